"""DCP folders as trainers write them: the model beside its optimizer and what else a run needs to go on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

import titan_adapters as ta
from tests.conftest import assert_bitwise_equal, random_model, random_tokens, titan_error_text
from titan_adapters.checkpoint import Identity, convert_checkpoint, open_weights, write_identity
from titan_adapters.cli import app
from titan_adapters.errors import CheckpointError, StateDictError
from titan_adapters.state_dict import native_tensors

Llama = ta.get_model("llama")
TIED = Llama.tiny_configs()["tied, llama3 rope"]


class Attack:
    def __init__(self, ran: Path):
        self.ran = ran

    def __reduce__(self) -> Any:
        return Path.touch, (self.ran,)


@pytest.fixture
def trained() -> tuple[ta.BaseTransformer, dict[str, Any], dict[str, Any]]:
    """A model after a step of AdamW, and both state dicts as torch makes them."""
    model = random_model(Llama, TIED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(random_tokens(TIED, 9)).square().mean().backward()
    optimizer.step()
    return model, *get_state_dict(model, optimizer)


def save(folder: Path, state: dict[str, Any]) -> None:
    torch_dcp.save(state, checkpoint_id=folder, no_dist=True)
    write_identity(folder, Identity(Llama, TIED, "native"))


def weights(model: ta.BaseTransformer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in native_tensors(model).items()}


@pytest.mark.parametrize("layout", ["model beside optimizer", "model's names without a prefix, as torchtitan has them"])
def test_the_model_is_found_beside_the_optimizer(trained, layout, tmp_path):
    model, parameters, optimizer = trained
    run = {"step": 3, "rng": torch.get_rng_state(), "sampler": Attack(tmp_path / "ran")}
    named = {"model": parameters} if layout.startswith("model beside") else parameters
    save(tmp_path / "folder", {**named, "optimizer": optimizer, "train_state": run})
    saved = open_weights(tmp_path / "folder").headers
    assert sum(name.endswith(".exp_avg_sq") for name in saved) == len(weights(model))
    assert_bitwise_equal(weights(ta.load_model(tmp_path / "folder")), weights(model))
    assert ta.fingerprint(tmp_path / "folder") == ta.fingerprint(model)
    convert_checkpoint(tmp_path / "folder", tmp_path / "published", "hf")
    assert_bitwise_equal(weights(ta.load_model(tmp_path / "published")), weights(model))
    assert not (tmp_path / "ran").exists()


def test_of_two_models_one_must_be_named(trained, tmp_path):
    model, parameters, optimizer = trained
    average = {name: tensor + 1 for name, tensor in parameters.items()}
    folder = tmp_path / "folder"
    save(folder, {"model": parameters, "ema": average, "optimizer": optimizer})
    with pytest.raises(CheckpointError, match="does not show which of its tensors are the model") as caught:
        ta.load_model(folder)
    text = titan_error_text(caught)
    assert "under 'model.' are" in text and "under 'ema.' are" in text and "prefix=" in text and "--prefix" in text
    assert_bitwise_equal(weights(ta.load_model(folder, prefix="model")), weights(model))
    assert_bitwise_equal(
        weights(ta.load_model(folder, prefix="ema.")), {name: tensor + 1 for name, tensor in weights(model).items()}
    )
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "native"), "--prefix", "model"])
    assert done.exit_code == 0
    assert_bitwise_equal(weights(ta.load_model(tmp_path / "native")), weights(model))


def test_what_is_missing_or_too_much_is_still_named(trained, tmp_path):
    _, parameters, optimizer = trained
    wrong = {name: tensor for name, tensor in parameters.items() if name != "norm.weight"}
    for prefix in ("", "model."):
        state = {**{f"{prefix}{n}": t for n, t in wrong.items()}, f"{prefix}layers.7.extra": torch.ones(2)}
        folder = tmp_path / f"folder {prefix}"
        save(folder, {**state, "optimizer": optimizer})
        with pytest.raises(StateDictError) as caught:
            ta.load_model(folder)
        problems = caught.value.problems
        assert "missing tensor norm.weight" in problems
        assert any("layers.7.extra" in problem for problem in problems) and len(problems) == 2


def test_prefix_is_for_dcp_folders(trained, tmp_path):
    ta.save_checkpoint(trained[0], tmp_path / "native")
    with pytest.raises(CheckpointError, match="is not a DCP folder"):
        ta.load_model(tmp_path / "native", prefix="model")
