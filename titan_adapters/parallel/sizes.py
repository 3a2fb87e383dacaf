"""Which numbers of ranks a model can be split over in training."""

from collections.abc import Iterator, Mapping

from titan_adapters.config import TransformerConfig
from titan_adapters.errors import PlanError

MAX_LEGAL = 64
"""Legal sizes are listed up to this many ranks."""


def check_sizes(config: TransformerConfig, sizes: Mapping[str, int]) -> None:
    """Raise PlanError with every reason, and the sizes that are legal. Needs no module and no memory."""
    problems = [problem for axis, check in CHECKS.items() for problem in check(config, sizes.get(axis, 1))]
    if problems:
        legal = "; ".join(f"{axis} {', '.join(map(str, legal_sizes(config, axis)))}" for axis in CHECKS)
        asked = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise PlanError(f"This model can't be split over {asked}.", problems, fix=f"legal sizes: {legal}.")


def legal_sizes(config: TransformerConfig, axis: str) -> list[int]:
    """Sizes of "tp" or "ep", up to `MAX_LEGAL`."""
    return [size for size in range(1, MAX_LEGAL + 1) if not list(CHECKS[axis](config, size))]


def _tp_problems(config: TransformerConfig, tp: int) -> Iterator[str]:
    for heads, kv_heads in sorted({(spec.num_heads, spec.num_kv_heads) for spec in config.attention_specs()}):
        if heads % tp:
            yield f"{heads} query heads can't be split over tp {tp}"
        if kv_heads % tp and tp % kv_heads:
            yield f"{kv_heads} kv heads can neither be split nor repeated over tp {tp}"
    moe = config.moe_specs().values()
    widths = {
        "hidden features": {spec.hidden_dim for spec in config.dense_specs().values()},
        "features of an expert": {spec.hidden_dim for spec in moe},
        "features of the shared experts": {spec.shared.feed_forward.hidden_dim for spec in moe if spec.shared},
    }
    for what, found in widths.items():
        for width in sorted(found):
            if width % tp:
                yield f"{width} {what} can't be split over tp {tp}"
    if (tp - 1) * -(-config.vocab_size // tp) >= config.vocab_size:
        yield f"a vocabulary of {config.vocab_size} leaves a rank of tp {tp} without rows"


def _ep_problems(config: TransformerConfig, ep: int) -> Iterator[str]:
    experts = {spec.num_experts for spec in config.moe_specs().values()}
    if ep > 1 and not experts:
        yield f"there are no experts to split over ep {ep}"
    for count in sorted(experts):
        if count % ep:
            yield f"{count} experts can't be split over ep {ep}"


CHECKS = {"tp": _tp_problems, "ep": _ep_problems}
