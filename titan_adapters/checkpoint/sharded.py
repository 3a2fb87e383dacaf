"""Checkpoints of parallel models: each rank takes its part of a whole tensor, and whole tensors come from all ranks."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_adapters.checkpoint.folder import atomic_folder
from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import CheckpointError
from titan_adapters.state_dict import native_tensors

Rows = Iterator[tuple[str, Tensor]]
Prepare = Callable[[Path], None]


def own_class(model: BaseTransformer) -> type[BaseTransformer]:
    """The class that its author wrote; FSDP2 puts a subclass in its place."""
    return next(c for c in type(model).__mro__ if issubclass(c, BaseTransformer) and not issubclass(c, FSDPModule))


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def device_of(tensors: Mapping[str, Tensor]) -> str:
    """Where to materialise them: on their mesh's kind of device, otherwise on the CPU."""
    return next((t.device_mesh.device_type for t in tensors.values() if isinstance(t, DTensor)), "cpu")


def materialised(model: BaseTransformer) -> dict[str, Tensor]:
    """The native tensors of `model`, which is given memory if it is on the meta device."""
    tensors = native_tensors(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        model.to_empty(device=device_of(tensors))
        tensors = native_tensors(model)
    return tensors


def write_part(target: Tensor, whole: Tensor) -> None:
    """Copy into `target`, or this rank's part of it, what belongs there. No communication."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            part = distribute_tensor(whole.detach(), target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(whole)


def whole_tensors(tensors: Mapping[str, Tensor]) -> Rows:
    """Each tensor in full, one at a time. All ranks must go through it together."""
    for name, tensor in tensors.items():
        with torch.no_grad():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        yield name, whole


def write_on_first_rank(rows: Rows, write: Callable[[Rows], None]) -> None:
    """Let rank 0 `write(rows)`, while the others take part in gathering them. All raise if it fails."""
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            write(rows)
        except Exception as caught:
            error = caught
    for _ in rows:  # the other ranks wait for each tensor, also for those that are not written any more
        pass
    _raise_together(error)


def save_dcp(
    path: Path, tensors: Mapping[str, Tensor], text: Mapping[str, str], *, overwrite: bool, prepare: Prepare
) -> None:
    """Write a DCP folder, each rank its own part, that appears complete or not at all. All raise if one fails.

    Args:
        text: Further entries.
        prepare: Puts what else belongs there into the folder.
    """
    state = {**tensors, **text}
    if not is_sharded(tensors):
        with atomic_folder(path, overwrite=overwrite) as folder:
            prepare(folder)
            _save(state, folder, no_dist=True)
        return
    error: Exception | None = None
    announced: list[str | None] = [None]
    first = dist.get_rank() == 0
    try:
        if first:
            with atomic_folder(path, overwrite=overwrite) as folder:
                prepare(folder)
                announced = [str(folder)]
                dist.broadcast_object_list(announced, src=0)
                _save(state, folder, no_dist=False)
        else:
            dist.broadcast_object_list(announced, src=0)
            if announced[0] is not None:
                _save(state, Path(announced[0]), no_dist=False)
    except Exception as caught:
        error = caught
    if first and announced[0] is None:  # refused before the others were told where to write: they still wait
        dist.broadcast_object_list(announced, src=0)
    _raise_together(error)


def _save(state: dict[str, Any], folder: Path, *, no_dist: bool) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be with no_dist
            torch_dcp.save(state, checkpoint_id=folder, no_dist=no_dist)
    except CheckpointException as failed:  # not an Exception
        problems = [f"rank {rank}: {error}" for rank, (error, _) in failed.failures.items()]
        raise CheckpointError("torch.distributed.checkpoint failed.", problems, fix="see its errors.") from failed


def _raise_together(error: Exception | None) -> None:
    outcome = [None if error is None else str(error)]
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[0] is not None:
        raise CheckpointError("Rank 0 could not write the checkpoint.", outcome[0].splitlines(), fix="see its error.")
