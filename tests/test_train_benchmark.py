"""benchmarks/train.py on a CPU: what it compares is the same function, and it says so when it is not."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import titan_adapters as ta
from tests.conftest import load_script

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def train(monkeypatch):
    """The script as a module, with the first tiny config of each family as a shape."""
    module = load_script(Path(__file__).parent.parent / "benchmarks" / "train.py")
    families = [ta.get_model(name) for name in ("gemma3_text", "qwen3_moe", "gpt_oss")]
    shapes = {cls.model_type: cls.to_hf_config(next(iter(cls.tiny_configs().values()))) for cls in families}
    monkeypatch.setattr(module, "SHAPES", shapes)
    return module


def run(train, *arguments: str):
    import typer

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(train.main)
    small = "--batch 2 --length 24 --repeats 2 --steps 1 --dtype float32 --compile nothing"
    return CliRunner().invoke(app, [*arguments, *small.split()])


@pytest.mark.parametrize(
    ("shape", "peer", "left_out"),
    [("gemma3_text", "sdpa", []), ("qwen3_moe", "sdpa", []), ("gpt_oss", "eager", ["sdpa"])],  # which has no sinks
    ids=str,
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="of the form that runs on a CPU")
def test_agreement_with_transformers(train, shape, peer, left_out, tmp_path):
    peers = [option for name in (peer, *left_out) for option in ("--peer", name)]
    result = run(train, shape, *peers, "--output", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["agree"] and sorted(document["samples"]) == sorted(["ours", peer])
    assert list(document["left out"]) == left_out
    assert [len(values["ms"]) for values in document["samples"].values()] == [2, 2]
    assert f"ratio to the best of transformers ({peer})" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the form that runs on a CPU")
def test_another_function_is_reported(train, monkeypatch):
    """A model whose window is one token shorter than that of the weights' own config."""
    stock = train.stock

    def narrower(model):
        theirs = stock(model)
        theirs.config.sliding_window -= 1
        for layer in theirs.model.layers:
            if layer.self_attn.sliding_window is not None:
                layer.self_attn.sliding_window -= 1
        return theirs

    monkeypatch.setattr(train, "stock", narrower)
    result = run(train, "gemma3_text", "--peer", "sdpa")
    assert result.exit_code == 1 and "don't compute the same function" in result.output
