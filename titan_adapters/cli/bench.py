"""The command `bench`: ours beside vLLM's own implementations."""

import json
import platform
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from titan_adapters.bench import IMPLEMENTATIONS
from titan_adapters.bench.shapes import SHAPES, write_random_checkpoint, write_shape
from titan_adapters.bench.workload import POINTS, Workload

Implementation = StrEnum("Implementation", IMPLEMENTATIONS)  # type: ignore[misc]
PointName = StrEnum("PointName", POINTS)  # type: ignore[misc]
Shape = StrEnum("Shape", list(SHAPES))  # type: ignore[misc]


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
    start_repeats: Annotated[
        int, typer.Option(min=0, help="Start each so often in fresh processes; the first start has cold caches.")
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON, written anew after every round.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Ratios as an image; needs matplotlib.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for what engines print; default: a new one.")] = None,
) -> None:
    """Compare vLLM's native implementation, its Transformers backend and ours, in interleaved rounds.

    Exits with 1 if ours failed; another implementation that fails is reported, and left out.
    """
    from titan_adapters.bench.plot import check_plotting, plot_ratios
    from titan_adapters.bench.report import document, table, write_json
    from titan_adapters.bench.run import Results, Run, Settings

    if plot is not None:
        check_plotting()
    names = [name for name in IMPLEMENTATIONS if not only or name in only]
    workload = Workload(
        points=tuple(p for p in POINTS if (not point or p in point) and not (concurrent_start and p == "start")),
        batches=tuple(batch or (1, 32, 256)),
        decode_tokens=decode_tokens,
        prefill_requests=prefill_requests,
        prefill_length=prefill_length,
        mixed_requests=mixed_requests,
        long_requests=long_requests,
        long_lengths=tuple(long_length or (8192,)),
        long_tokens=long_tokens,
        max_model_len=max_model_len,
    )
    options: dict[str, Any] = {"max_model_len": max_model_len, "max_num_seqs": max(workload.batches)}
    options |= {"enforce_eager": eager, "tensor_parallel_size": tp}
    if kv_cache_memory_gib is not None:
        # vLLM wants the share of memory free that it then makes no use of.
        options |= {"kv_cache_memory_bytes": int(kv_cache_memory_gib * 2**30), "gpu_memory_utilization": 0.01}
    if gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = gpu_memory_utilization
    if (shape is None) == (published is None) or (weights is not None and shape is None):
        raise typer.BadParameter("give PUBLISHED, or --shape, with or without --weights")
    if concurrent_start and len(names) > 1 and kv_cache_memory_gib is None:
        raise typer.BadParameter("--concurrent-start needs --kv-cache-memory-gib: free memory changes meanwhile")
    if shape is not None and weights is None:
        options["load_format"] = "dummy"
    options |= json.loads(engine_args)
    logs = logs or Path(tempfile.mkdtemp(prefix="titan-bench-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, soft_wrap=True, highlight=False)

    def save(results: Results) -> None:
        results.machine["cpu"] = cpu_model()
        if output is not None:
            write_json(document(results, sys.argv, context.params, options), output)

    with tempfile.TemporaryDirectory(prefix="titan-bench-") as scratch:
        if shape is not None and weights is not None:
            if not (weights / "config.json").exists():
                console.print(f"writing random weights to {weights}")
                write_random_checkpoint(SHAPES[shape], weights)
            published = weights
        elif shape is not None:
            published = write_shape(SHAPES[shape], Path(scratch) / shape)
        assert published is not None
        folders = {name: (native or published) if name == "ours" else published for name in names}
        run = Run(
            Settings(folders, options, workload, repeats, start_repeats, concurrent_start, logs),
            say=lambda text: console.print(text, markup=False),
            save=save,
        )
        results = run.execute()
    wide = Console()
    wide = wide if wide.is_terminal else Console(width=150)
    wide.print(table(results))
    if plot is not None:
        plot_ratios(document(results, sys.argv, context.params, options), plot)
    if "ours" in results.failed:
        raise typer.Exit(1)


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(found)} x {found[0]}" if found else platform.processor()


def add_to(app: typer.Typer) -> None:
    app.command()(bench)
