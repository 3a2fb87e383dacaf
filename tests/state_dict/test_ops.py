"""Ops: values written by hand, inverses by property, and the rope permutation against HF's own rotation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import titan_adapters as ta
from tests.conftest import titan_error_text
from titan_adapters.nn import Rope
from titan_adapters.state_dict import Op


def assert_inverse(op: Op, published: torch.Tensor) -> None:
    native = op.to_native(published)
    back = op.to_hf(native)
    assert back.dtype == published.dtype and torch.equal(back, published)
    assert torch.equal(op.to_native(op.to_hf(native)), native)
    on_meta = op.to_native(published.to("meta"))
    assert on_meta.shape == native.shape and on_meta.dtype == native.dtype


def test_transpose_by_hand():
    tensor = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert ta.Transpose().to_native(tensor).tolist() == [[1, 4], [2, 5], [3, 6]]
    cube = torch.arange(8).view(2, 2, 2)
    assert ta.Transpose(0, 1).to_native(cube).tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert ta.Transpose().to_native(tensor).data_ptr() == tensor.data_ptr()
    assert ta.Transpose().to_hf(tensor).is_contiguous()


def test_permute_by_hand_partial_rotary():
    """Two heads of 6 rows, 4 rotated: published pairs are (0, 2) and (1, 3), which become neighbours; 4, 5 stay."""
    op = ta.Permute(heads=2, head_dim=6, rotary_dim=4)
    rows = torch.arange(12)
    expected = [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert op.to_native(rows).tolist() == expected  # a bias
    weight = torch.stack([rows, rows + 100], dim=1)
    assert op.to_native(weight).tolist() == [[row, row + 100] for row in expected]
    assert op.to_hf(torch.tensor(expected)).tolist() == list(range(12))


def test_permute_by_hand_whole_head():
    """8 rows: published pairs are (j, j + 4)."""
    op = ta.Permute(heads=1, head_dim=8, rotary_dim=8)
    assert op.to_native(torch.arange(8)).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_permute_refuses_a_wrong_head_count():
    with pytest.raises(ta.TitanError) as caught:
        ta.Permute(heads=4, head_dim=6, rotary_dim=4).to_native(torch.zeros(12, 3))
    text = titan_error_text(caught)
    assert "Permute(heads=4, head_dim=6, rotary_dim=4) got a tensor of shape (12, 3)" in text
    assert "its first dim must be heads * head_dim = 24" in text


def test_cast_by_hand():
    op = ta.Cast(hf=torch.bfloat16, native=torch.float32)
    native = op.to_native(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert native.dtype == torch.float32 and native.tolist() == [1.5, -2.0]
    assert op.to_hf(torch.tensor([1.0 + 2**-12])).tolist() == [1.0]  # 8 bits: not representable, so rounded


def test_deinterleave_by_hand():
    op = ta.Deinterleave(parts=2, dim=0)
    assert op.to_native(torch.tensor([0, 10, 1, 11, 2, 12])).tolist() == [0, 1, 2, 10, 11, 12]
    assert op.to_hf(torch.tensor([0, 1, 2, 10, 11, 12])).tolist() == [0, 10, 1, 11, 2, 12]
    columns = torch.tensor([[0, 10, 20, 1, 11, 21], [5, 15, 25, 6, 16, 26]])
    expected = [[0, 1, 10, 11, 20, 21], [5, 6, 15, 16, 25, 26]]
    for dim in (1, -1):
        assert ta.Deinterleave(parts=3, dim=dim).to_native(columns).tolist() == expected


def test_deinterleave_refuses_a_length_that_does_not_divide():
    for convert in (ta.Deinterleave(2, -1).to_native, ta.Deinterleave(2, -1).to_hf):
        with pytest.raises(ta.TitanError) as caught:
            convert(torch.zeros(2, 5))
        text = titan_error_text(caught)
        assert "Deinterleave(parts=2, dim=-1) got a tensor of shape (2, 5)" in text
        assert "dim -1 must be a multiple of 2" in text


def test_vocab_padding_by_hand():
    """Real rows survive bit for bit; what stood in the others does not, and comes back as zeros of the same dtype."""
    op = ta.VocabPadding(vocab_size=2, padded_vocab_size=4)
    weight = torch.tensor([[1, 2], [3, 4], [7, 8], [9, 9]], dtype=torch.bfloat16)
    assert op.to_native(weight).tolist() == [[1, 2], [3, 4]]
    back = op.to_hf(op.to_native(weight))
    assert back.tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]] and back.dtype == torch.bfloat16
    bias = torch.tensor([5, 6, 7, 8])
    assert op.to_native(bias).tolist() == [5, 6] and op.to_hf(bias[:2]).tolist() == [5, 6, 0, 0]


def test_vocab_padding_refuses_other_numbers_of_rows():
    op = ta.VocabPadding(vocab_size=3, padded_vocab_size=4)
    for convert, rows, expected in ((op.to_native, 3, "the published tensor has 3 rows instead of 4"),
                                    (op.to_native, 5, "the published tensor has 5 rows instead of 4"),
                                    (op.to_hf, 4, "the native tensor has 4 rows instead of 3")):  # fmt: skip
        with pytest.raises(ta.TitanError) as caught:
            convert(torch.zeros(rows, 2))
        assert f"VocabPadding(vocab_size=3, padded_vocab_size=4): {expected}." in titan_error_text(caught)
    with pytest.raises(ta.TitanError, match="the padded vocabulary is the smaller one") as caught:
        ta.VocabPadding(vocab_size=4, padded_vocab_size=3)
    titan_error_text(caught)


def all_bf16() -> torch.Tensor:
    """Every finite bf16 value."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


