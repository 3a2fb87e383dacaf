"""The table that a model's rows expand to, and streaming conversion through it with exact accounting."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from titan_adapters.errors import StateDictError
from titan_adapters.state_dict.rows import Binding, Drop, Rename, Row, Stack, Tie

Direction = Literal["to_native", "to_hf"]


class StateDictAdapter:
    """Rows expanded over concrete ranges, checked when built.

    Args:
        rows: In any order.
        ranges: Values of each placeholder, such as `layer=range(32)`.

    Raises:
        StateDictError: two rows claim the same name, or a placeholder has no range.
    """

    def __init__(self, *rows: Row, **ranges: Sequence[int]):
        self.rows = rows
        self.bindings = [binding for row in rows for binding in row.bindings(ranges)]
        problems = []
        for side in ("hf", "native"):
            owner: dict[str, Binding] = {}
            for binding in self.bindings:
                for name in getattr(binding, side):
                    if name in owner:
                        problems.append(f"{side} name {name} is claimed by {owner[name].row} and by {binding.row}")
                    owner[name] = binding
        if problems:
            raise StateDictError("Rows overlap.", problems, fix="let each name occur in exactly one row.")

    def native_names(self) -> set[str]:
        """Names that a load must write: all but aliases."""
        return {name for b in self.bindings if not isinstance(b.row, Tie) for name in b.native}

    def required(self) -> set[str]:
        """Checkpoint names without which a load fails."""
        return {name for b in self.bindings if not isinstance(b.row, Tie | Drop) for name in b.hf}

    def session(self, direction: Direction = "to_native", *, in_parts: Collection[str] = ()) -> "Session":
        """A conversion that takes tensors one at a time, in any order and any number of calls.

        Args:
            in_parts: Native names of `Stack` rows whose entries are handed on as they come, by `part_name`, instead
                of being gathered and stacked. The accounts are the same: all of a row must come.
        """
        return Session(self.bindings, direction, in_parts)

    def stacked(self) -> dict[str, int]:
        """Native names that `Stack` rows make, and how many parts each has."""
        return {b.native[0]: len(b.hf) for b in self.bindings if isinstance(b.row, Stack)}

    def to_native(self, tensors: Mapping[str, Tensor], *, partial: bool = False) -> dict[str, Tensor]:
        """Checkpoint tensors to native ones. With `partial`, absent names are fine, half-filled rows are not."""
        return dict(self.session("to_native").convert(tensors.items(), partial=partial))

    def to_hf(self, tensors: Mapping[str, Tensor], *, partial: bool = False) -> dict[str, Tensor]:
        """Native tensors to checkpoint ones; the inverse of `to_native`."""
        return dict(self.session("to_hf").convert(tensors.items(), partial=partial))

    def ties(self) -> list[tuple[str, str]]:
        """Pairs of checkpoint names that must hold the same tensor, if both are there."""
        return [(b.row.hf, b.row.hf_of) for b in self.bindings if isinstance(b.row, Tie)]

    def check(self, available: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert meta tensors and compare with `expected` native shapes, before any data is read.

        Returns what a load will produce: native names and meta tensors.

        Args:
            available: Checkpoint names and meta tensors.
            expected: Native names and tensors (any device; only shapes are read). Aliases are left out.

        Raises:
            StateDictError: lists all missing, unexpected and misshapen names at once.
        """
        session = self.session("to_native")
        produced: dict[str, Tensor] = {}
        for name, tensor in available.items():
            try:
                produced.update(session.feed(name, tensor.to("meta")))
            except StateDictError as error:
                session.problems.append(f"{name}: {error.summary}")
            except (RuntimeError, IndexError) as error:  # torch's own refusal: parts of unequal shape, too few dims
                session.problems.append(f"{name} {tuple(tensor.shape)} can't be converted: {error}")
        problems = session.finish_problems(partial=False)
        native = self.native_names()
        problems += [f"no row writes {name}" for name in expected if name not in native]
        problems += [f"rows write {name}, which the model does not have" for name in produced if name not in expected]
        problems += [
            f"{name} has shape {tuple(produced[name].shape)}, the model needs {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in produced and produced[name].shape != tensor.shape
        ]
        if problems:
            raise StateDictError(
                "The checkpoint does not fit the model.",
                problems,
                fix="check that the config belongs to these weights; name knowingly unused tensors in a ta.Drop row.",
            )
        return produced


