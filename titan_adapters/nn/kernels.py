"""Which kernels a model uses in plain torch."""

from typing import TYPE_CHECKING, Literal, get_args

from titan_adapters.errors import ConfigError
from titan_adapters.nn.attention import AttentionKernel, InnerAttention
from titan_adapters.nn.moe import ExpertsKernel, InnerExperts

if TYPE_CHECKING:
    from titan_adapters.contract import BaseTransformer


def use_kernels(
    model: "BaseTransformer",
    *,
    attention: Literal["reference", "flex"] = "flex",
    experts: Literal["loop", "grouped"] = "grouped",
) -> None:
    """Take these kernels in every layer of `model`. The function stays the same, but for the order of sums.

    A new model has the definitions, "reference" and "loop"; the defaults here are for training on a GPU, where
    `torch.compile` then takes the whole model as one graph (the loop over experts breaks it).

    Args:
        attention: See `ta.nn.InnerAttention`.
        experts: See `ta.nn.InnerExperts`.

    Raises:
        ConfigError: there is no such kernel, or experts are too narrow for it. The model is unchanged then.
    """
    problems = [
        f"{name}={kernel!r} is none of {', '.join(get_args(kinds))}"
        for name, kernel, kinds in (("attention", attention, AttentionKernel), ("experts", experts, ExpertsKernel))
        if kernel not in get_args(kinds)
    ]
    inner = [module for module in model.modules() if isinstance(module, InnerAttention)]
    mixtures = {path: module for path, module in model.named_modules() if isinstance(module, InnerExperts)}
    if experts == "grouped":
        problems += [
            f"{path}: width {module.w1.shape[1]} or dim {module.w1.shape[2]} of {module.w1.dtype} "
            "is no multiple of 16 bytes, which grouped matmuls need"
            for path, module in mixtures.items()
            if not module.groupable(module.w1.dtype)
        ]
    if problems:
        raise ConfigError(
            "The model can't use these kernels.",
            problems,
            fix='name one of those listed; experts="loop" takes any width.',
        )
    for attends in inner:
        attends.kernel = attention
    for mixture in mixtures.values():
        mixture.kernel = experts
    model.flex_specs = tuple(dict.fromkeys(a.spec for a in inner)) if attention == "flex" else ()
