"""What the grouped kernel of experts is made of: rows sorted by group, products and biases per group.

Shapes: T tokens  R rows  D and F widths of a row  E groups.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Rearranged(torch.autograd.Function):
    """x[index // copies], where `index` permutes `copies` of each row of x [T, D] and `inverse` undoes it.

    Its gradient is gathered too. Autograd's own of an indexed read adds row after row, by atomics or after a sort.
    """

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        return x[index // copies]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, inverse, ctx.copies = inputs
        ctx.num_rows = len(x)
        ctx.save_for_backward(inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].view(ctx.num_rows, ctx.copies, grad.shape[-1]).sum(1), None, None, None


class OfGroup(torch.autograd.Function):
    """bias[group] of bias [E, F] and groups [R]. Its gradient is a matmul, for the same reason."""

    @staticmethod
    def forward(bias: Tensor, group: Tensor) -> Tensor:
        return bias[group]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        bias, group = inputs
        ctx.num_groups = len(bias)
        ctx.save_for_backward(group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (group,) = ctx.saved_tensors
        groups = torch.arange(ctx.num_groups, device=group.device)
        return (groups[:, None] == group).to(grad.dtype) @ grad, None


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows [R, D] of group after group, times weight [E, D, F] -> [R, F]; group e ends before row ends[e] (int32)."""
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        return _opaque_grouped_mm(rows, weight, ends)
    return F.grouped_mm(rows, weight, offs=ends)


@torch.library.custom_op("titan::grouped_mm", mutates_args=())
def _opaque_grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same for compilers: torch's shape rule for it knows bf16 only (2.11 to 2.13)."""
    return F.grouped_mm(rows, weight, offs=ends)


@torch.library.custom_op("titan::grouped_mm_of_weight", mutates_args=())
def _opaque_weight_gradient(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """rows [R, D] and grad [R, F] -> [E, D, F], each group's product."""
    return F.grouped_mm(rows.T, grad, offs=ends)


@_opaque_grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[-1])


@_opaque_weight_gradient.register_fake
def _(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), rows.shape[-1], grad.shape[-1])


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _opaque_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return _opaque_grouped_mm(grad, weight.mT, ends), _opaque_weight_gradient(rows, grad, ends), None


_opaque_grouped_mm.register_autograd(_opaque_backward, setup_context=_save_inputs)
