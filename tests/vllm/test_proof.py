"""A running engine's weights are the model's: fingerprints, claims, and the faults that they find."""

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, titan_error_text
from tests.vllm.conftest import engine_model
from tests.vllm.models import TINY, FreeAttention, Llama
from titan_adapters.state_dict import native_tensors
from titan_adapters.testing import unique_fill
from titan_adapters.vllm import loader

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]

CLAIMS = ["readable", "covered", "copies agree", "no NaN", "padding is zero", "ties share memory", "equal"]
TORCH = {"additional_config": {"titan_experts": "torch"}}


def tiny(name: str, number: int, dtype: str) -> tuple[type[ta.BaseTransformer], ta.TransformerConfig]:
    cls = ta.get_model(name)
    return cls, list(cls.tiny_configs().values())[number].model_copy(update={"dtype": dtype})


def broken(rows: list[ta.vllm.ProofRow]) -> dict[str, list[str]]:
    """Claims that do not hold, and the names of what they don't hold for."""
    assert [row.claim for row in rows] == CLAIMS
    return {row.claim: [p.partition(": ")[0] for p in row.problems] for row in rows if row.verdict != "proven"}


def differing(llm: Any, model: ta.BaseTransformer) -> list[str]:
    lines = ta.fingerprint_differences(ta.vllm.fingerprint(llm), ta.fingerprint(model))
    return [line.partition(": ")[0] for line in lines]


@pytest.mark.parametrize(
    ("name", "number", "dtype", "options"),
    [
        ("llama", 1, "float32", {}),  # tied
        ("llama", 2, "bfloat16", {}),  # biases, one kv head
        ("gemma3_text", 0, "bfloat16", {}),
        ("qwen2", 0, "float16", {}),
        ("gpt_oss", 0, "bfloat16", {}),  # w1 and w3 interleaved, sinks
        ("gpt_oss", 0, "float16", TORCH),
        ("qwen3_moe", 0, "float32", {}),
        ("qwen3_moe", 0, "bfloat16", TORCH),
        ("glm4_moe", 0, "bfloat16", {}),  # a bias in fp32, shared experts
    ],
)
def test_published_weights_of_a_trainer_in_fp32_are_served(start, tmp_path, name, number, dtype, options):
    """Through the rows for published names, into engines that round, pack, pad and repack."""
    cls, config = tiny(name, number, dtype)
    trainer = unique_fill(cls(config))
    ta.save_checkpoint(trainer, tmp_path / "hf", "hf", cast=True)
    llm = start(checkpoint=tmp_path / "hf", **options)
    rows = ta.vllm.weight_proof(llm, trainer)
    assert broken(rows) == {}
    served = ta.vllm.fingerprint(llm)
    assert served == ta.fingerprint(tmp_path / "hf") == ta.fingerprint(trainer, dtype=getattr(torch, dtype))
    if config.tied_embeddings:
        details = {row.claim: row.detail for row in rows}
        assert details["ties share memory"] == "2 pairs"  # in the engine, and in the trainer's model
        # The embedding is looked up in one tensor, the head multiplies by a repacked copy.
        assert details["copies agree"] == "1 copies beside the first"


@pytest.fixture(scope="module")
def dense(start, tmp_path_factory) -> tuple[Any, ta.BaseTransformer]:
    """An engine of a tied model, and the model."""
    folder, config = tmp_path_factory.mktemp("dense"), Llama.tiny_configs()["tied, llama3 rope"]
    ta.register_model(Llama)
    model = random_model(Llama, config)
    ta.save_checkpoint(model, folder / "checkpoint")
    return start(checkpoint=folder / "checkpoint"), model


def test_one_element_changes_one_name(dense):
    llm, model = dense
    weight = engine_model(llm).backbone.model.layers[1].ffn_norm.weight.data
    before = weight[5].clone()
    for value, claims in [(before * (1 + 2**-20), ["equal"]), (torch.tensor(float("nan")), ["no NaN", "equal"])]:
        weight[5] = value
        rows = ta.vllm.weight_proof(llm, model)
        assert broken(rows) == {claim: ["layers.1.ffn_norm.weight"] for claim in claims}
    assert rows[3].problems == [
        "layers.1.ffn_norm.weight: 1 elements are NaN, from [5] to [5], in layers.1.ffn_norm.weight on rank 0"
    ]
    weight[5] = before
    assert broken(ta.vllm.weight_proof(llm, model)) == {}


