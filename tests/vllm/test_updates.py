"""Engines without a checkpoint, live weight updates, and several models in one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, random_tokens
from tests.vllm.conftest import engine_model, error_against_torch, generate, logprobs_of
from tests.vllm.models import TINY, FreeAttention, Llama
from titan_adapters.checkpoint import open_weights

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]

TOLERANCE = 1e-5
TIED = Llama.tiny_configs()["tied, llama3 rope"]


def outputs(llm: Any, config: ta.TransformerConfig) -> list[Any]:
    return generate(llm, [random_tokens(config, length, seed=length).tolist() for length in (40, 3)], max_tokens=4)


def all_logprobs(llm: Any, config: ta.TransformerConfig) -> Tensor:
    return torch.cat([logprobs_of(output) for output in outputs(llm, config)])


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    return open_weights(folder).tensors()


def two_checkpoints(config: ta.TransformerConfig, path: Path) -> tuple[Path, Path]:
    cls = FreeAttention if isinstance(config, FreeAttention.Config) else Llama
    ta.register_model(cls)
    for seed in (0, 1):
        ta.save_checkpoint(random_model(cls, config, seed), path / str(seed), max_shard_bytes=50_000)
    return path / "0", path / "1"


def reload(llm: Any, **kwargs: Any) -> None:
    llm.collective_rpc("reload_weights", kwargs=kwargs)
    llm.reset_prefix_cache()  # vLLM does not: cached blocks are of the old weights


@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_reload_from_another_folder_and_back(start, tmp_path, config):
    one, two = two_checkpoints(config, tmp_path)
    llm, other = start(checkpoint=one), start(checkpoint=two)
    first, second = all_logprobs(llm, config), all_logprobs(other, config)
    assert not torch.equal(first, second)
    addresses = {name: p.data_ptr() for name, p in engine_model(llm).named_parameters()}
    for folder, expected in [(two, second), (one, first)]:
        reload(llm, weights_path=str(folder))
        assert torch.equal(all_logprobs(llm, config), expected)
    assert {name: p.data_ptr() for name, p in engine_model(llm).named_parameters()} == addresses
    model = engine_model(llm).backbone.model
    shared = model.lm_head.head.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()
    assert shared == config.tied_embeddings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reload_reaches_the_sinks_that_attention_holds(start, tmp_path, dtype):
    """vLLM's attention takes the sinks when it is built, and may convert them when it runs."""
    ta.register_model(FreeAttention)
    config = FreeAttention.config({"sinks": True}).model_copy(update={"dtype": dtype})
    model = random_model(FreeAttention, config)
    ta.save_checkpoint(model, tmp_path / "0")
    with torch.no_grad():
        model.layers[0].attention.inner_attention.sinks += 3
    ta.save_checkpoint(model, tmp_path / "1")
    llm, other = start(checkpoint=tmp_path / "0"), start(checkpoint=tmp_path / "1")
    first, second = all_logprobs(llm, config), all_logprobs(other, config)
    assert (first - second).abs().max() > 0.1
    for folder, expected in (("1", second), ("0", first)):
        reload(llm, weights_path=str(tmp_path / folder))
        assert torch.equal(all_logprobs(llm, config), expected)
    sinks = "layers.0.attention.inner_attention.sinks"
    reload(llm, weights_iterator=iter([(sinks, model.state_dict()[sinks])]))
    assert torch.equal(all_logprobs(llm, config), second)


def test_titan_skip_waits_for_a_live_update(start, tmp_path):
    one, _ = two_checkpoints(TINY, tmp_path)
    expected = all_logprobs(start(checkpoint=one), TINY)
    llm = start(Llama, TINY, load_format="titan_skip")
    assert all(p.isnan().all() for p in engine_model(llm).parameters())
    reload(llm, weights_iterator=tensors(one))
    assert torch.equal(all_logprobs(llm, TINY), expected)


def test_an_update_may_come_in_pieces(start, tmp_path):
    one, two = two_checkpoints(TINY, tmp_path)
    expected = all_logprobs(start(checkpoint=two), TINY)
    llm = start(checkpoint=one)
    weights = list(tensors(two))
    for piece in (weights[::2], weights[1::2]):  # separates the parts of packed layers
        reload(llm, weights_iterator=iter(piece))
    assert torch.equal(all_logprobs(llm, TINY), expected)


