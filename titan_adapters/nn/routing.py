"""From router logits to experts and weights; recording and replaying choices; what training makes of them.

Shapes: T tokens  E experts  K chosen experts per token  G groups.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from titan_adapters.errors import ConfigError
from titan_adapters.moe_spec import ExpertGroupsSpec, MoESpec

if TYPE_CHECKING:
    from titan_adapters.nn.moe import Router, Routing


def choose_experts(
    spec: MoESpec, logits: Tensor, correction_bias: Tensor | None, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Experts, int64 [T, K], and their weights, fp32 [T, K], of router logits, fp32 [T, E].

    Args:
        correction_bias: fp32 [E]; added to the scores for the choice only.
        replayed: int64 [T, K]: take these experts instead of choosing. Their weights are computed as ever.

    Raises:
        ConfigError: `replayed` is of another number of tokens.
    """
    match spec.score:
        case "softmax":
            scores = logits.softmax(-1)
        case "sigmoid":
            scores = logits.sigmoid()
        case "softmax_of_top_k":
            scores = logits
    if replayed is None:
        ranking = scores if correction_bias is None else scores + correction_bias
        if spec.groups is not None:
            ranking = _within_best_groups(ranking, spec.groups)
        experts = ranking.topk(spec.top_k, dim=-1).indices
    elif len(replayed) == len(logits):
        experts = replayed
    else:  # gather would leave the last tokens without experts
        raise ConfigError(
            f"The replayed routing is of {len(replayed)} tokens, the forward pass has {len(logits)}.",
            fix="replay it with the tokens it was recorded with, all of them in one pass.",
        )
    weights = scores.gather(-1, experts)
    if spec.score == "softmax_of_top_k":
        weights = weights.softmax(-1)
    if spec.renormalize:
        # What DeepSeek-V3 adds so that sigmoids that are all zero stay zero. Next to a softmax's sum it is nothing.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if spec.scaling_factor != 1.0:
        weights = weights * spec.scaling_factor
    return experts, weights


def _within_best_groups(ranking: Tensor, groups: ExpertGroupsSpec) -> Tensor:
    """`ranking`, with minus infinity for experts outside of each token's best groups."""
    grouped = ranking.unflatten(-1, (groups.num_groups, -1))
    of_group = grouped.amax(-1) if groups.score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    best = of_group.topk(groups.top_groups, dim=-1).indices
    closed = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)


@dataclass
class RoutingRecord:
    """What the routers of a model did, by global layer index; one entry per call of the layer."""

    layers: dict[int, list["Routing"]] = field(default_factory=dict)

    def experts(self) -> dict[int, Tensor]:
        """int64 [T, K] of each layer, the calls one after the other: what `replay_routing` takes."""
        return {layer: torch.cat([call.experts for call in calls]) for layer, calls in self.layers.items()}

    def counts(self, num_experts: int) -> dict[int, Tensor]:
        """int64 [E] of each layer: how many tokens each expert got."""
        return {layer: experts.flatten().bincount(minlength=num_experts) for layer, experts in self.experts().items()}

    def load_balancing_loss(self) -> Tensor:
        """Switch Transformer's auxiliary loss (arXiv:2101.03961, eq. 4) over the tokens of all layers together.

        `E * sum over e of (share of tokens that chose e) * (mean softmax probability of e)`, as transformers computes
        it. 0-dim, with gradients to the routers; the caller multiplies by a coefficient.

        Raises:
            ConfigError: nothing was recorded.
        """
        calls = [call for calls in self.layers.values() for call in calls]
        if not calls:
            raise ConfigError("No routing was recorded.", fix="run a model with mixtures of experts inside the block.")
        logits = torch.cat([call.logits for call in calls])
        num_experts = logits.shape[-1]
        chosen = torch.cat([nn.functional.one_hot(call.experts, num_experts).sum(1) for call in calls])
        return num_experts * (chosen.float().mean(0) * logits.softmax(-1).mean(0)).sum()


def routers(model: nn.Module) -> dict[int, "Router"]:
    """The model's routers by global layer index."""
    from titan_adapters.nn.moe import Router

    return {module.layer: module for module in model.modules() if isinstance(module, Router)}


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record every routing of `model` inside the block."""
    record = RoutingRecord()

    def remember(router: "Router", _, routing: "Routing") -> None:
        record.layers.setdefault(router.layer, []).append(routing)

    hooks = [router.register_forward_hook(remember) for router in routers(model).values()]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replay_routing(model: nn.Module, experts: Mapping[int, Tensor]) -> Iterator[None]:
    """Let the layers of `model` use given experts instead of choosing, for one forward pass inside the block.

    Args:
        experts: Of each mixture layer, int64 [T, K], with the tokens of the forward pass in their order.

    Raises:
        ConfigError: layers are missing or too many, shapes or indices don't fit them, or a token has an expert twice.
    """
    found = routers(model)
    problems = [f"layer {layer} has no router" for layer in experts if layer not in found]
    for layer, router in found.items():
        spec = router.spec
        if layer not in experts:
            problems.append(f"layer {layer} is missing")
        elif experts[layer].dim() != 2 or experts[layer].shape[1] != spec.top_k:
            problems.append(f"layer {layer}: shape {tuple(experts[layer].shape)} is not [tokens, {spec.top_k}]")
        elif experts[layer].numel() and not 0 <= experts[layer].min() <= experts[layer].max() < spec.num_experts:
            problems.append(f"layer {layer}: an index is outside of 0 to {spec.num_experts - 1}")
        elif not experts[layer].sort(-1).values.diff(dim=-1).all():
            problems.append(f"layer {layer}: a token has the same expert twice")
    if problems:
        raise ConfigError("This routing can't be replayed.", problems, fix="give each mixture layer its experts.")
    for layer, router in found.items():
        router.replayed = experts[layer].to(router.gate.weight.device, torch.int64)
    try:
        yield
    finally:
        for router in found.values():
            router.replayed = None
