"""What can't be served is refused before memory is taken, with the reason, through either front door."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import vllm

import titan_adapters as ta
from tests.conftest import random_model, titan_error_text
from tests.vllm import models
from tests.vllm.conftest import TINY as TINY_ENGINE
from tests.vllm.models import TINY, FreeAttention, Llama
from titan_adapters.hf_config import emit_hf_config
from titan_adapters.vllm import engine_args, wrapper
from titan_adapters.vllm.plugin import register
from titan_adapters.vllm.wrapper import identity_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]


def ours(folder: Path, **kwargs):
    return ta.vllm.LLM(checkpoint=folder, **TINY_ENGINE | kwargs)


def stock(folder: Path, **kwargs):
    register()
    return vllm.LLM(str(folder), config_format="titan", **TINY_ENGINE | {"dtype": "float32"} | kwargs)


both = pytest.mark.parametrize("start", [ours, stock])


@pytest.fixture
def no_memory_taken(monkeypatch):
    """No module is given memory and no weight is read."""

    def taken(*args):
        raise AssertionError("too late: the engine's modules are being built")

    monkeypatch.setattr(wrapper, "swap_modules", taken)


@pytest.fixture
def folder(tmp_path) -> Path:
    ta.save_checkpoint(random_model(Llama, TINY), tmp_path / "native", max_shard_bytes=100_000)
    return tmp_path / "native"


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ta.TitanError) as caught:
        call(*args, **kwargs)
    return titan_error_text(caught)


def edit(folder: Path, **config) -> None:
    """Change fields of the config in titan.json."""
    described = json.loads((folder / "titan.json").read_text())
    described["config"] |= config
    (folder / "titan.json").write_text(json.dumps(described))


# ----- checkpoint folders


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 2
    return found


def remove_shard(folder: Path) -> str:
    shards(folder)[1].unlink()
    return "shard model-00002-of"


def truncate_shard(folder: Path) -> str:
    data = shards(folder)[1].read_bytes()
    shards(folder)[1].write_bytes(data[:-8])
    return "is damaged or truncated"


def add_shard(folder: Path) -> str:
    (folder / "stray.safetensors").write_bytes(shards(folder)[0].read_bytes())
    return "file stray.safetensors is not named"


def drop_layer_from_config(folder: Path) -> str:
    edit(folder, num_layers=2)
    return "unexpected tensor layers.2."


def add_layer_to_config(folder: Path) -> str:
    edit(folder, num_layers=4)
    return "missing tensor layers.3."


def widen_config(folder: Path) -> str:
    edit(folder, hidden_dim=96)
    return "(80, 48), the model needs (96, 48)"


def change_theta(folder: Path) -> str:
    edit(folder, rope=TINY.rope.model_dump() | {"theta": 1234.5})
    return "was written with another config than titan.json now holds"


def remove_identity(folder: Path) -> str:
    (folder / "titan.json").unlink()
    return "it has neither titan.json nor config.json"


DIGEST = (drop_layer_from_config, add_layer_to_config, widen_config)


@both
@pytest.mark.parametrize("damage", [remove_shard, truncate_shard, add_shard, *DIGEST, change_theta, remove_identity])
def test_damaged_folder(start, damage, folder, no_memory_taken):
    text = damage(folder)
    found = refusal(start, folder)
    if damage in DIGEST:  # caught by the digest; without one, by the shapes
        assert "was written with another config than titan.json now holds" in found
        without_digest(folder)
        found = refusal(start, folder)
    assert text in found


def without_digest(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.clone() for name, tensor in load_file(file).items()}, file, {"format": "pt"})


# ----- arguments


def test_another_model_or_config_than_the_checkpoint_holds(folder):
    text = refusal(engine_args, "qwen3", None, folder)
    assert "model: qwen3 is asked for, the checkpoint holds a llama" in text
    text = refusal(engine_args, Llama, TINY.model_copy(update={"num_layers": 5, "norm_eps": 0.1}), folder)
    assert "num_layers: 5 here, 3 in the checkpoint" in text
    assert "norm_eps: 0.1 here, 1e-05 in the checkpoint" in text
    assert engine_args(Llama, TINY, folder)["model"] == str(folder)


def test_arguments_that_are_ours(folder):
    text = refusal(engine_args, checkpoint=folder, quantization="fp8", config_format="hf")
    assert "quantization='fp8' is not supported yet" in text and "config_format is set by this function" in text


def test_no_checkpoint_and_no_load_format():
    assert "pass checkpoint=, or model=, config= and load_format=" in refusal(engine_args, Llama, TINY)
    assert "pass checkpoint=" in refusal(engine_args, None, TINY, load_format="dummy")


def test_quantization_through_the_stock_front_door(folder, no_memory_taken):
    text = refusal(stock, folder, quantization="fp8", dtype="bfloat16")
    assert "not supported yet" in text and "quantization" in text


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"stages": 1}, False),
        ({"dtype": torch.float32}, False),
        ({"sinks": False}, False),
        ({"backend": "TRITON_ATTN"}, False),
        ({"backend": "FLASH_ATTN"}, True),
        ({"cuda": False}, False),
    ],
    ids=str,
)
def test_sinks_over_pipeline_stages_on_a_gpu(changes, refused, monkeypatch):
    """The rule, with vLLM's config as it is there: no CPU has the kernel that was wrong."""
    case = {"stages": 2, "dtype": torch.bfloat16, "sinks": True, "backend": None, "cuda": True} | changes
    monkeypatch.setattr(wrapper, "current_platform", SimpleNamespace(is_cuda=lambda: case["cuda"]))
    vllm_config = SimpleNamespace(
        quant_config=None,
        attention_config=SimpleNamespace(backend=case["backend"] and SimpleNamespace(name=case["backend"])),
        parallel_config=SimpleNamespace(pipeline_parallel_size=case["stages"]),
        model_config=SimpleNamespace(dtype=case["dtype"]),
    )
    cls = ta.get_model("gpt_oss" if case["sinks"] else "llama")
    config = next(iter(cls.tiny_configs().values()))
    if refused:
        text = refusal(wrapper.refuse_unsupported, vllm_config, config)
        assert "gave wrong results on a GPU" in text and 'attention_backend="TRITON_ATTN"' in text
    else:
        wrapper.refuse_unsupported(vllm_config, config)


