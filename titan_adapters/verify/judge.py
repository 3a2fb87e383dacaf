"""From what engines said to rows with verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titan_adapters.verify.metrics import Comparison, Scored, compare
from titan_adapters.verify.report import Row
from titan_adapters.verify.rules import FP32_MEAN, Noise, problems

Scores = Mapping[tuple[int, ...], Scored]
"""By the sequence's tokens."""


@dataclass
class Run:
    """What one engine said in one scenario."""

    outputs: list[Scored] = field(default_factory=list)
    counterpart: list[Scored] = field(default_factory=list)
    """What another run said of the same sequences, one for each; or nothing."""
    how: str = ""
    """What was run, and how it is certain that it was."""
    missing: str = ""
    """Why the scenario did not take place."""
    failure: str = ""
    """What the engine broke with."""


class Judge:
    """Verdicts by the rules.

    Args:
        served: Plain torch in the served dtype.
        wider: Plain torch one precision wider, of the same sequences.
    """

    def __init__(self, served: Scores, wider: Scores):
        self._served, self._wider = served, wider
        self.noise = Noise.of([served[tokens] for tokens in wider], list(wider.values()))

    def row(self, name: str, engine: str, run: Run) -> Row:
        """Of a scenario, compared with plain torch and with its counterpart."""
        if row := _not_run(name, engine, run):
            return row
        found = self.against_torch(run.outputs)
        allowed = self._allowed(run.outputs)
        wrong = problems(found, allowed, self.noise.allowed_max)
        figures = _figures(found, allowed)
        if run.counterpart:
            other = compare(run.outputs, run.counterpart, self.noise.allowed_max)
            wrong += [f"between the two runs: {p}" for p in problems(other, allowed, self.noise.allowed_max)]
            figures |= {"mean between the runs": other.mean, "max between the runs": other.max}
        return _row(name, engine, run.how, found, allowed, wrong, figures)

    def against(self, name: str, run: Run, reference: Sequence[Scored]) -> Row:
        """The served engine's prompts, compared with another implementation."""
        if row := _not_run(name, "served", run):
            return row
        found = compare(run.outputs, reference, self.noise.allowed_max)
        allowed = self._allowed(run.outputs)
        wrong = problems(found, allowed, self.noise.allowed_max)
        return _row(name, "served", run.how, found, allowed, wrong, _figures(found, allowed))

    def exactly(self, name: str, reference: Sequence[Scored]) -> Row:
        """Plain torch one precision wider, compared with another implementation in fp32: bounds that hide little."""
        ours = [self._wider[scored.tokens] for scored in reference]
        found = compare(ours, reference, near_tie=100 * FP32_MEAN)
        wrong = problems(found, FP32_MEAN, 100 * FP32_MEAN)
        how = f"{len(reference)} sequences through plain torch and {name}, both in fp32 or wider, of the same weights"
        return _row(f"plain torch against {name}", "", how, found, FP32_MEAN, wrong, _figures(found, FP32_MEAN))

    def against_torch(self, outputs: Sequence[Scored]) -> Comparison:
        return compare(outputs, [self._wider[scored.tokens] for scored in outputs], self.noise.allowed_max)

    def differences(self, outputs: Sequence[Scored]) -> list[float]:
        """Of plain torch in the served dtype, on the tokens of `outputs`."""
        points = self._rounding(outputs).points
        return [ours - reference for reference, ours in points]

    def _rounding(self, outputs: Sequence[Scored]) -> Comparison:
        served = [self._served[scored.tokens] for scored in outputs]
        wider = [self._wider[o.tokens].between(o.start, len(o.tokens)) for o in outputs]
        return compare(served, wider, near_tie=float("inf"))

    def _allowed(self, outputs: Sequence[Scored]) -> float:
        found = self._rounding(outputs)
        return self.noise.allowed_mean(Noise(found.mean, found.max), found.tokens)


def _not_run(name: str, engine: str, run: Run) -> Row | None:
    if run.failure:
        return Row(name=name, verdict="failed", why=f"the engine broke with {run.failure}", engine=engine)
    return Row(name=name, verdict="not proven", why=run.missing, engine=engine) if run.missing else None


def _row(name: str, engine: str, how: str, found: Comparison, allowed: float, wrong: list[str], figures: dict) -> Row:
    if wrong:
        why = "; ".join(wrong)
    else:
        why = (
            f"{how}: {found.tokens} tokens differ by {found.mean:.2g} nats in the mean (rounding: up to {allowed:.2g})"
        )
        if found.near_ties:
            why += f", {found.near_ties} best tokens at near ties"
    return Row(name=name, verdict="failed" if wrong else "proven", why=why, engine=engine, figures=figures)


def _figures(found: Comparison, allowed: float) -> dict[str, float | int | str]:
    return {
        "tokens": found.tokens,
        "mean": found.mean,
        "mean allowed": allowed,
        "max": found.max,
        "KL mean": found.kl_mean,
        "KL max": found.kl_max,
        "best tokens compared": found.positions,
        "best tokens equal": found.positions - found.near_ties - len(found.mismatches),
        "near ties": found.near_ties,
        "largest gap": found.largest_gap,
    }
