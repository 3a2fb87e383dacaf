"""Rows: one tiny conversion of each kind by hand. Inverses of random ones are in `test_properties`."""

import pytest
import torch

import titan_adapters as ta
from tests.conftest import assert_bitwise_equal, titan_error_text
from tests.state_dict.conftest import both_ways, numbers


def test_rename_over_a_range():
    both_ways(
        ta.Rename("m.{layer}.a", "l.{layer}.b"), {"m.1.a": [1, 2], "m.4.a": [3]}, {"l.1.b": [1, 2], "l.4.b": [3]},
        layer=[1, 4],
    )  # fmt: skip


def test_rename_over_two_ranges():
    names = [(layer, e) for layer in (0, 1) for e in (0, 1, 2)]
    both_ways(
        ta.Rename("m.{layer}.e.{expert}", "l{layer}e{expert}"),
        {f"m.{layer}.e.{e}": [10 * layer + e] for layer, e in names},
        {f"l{layer}e{e}": [10 * layer + e] for layer, e in names},
        layer=range(2),
        expert=range(3),
    )


def test_rename_applies_ops_left_to_right():
    """Rows 0 to 3 are interleaved to 0, 2, 1, 3 first; the other order would shuffle the transposed tensor's rows."""
    row = ta.Rename("a", "b", ta.Permute(1, 4, 4), ta.Transpose())
    both_ways(row, {"a": [[0, 9], [1, 8], [2, 7], [3, 6]]}, {"b": [[0, 2, 1, 3], [9, 7, 8, 6]]})


def test_stack():
    both_ways(
        ta.Stack("m.{layer}.e.{expert}.w", "l.{layer}.w", ta.Transpose(), over="expert"),
        {"m.5.e.0.w": [[1, 2]], "m.5.e.1.w": [[3, 4]], "m.5.e.2.w": [[5, 6]]},
        {"l.5.w": [[[1], [2]], [[3], [4]], [[5], [6]]]},
        layer=[5],
        expert=range(3),
    )


def test_concat():
    both_ways(ta.Concat(["gate", "up"], "w13", sizes=[1, 2]), {"gate": [1], "up": [2, 3]}, {"w13": [1, 2, 3]})
    both_ways(
        ta.Concat(["a", "b"], "c", ta.Transpose(), sizes=[1, 2], dim=1),
        {"a": [[1], [4]], "b": [[2, 3], [5, 6]]},
        {"c": [[1, 4], [2, 5], [3, 6]]},
    )


def test_split():
    both_ways(
        ta.Split("m.{layer}.qkv", ["l.{layer}.q", "l.{layer}.k", "l.{layer}.v"], sizes=[2, 1, 1]),
        {"m.0.qkv": [[1], [2], [3], [4]]},
        {"l.0.q": [[1], [2]], "l.0.k": [[3]], "l.0.v": [[4]]},
        layer=[0],
    )
    both_ways(
        ta.Split("a", ["b", "c"], ta.Transpose(), sizes=[1, 2], dim=0),
        {"a": [[1, 2, 3], [4, 5, 6]]},
        {"b": [[1, 4]], "c": [[2, 5], [3, 6]]},
    )


QKV = ["l.{layer}.q", "l.{layer}.k", "l.{layer}.v"]


def test_fused_qkv_concatenated():
    """2 query heads, 1 kv head, 2 channels: rows of q0, q1, k0, v0 in this order."""
    row = ta.FusedQKV("m.{layer}.qkv", QKV, layout="concat", num_heads=2, num_kv_heads=1, head_dim=2)
    both_ways(
        row,
        {"m.3.qkv": [[10], [11], [20], [21], [30], [31], [40], [41]]},
        {"l.3.q": [[10], [11], [20], [21]], "l.3.k": [[30], [31]], "l.3.v": [[40], [41]]},
        layer=[3],
    )


def test_fused_qkv_grouped():
    """4 query heads on 2 kv heads: q0 q1 k0 v0, then q2 q3 k1 v1. With as many kv heads: q0 k0 v0 q1 k1 v1."""
    row = ta.FusedQKV("m.{layer}.qkv", QKV, layout="grouped", num_heads=4, num_kv_heads=2, head_dim=1)
    both_ways(
        row,
        {"m.0.qkv": [[0], [1], [10], [20], [2], [3], [11], [21]]},
        {"l.0.q": [[0], [1], [2], [3]], "l.0.k": [[10], [11]], "l.0.v": [[20], [21]]},
        layer=[0],
    )
    row = ta.FusedQKV("a", ["q", "k", "v"], layout="grouped", num_heads=2, num_kv_heads=2, head_dim=2)
    both_ways(
        row,
        {"a": [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]},  # a bias
        {"q": [0, 1, 2, 3], "k": [10, 11, 12, 13], "v": [20, 21, 22, 23]},
    )


