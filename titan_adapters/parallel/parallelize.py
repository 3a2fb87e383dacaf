"""`parallelize`: a model's own plan, applied for training with DTensor and FSDP2."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import PlanError
from titan_adapters.parallel.layout import MODEL_AXES, ModelLayout, ParameterLayout, model_layout, owners_by_unit
from titan_adapters.parallel.local_view import LocalView, Slot
from titan_adapters.parallel.sizes import check_sizes
from titan_adapters.parallel.styles import split_activations
from titan_adapters.plan import ParallelPlan

DATA_AXES = ("fsdp", "dp_shard")


def parallelize(
    model: BaseTransformer,
    device_mesh: DeviceMesh,
    plan: ParallelPlan | None = None,
    *,
    sequence_parallel: bool = False,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> BaseTransformer:
    """Split `model`, in place, over the axes of `device_mesh`; every axis may be absent.

    - "tp": features, heads, the vocabulary and each expert's width, as the plan's styles say. Odd vocabularies are
      split unevenly. Key and value heads that are fewer than ranks are held by several.
    - "ep": whole experts. Each rank computes its own for all tokens, and the results are summed.
    - "fsdp" (or "dp_shard"): FSDP2's `fully_shard`, for each layer and for the rest.

    Ranks along "tp" and "ep" must be given the same tokens, and each computes the loss from the whole logits that
    `model(tokens)` returns; ranks along "fsdp" are given different ones, and gradients are averaged over them.

    With "tp" or "ep", parameters become DTensors on those axes, whose values are the first rank's; "fsdp" takes each
    rank's own values, so seed all ranks alike. A model on the meta device stays there: let `load_checkpoint` or
    `titan_adapters.parallel.init_weights` materialise and fill it. `save_checkpoint` and `load_checkpoint` work on a
    parallel model.

    To recompute layers in the backward pass, call `torch.utils.checkpoint.checkpoint(layer, x, seq)` from outside: a
    layer's parameters are plain tensors only while its `__call__` runs.

    Args:
        plan: Instead of the model's own `parallel_plan`.
        sequence_parallel: Between the parts that "tp" splits, each of its ranks has its share of the tokens, of any
            number of them, for norms, residuals, and what else the plan replicates (arXiv:2205.05198). The tokens are
            gathered before a split part, and its outputs summed and scattered in one after it. A mixture still gets
            all of them, and so does attention that is replicated. A replicated module of your own must treat every
            token by itself, and see only x: positions and documents in `seq` are still those of all tokens.
        mp_policy: For FSDP2. Default: no mixed precision.

    Raises:
        PlanError: unknown axes, sizes that don't fit the model (with those that do), a plan that does not cover the
            model, or a model that is parallel already. Nothing has been allocated or changed then.
    """
    sizes = _axes(device_mesh)
    check_sizes(model.config, {axis: sizes[axis] for axis in MODEL_AXES if axis in sizes})
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise PlanError(
            f"This {type(model).__name__} is parallel already.", fix="build the model again, then parallelize it once."
        )
    if sequence_parallel and "tp" not in sizes:
        raise PlanError("Sequence parallelism is over the axis 'tp'.", fix="name an axis of the device mesh so.")
    plan = plan or type(model).parallel_plan(model.config)
    layout = model_layout(model, plan, sizes, sequence_parallel=sequence_parallel)
    axes = tuple(axis for axis in sizes if axis in MODEL_AXES)
    if axes:
        groups = {axis: device_mesh.get_group(axis) for axis in axes if sizes[axis] > 1}
        split_activations(model, layout, groups)
        _split_parameters(model, layout, device_mesh[axes])
        _attach_views(model, layout, groups.get("tp"))
    for axis in sizes:
        if axis in DATA_AXES:
            for unit in (*model.layers, model):
                fully_shard(unit, mesh=device_mesh[axis], mp_policy=mp_policy or MixedPrecisionPolicy())
    return model


def _axes(device_mesh: DeviceMesh) -> dict[str, int]:
    names = device_mesh.mesh_dim_names or ()
    known = (*MODEL_AXES, *DATA_AXES)
    problems = [f"axis {name!r} is unknown" for name in names if name not in known]
    if not names:
        problems.append("its axes have no names")
    if set(DATA_AXES) <= set(names):
        problems.append(f"{' and '.join(DATA_AXES)} are two names of the same axis")
    if problems:
        raise PlanError(
            "This device mesh can't be used.",
            problems,
            fix=f"name its axes with init_device_mesh(..., mesh_dim_names=...): any of {', '.join(known)}.",
        )
    return {name: device_mesh.size(i) for i, name in enumerate(names)}


def placements(layout: ParameterLayout, axes: tuple[str, ...]) -> list[Placement]:
    """DTensor's words for what the ranks along `axes` hold."""
    return [Shard(layout.dims[axis]) if axis in layout.dims else Replicate() for axis in axes]


def _split_parameters(model: BaseTransformer, layout: ModelLayout, mesh: DeviceMesh) -> None:
    axes = mesh.mesh_dim_names
    assert axes is not None
    made: dict[int, nn.Parameter] = {}  # by the original: a tied parameter stays one
    originals = []  # kept alive, so that no two have the same id
    for (path, name), how in layout.parameters.items():
        module = model.get_submodule(path)
        original = module.get_parameter(name)
        if id(original) not in made:
            split = distribute_tensor(original.detach(), mesh, placements(how, axes))
            made[id(original)] = nn.Parameter(split, requires_grad=original.requires_grad)
            originals.append(original)
        module.register_parameter(name, made[id(original)])


def _attach_views(model: BaseTransformer, layout: ModelLayout, tp: dist.ProcessGroup | None) -> None:
    by_module: dict[str, list[Slot]] = {}
    for (path, name), how in layout.parameters.items():
        by_module.setdefault(path, []).append(Slot(model.get_submodule(path), name, how))
    for unit, paths in owners_by_unit(model, layout.styles).items():
        LocalView([slot for path in paths for slot in by_module[path]], tp).attach(unit)
