"""Commands about checkpoint folders: `config`, `inspect`, `convert`, `fingerprint`."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from titan_adapters.checkpoint import convert_checkpoint, open_weights, read_identity
from titan_adapters.checkpoint.api import DEFAULT_SHARD_BYTES
from titan_adapters.fingerprints import dtype_name, fingerprint, fingerprint_differences, total
from titan_adapters.hf_config import emit_hf_config, write_hf_config
from titan_adapters.hf_diff import HFDiff, diff_hf_config

Folder = Annotated[Path, typer.Argument(help="A native or published checkpoint folder.", exists=True, file_okay=False)]


class Format(StrEnum):
    native = "native"
    hf = "hf"


class DType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def config(
    folder: Folder,
    published: Annotated[
        bool, typer.Option("--published", help="The stock architecture's config.json instead.")
    ] = False,
    diff: Annotated[
        Path | None,
        typer.Option(help="Compare the stock architecture's config with this config.json, or the one in this folder."),
    ] = None,
) -> None:
    """Print the config that an engine is given for this checkpoint, as JSON.

    With --diff, only what differs; exits with 1 if anything does.
    """
    identity = read_identity(folder)
    if diff is not None:
        _print_diff(diff_hf_config(identity.model, identity.config, diff))
        return
    if published:
        data = write_hf_config(identity.model, identity.config)
    else:
        data = emit_hf_config(identity.model, identity.config, identity.names)
    typer.echo(json.dumps(data, indent=2))


def _print_diff(diff: HFDiff) -> None:
    console = Console()
    if not diff.same_family:
        console.print("Another family: compared key by key; a key that one of them lacks may still mean the same.")
    if diff.differences:
        table = Table(*(Column(title, overflow="fold") for title in ("field", "ours", "theirs")))
        for difference in diff.differences:
            table.add_row(difference.field, str(difference.ours), str(difference.theirs))
        console.print(table)
    console.print(f"{len(diff.differences)} fields differ, {diff.num_equal} keys say the same", highlight=False)
    if diff.differences:
        raise typer.Exit(1)


def inspect(folder: Folder) -> None:
    """List every tensor from headers alone, after checking them against the index."""
    weights = open_weights(folder)
    table = Table(*(Column(title, overflow="fold") for title in ("tensor", "dtype", "shape", "file")))
    for name, header in weights.headers.items():
        table.add_row(name, dtype_name(header.dtype), str(list(header.shape)), header.file)
    console = Console()
    console.print(table)
    files = {header.file for header in weights.headers.values()}
    console.print(f"{len(weights.headers)} tensors in {len(files)} files, {weights.nbytes:,} bytes", highlight=False)


def convert(
    source: Folder,
    target: Annotated[Path, typer.Argument(help="Folder to create.")],
    to: Annotated[Format, typer.Option(help="Ours, or the stock architecture's.")] = Format.native,
    dtype: Annotated[DType | None, typer.Option(help="Store and serve in this dtype; default: the source's.")] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Of the model's names, in a DCP folder with several models.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing checkpoint folder.")] = False,
    max_shard_bytes: Annotated[int, typer.Option(min=1)] = DEFAULT_SHARD_BYTES,
) -> None:
    """Stream a checkpoint into the other format; tokenizer files come along."""
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("convert", total=None)
        identity = convert_checkpoint(
            source,
            target,
            to.value,
            dtype=dtype and dtype.value,
            prefix=prefix,
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
            progress=lambda done, total, name: bar.update(task, completed=done, total=total),
        )
    typer.echo(f"{target}: {identity.model.model_type}, {identity.config.dtype}, {to.value} names")


def fingerprints(
    folder: Folder,
    other: Annotated[
        Path | None, typer.Argument(help="Another folder, to list what differs.", exists=True, file_okay=False)
    ] = None,
    dtype: Annotated[DType | None, typer.Option(help="Cast first; default: what the config says.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print a hash of each parameter, by native name, and one of all: the same for every format of a checkpoint.

    With two folders, only what differs; exits with 1 if anything does.
    """
    cast = None if dtype is None else getattr(torch, dtype.value)
    found = fingerprint(folder, dtype=cast)
    if other is None:
        if as_json:
            typer.echo(json.dumps({"parameters": found, "total": total(found)}, indent=2))
            return
        for name, text in found.items():
            typer.echo(f"{text}  {name}")
        typer.echo(f"{total(found)}  all {len(found)}")
        return
    differing = fingerprint_differences(found, fingerprint(other, dtype=cast))
    if as_json:
        typer.echo(json.dumps({"differing": differing}, indent=2))
    else:
        for line in differing:
            typer.echo(line)
        typer.echo(f"{len(differing)} of {len(found)} parameters differ")
    if differing:
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    app.command()(config)
    app.command()(inspect)
    app.command()(convert)
    app.command("fingerprint")(fingerprints)
