"""Saving, loading and converting whole checkpoints: what is kept, and everything that is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import titan_adapters as ta
from tests.conftest import assert_bitwise_equal, random_model, titan_error_text
from titan_adapters.checkpoint import convert_checkpoint

LLAMA, QWEN2, QWEN3 = (ta.get_model(name) for name in ("llama", "qwen2", "qwen3"))
CONFIG = next(iter(QWEN2.tiny_configs().values()))


@pytest.fixture
def saved(tmp_path) -> Path:
    ta.save_checkpoint(random_model(QWEN2, CONFIG), tmp_path / "saved")
    return tmp_path / "saved"


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(call, *pattern: str) -> str:
    with pytest.raises(ta.TitanError) as caught:
        call()
    text = titan_error_text(caught)
    for part in pattern:
        assert part in text, text
    return text


def test_native_folder_says_whose_it_is(saved):
    assert sorted(p.name for p in saved.iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "titan.json",
    ]
    identity = json.loads((saved / "titan.json").read_text())
    assert identity["titan_format"] == 1 and identity["model"] == "qwen2" and identity["names"] == "native"
    assert identity["config"]["num_kv_heads"] == 2 and identity["config"]["windows"] == [None, None]


@pytest.mark.parametrize("format", ["native", "hf"])
def test_resharded_load_is_bitwise(format, tmp_path):
    model = random_model(LLAMA, LLAMA.tiny_configs()["tied, llama3 rope"])
    ta.save_checkpoint(model, tmp_path / "saved", format, max_shard_bytes=30_000)
    assert len(list((tmp_path / "saved").glob("model-*-of-*.safetensors"))) > 5
    assert_bitwise_equal(ta.load_model(tmp_path / "saved").state_dict(), model.state_dict())


def test_config_edited_after_the_fact_is_refused(saved):
    config = json.loads((saved / "titan.json").read_text())["config"]
    edit(saved / "titan.json", config=config | {"norm_eps": 1e-5})
    refusal(
        lambda: ta.load_model(saved),
        "was written with another config than titan.json now holds",
        f"digest in the file: {CONFIG.digest()}",
        "Fix: restore the original titan.json",
    )


def test_wrong_model_is_refused(saved):
    model = random_model(QWEN3, next(iter(QWEN3.tiny_configs().values())))
    refusal(lambda: ta.load_checkpoint(model, saved), "holds a qwen2, the model is a qwen3")


def test_different_config_lists_all_fields(saved):
    changes = {"norm_eps": 1e-5, "windows": (None, 7), "dtype": "bfloat16"}  # dtype is how it is held, not what it is
    model = random_model(QWEN2, CONFIG.model_copy(update=changes)).float()
    with pytest.raises(ta.TitanError) as caught:
        ta.load_checkpoint(model, saved)
    titan_error_text(caught)
    assert caught.value.problems == [
        "norm_eps: 1e-05 here, 1e-06 in the checkpoint",
        "windows.1: 7 here, None in the checkpoint",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_is_refused_unless_asked(saved, dtype):
    model = random_model(QWEN2, CONFIG, seed=2).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    refusal(
        lambda: ta.load_checkpoint(model, saved),
        "Storing these weights would round them.",
        f"layers.0.attention_norm.weight is torch.float32, which {dtype} would round",
        "cast=True",
    )
    assert_bitwise_equal(model.state_dict(), before)
    ta.load_checkpoint(model, saved, cast=True)
    expected = {name: tensor.to(dtype) for name, tensor in random_model(QWEN2, CONFIG).state_dict().items()}
    assert_bitwise_equal(model.state_dict(), expected)
    assert_bitwise_equal(ta.load_model(saved, dtype=dtype).state_dict(), expected)


def test_widening_needs_no_cast(tmp_path):
    narrow = random_model(QWEN2, CONFIG.model_copy(update={"dtype": "bfloat16"}))
    ta.save_checkpoint(narrow, tmp_path / "bf16")
    wide = QWEN2(CONFIG)
    ta.load_checkpoint(wide, tmp_path / "bf16")
    assert_bitwise_equal(wide.state_dict(), {n: t.float() for n, t in narrow.state_dict().items()})
    loaded = ta.load_model(tmp_path / "bf16")
    assert {t.dtype for t in loaded.state_dict().values()} == {torch.bfloat16}


def test_saving_another_dtype_than_the_config_says_is_refused_unless_asked(tmp_path):
    model = random_model(QWEN2, CONFIG).bfloat16()
    refusal(
        lambda: ta.save_checkpoint(model, tmp_path / "x"),
        "The config says float32, but the model holds other dtypes.",
        "tok_embeddings.weight is torch.bfloat16",
    )
    assert list(tmp_path.iterdir()) == []
    ta.save_checkpoint(model, tmp_path / "x", cast=True)
    assert_bitwise_equal(ta.load_model(tmp_path / "x").state_dict(), model.float().state_dict())


def test_convert_to_another_dtype(saved, tmp_path):
    identity = convert_checkpoint(saved, tmp_path / "half", "hf", dtype="float16")
    assert identity.config.dtype == "float16" and identity.names == "hf"
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    expected = random_model(QWEN2, CONFIG).half().state_dict()
    assert_bitwise_equal(ta.load_model(tmp_path / "half").state_dict(), expected)


def test_a_folder_whose_config_is_narrower_than_its_weights_is_refused(saved, tmp_path):
    convert_checkpoint(saved, tmp_path / "hf", "hf")
    edit(tmp_path / "hf" / "config.json", dtype="bfloat16", torch_dtype="bfloat16")
    refusal(lambda: convert_checkpoint(tmp_path / "hf", tmp_path / "new"), "would round them", "--dtype")
    refusal(lambda: ta.load_model(tmp_path / "hf"), "would round them")
    assert not (tmp_path / "new").exists()


def test_failure_while_converting_leaves_nothing(tmp_path):
    """The tied head turns out to differ only when its data has been read, after most has been written."""
    config = QWEN2.tiny_configs()["tied, one kv head"]
    ta.save_checkpoint(random_model(QWEN2, config), tmp_path / "hf", "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    refusal(lambda: convert_checkpoint(tmp_path / "hf", tmp_path / "new"), "lm_head.weight differs from")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_what_the_stock_format_cannot_hold_is_refused_before_writing(tmp_path):
    model = random_model(QWEN2, CONFIG.model_copy(update={"windows": (3, 7)}))
    refusal(lambda: ta.save_checkpoint(model, tmp_path / "x", "hf"), "different windows ([3, 7])", "format='native'")
    assert list(tmp_path.iterdir()) == []
    ta.save_checkpoint(model, tmp_path / "x", "native")
    assert ta.load_model(tmp_path / "x").config.windows == (3, 7)


@pytest.mark.parametrize("model", ["no-such-model", "os:system", "trojan:Model", "trojan"])
@pytest.mark.parametrize("format", ["native", "hf"])
def test_a_checkpoint_cannot_have_anything_imported(saved, tmp_path, monkeypatch, model, format):
    (tmp_path / "trojan.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    if format == "native":
        edit(saved / "titan.json", model=model)
    else:
        convert_checkpoint(saved, tmp_path / "hf", "hf")
        saved = tmp_path / "hf"
        edit(saved / "config.json", model_type=model, auto_map={"AutoConfig": "trojan.Model"})
    text = refusal(lambda: ta.load_model(saved), f"No model is registered under {model!r}")
    assert "known: " in text and " llama, " in text
    assert not (tmp_path / "ran").exists() and "trojan" not in sys.modules


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "is not JSON"),
        ("[]", "does not hold a JSON object"),
        ("{}", "keys must be exactly ['config', 'model', 'names', 'titan_format'], are []"),
    ],
)
def test_malformed_titan_json_is_refused(saved, content, expected):
    (saved / "titan.json").write_text(content)
    refusal(lambda: ta.load_model(saved), expected)


@pytest.mark.parametrize("change", [{"titan_format": 2}, {"names": "other"}, {"extra": 1}])
def test_unknown_titan_json_is_refused(saved, change):
    edit(saved / "titan.json", **change)
    refusal(lambda: ta.load_model(saved), "is not a version 1 description")


def test_no_checkpoint_at_all(tmp_path):
    refusal(lambda: ta.load_model(tmp_path), "it has neither titan.json nor config.json")
    refusal(lambda: ta.load_model(tmp_path / "nowhere"), "there is no such folder")


def test_companions_come_along_and_stop_ids_are_kept(saved, tmp_path):
    """config.json is rewritten, so the ids that stop generation move to generation_config.json."""
    source = tmp_path / "hf"
    convert_checkpoint(saved, source, "hf")
    edit(source / "config.json", eos_token_id=[7, 9], bos_token_id=0, pad_token_id=None)
    files = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "tokenizer_config.json": "{}"}
    for name, text in (files | {"README.md": "not ours to copy", "modeling_x.py": "raise"}).items():
        (source / name).write_text(text)
    convert_checkpoint(source, tmp_path / "native")
    target = tmp_path / "native"
    assert {name: (target / name).read_text() for name in files} == files
    assert json.loads((target / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": [7, 9]}
    assert not (target / "README.md").exists() and not (target / "modeling_x.py").exists()
    # An existing generation_config.json is authoritative, and survives the way back.
    (target / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.6}')
    convert_checkpoint(target, tmp_path / "back", "hf")
    kept = (tmp_path / "back" / "generation_config.json").read_text()
    assert kept == '{"eos_token_id": 3, "temperature": 0.6}'
