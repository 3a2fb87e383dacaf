"""Collectives with gradients, over ranks that hold parts of one model and see the same tokens.

The loss is computed alike on every such rank. So a gradient that arrives at a whole (replicated) tensor is whole too,
and one that leaves a rank's own part of the work is only that part's share.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def spread(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """A whole tensor that each rank now uses for its own part of the work: the gradients are summed."""
    for group in groups:
        x = _Spread.apply(x, group)
    return x


def summed(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The sum of all ranks' parts, whole on each."""
    for group in groups:
        x = _Summed.apply(x, group)
    return x


def gathered(x: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """All ranks' parts of the last dim, one after the other: [..., part] -> [..., size].

    Parts are what `torch.chunk` makes of `size`: equal, but that the last may be shorter.
    """
    return _Gathered.apply(x, group, size)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)  # shares memory: FSDP frees and refills a parameter's storage between forward and backward

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.part = -(-size // group.size())
        ctx.rank, ctx.length = group.rank(), x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, ctx.part - x.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(parts, dim=-1)[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, ctx.rank * ctx.part, ctx.length).contiguous(), None, None


def _all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
