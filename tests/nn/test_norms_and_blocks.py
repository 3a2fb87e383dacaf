"""Norms, QK norms and attention temperature by hand; where each kind of block puts its norms."""

import pytest
import torch

import titan_adapters as ta
from tests.conftest import relative_error
from tests.nn.test_attention import attention_spec
from titan_adapters.nn import Attention, LayerNorm, PostNormBlock, RMSNorm, SandwichNormBlock, make_norm, sequence_info

RMS = dict(eps=3.5, offset=0.0, weight_in_fp32=False)


class Config(ta.TransformerConfig):
    spec: ta.AttentionSpec

    def attention(self, layer):
        return self.spec

    def feed_forward(self, layer):
        return ta.FeedForwardSpec(hidden_dim=5, activation="silu", gated=True, bias=False)

    def norm(self):
        return ta.RMSNormSpec(eps=self.norm_eps, offset=0.0, weight_in_fp32=False)


def tiny_config(**changes) -> Config:
    return Config(
        dim=6, num_layers=1, vocab_size=3, max_seq_len=64, norm_eps=1e-6, tied_embeddings=False, dtype="float32",
        spec=attention_spec(**changes),
    )  # fmt: skip


def test_rms_norm_offset_by_hand():
    """(3, 4) becomes (0.75, 1), as without an offset; stored weights (1, -2) mean (2, -1), stored zeros no change."""
    norm = make_norm(2, ta.RMSNormSpec(**RMS | {"offset": 1.0}))
    with torch.no_grad():
        assert norm(torch.tensor([3.0, 4.0])).tolist() == [0.75, 1.0]
        norm.weight.copy_(torch.tensor([1.0, -2.0]))
        assert norm(torch.tensor([3.0, 4.0])).tolist() == [1.5, -1.0]


def test_rms_norm_rounds_before_or_after_the_weight():
    """In bf16 the two orders part somewhere among 512 values, and each is its own formula exactly."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.linspace(0.5, 1.7, 8).bfloat16()
    exact = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    outs = []
    for in_fp32, expected in ((True, (exact * weight.float()).bfloat16()), (False, exact.bfloat16() * weight)):
        norm = RMSNorm(8, 1e-6, weight_in_fp32=in_fp32)
        norm.weight = torch.nn.Parameter(weight)
        outs.append(norm(x))
        assert torch.equal(outs[-1], expected)
    assert not torch.equal(*outs)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_by_hand(bias):
    """(1, 5): mean 3, variance 4, plus eps 5 is 9; so (-2, 2) / 3, times (3, 6), plus (10, 20)."""
    norm = make_norm(2, ta.LayerNormSpec(eps=5.0, bias=bias))
    assert type(norm) is LayerNorm and (norm.bias is not None) == bias
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([3.0, 6.0]))
        if bias:
            norm.bias.copy_(torch.tensor([10.0, 20.0]))
        expected = torch.tensor([-2.0, 4.0]) + (torch.tensor([10.0, 20.0]) if bias else 0)
        torch.testing.assert_close(norm(torch.tensor([1.0, 5.0])), expected)


@pytest.mark.parametrize("scope", ["per_head", "full"])
def test_qk_norm_scopes(scope):
    """Statistics over 8 channels of one head, or over all 48 of q and 16 of k, written out with other calls."""
    attention = Attention(
        tiny_config(qk_norm=ta.QKNormSpec(**RMS | {"eps": 1e-6}, scope=scope, weight=True, after_rope=False)), 0
    )
    assert attention.q_norm.weight.numel() == (8 if scope == "per_head" else 48)
    assert attention.k_norm.weight.numel() == (8 if scope == "per_head" else 16)
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
        q, k, v = attention.qkv_linear(x)
        shape = (-1, 8) if scope == "per_head" else (-1,)

        def normed(t, norm):
            wide = t.reshape(9, *shape).double()
            weights = norm.weight.double()
            return (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights).reshape(t.shape).float()

        seq = sequence_info(torch.zeros(9), None, None)
        inner = attention.inner_attention(normed(q, attention.q_norm), normed(k, attention.k_norm), v, seq)
        assert relative_error(attention(x, seq), attention.wo(inner.flatten(-2))) < 1e-6


@pytest.mark.parametrize("offset", [0, 1])
def test_temperature_by_hand(offset):
    """beta 0.5, 4 original tokens: queries 0 to 3 stay, 4 to 7 grow by 1 + ln(2) / 2, 8 to 11 by 1 + ln(3) / 2.

    With an offset of 1, each step comes one query earlier, and query 11 grows by 1 + ln(4) / 2.
    """
    spec = ta.TemperatureSpec(beta=0.5, original_max_position=4, offset=offset)
    plain, warm = Attention(tiny_config(), 0), Attention(tiny_config(temperature=spec), 0)
    warm.load_state_dict(plain.state_dict())
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    seq = sequence_info(torch.zeros(12), None, None)
    with torch.no_grad():
        factors = torch.tensor([1.0] * 4 + [1.34657359] * 4 + [1.54930614] * 4 + [1.69314718])[offset:][:12]
        q, k, v = plain.qkv_linear(x)
        expected = plain.wo(plain.inner_attention(q * factors[:, None, None], k, v, seq).flatten(-2))
        actual = warm(x, seq)
        assert relative_error(actual, expected) < 1e-6
        unchanged, same = 4 - offset, plain(x, seq)
        assert torch.equal(actual[:unchanged], same[:unchanged])
        assert relative_error(actual[unchanged:], same[unchanged:]) > 1e-4


@pytest.mark.parametrize(("block", "norms"), [
    (SandwichNormBlock, ("attention_norm", "ffn_norm", "post_attention_norm", "post_ffn_norm")),
    (PostNormBlock, ("attention_norm", "ffn_norm")),
])  # fmt: skip
def test_where_blocks_put_their_norms(block, norms):
    built = block(tiny_config(), 0)
    assert [name for name, module in built.named_children() if isinstance(module, RMSNorm)] == list(norms)
    x, seq = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), sequence_info(torch.zeros(5), None, None)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
        if block is PostNormBlock:
            middle = x + built.attention_norm(built.attention(x, seq))
            expected = middle + built.ffn_norm(built.feed_forward(middle))
        else:
            middle = x + built.post_attention_norm(built.attention(built.attention_norm(x), seq))
            expected = middle + built.post_ffn_norm(built.feed_forward(built.ffn_norm(middle)))
        assert torch.equal(built(x, seq), expected)
