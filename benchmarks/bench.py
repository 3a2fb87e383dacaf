"""Throughput of ours against vLLM's native implementation and its Transformers backend, side by side.

    python benchmarks/bench.py PUBLISHED NATIVE [--repeats 3] [--eager] [--output FILE.json]
    python benchmarks/bench.py --shape qwen3-30b-a3b [--only native --only ours] ...

PUBLISHED and NATIVE hold the same weights in the two formats (`make demo` leaves them in .demo). With --shape there
are no weights: each engine makes up its own (`load_format="dummy"`), for speed only. Each implementation
lives in a process of its own for the whole run. Rounds are interleaved (A B C, A B C, ...) and only one process works
at a time, so that drift of the machine hits all alike. Ratios are of medians, to native.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from shapes import SHAPES

IMPLEMENTATIONS = ["native", "transformers", "ours"]
HIGHER_IS_BETTER = {"start s": False, "host peak GiB": False}


class Engine:
    """One implementation in a child process that answers a line of JSON per request."""

    def __init__(self, name: str, folder: Path, options: dict, lengths: dict):
        worker = Path(__file__).with_name("worker.py")
        command = [sys.executable, str(worker), name, str(folder), json.dumps(options), json.dumps(lengths)]
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
    published: Annotated[Path | None, typer.Argument(help="Published checkpoint folder.")] = None,
    native: Annotated[Path | None, typer.Argument(help="The same weights in our format.")] = None,
    shape: Annotated[str | None, typer.Option(help=f"Instead of folders, one of {', '.join(SHAPES)}.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Implementation; may be repeated. Default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    eager: bool = False,
    max_model_len: int = 1024,
    batch: Annotated[list[int] | None, typer.Option(help="Requests at once; may be repeated.")] = None,
    decode_tokens: Annotated[int, typer.Option(help="Generated per request.")] = 64,
    prefill_length: int = 900,
    prefill_requests: int = 4,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Of each engine; all three are up.")] = None,
    output: Path | None = None,
) -> None:
    """Measure start, memory, prefill and decode of the implementations and print ratios."""
    console = Console(stderr=True)
    batches = batch or [1, 8, 32]
    implementations = [name for name in IMPLEMENTATIONS if name in (only or IMPLEMENTATIONS)]
    options: dict = {"max_model_len": max_model_len, "max_num_seqs": max(batches), "enforce_eager": eager}
    if shape is not None:
        published = native = Path(tempfile.mkdtemp(prefix=f"{shape}-"))
        (published / "config.json").write_text(json.dumps(SHAPES[shape]))
        options["load_format"] = "dummy"
    if published is None or native is None:
        raise typer.BadParameter("give PUBLISHED and NATIVE, or --shape")
    if gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = gpu_memory_utilization
    lengths = {"decode_tokens": decode_tokens, "prefill": [prefill_requests, prefill_length]}
    engines: dict[str, Engine] = {}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in implementations}

    def record(name: str, result: dict) -> None:
        for point, value in result.items():
            samples[name].setdefault(point, []).append(value)

    for name in implementations:
        console.print(f"starting {name} ...")
        engines[name] = Engine(name, native if name == "ours" else published, options, lengths)
        record(name, engines[name].ask("start"))
    points = ["prefill", *(f"decode {size}" for size in batches)]
    for point in points:  # one unrecorded round to warm up
        for name in implementations:
            engines[name].ask(point)
    for repeat in range(repeats):
        for point in points:
            console.print(f"round {repeat + 1} of {repeats}: {point}")
            for name in implementations:
                record(name, engines[name].ask(point))
    for name in implementations:
        record(name, engines[name].ask("memory"))
        engines[name].close()
    report(samples, output, options | {"repeats": repeats, "shape": shape, "batches": batches} | lengths)


def report(samples: dict[str, dict[str, list[float]]], output: Path | None, options: dict) -> None:
    medians = {name: {p: statistics.median(v) for p, v in points.items()} for name, points in samples.items()}
    others = [name for name in samples if name != "ours"]
    table = Table("point", *samples, *(f"ours / {name}" for name in others), *(f"spread of {name}" for name in others))
    for point in medians["ours"]:
        better = "" if HIGHER_IS_BETTER.get(point, True) else " (less is better)"
        values = [f"{medians[name][point]:.1f}" for name in samples]
        ratios = [f"{medians['ours'][point] / medians[name][point]:.3f}" for name in others]
        table.add_row(point + better, *values, *ratios, *(_spread(samples[name][point]) for name in others))
    Console().print(table)
    if output is not None:
        import torch
        import transformers
        import vllm

        versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        machine = {"python": platform.python_version(), "cpu": cpu_model(), **versions}
        if torch.cuda.is_available():
            machine["gpu"] = torch.cuda.get_device_name()
        data = {"options": options, "machine": machine, "medians": medians, "samples": samples}
        temporary = output.with_suffix(".tmp")
        temporary.write_text(json.dumps(data, indent=2) + "\n")
        temporary.rename(output)


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return "one run"
    return f"{(max(values) - min(values)) / statistics.median(values):.1%}"


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    typer.run(main)
