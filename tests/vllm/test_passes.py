"""Our Inductor passes, run by Inductor itself on the CPU."""

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from torch import fx, nn

from titan_adapters.vllm.passes import UnfuseResidual

aten = torch.ops.aten


class Spy(UnfuseResidual):
    """Counts products before and after."""

    counts: list[tuple[int, int, int]]

    def __init__(self) -> None:
        self.counts = []

    def _count(self, graph: fx.Graph) -> tuple[int, int, int]:
        wanted = (aten.addmm.default, aten.mm.default, aten.add.Tensor)
        return tuple(len(graph.find_nodes(op="call_function", target=target)) for target in wanted)

    def __call__(self, graph: fx.Graph) -> None:
        self.counts.append(self._count(graph))
        super().__call__(graph)
        self.counts.append(self._count(graph))
        graph.lint()

    def uuid(self) -> None:
        return None  # not cached, so that it runs in every test


@pytest.mark.parametrize("bias", [False, True])
def test_residuals_leave_the_product_and_biases_stay(bias):
    torch.manual_seed(0)
    linear, norm = nn.Linear(24, 32, bias=bias), nn.RMSNorm(32)
    spy = Spy()

    def block(x, y):
        x = x + linear(y)
        return x, norm(x)

    with torch.no_grad():
        x, y = torch.randn(5, 32), torch.randn(5, 24)
        compiled = torch.compile(block, fullgraph=True, options={"post_grad_custom_post_pass": spy})
        for ours, eager in zip(compiled(x, y), block(x, y), strict=True):
            torch.testing.assert_close(ours, eager)
    (before, after) = spy.counts
    if bias:
        assert before[0] == after[0] == 1, "addmm of the bias is one kernel"
    else:
        assert before[:2] == (1, 0), "Inductor no longer fuses this: the pass can go"
        assert after[:2] == (0, 1) and after[2] == before[2] + 1
