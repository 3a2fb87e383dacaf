"""Which spec fields the engine honours, and who computes each. What is in use and not listed here is refused.

So a field that is added to a spec is refused until somebody has looked after it in the engine.
"""

from collections.abc import Iterator
from typing import Any

from titan_adapters.config import AttentionSpec, TransformerConfig, layers_by_value
from titan_adapters.moe_spec import FeedForwardSpec, MoESpec
from titan_adapters.spec import Spec

ATTENTION, OWN = "vLLM's attention", "the model's own module"
NORM_ROPE = "the model's own module; on CUDA our kernel"
EXPERTS = "vLLM's fused experts, or the model's own"
ROUTER = "vLLM's router, or the model's own"

HONOURED: dict[type[Spec], dict[str, str]] = {
    AttentionSpec: {
        "num_heads": ATTENTION,
        "num_kv_heads": ATTENTION,
        "head_dim": ATTENTION,
        "v_head_dim": ATTENTION,  # the narrower of head_dim and v_head_dim is filled up with zeros
        "scale": ATTENTION,
        "window": ATTENTION,  # per layer; counts the current token, as ours does
        "chunk": "vLLM's ChunkedLocalAttention",
        "sinks": ATTENTION,
        "softcap": ATTENTION,
        "qk_norm": NORM_ROPE,
        "biases": "vLLM's linears",
        "rope": NORM_ROPE,  # every kind: the table is ours, so are its multipliers
        "temperature": OWN,
        "output_gate": "vLLM's ColumnParallelLinear, and the model's own module",
    },
    MoESpec: {
        "num_experts": EXPERTS,
        "top_k": ROUTER,
        "hidden_dim": EXPERTS,
        "score": ROUTER,
        "renormalize": ROUTER,
        "scaling_factor": ROUTER,
        "groups": ROUTER,
        "correction_bias": ROUTER,
        "weighs": EXPERTS,
        "router_dtype": OWN,
        "router_bias": OWN,
        "activation": EXPERTS,
        "gated": EXPERTS,
        "bias": EXPERTS,
        "shared": "vLLM's linears",
    },
    FeedForwardSpec: {
        "hidden_dim": "vLLM's linears",
        "activation": "vLLM's SiluAndMul and GeluAndMul if gated, else the model's own module",
        "gated": "vLLM's MergedColumnParallelLinear",
        "bias": "vLLM's linears",
    },
}


def unhonoured(config: TransformerConfig) -> list[str]:
    """Fields in use that the engine would ignore, each with the layers concerned."""
    found = layers_by_value(
        (f"{name} = {value!r}", layer)
        for layer in range(config.num_layers)
        for spec in (config.attention(layer), config.feed_forward(layer))
        for name, value in _in_use(spec)
    )
    problems = [f"{what} of layers {layers} is not honoured by vLLM's engine" for what, layers in found.items()]
    for name in ("window", "sinks", "softcap"):
        both = [i for i, s in enumerate(config.attention_specs()) if s.chunk is not None and getattr(s, name)]
        if both:
            problems.append(
                f"chunk together with {name} of layers {both} is not honoured: vLLM's chunked layer lacks it"
            )
    return problems


def _in_use(spec: Spec) -> Iterator[tuple[str, Any]]:
    honoured = next(fields for base, fields in HONOURED.items() if isinstance(spec, base))
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if name not in honoured and value is not None and value is not False:
            yield f"{type(spec).__name__}.{name}", value


def unpageable(config: TransformerConfig, block_size: int) -> list[str]:
    """What can't be cached in blocks of `block_size` tokens: vLLM gives each chunk whole blocks."""
    chunks = ((spec.chunk, layer) for layer, spec in enumerate(config.attention_specs()) if spec.chunk is not None)
    layers = layers_by_value((chunk, layer) for chunk, layer in chunks if chunk % block_size)
    return [
        f"chunk {chunk} of layers {ids} is not a multiple of the KV cache's block_size, {block_size} tokens"
        for chunk, ids in layers.items()
    ]
