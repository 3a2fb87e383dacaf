"""Folders that are damaged are refused by name before anything is loaded; folders appear whole or not at all."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import titan_adapters as ta
from tests.conftest import random_model, titan_error_text
from titan_adapters.checkpoint import open_weights
from titan_adapters.checkpoint.folder import atomic_folder, write_weights

INDEX = "model.safetensors.index.json"


def shard(number: int) -> str:
    return f"model-{number:05}-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path) -> Path:
    """a and b in the first shard, c in the second; written without the code under test."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"a": torch.arange(4.0), "b": torch.zeros(2, 3, dtype=torch.bfloat16)}, folder / shard(1))
    save_file({"c": torch.ones(5, dtype=torch.int64)}, folder / shard(2))
    # 4 * 4 bytes, 6 * 2 bytes and 5 * 8 bytes.
    write_index(folder, {"a": shard(1), "b": shard(1), "c": shard(2)}, 16 + 12 + 40)
    return folder


def write_index(folder: Path, weight_map: dict[str, str], total_size: int | None) -> None:
    metadata = {} if total_size is None else {"total_size": total_size}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def refusal(folder: Path) -> list[str]:
    with pytest.raises(ta.TitanError) as caught:
        open_weights(folder)
    text = titan_error_text(caught)
    assert text.startswith(f"The weights in {folder} are not usable.") and text.endswith("Nothing was loaded.")
    return caught.value.problems


def test_intact_folder_reads(sharded):
    weights = open_weights(sharded)
    assert weights.nbytes == 68
    assert {n: (h.file, h.dtype, h.shape) for n, h in weights.headers.items()} == {
        "a": (shard(1), torch.float32, (4,)),
        "b": (shard(1), torch.bfloat16, (2, 3)),
        "c": (shard(2), torch.int64, (5,)),
    }
    meta = weights.meta_tensors()
    assert meta["b"].is_meta and meta["b"].dtype == torch.bfloat16 and meta["b"].shape == (2, 3)
    seen = []
    tensors = dict(weights.tensors(progress=lambda done, total, name: seen.append((done, total, name))))
    assert torch.equal(tensors["a"], torch.arange(4.0)) and torch.equal(tensors["c"], torch.ones(5, dtype=torch.int64))
    assert sorted(done for done, _, _ in seen)[-1] == 68 and {total for _, total, _ in seen} == {68}


def test_missing_shard(sharded):
    (sharded / shard(2)).unlink()
    assert refusal(sharded) == [f"shard {shard(2)} is named in {INDEX}, but missing"]


def test_file_outside_the_index(sharded):
    save_file({"z": torch.zeros(1)}, sharded / "consolidated.safetensors")
    assert refusal(sharded) == [f"file consolidated.safetensors is not named in {INDEX}"]


def test_tensor_outside_the_index(sharded):
    write_index(sharded, {"a": shard(1), "c": shard(2)}, None)
    assert refusal(sharded) == [f"tensor b in {shard(1)} is not named in {INDEX}"]


def test_tensor_in_two_files(sharded):
    save_file({"a": torch.zeros(4), "c": torch.ones(5, dtype=torch.int64)}, sharded / shard(2))
    assert refusal(sharded) == [f"tensor a is in {shard(2)}, but {INDEX} places it in {shard(1)}"]


def test_index_names_a_tensor_that_is_not_in_its_file(sharded):
    write_index(sharded, {"a": shard(1), "b": shard(1), "c": shard(2), "d": shard(2)}, None)
    assert refusal(sharded) == [f"tensor d is not in {shard(2)}, where {INDEX} places it"]


@pytest.mark.parametrize("cut", [1, 60, "to nothing"])
def test_truncated_file(sharded, cut):
    """By one byte, within the header, and empty."""
    data = (sharded / shard(2)).read_bytes()
    (sharded / shard(2)).write_bytes(b"" if cut == "to nothing" else data[:-cut])
    (problem,) = refusal(sharded)
    assert problem.startswith(f"{shard(2)} is damaged or truncated (")


def test_wrong_total_size(sharded):
    write_index(sharded, {"a": shard(1), "b": shard(1), "c": shard(2)}, 69)
    assert refusal(sharded) == [f"{INDEX} says 69 bytes in all, the tensors have 68"]


def test_several_files_without_an_index(sharded):
    (sharded / INDEX).unlink()
    assert refusal(sharded) == [f"there are 2 *.safetensors files, but no {INDEX}: {shard(1)}, {shard(2)}"]


def test_no_files(tmp_path):
    assert refusal(tmp_path) == [f"there are 0 *.safetensors files, but no {INDEX}"]