# ----- models


@both
def test_head_size_that_attention_on_the_cpu_lacks(start, tmp_path):
    rope = TINY.rope.model_copy(update={"rotary_dim": 24})
    ta.save_checkpoint(random_model(Llama, TINY.model_copy(update={"head_dim": 24, "rope": rope})), tmp_path / "native")
    text = refusal(start, tmp_path / "native")
    assert "head_dim 24 of layers [0, 1, 2] is not supported by vLLM's CPU attention" in text


def free(path: Path, *changes) -> Path:
    ta.register_model(FreeAttention)
    ta.save_checkpoint(random_model(FreeAttention, FreeAttention.config(*changes)), path / "native")
    return path / "native"


def test_the_larger_of_two_head_sizes_decides(tmp_path):
    folder = free(tmp_path, {"v_head_dim": 64}, {"v_head_dim": 64})
    assert engine_args(checkpoint=folder)["model"] == str(folder)
    text = refusal(ours, free(tmp_path / "odd", {"v_head_dim": 48}, {"v_head_dim": 48}))
    assert "v_head_dim 48 of layers [0, 1] is not supported by vLLM's CPU attention" in text


@both
def test_chunks_that_are_not_whole_cache_blocks(start, tmp_path, no_memory_taken):
    text = refusal(start, free(tmp_path, {"chunk": 48}, {}, {"chunk": 32}, {"chunk": 48}))
    assert "chunk 48 of layers [0, 3] is not a multiple of the KV cache's block_size, 32 tokens" in text
    assert "chunk 32" not in text
    text = refusal(start, free(tmp_path / "128", {"chunk": 32}), block_size=None)  # vLLM's own: 128 on the CPU
    assert "chunk 32 of layers [0] is not a multiple of the KV cache's block_size, 128 tokens" in text


@pytest.mark.parametrize("field", [{"window": 5}, {"sinks": True}, {"softcap": 2.0}])
def test_chunks_together_with_what_the_chunked_layer_lacks(field, tmp_path):
    text = refusal(ours, free(tmp_path, {"sinks": "sinks" in field}, {"chunk": 32} | field))
    assert f"chunk together with {next(iter(field))} of layers [1] is not honoured" in text


@pytest.mark.parametrize(("cls", "text"), list(models.without_a_good_seam()))
def test_attention_seams(cls, text, unloaded, tmp_path):
    ta.register_model(cls)
    ta.save_checkpoint(random_model(cls, TINY), tmp_path / "native")
    assert text in refusal(unloaded, tmp_path / "native")


# ----- configs that choose code


def stub(**titan):
    """A VllmConfig with the emitted config of `Llama`, changed."""
    hf_config = SimpleNamespace(titan=emit_hf_config(Llama, TINY)["titan"] | titan)
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config, dtype=torch.float32), quant_config=None)


@pytest.fixture
def bait(tmp_path, monkeypatch) -> str:
    """A module that would be importable."""
    (tmp_path / "bait_module.py").write_text("class Model: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "bait_module:Model"
    assert "bait_module" not in sys.modules


def test_a_config_names_a_model_and_does_not_choose_its_class(bait, folder):
    assert identity_of(stub()) == wrapper.Identity(Llama, TINY, "native")
    for path in (bait, "os:system"):
        text = refusal(identity_of, stub(**{"class": path}))
        assert f"resolved 'llama' to {path}, this process to titan_models.llama:Llama" in text
        assert f"No model is registered under {path!r}" in refusal(identity_of, stub(model=path))
    described = json.loads((folder / "titan.json").read_text())
    (folder / "titan.json").write_text(json.dumps(described | {"model": bait}))
    for start in (ours, stock):
        assert f"No model is registered under {bait!r}" in refusal(start, folder)


def test_specs_that_differ_between_processes(bait):
    assert "computes other specs in this process" in refusal(identity_of, stub(fingerprint="0" * 64))
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace()))
    assert "does not say which model to build" in refusal(identity_of, config)
