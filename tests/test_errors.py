"""The shape of every error's text, and that it survives the way from an engine's process to the user's."""

import pickle

import pytest

import titan_adapters as ta
from titan_adapters import errors


def test_text_by_hand():
    error = ta.TitanError("It failed.", ["a is 1", "b is 2"], fix="make them 3.")
    assert str(error) == "It failed.\n  - a is 1\n  - b is 2\nFix: make them 3."
    assert str(ta.TitanError("It failed.", fix="try again.")) == "It failed.\nFix: try again."


@pytest.mark.parametrize("count", [10, 11, 250])
def test_first_ten_problems_are_printed_and_all_are_kept(count):
    error = ta.TitanError("Many.", [f"problem {i}" for i in range(count)], fix="all of them.")
    lines = str(error).splitlines()
    assert lines[1:11] == [f"  - problem {i}" for i in range(10)]
    assert lines[11:] == ([f"  - ... and {count - 10} more"] if count > 10 else []) + ["Fix: all of them."]
    assert len(error.problems) == count


def test_every_kind_is_a_titan_error_and_pickles():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ta.TitanError)]
    assert len(kinds) >= 8
    for kind in kinds:
        error = pickle.loads(pickle.dumps(kind("It failed.", ["a"], fix="b.")))
        assert type(error) is kind and error.problems == ["a"] and error.fix == "b."
        assert str(error) == "It failed.\n  - a\nFix: b."


def test_fix_cannot_be_left_out():
    with pytest.raises(TypeError):
        ta.TitanError("It failed.")
