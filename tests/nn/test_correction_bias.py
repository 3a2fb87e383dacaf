"""A router's correction bias is fp32, bit for bit, whatever is done to its model."""

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import titan_adapters as ta
from tests.conftest import random_model, random_tokens, titan_error_text
from tests.nn.test_routing import moe_spec
from titan_adapters.checkpoint import convert_checkpoint
from titan_adapters.nn import Router

# Correction biases around 5 that differ by 2**-10: bf16's step is 2**-5 there, so that rounding makes them one.
BIAS = 5 + torch.arange(8) / 1024


class BiasedConfig(ta.get_model("qwen3_moe").Config):
    def feed_forward(self, layer):
        return super().feed_forward(layer).model_copy(update={"score": "sigmoid", "correction_bias": True})


class Biased(ta.get_model("qwen3_moe")):
    """Qwen3 MoE with a correction bias, which is published as GLM's is."""

    model_type = "biased"
    Config = BiasedConfig

    @classmethod
    def from_hf_config(cls, hf):
        return BiasedConfig.from_json(super().from_hf_config(hf).to_json())

    @classmethod
    def to_hf_config(cls, config):
        return super().to_hf_config(config) | {"model_type": "biased"}


BUFFER = "layers.1.moe.router.correction_bias"


def biased_model() -> ta.BaseTransformer:
    tiny = next(iter(ta.get_model("qwen3_moe").tiny_configs().values()))
    config = BiasedConfig.from_json(tiny.to_json() | {"dtype": "bfloat16"})
    model = random_model(Biased, config)
    for layer in model.layers:
        layer.moe.router.correction_bias.copy_(BIAS)
    return model


def assert_exact(bias: Tensor) -> None:
    assert bias.dtype == torch.float32 and torch.equal(bias.cpu(), BIAS)


def test_these_biases_would_show_a_rounding():
    assert BIAS.bfloat16().unique().numel() == 1 and BIAS.half().unique().numel() < 8
    spec = moe_spec(num_experts=8, score="sigmoid", correction_bias=True)
    logits = torch.zeros(1, 8)
    experts, _ = ta.nn.choose_experts(spec, logits, BIAS)
    assert sorted(experts[0].tolist()) == [6, 7]
    lowered = BIAS.clone()
    lowered[7] -= 3 / 1024
    assert sorted(ta.nn.choose_experts(spec, logits, lowered)[0][0].tolist()) == [5, 6]
    rounded = [ta.nn.choose_experts(spec, logits, bias.bfloat16().float())[0] for bias in (BIAS, lowered)]
    assert torch.equal(*rounded), "rounded, the two biases are the same"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.half().bfloat16().float(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.bfloat16().to(device="cpu"),
    ],
)
def test_correction_bias_survives_casts(change):
    model = change(biased_model())
    assert_exact(model.get_buffer(BUFFER))
    router = Router(8, moe_spec(num_experts=8, correction_bias=True), layer=0)
    router.correction_bias.copy_(BIAS)
    assert_exact(change(router).correction_bias)


def test_correction_bias_on_the_meta_device():
    config = biased_model().config
    with torch.device("meta"):
        model = Biased(config)
    model = model.bfloat16()
    assert model.get_buffer(BUFFER).is_meta and model.get_buffer(BUFFER).dtype == torch.float32
    model.to_empty(device="cpu")
    assert model.get_buffer(BUFFER).dtype == torch.float32
    model.load_state_dict(biased_model().state_dict())
    assert_exact(model.get_buffer(BUFFER))


@pytest.mark.parametrize("format", ["native", "hf"])
def test_correction_bias_in_checkpoints(format, tmp_path, no_registrations_left):
    """Saved, loaded, and converted back and forth, it stays fp32, bit for bit; the weights are bf16."""
    ta.register_model(Biased)
    model = biased_model().bfloat16()
    ta.save_checkpoint(model, tmp_path / "saved", format)
    other = "hf" if format == "native" else "native"
    names = {"native": BUFFER, "hf": "model.layers.1.mlp.gate.e_score_correction_bias"}
    convert_checkpoint(tmp_path / "saved", tmp_path / "other", other)
    for folder, name in (("saved", names[format]), ("other", names[other])):
        with safe_open(next((tmp_path / folder).glob("*.safetensors")), "pt") as file:
            assert_exact(file.get_tensor(name))
            assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
        loaded = ta.load_model(tmp_path / "saved", dtype=dtype)
        assert_exact(loaded.get_buffer(BUFFER))
        assert loaded.lm_head.weight.dtype == (dtype or torch.bfloat16)
    tokens = random_tokens(model.config, 5)
    assert torch.equal(ta.load_model(tmp_path / "saved")(tokens), model(tokens))


def test_a_bias_that_is_not_fp32_is_not_saved(tmp_path):
    model = biased_model().bfloat16()
    model.layers[1].moe.router.correction_bias = BIAS.bfloat16()
    with pytest.raises(ta.TitanError, match="The config says bfloat16, but") as caught:
        ta.save_checkpoint(model, tmp_path / "rounded")
    titan_error_text(caught)
    assert caught.value.problems == [f"{BUFFER} is torch.bfloat16"]
    with pytest.raises(AssertionError):
        assert_exact(BIAS.bfloat16().float())
