"""Who sees whom, as a dense mask or as blocks; and attention over blocks, by torch's flex_attention.

Shapes: B batch  S tokens  N query heads  K kv heads  H head_dim  V v_head_dim.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from titan_adapters.config import AttentionSpec

Sees = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""flex_attention's mask_mod: (batch, head, query, key), indices that broadcast -> whether the query sees the key."""


class Reach(NamedTuple):
    """How far back a layer looks, beside causality and documents. Layers with the same reach share a mask."""

    window: int | None
    chunk: int | None


def visibility(reach: Reach, positions: Tensor, document_ids: Tensor | None) -> Sees:
    """The rule for tokens at positions int64 [B, S], of documents int64 [B, S]."""
    window, chunk = reach

    def sees(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        visible = query >= key
        if window is not None:
            visible = visible & (query - key < window)
        if chunk is not None:
            visible = visible & (positions[batch, query] // chunk == positions[batch, key] // chunk)
        if document_ids is not None:
            visible = visible & (document_ids[batch, query] == document_ids[batch, key])
        return visible

    return sees


def dense_mask(reach: Reach, positions: Tensor, document_ids: Tensor | None) -> Tensor:
    """bool [B, 1, S, S], True where query (row) sees key (column)."""
    batch, index = (torch.arange(size, device=positions.device) for size in positions.shape)
    sees = visibility(reach, positions, document_ids)(batch[:, None, None], None, index[:, None], index)
    return sees.expand(len(batch), -1, -1)[:, None]


def block_mask(reach: Reach, positions: Tensor, document_ids: Tensor | None) -> BlockMask:
    """The same for flex_attention, of positions and documents [B, S] or [S]: blocks without a visible key are skipped.

    Building one costs a pass over S x S entries: do it once for all layers of the same reach.
    """
    if positions.dim() == 1:
        positions, document_ids = positions[None], None if document_ids is None else document_ids[None]
    batch, length = positions.shape
    same_rows = reach.chunk is None and document_ids is None
    return _fast(create_block_mask, positions.device)(
        visibility(reach, positions, document_ids), None if same_rows else batch, None, length, length, positions.device
    )


def attend_by_blocks(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, mask: BlockMask, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """[B, N, S, V], scores and their softmax in fp32 in the kernel."""
    out, aux = _fast(flex_attention, q_BNSH.device)(
        q_BNSH,
        k_BKSH,
        v_BKSV,
        score_mod=None if spec.softcap is None else capped(spec.softcap),
        block_mask=mask,
        scale=spec.scale,
        enable_gqa=q_BNSH.shape[1] != k_BKSH.shape[1],
        return_aux=AuxRequest(lse=sinks is not None),
    )
    if sinks is None:
        return out
    # A sink is one more term in the softmax's sum: exp(lse) / (exp(lse) + exp(sink)) of the weight is left to the keys.
    kept_BNS = torch.sigmoid(aux.lse - sinks.float()[:, None])
    return (out * kept_BNS[..., None]).to(out.dtype)


def capped(softcap: float) -> Callable[..., Tensor]:
    """flex_attention's score_mod: (score, batch, head, query, key) -> score."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _fast(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Outside of a compiled model, the function compiled by itself; on a CPU, where it may not compile, as it is."""
    return function if torch.compiler.is_compiling() or device.type == "cpu" else _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
