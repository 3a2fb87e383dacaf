"""Mixtures of experts for the engine's tests, importable by its processes; not a test."""

from typing import Any

import torch
from torch import Tensor

import titan_adapters as ta
from tests.vllm.models import TINY, Llama, LlamaConfig, native_rows
from titan_adapters.moe_spec import Activation


def feed_forward(hidden_dim: int, activation: Activation = "silu") -> ta.FeedForwardSpec:
    return ta.FeedForwardSpec(hidden_dim=hidden_dim, activation=activation, gated=True, bias=False)


PLAIN = ta.MoESpec(
    num_experts=8, top_k=2, hidden_dim=32, score="softmax", renormalize=True, scaling_factor=1.0, groups=None,
    correction_bias=False, weighs="output", router_dtype="float32", router_bias=False, activation="silu", gated=True,
    bias=False, shared=None,
)  # fmt: skip
SHARED = ta.SharedExpertsSpec(feed_forward=feed_forward(64), output_gate=False)
GATED = ta.SharedExpertsSpec(feed_forward=feed_forward(64), output_gate=True)
GPT_OSS = ta.ClampedSwiGLU(alpha=1.702, limit=7.0)
DEEPSEEK = {"score": "sigmoid", "correction_bias": True, "scaling_factor": 2.5}


def groups(score: str) -> dict[str, Any]:
    return {"groups": ta.ExpertGroupsSpec(num_groups=4, top_groups=2, score=score)}


VLLM, OWN, TORCH = "vLLM's router", "own routing", "torch"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": (VLLM, {}),
    "softmax, not renormalised": (VLLM, {"renormalize": False}),
    "softmax of the top k, router bias": (
        VLLM,
        {"score": "softmax_of_top_k", "renormalize": False, "router_bias": True},
    ),
    "softmax, scaled": (OWN, {"scaling_factor": 2.5}),
    "softmax, best groups": (OWN, {"renormalize": False} | groups("max")),
    "softmax with a bias in the choice": (OWN, {"correction_bias": True}),
    "sigmoid": (OWN, {"score": "sigmoid"}),
    "sigmoid with bias": (OWN, DEEPSEEK),
    "sigmoid with bias, best groups": (OWN, DEEPSEEK | groups("top2_sum")),
    "sigmoid with bias, groups by their maximum": (OWN, DEEPSEEK | groups("max")),
    "input weighed, one expert": (OWN, {"score": "sigmoid", "top_k": 1, "weighs": "input", "renormalize": False}),
    "input weighed, two experts": (TORCH, {"score": "sigmoid", "weighs": "input"}),
    "shared experts": (VLLM, {"shared": SHARED}),
    "shared experts behind a gate": (VLLM, {"shared": GATED, "router_dtype": "model"}),
    "biased experts, clamped": (VLLM, {"bias": True, "activation": GPT_OSS}),
    "clamped at another limit": (TORCH, {"activation": ta.ClampedSwiGLU(alpha=1.5, limit=0.5)}),
    "biased experts, gelu": (VLLM, {"bias": True, "activation": "gelu"}),
    "gelu_tanh, one expert in all": (VLLM, {"activation": "gelu_tanh", "num_experts": 1, "top_k": 1}),
    "ungated": (TORCH, {"gated": False}),
    "every expert, narrow": (VLLM, {"top_k": 8, "hidden_dim": 24}),
    "square": (VLLM, {"hidden_dim": 64}),
}
"""Name -> how the engine computes it on the CPU if it may choose, and what differs from `PLAIN`."""


class Mixture(Llama):
    """Llama with a mixture of experts in the layers that have one in the config."""

    model_type = "mixture"

    class Config(LlamaConfig):
        mixtures: ta.PerLayer[ta.MoESpec | None]

        def feed_forward(self, layer: int) -> ta.FeedForwardSpec | ta.MoESpec:
            return self.mixtures[layer] or super().feed_forward(layer)

    @classmethod
    def of(cls, *mixtures: ta.MoESpec | None) -> "Config":
        """One layer for each; 64 wide, since the fused kernel on the CPU takes multiples of 32."""
        return cls.Config(**TINY.model_dump() | {"num_layers": len(mixtures), "dim": 64, "mixtures": mixtures})

    @classmethod
    def state_dict_adapter(cls, config: ta.TransformerConfig) -> ta.StateDictAdapter:
        return native_rows(cls, config)

    @classmethod
    def tiny_configs(cls) -> dict[str, "Config"]:
        plain = PLAIN.model_copy(update={"num_experts": 6, "hidden_dim": 64, "router_dtype": "model"})
        shared = ta.SharedExpertsSpec(feed_forward=feed_forward(48), output_gate=True)
        sigmoid = {"score": "sigmoid", "correction_bias": True, "router_dtype": "float32", "scaling_factor": 1.5}
        oss = {"score": "softmax_of_top_k", "renormalize": False, "activation": GPT_OSS, "bias": True}
        changes = [{}, {"shared": shared}, sigmoid | {"shared": shared}, oss | {"router_bias": True}]
        specs = [plain.model_copy(update=change) for change in changes]
        return {
            str(change): cls.of(None if i == 0 else spec, spec)
            for i, (change, spec) in enumerate(zip(changes, specs, strict=True))
        }


class FreeMoE(Mixture):
    """A dense layer, then a mixture."""

    model_type = "free-moe"

    @classmethod
    def config(cls, **changes: Any) -> Mixture.Config:
        """`changes` of `PLAIN`."""
        return cls.of(None, ta.MoESpec(**PLAIN.model_dump() | changes))


class SecondBest(ta.nn.Router):
    """An author's own routing: the best expert is left out."""

    def forward(self, x: Tensor) -> ta.nn.Routing:
        logits = self.logits(x)
        experts = logits.topk(self.spec.top_k + 1, dim=-1).indices[:, 1:]
        return ta.nn.Routing(logits, experts, logits.softmax(-1).gather(-1, experts))


class DoubledMoE(ta.nn.MoE):
    """An author's own block around the library's router and experts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x) - x


class OwnRouter(FreeMoE):
    model_type = "own-router"

    class Block(ta.nn.PreNormBlock):
        def __init__(self, config: ta.TransformerConfig, layer: int):
            super().__init__(config, layer)
            if self.moe is not None:
                self.moe.router = SecondBest(config.dim, self.moe.spec, layer)


class OwnBlock(FreeMoE):
    model_type = "own-block"

    class Block(ta.nn.PreNormBlock):
        def __init__(self, config: ta.TransformerConfig, layer: int):
            super().__init__(config, layer)
            if self.moe is not None:
                self.moe = DoubledMoE(config.dim, self.moe.spec, layer)


def tie_experts(model: ta.BaseTransformer, *, by: float = 0.0) -> None:
    """Give all experts of the last layer's router the same logit, or each the next one's plus `by`."""
    gate = model.layers[-1].moe.router.gate
    with torch.no_grad():
        gate.weight.copy_(gate.weight[:1].expand_as(gate.weight))
        gate.bias.copy_(by * torch.arange(len(gate.bias)))
