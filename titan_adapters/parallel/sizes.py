"""Which numbers of ranks a model can be split over in training."""

from collections.abc import Mapping

from titan_adapters.config import TransformerConfig
from titan_adapters.errors import PlanError
from titan_adapters.parallel_sizes import legal_sizes, size_problems


def check_sizes(config: TransformerConfig, sizes: Mapping[str, int]) -> None:
    """Raise PlanError with every reason, and the sizes that are legal. Needs no module and no memory."""
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    # Asked for separately: both axes split the experts here, "tp" each one's width and "ep" their number.
    problems = size_problems(config, tp=tp) + size_problems(config, ep=ep)
    if (tp - 1) * -(-config.vocab_size // tp) >= config.vocab_size:
        problems.append(f"vocab_size {config.vocab_size} leaves a rank of tp {tp} without rows")
    if problems:
        legal = legal_sizes(config)
        raise PlanError(
            f"This model can't be split over {', '.join(f'{axis} {size}' for axis, size in sizes.items())}.",
            problems,
            fix=f"legal sizes: tp {', '.join(map(str, legal.tp))}; ep {', '.join(map(str, legal.ep))}.",
        )
