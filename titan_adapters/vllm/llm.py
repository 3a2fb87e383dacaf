"""Starting an engine from Python."""

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_adapters.checkpoint import Identity, read_identity, write_identity
from titan_adapters.checkpoint.api import checked_weights
from titan_adapters.checkpoint.dcp import DcpFolder
from titan_adapters.checkpoint.identity import config_diff
from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer
from titan_adapters.errors import EngineError
from titan_adapters.registry import get_model, import_path
from titan_adapters.vllm.parallel import Parallel, check_parallel, share_cores
from titan_adapters.vllm.plugin import CONFIG_FORMAT, DCP_FORMAT, SKIP_FORMAT, register
from titan_adapters.vllm.worker import EXTENSION

if TYPE_CHECKING:
    import vllm

OURS = ("model", "config_format", "hf_config_path")
UNSUPPORTED = {"quantization": None, "enable_lora": False}
"""Engine arguments that are refused unless they have this value."""
WITHOUT_WEIGHTS = ("dummy", SKIP_FORMAT)


def engine_args(
    model: str | type[BaseTransformer] | None = None,
    config: TransformerConfig | None = None,
    checkpoint: str | Path | None = None,
    **engine_kwargs: Any,
) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM` or `vllm.EngineArgs`, after everything cheap has been checked.

    For several ranks on a CPU without as many NUMA nodes, also sets VLLM_CPU_OMP_THREADS_BIND, unless it is set.

    Args:
        model: Registered name, `"pkg.module:Class"`, or class. May be left out if `checkpoint` names it.
        config: May be left out if `checkpoint` has it; otherwise the two must agree.
        checkpoint: Native or published safetensors folder, or a DCP folder. Without one, `load_format` must say where
            weights come from: "dummy" (random), or "titan_skip" (a later live update). There is then no tokenizer
            either, unless `tokenizer` names one.
        engine_kwargs: Passed on to vLLM. `dtype` defaults to the config's. An own `worker_extension_cls` should be a
            subclass of `titan_adapters.vllm.worker.TitanWorker`.

    Raises:
        EngineError, CheckpointError, StateDictError, ConfigError: with everything that is wrong.
    """
    clash = [f"{key} is set by this function" for key in OURS if key in engine_kwargs]
    clash += [
        f"{key}={engine_kwargs[key]!r} is not supported yet"
        for key, only in UNSUPPORTED.items()
        if engine_kwargs.get(key, only) != only
    ]
    if clash:
        raise EngineError("These engine arguments can't be used here.", clash, fix="leave them out.")
    load_format = engine_kwargs.get("load_format", "auto")
    cls = None if model is None else get_model(model)
    if checkpoint is None:
        if cls is None or config is None or load_format not in WITHOUT_WEIGHTS:
            raise EngineError(
                "There is no checkpoint to load.",
                fix=f"pass checkpoint=, or model=, config= and load_format= one of {', '.join(WITHOUT_WEIGHTS)}.",
            )
        identity = Identity(cls, config, "native")
        folder = _folder_without_weights(identity)
        engine_kwargs.setdefault("skip_tokenizer_init", "tokenizer" not in engine_kwargs)
    else:
        folder = Path(checkpoint)
        identity = read_identity(folder)
        _check_agreement(identity, cls, config, folder)
        if load_format not in WITHOUT_WEIGHTS:
            weights, *_ = checked_weights(identity, folder)
            if isinstance(weights, DcpFolder) and load_format == "auto":
                engine_kwargs["load_format"] = DCP_FORMAT
    parallel = Parallel.from_arguments(engine_kwargs)
    check_parallel(identity.model, identity.config, parallel)
    share_cores(parallel)
    return {
        "dtype": identity.config.dtype,
        "worker_extension_cls": EXTENSION,
        **engine_kwargs,
        "model": str(folder),
        "config_format": CONFIG_FORMAT,
    }


def LLM(
    model: str | type[BaseTransformer] | None = None,
    config: TransformerConfig | None = None,
    checkpoint: str | Path | None = None,
    **engine_kwargs: Any,
) -> "vllm.LLM":
    """A real `vllm.LLM` that serves the given model; arguments as for `engine_args`."""
    import vllm

    replicas = engine_kwargs.get("data_parallel_size", 1)
    if replicas > 1 and engine_kwargs.get("distributed_executor_backend") != "external_launcher":
        raise EngineError(
            f"vllm.LLM runs one replica, not data_parallel_size={replicas}.",
            fix="run `vllm serve FOLDER --config-format titan --data-parallel-size N`, or vllm's "
            "AsyncLLM.from_engine_args(AsyncEngineArgs(**titan_adapters.vllm.engine_args(...))).",
        )
    arguments = engine_args(model, config, checkpoint, **engine_kwargs)
    register()  # also without an installed entry point, for an engine in this process
    llm = vllm.LLM(**arguments)
    if engine_kwargs.get("pipeline_parallel_size", 1) > 1:
        llm.collective_rpc("titan_warm_up")
    return llm


def _folder_without_weights(identity: Identity) -> Path:
    """A folder that only names the model. The same one each time: its path is in the key of vLLM's compile cache."""
    from vllm import envs

    described = f"{import_path(identity.model)} {identity.config.digest()}"
    parent = Path(envs.VLLM_CACHE_ROOT) / "titan_adapters"
    folder = parent / hashlib.sha256(described.encode()).hexdigest()[:16]
    if not folder.exists():
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=parent))
        write_identity(made, identity)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def _check_agreement(
    identity: Identity, cls: type[BaseTransformer] | None, config: TransformerConfig | None, folder: Path
) -> None:
    problems = []
    if cls is not None and cls is not identity.model:
        problems.append(f"model: {cls.model_type} is asked for, the checkpoint holds a {identity.model.model_type}")
    elif config is not None:
        problems = config_diff(config, identity.config)
    if problems:
        raise EngineError(
            f"{folder} is not the model that was asked for.", problems, fix="leave out model= and config=."
        )
