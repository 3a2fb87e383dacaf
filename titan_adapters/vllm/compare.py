"""Comparing the outputs of two engines on the same prompts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from titan_adapters.verify.metrics import NEAR_TIE, Comparison, Scored, compare

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


def comparison_sampling(max_tokens: int, *, best: int = 2, prompt: bool = True) -> "SamplingParams":
    """Greedy, with what `scored` needs: the best logprobs of each token.

    Args:
        best: Tokens per position whose logprobs are wanted.
        prompt: Of the prompt's tokens too. vLLM reads no cached prefixes for such requests.
    """
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=best, prompt_logprobs=best if prompt else None)


def scored(output: "RequestOutput") -> Scored:
    """What the engine says about prompt tokens 1 and later, if it was asked, and about those that it generated."""
    prompt, completion = list(output.prompt_token_ids or ()), output.outputs[0]
    if completion.logprobs is None:
        raise ValueError("the output has no logprobs: generate with comparison_sampling")
    rows: list[Any] = [*(output.prompt_logprobs or [])[1:], *completion.logprobs]
    tokens = [*prompt, *completion.token_ids]
    start = len(tokens) - len(rows)
    ranked = [sorted(row.items(), key=lambda item: -item[1].logprob) for row in rows]
    width = min((len(row) for row in ranked), default=0)  # a token that is not among the best is one more
    return Scored(
        tuple(tokens),
        start,
        torch.tensor([row[token].logprob for token, row in zip(tokens[start:], rows, strict=True)]),
        torch.tensor([[token for token, _ in row[:width]] for row in ranked], dtype=torch.int64),
        torch.tensor([[found.logprob for _, found in row[:width]] for row in ranked]),
    )


def compare_outputs(
    ours: Sequence["RequestOutput"], reference: Sequence["RequestOutput"], near_tie: float = NEAR_TIE
) -> Comparison:
    """`titan_adapters.verify.compare` of two engines' outputs, made with `comparison_sampling`."""
    for index, (a, b) in enumerate(zip(ours, reference, strict=True)):
        if a.prompt_token_ids != b.prompt_token_ids:
            raise ValueError(f"prompt {index} was tokenized differently")
    return compare([scored(output) for output in ours], [scored(output) for output in reference], near_tie)