def test_everything_wrong_is_listed_at_once(sharded):
    (sharded / shard(1)).write_bytes(b"not a header")
    save_file({"z": torch.zeros(1)}, sharded / "other.safetensors")
    write_index(sharded, {"a": shard(1), "d": shard(2), "e": "gone.safetensors"}, None)
    problems = refusal(sharded)
    assert [problem.split(" (")[0] for problem in problems] == [
        f"shard gone.safetensors is named in {INDEX}, but missing",
        f"file other.safetensors is not named in {INDEX}",
        f"{shard(1)} is damaged or truncated",
        f"tensor c in {shard(2)} is not named in {INDEX}",
        f"tensor d is not in {shard(2)}, where {INDEX} places it",
    ]


@pytest.mark.parametrize("index", ["{", "[]", '{"metadata": {}}', '{"weight_map": ["a"]}'])
def test_index_that_is_no_index(sharded, index):
    (sharded / INDEX).write_text(index)
    (problem,) = refusal(sharded)
    assert INDEX in problem


def test_single_file_without_an_index_reads(sharded, tmp_path):
    (tmp_path / "single").mkdir()
    shutil.copy(sharded / shard(1), tmp_path / "single" / "model.safetensors")
    assert set(open_weights(tmp_path / "single").headers) == {"a", "b"}


def test_nothing_is_loaded_from_a_refused_folder(tmp_path):
    """Two shards, the second one damaged: the model keeps every bit it had."""
    cls = ta.get_model("qwen2")
    config = next(iter(cls.tiny_configs().values()))
    ta.save_checkpoint(random_model(cls, config, seed=1), tmp_path / "saved", max_shard_bytes=300_000)
    last = sorted((tmp_path / "saved").glob("*.safetensors"))[-1]
    assert last.name != "model-00001-of-00001.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    model = random_model(cls, config, seed=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ta.TitanError, match="is damaged or truncated"):
        ta.load_checkpoint(model, tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_folder_is_written_or_absent(tmp_path):
    target = tmp_path / "new"
    with pytest.raises(ZeroDivisionError), atomic_folder(target, overwrite=False) as folder:
        (folder / "half").write_text("x")
        assert not target.exists()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(target, overwrite=False) as folder:
        (folder / "whole").write_text("x")
    assert [p.name for p in tmp_path.iterdir()] == ["new"] and [p.name for p in target.iterdir()] == ["whole"]


def test_existing_checkpoint_is_kept_if_writing_fails(sharded):
    before = {p.name: p.read_bytes() for p in sharded.iterdir()}
    with pytest.raises(ZeroDivisionError), atomic_folder(sharded, overwrite=True) as folder:
        (folder / "half").write_text("x")
        raise ZeroDivisionError
    assert {p.name: p.read_bytes() for p in sharded.iterdir()} == before
    assert [p.name for p in sharded.parent.iterdir()] == ["sharded"]


def test_existing_checkpoint_is_replaced_only_if_asked(sharded):
    with pytest.raises(ta.TitanError) as caught, atomic_folder(sharded, overwrite=False):
        pass
    assert "or pass overwrite=True" in titan_error_text(caught) and (sharded / INDEX).exists()
    with atomic_folder(sharded, overwrite=True) as folder:
        (folder / "new").write_text("x")
    assert [p.name for p in sharded.iterdir()] == ["new"]
    assert [p.name for p in sharded.parent.iterdir()] == ["sharded"]


def test_what_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("ten years")
    (tmp_path / "file").write_text("x")
    for name in ("thesis", "file"):
        with pytest.raises(ta.TitanError) as caught, atomic_folder(tmp_path / name, overwrite=True):
            pass
        text = titan_error_text(caught)
        assert "it is not a checkpoint folder, so it won't be replaced" in text and "overwrite" not in text
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "ten years"
    assert (tmp_path / "file").read_text() == "x"


def test_shards_hold_at_most_what_is_asked(tmp_path):
    """Tensors of 40, 40, 20 and 120 bytes in shards of 100: the last one alone, because it can't be cut."""
    sizes = {"a": 10, "b": 10, "c": 5, "d": 30}
    tensors = {name: torch.full((size,), float(size)) for name, size in sizes.items()}
    write_weights(tmp_path, tensors.items(), max_shard_bytes=100, metadata={"format": "pt"})
    files = {p.name: load_file(p) for p in tmp_path.glob("*.safetensors")}
    assert {name: sorted(held) for name, held in files.items()} == {shard(1): ["a", "b", "c"], shard(2): ["d"]}
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 220}
    assert index["weight_map"] == {"a": shard(1), "b": shard(1), "c": shard(1), "d": shard(2)}


def test_views_are_written_as_what_they_show(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    write_weights(tmp_path, [("rows", whole[1:]), ("turned", whole.T)], max_shard_bytes=1000, metadata={})
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_size < 400  # 32 + 48 bytes of data, and a header
    held = load_file(file)
    assert held["rows"].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert held["turned"].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
