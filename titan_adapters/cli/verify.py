"""The command `verify`: what is proven of the model in an engine."""

import json
import os
from argparse import Namespace
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from titan_adapters.cli.checkpoints import DType, Folder
from titan_adapters.errors import ConfigError


class Against(StrEnum):
    torch = "torch"
    hf = "hf"
    native = "native"


def verify(
    context: typer.Context,
    folder: Folder,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dtype: Annotated[DType | None, typer.Option(help="Served dtype; default: the checkpoint's.")] = None,
    eager: Annotated[bool, typer.Option("--eager/--compiled", help="How the model will be served.")] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(help="One text per line, or JSON lines with lists of token ids.", exists=True, dir_okay=False),
    ] = None,
    against: Annotated[
        list[Against] | None,
        typer.Option(help="Besides plain torch: transformers, or vLLM's own implementation. Repeatable."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for report.json and report.html.")] = None,
    seed: Annotated[int, typer.Option(help="Of random tokens.")] = 0,
) -> None:
    """Prove that an engine computes a checkpoint's model, and report what was proven; exits with 1 if anything failed.

    Further options are vLLM's own (--max-model-len, --block-size, ...): the settings that will be served.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        # On a CPU, starting a process for each engine takes longer than all else. In this one, the same is computed.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    options = {name: size for name, size in sizes.items() if size > 1}
    options |= {"enforce_eager": eager} | engine_options(context.args)
    import titan_adapters.vllm as serving

    console = Console(stderr=True)
    with console.status("starting") as status:
        report = serving.verify(
            folder,
            against=[choice.value for choice in against or [Against.torch]],
            prompts=None if prompts is None else read_prompts(prompts),
            dtype=dtype and dtype.value,
            output=output,
            seed=seed,
            progress=lambda phase: status.update(f"{phase} ...") if console.is_terminal else console.print(phase),
            **options,
        )
    Console().print(report)
    if output is not None:
        typer.echo(f"{output / 'report.html'}")
    if report.failed:
        raise typer.Exit(1)


def engine_options(arguments: list[str]) -> dict[str, Any]:
    """Those of vLLM's engine options that were given on a command line."""
    if not arguments:
        return {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="titan-adapters verify"))
    unset = object()  # which no default replaces, so that what was given can be told from what was not
    parsed = parser.parse_args(arguments, Namespace(**{field.name: unset for field in fields(EngineArgs)}))
    return {name: value for name, value in vars(parsed).items() if value is not unset}


def read_prompts(file: Path) -> list[str | list[int]]:
    """One prompt per line that is not empty: JSON lists of token ids, or texts."""
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    if not all(line.lstrip().startswith("[") for line in lines):
        return [*lines]
    found, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            tokens = json.loads(line)
        except json.JSONDecodeError:
            tokens = line
        if isinstance(tokens, list) and all(type(token) is int for token in tokens):
            found.append(tokens)
        else:
            problems.append(f"line {number}: {tokens!r}")
    if problems:
        raise ConfigError(f"{file} has lines that are no lists of token ids.", problems, fix="write [1, 2, 3].")
    return [*found]


def add_to(app: typer.Typer) -> None:
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(verify)
