"""As test_hf_families, for the families with mixtures of experts; and their row lists."""

import re

import pytest
import torch

import titan_adapters as ta
from tests.conftest import titan_error_text
from tests.test_hf_families import BASE, problems, read
from titan_adapters.state_dict import native_tensors

MIXTRAL = BASE | {  # mistralai/Mixtral-8x7B-v0.1
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02, "attention_dropout": 0.0,
}  # fmt: skip
QWEN2_MOE = BASE | {  # Qwen/Qwen1.5-MoE-A2.7B-Chat
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21,
    "vocab_size": 151936, "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "attention_dropout": 0.0,
}  # fmt: skip
QWEN3_MOE = BASE | {  # Qwen/Qwen3-30B-A3B
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
    "max_window_layers": 48, "vocab_size": 151936, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
    "attention_bias": False, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
OLMOE = BASE | {  # allenai/OLMoE-1B-7B-0924
    "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "vocab_size": 50304, "clip_qkv": None, "norm_topk_prob": False,
    "num_experts": 64, "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.01,
    "attention_bias": False,
}  # fmt: skip
GPT_OSS = {  # openai/gpt-oss-20b, with the dtype of its bf16 copies and without quantization_config
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "initial_context_length": 4096, "rope_theta": 150000, "hidden_act": "silu", "swiglu_limit": 7.0,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "attention_bias": True, "output_router_logits": False,
    "router_aux_loss_coef": 0.9, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 201088,
}  # fmt: skip

GLM4_MOE = BASE | {  # zai-org/GLM-4.5-Air
    "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "head_dim": 128,
    "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 1000000, "partial_rotary_factor": 0.5, "attention_bias": True,
    "use_qk_norm": False, "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "attention_dropout": 0.0, "vocab_size": 151552,
}  # fmt: skip


def mixture(**changes) -> ta.MoESpec:
    plain = dict(
        score="softmax", renormalize=False, scaling_factor=1.0, groups=None, correction_bias=False, weighs="output",
        router_dtype="model", router_bias=False, activation="silu", gated=True, bias=False, shared=None,
    )  # fmt: skip
    return ta.MoESpec(**plain | changes)


def test_mixtral():
    config = read(MIXTRAL)
    expected = mixture(num_experts=8, top_k=2, hidden_dim=14336, renormalize=True)
    assert config.moe_specs() == dict.fromkeys(range(32), expected) and not config.dense_specs()
    assert (config.attention(0).head_dim, config.windows) == (128, (None,) * 32)
    assert read(MIXTRAL, router_jitter_noise=0.1, output_router_logits=True) == config  # of training
    assert read(MIXTRAL, "num_local_experts", num_experts=8) == config
    assert read(MIXTRAL, sliding_window=4096).windows == (4096,) * 32
    assert problems(MIXTRAL, num_experts=4) == [
        "num_local_experts is contradictory: num_local_experts = 8, num_experts = 4"
    ]
    assert problems(MIXTRAL, "num_local_experts") == ["num_local_experts / num_experts is missing"]
    assert problems(MIXTRAL, num_experts_per_tok=9) == ["config: Value error, top_k (9) exceeds num_experts (8)"]


def test_qwen2_moe():
    config = read(QWEN2_MOE)
    shared = ta.FeedForwardSpec(hidden_dim=5632, activation="silu", gated=True, bias=False)
    expected = mixture(
        num_experts=60,
        top_k=4,
        hidden_dim=1408,
        shared=ta.SharedExpertsSpec(feed_forward=shared, output_gate=True),
    )
    assert config.moe_specs() == dict.fromkeys(range(24), expected)
    assert config.attention(0).biases == "qkv" and config.windows == (None,) * 24
    assert read(QWEN2_MOE, qkv_bias=False).attention(0).biases == ""
    assert list(read(QWEN2_MOE, decoder_sparse_step=2, mlp_only_layers=[3]).moe_specs())[:3] == [1, 5, 7]
    assert problems(QWEN2_MOE, use_sliding_window=True) == [
        "use_sliding_window is true, but layer_types does not say which layers have it"
    ]
    types = ["full_attention", "sliding_attention"] * 12
    assert read(QWEN2_MOE, use_sliding_window=True, layer_types=types).windows == (None, 32768) * 12


def test_qwen3_moe():
    config = read(QWEN3_MOE)
    expected = mixture(num_experts=128, top_k=8, hidden_dim=768, renormalize=True)
    assert config.moe_specs() == dict.fromkeys(range(48), expected)
    assert config.attention(0).qk_norm == ta.QKNormSpec(
        scope="per_head",
        eps=1e-6,
        offset=0.0,
        weight_in_fp32=False,
        weight=True,
        after_rope=False,
    )
    assert config.windows == (None,) * 48 and config.attention(0).biases == ""
    assert read(QWEN3_MOE, "num_experts", num_local_experts=128) == config  # as transformers 5 writes it
    mixed = read(QWEN3_MOE, mlp_only_layers=[0, 47], decoder_sparse_step=3)
    assert list(mixed.moe_specs()) == list(range(2, 47, 3)) and mixed.feed_forward(0).hidden_dim == 6144
    assert read(QWEN3_MOE, mlp_only_layers=list(range(48))).moe_specs() == {}
    assert not read(QWEN3_MOE, "norm_topk_prob").feed_forward(0).renormalize
    assert problems(QWEN3_MOE, mlp_only_layers=[48]) == ["mlp_only_layers names layers [48], there are 48"]
    assert problems(QWEN3_MOE, decoder_sparse_step=0) == ["decoder_sparse_step must be at least 1, is 0"]


def test_qwen3_moe_window():
    """transformers 4 gave it to the layers from max_window_layers on, 5 gives it to all."""
    assert read(QWEN3_MOE, sliding_window=4096).windows == (None,) * 48
    switched = dict(use_sliding_window=True, sliding_window=4096)
    assert read(QWEN3_MOE, "max_window_layers", **switched).windows == (4096,) * 48
    assert problems(QWEN3_MOE, **switched) == ["use_sliding_window with max_window_layers = 48 has no agreed meaning"]


def test_olmoe():
    config = read(OLMOE)
    expected = mixture(num_experts=64, top_k=8, hidden_dim=1024)
    assert config.moe_specs() == dict.fromkeys(range(16), expected)
    spec = config.attention(0)
    assert (spec.qk_norm.scope, spec.qk_norm.weight_in_fp32, spec.window, spec.biases) == ("full", False, None, "")
    assert read(OLMOE, norm_topk_prob=True).feed_forward(0).renormalize
    assert read(OLMOE, "norm_topk_prob", "clip_qkv", "num_key_value_heads") == config
    assert problems(OLMOE, clip_qkv=8.0) == ["clip_qkv is 8.0; olmoe computes None only"]


def test_published_names():
    """One dense layer and one mixture, written down in full."""
    cls = ta.get_model("qwen2_moe")
    config = next(iter(cls.tiny_configs().values())).model_copy(
        update={"num_experts": 2, "sparse": (False, True), "attention_bias": False}
    )
    published = {name for b in cls.state_dict_adapter(config).bindings for name in b.hf}
    projections = [f"{p}_proj" for p in ("gate", "up", "down")]
    assert {name for name in published if ".mlp." in name} == {
        *(f"model.layers.0.mlp.{p}.weight" for p in projections),
        *(f"model.layers.1.mlp.experts.{e}.{p}.weight" for e in (0, 1) for p in projections),
        *(f"model.layers.1.mlp.shared_expert.{p}.weight" for p in projections),
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_expert_gate.weight",
    }


def test_only_dense_layers():
    cls = ta.get_model("qwen3_moe")
    config = next(iter(cls.tiny_configs().values())).model_copy(update={"sparse": (False, False)})
    assert ta.layer_ranges(config) == {"layer": range(2), "dense": [0, 1], "moe": [], "expert": range(0)}
    assert not [b for b in cls.state_dict_adapter(config).bindings if "expert" in str(b.hf)]


def test_mixtures_of_different_shapes_are_refused():
    cls = ta.get_model("qwen3_moe")

    class Uneven(cls.Config):
        def feed_forward(self, layer):
            return super().feed_forward(layer).model_copy(update={"num_experts": 8 - layer})

    config = Uneven.from_json(next(iter(cls.tiny_configs().values())).to_json())
    with pytest.raises(ta.TitanError, match=r"Layers 0 and 1 differ in num_experts \(8, 7\)") as caught:
        cls.state_dict_adapter(config)
    titan_error_text(caught)


def test_gpt_oss():
    config = read(GPT_OSS)
    spec = config.attention(1)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.biases) == (64, 8, 64, 0.125, "qkvo")
    assert config.windows == (128, None) * 12 and spec.sinks
    assert spec.rope.theta == 150000 and spec.rope.scaling == ta.YarnScaling(
        factor=32.0, original_max_position=4096, beta_fast=32.0, beta_slow=1.0, truncate=False, attention_factor=None,
        mscale=None, mscale_all_dim=None,
    )  # fmt: skip
    assert config.norm() == ta.RMSNormSpec(eps=1e-5, offset=0.0, weight_in_fp32=True)
    expected = mixture(
        num_experts=32, top_k=4, hidden_dim=2880, score="softmax_of_top_k", router_bias=True, bias=True,
        activation=ta.ClampedSwiGLU(alpha=1.702, limit=7.0),
    )  # fmt: skip
    assert config.moe_specs() == dict.fromkeys(range(24), expected)
    assert read(GPT_OSS, "layer_types", "swiglu_limit", "head_dim", "num_key_value_heads", "attention_bias") == config
    assert read(GPT_OSS, swiglu_alpha=1.5).swiglu.alpha == 1.5
    v5 = GPT_OSS["rope_scaling"] | {"rope_theta": 150000}
    assert read(GPT_OSS, "rope_theta", "rope_scaling", "initial_context_length", rope_parameters=v5) == config
    assert problems(GPT_OSS, experts_per_token=2) == [
        "num_experts_per_tok is contradictory: num_experts_per_tok = 4, experts_per_token = 2"
    ]
    assert problems(GPT_OSS, initial_context_length=8192) == [
        "original_max_position_embeddings is contradictory: 8192, in rope_parameters 4096"
    ]


