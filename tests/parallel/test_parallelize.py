"""What `parallelize` refuses, and what it leaves behind, on a fake process group."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import titan_adapters as ta
from tests.conftest import titan_error_text
from tests.parallel.models import TINY, Llama, Parts, attention, mixture
from titan_adapters.contract import meta_model
from titan_adapters.errors import PlanError

pytestmark = pytest.mark.usefixtures("four_fake_ranks")


def _refusal(
    model: ta.BaseTransformer, axes: dict[str, int], plan: ta.ParallelPlan | None = None, **options: bool
) -> str:
    """The error's text, after a check that nothing was changed."""
    before = dict(model.named_parameters())
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with pytest.raises(PlanError) as caught:
        ta.parallelize(model, mesh, plan, **options)
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return titan_error_text(caught)


def test_sizes_that_do_not_fit_are_refused_with_those_that_do() -> None:
    # 6 query heads, 2 kv heads; 80 hidden features, 40 of an expert; 6 experts.
    model = meta_model(Parts, Parts.config([attention()] * 2, [TINY.feed_forward(0), mixture()]))
    text = _refusal(model, {"ep": 1, "tp": 4})
    assert text.startswith("This model can't be split over tp 4, ep 1.\n")
    assert "num_heads 6 of layers [0, 1] is not divisible by tensor_parallel_size 4; legal sizes: 1, 2" in text
    assert text.endswith("Fix: legal sizes: tp 1, 2; ep 1, 2, 3, 6.")
    assert (
        "num_experts 6 of layers [1] is not divisible by 4 expert-parallel ranks; legal sizes: 1, 2, 3, 6"
        in _refusal(model, {"ep": 4})
    )


def test_kv_heads_that_neither_divide_nor_are_divided() -> None:
    config = Parts.config([attention(num_heads=12, num_kv_heads=3)], [TINY.feed_forward(0)])
    text = _refusal(meta_model(Parts, config), {"tp": 4})
    assert "num_kv_heads 3 of layers [0] neither divides nor is divisible by tensor_parallel_size 4" in text
    assert "no layer is a mixture of experts" in _refusal(meta_model(Parts, config), {"ep": 4})


def test_widths_and_vocabularies() -> None:
    expert = mixture(hidden_dim=6, shared=ta.SharedExpertsSpec(feed_forward=TINY.feed_forward(0), output_gate=False))
    dense = TINY.feed_forward(0).model_copy(update={"hidden_dim": 7})
    config = Parts.config([attention(num_heads=4)] * 2, [dense, expert], vocab_size=6)
    text = _refusal(meta_model(Parts, config), {"tp": 4})
    assert "hidden_dim 7 of layers [0] is not divisible by" in text
    assert "hidden_dim of experts 6 of layers [1] is not divisible by" in text
    assert "vocab_size 6 leaves a rank of tp 4 without rows" in text
    assert "shared" not in text  # 80 over 4


def test_a_mesh_needs_known_axes() -> None:
    model = meta_model(Llama, TINY)
    assert "axis 'dp' is unknown" in _refusal(model, {"dp": 2, "tp": 2})
    text = _refusal(model, {"fsdp": 2, "dp_shard": 2})
    assert "fsdp and dp_shard are two names of the same axis" in text
    with pytest.raises(PlanError, match="its axes have no names"):
        ta.parallelize(model, init_device_mesh("cpu", (4,)))


def test_parts_that_belong_together_are_split_alike() -> None:
    rows = ta.decoder_plan(TINY).rows
    model = meta_model(Llama, TINY)
    text = _refusal(model, {"fsdp": 2, "tp": 2}, ta.ParallelPlan(rows | {"layers.*.attention.wo": ta.replicate}))
    assert (
        "layers.0.attention.wo is replicate; either wq colwise, wk colwise, wv colwise, wo rowwise, or all of them "
        "replicate" in text
    )
    text = _refusal(model, {"fsdp": 2, "tp": 2}, ta.ParallelPlan(rows | {"layers.*.feed_forward.w3": ta.replicate}))
    assert "layers.2.feed_forward.w3 is replicate; either w1 colwise, w3 colwise, w2 rowwise" in text


def test_attention_of_an_unknown_kind_is_refused() -> None:
    model = meta_model(Llama, TINY)
    model.layers[1].attention = nn.ModuleDict({"inner_attention": model.layers[1].attention.inner_attention})
    rows = {
        path.replace(".*.attention.", ".[02].attention."): style for path, style in ta.decoder_plan(TINY).rows.items()
    }
    text = _refusal(model, {"fsdp": 2, "tp": 2}, ta.ParallelPlan(rows))
    assert "layers.1.attention.inner_attention is not in a titan_adapters.nn.Attention" in text


