"""Attention against a formula written out here with einsum, and the exact edge of a window.

Shapes: S queries  T keys  D model dim  N query heads  K kv heads  H head_dim  V v_head_dim.
"""

import math

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


def qkv(length: int = 11, v_head_dim: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(length, heads, 8, generator=generator) for heads in (6, 2))
    return q, k, torch.randn(length, 2, v_head_dim, generator=generator)


SINKS = torch.tensor([-2.0, -0.5, 0.0, 0.5, 1.0, 4.0])


def inner_attention(**changes) -> InnerAttention:
    inner = InnerAttention(attention_spec(**changes), layer=0)
    if inner.sinks is not None:
        inner.sinks.data.copy_(SINKS)
    return inner


def formula(q_SNH, k_TKH, v_TKV, *, scale=0.37, window=None, softcap=None, chunk=None, sinks=False, v_head_dim=8):
    """One document, one token and head at a time, in fp64: head n reads kv head n // 3."""
    out = torch.zeros(len(q_SNH), 6, v_head_dim, dtype=torch.float64)
    for s in range(len(q_SNH)):
        first = 0 if window is None else max(0, s - window + 1)
        if chunk is not None:
            first = max(first, s - s % chunk)
        for n in range(6):
            keys, values = (t[first : s + 1, n // 3].double() for t in (k_TKH, v_TKV))
            scores = torch.einsum("h,th->t", q_SNH[s, n].double(), keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            total = scores.exp().sum() + (SINKS[n].double().exp() if sinks else 0)
            out[s, n] = torch.einsum("t,tv->v", scores.exp() / total, values)
    return out


@pytest.mark.parametrize(
    "changes",
    [dict(window=window, softcap=softcap) for window in (None, 1, 4, 11, 50) for softcap in (None, 1.5)]
    + [dict(chunk=chunk, sinks=sinks) for chunk in (None, 1, 4, 11, 50) for sinks in (False, True)]
    + [
        dict(sinks=True, window=4),
        dict(sinks=True, softcap=1.5),
        dict(sinks=True, softcap=1.5, window=3, chunk=5),
        dict(chunk=5, window=3),
        dict(v_head_dim=4),
        dict(v_head_dim=12),
        dict(v_head_dim=12, sinks=True, window=4),
        dict(v_head_dim=4, chunk=4),
    ],
    ids=lambda changes: ", ".join(f"{name}={value}" for name, value in changes.items() if value) or "plain",
)
def test_inner_attention_is_the_formula(changes):
    """fp32 against fp64: 1e-6 is ten roundings. The scale, 0.37, is nobody's default."""
    q, k, v = qkv(v_head_dim=changes.get("v_head_dim", 8))
    inner = inner_attention(**changes)
    expected = formula(q, k, v, **changes)
    packed = inner(q, k, v, sequence_info(torch.zeros(11), None, None))
    batched = inner(q[None], k[None], v[None], sequence_info(torch.zeros(1, 11), None, None))
    assert relative_error(packed, expected) < 1e-6
    assert relative_error(batched[0], expected) < 1e-6


def test_sinks_by_hand():
    """Equal scores: each of t tokens gets 1 / (t + e^sink). The first head's sink takes nearly nothing."""
    inner = inner_attention(sinks=True)
    inner.sinks.data = torch.tensor([-100.0, 0.0, 0.0, 0.0, 0.0, math.log(3)])
    q, k, v = torch.zeros(2, 6, 8), torch.zeros(2, 2, 8), torch.ones(2, 2, 8)
    out = inner(q, k, v, sequence_info(torch.zeros(2), None, None))
    assert out[:, 0, 0].tolist() == [1.0, 1.0]
    assert out[:, 1, 0].tolist() == pytest.approx([1 / 2, 2 / 3])
    assert out[:, 5, 0].tolist() == pytest.approx([1 / 4, 2 / 5])


@pytest.mark.parametrize("changes", [dict(softcap=1.5), dict(sinks=True), dict(sinks=True, softcap=1.5, window=4)])
def test_softcap_and_sinks_in_bfloat16_keep_scores_in_fp32(changes):
    q, k, v = (t.bfloat16() for t in qkv())
    out = inner_attention(**changes).bfloat16()(q, k, v, sequence_info(torch.zeros(11), None, None))
    assert out.dtype == torch.bfloat16
    # One rounding of the result, at most 2^-9 relative to each value. bf16 holds these sinks exactly.
    assert relative_error(out, formula(q, k, v, **changes)) < 2**-8


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
        with torch.no_grad(), ta.nn.replay_routing(model, record.experts()):
            return model(other)[12]

    # An expert's matmul rounds by how many tokens it gets, so mixtures take the same experts every time.
    with torch.no_grad(), ta.nn.record_routing(model) as record:
        original = model(tokens)[12]
    assert torch.equal(logits_of_12(7), original)
    assert torch.equal(logits_of_12(13), original)
    for visible in (8, 9, 12):
        assert not torch.allclose(logits_of_12(visible), original, rtol=1e-3, atol=1e-3), visible


@pytest.mark.parametrize("changes", [dict(window=4), dict(chunk=4), dict(chunk=4, sinks=True), dict(chunk=5, window=3)])
def test_windows_and_chunks_stay_within_the_document(changes):
    """Chunks count from each document's own beginning."""
    q, k, v = qkv()
    documents = (slice(0, 6), slice(6, 11))
    expected = torch.cat([formula(q[part], k[part], v[part], **changes) for part in documents])
    inner = inner_attention(**changes)
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4])
    ids = torch.tensor([7] * 6 + [3] * 5)
    for given in ((positions, None), (None, ids), (positions, ids)):
        assert relative_error(inner(q, k, v, sequence_info(torch.zeros(11), *given)), expected) < 1e-6
    # As rows of a batch, where documents lie differently in each.
    rows = [torch.cat([t[None], t.roll(5, 0)[None]]) for t in (q, k, v, positions)]
    out = inner(*rows[:3], sequence_info(torch.zeros(2, 11), rows[3], None))
    assert relative_error(out[0], expected) < 1e-6
    assert relative_error(out[1], expected.roll(5, 0)) < 1e-6


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