def test_gpt_oss_in_mxfp4_is_refused():
    """As openai/gpt-oss-20b itself is published; it names no dtype either."""
    quantization = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
    assert problems(GPT_OSS, "torch_dtype", quantization_config=quantization) == [
        "dtype / torch_dtype is missing: say what the weights are served in",
        "quantization_config: the weights are quantised (mxfp4), and only plain ones are read: take a checkpoint of "
        "the same model in bf16",
    ]


def test_glm4_moe():
    config = read(GLM4_MOE)
    spec = config.attention(0)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.biases, spec.qk_norm) == (96, 8, 128, "qkv", None)
    assert spec.rope == ta.RopeSpec(theta=1e6, rotary_dim=64, layout="half", scaling=None)
    assert config.norm() == ta.RMSNormSpec(eps=1e-5, offset=0.0, weight_in_fp32=False)
    assert list(config.dense_specs()) == [0] and list(config.moe_specs()) == list(range(1, 46))
    dense = ta.FeedForwardSpec(hidden_dim=10944, activation="silu", gated=True, bias=False)
    assert config.feed_forward(0) == dense
    shared = ta.SharedExpertsSpec(feed_forward=dense.model_copy(update={"hidden_dim": 1408}), output_gate=False)
    assert config.feed_forward(45) == mixture(
        num_experts=128, top_k=8, hidden_dim=1408, score="sigmoid", renormalize=True, correction_bias=True,
        router_dtype="float32", shared=shared,
    )  # fmt: skip
    assert read(GLM4_MOE, "partial_rotary_factor", "use_qk_norm", "n_group", "topk_group", "norm_topk_prob") == config
    larger = read(GLM4_MOE, use_qk_norm=True, first_k_dense_replace=3, routed_scaling_factor=2.5)  # GLM-4.5
    assert list(larger.dense_specs()) == [0, 1, 2] and larger.feed_forward(3).scaling_factor == 2.5
    assert larger.attention(0).qk_norm == ta.QKNormSpec(
        scope="per_head", eps=1e-5, offset=0.0, weight_in_fp32=False, weight=True, after_rope=False
    )
    groups = ta.ExpertGroupsSpec(num_groups=8, top_groups=4, score="top2_sum")
    assert read(GLM4_MOE, n_group=8, topk_group=4).feed_forward(1).groups == groups
    assert problems(GLM4_MOE, num_nextn_predict_layers=2) == [
        "num_nextn_predict_layers is 2; glm4_moe computes 0 or 1 only"
    ]


