"""Causal self-attention: the block that authors compose, and the seam that engines replace.

Shapes: ... leading dims ([B, S] batched or [T] packed)  D model dim  N query heads  K kv heads  H head_dim
V v_head_dim.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from titan_adapters.config import AttentionSpec, TemperatureSpec, TransformerConfig
from titan_adapters.nn.flex import Reach, attend_by_blocks, block_mask, dense_mask
from titan_adapters.nn.norm import make_norm
from titan_adapters.nn.rope import Rope

AttentionKernel = Literal["reference", "flex"]


class SequenceInfo(NamedTuple):
    """Where each token stands. Handed through every layer, so that authors build neither positions nor masks."""

    positions: Tensor
    """int64, shape of the tokens: 0-based position within the token's document."""
    document_ids: Tensor | None
    """int64, shape of the tokens: tokens see only their own document. None: each row of the batch is one document
    (or, inside an engine, the engine keeps requests apart)."""
    masks: Mapping[Reach, BlockMask] | None = None
    """What layers with the kernel "flex" share; a layer that finds none of its reach builds its own."""


def sequence_info(tokens: Tensor, positions: Tensor | None, document_ids: Tensor | None) -> SequenceInfo:
    """Complete what the caller left out, for tokens [B, S] or [T].

    Without `positions`, each row counts from 0 (within each document, if `document_ids` are given). With positions
    but without ids, a document starts wherever the position is not its left neighbour's plus one.
    """
    if document_ids is None:
        if positions is None:
            return SequenceInfo(torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape), None)
        starts = torch.ones_like(positions, dtype=torch.bool)
        starts[..., 1:] = positions[..., 1:] != positions[..., :-1] + 1
        return SequenceInfo(positions, starts.cumsum(-1))
    if positions is None:
        index = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
        starts = torch.ones_like(document_ids, dtype=torch.bool)
        starts[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
        positions = index - torch.where(starts, index, 0).cummax(-1).values
    return SequenceInfo(positions, document_ids)


class QKVLinear(nn.Module):
    """Query, key and value projections. An engine packs the three into one matmul."""

    def __init__(self, dim: int, spec: AttentionSpec):
        super().__init__()
        self.spec = spec
        self.wq = nn.Linear(dim, spec.num_heads * spec.head_dim, bias="q" in spec.biases)
        self.wk = nn.Linear(dim, spec.num_kv_heads * spec.head_dim, bias="k" in spec.biases)
        self.wv = nn.Linear(dim, spec.num_kv_heads * spec.v_head_dim, bias="v" in spec.biases)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., D] -> q [..., N, H], k [..., K, H] and v [..., K, V]."""
        heads, v_heads = (-1, self.spec.head_dim), (-1, self.spec.v_head_dim)
        return self.wq(x).unflatten(-1, heads), self.wk(x).unflatten(-1, heads), self.wv(x).unflatten(-1, v_heads)


class InnerAttention(nn.Module):
    """The part of attention without projections: q, k, v, sinks, and who sees whom. Engines replace this module.

    This implementation is plain torch: it trains and infers, and is the reference the engine is compared with.

    `kernel` says how: "reference", with a dense mask where one is needed, is the definition; "flex", for training on a
    GPU (torch has no gradients of it on a CPU), is flash attention for the plain causal triangle and flex_attention,
    which skips what a window, chunk or document hides, for all else. See `ta.nn.use_kernels`.

    Args:
        spec: What to compute. Every field is honoured.
        layer: 0-based global layer index; an engine finds this layer's KV cache by it.
    """

    def __init__(self, spec: AttentionSpec, layer: int):
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.kernel: AttentionKernel = "reference"
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads)) if spec.sinks else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        """q [..., N, H], k [..., K, H], v [..., K, V] -> [..., N, V]."""
        packed = q.dim() == 3
        if packed:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            ids = None if seq.document_ids is None else seq.document_ids.unsqueeze(0)
            seq = seq._replace(positions=seq.positions.unsqueeze(0), document_ids=ids)
        out = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seq).transpose(1, 2)
        return out.squeeze(0) if packed else out

    def _attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, seq: SequenceInfo) -> Tensor:
        spec = self.spec
        reach = _reach(spec, seq)
        if self.kernel == "flex" and _needs_blocks(spec, seq):
            mask = None if seq.masks is None else seq.masks.get(reach)
            if mask is None:
                mask = block_mask(reach, seq.positions, seq.document_ids)
            return attend_by_blocks(q_BNSH, k_BKSH, v_BKSV, mask, spec, self.sinks)
        visible = None if _is_triangle(reach, seq) else dense_mask(reach, seq.positions, seq.document_ids)
        if spec.softcap is not None or self.sinks is not None:
            return self._attend_explicitly(q_BNSH, k_BKSH, v_BKSV, visible)
        return F.scaled_dot_product_attention(
            q_BNSH,
            k_BKSH,
            v_BKSV,
            attn_mask=visible,
            is_causal=visible is None,
            scale=spec.scale,
            enable_gqa=spec.num_kv_heads != spec.num_heads,
        )

    def _attend_explicitly(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, visible: Tensor | None) -> Tensor:
        """Scores in fp32, for what scaled_dot_product_attention can't express."""
        groups, softcap = self.spec.num_heads // self.spec.num_kv_heads, self.spec.softcap
        k_BNSH, v_BNSV = k_BKSH.repeat_interleave(groups, dim=1), v_BKSV.repeat_interleave(groups, dim=1)
        scores = (q_BNSH.float() @ k_BNSH.float().transpose(-1, -2)) * self.spec.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if visible is None:
            length = scores.shape[-1]
            visible = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is not None:  # one more column, which takes its share of the weight and contributes nothing
            sinks = self.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            return (torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v_BNSV.float()).to(q_BNSH.dtype)
        return (scores.softmax(-1) @ v_BNSV.float()).to(q_BNSH.dtype)


