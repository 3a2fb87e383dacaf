"""What a trainer of several processes saved is served as it is: DCP folders of any layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import titan_adapters as ta
from tests.conftest import random_model, random_tokens, relative_error
from tests.parallel.processes import run_processes
from tests.parallel.trainer import train_and_save
from tests.vllm.conftest import error_against_torch, generate, logprobs_of, torch_logprobs_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("name", "axes"), [("qwen3", {"tp": 2}), ("qwen3_moe", {"ep": 2}), ("gemma3_text", {"fsdp": 2})]
)
def test_trained_in_parallel_and_served(
    start: Callable[..., Any], tmp_path: Path, name: str, axes: dict[str, int]
) -> None:
    cls = ta.get_model(name)
    config = list(cls.tiny_configs().values())[1]  # one kv head
    assert config.attention(0).num_kv_heads == 1
    folders = [tmp_path / "first", tmp_path / "second"]
    run_processes(2, train_and_save, name, config, axes, folders)
    first, second = (ta.load_model(folder) for folder in folders)
    llm = start(checkpoint=folders[0])
    prompts = [random_tokens(config, length, seed=length).tolist() for length in (1, 2, 3, 40)]
    outputs = generate(llm, prompts)
    assert error_against_torch(first, outputs) < 1e-5
    for other in (random_model(cls, config), second):  # one step of training is seen
        assert relative_error(logprobs_of(outputs[-1]), torch_logprobs_of(other, outputs[-1])) > 1e-3
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders[1])})
    assert error_against_torch(second, generate(llm, prompts)) < 1e-5


def test_the_format_is_chosen_by_the_folder(tmp_path: Path) -> None:
    cls = ta.get_model("llama")
    model = random_model(cls, next(iter(cls.tiny_configs().values())))
    ta.save_checkpoint(model, tmp_path / "dcp", "dcp")
    ta.save_checkpoint(model, tmp_path / "native")
    assert ta.vllm.engine_args(checkpoint=tmp_path / "dcp")["load_format"] == "titan_dcp"
    assert "load_format" not in ta.vllm.engine_args(checkpoint=tmp_path / "native")
    assert ta.vllm.engine_args(checkpoint=tmp_path / "dcp", load_format="dummy")["load_format"] == "dummy"
