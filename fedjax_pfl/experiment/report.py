"""``fedjax-pfl report``: configs and results of runs, as one self-contained HTML file.

Tables are made here. ``report.js`` draws curves and clients from the numbers, which the page holds as JSON.
``report.js`` and ``report.css`` are copied into the page.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from fedjax_pfl.data.dealing import counted
from fedjax_pfl.data.divide import count_new
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment import headline
from fedjax_pfl.experiment.config import ELSEWHERE, Config, parts_elsewhere, without_fields
from fedjax_pfl.experiment.folders import write_atomically
from fedjax_pfl.experiment.gathered import (
    WITHOUT_EFFECT,
    Table,
    cells_of,
    compared,
    differing_values,
    folders_of,
    gather,
    is_current,
    names_of,
    table_in,
)
from fedjax_pfl.experiment.html import cells_html, details_html, notes_html, partition_html, runs_html, table_html
from fedjax_pfl.experiment.options import SELECTORS
from fedjax_pfl.experiment.plots.style import quantity
from fedjax_pfl.experiment.saved import Begun
from fedjax_pfl.experiment.summary import POINTS, flat, without_nan
from fedjax_pfl.experiment.tables import NONE, decimals, markdown, mean_and_spread, show, without_seed

# The metrics for the horizontal axis, which measure progress and cost, not quality.
_ACROSS = {"round": "round", "seconds": "seconds", "megabytes": "megabytes"}
_DIAGNOSTICS = "diagnostics."
# The largest number of dots (more would cover each other) and of partition tables (nobody would read more).
_DOTS, _PARTITIONS = 400, 6


class _Combination(NamedTuple):
    """Runs that differ only in their seeds.

    Attributes:
      name: the name of the combination.
      runs: the indices of these runs among all runs.
    """

    name: str
    runs: list[int]


class _Runs(NamedTuple):
    """All runs of a report.

    Attributes:
      begun: the files of each run so far.
      values: for each run, the values that distinguish it from the others.
      names: the name of each run.
      of: the combinations, that is, groups of runs that differ only in their seeds.
      table: the table that a comparison or sweep has written, if the report is of its folder.
    """

    begun: list[Begun]
    values: list[dict[str, Any]]
    names: list[str]
    of: list[_Combination]
    table: Table | None


def report(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] = "report.html", *, overwrite: bool = False
) -> None:
    """Writes a report of runs: one HTML file, which opens in any browser and needs no network.

    Args:
      paths: run directories (also of runs that have not ended), and folders of comparisons and sweeps.
      out: the file.
      overwrite: whether to replace the file if it exists.

    Raises:
      ConfigError: no run has begun there, a file of a run is damaged, or the report exists, cannot be
        written or has another suffix than .html.
    """
    folders_of(paths)  # without them it does not matter where the report would go
    target = Path(os.path.expanduser(out))
    if target.is_dir():
        raise ConfigError("out", str(out), "the name of a file: this is a folder")
    if target.suffix not in ("", ".html", ".htm"):
        raise ConfigError("out", str(out), "a file that ends in .html: the report is a page for browsers")
    if target.exists() and not overwrite:
        raise ConfigError("out", str(out), "it exists; name another file, or replace it: overwrite=True, --overwrite")
    text = report_html(paths)
    try:
        write_atomically(target, text)
    except OSError as error:
        raise ConfigError("out", str(out), f"a file that can be written ({error.strerror})") from None


def report_html(paths: Sequence[str | os.PathLike[str]]) -> str:
    """The HTML text of a report.

    Args:
      paths: as in `report`.

    Raises:
      ConfigError: as in `report`, except for the errors about the file.
    """
    folders = folders_of(paths)
    runs = _together(gather(folders), table_in(folders))
    sections = {
        "Runs": _runs(runs),
        "Results": _results(runs),
        "Curves": _curves(runs),
        "Clients": _clients(runs),
        "Partition": _partitions(runs),
        "Traffic and time": _costs(runs),
        "Diagnostics": _diagnostics(runs),
        "Environment": _environment(runs),
    }
    shown = {title: body for title, body in sections.items() if body}
    links = "".join(f'<a href="#{_anchor(title)}">{title}</a>' for title in shown)
    bodies = "".join(
        f'<section id="{_anchor(title)}"><h2>{title}</h2>{body}</section>' for title, body in shown.items()
    )
    # "<" would let a name end the script that holds it.
    numbers = json.dumps(_numbers(runs), allow_nan=False).replace("<", "\\u003c")
    title = escape(_title(runs))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>' + title + "</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        '<link rel="icon" href="data:,">\n'
        f"<style>\n{_file('report.css')}</style></head>\n"
        f"<body><header><h1>{title}</h1><nav>{links}</nav></header>\n<main>{bodies}</main>\n"
        f'<script type="application/json" id="numbers">{numbers}</script>\n'
        f"<script>\n{_file('report.js')}</script></body></html>\n"
    )


def _file(name: str) -> str:
    return files("fedjax_pfl.experiment").joinpath(name).read_text(encoding="utf-8")


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _together(begun: list[Begun], table: Table | None) -> _Runs:
    found, members = names_of(begun, table), dict[str, list[int]]()
    for number in sorted(range(len(begun)), key=lambda at: found[at][1]):
        members.setdefault(show(without_seed(found[number][0])), []).append(number)
    together = [_Combination(name or begun[at[0]].config.method["name"], at) for name, at in members.items()]
    return _Runs(begun, differing_values(begun), [show(values) for values, _ in found], together, table)


def _title(runs: _Runs) -> str:
    if len(runs.begun) == 1:
        config = runs.begun[0].config
        training = {"method": config.method["name"], "rounds": config.training.rounds}
        data = {"dataset": config.data.source, "clients": config.data.clients}
        return f"{headline.title({**training, **data})}, seed {config.run.seed}"
    configs = [run.config for run in runs.begun]
    names = [(config.data.source, config.data.partition["kind"], config.model["name"]) for config in configs]
    shared = [of[0] for of in zip(*names, strict=True) if len(set(of)) == 1]
    return f"{len(configs)} runs{': ' if shared else ''}{', '.join(shared)}"


def _runs(runs: _Runs) -> str:
    """What was run: what the runs share, what differs, and how far each is."""
    first = runs.begun[0].config
    if len(runs.begun) == 1:
        return notes_html([_state(runs.begun[0])]) + _config(first, ["run.out"])
    fields = dict.fromkeys(itertools.chain(*runs.values))
    # Options of a part are listed with the part, not as differences between runs.
    apart = [name.rpartition(".")[0] for name in SELECTORS if name in fields]
    rows, options = [], []
    for run, values in zip(runs.begun, runs.values, strict=True):
        config = flat(run.config.model_dump(mode="json"))
        own = [field for field in config if field.startswith(tuple(f"{part}." for part in apart))]
        said = "; ".join(f"{field} = {json.dumps(config[field])}" for field in own if field not in fields)
        options += [f"**{', '.join(config[name] for name in SELECTORS if name in fields)}**: {said}"] if said else []
        known = [*(_value(values.get(field)) for field in fields), *(_percent(run, point) for point in POINTS)]
        rows.append(cells_html(map(escape, [*known, _state(run), str(run.path)]), numbers=False))
    headings = [*fields, *(f"{point.upper()} %" for point in POINTS), "state", "directory"]
    table = table_html(headings, rows, numbers=False) + notes_html(dict.fromkeys(options))
    return table + _config(first, {*apart, *fields, *WITHOUT_EFFECT})


def _config(config: Config, without: Collection[str]) -> str:
    """What a config says but for some fields: what is not the default in one paragraph, and all of it."""
    changed = flat(without_fields(config.non_defaults(), without))
    said = "; ".join(f"{field} = {json.dumps(value)}" for field, value in changed.items())
    said += "".join(f" ({field}: {ELSEWHERE})" for field in parts_elsewhere(config) if field in changed)
    whole = details_html("the whole config, what is not the default in bold", config.html(without))
    return f"<p>Given, and not the default: {escape(said)}</p>{whole}"


def _value(value: Any) -> str:
    return NONE if value is None else value if isinstance(value, str) else json.dumps(value)


def _percent(run: Begun, point: str) -> str:
    """The accuracy after the newest evaluated round."""
    accuracy = run.history[f"{point}.accuracy"][-1] if run.history else math.nan
    return NONE if math.isnan(accuracy) else f"{100 * accuracy:.2f}"


def _state(run: Begun) -> str:
    """How far a run is."""
    rounds = run.config.training.rounds
    if run.summary is None:
        if not run.history:
            return "not ended: no round evaluated yet"
        return f"not ended: round {int(run.history['round'][-1])} of {rounds}"
    said = f"ended after {counted(run.summary['rounds'], 'round')}"
    if "stopped" in run.summary:
        said += f" of {rounds}: {run.summary['stopped']}"
    if run.summary.get("diverged_round") is not None:
        said += f"; diverged in round {run.summary['diverged_round']}"
    return said


def _results(runs: _Runs) -> str:
    """The final table, of the runs that have ended."""
    if runs.table is not None and is_current(runs.table, runs.begun):
        return runs_html(runs.table.text)
    ended = cells_of(runs.begun, runs.table)
    if not ended:
        return notes_html(["No run has ended yet: the curves show how far they are."])
    if len(runs.begun) == 1:
        (summary,) = (cell.summary for cell in ended if cell.summary)
        headings, *rows = headline.table(summary)
        said = [*headline.caption(summary).split("\n"), *headline.remarks(summary)]
        return table_html(headings, [cells_html(map(escape, row)) for row in rows]) + notes_html(said)
    heading = "method" if set(without_seed(ended[0].values)) == {"method.name"} else "run"
    baseline, point = compared(runs.begun, runs.table) or (without_seed(ended[0].values), _point(runs))
    return runs_html(markdown(ended, baseline, point, heading=heading))


def _point(runs: _Runs) -> str:
    """Where the runs are judged, if all that have ended are judged at the same point."""
    judged = {run.summary["headline"] for run in runs.begun if run.summary is not None}
    return judged.pop() if len(judged) == 1 else POINTS[0]


def _curves(runs: _Runs) -> str:
    """Controls, and the places that the script draws in."""
    names = _metrics(runs)
    if not names:
        return ""
    options = "".join(f'<option value="{escape(name)}">{escape(quantity(name)[1])}</option>' for name in names)
    across = "".join(f'<option value="{name}">{text}</option>' for name, text in _ACROSS.items())
    several = any(len(of.runs) > 1 for of in runs.of)
    every = '<label><input type="checkbox" id="every"> every run</label>' if several else ""
    band = (
        "Lines are means over seeds, up to the last round that all have, bands ± their sample standard deviation. "
        if several
        else ""
    )
    return (
        f'<div class="controls"><label>metric <select id="metric">{options}</select></label>'
        f'<label>beside it <select id="beside"><option value="">{NONE}</option>{options}</select></label>'
        f'<label>across <select id="across">{across}</select></label>{every}</div>'
        '<fieldset id="lines"><legend>lines</legend></fieldset>'
        '<div class="figure" id="curves-figure"></div>'
        f"<noscript>{notes_html(['Curves are drawn by a script, which this browser does not run.'])}</noscript>"
        + notes_html([f"{band}Point at the figure, or select it and use the arrow keys, to read values."])
    )


def _clients(runs: _Runs) -> str:
    if not any(_has_clients(run) for run in runs.begun):
        return ""
    several = any(len(of.runs) > 1 for of in runs.of)
    said = "A dot is a client" + (" of one of the seeds" if several else "")
    said += (
        "; the bar is the mean that the tables report. Clients that never train are squares, malicious ones crosses."
    )
    return f'<div class="figure" id="clients-figure"></div>{notes_html([said])}'


def _partitions(runs: _Runs) -> str:
    """Who holds what, once for all runs that share it."""
    holders: dict[str, list[int]] = {}
    for number, run in enumerate(runs.begun):
        holders.setdefault(run.partition["hash"], []).append(number)
    if len(holders) == 1:
        return partition_html(runs.begun[0].partition)
    names, shown = runs.names, list[str]()
    for at in list(holders.values())[:_PARTITIONS]:
        title = escape("; ".join(names[number] for number in at))
        shown.append(details_html(title, partition_html(runs.begun[at[0]].partition), opened=not shown))
    left = len(holders) - len(shown)
    return "".join(shown) + (notes_html([f"{left} more partitions are not shown"]) if left else "")


def _costs(runs: _Runs) -> str:
    """A row per combination, its means over seeds."""
    of: dict[str, Callable[[Begun], Any]] = {
        "MB so far": lambda run: run.history["megabytes"][-1],
        "MB, if nothing were left out": lambda run: run.summary and run.summary["traffic"]["megabytes_dense"],
        "floats up per client and round": lambda run: (
            run.summary and run.summary["traffic"]["floats_up_per_client_round"]
        ),
        "floats down": lambda run: run.summary and run.summary["traffic"]["floats_down_per_client_round"],
        "s per round": lambda run: run.summary and run.summary["timing"]["seconds_per_round"],
        "s compilation": lambda run: run.summary and run.summary["timing"]["compile_seconds"],
        "s so far": lambda run: run.history["seconds"][-1],
    }
    digits = {"s per round": 3, "floats up per client and round": 0, "floats down": 0}
    rows = []
    for combination in runs.of:
        begun = [run for run in (runs.begun[at] for at in combination.runs) if run.history]
        found = [[value for run in begun if (value := measure(run)) is not None] for measure in of.values()]
        texts = [
            _mean(values, decimals(min(values, default=1)) if name.startswith("MB") else digits.get(name, 1))
            for name, values in zip(of, found, strict=True)
        ]
        rows.append(cells_html(map(escape, [combination.name, *texts])))
    said = "All clients, up and down. Seeds that were rows of one program share its time evenly."
    return table_html(["run", *of], rows) + notes_html([said])


def _diagnostics(runs: _Runs) -> str:
    """What methods record of themselves, after the newest round that all seeds of a combination have."""
    names = [name for name in _metrics(runs) if name.startswith(_DIAGNOSTICS)]
    if not names:
        return ""
    rows = []
    for combination in runs.of:
        histories = [runs.begun[at].history for at in combination.runs]
        last = [_newest([history for history in histories if name in history], name) for name in names]
        rows.append(cells_html(map(escape, [combination.name, *(_mean(values, 4) for values in last)])))
    said = "After the newest evaluated round that all seeds have; among the curves, they are to be seen over rounds."
    return table_html(["run", *(name.removeprefix(_DIAGNOSTICS) for name in names)], rows) + notes_html([said])


def _environment(runs: _Runs) -> str:
    """What the runs that have ended ran on."""
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for run, name in zip(runs.begun, runs.names, strict=True):
        if run.summary is not None:
            of = run.summary["environment"]
            found.setdefault(json.dumps(of, sort_keys=True), (of, []))[1].append(name)
    if not found:
        return ""
    fields = dict.fromkeys(itertools.chain(*(of for of, _ in found.values())))
    rows = [
        [*(_value(of.get(field)) for field in fields), *(["; ".join(names)] if len(found) > 1 else [])]
        for of, names in found.values()
    ]
    headings = [*(field.replace("_", " ") for field in fields), *(["runs"] if len(found) > 1 else [])]
    return table_html(headings, [cells_html(map(escape, row), numbers=False) for row in rows], numbers=False)


def _newest(histories: Sequence[Mapping[str, np.ndarray]], name: str) -> list[float]:
    """A metric of some runs after the newest round that all of them have; nothing where they have none in common."""
    rounds = set.intersection(*(set(history["round"].tolist()) for history in histories)) if histories else set()
    return [history[name][history["round"] == max(rounds)].item() for history in histories if rounds]


def _mean(values: Sequence[float], digits: int) -> str:
    """The mean over seeds that have a value, with its spread if there is any."""
    values = [value for value in values if not math.isnan(value)]
    return mean_and_spread(values if len(set(values)) > 1 else values[:1], digits)


def _metrics(runs: _Runs) -> list[str]:
    """The metrics that some run has a value of, in the order of the files."""
    columns = itertools.chain(*(run.history.items() for run in runs.begun))
    found = dict.fromkeys(name for name, values in columns if np.isfinite(values).any())
    return [name for name in found if name not in _ACROSS]


def _has_clients(run: Begun) -> bool:
    return len(run.clients.get("client", ())) > 0


def _numbers(runs: _Runs) -> dict[str, Any]:
    """What the script draws, as JSON has it: null stands for NaN."""
    metrics = _metrics(runs)
    point = _point(runs)
    alone = len(runs.of) == 1
    first = [f"{p}.accuracy" for p in (point, *(p for p in POINTS if p != point))]
    found: dict[str, Any] = {
        "metrics": {name: dict(zip(("scale", "label"), quantity(name), strict=True)) for name in metrics},
        "shown": [name for name in first if name in metrics][: 2 if alone else 1],
        "runs": [
            {
                "name": name,
                **{of: run.history[of].tolist() for of in _ACROSS if of in run.history},
                "values": {metric: run.history[metric].tolist() for metric in metrics if metric in run.history},
            }
            for run, name in zip(runs.begun, runs.names, strict=True)
        ],
        "combinations": [of._asdict() for of in runs.of],
        "strips": [strip for at in range(len(runs.of)) for strip in _strips(runs, at)],
    }
    return without_nan(found)


def _strips(runs: _Runs, at: int) -> list[dict[str, Any]]:
    """The clients of a combination at both points: dots with accuracy, run, client, its scored samples and kind."""
    begun = [(number, runs.begun[number]) for number in runs.of[at].runs if _has_clients(runs.begun[number])]
    strips = []
    for point in POINTS if begun else ():
        dots = []
        for number, run in begun:
            clients, held = run.clients, np.asarray(run.partition[f"n_{run.config.data.evaluate_on}"])
            client = clients["client"]
            columns = [clients[f"{point}_accuracy"], np.full_like(client, number), client, held[client], _kinds(run)]
            rows = zip(*(column.tolist() for column in columns), strict=True)
            dots += [row for row in rows if not np.isnan(row[0])]
        dots.sort()
        kept = sorted({round(at) for at in np.linspace(0, len(dots) - 1, _DOTS).tolist()}) if dots else []
        strips.append(
            {
                "combination": at,
                "point": point.upper(),
                "mean": float(np.mean([run.history[f"{point}.accuracy"][-1] for _, run in begun])),
                "clients": len(dots),
                "dots": [dots[place] for place in kept],
            }
        )
    return strips


def _kinds(run: Begun) -> Int[np.ndarray, " clients"]:
    """The kind of each client in the table of a run: 1 if it never trains, 2 if it is malicious, else 0.

    The table says so once the run has ended, and only where there are such clients; before, partition and config do.
    """
    client, there = run.clients["client"], len(run.partition["n_train"])
    new = client >= there - count_new(run.config.data.new_clients, there)
    malicious = np.isin(client, run.partition.get("attackers", ()))
    return np.where(run.clients.get("attacker", malicious) == 1, 2, run.clients.get("new", new).astype(int))
