"""Experts in every published layout, against values written by index and against transformers' own modules."""

from itertools import product

import pytest
import torch

import titan_adapters as ta
from tests.conftest import titan_error_text
from tests.state_dict.conftest import both_ways

GATE, DOWN, UP = 1, 2, 3
SHAPES = {"odd": (2, 3, 4), "F == D": (2, 3, 3), "E == F == D": (2, 2, 2), "E == F": (3, 3, 2), "2F == D": (2, 2, 4)}
"""(E, F, D)"""
shapes = pytest.mark.parametrize(("E", "F", "D"), SHAPES.values(), ids=SHAPES)


def weight(projection: int, e: int, f: int, d: int) -> int:
    """Of the connection between hidden channel f and model channel d of expert e."""
    return 1000 * projection + 100 * e + 10 * f + d


def bias(projection: int, e: int, channel: int) -> int:
    return -weight(projection, e, channel, 9)


def native_experts(E: int, F: int, D: int, biases: bool, gated: bool = True) -> dict:
    """Nested lists in the native layout."""
    first = GATE if gated else UP
    tensors = {
        "l.7.w1": [[[weight(first, e, f, d) for d in range(D)] for f in range(F)] for e in range(E)],
        "l.7.w3": [[[weight(UP, e, f, d) for d in range(D)] for f in range(F)] for e in range(E)],
        "l.7.w2": [[[weight(DOWN, e, f, d) for f in range(F)] for d in range(D)] for e in range(E)],
    }
    if biases:
        tensors["l.7.b1"] = [[bias(first, e, f) for f in range(F)] for e in range(E)]
        tensors["l.7.b3"] = [[bias(UP, e, f) for f in range(F)] for e in range(E)]
        tensors["l.7.b2"] = [[bias(DOWN, e, d) for d in range(D)] for e in range(E)]
    return {name: values for name, values in tensors.items() if gated or not name.endswith("3")}


def table(layout, biases: bool, E: int, layers=(7,)) -> ta.StateDictAdapter:
    rows = ta.expert_rows("m.{layer}", "l.{layer}", layout=layout, bias=biases)
    return ta.StateDictAdapter(*rows, layer=layers, expert=range(E))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), (None, "up", "down")])
@shapes
def test_one_tensor_per_expert(E, F, D, names, biases):
    gate, up, down = names
    published = {}
    for e in range(E):
        for name, projection in ((gate, GATE), (up, UP)):
            if name is not None:
                published[f"m.7.{e}.{name}.weight"] = [
                    [weight(projection, e, f, d) for d in range(D)] for f in range(F)
                ]
                published[f"m.7.{e}.{name}.bias"] = [bias(projection, e, f) for f in range(F)]
        published[f"m.7.{e}.{down}.weight"] = [[weight(DOWN, e, f, d) for f in range(F)] for d in range(D)]
        published[f"m.7.{e}.{down}.bias"] = [bias(DOWN, e, d) for d in range(D)]
    if not biases:
        published = {name: values for name, values in published.items() if name.endswith("weight")}
    layout = ta.PerExpert(gate=gate, up=up, down=down)
    rows = ta.expert_rows("m.{layer}", "l.{layer}", layout=layout, bias=biases)
    both_ways(rows, published, native_experts(E, F, D, biases, gated=gate is not None), layer=[7], expert=range(E))


