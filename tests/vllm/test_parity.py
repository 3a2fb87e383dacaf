"""The engine computes what the torch model computes: whole prompts, chunks, cache hits, batches, preemption.

Relative errors are over the whole distribution at every compared position; measured: 3e-7 to 1.2e-6 in fp32.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import EVERY_MODEL, random_model, random_tokens, relative_error
from tests.vllm.conftest import (
    chunks_of,
    error_against_torch,
    generate,
    logprobs_of,
    recorded_steps,
    torch_logprobs_of,
)

pytestmark = pytest.mark.engine

TOLERANCE = 1e-5
LENGTH = 72
"""Tokens of the usual prompt: two and a quarter cache blocks, more than any window."""


class Served(NamedTuple):
    model: ta.BaseTransformer
    llm: Any

    def prompt(self, length: int = LENGTH, seed: int = 1) -> list[int]:
        return random_tokens(self.model.config, length, seed=seed).tolist()


@pytest.fixture(scope="module", params=[pytest.param(p.values, id=p.id) for p in EVERY_MODEL])
def served(request, start, tmp_path_factory) -> Iterator[Served]:
    cls, config = request.param
    model = random_model(cls, config)
    folder = tmp_path_factory.mktemp("checkpoint") / "native"
    ta.save_checkpoint(model, folder)
    # As few cache blocks as one request of max_model_len needs, so that several long ones must preempt each other. vLLM
    # keeps layers in groups of equal size and kind, each with blocks of its own.
    windows = [(spec.window, spec.chunk) for spec in config.attention_specs()]
    uneven = len({windows.count(window) for window in windows}) > 1
    yield Served(model, start(checkpoint=folder, num_gpu_blocks_override=24 if uneven else 14))


def test_whole_prompt(served):
    with recorded_steps(served.llm) as steps:
        outputs = generate(served.llm, [served.prompt()])
    assert list(steps[0].num_scheduled_tokens.values()) == [LENGTH]
    error = error_against_torch(served.model, outputs)
    assert error < TOLERANCE
    # The comparison can fail: it notices one norm weight of one layer that is off by a hundredth.
    weight = served.model.layers[-1].ffn_norm.weight
    with torch.no_grad():
        original = weight[0].clone()
        weight[0] *= 1.01
        changed = error_against_torch(served.model, outputs)
        weight[0] = original
    assert changed > TOLERANCE > 3 * error


@pytest.mark.parametrize("size", [16, 7, 1])
def test_chunked_prompt(served, size):
    with chunks_of(served.llm, size), recorded_steps(served.llm) as steps:
        outputs = generate(served.llm, [served.prompt()])
    chunks = [n for step in steps for n in step.num_scheduled_tokens.values()][: -(-LENGTH // size)]
    assert max(chunks) == size and sum(chunks) == LENGTH
    assert error_against_torch(served.model, outputs) < TOLERANCE


def test_prefix_cache_hit(served):
    served.llm.reset_prefix_cache()
    prompt = served.prompt()
    first = generate(served.llm, [prompt], prompt_logprobs=False)
    again = generate(served.llm, [prompt], prompt_logprobs=False)
    forked = generate(served.llm, [prompt[:70] + served.prompt(20, seed=2)], prompt_logprobs=False)
    assert [o.num_cached_tokens for o in first + again + forked] == [0, 64, 64]  # whole blocks of 32
    assert error_against_torch(served.model, first + again + forked) < TOLERANCE


def test_mixed_batch(served):
    prompts = [served.prompt(length, seed=length) for length in (1, 2, 3, 17, 61, LENGTH)]
    alone = [generate(served.llm, [prompt])[0] for prompt in prompts]
    with recorded_steps(served.llm) as steps:
        together = generate(served.llm, prompts)
    assert max(len(step.num_scheduled_tokens) for step in steps) > 3
    assert error_against_torch(served.model, together) < TOLERANCE
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert relative_error(logprobs_of(other), logprobs_of(one)) < TOLERANCE


def test_preemption(served):
    served.llm.reset_prefix_cache()
    prompts = [served.prompt(30, seed=seed) for seed in range(8)]
    with recorded_steps(served.llm) as steps:
        outputs = generate(served.llm, prompts, max_tokens=60, prompt_logprobs=False)
    preempted = {request for step in steps for request in step.preempted_req_ids or ()}
    assert preempted
    assert [len(o.outputs[0].token_ids) for o in outputs] == [60] * 8
    assert error_against_torch(served.model, outputs) < TOLERANCE


@pytest.mark.parametrize("windows", [(5,), (5, 5)], ids=["one layer", "two layers"])
def test_window_edge(start, tmp_path, windows):
    """Through n layers a window of 5 reaches back 4n tokens: exactly these see a change, and see it in the engine."""
    cls = ta.get_model("qwen2")
    config = next(iter(cls.tiny_configs().values())).model_copy(update={"windows": windows, "num_layers": len(windows)})
    model = random_model(cls, config)
    ta.save_checkpoint(model, tmp_path / "native")
    llm = start(checkpoint=tmp_path / "native", enable_prefix_caching=False)
    position, reach = 20, 4 * len(windows)
    prompt = random_tokens(config, LENGTH).tolist()
    changed = list(prompt)
    changed[position] = (changed[position] + 1) % config.vocab_size
    for size in (LENGTH, 7):
        with chunks_of(llm, size):
            before, after = generate(llm, [prompt], 1), generate(llm, [changed], 1)
        assert error_against_torch(model, before + after) < TOLERANCE
        # Row i is the distribution after token i.
        different = (logprobs_of(before[0]) - logprobs_of(after[0])).abs().amax(-1) > 1e-3
        assert different.nonzero().flatten().tolist() == list(range(position, position + reach + 1))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_bf16(start, tmp_path, name):
    """bf16 in both; the engine may round at other places than torch (packed projections, fused norms, attention)."""
    cls = ta.get_model(name)
    config = next(iter(cls.tiny_configs().values())).model_copy(update={"dtype": "bfloat16"})
    model = random_model(cls, config)
    ta.save_checkpoint(model, tmp_path / "native")
    llm = start(checkpoint=tmp_path / "native")
    assert {p.dtype for p in llm.collective_rpc(lambda w: next(w.get_model().parameters()))} == {torch.bfloat16}
    outputs = generate(llm, [random_tokens(config, length, seed=length).tolist() for length in (LENGTH, 61)])
    assert error_against_torch(model, outputs) < 0.01  # measured: 0.003 to 0.004
    # Nor is the engine the less exact of the two.
    ours = torch.cat([logprobs_of(output) for output in outputs])
    torchs = torch.cat([torch_logprobs_of(model, output) for output in outputs])
    exact = torch.cat([torch_logprobs_of(model.float(), output) for output in outputs])
    assert relative_error(ours, exact) < 1.5 * relative_error(torchs, exact)