def test_fused_qkv_refuses_what_does_not_fit():
    heads = dict(num_heads=4, num_kv_heads=2, head_dim=1)
    for native, changes in ((["q", "k"], {}), (QKV, {"num_kv_heads": 3}), (QKV, {"layout": "interleaved"})):
        with pytest.raises(ta.TitanError, match="FusedQKV can't cut a into") as caught:
            ta.FusedQKV("a", native, **{"layout": "grouped", **heads, **changes})
        titan_error_text(caught)
    adapter = ta.StateDictAdapter(ta.FusedQKV("a", ["q", "k", "v"], layout="grouped", **heads))
    with pytest.raises(ta.TitanError, match=r"the tensor has shape \(9,\)\.\nFix: dim 0 must be 8\."):
        adapter.to_native({"a": numbers(9)})
    with pytest.raises(ta.TitanError, match=r"have \[4, 2, 3\] rows\.\nFix: they must have \[4, 2, 2\]\."):
        adapter.to_hf({"q": numbers(4), "k": numbers(2), "v": numbers(3)})


def test_tie_and_drop_go_nowhere():
    adapter = ta.StateDictAdapter(
        ta.Rename("embed", "tok"), ta.Tie("head", "embed", "lm_head", "tok"), ta.Drop("inv.{layer}"), layer=range(2)
    )
    ours = {"tok": numbers(2)}
    assert_bitwise_equal(adapter.to_native({"embed": numbers(2), "head": numbers(2), "inv.1": numbers(3)}), ours)
    assert_bitwise_equal(adapter.to_native({"embed": numbers(2)}), ours)
    assert_bitwise_equal(adapter.to_hf(ours), {"embed": numbers(2)})
    assert_bitwise_equal(adapter.to_hf(ours | {"lm_head": numbers(2)}), {"embed": numbers(2)})
    assert adapter.native_names() == {"tok"}


@pytest.mark.parametrize(
    ("make", "published", "expected"),
    [
        (lambda: ta.Concat(["a", "b"], "c", sizes=[1]), {}, "2 parts but 1 sizes: ['a', 'b'], [1]"),
        (lambda: ta.Split("a", ["b"], sizes=[1, 2]), {}, "1 parts but 2 sizes: ['b'], [1, 2]"),
        (
            lambda: ta.Concat(["a", "b"], "c", sizes=[2, 2]),
            {"a": numbers(1), "b": numbers(3)},
            "the parts have lengths [1, 3] along dim 0.\nFix: they must be [2, 2].",
        ),
        (
            lambda: ta.Split("a", ["b", "c"], sizes=[2, 2]),
            {"a": numbers(5)},
            "the tensor has shape (5,).\nFix: dim 0 must be 4.",
        ),
    ],
)
def test_wrong_sizes_are_refused(make, published, expected):
    with pytest.raises(ta.TitanError) as caught:
        ta.StateDictAdapter(make()).to_native(published)
    assert expected in titan_error_text(caught)


def test_placeholder_without_a_range_is_refused():
    for row in (ta.Rename("a.{layer}", "b.{layer}"), ta.Drop("a.{layer}"), ta.Stack("a.{layer}", "b", over="layer")):
        with pytest.raises(ta.TitanError, match=r"placeholder \{layer\}, but no range is given") as caught:
            ta.StateDictAdapter(row, expert=range(2))
        assert "pass layer=range(...)" in titan_error_text(caught)


def test_cast_composes_with_every_kind_of_row():
    """A router's correction bias stays fp32 natively, whatever the others do, and is written back as it was."""
    keep, widen = ta.Cast(torch.float32, torch.float32), ta.Cast(torch.bfloat16, torch.float32)
    adapter = ta.StateDictAdapter(
        ta.Rename("gate.e_score_correction_bias", "router.bias", keep),
        ta.Rename("norm", "norm", widen, ta.Offset(1.0)),
        ta.Stack("e.{expert}", "experts", widen, over="expert"),
        ta.Split("ab", ["a", "b"], ta.Transpose(), widen, sizes=[1, 1]),
        ta.Concat(["c", "d"], "cd", widen, sizes=[1, 1]),
        ta.Rename("gate.weight", "router.gate.weight"),
        expert=range(2),
    )
    third = torch.tensor([1 / 3])  # not a bf16 value
    bf16 = torch.tensor([[0.5, -3.0]], dtype=torch.bfloat16)
    published = {"gate.e_score_correction_bias": third, "norm": bf16, "ab": bf16, "gate.weight": bf16}
    published |= {name: bf16 for name in ("e.0", "e.1", "c", "d")}
    native = adapter.to_native(published)
    assert {name for name, tensor in native.items() if tensor.dtype == torch.bfloat16} == {"router.gate.weight"}
    assert native["router.bias"].item() == torch.tensor(1 / 3).item()
    assert native["norm"].tolist() == [[1.5, -2.0]]
    assert native["a"].tolist() == [[0.5]] and native["b"].tolist() == [[-3.0]]
    assert_bitwise_equal(adapter.to_hf(native), published)
