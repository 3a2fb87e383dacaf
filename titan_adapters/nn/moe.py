"""Mixture of experts: router, experts, shared experts, and the block that authors compose. Engines replace `MoE`.

Shapes: ... leading dims ([B, S] or [T])  T tokens  D model dim  E experts  K chosen experts per token  F expert width.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titan_adapters.errors import ConfigError
from titan_adapters.moe_spec import ClampedSwiGLU, MoESpec
from titan_adapters.nn.feed_forward import ACTIVATIONS, FeedForward
from titan_adapters.nn.grouped import OfGroup, Rearranged, grouped_mm
from titan_adapters.nn.routing import choose_experts

ExpertsKernel = Literal["loop", "grouped"]


class Routing(NamedTuple):
    """Where each token goes."""

    logits: Tensor
    """fp32 [T, E], before any bias."""
    experts: Tensor
    """int64 [T, K]: indices of the chosen experts, in no particular order."""
    weights: Tensor
    """fp32 [T, K]: what the experts' results (or inputs) are multiplied by."""


class Router(nn.Module):
    """Chooses `spec.top_k` experts per token.

    Args:
        layer: 0-based global layer index, by which recorded routings are found.
    """

    def __init__(self, dim: int, spec: MoESpec, layer: int):
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.gate = nn.Linear(dim, spec.num_experts, bias=spec.router_bias)
        self.correction_bias: Tensor | None
        bias = torch.zeros(spec.num_experts, dtype=torch.float32) if spec.correction_bias else None
        self.register_buffer("correction_bias", bias)
        self.replayed: Tensor | None = None
        """int64 [T, K]: experts to use instead of choosing; set by `ta.nn.replay_routing`."""

    def _apply(self, fn, recurse=True):
        kept = self.correction_bias
        super()._apply(fn, recurse)
        if kept is not None and self.correction_bias is not None and self.correction_bias.dtype != torch.float32:
            self.correction_bias = kept.to(self.correction_bias.device)  # `.to(bfloat16)` must not round it
        return self

    def forward(self, x: Tensor) -> Routing:
        """[T, D] -> logits [T, E], and the chosen experts and their weights [T, K]."""
        logits = self.logits(x)
        experts, weights = choose_experts(self.spec, logits, self.correction_bias, self.replayed)
        return Routing(logits, experts, weights)

    def logits(self, x: Tensor) -> Tensor:
        """[T, D] -> fp32 [T, E]."""
        if self.spec.router_dtype == "model":
            return self.gate(x).float()
        bias = None if self.gate.bias is None else self.gate.bias.float()
        return F.linear(x.float(), self.gate.weight.float(), bias)


