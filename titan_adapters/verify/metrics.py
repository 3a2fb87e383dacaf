"""Comparing what two implementations say about the same tokens.

Shapes: T tokens of a sequence  P scored ones of them  K best tokens of the vocabulary  V the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan

import torch
from torch import Tensor

BEST = 20
"""Tokens per position whose logprobs are compared; vLLM's own default limit for a request."""
NEAR_TIE = 0.05
"""Nats between a reference's two best tokens below which rounding in bf16 may choose either, where nothing better is
known: `rules.Noise` measures it."""


@dataclass(frozen=True)
class Scored:
    """What one implementation says about the tokens of one sequence, each given those before it."""

    tokens: tuple[int, ...]
    start: int
    """Position of the first token that is scored; at least 1, since nothing precedes the first."""
    logprobs: Tensor
    """fp32 [P], of the sequence's own tokens from `start` on."""
    best: Tensor
    """int64 [P, K], best first."""
    best_logprobs: Tensor
    """fp32 [P, K]."""

    def between(self, start: int, end: int) -> "Scored":
        """Only positions `start` to `end` (exclusive)."""
        rows = slice(start - self.start, end - self.start)
        return Scored(self.tokens[:end], start, self.logprobs[rows], self.best[rows], self.best_logprobs[rows])


def score_logits(tokens: Sequence[int], logits: Tensor, best: int = BEST) -> Scored:
    """Of logits [T, V] that a forward pass over `tokens` gave."""
    logprobs = logits[:-1].float().log_softmax(-1)
    top = logprobs.topk(min(best, logprobs.shape[-1]))
    own = logprobs.gather(1, torch.tensor(tokens[1:], device=logits.device).unsqueeze(1)).squeeze(1)
    return Scored(tuple(tokens), 1, own.cpu(), top.indices.cpu(), top.values.cpu())


@dataclass
class Comparison:
    """How far two implementations agree; differences in nats."""

    sequences: int = 0
    tokens: int = 0
    """Tokens whose logprobs were compared, in the same context."""
    mean: float = 0.0
    """Mean absolute difference of the logprobs of the sequences' own tokens. NaN if any is."""
    max: float = 0.0
    relative: float = 0.0
    """2-norm of the differences over that of the reference, of all tokens together."""
    worst: tuple[int, int] | None = None
    """Sequence and position of the largest difference."""
    kl_mean: float = 0.0
    """Mean over positions of KL(reference || ours): a lower bound, from the tokens that are among the best of both, and
    all others as one."""
    kl_max: float = 0.0
    positions: int = 0
    """Positions at which the best tokens were compared: one more than `tokens` where two continuations part."""
    near_ties: int = 0
    """Positions where the best tokens differ, but are nearly equal in the reference; not an error."""
    mismatches: list[str] = field(default_factory=list)
    """Positions where the best tokens differ otherwise."""
    largest_gap: float = 0.0
    """Nats between the reference's best token and ours, at most, where they differ; near ties included."""
    points: list[tuple[float, float]] = field(default_factory=list)
    """(reference's, ours) logprob of every compared token, for plots."""

    def __str__(self) -> str:
        return (
            f"{self.sequences} prompts, {self.positions} tokens compared, {len(self.mismatches)} differ, "
            f"{self.near_ties} part at near ties; logprobs differ by {self.mean:.4f} in the mean, {self.max:.4f} at "
            "most"
        )


def compare(ours: Sequence[Scored], reference: Sequence[Scored], near_tie: float = NEAR_TIE) -> Comparison:
    """Compare sequence by sequence, wherever both have scored a token in the same context.

    Where two continuations part, only their choices are compared, and nothing after that.

    Args:
        near_tie: Nats by which the reference may prefer its own best token to ours.
    """
    result = Comparison(sequences=len(reference))
    divergences: list[Tensor] = []
    for index, (a, b) in enumerate(zip(ours, reference, strict=True)):
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), None)
        common = min(len(a.tokens), len(b.tokens)) if same is None else same
        start = max(a.start, b.start)
        if common > start:
            _compare_logprobs(index, start, a.between(start, common), b.between(start, common), result, divergences)
        end = common if same is None else common + 1
        if end > start:
            _compare_choices(index, start, a.between(start, end), b.between(start, end), near_tie, result)
        if same is None and len(a.tokens) != len(b.tokens):
            result.mismatches.append(f"prompt {index}: {len(a.tokens)} against {len(b.tokens)} tokens")
    if result.points:
        points = torch.tensor(result.points, dtype=torch.float64)
        differences = points.diff(dim=1).abs()
        result.mean, result.max = float(differences.mean()), float(differences.max())
        result.relative = float(differences.norm() / points[:, 0].norm())
    if divergences:
        kl = torch.cat(divergences)
        result.kl_mean, result.kl_max = float(kl.mean()), float(kl.max())
    return result


def _compare_logprobs(
    index: int, start: int, ours: Scored, reference: Scored, result: Comparison, divergences: list[Tensor]
) -> None:
    difference = (ours.logprobs - reference.logprobs).abs()
    here = int(difference.argmax())  # of a NaN, if there is one
    if result.worst is None or (not isnan(result.max) and not float(difference[here]) <= result.max):
        result.worst, result.max = (index, start + here), float(difference[here])
    result.tokens += len(difference)
    result.points += zip(reference.logprobs.tolist(), ours.logprobs.tolist(), strict=True)
    if ours.best.shape[1] and reference.best.shape[1]:
        divergences.append(_divergence(ours, reference))


def _divergence(ours: Scored, reference: Scored) -> Tensor:
    """KL(reference || ours) [P], from below: taking tokens together as one never makes it larger."""
    both_PKL = ours.best.unsqueeze(2) == reference.best.unsqueeze(1)
    q, p = ours.best_logprobs.double(), reference.best_logprobs.double()
    terms = p.exp().unsqueeze(1) * (p.unsqueeze(1) - q.unsqueeze(2))
    known = torch.where(both_PKL, terms, 0.0).sum((1, 2))
    rest_q = (1 - (q.exp() * both_PKL.any(2)).sum(1)).clamp(min=1e-6)  # logprobs are in fp32
    rest_p = (1 - (p.exp() * both_PKL.any(1)).sum(1)).clamp(min=1e-6)
    return (known + rest_p * (rest_p / rest_q).log()).clamp(min=0)


def _compare_choices(
    index: int, start: int, ours: Scored, reference: Scored, near_tie: float, result: Comparison
) -> None:
    if not (ours.best.shape[1] and reference.best.shape[1]):
        return
    result.positions += len(ours.best)
    for row in (ours.best[:, 0] != reference.best[:, 0]).nonzero().flatten().tolist():
        x, y = int(ours.best[row, 0]), int(reference.best[row, 0])
        of_ours = reference.best_logprobs[row][reference.best[row] == x]
        # If ours is not among the reference's best, then it is at least as far away as the last of them.
        other = float(of_ours[0]) if len(of_ours) else float(reference.best_logprobs[row, -1])
        gap = float(reference.best_logprobs[row, 0]) - other
        result.largest_gap = max(result.largest_gap, gap)
        if gap <= near_tie:
            result.near_ties += 1
        else:
            result.mismatches.append(f"prompt {index}, token {start + row}: {x} against {y}, {gap:.3f} nats apart")