def test_part_of_a_packed_layer_changes_nothing_until_the_rest_comes(start, tmp_path):
    one, two = two_checkpoints(TINY, tmp_path)
    llm, other = start(checkpoint=one), start(checkpoint=two)
    before, expected = all_logprobs(llm, TINY), all_logprobs(other, TINY)
    part = [(name, tensor) for name, tensor in tensors(two) if name.endswith(("wk.weight", "w3.weight"))]
    reload(llm, weights_iterator=iter(part))
    assert torch.equal(all_logprobs(llm, TINY), before)
    reload(llm, weights_iterator=tensors(two))
    assert torch.equal(all_logprobs(llm, TINY), expected)


def test_after_a_refused_update_a_good_one_succeeds(start, tmp_path):
    one, two = two_checkpoints(TINY, tmp_path)
    expected = all_logprobs(start(checkpoint=two), TINY)
    llm = start(checkpoint=one)
    bad = [(n, t.T.contiguous() if n == "layers.1.attention.qkv_linear.wv.weight" else t) for n, t in tensors(two)]
    with pytest.raises(ta.TitanError, match=r"wv\.weight has shape"):
        reload(llm, weights_iterator=iter(bad))
    # Nothing of it is kept: if wq and wk were, wv alone would complete the layer.
    wv = "layers.1.attention.qkv_linear.wv.weight"
    assert engine_model(llm).load_weights([(wv, dict(tensors(two))[wv])]) == set()
    reload(llm, weights_iterator=tensors(two))
    assert torch.equal(all_logprobs(llm, TINY), expected)


def test_past_the_reload_only_what_takes_effect_is_written(start, tmp_path):
    """On the CPU, linear layers compute with a repacked copy, which a direct write would not reach."""
    one, two = two_checkpoints(TINY, tmp_path)
    llm = start(checkpoint=one)
    before, weights = all_logprobs(llm, TINY), dict(tensors(two))

    def write(name):
        llm.collective_rpc(lambda worker: worker.get_model().load_weights([(name, weights[name])]) and None)

    for name in ("layers.0.attention.wo.weight", "layers.1.feed_forward.w3.weight", "lm_head.weight"):
        with pytest.raises(ta.TitanError, match="which only a reload renews"):
            write(name)
    assert torch.equal(all_logprobs(llm, TINY), before)
    write("norm.weight")
    assert not torch.equal(all_logprobs(llm, TINY), before)


@pytest.mark.parametrize(
    "config",
    [Llama.tiny_configs()["biases, one kv head, square"], TIED, list(FreeAttention.tiny_configs().values())[-1]],
    ids=["untied, biases", "tied", "sinks, gate, q and o biases"],
)
def test_every_weight_reaches_the_logits(start, tmp_path, config):
    one, _ = two_checkpoints(config, tmp_path)
    llm = start(checkpoint=one)
    before = all_logprobs(llm, config)
    weights = dict(tensors(one))
    for name, tensor in weights.items():
        # With the other tensors of its engine layer, without which it would not be written yet.
        module, kind = name.rpartition(".")[0].rstrip("qkv13"), name.rpartition(".")[2]
        layer = {n: t for n, t in weights.items() if n.rpartition(".")[0].rstrip("qkv13") == module}
        factor = 1 + 0.5 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(3))
        reload(llm, weights_iterator=iter((layer | {name: tensor * factor}).items()))
        changed = (all_logprobs(llm, config)[:39] - before[:39]).abs().max()
        assert changed > 1e-4, (name, kind)
        reload(llm, weights_iterator=iter(layer.items()))
    assert torch.equal(all_logprobs(llm, config), before)


def test_dummy_weights_need_no_checkpoint(start):
    logprobs = all_logprobs(start("llama", TINY, load_format="dummy"), TINY)
    assert torch.isfinite(logprobs).all()


def test_models_in_one_process_do_not_disturb_each_other(start, tmp_path):
    qwen3 = ta.get_model("qwen3")
    cases = [
        (Llama, TINY),
        (Llama, TIED),  # the same class with another config
        (qwen3, qwen3.tiny_configs()["second layer windowed, square mlp, yarn"]),
    ]
    engines, models, alone = [], [], []
    for index, (cls, config) in enumerate(cases):
        models.append(random_model(cls, config, seed=index))
        ta.save_checkpoint(models[-1], tmp_path / str(index))
        engines.append(start(checkpoint=tmp_path / str(index)))
        alone.append(all_logprobs(engines[-1], config))
    for _ in range(2):
        for llm, model, before in zip(engines, models, alone, strict=True):
            assert torch.equal(all_logprobs(llm, model.config), before)
            assert error_against_torch(model, outputs(llm, model.config)) < TOLERANCE
