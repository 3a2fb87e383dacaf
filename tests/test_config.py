"""Configs and specs: nothing unknown, nothing missing, nothing mutable; and what is emitted from them."""

import json

import pytest
import titan_models.llama
import titan_models.qwen3
from pydantic import ValidationError

import titan_adapters as ta
from tests.conftest import EVERY_MODEL, titan_error_text

every_model = pytest.mark.parametrize(("cls", "config"), EVERY_MODEL)

ROPE = dict(theta=10000.0, rotary_dim=8, layout="half", scaling=None)
ATTENTION = dict(
    num_heads=4, num_kv_heads=2, head_dim=8, scale=0.35, window=None, softcap=None, qk_norm=None, biases="",
    rope=ta.RopeSpec(**ROPE), temperature=None, output_gate=None, v_head_dim=8, chunk=None,
    sinks=False,
)  # fmt: skip
SCALING = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
QK_NORM = dict(scope="per_head", eps=1e-6, offset=0.0, weight_in_fp32=False, weight=True, after_rope=False)
FEED_FORWARD = dict(hidden_dim=16, activation="silu", gated=True, bias=False)
GROUPS = dict(num_groups=4, top_groups=2, score="top2_sum")
SHARED = dict(feed_forward=ta.FeedForwardSpec(**FEED_FORWARD), output_gate=True)
SWIGLU = dict(alpha=1.702, limit=7.0)
MOE = dict(
    num_experts=8, top_k=2, hidden_dim=16, score="softmax", renormalize=True, scaling_factor=1.0, groups=None,
    correction_bias=False, weighs="output", router_dtype="model", router_bias=False, activation="silu", gated=True,
    bias=False, shared=None,
)  # fmt: skip
SPECS = [
    pytest.param(ta.RopeSpec, ROPE, id="rope"),
    pytest.param(ta.AttentionSpec, ATTENTION, id="attention"),
    pytest.param(ta.Llama3Scaling, SCALING, id="llama3"),
    pytest.param(ta.FeedForwardSpec, FEED_FORWARD, id="feed forward"),
    pytest.param(ta.QKNormSpec, QK_NORM, id="qk norm"),
    pytest.param(ta.MoESpec, MOE, id="moe"),
    pytest.param(ta.SharedExpertsSpec, SHARED, id="shared experts"),
    pytest.param(ta.ExpertGroupsSpec, GROUPS, id="expert groups"),
    pytest.param(ta.ClampedSwiGLU, SWIGLU, id="clamped swiglu"),
]


@pytest.mark.parametrize(("spec", "fields"), SPECS)
def test_specs_have_no_defaults_no_extras_and_do_not_change(spec, fields):
    made = spec(**fields)
    assert made == spec(**fields) and hash(made) == hash(spec(**fields))
    for name in fields:
        with pytest.raises(ValidationError, match="Field required"):
            spec(**{key: value for key, value in fields.items() if key != name})
        with pytest.raises(ValidationError, match="frozen"):
            setattr(made, name, fields[name])
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        spec(**fields, sliding_windw=4)


@pytest.mark.parametrize(
    ("spec", "fields", "message"),
    [
        (ta.RopeSpec, ROPE | {"rotary_dim": 7}, "rotary_dim must be even, is 7"),
        (ta.RopeSpec, ROPE | {"theta": 0}, "greater than 0"),
        (ta.RopeSpec, ROPE | {"layout": "neox"}, "'interleaved' or 'half'"),
        (
            ta.AttentionSpec,
            ATTENTION | {"num_kv_heads": 3},
            r"num_heads \(4\) must be a multiple of .* \(3\)",
        ),
        (ta.AttentionSpec, ATTENTION | {"head_dim": 6}, r"rotary_dim \(8\) exceeds head_dim \(6\)"),
        (ta.AttentionSpec, ATTENTION | {"window": 0}, "greater than 0"),
        (ta.Llama3Scaling, SCALING | {"high_freq_factor": 0.5}, r"high_freq_factor \(0.5\) must be at least"),
        (ta.FeedForwardSpec, FEED_FORWARD | {"activation": "relu"}, "'silu', 'gelu' or 'gelu_tanh'"),
        (ta.MoESpec, MOE | {"top_k": 9}, r"top_k \(9\) exceeds num_experts \(8\)"),
        (ta.MoESpec, MOE | {"top_k": 0}, "greater than 0"),
        (ta.MoESpec, MOE | {"scaling_factor": 0.0}, "greater than 0"),
        (ta.MoESpec, MOE | {"score": "softmax_of_top_k"}, "renormalize has no effect with softmax_of_top_k"),
        (
            ta.MoESpec,
            MOE | {"activation": ta.ClampedSwiGLU(**SWIGLU), "gated": False},
            "ClampedSwiGLU needs gated experts",
        ),
        (ta.MoESpec, MOE | {"activation": "relu"}, "'silu', 'gelu' or 'gelu_tanh'"),
        (
            ta.MoESpec,
            MOE | {"groups": ta.ExpertGroupsSpec(**GROUPS | {"num_groups": 3})},
            r"num_groups \(3\) must divide num_experts \(8\)",
        ),
        (
            ta.MoESpec,
            MOE | {"groups": ta.ExpertGroupsSpec(**GROUPS | {"top_groups": 5})},
            r"top_groups \(5\) exceeds num_groups \(4\)",
        ),
        (
            ta.MoESpec,
            MOE | {"top_k": 5, "groups": ta.ExpertGroupsSpec(**GROUPS)},
            r"2 groups of 2 experts can't give top_k = 5",
        ),
        (
            ta.MoESpec,
            MOE | {"groups": ta.ExpertGroupsSpec(**GROUPS | {"num_groups": 8})},
            "top2_sum needs at least two experts per group",
        ),
        (ta.ClampedSwiGLU, SWIGLU | {"limit": 0.0}, "greater than 0"),
        (ta.ExpertGroupsSpec, GROUPS | {"score": "sum"}, "'max' or 'top2_sum'"),
    ],
)
def test_contradictions_are_refused(spec, fields, message):
    with pytest.raises(ValidationError, match=message):
        spec(**fields)


