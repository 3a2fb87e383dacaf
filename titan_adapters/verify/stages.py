"""Judging each stage of a served model alone, on the engine's own input."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from titan_adapters.contract import BaseTransformer
from titan_adapters.verify.records import Kind, StageRecords, layer_of
from titan_adapters.verify.replay import Event, Replay

Outcome = Literal["equal", "rounding", "wrong", "not proven"]

FACTOR = 4.0
OVERALL_FACTOR = 2.0
FLOOR = 0.5


@dataclass(frozen=True)
class StageVerdict:
    """Whether one stage of an engine computes the model's function."""

    path: str
    """Module path, such as "layers.3.attention.inner_attention"."""
    layer: int | None
    kind: Kind
    error: float
    """Relative error of the worst token, against fp64."""
    allowed: float
    """What rounding in the served dtype explains there."""
    worst_token: int
    """Its position; -1 if there is none."""
    verdict: Outcome
    """"equal": bit for bit what the plain model computes in the served dtype."""
    detail: str


def check_stages(model: BaseTransformer, captured: StageRecords, dtype: torch.dtype) -> list[StageVerdict]:
    """A verdict for each stage, in execution order.

    Args:
        model: The plain model, in any dtype.
        captured: From `titan_adapters.vllm.record_stages`.
        dtype: The dtype that is served.
    """
    exact = Replay(model, captured, dtype, exact=True).run()
    rounded = Replay(model, captured, dtype, exact=False).run()
    merged: dict[tuple[str, Kind], StageVerdict] = {}
    for events in zip(exact, rounded, strict=True):
        verdict = _judged(*events)
        before = merged.pop((verdict.path, verdict.kind), verdict)
        merged[verdict.path, verdict.kind] = max(verdict, before, key=_badness)
    return list(merged.values())


def first_fault(verdicts: Sequence[StageVerdict]) -> StageVerdict | None:
    """The first wrong stage in execution order. A block comes after its stages."""
    return next((verdict for verdict in verdicts if verdict.verdict == "wrong"), None)


def _badness(verdict: StageVerdict) -> tuple[bool, bool, float]:
    return verdict.verdict == "wrong", verdict.verdict == "not proven", verdict.error / (verdict.allowed or 1.0)


def _judged(exact: Event, rounded: Event) -> StageVerdict:
    where = (exact.path, layer_of(exact.path), exact.kind)
    if exact.problem:
        return StageVerdict(*where, 0.0, 0.0, -1, "wrong" if exact.wrong else "not proven", exact.problem)
    compared = [
        _compared(where, engine, reference, ours, native.dtype, exact.positions)
        for (engine, reference), (native, ours) in zip(exact.pairs, rounded.pairs, strict=True)
    ]
    if not compared:
        return StageVerdict(*where, 0.0, 0.0, -1, "equal", "")
    return max(compared, key=_badness)


def _compared(where, engine: Tensor, exact: Tensor, ours: Tensor, dtype: torch.dtype, positions: Tensor):
    if engine.shape != exact.shape:
        text = f"its shape is {tuple(engine.shape)}, the model's {tuple(exact.shape)}"
        return StageVerdict(*where, float("inf"), 0.0, -1, "wrong", text)
    if not len(engine):
        return StageVerdict(*where, 0.0, 0.0, -1, "not proven", "no token was recorded")
    num_tokens = len(engine)
    engine, exact, ours = (x.double().reshape(-1, x.shape[-1] if x.dim() > 1 else 1) for x in (engine, exact, ours))
    step = torch.finfo(dtype if dtype.is_floating_point and dtype != torch.float64 else torch.float32).eps / 2
    sizes = exact.norm(dim=-1)
    sizes = sizes.clamp(min=max(step * float(sizes.max()), 1e-300))
    error, noise = ((x - exact).norm(dim=-1) / sizes for x in (engine, ours))
    error = error.nan_to_num(nan=float("inf"))
    allowed = FACTOR * noise.clamp(min=FLOOR * step)
    worst = int((error / allowed).argmax())
    token = int(positions[worst * num_tokens // len(error)])
    row = StageVerdict(*where, float(error[worst]), float(allowed[worst]), token, "rounding", "")
    if torch.equal(engine, ours):
        return replace(row, verdict="equal")
    if row.error > row.allowed:
        return replace(row, verdict="wrong", detail=f"{row.error:.1e}, where rounding explains {row.allowed:.1e}")
    overall, explained = (float((x - exact).norm() / sizes.norm()) for x in (engine, ours))
    explained = OVERALL_FACTOR * max(explained, FLOOR * step)
    if overall > explained:
        text = f"{overall:.1e} over all tokens, where rounding explains {explained:.1e}"
        return replace(row, error=overall, allowed=explained, verdict="wrong", detail=text)
    return row
