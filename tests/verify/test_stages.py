"""Seeded faults are found where they are, and nothing is found where there are none."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, random_tokens
from tests.verify.faults import FAULTS, served
from tests.vllm.conftest import generate
from tests.vllm.conftest import start as start  # a fixture

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engines(start, tmp_path_factory) -> Any:
    """`engines(name)`: the plain model of a family, and an engine in bf16 that serves it."""
    started: dict[str, Any] = {}

    def engine(name: str) -> tuple[ta.BaseTransformer, Any]:
        if name not in started:
            model = random_model(*served(name))
            folder = tmp_path_factory.mktemp(name)
            ta.save_checkpoint(model, folder, overwrite=True)
            started[name] = model, start(checkpoint=folder, enable_prefix_caching=False)
        return started[name]

    return engine


def verdicts(model: ta.BaseTransformer, llm: Any) -> list[list[ta.verify.StageVerdict]]:
    """Of a long and a short prompt, in one batch."""
    prompts = [random_tokens(model.config, length, seed=length).tolist() for length in (60, 3)]
    with ta.vllm.record_stages(llm) as recorded:
        outputs = generate(llm, prompts, max_tokens=4)
    return [ta.verify.check_stages(model, recorded.of(output), torch.bfloat16) for output in outputs]


def test_a_choice_that_nobody_saw_is_not_proven(engines):
    model, llm = engines("qwen3_moe")
    with ta.vllm.record_stages(llm) as recorded:
        (output,) = generate(llm, [random_tokens(model.config, 20).tolist()])
    records, router = recorded.of(output), "layers.1.moe.router"
    call = records.calls[router]
    blind = replace(records, calls=records.calls | {router: replace(call, outputs=call.outputs[:1])})
    found = ta.verify.check_stages(model, blind, torch.bfloat16)
    assert [verdict.path for verdict in found if verdict.verdict == "not proven"] == [router, "layers.1.moe"]
    assert ta.verify.first_fault(found) is None


@pytest.mark.parametrize("name", sorted({fault.model for fault in FAULTS}))
def test_no_false_alarm(engines, name):
    for found in verdicts(*engines(name)):
        assert {verdict.verdict for verdict in found} <= {"equal", "rounding"}


@pytest.mark.parametrize("fault", sorted(FAULTS, key=lambda fault: fault.model), ids=lambda fault: fault.name)
def test_fault_is_found_where_it_is(engines, fault):
    model, llm = engines(fault.model)
    with fault.seeded(llm, model):
        found = ta.verify.first_fault(verdicts(model, llm)[0])
    assert found is not None
    assert (found.path, found.kind) == (fault.path, fault.kind), found
