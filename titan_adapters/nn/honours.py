"""Which module of plain torch computes each spec field. The engine's counterpart is `titan_adapters.vllm.honours`."""

from torch import nn

from titan_adapters.config import AttentionSpec
from titan_adapters.moe_spec import FeedForwardSpec, MoESpec
from titan_adapters.nn.attention import Attention, InnerAttention, QKVLinear
from titan_adapters.nn.feed_forward import FeedForward
from titan_adapters.nn.moe import InnerExperts, MoE, Router
from titan_adapters.nn.norm import RMSNorm
from titan_adapters.nn.rope import Rope
from titan_adapters.spec import Spec

HONOURED: dict[type[Spec], dict[str, type[nn.Module]]] = {
    AttentionSpec: {
        "num_heads": QKVLinear,
        "num_kv_heads": QKVLinear,
        "head_dim": QKVLinear,
        "v_head_dim": QKVLinear,
        "scale": InnerAttention,
        "window": InnerAttention,
        "chunk": InnerAttention,
        "sinks": InnerAttention,
        "softcap": InnerAttention,
        "qk_norm": RMSNorm,
        "biases": Attention,
        "rope": Rope,
        "temperature": Attention,
        "output_gate": Attention,
    },
    MoESpec: {
        "num_experts": InnerExperts,
        "top_k": Router,
        "hidden_dim": InnerExperts,
        "score": Router,
        "renormalize": Router,
        "scaling_factor": Router,
        "groups": Router,
        "correction_bias": Router,
        "weighs": InnerExperts,
        "router_dtype": Router,
        "router_bias": Router,
        "activation": InnerExperts,
        "gated": InnerExperts,
        "bias": InnerExperts,
        "shared": MoE,
    },
    FeedForwardSpec: dict.fromkeys(("hidden_dim", "activation", "gated", "bias"), FeedForward),
}
