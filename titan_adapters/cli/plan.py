"""The command `plan`: what each rank would hold of a model."""

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from titan_adapters.checkpoint import read_identity
from titan_adapters.config import TransformerConfig
from titan_adapters.contract import BaseTransformer
from titan_adapters.parallel import DryRun, PlannedTensor, dry_run
from titan_adapters.parallel_sizes import legal_sizes
from titan_adapters.registry import get_model


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_FOLDER",
            help="A folder with titan.json or config.json (weights are not needed), or a model, for its first tiny "
            "config.",
        ),
    ],
    tp: Annotated[int, typer.Option(min=1, help="Ranks over which heads, widths and the vocabulary are split.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks over which whole experts are distributed.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Stages over which layers are distributed.")] = 1,
) -> None:
    """List what each rank would hold of a model's weights, without memory and without other processes.

    Sizes that don't fit are refused with the reasons and with those that do. Shapes are those of training
    (`ta.parallelize`); an engine splits alike, but rounds the vocabulary up, and its expert-parallel ranks are its
    tensor-parallel ones.
    """
    cls, config = _resolve(model)
    run = dry_run(cls, config, tp=tp, ep=ep, pp=pp)
    columns = ("tensor", "style", "shape", "a rank's part")
    table = Table(*(Column(title, overflow="fold") for title in columns), title=f"{cls.model_type}, {config.dtype}")
    for row in _rows(run):
        table.add_row(*row)
    console = Console()
    console.print(table)
    held = Table("rank", Column("bytes of weights", justify="right"), Column("of the model", justify="right"))
    for rank, nbytes in run.bytes_by_rank().items():
        held.add_row(rank, f"{nbytes:,}", f"{nbytes / run.nbytes():.1%}")
    console.print(held)
    console.print(f"{run.nbytes():,} bytes in all", highlight=False)
    legal = legal_sizes(config)
    for name, sizes in (("tp", legal.tp), ("ep", legal.ep), ("pp", legal.pp)):
        console.print(f"legal {name}: {', '.join(map(str, sizes))}", highlight=False)


def _resolve(model: str) -> tuple[type[BaseTransformer], TransformerConfig]:
    if Path(model).is_dir():
        identity = read_identity(model)
        return identity.model, identity.config
    cls = get_model(model)
    return cls, next(iter(cls.tiny_configs().values()))


def _rows(run: DryRun) -> list[tuple[str, ...]]:
    """Table rows; layers that are alike share one."""
    layers: dict[tuple[str, ...], list[int]] = {}
    for tensor in run.tensors:
        name, parts, layer = tensor.name, _parts(tensor), -1
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            name, layer = f"layers.{{}}.{rest}", int(number)
        layers.setdefault((name, tensor.style, _shape(tensor.shape), parts), []).append(layer)
    return [(name.format(_ranges(found)), *rest) for (name, *rest), found in layers.items()]


def _parts(tensor: PlannedTensor) -> str:
    """The parts that ranks hold, each once."""
    return " or ".join(dict.fromkeys(_shape(shape) for shape in tensor.held.values()))


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2,5"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def add_to(app: typer.Typer) -> None:
    app.command()(plan)
