"""As test_hf_families, for the families with mixtures of experts; and their row lists."""

import pytest

import titan_adapters as ta
from tests.conftest import titan_error_text
from tests.test_hf_families import BASE, problems, read

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
