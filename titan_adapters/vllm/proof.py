"""Asking a running engine for its weights: fingerprints, and what can be said of every element."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from titan_adapters.contract import BaseTransformer
from titan_adapters.fingerprints import UNKNOWN, Sums, fingerprint_differences, places_sum, render
from titan_adapters.fingerprints import fingerprint as fingerprint_of

if TYPE_CHECKING:
    import vllm

    from titan_adapters.vllm.readings import RankReport, Reading

Verdict = Literal["proven", "failed", "not proven"]


@dataclass(frozen=True)
class ProofRow:
    """One claim about all weights of a running engine."""

    claim: str
    verdict: Verdict
    detail: str
    """What was looked at."""
    problems: list[str] = field(default_factory=list)
    """Where the claim does not hold, or else where it can't be told, one line each."""


def fingerprint(llm: "vllm.LLM") -> dict[str, str]:
    """What `titan_adapters.fingerprint` gives of a model, of the weights in a running engine, by native name.

    Each rank hashes its share of every native tensor where it is. Which elements those are is found by sending indices,
    in place of weights, through the loaders that write weights: nothing is assumed about sharding, packing, replicated
    heads or padding. A share is known by the number of its elements and a sum over their indices. Places with the same
    share are replicas and must hold the same; shares that differ must add up to each index once.

    So this says that every weight is in the engine, bit for bit, where its loader puts it. Whether that is where the
    layer wants it (gate and up projection exchanged, say, in every load) is up to a comparison of logits.

    An entry that starts with "unknown: " says why there is no fingerprint: this platform keeps the parameter in a form
    that can't be read back, replicas differ, or elements are missing or double. It is equal to nothing: compare by
    `ta.fingerprint_differences(ta.vllm.fingerprint(llm), ta.fingerprint(model, dtype=...))`, with the served dtype.
    """
    return {name: entry.text for name, entry in _entries(_ask(llm)).items()}


def weight_proof(
    llm: "vllm.LLM", against: BaseTransformer | str | Path | Mapping[str, str] | None = None
) -> list[ProofRow]:
    """What can be said about the weights that a running engine holds now, as `fingerprint` reads them.

    - readable: every parameter can be read back here. For those that can't, no other row is proven.
    - covered: of every native tensor, the ranks have each element, and count it once.
    - copies agree: what is on several ranks, or in several forms on one, is the same.
    - no NaN: with that, `load_format="titan_skip"` and `additional_config={"titan_poison": True}` fill parameters
      before weights come. In a layer that was asked for repacked weights, one shows as a whole row.
    - padding is zero: what loaders fill up is. Elements that they leave as they were (a kernel that ignores them may
      want a longer row) are counted only.
    - ties share memory: a tied head and its embedding do, on each rank that has both, and in the model `against`.
    - equal: the fingerprints are those of `against`.

    Args:
        against: A model, a checkpoint folder (whose rows the engine used too: what is wrong in them is wrong in both),
            or fingerprints.
    """
    reports = _ask(llm)
    entries = _entries(reports)
    unreadable = {name: entry.text for name, entry in entries.items() if entry.breaks == "readable"}

    def row(claim: str, failures: list[str], detail: str) -> ProofRow:
        unknown = [f"{name}: {why}" for name, why in unreadable.items()]
        verdict: Verdict = "failed" if failures else "not proven" if unknown else "proven"
        return ProofRow(claim, verdict, detail, failures or unknown)

    def broken(claim: str) -> list[str]:
        return [f"{name}: {entry.text}" for name, entry in entries.items() if entry.breaks == claim]

    readings = [reading for report in reports for reading in report["readings"]]
    padding = [entry for report in reports for entry in report["padding"]]
    misfilled = [f"{p['place']}: {p['nonzero']} of {p['zeros']} are not zero" for p in padding if p["nonzero"]]
    zeros, unused = (sum(p[key] for p in padding) for key in ("zeros", "unused"))
    ties = [tie for report in reports for tie in report["ties"]]
    if isinstance(against, BaseTransformer) and against.config.tied_embeddings:
        same = against.lm_head.weight is against.tok_embeddings.weight
        ties.append(["tok_embeddings.weight", "lm_head.weight of the model", same])
    apart = [f"{name} and {alias} are two tensors" for name, alias, same in ties if not same]
    rows = [
        row("readable", [], f"{len(entries)} parameters"),
        row("covered", broken("covered"), f"{len(readings)} shares on {len(reports)} ranks"),
        row("copies agree", broken("copies agree"), f"{_num_copies(readings)} copies beside the first"),
        row("no NaN", _nan_lines(reports), f"{sum(reading['sums'][0] for reading in readings):,} elements"),
        row("padding is zero", misfilled, f"{zeros:,} elements; {unused:,} more that no loader writes"),
        row("ties share memory", apart, f"{len(ties)} pairs"),
    ]
    if against is not None:
        if not isinstance(against, Mapping):
            served = llm.llm_engine.model_config.dtype
            assert isinstance(served, torch.dtype), "vLLM has resolved it"
            against = fingerprint_of(against, dtype=served)
        ours = {name: entry.text for name, entry in entries.items() if name not in unreadable}
        theirs = {name: text for name, text in against.items() if name not in unreadable}
        rows.append(row("equal", fingerprint_differences(ours, theirs), f"{len(ours)} fingerprints"))
    return rows


class _Entry(NamedTuple):
    text: str
    breaks: str | None = None
    """The claim that does not hold, if there is no fingerprint."""


def _ask(llm: "vllm.LLM") -> "list[RankReport]":
    return [report for reports in llm.collective_rpc("titan_read_weights") for report in reports]


def _entries(reports: "list[RankReport]") -> dict[str, _Entry]:
    unreadable = {name: why for report in reports for name, why in report["unreadable"]}
    readings: dict[str, list[Reading]] = {}
    for report in reports:
        for reading in report["readings"]:
            readings.setdefault(reading["native"], []).append(reading)
    return {
        name: _Entry(f"{UNKNOWN}not readable here: {unreadable[name]}", "readable")
        if name in unreadable
        else _put_together(shape, readings.get(name, []))
        for name, (shape, _) in sorted(reports[0]["natives"].items())
    }


def _put_together(shape: list[int], readings: "list[Reading]") -> _Entry:
    shares: dict[tuple[int, int], Reading] = {}
    for reading in readings:
        numel, places, *_ = reading["sums"]
        first = shares.setdefault((numel, places), reading)
        if (reading["dtype"], reading["sums"]) != (first["dtype"], first["sums"]):
            return _Entry(f"{UNKNOWN}{reading['place']} holds something else than {first['place']}", "copies agree")
    whole, numel = sum((Sums(*share["sums"]) for share in shares.values()), Sums()), torch.Size(shape).numel()
    if (whole.numel, whole.places) != (numel, places_sum(numel)):
        found = ", ".join(f"{share['sums'][0]} in {share['place']}" for share in shares.values())
        return _Entry(f"{UNKNOWN}not each of {numel} elements is there once: {found or 'none is'}", "covered")
    dtypes = sorted({share["dtype"] for share in shares.values()})
    return _Entry(render(" and ".join(dtypes), shape, whole))


def _num_copies(readings: "list[Reading]") -> int:
    return len(readings) - len({(r["native"], *r["sums"][:2]) for r in readings})


def _nan_lines(reports: "list[RankReport]") -> list[str]:
    from titan_adapters.vllm.readings import nan_line

    return [
        nan_line(reading, report["natives"][reading["native"]][0])
        for report in reports
        for reading in report["readings"]
        if reading["nans"]
    ]
