"""What each rank holds of each parameter, and what the forward pass makes of it, from the plan alone.

Two axes split a model: "tp" splits features, heads, the vocabulary and each expert's width; "ep" splits the set of
experts. Ranks along both see the same tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import PlanError
from titan_adapters.nn.attention import Attention, InnerAttention
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.moe import InnerExperts, Router
from titan_adapters.nn.norm import RMSNorm
from titan_adapters.plan import (
    ParallelPlan,
    Style,
    colwise,
    expertwise,
    headwise,
    partwise,
    replicate,
    rowwise,
    split_styles,
    vocabwise,
)

MODEL_AXES = ("tp", "ep")

Use = Literal["own", "spread", "first", "kv_heads"]


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter across the model's axes."""

    dims: Mapping[str, int] = field(default_factory=dict)
    """Axis -> the dim that it splits. An axis that is absent holds the parameter whole."""
    use: Use = "own"
    """What a rank's forward pass uses of what it holds.

    own: as it is; where held whole, on whole activations, so that every rank computes the same gradient.
    spread: all of it, on this rank's heads, features or tokens: gradients are summed over "tp".
    first: only the first rank of "tp" adds it (the bias of a projection whose output is summed).
    kv_heads: there are fewer kv heads than ranks; the rows of the one that this rank's query heads attend to."""
    kv_heads: int = 0
    """With use kv_heads: how many there are in all."""


