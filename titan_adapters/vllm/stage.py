"""Pipeline stages: which layers of a model this rank has."""

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from vllm.distributed import get_pp_group
from vllm.distributed.utils import get_pp_indices

from titan_adapters.contract import BaseTransformer, slots_elsewhere
from titan_adapters.errors import EngineError


@dataclass(frozen=True)
class Stage:
    """Layers `start` to `stop` (exclusive, global indices), and what precedes or follows them all."""

    start: int
    stop: int
    is_first: bool
    is_last: bool


def this_stage(num_layers: int) -> Stage:
    """The stage of this rank, as vLLM splits layers."""
    group = get_pp_group()
    start, stop = get_pp_indices(num_layers, group.rank_in_group, group.world_size)
    return Stage(start, stop, group.is_first_rank, group.is_last_rank)


class Elsewhere(nn.Module):
    """In place of a part that another stage has."""

    def forward(self, *args: Any) -> NoReturn:
        raise EngineError("This part of the model is on another pipeline stage.", fix="report this.")


def drop_other_stages(model: BaseTransformer, stage: Stage) -> None:
    """Leave of `model` (on the meta device) what `stage` computes. Layers keep their global indices."""
    elsewhere = [f"layers.{i}" for i in range(model.config.num_layers) if not stage.start <= i < stage.stop]
    elsewhere += slots_elsewhere(model.config, is_first=stage.is_first, is_last=stage.is_last)
    for path in elsewhere:
        model.set_submodule(path, Elsewhere())
