"""Fingerprints of models and folders: what they depend on, and what they don't."""

import json

import pytest
import torch
from typer.testing import CliRunner

import titan_adapters as ta
from tests.conftest import random_model, titan_error_text
from titan_adapters.cli import app
from titan_adapters.contract import meta_model
from titan_adapters.errors import CheckpointError
from titan_adapters.fingerprints import Sums, element_sums, places_sum, tensor_sums, total
from titan_adapters.state_dict import native_tensors
from titan_adapters.testing import unique_fill

LLAMA = ta.get_model("llama")
TIED = next(c for c in LLAMA.tiny_configs().values() if c.tied_embeddings)
GLM = ta.get_model("glm4_moe")
BIASED = next(iter(GLM.tiny_configs().values()))


def mix(x: int) -> int:
    """splitmix64's finalizer, as its authors write it, in Python's integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_sums_equal_the_formula_in_integers():
    values = torch.tensor([1.5, -2.0, 0.0, -0.0], dtype=torch.bfloat16)
    bits = [0x3FC0, 0xC000 - 2**16, 0, 0]  # the bits of a float as a signed integer
    constants = [
        (-0x61C8864680B583EB, -0x4B47D0C5E7E4B4A5, 0x1B873593CC9E2D51),
        (-0x3D4D51C2D82B14B1, 0x27D4EB2F165667C5, -0x2AB32D5C9A3B1F67),
    ]
    lanes = [sum(mix((a * b + i * f + c) % 2**64) for i, b in enumerate(bits)) % 2**64 for a, f, c in constants]
    places = sum(mix((i * 0x2545F4914F6CDD1D + 0x369DEA0F31A53F85) % 2**64) for i in range(4)) % 2**64
    assert [x % 2**64 for x in tensor_sums(values)] == [4, places, *lanes]


def test_a_hash_is_pinned():
    """Fingerprints are compared between versions of this library, too."""
    values = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert tensor_sums(values) == Sums(
        6, places=3210698930865302050, first=7466780215768348297, second=-6861543906180651047
    )


def test_parts_in_any_order_add_up():
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    whole, order = tensor_sums(values), torch.randperm(200_000, generator=torch.Generator().manual_seed(1))
    parts = [element_sums(values[part], part) for part in order.split(60_000)]
    assert sum(parts, Sums()) == whole
    assert whole.places == places_sum(200_000)
    assert sum([*parts, parts[0]], Sums()) != whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_element_and_its_place_count(dtype):
    values = torch.arange(12).to(dtype)
    seen = {tensor_sums(values)}
    for i in range(12):
        changed = values.clone()
        changed[i] = 1 - changed[i].float()
        seen.add(tensor_sums(changed))
    seen |= {tensor_sums(values.roll(k)) for k in range(1, 3)}
    assert len(seen) == 15 if dtype != torch.bool else len(seen) >= 13


def test_formats_of_a_checkpoint_have_one_fingerprint(tmp_path):
    model = random_model(LLAMA, TIED)
    expected = ta.fingerprint(model)
    for format in ("native", "hf", "dcp"):
        ta.save_checkpoint(model, tmp_path / format, format)
        assert ta.fingerprint(tmp_path / format) == expected
    assert list(expected) == sorted(native_tensors(model))
    assert "lm_head.weight" not in expected  # it is tok_embeddings.weight
    vocabulary = f"float32[{TIED.vocab_size},{TIED.dim}] "
    assert expected["tok_embeddings.weight"].startswith(vocabulary)
    assert len(expected["tok_embeddings.weight"]) == len(vocabulary) + 32


def test_a_cast_first_but_for_what_stays_fp32(tmp_path):
    trainer = random_model(GLM, BIASED)
    served = GLM(BIASED).to(torch.bfloat16)
    served.load_state_dict(trainer.state_dict())
    cast = ta.fingerprint(trainer, dtype=torch.bfloat16)
    assert cast == ta.fingerprint(served)
    ta.save_checkpoint(trainer, tmp_path / "folder")
    assert ta.fingerprint(tmp_path / "folder", dtype=torch.bfloat16) == cast
    assert ta.fingerprint_differences(cast, ta.fingerprint(trainer))
    kinds = {name: text.partition("[")[0] for name, text in cast.items()}
    kept = {name for name, kind in kinds.items() if kind == "float32"}
    assert kept and kept == {name for name in cast if name.endswith("correction_bias")}


def test_unique_fill_tells_equal_shapes_apart():
    model = unique_fill(LLAMA(TIED))
    digests = [text for text in ta.fingerprint(model).values()]
    assert len(set(digests)) == len(digests)
    for dtype in (torch.bfloat16, torch.float16):
        assert all(t.equal(t.to(dtype).float()) for t in native_tensors(model).values())
    layer = model.layers[0].feed_forward
    with torch.no_grad():
        w1, w3 = layer.w1.weight.clone(), layer.w3.weight.clone()
        layer.w1.weight.copy_(w3)
        layer.w3.weight.copy_(w1)
    changed = ta.fingerprint_differences(ta.fingerprint(model), dict(zip(ta.fingerprint(model), digests, strict=True)))
    assert [line.partition(":")[0] for line in changed] == [f"layers.0.feed_forward.w{i}.weight" for i in (1, 3)]


def test_differences_name_what_is_missing_and_what_is_unknown():
    ours, theirs = {"a": "x", "b": "unknown: packed", "c": "y"}, {"a": "x", "b": "unknown: packed", "d": "z"}
    assert ta.fingerprint_differences(ours, theirs) == [
        "b: unknown: packed against unknown: packed",
        "c: y against not there",
        "d: not there against z",
    ]
    assert total(ours) != total(theirs) and total(ours) == total(dict(reversed(ours.items())))


def test_a_model_without_memory_has_none():
    with pytest.raises(CheckpointError, match="Weights on the meta device have no values") as caught:
        ta.fingerprint(meta_model(LLAMA, TIED))
    assert "Fix: load the model first." in titan_error_text(caught)


def test_command(tmp_path):
    model = random_model(LLAMA, TIED)
    ta.save_checkpoint(model, tmp_path / "one")
    ta.save_checkpoint(model, tmp_path / "hf", "hf")
    with torch.no_grad():
        model.norm.weight[3] += 1
    ta.save_checkpoint(model, tmp_path / "two")

    def run(*arguments: str):
        return CliRunner().invoke(app, ["fingerprint", *(str(tmp_path / a) if a[0] != "-" else a for a in arguments)])

    printed = json.loads(run("one", "--json").stdout)
    assert printed == {"parameters": ta.fingerprint(tmp_path / "one"), "total": total(ta.fingerprint(tmp_path / "one"))}
    assert run("one").stdout.splitlines()[-1] == f"{printed['total']}  all {len(printed['parameters'])}"
    same = run("one", "hf")
    assert (same.exit_code, same.stdout) == (0, f"0 of {len(printed['parameters'])} parameters differ\n")
    other = run("one", "two", "--json")
    (line,) = json.loads(other.stdout)["differing"]
    assert other.exit_code == 1 and line.startswith("norm.weight: float32[")
