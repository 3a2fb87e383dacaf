"""Whether engines over two ranks give what one rank gives, and whether training over two ranks is training on one.

    python benchmarks/parallel_check.py [MODEL[:N]...] [--dtype float32|bfloat16] [--jobs 8] [--eager] [--experts auto]

MODEL is a checkpoint folder, or a registered model's name, whose tiny configs (or the N-th of them) then get random
weights. Without one: llama, qwen3 (also with one kv head), gemma3, gpt_oss and qwen3_moe. Made for a host with two
GPUs, where engines run compiled with CUDA graphs and mixtures with fused kernels, or are refused; also runs on a CPU,
with `--eager --experts auto`. An engine over one rank takes one GPU, several ones take turns; every other child takes
two. One line per case; the exit code is 1 if anything differs: in float32 greedy tokens away from ties, the prompts'
logprobs by more than 1e-4 of their norm, or a loss by more than 1e-5 of it; in bfloat16 logprobs by more than 3e-2.
"""

import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional as F

import titan_adapters as ta
from titan_adapters.bench.report import write_json

DEFAULT = ("llama:0", "qwen3:0", "qwen3:1", "gemma3_text:0", "gpt_oss:0", "qwen3_moe:0")
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "EP 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
TRAINED: dict[str, dict[str, Any]] = {
    "trained TP 2": {"axes": {"tp": 2}},
    "trained TP 2 with sequence parallel": {"axes": {"tp": 2}, "sequence_parallel": True},
    "trained FSDP 2": {"axes": {"fsdp": 2}},
    # Both in one mesh; an axis of one rank goes through the same code.
    "trained FSDP 2 and TP 1": {"axes": {"fsdp": 2, "tp": 1}},
    "trained FSDP 1 and TP 2": {"axes": {"fsdp": 1, "tp": 2}},
    "trained FSDP 2 and TP 2": {"axes": {"fsdp": 2, "tp": 2}},
}
"""Those that need more GPUs than there are, are left out, and named."""
LENGTHS = (1, 2, 3, 17, 64, 100)
"""Tokens of the prompts: fewer than ranks, as many, and more."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative, of prompt logprobs. Steps of bf16 are 4e-3, and a token that rounding sends to another expert moves
further: at most 1.4e-2 in all on two H200. A wrong function was at 0.17."""
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats between the two best tokens, within which rounding may choose either. In bf16 mismatches are only stated: a
token with another expert may be far from a tie."""
LOSS_TOLERANCE = 1e-5
CHILD = "PARALLEL_CHECK_CHILD"


# ----- in child processes


def generate(result: Path, folder: str, options: dict[str, Any]) -> None:
    """One engine, all prompts at once."""
    from titan_adapters.checkpoint import read_identity
    from titan_adapters.vllm.compare import comparison_sampling

    config = read_identity(Path(folder)).config
    start = time.perf_counter()
    llm = ta.vllm.LLM(checkpoint=folder, skip_tokenizer_init=True, max_num_seqs=8, **options)
    seconds = time.perf_counter() - start
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (length,), generator=draw).tolist() for length in LENGTHS]
    sampling = comparison_sampling(max_tokens=24)
    sampling.detokenize, sampling.ignore_eos = False, True
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    graphs = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    result.write_bytes(pickle.dumps({"outputs": outputs, "start": seconds, "graphs": getattr(graphs, "name", "none")}))


def train(result: Path, model: str, folder: str, layout: dict[str, Any]) -> None:
    """Four steps in fp32, alone without a layout, and a DCP checkpoint. Losses are those of all rows."""
    axes = layout.get("axes", {})
    _, cls, config = next(tiny_configs(model))
    cuda = torch.cuda.is_available()
    rank = int(os.environ.get("RANK", 0))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    built = cls(config.model_copy(update={"dtype": "float32"})).to(device)
    if axes:
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
        mesh = torch.distributed.init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        ta.parallelize(built, mesh, sequence_parallel=layout.get("sequence_parallel", False))
    optimizer, losses = torch.optim.SGD(built.parameters(), lr=0.5, momentum=0.9), []
    tokens, labels = torch.randint(config.vocab_size, (2, 4, 24), generator=torch.Generator().manual_seed(1)).to(device)
    if "fsdp" in axes:
        tokens, labels = (whole.chunk(axes["fsdp"])[mesh.get_local_rank("fsdp")] for whole in (tokens, labels))
    for _ in range(4):
        loss = F.cross_entropy(built(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if "fsdp" in axes:
            torch.distributed.all_reduce(mean, group=mesh.get_group("fsdp"))
            mean /= axes["fsdp"]
        losses.append(mean.item())
    ta.save_checkpoint(built, folder, "dcp")
    if rank == 0:
        result.write_bytes(pickle.dumps({"losses": losses}))
    if axes:
        torch.distributed.destroy_process_group()


# ----- in the parent


def tiny_configs(model: str) -> Iterator[tuple[str, type[ta.BaseTransformer], ta.TransformerConfig]]:
    """(title, class, config) of MODEL's tiny configs, or the one of MODEL:N."""
    name, _, index = model.partition(":")
    cls = ta.get_model(name)
    for i, config in enumerate(cls.tiny_configs().values()):
        if index in ("", str(i)):
            yield f"{name}:{i}", cls, config