def test_every_contradiction_of_a_mixture_is_listed():
    groups = ta.ExpertGroupsSpec(**GROUPS | {"num_groups": 3, "top_groups": 4})
    with pytest.raises(ValidationError, match=r"top_k .* exceeds .*; renormalize has no effect.*; .* must divide .*; "):
        ta.MoESpec(**MOE | {"top_k": 9, "score": "softmax_of_top_k", "groups": groups})


@every_model
def test_json_round_trip(cls, config):
    data = json.loads(json.dumps(config.to_json()))
    assert cls.Config.from_json(data) == config
    assert cls.Config.from_json(data).fingerprint() == config.fingerprint()
    with pytest.raises(ValidationError, match="frozen"):
        config.dim = 1


@every_model
def test_from_json_lists_every_bad_field_at_once(cls, config):
    data = config.to_json() | {"dim": -1, "sliding_windw": 4, "dtype": "float8"}
    del data["norm_eps"]
    data["rope"] = data["rope"] | {"theta": "x"}
    with pytest.raises(ta.TitanError) as caught:
        cls.Config.from_json(data)
    text = titan_error_text(caught)
    fields = sorted(problem.split(":")[0] for problem in caught.value.problems)
    assert fields == ["dim", "dtype", "norm_eps", "rope.theta", "sliding_windw"]
    assert text.splitlines()[-1].startswith("Fix: give every field, and no other: dim, num_layers, ")


@every_model
def test_fingerprint_changes_with_every_field(cls, config):
    """Each field gets another legal value; the specs are part of it, so a changed method changes it too."""
    changes = {
        "tied_embeddings": not config.tied_embeddings,
        "dtype": "bfloat16",
        "norm_eps": 1e-4,
        "num_kv_heads": 1 if config.attention(0).num_kv_heads > 1 else config.attention(0).num_heads,
        "activation": "gelu_tanh" if getattr(config, "activation", "") == "gelu" else "gelu",
        "temperature": ta.TemperatureSpec(beta=0.3, original_max_position=7, offset=0),
        "swiglu": ta.ClampedSwiGLU(alpha=2.0, limit=3.0),
        "groups": ta.ExpertGroupsSpec(num_groups=1, top_groups=1, score="max"),
        "top_k": 2 if getattr(config, "top_k", None) == 1 else 1,
        "num_dense_layers": getattr(config, "num_dense_layers", 0) + 1,
    }
    # Fields that hold one value per layer.
    per_layer = {name: v for name in cls.Config.model_fields if isinstance(v := getattr(config, name), tuple)}
    seen = {config.fingerprint()}
    for name in cls.Config.model_fields:
        old = getattr(config, name)
        if name in changes:
            new = changes[name]
        elif isinstance(old, ta.RopeSpec):
            new = old.model_copy(update={"theta": old.theta + 1})
        elif name in per_layer:
            new = (*old[:-1], not old[-1] if isinstance(old[-1], bool) else 9)
        else:
            new = not old if isinstance(old, bool) else (old or 1.5) * 2
        more = {name: v * 2 for name, v in per_layer.items()} if name == "num_layers" else {}
        changed = config.model_copy(update={name: new, **more})
        assert changed.fingerprint() not in seen, name
        seen.add(changed.fingerprint())


