"""Each family's published config: facts by hand, and every spelling of it that is in use.

The configs are those of real checkpoints, as their repositories hold them (v4 spelling), without bookkeeping keys.
"""

import pytest

import titan_adapters as ta

BASE = {"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "use_cache": True}
MISTRAL = BASE | {  # mistralai/Mistral-7B-v0.1
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000,
}  # fmt: skip
MINISTRAL3 = BASE | {  # mistralai/Ministral-3-8B-Base-2512, text_config
    "model_type": "ministral3", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5, "sliding_window": None, "vocab_size": 131072,
    "rope_parameters": {
        "type": "yarn", "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1, "max_position_embeddings": 262144,
    },
}  # fmt: skip
STARCODER2 = BASE | {  # bigcode/starcoder2-7b
    "model_type": "starcoder2", "hidden_size": 4608, "intermediate_size": 18432, "num_hidden_layers": 32,
    "num_attention_heads": 36, "num_key_value_heads": 4, "max_position_embeddings": 16384, "norm_epsilon": 1e-5,
    "norm_type": "layer_norm", "mlp_type": "default", "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1000000,
    "sliding_window": 4096, "use_bias": True, "vocab_size": 49152, "attention_dropout": 0.1, "embedding_dropout": 0.1,
    "residual_dropout": 0.1,
}  # fmt: skip
PYTHIA = BASE | {  # EleutherAI/pythia-1b
    "model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 8, "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip


def read(hf: dict, *without: str, **changes):
    _, config = ta.read_hf_config({key: value for key, value in (hf | changes).items() if key not in without})
    return config


def problems(hf: dict, *without: str, **changes) -> list[str]:
    with pytest.raises(ta.TitanError) as caught:
        read(hf, *without, **changes)
    return caught.value.problems


def test_mistral():
    spec = read(MISTRAL).attention(31)
    assert (spec.num_kv_heads, spec.head_dim, spec.window, spec.temperature) == (8, 128, 4096, None)
    assert spec.rope == ta.RopeSpec(theta=1e4, rotary_dim=128, layout="half", scaling=None)
    assert read(MISTRAL, sliding_window=None).windows == (None,) * 32  # v0.2
    assert read(MISTRAL, "sliding_window").windows == (4096,) * 32  # absent is not null: transformers takes 4096
    assert read(MISTRAL, head_dim=160).attention(0).head_dim == 160  # Nemo: 32 heads of 160 are not 4096
    assert read(MISTRAL, "rope_theta", rope_parameters={"rope_theta": 1e4, "rope_type": "default"}) == read(MISTRAL)
    assert problems(MISTRAL, layer_types=["full_attention"] * 32)[0].startswith("layer_types = [")


def test_ministral_windows():
    types = ["sliding_attention", "full_attention"] * 16
    hf = MISTRAL | {"model_type": "ministral"}
    assert read(hf, layer_types=types).windows == (4096, None) * 16
    assert read(hf).windows == (4096,) * 32
    assert read(hf, sliding_window=None).windows == (None,) * 32


def test_ministral3():
    spec = read(MINISTRAL3).attention(0)
    assert spec.temperature == ta.TemperatureSpec(beta=0.1, original_max_position=16384)
    assert spec.rope.scaling == ta.YarnScaling(
        factor=16.0, original_max_position=16384, beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=None,
        mscale=1.0, mscale_all_dim=1.0,
    )  # fmt: skip
    rope = MINISTRAL3["rope_parameters"]
    old = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    assert read(MINISTRAL3, "rope_parameters", rope_theta=1e6, rope_scaling=old) == read(MINISTRAL3)
    assert read(MINISTRAL3, rope_parameters=rope | {"llama_4_scaling_beta": 0}).attention(0).temperature is None
    assert problems(MINISTRAL3, rope_parameters={k: v for k, v in rope.items() if k != "llama_4_scaling_beta"}) == [
        "llama_4_scaling_beta is missing from the rope settings"
    ]
    assert problems(MINISTRAL3, rope_parameters=rope | {"type": "linear", "beta_fsat": 3}) == [
        "rope settings are not read for type 'yarn': beta_fsat, type"
    ]
    assert problems(MINISTRAL3, rope_parameters={"rope_theta": 1e6, "llama_4_scaling_beta": 0.1})[0].startswith(
        "the rope type must be yarn"
    )


def test_starcoder2():
    config = read(STARCODER2)
    spec = config.attention(0)
    assert (spec.head_dim, spec.window, spec.qkv_bias, spec.out_bias) == (128, 4096, True, True)
    assert config.norm() == ta.LayerNormSpec(eps=1e-5, bias=True)
    expected = ta.FeedForwardSpec(hidden_dim=18432, activation="gelu_tanh", gated=False, bias=True)
    assert config.feed_forward(0) == expected
    assert read(STARCODER2, "sliding_window").windows == (None,) * 32  # here absent means none
    assert problems(STARCODER2, norm_type="rms_norm") == [
        "norm_type is 'rms_norm'; starcoder2 computes 'layer_norm' only"
    ]


def test_gpt_neox():
    config = read(PYTHIA)
    spec = config.attention(0)
    assert (spec.num_kv_heads, spec.head_dim, spec.qkv_bias, config.parallel_residual) == (8, 256, True, True)
    assert spec.rope == ta.RopeSpec(theta=1e4, rotary_dim=64, layout="half", scaling=None)
    assert read(PYTHIA, rope_theta=10000.0, partial_rotary_factor=0.25) == config  # as v4 wrote it back
    v5 = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}
    assert read(PYTHIA, "rotary_emb_base", "rotary_pct", rope_parameters=v5) == config
    assert read(PYTHIA, "rotary_pct") == config  # a quarter is what the format takes
    assert read(PYTHIA, rotary_pct=1.0).rope.rotary_dim == 256
    assert problems(PYTHIA, rope_parameters=v5 | {"partial_rotary_factor": 0.5}) == [
        "partial_rotary_factor is contradictory: rotary_pct = 0.25, rope_parameters.partial_rotary_factor = 0.5"
    ]
    assert problems(PYTHIA, rotary_pct=9 / 256) == ["config: Value error, rotary_dim must be even, is 9"]
