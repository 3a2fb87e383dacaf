"""Comparing logprobs: expected values by hand or by torch's own functions."""

import math

import pytest
import torch

from titan_adapters.verify import Scored, compare, score_logits


def scored(logits: list[list[float]], tokens: list[int], best: int = 20) -> Scored:
    """`logits` say what follows each token."""
    return score_logits(tokens, torch.tensor([*logits, [0.0] * len(logits[0])]), best)


def of(probabilities: list[float], token: int, best: int = 20) -> Scored:
    """One scored token."""
    return scored([[math.log(p) for p in probabilities]], [0, token], best)


def test_scores_are_the_models_log_softmax():
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    tokens = [3, 0, 6, 2]
    found = score_logits(tokens, logits, best=2)
    expected = logits.log_softmax(-1)
    assert (found.tokens, found.start) == ((3, 0, 6, 2), 1)
    assert found.logprobs.tolist() == pytest.approx([float(expected[i, t]) for i, t in enumerate(tokens[1:])])
    assert found.best[:, 0].tolist() == expected[:3].argmax(-1).tolist()
    assert found.best.shape == found.best_logprobs.shape == (3, 2)


def test_differences_and_divergence():
    ours, reference = of([0.5, 0.25, 0.25], 1), of([0.25, 0.5, 0.25], 1)
    found = compare([ours], [reference], near_tie=1.0)
    assert found.tokens == found.positions == 1 and found.worst == (0, 1)
    assert found.mean == found.max == pytest.approx(math.log(2))
    assert found.relative == pytest.approx(1.0)  # from log 0.5 to log 0.25
    # 0.25 log(0.25 / 0.5) + 0.5 log(0.5 / 0.25) = 0.25 log 2
    assert found.kl_mean == found.kl_max == pytest.approx(0.25 * math.log(2), abs=1e-5)
    assert found.points == [(pytest.approx(math.log(0.5)), pytest.approx(math.log(0.25)))]


def test_divergence_of_the_best_tokens_is_a_lower_bound():
    p = torch.randn(50, generator=torch.Generator().manual_seed(1)).softmax(-1).double()
    q = torch.randn(50, generator=torch.Generator().manual_seed(2)).softmax(-1).double()
    whole = float((p * (p / q).log()).sum())
    bounds = []
    for best in (1, 5, 20, 50):
        pair = (of(x.tolist(), 0, best) for x in (q, p))
        bounds.append(compare([next(pair)], [next(pair)], near_tie=math.inf).kl_mean)
    assert bounds == sorted(bounds) and 0 < bounds[2] < bounds[3]
    assert bounds[-1] == pytest.approx(whole, rel=1e-4)


def test_best_tokens_may_differ_only_at_near_ties():
    reference = of([0.4, 0.39, 0.21], 0)
    gap = math.log(0.4 / 0.39)
    other = of([0.39, 0.4, 0.21], 0)
    found = compare([other], [reference], near_tie=gap + 1e-6)
    assert (found.near_ties, found.mismatches) == (1, [])
    assert found.largest_gap == pytest.approx(gap, abs=1e-6)
    found = compare([other], [reference], near_tie=gap - 1e-3)
    assert found.near_ties == 0
    assert found.mismatches == ["prompt 0, token 1: 1 against 0, 0.025 nats apart"]


def test_a_choice_that_is_not_among_the_references_best_is_as_far_as_the_last_of_them():
    found = compare([of([0.1, 0.2, 0.7], 0)], [of([0.6, 0.3, 0.1], 0, best=2)], near_tie=0.6)
    assert found.largest_gap == pytest.approx(math.log(2)) and len(found.mismatches) == 1


def test_after_two_continuations_part_nothing_is_compared():
    flat, sure = [0.0, 0.0, 0.1], [9.0, 0.0, 0.0]
    ours, reference = scored([sure, flat, sure], [0, 0, 2, 1]), scored([sure, flat, flat], [0, 0, 1, 0])
    found = compare([ours], [reference], near_tie=0.0)
    assert (found.tokens, found.positions) == (1, 2)  # the first token; and the choice of the second
    assert found.max == 0 and found.mismatches == []


def test_only_what_both_scored_is_compared():
    whole = scored([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]], [0, 1, 0, 1])
    found = compare([whole.between(2, 4)], [whole])
    assert found.tokens == 2 and found.mean == 0
    short = compare([whole.between(1, 3)], [whole])
    assert short.mismatches == ["prompt 0: 3 against 4 tokens"]


def test_nan_is_never_equal():
    reference = scored([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], [0, 1, 0, 0])
    broken = Scored(reference.tokens, 1, torch.tensor([-0.3, math.nan, -9.0]), reference.best, reference.best_logprobs)
    found = compare([broken], [reference])
    assert math.isnan(found.mean) and math.isnan(found.max) and found.worst == (0, 2)
