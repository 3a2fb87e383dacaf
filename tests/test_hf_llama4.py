"""As test_hf_families, for Llama 4's text model."""

import pytest

import titan_adapters as ta
from tests.conftest import titan_error_text
from tests.test_hf_families import BASE, problems, read
from tests.test_hf_moe_families import mixture

LLAMA4 = BASE | {  # meta-llama/Llama-4-Scout-17B-16E, text_config
    "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "head_dim": 128, "num_attention_heads": 40, "num_key_value_heads": 8,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192,
    "no_rope_layers": [1, 1, 1, 0] * 12, "interleave_moe_layer_step": 1, "moe_layers": list(range(48)),
    "num_local_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True, "vocab_size": 202048,
    "cache_implementation": "hybrid", "for_llm_compressor": False, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def test_llama4():
    config = read(LLAMA4)
    local, full = config.attention(0), config.attention(3)
    assert (local.num_heads, local.num_kv_heads, local.head_dim, local.biases) == (40, 8, 128, "")
    assert local.rope.layout == "interleaved" and local.rope.theta == 5e5
    assert local.rope.scaling == ta.Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    assert local.qk_norm == ta.QKNormSpec(
        scope="per_head", eps=1e-5, offset=0.0, weight_in_fp32=False, weight=False, after_rope=True
    )
    assert (local.chunk, local.temperature) == (8192, None)
    assert (full.chunk, full.rope, full.qk_norm) == (None, None, None)
    assert full.temperature == ta.TemperatureSpec(beta=0.1, original_max_position=8192, offset=1)
    assert [spec.rope is None for spec in config.attention_specs()] == [False, False, False, True] * 12
    shared = ta.FeedForwardSpec(hidden_dim=8192, activation="silu", gated=True, bias=False)
    expected = mixture(
        num_experts=16, top_k=1, hidden_dim=8192, score="sigmoid", weighs="input",
        shared=ta.SharedExpertsSpec(feed_forward=shared, output_gate=False),
    )  # fmt: skip
    assert config.moe_specs() == dict.fromkeys(range(48), expected)
    defaults = ("attention_chunk_size", "attn_scale", "floor_scale", "attn_temperature_tuning", "use_qk_norm")
    assert read(LLAMA4, *defaults, "no_rope_layers", "moe_layers", "interleave_moe_layer_step") == config
    assert read(LLAMA4, no_rope_layers=[]) == config  # as it was first published
    types = ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"] * 12
    assert read(LLAMA4, "no_rope_layers", layer_types=types, attn_temperature_tuning=True) == config


def test_llama4_instruct_and_maverick():
    instruct = LLAMA4["rope_scaling"] | {"factor": 16.0, "high_freq_factor": 1.0}  # Scout's Instruct blends nothing
    scaling = read(LLAMA4, rope_scaling=instruct).rope.scaling
    assert (scaling.factor, scaling.high_freq_factor, scaling.low_freq_factor) == (16.0, 1.0, 1.0)
    changes = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_scaling": None}
    maverick = read(LLAMA4, "moe_layers", "no_rope_layers", **changes)
    assert list(maverick.moe_specs()) == list(range(1, 48, 2)) and maverick.feed_forward(0).hidden_dim == 16384
    assert (maverick.attention(0).qk_norm, maverick.rope.scaling) == (None, None)
    assert read(LLAMA4, attn_temperature_tuning=False).attention(3).temperature is None


def test_llama4_refuses_what_does_not_fit():
    assert problems(LLAMA4, no_rope_layers=[1, 0]) == ["no_rope_layers must have one value per layer, 48, has 2"]
    assert problems(LLAMA4, moe_layers=[0, 48]) == ["moe_layers names layers [48], there are 48"]
    assert problems(LLAMA4, "moe_layers", interleave_moe_layer_step=0) == [
        "interleave_moe_layer_step must be at least 1, is 0"
    ]
    assert problems(LLAMA4, for_llm_compressor=True) == ["for_llm_compressor is True; llama4_text computes False only"]
    types = ["sliding_attention"] * 48
    assert problems(LLAMA4, layer_types=types)[0].startswith(
        "layer_types must be 48 of full_attention, chunked_attention; got ['sliding_attention', "
    )
    with pytest.raises(ta.TitanError, match="No model is registered under 'llama4'"):
        read(LLAMA4, model_type="llama4")  # with images


def test_llama4_published_names():
    """One dense layer and one mixture, written down in full."""
    cls = ta.get_model("llama4_text")
    config = next(iter(cls.tiny_configs().values())).model_copy(
        update={"num_layers": 2, "rotates": (True, False), "chunks": (32, None), "sparse": (False, True)}
    )
    projections = [f"{p}_proj.weight" for p in ("gate", "up", "down")]
    assert {name for b in cls.state_dict_adapter(config).bindings for name in b.hf} == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        *(f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qkvo"),
        *(f"model.layers.{i}.{n}_layernorm.weight" for i in (0, 1) for n in ("input", "post_attention")),
        *(f"model.layers.0.feed_forward.{p}" for p in projections),
        *(f"model.layers.1.feed_forward.shared_expert.{p}" for p in projections),
        "model.layers.1.feed_forward.router.weight", "model.layers.1.feed_forward.experts.gate_up_proj",
        "model.layers.1.feed_forward.experts.down_proj",
    }  # fmt: skip


def test_llama4_format_holds_one_chunk_and_llama_s_offset():
    cls = ta.get_model("llama4_text")
    config = next(iter(cls.tiny_configs().values()))
    with pytest.raises(
        ta.TitanError, match=r"Layers have different chunks \(\[32, 64\]\); this format holds one\."
    ) as caught:
        cls.to_hf_config(config.model_copy(update={"chunks": (32, None, 64)}))
    titan_error_text(caught)
    without = cls.to_hf_config(config.model_copy(update={"chunks": (None,) * 3}))
    assert (without["attention_chunk_size"], set(without["layer_types"])) == (128, {"full_attention"})
    early = config.temperature.model_copy(update={"offset": 0})
    with pytest.raises(ta.TitanError, match=r"temperature\.offset: 0, published 1") as caught:
        ta.write_hf_config(cls, config.model_copy(update={"temperature": early}))
    titan_error_text(caught)
