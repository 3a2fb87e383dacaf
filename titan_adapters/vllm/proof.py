"""Asking a running engine for its weights: fingerprints, and what can be said of every element."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from titan_adapters.contract import BaseTransformer
from titan_adapters.fingerprints import UNKNOWN, Sums, fingerprint_differences, index_sum, render
from titan_adapters.fingerprints import fingerprint as fingerprint_of

if TYPE_CHECKING:
    import vllm


def fingerprint(llm: "vllm.LLM") -> dict[str, str]:
    """What `titan_adapters.fingerprint` gives of a model, of the weights in a running engine, by native name.

    Each rank hashes its share of every native tensor where it is. Which elements these are is found by sending indices
    through the loaders that write weights, so nothing about layouts (sharding over ranks, packing, replicated heads,
    padding) is assumed twice. A share is the number of its elements and a sum over their indices. Places with the same
    share are replicas, and must hold the same; shares that differ must add up to every index once. Compare with
    `ta.fingerprint(model, dtype=...)` of the served dtype by `ta.fingerprint_differences`.

    An entry that starts with "unknown: " says why there is no fingerprint: this platform keeps the parameter in a form
    that can't be read back, replicas differ, or elements are missing or double. It is never equal to anything.

    Raises:
        StateDictError: never for what is in the engine, which is reported by entry.
    """
    return _fingerprints(_ask(llm))


Verdict = Literal["proven", "failed", "not proven"]


@dataclass(frozen=True)
class ProofRow:
    """One claim about all weights of a running engine."""

    claim: str
    verdict: Verdict
    detail: str
    """What was compared."""
    problems: list[str] = field(default_factory=list)
    """Where it does not hold, or can't be told, one line each."""


def weight_proof(
    llm: "vllm.LLM", against: BaseTransformer | str | Path | Mapping[str, str] | None = None
) -> list[ProofRow]:
    """What can be said about the weights in a running engine, from what it holds now.

    - readable: every parameter can be read back here. What can't is "not proven" in the other rows too.
    - covered: every native element is there, and each share of the ranks counts it once.
    - replicas agree: what is on several ranks, or in several forms on one, is the same.
    - no poison: no NaN is left, with which parameters are filled before a load. Where a layer was asked for repacked
      weights, one NaN shows as a whole row of them.
    - padding is zero: so are elements that loaders fill up with zeros, and no element is left unwritten.
    - ties share memory: a tied head and its embedding, on each rank that has both.
    - equal: fingerprints are those of `against`. Its rows are used on both sides: an error inside of them shows only
      in a comparison of logits with another implementation.

    Args:
        against: A model, a checkpoint folder, or fingerprints.
    """
    reports = _ask(llm)
    entries = _fingerprints(reports)
    unreadable = [f"{name}: {why}" for report in reports for name, why in report["unreadable"]]
    rows = [
        _row("readable", [], f"{len(entries)} parameters", unreadable),
        _row("covered", _with(entries, "covers"), f"every element of {len(entries)} parameters", unreadable),
        _row("replicas agree", _with(entries, "holds"), f"{_num_replicas(reports)} further copies", unreadable),
        _row("no poison", _nans(reports), "every element is a number", unreadable),
        _row("padding is zero", *_padding(reports), unreadable),
        _ties(reports),
    ]
    if against is not None:
        if not isinstance(against, Mapping):
            against = fingerprint_of(against, dtype=served_dtype(llm))
        known = {name: entry for name, entry in entries.items() if name not in _names(reports)}
        theirs = {name: entry for name, entry in against.items() if name not in _names(reports)}
        rows.append(_row("equal", fingerprint_differences(known, theirs), f"{len(known)} fingerprints", unreadable))
    return rows


def served_dtype(llm: "vllm.LLM") -> torch.dtype:
    """What the engine computes in."""
    dtype = llm.llm_engine.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def _row(claim: str, failures: list[str], detail: str, unreadable: list[str]) -> ProofRow:
    verdict: Verdict = "failed" if failures else "not proven" if unreadable else "proven"
    return ProofRow(claim, verdict, detail, failures or unreadable)


def _ask(llm: "vllm.LLM") -> list[dict[str, Any]]:
    """The reports of all ranks."""
    return [report for reports in llm.collective_rpc("titan_read_weights") for report in reports]


def _fingerprints(reports: list[dict[str, Any]]) -> dict[str, str]:
    unreadable = {name: why for report in reports for name, why in report["unreadable"]}
    entries = {}
    for name, (shape, dtype) in sorted(reports[0]["natives"].items()):
        if name in unreadable:
            entries[name] = f"{UNKNOWN}not readable here: {unreadable[name]}"
        else:
            entries[name] = _put_together(shape, dtype, [r[1:] for x in reports for r in x["readings"] if r[0] == name])
    return entries


def _put_together(shape: list[int], dtype: str, readings: list[tuple[str, str, list[int], Any]]) -> str:
    shares: dict[tuple[int, int], tuple[str, str, Sums]] = {}
    for place, held, numbers, _ in readings:
        sums = Sums(*numbers)
        first, first_held, known = shares.setdefault((sums.count, sums.index), (place, held, sums))
        if (held, sums) != (first_held, known):
            return f"{UNKNOWN}{place} holds something else than {first}"
    total = sum((sums for _, _, sums in shares.values()), Sums())
    numel = torch.Size(shape).numel()
    if (total.count, total.index) != (numel, index_sum(numel)):
        places = ", ".join(f"{sums.count} in {place}" for place, _, sums in shares.values())
        return f"{UNKNOWN}what is there covers {numel} elements not exactly once: {places or 'nothing is'}"
    held = {held for _, held, _ in shares.values()}
    return render(held.pop() if len(held) == 1 else dtype, shape, total)


def _names(reports: list[dict[str, Any]]) -> set[str]:
    return {name for report in reports for name, _ in report["unreadable"]}


def _with(entries: dict[str, str], word: str) -> list[str]:
    return [f"{n}: {e.removeprefix(UNKNOWN)}" for n, e in entries.items() if e.startswith(UNKNOWN) and f" {word} " in e]


def _num_replicas(reports: list[dict[str, Any]]) -> int:
    shares = [(r[0], *r[3][:2]) for report in reports for r in report["readings"]]
    return len(shares) - len(set(shares))


def _nans(reports: list[dict[str, Any]]) -> list[str]:
    lines = []
    for report in reports:
        shapes = report["natives"]
        for native, place, _, _, nans in report["readings"]:
            if nans:
                count, low, high = nans
                shape = shapes[native][0]
                ends = " to ".join(
                    str([int(i) for i in torch.unravel_index(torch.tensor(e), shape)]) for e in (low, high)
                )
                lines.append(f"{native}: {count} elements from {ends}, in {place}")
    return lines


def _padding(reports: list[dict[str, Any]]) -> tuple[list[str], str]:
    found = [entry for report in reports for entry in report["padding"]]
    lines = [f"{place}: {bad} of {zeros} are not zero" for place, zeros, bad, _ in found if bad]
    lines += [f"{place}: {unused} elements are never written" for place, _, _, unused in found if unused]
    return lines, f"{sum(zeros for _, zeros, _, _ in found)} elements that no weight goes to"


def _ties(reports: list[dict[str, Any]]) -> ProofRow:
    ties = [tie for report in reports for tie in report["ties"]]
    apart = [f"{name} and {alias} are two tensors" for name, alias, shared in ties if not shared]
    return _row("ties share memory", apart, f"{len(ties)} pairs", [])
