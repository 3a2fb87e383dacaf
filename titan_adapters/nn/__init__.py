"""Blocks that authors compose, and the seams that engines replace (`InnerAttention`, `QKVLinear`, `FeedForward`)."""

from titan_adapters.nn.attention import Attention, InnerAttention, QKVLinear, SequenceInfo, sequence_info
from titan_adapters.nn.block import PreNormBlock
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.norm import RMSNorm
from titan_adapters.nn.rope import Rope

__all__ = [
    "Attention",
    "FeedForward",
    "InnerAttention",
    "PreNormBlock",
    "QKVLinear",
    "RMSNorm",
    "Rope",
    "SequenceInfo",
    "sequence_info",
]
