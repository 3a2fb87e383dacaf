"""Stages are recorded whole, however an engine schedules a request's tokens."""

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, random_tokens, titan_error_text
from tests.vllm.conftest import chunks_of, generate
from titan_adapters.verify.records import HEAD, join

pytestmark = pytest.mark.engine

GEMMA3 = ta.get_model("gemma3_text")
CONFIG = next(iter(GEMMA3.tiny_configs().values()))


@pytest.fixture(scope="module")
def served(start, tmp_path_factory) -> tuple[ta.BaseTransformer, Any]:
    model = random_model(GEMMA3, CONFIG)
    folder = tmp_path_factory.mktemp("gemma3")
    ta.save_checkpoint(model, folder, overwrite=True)
    return model, start(checkpoint=folder)


def prompt(length: int) -> list[int]:
    return random_tokens(CONFIG, length, seed=length).tolist()


def outcomes(model: ta.BaseTransformer, records: ta.verify.StageRecords) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for verdict in ta.verify.check_stages(model, records, torch.float32):
        found.setdefault(verdict.verdict, []).append(verdict.path)
    return found


def test_chunks_in_mixed_batches(served):
    model, llm = served
    with ta.vllm.record_stages(llm) as recorded, chunks_of(llm, 7):
        outputs = generate(llm, [prompt(40), prompt(3)], max_tokens=6)
    for output, num_tokens in zip(outputs, (45, 8), strict=True):
        records = recorded.of(output)
        assert records.tokens.tolist() == [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        assert records.complete and records.head_positions.tolist() == list(range(num_tokens))
        (x,), (logits,) = records.calls["norm"].outputs, records.calls[HEAD].outputs
        assert x[0].shape == (num_tokens, CONFIG.dim) and logits[0].shape == (num_tokens, CONFIG.vocab_size)
        assert set(outcomes(model, records)) <= {"equal", "rounding"}


def test_prefix_from_the_cache(served):
    model, llm = served
    llm.reset_prefix_cache()
    with ta.vllm.record_stages(llm) as recorded:
        (first,) = generate(llm, [prompt(70)], prompt_logprobs=False)
        (second,) = generate(llm, [[*prompt(70), 5]], prompt_logprobs=False)
    assert second.num_cached_tokens == 64
    alone = recorded.of(second)
    assert not alone.complete and alone.positions[0] == 64
    found = outcomes(model, alone)
    assert found.pop("not proven") == [f"layers.{layer}.attention.inner_attention" for layer in range(3)]
    assert set(found) <= {"equal", "rounding"}
    whole = recorded.of(second, earlier=[first])
    assert whole.complete and set(outcomes(model, whole)) <= {"equal", "rounding"}


def test_some_layers(served):
    model, llm = served
    with ta.vllm.record_stages(llm, layers=[1]) as recorded:
        (output,) = generate(llm, [prompt(9)], max_tokens=1)
    verdicts = ta.verify.check_stages(model, recorded.of(output), torch.float32)
    assert {verdict.layer for verdict in verdicts} == {None, 1}
    assert not ta.verify.first_fault(verdicts)


def test_what_was_not_recorded(served):
    _, llm = served
    with ta.vllm.record_stages(llm) as recorded:
        pass
    (output,) = generate(llm, [prompt(3)], max_tokens=1)
    with pytest.raises(ta.TitanError, match="was not recorded") as caught:
        recorded.of(output)
    titan_error_text(caught)


def test_joining_the_shares_of_ranks():
    whole = torch.arange(2 * 4 * 3).reshape(2, 4, 3)
    assert torch.equal(join([whole], whole), whole)
    assert torch.equal(join([whole, whole], whole), whole)
    assert torch.equal(join(list(whole.split(1, dim=1)), whole), whole)
    each_twice = [share for share in whole.split(2, dim=1) for _ in range(2)]  # two ranks have the same heads
    assert torch.equal(join(each_twice, whole), whole)
