"""The command `doctor`."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table


def doctor(
    folder: Annotated[Path | None, typer.Argument(help="A checkpoint folder to look at, too.")] = None,
    engine: Annotated[bool, typer.Option("--engine", help="Also look from a worker of an engine for it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what each process sees, and every known mistake with its fix; exits with 1 if there is an error."""
    from titan_adapters.doctor import examine

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    report = examine(folder, engine=engine)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        console = Console()
        table = Table(Column("", no_wrap=True), *(Column(process, overflow="fold") for process in report.views))
        for name, values in report.rows().items():
            table.add_row(name, *values, style="" if len(set(values)) == 1 else "bold yellow")
        console.print(table)
        for process, reason in report.not_looked_at.items():
            console.print(f"{process}: not looked at; {reason}", markup=False, highlight=False)
        for finding in report.findings:
            console.print(f"[{'red' if finding.severity == 'error' else 'yellow'}]{finding.severity}[/]")
            console.print(f"  {finding.problem}\n  Fix: {finding.fix}", markup=False, highlight=False)
        console.print("No mistakes found." if not report.findings else f"{len(report.findings)} found.")
    if not report.healthy:
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    app.command()(doctor)
