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
    assert ta.Transpose().to_native(tensor).is_contiguous()


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
