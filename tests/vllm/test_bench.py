"""`titan-adapters bench` with real engines, each in a process of its own."""

import json
import subprocess

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm", exc_type=ImportError)

from titan_adapters.cli import app

pytestmark = pytest.mark.engine

SIZES = {
    "repeats": 1, "batch": 2, "decode-tokens": 4, "prefill-requests": 1, "prefill-length": 20, "mixed-requests": 3,
    "long-length": 40, "long-tokens": 4, "max-model-len": 64,
}  # fmt: skip
SMALL = ["--eager", *(f"--{option}={size}" for option, size in SIZES.items())]


def bench(folder, *arguments: str) -> tuple[int, str, dict]:
    output = folder / "out.json"
    result = CliRunner().invoke(app, ["bench", *arguments, *SMALL, "--output", str(output), "--logs", str(folder)])
    return result.exit_code, result.output, json.loads(output.read_text())


def test_ours_beside_native(tmp_path):
    code, text, data = bench(tmp_path, "--shape", "tiny", "--only", "native", "--only", "ours", "--profile")
    assert code == 0, text
    assert data["failed"] == {} and set(data["machine"]) >= {"vllm", "torch", "transformers", "titan_adapters", "cpu"}
    points = {"start s", "engine start s", "prefill tok/s", "decode 2 tok/s", "mixed tok/s"}
    points |= {"prefill of 40 tok/s", "host peak GiB"}
    for name in ("native", "ours"):
        found = set(data["medians"][name])
        assert points <= found <= points | {"decode after 40 tok/s"}
        assert 0.1 < data["medians"][name]["host peak GiB"] < 10
    assert "ours : native" in text and "host peak GiB" in text
    assert data["classes"] == {"native": "LlamaForCausalLM", "ours": "TitanForCausalLM"}
    assert set(data["profiles"]) == {"decode 2, a step", "prefill"} and "ours - native" in text
    for by_implementation in data["profiles"].values():
        for name in ("native", "ours"):
            kinds = by_implementation[name]["kinds"]
            assert kinds["matrix products"] > 0 and kinds["attention"] > 0
    assert data["graphs"] == {"native": ["none"], "ours": ["none"]}
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running


def test_an_implementation_that_does_not_start_is_reported(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no_such_model"}')
    code, text, data = bench(tmp_path, str(tmp_path / "broken"), "--only", "native")
    assert code == 0, text
    assert "no_such_model" in data["failed"]["native"] and data["samples"] == {"native": {}}
    assert f"its log: {tmp_path / 'native'}.log" in text
    assert "Traceback" in (tmp_path / "native.log").read_text()