def test_between_split_parts_a_rank_has_its_share_of_the_tokens() -> None:
    """Of 5 tokens, rank 0 of 4 has two, the others one; the loop's graph keeps no more of the residual stream."""
    config = Parts.config([attention(num_heads=4)] * 2, [TINY.feed_forward(0), mixture()])
    model = Parts(config)
    ta.parallelize(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), sequence_parallel=True)
    seen: dict[str, tuple[int, ...]] = {}
    for name in ("layers.0", "layers.0.attention_norm", "layers.0.attention.qkv_linear.wq", "layers.0.ffn_norm",
                 "layers.1.moe.router", "norm", "lm_head"):  # fmt: skip
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, tuple(args[0].shape))
        )
    for shape in ((3, 5), (5,)):
        logits = model(torch.zeros(shape, dtype=torch.int64))
        own = (*shape[:-1], 2, 48)
        assert seen.pop("layers.1.moe.router") == (torch.Size(shape).numel(), 48)
        assert seen.pop("lm_head") == seen.pop("layers.0.attention.qkv_linear.wq") == (*shape, 48)
        assert set(seen.values()) == {own} and len(seen) == 4
        assert logits.shape == (*shape, 131)


def test_what_sequence_parallelism_refuses() -> None:
    text = _refusal(meta_model(Llama, TINY), {"fsdp": 2}, sequence_parallel=True)
    assert text.startswith("Sequence parallelism is over the axis 'tp'.")
    config = Parts.config([attention(num_heads=4)], [mixture()])
    model = meta_model(Parts, config)
    router = model.layers[0].moe.router
    model.layers[0].moe.router = None
    model.layers[0].router = router
    plan = {row.replace("moe.router", "router"): style for row, style in ta.decoder_plan(config).rows.items()}
    text = _refusal(model, {"tp": 4}, ta.ParallelPlan(plan), sequence_parallel=True)
    assert "layers.0.router is not in the module that has the experts" in text


def test_tokens_that_get_lost_are_noticed() -> None:
    class Last(Llama):
        model_type = "last"

        def run_layers(self, x, seq, start=0, stop=None):
            return super().run_layers(x, seq, start, stop)[:, -1:]

    model = Last(TINY)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    ta.parallelize(model, mesh["tp"], sequence_parallel=True)
    with pytest.raises(PlanError) as caught:
        model(torch.zeros(2, 6, dtype=torch.int64))
    assert titan_error_text(caught).startswith(
        "Activations of shape (2, 1, 48) are not those of 3 of the tokens (2, 6)."
    )


def test_a_model_is_parallelized_once() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = ta.parallelize(meta_model(Llama, TINY), mesh)
    with pytest.raises(PlanError, match="is parallel already"):
        ta.parallelize(model, mesh)


def test_what_a_rank_holds_on_meta_and_after_it() -> None:
    # One kv head, 131 tokens, 6 experts of width 40; this is rank 0 of tp 2 x ep 2.
    config = Parts.config(
        [attention(num_kv_heads=1, sinks=True)], [mixture(bias=True)], tied_embeddings=True, dtype="bfloat16"
    )
    model = meta_model(Parts, config).to(torch.bfloat16)
    ta.parallelize(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp")))
    expected = {
        "tok_embeddings.weight": ((66, 48), (Replicate(), Shard(0))),
        "layers.0.attention.qkv_linear.wq.weight": ((96, 48), (Replicate(), Shard(0))),
        "layers.0.attention.qkv_linear.wk.weight": ((32, 48), (Replicate(), Replicate())),
        "layers.0.attention.inner_attention.sinks": ((3,), (Replicate(), Shard(0))),
        "layers.0.attention.wo.weight": ((48, 96), (Replicate(), Shard(1))),
        "layers.0.moe.experts.w1": ((3, 20, 48), (Shard(0), Shard(1))),
        "layers.0.moe.experts.w2": ((3, 48, 20), (Shard(0), Shard(2))),
        "layers.0.moe.experts.b2": ((3, 48), (Shard(0), Replicate())),
        "layers.0.moe.router.gate.weight": ((6, 48), (Replicate(), Replicate())),
    }
    for name, (shape, placements) in expected.items():
        parameter = model.get_parameter(name)
        assert parameter.is_meta and parameter.to_local().shape == shape, name
        assert parameter.placements == placements, name
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.tok_embeddings.weight and not model.lm_head.weight.is_meta
    assert model.layers[0].moe.router.correction_bias.dtype == torch.float32
    assert torch.equal(model.layers[0].attention.rope.cos_sin, Parts(config).layers[0].attention.rope.cos_sin)
