"""Frequencies and multipliers of every kind of rope, on the CPU in fp32.

Shapes: R rotary_dim. Each function states its source; operations are in the order of the reference implementation
(transformers `modeling_rope_utils.py`), so that the bits agree where the formula does.
"""

import math

import torch
from torch import Tensor

from titan_adapters.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)


def inverse_frequencies(spec: RopeSpec, max_seq_len: int) -> Tensor:
    """Angular step per position of each rotated pair: fp32, [R / 2], in radians.

    Args:
        max_seq_len: Tokens of the longest sequence; the kinds that depend on the sequence's length take this one.
    """
    dim, scaling = spec.rotary_dim, spec.scaling
    match scaling:
        case None:
            return _series(spec.theta, dim)
        case LinearScaling():
            return _series(spec.theta, dim) / scaling.factor
        case DynamicScaling():
            return _series(_dynamic_theta(spec.theta, dim, scaling, max_seq_len), dim)
        case Llama3Scaling():
            return _llama3(_series(spec.theta, dim), scaling)
        case YarnScaling():
            return _yarn(spec.theta, dim, scaling)
        case LongRopeScaling():
            is_long = max_seq_len > scaling.original_max_position
            divisors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor, device="cpu")
            return 1.0 / (divisors * spec.theta ** _exponents(dim))
        case ProportionalScaling():
            steps = _series(spec.theta, dim)
            steps[scaling.turning_dim // 2 :] = 0.0
            return steps / scaling.factor


def multiplier(spec: RopeSpec) -> float:
    """Factor on cos and sin. Queries and keys both carry it, so scores grow by its square."""
    match spec.scaling:
        case YarnScaling() as s if s.attention_factor is not None:
            return s.attention_factor
        case YarnScaling() as s if s.mscale is not None and s.mscale_all_dim is not None:
            return _yarn_mscale(s.factor, s.mscale) / _yarn_mscale(s.factor, s.mscale_all_dim)
        case YarnScaling() as s:
            return _yarn_mscale(s.factor, 1.0)
        case LongRopeScaling() as s:
            return s.attention_factor
    return 1.0


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim


def _series(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** _exponents(dim))


def _dynamic_theta(theta: float, dim: int, s: DynamicScaling, max_seq_len: int) -> float:
    length = max(max_seq_len, s.original_max_position)
    return theta * ((s.factor * length / s.original_max_position) - (s.factor - 1)) ** (dim / (dim - 2))


def _llama3(inv_freq: Tensor, s: Llama3Scaling) -> Tensor:
    """Keep short wavelengths, divide long ones by `factor`, blend in between."""
    wavelength = 2 * math.pi / inv_freq
    longest_kept = s.original_max_position / s.high_freq_factor
    if s.high_freq_factor == s.low_freq_factor:
        return torch.where(wavelength < longest_kept, inv_freq, inv_freq / s.factor)
    smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blended = (1 - smooth) * inv_freq / s.factor + smooth * inv_freq
    shortest_divided = s.original_max_position / s.low_freq_factor
    scaled = torch.where(wavelength > shortest_divided, inv_freq / s.factor, blended)
    return torch.where(wavelength < longest_kept, inv_freq, scaled)


def _yarn_mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(theta: float, dim: int, s: YarnScaling) -> Tensor:
    """Pairs up to `first` are kept, those from `last` on divided by `factor`, with a linear ramp in between."""

    def pair_that_turns(times: float) -> float:
        """Index (fractional) of the pair that turns so often within the original context."""
        return dim * math.log(s.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(s.beta_fast), pair_that_turns(s.beta_slow)
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # the reference's guard against dividing by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    powers = theta ** _exponents(dim)
    return 1.0 / (s.factor * powers) * (1 - kept) + 1.0 / powers * kept
