"""A report as one self-contained HTML page.

Names and labels are escaped, and a content security policy blocks all scripts and resources except the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from fedrax.config.arguments import checked_arguments
from fedrax.escaping import format_setting, short_path
from fedrax.files import flatten, write_text
from fedrax.report import comparison_table, html_curves, search_plots
from fedrax.report.report_data import ReportData, SearchOutcome, about_repeated, differences, gather
from fedrax.report.runs import how_to_resume, last_values, megabytes, summarize_all, wire_megabytes
from fedrax.report.svg import ChartCurve, bars, breakable, chart, dots, number, shown
from fedrax.simulation.persistence.client_summary import ClientSummary, read_client_summary
from fedrax.simulation.persistence.run_description import EXPERIMENT
from fedrax.version import VERSION

FILE = "report.html"
_MOST_RUNS = 400
"""Largest number of runs in the list of runs."""


@checked_arguments
def write_report(
    directories: Path | str | Sequence[Path | str],
    path: Path | str | None = None,
    *,
    target: float | None = None,
    title: str | None = None,
) -> Path:
    """Write a self-contained HTML page about runs: curves, table, partition, settings.

    Args:
        directories: Run directories, or directories of several runs; runs may still be in progress.
        path: The file; by default report.html in the directory, or in the working directory for several.
        target: An accuracy whose cost is shown.
        title: Title of the page.

    Returns:
        The path of the page.

    Raises:
        FedraxError: If a directory holds no run or a damaged one, or the page cannot be written.

    Example:
        >>> experiment = fedrax.experiments.Experiment()
        >>> fedrax.experiments.experiment.write(experiment, "r/experiment.toml")
        >>> fedrax.report.write_report("r").name
        'report.html'
    """
    given = [directories] if isinstance(directories, Path | str) else directories
    places = [Path(directory) for directory in given]
    if path is None:
        path = places[0] / FILE if len(places) == 1 else Path(FILE)
    write_text(Path(path), page(gather(places, target), title))
    return Path(path)


def page(data: ReportData, title: str | None = None) -> str:
    """The whole page."""
    title = title or ", ".join(dict.fromkeys(source.name for source in data.sources))
    sections = {name: made for name, make in _SECTIONS.items() if (made := make(data))}
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections)
    body = "".join(f'<section id="{_anchor(name)}"><h2>{name}</h2>{made}</section>' for name, made in sections.items())
    style = _resource("page.css") + html_curves.hiding_style(len(data.methods))
    script = _resource("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none';"
        " form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{shown(title)}</title>\n'
        f"<style>{style}</style></head>\n"
        f"<body><header><h1>{shown(title)}</h1>{_lead(data)}<nav>{links}</nav></header>\n"
        f"<main>{body}</main>\n<footer>Written by fedrax {VERSION} from {_places(data)}.</footer>\n"
        f"<script>{script}</script></body></html>\n"
    )


def _resource(name: str) -> str:
    """A file of this package."""
    return resources.files("fedrax.report").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    """The hash by which a content security policy allows the page's own style and script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _anchor(name: str) -> str:
    """The id of a section."""
    return name.lower().replace(" ", "-")


def _count(n: int, word: str) -> str:
    """A number with a noun in singular or plural."""
    return f"{n:,} {word}{'s' * (n != 1)}"


def _places(data: ReportData) -> str:
    """The directories of the report."""
    return ", ".join(f"<code>{shown(source.directory)}</code>" for source in data.sources)


# -- the head ------------------------------------------------------------------------------------------------------


def _lead(data: ReportData) -> str:
    """A line about the runs, and tiles with the best values and the number of finished runs."""
    runs = data.runs
    words = [_count(len(data.methods), "method")]
    for part in ("data", "model"):
        tables_of = [run.table[part] for run in runs if isinstance(run.table.get(part), dict)]
        names = dict.fromkeys(str(table.get("name")) for table in tables_of)
        words += [f"{part} {', '.join(names)}"] if names else []
    if seeds := sorted({run.seed for run in runs if run.seed is not None}):
        several, more = "s" * (len(seeds) > 1), ", …" if len(seeds) > 10 else ""
        words.append(f"seed{several} {', '.join(map(str, seeds[:10]))}{more}")
    done = sum(run.finished and run.failure is None for run in runs)
    lost = sum(run.failure is not None for run in runs)
    state = f"{done} of {len(runs)}" if done < len(runs) else str(done)
    tiles = [(state, f"run{'s' * (len(runs) > 1)} finished" + (f", {lost} diverged" if lost else ""))]
    tiles = [*_best_tiles(data), *tiles]
    made = "".join(f'<div class="tile"><b>{shown(value)}</b><span>{shown(name)}</span></div>' for value, name in tiles)
    return f'<p class="lead">{shown(" · ".join(words))}</p><div class="tiles">{made}</div>'


