"""Which parallel sizes a model can be run with, from its specs alone. Imports neither torch nor vllm."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from titan_adapters.config import TransformerConfig, layers_by_value


@dataclass(frozen=True)
class LegalSizes:
    """Sizes that `size_problems` has nothing against, each with the others at 1."""

    tp: list[int]
    """Tensor-parallel ranks."""
    pp: list[int]
    """Pipeline stages."""
    ep: list[int]
    """Expert-parallel ranks; [1] without mixtures."""


def size_problems(config: TransformerConfig, tp: int = 1, pp: int = 1, ep: int = 1) -> list[str]:
    """What keeps a model with the usual plan from being split like this; one line each, with the sizes that are legal.

    Args:
        tp: Tensor-parallel ranks, over which heads and widths are split. Kv heads fewer than ranks are replicated.
        pp: Pipeline stages, over which layers are split.
        ep: Expert-parallel ranks, over which whole experts are distributed. At 1, `tp` splits the width of each expert.
    """
    problems = []
    if found := _tensor_problems(config, tp, ep):
        legal = listed(size for size in range(1, _most_heads(config) + 1) if not _tensor_problems(config, size, ep))
        problems += [f"{problem} tensor_parallel_size {tp}; legal sizes: {legal}" for problem in found]
    if not 1 <= pp <= config.num_layers:
        problems.append(
            f"num_layers {config.num_layers} can't be split into pipeline_parallel_size {pp} stages; "
            f"legal sizes: 1 to {config.num_layers}"
        )
    if ep != 1:
        counts = layers_by_value((spec.num_experts, layer) for layer, spec in config.moe_specs().items())
        if not counts:
            problems.append("expert parallelism is asked for, but no layer is a mixture of experts")
        problems += [
            f"num_experts {count} of layers {layers} is not divisible by {ep} expert-parallel ranks; "
            f"legal sizes: {listed(size for size in range(1, count + 1) if count % size == 0)}"
            for count, layers in counts.items()
            if ep < 1 or count % ep
        ]
    return problems


def legal_sizes(config: TransformerConfig) -> LegalSizes:
    """All legal sizes of a model with the usual plan."""
    counts = {spec.num_experts for spec in config.moe_specs().values()}
    return LegalSizes(
        tp=[size for size in range(1, _most_heads(config) + 1) if not _tensor_problems(config, size, ep=1)],
        pp=list(range(1, config.num_layers + 1)),
        ep=[size for size in range(1, max(counts, default=1) + 1) if all(count % size == 0 for count in counts)],
    )


def _most_heads(config: TransformerConfig) -> int:
    return max(spec.num_heads for spec in config.attention_specs())


def _tensor_problems(config: TransformerConfig, tp: int, ep: int) -> list[str]:
    """Quantities that `tp` ranks can't share, each a sentence up to the size itself."""
    problems = []
    for (name, value), layers in layers_by_value(_widths(config, ep)).items():
        if tp < 1 or value % tp:
            problems.append(f"{name} {value} of layers {layers} is not divisible by")
    kv_heads = layers_by_value((spec.num_kv_heads, layer) for layer, spec in enumerate(config.attention_specs()))
    for count, layers in kv_heads.items():
        if tp >= 1 and count % tp and tp % count:
            problems.append(f"num_kv_heads {count} of layers {layers} neither divides nor is divisible by")
    return problems


def _widths(config: TransformerConfig, ep: int) -> Iterator[tuple[tuple[str, int], int]]:
    """((what, how many), layer) of everything that is split evenly over tensor-parallel ranks."""
    for layer, attention in enumerate(config.attention_specs()):
        yield ("num_heads", attention.num_heads), layer
    for layer, dense in config.dense_specs().items():
        yield ("hidden_dim", dense.hidden_dim), layer
    for layer, moe in config.moe_specs().items():
        if ep == 1:
            yield ("hidden_dim of experts", moe.hidden_dim), layer
        if moe.shared is not None:
            yield ("hidden_dim of shared experts", moe.shared.feed_forward.hidden_dim), layer


def listed(sizes: Iterable[int]) -> str:
    """For messages."""
    return ", ".join(map(str, sizes))
