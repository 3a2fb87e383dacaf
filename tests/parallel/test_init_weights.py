"""A parallel model on the meta device starts with the weights that one process would start with."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import titan_adapters as ta
from titan_adapters.contract import meta_model
from titan_adapters.state_dict import native_tensors


@pytest.mark.parametrize(
    ("name", "axes"),
    [("llama", ("fsdp",)), ("llama", ("fsdp", "tp")), ("qwen2_moe", ("fsdp", "tp")), ("qwen2_moe", ("fsdp", "ep"))],
)
def test_each_rank_has_its_part_of_one_start(four_fake_ranks, name, axes):
    cls = ta.get_model(name)
    config = list(cls.tiny_configs().values())[1].model_copy(update={"tied_embeddings": True})
    mesh = init_device_mesh("cpu", (4,) if axes == ("fsdp",) else (2, 2), mesh_dim_names=axes)
    model = ta.parallelize(meta_model(cls, config), mesh)
    before = torch.random.get_rng_state()
    ta.parallel.init_weights(model, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(3)
    expected, parts = native_tensors(cls(config)), native_tensors(model)
    assert parts.keys() == expected.keys()
    for key, whole in expected.items():
        part = parts[key]
        if isinstance(part, DTensor):
            # This process is rank 0 along every axis. FSDP splits what the plan has split.
            for axis, placement in reversed(list(enumerate(part.placements))):
                if not isinstance(placement, Replicate):
                    whole = whole.chunk(part.device_mesh.size(axis), placement.dim)[0]
            part = part.to_local()
        assert torch.equal(part, whole), key
    assert model.lm_head.weight is model.tok_embeddings.weight
