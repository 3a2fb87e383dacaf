"""A check for models with modules of their own: do ranks that hold the same parameter train it alike?"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import PlanError
from titan_adapters.parallel.layout import MODEL_AXES

TOLERANCE = 1e-3
"""Relative; ranks compute the same sums, so that what differs by more is another gradient."""


def check_replicas(model: BaseTransformer) -> None:
    """After a backward pass, compare the gradients of parameters that several ranks of "tp" or "ep" hold.

    They differ where a module is planned `replicate`, but applied to a rank's own heads or features: each rank then
    has only its own share of the gradient, and the copies drift apart without an error. All ranks must call this.

    Raises:
        PlanError: lists these parameters.
    """
    gradients = {n: p.grad for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    total = torch.stack([grad.to_local().norm() for grad in gradients.values()]).norm().item()
    problems = []
    for name, grad in gradients.items():
        for axis, group in _held_alike(grad):
            lowest, highest = _extremes(grad.to_local(), group)
            scale = max(lowest.norm().item(), highest.norm().item(), 1e-6 * total)  # below this, all is rounding
            difference = (highest - lowest).norm().item()
            if not difference <= TOLERANCE * scale:
                problems.append(f"{name} differs over {axis} by {difference / scale:.0e} of its norm")
    if problems:
        raise PlanError(
            "Ranks that hold the same parameter have different gradients.",
            problems,
            fix="plan a module that each rank applies to its own heads or features ta.partwise, not ta.replicate.",
        )


def _held_alike(grad: DTensor) -> Iterator[tuple[str, dist.ProcessGroup]]:
    for i, (axis, placement) in enumerate(zip(grad.device_mesh.mesh_dim_names or (), grad.placements, strict=True)):
        if axis in MODEL_AXES and isinstance(placement, Replicate) and grad.device_mesh.size(i) > 1:
            yield axis, grad.device_mesh.get_group(i)


def _extremes(local: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    lowest, highest = local.detach().float().clone(), local.detach().float().clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return lowest, highest
