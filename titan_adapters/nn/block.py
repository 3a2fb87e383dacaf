"""Whole decoder layers."""

from torch import Tensor, nn

from titan_adapters.config import TransformerConfig
from titan_adapters.nn.attention import Attention, SequenceInfo
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.norm import RMSNorm


class PreNormBlock(nn.Module):
    """Llama's layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`."""

    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config, layer)

    def forward(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        x = x + self.attention(self.attention_norm(x), seq)
        return x + self.feed_forward(self.ffn_norm(x))
