"""The contract suite's engine tier in a process of a model author. On every model: `test_parity.py`."""

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.vllm.models import TINY, ChunkLocal, Llama
from titan_adapters.testing.case import Case, Skip
from titan_adapters.testing.engine import Served

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]


def test_a_model_that_is_wrong_in_chunks_only():
    outcomes = {r.check: r for r in ta.testing.check_model(ChunkLocal, engine=True) if r.check.startswith("engine")}
    assert [check for check, result in outcomes.items() if result.outcome == "failed"] == ["engine_chunked_prompt"]
    assert "chunks of 16: relative error" in outcomes["engine_chunked_prompt"].detail
    assert len(outcomes) == 5 and {r.outcome for r in outcomes.values()} == {"passed", "failed"}


def test_a_head_size_that_this_platform_lacks_is_skipped_with_the_reason():
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's attention on CPUs lacks it")
    small = TINY.model_copy(update={"head_dim": 24, "rope": TINY.rope.model_copy(update={"rotary_dim": 24})})
    with pytest.raises(Skip, match=r"head_dim 24 of layers \[0, 1, 2\] is not supported by vLLM's CPU attention"):
        Served.start(Case.build(Llama, small))
