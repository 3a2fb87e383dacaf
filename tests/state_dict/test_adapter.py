"""Exact accounting: whatever does not balance is listed, all of it, in one error."""

import pytest
import torch

import titan_adapters as ta
from tests.conftest import random_model, titan_error_text
from titan_adapters.errors import StateDictError
from titan_adapters.state_dict import native_adapter, native_tensors


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def problems_of(call) -> list[str]:
    with pytest.raises(ta.TitanError) as caught:
        call()
    titan_error_text(caught)
    return caught.value.problems


TABLE = ta.StateDictAdapter(
    ta.Rename("a.{layer}", "x.{layer}"),
    ta.Concat(["gate", "up"], "w13", sizes=[1, 2]),
    ta.Stack("e.{expert}", "experts", over="expert"),
    layer=range(2),
    expert=range(3),
)
FULL = {"a.0": ones(1), "a.1": ones(2), "gate": ones(1), "up": ones(2)} | {f"e.{i}": ones(2) for i in range(3)}
NATIVE = {"x.0": ones(1), "x.1": ones(2), "w13": ones(3), "experts": ones(3, 2)}


def test_double_claims_are_all_listed():
    rows = [ta.Rename("a", "x"), ta.Rename("a", "y"), ta.Drop("b"), ta.Split("b", ["x", "z"], sizes=[1, 1])]
    problems = problems_of(lambda: ta.StateDictAdapter(*rows))
    assert [problem.split(" by ")[0] for problem in problems] == [
        "hf name a is claimed",
        "hf name b is claimed",
        "native name x is claimed",
    ]
    assert "Drop(hf='b'" in problems[1] and "Split(" in problems[1]


def test_a_row_whose_range_does_not_tell_its_names_apart_claims_them_twice():
    problems = problems_of(lambda: ta.StateDictAdapter(ta.Rename("a.{layer}", "x"), layer=range(2)))
    assert len(problems) == 1 and problems[0].startswith("native name x is claimed")
    problems = problems_of(lambda: ta.StateDictAdapter(ta.Stack("same", "x", over="e"), e=range(2)))
    assert len(problems) == 1 and problems[0].startswith("hf name same is claimed")


def test_missing_and_unexpected_are_listed_at_once():
    fed = {name: tensor for name, tensor in FULL.items() if name not in ("a.1", "up")} | {"stray": ones(4, 5)}
    assert problems_of(lambda: TABLE.to_native(fed)) == [
        "unexpected tensor stray (4, 5)",
        "missing tensor a.1",
        "missing tensor up",
    ]


def test_the_way_out_is_accounted_for_too():
    fed = {name: tensor for name, tensor in NATIVE.items() if name != "experts"} | {"stray": ones(1)}
    assert problems_of(lambda: TABLE.to_hf(fed)) == ["unexpected tensor stray (1,)", "missing tensor experts"]


def test_a_tensor_that_comes_twice_is_refused():
    session = TABLE.session()
    for name, tensor in FULL.items():
        session.feed(name, tensor)
    assert session.feed("gate", ones(1)) == [] and session.feed("a.0", ones(1)) == []
    assert problems_of(lambda: session.finish(partial=False)) == ["gate came twice", "a.0 came twice"]


def test_partial_accepts_absent_rows_but_no_unpaired_halves():
    assert TABLE.to_native({"a.1": ones(2)}, partial=True).keys() == {"x.1"}
    assert TABLE.to_native({}, partial=True) == {}
    fed = {"gate": ones(1), "e.1": ones(2), "a.0": ones(1)}
    assert problems_of(lambda: TABLE.to_native(fed, partial=True)) == [
        "missing tensor up",
        "missing tensor e.0",
        "missing tensor e.2",
    ]
    assert problems_of(lambda: TABLE.to_native({"stray": ones(1)}, partial=True)) == ["unexpected tensor stray (1,)"]


def test_check_lists_missing_unexpected_and_misshapen_at_once():
    """Nothing else is wrong with the three right tensors, a.0, gate and up."""
    available = FULL | {"a.1": ones(7), "stray": ones(3)}
    del available["e.2"]
    expected = NATIVE | {"extra": ones(1)}
    del expected["w13"]
    assert sorted(problems_of(lambda: TABLE.check(available, expected))) == [
        "missing tensor e.2",
        "no row writes extra",
        "rows write w13, which the model does not have",
        "unexpected tensor stray (3,)",
        "x.1 has shape (7,), the model needs (2,)",
    ]
    TABLE.check(FULL, NATIVE)


def test_check_names_tensors_that_a_row_cannot_convert():
    """Parts of wrong length, unequal shapes to stack, and a dim to swap that is not there."""
    adapter = ta.StateDictAdapter(
        *TABLE.rows, ta.Rename("flat", "matrix", ta.Transpose()), layer=range(2), expert=range(3)
    )
    available = FULL | {"up": ones(5), "e.1": ones(9), "flat": ones(3), "stray": ones(1)}
    problems = problems_of(lambda: adapter.check(available, NATIVE | {"matrix": ones(3, 1)}))
    assert any(p.startswith("up: ") and "lengths [1, 5]" in p for p in problems)
    assert any(p.startswith("e.2 (2,) can't be converted: ") for p in problems)
    assert any(p.startswith("flat (3,) can't be converted: ") for p in problems)
    assert "unexpected tensor stray (1,)" in problems


