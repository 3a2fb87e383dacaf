"""Plots of what was measured."""

import importlib.util
from pathlib import Path
from typing import Any

from titan_adapters.errors import ConfigError


def check_plotting() -> None:
    """Before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("A plot needs matplotlib, which is not installed.", fix="pip install matplotlib.")


def plot_ratios(data: dict[str, Any], path: Path) -> None:
    """Bars of ours against each other implementation, with the noise of the other as whiskers."""
    from matplotlib.figure import Figure

    points = list(data["medians"].get("ours", {}))
    others = data["ratios"]
    figure = Figure(figsize=(max(6, 1.2 * len(points)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(others))
    for index, (name, ratios) in enumerate(others.items()):
        shared = [point for point in points if point in ratios]
        where = [points.index(point) + (index - (len(others) - 1) / 2) * width for point in shared]
        noise = [ratios[point]["noise"] or 0 for point in shared]
        axes.bar(where, [ratios[p]["ratio"] for p in shared], width, yerr=noise, capsize=3, label=f"ours : {name}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(points)), [point.removesuffix(" tok/s") for point in points], rotation=30, ha="right")
    axes.set_ylabel("above 1: ours is better")
    shape, machine = data["options"].get("shape"), data["machine"]
    axes.set_title(f"{shape or data['options'].get('published')}, {machine.get('gpu', machine['cpu'])}")
    axes.legend()
    figure.savefig(path)
