"""What rotary position embedding of one layer computes, as frozen data. Imports neither torch nor vllm."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from titan_adapters.spec import Spec


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
    """As the lower one, if nothing is blended in between (Llama 4)."""
    original_max_position: int = Field(gt=0)
    """Context length of pre-training, in tokens."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be at least low_freq_factor ({self.low_freq_factor})"
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
        if isinstance(self.scaling, YarnScaling) and self.theta == 1:
            raise ValueError("yarn needs a theta other than 1, at which all pairs turn equally often")
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
