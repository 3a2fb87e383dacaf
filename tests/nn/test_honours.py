"""Every spec field changes what the torch modules compute, in the module that the table names."""

import pytest
import torch

import titan_adapters as ta
from titan_adapters.nn.honours import HONOURED

ROPE = ta.RopeSpec(theta=1e4, rotary_dim=16, layout="half", scaling=None)
NORM = ta.QKNormSpec(scope="per_head", eps=1e-5, offset=0.0, weight_in_fp32=False, weight=True, after_rope=False)
ATTENTION = ta.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, scale=0.25, window=None, chunk=None, sinks=False,
    softcap=None, qk_norm=None, biases="", rope=None, temperature=None, output_gate=None,
)  # fmt: skip
FEED_FORWARD = ta.FeedForwardSpec(hidden_dim=24, activation="silu", gated=False, bias=False)
MOE = ta.MoESpec(
    num_experts=8, top_k=2, hidden_dim=24, score="softmax", renormalize=True, scaling_factor=1.0, groups=None,
    correction_bias=False, weighs="output", router_dtype="float32", router_bias=False, activation="silu", gated=False,
    bias=False, shared=None,
)  # fmt: skip
CHANGED = {
    ta.MoESpec: {
        "num_experts": 16, "top_k": 3, "hidden_dim": 48, "score": "sigmoid", "renormalize": False,
        "scaling_factor": 2.0, "groups": ta.ExpertGroupsSpec(num_groups=4, top_groups=1, score="max"),
        "correction_bias": True, "weighs": "input", "router_dtype": "model", "router_bias": True, "activation": "gelu",
        "gated": True, "bias": True, "shared": ta.SharedExpertsSpec(feed_forward=FEED_FORWARD, output_gate=False),
    },
    ta.AttentionSpec: {
        "num_heads": 2, "num_kv_heads": 4, "head_dim": 32, "v_head_dim": 32, "scale": 0.3, "window": 5, "chunk": 4,
        "sinks": True, "softcap": 1.0, "qk_norm": NORM, "biases": "o", "rope": ROPE, "output_gate": "per_head",
        "temperature": ta.TemperatureSpec(beta=0.5, original_max_position=4, offset=0),
    },
    ta.FeedForwardSpec: {"hidden_dim": 48, "activation": "gelu", "gated": True, "bias": True},
}  # fmt: skip


class Config(ta.TransformerConfig):
    specs: tuple[ta.AttentionSpec, ta.FeedForwardSpec | ta.MoESpec]

    def attention(self, layer):
        return self.specs[0]

    def feed_forward(self, layer):
        return self.specs[1]

    def norm(self):
        return ta.RMSNormSpec(eps=1e-5, offset=0.0, weight_in_fp32=False)


def block(attention: ta.AttentionSpec, feed_forward: ta.FeedForwardSpec | ta.MoESpec) -> ta.nn.PreNormBlock:
    """A layer whose parameters are a pattern, the same whatever there is besides and how long it is."""
    config = Config(
        dim=32, num_layers=1, vocab_size=7, max_seq_len=16, norm_eps=1e-5, tied_embeddings=False, dtype="float32",
        specs=(attention, feed_forward),
    )  # fmt: skip
    built = ta.nn.PreNormBlock(config, 0)
    with torch.no_grad():
        for parameter in (*built.parameters(), *(b for n, b in built.named_buffers() if n.endswith("correction_bias"))):
            parameter.copy_((torch.arange(parameter.numel()) * 0.7 + 0.3).sin().view_as(parameter) / 3)
    return built


def output(layer: ta.nn.PreNormBlock) -> torch.Tensor:
    x = (torch.arange(12 * 32) * 1.3).cos().view(12, 32).to(layer.attention.wo.weight.dtype)
    with torch.no_grad():
        return layer(x, ta.nn.sequence_info(torch.zeros(12), None, None))


@pytest.mark.parametrize(("spec", "field"), [(spec, field) for spec in CHANGED for field in spec.model_fields])
def test_every_field_counts(spec, field):
    module = HONOURED[spec][field]
    given = (ATTENTION, MOE if spec is ta.MoESpec else FEED_FORWARD)
    specs = [s.model_copy(update={field: CHANGED[spec][field]}) if type(s) is spec else s for s in given]
    dtype = torch.bfloat16 if field == "router_dtype" else torch.float32  # it says what is computed in fp32 even so
    layer, plain = block(*specs).to(dtype), block(*given).to(dtype)
    assert any(isinstance(part, module) for part in layer.modules())
    assert (output(layer) - output(plain)).abs().max() > 1e-3
    assert torch.equal(output(plain), output(block(*given).to(dtype)))


def test_the_table_names_every_field():
    assert {spec: set(fields) for spec, fields in HONOURED.items()} == {
        spec: set(spec.model_fields) for spec in CHANGED
    }
