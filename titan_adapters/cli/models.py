"""Commands about model definitions: `models`, `check`, `new`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from titan_adapters.registry import list_models
from titan_adapters.scaffold import Template, class_name, new_model

if TYPE_CHECKING:
    from titan_adapters.testing import CheckResult

OUTCOMES = {"passed": "[green]pass[/]", "failed": "[red]FAIL[/]", "skipped": "[yellow]skip[/]"}


def models() -> None:
    """List the models that are registered or installed."""
    table = Table("model", "class", "source")
    for info in list_models():
        table.add_row(info.name, info.path, info.source)
    Console().print(table)


def check(
    model: Annotated[str | None, typer.Argument(help="A registered name, or pkg.module:Class.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every known model.")] = False,
    engine: Annotated[
        bool, typer.Option("--engine", help="Also compare a vLLM engine with plain torch, a few seconds per config.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Only a table of models and checks.")] = False,
    fields: Annotated[
        bool, typer.Option("--fields", help="Only a Markdown table of spec fields and who computes them.")
    ] = False,
) -> None:
    """Run the contract suite on a model's tiny configs; exits with 1 if any check fails."""
    from titan_adapters.testing import capability_table, check_model, field_table

    if fields:
        typer.echo(field_table(), nl=False)
        return
    if every == (model is not None):
        raise typer.BadParameter("give a MODEL or --all")
    names = [info.name for info in list_models()] if model is None else [model]
    results = {name: check_model(name, engine=engine) for name in names}
    if markdown:
        typer.echo(capability_table(results), nl=False)
    else:
        for name, found in results.items():
            _print(name, found)
    if any(r.outcome == "failed" for found in results.values() for r in found):
        raise typer.Exit(1)


def new(
    name: Annotated[str, typer.Argument(help="The model's name, in snake_case.")],
    like: Annotated[Template, typer.Option(help="What to start from.")] = Template.llama,
    directory: Annotated[Path, typer.Option(file_okay=False, help="Where to write.")] = Path(),
) -> None:
    """Write a small complete model and its test, to change into yours. Existing files are left alone."""
    model, test = new_model(name, like, directory)
    typer.echo(
        f"{model}  the model; change what is marked CHANGE\n{test}  its test\n\nNext:\n"
        f"  python -m pytest {test}\n"
        f"  PYTHONPATH={directory} titan-adapters check {name}:{class_name(name)}"
    )


def _print(model: str, results: "list[CheckResult]") -> None:
    configs = list(dict.fromkeys(r.config for r in results if r.config))
    table = Table(Column("check", no_wrap=True), *configs, title=f"{model}: contract suite", caption_justify="left")
    for name in dict.fromkeys(r.check for r in results):
        cells = {r.config: OUTCOMES[r.outcome] for r in results if r.check == name}
        table.add_row(name, *(cells.get(c, cells.get("", "")) for c in configs))
    console = Console()
    console.print(table)
    for r in results:
        if r.outcome != "passed":
            console.print(f"{OUTCOMES[r.outcome]} {r.check} [dim]{r.config}[/]")
            console.print(f"    {r.detail}", markup=False, highlight=False)
    counts = {outcome: sum(r.outcome == outcome for r in results) for outcome in OUTCOMES}
    console.print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))


def add_to(app: typer.Typer) -> None:
    app.command()(models)
    app.command()(check)
    app.command()(new)
