"""One implementation in a process group of its own, from the side of the benchmark."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import titan_adapters

CLOSING_SECONDS = 60.0


class EngineFailed(Exception):
    """An implementation did not start, or ended; says why in one line."""


class Engine:
    """A child that is starting, or has started, an engine; see `worker.py`.

    Args:
        implementation: "native", "transformers" or "ours".
        folder: What it serves.
        options: Keyword arguments of `vllm.LLM`.
        log: Where all that the child prints goes, appended.
        environment: Set for the child, beyond what is set here.
    """

    def __init__(
        self, implementation: str, folder: Path, options: dict[str, Any], log: Path, environment: dict[str, str]
    ):
        self._log = log
        self._begin = time.perf_counter()
        root = str(Path(titan_adapters.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
        if implementation != "ours":
            environment["VLLM_PLUGINS"] = ",".join(_plugins_of_others())
        worker = Path(__file__).with_name("worker.py")
        with log.open("a") as messages:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(worker), json.dumps([implementation, str(folder), options])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                env=environment,
                start_new_session=True,  # a group that can be ended as a whole
            )

    def ready(self) -> dict[str, Any]:
        """Wait until it serves. Returns the child's "engine start s", its "machine", the "class" of its model, its
        "graphs" (compiled, from the cache, or none), and "start s", which includes the start of Python and imports."""
        answer = self._answer()
        return {"start s": time.perf_counter() - self._begin} | answer

    def seconds(self, prompts: list[int], outputs: list[int], seed: str) -> float:
        """For requests of these prompt and output lengths, sent at once."""
        return self._ask("seconds", prompts=prompts, outputs=outputs, seed=seed)["seconds"]

    def profile(self, prompts: list[int], outputs: list[int], seed: str) -> dict[str, list[float]]:
        """Of such requests, on rank 0: by name of a kernel or of a function of CUDA, calls and microseconds."""
        return self._ask("profile", prompts=prompts, outputs=outputs, seed=seed)

    def memory(self) -> dict[str, float]:
        """GiB by title, over all ranks."""
        return self._ask("memory")

    def _ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the answer says why, or its absence
            self._process.stdin.write(json.dumps([what, arguments]) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            lines = [text.strip() for text in self._log.read_text(errors="replace").splitlines() if text.strip()]
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise EngineFailed(f"ended with {how}: {lines[-1][:300] if lines else 'without a message'}")
        answer = json.loads(line)
        if "failed" in answer:
            raise EngineFailed(answer["failed"])
        return answer

    def close(self, patience: float = CLOSING_SECONDS) -> None:
        """End it, by force after so many seconds, and whatever processes it has left."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):  # where nothing is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


def _plugins_of_others() -> list[str]:
    """vLLM's own implementations are measured as they are without us."""
    allowed = os.environ.get("VLLM_PLUGINS")
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    names = {point.name for group in groups for point in entry_points(group=group)} | {""}
    return sorted((names if allowed is None else set(allowed.split(","))) - {"titan_adapters"})