class InnerExperts(nn.Module):
    """The experts' weights and what they compute. Engines replace this module.

    `kernel` says how: "loop", one expert after the other, is the definition; "grouped" is one grouped matmul per
    projection, for training speed, with gradients. It needs rows of D and of F entries to be multiples of 16 bytes.
    """

    def __init__(self, dim: int, spec: MoESpec):
        super().__init__()
        self.spec = spec
        self.kernel: ExpertsKernel = "loop"
        self.partial = False
        """Whether other ranks hold further experts, whose indices are outside of 0 to E - 1 and contribute nothing."""
        num_experts, hidden_dim = spec.num_experts, spec.hidden_dim
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim)) if spec.gated else None
        self.b1 = nn.Parameter(torch.empty(num_experts, hidden_dim)) if spec.bias else None
        self.b2 = nn.Parameter(torch.empty(num_experts, dim)) if spec.bias else None
        self.b3 = nn.Parameter(torch.empty(num_experts, hidden_dim)) if spec.bias and spec.gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert as nn.Linear starts: uniform within one over the square root of its inputs."""
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2), (self.w3, self.b3)):
            if weight is not None:
                bound = weight.shape[-1] ** -0.5
                nn.init.uniform_(weight, -bound, bound)
                if bias is not None:
                    nn.init.uniform_(bias, -bound, bound)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Sum of the chosen experts' results, times their weights: [T, D] -> [T, D], summed in fp32.

        Raises:
            ConfigError: widths that the grouped kernel can't take.
        """
        experts = self._loop if self.kernel == "loop" else self._grouped
        return experts(x, routing).to(x.dtype)

    def groupable(self, dtype: torch.dtype) -> bool:
        """Whether rows of D and of F entries are multiples of 16 bytes, as grouped matmuls need them."""
        return not any(width * dtype.itemsize % 16 for width in self.w1.shape[1:])

    def use_static_kernel(self) -> None:
        """Take the kernel whose shapes the routing doesn't change, which graphs can capture, if the widths allow it."""
        self.kernel = "grouped" if self.groupable(self.w1.dtype) else "loop"

    def _loop(self, x_TD: Tensor, routing: Routing) -> Tensor:
        out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for expert in range(self.spec.num_experts):
            tokens, slots = torch.where(routing.experts == expert)
            weights = routing.weights[tokens, slots, None]
            hidden = x_TD[tokens] if self.spec.weighs == "output" else (x_TD[tokens] * weights).to(x_TD.dtype)
            hidden = F.linear(self._act(hidden, expert), self.w2[expert], None if self.b2 is None else self.b2[expert])
            out_TD = out_TD.index_add(0, tokens, hidden * weights if self.spec.weighs == "output" else hidden.float())
        return out_TD

    def _act(self, x: Tensor, expert: int) -> Tensor:
        gate = F.linear(x, self.w1[expert], None if self.b1 is None else self.b1[expert])
        up = None
        if self.w3 is not None:
            up = F.linear(x, self.w3[expert], None if self.b3 is None else self.b3[expert])
        return activate(self.spec, gate, up)

    def _grouped(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Tokens sorted by expert (R = T * K rows), one grouped matmul per projection. No sync with the host."""
        if not self.groupable(x_TD.dtype):
            raise ConfigError(
                f"The grouped kernel can't take experts of {x_TD.dtype}, width {self.w1.shape[1]} and dim "
                f"{self.w1.shape[2]}: rows must be multiples of 16 bytes.",
                fix="set kernel = 'loop'.",
            )
        num_chosen, num_experts = self.spec.top_k, self.spec.num_experts
        chosen = routing.experts.flatten()
        if self.partial:  # others' experts come last, past the end of the last group
            chosen = chosen.where((chosen >= 0) & (chosen < num_experts), num_experts)
        order = chosen.argsort(stable=True)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        expert_R = chosen[order]
        experts_E = torch.arange(num_experts, device=x_TD.device)
        ends_E = torch.searchsorted(expert_R, experts_E, right=True, out_int32=True)
        rows: Tensor = Rearranged.apply(x_TD, order, place, num_chosen)
        if self.spec.weighs == "input":
            rows = (rows * routing.weights.flatten()[order, None]).to(x_TD.dtype)

        def own(rows: Tensor) -> Tensor:
            """Zeros in rows of no group, where a grouped matmul leaves what was in memory, also in its gradients."""
            return rows.masked_fill((expert_R == num_experts)[:, None], 0.0) if self.partial else rows

        def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            rows = own(grouped_mm(own(rows), weight.transpose(-2, -1), ends_E))
            return rows if bias is None else rows + OfGroup.apply(bias, expert_R.clamp(max=num_experts - 1))

        up = None if self.w3 is None else project(rows, self.w3, self.b3)
        rows = project(activate(self.spec, project(rows, self.w1, self.b1), up), self.w2, self.b2)
        rows_TKD = Rearranged.apply(own(rows), place, order, 1).view(-1, num_chosen, rows.shape[-1])
        if self.spec.weighs == "output":
            rows_TKD = rows_TKD * routing.weights[..., None]
        return rows_TKD.sum(1, dtype=torch.float32)


def activate(spec: MoESpec, gate: Tensor, up: Tensor | None) -> Tensor:
    """`act(gate) * up`, or `act(gate)` of ungated experts."""
    if isinstance(spec.activation, ClampedSwiGLU):
        assert up is not None
        limit = spec.activation.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * spec.activation.alpha))
    hidden = ACTIVATIONS[spec.activation](gate)
    return hidden if up is None else hidden * up


class MoE(nn.Module):
    """The chosen experts' sum, plus what the shared experts give.

    Args:
        layer: 0-based global layer index.
    """

    def __init__(self, dim: int, spec: MoESpec, layer: int):
        super().__init__()
        self.spec = spec
        self.router = Router(dim, spec, layer)
        self.experts = InnerExperts(dim, spec)
        self.shared_experts = self.shared_gate = None
        if spec.shared is not None:
            self.shared_experts = FeedForward(dim, spec.shared.feed_forward)
            self.shared_gate = nn.Linear(dim, 1, bias=False) if spec.shared.output_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        x_TD = x.reshape(-1, x.shape[-1])
        out_TD = self.experts(x_TD, self.router(x_TD))
        if self.shared_experts is not None:
            shared_TD = self.shared_experts(x_TD)
            if self.shared_gate is not None:
                shared_TD = shared_TD * self.shared_gate(x_TD).sigmoid()
            out_TD = out_TD + shared_TD
        return out_TD.view(x.shape)
