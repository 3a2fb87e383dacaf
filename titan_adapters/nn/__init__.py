"""Blocks that authors compose, and the seams that engines replace (`InnerAttention`, `QKVLinear`, `FeedForward`)."""

from titan_adapters.nn.attention import Attention, InnerAttention, QKVLinear, SequenceInfo, sequence_info
from titan_adapters.nn.block import PostNormBlock, PreNormBlock, SandwichNormBlock
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.norm import LayerNorm, RMSNorm, make_norm
from titan_adapters.nn.rope import Rope

__all__ = [
    "Attention",
    "FeedForward",
    "InnerAttention",
    "LayerNorm",
    "PostNormBlock",
    "PreNormBlock",
    "QKVLinear",
    "RMSNorm",
    "Rope",
    "SandwichNormBlock",
    "SequenceInfo",
    "make_norm",
    "sequence_info",
]
