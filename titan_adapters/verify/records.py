"""What each stage of a served model got and gave, for the tokens of one request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from titan_adapters.contract import BaseTransformer
from titan_adapters.nn import (
    FeedForward,
    InnerAttention,
    InnerExperts,
    LayerNorm,
    MoE,
    NormRope,
    QKVLinear,
    RMSNorm,
    Router,
)

Kind = Literal[
    "embedding",
    "norm",
    "qkv",
    "rope",
    "attention",
    "projection",
    "gate",
    "router",
    "experts",
    "feed_forward",
    "block",
    "head",
    "chain",
]
"""What a stage does; "block" is what a layer adds around its stages, "chain" what arrives at a stage."""

EMBED, HEAD = "tok_embeddings", "lm_head"
"""Paths under which `BaseTransformer.embed` and `compute_logits` are recorded, which may do more than these modules."""

KINDS: dict[type[nn.Module], Kind] = {
    RMSNorm: "norm",
    LayerNorm: "norm",
    QKVLinear: "qkv",
    NormRope: "rope",
    InnerAttention: "attention",
    Router: "router",
    InnerExperts: "experts",
    FeedForward: "feed_forward",
    MoE: "experts",
    nn.Linear: "projection",
}
GATES = ("wg", "shared_gate")


@dataclass(frozen=True)
class Call:
    """One call of a stage: its tensors in the order of its arguments and results.

    Each is a list with one tensor, or the shares of the tensor-parallel ranks. Rows are those of the request's records.
    """

    inputs: list[list[Tensor]]
    outputs: list[list[Tensor]]


@dataclass(frozen=True)
class StageRecords:
    """What an engine's stages got and gave for one request, on the CPU and in the engine's dtypes."""

    tokens: Tensor
    """int64 [T]: the prompt, and all generated tokens but the last."""
    positions: Tensor
    """int64 [R], ascending: the positions that were recorded. The others came from the prefix cache."""
    calls: Mapping[str, Call]
    """Module path -> what it got and gave, [R, ...]. A second call in one step has the path and "@2"."""
    head_positions: Tensor
    """int64 [P]: the positions of the rows of the call at `HEAD`. Logits are not computed for every token."""

    @property
    def complete(self) -> bool:
        """Whether no token came from the prefix cache."""
        return len(self.positions) == len(self.tokens)


def stage_kinds(model: BaseTransformer) -> dict[str, Kind]:
    """The modules of a model that are judged alone, by path, beside embedding and head; parents before children."""
    kinds: dict[str, Kind] = {}
    blocks = {f"layers.{layer}" for layer in range(model.config.num_layers)}
    leaf = ""
    for path, module in model.named_modules():
        if path in (EMBED, HEAD) or (leaf and path.startswith(leaf)):
            continue
        kind = next((kind for cls, kind in KINDS.items() if isinstance(module, cls)), None)
        if path in blocks:
            kinds[path] = "block"
        elif kind is not None:
            kinds[path] = "gate" if path.rpartition(".")[2] in GATES else kind
            leaf = "" if isinstance(module, MoE) else f"{path}."
    return kinds


def layer_of(path: str) -> int | None:
    """The global layer index in a module path, if it is in a layer."""
    layers, _, rest = path.partition(".")
    return int(rest.partition(".")[0]) if layers == "layers" and rest else None


def has_rows(x: object, num_rows: int) -> bool:
    """Whether `x` is a tensor with one row per token."""
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == num_rows


def join(shares: list[Tensor], like: Tensor) -> Tensor:
    """The whole tensor, of the shape of `like`, of ranks' shares. What several ranks in a row have is taken once."""
    first = shares[0]
    split = [dim for dim, size in enumerate(like.shape) if dim < first.dim() and first.shape[dim] != size]
    if len(shares) == 1 or len(split) != 1 or first.dim() != like.dim():
        return first
    (dim,) = split
    copies = max(1, first.shape[dim] * len(shares) // like.shape[dim])
    return torch.cat(shares[::copies], dim=dim)
