"""How much of a difference is rounding, and what is not: the bounds of every verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_adapters.verify.metrics import Comparison, Scored, compare

FACTOR = 2.0
"""Times the rounding of plain torch that an engine may show in the mean."""
FACTOR_WORST = 4.0
"""Times the largest rounding error that plain torch shows anywhere, for any one token."""
FLOOR = 2e-6
"""Nats, mean. Logprobs arrive in fp32, where those around 10 have steps of 1e-6."""
FP32_MEAN = 1e-4
"""Nats, mean, between two fp32 implementations of one function. SmolLM2-135M: 4e-6 between ours and vLLM's Llama."""

RULES = (
    f"Yardstick: plain torch in the served dtype against plain torch one precision wider (fp32 for bf16 and fp16, fp64 "
    f"for fp32), on the same tokens. A difference is rounding if its mean is at most {FACTOR:g} times the yardstick's "
    f"(the larger of the row's own tokens and all tokens) plus {FLOOR:g} nats, apart from one token that may differ by "
    f"the yardstick's largest, and no token's is more than {FACTOR_WORST:g} times that; otherwise it is another "
    "function. Best tokens may differ only where the reference's own are nearer than that bound for one token. All "
    "logprobs in nats; KL is a lower bound, from the best tokens of both, all others taken as one."
)


@dataclass(frozen=True)
class Noise:
    """What rounding alone does: plain torch in the served dtype against plain torch one precision wider."""

    mean: float
    max: float

    @classmethod
    def of(cls, served: Sequence[Scored], wider: Sequence[Scored]) -> "Noise":
        found = compare(served, wider, near_tie=float("inf"))
        return cls(found.mean, found.max)

    def allowed_mean(self, own: "Noise", num_tokens: int) -> float:
        """For a row of `num_tokens` whose own tokens show the rounding `own`.

        Where a mixture's router is near a tie, rounding chooses another expert, and a token is off by nats: in a few
        tokens out of hundreds, but not in the same ones for plain torch and the engine. A row may have one of these
        that the yardstick saw elsewhere.
        """
        return FACTOR * max(self.mean, own.mean) + FLOOR + self.max / max(num_tokens, 1)

    @property
    def allowed_max(self) -> float:
        """For one token; also how near a reference's best tokens must be for either to be chosen, since each may be
        that far off."""
        return FACTOR_WORST * self.max + 10 * FLOOR


def problems(found: Comparison, allowed_mean: float, allowed_max: float) -> list[str]:
    """Why `found` is more than rounding; empty if it is not."""
    result = []
    if not found.mean <= allowed_mean:  # NaN is never rounding
        result.append(f"logprobs differ by {found.mean:.3g} in the mean, rounding would be at most {allowed_mean:.3g}")
    if not found.max <= allowed_max:
        where = "" if found.worst is None else " (prompt {}, token {})".format(*found.worst)
        result.append(f"one token's differs by {found.max:.3g}{where}, rounding would be at most {allowed_max:.3g}")
    if found.mismatches:
        shown = "; ".join(found.mismatches[:3])
        result.append(f"the best token is another in {len(found.mismatches)} places: {shown}")
    if not found.tokens:
        result.append("nothing was compared")
    return result
