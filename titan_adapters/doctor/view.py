"""What one process sees, as text by row, so that processes can be compared. Imports vllm only inside `look`."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import torch

import titan_adapters
from titan_adapters.checkpoint import read_identity
from titan_adapters.hf_config import ARCHITECTURE
from titan_adapters.registry import ENVIRONMENT, import_path, list_models

View = dict[str, str]

VARIABLES = (
    ENVIRONMENT, "PYTHONPATH", "VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_ATTENTION_BACKEND", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
)  # fmt: skip
"""Environment variables that change what an engine does; those that start with NCCL_ are shown too."""
ERROR = "error: "
"""How the value of a row starts that could not be found out."""
ABSENT = "(not installed)"


def look(folder: str | None = None) -> View:
    """What this process sees; of checkpoint `folder` too, if one is given. Never raises."""
    rows: dict[str, Callable[[], str]] = {
        "python": lambda: f"{platform.python_version()} {sys.executable}",
        "platform": platform.platform,
        "torch": lambda: f"{torch.__version__}, built for {torch.version.cuda or torch.version.hip or 'cpu'}",
        "devices": _devices,
        "vllm": _vllm,
        "vllm platform": _vllm_platform,
        "transformers": lambda: version("transformers") or ABSENT,
        "titan_adapters": lambda: f"{titan_adapters.__version__} {Path(titan_adapters.__file__).parent}",
        "plugin": _plugin,
        "models": lambda: ", ".join(
            info.name if info.source.startswith("installed") else f"{info.name} ({info.path}, {info.source})"
            for info in list_models()
        ),
    }
    if folder is not None:
        identity = lambda: read_identity(folder)  # noqa: E731
        rows |= {
            "class": lambda: import_path(identity().model),
            "dtype": lambda: identity().config.dtype,
            "max_seq_len": lambda: str(identity().config.max_seq_len),
            "fingerprint": lambda: identity().config.fingerprint()[:12],
        }
    view = {row: _or_error(find) for row, find in rows.items()}
    nccl = sorted(name for name in os.environ if name.startswith("NCCL_"))
    return view | {f"${name}": os.environ[name] for name in (*VARIABLES, *nccl) if name in os.environ}


def version(distribution: str) -> str | None:
    """Of an installed distribution, from its metadata."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def plugin_entry_points() -> list[EntryPoint]:
    """vLLM's ways into this library; one, if it is installed well."""
    return [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "titan_adapters"]


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _or_error(find: Callable[[], str]) -> str:
    try:
        return find()
    except Exception as error:  # whatever is broken here is what is to be shown
        return f"{ERROR}{type(error).__name__}: {error}"


def _devices() -> str:
    if not torch.cuda.is_available():
        return f"cpu, {os.cpu_count()} cores"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _vllm() -> str:
    found = [f"{name} {number}" for name in ("vllm", "vllm-cpu") if (number := version(name))]
    return ", ".join(found) or ABSENT


def _vllm_platform() -> str:
    if not has_vllm():
        return ABSENT
    from vllm.platforms import current_platform

    return current_platform.device_type or "none"


def _plugin() -> str:
    """As vLLM itself sees it, after loading its plugins."""
    if not has_vllm():
        return ABSENT
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.plugins import load_general_plugins
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER

    load_general_plugins()
    known = ARCHITECTURE in ModelRegistry.get_supported_archs() and "titan" in _CONFIG_FORMAT_TO_CONFIG_PARSER
    return "loaded" if known else "not loaded"
