"""Whole decoder layers.

The feed-forward part is `feed_forward` in a dense layer and `moe` in one with a mixture of experts.
"""

from torch import Tensor, nn

from titan_adapters.config import TransformerConfig
from titan_adapters.moe_spec import MoESpec
from titan_adapters.nn.attention import Attention, SequenceInfo
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.moe import MoE
from titan_adapters.nn.norm import make_norm


class DecoderBlock(nn.Module):
    """Base of decoder layers: attention, the feed-forward part, and a norm for each."""

    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__()
        self.attention = Attention(config, layer)
        self.attention_norm = make_norm(config.dim, config.norm())
        self.ffn_norm = make_norm(config.dim, config.norm())
        self.feed_forward = self.moe = None
        spec = config.feed_forward(layer)
        if isinstance(spec, MoESpec):
            self.moe = MoE(config.dim, spec, layer)
        else:
            self.feed_forward = FeedForward(config.dim, spec)

    def ffn(self, x: Tensor) -> Tensor:
        """The feed-forward part, dense or a mixture: [..., D] -> [..., D]."""
        part = self.feed_forward if self.moe is None else self.moe
        assert part is not None
        return part(x)


class PreNormBlock(DecoderBlock):
    """Llama's layer: `x + attention(norm(x))`, then `x + ffn(norm(x))`."""

    def forward(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        x = x + self.attention(self.attention_norm(x), seq)
        return x + self.ffn(self.ffn_norm(x))


class SandwichNormBlock(DecoderBlock):
    """A norm before and after each half: `x + norm(attention(norm(x)))`, then the same with the feed-forward part."""

    def __init__(self, config: TransformerConfig, layer: int):
        super().__init__(config, layer)
        self.post_attention_norm = make_norm(config.dim, config.norm())
        self.post_ffn_norm = make_norm(config.dim, config.norm())

    def forward(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        x = x + self.post_attention_norm(self.attention(self.attention_norm(x), seq))
        return x + self.post_ffn_norm(self.ffn(self.ffn_norm(x)))


class PostNormBlock(DecoderBlock):
    """OLMo 2's layer: `x + norm(attention(x))`, then `x + norm(ffn(x))`."""

    def forward(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """[..., D] -> [..., D]."""
        x = x + self.attention_norm(self.attention(x, seq))
        return x + self.ffn_norm(self.ffn(x))
