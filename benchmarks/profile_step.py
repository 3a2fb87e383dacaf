"""Where the GPU's time goes in one decode step, in vLLM's native model and in ours.

    python benchmarks/profile_step.py --shape qwen3-0.6b [--batch 1] [--layers 8] [--output FILE.json]

Random weights. Each implementation runs in a process of its own, one after the other, with CUDA graphs. Kernel times
are from torch's profiler, in microseconds per step, by what the kernels do; launches are what the host did per step.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from titan_adapters.bench.report import write_json
from titan_adapters.bench.shapes import SHAPES, write_shape

IMPLEMENTATIONS = ["native", "ours"]
KINDS = {  # the first whose part occurs in a kernel's name
    "attention": ("flash", "attention"),
    "kv cache write": ("reshape_and_cache",),
    "experts and their routing": ("moe", "topk", "swiglu"),
    "qk norm and rope": ("norm_rope", "rotary"),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas", "splitk"),
    "sampling": ("gumbel", "sample", "argmax", "softmax"),
    "copies": ("memcpy", "memset"),
    "norms, activations, additions": ("triton",),
}
LAUNCHES = {
    "graphs": ("cudaGraphLaunch",),
    "kernels": ("cudaLaunchKernel",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def child(implementation: str, shape: str, layers: int | None, batch: int, steps: int, result: str) -> None:
    """One engine; its kernels and launches per step go to `result`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler sees this process only
    from torch.profiler import ProfilerActivity, profile

    changes = {} if layers is None else {"num_hidden_layers": layers}
    folder = write_shape(SHAPES[shape] | changes, Path(tempfile.mkdtemp()) / shape)
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": batch, "load_format": "dummy"}
    options |= {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    import vllm

    if implementation == "ours":
        import titan_adapters as ta

        llm = ta.vllm.LLM(checkpoint=folder, **options)
    else:
        llm = vllm.LLM(str(folder), **options)

    def decode(tokens: int) -> None:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": list(range(10 + i, 26 + i))} for i in range(batch)]
        llm.generate(prompts, sampling, use_tqdm=False)

    measured = {}
    for tokens in (1, 1 + steps):  # what the prompts cost is taken off
        decode(tokens)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            decode(tokens)
        measured[tokens] = {e.key: (e.count, e.self_device_time_total) for e in profiled.key_averages()}
    few, many = measured[1], measured[1 + steps]
    per_step = {
        name: [(count - few.get(name, (0, 0))[0]) / steps, (time - few.get(name, (0, 0))[1]) / steps]
        for name, (count, time) in many.items()
    }
    kernels = {name: values for name, values in per_step.items() if many[name][1] > 0}
    launches = {
        kind: sum(count for name, (count, _) in per_step.items() if name.startswith(parts))
        for kind, parts in LAUNCHES.items()
    }
    Path(result).write_text(json.dumps({"kernels": kernels, "launches": launches}))


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")],
    layers: Annotated[int | None, typer.Option(help="Fewer layers than published.")] = None,
    batch: int = 1,
    steps: int = 64,
    output: Path | None = None,
) -> None:
    """Print microseconds per decode step by what kernels do, native against ours."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in IMPLEMENTATIONS:
            result, log = Path(scratch, f"{name}.json"), Path(scratch, f"{name}.log")
            arguments = json.dumps([name, shape, layers, batch, steps, str(result)])
            with log.open("w") as stream:
                subprocess.run([sys.executable, __file__, "--child", arguments], stdout=stream, stderr=stream)
            if not result.exists():
                raise SystemExit(f"{name} failed:\n{log.read_text()[-2000:]}")
            found[name] = json.loads(result.read_text())
    table = Table("microseconds per step", *IMPLEMENTATIONS, "difference", title=f"{shape}, batch {batch}")
    rows = {kind: [_total(found[name], kind) for name in IMPLEMENTATIONS] for kind in [*KINDS, "other"]}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    for kind, (native, ours) in rows.items():
        table.add_row(kind, f"{native:.1f}", f"{ours:.1f}", f"{ours - native:+.1f}")
    for kind in LAUNCHES:
        counts = [f"{found[name]['launches'][kind]:.1f}" for name in IMPLEMENTATIONS]
        table.add_row(f"launches: {kind}", *counts, "")
    Console(width=100).print(table)
    if output is not None:
        write_json({"shape": shape, "layers": layers, "batch": batch, "kinds": rows} | found, output)


def _total(found: dict[str, Any], kind: str) -> float:
    return sum(time for name, (_, time) in found["kernels"].items() if kind_of(name) == kind)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
    else:
        typer.run(main)
