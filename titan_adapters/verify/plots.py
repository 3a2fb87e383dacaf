"""The plots of a report, as SVG that takes its colours from the page around it."""

import io
import re
from typing import TYPE_CHECKING, Any

from titan_adapters.verify.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stand-ins that no plot uses otherwise; the page's own variables take their place, which differ in light and dark.
COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--grid)",
    "#030303": "var(--series-1)",
    "#040404": "var(--series-2)",
    "#050505": "var(--bad)",
}
INK, GRID, OURS, TORCH, BAD = COLOURS
SHOWN = 4000
"""Points in a scatter plot, at most."""
LEAST = 1e-3
"""Share of the allowed error below which a stage is drawn as if it had this one; many have none."""


def plots(report: Report) -> dict[str, str]:
    """Caption -> SVG. Empty without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return {}
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "titan_adapters",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": GRID,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    drawings = {
        "Each stage alone, run again in fp64 on the engine's own input: its error as a share of what rounding in the "
        "served dtype may make. Above the line is another function.": _stages if report.stages else None,
        "Logprob of every compared token: plain torch in a wider precision, and the served engine.": _scatter,
        "Differences of logprobs from plain torch in a wider precision: the served engine's, and those of plain torch "
        "in the served dtype, which is rounding alone.": _histogram,
    }
    with matplotlib.rc_context(style):
        return {caption: _svg(draw, report) for caption, draw in drawings.items() if draw is not None}


def _svg(draw: Any, report: Report) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3) if draw is _stages else (4.4, 3.4), layout="constrained")
    draw(figure.subplots(), report)
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    # No metadata and no addresses: the page refers to nothing outside of itself.
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, variable)
    return svg


def _stages(axes: "Axes", report: Report) -> None:
    layers = [stage.layer for stage in report.stages if stage.layer is not None]
    margin = max(1, len(set(layers)) // 12)  # so that the labels of both ends have room
    first, last = -margin, max(layers, default=0) + margin
    shown = [stage for stage in report.stages if stage.verdict != "not proven" and stage.allowed > 0]
    for colour, label, wrong in ((OURS, "equal up to rounding", False), (BAD, "another function", True)):
        points = []
        for stage in shown:
            x = stage.layer if stage.layer is not None else first if stage.kind == "embedding" else last
            if (stage.verdict == "wrong") == wrong:
                points.append((x, max(stage.error / stage.allowed, LEAST)))
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, s=14, color=colour, alpha=0.6, linewidths=0, label=label)
    axes.axhline(1, color=INK, linewidth=1, linestyle="--")
    axes.set_yscale("log")
    ticks = list(range(0, last - margin + 1, margin))
    axes.set_xticks([first, *ticks, last], ["embed", *map(str, ticks), "head"])
    axes.set_xlabel("layer")
    axes.set_ylabel("error / allowed")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def _scatter(axes: "Axes", report: Report) -> None:
    points = report.points[:: max(1, len(report.points) // SHOWN)]
    if not points:
        return
    reference, ours = zip(*points, strict=True)
    lowest = min(*reference, *ours)
    axes.plot([lowest, 0], [lowest, 0], color=INK, linewidth=1, linestyle="--")
    axes.scatter(reference, ours, s=10, color=OURS, alpha=0.5, linewidths=0)
    axes.set_xlabel("plain torch, nats")
    axes.set_ylabel("engine, nats")


def _histogram(axes: "Axes", report: Report) -> None:
    ours = [engine - reference for reference, engine in report.points]
    if not ours:
        return
    widest = max(map(abs, [*ours, *report.noise])) or 1e-6
    bins = [widest * (i / 20 - 1) for i in range(41)]
    axes.hist(ours, bins=bins, color=OURS, alpha=0.45, label="engine")
    axes.hist(report.noise, bins=bins, histtype="step", color=TORCH, linewidth=1.5, label="plain torch, same dtype")
    axes.set_yscale("log")
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 3))
    axes.set_xlabel("difference, nats")
    axes.set_ylabel("tokens")
    axes.legend(loc="upper right", fontsize=8)