def test_offset_by_hand():
    op = ta.Offset(1.0)
    assert op.to_native(torch.tensor([0.25, -3.0, 0.0])).tolist() == [1.25, -2.0, 1.0]
    assert op.to_hf(torch.tensor([1.25, -2.0, 1.0])).tolist() == [0.25, -3.0, 0.0]
    assert ta.Offset(-1.0).to_native(torch.tensor([1.25])).tolist() == [0.25]
    # 2 is the even neighbour of 2.0078125 (bf16 has steps of 2^-6 from 2 on)
    assert op.to_native(torch.tensor([1.0078125], dtype=torch.bfloat16)).tolist() == [2.0]


def test_offset_inverse_is_bitwise_where_documented():
    """Exhaustively in bf16: native weights in [0.5, 2]; and all published ones from 2^-16 to 2^16, if cast before."""
    values = all_bf16()
    op = ta.Offset(1.0)
    native = values[(values >= 0.5) & (values <= 2)]
    assert len(native) == 2 * 2**7 + 1
    assert torch.equal(op.to_native(op.to_hf(native)), native)
    published = values[(values == 0) | ((values.abs() >= 2**-16) & (values.abs() <= 2**16))]
    assert len(published) == 2 + 2 * (32 * 2**7 + 1)
    adapter = ta.StateDictAdapter(ta.Rename("a", "b", ta.Cast(torch.bfloat16, torch.float32), op))
    held = adapter.to_native({"a": published})
    assert held["b"].dtype == torch.float32
    assert torch.equal(held["b"].double(), published.double() + 1)  # nothing was rounded
    assert torch.equal(adapter.to_hf(held)["a"], published)


def test_offset_inverse_is_not_bitwise_elsewhere():
    op = ta.Offset(1.0)
    small = torch.tensor([0.001], dtype=torch.bfloat16)
    assert op.to_native(small).item() == 1.0 and op.to_hf(op.to_native(small)).item() == 0.0
    tiny = torch.tensor([2**-17 * (1 + 2**-7)])  # fp32: its last bit is 2^-24, half a step at 1
    assert op.to_hf(op.to_native(tiny)).item() == 2**-17
    native = torch.tensor([0.125 + 2**-26])  # -0.875 + 2^-26 has a bit too many
    assert op.to_native(op.to_hf(native)).item() == 0.125


def test_scale_by_hand():
    op = ta.Scale(0.5)
    assert op.to_native(torch.tensor([3.0, -4.0])).tolist() == [1.5, -2.0]
    assert op.to_hf(torch.tensor([1.5, -2.0])).tolist() == [3.0, -4.0]
    with pytest.raises(ta.TitanError, match=r"Scale\(factor=0.0\) has no inverse") as caught:
        ta.Scale(0.0)
    titan_error_text(caught)