def test_glm4_moe_drops_its_prediction_layer_by_name():
    """The names are those of GLM-4.5-Air's layer 46; of its experts, the first stands for all."""
    cls = ta.get_model("glm4_moe")
    config = next(iter(cls.tiny_configs().values()))
    native = native_tensors(cls(config))
    adapter = cls.state_dict_adapter(config)
    published = adapter.to_hf(native)
    attention = [f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")]
    mlp = [f"mlp.{part}.{p}_proj.weight" for part in ("experts.0", "shared_experts") for p in ("gate", "up", "down")]
    names = [
        "embed_tokens.weight", "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.head.weight",
        "shared_head.norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight", *attention,
        "self_attn.o_proj.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias", *mlp,
    ]  # fmt: skip
    further = {f"model.layers.{config.num_layers}.{name}": torch.zeros(1) for name in names}
    adapter.check(published | further, native)
    assert set(adapter.to_native(published | further)) == set(native)
    assert not set(further) & set(published) and cls.to_hf_config(config)["num_nextn_predict_layers"] == 0
    past = config.num_layers
    for stray in (f"model.layers.{past}.mlp.w.weight", f"model.layers.{past + 1}.enorm.weight"):
        with pytest.raises(ta.TitanError, match=re.escape(stray)):
            adapter.check(published | {stray: torch.zeros(1)}, native)
