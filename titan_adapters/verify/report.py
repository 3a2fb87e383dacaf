"""The report: rows with verdicts, as data, as a table for a terminal, and as a folder with a page."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from titan_adapters.verify.stages import StageVerdict

Verdict = Literal["proven", "failed", "not proven"]
COLOURS: dict[Verdict, str] = {"proven": "green", "failed": "bold red", "not proven": "yellow"}
JSON_NAME, PAGE_NAME = "report.json", "report.html"


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Row(_Data):
    """One claim about the engine."""

    name: str
    verdict: Verdict
    why: str
    """What was done and found; what is wrong; or why nothing can be said."""
    engine: str = ""
    """Which of the engines: a key of `Report.engines`."""
    figures: dict[str, float | int | str] = Field(default_factory=dict)


class Report(_Data):
    """What one run of `verify` found."""

    headline: str
    """One sentence: whether the engine computes the checkpoint's model, and if not, where it first does not."""
    rows: list[Row]
    stages: list[StageVerdict] = Field(default_factory=list)
    checkpoint: str
    model: str
    command: str
    """Of the process that ran this."""
    when: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    platform: dict[str, str]
    engines: dict[str, dict[str, str]]
    """Settings of every engine that was started, by name; "served" is the one under test."""
    prompts: str
    """Which tokens were used, and the seed of those that were drawn."""
    rules: str
    seconds: dict[str, float]
    """Wall-clock time by phase."""
    points: list[tuple[float, float]] = Field(default_factory=list)
    """(plain torch one precision wider, served engine): logprobs of prompt and generated tokens."""
    noise: list[float] = Field(default_factory=list)
    """Differences (plain torch in the served dtype minus wider) on the same tokens."""

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def failed(self) -> bool:
        return self.count("failed") > 0

    def row(self, name: str) -> Row:
        """The row of this name; KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]

    def save(self, folder: str | Path) -> list[Path]:
        """Write `report.json` and `report.html`, one self-contained page; returns their paths."""
        from titan_adapters.verify.html import page

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON_NAME).write_text(self.model_dump_json(indent=1))
        (folder / PAGE_NAME).write_text(page(self))
        return [folder / JSON_NAME, folder / PAGE_NAME]

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """From the JSON file that `save` wrote."""
        return cls.model_validate_json(Path(path).read_text())

    def __rich__(self) -> Group:
        columns = (Column("claim"), Column("verdict"), Column("why", overflow="fold", ratio=1))
        table = Table(*columns, title=Text(f"{self.model}, {self.checkpoint}"), expand=True)
        for row in self.rows:
            table.add_row(row.name, Text(row.verdict, COLOURS[row.verdict]), Text(row.why))
        headline = Text(self.headline, "bold red" if self.failed else "bold green")
        return Group(table, headline, Text(self.summary()))

    def summary(self) -> str:
        counts = ", ".join(f"{self.count(verdict)} {verdict}" for verdict in COLOURS)
        return f"{counts}; {sum(self.seconds.values()):.0f} s"