def test_scale_inverse_is_bitwise_for_powers_of_two_only():
    """Of all normal bf16 values far from the ends of the range."""
    values = all_bf16()
    values = values[(values.abs() > 2.0**-100) & (values.abs() < 2.0**100)]
    for factor in (0.5, -8.0, 2**-20):
        op = ta.Scale(factor)
        assert torch.equal(op.to_hf(op.to_native(values)), values)
        assert torch.equal(op.to_native(op.to_hf(values)), values)
    op = ta.Scale(0.7)
    assert not torch.equal(op.to_hf(op.to_native(values)), values)
    torch.testing.assert_close(op.to_hf(op.to_native(values)), values, rtol=2**-7, atol=0)
    end = torch.tensor([3.0e38])
    assert ta.Scale(2.0).to_hf(ta.Scale(2.0).to_native(end)).isinf()


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
def test_transpose_inverse(shape, data):
    dims = [data.draw(st.integers(-len(shape), len(shape) - 1)) for _ in range(2)]
    assert_inverse(ta.Transpose(*dims), torch.arange(torch.Size(shape).numel()).view(shape))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_permute_inverse(heads, pairs, unrotated, columns):
    """Also for biases (no columns) and partial rotary."""
    op = ta.Permute(heads, 2 * pairs + unrotated, 2 * pairs)
    shape = (heads * op.head_dim, columns)[: 2 if columns else 1]
    assert_inverse(op, torch.arange(torch.Size(shape).numel()).view(shape))


@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_deinterleave_inverse(parts, shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= parts
    assert_inverse(ta.Deinterleave(parts, dim), torch.arange(torch.Size(shape).numel()).view(shape))


@given(st.lists(st.integers(-255, 255), min_size=1, max_size=6))
def test_cast_inverse_for_what_both_dtypes_hold(values):
    """Integers up to 2^8 fit bf16's 8 bits."""
    assert_inverse(ta.Cast(torch.bfloat16, torch.float32), torch.tensor(values, dtype=torch.bfloat16))


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """As transformers writes it (models/llama/modeling_llama.py)."""
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def hf_scores(wq, wk, x, position_of_q, position_of_k, head_dim, rotary_dim, theta):
    """q · k per query head, the published way, for weights [heads * head_dim, D] and one hidden state x [D]."""
    angles = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)

    def rotated(weight, position):
        heads = (weight @ x).view(-1, head_dim)
        cos, sin = ((torch.cat([angles, angles]) * position).cos(), (torch.cat([angles, angles]) * position).sin())
        first, rest = heads[:, :rotary_dim], heads[:, rotary_dim:]
        return torch.cat([first * cos + rotate_half(first) * sin, rest], dim=-1)

    q, k = rotated(wq, position_of_q), rotated(wk, position_of_k)
    return (q.view(k.shape[0], -1, head_dim) * k[:, None]).sum(-1).flatten()


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_native_rotation_of_permuted_rows_is_hfs_rotation(rotary_dim):
    """Permuted weights under interleaved rope give HF's scores, for every one-hot pair of a q row and a k row."""
    heads, kv_heads, head_dim, theta, m, n = 4, 2, 8, 100.0, 7, 3
    rope = Rope(ta.RopeSpec(theta=theta, rotary_dim=rotary_dim, layout="interleaved", scaling=None), max_seq_len=8)
    permute_q = ta.Permute(heads, head_dim, rotary_dim)
    permute_k = ta.Permute(kv_heads, head_dim, rotary_dim)
    x = torch.ones(1, dtype=torch.float64)
    wrong = 0
    for q_row in range(head_dim):  # of head 1, which reads kv head 0
        for k_row in range(head_dim):
            wq, wk = torch.zeros(heads * head_dim, 1), torch.zeros(kv_heads * head_dim, 1)
            wq[head_dim + q_row], wk[k_row] = 2.0, 3.0
            expected = hf_scores(wq.double(), wk.double(), x, m, n, head_dim, rotary_dim, theta)

            def scores(wq, wk):
                q, k = (w.view(1, -1, head_dim).expand(2, -1, -1) for w in (wq, wk))
                q, k = rope(q, k, torch.tensor([m, n]))
                return (q[0].view(kv_heads, -1, head_dim) * k[1][:, None]).sum(-1).flatten()

            actual = scores(permute_q.to_native(wq), permute_k.to_native(wk))
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6)  # fp32, values up to 6
            wrong += not torch.allclose(scores(wq, wk).double(), expected, rtol=0, atol=1e-3)
    assert wrong > 0  # unpermuted weights fail
