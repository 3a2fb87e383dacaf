"""Checks at the edges: the last token that a window shows, and routers that have nothing to choose by."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from titan_adapters.config import AttentionSpec
from titan_adapters.moe_spec import MoESpec
from titan_adapters.nn.routing import routers
from titan_adapters.testing.case import LENGTH, Case, Skip, both, cut_seams

CHANGED = 10
"""The position whose token is changed, early enough for windows and chunks to end after it."""


def reach(case: Case) -> str:
    """Each layer's attention, all others cut, reaches exactly as far as its spec's window and chunk say.

    A window counts the current token. If this fails, the layer's seam was built from another spec, or the model makes
    masks or positions of its own.
    """
    for layer, spec in enumerate(case.config.attention_specs()):
        model = Case.build(case.cls, case.config).model
        cut_seams(model, keep=layer)
        tokens = case.tokens(LENGTH)
        changed = tokens.clone()
        changed[CHANGED] = (changed[CHANGED] + 1) % case.config.vocab_size
        expected = torch.tensor([_sees(spec, position) for position in range(LENGTH)])
        before, after = both(model, tokens, changed, (~expected).nonzero().flatten())
        found = (before != after).any(-1)
        wrong = (found != expected).nonzero().flatten().tolist()
        assert not wrong, (
            f"layer {layer}, window {spec.window}, chunk {spec.chunk}: the token at position {CHANGED} should be seen "
            f"at {_span(expected)}, is seen at {_span(found)}"
        )
    return f"{case.config.num_layers} layers"


def _sees(spec: AttentionSpec, position: int) -> bool:
    return (
        position >= CHANGED
        and (spec.window is None or position - CHANGED < spec.window)
        and (spec.chunk is None or position // spec.chunk == CHANGED // spec.chunk)
    )


def _span(seen: Tensor) -> str:
    positions = seen.nonzero().flatten().tolist()
    return f"{len(positions)} positions, {positions[0]} to {positions[-1]}" if positions else "none"


def hard_router_logits(case: Case) -> str:
    """Routers whose logits are all equal, or all far below zero, still give every token `top_k` experts, weighted as
    the spec says, and finite logits.

    If this fails, a router of your own divides by what may be zero, masks with zeros, or weighs otherwise than stated.
    """
    if not case.config.moe_specs():
        raise Skip("no mixture of experts")
    model = Case.build(case.cls, case.config).model
    found = routers(model)
    missing = sorted(case.config.moe_specs().keys() - found.keys())
    assert not missing, f"layers {missing} have no titan_adapters.nn.Router, so that routing can't be recorded"
    for name, shift in (("tied", torch.zeros_like), ("all negative", lambda logits: logits - logits.amax() - 10.0)):
        for layer, router in found.items():
            vars(router)["logits"] = partial(_shifted, type(router).logits.__get__(router), shift)
            routing = router(torch.randn(LENGTH, case.config.dim, generator=torch.Generator().manual_seed(3)))
            spec, where = case.config.moe_specs()[layer], f"layer {layer}, {name} logits"
            chosen = routing.experts.sort(-1).values
            assert chosen.shape == (LENGTH, spec.top_k), f"{where}: experts have shape {tuple(chosen.shape)}"
            assert chosen.diff(dim=-1).all(), f"{where}: a token has the same expert twice"
            assert chosen.min() >= 0 and chosen.max() < spec.num_experts, f"{where}: there is no such expert"
            _check_weights(spec, routing.weights, where, tied=name == "tied")
        logits = model(case.tokens(LENGTH))
        assert torch.isfinite(logits).all(), f"{name} router logits: the model's logits are not finite"
    return f"{len(found)} routers, tied and all negative"


def _shifted(original: Callable[[Tensor], Tensor], shift: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return shift(original(x))


def _check_weights(spec: MoESpec, weights: Tensor, where: str, *, tied: bool) -> None:
    """Sums for which the logits don't matter, and the weights where all experts are alike."""
    if spec.renormalize or spec.score == "softmax_of_top_k":
        total = spec.scaling_factor
        sums = weights.sum(-1)
        assert torch.allclose(sums, torch.full_like(sums, total), rtol=1e-5), (
            f"{where}: weights sum to {sums.min():.6g} ... {sums.max():.6g}, not to {total:g}"
        )
    elif tied:
        each = spec.scaling_factor * (1 / spec.num_experts if spec.score == "softmax" else 0.5)
        assert torch.allclose(weights, torch.full_like(weights, each), rtol=1e-5), (
            f"{where}: weights are {weights.min():.6g} ... {weights.max():.6g}, not {each:.6g}"
        )
    assert (weights >= 0).all(), f"{where}: a weight is negative"
