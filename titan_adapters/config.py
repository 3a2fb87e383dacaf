"""Facts about a model, as frozen data that is readable before any module exists.

The emitter, the KV cache and the parallel plan read only these specs. No field that changes the computed function
has a default: an author states every one of them. Imports neither torch nor vllm.
"""

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from titan_adapters.errors import ConfigError

DType = Literal["float32", "bfloat16", "float16"]


class Spec(BaseModel):
    """Frozen pydantic base: unknown keys are errors, instances hash and compare by value."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Llama3Scaling(Spec):
    """Llama 3.1's frequency-dependent interpolation (arXiv:2407.21783, meta-llama/llama-models `apply_scaling`)."""

    type: Literal["llama3"] = "llama3"
    factor: float = Field(gt=0)
    """Divisor of the frequencies whose wavelength exceeds the original context."""
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_position: int = Field(gt=0)
    """Context length of pre-training, in tokens."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must exceed low_freq_factor ({self.low_freq_factor})"
            )
        return self


class RopeSpec(Spec):
    """Rotary position embedding (arXiv:2104.09864) of one layer."""

    theta: float = Field(gt=0)
    """Base of the geometric frequency series."""
    rotary_dim: int = Field(gt=0)
    """Leading channels of each head that are rotated; even, at most head_dim."""
    layout: Literal["interleaved", "half"]
    """Which channels form a pair: (2j, 2j+1), or (j, j + rotary_dim / 2)."""
    scaling: Llama3Scaling | None
    """Context extension, or None for the plain series."""

    @model_validator(mode="after")
    def _even(self) -> Self:
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even, is {self.rotary_dim}")
        return self


class QKNormSpec(Spec):
    """RMSNorm on queries and keys, before the rotation."""

    scope: Literal["per_head"]
    """per_head: statistics over one head's channels, one weight of head_dim shared by all heads."""
    eps: float = Field(gt=0)


class AttentionSpec(Spec):
    """Everything that decides what causal self-attention of one layer computes."""

    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    scale: float = Field(gt=0)
    """Factor on q·k before the softmax."""
    window: int | None = Field(gt=0)
    """Number of visible tokens, the current one included; None for all earlier ones."""
    softcap: float | None = Field(gt=0)
    """Scores become `softcap * tanh(scores / softcap)`; None for no cap."""
    qk_norm: QKNormSpec | None
    qkv_bias: bool
    out_bias: bool
    rope: RopeSpec | None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.rope is not None and self.rope.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim ({self.rope.rotary_dim}) exceeds head_dim ({self.head_dim})")
        return self


class FeedForwardSpec(Spec):
    """A dense feed-forward layer: `w2(act(w1 x) * w3 x)` if gated, else `w2(act(w1 x))`."""

    hidden_dim: int = Field(gt=0)
    activation: Literal["silu", "gelu", "gelu_tanh"]
    gated: bool
    bias: bool


class TransformerConfig(Spec):
    """Base of every model's config. Subclasses add fields and answer `attention` and `feed_forward` per layer.

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

    def attention(self, layer: int) -> AttentionSpec:
        """What attention of layer `layer` (0-based, global) computes."""
        raise NotImplementedError(f"{type(self).__qualname__}.attention(layer)")

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """What the feed-forward part of layer `layer` (0-based, global) computes."""
        raise NotImplementedError(f"{type(self).__qualname__}.feed_forward(layer)")

    def attention_specs(self) -> list[AttentionSpec]:
        return [self.attention(layer) for layer in range(self.num_layers)]

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

    def fingerprint(self) -> str:
        """Hash of the config and of every layer's specs: equal fingerprints mean the same function and shapes.

        Goes into checkpoints (to notice an edited config) and into the engine's compile-cache key.
        """
        facts = {
            "config": self.to_json(),
            "attention": [spec.model_dump(mode="json") for spec in self.attention_specs()],
            "feed_forward": [self.feed_forward(layer).model_dump(mode="json") for layer in range(self.num_layers)],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
