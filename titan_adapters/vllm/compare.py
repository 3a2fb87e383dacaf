"""Comparing the outputs of two engines on the same prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

NEAR_TIE = 0.05
"""Nats between a reference's two best tokens below which rounding in bf16 may choose either."""


def comparison_sampling(max_tokens: int) -> "SamplingParams":
    """Greedy, with what `compare_outputs` needs: the two best logprobs of each token, and prompt logprobs."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, prompt_logprobs=0)


@dataclass
class Comparison:
    """How far two engines agree."""

    prompts: int = 0
    tokens: int = 0
    """Generated tokens that were compared: up to and including the first difference of each prompt."""
    near_ties: int = 0
    """Prompts that part where the reference's two best tokens are nearly equal; not an error."""
    mismatches: list[str] = field(default_factory=list)
    """Prompts that part anywhere else."""
    largest_gap: float = 0.0
    """Nats between the reference's two best tokens, at most, where prompts part; near-ties included."""
    prompt_logprob_mean: float = 0.0
    """Mean absolute difference over all prompt tokens, in nats."""
    prompt_logprob_max: float = 0.0
    prompt_logprob_relative: float = 0.0
    """2-norm of the differences over that of the reference, of all prompt tokens together."""

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts, {self.tokens} greedy tokens compared, {len(self.mismatches)} differ, "
            f"{self.near_ties} part at near-ties; prompt logprobs differ by {self.prompt_logprob_mean:.4f} in the "
            f"mean, {self.prompt_logprob_max:.4f} at most, {self.prompt_logprob_relative:.1e} relative"
        )


def compare_outputs(
    ours: Sequence["RequestOutput"], reference: Sequence["RequestOutput"], near_tie: float = NEAR_TIE
) -> Comparison:
    """Compare greedy continuations and prompt logprobs of the same prompts, made with `comparison_sampling`.

    After the first difference contexts are not the same any more, so a prompt's comparison ends there.
    """
    result = Comparison(prompts=len(reference))
    pairs: list[tuple[float, float]] = []
    for index, (a, b) in enumerate(zip(ours, reference, strict=True)):
        if a.prompt_token_ids != b.prompt_token_ids:
            raise ValueError(f"prompt {index} was tokenized differently")
        _compare_tokens(index, a, b, near_tie, result)
        pairs += _prompt_logprobs(a, b)
    if pairs:
        differences = [abs(x - y) for x, y in pairs]
        result.prompt_logprob_mean = sum(differences) / len(differences)
        result.prompt_logprob_max = max(differences)
        result.prompt_logprob_relative = math.hypot(*differences) / math.hypot(*(y for _, y in pairs))
    return result


def _compare_tokens(
    index: int, ours: "RequestOutput", reference: "RequestOutput", near_tie: float, result: Comparison
) -> None:
    a, b = ours.outputs[0], reference.outputs[0]
    if b.logprobs is None:
        raise ValueError("the reference has no logprobs: generate with comparison_sampling")
    for step, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        result.tokens += 1
        if x == y:
            continue
        best, second = sorted((lp.logprob for lp in b.logprobs[step].values()), reverse=True)[:2]
        result.largest_gap = max(result.largest_gap, best - second)
        if best - second <= near_tie:
            result.near_ties += 1
        else:
            result.mismatches.append(f"prompt {index}, token {step}: {x} against {y}, {best - second:.3f} nats apart")
        return
    if len(a.token_ids) != len(b.token_ids):
        result.mismatches.append(f"prompt {index}: {len(a.token_ids)} against {len(b.token_ids)} tokens")


def _prompt_logprobs(ours: "RequestOutput", reference: "RequestOutput") -> list[tuple[float, float]]:
    if not ours.prompt_logprobs or not reference.prompt_logprobs:
        return []  # not asked for
    tokens = reference.prompt_token_ids or []
    pairs = zip(tokens[1:], ours.prompt_logprobs[1:], reference.prompt_logprobs[1:], strict=True)  # none for the first
    return [(a[token].logprob, b[token].logprob) for token, a, b in pairs if a and b]
