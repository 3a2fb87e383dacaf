"""Rows: which checkpoint tensors become which native tensors, as data.

A row names both sides with templates such as `model.layers.{layer}.mlp.up_proj.weight` and is expanded over concrete
ranges into bindings before any tensor is read. Rows say how tensors are wired together (renamed, stacked, joined,
split, tied, dropped); `Op`s, applied per tensor, say how each one's layout changes on the way.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from string import Formatter

import torch
from torch import Tensor

from titan_adapters.errors import StateDictError
from titan_adapters.state_dict.ops import Op

Ranges = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Binding:
    """A row with every placeholder filled in."""

    row: "Row"
    hf: tuple[str, ...]
    native: tuple[str, ...]


@dataclass(frozen=True, init=False, kw_only=True)
class Row(ABC):
    """Base of all rows. `ops` run left to right on the way in, right to left and inverted on the way out."""

    ops: tuple[Op, ...] = field(default=(), repr=False)

    @abstractmethod
    def bindings(self, ranges: Ranges) -> Iterator[Binding]: ...

    @property
    def rearranges(self) -> bool:
        """Whether native tensors are more than plain parts of the incoming ones: the conversion, or copying its
        result, is then work, which is done best on the device where the result is wanted."""
        return any(op.rearranges for op in self.ops)

    @abstractmethod
    def to_native(self, tensors: list[Tensor]) -> list[Tensor]: ...

    @abstractmethod
    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]: ...

    def _in(self, tensor: Tensor) -> Tensor:
        for op in self.ops:
            tensor = op.to_native(tensor)
        return tensor

    def _out(self, tensor: Tensor) -> Tensor:
        for op in reversed(self.ops):
            tensor = op.to_hf(tensor)
        return tensor


@dataclass(frozen=True, init=False, kw_only=True)
class Rename(Row):
    """One tensor to one tensor, through `ops`."""

    hf: str
    native: str

    def __init__(self, hf: str, native: str, *ops: Op):
        set_fields(self, hf=hf, native=native, ops=ops)

    def bindings(self, ranges: Ranges) -> Iterator[Binding]:
        for fill in fills([self.hf, self.native], ranges):
            yield Binding(self, (self.hf.format(**fill),), (self.native.format(**fill),))

    def to_native(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self._in(tensors[0])]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self._out(tensors[0])]


@dataclass(frozen=True, init=False, kw_only=True)
class Stack(Row):
    """Many equal-shaped tensors, one per value of placeholder `over`, to one with a new leading dim."""

    hf: str
    native: str
    over: str

    def __init__(self, hf: str, native: str, *ops: Op, over: str):
        set_fields(self, hf=hf, native=native, ops=ops, over=over)

    def bindings(self, ranges: Ranges) -> Iterator[Binding]:
        outer = {name: values for name, values in ranges.items() if name != self.over}
        for fill in fills([self.native], outer):
            sources = tuple(self.hf.format(**fill, **{self.over: index}) for index in _range(ranges, self.over))
            yield Binding(self, sources, (self.native.format(**fill),))

    def to_native(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.stack([self.part(t) for t in tensors])]

    def part(self, tensor: Tensor) -> Tensor:
        """What one incoming tensor becomes: an entry of the native one along its leading dim."""
        return self._in(tensor)

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self._out(t) for t in tensors[0].unbind(0)]


@dataclass(frozen=True, init=False, kw_only=True)
class Concat(Row):
    """Several checkpoint tensors to one native tensor, joined along `dim`. `ops` act on the joined tensor.

    Args:
        sizes: Length of each part along `dim`, in order; needed for the way back.
    """

    hf: tuple[str, ...]
    native: str
    sizes: tuple[int, ...]
    dim: int

    def __init__(self, hf: Sequence[str], native: str, *ops: Op, sizes: Sequence[int], dim: int = 0):
        set_fields(self, hf=tuple(hf), native=native, ops=ops, sizes=_sizes(hf, sizes), dim=dim)

    @property
    def rearranges(self) -> bool:
        return True

    def bindings(self, ranges: Ranges) -> Iterator[Binding]:
        for fill in fills([*self.hf, self.native], ranges):
            yield Binding(self, tuple(name.format(**fill) for name in self.hf), (self.native.format(**fill),))

    def to_native(self, tensors: list[Tensor]) -> list[Tensor]:
        _check_parts(self, tensors, self.sizes, self.dim)
        return [self._in(torch.cat(tensors, dim=self.dim))]

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(_split(self, self._out(tensors[0]), self.sizes, self.dim))


@dataclass(frozen=True, init=False, kw_only=True)
class Split(Row):
    """One checkpoint tensor to several native tensors, views cut along `dim`. `ops` act before the cut."""

    hf: str
    native: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int

    def __init__(self, hf: str, native: Sequence[str], *ops: Op, sizes: Sequence[int], dim: int = 0):
        set_fields(self, hf=hf, native=tuple(native), ops=ops, sizes=_sizes(native, sizes), dim=dim)

    def bindings(self, ranges: Ranges) -> Iterator[Binding]:
        for fill in fills([self.hf, *self.native], ranges):
            yield Binding(self, (self.hf.format(**fill),), tuple(name.format(**fill) for name in self.native))

    def to_native(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(_split(self, self._in(tensors[0]), self.sizes, self.dim))

    def to_hf(self, tensors: list[Tensor]) -> list[Tensor]:
        _check_parts(self, tensors, self.sizes, self.dim)
        return [self._out(torch.cat(tensors, dim=self.dim))]


@dataclass(frozen=True, init=False, kw_only=True)
class Tie(Row):
    """A name that holds the same tensor as another on both sides, such as a tied head.

    Incoming, it may be absent; if present it must equal the other bit for bit, or the load is refused. Outgoing, it
    is left out. The alias itself is made by the model (`BaseTransformer.tie_weights`), not by copying.
    """

    hf: str
    hf_of: str
    native: str
    native_of: str

    def __init__(self, hf: str, hf_of: str, native: str, native_of: str):
        set_fields(self, hf=hf, hf_of=hf_of, native=native, native_of=native_of)

    def bindings(self, ranges: Ranges) -> Iterator[Binding]:
        yield Binding(self, (self.hf,), (self.native,))

    def to_native(self, tensors: list[Tensor]) -> list[Tensor]:
        return []

    to_hf = to_native


@dataclass(frozen=True, init=False, kw_only=True)
class Drop(Row):
    """A checkpoint tensor that is known and not needed, such as a stored inverse frequency. Never written back.

    Args:
        only_with: Another tensor without which this one is not known: it tells a part that is not needed from one
            that looks the same and is.
    """

    hf: str
    only_with: str | None

    def __init__(self, hf: str, *, only_with: str | None = None):
        set_fields(self, hf=hf, only_with=only_with)

    def bindings(self, ranges: Ranges) -> Iterator[Binding]:
        for fill in fills([self.hf], ranges):
            needed = None if self.only_with is None else self.only_with.format(**fill)
            yield Binding(Drop(self.hf, only_with=needed), (self.hf.format(**fill),), ())

    def to_native(self, tensors: list[Tensor]) -> list[Tensor]:
        return []

    to_hf = to_native


def set_fields(row: Row, **fields) -> None:
    for name, value in fields.items():
        object.__setattr__(row, name, value)  # frozen dataclass with a positional *ops constructor


def fills(templates: Sequence[str], ranges: Ranges) -> Iterator[dict[str, int]]:
    """Every assignment of the placeholders that occur in `templates`."""
    names = sorted({field for t in templates for _, field, _, _ in Formatter().parse(t) if field})
    for values in product(*(_range(ranges, name) for name in names)):
        yield dict(zip(names, values, strict=True))


def _range(ranges: Ranges, name: str) -> Sequence[int]:
    if name not in ranges:
        raise StateDictError(
            f"A row uses the placeholder {{{name}}}, but no range is given for it.",
            fix=f"pass {name}=range(...) to StateDictAdapter.",
        )
    return ranges[name]


def _sizes(names: Sequence[str], sizes: Sequence[int]) -> tuple[int, ...]:
    if len(names) != len(sizes):
        raise StateDictError(
            f"{len(names)} parts but {len(sizes)} sizes: {list(names)}, {list(sizes)}.", fix="give one size per part."
        )
    return tuple(sizes)


def _check_parts(row: Row, tensors: list[Tensor], sizes: Sequence[int], dim: int) -> None:
    actual = [t.shape[dim] for t in tensors]
    if actual != list(sizes):
        raise StateDictError(
            f"{row}: the parts have lengths {actual} along dim {dim}.", fix=f"they must be {list(sizes)}."
        )


def _split(row: Row, tensor: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    if tensor.shape[dim] != sum(sizes):
        raise StateDictError(
            f"{row}: the tensor has shape {tuple(tensor.shape)}.", fix=f"dim {dim} must be {sum(sizes)}."
        )
    return tensor.split(list(sizes), dim=dim)