def _best_tiles(data: ReportData) -> list[tuple[str, str]]:
    """The best method and its value in the main columns."""
    rows = summarize_all(data.methods, data.target, data.metric)
    word = "accuracy" if data.metric == "test_accuracy" else "loss"
    found: list[tuple[str, str]] = []
    columns = [(word, "test " + word)]
    if data.target is not None:
        columns += [("rounds", "rounds"), ("megabytes", "MB")]
    for column, name in columns:
        tops = comparison_table.best(rows, column, data.metric)
        if len(rows) == 1 and getattr(rows[0], column) is not None:
            tops = {0}
        if not tops:
            continue
        best, tied = getattr(rows[min(tops)], column), len(tops) > 1
        amount = comparison_table.amount(replace(best, std=None if tied else best.std or None), column)
        who = f"{len(tops)} methods" if tied else rows[min(tops)].label
        to = "" if column == word else f" to {data.target:g}"
        found.append((who, f"{amount} {name}{to}"))
    return found


# -- sections ------------------------------------------------------------------------------------------------------


def _table(data: ReportData) -> str:
    """The table of the comparison."""
    rows = summarize_all(data.methods, data.target, data.metric)
    made = comparison_table.cells(rows, data.target, data.metric)
    heads = "".join(f"<th{_name(i < made.names)}>{shown(text)}</th>" for i, text in enumerate(made.headings))
    lines = []
    for row in made.rows:
        cells = [f"<th>{shown(row[0][0])}</th>"]
        for i, (text, top) in enumerate(row[1:-1], 1):
            kind = ' class="best"' if top else _name(i < made.names)
            cells.append(f"<td{kind}>{shown(text)}</td>")
        lines.append(f"<tr>{''.join(cells)}<td>{_state(row[-1][0])}</td></tr>")
    legend = f"{comparison_table.legend(data.target, data.given, rows)} {about_repeated(data.repeated)}".strip()
    note = "Mean ± standard deviation over seeds; ★ marks the best mean of a column. " if len(rows) > 1 else ""
    return (
        f'<div class="card scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        f'<p class="note">{shown(note + legend[:1].upper() + legend[1:])}</p>'
    )


def _name(is_name: bool) -> str:
    """The class of cells with names."""
    return ' class="name"' if is_name else ""


def _state(state: str) -> str:
    """The state of a run as a colored label."""
    kinds = {"finished": "finished", "budget": "finished", "diverged": "diverged"}
    kind = kinds.get(state.partition(" ")[0], "going")
    return f'<span class="state {kind}">{shown(state)}</span>'


def _searches(data: ReportData) -> str:
    """The searches of all comparisons."""
    return "".join(_search(source.search) for source in data.sources if source.search is not None)


def _search(search: SearchOutcome) -> str:
    """A chart of the metric against each setting, and the selected settings."""
    cards = []
    for path in search_plots.varied_paths(search.results):
        cards.append(f'<div class="card">{_search_chart(path, search)}</div>')
    first, rest = search.lines[0], search.lines[1:]
    selected = [line.strip() for line in rest if not line.startswith("warning")]
    items = "".join(f"<li>{shown(line)}</li>" for line in selected)
    warnings = "".join(f'<p class="note warning">{shown(line)}</p>' for line in rest if line.startswith("warning"))
    text = f'<p class="note">{shown(first[:1].upper() + first[1:])}</p><ul class="note">{items}</ul>{warnings}'
    return f'<div class="pair">{"".join(cards)}</div>{text}'


def _search_chart(path: str, search: SearchOutcome) -> str:
    """The validation metric against one setting."""
    drawn_results = {label: c for label, c in search.results.items() if path in c.trials[0].point}
    values = [trial.point[path] for result in drawn_results.values() for trial in result.trials]
    names = [] if search_plots.are_numbers(values) else list(dict.fromkeys(map(format_setting, values)))
    at: Callable[[Any], float] = (lambda value: names.index(format_setting(value))) if names else float
    curves = []
    for i, (label, result) in enumerate(search.results.items()):
        if label not in drawn_results:
            continue
        best = search_plots.best_over_the_others(path, result)
        points = [(at(value), trial.value, 0.0) for value, trial in best if trial.value is not None]
        lost = [at(value) for value, trial in best if trial.value is None]
        top = result.best
        ring = None if top.value is None else (at(top.point[path]), top.value)
        joined = path not in result.ranges  # sampled values differ in the other settings, so they are no curve
        curves.append(ChartCurve(label, i, points, ring=ring, lost=lost, joined=joined))
    metric = next(iter(drawn_results.values())).metric
    wide = not names and min(values) > 0 and max(values) > 5 * min(values)
    found = range(len(names)) if names else sorted(set(map(float, values)))
    ticks = list(found) if len(found) <= 8 else []
    name = f"validation {metric.replace('_', ' ')}"
    drawn = chart(curves, short_path(path), name, share=metric == "accuracy", log_x=wide, ticks=ticks, names=names)
    return f"<h3>{shown(name)}</h3>{drawn}"