@pytest.mark.parametrize(("gate_up_transposed", "down_transposed"), list(product([False, True], repeat=2)))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("order", ["gate_up", "up_gate", "up"])
@shapes
def test_stacked(E, F, D, order, interleaved, gate_up_transposed, down_transposed):
    first, second = {"gate_up": (GATE, UP), "up_gate": (UP, GATE), "up": (UP, None)}[order]
    if order == "up":
        along = [(UP, f) for f in range(F)]
    elif interleaved:
        along = [pair for f in range(F) for pair in ((first, f), (second, f))]
    else:
        along = [(first, f) for f in range(F)] + [(second, f) for f in range(F)]
    up = [[[weight(p, e, f, d) for d in range(D)] for p, f in along] for e in range(E)]
    if gate_up_transposed:
        up = [[[weight(p, e, f, d) for p, f in along] for d in range(D)] for e in range(E)]
    down = [[[weight(DOWN, e, f, d) for f in range(F)] for d in range(D)] for e in range(E)]
    if down_transposed:
        down = [[[weight(DOWN, e, f, d) for d in range(D)] for f in range(F)] for e in range(E)]
    name = "m.7.up_proj" if order == "up" else "m.7.gate_up_proj"
    published = {name: up, "m.7.down_proj": down}
    biases = {
        f"{name}_bias": [[bias(p, e, f) for p, f in along] for e in range(E)],
        "m.7.down_proj_bias": [[bias(DOWN, e, d) for d in range(D)] for e in range(E)],
    }
    layout = ta.StackedExperts(
        hidden_dim=F,
        order=order,
        interleaved=interleaved,
        gate_up_transposed=gate_up_transposed,
        down_transposed=down_transposed,
    )
    for with_bias in (False, True):
        rows = ta.expert_rows("m.{layer}", "l.{layer}", layout=layout, bias=with_bias)
        native = native_experts(E, F, D, with_bias, gated=order != "up")
        both_ways(rows, published | (biases if with_bias else {}), native, layer=[7])


GPT_OSS = dict(order="gate_up", interleaved=True, gate_up_transposed=True, down_transposed=True)
LLAMA4 = GPT_OSS | {"interleaved": False}
IN_MEMORY = LLAMA4 | {"gate_up_transposed": False, "down_transposed": False}


def test_gpt_oss_in_full():
    """One expert, F = 2, D = 3: columns of gate_up_proj are gate 0, up 0, gate 1, up 1."""
    both_ways(
        ta.expert_rows("m", "l", layout=ta.StackedExperts(hidden_dim=2, **GPT_OSS), bias=True),
        {
            "m.gate_up_proj": [[[10, 30, 20, 40], [11, 31, 21, 41], [12, 32, 22, 42]]],
            "m.gate_up_proj_bias": [[1, 3, 2, 4]],
            "m.down_proj": [[[50, 51, 52], [60, 61, 62]]],
            "m.down_proj_bias": [[5, 6, 7]],
        },
        {
            "l.w1": [[[10, 11, 12], [20, 21, 22]]],
            "l.w3": [[[30, 31, 32], [40, 41, 42]]],
            "l.w2": [[[50, 60], [51, 61], [52, 62]]],
            "l.b1": [[1, 2]],
            "l.b3": [[3, 4]],
            "l.b2": [[5, 6, 7]],
        },
    )


