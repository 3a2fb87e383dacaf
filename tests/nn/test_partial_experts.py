"""Ranks that hold some of the experts each: their results add up to what all experts give."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import titan_adapters as ta
from titan_adapters.nn import InnerExperts, Routing

SPEC = ta.MoESpec(
    num_experts=6, top_k=2, hidden_dim=16, score="softmax", renormalize=True, scaling_factor=1.0, groups=None,
    correction_bias=False, weighs="output", router_dtype="float32", router_bias=False, activation="silu", gated=True,
    bias=True, shared=None,
)  # fmt: skip


def by_hand(experts: InnerExperts, x: Tensor, routing: Routing) -> Tensor:
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for slot in range(SPEC.top_k):
            e, weight = int(routing.experts[token, slot]), routing.weights[token, slot]
            given = weight * x[token] if experts.spec.weighs == "input" else x[token]
            gate = experts.w1[e] @ given + experts.b1[e]
            up = experts.w3[e] @ given + experts.b3[e]
            result = experts.w2[e] @ (F.silu(gate) * up) + experts.b2[e]
            out[token] += result if experts.spec.weighs == "input" else weight * result
    return out


@pytest.mark.parametrize("kernel", ["loop", "grouped"])
@pytest.mark.parametrize("weighs", ["input", "output"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_the_ranks_results_add_up(kernel, weighs, ranks):
    torch.manual_seed(0)
    whole = InnerExperts(32, SPEC.model_copy(update={"weighs": weighs}))
    # The last token's experts are both on the first rank, no token chose expert 5.
    chosen = torch.tensor([[0, 4], [1, 3], [3, 2], [4, 1], [1, 0]])
    routing = Routing(torch.empty(5, 6), chosen, torch.rand(5, 2))
    x, each, total = torch.randn(5, 32), 6 // ranks, torch.zeros(5, 32)
    for rank in range(ranks):
        local = InnerExperts(32, whole.spec.model_copy(update={"num_experts": each}))
        local.kernel, local.partial = kernel, ranks > 1
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                local.get_parameter(name).copy_(parameter[rank * each : (rank + 1) * each])
            total += local(x, routing._replace(experts=chosen - rank * each))
    assert torch.allclose(total, by_hand(whole, x, routing), atol=1e-5)
