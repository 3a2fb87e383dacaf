"""What each rank would hold, from a dry run: the model on the meta device, the process group a fake one."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer, meta_model, slots_elsewhere
from titan_adapters.errors import PlanError
from titan_adapters.parallel.parallelize import parallelize
from titan_adapters.parallel.sizes import check_sizes
from titan_adapters.state_dict import native_tensors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlannedTensor:
    """One parameter or persistent buffer over all ranks. A rank whose stage does not have it holds nothing."""

    name: str
    style: str
    """Of its module; "buffer" for a buffer, which every rank holds whole."""
    shape: Shape
    dtype: torch.dtype
    held: dict[str, Shape]
    """Rank, such as "pp 0, ep 0, tp 1", -> the shape of its part."""

    def bytes_of(self, rank: str) -> int:
        return math.prod(self.held[rank]) * self.dtype.itemsize if rank in self.held else 0


@dataclass(frozen=True)
class DryRun:
    """What a model's weights take over all ranks of all axes."""

    ranks: list[str]
    tensors: list[PlannedTensor]

    def bytes_by_rank(self) -> dict[str, int]:
        return {rank: sum(tensor.bytes_of(rank) for tensor in self.tensors) for rank in self.ranks}

    def nbytes(self) -> int:
        """Of the whole model, every tensor once."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors)


def dry_run(model: type[BaseTransformer], config: TransformerConfig, tp: int = 1, ep: int = 1, pp: int = 1) -> DryRun:
    """Run `parallelize` for every rank without memory or other processes, in the config's dtype.

    Args:
        tp: Ranks of the axis "tp".
        ep: Ranks of the axis "ep". Together with "tp", experts are split along both.
        pp: Stages, to which layers are dealt as an engine deals them (`stage_layers`); training has none.

    Raises:
        PlanError: sizes that don't fit, with those that do; a plan that does not cover the model; or a process group
            exists in this process already.
    """
    sizes = {"pp": pp, "ep": ep, "tp": tp}
    check_sizes(config, sizes)
    styles = model.parallel_plan(config).resolve(meta_model(model, config))
    parts: dict[str, dict[str, Shape]] = {}
    ranks = []
    for ep_rank, tp_rank in product(range(ep), range(tp)):
        built = meta_model(model, config).to(getattr(torch, config.dtype))
        whole = native_tensors(built)
        with fake_process_group(ep_rank * tp + tp_rank, ep * tp):
            parallelize(built, init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp")))
            local = {n: _local_shape(tensor) for n, tensor in native_tensors(built).items()}
        for stage in range(pp):
            rank = f"pp {stage}, ep {ep_rank}, tp {tp_rank}"
            ranks.append(rank)
            for name in _of_stage(local, config, stage, pp):
                parts.setdefault(name, {})[rank] = local[name]
    tensors = []
    for name, tensor in whole.items():
        owner = name.rpartition(".")[0]
        style = styles[owner].name if isinstance(tensor, torch.nn.Parameter) else "buffer"
        tensors.append(PlannedTensor(name, style, tuple(tensor.shape), tensor.dtype, parts[name]))
    return DryRun(sorted(ranks, key=_numbers), tensors)


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """A default process group in which this process is `rank`, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    if dist.is_initialized():
        raise PlanError(
            "A dry run needs a process without a process group.", fix="run it before init_process_group, or elsewhere."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """Layers of each stage. Of what does not divide, the stages before the last get one more each, from the last but
    one backwards, as vLLM's `get_pp_indices` deals them: the last has the head besides."""
    counts = [num_layers // pp] * pp
    for i in range(num_layers % pp):
        counts[-2 - i] += 1
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _of_stage(names: Mapping[str, Shape], config: TransformerConfig, stage: int, pp: int) -> Iterator[str]:
    """Names on `stage`: its layers, and what is not in a slot that is elsewhere."""
    layers = stage_layers(config.num_layers, pp)[stage]
    elsewhere = slots_elsewhere(config, is_first=stage == 0, is_last=stage == pp - 1)
    for name in names:
        slot, _, rest = name.partition(".")
        if int(rest.partition(".")[0]) in layers if slot == "layers" else slot not in elsewhere:
            yield name


def _local_shape(tensor: torch.Tensor) -> Shape:
    return tuple(tensor.to_local().shape if isinstance(tensor, DTensor) else tensor.shape)


def _numbers(rank: str) -> list[int]:
    return [int(part.split()[1]) for part in rank.split(", ")]
