"""The report as one page that refers to nothing outside of itself."""

from collections.abc import Iterable, Mapping
from html import escape

from titan_adapters.verify.plots import plots
from titan_adapters.verify.report import Report, Row
from titan_adapters.verify.stages import StageVerdict

STYLE = """
:root { color-scheme: light dark; --paper: #fbfbf9; --card: #fff; --ink: #1c1e21; --soft: #5f6670; --grid: #dcdfe3;
  --good: #1a7f4b; --bad: #c4302b; --open: #9a6700; --series-1: #2864c8; --series-2: #c2620e; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --card: #1c1f25; --ink: #e6e8eb; --soft: #9aa3ad;
  --grid: #343942; --good: #4cc38a; --bad: #ff7b72; --open: #d9a52c; --series-1: #79a8ff; --series-2: #ffa657; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 66rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .75rem; }
p { margin: .5rem 0; } .soft { color: var(--soft); } code { font-size: .9em; overflow-wrap: anywhere; }
.banner { border-left: 6px solid var(--good); background: var(--card); padding: 1rem 1.25rem; border-radius: 6px;
  margin: 1.25rem 0; font-size: 1.1rem; box-shadow: 0 0 0 1px var(--grid); overflow-wrap: anywhere; }
.banner.failed { border-color: var(--bad); }
.card { background: var(--card); border-radius: 6px; box-shadow: 0 0 0 1px var(--grid); overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .5rem .75rem; vertical-align: top; }
tbody tr > * { border-top: 1px solid var(--grid); }
th { font-weight: 600; white-space: nowrap; }
thead th { color: var(--soft); font-size: .85rem; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.badge { font-weight: 600; white-space: nowrap; }
td.proven { color: var(--good); } td.failed, td.wrong { color: var(--bad); }
td.not-proven { color: var(--open); } td.why { overflow-wrap: anywhere; min-width: 18rem; }
.figures { color: var(--soft); font-size: .85rem; margin-top: .2rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; padding: .75rem; } figure.wide { grid-column: 1 / -1; } figure svg { width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .85rem; } summary { cursor: pointer; padding: .5rem 0; }
"""
MARKS = {"proven": "✓ proven", "failed": "✗ failed", "not proven": "? not proven"}


def page(report: Report) -> str:
    """HTML, UTF-8."""
    drawn = plots(report)
    figures = "".join(
        f'<figure class="card{" wide" if i == 0 and report.stages else ""}">{svg}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for i, (caption, svg) in enumerate(drawn.items())
    )
    failed = " failed" if report.failed else ""
    parts = [
        f"<h1>{escape(report.model)}</h1>",
        f'<p class="soft"><code>{escape(report.checkpoint)}</code> · {escape(report.when)}</p>',
        f'<div class="banner{failed}">{escape(report.headline)}</div>',
        f"<p>{escape(report.summary())}. Command: <code>{escape(report.command)}</code></p>",
        "<h2>Claims</h2>",
        '<div class="card"><table><thead><tr><th>Claim</th><th>Verdict</th><th>Why</th></tr></thead><tbody>',
        *map(_row, report.rows),
        "</tbody></table></div>",
        "<h2>Plots</h2>",
        f'<div class="plots">{figures}</div>' if drawn else "<p>matplotlib is not installed, so there are none.</p>",
        "<h2>In words</h2>",
        *_words(report),
        "<h2>How rounding was told from another function</h2>",
        f"<p>{escape(report.rules)}</p>",
        "<h2>Settings</h2>",
        f"<p>{escape(report.prompts)}.</p>",
        _engines(report.engines),
        "<h2>Where</h2>",
        _pairs({**report.versions, **report.platform}),
        "<h2>Time</h2>",
        _pairs({phase: f"{seconds:.1f} s" for phase, seconds in report.seconds.items()}),
        _stages(report.stages),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{escape(report.model)}: verify</title><style>{STYLE}</style></head><body>'
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _row(row: Row) -> str:
    figures = " · ".join(f"{name} {_number(value)}" for name, value in row.figures.items())
    small = f'<div class="figures">{escape(figures)}</div>' if figures else ""
    kind = row.verdict.replace(" ", "-")
    return (
        f'<tr><th>{escape(row.name)}</th><td class="badge {kind}">{MARKS[row.verdict]}</td>'
        f'<td class="why">{escape(row.why)}{small}</td></tr>'
    )


def _words(report: Report) -> Iterable[str]:
    groups = {
        "proven": "Proven, for these weights, prompts, settings and this machine",
        "failed": "Failed",
        "not proven": "Not proven, so it may or may not hold",
    }
    for verdict, title in groups.items():
        names = [row.name for row in report.rows if row.verdict == verdict]
        if names:
            yield f"<p><strong>{title}:</strong> {escape(', '.join(names))}.</p>"
    yield (
        "<p>A proof here is a measurement: on these prompts the engine's logprobs are as near to the author's model as "
        "the author's model in the same dtype is to itself in a wider one. Nothing is said about other weights, other "
        "settings, another machine, or sampling.</p>"
    )


def _engines(engines: Mapping[str, Mapping[str, str]]) -> str:
    names = list(dict.fromkeys(name for settings in engines.values() for name in settings))
    head = "".join(f"<th>{escape(engine)}</th>" for engine in engines)
    rows = "".join(
        f"<tr><th>{escape(name)}</th>"
        + "".join(f"<td>{escape(settings.get(name, ''))}</td>" for settings in engines.values())
        + "</tr>"
        for name in names
    )
    return f'<div class="card"><table><thead><tr><th>Engine</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _pairs(values: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
    return f'<div class="card"><table><tbody>{rows}</tbody></table></div>'


def _stages(stages: list[StageVerdict]) -> str:
    if not stages:
        return ""
    rows = "".join(
        f'<tr><th>{escape(s.path)}</th><td>{escape(s.kind)}</td><td class="{s.verdict.replace(" ", "-")}">'
        f'{escape(s.verdict)}</td><td class="number">{s.error:.2g}</td><td class="number">{s.allowed:.2g}</td>'
        f"<td>{escape(s.detail)}</td></tr>"
        for s in stages
    )
    return (
        f"<details><summary>All {len(stages)} stages</summary>"
        '<div class="card"><table><thead><tr><th>Stage</th><th>Kind</th><th>Verdict</th><th>Error</th><th>Allowed</th>'
        f"<th></th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _number(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
