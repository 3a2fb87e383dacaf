"""Field-by-field comparison of two nested dicts, such as two configs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ABSENT = "(absent)"
"""Stands for the value of a field that only the other side has."""


@dataclass(frozen=True)
class Difference:
    """One field that is not the same on both sides."""

    field: str
    """Dotted path, such as `rope.scaling.factor`, or `windows.3` for the fourth layer's."""
    ours: Any
    theirs: Any


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """In the order of `ours`, then of `theirs`. Lists of one length are compared number by number."""
    return list(_differences("", ours, theirs))


def _differences(path: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        ours, theirs = dict(enumerate(ours)), dict(enumerate(theirs))
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in {**ours, **theirs}:
            below = f"{path}.{key}" if path else str(key)
            yield from _differences(below, ours.get(key, ABSENT), theirs.get(key, ABSENT))
    elif ours != theirs:
        yield Difference(path, ours, theirs)
