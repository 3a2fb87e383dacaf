"""Tensor transforms between a published layout and the native one: pure, invertible, no state.

`to_native` turns a checkpoint's tensor into ours, `to_hf` is its exact inverse. Nothing is inferred from a shape: what
an op needs to know is given when it is written down. Ops run on meta tensors too, which is how shapes are checked
before any data is read.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_adapters.errors import StateDictError


class Op(ABC):
    """One invertible transform of one tensor."""

    @abstractmethod
    def to_native(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def to_hf(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Transpose(Op):
    """Swap two dims; its own inverse."""

    dim0: int = -2
    dim1: int = -1

    def to_native(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(self.dim0, self.dim1).contiguous()

    to_hf = to_native


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
        rotated = rotated.unflatten(1, grid).transpose(1, 2).flatten(1, 2)
        return torch.cat([rotated, rest], dim=1).flatten(0, 1)


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
