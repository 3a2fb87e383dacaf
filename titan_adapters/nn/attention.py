"""Causal self-attention: the block that authors compose, and the seam that engines replace.

Shapes: ... leading dims ([B, S] batched or [T] packed)  D model dim  N query heads  K kv heads  H head_dim
V v_head_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titan_adapters.config import AttentionSpec, TemperatureSpec, TransformerConfig
from titan_adapters.nn.norm import make_norm
from titan_adapters.nn.rope import Rope


class SequenceInfo(NamedTuple):
    """Where each token stands. Handed through every layer, so that authors build neither positions nor masks."""

    positions: Tensor
    """int64, shape of the tokens: 0-based position within the token's document."""
    document_ids: Tensor | None
    """int64, shape of the tokens: tokens see only their own document. None: each row of the batch is one document
    (or, inside an engine, the engine keeps requests apart)."""


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

    Args:
        spec: What to compute. Every field is honoured.
        layer: 0-based global layer index; an engine finds this layer's KV cache by it.
    """

    def __init__(self, spec: AttentionSpec, layer: int):
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads)) if spec.sinks else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        """q [..., N, H], k [..., K, H], v [..., K, V] -> [..., N, V]."""
        packed = q.dim() == 3
        if packed:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            ids = None if seq.document_ids is None else seq.document_ids.unsqueeze(0)
            seq = SequenceInfo(seq.positions.unsqueeze(0), ids)
        out = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seq).transpose(1, 2)
        return out.squeeze(0) if packed else out

    def _attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, seq: SequenceInfo) -> Tensor:
        spec = self.spec
        if spec.softcap is not None or self.sinks is not None:
            return self._attend_explicitly(q_BNSH, k_BKSH, v_BKSV, seq)
        mask = self._visible(seq)
        return F.scaled_dot_product_attention(
            q_BNSH,
            k_BKSH,
            v_BKSV,
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.scale,
            enable_gqa=spec.num_kv_heads != spec.num_heads,
        )

    def _visible(self, seq: SequenceInfo) -> Tensor | None:
        """bool [B, 1, S, S], True where query (row) sees key (column); None if that is the plain causal triangle."""
        length = seq.positions.shape[-1]
        window, chunk = self.spec.window, self.spec.chunk
        if seq.document_ids is None and chunk is None and (window is None or window >= length):
            return None
        index = torch.arange(length, device=seq.positions.device)
        distance = index[:, None] - index[None, :]
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        if chunk is not None:
            chunks = seq.positions // chunk
            visible = visible & (chunks[:, :, None] == chunks[:, None, :])
        if seq.document_ids is not None:
            visible = visible & (seq.document_ids[:, :, None] == seq.document_ids[:, None, :])
        return visible[:, None] if visible.dim() == 3 else visible[None, None]

    def _attend_explicitly(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, seq: SequenceInfo) -> Tensor:
        """Scores in fp32, for what scaled_dot_product_attention can't express."""
        groups, softcap = self.spec.num_heads // self.spec.num_kv_heads, self.spec.softcap
        k_BNSH, v_BNSV = k_BKSH.repeat_interleave(groups, dim=1), v_BKSV.repeat_interleave(groups, dim=1)
        scores = (q_BNSH.float() @ k_BNSH.float().transpose(-1, -2)) * self.spec.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = self._visible(seq)
        if visible is None:
            length = scores.shape[-1]
            visible = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is not None:  # one more column, which takes its share of the weight and contributes nothing
            sinks = self.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            return (torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v_BNSV.float()).to(q_BNSH.dtype)
        return (scores.softmax(-1) @ v_BNSV.float()).to(q_BNSH.dtype)


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
        self.inner_attention = InnerAttention(spec, layer)
        self.wo = nn.Linear(spec.num_heads * spec.v_head_dim, config.dim, bias="o" in spec.biases)
        self.wg = None
        if spec.output_gate is not None:
            per_head = spec.v_head_dim if spec.output_gate == "per_channel" else 1
            self.wg = nn.Linear(config.dim, spec.num_heads * per_head, bias=False)

    def forward(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        q, k, v = self.qkv_linear(x)
        norm = self.spec.qk_norm
        if norm is not None and not norm.after_rope:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.rope is not None:
            q, k = self.rope(q, k, seq.positions)
        if norm is not None and norm.after_rope:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.spec.temperature is not None:
            q = q * query_multiplier(self.spec.temperature, seq.positions)[..., None, None].to(q.dtype)
        heads = self.inner_attention(q, k, v, seq)
        if self.wg is not None:
            heads = heads * self.wg(x).sigmoid().unflatten(-1, (heads.shape[-2], -1))
        return self.wo(heads.flatten(-2))

    def _normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        assert norm is not None and self.spec.qk_norm is not None
        if self.spec.qk_norm.scope == "per_head":
            return norm(x)
        return norm(x.flatten(-2)).unflatten(-1, (-1, self.spec.head_dim))


def query_multiplier(spec: TemperatureSpec, positions: Tensor) -> Tensor:
    """fp32, shape of the positions: what the queries there are multiplied by."""
    return 1 + spec.beta * torch.log(1 + torch.floor((positions + spec.offset) / spec.original_max_position))
