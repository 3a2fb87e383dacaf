"""Tied heads, case by case: what the config says against what the folder holds."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import titan_adapters as ta
from tests.conftest import random_model, random_tokens, titan_error_text

MODELS = [pytest.param(ta.get_model(name), id=name) for name in ("llama", "qwen2", "qwen3")]
FORMATS = {"native": ("tok_embeddings.weight", "titan.json"), "hf": ("model.embed_tokens.weight", "config.json")}


def config_of(cls, tied: bool):
    return next(config for config in cls.tiny_configs().values() if config.tied_embeddings == tied)


def folder(cls, path: Path, format: str, *, tied: bool, head: str) -> Path:
    """A folder whose config says `tied` and whose lm_head.weight is "absent", "equal" or "different"."""
    model = random_model(cls, config_of(cls, tied))
    ta.save_checkpoint(model, path, format)
    (path / "model.safetensors.index.json").unlink()
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    embedding = tensors[FORMATS[format][0]]
    tensors.pop("lm_head.weight", None)
    if head != "absent":
        tensors["lm_head.weight"] = embedding.clone()
    if head == "different":
        tensors["lm_head.weight"][-1, -1] += 1e-6 * tensors["lm_head.weight"][-1, -1].abs() + 1e-9
    save_file(tensors, file)
    return path


def refusal(cls, path: Path, tied: bool) -> list[str]:
    with pytest.raises(ta.TitanError) as caught:
        ta.load_checkpoint(random_model(cls, config_of(cls, tied), seed=5), path)
    titan_error_text(caught)
    return caught.value.problems


every_case = pytest.mark.parametrize("format", FORMATS)
every_model = pytest.mark.parametrize("cls", MODELS)


@every_model
@every_case
@pytest.mark.parametrize("head", ["absent", "equal"])
def test_tied_and_absent_or_equal_becomes_an_alias(cls, format, head, tmp_path):
    path = folder(cls, tmp_path / "x", format, tied=True, head=head)
    expected = random_model(cls, config_of(cls, True))
    model = random_model(cls, config_of(cls, True), seed=5)
    ta.load_checkpoint(model, path)
    assert model.lm_head.weight is model.tok_embeddings.weight
    assert torch.equal(model.lm_head.weight, expected.tok_embeddings.weight)


@every_model
@every_case
def test_tied_and_different_is_refused_before_anything_is_written(cls, format, tmp_path):
    path = folder(cls, tmp_path / "x", format, tied=True, head="different")
    name = FORMATS[format][0]
    model = random_model(cls, config_of(cls, True))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ta.TitanError):
        ta.load_checkpoint(model, path)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert refusal(cls, path, True) == [f"lm_head.weight differs from {name}, but the config says that they are tied"]


@every_model
@every_case
def test_untied_and_absent_is_refused(cls, format, tmp_path):
    path = folder(cls, tmp_path / "x", format, tied=False, head="absent")
    assert "missing tensor lm_head.weight" in refusal(cls, path, False)


@every_model
@every_case
def test_untied_and_different_is_kept_apart(cls, format, tmp_path):
    """Also untied and equal: nothing is tied because two tensors happen to be the same."""
    for head in ("equal", "different"):
        path = folder(cls, tmp_path / head, format, tied=False, head=head)
        model = ta.load_model(path)
        assert model.lm_head.weight is not model.tok_embeddings.weight
        assert torch.equal(model.lm_head.weight, model.tok_embeddings.weight) == (head == "equal")


@every_model
def test_alias_survives_meta_save_and_reload(cls, tmp_path):
    config = config_of(cls, True)
    model = random_model(cls, config)
    for format in FORMATS:
        ta.save_checkpoint(model, tmp_path / format, format)
        (file,) = (tmp_path / format).glob("*.safetensors")
        assert "lm_head.weight" not in load_file(file)
        with torch.device("meta"):
            loaded = cls(config)
        assert loaded.lm_head.weight is loaded.tok_embeddings.weight
        ta.load_checkpoint(loaded, tmp_path / format)
        assert loaded.lm_head.weight is loaded.tok_embeddings.weight and not loaded.lm_head.weight.is_meta
        tokens = random_tokens(config, 6)
        with torch.no_grad():
            assert torch.equal(loaded(tokens), model(tokens))
            loaded.double()  # moves and casts make new parameters, of which there must still be one
        assert loaded.lm_head.weight is loaded.tok_embeddings.weight


@every_model
def test_alias_trains_as_one(cls):
    """A tied weight gets the gradients of both its uses, and one update."""
    config = config_of(cls, True)
    model = random_model(cls, config)
    names = [name for name, _ in model.named_parameters()]
    assert "tok_embeddings.weight" in names and "lm_head.weight" not in names
    model(random_tokens(config, 6)).logsumexp(-1).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.lm_head.weight is model.tok_embeddings.weight


def test_tying_is_what_the_config_says(tmp_path):
    """Editing the published flag changes which of the four cases applies."""
    cls = ta.get_model("qwen2")
    path = folder(cls, tmp_path / "x", "hf", tied=True, head="absent")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ta.TitanError, match=r"missing tensor lm_head\.weight"):
        ta.load_model(path)
