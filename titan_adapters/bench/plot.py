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
    axes.set_title(_title(data))
    axes.legend()
    figure.savefig(path)


def plot_growth(data: dict[str, Any], path: Path) -> None:
    """Time per token by size, one panel per point."""
    from matplotlib.figure import Figure

    curves = data["curves"]
    figure = Figure(figsize=(4.5 * max(1, len(curves)), 4), layout="constrained")
    panels = figure.subplots(1, max(1, len(curves)), squeeze=False)[0]
    for axes, (point, names) in zip(panels, curves.items()):
        for name, curve in names.items():
            label = f"{name}, exponent {curve['exponent']:.2f}" if "exponent" in curve else name
            axes.loglog(curve["sizes"], [1000 * s for s in curve["seconds per token"]], marker="o", label=label)
        axes.set(title=point.removesuffix(" tok/s"), xlabel=data["growth"], ylabel="ms per token")
        axes.legend()
    figure.suptitle(_title(data))
    figure.savefig(path)


def _title(data: dict[str, Any]) -> str:
    machine = data["machine"]
    return f"{data['options']['shape'] or data['options']['published']}, {machine.get('gpu', machine['cpu'])}"