def test_only_the_first_ten_are_printed_and_all_are_kept():
    with pytest.raises(ta.TitanError) as caught:
        TABLE.to_native(FULL | {f"stray{i:02}": ones(1) for i in range(12)})
    lines = titan_error_text(caught).splitlines()
    assert lines[0] == "The state dict does not balance (to_native)."
    assert lines[1:11] == [f"  - unexpected tensor stray{i:02} (1,)" for i in range(10)]
    assert lines[11] == "  - ... and 2 more"
    assert lines[12].startswith("Fix: supply each tensor that the rows name exactly once") and len(lines) == 13
    assert len(caught.value.problems) == 12


TIED = ta.StateDictAdapter(ta.Rename("e", "tok"), ta.Tie("h", "e", "head", "tok"), ta.Tie("g", "e", "gate", "tok"))


@pytest.mark.parametrize("order", [("e", "h", "g"), ("h", "g", "e"), ("g", "e", "h")])
def test_every_alias_is_compared_with_its_original(order):
    same = {name: torch.tensor([1.0, 2.0]) for name in order}
    assert TIED.to_native(same)["tok"].tolist() == [1.0, 2.0]
    for alias in ("h", "g"):
        fed = same | {alias: torch.tensor([1.0, 2.0 + 2**-22])}  # one bit of fp32
        assert problems_of(lambda fed=fed: TIED.to_native(fed)) == [
            f"{alias} differs from e, but the config says that they are tied"
        ]
        fed = same | {alias: torch.tensor([1.0])}
        assert len(problems_of(lambda fed=fed: TIED.to_native(fed))) == 1


def test_an_alias_without_its_original_is_not_silently_dropped():
    """In a partial dict the alias alone would change nothing, although its sender believes that it did."""
    assert problems_of(lambda: TIED.to_native({"h": ones(2)})) == ["missing tensor e"]
    (problem,) = problems_of(lambda: TIED.to_native({"h": ones(2)}, partial=True))
    assert "h" in problem and "e" in problem
    assert TIED.to_native({"e": ones(2)}, partial=True).keys() == {"tok"}


def test_native_tables_of_tied_and_untied_models():
    cls = ta.get_model("qwen2")
    for config in cls.tiny_configs().values():
        model = random_model(cls, config)
        tensors = native_tensors(model)
        assert ("lm_head.weight" in tensors) != config.tied_embeddings
        assert set(tensors) | {"lm_head.weight"} == set(model.state_dict())
        adapter = native_adapter(model)
        assert adapter.native_names() == set(tensors)
        converted = adapter.to_native(model.state_dict())
        assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())


def test_a_part_that_is_not_needed_is_told_by_a_tensor_of_its_own():
    """Layer 2 is an extra one only if it has a projection; else it is a layer that the config does not know of."""
    rows = [ta.Rename("layers.{layer}.w", "w.{layer}"), ta.Drop("layers.{extra}.w", only_with="layers.{extra}.proj")]
    adapter = ta.StateDictAdapter(*rows, ta.Drop("layers.{extra}.proj"), layer=range(2), extra=[2])
    weights = {f"layers.{i}.w": torch.full((1,), float(i)) for i in range(3)}
    assert adapter.to_native(weights | {"layers.2.proj": torch.ones(1)}).keys() == {"w.0", "w.1"}
    problems = problems_of(lambda: adapter.to_native(weights))
    assert problems == ["unexpected tensor layers.2.w: it is not needed only where layers.2.proj is there"]


def test_rows_of_every_installed_model_cover_it_exactly():
    """Against the model's own names, tied or not; a missing layer on either side is noticed."""
    for info in ta.list_models():
        cls = ta.get_model(info.name)
        for config in cls.tiny_configs().values():
            model = random_model(cls, config)
            assert cls.state_dict_adapter(config).native_names() == set(native_tensors(model))
            published = cls.state_dict_adapter(config).to_hf(native_tensors(model))
            short = cls.state_dict_adapter(config.model_copy(update={"num_layers": config.num_layers - 1}))
            problems = problems_of(lambda p=published, m=model, s=short: s.check(p, native_tensors(m)))
            last = config.num_layers - 1
            assert f"no row writes layers.{last}.attention.wo.weight" in problems
            unexpected = [p for p in problems if p.startswith("unexpected tensor ")]
            assert unexpected and all(f".layers.{last}." in p for p in unexpected)


def test_parts_of_a_stack_are_handed_on_as_they_come_and_all_must_come():
    table = ta.StateDictAdapter(ta.Stack("e.{expert}", "w", ta.Transpose(), over="expert"), expert=range(3))
    parts = [torch.full((1, 2), float(i)) for i in range(3)]
    session = table.session(in_parts={"w"})
    assert table.stacked() == {"w": 3}
    for index in (2, 0):
        ((name, part),) = session.feed(f"e.{index}", parts[index])
        assert name == f"w[{index}]" and part.tolist() == [[index], [index]]
    assert session.pending
    with pytest.raises(StateDictError, match=r"missing tensor e\.1"):
        session.finish(partial=True)
    assert [name for name, _ in session.feed("e.1", parts[1])] == ["w[1]"] and not session.pending
    session.finish(partial=False)


def test_rows_say_whether_they_only_cut():
    rows = [
        ta.Rename("a", "a"),
        ta.Rename("b", "b", ta.VocabPadding(3, 4)),
        ta.Split("c", ["c1", "c2"], sizes=[1, 1]),
        ta.Rename("d", "d", ta.Permute(1, 4, 4)),
        ta.Concat(["e1", "e2"], "e", sizes=[1, 1]),
    ]
    session = ta.StateDictAdapter(*rows).session()
    assert [name for name in ("a", "b", "c", "d", "e1", "e2", "f") if session.rearranges(name)] == ["d", "e1", "e2"]
