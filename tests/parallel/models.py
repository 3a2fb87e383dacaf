"""Model classes for these tests, importable by their processes; not a test."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import titan_adapters as ta

Llama = ta.get_model("llama")
TINY = next(iter(Llama.tiny_configs().values()))


class Parts(Llama):
    """Layers given by their specs, one per layer; the rest is Llama's."""

    model_type = "parts"

    class Config(Llama.Config):
        attentions: ta.PerLayer[ta.AttentionSpec]
        feed_forwards: ta.PerLayer[ta.FeedForwardSpec | ta.MoESpec]

        def attention(self, layer: int) -> ta.AttentionSpec:
            return self.attentions[layer]

        def feed_forward(self, layer: int) -> ta.FeedForwardSpec | ta.MoESpec:
            return self.feed_forwards[layer]

    @classmethod
    def state_dict_adapter(cls, config: ta.TransformerConfig) -> ta.StateDictAdapter:
        names = ta.state_dict.native_tensors(ta.contract.meta_model(cls, config))
        return ta.StateDictAdapter(*(ta.Rename(name, name) for name in names))

    @classmethod
    def tiny_configs(cls) -> dict[str, "Parts.Config"]:
        """Every parameter of attention and of mixtures that no installed family has."""
        dense = TINY.feed_forward(0)
        biased = dense.model_copy(update={"bias": True, "gated": False})
        shared = ta.SharedExpertsSpec(feed_forward=dense, output_gate=True)
        return {
            "sinks, gates, narrow values, one kv head": cls.config(
                [attention(sinks=True, num_kv_heads=1, v_head_dim=24, output_gate="per_head", biases="qkvo")] * 2,
                [dense, biased],
            ),
            "full norm with as many kv heads, gated channels, softcap": cls.config(
                [attention(qk_norm=norm("full"), output_gate="per_channel", softcap=2.0), attention(window=3)],
                [dense, dense],
            ),
            "shared experts behind a gate, correction bias": cls.config(
                [attention(qk_norm=norm("per_head"))] * 2, [mixture(shared=shared), dense]
            ),
            "biased experts, ungated, weights on the input": cls.config(
                [attention()] * 2, [mixture(gated=False, bias=True, router_bias=True, weighs="input"), mixture()]
            ),
        }

    @classmethod
    def config(cls, attentions: list[ta.AttentionSpec], feed_forwards: list[Any], **changes: Any) -> "Parts.Config":
        fields = TINY.model_dump() | {"num_layers": len(attentions)} | changes
        return cls.Config(**fields, attentions=tuple(attentions), feed_forwards=tuple(feed_forwards))


class Gain(nn.Module):
    """Multiplies hidden features by one learnt number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class GainedFeedForward(ta.nn.FeedForward):
    """With a module of its own among the split features, and its input among the whole ones."""

    def __init__(self, dim: int, spec: ta.FeedForwardSpec):
        super().__init__(dim, spec)
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.gain(F.silu(self.w1(x)) * self.w3(x))) + x


class Gained(Llama):
    model_type = "gained"

    class Block(ta.nn.PreNormBlock):
        def __init__(self, config: ta.TransformerConfig, layer: int):
            super().__init__(config, layer)
            self.feed_forward = GainedFeedForward(config.dim, config.feed_forward(layer))

    @classmethod
    def parallel_plan(cls, config: ta.TransformerConfig, style: ta.Style = ta.partwise) -> ta.ParallelPlan:
        return ta.decoder_plan(config, {"layers.*.feed_forward.gain": style})


class Whole(Llama):
    """Split in the feed-forward layers only."""

    model_type = "whole"

    @classmethod
    def parallel_plan(cls, config: ta.TransformerConfig) -> ta.ParallelPlan:
        split = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
        rows = ta.decoder_plan(config).rows
        return ta.ParallelPlan({row: style if row.endswith(split) else ta.replicate for row, style in rows.items()})


def attention(**changes: Any) -> ta.AttentionSpec:
    return TINY.attention(0).model_copy(update=changes)


def norm(scope: str) -> ta.QKNormSpec:
    return ta.QKNormSpec(scope=scope, eps=1e-5, offset=1.0, weight_in_fp32=True, weight=True, after_rope=True)


def mixture(**changes: Any) -> ta.MoESpec:
    facts = dict(
        num_experts=6, top_k=2, hidden_dim=40, score="sigmoid", renormalize=True, scaling_factor=2.5, groups=None,
        correction_bias=True, weighs="output", router_dtype="float32", router_bias=False, activation="silu",
        gated=True, bias=False, shared=None,
    )  # fmt: skip
    return ta.MoESpec(**facts | changes)
