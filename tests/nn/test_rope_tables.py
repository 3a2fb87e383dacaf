"""Tables of every kind of rope against transformers' own rotary modules, and multipliers by hand.

Compared at positions 0, original max - 1, original max and max - 1: many faults of a scaled rope are zero at the
first one and grow with the position. Angles reach 4095 radians, where one fp32 rounding is worth 2.4e-4, so a table
may differ by that much only if the frequencies' last bits do; the frequencies themselves are compared to 1e-6.
"""

import math

import pytest
import torch
from pydantic import ValidationError

import titan_adapters as ta
from titan_adapters.hf_rope import fraction, hf_rope
from titan_adapters.nn import Rope
from titan_adapters.nn.rope import swapped_pairs
from titan_adapters.nn.rope_tables import inverse_frequencies, multiplier

HEAD_DIM, ORIGINAL, LONGEST = 32, 512, 4096
YARN = dict(
    factor=8.0, original_max_position=ORIGINAL, beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=None,
    mscale=None, mscale_all_dim=None,
)  # fmt: skip
LONG = dict(
    short_factor=tuple(1 + 0.01 * i for i in range(8)), long_factor=tuple(1 + 1.7 * i for i in range(8)),
    original_max_position=ORIGINAL, attention_factor=1.25,
)  # fmt: skip
KINDS = {
    "default": (None, {}),
    "default, partial": (None, {"rotary_dim": 16}),
    "linear": (ta.LinearScaling(factor=8.0), {}),
    "linear, partial": (ta.LinearScaling(factor=8.0), {"rotary_dim": 16}),
    "llama3": (
        ta.Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=ORIGINAL),
        {},
    ),
    "llama3, nothing blended": (
        ta.Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position=ORIGINAL),
        {},
    ),
    "yarn": (ta.YarnScaling(**YARN), {}),
    "yarn, partial": (ta.YarnScaling(**YARN), {"rotary_dim": 16}),
    "yarn, not truncated": (ta.YarnScaling(**YARN | {"truncate": False}), {}),
    "yarn, attention factor": (ta.YarnScaling(**YARN | {"attention_factor": 1.0}), {}),
    "yarn, mscale": (ta.YarnScaling(**YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}), {}),
    "yarn, ramp of no width": (ta.YarnScaling(**YARN | {"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False}), {}),
    "longrope": (ta.LongRopeScaling(**LONG), {"rotary_dim": 16}),
    "proportional": (ta.ProportionalScaling(factor=2.0, turning_dim=8), {}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def rope_spec(kind: str) -> ta.RopeSpec:
    scaling, changes = KINDS[kind]
    return ta.RopeSpec(**(dict(theta=10000.0, rotary_dim=HEAD_DIM, layout="half", scaling=scaling) | changes))


def transformers_rotary(spec: ta.RopeSpec, max_seq_len: int = LONGEST) -> torch.nn.Module:
    """GLM-4's, which reads a partial factor; every family's is made of the same functions."""
    from transformers.models.glm4.configuration_glm4 import Glm4Config
    from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding

    settings = hf_rope(spec, max_seq_len, HEAD_DIM)["rope_parameters"]
    if isinstance(spec.scaling, ta.ProportionalScaling):  # here the factor means the channels that turn
        settings["partial_rotary_factor"] = spec.scaling.turning_dim / HEAD_DIM
    config = Glm4Config(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, max_position_embeddings=max_seq_len,
        rope_parameters=settings,
    )  # fmt: skip
    return Glm4RotaryEmbedding(config)


def transformers_table(rotary: torch.nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """In our form: cosines of the pairs, then sines."""
    """In half layout, with the sines of the first half negative, as our tables have them."""
    cos, sin = rotary(torch.zeros(1), positions[None])
    pairs = cos.shape[-1] // 2
    return torch.cat([cos[0], -sin[0, :, :pairs], sin[0, :, pairs:]], dim=-1)


@every_kind
def test_table_is_transformers_own(kind):
    spec = rope_spec(kind)
    rotary = transformers_rotary(spec)
    # Ending at the last position makes transformers take the long factors, as a model of this length always does.
    positions = torch.tensor([0, ORIGINAL - 1, ORIGINAL, LONGEST - 1])
    expected = transformers_table(rotary, positions)
    table = Rope(spec, LONGEST).cos_sin
    assert table.dtype == torch.float32 and table.shape == (LONGEST, 2 * spec.rotary_dim)
    torch.testing.assert_close(inverse_frequencies(spec, LONGEST), rotary.inv_freq, rtol=1e-6, atol=0)
    torch.testing.assert_close(table[positions], expected, rtol=0, atol=5e-4 * multiplier(spec))
    assert multiplier(spec) == pytest.approx(rotary.attention_scaling, rel=1e-12)


@every_kind
def test_other_kinds_have_other_tables(kind):
    """The comparison above can fail: no two kinds of the same width agree at the last position."""
    spec = rope_spec(kind)
    for other in KINDS:
        if other != kind and rope_spec(other).rotary_dim == spec.rotary_dim:
            last, others = (Rope(s, LONGEST).cos_sin[-1] for s in (spec, rope_spec(other)))
            assert (last - others).abs().max() > 1e-2, other


def test_longrope_takes_the_short_factors_within_the_original_context():
    spec = rope_spec("longrope")
    table = Rope(spec, ORIGINAL).cos_sin
    positions = torch.tensor([0, 1, ORIGINAL - 1])
    torch.testing.assert_close(
        table[positions], transformers_table(transformers_rotary(spec, ORIGINAL), positions), rtol=0, atol=1e-4
    )
    assert (table[-1] - Rope(spec, LONGEST).cos_sin[ORIGINAL - 1]).abs().max() > 0.1


def test_dynamic_is_transformers_at_the_longest_sequence():
    """Built for the original context and then fed a sequence of LONGEST tokens, transformers grows its base once."""
    spec = ta.RopeSpec(
        theta=10000.0, rotary_dim=HEAD_DIM, layout="half",
        scaling=ta.DynamicScaling(factor=2.0, original_max_position=ORIGINAL),
    )  # fmt: skip
    plain = spec.model_copy(update={"scaling": None})
    assert torch.equal(Rope(spec, ORIGINAL).cos_sin, Rope(plain, ORIGINAL).cos_sin)
    rotary = transformers_rotary(spec, ORIGINAL)
    positions = torch.tensor([0, ORIGINAL - 1, ORIGINAL, LONGEST - 1])
    expected = transformers_table(rotary, positions)
    torch.testing.assert_close(Rope(spec, LONGEST).cos_sin[positions], expected, rtol=0, atol=5e-4)
    with pytest.raises(ta.TitanError, match="Dynamic rope from 512 to 4096 tokens can't be said"):
        hf_rope(spec, LONGEST)


def test_multipliers_by_hand():
    """ln(e) = 1, so a factor of e gives 0.1 * s + 1."""
    yarn = YARN | {"factor": math.e}

    def of(**changes):
        scaling = ta.YarnScaling(**yarn | changes)
        return multiplier(ta.RopeSpec(theta=1e4, rotary_dim=4, layout="half", scaling=scaling))

    assert of() == pytest.approx(1.1)
    assert of(mscale=2.0, mscale_all_dim=5.0) == pytest.approx(1.2 / 1.5)
    assert of(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert of(attention_factor=0.5, mscale=2.0, mscale_all_dim=5.0) == 0.5
    assert of(factor=0.5) == 1.0
    # The multiplier is in the table: at position 0 cosines are 1 and sines 0.
    spec = rope_spec("longrope")
    assert Rope(spec, 4).cos_sin[0].tolist() == [1.25] * 16 + [0.0] * 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ta.YarnScaling(**YARN | {"mscale": 1.0}), "mscale and mscale_all_dim act together"),
        (lambda: ta.YarnScaling(**YARN | {"beta_fast": 0.5}), r"beta_fast \(0.5\) must be at least beta_slow \(1.0\)"),
        (lambda: rope_spec("longrope").model_validate(rope_spec("longrope").model_dump() | {"rotary_dim": 32}),
         "short_factor must have rotary_dim / 2 = 16 numbers, has 8"),
        (lambda: ta.RopeSpec(theta=1e4, rotary_dim=8, layout="half", scaling={"type": "yarnn"}), "does not match any"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


@every_kind
def test_specs_survive_json(kind):
    spec = rope_spec(kind)
    assert ta.RopeSpec.model_validate_json(spec.model_dump_json()) == spec
    hash(spec)


def test_fraction_survives_truncation():
    """transformers computes int(head_dim * factor): every even rotary dim of every head size must come back."""
    for whole in range(2, 260):
        for part in range(2, whole + 1, 2):
            assert int(whole * fraction(part, whole)) == part


@pytest.mark.parametrize("layout, expected", [("half", [3, 4, 5, 0, 1, 2]), ("interleaved", [1, 0, 3, 2, 5, 4])])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "by index"])  # as on CPUs, and as on GPUs
def test_pairs_are_swapped(layout, expected, stacked):
    x = torch.arange(6.0).expand(2, 3, 6).clone().requires_grad_()
    swapped = swapped_pairs(x, layout, stacked=stacked)
    assert swapped[1, 2].tolist() == expected
    (gradient,) = torch.autograd.grad(swapped, x, torch.arange(6.0).expand(2, 3, 6))
    assert gradient[1, 2].tolist() == expected  # a swap is its own inverse
