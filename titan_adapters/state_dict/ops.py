"""Tensor transforms between a published layout and the native one: pure, invertible, no state.

`to_native` turns a checkpoint's tensor into ours, `to_hf` is its inverse: bitwise for ops that only move values; the
others say when. Nothing is inferred from a shape: what an op needs to know is given when it is written down. Ops run on
meta tensors too, which is how shapes are checked before any data is read.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_adapters.errors import StateDictError


class Op(ABC):
    """One invertible transform of one tensor."""

    rearranges: ClassVar[bool] = True
    """Whether values change, or their order in memory; otherwise the result is a plain part of the tensor."""

    @abstractmethod
    def to_native(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def to_hf(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Transpose(Op):
    """Swap two dims; its own inverse. Incoming, the result is a view: whoever writes it copies anyway."""

    dim0: int = -2
    dim1: int = -1

    def to_native(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(self.dim0, self.dim1)

    def to_hf(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(self.dim0, self.dim1).contiguous()


@dataclass(frozen=True)
class Permute(Op):
    """Rope layout of q or k rows (weight [heads * head_dim, D], bias or norm weight [heads * head_dim]).

    Published: half layout, channel j pairs with j + rotary_dim / 2. Native: interleaved, 2j pairs with 2j + 1. Only
    the first rotary_dim rows of each head move.

    Args:
        heads: Heads of *this* tensor: query heads for q, kv heads for k, 1 for a weight shared by all heads.
    """

    heads: int
    head_dim: int
    rotary_dim: int

    def to_native(self, tensor: Tensor) -> Tensor:
        return self._shuffle(tensor, (2, self.rotary_dim // 2))

    def to_hf(self, tensor: Tensor) -> Tensor:
        return self._shuffle(tensor, (self.rotary_dim // 2, 2))

    def _shuffle(self, tensor: Tensor, grid: tuple[int, int]) -> Tensor:
        if tensor.shape[0] != self.heads * self.head_dim:
            raise StateDictError(
                f"{self} got a tensor of shape {tuple(tensor.shape)}.",
                [f"its first dim must be heads * head_dim = {self.heads * self.head_dim}"],
                fix="check the head counts in the config against the checkpoint.",
            )
        per_head = tensor.unflatten(0, (self.heads, self.head_dim))
        rotated, rest = per_head[:, : self.rotary_dim], per_head[:, self.rotary_dim :]
        return torch.cat([_swap_grid(rotated, 1, grid), rest], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Deinterleave(Op):
    """Sort alternating entries along `dim` apart: published a0 b0 a1 b1, native a0 a1 b0 b1 (for two parts).

    Before a `Split`, for a gate and an up projection that are published row by row.
    """

    parts: int
    dim: int

    def to_native(self, tensor: Tensor) -> Tensor:
        return _swap_grid(tensor, self.dim, (self._length(tensor), self.parts))

    def to_hf(self, tensor: Tensor) -> Tensor:
        return _swap_grid(tensor, self.dim, (self.parts, self._length(tensor)))

    def _length(self, tensor: Tensor) -> int:
        length = tensor.shape[self.dim]
        if length % self.parts:
            raise StateDictError(
                f"{self} got a tensor of shape {tuple(tensor.shape)}.",
                fix=f"dim {self.dim} must be a multiple of {self.parts}.",
            )
        return length // self.parts


@dataclass(frozen=True)
class VocabPadding(Op):
    """An embedding, head or head bias published with more rows than the vocabulary has.

    Incoming, rows from vocab_size on are cut off. Outgoing, they are zeros, because what they held is not kept: the
    round trip is bitwise for the real rows only. A reader that does not cut them off either sees a logit of 0 for each.
    """

    rearranges = False
    vocab_size: int
    padded_vocab_size: int

    def __post_init__(self):
        if self.padded_vocab_size < self.vocab_size:
            raise StateDictError(
                f"{self}: the padded vocabulary is the smaller one.", fix="give the number of rows published."
            )

    def to_native(self, tensor: Tensor) -> Tensor:
        self._check(tensor, self.padded_vocab_size, "published")
        return tensor[: self.vocab_size]

    def to_hf(self, tensor: Tensor) -> Tensor:
        self._check(tensor, self.vocab_size, "native")
        return torch.cat([tensor, tensor.new_zeros(self.padded_vocab_size - self.vocab_size, *tensor.shape[1:])])

    def _check(self, tensor: Tensor, rows: int, side: str) -> None:
        if tensor.shape[0] != rows:
            raise StateDictError(
                f"{self}: the {side} tensor has {tensor.shape[0]} rows instead of {rows}.",
                fix="check vocab_size and padded_vocab_size in the config against the checkpoint.",
            )


@dataclass(frozen=True)
class Cast(Op):
    """Hold natively in one dtype what is published in another, such as a router bias that must stay fp32.

    The inverse is exact for values that the published dtype can represent.
    """

    hf: torch.dtype
    native: torch.dtype

    def to_native(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.native)

    def to_hf(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.hf)


@dataclass(frozen=True)
class Offset(Op):
    """native = published + value, such as a norm weight published as gamma - 1 and held as gamma, or the reverse.

    Computed in fp64 and rounded to the tensor's dtype. A round trip from either side is bitwise where the other side's
    value can be represented, and otherwise off by the rounding. With value = 1, native weights in [0.5, 2] always
    survive; small published ones do not: in bf16, 0.001 + 1 is 1. Hold such a tensor in fp32 with
    `Cast(torch.bfloat16, torch.float32)` *before* this op: then every bf16 value from 2^-16 to 2^16 survives.
    """

    value: float

    def to_native(self, tensor: Tensor) -> Tensor:
        return (tensor.double() + self.value).to(tensor.dtype)

    def to_hf(self, tensor: Tensor) -> Tensor:
        return (tensor.double() - self.value).to(tensor.dtype)


@dataclass(frozen=True)
class Scale(Op):
    """native = published * factor.

    Computed in fp64 and rounded to the tensor's dtype. The inverse is bitwise if `factor` is a power of two (and
    nothing overflows or becomes subnormal); with other factors it can be off by one unit in the last place.
    """

    factor: float

    def __post_init__(self):
        if self.factor == 0:
            raise StateDictError(f"{self} has no inverse.", fix="use a factor other than 0.")

    def to_native(self, tensor: Tensor) -> Tensor:
        return (tensor.double() * self.factor).to(tensor.dtype)

    def to_hf(self, tensor: Tensor) -> Tensor:
        return (tensor.double() / self.factor).to(tensor.dtype)


def _swap_grid(tensor: Tensor, dim: int, grid: tuple[int, int]) -> Tensor:
    """Read `dim` as a grid of this shape, row by row, and write it column by column."""
    dim %= tensor.ndim
    return tensor.unflatten(dim, grid).transpose(dim, dim + 1).flatten(dim, dim + 1)
