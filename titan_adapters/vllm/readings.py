"""What one rank says about the weights in its engine: plain data, for the front end to put together."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from titan_adapters.fingerprints import Sums, element_sums
from titan_adapters.vllm.held import NotReadable, Pieces, held_pieces, plain_pieces
from titan_adapters.vllm.layers import EngineAttention
from titan_adapters.vllm.loader import WeightWriter
from titan_adapters.vllm.weight_map import UNUSED, ZERO, ParameterMap, Part


class Reading(NamedTuple):
    """One place's share of one native tensor."""

    native: str
    place: str
    dtype: str
    sums: list[int]
    """The fields of `Sums`."""
    nans: list[int]
    """How many, and the first and last flat native index; empty if none."""


class RankReport(NamedTuple):
    """A rank's answer."""

    natives: dict[str, tuple[list[int], str]]
    """Shape, and dtype as served, of every native tensor of the whole model."""
    readings: list[Reading]
    unreadable: list[tuple[str, str]]
    """Native name, and why."""
    padding: list[tuple[str, int, int, int]]
    """Engine parameter; elements that loaders fill with zero; those of them that are not zero; unused elements."""
    ties: list[tuple[str, str, bool]]
    """Two names of one parameter that are both on this rank, and whether they share memory."""


def read_weights(writer: WeightWriter, rank: int) -> RankReport:
    """Hash everything that this rank's engine computes with, where it is."""
    swap = writer.weight_map.swap
    state = dict(swap.model.state_dict(keep_vars=True))
    readings: list[Reading] = []
    unreadable: list[tuple[str, str]] = []
    padding: list[tuple[str, int, int, int]] = []
    for mapped in writer.weight_map:
        for place, pieces in _places(writer, mapped):
            try:
                tally = _Tally(mapped.parts, {part.native: writer.natives[part.native].dtype for part in mapped.parts})
                for values, numbers in pieces():
                    tally.add(values, numbers)
            except NotReadable as reason:
                unreadable += [(part.native, f"{place} on rank {rank}: {reason}") for part in mapped.parts]
                continue
            readings += tally.readings(f"{place} on rank {rank}")
            if tally.zeros or tally.unused:
                padding.append((f"{place} on rank {rank}", tally.zeros, tally.nonzero, tally.unused))
    natives = {
        name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in writer.natives.items()
    }
    ties = [
        (name, alias, state[name].data_ptr() == state[alias].data_ptr())
        for name, alias in swap.aliases.items()
        if name in state and alias in state
    ]
    return RankReport(natives, readings, unreadable, padding, ties)


def _places(writer: WeightWriter, mapped: ParameterMap) -> Iterator[tuple[str, Callable[[], Pieces]]]:
    """Everything that computes with a parameter: itself, its alias (which may be repacked), what attention holds."""
    swap = writer.weight_map.swap
    names = [mapped.name]
    if mapped.name in swap.aliases:
        names.append(swap.aliases[mapped.name])
    for name in names:
        path, _, kind = name.rpartition(".")
        module = swap.model.get_submodule(path)
        yield name, lambda m=module, k=kind: held_pieces(m, k, mapped.templates, mapped.numbers)
        if isinstance(module, EngineAttention):
            taken = vars(module.attn.impl)["sinks"]
            if taken is not None and taken.data_ptr() != cast(Tensor, module.sinks).data_ptr():
                yield f"{path}.attn.impl.{kind}", lambda t=taken: plain_pieces(t, mapped.numbers)


class _Tally:
    """Adds up the pieces of one engine parameter, by native tensor."""

    def __init__(self, parts: list[Part], dtypes: dict[str, torch.dtype]):
        self._parts = parts
        self._dtypes = dtypes
        self._held: dict[str, torch.dtype] = {}
        self._sums = {part.native: Sums() for part in parts}
        self._nans: dict[str, list[int]] = {part.native: [] for part in parts}
        self.zeros = self.nonzero = self.unused = 0

    def add(self, values: Tensor, numbers: Tensor) -> None:
        for part in self._parts:
            mine = (numbers >= part.first) & (numbers < part.first + part.numel)
            found, indices = values[mine], numbers[mine] - part.first
            self._sums[part.native] += element_sums(self._as_served(part.native, found), indices)
            if len(nans := indices[found.isnan()]):
                count, low, high = self._nans[part.native] or [0, part.numel, 0]
                self._nans[part.native] = [count + len(nans), min(low, int(nans.min())), max(high, int(nans.max()))]
        self.zeros += int((numbers == ZERO).sum())
        self.nonzero += int((values[numbers == ZERO] != 0).sum())
        self.unused += int((numbers == UNUSED).sum())

    def _as_served(self, native: str, values: Tensor) -> Tensor:
        """In the dtype that the parameter should have. A platform may hold a wider one, with the same values."""
        wanted = self._dtypes[native]
        narrowed = values.to(wanted)
        same = torch.promote_types(values.dtype, wanted) == values.dtype
        if same and torch.equal(narrowed.to(values.dtype).nan_to_num(), values.nan_to_num()):
            values = narrowed
        if self._held.setdefault(native, values.dtype) != values.dtype:
            raise NotReadable(f"it is held in {values.dtype}, and not all of it can be told in {wanted}")
        return values

    def readings(self, place: str) -> Iterator[Reading]:
        for native, sums in self._sums.items():
            if sums.count:
                dtype = str(self._held[native]).removeprefix("torch.")
                yield Reading(native, place, dtype, list(sums), self._nans[native])
