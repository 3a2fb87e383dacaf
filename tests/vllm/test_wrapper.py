"""Inside the engine: which layers a model gets, and how weights are written into them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import EVERY_MODEL, random_model, random_tokens, titan_error_text
from tests.vllm.conftest import engine_model, error_against_torch, generate
from tests.vllm.models import TINY, Free, Halves, Llama, OwnParts, ReplicatedOutput
from titan_adapters.checkpoint import open_weights
from titan_adapters.state_dict import native_tensors

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]

TOLERANCE = 1e-5


def prompts(config: ta.TransformerConfig) -> list[list[int]]:
    return [random_tokens(config, length, seed=length).tolist() for length in (40, 3)]


def saved(model: ta.BaseTransformer, path: Path) -> Path:
    ta.register_model(type(model))
    ta.save_checkpoint(model, path / model.model_type)
    return path / model.model_type


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    return open_weights(folder).tensors()


# ----- layers


@pytest.mark.parametrize("config", [pytest.param(c, id=name) for name, c in Free.tiny_configs().items()])
def test_every_spec_field_is_honoured(start, tmp_path, config):
    model = random_model(Free, config)
    llm = start(checkpoint=saved(model, tmp_path))
    assert error_against_torch(model, generate(llm, prompts(config))) < TOLERANCE
    # Each field counts: with any one of them changed, torch gives something else.
    for field, value in {"scale": 0.51, "softcap": 2.1, "window": 6, "activation": "silu"}.items():
        other = Free(config.model_copy(update={field: value})).eval()
        other.load_state_dict(model.state_dict())
        assert error_against_torch(other, generate(llm, prompts(config))) > TOLERANCE, field


def test_exact_types_are_packed_and_planned(start, tmp_path):
    model = random_model(Llama, TINY)
    llm = start(checkpoint=saved(model, tmp_path))
    layer = engine_model(llm).backbone.model.layers[0]
    assert {path: type(module).__name__ for path, module in layer.named_modules() if path} == {
        "attention_norm": "RMSNorm",
        "attention": "Attention",
        "attention.qkv_linear": "EngineQKVLinear",
        "attention.qkv_linear.packed": "QKVParallelLinear",
        "attention.rope": "Rope",
        "attention.norm_rope": "NormRope",
        "attention.inner_attention": "EngineAttention",
        "attention.inner_attention.attn": "Attention",
        "attention.wo": "RowParallelLinear",
        "ffn_norm": "RMSNorm",
        "feed_forward": "EngineFeedForward",
        "feed_forward.w13": "MergedColumnParallelLinear",
        "feed_forward.w2": "RowParallelLinear",
        "feed_forward.act": "SiluAndMul",
    }
    outside = engine_model(llm).backbone.model
    assert type(outside.tok_embeddings).__name__ == "VocabParallelEmbedding"
    assert type(outside.lm_head.head).__name__ == "ParallelLMHead"


def test_subclasses_keep_their_forward(start, tmp_path):
    model = random_model(OwnParts, TINY)
    llm = start(checkpoint=saved(model, tmp_path))
    layer = engine_model(llm).backbone.model.layers[1]
    assert [type(layer.attention.qkv_linear).__name__, type(layer.feed_forward).__name__] == ["TwiceValue", "Residual"]
    linears = [getattr(layer.attention.qkv_linear, f"w{p}") for p in "qkv"] + [layer.feed_forward.w1]
    assert {type(linear).__name__ for linear in linears} == {"ColumnParallelLinear"}
    assert error_against_torch(model, generate(llm, prompts(TINY))) < TOLERANCE


def test_plan_rows_decide_the_layer(start, tmp_path):
    config = TINY.model_copy(update={"attention_bias": True})
    model = random_model(ReplicatedOutput, config)
    llm = start(checkpoint=saved(model, tmp_path))
    attention = engine_model(llm).backbone.model.layers[0].attention
    found = [type(m).__name__ for m in (attention.wo, attention.qkv_linear.wv, attention.qkv_linear.wq)]
    assert found == ["ReplicatedLinear", "ReplicatedLinear", "ColumnParallelLinear"]
    assert error_against_torch(model, generate(llm, prompts(config))) < TOLERANCE


# ----- writing weights


@pytest.mark.parametrize(("cls", "config"), EVERY_MODEL)
def test_a_load_names_exactly_the_engines_parameters(start, unloaded, tmp_path, cls, config):
    model = random_model(cls, config)
    folder = saved(model, tmp_path)
    fresh = unloaded(folder)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(float("nan"))
    written = fresh.load_weights(tensors(folder))
    biases = {name for name, _ in fresh.named_buffers() if name.endswith("correction_bias")}
    assert written == {name for name, _ in fresh.named_parameters()} | biases
    assert not any(p.isnan().any() for p in fresh.parameters())
    if config.tied_embeddings:
        assert fresh.backbone.model.lm_head.head.weight is fresh.backbone.model.tok_embeddings.weight


def test_a_first_load_must_balance_and_lists_everything(unloaded, tmp_path):
    folder = saved(random_model(Llama, TINY), tmp_path)
    good = dict(tensors(folder))
    missing, misshapen = "layers.2.attention.wo.weight", "layers.1.feed_forward.w2.weight"
    weights = [(name, tensor) for name, tensor in good.items() if name != missing]
    weights += [("stray.weight", torch.zeros(3)), ("norm.weight", good["norm.weight"])]
    weights = [(name, tensor.T.contiguous() if name == misshapen else tensor) for name, tensor in weights]
    with pytest.raises(ta.TitanError) as caught:
        unloaded(folder).load_weights(weights)
    text = titan_error_text(caught)
    for problem in (
        f"missing tensor {missing}",
        f"{misshapen} has shape (80, 48), the model needs (48, 80)",
        "unexpected tensor stray.weight (3,)",
        "norm.weight came twice",
    ):
        assert problem in text
    assert len(caught.value.problems) == 4
    # A refused first load is not taken for the first load.
    again = unloaded(folder)
    with pytest.raises(ta.TitanError):
        again.load_weights(weights[:5])
    with pytest.raises(ta.TitanError):
        again.load_weights(weights[:5])


def test_later_loads_may_be_partial(unloaded, tmp_path):
    folder = saved(random_model(Llama, TINY), tmp_path)
    model = unloaded(folder)
    model.load_weights(tensors(folder))
    before = {name: p.clone() for name, p in model.named_parameters()}
    update = {n: t + 1 for n, t in tensors(folder) if "layers.1.attention.qkv_linear" in n or n == "norm.weight"}
    packed = "backbone.model.layers.1.attention.qkv_linear.packed.weight"
    assert model.load_weights(list(update.items())[:2]) == {packed}
    assert model.load_weights(list(update.items())[2:]) == {packed, "backbone.model.norm.weight"}
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {packed, "backbone.model.norm.weight"}
    assert torch.equal(dict(model.named_parameters())[packed], before[packed] + 1)
    for bad in ([("norm.weight", torch.zeros(3))], [("stray", torch.zeros(3))], [("norm.weight", torch.zeros(48))] * 2):
        with pytest.raises(ta.TitanError):
            model.load_weights(bad)


def test_halves_of_a_row_may_come_in_different_loads(unloaded, tmp_path):
    reference = random_model(Halves, TINY)
    folder = saved(reference, tmp_path)
    model = unloaded(folder, names="hf")
    published = reference.state_dict_adapter(TINY).to_hf(native_tensors(reference))
    model.load_weights(published.items())
    w1 = model.backbone.model.layers[0].feed_forward.w13.weight
    assert torch.equal(w1[:80], reference.layers[0].feed_forward.w1.weight)
    top, bottom = torch.full((40, 48), 1.0), torch.full((40, 48), 2.0)
    assert model.load_weights([("w1.0.bottom", bottom)]) == set()
    assert torch.equal(w1[:80], reference.layers[0].feed_forward.w1.weight)
    model.load_weights([("w1.0.top", top)])
    assert torch.equal(w1[:80], torch.cat([top, bottom]))
    with pytest.raises(ta.TitanError, match=r"missing tensor w1\.0\.top"):
        unloaded(folder, names="hf").load_weights((n, t) for n, t in published.items() if n != "w1.0.top")
