"""What one rank says about the weights in its engine: plain data, for the front end to put together."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from titan_adapters.fingerprints import Sums, dtype_name, element_sums
from titan_adapters.vllm.held import NotReadable, Pieces, held_pieces, plain_pieces
from titan_adapters.vllm.layers import EngineAttention
from titan_adapters.vllm.weight_map import UNUSED, ZERO, ParameterMap, Part

if TYPE_CHECKING:
    from titan_adapters.vllm.loader import WeightWriter


class Reading(TypedDict):
    """One place's share of one native tensor."""

    native: str
    place: str
    dtype: str
    sums: list[int]
    """The fields of `Sums`."""
    nans: list[int]
    """How many, and the first and last index (flat, of the native tensor); empty if there are none."""


class Padding(TypedDict):
    """Elements of one engine parameter that are no native ones."""

    place: str
    zeros: int
    """Those that a loader fills with zero."""
    nonzero: int
    """Those of them that are not zero."""
    unused: int
    """Those that no loader writes."""


class RankReport(TypedDict):
    """A rank's answer; lists, dicts, strings and numbers only, as they come out of an engine's process."""

    natives: dict[str, tuple[list[int], str]]
    """Shape, and dtype as served, of every native tensor of the whole model."""
    readings: list[Reading]
    unreadable: list[list[str]]
    """Native names, and why each can't be read."""
    padding: list[Padding]
    ties: list[Any]
    """Two names of one parameter that are both on this rank, and whether they share memory."""


def read_weights(writer: "WeightWriter", rank: int) -> RankReport:
    """Hash everything that this rank's engine computes with, where it is."""
    swap = writer.weight_map.swap
    report = RankReport(
        natives={name: (list(t.shape), dtype_name(t.dtype)) for name, t in writer.natives.items()},
        readings=[],
        unreadable=[],
        padding=[],
        ties=[],
    )
    for mapped in writer.weight_map:
        for where, pieces in _places(writer, mapped):
            place, tally = f"{where} on rank {rank}", _Tally(writer, mapped.parts)
            try:
                for values, numbers in pieces:
                    tally.add(values, numbers)
            except NotReadable as reason:
                report["unreadable"] += [[part.native, f"{place}: {reason}"] for part in mapped.parts]
                continue
            report["readings"] += tally.readings(place)
            if tally.zeros or tally.unused:
                report["padding"].append(
                    Padding(place=place, zeros=tally.zeros, nonzero=tally.nonzero, unused=tally.unused)
                )
    state = dict(swap.model.state_dict(keep_vars=True))
    for name, alias in swap.aliases.items():
        if name in state and alias in state:
            report["ties"].append([name, alias, state[name].data_ptr() == state[alias].data_ptr()])
    return report


def unwritten(writer: "WeightWriter") -> list[str]:
    """After the load of a poisoned model, before anything is repacked: where NaN is left, one line each.

    Elements to which no weight goes become zero.
    """
    lines = []
    state = dict(writer.weight_map.swap.model.state_dict(keep_vars=True))
    for mapped in writer.weight_map:
        tally = _Tally(writer, mapped.parts)
        for values, numbers in plain_pieces(state[mapped.name], mapped.numbers):
            tally.add(values, numbers)
        for reading in tally.readings(mapped.name):
            if reading["nans"]:
                lines.append(nan_line(reading, list(writer.natives[reading["native"]].shape)))
        if tally.unused:
            state[mapped.name].data.masked_fill_(state[mapped.name].isnan(), 0)
    return lines


def nan_line(reading: Reading, shape: list[int]) -> str:
    """Which elements of a native tensor of `shape` are NaN, in words."""
    count, *ends = reading["nans"]
    first, last = ([int(i) for i in torch.unravel_index(torch.tensor(end), shape)] for end in ends)
    return f"{reading['native']}: {count} elements are NaN, from {first} to {last}, in {reading['place']}"


def _places(writer: "WeightWriter", mapped: ParameterMap) -> Iterator[tuple[str, Pieces]]:
    """Everything that computes with a parameter: itself, its alias (which may be repacked), what attention took."""
    swap = writer.weight_map.swap
    names = [mapped.name, *([swap.aliases[mapped.name]] if mapped.name in swap.aliases else [])]
    for name in names:
        path, _, kind = name.rpartition(".")
        module = swap.model.get_submodule(path)
        yield name, held_pieces(module, kind, mapped.templates, mapped.numbers)
        if isinstance(module, EngineAttention):
            taken = vars(module.attn.impl).get("sinks")
            if taken is not None and taken.data_ptr() != getattr(module, kind).data_ptr():
                yield f"{path}.attn.impl.sinks", plain_pieces(taken, mapped.numbers)


@dataclass
class _Share:
    """What an engine parameter holds of one native tensor."""

    dtype: torch.dtype
    """As served."""
    held: torch.dtype | None = None
    sums: Sums = field(default_factory=Sums)
    nans: list[int] = field(default_factory=list)


class _Tally:
    """Adds up the pieces of one engine parameter, by native tensor."""

    def __init__(self, writer: "WeightWriter", parts: list[Part]):
        self._parts = parts
        self._shares = {part.native: _Share(writer.natives[part.native].dtype) for part in parts}
        self.zeros = self.nonzero = self.unused = 0

    def add(self, values: Tensor, numbers: Tensor) -> None:
        low, high = (int(end) for end in numbers.aminmax())
        for part in self._parts:
            end = part.first + part.numel
            if low >= part.first and high < end:  # as almost always
                self._add_to(part, values, numbers - part.first)
                return
            if low < end and high >= part.first:
                mine = (numbers >= part.first) & (numbers < end)
                self._add_to(part, values[mine], numbers[mine] - part.first)
        self.zeros += int((numbers == ZERO).sum())
        self.nonzero += int((values[numbers == ZERO] != 0).sum())
        self.unused += int((numbers == UNUSED).sum())

    def _add_to(self, part: Part, values: Tensor, indices: Tensor) -> None:
        share = self._shares[part.native]
        values = self._as_served(share, values)
        share.sums += element_sums(values, indices)
        isnan = values.isnan()
        if isnan.any():
            nans = indices[isnan]
            count, low, high = share.nans or [0, part.numel, 0]
            share.nans = [count + len(nans), min(low, int(nans.min())), max(high, int(nans.max()))]

    def _as_served(self, share: _Share, values: Tensor) -> Tensor:
        """In the dtype that the parameter should have. A platform may hold a wider one, with the same values."""
        if values.dtype != share.dtype and torch.promote_types(values.dtype, share.dtype) == values.dtype:
            narrowed = values.to(share.dtype)
            if torch.equal(narrowed.to(values.dtype).nan_to_num(), values.nan_to_num()):
                values = narrowed
        if share.held not in (None, values.dtype):
            raise NotReadable(f"it is held in a wider dtype than {share.dtype}, with values that this does not have")
        share.held = values.dtype
        return values

    def readings(self, place: str) -> Iterator[Reading]:
        for native, share in self._shares.items():
            if share.held is not None:
                yield Reading(
                    native=native, place=place, dtype=dtype_name(share.held), sums=list(share.sums), nans=share.nans
                )
