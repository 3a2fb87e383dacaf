"""Facts about a model, as frozen data that is readable before any module exists.

The emitter, the KV cache and the parallel plan read only these specs. No field that changes the computed function
has a default: an author states every one of them. Imports neither torch nor vllm.
"""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from titan_adapters.errors import ConfigError

DType = Literal["float32", "bfloat16", "float16"]


class Spec(BaseModel):
    """Frozen pydantic base: unknown keys are errors, instances hash and compare by value."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LinearScaling(Spec):
    """Position interpolation (arXiv:2306.15595): every frequency is divided."""

    type: Literal["linear"] = "linear"
    factor: float = Field(gt=0)


class DynamicScaling(Spec):
    """Dynamic NTK: the base grows with the sequence, once that exceeds the original context.

    A causal model cannot know how long its sequence will become, so the table is that of a sequence of `max_seq_len`.
    """

    type: Literal["dynamic"] = "dynamic"
    factor: float = Field(gt=0)
    original_max_position: int = Field(gt=0)
    """Context length of pre-training, in tokens."""


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


class YarnScaling(Spec):
    """YaRN (arXiv:2309.00071): interpolation of long wavelengths, and a factor on cos and sin.

    The factor is `attention_factor` if given, else `m(mscale) / m(mscale_all_dim)` if those are, else `m(1)`, where
    m(s) = 0.1 * s * ln(factor) + 1, and 1 for factors up to 1.
    """

    type: Literal["yarn"] = "yarn"
    factor: float = Field(gt=0)
    original_max_position: int = Field(gt=0)
    """Context length of pre-training, in tokens."""
    beta_fast: float = Field(gt=0)
    """Pairs that turn more often than this within the original context are kept."""
    beta_slow: float = Field(gt=0)
    """Pairs that turn less often than this are divided by `factor`; a linear ramp leads from one to the other."""
    truncate: bool
    """Whether the ends of the ramp are rounded outwards to whole pairs."""
    attention_factor: float | None = Field(gt=0)
    mscale: float | None = Field(gt=0)
    mscale_all_dim: float | None = Field(gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast ({self.beta_fast}) must be at least beta_slow ({self.beta_slow})")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim act together: give both or neither")
        return self


class LongRopeScaling(Spec):
    """LongRoPE (arXiv:2402.13753): each pair has a divisor of its own.

    The long divisors hold for every token of a model whose `max_seq_len` exceeds the original context, the short ones
    for every token of one that stays within it. (transformers switches all tokens of a batch as soon as its longest
    sequence crosses the boundary, which no KV cache can follow.)
    """

    type: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int = Field(gt=0)
    """Context length of pre-training, in tokens."""
    attention_factor: float = Field(gt=0)
    """Multiplies cos and sin, at every length."""


class ProportionalScaling(Spec):
    """Exponents over all of `rotary_dim`, of which only the first pairs turn; the others keep angle zero."""

    type: Literal["proportional"] = "proportional"
    factor: float = Field(gt=0)
    """Divisor of the frequencies."""
    turning_dim: int = Field(gt=0)
    """Channels that turn; even."""


RopeScaling = Annotated[
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling,
    Field(discriminator="type"),
]


class RopeSpec(Spec):
    """Rotary position embedding (arXiv:2104.09864) of one layer."""

    theta: float = Field(gt=0)
    """Base of the geometric frequency series."""
    rotary_dim: int = Field(gt=0)
    """Leading channels of each head that are rotated; even, at most head_dim."""
    layout: Literal["interleaved", "half"]
    """Which channels form a pair: (2j, 2j+1), or (j, j + rotary_dim / 2)."""
    scaling: RopeScaling | None
    """Context extension, or None for the plain series."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even, is {self.rotary_dim}")
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                given = len(getattr(self.scaling, name))
                if given != self.rotary_dim // 2:
                    raise ValueError(f"{name} must have rotary_dim / 2 = {self.rotary_dim // 2} numbers, has {given}")
        if isinstance(self.scaling, ProportionalScaling):
            turning = self.scaling.turning_dim
            if turning % 2 or turning > self.rotary_dim:
                raise ValueError(f"turning_dim must be even and at most rotary_dim = {self.rotary_dim}, is {turning}")
        return self


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
    """RMSNorm on queries and keys, before the rotation."""

    scope: Literal["per_head", "full"]
    """per_head: statistics over one head's channels, one weight of head_dim shared by all heads. full: statistics
    over the channels of all heads together, one weight per channel."""


class TemperatureSpec(Spec):
    """Queries times `1 + beta * ln(1 + floor(position / original_max_position))`, after the rotation.

    Llama 4's attention temperature, which sharpens attention beyond the original context.
    """

    beta: float = Field(gt=0)
    original_max_position: int = Field(gt=0)
    """In tokens."""


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
    temperature: TemperatureSpec | None

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

    def attention(self, layer: int) -> AttentionSpec:
        """What attention of layer `layer` (0-based, global) computes."""
        raise NotImplementedError(f"{type(self).__qualname__}.attention(layer)")

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """What the feed-forward part of layer `layer` (0-based, global) computes."""
        raise NotImplementedError(f"{type(self).__qualname__}.feed_forward(layer)")

    def norm(self) -> NormSpec:
        """What the norms on the residual stream compute, all layers' and the final one."""
        raise NotImplementedError(f"{type(self).__qualname__}.norm()")

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
        norm = self.norm()
        facts = {
            "config": self.to_json(),
            "attention": [spec.model_dump(mode="json") for spec in self.attention_specs()],
            "feed_forward": [self.feed_forward(layer).model_dump(mode="json") for layer in range(self.num_layers)],
            "norm": [type(norm).__name__, norm.model_dump(mode="json")],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
