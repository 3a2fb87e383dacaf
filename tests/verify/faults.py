"""Faults to seed into a running engine, and where each should be found; not a test.

`for fault in FAULTS: with fault.seeded(llm, model): ...`, with an engine in this process that serves
`random_model(*served(fault.model))` without prefix caching. Undone at the end of the block.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import titan_adapters as ta
from tests.vllm.conftest import engine_model
from titan_adapters.nn.rope import cos_sin_table
from titan_adapters.state_dict import native_tensors

Weights = dict[str, Tensor]


def served(name: str, dtype: str = "bfloat16") -> tuple[type[ta.BaseTransformer], ta.TransformerConfig]:
    """The first tiny config of a family."""
    cls = ta.get_model(name)
    return cls, next(iter(cls.tiny_configs().values())).model_copy(update={"dtype": dtype})


@dataclass(frozen=True)
class Fault:
    """One thing wrong in an engine."""

    name: str
    model: str
    """Registered name."""
    path: str
    """Of the stage that is to be found."""
    kind: ta.verify.Kind
    weights: Callable[[Weights], Weights] | None = None
    """From the right weights, on which it may write, to those that are wrong."""
    patches: Callable[[Any], list[AbstractContextManager]] | None = None
    """What to patch in the engine's `BaseTransformer`."""

    @contextmanager
    def seeded(self, llm: Any, model: ta.BaseTransformer) -> Iterator[None]:
        """The fault is in `llm`, which serves `model`, inside the block."""
        right = native_tensors(model)
        with ExitStack() as stack:
            if self.weights is not None:
                stack.callback(_load, llm, right)
                _load(llm, right | self.weights({name: tensor.detach().clone() for name, tensor in right.items()}))
            for patch in self.patches(engine_model(llm).backbone.model) if self.patches else []:
                stack.enter_context(patch)
            yield


def _load(llm: Any, weights: Weights) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})


def swap(one: str, other: str) -> Callable[[Weights], Weights]:
    return lambda w: {one: w[other], other: w[one]}


