"""Checkpoints of parallel models: between any two layouts, bitwise, and back to what stock tools read."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import titan_adapters as ta
from tests.conftest import assert_bitwise_equal, random_model, titan_error_text
from tests.parallel.checkpoints import Move, move_all, refused_saves
from tests.parallel.models import TINY, Llama, Parts
from tests.parallel.processes import run_processes
from titan_adapters.checkpoint import convert_checkpoint, open_weights
from titan_adapters.errors import CheckpointError
from titan_adapters.state_dict import native_tensors

LAYOUTS = {"alone": None, "tp": {"tp": 2}, "fsdp": {"fsdp": 2}}


def _moves() -> dict[str, Move]:
    tied = Llama.tiny_configs()["tied, llama3 rope"]
    moves = {
        f"{source} to {target}, {format}": Move(Llama, tied, format, LAYOUTS[source], LAYOUTS[target])
        for format in ("dcp", "hf", "native")
        for source in LAYOUTS
        for target in LAYOUTS
        if format == "dcp" or source != target
    }
    name, config = next((n, c) for n, c in Parts.tiny_configs().items() if "correction bias" in n)
    for source, target in (("ep", "fsdp"), ("fsdp", "ep"), ("ep", "tp"), ("tp", "alone")):
        layouts = LAYOUTS | {"ep": {"ep": 2}}
        moves[f"{name}, {source} to {target}"] = Move(Parts, config, "dcp", layouts[source], layouts[target])
    return moves


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(2, move_all, _moves(), tmp_path_factory.mktemp("moves"))


@pytest.mark.parametrize("move", _moves())
def test_between_layouts(moved: list[dict[str, Any]], move: str) -> None:
    for rank in moved:
        wrong, difference = rank[move]
        assert not wrong
        assert difference < 1e-4  # logits are around 10: other orders of summation


def test_two_axes_and_back(tmp_path: Path) -> None:
    """FSDP over tensor parallel, whose shards interleave, with an odd vocabulary."""
    both = {"fsdp": 2, "tp": 2}
    moves = {"from": Move(Llama, TINY, "dcp", both, None), "to": Move(Llama, TINY, "hf", None, both)}
    moves["ep"] = Move(Llama, TINY, "dcp", {"fsdp": 4}, both)
    for rank in run_processes(4, move_all, moves, tmp_path):
        for wrong, difference in rank.values():
            assert not wrong and difference < 1e-4


def test_all_ranks_raise_if_the_first_is_refused(tmp_path: Path) -> None:
    for first, second in run_processes(2, refused_saves, tmp_path):
        for text in (first, second):
            assert f"{tmp_path / 'there'} exists already." in text
            assert text.splitlines()[-1].startswith("Fix: ")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[ta.BaseTransformer, Path]:
    model = random_model(Llama, TINY)
    ta.save_checkpoint(model, tmp_path / "dcp", "dcp")
    return model, tmp_path / "dcp"


def test_torch_reads_what_we_write_and_we_what_torch_writes(saved: tuple[ta.BaseTransformer, Path]) -> None:
    model, folder = saved
    expected = {name: tensor.detach() for name, tensor in native_tensors(model).items()}
    theirs = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    torch_dcp.load(theirs, checkpoint_id=folder, no_dist=True)
    assert_bitwise_equal(theirs, expected)
    for file in (".metadata", "__0_0.distcp"):
        (folder / file).unlink()
    torch_dcp.save(expected, checkpoint_id=folder, no_dist=True)
    assert_bitwise_equal({n: t.detach() for n, t in native_tensors(ta.load_model(folder)).items()}, expected)


def test_a_dcp_folder_is_a_source_like_any_other(saved: tuple[ta.BaseTransformer, Path], tmp_path: Path) -> None:
    model, folder = saved
    expected = {name: tensor.detach() for name, tensor in native_tensors(model).items()}
    assert_bitwise_equal(dict(open_weights(folder).tensors()), expected)
    seen: list[tuple[int, int]] = []
    convert_checkpoint(folder, tmp_path / "hf", "hf", progress=lambda done, total, _: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(tensor.nbytes for tensor in expected.values())
    assert_bitwise_equal({n: t.detach() for n, t in native_tensors(ta.load_model(tmp_path / "hf")).items()}, expected)
    ta.save_checkpoint(model, folder, "dcp", overwrite=True)
    ta.save_checkpoint(model, folder, "native", overwrite=True)
    assert not (folder / ".metadata").exists()


def test_training_dtype_is_kept(tmp_path: Path) -> None:
    config = TINY.model_copy(update={"dtype": "bfloat16"})
    model = random_model(Llama, config).float()
    ta.save_checkpoint(model, tmp_path / "dcp", "dcp")
    assert {header.dtype for header in open_weights(tmp_path / "dcp").headers.values()} == {torch.float32}
    with pytest.raises(CheckpointError, match="Storing these weights would round them"):
        ta.load_model(tmp_path / "dcp")
    assert ta.load_model(tmp_path / "dcp", dtype=torch.bfloat16).norm.weight.dtype == torch.bfloat16


def test_an_edited_config_is_noticed(saved: tuple[ta.BaseTransformer, Path]) -> None:
    _, folder = saved
    titan = json.loads((folder / "titan.json").read_text())
    titan["config"]["norm_eps"] *= 2
    (folder / "titan.json").write_text(json.dumps(titan))
    with pytest.raises(CheckpointError, match="was written with another config") as caught:
        ta.load_model(folder)
    titan_error_text(caught)


class Attack:
    def __init__(self, ran: Path):
        self.ran = ran

    def __reduce__(self) -> Any:
        return Path.touch, (self.ran,)


def _edit(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_code_in_the_metadata_is_not_run(saved: tuple[ta.BaseTransformer, Path], tmp_path: Path) -> None:
    _, folder = saved
    _edit(folder, lambda metadata: setattr(metadata, "planner_data", Attack(tmp_path / "ran")))
    with pytest.raises(CheckpointError) as caught:
        ta.load_model(folder)
    assert "A checkpoint's .metadata asks for pathlib.Path.touch." in titan_error_text(caught)
    assert not (tmp_path / "ran").exists()
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path / "ran") + b"'\ntR.")
    with pytest.raises(CheckpointError, match=r"asks for os\.system"):
        open_weights(folder)
    (folder / ".metadata").write_bytes(b"ctorch\nload\n(S'x'\ntR.")
    with pytest.raises(CheckpointError, match=r"asks for torch\.load"):
        open_weights(folder)
    assert not (tmp_path / "ran").exists()


def test_code_among_the_weights_is_not_run(saved: tuple[ta.BaseTransformer, Path], tmp_path: Path) -> None:
    _, folder = saved
    torch.save({"w": Attack(tmp_path / "ran")}, folder / "evil.distcp")
    length = (folder / "evil.distcp").stat().st_size

    def redirect(metadata: Any) -> None:
        (index,) = (index for index in metadata.storage_data if index.fqn == "norm.weight")
        metadata.storage_data[index] = type(metadata.storage_data[index])("evil.distcp", 0, length)

    _edit(folder, redirect)
    with pytest.raises(CheckpointError, match=r"evil\.distcp holds more than a tensor, or is damaged") as caught:
        ta.load_model(folder)
    titan_error_text(caught)
    assert not (tmp_path / "ran").exists()


def test_damage_is_found_before_anything_is_read(saved: tuple[ta.BaseTransformer, Path]) -> None:
    _, folder = saved
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    assert "__0_0.distcp is truncated within layers" in _refusal(folder)
    (folder / "__0_0.distcp").rename(folder / "elsewhere.distcp")
    assert "__0_0.distcp is missing, which holds a part of tok_embeddings.weight" in _refusal(folder)
    (folder / "__0_0.distcp").write_bytes(data)
    described = (folder / ".metadata").read_bytes()

    def changed(change: Callable[[Any], None]) -> str:
        (folder / ".metadata").write_bytes(described)
        _edit(folder, change)
        return _refusal(folder)

    def shift(metadata: Any) -> None:
        (chunk,) = metadata.state_dict_metadata["norm.weight"].chunks
        chunk.sizes = torch.Size([47])

    def outside(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "norm.weight":
                info.relative_path = "../__0_0.distcp"

    def double(metadata: Any) -> None:
        (chunk,) = metadata.state_dict_metadata["norm.weight"].chunks
        chunk.sizes = torch.Size([24])
        metadata.state_dict_metadata["norm.weight"].chunks *= 2

    assert "the chunks of norm.weight don't cover it exactly" in changed(shift)
    assert "the chunks of norm.weight don't cover it exactly" in changed(double)
    assert "'../__0_0.distcp' is not in the folder" in changed(outside)
    (folder / ".metadata").write_bytes(described[:100])
    assert ".metadata is damaged" in _refusal(folder)
    (folder / ".metadata").write_bytes(pickle.dumps([1, 2]))
    assert ".metadata does not describe tensors" in _refusal(folder)
    (folder / ".metadata").write_bytes(described)
    (folder / "model.safetensors").touch()
    assert "it has both .metadata and safetensors files" in _refusal(folder)


def _refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError, match=r"The DCP checkpoint in .* is not usable") as caught:
        open_weights(folder)
    return titan_error_text(caught)
