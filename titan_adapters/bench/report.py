"""What the samples say: medians, ratios, noise; as JSON and as a table."""

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from titan_adapters.bench.growth import curves
from titan_adapters.bench.run import Results

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""By implementation and point."""


@dataclass(frozen=True)
class Ratio:
    """Ours against another implementation at one point."""

    ratio: float
    """Of medians; above 1 ours is better: more tokens per second, or fewer seconds or bytes."""
    noise: float | None
    """(max - min) / median of the other's own rounds; None if there was only one."""
    short: bool | None
    """Whether the ratio is below 1 - noise; None if the noise is unknown."""


def higher_is_better(point: str) -> bool:
    return point.endswith("tok/s")


def medians(samples: Samples) -> dict[str, dict[str, float]]:
    return {name: {p: statistics.median(values) for p, values in points.items()} for name, points in samples.items()}


def ratios(samples: Samples) -> dict[str, dict[str, Ratio]]:
    """By other implementation and point, of the points that both have."""
    ours = samples.get("ours", {})
    return {
        name: {point: ratio(ours[point], values, higher_is_better(point)) for point, values in points.items()}
        for name, points in ((n, {p: v for p, v in s.items() if p in ours}) for n, s in samples.items() if n != "ours")
    }


def ratio(ours: Sequence[float], theirs: Sequence[float], higher: bool) -> Ratio:
    speed = statistics.median(ours) / statistics.median(theirs)
    value = speed if higher else 1 / speed
    spread = noise(theirs)
    return Ratio(value, spread, None if spread is None else value < 1 - spread)


def noise(values: Sequence[float]) -> float | None:
    return None if len(values) < 2 else (max(values) - min(values)) / statistics.median(values)


def document(results: Results) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "classes": results.classes,
        "graphs": results.graphs,
        "failed": results.failed,
        "medians": medians(results.samples),
        "ratios": {n: {p: asdict(r) for p, r in points.items()} for n, points in ratios(results.samples).items()},
        "samples": results.samples,
        "profiles": results.profiles,
    }


@dataclass
class Report:
    """Everything that is kept of one command.

    Args:
        command: As it was typed.
        options: Of the command, with what was not typed.
        engine: Keyword arguments of `vllm.LLM`.
        growth: What grows, if anything does.
        runs: By size where each size is a run of its own, or the only run, under 0.
    """

    command: Sequence[str]
    options: Mapping[str, Any]
    engine: Mapping[str, Any]
    growth: str | None
    runs: dict[int, Results] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """For JSON, and for plots."""
        machine = {"cpu": cpu_model(), "titan_adapters": version("titan-adapters")}
        for results in self.runs.values():
            machine |= results.machine
        header = {"command": self.command, "options": self.options, "engine": self.engine, "machine": machine}
        found = {size: document(results) for size, results in self.runs.items()}
        if self.growth is None:
            return header | found[0]
        by_size = {size: run["medians"] for size, run in found.items()}
        return header | {"growth": self.growth, "curves": curves(self.growth, by_size), "runs": found}


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(found)} x {found[0]}" if found else platform.processor()


def write_json(data: Any, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=2, default=str) + "\n")
    temporary.rename(path)


def growth_table(data: Mapping[str, Any]) -> Table:
    """Milliseconds per token by size, and the exponent of growth, of `Report.data`."""
    grid = Table("point", "implementation", "size: ms per token", "exponent", title=f"growth with {data['growth']}")
    for point, names in data["curves"].items():
        for name, curve in names.items():
            pairs = zip(curve["sizes"], curve["seconds per token"])
            times = ", ".join(f"{size}: {1000 * seconds:.4g}" for size, seconds in pairs)
            grid.add_row(point, name, times, f"{curve['exponent']:.2f}" if "exponent" in curve else "-")
    return grid


def table(results: Results) -> Table:
    """Medians of all, and ours against the others."""
    found, against = medians(results.samples), ratios(results.samples)
    names = list(results.samples)
    titles = ["point", *names, *(f"ours : {name}" for name in against)]
    grid = Table(
        *(Column(title, justify="left" if title == "point" else "right") for title in titles),
        caption="Medians. Ratio above 1: ours is better. Noise: (max - min) / median of the other's own rounds.",
    )
    grid.add_row("class", *(results.classes.get(name, "-") for name in names), *("" for _ in against))
    for point in dict.fromkeys(point for points in found.values() for point in points):
        values = [f"{found[name][point]:.4g}" if point in found[name] else "-" for name in names]
        grid.add_row(point, *values, *(_cell(points.get(point)) for points in against.values()))
    for name, reason in results.failed.items():
        grid.add_row("failed", *(reason if name == other else "" for other in names))
    return grid


def _cell(found: Ratio | None) -> str:
    if found is None:
        return "-"
    spread = "one run" if found.noise is None else f"noise {found.noise:.1%}"
    return f"{found.ratio:.3f} ({spread})" + (" SHORT" if found.short else "")
