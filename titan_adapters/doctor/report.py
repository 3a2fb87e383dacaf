"""Looking from three processes, and what comes of it."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from titan_adapters.checkpoint import read_identity
from titan_adapters.contract import meta_model
from titan_adapters.doctor.checks import CHECKS, Finding, Scene
from titan_adapters.doctor.view import View, has_vllm, look
from titan_adapters.errors import TitanError

HERE, SPAWNED, WORKER = "this process", "spawned process", "vLLM worker"
SMALL = 500_000_000
"""Parameters up to which a model is built with random weights to look into a worker."""


@dataclass(frozen=True)
class Report:
    """What each process sees, and what is wrong."""

    views: dict[str, View]
    not_looked_at: dict[str, str]
    """Processes that were left out, each with the reason."""
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    def rows(self) -> dict[str, list[str]]:
        """Each row's values, process by process; empty where a process lacks it."""
        names = dict.fromkeys(name for view in self.views.values() for name in view)
        return {name: [view.get(name, "") for view in self.views.values()] for name in names}

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"healthy": self.healthy}


def examine(folder: str | Path | None = None, *, engine: bool = False) -> Report:
    """Look from this process, from a spawned one and, with `engine`, from a vLLM worker; then look for known mistakes.

    Scripts that call this need an `if __name__ == "__main__"` guard, as with everything that spawns.

    Args:
        folder: A checkpoint folder to look at, too.
        engine: Start an engine for it, with random weights, if the model has at most `SMALL` parameters.
    """
    path = None if folder is None else str(folder)
    views = {HERE: look(path)}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        views[SPAWNED] = pool.submit(look, path).result()
    not_looked_at = {}
    if reason := _why_no_engine(path, engine):
        not_looked_at[WORKER] = reason
    else:
        try:
            views[WORKER] = _look_from_worker(str(path))
        except Exception as error:  # an engine that does not start is what is to be explained
            not_looked_at[WORKER] = f"the engine did not start: {error}"
    scene = Scene(views, None if path is None else Path(path))
    findings = [finding for check in CHECKS for finding in check(scene)]
    if not_looked_at.get(WORKER, "").startswith("the engine did not start"):
        findings.append(Finding("error", f"{WORKER}: {not_looked_at[WORKER]}", "see the engine's own log above."))
    return Report(views, not_looked_at, findings)


def _why_no_engine(folder: str | None, engine: bool) -> str:
    if not engine or folder is None:
        return "give a folder and --engine"
    if not has_vllm():
        return "vllm is not installed"
    try:
        identity = read_identity(folder)
    except TitanError as error:
        return error.summary
    parameters = sum(p.numel() for p in meta_model(identity.model, identity.config).parameters())
    return f"the model has {parameters:,} parameters, more than {SMALL:,}" if parameters > SMALL else ""


def _look_from_worker(folder: str) -> View:
    from titan_adapters.vllm import LLM

    length = min(128, read_identity(folder).config.max_seq_len)
    # Not most of the memory, as vLLM would take by default on the CPU. What is set for this look only is not shown.
    ours = {name: value for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1"}.items() if name not in os.environ}
    with mock.patch.dict(os.environ, ours):
        llm = LLM(
            checkpoint=folder, load_format="dummy", enforce_eager=True, max_model_len=length, max_num_seqs=2,
            skip_tokenizer_init=True, disable_log_stats=True,
        )  # fmt: skip
        try:
            (view, *_) = llm.collective_rpc("titan_look", args=(folder,))
        finally:
            llm.llm_engine.engine_core.shutdown()
    return {row: value for row, value in view.items() if row.removeprefix("$") not in ours}
