"""`verify` end to end: on models that are served right, on one that is not, and as a command.

Engines run in this process, eager, one after the other.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, titan_error_text
from titan_adapters.cli import app
from titan_adapters.cli.verify import engine_options, read_prompts
from titan_adapters.nn import SequenceInfo
from titan_adapters.verify import Report
from titan_adapters.vllm import loader
from titan_adapters.vllm.engine_runs import EngineRuns
from titan_adapters.vllm.layers import EngineAttention

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 32, "max_num_seqs": 8}
LOGPROB_ROWS = (
    "whole prompt", "token counts", "mixed batch", "prefix-cache hit", "decode against prefill", "chunked prefill",
    "preemption and resume",
)  # fmt: skip


def saved(name: str, folder: Path, index: int = 0, **changed: Any) -> Path:
    cls = ta.get_model(name)
    config = list(cls.tiny_configs().values())[index].model_copy(update=changed)
    ta.save_checkpoint(random_model(cls, config), folder)
    return folder


def verdicts(report: Report) -> dict[str, str]:
    return {row.name: row.verdict for row in report.rows if not row.name.startswith("weights: ")}


def test_command(tmp_path, monkeypatch):
    """A bf16 mixture: no false alarm, and what was not run is said not to be proven."""
    monkeypatch.setattr("sys.argv", ["titan-adapters", "verify", "x"])
    folder = saved("mixtral", tmp_path / "native", dtype="bfloat16")
    arguments = ["verify", str(folder), "--eager", "--output", str(tmp_path / "report"), "--against", "hf"]
    done = CliRunner().invoke(app, [*arguments, "--block-size", "32", "--max-num-seqs=8"])
    report = Report.load(tmp_path / "report" / "report.json")
    assert done.exit_code == 0, done.output
    found = verdicts(report)
    assert found.pop("compiled against eager") == found.pop("TP against one rank") == "not proven"
    assert set(found.values()) == {"proven"} and set(found) >= {
        *LOGPROB_ROWS, "stages, one by one", "against transformers", "plain torch against transformers"
    }  # fmt: skip
    assert report.command == "titan-adapters verify x"
    assert report.engines["served"]["block_size"] == "32"
    assert report.headline.startswith("The engine computes what titan_models.mixtral:Mixtral computes, up to rounding")
    page = (tmp_path / "report" / "report.html").read_text()
    assert all(f"<th>{row.name}</th>" in page for row in report.rows)


def test_a_wrong_stage_is_named(tmp_path, monkeypatch):
    """Attention of the second layer scales scores by twice what the spec says."""
    original = EngineAttention.forward

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        return original(self, 2 * q if ".1." in self.attn.layer_name else q, k, v, seq)

    monkeypatch.setattr(EngineAttention, "forward", forward)
    report = ta.vllm.verify(saved("llama", tmp_path / "native"), **OPTIONS)
    assert report.failed
    stage = "layers.1.attention.inner_attention (attention)"
    assert report.headline.startswith(f"{stage} gives another function: relative error ")
    found = verdicts(report)
    assert {found[row] for row in ("stages, one by one", "whole prompt", "chunked prefill")} == {"failed"}
    assert {row.verdict for row in report.rows if row.name.startswith("weights: ")} == {"proven"}
    # Both ways to the same wrong function agree with each other.
    assert "between the two runs" not in report.row("mixed batch").why


def test_refusals(tmp_path):
    folder = saved("llama", tmp_path / "native")
    with pytest.raises(ta.TitanError) as caught:
        ta.vllm.verify(folder, against=["jax"])
    assert "'jax' is not one of torch, hf, native" in titan_error_text(caught)
    with pytest.raises(ta.TitanError) as caught:
        ta.vllm.verify(folder, dtype="auto")
    assert "choose from bfloat16, float16, float32" in titan_error_text(caught)


def test_options_of_the_command():
    given = ["--max-model-len", "64", "--no-enable-prefix-caching", "--block-size=16"]
    assert engine_options(given) == {"max_model_len": 64, "enable_prefix_caching": False, "block_size": 16}
    assert engine_options([]) == {}


def test_prompt_files(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo words\n")
    assert read_prompts(file) == ["one", "two words"]
    file.write_text("[1, 2]\n[3]\n")
    assert read_prompts(file) == [[1, 2], [3]]
    file.write_text('[1, 2]\n["a"]\n[1,\n')
    with pytest.raises(ta.TitanError) as caught:
        read_prompts(file)
    text = titan_error_text(caught)
    assert "line 2: ['a']" in text and "line 3: " in text and "line 1" not in text


def test_what_a_load_leaves_out_is_a_failed_row(tmp_path, monkeypatch):
    runs = EngineRuns(saved("llama", tmp_path / "native"), None, 0, lambda phase: None, OPTIONS)
    runs.prompts = [[1, 2, 3]]
    write = loader.write_one
    monkeypatch.setattr(
        loader, "write_one", lambda p, name, *rest: name.endswith("1.attention.wo.weight") or write(p, name, *rest)
    )
    runs.small()
    (row,) = runs.rows
    assert (row.name, row.verdict) == ("weights: nothing is left out", "failed") and "NaN is left" in row.why
    assert runs.runs["chunked prefill"][1].missing.startswith("the engine for it could not be run")
