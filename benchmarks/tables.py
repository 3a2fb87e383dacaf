"""Writes the tables of docs/performance.md from `results/`, so that nobody copies figures by hand.

    python benchmarks/tables.py [--check]

A table stands between `<!-- table: FILE against NAME, ... -->` and `<!-- end -->`: a row for each file of `results/`
and implementation in it, by the name of the shape. `--check` changes nothing, and exits with 1 if a table is not what
the results give.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
DOCUMENT, RESULTS = ROOT / "docs/performance.md", ROOT / "benchmarks/results"
TABLE = re.compile(r"(?P<begin><!-- table: (?P<rows>[^>]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
POINTS = {
    r"prefill tok/s": "prefill",
    r"decode 1 tok/s": "decode 1",
    r"decode 32 tok/s": "decode 32",
    r"decode 256 tok/s": "decode 256",
    r"mixed tok/s": "mixed load",
    r"prefill of \d+ tok/s": "8k prompts",
    r"decode after \d+ tok/s": "decode after 8k",
}
"""Columns, by the names of their points."""
NAMES = {"native": "native", "transformers": "Transformers backend"}


def row(title: str, against: str, data: dict[str, Any]) -> str:
    """Ratios with the noise of the other, and "short" where a ratio is below 1 by more than that."""
    ratios = data["ratios"][against]
    cells = []
    for pattern in POINTS:
        found = next((ratio for point, ratio in ratios.items() if re.fullmatch(pattern, point)), None)
        short = " **short**" if found and found["short"] else ""
        cells.append(f"{found['ratio']:.3f} ({found['noise']:.1%}){short}" if found else "")
    return f"| {title}, {NAMES[against]} | {' | '.join(cells)} |"


def table(rows: str) -> str:
    """Of a marker's rows: "FILE against NAME, FILE against NAME"."""
    lines = [f"| shape, against | {' | '.join(POINTS.values())} |", "|---" * (len(POINTS) + 1) + "|"]
    for item in re.split(r",\s+", rows.strip()):
        file, _, against = item.partition(" against ")
        data = json.loads((RESULTS / f"{file}.json").read_text())
        shape = data["options"]["shape"] or "SmolLM2-135M"
        lines.append(row(f"[{shape}](../benchmarks/results/{file}.json)", against, data))
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """The document with each table as the results give it."""
    return TABLE.sub(lambda match: f"{match['begin']}{table(match['rows'])}{match['end']}", text)


def main(check: Annotated[bool, typer.Option(help="Only say whether the tables are up to date.")] = False) -> None:
    """Write the tables."""
    before = DOCUMENT.read_text()
    after = rewritten(before)
    if check:
        raise SystemExit(before != after)
    DOCUMENT.write_text(after)


if __name__ == "__main__":
    typer.run(main)
