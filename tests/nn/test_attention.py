"""Attention against a formula written out here with einsum, and the exact edge of a window.

Shapes: S queries  T keys  D model dim  N query heads  K kv heads  G queries per kv head  H head_dim.
"""

import pytest
import torch

import titan_adapters as ta
from tests.conftest import WINDOWED, one_windowed_layer, random_model, random_tokens, relative_error
from titan_adapters.nn import InnerAttention, SequenceInfo, sequence_info


def attention_spec(**changes) -> ta.AttentionSpec:
    fields = dict(
        num_heads=6, num_kv_heads=2, head_dim=8, scale=0.37, window=None, softcap=None, qk_norm=None, biases="",
        rope=None, temperature=None, output_gate=None, v_head_dim=8, chunk=None,
        sinks=False,
    )  # fmt: skip
    return ta.AttentionSpec(**(fields | changes))


def qkv(length: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(length, heads, 8, generator=generator) for heads in (6, 2, 2))


def formula(q_SNH, k_TKH, v_TKH, *, scale, window=None, softcap=None):
    """One token and head at a time, in fp64: head n reads kv head n // 3."""
    out = torch.zeros_like(q_SNH, dtype=torch.float64)
    for s in range(q_SNH.shape[0]):
        first = 0 if window is None else max(0, s - window + 1)
        for n in range(6):
            keys, values = (t[first : s + 1, n // 3].double() for t in (k_TKH, v_TKH))
            scores = torch.einsum("h,th->t", q_SNH[s, n].double(), keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp() / scores.exp().sum()
            out[s, n] = torch.einsum("t,th->h", weights, values)
    return out


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 4, 11, 50])
def test_inner_attention_is_the_formula(window, softcap):
    """fp32 against fp64: 1e-6 is ten roundings. The scale, 0.37, is nobody's default."""
    q, k, v = qkv()
    inner = InnerAttention(attention_spec(window=window, softcap=softcap), layer=0)
    expected = formula(q, k, v, scale=0.37, window=window, softcap=softcap)
    packed = inner(q, k, v, sequence_info(torch.zeros(11), None, None))
    batched = inner(q[None], k[None], v[None], sequence_info(torch.zeros(1, 11), None, None))
    assert relative_error(packed, expected) < 1e-6
    assert relative_error(batched[0], expected) < 1e-6


def test_softcap_in_bfloat16_keeps_scores_in_fp32():
    q, k, v = (t.bfloat16() for t in qkv())
    out = InnerAttention(attention_spec(softcap=1.5), layer=0)(q, k, v, sequence_info(torch.zeros(11), None, None))
    assert out.dtype == torch.bfloat16
    # One rounding of the result, at most 2^-9 relative to each value.
    assert relative_error(out, formula(q, k, v, scale=0.37, softcap=1.5)) < 2**-8


def test_gqa_is_mha_with_repeated_kv_weights():
    """A whole layer's attention, with weights repeated by hand, complex rope and an explicit mask."""
    cls = ta.get_model("llama")
    config = cls.tiny_configs()["gqa, head_dim != dim / heads"]
    attention = random_model(cls, config).layers[0].attention
    S, D, N, K, H = 20, 48, 6, 2, 32
    wq, wk, wv, wo = (
        w.weight.detach().double()
        for w in (attention.qkv_linear.wq, attention.qkv_linear.wk, attention.qkv_linear.wv, attention.wo)
    )
    wq_NHD = wq.view(N, H, D)
    wk_NHD, wv_NHD = (w.view(K, 1, H, D).expand(K, N // K, H, D).reshape(N, H, D) for w in (wk, wv))
    x = torch.randn(S, D, generator=torch.Generator().manual_seed(3))
    q, k, v = (torch.einsum("sd,nhd->nsh", x.double(), w) for w in (wq_NHD, wk_NHD, wv_NHD))
    # Channels 2j and 2j + 1 are the real and imaginary part of a number that turns by s * 500000^(-2j / H).
    steps = torch.tensor([500000.0 ** (-2 * j / H) for j in range(H // 2)], dtype=torch.float64)
    turns = torch.exp(1j * torch.arange(S)[:, None] * steps)

    def turned(t):
        return torch.view_as_real(torch.complex(t[..., 0::2], t[..., 1::2]) * turns).flatten(-2)

    scores = torch.einsum("nsh,nth->nst", turned(q), turned(k)) / 32**0.5
    scores = scores + torch.full((S, S), float("-inf"), dtype=torch.float64).triu(1)
    expected = torch.einsum("nst,nth,dnh->sd", scores.softmax(-1), v, wo.view(D, N, H))
    with torch.no_grad():
        actual = attention(x, sequence_info(torch.zeros(S), None, None))
        # fp32 projections, table and softmax against fp64.
        assert relative_error(actual, expected) < 1e-5
        attention.qkv_linear.wk.weight.copy_(attention.qkv_linear.wk.weight.roll(H, 0))  # swap the two kv heads
        assert relative_error(attention(x, sequence_info(torch.zeros(S), None, None)), expected) > 1e-2


@pytest.mark.parametrize("name", WINDOWED)
def test_window_edge(name):
    """With one layer and a window of 5, token 12 sees tokens 8 to 12: 8 is the edge, 7 is outside."""
    cls = ta.get_model(name)
    config = one_windowed_layer(cls, 5)
    model = random_model(cls, config)
    tokens = random_tokens(config, 16)

    def logits_of_12(changed: int) -> torch.Tensor:
        other = tokens.clone()
        other[changed] = (other[changed] + 1) % config.vocab_size
        with torch.no_grad():
            return model(other)[12]

    with torch.no_grad():
        original = model(tokens)[12]
    assert torch.equal(logits_of_12(7), original)
    assert torch.equal(logits_of_12(13), original)
    for visible in (8, 9, 12):
        assert not torch.allclose(logits_of_12(visible), original, rtol=1e-3, atol=1e-3), visible


def test_window_does_not_reach_into_the_previous_document():
    inner = InnerAttention(attention_spec(window=4), layer=0)
    q, k, v = qkv()
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4])
    out = inner(q, k, v, sequence_info(torch.zeros(11), positions, None))
    expected = [formula(q[part], k[part], v[part], scale=0.37, window=4) for part in (slice(0, 6), slice(6, 11))]
    assert relative_error(out, torch.cat(expected)) < 1e-6


def test_sequence_info_completes_what_is_left_out():
    tokens = torch.zeros(2, 5)
    plain = sequence_info(tokens, None, None)
    assert plain.positions.tolist() == [[0, 1, 2, 3, 4]] * 2 and plain.document_ids is None
    positions = torch.tensor([[0, 1, 0, 1, 2], [3, 4, 5, 0, 0]])
    by_positions = sequence_info(tokens, positions, None)
    assert by_positions.positions is positions
    assert by_positions.document_ids.tolist() == [[1, 1, 2, 2, 2], [1, 1, 1, 2, 3]]
    ids = torch.tensor([[8, 8, 3, 3, 3], [5, 1, 1, 1, 5]])
    by_ids = sequence_info(tokens, None, ids)
    assert by_ids.positions.tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 2, 0]]
    assert by_ids.document_ids is ids
    assert sequence_info(tokens, positions, ids) == SequenceInfo(positions, ids)
