"""The `titan-adapters` command."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from titan_adapters.cli import bench, checkpoints, doctor, models, plan, serving, verify
from titan_adapters.errors import TitanError
from titan_adapters.registry import register_model

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def register(
    model: Annotated[
        list[str] | None, typer.Option("--register", metavar="PKG.MODULE:CLASS", help="Make this model known first.")
    ] = None,
) -> None:
    """Define a model once, train it in plain PyTorch, serve exactly that model on vLLM."""
    for path in model or []:
        register_model(path)


models.add_to(app)
checkpoints.add_to(app)
plan.add_to(app)
serving.add_to(app)
bench.add_to(app)
verify.add_to(app)
doctor.add_to(app)


def main() -> None:
    """Run the command; the library's own errors are printed without a traceback and exit with 1."""
    try:
        app()
    except TitanError as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False, highlight=False)
        sys.exit(1)
