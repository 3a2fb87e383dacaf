"""The engine computes what the torch model computes: whole prompts, chunks, cache hits, batches, preemption.

Relative errors are over the whole distribution at every compared position; measured: 3e-7 to 1.2e-6 in fp32.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import (
    EVERY_MODEL,
    WINDOWED,
    one_windowed_layer,
    random_model,
    random_tokens,
    relative_error,
)
from tests.vllm.conftest import (
    chunks_of,
    error_against_torch,
    generate,
    logprobs_of,
    recorded_steps,
    torch_logprobs_of,
)
from tests.vllm.models import FreeAttention
from titan_adapters.testing.engine import ENGINE_CHECKS, LENGTH, Served

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]

TOLERANCE = 1e-5


FREE = [
    pytest.param(FreeAttention, config, id=f"free attention: {name}")
    for name, config in FreeAttention.tiny_configs().items()
]


@pytest.fixture(scope="module", params=[pytest.param(p.values, id=p.id) for p in EVERY_MODEL + FREE])
def served(request, start, tmp_path_factory, no_registrations_left) -> Iterator[Served]:
    cls, config = request.param
    ta.register_model(cls)
    model = random_model(cls, config)
    folder = tmp_path_factory.mktemp("checkpoint") / "native"
    ta.save_checkpoint(model, folder)
    # As few cache blocks as one request of max_model_len needs, so that several long ones must preempt each other. vLLM
    # keeps layers in groups of equal size and kind, each with blocks of its own.
    kinds = [(spec.window, spec.chunk) for spec in config.attention_specs()]
    uneven = len({kinds.count(kind) for kind in kinds}) > 1
    llm = start(checkpoint=folder, num_gpu_blocks_override=24 if uneven else 14)
    yield Served(model, llm, TOLERANCE)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_contract_suite(served, check):
    check(served)


def test_the_comparison_can_fail(served):
    """It notices one norm weight of one layer that is off by a hundredth."""
    outputs = generate(served.llm, [served.prompt()])
    error = error_against_torch(served.model, outputs)
    weight = served.model.layers[-1].ffn_norm.weight
    with torch.no_grad():
        original = weight[0].clone()
        weight[0] *= 1.01
        changed = error_against_torch(served.model, outputs)
        weight[0] = original
    assert changed > TOLERANCE > 3 * error


def test_preemption(served):
    served.llm.reset_prefix_cache()
    prompts = [served.prompt(30, seed=seed) for seed in range(8)]
    with recorded_steps(served.llm) as steps:
        outputs = generate(served.llm, prompts, max_tokens=60, prompt_logprobs=False)
    preempted = {request for step in steps for request in step.preempted_req_ids or ()}
    assert preempted
    assert [len(o.outputs[0].token_ids) for o in outputs] == [60] * 8
    assert error_against_torch(served.model, outputs) < TOLERANCE


def served_alone(start, folder: Path, cls: type[ta.BaseTransformer], config: ta.TransformerConfig) -> Served:
    model = random_model(cls, config)
    ta.register_model(cls)
    ta.save_checkpoint(model, folder)
    return Served(model, start(checkpoint=folder, enable_prefix_caching=False), TOLERANCE)


def positions_that_see(served: Served, position: int) -> list[int]:
    """Where the engine's distribution depends on the token at `position`, with the prompt whole and in chunks."""
    prompt = served.prompt()
    changed = list(prompt)
    changed[position] = (changed[position] + 1) % served.model.config.vocab_size
    found = []
    for size in (LENGTH, 7):
        with chunks_of(served.llm, size):
            before, after = generate(served.llm, [prompt], 1), generate(served.llm, [changed], 1)
        assert error_against_torch(served.model, before + after) < TOLERANCE
        different = (logprobs_of(before[0]) - logprobs_of(after[0])).abs().amax(-1) > 1e-3
        found.append(different.nonzero().flatten().tolist())
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("name", "windows"),
    [pytest.param(name, (5,), id=name) for name in WINDOWED]
    + [pytest.param("qwen2", (5, 5), id="two layers"), pytest.param("qwen2", (5, 9), id="two windows")],
)
def test_window_edge(start, tmp_path, name, windows):
    """Each layer's window of w reaches back w - 1 tokens: exactly these see a change, and see it in the engine."""
    cls = ta.get_model(name)
    served = served_alone(start, tmp_path / "native", cls, one_windowed_layer(cls, *windows))
    assert positions_that_see(served, 20) == list(range(20, 21 + sum(window - 1 for window in windows)))


def test_chunk_edge(start, tmp_path):
    """Chunks of 32 are positions 0 to 31, 32 to 63, 64 and later."""
    served = served_alone(start, tmp_path / "native", FreeAttention, FreeAttention.config({"chunk": 32}))
    for position, end in {20: 32, 31: 32, 32: 64, 63: 64, 64: LENGTH}.items():
        assert positions_that_see(served, position) == list(range(position, end))


BF16 = [ta.get_model(name) for name in ("llama", "qwen2", "qwen3")] + [FreeAttention]


@pytest.mark.parametrize("cls", BF16, ids=lambda cls: cls.model_type)
def test_bf16(start, tmp_path, cls):
    """bf16 in both; the engine may round at other places than torch (packed projections, fused norms, attention)."""
    ta.register_model(cls)
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
