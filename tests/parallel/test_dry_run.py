"""The dry run behind `titan-adapters plan`: every rank's shapes and bytes, by hand."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import titan_adapters as ta
from tests.conftest import titan_error_text
from tests.parallel.models import TINY, Llama, Parts, attention, mixture
from titan_adapters import cli
from titan_adapters.checkpoint import Identity, write_identity
from titan_adapters.errors import PlanError
from titan_adapters.parallel import dry_run
from titan_adapters.parallel.dry_run import stage_layers
from titan_adapters.parallel_sizes import size_problems


def test_one_rank_holds_everything() -> None:
    run = dry_run(Llama, TINY)
    expected = sum(parameter.numel() for parameter in Llama(TINY).parameters()) * 4
    assert run.bytes_by_rank() == {"pp 0, ep 0, tp 0": expected} and run.nbytes() == expected
    assert not dist.is_initialized()


def test_shapes_and_bytes_over_tensor_parallel_ranks() -> None:
    # dim 48, 6 query heads and one kv head of 32, hidden 80, 131 tokens, tied; bf16.
    config = Parts.config([attention(num_kv_heads=1)], [TINY.feed_forward(0)], dtype="bfloat16", tied_embeddings=True)
    run = dry_run(Parts, config, tp=2)
    held = {tensor.name: tuple(tensor.held.values()) for tensor in run.tensors}
    assert held["tok_embeddings.weight"] == ((66, 48), (65, 48))
    assert held["layers.0.attention.qkv_linear.wq.weight"] == ((96, 48),) * 2
    assert held["layers.0.attention.qkv_linear.wk.weight"] == ((32, 48),) * 2  # whole on both
    assert held["layers.0.feed_forward.w2.weight"] == ((48, 40),) * 2
    assert "lm_head.weight" not in held
    norms = 3 * 48
    both = (96 + 32 + 32 + 96) * 48 + 3 * 40 * 48 + norms
    assert run.bytes_by_rank() == {
        "pp 0, ep 0, tp 0": 2 * (66 * 48 + both),
        "pp 0, ep 0, tp 1": 2 * (65 * 48 + both),
    }


def test_experts_over_both_axes_and_layers_over_stages() -> None:
    config = Parts.config([attention()] * 3, [TINY.feed_forward(0), mixture(), mixture()], dtype="bfloat16")
    run = dry_run(Parts, config, tp=2, ep=3, pp=2)
    assert len(run.ranks) == 12
    assert run.ranks[:2] == ["pp 0, ep 0, tp 0", "pp 0, ep 0, tp 1"] and run.ranks[-1] == "pp 1, ep 2, tp 1"
    tensors = {tensor.name: tensor for tensor in run.tensors}
    w1 = tensors["layers.1.moe.experts.w1"]  # of 6 experts 2, of 40 features 20
    assert set(w1.held) == set(run.ranks[:6]) and set(w1.held.values()) == {(2, 20, 48)}
    assert set(tensors["layers.2.moe.experts.w1"].held) == set(run.ranks[6:])
    assert set(tensors["lm_head.weight"].held) == set(tensors["norm.weight"].held) == set(run.ranks[6:])
    assert set(tensors["tok_embeddings.weight"].held) == set(run.ranks[:6])
    bias = tensors["layers.2.moe.router.correction_bias"]
    assert (bias.style, bias.dtype, bias.bytes_of(run.ranks[-1])) == ("buffer", torch.float32, 24)


def test_a_tied_embedding_is_on_the_last_stage_too() -> None:
    run = dry_run(Llama, TINY.model_copy(update={"tied_embeddings": True}), pp=3)
    held = {tensor.name: sorted(tensor.held) for tensor in run.tensors}
    assert held["tok_embeddings.weight"] == ["pp 0, ep 0, tp 0", "pp 2, ep 0, tp 0"]
    assert held["layers.1.attention_norm.weight"] == ["pp 1, ep 0, tp 0"]


@pytest.mark.parametrize(("num_layers", "pp"), [(7, 3), (8, 3), (9, 3), (5, 4), (3, 1), (32, 5)])
def test_layers_are_dealt_as_the_engine_deals_them(num_layers: int, pp: int) -> None:
    utils = pytest.importorskip("vllm.distributed.utils", exc_type=ImportError)
    expected = [utils.get_pp_indices(num_layers, stage, pp) for stage in range(pp)]
    assert [(stage.start, stage.stop) for stage in stage_layers(num_layers, pp)] == expected


def test_refusals() -> None:
    with pytest.raises(PlanError) as caught:
        dry_run(Llama, TINY, tp=4, ep=2, pp=4)
    text = titan_error_text(caught)
    assert text.startswith("This model can't be split over pp 4, ep 2, tp 4.")
    assert "num_heads 6 of layers [0, 1, 2] is not divisible by tensor_parallel_size 4" in text
    assert "num_layers 3 can't be split into pipeline_parallel_size 4 stages" in text
    assert "no layer is a mixture of experts" in text
    assert text.endswith("Fix: legal sizes: pp 1, 2, 3; ep 1; tp 1, 2.")


@pytest.mark.usefixtures("four_fake_ranks")
def test_not_within_a_process_group() -> None:
    with pytest.raises(PlanError, match="A dry run needs a process without a process group"):
        dry_run(Llama, TINY)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    write_identity(tmp_path, Identity(Llama, TINY, "native"))  # no weights are needed
    result = CliRunner().invoke(cli.app, ["plan", str(tmp_path), "--tp", "2", "--pp", "2"])
    assert result.exit_code == 0, result.output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    assert ["layers.0-2.attention.qkv_linear.wq.weight", "colwise", "192 x 48", "96 x 48"] in cells
    assert ["lm_head.weight", "vocabwise", "131 x 48", "66 x 48 or 65 x 48"] in cells
    # Layer 0 and one more of 3: 2 * (4 * 48 * (96 + 32 + 32 + 96 + 3 * 40) + 4 * 96), and an embedding of 66 rows.
    layer = (96 + 32 + 32 + 96 + 3 * 40) * 48 + 2 * 48
    assert [row[1] for row in cells if row[0] == "pp 0, ep 0, tp 0"] == [f"{4 * (2 * layer + 66 * 48):,}"]
    assert "legal tp: 1, 2\nlegal ep: 1\nlegal pp: 1, 2, 3\n" in result.output
    monkeypatch.setattr(sys, "argv", ["titan-adapters", "plan", "llama", "--tp", "5"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 1
    assert "Fix: legal sizes: pp 1, 2, 3; ep 1; tp 1, 2." in capsys.readouterr().err


def test_every_family_is_dry_run() -> None:
    """Two ranks hold about half each where heads can be split at all."""
    count = 0
    for info in ta.list_models():
        configs = ta.get_model(info.name).tiny_configs() if info.source.startswith("installed") else {}
        for config in configs.values():
            if not size_problems(config, tp=2):
                run = dry_run(ta.get_model(info.name), config, tp=2)
                first, second = run.bytes_by_rank().values()
                assert run.nbytes() / 2 <= first < 0.8 * run.nbytes() and second <= first, info.name
                count += 1
    assert count > 50
