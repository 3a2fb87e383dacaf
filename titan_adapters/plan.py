"""The parallel plan: which style each parameter-owning module follows, as an exact cover.

One plan has two readers. Training turns a style into DTensor placements; an engine turns it into the engine's own
layer (column-, row- or vocabulary-parallel) over plain local tensors. Nothing is replicated unless a row says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from titan_adapters.config import TransformerConfig
from titan_adapters.errors import PlanError
from titan_adapters.nn.attention import Attention, InnerAttention, QKVLinear
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.moe import InnerExperts
from titan_adapters.nn.norm import RMSNorm


@dataclass(frozen=True)
class Style:
    """How one module's weights are sharded, and with them its activations."""

    name: str
    meaning: str
    modules: tuple[type[nn.Module], ...]
    """What the style can be applied to; empty for anything."""

    def __repr__(self) -> str:
        return self.name


colwise = Style("colwise", "output features are sharded; the input is whole, the output local", (nn.Linear,))
rowwise = Style("rowwise", "input features are sharded; the input is local, the output summed", (nn.Linear,))
vocabwise = Style(
    "vocabwise",
    "vocabulary rows are sharded; an embedding sums its output, a head gathers its logits",
    (nn.Embedding, nn.Linear),
)
headwise = Style(
    "headwise",
    "parameters of heads are sharded like the heads; a norm over all heads sums its squares over ranks",
    (InnerAttention, RMSNorm),
)
expertwise = Style(
    "expertwise",
    "experts are sharded: each one's width under tensor parallelism, whole experts under expert parallelism",
    (InnerExperts,),
)
replicate = Style("replicate", "every rank holds the whole module, and applies it to whole activations", ())
partwise = Style(
    "partwise",
    "every rank holds the whole module, and applies it to its own heads or features; gradients are summed over ranks",
    (),
)


class ParallelPlan:
    """Rows of `pattern: style`, where a pattern is a module path matched segment by segment with shell wildcards.

    `layers.*.attention.qkv_linear.w[qkv]` matches the three projections of every layer; `*` never crosses a dot.
    """

    def __init__(self, rows: Mapping[str, Style]):
        self.rows = dict(rows)

    def resolve(self, model: nn.Module) -> dict[str, Style]:
        """Style of every module in `model` that owns parameters.

        Raises:
            PlanError: a module matches no row or several, a row matches no module, or a style can't apply.
        """
        owners = dict(parameter_owners(model))
        problems: list[str] = []
        styles: dict[str, Style] = {}
        used: set[str] = set()
        for path, module in owners.items():
            matches = [pattern for pattern in self.rows if _matches(pattern, path)]
            used.update(matches)
            if not matches:
                problems.append(f"{path} ({type(module).__name__}) owns parameters, but no row covers it")
            elif len(matches) > 1:
                problems.append(f"{path} is covered by {len(matches)} rows: {', '.join(map(repr, matches))}")
            else:
                style = self.rows[matches[0]]
                if style.modules and not isinstance(module, style.modules):
                    allowed = " or ".join(t.__name__ for t in style.modules)
                    problems.append(f"{path} is a {type(module).__name__}; {style} applies to {allowed}")
                styles[path] = style
        problems += [f"row {pattern!r} matches no module" for pattern in self.rows if pattern not in used]
        if problems:
            raise PlanError(
                f"The parallel plan of {type(model).__name__} is not an exact cover.",
                problems,
                fix="give every parameter-owning module exactly one row of parallel_plan; "
                "say ta.replicate aloud where that is meant.",
            )
        return styles


def parameter_owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters of their own (not only their children's), by path."""
    for path, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            yield path, module


def _matches(pattern: str, path: str) -> bool:
    wanted, given = pattern.split("."), path.split(".")
    return len(wanted) == len(given) and all(fnmatchcase(g, w) for w, g in zip(wanted, given, strict=True))


def split_styles(path: str, module: nn.Module) -> dict[str, Style]:
    """How the parts of `module`, at `path`, are planned where its heads or hidden features are split."""
    match module:
        case QKVLinear():
            return {f"{path}.w{letter}": colwise for letter in "qkv"}
        case InnerAttention():
            return {path: headwise} if module.spec.sinks else {}
        case Attention():
            norm = module.spec.qk_norm
            full = norm is not None and norm.weight and norm.scope == "full"
            norms = {f"{path}.q_norm": headwise, f"{path}.k_norm": headwise} if full else {}
            return {f"{path}.wo": rowwise} | ({} if module.wg is None else {f"{path}.wg": colwise}) | norms
        case FeedForward():
            gate = {} if module.w3 is None else {f"{path}.w3": colwise}
            return {f"{path}.w1": colwise} | gate | {f"{path}.w2": rowwise}
    return {}


def decoder_plan(config: TransformerConfig, extra: Mapping[str, Style] | None = None) -> ParallelPlan:
    """The plan of a decoder made of `nn.Attention`, `nn.FeedForward`, `nn.MoE` and norms named `*_norm`.

    Args:
        extra: Further rows.
    """
    rows = {
        "tok_embeddings": vocabwise,
        "layers.*.attention.qkv_linear.w[qkv]": colwise,
        "layers.*.attention.wo": rowwise,
        "layers.*.*_norm": replicate,
        "norm": replicate,
        "lm_head": vocabwise,
    }
    if dense := config.dense_specs().values():
        rows["layers.*.feed_forward.w1"] = colwise
        rows["layers.*.feed_forward.w2"] = rowwise
        if any(spec.gated for spec in dense):
            rows["layers.*.feed_forward.w3"] = colwise
    if moe := config.moe_specs().values():
        rows["layers.*.moe.router.gate"] = replicate
        rows["layers.*.moe.experts"] = expertwise
        if any(spec.shared for spec in moe):
            rows["layers.*.moe.shared_experts.w[13]"] = colwise
            rows["layers.*.moe.shared_experts.w2"] = rowwise
        if any(spec.shared and spec.shared.output_gate for spec in moe):
            rows["layers.*.moe.shared_gate"] = replicate
    if any(spec.output_gate for spec in config.attention_specs()):
        rows["layers.*.attention.wg"] = colwise
    if any(spec.sinks for spec in config.attention_specs()):
        rows["layers.*.attention.inner_attention"] = headwise
    scopes = {i: s.qk_norm.scope for i, s in enumerate(config.attention_specs()) if s.qk_norm and s.qk_norm.weight}
    for layer, scope in scopes.items():
        # Per head, one weight serves all heads. Over all heads, each channel has its own.
        row = f"layers.{'*' if len(set(scopes.values())) == 1 else layer}.attention.[qk]_norm"
        rows[row] = replicate if scope == "per_head" else headwise
    return ParallelPlan(rows | dict(extra or {}))
