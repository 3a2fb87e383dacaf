"""gpt-oss against transformers, with faults that are easily made: each of them must show in the logits."""

import pytest
import torch
from torch import Tensor

import titan_adapters as ta
from tests.conftest import random_model, random_tokens, relative_error

GptOss = ta.get_model("gpt_oss")
CONFIG = next(config for config in GptOss.tiny_configs().values() if config.swiglu.limit < 1)
"""The one whose gate clamps; it has a window and yarn too."""
TOKENS = random_tokens(CONFIG, 1, 80)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Tensor:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gpt_oss") / "published"
    ta.save_checkpoint(random_model(GptOss, CONFIG), folder, "hf")
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return theirs(TOKENS).logits


def without_sinks(layer):
    layer.attention.inner_attention.sinks = None


def sinks_of_other_heads(layer):
    sinks = layer.attention.inner_attention.sinks
    sinks.copy_(sinks.flip(0))


def gate_and_up_swapped(layer):
    experts = layer.moe.experts
    experts.w1, experts.w3, experts.b1, experts.b3 = experts.w3, experts.w1, experts.b3, experts.b1


def gate_and_up_halved(layer):
    """As if gate and up were one above the other, and not alternating."""
    experts = layer.moe.experts
    for gate, up in ((experts.w1, experts.w3), (experts.b1, experts.b3)):
        rows = torch.stack([gate, up], dim=2).flatten(1, 2)
        for part, half in zip((gate, up), rows.chunk(2, dim=1), strict=True):
            part.copy_(half)


def without_expert_biases(layer):
    for bias in (layer.moe.experts.b1, layer.moe.experts.b2, layer.moe.experts.b3):
        bias.zero_()


def without_router_bias(layer):
    layer.moe.router.gate.bias.zero_()


def gate(**changes):
    def fault(layer):
        experts = layer.moe.experts
        activation = experts.spec.activation.model_copy(update=changes)
        experts.spec = experts.spec.model_copy(update={"activation": activation})

    return fault


def plain_swiglu(layer):
    experts = layer.moe.experts
    experts.spec = experts.spec.model_copy(update={"activation": "silu"})


def softmax_over_all_experts(layer):
    layer.moe.router.spec = layer.moe.router.spec.model_copy(update={"score": "softmax"})


FAULTS = {
    "no sinks": without_sinks,
    "sinks of other heads": sinks_of_other_heads,
    "gate and up swapped": gate_and_up_swapped,
    "gate and up not interleaved": gate_and_up_halved,
    "no expert biases": without_expert_biases,
    "no router bias": without_router_bias,
    "alpha missing": gate(alpha=1.0),
    "limit missing": gate(limit=1e9),
    "SwiGLU of others": plain_swiglu,
    "softmax over all experts": softmax_over_all_experts,
}


@torch.no_grad()
def test_matches_transformers(reference):
    assert relative_error(random_model(GptOss, CONFIG)(TOKENS), reference) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_one_layer_shows(reference, fault):
    model = random_model(GptOss, CONFIG)
    fault(model.layers[1])
    assert relative_error(model(TOKENS), reference) > 1e-3


@torch.no_grad()
def test_a_truncated_ramp_of_yarn_shows(reference):
    scaling = CONFIG.rope.scaling.model_copy(update={"truncate": True})
    model = random_model(
        GptOss, CONFIG.model_copy(update={"rope": CONFIG.rope.model_copy(update={"scaling": scaling})})
    )
    assert relative_error(model(TOKENS), reference) > 1e-3
