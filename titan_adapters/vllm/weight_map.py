"""Which element of which native tensor each element of an engine parameter is, from the loaders that write weights.

Nothing here knows a layout: native indices are written, in place of weights, through the same loaders into shadows of
the engine's parameters, so that sharding, packing, replication and padding come out as they are.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_adapters.vllm.moves import Swap, write_one

UNUSED = -1
"""An element that no loader writes."""
ZERO = 0
"""An element that a loader fills with zero, such as a padded vocabulary row."""


class Part(NamedTuple):
    """One of the native tensors in an engine parameter: its element i has the number `first` + i."""

    native: str
    first: int
    numel: int


class ParameterMap(NamedTuple):
    """Where the elements of one engine parameter come from, as it is when weights are loaded."""

    name: str
    """Relative to the author's model."""
    parts: list[Part]
    numbers: Tensor
    """int32 or int64, of the parameter's shape, on the CPU: `UNUSED`, `ZERO`, or the number of a native element."""
    templates: dict[str, Tensor]
    """All parameters of its module as they are then, on the meta device, by kind ("weight", "bias", ...)."""


class WeightMap:
    """Made from a swapped model before its weights are loaded and repacked.

    Args:
        natives: Names and tensors (meta) of what this pipeline stage has.
    """

    def __init__(self, swap: Swap, natives: dict[str, Tensor]):
        self.swap = swap
        self._natives = natives
        self._templates = {name: _like(t, "meta", t.dtype) for name, t in _state(swap).items()}

    def __iter__(self) -> Iterator[ParameterMap]:
        """One engine parameter after the other: a map needs several times a parameter's memory, on the host."""
        natives: dict[str, list[str]] = {}
        for native in self._natives:
            natives.setdefault(self.swap.target(native)[0], []).append(native)
        for name, packed in natives.items():
            yield self._map(name, packed)

    def _map(self, name: str, natives: list[str]) -> ParameterMap:
        total = sum(self._natives[native].numel() for native in natives)
        shadow = _like(self._templates[name], "cpu", torch.int32 if total < 2**31 - 1 else torch.int64)
        shadow.data.fill_(UNUSED)
        parts, first = [], 1
        with torch.no_grad(), torch.device("cpu"):
            for native in natives:
                shape = self._natives[native].shape
                part = Part(native, first, shape.numel())
                first += part.numel
                numbers = torch.arange(part.first, first, dtype=shadow.dtype).view(shape)
                write_one(shadow, name, numbers, self.swap.target(native)[1])
                parts.append(part)
        module = name.rpartition(".")[0]
        templates = {
            other.rpartition(".")[2]: tensor
            for other, tensor in self._templates.items()
            if other.rpartition(".")[0] == module
        }
        return ParameterMap(name, parts, shadow.data, templates)


def _state(swap: Swap) -> dict[str, Tensor]:
    return dict(swap.model.state_dict(keep_vars=True))


def _like(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """The same class and attributes (loaders look at both) over other memory, whatever the dtype."""
    made = torch.empty(tensor.shape, dtype=dtype, device=device)
    made.__class__ = tensor.__class__
    made.__dict__ = dict(vars(tensor))
    return made