def random_checkpoint(cls: type[ta.BaseTransformer], config: ta.TransformerConfig, folder: Path) -> Path:
    """Weights that are wide enough for greedy tokens to be far from ties."""
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(std=0.2)
    ta.save_checkpoint(model, folder, cast=True)
    return folder


@dataclass
class Children:
    """Child processes, each with its own GPUs, port and compile cache."""

    scratch: Path
    logs: Path
    timeout: float
    gpus: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def run(self, title: str, ranks: int, function: Callable[..., None], *args: Any, torchrun: bool = False) -> dict:
        """What `function(*args)` found, or under "failure" why it did not."""
        number = next(self.numbers)
        result, log = self.scratch / f"{number}.pickle", self.logs / f"{re.sub('[^a-zA-Z0-9]+', '-', title)}.log"
        environment = os.environ | {
            CHILD: json.dumps([function.__name__, str(result), *args]),
            "VLLM_PORT": str(29600 + 50 * number),
            "VLLM_CACHE_ROOT": str(self.scratch / f"cache-{number}"),
        }
        if self.gpus:
            first = number % len(self.gpus) if ranks == 1 else 0
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[first : first + ranks])
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if torchrun else []
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *launcher, __file__],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | str = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                code = f"not done after {self.timeout:.0f} s"
            if code:
                with suppress(ProcessLookupError):  # also ranks that outlive what started them
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code or not result.exists():
            return {"failure": f"exit {code}: {_reasons(log.read_text(errors='replace'))}"}
        return pickle.loads(result.read_bytes())


def _reasons(log: str) -> str:
    """The first errors in a log: those that follow are of the processes around it."""
    found = re.findall(r"(?:[\w.]+\.)?\w*(?:Error|Exception)\b: [^\n]+(?:\n[^\n]*  - [^\n]+)*", log)
    return " | ".join(list(dict.fromkeys(text[:300] for text in found))[:2]) or log[-300:].strip()


def ranks_of(layout: dict[str, Any]) -> int:
    """Of a training; one without a layout."""
    return math.prod(layout.get("axes", {}).values())


