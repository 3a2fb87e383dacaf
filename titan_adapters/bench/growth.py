"""How cost grows with layers, width, batch and context."""

import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

from titan_adapters.bench.shapes import scaled

GROWTHS = ("layers", "dim", "batch", "context")
SIZE_KEYS = {"layers": "num_hidden_layers", "dim": "hidden_size"}
"""Of those that need a shape per size; the others are points of one run."""
FACTORS = (1.0, 2.0, 4.0)
DEFAULTS = {"batch": (1, 4, 16, 64, 256), "context": (1024, 2048, 4096, 8192)}

Medians = Mapping[str, Mapping[str, float]]
"""By implementation and point."""


def variants(shape: dict[str, Any], growth: str, factors: tuple[float, ...]) -> dict[int, dict[str, Any]]:
    """By size (layers, or hidden size): the shape with so many times of it."""
    shapes = [scaled(shape, **{growth: factor}) for factor in sorted(factors)]
    return {variant[SIZE_KEYS[growth]]: variant for variant in shapes}


def curves(growth: str, runs: Mapping[int, Medians]) -> dict[str, dict[str, dict[str, Any]]]:
    """Seconds per token by size, of every point with tokens per second.

    Args:
        runs: By size, or one run of any size where the points themselves have sizes.

    Returns:
        By point and implementation: "sizes", "seconds per token"; from two sizes on, "exponent" (the slope of the
        logarithms: 1 is proportional), "slope" and "intercept" of the straight line in seconds per token.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for run_size, medians in runs.items():
        for name, points in medians.items():
            for point, rate in points.items():
                title, size = (point, run_size) if growth in SIZE_KEYS else _sized(point)
                if size is not None and point.endswith("tok/s"):
                    found.setdefault(title, {}).setdefault(name, {})[size] = 1 / rate
    return {title: {name: _fit(by_size) for name, by_size in names.items()} for title, names in found.items()}


def _sized(point: str) -> tuple[str, int | None]:
    """ "decode 32 tok/s" -> "decode N tok/s", 32."""
    number = re.search(r"\d+", point)
    return (point, None) if number is None else (point.replace(number[0], "N"), int(number[0]))


def _fit(by_size: Mapping[int, float]) -> dict[str, Any]:
    sizes, seconds = zip(*sorted(by_size.items()))
    found: dict[str, Any] = {"sizes": sizes, "seconds per token": seconds}
    if len(sizes) > 1:
        line = statistics.linear_regression(sizes, seconds)
        power = statistics.linear_regression([math.log(n) for n in sizes], [math.log(s) for s in seconds])
        found |= {"exponent": power.slope, "slope": line.slope, "intercept": line.intercept}
    return found
