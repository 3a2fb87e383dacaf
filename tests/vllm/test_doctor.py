"""What real processes see: this one, a spawned one, and a worker of an engine."""

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model
from tests.vllm.models import TINY, Llama
from titan_adapters.doctor import examine
from titan_adapters.doctor.checks import MUST_AGREE, Scene, folder_is_servable

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]


def test_three_processes(tmp_path):
    ta.save_checkpoint(random_model(Llama, TINY), tmp_path / "checkpoint")
    report = examine(tmp_path / "checkpoint", engine=True)
    assert list(report.views) == ["this process", "spawned process", "vLLM worker"] and not report.not_looked_at
    rows = report.rows()
    assert {row for row in MUST_AGREE if len(set(rows[row])) > 1} == set()
    assert rows["plugin"] == ["loaded"] * 3
    assert rows["fingerprint"] == [TINY.fingerprint()[:12]] * 3
    assert rows["served dtype"] == ["", "", "torch.float32"] and rows["served max_model_len"][2] == "128"
    assert rows["attention backend"][2]
    # Nothing is wrong but what this test leaves out, and what a developer's several clones may bring.
    errors = [f.problem for f in report.findings if f.severity == "error" and "installed 2 times" not in f.problem]
    assert errors == []
    assert [f.problem for f in report.findings if "has no tokenizer" in f.problem]


def test_a_class_that_only_this_process_knows(tmp_path, monkeypatch):
    class Local(Llama):
        model_type = "local"

    ta.register_model(Local)
    ta.save_checkpoint(random_model(Local, TINY), tmp_path / "checkpoint")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    (finding,) = folder_is_servable(Scene({}, tmp_path / "checkpoint"))
    assert "can't be imported by vLLM's engine process: it is defined inside a function" in finding.problem