@every_model
def test_fields_per_layer_must_have_one_value_per_layer(cls, config):
    data = config.to_json() | {"num_layers": config.num_layers + 1}
    per_layer = [name for name in cls.Config.model_fields if isinstance(data[name], list)]
    if per_layer:
        with pytest.raises(ta.TitanError, match=f"{per_layer[0]} must have one value per layer, {data['num_layers']}"):
            cls.Config.from_json(data)


def test_fingerprint_changes_with_what_the_specs_say():
    config = next(iter(ta.get_model("llama").tiny_configs().values()))

    class Scaled(titan_models.llama.LlamaConfig):
        def attention(self, layer):
            return super().attention(layer).model_copy(update={"scale": 1.0})

    assert Scaled.from_json(config.to_json()).fingerprint() != config.fingerprint()


def test_base_config_answers_nothing():
    config = ta.TransformerConfig(
        dim=8, num_layers=1, vocab_size=8, max_seq_len=8, norm_eps=1e-6, tied_embeddings=False, dtype="float32"
    )
    for method in (lambda: config.attention(0), lambda: config.feed_forward(0), config.norm):
        with pytest.raises(NotImplementedError):
            method()


def test_emitted_config_by_hand():
    """For an engine. Nothing more than this is emitted: a field that is not true must be absent."""
    config = next(iter(titan_models.qwen3.Qwen3.tiny_configs().values()))
    emitted = ta.emit_hf_config("qwen3", config)
    titan = emitted.pop("titan")
    assert emitted == {
        "architectures": ["TitanForCausalLM"],
        "model_type": "titan",
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 131,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    assert titan == {
        "model": "qwen3",
        "class": "titan_models.qwen3:Qwen3",
        "config": config.to_json(),
        "names": "native",
        "fingerprint": config.fingerprint(),
    }
    assert json.loads(json.dumps(titan)) == titan
    assert ta.emit_hf_config("qwen3", config, names="hf")["titan"]["names"] == "hf"


def test_emitted_window_comes_with_the_layers_that_have_it():
    """A window without layer_types would be applied to every layer."""
    config = ta.get_model("qwen3").tiny_configs()["second layer windowed, square mlp, yarn"]
    emitted = ta.emit_hf_config("qwen3", config)
    assert emitted["sliding_window"] == 5
    assert emitted["layer_types"] == ["full_attention", "sliding_attention"]
    every = ta.emit_hf_config("qwen3", config.model_copy(update={"windows": (5, 5)}))
    assert every["sliding_window"] == 5 and every["layer_types"] == ["sliding_attention"] * 2


class Uneven(titan_models.llama.LlamaConfig):
    """Layer 1 differs from layer 0 in everything an engine knows one number of."""

    def attention(self, layer):
        changes = {} if layer == 0 else {"num_kv_heads": 3, "window": None, "softcap": 30.0}
        return super().attention(layer).model_copy(update=changes)


def test_emitted_numbers_of_layers_that_differ():
    """One number for all layers, true for what an engine reads it for: heads can be split by what divides every count,
    and scratch space must fit the widest head, of values too."""

    class Config(titan_models.llama.LlamaConfig):
        def attention(self, layer):
            differing = [
                {"num_heads": 8, "num_kv_heads": 2, "window": 9},
                {"num_heads": 12, "num_kv_heads": 3, "head_dim": 64, "window": 5},
                {"num_heads": 20, "num_kv_heads": 1, "v_head_dim": 96, "chunk": 8},
            ]
            return super().attention(layer).model_copy(update=differing[layer])

    config = Config.from_json(next(iter(ta.get_model("llama").tiny_configs().values())).to_json())
    emitted = ta.emit_hf_config("llama", config)
    assert [emitted[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [4, 3, 96]
    assert emitted["sliding_window"] == 5
    assert emitted["layer_types"] == ["sliding_attention", "sliding_attention", "chunked_attention"]
    assert "attention_chunk_size" not in emitted


def test_emitted_softcap_only_if_a_layer_has_one():
    class Capped(titan_models.llama.LlamaConfig):
        def attention(self, layer):
            return super().attention(layer).model_copy(update={"softcap": 30.0})

    config = Capped.from_json(next(iter(ta.get_model("llama").tiny_configs().values())).to_json())
    assert ta.emit_hf_config("llama", config)["attn_logit_softcapping"] == 30.0


def test_digest_is_of_the_fields_alone():
    """So that a library that describes the same model by more spec fields still reads what was saved before."""
    config = next(iter(ta.get_model("llama").tiny_configs().values()))

    class Richer(type(config)):
        def norm(self):
            return super().norm().model_copy(update={"offset": 1.0})

    same_fields = Richer.from_json(config.to_json())
    assert same_fields.digest() == config.digest() and same_fields.fingerprint() != config.fingerprint()
    assert config.model_copy(update={"norm_eps": 0.1}).digest() != config.digest()
