"""Normalisation layers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titan_adapters.config import LayerNormSpec, NormSpec, QKNormSpec, RMSNormSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (arXiv:1910.07467), statistics in fp32.

    Args:
        offset: Added to the stored weight. The weight starts such that the sum is 1.
        weight: Whether there is a weight.
        weight_in_fp32: Multiply the weight before rounding to the input's dtype, as Gemma and OLMo do. Otherwise the
            normalised value is rounded first, as in Llama's own code, in transformers and in vLLM.
    """

    def __init__(self, dim: int, eps: float, *, offset: float = 0.0, weight_in_fp32: bool = False, weight: bool = True):
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight_in_fp32 = weight_in_fp32
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        normed = x_fp32 * torch.rsqrt(self.mean_square(x_fp32) + self.eps)
        if self.weight is None:
            return normed.to(x.dtype)
        if self.weight_in_fp32:
            weight = self.weight.float()
            return (normed * (weight + self.offset if self.offset else weight)).to(x.dtype)
        return normed.to(x.dtype) * (self.weight + self.offset if self.offset else self.weight)

    def mean_square(self, x_fp32: Tensor) -> Tensor:
        """[..., D] -> [..., 1]."""
        return x_fp32.pow(2).mean(-1, keepdim=True)

    def extra_repr(self) -> str:
        shape = "no weight" if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.eps}, offset={self.offset}"


class RMSNormOverRanks(RMSNorm):
    """`norm` over channels that are spread over ranks, over as many on each.

    Channels that several ranks have are counted once for each, which leaves the mean as it is.

    Args:
        weight: This rank's part of the weight, if there is one.
        total: The sum over the ranks of a tensor that each has.
    """

    def __init__(self, norm: RMSNorm, weight: nn.Parameter | None, num_ranks: int, total: Callable[[Tensor], Tensor]):
        super().__init__(1, norm.eps, offset=norm.offset, weight_in_fp32=norm.weight_in_fp32, weight=False)
        self.weight = weight
        self._num_ranks = num_ranks
        self._total = total

    def mean_square(self, x_fp32: Tensor) -> Tensor:
        return self._total(super().mean_square(x_fp32)) / self._num_ranks


class LayerNorm(nn.Module):
    """Layer norm over the last dim (arXiv:1607.06450), with an optional bias."""

    def __init__(self, dim: int, eps: float, *, bias: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def make_norm(dim: int, spec: NormSpec) -> RMSNorm | LayerNorm:
    """The module that computes `spec` over `dim` channels."""
    if isinstance(spec, LayerNormSpec):
        return LayerNorm(dim, spec.eps, bias=spec.bias)
    assert isinstance(spec, RMSNormSpec)
    weight = not isinstance(spec, QKNormSpec) or spec.weight
    return RMSNorm(dim, spec.eps, offset=spec.offset, weight_in_fp32=spec.weight_in_fp32, weight=weight)