def transformers_experts(family: str, E: int, F: int, D: int) -> torch.nn.Module:
    """The module with random fp64 weights."""
    common = dict(hidden_size=D, intermediate_size=F, num_local_experts=E)
    if family == "gpt_oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

        module = GptOssExperts(GptOssConfig(**common))
    elif family == "llama4":
        from transformers.models.llama4.modeling_llama4 import Llama4TextConfig, Llama4TextExperts

        module = Llama4TextExperts(Llama4TextConfig(**common))
    else:
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

        module = MixtralExperts(MixtralConfig(**common))
    torch.manual_seed(0)
    module = module.double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize(
    ("family", "declared"), [("gpt_oss", GPT_OSS), ("llama4", LLAMA4), ("mixtral", IN_MEMORY)], ids=lambda v: str(v)[:8]
)
@shapes
@torch.no_grad()
def test_native_experts_compute_what_transformers_computes(E, F, D, family, declared):
    """Square experts too, where a wrong declaration would go unnoticed by shape."""
    module = transformers_experts(family, E, F, D)
    layout = ta.StackedExperts(hidden_dim=F, **declared)
    biased = family == "gpt_oss"
    rows = ta.expert_rows("m", "l", layout=layout, bias=biased)
    t = ta.StateDictAdapter(*rows).to_native({f"m.{n}": p for n, p in module.state_dict().items()})
    x = torch.randn(5, D, dtype=torch.float64)
    for e in range(E):
        gate, up = x @ t["l.w1"][e].T, x @ t["l.w3"][e].T
        if family == "gpt_oss":  # its model card's activation: clamped at 7, sigmoid steepened by 1.702
            gate, up = (gate + t["l.b1"][e]).clamp(max=7), (up + t["l.b3"][e]).clamp(-7, 7)
            expected = (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ t["l.w2"][e].T + t["l.b2"][e]
        else:
            expected = (torch.nn.functional.silu(gate) * up) @ t["l.w2"][e].T
        if family == "llama4":  # takes each expert's tokens in turn
            actual = module(x.repeat(E, 1)).view(E, 5, D)[e]
        else:
            actual = module(x, torch.full((5, 1), e), torch.ones(5, 1, dtype=torch.float64))
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_experts_of_a_layer_come_in_any_order_and_in_several_calls():
    """Last expert first, layers mixed: each native tensor appears once, with the call that completes it."""
    adapter = table(ta.PerExpert(gate="g", up="u", down="d"), False, E=3, layers=(0, 1))
    session = adapter.session("to_native")
    finished = {}
    for call, (e, layer) in enumerate(product((2, 0, 1), (1, 0))):
        for name in "gud":
            for ours, tensor in session.feed(f"m.{layer}.{e}.{name}.weight", torch.tensor([[10 * layer + e]])):
                finished[ours] = (call, tensor.flatten().tolist())
        assert session.pending == (call < 5)
    session.finish(partial=False)
    expected = {1: (4, [10, 11, 12]), 0: (5, [0, 1, 2])}
    assert finished == {f"l.{layer}.{w}": expected[layer] for layer in (0, 1) for w in ("w1", "w3", "w2")}


def test_lengths_that_do_not_fit_are_refused():
    for interleaved, transposed in product([False, True], repeat=2):
        layout = ta.StackedExperts(
            hidden_dim=3,
            order="gate_up",
            interleaved=interleaved,
            gate_up_transposed=transposed,
            down_transposed=transposed,
        )
        adapter = table(layout, True, E=2)
        for name, shape in (
            ("m.7.gate_up_proj", (2, 5, 8) if transposed else (2, 8, 5)),
            ("m.7.gate_up_proj_bias", (2, 8)),
        ):
            with pytest.raises(ta.TitanError, match=r"Fix: dim 1 must be 6\.") as caught:
                adapter.to_native({name: torch.zeros(shape)}, partial=True)
            assert f"Split(hf='{name.replace('7', '{layer}')}'" in titan_error_text(caught)
        with pytest.raises(ta.TitanError, match=r"lengths \[3, 4\] along dim 1\.\nFix: they must be \[3, 3\]\."):
            adapter.to_hf({"l.7.w1": torch.zeros(2, 3, 5), "l.7.w3": torch.zeros(2, 4, 5)}, partial=True)


def test_missing_halves_are_named():
    adapter = table(ta.PerExpert(gate="g", up="u", down="d"), False, E=2)
    with pytest.raises(ta.TitanError) as caught:
        adapter.to_native({"m.7.1.g.weight": torch.zeros(2, 2)}, partial=True)
    assert caught.value.problems == ["missing tensor m.7.0.g.weight"]
    titan_error_text(caught)
    adapter = table(ta.StackedExperts(hidden_dim=2, **GPT_OSS), False, E=2)
    with pytest.raises(ta.TitanError) as caught:
        adapter.to_hf({"l.7.w1": torch.zeros(2, 2, 2)}, partial=True)
    assert caught.value.problems == ["missing tensor l.7.w3"]


def test_unknown_order_is_refused():
    layout = ta.StackedExperts(hidden_dim=2, **GPT_OSS | {"order": "gate"})
    with pytest.raises(ta.TitanError, match=r"m\.gate_up_proj can't be cut in the order 'gate'") as caught:
        ta.expert_rows("m", "l", layout=layout, bias=False)
    titan_error_text(caught)
