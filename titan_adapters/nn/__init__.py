"""Blocks that authors compose, and the seams that engines replace.

Seams: `InnerAttention`, `QKVLinear`, `NormRope`, `FeedForward`, `MoE` and, in an author's own mixture, `InnerExperts`.
"""

from titan_adapters.nn.attention import Attention, InnerAttention, NormRope, QKVLinear, SequenceInfo, sequence_info
from titan_adapters.nn.block import DecoderBlock, PostNormBlock, PreNormBlock, SandwichNormBlock
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.kernels import use_kernels
from titan_adapters.nn.moe import InnerExperts, MoE, Router, Routing
from titan_adapters.nn.norm import LayerNorm, RMSNorm, make_norm
from titan_adapters.nn.rope import Rope
from titan_adapters.nn.routing import RoutingRecord, choose_experts, record_routing, replay_routing

__all__ = [
    "Attention",
    "DecoderBlock",
    "FeedForward",
    "InnerAttention",
    "InnerExperts",
    "LayerNorm",
    "MoE",
    "NormRope",
    "PostNormBlock",
    "PreNormBlock",
    "QKVLinear",
    "RMSNorm",
    "Rope",
    "Router",
    "Routing",
    "RoutingRecord",
    "SandwichNormBlock",
    "SequenceInfo",
    "choose_experts",
    "make_norm",
    "record_routing",
    "replay_routing",
    "sequence_info",
    "use_kernels",
]
