"""Whether engines over two ranks give what one rank gives: tensor, pipeline and expert parallel, compiled.

    python benchmarks/parallel_check.py MODEL... [--eager] [--experts auto|fused|torch] [--output FILE.json]

MODEL is a checkpoint folder, or a registered model's name, whose tiny configs then get random weights. For a host with
two GPUs, where engines run with CUDA graphs and mixtures with fused kernels, or are refused. It also runs on a CPU,
with `--experts auto`. Engines run one after the other. Exits with 1 if anything differs.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import titan_adapters as ta

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "EP 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
LENGTHS = (1, 2, 3, 17, 64, 100)
"""Tokens of the prompts: fewer than ranks, as many, and more."""


def random_checkpoint(cls: type[ta.BaseTransformer], config: ta.TransformerConfig, folder: Path) -> Path:
    """Weights that are wide enough for greedy tokens to be far from ties. bf16, because CUDA's attention wants it."""
    config = config.model_copy(update={"dtype": "bfloat16"})
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(std=0.2)
    ta.save_checkpoint(model, folder, cast=True)
    return folder


def folders(model: str, scratch: Path) -> dict[str, Path]:
    """Checkpoints of one command-line argument, by title."""
    if Path(model).is_dir():
        return {model: Path(model)}
    cls = ta.get_model(model)
    return {
        f"{model}: {name}": random_checkpoint(cls, config, scratch / f"{model}-{index}")
        for index, (name, config) in enumerate(cls.tiny_configs().items())
    }


def generate(folder: Path, options: dict[str, Any], result: Path) -> None:
    """The child's part: one engine, all prompts at once, outputs pickled to `result`."""
    from titan_adapters.checkpoint import read_identity
    from titan_adapters.vllm.compare import comparison_sampling

    config = read_identity(folder).config
    start = time.perf_counter()
    llm = ta.vllm.LLM(checkpoint=folder, skip_tokenizer_init=True, max_num_seqs=8, **options)
    seconds = time.perf_counter() - start
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (length,), generator=draw).tolist() for length in LENGTHS]
    sampling = comparison_sampling(max_tokens=24)
    sampling.detokenize, sampling.ignore_eos = False, True
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    graphs = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    result.write_bytes(pickle.dumps({"outputs": outputs, "start": seconds, "graphs": str(graphs)}))


def run_child(folder: Path, options: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """What `generate` found, or the last lines of why it did not."""
    result = scratch / "result.pickle"
    result.unlink(missing_ok=True)
    environment = os.environ | {"PARALLEL_CHECK_CHILD": json.dumps([str(folder), options, str(result)])}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode or not result.exists():
        # A refusal of ours, among those of the processes around it, or else the end of it all.
        reason = done.stdout.rfind("titan_adapters.errors.")
        return {"failure": done.stdout[reason:][:600] if reason >= 0 else done.stdout[-600:]}
    return pickle.loads(result.read_bytes())


def main(
    models: list[str],
    eager: bool = False,
    experts: Annotated[str, typer.Option(help="auto, fused or torch")] = "fused",
    max_model_len: int = 128,
    output: Path | None = None,
) -> None:
    """Compare every layout of every model with one rank."""
    from titan_adapters.checkpoint import read_identity
    from titan_adapters.vllm.compare import compare_outputs

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for title, folder in [item for model in models for item in folders(model, Path(scratch)).items()]:
            mixture = bool(read_identity(folder).config.moe_specs())
            options: dict[str, Any] = {"enforce_eager": eager, "max_model_len": max_model_len}
            if mixture:
                options["additional_config"] = {"titan_experts": experts}
            reference = None
            for layout, sizes in LAYOUTS.items():
                if layout == "EP 2" and not mixture:
                    continue
                found = run_child(folder, options | sizes, Path(scratch))
                row = {"model": title, "layout": layout} | {k: v for k, v in found.items() if k != "outputs"}
                if "failure" not in found:
                    reference = found["outputs"] if layout == "one rank" else reference
                    if reference is not None:
                        row |= asdict(compare_outputs(found["outputs"], reference)) | {"points": None}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    table = Table("model", "layout", "graphs", "greedy tokens", "differ", "near ties", "logprob mean", "max", "start s")
    for row in rows:
        if "mismatches" in row:
            counts = (row["tokens"], len(row["mismatches"]), row["near_ties"])
            gaps = (f"{row['mean']:.5f}", f"{row['max']:.4f}", f"{row['start']:.1f}")
            table.add_row(row["model"], row["layout"], row["graphs"], *map(str, counts), *gaps)
        else:
            table.add_row(row["model"], row["layout"], row.get("failure", "nothing to compare with"))
    Console(width=200).print(table)
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n")
    raise SystemExit(any(row.get("mismatches", ["failed"]) for row in rows))


if __name__ == "__main__":
    if child := os.environ.get("PARALLEL_CHECK_CHILD"):
        folder, options, result = json.loads(child)
        generate(Path(folder), options, Path(result))
    else:
        typer.run(main)
