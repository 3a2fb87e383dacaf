"""Collectives with gradients, over ranks that hold parts of one model and see the same tokens.

The loss is computed alike on every such rank. So a gradient that arrives at a whole (replicated) tensor is whole too,
and one that leaves a rank's own part of the work is only that part's share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def spread(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """A whole tensor that each rank now uses for its own part of the work: the gradients are summed."""
    for group in groups:
        x = _Moved.apply(x, _same, partial(_all_reduced, group))
    return x


def summed(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The sum of all ranks' parts, whole on each."""
    for group in groups:
        x = _Moved.apply(x, partial(_all_reduced, group), _same)
    return x


@dataclass(frozen=True)
class Parts:
    """A dim that the ranks of a group share: rank r has `sizes[r]` entries, after those of the ranks before it."""

    group: dist.ProcessGroup
    dim: int
    sizes: Sequence[int]

    def gathered(self, part: Tensor) -> Tensor:
        """All parts, one after the other. Every rank goes on with them alike."""
        return _Moved.apply(part, self._gather, self._cut)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of what all ranks have alike; the inverse of `gathered`."""
        return _Moved.apply(whole, self._cut, self._gather)

    def gathered_spread(self, part: Tensor) -> Tensor:
        """`spread(gathered(part))`, whose gradients are summed and cut in one."""
        return _Moved.apply(part, self._gather, self._sum_and_cut)

    def summed_cut(self, share: Tensor) -> Tensor:
        """`cut(summed(share))` in one."""
        return _Moved.apply(share, self._sum_and_cut, self._gather)

    def _gather(self, part: Tensor) -> Tensor:
        padded = self._padded(part)
        every = [torch.empty_like(padded) for _ in self.sizes]
        dist.all_gather(every, padded, group=self.group)
        parts = zip(every, self.sizes, strict=True)
        return torch.cat([padded.narrow(self.dim, 0, size) for padded, size in parts], self.dim)

    def _sum_and_cut(self, whole: Tensor) -> Tensor:
        every = [self._padded(part) for part in whole.split(list(self.sizes), self.dim)]
        own = torch.empty_like(every[0])
        dist.reduce_scatter(own, every, group=self.group)
        return own.narrow(self.dim, 0, self.sizes[self.group.rank()]).contiguous()

    def _cut(self, whole: Tensor) -> Tensor:
        rank = self.group.rank()
        # A copy: a view would keep the whole in memory.
        return whole.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank]).clone(
            memory_format=torch.contiguous_format
        )

    def _padded(self, part: Tensor) -> Tensor:
        """Collectives want parts of one size, contiguous."""
        missing = max(self.sizes) - part.shape[self.dim]
        if missing:
            part = F.pad(part.movedim(self.dim, -1), (0, missing)).movedim(-1, self.dim)
        return part.contiguous()


class _Moved(torch.autograd.Function):
    """`there(x)`, with `back(gradient)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)  # shares memory: FSDP frees and refills a parameter's storage between forward and backward


def _all_reduced(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
