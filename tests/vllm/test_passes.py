"""Our Inductor passes, run by Inductor itself on the CPU."""

import copy

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from torch import fx, nn

from titan_adapters.nn import RMSNorm
from titan_adapters.vllm import passes
from titan_adapters.vllm.passes import ResidualPass

aten = torch.ops.aten


class Spy(ResidualPass):
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


def sums(graph: fx.Graph) -> list[torch.dtype]:
    """Of whole tensors: the dtypes of their additions."""
    nodes = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    return [node.meta["val"].dtype for node in nodes if node.meta["val"].shape == (7, 64)]


class SumSpy(ResidualPass):
    dtypes: list[list[torch.dtype]]

    def __call__(self, graph: fx.Graph) -> None:
        self.dtypes = [sums(graph)]
        super().__call__(graph)
        graph.lint()
        self.dtypes.append(sums(graph))

    def uuid(self) -> None:
        return None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_reads_the_sum_before_it_is_rounded(dtype):
    """One rounding less than eager torch, so at least as close to fp32; in fp32 nothing changes."""
    torch.manual_seed(0)
    norms = nn.ModuleList([RMSNorm(64, 1e-5, weight_in_fp32=True, offset=1.0), RMSNorm(64, 1e-5)]).to(dtype)
    for norm in norms:
        nn.init.normal_(norm.weight)

    def block(norms, x, y):  # as after a sandwich norm
        x = x + norms[0](y)
        return x, norms[1](x)

    spy = SumSpy()
    with torch.no_grad():
        x, y = torch.randn(2, 7, 64, dtype=dtype)
        compiled = torch.compile(block, fullgraph=True, options={"post_grad_custom_post_pass": spy})(norms, x, y)
        eager, exact = block(norms, x, y), block(copy.deepcopy(norms).float(), x.float(), y.float())
    assert spy.dtypes == [[dtype], [torch.float32]]
    for ours, torchs, wanted in zip(compiled, eager, exact, strict=True):
        assert ours.dtype is dtype
        assert (ours.float() - wanted).norm() <= 1.001 * (torchs.float() - wanted).norm() + 1e-5


def test_caches_know_all_of_the_pass(monkeypatch):
    """Inductor finds compiled graphs by it: an edited pass must not meet those of the pass before."""
    before = ResidualPass().uuid()
    assert before == ResidualPass().uuid()
    monkeypatch.setattr(passes, "widen_sums", lambda graph: None)
    assert ResidualPass().uuid() != before
