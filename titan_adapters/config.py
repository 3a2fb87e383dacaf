"""Facts about a model, as frozen data that is readable before any module exists.

The emitter, the KV cache and the parallel plan read only these specs. No field that changes the computed function
has a default: an author states every one of them. Imports neither torch nor vllm.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from titan_adapters.errors import ConfigError
from titan_adapters.moe_spec import FeedForwardSpec, MoESpec
from titan_adapters.rope_spec import RopeSpec
from titan_adapters.spec import Spec

DType = Literal["float32", "bfloat16", "float16"]

T = TypeVar("T")
PerLayer = Annotated[tuple[T, ...], "per layer"]
"""Type of a config field with one value per layer; another number of values is an error."""


def layers_by_value(pairs: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    """Layers that share a value, from (value, layer) pairs; for messages that name the layers concerned."""
    found: dict[T, list[int]] = {}
    for value, layer in pairs:
        found.setdefault(value, []).append(layer)
    return found


class RMSNormSpec(Spec):
    """Root-mean-square norm (arXiv:1910.07467)."""

    eps: float = Field(gt=0)
    offset: float
    """Added to the stored weight: 1 where zero weights mean no change (Gemma), else 0."""
    weight_in_fp32: bool
    """Whether the weight multiplies before the result is rounded to the activations' dtype (Gemma, OLMo), or after
    (Llama). The same in fp32."""


class LayerNormSpec(Spec):
    """Layer norm (arXiv:1607.06450), computed in fp32."""

    eps: float = Field(gt=0)
    bias: bool


NormSpec = RMSNormSpec | LayerNormSpec


class QKNormSpec(RMSNormSpec):
    """RMSNorm on queries and keys."""

    scope: Literal["per_head", "full"]
    """per_head: statistics over one head's channels, one weight of head_dim shared by all heads. full: statistics
    over the channels of all heads together, one weight per channel."""
    weight: bool
    """Whether there is a learnt weight (Llama 4 has none)."""
    after_rope: bool
    """Whether the norm follows the rotation (Llama 4) or precedes it."""

    @model_validator(mode="after")
    def _offset_needs_weight(self) -> Self:
        if self.offset and not self.weight:
            raise ValueError(f"offset ({self.offset}) is added to a weight, which this norm does not have")
        return self


class TemperatureSpec(Spec):
    """Queries times `1 + beta * ln(1 + floor((position + offset) / original_max_position))`, after the rotation.

    An attention temperature (arXiv:2501.19399), which sharpens attention beyond the original context.
    """

    beta: float = Field(gt=0)
    original_max_position: int = Field(gt=0)
    """In tokens."""
    offset: int = Field(ge=0)
    """What is added to the 0-based position: 1 in Llama 4, 0 in Ministral 3."""


class AttentionSpec(Spec):
    """Everything that decides what causal self-attention of one layer computes."""

    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    """Channels of a query or key head."""
    v_head_dim: int = Field(gt=0)
    """Channels of a value head, and so of each head's output."""
    scale: float = Field(gt=0)
    """Factor on q·k before the softmax."""
    window: int | None = Field(gt=0)
    """Number of visible tokens, the current one included; None for all earlier ones."""
    chunk: int | None = Field(gt=0)
    """Tokens see earlier ones of their own chunk of so many positions only (Llama 4); None for no chunks."""
    sinks: bool
    """Whether each query head has a learnt logit that takes part in the softmax, and attends to nothing (gpt-oss)."""
    softcap: float | None = Field(gt=0)
    """Scores become `softcap * tanh(scores / softcap)`; None for no cap."""
    qk_norm: QKNormSpec | None
    biases: str = Field(pattern="^q?k?v?o?$")
    """Which projections have a bias: some of the letters q, k, v and o, in this order; empty for none."""
    rope: RopeSpec | None
    temperature: TemperatureSpec | None
    output_gate: Literal["per_head", "per_channel"] | None
    """Heads' outputs times `sigmoid(wg x)` before the output projection (arXiv:2505.06708), one gate per query head or
    one per channel of each; None for no gate."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.rope is not None and self.rope.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim ({self.rope.rotary_dim}) exceeds head_dim ({self.head_dim})")
        return self


class TransformerConfig(Spec):
    """Base of every model's config. Subclasses add fields and answer `attention`, `feed_forward` and `norm`.

    Unknown keys and missing fields are errors. A config is JSON: `from_json(config.to_json()) == config`.
    """

    dim: int = Field(gt=0)
    """Width of the residual stream."""
    num_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    max_seq_len: int = Field(gt=0)
    """Longest sequence the model is defined for, in tokens. Rope tables have this many rows."""
    norm_eps: float = Field(gt=0)
    tied_embeddings: bool
    """Whether lm_head.weight is tok_embeddings.weight (one storage)."""
    dtype: DType
    """What weights are stored and served in. Training may hold them wider."""

    @model_validator(mode="after")
    def _one_value_per_layer(self) -> Self:
        for name, field in type(self).model_fields.items():
            if "per layer" in field.metadata and len(getattr(self, name)) != self.num_layers:
                given = len(getattr(self, name))
                raise ValueError(f"{name} must have one value per layer, {self.num_layers}, has {given}")
        return self

    def attention(self, layer: int) -> AttentionSpec:
        """What attention of layer `layer` (0-based, global) computes."""
        raise NotImplementedError(f"{type(self).__qualname__}.attention(layer)")

    def feed_forward(self, layer: int) -> FeedForwardSpec | MoESpec:
        """What the feed-forward part of layer `layer` (0-based, global) computes, dense or a mixture of experts."""
        raise NotImplementedError(f"{type(self).__qualname__}.feed_forward(layer)")

    def norm(self) -> NormSpec:
        """What the norms on the residual stream compute, all layers' and the final one."""
        raise NotImplementedError(f"{type(self).__qualname__}.norm()")

    def attention_specs(self) -> list[AttentionSpec]:
        return [self.attention(layer) for layer in range(self.num_layers)]

    def moe_specs(self) -> dict[int, MoESpec]:
        """Specs of the layers that are mixtures of experts, by layer."""
        specs = {layer: self.feed_forward(layer) for layer in range(self.num_layers)}
        return {layer: spec for layer, spec in specs.items() if isinstance(spec, MoESpec)}

    def dense_specs(self) -> dict[int, FeedForwardSpec]:
        """Specs of the layers that have a dense feed-forward part, by layer."""
        specs = {layer: self.feed_forward(layer) for layer in range(self.num_layers)}
        return {layer: spec for layer, spec in specs.items() if isinstance(spec, FeedForwardSpec)}

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Validate `data`; raises ConfigError that lists every bad field."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(
                f"{cls.__module__}.{cls.__qualname__} does not accept this config.",
                [f"{'.'.join(map(str, e['loc'])) or '(whole config)'}: {e['msg']}" for e in error.errors()],
                fix=f"give every field, and no other: {', '.join(cls.model_fields)}.",
            ) from error

    def digest(self) -> str:
        """Hash of the config's own fields. Goes into checkpoints, to notice an edited config; the specs are left out,
        so that a later version of this library may describe the same model by more of them."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def fingerprint(self) -> str:
        """Hash of the config and of every layer's specs: equal fingerprints mean the same function and shapes.

        Goes into the engine's compile-cache key, and tells whether two processes describe a model alike.
        """
        norm = self.norm()
        facts = {
            "config": self.to_json(),
            "attention": [spec.model_dump(mode="json") for spec in self.attention_specs()],
            "feed_forward": [self.feed_forward(layer).model_dump(mode="json") for layer in range(self.num_layers)],
            "norm": [type(norm).__name__, norm.model_dump(mode="json")],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