def _spreads(data: ReportData) -> str:
    """Metrics over clients."""
    made = html_curves.spreads_of(data)
    if not made:
        return (
            '<p class="note">The runs have no metrics per client: run them with <code>--run.per-client</code> for the'
            " worst client and percentiles.</p>"
        )
    cards = "".join(f'<div class="card">{svg}</div>' for svg in made)
    return (
        f'<div class="pair">{cards}</div>{_worst_clients(data)}'
        '<p class="note">Bar: 10th to 90th percentile of the clients; line: median;'
        " ring: worst client. At the last evaluation, means over seeds. The metric of a worst client with few samples"
        " has a large statistical error.</p>"
    )


def _worst_clients(data: ReportData) -> str:
    """A table of the worst client of each run; empty if the runs do not report its number."""
    lines, metric = [], ""
    for method in data.methods:
        for run in method.runs:
            last, end = last_values(run.events), "_worst_client_number"
            known = [key.removesuffix(end) for key in last if key.endswith(end) and last[key] is not None]
            metric = metric or min(known, key=lambda name: ("accuracy" not in name, "loss" not in name), default="")
            if metric in known and len(lines) < _MOST_RUNS:
                client, samples = int(last[f"{metric}{end}"]), int(last[f"{metric}_worst_client_samples"])
                clients = read_client_summary(run.directory)
                name = clients.names[client] if clients is not None and client < len(clients.names) else ""
                words = f"{client} ({name})" if name and name != str(client) else str(client)
                cells = (str(run.seed), words, f"{last[f'{metric}_worst_client']:.4g}", f"{samples:,}")
                row = "".join(f"<td>{shown(cell)}</td>" for cell in cells)
                lines.append(f"<tr><th>{shown(method.label)}</th>{row}</tr>")
    heads = ("seed", "worst client", metric.replace("_", " "), "samples")
    head = "".join(f"<th>{shown(word)}</th>" for word in heads)
    return (
        f'<div class="card scroll"><table><thead><tr><th class="name">method</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
        if lines
        else ""
    )


def _partitions(data: ReportData) -> str:
    """The partitions of the runs."""
    found = data.clients()
    if not found:
        return '<p class="note">The runs have no clients.json with their partition.</p>'
    return "".join(_partition(clients) for clients in found[:4])


def _partition(clients: ClientSummary) -> str:
    """A partition: sizes, heterogeneity and a chart."""
    sizes = f"{clients.smallest:,} to {clients.largest:,}" if clients.smallest < clients.largest else clients.largest
    words = f"{clients.data}: {clients.clients:,} clients of {sizes} training samples (median {clients.median:g}),"
    words += f" {clients.samples:,} in all."
    if clients.total_variation is not None:
        words += (
            " Mean total variation distance between a client's label distribution and that of all clients:"
            f" {clients.total_variation:.3f} (0: identical, 1: disjoint)."
        )
    if len(clients.names) < clients.clients:
        words += f" Shown are the first {len(clients.names)}."
    names = [name or " " for name in clients.names]
    drawn = dots(names, clients.classes, clients.counts) if clients.classes else bars(names, clients.sizes)
    what = "Classes against clients; the area of a dot is the number of samples." if clients.classes else ""
    return f'<p>{shown(words)}</p><div class="card scroll">{drawn}</div><p class="note">{what}</p>'


def _differences(data: ReportData) -> str:
    """The settings in which methods differ."""
    found = differences(data.methods)
    if len(data.methods) == 1:
        return ""
    if not found:
        return "<p>Only the seeds.</p>"
    heads = "".join(f"<th>{shown(method.label)}</th>" for method in data.methods)
    cells = {path: "".join(f"<td>{shown(_value(value))}</td>" for value in values) for path, values in found.items()}
    lines = "".join(f"<tr><th>{breakable(short_path(path))}</th>{made}</tr>" for path, made in cells.items())
    return (
        f'<div class="card scroll"><table><thead><tr><th class="name">setting</th>{heads}</tr></thead>'
        f'<tbody>{lines}</tbody></table></div><p class="note">All other settings are equal, except for seeds.</p>'
    )


