"""Rotary position embedding.

Shapes: ... leading dims ([B, S] batched or [T] packed)  N heads  H head_dim  R rotary_dim  P max_seq_len.
"""

from typing import Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from titan_adapters.nn.rope_tables import inverse_frequencies, multiplier
from titan_adapters.rope_spec import RopeSpec

# Layers with the same spec share one table: at 128k positions it is tens of megabytes.
_TABLES: "WeakValueDictionary[tuple, Tensor]" = WeakValueDictionary()


def cos_sin_table(spec: RopeSpec, max_seq_len: int, device: torch.device) -> Tensor:
    """fp32 [P, 2R], times the multiplier: for positions 0 to P - 1, each channel's cosine, then each one's signed sine.

    With it a rotation is `x * cos + partner * sin`, the same for every channel, where `partner` is the channel that
    turns together with it: compilers make one pass of that, and two or three of halves that are put together again.
    The first channel of a pair has the negative sine.

    Angles are computed on the CPU in fp32 whatever the device, so that every process holds the same bits.
    """
    key = (spec, max_seq_len, device)
    table = _TABLES.get(key)
    if table is None:
        if device.type == "meta":
            table = torch.empty(max_seq_len, 2 * spec.rotary_dim, dtype=torch.float32, device=device)
        else:
            positions = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
            angles = torch.outer(positions, inverse_frequencies(spec, max_seq_len))
            cos, sin, pair = angles.cos(), angles.sin(), -1 if spec.layout == "interleaved" else -2
            channels = [torch.stack([cos, cos], dim=pair), torch.stack([-sin, sin], dim=pair)]
            table = (torch.cat([t.flatten(1) for t in channels], dim=-1) * multiplier(spec)).to(device)
        _TABLES[key] = table
    return table


class Rope(nn.Module):
    """Rotates the first R channels of queries and keys by their positions.

    Args:
        spec: Frequencies, layout and rotary dim.
        max_seq_len: Rows of the table. A position at or beyond it is an index error.
    """

    def __init__(self, spec: RopeSpec, max_seq_len: int):
        super().__init__()
        self.spec = spec
        self.max_seq_len = max_seq_len
        device = torch.get_default_device()
        self.register_buffer("cos_sin", cos_sin_table(spec, max_seq_len, device), persistent=False)

    def _apply(self, fn, recurse=True):
        # `.to(bfloat16)` must not round the table and `.to_empty()` must not leave it uninitialised: take only the
        # device from `fn`, and build the table again.
        device = fn(torch.empty(0, device=self.cos_sin.device)).device
        self.cos_sin = cos_sin_table(self.spec, self.max_seq_len, device)
        return self

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [..., N, H] and k [..., K, H] by positions [...]; same shapes and dtypes come back."""
        cos, sin = self.cos_sin[positions].unsqueeze(-2).chunk(2, dim=-1)  # [..., 1, R]
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotary_dim = self.spec.rotary_dim
        turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        wide = turned.float()
        turned = (wide * cos + self._partner(turned, wide) * sin).to(x.dtype)
        return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)

    def _partner(self, x: Tensor, wide: Tensor) -> Tensor:
        """fp32 [..., R]: x, of which `wide` is fp32, with the two channels of each pair swapped."""
        return swapped_pairs(wide, self.spec.layout, stacked=wide.device.type == "cpu")


def swapped_pairs(x: Tensor, layout: Literal["interleaved", "half"], *, stacked: bool) -> Tensor:
    """x [..., R] with the two channels of each pair swapped.

    Args:
        stacked: As a stack of both. Compiled, it is written in x's dtype and read again, in the gradient too; on a GPU
            that takes twice the time of indices inside one kernel, on a CPU half.
    """
    shape, pair = ((2, -1), -2) if layout == "half" else ((-1, 2), -1)
    pairs = x.unflatten(-1, shape)
    if not stacked:
        return pairs.flip(pair).flatten(-2)
    first, second = pairs.unbind(pair)
    return torch.stack([second, first], dim=pair).flatten(-2)