def test_a_head_that_does_not_follow_its_embedding(dense):
    llm, model = dense
    embedding = engine_model(llm).backbone.model.tok_embeddings.weight.data
    embedding[7] += 1  # the head has repacked it
    rows = ta.vllm.weight_proof(llm, model)
    assert broken(rows) == {"copies agree": ["tok_embeddings.weight"], "equal": ["tok_embeddings.weight"]}
    assert rows[2].problems == [
        "tok_embeddings.weight: unknown: lm_head.head.weight on rank 0 holds something else than "
        "tok_embeddings.weight on rank 0"
    ]
    embedding[7] = model.tok_embeddings.weight.data[7]
    embedding[-1, 0] = 3  # padding
    name = "tok_embeddings.weight on rank 0"
    assert broken(ta.vllm.weight_proof(llm, model)) == {"padding is zero": [name]}
    embedding[-1, 0] = 0


def test_untied_memory_is_found(dense):
    llm, model = dense
    head = engine_model(llm).backbone.model.lm_head.head
    shared, head.weight = head.weight, torch.nn.Parameter(head.weight.clone())
    assert broken(ta.vllm.weight_proof(llm, model)) == {
        "ties share memory": ["tok_embeddings.weight and lm_head.head.weight are two tensors"]
    }
    head.weight = shared
    untied = random_model(Llama, model.config)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    assert broken(ta.vllm.weight_proof(llm, untied)) == {
        "ties share memory": ["tok_embeddings.weight and lm_head.weight of the model are two tensors"],
        "equal": ["lm_head.weight"],
    }


def test_live_updates_are_followed(dense):
    llm, model = dense
    other = random_model(Llama, model.config, seed=5)
    weights = {name: tensor.detach() for name, tensor in native_tensors(other).items()}

    def reload(changed: dict[str, torch.Tensor]) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter((weights | changed).items())})

    assert set(differing(llm, other)) == set(weights)
    reload({})
    assert differing(llm, other) == []
    # Two heads exchanged, in a layer that packs q, k and v.
    k = "layers.1.attention.qkv_linear.wk.weight"
    heads = weights[k].unflatten(0, (model.config.attention(1).num_kv_heads, -1))
    reload({k: heads.flip(0).flatten(0, 1)})
    assert differing(llm, other) == [k]
    reload({name: tensor.detach() for name, tensor in native_tensors(model).items()})
    assert differing(llm, model) == []


def experts_engine(start, folder, **options: Any) -> tuple[Any, ta.BaseTransformer, Any]:
    cls, config = tiny("gpt_oss", 0, "bfloat16")
    model = random_model(cls, config)
    ta.save_checkpoint(model, folder / "checkpoint")
    llm = start(checkpoint=folder / "checkpoint", **options)
    return llm, model, engine_model(llm).backbone.model.layers[1].moe.runner.routed_experts


def test_faults_among_experts(start, tmp_path):
    llm, model, experts = experts_engine(start, tmp_path)
    prefix = "layers.1.moe.experts."
    for parameter, names in (("w2_weight", ["w2"]), ("w13_weight", ["w1", "w3"]), ("w13_bias", ["b1", "b3"])):
        packed = getattr(experts, parameter).data
        packed[[0, 1]] = packed[[1, 0]]
        assert differing(llm, model) == [f"{prefix}{name}" for name in names]
        packed[[0, 1]] = packed[[1, 0]]
    attention = engine_model(llm).backbone.model.layers[0].attention.inner_attention
    kept, attention.attn.impl.sinks = attention.attn.impl.sinks, attention.sinks.data + 1
    name = ["layers.0.attention.inner_attention.sinks"]
    assert broken(ta.vllm.weight_proof(llm, model)) == {"copies agree": name, "equal": name}
    attention.attn.impl.sinks = kept
    assert differing(llm, model) == []


