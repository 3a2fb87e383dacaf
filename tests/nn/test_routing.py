"""Which experts a token goes to and with which weights: by hand, and against transformers' own routers."""

import pytest
import torch
from torch import Tensor

import titan_adapters as ta
from titan_adapters.nn import Router, choose_experts


def moe_spec(**changes) -> ta.MoESpec:
    plain = dict(
        num_experts=4, top_k=2, hidden_dim=8, score="softmax", renormalize=False, scaling_factor=1.0, groups=None,
        correction_bias=False, weighs="output", router_dtype="model", router_bias=False, activation="silu", gated=True,
        bias=False, shared=None,
    )  # fmt: skip
    return ta.MoESpec(**plain | changes)


def by_expert(experts: Tensor, weights: Tensor) -> list[dict[int, float]]:
    """Of each token, its experts' weights; their order is of no meaning."""
    return [dict(zip(e, w)) for e, w in zip(experts.tolist(), weights.tolist())]


def same_routing(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], tolerance: float = 1e-6) -> None:
    assert ours[1].dtype == torch.float32
    for our_token, their_token in zip(by_expert(*ours), by_expert(*theirs), strict=True):
        assert our_token == pytest.approx(their_token, rel=tolerance, abs=1e-12)


# Logits of one token whose exponentials are 1, 2, 4 and 1, with sum 8.
LOGITS = torch.tensor([[1.0, 2.0, 4.0, 1.0]]).log()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {1: 1 / 4, 2: 1 / 2}),
        ({"renormalize": True}, {1: 1 / 3, 2: 2 / 3}),
        ({"scaling_factor": 2.5}, {1: 2.5 / 4, 2: 2.5 / 2}),
        ({"renormalize": True, "scaling_factor": 6.0}, {1: 2.0, 2: 4.0}),  # renormalised first
        ({"score": "softmax_of_top_k"}, {1: 1 / 3, 2: 2 / 3}),
        ({"score": "softmax_of_top_k", "scaling_factor": 3.0}, {1: 1.0, 2: 2.0}),
        ({"score": "sigmoid"}, {1: 2 / 3, 2: 4 / 5}),  # x / (1 + x)
        ({"score": "sigmoid", "renormalize": True}, {1: 10 / 22, 2: 12 / 22}),
        ({"top_k": 1}, {2: 1 / 2}),
        ({"top_k": 1, "renormalize": True}, {2: 1.0}),
        ({"top_k": 4}, {0: 1 / 8, 1: 1 / 4, 2: 1 / 2, 3: 1 / 8}),
    ],
)
def test_weights_by_hand(changes, expected):
    assert by_expert(*choose_experts(moe_spec(**changes), LOGITS, None)) == [pytest.approx(expected)]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_correction_bias_changes_the_choice_and_not_the_weights(score):
    """It lifts experts 0 and 3 above the others. Without it the choice is 1 and 2."""
    spec = moe_spec(score=score, correction_bias=True)
    chosen = choose_experts(spec, LOGITS, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    weight = 1 / 8 if score == "softmax" else 1 / 2
    assert by_expert(*chosen) == [pytest.approx({0: weight, 3: weight})]
    zeros = choose_experts(spec, LOGITS, torch.zeros(4))
    assert by_expert(*zeros) == by_expert(*choose_experts(moe_spec(score=score), LOGITS, None))


# Scores (logits of sigmoids) of six experts in three groups: best per group 0.9, 0.7, 0.6; two best 1.0, 1.35, 1.15.
GROUPED = torch.tensor([[0.9, 0.1, 0.7, 0.65, 0.6, 0.55]]).logit()


@pytest.mark.parametrize(
    ("score", "top_groups", "expected"),
    [
        ("max", 1, {0: 0.9, 1: 0.1}),
        ("max", 2, {0: 0.9, 2: 0.7}),
        ("top2_sum", 1, {2: 0.7, 3: 0.65}),
        ("top2_sum", 2, {2: 0.7, 3: 0.65}),  # the best expert of all is in a closed group
        ("top2_sum", 3, {0: 0.9, 2: 0.7}),
    ],
)
def test_groups_by_hand(score, top_groups, expected):
    groups = ta.ExpertGroupsSpec(num_groups=3, top_groups=top_groups, score=score)
    spec = moe_spec(num_experts=6, score="sigmoid", groups=groups)
    assert by_expert(*choose_experts(spec, GROUPED, None)) == [pytest.approx(expected)]


def test_a_closed_group_stays_closed_under_a_negative_bias():
    """Masked with 0 instead of minus infinity, experts of closed groups would win over negative ranks."""
    groups = ta.ExpertGroupsSpec(num_groups=3, top_groups=1, score="top2_sum")
    spec = moe_spec(num_experts=6, score="sigmoid", groups=groups, correction_bias=True)
    chosen = choose_experts(spec, GROUPED, torch.full((6,), -5.0))
    assert by_expert(*chosen) == [pytest.approx({2: 0.7, 3: 0.65})]


def test_choosing_before_and_after_the_softmax_is_one_formula():
    """softmax over all, renormalised over the chosen, is the softmax of the chosen: exp cancels against the sum."""
    logits = 3 * torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    after = choose_experts(moe_spec(num_experts=16, top_k=5, renormalize=True), logits, None)
    before = choose_experts(moe_spec(num_experts=16, top_k=5, score="softmax_of_top_k"), logits, None)
    same_routing(after, before)
    chosen = [sorted(row, reverse=True)[:5] for row in logits.tolist()]
    formula = torch.tensor(chosen, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(after[1].double(), formula, rtol=1e-6, atol=0)


def transformers_router(family: str, **settings) -> torch.nn.Module:
    from transformers import Glm4MoeConfig, GptOssConfig, MixtralConfig, Qwen3MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    router, config = {
        "glm4_moe": (Glm4MoeTopkRouter, Glm4MoeConfig),
        "gpt_oss": (GptOssTopKRouter, GptOssConfig),
        "mixtral": (MixtralTopKRouter, MixtralConfig),
        "qwen3_moe": (Qwen3MoeTopKRouter, Qwen3MoeConfig),
    }[family]
    return router(config(hidden_size=32, **settings))


SIGMOID = dict(score="sigmoid", correction_bias=True, router_dtype="float32", scaling_factor=2.5)
GLM = dict(n_routed_experts=12, num_experts_per_tok=3, routed_scaling_factor=2.5)
ROUTERS = {
    "mixtral": ("mixtral", dict(num_local_experts=12, num_experts_per_tok=3), dict(renormalize=True)),
    "qwen3": ("qwen3_moe", dict(num_experts=12, num_experts_per_tok=3, norm_topk_prob=False), {}),
    "qwen3 renormalised": (
        "qwen3_moe",
        dict(num_experts=12, num_experts_per_tok=3, norm_topk_prob=True),
        dict(renormalize=True),
    ),
    "gpt-oss": (
        "gpt_oss",
        dict(num_local_experts=12, num_experts_per_tok=3),
        dict(score="softmax_of_top_k", router_bias=True),
    ),
    "glm4": ("glm4_moe", dict(**GLM, n_group=1, topk_group=1, norm_topk_prob=True), SIGMOID | dict(renormalize=True)),
    "glm4 in groups": (
        "glm4_moe",
        dict(**GLM, n_group=4, topk_group=2, norm_topk_prob=False),
        SIGMOID | dict(groups=ta.ExpertGroupsSpec(num_groups=4, top_groups=2, score="top2_sum")),
    ),
}


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 200])
@pytest.mark.parametrize(("family", "settings", "facts"), ROUTERS.values(), ids=ROUTERS)
@torch.no_grad()
def test_routers_of_transformers(family, settings, facts, tokens):
    torch.manual_seed(0)
    theirs = transformers_router(family, **settings)
    ours = Router(32, moe_spec(num_experts=12, top_k=3, **facts), layer=0)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        tensor.normal_(std=0.3)
    names = {"weight": "gate.weight", "bias": "gate.bias", "e_score_correction_bias": "correction_bias"}
    ours.load_state_dict({names[name]: tensor for name, tensor in theirs.state_dict().items()})
    x = torch.randn(tokens, 32)
    logits, weights, experts = theirs(x)
    routing = ours(x)
    assert routing.experts.shape == routing.weights.shape == (tokens, 3)
    torch.testing.assert_close(routing.logits, logits)
    same_routing((routing.experts, routing.weights), (experts, weights), tolerance=1e-5)


