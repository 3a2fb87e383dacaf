"""The library's error tree. Every error lists its problems and ends with what to do about them."""

from collections.abc import Sequence

MAX_LISTED = 10


class TitanError(Exception):
    """Base of all errors raised on purpose by this library.

    Args:
        summary: One line that says what was attempted.
        problems: What is wrong, one entry each. The first ten are printed, all are kept in `.problems`.
        fix: What the reader can do about it.
    """

    def __init__(self, summary: str, problems: Sequence[str] = (), *, fix: str):
        self.summary = summary
        self.problems = list(problems)
        self.fix = fix
        super().__init__(self._render())

    def _render(self) -> str:
        lines = [self.summary]
        lines += [f"  - {problem}" for problem in self.problems[:MAX_LISTED]]
        if len(self.problems) > MAX_LISTED:
            lines.append(f"  - ... and {len(self.problems) - MAX_LISTED} more")
        lines.append(f"Fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self):  # engine processes pickle exceptions; `fix` is keyword-only
        return _rebuild, (type(self), self.summary, self.problems, self.fix)


def _rebuild(cls: type[TitanError], summary: str, problems: list[str], fix: str) -> TitanError:
    return cls(summary, problems, fix=fix)


class ContractError(TitanError):
    """A model class does not meet the `BaseTransformer` contract."""


class RegistryError(TitanError):
    """A model name or import path can't be resolved, or clashes with another."""


class ConfigError(TitanError):
    """A config is missing a fact, contradicts itself, or says something this library can't honour."""


class StateDictError(TitanError):
    """A state dict and the rows that describe it disagree."""


class CheckpointError(TitanError):
    """A checkpoint folder is damaged, incomplete, or not what it says it is."""


class PlanError(TitanError):
    """A parallel plan does not cover its model exactly."""


class EngineError(TitanError):
    """The inference engine can't run this model as asked."""


class ScaffoldError(TitanError):
    """Files to start a model from can't be written."""
