"""Published configs: both spellings give the same facts, and nothing is guessed, ignored or defaulted in silence."""

import pytest

import titan_adapters as ta
from tests.conftest import EVERY_MODEL, titan_error_text
from titan_adapters.hf_writer import hf_windows

FAMILIES = ("llama", "qwen2", "qwen3")

# As transformers v5 writes it. 8 heads of 16 channels, which is not 96 / 8.
PUBLISHED = {
    "hidden_size": 96, "num_hidden_layers": 2, "vocab_size": 131, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 80, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
LLAMA3 = {
    "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
every_family = pytest.mark.parametrize("family", FAMILIES)


def read(family: str, *without: str, **changes):
    data = {"model_type": family} | PUBLISHED | changes
    cls, config = ta.read_hf_config({key: value for key, value in data.items() if key not in without})
    assert cls is ta.get_model(family)
    return config


def problems(family: str, *without: str, **changes) -> list[str]:
    with pytest.raises(ta.TitanError) as caught:
        read(family, *without, **changes)
    text = titan_error_text(caught)
    assert text.startswith(f"This config.json can't be read as {family}.")
    return caught.value.problems


@every_family
def test_fields_by_hand(family):
    config = read(family)
    expected = {
        "dim": 96, "num_layers": 2, "vocab_size": 131, "max_seq_len": 64, "norm_eps": 1e-5, "tied_embeddings": False,
        "dtype": "bfloat16", "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "hidden_dim": 80,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    layout = "interleaved" if family == "llama" else "half"
    assert config.rope == ta.RopeSpec(theta=5e5, rotary_dim=16, layout=layout, scaling=None)
    spec = config.attention(1)
    assert spec.scale == 0.25 and spec.window is None and spec.softcap is None
    assert spec.biases == ("qkv" if family == "qwen2" else "")
    assert spec.qk_norm == (
        ta.QKNormSpec(
            scope="per_head",
            eps=1e-5,
            offset=0.0,
            weight_in_fp32=False,
            weight=True,
            after_rope=False,
        )
        if family == "qwen3"
        else None
    )


@every_family
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_rope_spellings_agree(family, type_key):
    plain = read(family)
    assert read(family, "rope_parameters", rope_theta=5e5) == plain
    assert read(family, "rope_parameters", rope_theta=500000) == plain  # an integer in many published files
    assert read(family, "rope_parameters", rope_theta=5e5, rope_scaling=None) == plain
    assert read(family, "rope_parameters", rope_theta=5e5, rope_scaling={type_key: "default"}) == plain
    assert read(family, rope_theta=5e5) == plain
    scaled = read(family, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert scaled.rope.scaling == ta.Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    v4 = {type_key: "llama3", **LLAMA3}
    assert read(family, "rope_parameters", rope_theta=5e5, rope_scaling=v4) == scaled
    both = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_scaling": v4}
    assert read(family, rope_theta=5e5, **both) == scaled


@every_family
def test_theta_is_never_defaulted(family):
    expected = ["rope_theta is missing: neither rope_theta nor rope_parameters.rope_theta is there"]
    assert problems(family, "rope_parameters") == expected
    assert problems(family, rope_parameters={"rope_type": "default"}) == expected


@every_family
def test_contradictory_thetas_name_both_values(family):
    expected = ["rope_theta is contradictory: rope_theta = 10000.0, rope_parameters.rope_theta = 500000.0"]
    assert problems(family, rope_theta=10000.0) == expected


@every_family
def test_contradictory_rope_dicts_are_refused(family):
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    for v4 in ({"rope_type": "llama3", **LLAMA3, "factor": 8.0}, {"type": "default"}):
        (problem,) = problems(family, rope_parameters=scaled, rope_scaling=v4)
        assert "contradict each other" in problem and "32.0" in problem and str(v4) in problem


@every_family
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope_type": "mrope", "factor": 4.0}, "rope type 'mrope' is not supported"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
         "rope type llama3 lacks high_freq_factor, original_max_position_embeddings"),
        ({"rope_type": "default", "factor": 4.0, "beta_fast": 1},
         "rope settings are not read for type 'default': beta_fast, factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5},
         "rope settings are not read for type 'default': partial_rotary_factor"),
        ({"rope_type": "llama3", **LLAMA3, "attention_factor": 1.2},
         "rope settings are not read for type 'llama3': attention_factor"),
    ],
)  # fmt: skip
def test_rope_settings_that_are_not_honoured_are_refused_by_name(family, settings, expected):
    assert problems(family, rope_parameters={"rope_theta": 5e5} | settings) == [expected]


@every_family
def test_unknown_keys_are_refused_by_name_and_all_at_once(family):
    wrong = {"attn_logit_softcapping": 50.0, "partial_rotary_factor": 0.5, "hidden_act": "gelu"}
    assert problems(family, "rms_norm_eps", "vocab_size", **wrong) == [
        f"hidden_act is 'gelu'; {family} computes 'silu' only",
        "vocab_size is missing",
        "rms_norm_eps is missing",
        f"attn_logit_softcapping = 50.0 is not read by {family}",
        f"partial_rotary_factor = 0.5 is not read by {family}",
    ]


@every_family
def test_inert_keys_are_accepted(family):
    inert = {
        "_name_or_path": "x", "architectures": ["X"], "attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": [1],
        "initializer_range": 0.02, "pad_token_id": None, "pretraining_tp": 1, "transformers_version": "4.40",
        "use_cache": True, "is_encoder_decoder": False, "some_null": None,
    }  # fmt: skip
    assert read(family, **inert) == read(family)


@every_family
@pytest.mark.parametrize("key", ["is_encoder_decoder", "rope_interleaved"])
def test_keys_that_are_inert_at_one_value_only(family, key):
    assert read(family, **{key: False}) == read(family)
    assert problems(family, **{key: True}) == [f"{key} is True; {family} computes False only"]


@every_family
def test_dtype_spellings(family):
    plain = read(family)
    assert read(family, "dtype", torch_dtype="bfloat16") == plain
    assert read(family, "dtype", torch_dtype="torch.bfloat16") == plain
    assert read(family, torch_dtype="bfloat16") == plain
    assert problems(family, torch_dtype="float16") == [
        "dtype / torch_dtype is contradictory (bfloat16, float16): say what the weights are served in"
    ]
    assert problems(family, "dtype") == ["dtype / torch_dtype is missing: say what the weights are served in"]
    (problem,) = problems(family, dtype="float8_e4m3fn")
    assert problem.startswith("dtype: Input should be 'float32', 'bfloat16' or 'float16'")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows(family):
    full, sliding = "full_attention", "sliding_attention"
    assert read(family).windows == (None, None)
    # As Qwen2.5 publishes it: a number that nothing uses.
    assert read(family, use_sliding_window=False, sliding_window=4096, max_window_layers=1).windows == (None, None)
    used = {"use_sliding_window": True, "sliding_window": 4096}
    assert read(family, **used, layer_types=[full, sliding]).windows == (None, 4096)
    assert read(family, **used, layer_types=[sliding, full]).windows == (4096, None)
    assert problems(family, **used) == ["use_sliding_window is true, but layer_types does not say which layers have it"]
    assert problems(family, layer_types=[full, sliding]) == [
        "layer_types has sliding_attention, but sliding_window is missing"
    ]
    for types in ([full], [full, "chunked_attention"]):
        (problem,) = problems(family, layer_types=types)
        assert problem.startswith("layer_types must be 2 of full_attention, sliding_attention; got [")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_that_are_switched_off_and_on_at_once_are_refused(family):
    """transformers drops the window if use_sliding_window is false, whatever layer_types says."""
    types = ["full_attention", "sliding_attention"]
    (problem,) = problems(family, use_sliding_window=False, sliding_window=5, layer_types=types)
    assert "use_sliding_window" in problem and "layer_types" in problem


def test_llama_has_no_windows():
    assert problems("llama", sliding_window=5) == ["sliding_window = 5 is not read by llama"]


def test_one_window_per_config():
    assert hf_windows((None, None)) == {
        "use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    assert hf_windows((7, None, 7)) == {
        "use_sliding_window": True, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    with pytest.raises(ta.TitanError, match=r"different windows \(\[3, 7\]\)"):
        hf_windows((7, 3))


@pytest.mark.parametrize(("cls", "config"), EVERY_MODEL)
def test_published_config_reads_back_and_transformers_agrees(cls, config):
    """Its defaults fill what we left out, so what it writes must still be this config."""
    from transformers import AutoConfig

    hf = cls.to_hf_config(config)
    assert ta.read_hf_config(hf) == (cls, config)
    written = AutoConfig.for_model(**hf).to_dict()
    assert ta.read_hf_config(written | {"dtype": config.dtype, "torch_dtype": None}) == (cls, config)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_transformers_means_by_them(family):
    """Read the same file without its optional keys both ways."""
    from transformers import AutoConfig

    for key in ("head_dim", "num_key_value_heads", "tie_word_embeddings", "attention_bias", "mlp_bias"):
        data = {k: v for k, v in ({"model_type": family} | PUBLISHED).items() if k != key}
        theirs = AutoConfig.for_model(**data)
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        try:
            _, ours = ta.read_hf_config(data)
        except ta.TitanError as error:  # refusing is fine, guessing is not
            ours = {"num_key_value_heads": "num_kv_heads"}.get(key, key)  # by our name where a spec contradicts itself
            assert key in str(error) or ours in str(error)
            continue
        assert ours.head_dim == head_dim, key
        assert ours.num_kv_heads == theirs.num_key_value_heads, key
        assert ours.tied_embeddings == theirs.tie_word_embeddings, key


def test_unknown_family_and_no_family():
    with pytest.raises(ta.TitanError, match=r"config\.json has no model_type") as caught:
        ta.read_hf_config(dict(PUBLISHED))
    titan_error_text(caught)
    with pytest.raises(ta.TitanError, match="No model is registered under 'gpt2'") as caught:
        ta.read_hf_config(PUBLISHED | {"model_type": "gpt2"})
    titan_error_text(caught)
