"""`config FOLDER --diff OTHER`: spellings are no difference, facts are; expected values by hand."""

import json

import pytest
from typer.testing import CliRunner

import titan_adapters as ta
from tests.conftest import EVERY_MODEL, random_model, titan_error_text
from tests.example_models import Renamed
from titan_adapters.cli import app
from titan_adapters.differences import ABSENT

Llama = ta.get_model("llama")
TINY = Llama.tiny_configs()["tied, llama3 rope"]
V4 = {  # the same model as transformers v4 would publish it, as far as that differs from the format's defaults
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "num_hidden_layers": 3,
    "vocab_size": 131, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "torch_dtype": "float32", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 80, "hidden_act": "silu", "rope_theta": 10000.0, "eos_token_id": 7, "bos_token_id": 1,
    "rope_scaling": {
        "type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
V5 = {key: value for key, value in V4.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")} | {
    "dtype": "float32",
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000, "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip


def diff(path, other: dict):
    path.write_text(json.dumps(other))
    found = ta.diff_hf_config(Llama, TINY, path)
    return [(d.field, d.ours, d.theirs) for d in found.differences], found


@pytest.mark.parametrize("other", [V4, V5, V4 | V5])
def test_spellings_and_absent_defaults_are_no_difference(other, tmp_path):
    rows, found = diff(tmp_path / "config.json", other)
    assert rows == [] and found.same_family
    # hidden_size, num_hidden_layers, vocab_size, max_position_embeddings, rms_norm_eps, tie_word_embeddings, dtype,
    # three of heads, intermediate_size, hidden_act, rope_parameters, model_type, attention_bias, mlp_bias
    assert found.num_equal == 16
    assert ta.diff_hf_config(Llama, TINY, tmp_path) == found  # a folder will do


@pytest.mark.parametrize(("cls", "config"), EVERY_MODEL)
def test_no_model_differs_from_its_own_published_config(cls, config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(cls.to_hf_config(config)))
    assert ta.diff_hf_config(cls, config, tmp_path).differences == []


def test_facts_are_named_in_published_terms(tmp_path):
    other = V4 | {"rope_scaling": V4["rope_scaling"] | {"factor": 8.0}, "torch_dtype": "bfloat16", "mlp_bias": True}
    rows, found = diff(tmp_path / "config.json", other)
    assert rows == [
        ("dtype", "float32", "bfloat16"),
        ("rope_parameters.factor", 4.0, 8.0),
        ("mlp_bias", False, True),
    ]
    assert found.num_equal == 13
    theta = {key: value for key, value in V4.items() if key != "rope_scaling"} | {"rope_theta": 500000.0}
    assert diff(tmp_path / "config.json", theta)[0][:3] == [
        ("rope_parameters.rope_type", "llama3", "default"),
        ("rope_parameters.factor", 4.0, ABSENT),
        ("rope_parameters.low_freq_factor", 1.0, ABSENT),
    ]


def test_layers_are_named_one_by_one(tmp_path):
    cls = ta.get_model("gemma2")
    config = next(iter(cls.tiny_configs().values()))
    other = cls.to_hf_config(config) | {"layer_types": ["sliding_attention", "sliding_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(other))
    found = ta.diff_hf_config(cls, config, tmp_path).differences
    assert [(d.field, d.ours, d.theirs) for d in found] == [("layer_types.1", "full_attention", "sliding_attention")]


def test_another_family_is_compared_key_by_key(tmp_path):
    rows, found = diff(tmp_path / "config.json", V4 | {"model_type": "lamma", "qk_norm": True})
    assert not found.same_family
    assert rows == [
        ("model_type", "llama", "lamma"),
        ("attention_bias", False, ABSENT),
        ("mlp_bias", False, ABSENT),
        ("qk_norm", ABSENT, True),
    ]


def test_what_can_not_be_compared_is_an_error(tmp_path, no_registrations_left):
    def refusal(call, *parts):
        with pytest.raises(ta.TitanError) as caught:
            call()
        text = titan_error_text(caught)
        assert all(part in text for part in parts), text

    file = tmp_path / "config.json"
    refusal(lambda: ta.diff_hf_config(Llama, TINY, tmp_path), f"{file} is not there", "Fix: give a config.json, or")
    file.write_text("{")
    refusal(lambda: ta.diff_hf_config(Llama, TINY, tmp_path), f"{file} is not JSON")
    refusal(
        lambda: diff(file, V4 | {"rms_norm_esp": 1e-6, "mlp_type": "moe"}),
        "can't be read as llama",
        "mlp_type = 'moe' is not read by llama",
        "rms_norm_esp = 1e-06 is not read by llama",
    )

    class Unpublished(Renamed):
        model_type = "unpublished"
        to_hf_config = classmethod(ta.BaseTransformer.to_hf_config.__func__)

    file.write_text(json.dumps(V4))
    refusal(lambda: ta.diff_hf_config(Unpublished, TINY, file), "Unpublished can't be exported", "Fix: override to_hf")


def test_command(tmp_path):
    ta.save_checkpoint(random_model(Llama, TINY), tmp_path / "native")
    other = tmp_path / "other.json"

    def command(data: dict):
        other.write_text(json.dumps(data))
        return CliRunner().invoke(app, ["config", str(tmp_path / "native"), "--diff", str(other)])

    same = command(V4)
    assert (same.exit_code, same.output) == (0, "0 fields differ, 16 keys say the same\n")
    changed = command(V4 | {"rms_norm_eps": 1e-6})
    assert changed.exit_code == 1
    cells = [[cell.strip() for cell in line.split("│")[1:4]] for line in changed.output.splitlines() if "│" in line]
    assert cells == [["rms_norm_eps", "1e-05", "1e-06"]]
    assert changed.output.splitlines()[-1] == "1 fields differ, 15 keys say the same"
    assert command(V4 | {"model_type": "lamma"}).output.startswith("Another family: compared key by key")
