"""The other processes of an engine find the same model: plugin, registrations, pickled configs; compiled or not."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, relative_error
from tests.vllm import scripts
from tests.vllm.conftest import ROOT, child_environment
from tests.vllm.models import TINY, Llama, Registered
from titan_adapters.vllm.plugin import register

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_registrations_left")]

TOLERANCE = 1e-5


def run(*arguments: Any, **environment: str) -> dict[str, Any]:
    """The result of one of `tests.vllm.scripts`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.scripts", *map(str, arguments)],
        cwd=ROOT,
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=240,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and results, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(results[0].removeprefix("RESULT "))


def saved(model: ta.BaseTransformer, folder) -> Any:
    ta.register_model(type(model))
    ta.save_checkpoint(model, folder)
    return folder


def assert_computed_by(model: ta.BaseTransformer, logprobs: list) -> None:
    """Teacher-forced: the greedy tokens are those that the logprobs name."""
    for prompt, rows in zip(scripts.PROMPTS, logprobs, strict=True):
        ours = torch.tensor(rows)
        tokens = prompt + ours[len(prompt) - 1 :].argmax(-1).tolist()
        with torch.no_grad():
            reference = model(torch.tensor(tokens)).log_softmax(-1)[:-1]
        assert relative_error(ours, reference) < TOLERANCE


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """vLLM's caches, empty at first, so that the inspection subprocess and the compiler really run."""
    return tmp_path_factory.mktemp("cache")


def test_stock_script_with_an_engine_process_and_compilation(tmp_path, cache):
    model = random_model(Registered, TINY)
    result = run("stock", saved(model, tmp_path / "checkpoint"), VLLM_CACHE_ROOT=str(cache))
    assert result["client"] == "SyncMPClient"
    assert list((cache / "modelinfos").glob("titan_adapters-vllm-wrapper*"))
    assert list((cache / "torch_compile_cache").iterdir())
    assert_computed_by(model, result["logprobs"])


def test_two_compiled_models_in_one_process(tmp_path, cache):
    qwen3 = ta.get_model("qwen3")
    windowed = qwen3.tiny_configs()["second layer windowed, square mlp, yarn"]
    models = [
        random_model(Llama, TINY.model_copy(update={"num_layers": 1})),
        random_model(qwen3, windowed.model_copy(update={"num_layers": 1, "windows": (5,)})),
    ]
    folders = [saved(model, tmp_path / model.model_type) for model in models]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": str(cache)}
    result = run("two_compiled", *folders, **environment)
    for model, logprobs, again in zip(models, result["logprobs"], result["again"], strict=True):
        assert_computed_by(model, logprobs)
        assert again == logprobs


def test_class_in_main_needs_an_engine_in_this_process(tmp_path, cache):
    result = run("in_main", tmp_path, VLLM_CACHE_ROOT=str(cache))
    assert (
        "__main__:OnlyHere can't be imported by vLLM's engine process: it is defined in __main__" in result["refusal"]
    )
    assert "Fix: move the class to a module on PYTHONPATH" in result["refusal"]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in result["refusal"]
    assert result["served"] == len(scripts.PROMPTS)


def test_registering_twice_is_harmless():
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER

    register()
    before = _CONFIG_FORMAT_TO_CONFIG_PARSER["titan"], _LOAD_FORMAT_TO_MODEL_LOADER["titan_skip"]
    register()
    assert (_CONFIG_FORMAT_TO_CONFIG_PARSER["titan"], _LOAD_FORMAT_TO_MODEL_LOADER["titan_skip"]) == before


@pytest.fixture
def vllm_config(tmp_path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    register()
    folder = saved(random_model(Llama, TINY), tmp_path / "checkpoint")
    arguments = ta.vllm.engine_args(checkpoint=folder, skip_tokenizer_init=True)
    return EngineArgs(**arguments).create_engine_config()


def test_registry_says_what_the_wrapper_can_do(vllm_config):
    from vllm import ModelRegistry

    info, architecture = ModelRegistry.inspect_model_cls(["TitanForCausalLM"], vllm_config.model_config)
    assert architecture == "TitanForCausalLM"
    assert info.is_text_generation_model and not info.is_pooling_model
    assert not info.supports_multimodal and info.supports_pp


def test_config_pickles_without_our_classes(vllm_config):
    from transformers import PretrainedConfig

    hf_config = vllm_config.model_config.hf_config
    assert type(hf_config) is PretrainedConfig
    copy = pickle.loads(pickle.dumps(vllm_config))
    assert copy.model_config.hf_config.to_dict() == hf_config.to_dict()
    assert copy.model_config.hf_config.titan["config"] == TINY.to_json()
    assert b"titan_adapters.vllm" not in pickle.dumps(hf_config)
