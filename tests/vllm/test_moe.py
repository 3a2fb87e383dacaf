"""Mixtures of experts in the engine: fused kernels and the torch path compute what the torch model computes.

Measured in fp32: 2e-7 to 4e-7 relative, on either path.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, random_tokens, titan_error_text
from tests.vllm.conftest import chunks_of, engine_model, error_against_torch, generate
from tests.vllm.models import TINY, Llama
from tests.vllm.moe_models import (
    DEEPSEEK,
    GPT_OSS,
    OWN,
    TORCH,
    VARIANTS,
    VLLM,
    FreeMoE,
    OwnBlock,
    OwnRouter,
    tie_experts,
)
from titan_adapters.nn import InnerExperts
from titan_adapters.vllm.moe import EngineExperts, EngineMoE

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]

TOLERANCE = 1e-5


def served(start, folder: Path, model: ta.BaseTransformer, experts: str = "auto", **options: Any) -> Any:
    ta.register_model(type(model))
    ta.save_checkpoint(model, folder, overwrite=True)
    return start(checkpoint=folder, additional_config={"titan_experts": experts}, **options)


def prompts(model: ta.BaseTransformer, *lengths: int) -> list[list[int]]:
    return [random_tokens(model.config, length, seed=length).tolist() for length in lengths]


def path_taken(llm: Any) -> str:
    modules = list(engine_model(llm).modules())
    for module in modules:
        if isinstance(module, EngineMoE):
            own = getattr(module.vllm_router, "custom_routing_function", None) is not None
            return OWN if own else VLLM
    if any(isinstance(module, EngineExperts) for module in modules):
        return "fused experts"
    assert [module.kernel for module in modules if isinstance(module, InnerExperts)] == ["grouped"]
    return TORCH


@pytest.mark.parametrize("experts", ["auto", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_engine_equals_torch(start, tmp_path, variant, experts):
    expected, changes = VARIANTS[variant]
    model = random_model(FreeMoE, FreeMoE.config(**changes))
    llm = served(start, tmp_path, model, experts)
    assert path_taken(llm) == (expected if experts == "auto" else TORCH)
    outputs = generate(llm, prompts(model, 72, 1, 2, 3))
    assert error_against_torch(model, outputs) < TOLERANCE
    with chunks_of(llm, 7):
        assert error_against_torch(model, generate(llm, prompts(model, 40))) < TOLERANCE
    # The comparison can fail: one weight of one expert in a hundred matters.
    with torch.no_grad():
        model.layers[1].moe.experts.w2[0, 0, 0] += 2
    assert error_against_torch(model, outputs) > TOLERANCE


@pytest.mark.parametrize("cls", [OwnRouter, OwnBlock])
def test_own_router_and_own_block_keep_their_forward(start, tmp_path, cls):
    model = random_model(cls, cls.config())
    llm = served(start, tmp_path, model)
    assert path_taken(llm) == "fused experts"
    assert error_against_torch(model, generate(llm, prompts(model, 40, 3))) < TOLERANCE


@pytest.mark.parametrize("cls", [FreeMoE, OwnRouter, OwnBlock], ids=lambda cls: cls.__name__)
def test_kernels_get_weights_without_gaps(start, tmp_path, cls):
    """vLLM's Triton kernel, for one, reads weights [T, K] as if they were, and says nothing."""
    model = random_model(cls, cls.config(top_k=3, scaling_factor=2.0))
    llm = served(start, tmp_path, model)
    chosen = []
    for module in engine_model(llm).modules():
        if isinstance(module, EngineMoE | EngineExperts):
            router = module.runner.router
            original = router.custom_routing_function
            router.custom_routing_function = lambda call=original, **kwargs: chosen.append(call(**kwargs)) or chosen[-1]
    generate(llm, prompts(model, 40))
    assert {tuple(weights.shape) for weights, _ in chosen} >= {(40, 3)}
    assert all(tensor.is_contiguous() for choice in chosen for tensor in choice)


def test_an_expert_without_tokens_and_one_with_all(start, tmp_path):
    model = random_model(FreeMoE, FreeMoE.config(router_bias=True))
    with torch.no_grad():
        model.layers[1].moe.router.gate.bias[:2] = torch.tensor([1e4, -1e4])
    with ta.nn.record_routing(model) as record:
        model(torch.tensor(prompts(model, 40)))
    counts = record.counts(8)[1]
    assert counts[0] == 40 and counts[1] == 0
    for experts in ("auto", "torch"):
        llm = served(start, tmp_path / experts, model, experts)
        assert error_against_torch(model, generate(llm, prompts(model, 40, 1))) < TOLERANCE


@pytest.mark.parametrize("variant", ["softmax", "sigmoid with bias, best groups"])
@pytest.mark.parametrize("case", ["tied", "near-tied", "all negative"])
@pytest.mark.parametrize("experts", ["auto", "torch"])
def test_hard_router_logits(start, tmp_path, experts, variant, case):
    """Two implementations may choose differently among equals; given the choice, they compute the same."""
    model = random_model(FreeMoE, FreeMoE.config(**VARIANTS[variant][1] | {"router_bias": True}))
    if case == "all negative":
        with torch.no_grad():
            model.layers[1].moe.router.gate.bias.fill_(-60.0)
    else:
        tie_experts(model, by=2**-9 if case == "near-tied" else 0.0)
    llm = served(start, tmp_path, model, experts, enable_prefix_caching=False)
    with ta.vllm.record_routing(llm) as recorded:
        outputs = generate(llm, prompts(model, 40, 1))
    for output in outputs:
        chosen = recorded.of(output)
        assert all(len(set(row.tolist())) == 2 for row in chosen[1])
        tokens = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])[:-1]
        with ta.nn.record_routing(model) as ours, ta.nn.replay_routing(model, chosen):
            ours_logits = model(tokens)
        assert torch.isfinite(ours_logits).all()
        # What the engine chose is among the best, by torch's own scores.
        router = model.layers[1].moe.router
        scores = ours.layers[1][0].logits
        if variant == "softmax":
            worst, kth = scores.gather(-1, chosen[1]).amin(-1), scores.topk(router.spec.top_k).values[:, -1]
            assert (worst >= kth - 1e-4).all()
    with replayed(model, recorded, outputs):
        assert error_against_torch(model, outputs) < TOLERANCE