def test_layouts_of_other_kernels(start, tmp_path):
    """Those that vLLM has no code for on a CPU, laid out here by hand."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    cls, config = tiny("qwen3_moe", 0, "float32")
    model = random_model(cls, config)
    ta.save_checkpoint(model, tmp_path / "checkpoint")
    llm = start(checkpoint=tmp_path / "checkpoint")
    runners = [layer.moe.runner.routed_experts for layer in engine_model(llm).backbone.model.layers if layer.moe]
    ours = [layer.moe.experts for layer in model.layers if layer.moe]

    def lay_out(backend: UnquantizedMoeBackend, *order: str) -> None:
        for experts, native in zip(runners, ours, strict=True):
            experts.quant_method.unquantized_backend = backend
            w13 = torch.cat([getattr(native, name).detach() for name in order], dim=1)
            experts.w13_weight = torch.nn.Parameter(w13, requires_grad=False)
            experts.w2_weight = torch.nn.Parameter(native.w2.detach().clone(), requires_grad=False)

    w13 = [f"layers.{i}.moe.experts.w{n}" for i, layer in enumerate(model.layers) if layer.moe for n in (1, 3)]
    lay_out(UnquantizedMoeBackend.TRITON, "w1", "w3")
    assert differing(llm, model) == []
    lay_out(UnquantizedMoeBackend.TRITON, "w3", "w1")
    assert differing(llm, model) == w13
    lay_out(UnquantizedMoeBackend.FLASHINFER_CUTLASS, "w3", "w1")
    assert differing(llm, model) == []
    lay_out(UnquantizedMoeBackend.FLASHINFER_CUTLASS, "w1", "w3")
    assert differing(llm, model) == w13
    lay_out(UnquantizedMoeBackend.AITER, "w1", "w3")
    served = ta.vllm.fingerprint(llm)
    place = f"{w13[0].removesuffix('experts.w1')}runner.routed_experts.w13_weight on rank 0"
    assert served[w13[0]] == (
        f"unknown: not readable here: {place}: vLLM's ROCm AITER kernel keeps experts in a layout of its own"
    )
    unknown = sorted([*w13, *(name.replace("w1", "w2") for name in w13[::2])])
    assert [line.partition(": ")[0] for line in ta.fingerprint_differences(served, served)] == unknown
    rows = ta.vllm.weight_proof(llm, model)
    assert {row.verdict for row in rows} == {"not proven"} and broken(rows)["equal"] == unknown


def test_poison_shows_what_a_load_leaves_out(start, tmp_path):
    ta.register_model(FreeAttention)
    model = random_model(FreeAttention, FreeAttention.config({"sinks": True}, {}))
    ta.save_checkpoint(model, tmp_path / "checkpoint")
    poisoned = {"checkpoint": tmp_path / "checkpoint", "additional_config": {"titan_poison": True}}
    assert differing(start(**poisoned), model) == []
    original, wk = loader.write_one, "layers.1.attention.qkv_linear.wk.weight"

    def leave_out(parameter, name, tensor, shard):
        """Everything but some elements of two tensors."""
        kept = parameter.detach().clone()
        original(parameter, name, tensor, shard)
        if name == "layers.0.ffn_norm.weight":
            parameter.data[3:5] = kept[3:5]
        if name.startswith("layers.1.attention.qkv_linear") and shard == "k":
            parameter.data.copy_(kept)

    with (
        mock.patch.object(loader, "write_one", leave_out),
        pytest.raises(ta.TitanError, match="NaN is left of what additional_config") as caught,
    ):
        start(**poisoned)
    titan_error_text(caught)
    rows, columns = (size - 1 for size in model.get_parameter(wk).shape)
    assert sorted(caught.value.problems) == [
        "layers.0.ffn_norm.weight: 2 elements are NaN, from [3] to [4], in layers.0.ffn_norm.weight",
        f"{wk}: {(rows + 1) * (columns + 1)} elements are NaN, from [0, 0] to [{rows}, {columns}], "
        "in layers.1.attention.qkv_linear.packed.weight",
    ]


def test_an_engine_without_weights_proves_nothing(start):
    llm = start(Llama, TINY, load_format="titan_skip")
    rows = ta.vllm.weight_proof(llm, random_model(Llama, TINY))
    names = sorted(native_tensors(random_model(Llama, TINY)))
    found = broken(rows)
    assert sorted(set(found["no NaN"])) == sorted(set(found["equal"])) == names
