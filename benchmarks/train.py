"""Training speed of ours against transformers' model of the same shape and weights: forward, loss and backward.

    python benchmarks/train.py qwen3-0.6b [--layers 8] [--batch 4] [--length 4096] [--output FILE.json]

Both are in one process, on the same tokens and with the same loss, interleaved (A B C, B C A, ...) so that drift of
the machine hits all alike. Each layer, and the loss, is compiled by itself, as torchtitan does it, because all layers
share what one takes to compile; `--compile whole` compiles the model at once. Transformers takes part once with each
attention that trains on this device; the ratio is to the faster one. First, all must agree on the loss and on the norm
of all gradients (relative, 2e-3 and 2e-2 in bf16, whose rounding is 4e-3, and 1e-5 and 1e-4 in fp32).
"""

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import titan_adapters as ta
from titan_adapters.bench.profile import per_step, profile_table
from titan_adapters.bench.report import write_json
from titan_adapters.bench.shapes import SHAPES
from titan_adapters.bench.worker import kernel_times, new_profiler

TOLERANCES = {"bfloat16": (2e-3, 2e-2), "float32": (1e-5, 1e-4)}
"""Of the loss, and of the norm of the gradients."""
PEERS = ["sdpa", "flex_attention"]


class Trainee(NamedTuple):
    """One implementation."""

    module: nn.Module
    select: Callable[[], None]
    """Makes the module this implementation: transformers' are one module."""
    loss: Callable[[Tensor, Tensor], Tensor]

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss(tokens, labels)
        loss.backward()
        return loss.detach()


def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    layers: Annotated[int | None, typer.Option(help="Instead of the shape's own number.")] = None,
    batch: int = 4,
    length: int = 4096,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Per repeat and implementation.")] = 5,
    peer: Annotated[list[str] | None, typer.Option(help=f"attn_implementation. Default: {', '.join(PEERS)}.")] = None,
    attention: Annotated[str, typer.Option(help="Our kernel: flex or reference. Default: flex on CUDA.")] = "",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    compiled: Annotated[Literal["layers", "whole", "nothing"], typer.Option("--compile")] = "layers",
    profiled: Annotated[bool, typer.Option("--profile", help="Also: which kernels a step's time goes to.")] = False,
    output: Path | None = None,
) -> None:
    """Measure and print; the exit code is 1 if there is nothing to compare, or if it is not the same function."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = attention or ("flex" if device.type == "cuda" else "reference")
    options = {"layers": layers, "batch": batch, "length": length, "repeats": repeats, "steps": steps, "dtype": dtype}
    options |= {"compiled": compiled, "attention": attention}
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    changes = {"dtype": dtype} if layers is None else {"dtype": dtype, "num_hidden_layers": layers}
    cls, config = ta.read_hf_config(SHAPES[shape] | changes)
    with device:
        ours = cls(config).to(getattr(torch, dtype))
        tokens, labels = torch.randint(config.vocab_size, (2, batch, length))
    theirs = stock(ours).to(device)
    ta.nn.use_kernels(ours, attention=attention)  # type: ignore[arg-type]

    if compiled == "layers":
        for layer in [*ours.layers, *theirs.get_submodule("model.layers").children()]:
            layer.compile(dynamic=False)
    trainees = {"ours": Trainee(ours, lambda: None, make_loss(ours, compiled))}
    their_loss = make_loss(lambda tokens: theirs(input_ids=tokens, use_cache=False).logits, compiled)
    for name in peer or PEERS:
        trainees[name] = Trainee(theirs, lambda name=name: theirs.set_attn_implementation(name), their_loss)

    console, left_out = Console(width=120), {}
    checks: dict[str, dict[str, float]] = {}
    for name, trainee in list(trainees.items()):
        started = time.perf_counter()
        try:
            checks[name] = first_step(trainee, tokens, labels)
        except Exception as error:  # an attention that can't train here or not this model
            if name == "ours":
                raise
            left_out[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            console.print(f"left out: {name}, {left_out[name]}", markup=False)
            theirs.zero_grad()
            del trainees[name]
        else:
            checks[name]["first s"] = time.perf_counter() - started
    agree = agreement(checks, *TOLERANCES[dtype])
    samples = measure(trainees, tokens, labels, repeats, steps)
    results = summarize(samples, batch * length)
    document = {"shape": shape, "options": options, "machine": machine(device), "left out": left_out}
    document |= {"checks": checks, "agree": agree, "results": results, "samples": samples}
    print_table(console, f"{shape}, {json.dumps(options)}", results, checks)
    if profiled:
        document["profiles"] = {name: profile_of(trainee, tokens, labels) for name, trainee in trainees.items()}
        console.print(profile_table("a step", document["profiles"]))
    if output is not None:
        write_json(document, output)
    problem = "The implementations don't compute the same function." if not agree else ""
    if len(trainees) == 1:
        problem = "No attention of transformers trains here; name another with --peer."
    if problem:
        console.print(problem)
        raise typer.Exit(1)


def stock(model: ta.BaseTransformer) -> nn.Module:
    """Transformers' model with the same weights, through our export."""
    with tempfile.TemporaryDirectory() as folder:
        ta.save_checkpoint(model, Path(folder) / "hf", "hf")
        return transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype="auto").train()


