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
CHANGED = {
    ta.AttentionSpec: {
        "num_heads": 2, "num_kv_heads": 4, "head_dim": 32, "v_head_dim": 32, "scale": 0.3, "window": 5, "chunk": 4,
        "sinks": True, "softcap": 1.0, "qk_norm": NORM, "biases": "o", "rope": ROPE, "output_gate": "per_head",
        "temperature": ta.TemperatureSpec(beta=0.5, original_max_position=4),
    },
    ta.FeedForwardSpec: {"hidden_dim": 48, "activation": "gelu", "gated": True, "bias": True},
}  # fmt: skip


class Config(ta.TransformerConfig):
    specs: tuple[ta.AttentionSpec, ta.FeedForwardSpec]

    def attention(self, layer):
        return self.specs[0]

    def feed_forward(self, layer):
        return self.specs[1]

    def norm(self):
        return ta.RMSNormSpec(eps=1e-5, offset=0.0, weight_in_fp32=False)


def block(attention: ta.AttentionSpec, feed_forward: ta.FeedForwardSpec) -> ta.nn.PreNormBlock:
    """A layer whose parameters are a pattern, the same whatever there is besides and how long it is."""
    config = Config(
        dim=32, num_layers=1, vocab_size=7, max_seq_len=16, norm_eps=1e-5, tied_embeddings=False, dtype="float32",
        specs=(attention, feed_forward),
    )  # fmt: skip
    built = ta.nn.PreNormBlock(config, 0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_((torch.arange(parameter.numel()) * 0.7 + 0.3).sin().view_as(parameter) / 3)
    return built


def output(layer: ta.nn.PreNormBlock) -> torch.Tensor:
    x = (torch.arange(12 * 32) * 1.3).cos().view(12, 32)
    with torch.no_grad():
        return layer(x, ta.nn.sequence_info(torch.zeros(12), None, None))


@pytest.mark.parametrize(("spec", "field"), [(spec, field) for spec in CHANGED for field in spec.model_fields])
def test_every_field_counts(spec, field):
    module = HONOURED[spec][field]
    given = (ATTENTION, FEED_FORWARD)
    specs = [s.model_copy(update={field: CHANGED[spec][field]}) if type(s) is spec else s for s in given]
    layer, plain = block(*specs), block(*given)
    assert any(isinstance(part, module) for part in layer.modules())
    assert (output(layer) - output(plain)).abs().max() > 1e-3
    assert torch.equal(output(plain), output(block(*given)))


def test_the_table_names_every_field():
    assert {spec: set(fields) for spec, fields in HONOURED.items()} == {
        spec: set(spec.model_fields) for spec in (ta.AttentionSpec, ta.FeedForwardSpec)
    }
