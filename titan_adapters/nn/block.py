"""Whole decoder layers."""

from torch import Tensor, nn

from titan_adapters.config import TransformerConfig
from titan_adapters.nn.attention import Attention, SequenceInfo
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.norm import make_norm


class PreNormBlock(nn.Module):
    """Llama's layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`."""

    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__()
        self.attention_norm = make_norm(config.dim, config.norm())
        self.attention = Attention(config, layer)
        self.ffn_norm = make_norm(config.dim, config.norm())
        self.feed_forward = FeedForward(config, layer)

    def forward(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        x = x + self.attention(self.attention_norm(x), seq)
        return x + self.feed_forward(self.ffn_norm(x))


class SandwichNormBlock(nn.Module):
    """A norm before and after each half: `x + norm(attention(norm(x)))`, then the same with the feed-forward layer."""

    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__()
        self.attention_norm = make_norm(config.dim, config.norm())
        self.attention = Attention(config, layer)
        self.post_attention_norm = make_norm(config.dim, config.norm())
        self.ffn_norm = make_norm(config.dim, config.norm())
        self.feed_forward = FeedForward(config, layer)
        self.post_ffn_norm = make_norm(config.dim, config.norm())

    def forward(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        x = x + self.post_attention_norm(self.attention(self.attention_norm(x), seq))
        return x + self.post_ffn_norm(self.feed_forward(self.ffn_norm(x)))


class PostNormBlock(nn.Module):
    """OLMo 2's layer: `x + norm(attention(x))`, then `x + norm(feed_forward(x))`."""

    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__()
        self.attention = Attention(config, layer)
        self.attention_norm = make_norm(config.dim, config.norm())
        self.feed_forward = FeedForward(config, layer)
        self.ffn_norm = make_norm(config.dim, config.norm())

    def forward(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        x = x + self.attention_norm(self.attention(x, seq))
        return x + self.ffn_norm(self.feed_forward(x))
