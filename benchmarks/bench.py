"""Throughput of ours against vLLM's native implementation and its Transformers backend, side by side.

    python benchmarks/bench.py PUBLISHED NATIVE [--repeats 3] [--eager] [--output FILE.json]

PUBLISHED and NATIVE hold the same weights in the two formats (`make demo` leaves them in .demo). Each implementation
lives in a process of its own for the whole run. Rounds are interleaved (A B C, A B C, ...) and only one process works
at a time, so that drift of the machine hits all alike. Ratios are of medians, to native.
"""

import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

IMPLEMENTATIONS = ("native", "transformers", "ours")
HIGHER_IS_BETTER = {"start s": False, "peak GiB": False}


class Engine:
    """One implementation in a child process that answers a line of JSON per request."""

    def __init__(self, name: str, folder: Path, options: dict):
        worker = Path(__file__).with_name("worker.py")
        command = [sys.executable, str(worker), name, str(folder), json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: str) -> dict:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise SystemExit(f"the benchmark process ended with {self._process.wait()}; see its messages above")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def main(
    published: Path,
    native: Path,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    eager: bool = False,
    max_model_len: int = 1024,
    batch: Annotated[list[int] | None, typer.Option(help="Requests at once; may be repeated.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Of each engine; all three are up.")] = None,
    output: Path | None = None,
) -> None:
    """Measure start, memory, prefill and decode of the three implementations and print ratios."""
    console = Console(stderr=True)
    batches = batch or [1, 8, 32]
    options: dict = {"max_model_len": max_model_len, "max_num_seqs": max(batches), "enforce_eager": eager}
    if gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = gpu_memory_utilization
    engines: dict[str, Engine] = {}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in IMPLEMENTATIONS}

    def record(name: str, result: dict) -> None:
        for point, value in result.items():
            samples[name].setdefault(point, []).append(value)

    for name in IMPLEMENTATIONS:
        console.print(f"starting {name} ...")
        engines[name] = Engine(name, native if name == "ours" else published, options)
        record(name, engines[name].ask("start"))
    points = ["prefill", *(f"decode {size}" for size in batches)]
    for point in points:  # one unrecorded round to warm up
        for name in IMPLEMENTATIONS:
            engines[name].ask(point)
    for repeat in range(repeats):
        for point in points:
            console.print(f"round {repeat + 1} of {repeats}: {point}")
            for name in IMPLEMENTATIONS:
                record(name, engines[name].ask(point))
    for name in IMPLEMENTATIONS:
        record(name, engines[name].ask("memory"))
        engines[name].close()
    report(samples, output, options | {"repeats": repeats})


def report(samples: dict[str, dict[str, list[float]]], output: Path | None, options: dict) -> None:
    medians = {name: {p: statistics.median(v) for p, v in points.items()} for name, points in samples.items()}
    table = Table("point", *IMPLEMENTATIONS, "ours / native", "ours / transformers", "spread of native")
    for point in medians["native"]:
        values = [medians[name][point] for name in IMPLEMENTATIONS]
        low, high = min(samples["native"][point]), max(samples["native"][point])
        ratios = [values[2] / values[0], values[2] / values[1]]
        better = "" if HIGHER_IS_BETTER.get(point, True) else " (less is better)"
        spread = f"{(high - low) / values[0]:.1%}" if len(samples["native"][point]) > 1 else "one run"
        table.add_row(point + better, *(f"{v:.1f}" for v in values), *(f"{r:.3f}" for r in ratios), spread)
    Console().print(table)
    if output is not None:
        import torch
        import transformers
        import vllm

        versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        machine = {"python": platform.python_version(), "cpu": cpu_model(), **versions}
        data = {"options": options, "machine": machine, "medians": medians, "samples": samples}
        temporary = output.with_suffix(".tmp")
        temporary.write_text(json.dumps(data, indent=2) + "\n")
        temporary.rename(output)


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    typer.run(main)
