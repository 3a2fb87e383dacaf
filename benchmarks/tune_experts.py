"""Measure which tiles vLLM's Triton kernel of fused experts should use for a mixture's shape on this GPU.

    python benchmarks/tune_experts.py gpt-oss-20b [--tp 1] [--output titan_adapters/vllm/tuned]

vLLM reads such files by number of experts, width and GPU, has some for many shapes, and a rule of thumb for all others.
The file is written only if it is faster than what vLLM would do without it, and says by how much on the way. Every
candidate must also give what the rule of thumb gives (relative 2-norm, 2e-2 in bf16, whose rounding is 4e-3).
"""

import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import titan_adapters as ta
from titan_adapters.bench.report import write_json
from titan_adapters.bench.shapes import SHAPES
from titan_adapters.moe_spec import MoESpec

TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOLERANCE = 2e-2
Tiles = dict[str, int]
Run = Callable[[Tiles | None], Tensor]
"""One call of the kernels with given tiles, or with vLLM's own."""


def candidates(num_tokens: int) -> Iterator[Tiles]:
    """Few tokens wait for weights, and want narrow tiles with a long K; many want wide tiles."""
    if num_tokens <= 128:
        choices = [(16, 32, 64), (32, 64, 128), (64, 128, 256), (1,), (4,), (3, 4, 5)]
        rows = choices[0][: 1 if num_tokens <= 32 else 3]
    else:
        choices = [(64, 128), (128, 256), (64,), (1, 16), (4, 8), (3, 4)]
        rows = choices[0]
    for m, n, k, group, warps, stages in itertools.product(rows, *choices[1:]):
        shared_memory = 2 * stages * (m + n) * k
        if shared_memory <= 220 * 2**10 and m * n <= 128 * 256:
            yield {
                "BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": group,
                "num_warps": warps, "num_stages": stages,
            }  # fmt: skip


def experts(spec: MoESpec, dim: int, num_tokens: int, tp: int) -> Run:
    """The kernels on random weights, tokens and choices."""
    from vllm.model_executor.layers.fused_moe import fused_experts, override_config
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config

    width = spec.hidden_dim // tp
    torch.manual_seed(0)
    with torch.device("cuda"):
        options = {"dtype": torch.bfloat16}
        x = torch.randn(num_tokens, dim, **options)
        w13 = torch.randn(spec.num_experts, 2 * width, dim, **options) / dim**0.5
        w2 = torch.randn(spec.num_experts, dim, width, **options) / width**0.5
        chosen = torch.rand(num_tokens, spec.num_experts).topk(spec.top_k).indices.to(torch.int32)
        weights = torch.full(chosen.shape, 1 / spec.top_k)
        biases = [torch.randn(spec.num_experts, n, **options) if spec.bias else None for n in (2 * width, dim)]
    quant = biased_moe_quant_config(*biases) if spec.bias else None

    def run(tiles: Tiles | None) -> Tensor:
        with override_config(tiles):
            return fused_experts(x, w13, w2, weights, chosen, quant_config=quant)

    return run


def microseconds(run: Run, tiles: Tiles | None, num_tokens: int) -> float:
    """Of one call among several in a CUDA graph, where the host plays no part; the best of three replays."""
    calls = 8 if num_tokens <= 1024 else 2
    run(tiles)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run(tiles)
    found = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end) / calls)
    return min(found[1:])


def compile_all(spec: MoESpec, dim: int, tp: int, tiles: list[Tiles]) -> None:
    """In a process of its own: fill Triton's cache, which is what takes the time."""
    run = experts(spec, dim, 64, tp)
    for choice in tiles:
        run(choice)


def main(
    shape: Annotated[str, typer.Argument(help=f"A mixture among {', '.join(SHAPES)}.")],
    tp: Annotated[int, typer.Option(min=1, help="Ranks over which the width of each expert is spread.")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="That compile at once.")] = 8,
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("titan_adapters/vllm/tuned"),
) -> None:
    """Write vLLM's file of tiles by number of tokens."""
    _, config = ta.read_hf_config(SHAPES[shape])
    if not (specs := config.moe_specs()):
        raise SystemExit(f"{shape} has no mixture of experts.")
    spec = next(iter(specs.values()))
    every = list({json.dumps(tiles): tiles for tokens in TOKENS for tiles in candidates(tokens)}.values())
    print(f"compiling {len(every)} candidates", flush=True)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(compile_all, spec, config.dim, tp), [every[i::processes] for i in range(processes)]))
    os.environ["VLLM_TUNED_CONFIG_FOLDER"] = os.devnull  # what it is compared with is vLLM's own
    best: dict[int, Tiles] = {}
    gains = []
    for num_tokens in TOKENS:
        run = experts(spec, config.dim, num_tokens, tp)
        reference = run(None).float()
        own = microseconds(run, None, num_tokens)
        times = []
        for tiles in candidates(num_tokens):
            if (run(tiles).float() - reference).norm() > TOLERANCE * reference.norm():
                raise SystemExit(f"{tiles} gives another result for {num_tokens} tokens.")
            times.append((microseconds(run, tiles, num_tokens), tiles))
        fastest, best[num_tokens] = min(times, key=lambda pair: pair[0])
        gains.append(own / fastest)
        print(f"{num_tokens} tokens: {own:.0f} us, {fastest:.0f} with {best[num_tokens]}", flush=True)
    if statistics.geometric_mean(gains) < 1.02:
        raise SystemExit("vLLM's own tiles are as good; nothing is written.")
    write_json({str(tokens): tiles for tokens, tiles in best.items()}, output / file_name(spec, tp))


def file_name(spec: MoESpec, tp: int) -> str:
    """What vLLM looks for."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name

    name: Any = get_config_file_name(spec.num_experts, spec.hidden_dim // tp, None)
    return name


if __name__ == "__main__":
    typer.run(main)
