"""Judging each stage of a served model alone, on the engine's own input.

A stage's reference is the plain module in fp64 on what the engine gave it. Its error is the 2-norm of the difference
over that of the reference, per last-dim row (of a token, or of one head of a token), so that a fault in one token is
not averaged away. What rounding explains is measured on the same rows, and is the largest of

- what the plain module makes of the same input in the served dtype: its rounding steps are the engine's, mostly;
- what errors of `FP32_ARITHMETIC` in the input do to it, for a kernel that sums in another order;
- half a rounding step of the dtype.

A row may have `FACTOR` times that, and all rows together, where luck evens out, `OVERALL_FACTOR` times. Measured on all
models on the CPU, in bf16 and fp32: no more than a half of what is allowed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from titan_adapters.contract import BaseTransformer
from titan_adapters.verify.records import Kind, StageRecords, layer_of
from titan_adapters.verify.replay import FP32_ARITHMETIC, Event, Replay

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
    shaken = Replay(model, captured, dtype, exact=True, shaken=True).run()
    merged: dict[tuple[str, Kind], StageVerdict] = {}
    for events in zip(exact, rounded, shaken, strict=True):
        verdict = _judged(*events)
        before = merged.pop((verdict.path, verdict.kind), verdict)
        merged[verdict.path, verdict.kind] = max(verdict, before, key=_badness)
    return list(merged.values())


def first_fault(verdicts: Sequence[StageVerdict]) -> StageVerdict | None:
    """The first wrong stage in execution order. A block comes after its stages."""
    return next((verdict for verdict in verdicts if verdict.verdict == "wrong"), None)


def _badness(verdict: StageVerdict) -> tuple[bool, bool, float]:
    return verdict.verdict == "wrong", verdict.verdict == "not proven", verdict.error / (verdict.allowed or 1.0)


def _judged(exact: Event, rounded: Event, shaken: Event) -> StageVerdict:
    verdict = StageVerdict(exact.path, layer_of(exact.path), exact.kind, 0.0, 0.0, -1, "equal", "")
    if exact.problem:
        return replace(verdict, verdict="wrong" if exact.wrong else "not proven", detail=exact.problem)
    pairs = zip(exact.pairs, rounded.pairs, shaken.pairs, strict=True)
    compared = [
        _compared(verdict, engine, reference, others, exact.positions) for (engine, reference), *others in pairs
    ]
    return max(compared, key=_badness, default=verdict)


def _compared(
    verdict: StageVerdict,
    engine: Tensor,
    exact: Tensor,
    others: Sequence[tuple[Tensor, Tensor]],
    positions: Tensor,
) -> StageVerdict:
    """`verdict` with the outcome for one tensor; `others` are (the engine's, the plain model's) with rounding."""
    if engine.shape != exact.shape:
        text = f"its shape is {tuple(engine.shape)}, the model's {tuple(exact.shape)}"
        return replace(verdict, verdict="wrong", error=math.inf, detail=text)
    if not len(engine):
        return replace(verdict, verdict="not proven", detail="of no token")
    dtype = others[0][0].dtype  # as captured
    step = torch.finfo(dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32).eps / 2
    num_tokens = len(engine)
    engine, exact, rounded, shaken = (
        x.double().reshape(-1, x.shape[-1] if x.dim() > 1 else 1) for x in (engine, exact, *(x for _, x in others))
    )
    sizes = exact.norm(dim=-1)
    sizes = sizes.clamp(min=max(step * float(sizes.max()), torch.finfo(torch.float64).tiny))
    errors = [(x - exact).norm(dim=-1) for x in (engine, rounded, shaken)]
    error, *noises = (x / sizes for x in errors)
    error = error.nan_to_num(nan=math.inf)
    least = max(FLOOR * step, FP32_ARITHMETIC)
    allowed = FACTOR * torch.stack(noises).amax(0).clamp(min=least)
    worst = int((error / allowed).argmax())
    at_worst = replace(
        verdict,
        error=float(error[worst]),
        allowed=float(allowed[worst]),
        worst_token=int(positions[worst * num_tokens // len(error)]),
    )
    if torch.equal(engine, rounded):
        return at_worst
    if at_worst.error > at_worst.allowed:
        text = f"{at_worst.error:.1e} relative to fp64, where rounding explains {at_worst.allowed:.1e}"
        return replace(at_worst, verdict="wrong", detail=text)
    overall, *explained = (float(x.norm() / sizes.norm()) for x in errors)
    allowed_overall = OVERALL_FACTOR * max(*explained, least)
    if overall > allowed_overall:
        text = f"{overall:.1e} relative to fp64 over all tokens, where rounding explains {allowed_overall:.1e}"
        return replace(at_worst, error=overall, allowed=allowed_overall, verdict="wrong", detail=text)
    return replace(at_worst, verdict="rounding")
