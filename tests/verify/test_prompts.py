"""Which tokens are run."""

import titan_adapters as ta
from tests.conftest import one_windowed_layer
from titan_adapters.verify.prompts import edge_lengths, random_prompts, spans_reached, stretched

CONFIG = one_windowed_layer(ta.get_model("qwen2"), 7, 2000)


def test_lengths_around_every_edge():
    """None near the window of 2000 tokens, for which prompts are not made up."""
    assert edge_lengths(CONFIG, tp=4, block_size=32, limit=5000) == [1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33]
    assert edge_lengths(CONFIG, tp=1, block_size=32, limit=31) == [1, 2, 3, 6, 7, 8, 31]


def test_windows_that_nothing_goes_beyond_are_told():
    assert spans_reached(CONFIG, longest=8) == (["a window of 7"], ["a window of 2000"])
    assert spans_reached(CONFIG, longest=7) == ([], ["a window of 7", "a window of 2000"])


def test_random_prompts_depend_on_seed_and_length_only():
    first, again, other = (random_prompts(100, lengths, seed) for lengths, seed in (([3, 9], 0), ([9], 0), ([9], 1)))
    assert first[1] == again[0] != other[0]
    assert [len(p) for p in first] == [3, 9] and all(0 <= token < 100 for p in first for token in p)


def test_stretched_repeats():
    assert stretched([[1, 2], [3]], 5) == [1, 2, 3, 1, 2]
    assert stretched([[1, 2], [3]], 3, skip=1) == [2, 3, 1]
