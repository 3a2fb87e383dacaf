"""The CPU's exchange of 16-bit neighbours in integers, bitwise against the plain module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.vllm.conftest import engine_model
from titan_adapters.nn import Rope
from titan_adapters.vllm.cpu_rope import PairRope

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.float32, False), (torch.bfloat16, True)],
)
@pytest.mark.parametrize(("rotary_dim", "row"), [(16, 320), (64, 320), (64, 321)])
def test_equals_plain_rope(rotary_dim: int, row: int, dtype: torch.dtype, compiled: bool) -> None:
    """Queries and keys are views of rows of all heads, as in the engine; also where pairs are no integers in memory."""
    spec = ta.RopeSpec(theta=1e4, rotary_dim=rotary_dim, layout="interleaved", scaling=None)
    plain, pairs = Rope(spec, 128), PairRope(spec, 128)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(70, row, generator=generator).to(dtype)
    packed[3, 7:11] = torch.tensor([float("inf"), -0.0, float("nan"), 1e-40])
    q, k, _ = packed[:, :320].unflatten(-1, (5, 64)).split([3, 1, 1], dim=1)
    positions = torch.randint(128, (70,), generator=generator)
    rotate = torch.compile(pairs, dynamic=True, fullgraph=True) if compiled else pairs
    for ours, theirs in zip(rotate(q, k, positions), plain(q, k, positions), strict=True):
        assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_engine_takes_it_where_it_pays(start: Callable[..., Any], dtype: str) -> None:
    cls = ta.get_model("llama")
    config = next(iter(cls.tiny_configs().values())).model_copy(update={"dtype": dtype})
    llm = start(model=cls, config=config, load_format="dummy")
    kinds = {type(module) for module in engine_model(llm).modules() if isinstance(module, Rope)}
    assert kinds == {PairRope if dtype == "bfloat16" else Rope}
