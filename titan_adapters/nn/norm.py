"""Normalisation layers."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (arXiv:1910.07467), statistics in fp32.

    The normalised value is rounded to the input's dtype before the weight multiplies it, as in Llama's own code, in
    transformers and in vLLM.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
