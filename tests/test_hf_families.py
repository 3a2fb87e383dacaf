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
STARCODER2 = {  # bigcode/starcoder2-7b, which leaves out tie_word_embeddings
    "model_type": "starcoder2", "hidden_size": 4608, "intermediate_size": 18432, "num_hidden_layers": 32,
    "num_attention_heads": 36, "num_key_value_heads": 4, "max_position_embeddings": 16384, "norm_epsilon": 1e-5,
    "norm_type": "layer_norm", "mlp_type": "default", "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1000000,
    "sliding_window": 4096, "use_bias": True, "vocab_size": 49152, "attention_dropout": 0.1, "embedding_dropout": 0.1,
    "residual_dropout": 0.1, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
PYTHIA = BASE | {  # EleutherAI/pythia-1b
    "model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 8, "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True, "vocab_size": 50304,
    "torch_dtype": "float16",
}  # fmt: skip
PHI4_MINI = BASE | {  # microsoft/Phi-4-mini-instruct; the lists are shortened in content, not in length
    "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 24, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.1] * 48},
    "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064, "attention_bias": False,
    "mlp_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "interpolate_factor": 1, "full_attn_mod": 1,
    "lm_head_bias": False,
}  # fmt: skip
OLMO2 = BASE | {  # allenai/OLMo-2-1124-7B
    "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 500000, "rope_scaling": None, "attention_bias": False, "vocab_size": 100352,
}  # fmt: skip
OLMO3 = OLMO2 | {  # allenai/Olmo-3-1025-7B
    "model_type": "olmo3", "max_position_embeddings": 65536, "sliding_window": 4096,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "vocab_size": 100278,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
}  # fmt: skip
GEMMA2 = {  # google/gemma-2-9b
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "sliding_window": 4096, "query_pre_attn_scalar": 224, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False, "cache_implementation": "hybrid", "torch_dtype": "float32", "vocab_size": 256000,
}  # fmt: skip
GEMMA3 = {  # google/gemma-3-1b-it
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
    "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "cache_implementation": "hybrid", "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip
GRANITE = BASE | {  # ibm-granite/granite-3.0-8b-base
    "model_type": "granite", "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "logits_scaling": 16.0, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": True, "vocab_size": 49155,
}  # fmt: skip
GLM4 = BASE | {  # THUDM/GLM-4-9B-0414
    "model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "attention_bias": True, "vocab_size": 151552,
}  # fmt: skip
SMOLLM3 = BASE | {  # HuggingFaceTB/SmolLM3-3B
    "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 28, "layer_types": ["full_attention"] * 36, "no_rope_layers": [1, 1, 1, 0] * 9,
    "no_rope_layer_interval": 4, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    "vocab_size": 128256,
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
    assert spec.temperature == ta.TemperatureSpec(beta=0.1, original_max_position=16384, offset=0)
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
    assert (spec.head_dim, spec.window, spec.biases) == (128, 4096, "qkvo")
    assert config.tied_embeddings  # what transformers takes for an absent key
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
    assert (spec.num_kv_heads, spec.head_dim, spec.biases, config.parallel_residual) == (8, 256, "qkvo", True)
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


def test_phi3():
    config = read(PHI4_MINI)
    rope = config.rope
    assert (config.head_dim, rope.rotary_dim, config.windows) == (128, 96, (262144,) * 32)
    # sqrt(1 + ln(131072 / 4096) / ln(4096)) = sqrt(1 + 5 / 12), since both are powers of two
    assert rope.scaling.attention_factor == pytest.approx((17 / 12) ** 0.5)
    assert rope.scaling.long_factor == (1.1,) * 48 and rope.scaling.original_max_position == 4096
    settings = PHI4_MINI["rope_scaling"]
    v5 = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096, **{k: v for k, v in settings.items() if k != "type"},
    }  # fmt: skip
    assert read(PHI4_MINI, "rope_theta", "rope_scaling", "partial_rotary_factor", rope_parameters=v5) == config
    assert read(PHI4_MINI, rope_scaling=settings | {"type": "su"}) == config  # as the first release called it
    explicit = read(PHI4_MINI, rope_scaling=settings | {"attention_factor": 1.5, "factor": 2.0})
    assert explicit.rope.scaling.attention_factor == 1.5
    assert problems(PHI4_MINI, rope_scaling=settings | {"original_max_position_embeddings": 8192}) == [
        "original_max_position_embeddings is contradictory: 4096, in rope_parameters 8192"
    ]
    for key in ("full_attn_mod", "interpolate_factor"):
        assert problems(PHI4_MINI, **{key: 2}) == [f"{key} is 2; phi3 computes 1 only"]
    assert problems(PHI4_MINI, "original_max_position_embeddings") == [
        "rope type longrope lacks attention_factor, original_max_position_embeddings"
    ]


def test_olmo2_and_olmo3():
    spec = read(OLMO2).attention(0)
    assert spec.qk_norm == ta.QKNormSpec(
        scope="full",
        eps=1e-6,
        offset=0.0,
        weight_in_fp32=True,
        weight=True,
        after_rope=False,
    )
    assert spec.window is None and spec.rope == ta.RopeSpec(theta=5e5, rotary_dim=128, layout="half", scaling=None)
    config = read(OLMO3)
    assert config.windows == (4096, 4096, 4096, None) * 8 and config.attention(0).rope == spec.rope
    assert config.attention(3).rope.scaling.attention_factor == 1.2079441541679836
    assert read(OLMO3, "layer_types") == config
    v5 = {
        "full_attention": OLMO3["rope_scaling"] | {"rope_theta": 500000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
    }
    assert read(OLMO3, "rope_theta", "rope_scaling", rope_parameters=v5) == config
    assert problems(OLMO3, rope_parameters=OLMO3["rope_scaling"])[0].startswith(
        "rope_parameters has attention_factor, "
    )
    half = {"full_attention": v5["full_attention"]}
    assert problems(OLMO3, "rope_theta", "rope_scaling", rope_parameters=half) == [
        "rope_theta is missing: neither rope_theta nor rope_parameters.sliding_attention.rope_theta is there"
    ]


def test_gemma2():
    config = read(GEMMA2)
    assert config.windows == (4096, None) * 21  # the format's own pattern: the first layer has the window
    spec = config.attention(1)
    assert (spec.scale, spec.softcap, config.logit_softcap, config.tied_embeddings) == (224**-0.5, 50.0, 30.0, True)
    assert config.norm() == ta.RMSNormSpec(eps=1e-6, offset=1.0, weight_in_fp32=True)
    assert config.feed_forward(0).activation == "gelu_tanh"
    uncapped = read(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention(0).softcap, uncapped.logit_softcap) == (None, None)
    assert read(GEMMA2, "attn_logit_softcapping", "final_logit_softcapping") == config
    assert problems(GEMMA2, use_bidirectional_attention=True) == [
        "use_bidirectional_attention is True; gemma2 computes False only"
    ]


def test_gemma3():
    config = read(GEMMA3)
    assert config.windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert config.attention(0).rope.theta == 1e4 and config.attention(5).rope.theta == 1e6
    assert config.attention(0).qk_norm == ta.QKNormSpec(
        scope="per_head",
        eps=1e-6,
        offset=1.0,
        weight_in_fp32=True,
        weight=True,
        after_rope=False,
    )
    v5 = {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    assert read(GEMMA3, "rope_theta", "rope_local_base_freq", rope_parameters=v5) == config
    scaled = read(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})  # 4b and larger
    assert scaled.attention(5).rope.scaling == ta.LinearScaling(factor=8.0)
    assert scaled.attention(0).rope.scaling is None
    assert problems(GEMMA3, rope_local_base_freq=5000, rope_parameters=v5) == [
        "rope_theta is contradictory: rope_local_base_freq = 5000, rope_parameters.sliding_attention.rope_theta = 10000"
    ]


def test_granite():
    config = read(GRANITE)
    assert config.attention(0).scale == 0.0078125 and config.attention(0).head_dim == 128
    assert (config.embedding_multiplier, config.residual_multiplier, config.logits_divisor) == (12.0, 0.22, 16.0)
    assert read(GRANITE, "residual_multiplier").residual_multiplier == 1.0


def test_glm4():
    config = read(GLM4)
    spec = config.attention(0)
    assert spec.rope == ta.RopeSpec(theta=1e4, rotary_dim=64, layout="interleaved", scaling=None)
    assert spec.biases == "qkv"
    assert read(GLM4, "partial_rotary_factor") == config  # half is what the format takes


def test_smollm3():
    config = read(SMOLLM3)
    assert [config.attention(layer).rope is None for layer in range(36)] == [False, False, False, True] * 9
    assert read(SMOLLM3, "no_rope_layers") == config
    assert problems(SMOLLM3, no_rope_layers=[1, 0]) == ["no_rope_layers must have one value per layer, 36, has 2"]
    assert problems(SMOLLM3, no_rope_layer_interval=0) == ["no_rope_layer_interval must be at least 1, is 0"]