class Session:
    """One pass through a table. Remembers incomplete rows between calls, so chunking never loses a half."""

    def __init__(self, bindings: Sequence[Binding], direction: Direction, in_parts: Collection[str] = ()):
        self.direction = direction
        self.problems: list[str] = []
        self._bindings = bindings
        self._in_parts = in_parts
        self._of: dict[str, Binding] = {name: b for b in bindings for name in self._inputs(b)}
        self._pending: dict[int, dict[str, Tensor]] = {}
        self._seen: set[str] = set()
        # Of each tie the half that came first, by alias, held until the two can be compared.
        self._tied: dict[str, str] = {}
        for b in bindings:
            if isinstance(b.row, Tie):
                name, of = (b.row.hf, b.row.hf_of) if direction == "to_native" else (b.row.native, b.row.native_of)
                self._tied[name] = of
        self._held: dict[str, Tensor] = {}

    def _inputs(self, binding: Binding) -> tuple[str, ...]:
        return binding.hf if self.direction == "to_native" else binding.native

    def _outputs(self, binding: Binding) -> tuple[str, ...]:
        return binding.native if self.direction == "to_native" else binding.hf

    def contributes_to(self, name: str) -> tuple[str, ...]:
        """Outputs that tensor `name` becomes a part of, or is compared with."""
        binding = self._of.get(name)
        if binding is None:
            return ()
        if isinstance(binding.row, Tie):
            return (binding.row.native_of if self.direction == "to_native" else binding.row.hf_of,)
        return self._outputs(binding)

    def rearranges(self, name: str) -> bool:
        """Whether tensor `name` goes through a row that does more than hand on plain parts of it."""
        return name in self._of and self._of[name].row.rearranges

    @property
    def pending(self) -> bool:
        """Whether a row has received some of its inputs and waits for the others."""
        return bool(self._pending)

    def feed(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Take one tensor; return what it completes, as (name, tensor) pairs."""
        binding = self._of.get(name)
        if binding is None:
            self.problems.append(f"unexpected tensor {name} {tuple(tensor.shape)}")
            return []
        if name in self._seen:
            self.problems.append(f"{name} came twice")
            return []
        self._seen.add(name)
        self._compare_ties(name, tensor)
        if isinstance(binding.row, Tie | Drop):
            return []
        pending = self._pending.setdefault(id(binding), {})
        inputs, row = self._inputs(binding), binding.row
        streamed = None
        if isinstance(row, Stack) and binding.native[0] in self._in_parts:
            streamed = [(part_name(binding.native[0], inputs.index(name)), row.part(tensor))]
            tensor = tensor.to("meta")  # only counted from here on
        pending[name] = tensor
        if len(pending) < len(inputs):
            return streamed or []
        del self._pending[id(binding)]
        if streamed is not None:
            return streamed
        convert = getattr(row, self.direction)
        return list(zip(self._outputs(binding), convert([pending[n] for n in inputs]), strict=True))

    def _compare_ties(self, name: str, tensor: Tensor) -> None:
        for alias, of in self._tied.items():
            if name not in (alias, of):
                continue
            other = self._held.pop(alias, None)  # keyed by alias: an original with two aliases is compared with both
            if other is None:
                self._held[alias] = tensor
            elif tensor.shape != other.shape or not (tensor.is_meta or torch.equal(tensor, other.to(tensor.device))):
                self.problems.append(f"{alias} differs from {of}, but the config says that they are tied")

    def convert(self, tensors: Iterable[tuple[str, Tensor]], *, partial: bool) -> Iterator[tuple[str, Tensor]]:
        """Stream `tensors` through the table; raises StateDictError at the end if the accounts don't balance."""
        for name, tensor in tensors:
            yield from self.feed(name, tensor)
        self.finish(partial=partial)

    def finish_problems(self, *, partial: bool) -> list[str]:
        """Everything wrong so far. Without `partial`, every row must have been completed."""
        problems = list(self.problems)
        for binding in self._bindings:
            if isinstance(binding.row, Drop) and self._seen.issuperset(binding.hf):
                needed = binding.row.only_with
                if needed is not None and needed not in self._seen:
                    problems.append(f"unexpected tensor {binding.hf[0]}: it is not needed only where {needed} is there")
            if isinstance(binding.row, Tie | Drop):
                continue
            absent = [name for name in self._inputs(binding) if name not in self._seen]
            touched = len(absent) < len(self._inputs(binding))
            if absent and (touched or not partial):
                problems += [f"missing tensor {name}" for name in absent]
        if partial:
            lone = [(a, of) for a, of in self._tied.items() if a in self._seen and of not in self._seen]
            problems += [f"{alias} came without {of}, to which it is tied" for alias, of in lone]
        return problems

    def finish(self, *, partial: bool) -> None:
        problems = self.finish_problems(partial=partial)
        self._held.clear()
        if problems:
            raise StateDictError(
                f"The state dict does not balance ({self.direction}).",
                problems,
                fix="supply each tensor that the rows name exactly once; for a head that differs from its embedding "
                "set tied_embeddings=False.",
            )


def part_name(native: str, index: int) -> str:
    """How entry `index` of a stacked native tensor is called while it is on its own."""
    return f"{native}[{index}]"


def native_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of `model` by native name; of tied names, only the first."""
    state = dict(model.state_dict(keep_vars=True))
    seen: set[int] = set()
    unique = {}
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            unique[name] = tensor
    return unique


def native_adapter(model: nn.Module) -> StateDictAdapter:
    """The table of a checkpoint that already has native names: identity rows, and a tie for every alias."""
    state = dict(model.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    rows: list[Row] = []
    for name, tensor in state.items():
        of = first.setdefault(id(tensor), name)
        rows.append(Rename(name, name) if of == name else Tie(name, of, name, of))
    return StateDictAdapter(*rows)