def _reach(spec: AttentionSpec, seq: SequenceInfo) -> Reach:
    """A window that nothing falls out of is none."""
    window = spec.window
    return Reach(None if window is None or window >= seq.positions.shape[-1] else window, spec.chunk)


def _is_triangle(reach: Reach, seq: SequenceInfo) -> bool:
    return reach == (None, None) and seq.document_ids is None


def _needs_blocks(spec: AttentionSpec, seq: SequenceInfo) -> bool:
    """Whether flash attention can't compute this: it takes the plain triangle, and values as wide as keys."""
    plain = spec.softcap is None and not spec.sinks and spec.v_head_dim == spec.head_dim
    return not (plain and _is_triangle(_reach(spec, seq), seq))


def share_masks(specs: Iterable[AttentionSpec], seq: SequenceInfo) -> SequenceInfo:
    """`seq` with the masks that layers of these specs need with the kernel "flex", each of them once."""
    reaches = {_reach(spec, seq) for spec in specs if _needs_blocks(spec, seq)}
    return seq._replace(masks={reach: block_mask(reach, seq.positions, seq.document_ids) for reach in reaches})


class NormRope(nn.Module):
    """QK norm and rotation of queries and keys. Owns no weights; engines may replace it by one kernel."""

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.spec = spec

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        rope: Rope | None,
    ) -> tuple[Tensor, Tensor]:
        """q [..., N, H] and k [..., K, H] at positions [...]; same shapes and dtypes come back."""
        spec = self.spec.qk_norm
        if spec is not None and not spec.after_rope:
            q, k = self._normed(q, q_norm), self._normed(k, k_norm)
        if rope is not None:
            q, k = rope(q, k, positions)
        if spec is not None and spec.after_rope:
            q, k = self._normed(q, q_norm), self._normed(k, k_norm)
        return q, k

    def _normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        assert norm is not None and self.spec.qk_norm is not None
        if self.spec.qk_norm.scope == "per_head":
            return norm(x)
        return norm(x.flatten(-2)).unflatten(-1, (-1, self.spec.head_dim))


class Attention(nn.Module):
    """Grouped-query attention as `config.attention(layer)` says: projections, QK norm, rope, output gate, output."""

    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__()
        self.spec = spec = config.attention(layer)
        self.qkv_linear = QKVLinear(config.dim, spec)
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None:
            full = spec.qk_norm.scope == "full"
            self.q_norm = make_norm(spec.head_dim * (spec.num_heads if full else 1), spec.qk_norm)
            self.k_norm = make_norm(spec.head_dim * (spec.num_kv_heads if full else 1), spec.qk_norm)
        self.rope = Rope(spec.rope, config.max_seq_len) if spec.rope else None
        self.norm_rope = NormRope(spec)
        self.inner_attention = InnerAttention(spec, layer)
        self.wo = nn.Linear(spec.num_heads * spec.v_head_dim, config.dim, bias="o" in spec.biases)
        self.wg = None
        if spec.output_gate is not None:
            per_head = spec.v_head_dim if spec.output_gate == "per_channel" else 1
            self.wg = nn.Linear(config.dim, spec.num_heads * per_head, bias=False)

    def forward(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        q, k, v = self.qkv_linear(x)
        q, k = self.norm_rope(q, k, seq.positions, self.q_norm, self.k_norm, self.rope)
        if self.spec.temperature is not None:
            q = q * query_multiplier(self.spec.temperature, seq.positions)[..., None, None].to(q.dtype)
        heads = self.inner_attention(q, k, v, seq)
        if self.wg is not None:
            heads = heads * self.wg(x).sigmoid().unflatten(-1, (heads.shape[-2], -1))
        return self.wo(heads.flatten(-2))


def query_multiplier(spec: TemperatureSpec, positions: Tensor) -> Tensor:
    """fp32, shape of the positions: what the queries there are multiplied by."""
    return 1 + spec.beta * torch.log(1 + torch.floor((positions + spec.offset) / spec.original_max_position))
