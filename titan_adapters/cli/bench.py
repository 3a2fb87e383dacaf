"""The command `bench`: ours beside vLLM's own implementations."""

import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from titan_adapters.bench import IMPLEMENTATIONS
from titan_adapters.bench.growth import DEFAULTS, FACTORS, GROWTHS, SIZE_KEYS, variants
from titan_adapters.bench.plot import check_plotting, plot_growth, plot_ratios
from titan_adapters.bench.profile import check_profiling, profile_table
from titan_adapters.bench.report import Report, growth_table, table, write_json
from titan_adapters.bench.run import Results, Run, Settings
from titan_adapters.bench.shapes import SHAPES, random_checkpoint, write_shape
from titan_adapters.bench.workload import POINTS, Workload

Implementation = StrEnum("Implementation", IMPLEMENTATIONS)  # type: ignore[misc]
PointName = StrEnum("PointName", POINTS)  # type: ignore[misc]
Shape = StrEnum("Shape", list(SHAPES))  # type: ignore[misc]
Growth = StrEnum("Growth", GROWTHS)  # type: ignore[misc]


def bench(
    context: typer.Context,
    published: Annotated[Path | None, typer.Argument(help="Published checkpoint folder.", file_okay=False)] = None,
    native: Annotated[
        Path | None, typer.Argument(help="The same weights in our format; default: PUBLISHED.", file_okay=False)
    ] = None,
    shape: Annotated[Shape | None, typer.Option(help="Random weights in this shape instead.")] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="With --shape: write its weights to this folder, unless they are there, and load them."),
    ] = None,
    only: Annotated[list[Implementation] | None, typer.Option(help="Repeatable. Default: all.")] = None,
    point: Annotated[list[PointName] | None, typer.Option(help="Repeatable. Default: all.")] = None,
    growth: Annotated[
        Growth | None,
        typer.Option(
            help="Also fit growth of time per token: over --factor times the shape, --batch, or --long-length."
        ),
    ] = None,
    factor: Annotated[list[float] | None, typer.Option(help="Of --growth layers or dim. Repeatable. [1, 2, 4]")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, after one that warms up.")] = 3,
    batch: Annotated[list[int] | None, typer.Option(help="Requests decoded at once. Repeatable. [1, 32, 256]")] = None,
    decode_tokens: Annotated[int, typer.Option(min=2, help="Generated per request.")] = 128,
    prefill_requests: Annotated[int, typer.Option(min=1)] = 8,
    prefill_length: Annotated[int, typer.Option(min=1)] = 900,
    mixed_requests: Annotated[int, typer.Option(min=1)] = 64,
    long_requests: Annotated[int, typer.Option(min=1)] = 4,
    long_length: Annotated[list[int] | None, typer.Option(help="Prompts of this length. Repeatable. [8192]")] = None,
    long_tokens: Annotated[int, typer.Option(min=2, help="Generated after a long prompt.")] = 64,
    max_model_len: Annotated[int, typer.Option(help="Long prompts that don't fit are left out.")] = 1024,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of each engine.")] = 1,
    eager: bool = False,
    kv_cache_memory_gib: Annotated[
        float | None, typer.Option(help="KV cache per rank, the same for all; on a GPU, what lets engines share it.")
    ] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Of each engine; all of them are up.")] = None,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="More keyword arguments of vllm.LLM.")] = "{}",
    concurrent_start: Annotated[
        bool, typer.Option(help="Start all at once, which is quicker; start-up is not reported then.")
    ] = False,
    profile: Annotated[
        bool, typer.Option(help="Also: which kernels the time of a decode step, and of the prefill, goes to.")
    ] = False,
    start_repeats: Annotated[
        int, typer.Option(min=0, help="Start each so often in fresh processes; the first start has cold caches.")
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON, written anew after every round.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Ratios, or growth, as an image; needs matplotlib.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for what engines print; default: a new one.")] = None,
) -> None:
    """Compare vLLM's native implementation, its Transformers backend and ours, in interleaved rounds.

    Exits with 1 if ours failed; another implementation that fails is reported, and left out.
    """
    if plot is not None:
        check_plotting()
    names = [name for name in IMPLEMENTATIONS if not only or name in only]
    points, batches, long_lengths = tuple(point or POINTS), tuple(batch or (1, 32, 256)), tuple(long_length or (8192,))
    if growth == "batch":
        points, batches = ("decode",), tuple(batch or DEFAULTS["batch"])
    elif growth == "context":
        points, long_lengths = ("long",), tuple(long_length or DEFAULTS["context"])
    workload = Workload(
        points=tuple(p for p in POINTS if p in points and not (concurrent_start and p == "start")),
        batches=batches,
        decode_tokens=decode_tokens,
        prefill_requests=prefill_requests,
        prefill_length=prefill_length,
        mixed_requests=mixed_requests,
        long_requests=long_requests,
        long_lengths=long_lengths,
        long_tokens=long_tokens,
        max_model_len=max_model_len,
    )
    if profile:
        check_profiling(workload)
    if (shape is None) == (published is None):
        raise typer.BadParameter("give either PUBLISHED or --shape")
    if shape is None and (weights is not None or growth in SIZE_KEYS):
        raise typer.BadParameter("--weights, and --growth layers or dim, need --shape")
    if concurrent_start and kv_cache_memory_gib is None:
        raise typer.BadParameter("--concurrent-start needs --kv-cache-memory-gib: free memory changes meanwhile")
    options: dict[str, Any] = {"max_model_len": max_model_len, "max_num_seqs": max(batches)}
    options |= {"enforce_eager": eager, "tensor_parallel_size": tp}
    if kv_cache_memory_gib is not None:
        # vLLM wants the share of memory free that it then makes no use of.
        options |= {"kv_cache_memory_bytes": int(kv_cache_memory_gib * 2**30), "gpu_memory_utilization": 0.01}
    if gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = gpu_memory_utilization
    if shape is not None and weights is None:
        options["load_format"] = "dummy"
    options |= json.loads(engine_args)
    logs = logs or Path(tempfile.mkdtemp(prefix="titan-bench-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if "long" in workload.points and workload.fitting_lengths() != long_lengths:
        console.print("long prompts that don't fit --max-model-len with their output are left out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children are ended
    report = Report(["titan-adapters", *sys.argv[1:]], context.params, options, growth)

    def measure(size: int, folder: Path) -> None:
        def save(results: Results) -> None:
            report.runs[size] = results
            if output is not None:
                write_json(report.data(), output)

        folders = {name: (native or folder) if name == "ours" else folder for name in names}
        settings = Settings(folders, options, workload, repeats, start_repeats, concurrent_start, profile, logs)
        Run(settings, lambda text: console.print(text, markup=False), save).execute()

    if shape is None:
        assert published is not None
        measure(0, published)
    elif growth not in SIZE_KEYS:
        with _folder(SHAPES[shape], weights) as folder:
            measure(0, folder)
    else:
        for size, config in variants(SHAPES[shape], growth, tuple(factor or FACTORS)).items():
            console.print(f"{growth}: {size}")
            with _folder(config, weights and weights / str(size)) as folder:
                measure(size, folder)
    wide = Console()
    wide = wide if wide.is_terminal else Console(width=150)
    for results in report.runs.values():
        wide.print(table(results))
        for title, by_implementation in results.profiles.items():
            wide.print(profile_table(title, by_implementation))
    if growth is not None:
        wide.print(growth_table(report.data()))
    if plot is not None:
        (plot_growth if growth else plot_ratios)(report.data(), plot)
    if any("ours" in results.failed for results in report.runs.values()):
        raise typer.Exit(1)


@contextmanager
def _folder(shape: dict[str, Any], weights: Path | None) -> Iterator[Path]:
    """Of this shape: with random weights that stay in `weights`, or else without any, for as long as the context."""
    if weights is None:
        with tempfile.TemporaryDirectory(prefix="titan-bench-") as scratch:
            yield write_shape(shape, Path(scratch))
    else:
        yield random_checkpoint(shape, weights)


def add_to(app: typer.Typer) -> None:
    app.command()(bench)