def make_loss(forward: Callable[[Tensor], Tensor], compiled: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(tokens, labels) -> mean cross-entropy of the logits in fp32."""

    def entropy(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    if compiled == "layers":
        entropy = torch.compile(entropy, dynamic=False)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return entropy(forward(tokens), labels)

    return torch.compile(loss, dynamic=False) if compiled == "whole" else loss


def first_step(trainee: Trainee, tokens: Tensor, labels: Tensor) -> dict[str, float]:
    """Compiles; the loss and the norm of all gradients."""
    trainee.select()
    loss = trainee.step(tokens, labels)
    squares = [p.grad.float().square().sum() for p in trainee.module.parameters() if p.grad is not None]
    result = {"loss": loss.item(), "grad norm": torch.stack(squares).sum().sqrt().item()}
    trainee.module.zero_grad()
    return result


def agreement(checks: dict[str, dict[str, float]], loss: float, norm: float) -> bool:
    """Whether all are as close to ours as that, relatively."""
    ours = checks["ours"]
    return all(
        abs(check[key] / ours[key] - 1) <= tolerance
        for check in checks.values()
        for key, tolerance in (("loss", loss), ("grad norm", norm))
    )


def measure(
    trainees: dict[str, Trainee], tokens: Tensor, labels: Tensor, repeats: int, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a step, and the GiB that it takes beside the weights; round after round."""
    cuda = tokens.device.type == "cuda"
    samples: dict[str, dict[str, list[float]]] = {name: {"ms": [], "GiB": []} for name in trainees}
    for repeat in range(-1, repeats):  # the first is a warm-up
        first = repeat % len(trainees)  # another begins each round, because who runs later finds a warmer machine
        for name in [*trainees][first:] + [*trainees][:first]:
            trainee = trainees[name]
            trainee.select()
            held = 0
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            started = time.perf_counter()
            for _ in range(steps if repeat >= 0 else 2):
                trainee.step(tokens, labels)
                trainee.module.zero_grad()
            if cuda:
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - started
            if repeat >= 0:
                samples[name]["ms"].append(1e3 * elapsed / steps)
                samples[name]["GiB"].append((torch.cuda.max_memory_allocated() - held) / 2**30 if cuda else 0.0)
    return samples


def profile_of(trainee: Trainee, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
    """Of one step; see `titan_adapters.bench.profile`."""
    trainee.select()
    with new_profiler() as profiler:
        trainee.step(tokens, labels)
    trainee.module.zero_grad()
    return per_step({}, kernel_times(profiler), 1)


def summarize(samples: dict[str, dict[str, list[float]]], num_tokens: int) -> dict[str, dict[str, float]]:
    medians = {name: statistics.median(values["ms"]) for name, values in samples.items()}
    return {
        name: {
            "ms": medians[name],
            "tok/s": 1e3 * num_tokens / medians[name],
            "spread": (max(values["ms"]) - min(values["ms"])) / medians[name],
            "step GiB": max(values["GiB"]),
            "their ms / ours": medians[name] / medians["ours"],
        }
        for name, values in samples.items()
    }


def print_table(console: Console, title: str, results: dict, checks: dict) -> None:
    columns = list(results["ours"])
    table = Table("", *columns, *checks["ours"], title=title)
    for name, result in results.items():
        values = [f"{result[c]:.1%}" if c == "spread" else f"{result[c]:.4g}" for c in columns]
        table.add_row(name, *values, *(f"{value:.6g}" for value in checks[name].values()))
    console.print(table)
    peers = {name: result["ms"] for name, result in results.items() if name != "ours"}
    if peers:
        best = min(peers, key=lambda name: peers[name])
        ratio, spread = results[best]["their ms / ours"], results[best]["spread"]
        console.print(f"ratio to the best of transformers ({best}): {ratio:.3f}, its spread {spread:.1%}")


def machine(device: torch.device) -> dict[str, str]:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    return {"python": platform.python_version(), "device": name, **versions}


if __name__ == "__main__":
    typer.run(main)
