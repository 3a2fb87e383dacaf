"""Which numbers of ranks a model can be split over in training."""

from collections.abc import Mapping
from dataclasses import asdict

from titan_adapters.config import TransformerConfig
from titan_adapters.errors import PlanError
from titan_adapters.parallel_sizes import legal_sizes, listed, size_problems


def check_sizes(config: TransformerConfig, sizes: Mapping[str, int]) -> None:
    """Raise PlanError with every reason, and the sizes that are legal. Needs no module and no memory."""
    tp, ep, pp = (sizes.get(axis, 1) for axis in ("tp", "ep", "pp"))
    # Asked for separately: both axes split the experts here, "tp" each one's width and "ep" their number.
    problems = size_problems(config, tp=tp, pp=pp) + size_problems(config, ep=ep)
    if (tp - 1) * -(-config.vocab_size // tp) >= config.vocab_size:
        problems.append(f"vocab_size {config.vocab_size} leaves a rank of tp {tp} without rows")
    if problems:
        legal = asdict(legal_sizes(config))
        raise PlanError(
            f"This model can't be split over {', '.join(f'{axis} {sizes[axis]}' for axis in sizes)}.",
            problems,
            fix="legal sizes: " + "; ".join(f"{axis} {listed(legal[axis])}" for axis in sizes) + ".",
        )
