"""Seeded faults are found where they are, and nothing is found where there are none: by `verify` itself.

One engine per model, in this process, stands in for those that `verify` would start.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import INSTALLED, random_model, random_tokens
from tests.verify.faults import ENGINE_FAULTS
from tests.verify.seeding import prompts
from tests.vllm.conftest import chunks_of, generate, recorded_steps
from tests.vllm.conftest import start as start  # a fixture
from titan_adapters.vllm import scenarios
from titan_adapters.vllm.engine_runs import SMALL_BUDGET, EngineRuns, engine_settings

pytestmark = pytest.mark.engine

STAGES, WEIGHTS = "stages, one by one", "weights: "
NOT_RUN = {"compiled against eager", "TP against one rank"}


@pytest.fixture(scope="module")
def engines(start, tmp_path_factory) -> Any:
    """`engines(name)`: an engine that serves a family's first tiny config in bf16, the plain model, its folder."""
    started: dict[str, Any] = {}

    def engine(name: str) -> tuple[Any, ta.BaseTransformer, Path]:
        if name not in started:
            cls = ta.get_model(name)
            config = next(iter(cls.tiny_configs().values())).model_copy(update={"dtype": "bfloat16"})
            model, folder = random_model(cls, config), tmp_path_factory.mktemp(name)
            ta.save_checkpoint(model, folder, overwrite=True)
            kinds = [(spec.window, spec.chunk) for spec in config.attention_specs()]
            groups = sum(-(-kinds.count(kind) // min(map(kinds.count, kinds))) for kind in set(kinds))
            # Too few blocks for all requests at once, so that some are preempted.
            llm = start(checkpoint=folder, num_gpu_blocks_override=8 * groups)
            started[name] = llm, model, folder
        return started[name]

    return engine


def verified(llm: Any, model: ta.BaseTransformer, folder: Path) -> ta.verify.Report:
    """`verify`, with `llm` for the served engine and, with shorter steps, for the small one."""
    scheduler = llm.llm_engine.vllm_config.scheduler_config

    @contextmanager
    def engine(runs: EngineRuns, name: str, start: Any) -> Iterator[Any]:
        runs.engines[name] = engine_settings(llm)
        llm.reset_prefix_cache()
        budget = SMALL_BUDGET if name == "small" else scheduler.max_num_batched_tokens
        with mock.patch.object(scheduler, "max_num_batched_tokens", budget), chunks_of(llm, budget):
            yield llm

    def preemptions(_: Any) -> int:  # vLLM's metrics are of the engine that was started last
        return sum(len(step.preempted_req_ids or ()) for step in steps)

    with (
        mock.patch.object(EngineRuns, "engine", engine),
        mock.patch.object(scenarios, "preemptions", preemptions),
        recorded_steps(llm) as steps,
    ):
        return ta.vllm.verify(folder, prompts=prompts(model), enforce_eager=True)


def test_a_choice_that_nobody_saw_is_not_proven(engines):
    llm, model, _ = engines("qwen3_moe")
    with ta.vllm.record_stages(llm) as recorded:
        (output,) = generate(llm, [random_tokens(model.config, 20).tolist()])
    records, router = recorded.of(output), "layers.1.moe.router"
    call = records.calls[router]
    blind = replace(records, calls=records.calls | {router: replace(call, outputs=call.outputs[:1])})
    found = ta.verify.check_stages(model, blind, torch.bfloat16)
    assert [verdict.path for verdict in found if verdict.verdict == "not proven"] == [router, "layers.1.moe"]
    assert ta.verify.first_fault(found) is None


@pytest.mark.parametrize("name", INSTALLED)
def test_no_false_alarm(engines, name):
    report = verified(*engines(name))
    assert {row.name: row.why for row in report.rows if row.verdict != "proven"}.keys() == NOT_RUN, report.headline


@pytest.mark.parametrize("fault", sorted(ENGINE_FAULTS, key=lambda fault: fault.model), ids=lambda fault: fault.name)
def test_fault_is_found_where_it_is(engines, fault):
    llm, model, folder = engines(fault.model)
    with fault.seeded(llm, model):
        report = verified(llm, model, folder)
    failed = {row.name: row.why for row in report.rows if row.verdict == "failed"}
    assert (failed.pop(STAGES, None) is not None) == bool(fault.path), failed
    if fault.path:
        assert report.headline.startswith(f"{fault.path} ({fault.kind}) gives another function"), report.headline
        wrong = next(stage for stage in report.stages if stage.verdict == "wrong")
        assert wrong.worst_token >= fault.since
    claims = {row: failed.pop(row) for row in list(failed) if row.startswith(WEIGHTS)}
    if fault.claims or not fault.path:
        assert claims.keys() == {f"{WEIGHTS}{claim}" for claim in fault.claims}
        assert {named(why) for why in claims.values()} <= {fault.names}
    if fault.rows or not (fault.path or fault.claims):
        assert failed.keys() == set(fault.rows)


def named(why: str) -> tuple[str, ...]:
    """What a row about weights names."""
    return tuple(re.split(": | are ", problem)[0] for problem in why.split("; "))