def report(title: str, found: dict, reference: dict, dtype: str) -> dict[str, Any]:
    """Print one line about a case. Returns its figures, with "ok"."""
    from titan_adapters.vllm.compare import compare_outputs

    row: dict[str, Any] = {"case": title} | {k: v for k, v in found.items() if k != "outputs"}
    if failure := found.get("failure") or (reference.get("failure") and "nothing to compare with"):
        row |= {"ok": False, "failure": failure}
        text = failure
    elif "losses" in found:
        pairs = zip(found["losses"], reference["losses"], strict=True)
        row["loss"] = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        row["ok"] = row["loss"] <= LOSS_TOLERANCE
        text = f"losses {', '.join(f'{loss:.5f}' for loss in found['losses'])}, relative {row['loss']:.1e}"
    else:
        gap = compare_outputs(found["outputs"], reference["outputs"], NEAR_TIE[dtype])
        row |= asdict(gap) | {"points": None}
        row["ok"] = gap.relative <= TOLERANCE[dtype] and not (gap.mismatches and dtype == "float32")
        text = (
            f"logprobs relative {gap.relative:.1e}, at most {gap.max:.1e}; "
            f"of {gap.tokens} greedy tokens {len(gap.mismatches)} differ, {gap.near_ties} near ties; "
            f"graphs {found['graphs']}, start {found['start']:.0f} s"
        )
    print(f"{'ok  ' if row['ok'] else 'FAIL'} {title}: {text}", flush=True)
    return row


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Folder, MODEL or MODEL:N.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the random checkpoints: float32 or bfloat16.")] = "float32",
    training: Annotated[str, typer.Option(help="Which MODEL:N is trained too, in float32; empty: none.")] = "llama:0",
    jobs: Annotated[int, typer.Option(help="Child processes at once.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for each child.")] = 300,
    eager: bool = False,
    experts: Annotated[str, typer.Option(help="auto, fused or torch")] = "fused",
    attention_backend: Annotated[str | None, typer.Option(help="vLLM's name of one.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for what the children print.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for all figures.")] = None,
) -> None:
    """Compare every layout of every model with one rank, and parallel training with training on one."""
    from titan_adapters.checkpoint import read_identity

    if dtype == "float32":  # or Triton's kernels, vLLM's for attention and experts among them, multiply in TF32
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        scratch = Path(folder)
        children = Children(scratch, logs or scratch / "logs", timeout, visible_gpus())
        children.logs.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"enforce_eager": eager, "max_model_len": 128, "kv_cache_memory_bytes": 2**28}
        if children.gpus:  # which is asserted to be free, but with a KV cache of a given size not used
            options["gpu_memory_utilization"] = 0.02
        if attention_backend:
            options["attention_backend"] = attention_backend

        def serve(title: str, checkpoint: str, layout: str) -> dict:
            mixture = bool(read_identity(Path(checkpoint)).config.moe_specs())
            chosen = {"additional_config": {"titan_experts": experts}} if mixture else {}
            ranks = 1 if layout == "1 rank" else 2
            return children.run(title, ranks, generate, checkpoint, options | chosen | LAYOUTS[layout])

        def trained(title: str, layout: dict[str, Any], served: str) -> tuple[dict, dict]:
            """The training, and what an engine makes of its checkpoint."""
            target = str(scratch / title)
            found = children.run(title, ranks_of(layout), train, training, target, layout, torchrun=bool(layout))
            return found, found if "failure" in found else serve(f"{title}, served {served}", target, served)

        engines: list[tuple[str, Sequence[str], list[Future]]] = []
        for title, checkpoint in [item for model in models or DEFAULT for item in folders(model, dtype, scratch)]:
            mixture = bool(read_identity(checkpoint).config.moe_specs())
            layouts = [layout for layout in LAYOUTS if layout != "EP 2" or mixture]
            started = [pool.submit(serve, f"{title} {layout}", str(checkpoint), layout) for layout in layouts]
            engines.append((title, layouts, started))
        alone = pool.submit(trained, f"{training} trained alone", {}, "1 rank") if training else None
        trainings = {}
        for name, layout in (TRAINED if training else {}).items():
            if children.gpus and ranks_of(layout) > len(children.gpus):
                print(f"left out {training} {name}: there are {len(children.gpus)} GPUs", flush=True)
            else:
                trainings[name] = pool.submit(trained, f"{training} {name}", layout, "TP 2")
        rows = []
        for title, layouts, started in engines:
            reference = started[0].result()
            for layout, future in zip(layouts, started, strict=True):
                rows.append(report(f"{title} {layout}", future.result(), reference, dtype))
        for name, pair in trainings.items():
            assert alone is not None
            for what, found, reference in zip(("", ", served TP 2"), pair.result(), alone.result(), strict=True):
                rows.append(report(f"{training} {name}{what}", found, reference, "float32"))
    if output is not None:
        write_json(rows, output)
    good = sum(row["ok"] for row in rows)
    print(f"{good} of {len(rows)} cases are as they should be ({dtype}).")
    raise SystemExit(good < len(rows))


def folders(model: str, dtype: str, scratch: Path) -> list[tuple[str, Path]]:
    """(title, checkpoint) of one command-line argument."""
    if Path(model).is_dir():
        return [(model, Path(model))]
    return [
        (title, random_checkpoint(cls, config.model_copy(update={"dtype": dtype}), scratch / title))
        for title, cls, config in tiny_configs(model)
    ]


def visible_gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


if __name__ == "__main__":
    if child := os.environ.get(CHILD):
        function, result, *args = json.loads(child)
        {"generate": generate, "train": train}[function](Path(result), *args)
    else:
        typer.run(main)