class replayed:
    """Let `error_against_torch`, which runs one output after the other, take the engine's choices."""

    def __init__(self, model: ta.BaseTransformer, recorded: Any, outputs: list[Any]):
        self._model, self._chosen = model, [recorded.of(output) for output in outputs]

    def __enter__(self) -> None:
        forward, chosen = type(self._model).forward, iter(self._chosen)

        def replaying(tokens: torch.Tensor) -> torch.Tensor:
            choice = next(chosen)
            # The last generated token was not fed to the engine; torch's row for it is not compared.
            choice = {layer: torch.cat([experts, experts[-1:]]) for layer, experts in choice.items()}
            with ta.nn.replay_routing(self._model, choice):
                return forward(self._model, tokens)

        self._model.forward = replaying

    def __exit__(self, *_: Any) -> None:
        del self._model.forward


@pytest.mark.parametrize("experts", ["auto", "torch"])
@pytest.mark.parametrize("changes", [DEEPSEEK, {"bias": True, "activation": GPT_OSS}], ids=["deepseek", "gpt-oss"])
def test_live_updates(start, tmp_path, experts, changes):
    """All weights, in any order, and one layer alone; vLLM would leave fused experts in the wrong layout on the CPU."""
    config = FreeMoE.config(**changes)
    one, two = random_model(FreeMoE, config), random_model(FreeMoE, config, seed=1)
    llm = served(start, tmp_path / "one", one, experts)
    ta.save_checkpoint(two, tmp_path / "two")

    def reload(**kwargs: Any) -> list[Any]:
        llm.collective_rpc("reload_weights", kwargs=kwargs)
        llm.reset_prefix_cache()
        return generate(llm, prompts(one, 40, 3))

    assert error_against_torch(two, reload(weights_path=str(tmp_path / "two"))) < TOLERANCE
    weights = sorted(one.state_dict().items(), reverse=True)
    assert error_against_torch(one, reload(weights_iterator=iter(weights))) < TOLERANCE
    layer = {name: tensor for name, tensor in two.state_dict().items() if name.startswith("layers.1.moe")}
    outputs = reload(weights_iterator=iter(layer.items()))
    one.load_state_dict(layer, strict=False)
    assert error_against_torch(one, outputs) < TOLERANCE


@pytest.mark.parametrize("experts", ["auto", "torch"])
def test_correction_bias_stays_fp32_in_a_bf16_engine(start, tmp_path, experts):
    config = FreeMoE.config(**DEEPSEEK).model_copy(update={"dtype": "bfloat16"})
    model = random_model(FreeMoE, config)
    router = model.layers[1].moe.router
    # Around 4, one bf16 step is 1/32: rounded, these are equal, and no longer decide between scores that nearly are.
    router.correction_bias.copy_(4 + torch.arange(8) / 1024)
    with torch.no_grad():
        router.gate.weight *= 1e-3
    exact = router.correction_bias.clone()
    assert exact.bfloat16().unique().numel() == 1
    llm = served(start, tmp_path / "one", model, experts)
    engines = engine_model(llm).backbone.model.layers[1].moe.router.correction_bias
    assert engines.dtype == torch.float32 and torch.equal(engines, exact)
    router.correction_bias.copy_(exact.flip(0))
    ta.save_checkpoint(model, tmp_path / "two")
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path / "two")})
    assert torch.equal(engines, exact.flip(0))
    llm.reset_prefix_cache()
    assert error_against_torch(model, generate(llm, prompts(model, 40))) < 0.01
    # Seeded fault: with the bias rounded to bf16, the same comparison fails.
    router.correction_bias.copy_(exact.flip(0).bfloat16())
    assert error_against_torch(model, generate(llm, prompts(model, 40))) > 0.02


def test_what_can_not_be_served(start, tmp_path):
    model = random_model(FreeMoE, FreeMoE.config(gated=False))
    with pytest.raises(ta.TitanError, match=r"layers.1.moe.experts has no fused kernel here: .* are gated") as caught:
        served(start, tmp_path, model, "fused")
    titan_error_text(caught)
    with pytest.raises(ta.TitanError, match="is 'fastest'") as caught:
        served(start, tmp_path, model, "fastest")
    titan_error_text(caught)


def test_what_can_not_be_recorded(start, tmp_path):
    dense = served(start, tmp_path / "dense", random_model(Llama, TINY))
    with pytest.raises(ta.TitanError, match="no mixture of experts") as caught, ta.vllm.record_routing(dense):
        pass
    titan_error_text(caught)
    model = random_model(FreeMoE, FreeMoE.config())
    llm = served(start, tmp_path / "moe", model)
    before = generate(llm, prompts(model, 72), prompt_logprobs=False)
    with ta.vllm.record_routing(llm) as recorded:
        outputs = generate(llm, prompts(model, 72), prompt_logprobs=False)
    for output, text in [(outputs[0], "64 tokens of request .* is missing"), (before[0], "was not recorded")]:
        with pytest.raises(ta.TitanError, match=text) as caught:
            recorded.of(output)
        titan_error_text(caught)
