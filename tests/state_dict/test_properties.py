"""Every kind of row at once, over random sizes: inverses, and independence of order, chunks and device."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import titan_adapters as ta
from tests.conftest import assert_bitwise_equal
from tests.state_dict.conftest import numbers
from titan_adapters.state_dict import Row
from titan_adapters.state_dict.fused import split_gate_up

Table = tuple[ta.StateDictAdapter, dict[str, torch.Tensor]]

sizes = st.lists(st.integers(1, 3), min_size=1, max_size=4)


def feed_forwards(draw, num_experts: int) -> tuple[list[Row], dict[str, tuple[int, ...]]]:
    """Fused gate and up of one feed-forward layer, and experts in both layouts; published shapes of a layer."""
    F, D, E = draw(st.integers(1, 3)), draw(st.integers(1, 4)), num_experts
    order, interleaved, bias = draw(st.sampled_from(["gate_up", "up_gate"])), draw(st.booleans()), draw(st.booleans())
    layout = ta.StackedExperts(
        hidden_dim=F,
        order=draw(st.sampled_from(["gate_up", "up_gate", "up"])),
        interleaved=draw(st.booleans()),
        gate_up_transposed=draw(st.booleans()),
        down_transposed=draw(st.booleans()),
    )
    per_expert = ta.PerExpert(gate=draw(st.sampled_from([None, "w1"])), up="w3", down="w2")
    rows = [
        split_gate_up(
            "ff.{layer}",
            {"gate": "ff1.{layer}", "up": "ff3.{layer}"},
            order=order,
            interleaved=interleaved,
            hidden_dim=F,
        ),
        *ta.expert_rows("stacked.{layer}", "x.{layer}", layout=layout, bias=bias),
        *ta.expert_rows("each.{layer}", "y.{layer}", layout=per_expert, bias=bias),
    ]
    first = "up_proj" if layout.order == "up" else "gate_up_proj"
    length = F if layout.order == "up" else 2 * F
    shapes: dict[str, tuple[int, ...]] = {
        "ff.{layer}": (2 * F, D),
        f"stacked.{{layer}}.{first}": (E, D, length) if layout.gate_up_transposed else (E, length, D),
        "stacked.{layer}.down_proj": (E, F, D) if layout.down_transposed else (E, D, F),
    }
    biases: dict[str, tuple[int, ...]] = {
        f"stacked.{{layer}}.{first}_bias": (E, length),
        "stacked.{layer}.down_proj_bias": (E, D),
    }
    for e in range(E):
        for name in ("w1", "w3", "w2") if per_expert.gate else ("w3", "w2"):
            shapes[f"each.{{layer}}.{e}.{name}.weight"] = (D, F) if name == "w2" else (F, D)
            biases[f"each.{{layer}}.{e}.{name}.bias"] = (D,) if name == "w2" else (F,)
    return rows, shapes | (biases if bias else {})


@st.composite
def tables(draw) -> Table:
    """One row of every kind over random ranges and sizes, in random order, and published tensors that fit them."""
    layers, experts = range(draw(st.integers(1, 3))), range(draw(st.integers(1, 3)))
    heads, pairs, rest = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    columns, parts, cuts = draw(st.integers(1, 3)), draw(sizes), draw(sizes)
    part_names = [f"part{i}.{{layer}}" for i in range(len(parts))]
    cut_names = [f"cut{i}.{{layer}}" for i in range(len(cuts))]
    head_dim, padding = 2 * pairs + rest, draw(st.integers(0, 3))
    layout = draw(st.sampled_from(["concat", "grouped"]))
    fused = {"num_heads": heads * draw(st.integers(1, 3)), "num_kv_heads": heads, "head_dim": head_dim}
    ff_rows, ff_shapes = feed_forwards(draw, len(experts))
    rows: list[Row] = [
        ta.Rename("q.{layer}", "wq.{layer}", ta.Permute(heads, head_dim, 2 * pairs)),
        ta.Stack("e.{layer}.{expert}", "w1.{layer}", ta.Transpose(), over="expert"),
        ta.Concat(part_names, "joined.{layer}", ta.Transpose(), sizes=parts, dim=1),
        ta.Split("whole.{layer}", cut_names, ta.Transpose(), sizes=cuts),
        ta.FusedQKV("qkv.{layer}", [f"{p}.{{layer}}" for p in "abc"], layout=layout, **fused),
        ta.Rename("norm.{layer}", "norm.{layer}", ta.Cast(torch.int64, torch.float64), ta.Offset(1.0), ta.Scale(2.0)),
        *ff_rows,
        ta.Rename("embed", "tok", ta.VocabPadding(4, 4 + padding), ta.Cast(torch.int64, torch.int32)),
        ta.Tie("head", "embed", "lm_head", "tok"),
    ]
    per_layer = ff_shapes | {
        "q.{layer}": (heads * head_dim, columns),
        "whole.{layer}": (columns, sum(cuts)),
        "qkv.{layer}": ((fused["num_heads"] + 2 * heads) * head_dim, columns)[: 1 + columns % 2],
        "norm.{layer}": (columns,),
        **{f"e.{{layer}}.{expert}": (2, columns) for expert in experts},
        **{name: (columns, size) for name, size in zip(part_names, parts)},
    }
    shapes = {name.format(layer=layer): shape for layer in layers for name, shape in per_layer.items()}
    published = {name: numbers(*shape, start=1000 * i) for i, (name, shape) in enumerate(shapes.items())}
    embedding = numbers(4, columns, start=-1000)
    published["embed"] = torch.cat([embedding, embedding.new_zeros(padding, columns)])  # zeros survive a round trip
    return ta.StateDictAdapter(*draw(st.permutations(rows)), layer=layers, expert=experts), published


def shuffled(data, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in data.draw(st.permutations(list(tensors)))}


def of_layer(tensors: dict[str, torch.Tensor], layer: int | None) -> dict[str, torch.Tensor]:
    """Tensors whose name has this number behind the first dot; those without a number for None."""
    numbered = {name: name.split(".")[1] if "." in name else None for name in tensors}
    return {name: t for name, t in tensors.items() if numbered[name] == (None if layer is None else str(layer))}


@given(tables(), st.data())
def test_inverse_in_any_order_of_feeding(table, data):
    adapter, published = table
    native = adapter.to_native(published)
    assert set(native) == adapter.native_names()
    assert_bitwise_equal(adapter.to_native(shuffled(data, published)), native)
    assert_bitwise_equal(adapter.to_hf(shuffled(data, native)), published)
    assert_bitwise_equal(adapter.to_native(adapter.to_hf(native)), native)


@given(tables(), st.sampled_from(["to_native", "to_hf"]), st.data())
def test_any_chunking_of_a_session_gives_the_same(table, direction, data):
    adapter, published = table
    native = adapter.to_native(published)
    source, whole = (published, native) if direction == "to_native" else (native, published)
    session, chunked = adapter.session(direction), {}
    left = list(shuffled(data, source))
    while left:
        size = data.draw(st.integers(1, len(left)))
        for name in left[:size]:
            for produced, tensor in session.feed(name, source[name]):
                assert produced not in chunked
                chunked[produced] = tensor
        left = left[size:]
    assert not session.pending
    session.finish(partial=False)
    assert_bitwise_equal(chunked, whole)


@given(tables(), st.data())
def test_one_layer_at_a_time_gives_the_same(table, data):
    """Separate partial conversions, in any order of layers, as a live update sends them."""
    adapter, published = table
    native = adapter.to_native(published)
    for convert, source, whole in ((adapter.to_native, published, native), (adapter.to_hf, native, published)):
        by_layer: dict[str, torch.Tensor] = {}
        for layer in data.draw(st.permutations([None, 0, 1, 2])):
            converted = convert(shuffled(data, of_layer(source, layer)), partial=True)
            assert not set(by_layer) & set(converted)
            by_layer |= converted
        assert_bitwise_equal(by_layer, whole)


@given(tables())
def test_meta_tensors_give_the_shapes_of_real_ones(table):
    adapter, published = table
    native = adapter.to_native(published)
    for convert, source, whole in ((adapter.to_native, published, native), (adapter.to_hf, native, published)):
        on_meta = convert({name: tensor.to("meta") for name, tensor in source.items()})
        assert all(tensor.is_meta for tensor in on_meta.values())
        facts = [{n: (t.shape, t.dtype) for n, t in side.items()} for side in (on_meta, whole)]
        assert facts[0] == facts[1]
    adapter.check(published, native)


@given(tables(), st.data())
def test_partial_dicts_convert_whole_rows_or_none(table, data):
    """Of a random subset, every row whose inputs are all there comes out as in a whole conversion."""
    adapter, published = table
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