BF16_STEP = 2.0**-7
"""Between neighbours from 1 to 2."""
HARD = {
    "all tied": torch.zeros(3, 8),
    "tied at -200": torch.full((3, 8), -200.0),
    "one bf16 step apart": (1 + BF16_STEP * torch.arange(8.0)).repeat(3, 1),
    "from -200 to -193": torch.arange(-200.0, -192.0).repeat(3, 1),
    "from -200 to 0": torch.linspace(-200, 0, 8).repeat(3, 1),
    "one far above": torch.tensor([[-200.0] * 7 + [200.0]]),
}
KINDS = {
    "softmax": {},
    "softmax renormalised": {"renormalize": True},
    "softmax of the chosen": {"score": "softmax_of_top_k"},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid renormalised": {"score": "sigmoid", "renormalize": True},
    "groups": {
        "score": "sigmoid",
        "renormalize": True,
        "groups": ta.ExpertGroupsSpec(num_groups=4, top_groups=2, score="top2_sum"),
    },
}


@pytest.mark.parametrize("logits", HARD.values(), ids=HARD)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_hard_logits(logits, kind, top_k):
    experts, weights = choose_experts(moe_spec(num_experts=8, top_k=top_k, **kind), logits, None)
    assert experts.shape == weights.shape == (len(logits), top_k)
    assert all(len(set(row)) == top_k and set(row) <= set(range(8)) for row in experts.tolist())
    assert weights.isfinite().all() and (weights >= 0).all()
    if kind.get("score") == "softmax_of_top_k" or ("renormalize" in kind and weights.any()):
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(logits)))
    # A sigmoid of -200 is 0 in fp32, which leaves a tie. Where scores differ, the best logits are chosen.
    scores = logits.sigmoid() if kind.get("score") == "sigmoid" else logits.softmax(-1)
    if "groups" not in kind and all(len(set(row)) == 8 for row in scores.tolist()):
        best = logits.sort(-1, descending=True).values[:, :top_k]
        assert torch.equal(logits.gather(-1, experts).sort(-1, descending=True).values, best)


def test_router_dtype():
    """fp32 logits in a bf16 model are those of an fp32 matmul, "model" rounds them to bf16; the scores never are."""
    torch.manual_seed(0)
    x = torch.randn(5, 32).bfloat16()
    for dtype in ("float32", "model"):
        router = Router(32, moe_spec(router_dtype=dtype, router_bias=True), layer=0).bfloat16()
        exact = x.double() @ router.gate.weight.double().T + router.gate.bias.double()
        routing = router(x)
        assert routing.logits.dtype == routing.weights.dtype == torch.float32
        error = (routing.logits.double() - exact).abs().max()
        rounded = torch.equal(routing.logits, routing.logits.bfloat16().float())
        assert (error < 1e-6 and not rounded) if dtype == "float32" else (error > 1e-4 and rounded)
