"""All seeded faults, what finds each of them, and where. `python -m tests.verify.faults` prints docs/faults.md.

Each line is asserted by a test: those in engines by test_faults.py, those over ranks by tests/vllm/test_parallel.py,
those in a model's file by tests/testing/test_suite.py.
"""

from collections.abc import Iterator
from unittest import mock

import torch

from tests.testing.test_suite import FAULTS as MODEL_FAULTS
from tests.verify.seeding import (
    Fault,
    attribute,
    backwards,
    change,
    forgetting,
    from_position,
    gelu_and_mul,
    heads,
    interleaved,
    later_when_decoding,
    next_bf16,
    one_row,
    other_positions,
    restarting,
    rope_spec,
    spec,
    stale_prefix_cache,
    swap,
    table,
    through_the_batch,
    times,
    untied,
    without_residual,
)

ATTENTION = "layers.1.attention"
INNER, QKV, ROPE = f"{ATTENTION}.inner_attention", f"{ATTENTION}.qkv_linear", f"{ATTENTION}.norm_rope"
MOE = "layers.1.moe"
KV = (f"{QKV}.wk.weight", f"{QKV}.wv.weight")
WO, BIAS = f"{ATTENTION}.wo.weight", f"{MOE}.router.correction_bias"
EQUAL = ("equal",)
CHUNKED = ("chunked prefill", "prefix-cache hit", "preemption and resume")
"""Where requests come in several steps of more than one token, the last after what the cache has."""

ENGINE_FAULTS = [
    Fault("swapped norms", "llama", "layers.1.attention_norm", "norm",
          weights=swap("layers.1.attention_norm.weight", "layers.1.ffn_norm.weight")),
    Fault("final norm's epsilon", "llama", "norm", "norm", patches=attribute("norm", "eps", times(3e4))),
    Fault("kv heads in another order", "llama", QKV, "qkv",
          weights=change(f"{QKV}.wk.weight", heads(2, lambda x: x.flip(0)))),
    Fault("keys permuted with the queries' number of heads", "gemma3_text", QKV, "qkv",
          weights=change(f"{QKV}.wk.weight", heads(4, interleaved))),
    Fault("queries in the other rope layout", "llama", QKV, "qkv",
          weights=change(f"{QKV}.wq.weight", heads(6, interleaved))),
    Fault("rope base", "llama", ROPE, "rope", patches=table(f"{ATTENTION}.rope", rope_spec(theta=1.01e4))),
    Fault("positions off by one", "llama", ROPE, "rope",
          patches=attribute(ROPE, "forward", other_positions(lambda positions: positions + 1))),
    Fault("scale", "llama", INNER, "attention", patches=attribute(f"{INNER}.attn.impl", "scale", times(1.1))),
    Fault("heads reversed in the output projection", "llama", f"{ATTENTION}.wo", "projection",
          weights=change(f"{ATTENTION}.wo.weight", lambda w: w.flip(1))),
    Fault("gate and up swapped", "llama", "layers.1.feed_forward", "feed_forward",
          weights=swap("layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w3.weight")),
    Fault("another activation", "llama", "layers.1.feed_forward", "feed_forward",
          patches=attribute("layers.1.feed_forward.act", "forward", lambda _: gelu_and_mul)),
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
    Fault("rope base, from a position on", "llama", ROPE, "rope", since=40,
          patches=table(f"{ATTENTION}.rope", from_position(40, rope_spec(theta=1.01e4)))),
    Fault("positions off by one when decoding", "llama", ROPE, "rope", since=61,
          patches=attribute(ROPE, "forward", other_positions(later_when_decoding))),
    Fault("positions restart at each chunk", "llama", ROPE, "rope", since=32, rows=CHUNKED,
          patches=attribute(ROPE, "forward", other_positions(restarting))),
    Fault("earlier chunks not seen", "llama", INNER, "attention", since=32, rows=CHUNKED, patches=forgetting),
    Fault("positions counted through the batch", "llama", rows=("mixed batch", "preemption and resume"),
          patches=attribute(ROPE, "forward", other_positions(through_the_batch))),
    Fault("stale prefix cache after an update of weights", "llama", rows=("prefix-cache hit",),
          around=stale_prefix_cache),
    Fault("one element of one weight, one bf16 step larger", "llama", claims=EQUAL, names=(WO,),
          weights=next_bf16(WO, 7)),
    Fault("two weights of equal shape swapped", "llama", QKV, "qkv",
          claims=EQUAL, names=KV, weights=swap(*KV)),
    Fault("router's correction bias rounded to bf16", "glm4_moe", claims=EQUAL, names=(BIAS,),
          weights=change(BIAS, lambda bias: bias.bfloat16().float())),
    Fault("head untied", "gemma3_text", patches=untied,
          claims=("ties share memory",), names=("tok_embeddings.weight and lm_head.head.weight",)),
]  # fmt: skip

RANK_FAULTS = [
    Fault("kv heads over the ranks in another order", "llama", QKV, "qkv", claims=EQUAL, names=KV,
          weights=lambda w: {name: heads(2, lambda x: x.flip(0))(w[name]) for name in KV}),
    Fault("kv heads replicated that are not fewer than ranks", "llama", QKV, "qkv",
          claims=("covered", *EQUAL), names=KV,
          weights=lambda w: {}, patches=attribute(f"{QKV}.packed", "num_kv_head_replicas", lambda _: 2)),
]  # fmt: skip
"""Over two ranks, each with one of two kv heads."""

TEXT = """\
# Seeded faults, and what finds them

Each line is a fault that a test puts in, and what must be named then; that something fails is not enough. Engines serve
a family's first tiny config, with random weights in bf16, on the CPU. Without a fault, `verify` fails no row of any
registered model (tests/verify/test_faults.py). `python -m tests.verify.faults > docs/faults.md` writes this page.

## In an engine: `titan-adapters verify`

"stages": the first stage that gives another function, as the report's headline names it. "weights": claims about
weights that fail, and what they name. "logprobs": *all* rows of logprobs that fail. What is listed is exact; what is
not may fail too (most faults show in logprobs). [verify.md](verify.md) says what each row compares.

{engine}
## In an engine over two ranks

{ranks}
## In a model's file: `titan-adapters check`

{model}"""


def markdown_table(lines: Iterator[tuple[str, str, str, str]]) -> str:
    head = ("fault", "model", "found by", "where"), ("---",) * 4
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (*head, *lines))


def of_engines(faults: list[Fault]) -> Iterator[tuple[str, str, str, str]]:
    for fault in faults:
        found_by, where = zip(*fault.found, strict=True)
        yield fault.name, fault.model, "; ".join(found_by), "; ".join(where)


def of_models() -> Iterator[tuple[str, str, str, str]]:
    for name, (check, base, _, text) in MODEL_FAULTS.items():
        yield name, base.model_type, f"`{check}`", text


def markdown() -> str:
    """docs/faults.md."""
    return TEXT.format(
        engine=markdown_table(of_engines(ENGINE_FAULTS)),
        ranks=markdown_table(of_engines(RANK_FAULTS)),
        model=markdown_table(of_models()),
    )


if __name__ == "__main__":
    print(markdown(), end="")
