"""Rotary position embedding.

Shapes: ... leading dims ([B, S] batched or [T] packed)  N heads  H head_dim  R rotary_dim  P max_seq_len.
"""

from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from titan_adapters.nn.rope_tables import inverse_frequencies, multiplier
from titan_adapters.rope_spec import RopeSpec

# Layers with the same spec share one table: at 128k positions it is tens of megabytes.
_TABLES: "WeakValueDictionary[tuple, Tensor]" = WeakValueDictionary()


def cos_sin_table(spec: RopeSpec, max_seq_len: int, device: torch.device) -> Tensor:
    """fp32 [P, R]: cosines of the R / 2 angles, then their sines, for positions 0 to P - 1, times the multiplier.

    Angles are computed on the CPU in fp32 whatever the device, so that every process holds the same bits.
    """
    key = (spec, max_seq_len, device)
    table = _TABLES.get(key)
    if table is None:
        if device.type == "meta":
            table = torch.empty(max_seq_len, spec.rotary_dim, dtype=torch.float32, device=device)
        else:
            positions = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
            angles = torch.outer(positions, inverse_frequencies(spec, max_seq_len))
            table = (torch.cat([angles.cos(), angles.sin()], dim=-1) * multiplier(spec)).to(device)
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
        cos, sin = self.cos_sin[positions].unsqueeze(-2).chunk(2, dim=-1)  # [..., 1, R / 2]
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotary_dim = self.spec.rotary_dim
        rotated, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
        if self.spec.layout == "interleaved":
            first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1)
            rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        else:
            first, second = rotated.chunk(2, dim=-1)
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        rotated = rotated.to(x.dtype)
        return rotated if rest.shape[-1] == 0 else torch.cat([rotated, rest], dim=-1)