def _value(value: Any) -> str:
    """The text of a setting."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{}" if not value else str(dict(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _settings(data: ReportData) -> str:
    """The settings that all methods share."""
    differ = differences(data.methods)
    common = {
        path: v
        for path, v in flatten(data.runs[0].table, keep_empty=True).items()
        if path not in differ and path != "run.seed"
    }
    shares = {source.search.validation for source in data.sources if source.search is not None}
    if shares and common.get("validation") == 0:
        common["validation"] = f"{', '.join(f'{share:g}' for share in sorted(shares))} in the search, then 0"
    parts: dict[str, dict[str, Any]] = {}
    for path, value in common.items():
        part, _, rest = path.partition(".")
        if rest:
            parts.setdefault(part, {})[rest] = value
        elif path != "name":
            parts.setdefault("experiment", {})[path] = value
    order = ("data", "partition", "model", "finetuning", "task", "algorithm", "run")
    ranked = sorted(parts, key=lambda part: order.index(part) if part in order else len(order))
    cards = "".join(f'<div class="card"><h3>{shown(part)}</h3>{_keys(parts[part])}</div>' for part in ranked)
    return f'<div class="cards">{cards}</div>'


def _keys(values: Mapping[str, Any]) -> str:
    """A table of names and values."""
    lines = (f"<tr><th>{breakable(key)}</th><td>{shown(_value(value))}</td></tr>" for key, value in values.items())
    return f'<table class="keys"><tbody>{"".join(lines)}</tbody></table>'


def _environment(data: ReportData) -> str:
    """Versions and machines of the runs."""
    found = data.environments()
    if not found:
        return ""
    cards = "".join(
        f'<div class="card"><h3>{_count(count, "run")}</h3>{_keys(facts)}</div>' for facts, count in found[:12]
    )
    warning = (
        '<p class="note warning">The runs are of different versions or machines: their seconds are not comparable, and'
        " equal seeds need not give equal metrics.</p>"
    )
    return f'<div class="cards">{cards}</div>{warning * (len(found) > 1)}'


def _runs(data: ReportData) -> str:
    """The list of runs with their directories, states and costs."""
    metric, lines = data.metric, []
    listed = [(method, run) for method in data.methods for run in method.runs]
    for method, run in listed[:_MOST_RUNS]:
        last = last_values(run.events)
        value = "–" if last.get(metric) is None else number(last[metric])
        sent = f"{megabytes(run.events[-1]):.4g}" if run.events else "–"
        if run.events and (wire := wire_megabytes(run.events[-1])) is not None:
            sent += f" ({wire:.4g} on the wire)"
        work = f"{last['gradients']:,}" if run.events else "–"
        took = f"{last['seconds']:.3g}" if run.events else "–"
        seed = "secret" if run.seed is None else str(run.seed)
        cells = (seed, f"{run.rounds_done} of {run.rounds}", value, sent, work, took)
        lines.append(
            f"<tr><th>{shown(method.label)}</th>{''.join(f'<td>{shown(cell)}</td>' for cell in cells)}"
            f'<td>{_state(run.state)}</td><td class="name"><code>{shown(run.directory)}</code></td></tr>'
        )
    heads = ("seed", "rounds", metric.replace("_", " "), "MB", "gradients", "seconds", "state")
    head = "".join(f"<th>{shown(word)}</th>" for word in heads)
    more = f" {len(listed) - _MOST_RUNS:,} more runs are not listed." if len(listed) > _MOST_RUNS else ""
    files = (run.directory / EXPERIMENT for _, run in listed)
    again = next((f"fedrax run {shlex.quote(str(file))}" for file in files if file.exists()), None)
    repeats = "" if again is None else f" <code>{shown(again)}</code> repeats a run."
    unfinished = next((run for _, run in listed if not run.finished), None)
    remedy = "" if unfinished is None else how_to_resume(unfinished.directory)
    resume = f" To resume an unfinished one: {shown(remedy)}." if remedy else ""
    measured = "; those of a federation are measured and include waiting" * any(run.federation for _, run in listed)
    return (
        f'<div class="card scroll"><table><thead><tr><th class="name">method</th>{head}<th class="name">directory</th>'
        f'</tr></thead><tbody>{"".join(lines)}</tbody></table></div><p class="note">Seconds are without compilation'
        f"{measured}.{more}{repeats}{resume}</p>"
    )


_SECTIONS: Mapping[str, Callable[[ReportData], str]] = {
    "Curves": html_curves.section,
    "Table": _table,
    "Hyper-parameter search": _searches,
    "Clients": _spreads,
    "Partition": _partitions,
    "Settings that differ": _differences,
    "Settings": _settings,
    "Environment": _environment,
    "Runs": _runs,
}
