"""Helpers of the row and op tests."""

import torch

import titan_adapters as ta
from tests.conftest import assert_bitwise_equal
from titan_adapters.state_dict import Row


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel()).view(shape)


def both_ways(rows: Row | list[Row], published: dict, native: dict, **ranges) -> None:
    """Nested lists by name; converted either way, each side must come out as the other, bit for bit."""
    adapter = ta.StateDictAdapter(*([rows] if isinstance(rows, Row) else rows), **ranges)
    published, native = ({n: torch.tensor(v) for n, v in side.items()} for side in (published, native))
    assert_bitwise_equal(adapter.to_native(published), native)
    assert_bitwise_equal(adapter.to_hf(native), published)