def change(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    return lambda w: {name: function(w[name])}


def attribute(path: str, name: str, function: Callable[[Any], Any]) -> Callable[[Any], list[AbstractContextManager]]:
    """Another value for an attribute of the engine's module at `path`."""

    def patches(model: Any) -> list[AbstractContextManager]:
        module = model
        for part in path.split(".") if path else []:
            module = getattr(module, part)
        return [mock.patch.object(module, name, function(getattr(module, name)))]

    return patches


def table(path: str, other: Callable[[ta.nn.Rope], Tensor]) -> Callable[[Any], list[AbstractContextManager]]:
    """Another table of cosines and sines. It stays a buffer: a reload of weights counts on it."""

    def patches(model: Any) -> list[AbstractContextManager]:
        rope = model.get_submodule(path)
        return [mock.patch.dict(rope._buffers, {"cos_sin": other(rope)})]

    return patches


def rope_spec(**changes: Any) -> Callable[[ta.nn.Rope], Tensor]:
    return lambda rope: cos_sin_table(rope.spec.model_copy(update=changes), rope.max_seq_len, rope.cos_sin.device)


def times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


def spec(**changes: Any) -> Callable[[Any], Any]:
    return lambda spec: spec.model_copy(update=changes)


def heads(num_heads: int, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`function` of a projection's rows as [heads, head_dim, ...]."""
    return lambda w: function(w.unflatten(0, (num_heads, -1))).reshape(w.shape).contiguous()


def interleaved(x: Tensor) -> Tensor:
    """Heads [N, H, ...] with the two halves of their channels in turns."""
    return torch.stack(x.chunk(2, dim=1), dim=2)


def later_position(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, positions, *rest: forward(q, k, positions + 1, *rest)


def one_row(row: int) -> Callable[[Tensor], Tensor]:
    """Another row in place of this one."""

    def function(x: Tensor) -> Tensor:
        x[row] = x[row + 1]
        return x

    return function


def backwards(model: Any) -> Callable[..., Any]:
    def run_layers(x: Tensor, seq: Any, start: int = 0, stop: int | None = None) -> Tensor:
        for layer in reversed(model.layers[start:stop]):
            x = layer(x, seq)
        return x

    return run_layers


def without_residual(model: Any) -> list[AbstractContextManager]:
    block = model.layers[1]

    def forward(x: Tensor, seq: Any) -> Tensor:
        x = x + block.attention(block.attention_norm(x), seq)
        return block.ffn(block.ffn_norm(x))

    return [mock.patch.object(block, "forward", forward)]


ATTENTION = "layers.1.attention"
INNER, QKV, ROPE = f"{ATTENTION}.inner_attention", f"{ATTENTION}.qkv_linear", f"{ATTENTION}.norm_rope"
MOE = "layers.1.moe"

FAULTS = [
    Fault("swapped norms", "llama", "layers.1.attention_norm", "norm",
          weights=swap("layers.1.attention_norm.weight", "layers.1.ffn_norm.weight")),
    Fault("final norm's epsilon", "llama", "norm", "norm", patches=attribute("norm", "eps", times(3e4))),
    Fault("kv heads in another order", "llama", QKV, "qkv",
          weights=change(f"{QKV}.wk.weight", heads(2, lambda x: x.flip(0)))),
    Fault("keys permuted with the queries' number of heads", "llama", QKV, "qkv",
          weights=change(f"{QKV}.wk.weight", heads(4, interleaved))),
    Fault("queries in the other rope layout", "llama", QKV, "qkv",
          weights=change(f"{QKV}.wq.weight", heads(4, interleaved))),
    Fault("rope base", "llama", ROPE, "rope", patches=table(f"{ATTENTION}.rope", rope_spec(theta=1.01e4))),
    Fault("positions off by one", "llama", ROPE, "rope", patches=attribute(ROPE, "forward", later_position)),
    Fault("scale", "llama", INNER, "attention", patches=attribute(f"{INNER}.attn.impl", "scale", times(1.1))),
    Fault("heads reversed in the output projection", "llama", f"{ATTENTION}.wo", "projection",
          weights=change(f"{ATTENTION}.wo.weight", lambda w: w.flip(1))),
    Fault("gate and up swapped", "llama", "layers.1.feed_forward", "feed_forward",
          weights=swap("layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w3.weight")),
    Fault("another activation", "llama", "layers.1.feed_forward", "feed_forward",
          patches=attribute("layers.1.feed_forward", "act", lambda _: gelu_and_mul)),
    Fault("residual dropped", "llama", "layers.1", "block", patches=without_residual),
    Fault("layers in reverse", "llama", "layers.0", "chain",
          patches=lambda model: [mock.patch.object(model, "run_layers", backwards(model))]),
    Fault("head's rows off by one", "llama", "lm_head", "head",
          weights=change("lm_head.weight", lambda w: w.roll(1, 0))),
    Fault("one token's embedding", "llama", "tok_embeddings", "embedding",
          weights=change("tok_embeddings.weight", one_row(0))),
    Fault("embeddings unscaled", "gemma3_text", "tok_embeddings", "embedding",
          patches=lambda model: [mock.patch.object(model, "embed", model.tok_embeddings.forward)]),
    Fault("norm without its offset", "gemma3_text", "layers.0.attention_norm", "norm",
          patches=attribute("layers.0.attention_norm", "offset", times(0.0))),
    Fault("norms around the feed-forward part swapped", "gemma3_text", "layers.1.ffn_norm", "norm",
          weights=swap("layers.1.ffn_norm.weight", "layers.1.post_ffn_norm.weight")),
    Fault("q and k norm swapped", "gemma3_text", f"{ATTENTION}.q_norm", "norm",
          weights=swap(f"{ATTENTION}.q_norm.weight", f"{ATTENTION}.k_norm.weight")),
    Fault("window one token short", "gemma3_text", INNER, "attention",
          patches=attribute(f"{INNER}.attn.impl", "sliding_window", lambda window: window - 1)),
    Fault("rope of the other layers", "gemma3_text", ROPE, "rope",
          patches=table(f"{ATTENTION}.rope", rope_spec(theta=1e6))),
    Fault("rope's factor missing", "gemma3_text", "layers.2.attention.norm_rope", "rope",
          patches=table("layers.2.attention.rope", rope_spec(scaling=None))),
    Fault("q bias missing", "gpt_oss", QKV, "qkv", weights=change(f"{QKV}.wq.bias", torch.zeros_like)),
    Fault("output bias missing", "gpt_oss", f"{ATTENTION}.wo", "projection",
          weights=change(f"{ATTENTION}.wo.bias", torch.zeros_like)),
    Fault("sinks dropped", "gpt_oss", INNER, "attention",
          weights=change(f"{INNER}.sinks", lambda sinks: torch.full_like(sinks, -100.0))),
    Fault("rope multiplier missing", "gpt_oss", ROPE, "rope",
          patches=table(f"{ATTENTION}.rope", lambda rope: rope.cos_sin / 1.1386)),
    Fault("square expert transposed", "gpt_oss", MOE, "experts",
          weights=change(f"{MOE}.experts.w2", lambda w: w.transpose(1, 2).contiguous())),
    Fault("experts in another order", "gpt_oss", MOE, "experts",
          weights=change(f"{MOE}.experts.w2", lambda w: w.roll(1, 0))),
    Fault("expert bias missing", "gpt_oss", MOE, "experts", weights=change(f"{MOE}.experts.b2", torch.zeros_like)),
    Fault("router bias missing", "gpt_oss", f"{MOE}.router", "router",
          weights=change(f"{MOE}.router.gate.bias", torch.zeros_like)),
    Fault("router's rows permuted", "qwen3_moe", f"{MOE}.router", "router",
          weights=change(f"{MOE}.router.gate.weight", lambda w: w.roll(1, 0))),
    Fault("weights not renormalised", "qwen3_moe", f"{MOE}.router", "router",
          patches=attribute(f"{MOE}.vllm_router", "renormalize", lambda _: False)),
    Fault("correction bias missing", "glm4_moe", f"{MOE}.router", "router",
          weights=change(f"{MOE}.router.correction_bias", torch.zeros_like)),
    Fault("shared experts missing", "glm4_moe", MOE, "experts",
          weights=change(f"{MOE}.shared_experts.w2.weight", torch.zeros_like)),
    Fault("residual multiplier", "granite", "layers.1.ffn_norm", "chain",
          patches=attribute("layers.1", "multiplier", times(1.05))),
    Fault("logits undivided", "granite", "lm_head", "head",
          patches=lambda model: [mock.patch.object(model, "compute_logits", model.lm_head.forward)]),
    Fault("query temperature missing", "llama4_text", INNER, "chain",
          patches=attribute(ATTENTION, "spec", spec(temperature=None))),
]  # fmt: skip


def gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
