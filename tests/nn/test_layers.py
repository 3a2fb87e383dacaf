"""Rope, norm and feed-forward against numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

import titan_adapters as ta
from titan_adapters.nn import FeedForward, RMSNorm, Rope
from titan_adapters.nn.rope_tables import inverse_frequencies


def rope_spec(**changes) -> ta.RopeSpec:
    return ta.RopeSpec(**(dict(theta=100.0, rotary_dim=4, layout="half", scaling=None) | changes))


def test_rope_table_by_hand():
    """theta 100 and 4 channels: pairs turn by 1 and by 100^(-1/2) = 0.1 radians per token."""
    cos, sin = ([[f(p), f(p / 10)] for p in range(3)] for f in (math.cos, math.sin))
    for layout, order in (("half", [0, 1, 0, 1]), ("interleaved", [0, 0, 1, 1])):
        signs = [-1, -1, 1, 1] if layout == "half" else [-1, 1, -1, 1]
        expected = [
            [c[i] for i in order] + [sign * s[i] for i, sign in zip(order, signs)]
            for c, s in zip(cos, sin, strict=True)
        ]
        table = Rope(rope_spec(layout=layout), max_seq_len=3).cos_sin
        assert table.dtype == torch.float32
        torch.testing.assert_close(table, torch.tensor(expected), rtol=0, atol=1e-7)  # one fp32 rounding


@pytest.mark.parametrize(
    ("layout", "pairs"), [("half", [(0, 2), (1, 3)]), ("interleaved", [(0, 1), (2, 3)])]
)  # which channels turn together
def test_rotation_by_hand(layout, pairs):
    """Head of 6 channels, 4 of them rotated, at position 2."""
    rope = Rope(rope_spec(layout=layout), max_seq_len=4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    expected = x.tolist()
    for (a, b), angle in zip(pairs, (2.0, 0.2)):
        expected[a] = float(x[a]) * math.cos(angle) - float(x[b]) * math.sin(angle)
        expected[b] = float(x[b]) * math.cos(angle) + float(x[a]) * math.sin(angle)
    q, k = rope(x.expand(1, 3, 6), x.expand(1, 1, 6), torch.tensor([2]))
    assert q.shape == (1, 3, 6) and k.shape == (1, 1, 6)
    torch.testing.assert_close(q, torch.tensor(expected).expand(1, 3, 6), rtol=0, atol=1e-6)
    torch.testing.assert_close(k, torch.tensor(expected).expand(1, 1, 6), rtol=0, atol=1e-6)


def test_llama3_scaling_by_hand():
    """theta 10^4, 8 channels: steps 1, 0.1, 0.01, 0.001, so wavelengths 6.28, 62.8, 628 and 6283 tokens.

    With 200 original tokens and factors 1 and 4, those below 50 stay, those above 200 are divided by 8, and 62.8
    blends: its weight is (200 / 62.83 - 1) / (4 - 1) = 0.7277.
    """
    scaling = ta.Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position=200)
    actual = inverse_frequencies(rope_spec(theta=1e4, rotary_dim=8, scaling=scaling), max_seq_len=1600)
    smooth = (200 / (2 * math.pi / 0.1) - 1) / 3
    assert smooth == pytest.approx(0.7277, abs=1e-4)
    expected = [1.0, (1 - smooth) * 0.1 / 8 + smooth * 0.1, 0.01 / 8, 0.001 / 8]
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=0)


def test_position_beyond_the_table_is_an_error():
    rope = Rope(rope_spec(), max_seq_len=4)
    with pytest.raises(IndexError):
        rope(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.tensor([4]))


def test_rope_table_survives_moves():
    expected = Rope(rope_spec(), max_seq_len=5).cos_sin.clone()
    rope = Rope(rope_spec(), max_seq_len=5).to(torch.bfloat16)
    assert rope.cos_sin.dtype == torch.float32 and torch.equal(rope.cos_sin, expected)
    with torch.device("meta"):
        rope = Rope(rope_spec(), max_seq_len=5)
    assert rope.cos_sin.is_meta
    rope = nn.Sequential(rope).half().to_empty(device="cpu")[0]
    assert torch.equal(rope.cos_sin, expected)
    assert "cos_sin" not in rope.state_dict()


def test_rope_turns_bfloat16_in_fp32():
    """The rotation itself is done in fp32, so the result is the fp32 one, rounded once."""
    rope = Rope(rope_spec(), max_seq_len=64).to(torch.bfloat16)
    x = torch.randn(64, 2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, _ = rope(x, x, torch.arange(64))
    exact, _ = rope(x.float(), x.float(), torch.arange(64))
    assert torch.equal(q, exact.bfloat16())


def test_rms_norm_by_hand():
    """Mean square of (3, 4) is 12.5, plus eps 3.5 is 16: divided by 4, times the weights."""
    norm = RMSNorm(2, eps=3.5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, -1.0]))
        assert norm(torch.tensor([3.0, 4.0])).tolist() == [1.5, -1.0]


def test_rms_norm_squares_in_fp32():
    """Squares of 1000 overflow fp16 (65504 at most)."""
    norm = RMSNorm(4, eps=1e-6).half()
    assert norm(torch.full((4,), 1000.0, dtype=torch.float16)).tolist() == [1.0] * 4


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("activation", "by_hand"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
        ("gelu_tanh", lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
    ],
)
def test_feed_forward_by_hand(activation, by_hand, gated):
    """One channel: w1 = 2, bias 1; w3 = -3, bias 0.5; w2 = 0.25, bias 7."""

    class Config(ta.TransformerConfig):
        def feed_forward(self, layer):
            return ta.FeedForwardSpec(hidden_dim=1, activation=activation, gated=gated, bias=True)

    config = Config(
        dim=1, num_layers=1, vocab_size=1, max_seq_len=1, norm_eps=1e-6, tied_embeddings=False, dtype="float32"
    )
    layer = FeedForward(config.dim, config.feed_forward(0))
    values = {"w1": (2.0, 1.0), "w2": (0.25, 7.0), "w3": (-3.0, 0.5)}
    assert sorted(name for name, _ in layer.named_children()) == (["w1", "w2", "w3"] if gated else ["w1", "w2"])
    with torch.no_grad():
        for name, module in layer.named_children():
            module.weight.fill_(values[name][0])
            module.bias.fill_(values[name][1])
        for x in (-1.5, 0.8):
            hidden = by_hand(2 * x + 1) * ((-3 * x + 0.5) if gated else 1)
            assert float(layer(torch.tensor([x]))) == pytest.approx(0.25 * hidden + 7, rel=1e-6)
