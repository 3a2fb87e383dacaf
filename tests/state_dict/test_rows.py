"""Rows: one tiny conversion of each kind by hand, then inverses of random ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import titan_adapters as ta
from tests.conftest import assert_bitwise_equal, titan_error_text
from titan_adapters.state_dict import Row


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel()).view(shape)


def both_ways(row: Row, published: dict, native: dict, **ranges) -> None:
    adapter = ta.StateDictAdapter(row, **ranges)
    published, native = ({n: torch.tensor(v) for n, v in side.items()} for side in (published, native))
    assert_bitwise_equal(adapter.to_native(published), native)
    assert_bitwise_equal(adapter.to_hf(native), published)


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


sizes = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@st.composite
def rows_and_tensors(draw) -> tuple[list[Row], dict[str, torch.Tensor], dict[str, range]]:
    """One row of every kind over random ranges and sizes, and published tensors that fit them."""
    layers, experts = range(draw(st.integers(1, 3))), range(draw(st.integers(1, 3)))
    heads, pairs, rest = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    columns, parts, cuts = draw(st.integers(1, 3)), draw(sizes), draw(sizes)
    part_names = [f"part{i}" for i in range(len(parts))]
    cut_names = [f"cut{i}" for i in range(len(cuts))]
    head_dim = 2 * pairs + rest
    layout = draw(st.sampled_from(["concat", "grouped"]))
    fused = {"num_heads": heads * draw(st.integers(1, 3)), "num_kv_heads": heads, "head_dim": head_dim}
    rows: list[Row] = [
        ta.Rename("q.{layer}", "wq.{layer}", ta.Permute(heads, head_dim, 2 * pairs)),
        ta.Stack("e.{layer}.{expert}", "w1.{layer}", ta.Transpose(), over="expert"),
        ta.Concat([f"{n}.{{layer}}" for n in part_names], "joined.{layer}", ta.Transpose(), sizes=parts, dim=1),
        ta.Split("whole.{layer}", [f"{n}.{{layer}}" for n in cut_names], ta.Transpose(), sizes=cuts),
        ta.FusedQKV("qkv.{layer}", [f"{p}.{{layer}}" for p in "abc"], layout=layout, **fused),
        ta.Rename("embed", "tok", ta.Cast(torch.int64, torch.int32)),
        ta.Tie("head", "embed", "lm_head", "tok"),
    ]
    shapes = {"embed": (4, columns)}
    for layer in layers:
        shapes |= {f"q.{layer}": (heads * head_dim, columns), f"whole.{layer}": (columns, sum(cuts))}
        shapes |= {f"qkv.{layer}": ((fused["num_heads"] + 2 * heads) * head_dim, columns)[: 1 + columns % 2]}
        shapes |= {f"e.{layer}.{expert}": (2, columns) for expert in experts}
        shapes |= {f"{n}.{layer}": (columns, size) for n, size in zip(part_names, parts)}
    published = {name: numbers(*shape, start=1000 * i) for i, (name, shape) in enumerate(shapes.items())}
    return rows, published, {"layer": layers, "expert": experts}


@given(rows_and_tensors(), st.data())
def test_inverse_in_any_order_of_feeding(table, data):
    rows, published, ranges = table
    adapter = ta.StateDictAdapter(*data.draw(st.permutations(rows)), **ranges)
    native = adapter.to_native(published)
    assert set(native) == adapter.native_names()
    shuffled = {name: published[name] for name in data.draw(st.permutations(list(published)))}
    assert_bitwise_equal(adapter.to_native(shuffled), native)
    native_shuffled = {name: native[name] for name in data.draw(st.permutations(list(native)))}
    assert_bitwise_equal(adapter.to_hf(native_shuffled), published)


@given(rows_and_tensors(), st.data())
def test_any_chunking_of_a_session_gives_the_same(table, data):
    rows, published, ranges = table
    adapter = ta.StateDictAdapter(*rows, **ranges)
    whole = adapter.to_native(published)
    session, chunked = adapter.session("to_native"), {}
    left = data.draw(st.permutations(list(published)))
    while left:
        size = data.draw(st.integers(1, len(left)))
        for name in left[:size]:
            for ours, tensor in session.feed(name, published[name]):
                assert ours not in chunked
                chunked[ours] = tensor
        left = left[size:]
    assert not session.pending
    session.finish(partial=False)
    assert_bitwise_equal(chunked, whole)


@given(rows_and_tensors(), st.data())
def test_partial_dicts_convert_whole_rows_or_none(table, data):
    """Of a random subset, every row whose inputs are all there comes out as in a whole conversion."""
    rows, published, ranges = table
    adapter = ta.StateDictAdapter(*rows, **ranges)
    whole = adapter.to_native(published)
    kept = data.draw(st.sets(st.sampled_from(sorted(published))))
    session = adapter.session("to_native")
    partial = dict(pair for name in sorted(kept) for pair in session.feed(name, published[name]))
    expected = {
        ours: whole[ours] for b in adapter.bindings if b.hf != ("head",) and kept.issuperset(b.hf) for ours in b.native
    }
    assert_bitwise_equal(partial, expected)
    halves = [b for b in adapter.bindings if kept.intersection(b.hf) and not kept.issuperset(b.hf)]
    assert session.pending == bool(halves)
    missing = sorted(f"missing tensor {name}" for b in halves for name in b.hf if name not in kept)
    assert sorted(session.finish_problems(partial=True)) == missing