@dataclass(frozen=True)
class ModelLayout:
    """A whole model across the model's axes."""

    styles: dict[str, Style]
    """Of each module that owns parameters."""
    parameters: dict[tuple[str, str], ParameterLayout]
    """By (module path, parameter name)."""
    sharded_attention: frozenset[str]
    """Paths of attention modules whose heads are split."""
    sequence_parallel: bool
    """Whether ranks of "tp" have some of the tokens each, wherever the plan does not split features."""
    on_all_tokens: frozenset[str]
    """With sequence parallelism, paths of modules that need all tokens, and go on alike on every rank."""

    def sees_all_tokens(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{whole}.") for whole in self.on_all_tokens)


def model_layout(
    model: BaseTransformer, plan: ParallelPlan, sizes: Mapping[str, int], *, sequence_parallel: bool = False
) -> ModelLayout:
    """Resolve `plan` for axes of these `sizes` (absent: 1). Allocates nothing.

    Raises:
        PlanError: the plan does not cover the model, or parts of one layer are split in ways that don't fit together.
    """
    styles = plan.resolve(model)
    split_tp = sizes.get("tp", 1) > 1
    sequence_parallel = sequence_parallel and split_tp
    on_all_tokens = frozenset(_on_all_tokens(model, styles) if sequence_parallel else ())
    problems = list(_misfits(model, styles)) if split_tp else []
    problems += [
        f"{path} is not in the module that has the experts, so that it would route a rank's own tokens only"
        for path, module in model.named_modules()
        if sequence_parallel and isinstance(module, Router) and path.rpartition(".")[0] not in on_all_tokens
    ]
    if problems:
        raise PlanError(
            f"The parallel plan of {type(model).__name__} splits modules that belong together differently.",
            problems,
            fix="split all of a layer's heads or hidden features, or replicate the whole part.",
        )
    parameters = {
        (path, name): _by_style(style, name)
        for path, style in styles.items()
        for name, _ in model.get_submodule(path).named_parameters(recurse=False)
    }
    sharded = set()
    for path, module in model.named_modules():
        if isinstance(module, Attention) and styles[f"{path}.wo"] is rowwise and split_tp:
            sharded.add(path)
            parameters.update(_attention_exceptions(path, module, sizes["tp"]))
    layout = ModelLayout(styles, parameters, frozenset(sharded), sequence_parallel, on_all_tokens)
    if sequence_parallel:
        for (path, name), how in parameters.items():
            if how == ParameterLayout() and not layout.sees_all_tokens(path):
                parameters[path, name] = ParameterLayout(use="spread")
    return layout


def _on_all_tokens(model: BaseTransformer, styles: Mapping[str, Style]) -> Iterator[str]:
    """What mixes tokens and is not split, what is first or last and is not split, and mixtures, whose statistics are
    of all tokens."""
    yield from (path for path in ("tok_embeddings", "lm_head") if styles[path] is replicate)
    for path, module in model.named_modules():
        if isinstance(module, InnerExperts):
            yield path.rpartition(".")[0]
        elif isinstance(module, Attention) and styles[f"{path}.wo"] is replicate:
            yield path


def _by_style(style: Style, name: str) -> ParameterLayout:
    if style in (colwise, vocabwise, headwise):
        return ParameterLayout({"tp": 0})
    if style is rowwise:
        return ParameterLayout({"tp": 1}) if name == "weight" else ParameterLayout(use="first")
    if style is expertwise:
        if name == "b2":
            return ParameterLayout({"ep": 0}, use="first")
        return ParameterLayout({"ep": 0, "tp": 2 if name == "w2" else 1})
    return ParameterLayout(use="spread") if style is partwise else ParameterLayout()


def _attention_exceptions(
    path: str, attention: Attention, tp: int
) -> Iterator[tuple[tuple[str, str], ParameterLayout]]:
    """Key and value heads that are fewer than ranks, and norms of queries and keys."""
    spec = attention.spec
    few = spec.num_kv_heads % tp != 0
    kv = ParameterLayout(use="kv_heads", kv_heads=spec.num_kv_heads) if few else ParameterLayout({"tp": 0})
    for child in ("wk", "wv"):
        for name, _ in attention.qkv_linear.get_submodule(child).named_parameters():
            yield (f"{path}.qkv_linear.{child}", name), kv
    if spec.qk_norm is not None and spec.qk_norm.weight:
        # One weight for all heads serves different heads on each rank; one per channel is split like the heads.
        full = spec.qk_norm.scope == "full"
        shared = ParameterLayout(use="spread")
        yield (f"{path}.q_norm", "weight"), ParameterLayout({"tp": 0}) if full else shared
        yield (f"{path}.k_norm", "weight"), kv if full else shared


def _misfits(model: BaseTransformer, styles: Mapping[str, Style]) -> Iterator[str]:
    inner = {path for path, module in model.named_modules() if isinstance(module, InnerAttention)}
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            inner.discard(f"{path}.inner_attention")
            wanted = split_styles(f"{path}.qkv_linear", module.qkv_linear) | split_styles(path, module)
            wanted |= split_styles(f"{path}.inner_attention", module.inner_attention)
            for name in ("q_norm", "k_norm"):
                if wanted.get(f"{path}.{name}") is headwise and type(module.get_submodule(name)) is not RMSNorm:
                    yield f"{path}.{name} is a subclass of RMSNorm, whose statistics can't be told"
            yield from _all_or_none(wanted, styles)
        elif isinstance(module, FeedForward):
            yield from _all_or_none(split_styles(path, module), styles)
    for path in inner:
        yield f"{path} is not in a titan_adapters.nn.Attention, so nothing says which heads are this rank's"


def _all_or_none(wanted: Mapping[str, Style], styles: Mapping[str, Style]) -> Iterator[str]:
    actual = {path: styles[path] for path in wanted}
    if actual != wanted and set(actual.values()) != {replicate}:
        differing = ", ".join(f"{path} is {actual[path]}" for path in wanted if actual[path] is not wanted[path])
        right = ", ".join(f"{path.rpartition('.')[2]} {style}" for path, style in wanted.items())
        yield f"{differing}; either {right}, or all of them replicate"


def owners_by_unit(model: BaseTransformer, styles: Mapping[str, Style]) -> dict[nn.Module, list[str]]:
    """Parameter-owning modules by the unit whose forward pass uses them: their layer, or the model for the rest."""
    units: dict[nn.Module, list[str]] = {unit: [] for unit in (*model.layers, model)}
    for path in styles:
        first, _, rest = path.partition(".")
        units[model.layers[int(rest.partition(".")[0])] if first == "layers" else model].append(path)
    return units
