"""Plain local tensors in place of DTensor parameters, for the duration of a forward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titan_adapters.parallel.collectives import spread
from titan_adapters.parallel.layout import ParameterLayout


class Slot(NamedTuple):
    """A parameter by its place, because FSDP exchanges the object that is there."""

    module: nn.Module
    name: str
    layout: ParameterLayout


class LocalView:
    """Hooks on one unit (a layer, or the model): inside its forward pass its modules see this rank's plain tensors.

    Optimizers, checkpoints and FSDP, which work outside of it, see DTensors. So a model's code needs to know neither,
    and may reach for a weight directly (as a router does for its fp32 logits).
    """

    def __init__(self, slots: Sequence[Slot], tp: ProcessGroup | None):
        self._slots = slots
        self._tp = tp
        self._hidden: list[nn.Parameter] = []

    def attach(self, unit: nn.Module) -> None:
        unit.register_forward_pre_hook(self._enter)
        unit.register_forward_hook(self._leave, always_call=True)

    def _enter(self, unit: nn.Module, args: Any) -> None:
        self._hidden = [slot.module._parameters[slot.name] for slot in self._slots]  # type: ignore[misc]
        for slot, parameter in zip(self._slots, self._hidden, strict=True):
            assert isinstance(parameter, DTensor)
            slot.module._parameters[slot.name] = self._local(parameter.to_local(), slot.layout)  # type: ignore[assignment]

    def _leave(self, unit: nn.Module, args: Any, output: Any) -> None:
        for slot, parameter in zip(self._slots, self._hidden, strict=True):
            slot.module._parameters[slot.name] = parameter
        self._hidden = []

    def _local(self, held: Tensor, layout: ParameterLayout) -> Tensor:
        if self._tp is None or layout.use == "own":
            return held
        held, rank = spread(held, [self._tp]), self._tp.rank()
        match layout.use:
            case "spread":
                return held
            case "first":
                return held if rank == 0 else held * 0
            case "kv_heads":
                rows = held.shape[0] // layout.kv_heads
                head = rank * layout.kv_heads // self._tp.size()
                return held[head * rows : (head + 1) * rows]
        raise AssertionError(layout.use)
