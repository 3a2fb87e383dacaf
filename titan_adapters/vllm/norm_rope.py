"""QK norm and rotation in one pass over queries and keys, as a Triton kernel for CUDA.

Compiled from our torch code, the two take twice the time: Inductor reads the table anew for every head. vLLM's own
fused kernel holds cosines in the activations' dtype, which is not the function that was trained.

Shapes: T tokens  N, K query and kv heads (rank-local)  H head_dim  R rotary_dim  P positions of the table.
"""

import torch
from torch import Tensor, nn

from titan_adapters.config import AttentionSpec
from titan_adapters.nn import NormRope, RMSNorm, Rope

try:
    import triton
    import triton.language as tl
except ImportError:  # vLLM's CPU build comes without
    triton = None

HEADS_PER_BLOCK, WARPS = 8, 1
"""Measured on an H200: 81 us for 16,384 tokens of 36 heads of 128, 2.9 us for 256."""


def fusible(spec: AttentionSpec) -> bool:
    """Whether the kernel computes `spec`'s norm and rotation on this platform."""
    from vllm.platforms import current_platform

    if triton is None or not current_platform.is_cuda() or spec.rope is None:
        return False
    norm, rotary_dim, rest = spec.qk_norm, spec.rope.rotary_dim, spec.head_dim - spec.rope.rotary_dim
    powers = all(size & (size - 1) == 0 for size in (rotary_dim, rest))  # block sizes; 0 counts
    return powers and (norm is None or (norm.scope == "per_head" and norm.weight and not norm.after_rope))


class EngineNormRope(NormRope):
    """`NormRope` as one kernel."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        rope: Rope | None,
    ) -> tuple[Tensor, Tensor]:
        if type(rope) is not Rope or {type(q_norm), type(k_norm)} - {RMSNorm, type(None)}:
            return super().forward(q, k, positions, q_norm, k_norm, rope)  # an author's own parts
        table, interleaved = rope.cos_sin, rope.spec.layout == "interleaved"
        if not (isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm)):
            return norm_rope(q, k, None, None, table, positions, 0.0, 0.0, False, interleaved)
        settings = (q_norm.eps, q_norm.offset, q_norm.weight_in_fp32)
        return norm_rope(q, k, q_norm.weight, k_norm.weight, table, positions, *settings, interleaved)


@torch.library.custom_op("titan::norm_rope", mutates_args=())
def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    table: Tensor,
    positions: Tensor,
    eps: float,
    offset: float,
    weight_in_fp32: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """q [T, N, H] and k [T, K, H], normed if there are weights [H], then rotated by `table` [P, 2R] at positions [T].

    Rounds where the torch modules do.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    q, k = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (q, k))
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    q_blocks, k_blocks = (triton.cdiv(n, HEADS_PER_BLOCK) for n in (num_heads, num_kv_heads))
    if num_tokens:
        _norm_rope_kernel[num_tokens, q_blocks + k_blocks](
            q, k, q_out, k_out, q_weight, k_weight, table, positions, q.stride(0), k.stride(0), eps, offset,
            N=num_heads, K=num_kv_heads, H=head_dim, R=table.shape[1] // 2, Q_BLOCKS=q_blocks,
            HAS_NORM=q_weight is not None, WEIGHT_IN_FP32=weight_in_fp32, INTERLEAVED=interleaved,
            BLOCK=HEADS_PER_BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return q_out, k_out


@norm_rope.register_fake
def _(q, k, q_weight, k_weight, table, positions, eps, offset, weight_in_fp32, interleaved):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))


if triton is not None:

    @triton.jit
    def _norm_rope_kernel(
        q, k, q_out, k_out, q_weight, k_weight, table, positions, q_stride, k_stride, eps, offset,
        N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, R: tl.constexpr, Q_BLOCKS: tl.constexpr,
        HAS_NORM: tl.constexpr, WEIGHT_IN_FP32: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One token and BLOCK heads of q, or of k, per program."""
        token, block = tl.program_id(0), tl.program_id(1)
        position = tl.load(positions + token)
        dtype: tl.constexpr = q.dtype.element_ty
        if block < Q_BLOCKS:
            source, target, weight, num_heads, first = q + token * q_stride, q_out + token * N * H, q_weight, N, block
        else:
            source, target, weight, num_heads, first = (
                k + token * k_stride, k_out + token * K * H, k_weight, K, block - Q_BLOCKS,
            )  # fmt: skip
        heads = first * BLOCK + tl.arange(0, BLOCK)
        mask = (heads < num_heads)[:, None]
        half: tl.constexpr = R // 2
        pair = tl.arange(0, half)
        row = table + position * (2 * R)
        if INTERLEAVED:
            channels = heads[:, None] * H + tl.arange(0, R)[None, :]
            both = tl.load(source + channels, mask=mask, other=0.0).to(tl.float32)
            x1, x2 = tl.split(tl.reshape(both, (BLOCK, half, 2)))
            cos, sin = tl.load(row + 2 * pair), tl.load(row + R + 2 * pair + 1)
            w1_at, w2_at = 2 * pair, 2 * pair + 1
        else:
            channels = heads[:, None] * H + pair[None, :]
            x1 = tl.load(source + channels, mask=mask, other=0.0).to(tl.float32)
            x2 = tl.load(source + channels + half, mask=mask, other=0.0).to(tl.float32)
            cos, sin = tl.load(row + pair), tl.load(row + R + half + pair)
            w1_at, w2_at = pair, pair + half
        if R < H:
            rest_at = tl.arange(0, H - R) + R
            rest_channels = heads[:, None] * H + rest_at[None, :]
            rest = tl.load(source + rest_channels, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
            if R < H:
                squares += tl.sum(rest * rest, 1)
            scale = tl.rsqrt(squares / H + eps)[:, None]
            x1 = _weighted(x1 * scale, tl.load(weight + w1_at), offset, dtype, WEIGHT_IN_FP32)
            x2 = _weighted(x2 * scale, tl.load(weight + w2_at), offset, dtype, WEIGHT_IN_FP32)
            if R < H:
                rest = _weighted(rest * scale, tl.load(weight + rest_at), offset, dtype, WEIGHT_IN_FP32)
        turned1 = (x1 * cos[None, :] - x2 * sin[None, :]).to(dtype)
        turned2 = (x2 * cos[None, :] + x1 * sin[None, :]).to(dtype)
        if INTERLEAVED:
            tl.store(target + channels, tl.reshape(tl.join(turned1, turned2), (BLOCK, R)), mask=mask)
        else:
            tl.store(target + channels, turned1, mask=mask)
            tl.store(target + channels + half, turned2, mask=mask)
        if R < H:
            tl.store(target + rest_channels, rest.to(dtype), mask=mask)

    @triton.jit
    def _weighted(x, weight, offset, dtype: tl.constexpr, IN_FP32: tl.constexpr):
        """A normed fp32 block times its weight [C], rounded as RMSNorm rounds; fp32 again."""
        if IN_FP32:
            return (x * (weight.to(tl.float32) + offset)[None, :]).to(dtype).to(tl.float32)
        factor = (weight.to(tl.float32) + offset).to(dtype).to(tl.float32)
        return (x.to(dtype).to(tl.float32) * factor[None, :]).to(dtype).to(tl.float32)
