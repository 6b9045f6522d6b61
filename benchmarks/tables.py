"""Runs the experiments behind a paper's tables, and sets the paper's figures beside ours.

    python benchmarks/fedecouple_tables.py table2 --settings cifar10_s20 --seeds 0,1,2

``papers/<paper>.toml`` holds a paper's tables: settings, rows (methods, or the variants of an ablation) and figures;
``headline`` says whether these are of the last round or of the best, ``columns`` what they measure (see `COLUMNS`; by
default the accuracy of the personal models). A cell is one run: a row in a setting with a seed.
``results/<name>.json`` is rewritten after every cell, and a cell in it is run again only if its resolved config has
changed: a table can be filled by several calls, one after the other, and a call that was stopped goes on where it was.
A change of the code goes unnoticed; take another ``--name`` after one. ``results/<name>.md`` shows all cells that there
are.
"""

import argparse
import json
import platform
import shlex
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedjax_pfl import Config, ConfigError, load_config
from fedjax_pfl.experiment.build import cores
from fedjax_pfl.experiment.executors import Finished
from fedjax_pfl.experiment.record import write_atomically
from fedjax_pfl.experiment.statistics import paired_difference
from fedjax_pfl.experiment.summary import first_reached, harmonic_mean
from fedjax_pfl.experiment.sweep import run_configs
from fedjax_pfl.experiment.tables import NONE, grid, mean_and_spread

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HEADLINES = {
    "last": "of the last round",
    "best": "of the round with the highest {title}, which is chosen on the samples that are scored",
}
POINT = "at the point that the paper reports: PRE, after aggregation, or POST, after local training"
SEEDS = "mean over seeds ± sample standard deviation"
LEGEND = (
    "Columns PRE and POST: {clients}the last round. MB: all clients, up and down. p: two-sided paired t-test over "
    "seeds against {reference}."
)


class Columns(NamedTuple):
    """The figures that a table sets beside the paper's.

    Attributes:
      figures: their names; rows are ranked and tested by the last one, and a target is one of it.
      title: what the last one is called in the text.
      legend: what they mean.
    """

    figures: tuple[str, ...]
    title: str
    legend: str


COLUMNS = {
    "accuracy": Columns(
        ("accuracy",),
        "mean",
        f"Accuracy in %, unweighted mean over clients, {SEEDS}. Ours, the worst 10 % of clients and, where shown, the "
        f"standard deviation over clients are {{round}}, {POINT}.",
    ),
    "global": Columns(
        ("global",),
        "global accuracy",
        f"Accuracy in % of the global model on the pooled test set, {SEEDS}. Ours is {{round}}.",
    ),
    "i_local": Columns(
        ("local",),
        "local figure",
        f"Harmonic mean in % of a client's accuracy and macro-F1, unweighted mean over clients, {SEEDS}. Ours is "
        f"{{round}}, {POINT}.",
    ),
    "global_local_hm": Columns(
        ("global", "local", "hm"),
        "HM",
        f"Figures in %, {SEEDS}. Ours are {{round}}. Global: accuracy of the global model on the pooled test set. "
        f"Local: harmonic mean of a client's accuracy and macro-F1, unweighted mean over clients, {POINT}. HM: "
        "harmonic mean of the two; rows are ranked and tested by it. The paper's HM is that of its two columns.",
    ),
}

Key = tuple[str, str, int]
"""Setting, row, seed."""
Cell = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of a table; ``point``, ``pre`` or ``post``, is the accuracy that the paper reports."""

    label: str
    point: str
    overrides: list[str]


@dataclass(frozen=True)
class Setting:
    """What the rows are compared on, with the paper's figures by row and name, in %, and the cost of the target.

    ``paper_std`` holds standard deviations over the clients, in points; ``row_overrides`` what a row changes in this
    setting only, after its own overrides.
    """

    label: str
    overrides: list[str]
    row_overrides: dict[str, list[str]] = field(default_factory=dict)
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    paper_std: dict[str, float] = field(default_factory=dict)
    target: float | None = None
    paper_to_target: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of a paper; ``headline``, ``last`` or ``best``, is the round whose figures the paper reports.

    ``columns``, a key of `COLUMNS`, says which figures these are.
    """

    paper: str
    name: str
    title: str
    config: str
    headline: str
    columns: str
    rows: dict[str, Row]
    settings: dict[str, Setting]

    @property
    def ranked(self) -> str:
        """The figure that rows are ranked and tested by."""
        return COLUMNS[self.columns].figures[-1]


@dataclass(frozen=True)
class Line:
    """A row in a setting, with its cells by seed; there are none where nothing could be run."""

    key: str
    row: Row
    table: Table
    cells: dict[int, Cell]

    @property
    def ranked(self) -> dict[int, float]:
        """The figure that rows are ranked and tested by, by seed."""
        return self.by_seed(self.table.ranked)

    def by_seed(self, name: str) -> dict[int, float]:
        """A figure of the table's columns, of the runs that have it."""
        found = {seed: figures_of(cell, self.row.point, self.table) for seed, cell in self.cells.items()}
        return {seed: figures[name] for seed, figures in found.items() if name in figures}

    def show_spread(self, name: str) -> str:
        """The mean over seeds of a figure of `spread`, in %."""
        figures = [spread(cell, self.row.point, self.table.headline)[name] for cell in self.cells.values()]
        return f"{100 * np.mean(figures):.2f}" if figures else NONE

    def show(self, *path: str, digits: int = 2, scale: float = 1.0) -> str:
        """The mean over seeds of the figure that a path of keys leads to in a cell."""
        figures: list[Any] = [reduce(getitem, path, cell) for cell in self.cells.values()]
        return f"{scale * np.mean(figures):.{digits}f}" if figures else NONE


def main(paper: Path, arguments: Sequence[str] | None = None) -> None:
    """Fills and prints a table of a paper; bad input is one line on stderr and exit code 2.

    Args:
      paper: the TOML file of the paper's tables.
      arguments: the command line; that of the process unless given.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser(paper).parse_args(arguments)
    try:
        table = read_table(paper, options.table)
        reference = options.reference or list(table.rows)[-1]
        allow("--reference", [reference], table.rows)
        allow("--settings", options.settings or (), table.settings)
        allow("--methods", options.methods or (), table.rows)
        stem = options.name or f"{table.paper.lower()}_{table.name}"
        path = RESULTS / f"{stem}.json"
        cells = load_cells(path, table)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])
    missing = fill(table, cells, options, command, lambda: write_atomically(path, to_json(table, cells)))
    text = markdown(table, cells, missing, reference)
    write_atomically(path.with_suffix(".md"), text)
    print(text, end="")


def parser(paper: Path) -> argparse.ArgumentParser:
    """The command line."""

    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=f"Runs a table of {paper.name} and compares it with the paper's.")
    parser.add_argument("table", metavar="TABLE", help="e.g. table2")
    parser.add_argument("--settings", type=names, metavar="A,B", help="all of the table's unless given")
    parser.add_argument("--methods", type=names, metavar="X,Y", help="rows, by key; all of the table's unless given")
    parser.add_argument("--rounds", type=int, help="the config's unless given")
    parser.add_argument("--seeds", type=numbers, default=[0], metavar="0,1,2", help="of the runs; 0 unless given")
    parser.add_argument("--reference", metavar="ROW", help="what the t-test compares with; the last row unless given")
    parser.add_argument("--name", help="stem of the result files; <paper>_<table> unless given")
    change = "SECTION.KEY=VALUE"
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar=change, help="wins over all overrides")
    return parser


def read_table(path: Path, name: str) -> Table:
    """Reads a table of a paper's file.

    Raises:
      ConfigError: there is no such table, headline or columns, or a figure belongs to no row or column.
    """
    paper = tomllib.loads(path.read_text(encoding="utf-8"))
    allow("TABLE", [name], paper["tables"])
    fields = dict(paper["tables"][name])
    headline = fields.pop("headline", paper.get("headline", "last"))
    allow(f"{name}.headline", [headline], HEADLINES)
    columns = fields.pop("columns", "accuracy")
    allow(f"{name}.columns", [columns], COLUMNS)
    figures = COLUMNS[columns].figures
    rows = {key: Row(**row) for key, row in fields.pop("rows", paper.get("methods", {})).items()}
    settings = {key: read_setting(setting, figures) for key, setting in fields.pop("settings").items()}
    for key, setting in settings.items():
        for what in ("row_overrides", "paper", "paper_to_target"):
            allow(f"{name}.{key}.{what}", getattr(setting, what), rows)
        allow(f"{name}.{key}.paper_std", setting.paper_std, rows if columns == "accuracy" else ())
        for row, given in setting.paper.items():
            allow(f"{name}.{key}.paper.{row}", given, figures)
    return Table(paper["paper"], name, headline=headline, columns=columns, rows=rows, settings=settings, **fields)


def read_setting(fields: Mapping[str, Any], figures: Sequence[str]) -> Setting:
    """A setting; where the paper has a number alone for a row, it is the last of the figures."""
    given = fields.get("paper", {})
    paper = {row: found if isinstance(found, dict) else {figures[-1]: found} for row, found in given.items()}
    return Setting(**{**fields, "paper": paper})


def allow(option: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raises ConfigError where a name is not among those allowed."""
    for name in given:
        if name not in allowed:
            raise ConfigError(option, name, f"allowed: {', '.join(allowed)}")


def load_cells(path: Path, table: Table) -> dict[Key, Cell]:
    """The cells of earlier calls.

    Raises:
      ConfigError: the file holds another table.
    """
    if not path.exists():
        return {}
    held = json.loads(path.read_text(encoding="utf-8"))
    if (held["paper"], held["table"]) != (table.paper, table.name):
        raise ConfigError("--name", path.stem, f"{path} holds {held['table']} of {held['paper']}; choose another name")
    return {(cell["setting"], cell["row"], cell["seed"]): cell for cell in held["cells"]}


def to_json(table: Table, cells: Mapping[Key, Cell]) -> str:
    """JSON with a line per cell: a cell that is replaced is one line in a diff."""
    lines = ",\n".join(json.dumps(cell) for cell in cells.values())
    return f'{{"paper": {json.dumps(table.paper)}, "table": {json.dumps(table.name)}, "cells": [\n{lines}\n]}}\n'


def fill(
    table: Table, cells: dict[Key, Cell], options: argparse.Namespace, command: str, save: Callable[[], None]
) -> dict[Key, str]:
    """Runs the cells that are asked for and not there yet.

    Args:
      table: the table.
      cells: the cells that there are; new ones are added.
      options: the command line.
      command: the command line as text, kept with each cell.
      save: called after each program.

    Returns:
      Why cells could not be run, by key.
    """
    plan = [
        (setting, row, seed)
        for setting in table.settings
        for row in table.rows
        for seed in options.seeds
        if setting in (options.settings or table.settings) and row in (options.methods or table.rows)
    ]
    began, missing, wanted = time.perf_counter(), {}, {}

    def say(key: Key, outcome: str) -> None:
        setting, row, seed = key
        print(f"{time.perf_counter() - began:8.1f} s  {setting} {row} seed {seed}: {outcome}", file=sys.stderr)

    for key in plan:
        try:
            config = load_config(ROOT / table.config, cell_overrides(table, key, options))
        except ConfigError as error:
            missing[key] = str(error)
            say(key, f"missing, {error}")
            continue
        if key in cells and is_of(cells[key], config):
            say(key, f"kept{shown(cells[key], table)}")
        else:
            wanted[key] = config
    keys = list(wanted)
    # The seeds of a row are rows of one program; a call that is stopped has the rows that were done.
    for places, outcome in run_configs(list(wanted.values())):
        for at, key in enumerate(keys[place] for place in places):
            if isinstance(outcome, str):
                missing[key] = outcome
                say(key, f"missing, {outcome}")
                continue
            setting, row, seed = key
            asked = {"setting": setting, "row": row, "seed": seed, "set": options.set, "command": command}
            resolved = {"overrides": cell_overrides(table, key, options), "config": wanted[key].model_dump(mode="json")}
            cells[key] = {**asked, **resolved, **measures(outcome[at])}
            say(key, f"done{shown(cells[key], table)}")
        save()
    return missing


def shown(cell: Cell, table: Table) -> str:
    """A cell's figures, for the line that tells of it."""
    point = table.rows[cell["row"]].point
    figures = figures_of(cell, point, table)
    return "".join(f", {point if name == 'accuracy' else name} {100 * x:.2f} %" for name, x in figures.items())


def is_of(cell: Cell, config: Config) -> bool:
    """Whether a cell was run with this config; of a field that was added to configs since then it has the default."""
    try:
        return Config(**cell["config"]) == config
    except ConfigError:
        return False


def cell_overrides(table: Table, key: Key, options: argparse.Namespace) -> list[str]:
    """What a cell changes in the table's config; later ones win."""
    setting, row, seed = key
    rounds = [] if options.rounds is None else [f"training.rounds={options.rounds}"]
    chosen = table.settings[setting]
    both = [*chosen.overrides, *table.rows[row].overrides, *chosen.row_overrides.get(row, ())]
    return [*both, *rounds, f"run.seed={seed}", *options.set]


def measures(result: Finished) -> Cell:
    """What is kept of a run."""
    summary, history = result.summary, result.history
    environment = summary["environment"]
    return {
        "machine": f"{cores()} {platform.machine()} cores, JAX on {environment['platform']} "
        f"(devices: {environment['device_count']}), jax {environment['jax']}, Python {platform.python_version()}",
        "personal": summary["personal"],
        "best": {point: best_round(history, point) for point in ("pre", "post")},
        "global": summary["global"],
        "timing": summary["timing"],
        "megabytes_total": summary["traffic"]["megabytes_total"],
        "curve": {
            "round": history["round"].tolist(),
            "pre": rounded(history["pre.accuracy"], 6),
            "post": rounded(history["post.accuracy"], 6),
            "i_local": {point: rounded(history[f"{point}.i_local"], 6) for point in ("pre", "post")},
            "global": rounded(history["global"], 6),
            "megabytes": rounded(history["megabytes"], 3),
            "seconds": rounded(history["seconds"], 3),
        },
    }


def rounded(values: np.ndarray, digits: int) -> list[float | None]:
    """A metric for JSON, which has no NaN."""
    return [None if np.isnan(value) else value for value in values.round(digits).tolist()]


def best_round(history: Mapping[str, np.ndarray], point: str) -> dict[str, float]:
    """How the clients fared in the round with the highest mean accuracy; see `spread`."""
    at = np.argmax(history[f"{point}.accuracy"])
    return {name: float(history[f"{point}.{name}"][at]) for name in ("accuracy", "std_clients", "worst_10_percent")}


def spread(cell: Cell, point: str, headline: str) -> dict[str, float]:
    """``accuracy``, the mean over clients, with its ``std_clients`` and ``worst_10_percent``.

    Args:
      cell: the run.
      point: ``pre`` or ``post``.
      headline: ``last`` or ``best``, the round.
    """
    if headline == "best":
        return cell["best"][point]
    last = cell["personal"][point]
    return {"accuracy": last["last"], **{name: last[name] for name in ("std_clients", "worst_10_percent")}}


def curve_of(cell: Cell, name: str, point: str) -> np.ndarray:
    """A figure of `COLUMNS` in the evaluated rounds; NaN where it takes a global model and the run has none."""
    if name == "hm":
        return harmonic_mean(curve_of(cell, "global", point), curve_of(cell, "local", point))
    path = {"accuracy": [point], "local": ["i_local", point], "global": ["global"]}[name]
    return np.array(reduce(getitem, path, cell["curve"]), np.float64)


def figures_of(cell: Cell, point: str, table: Table) -> dict[str, float]:
    """A run's figures for the columns of a table, in the headline's round, without those that the run does not have."""
    if table.columns == "accuracy":
        return {"accuracy": spread(cell, point, table.headline)["accuracy"]}
    curves = {name: curve_of(cell, name, point) for name in COLUMNS[table.columns].figures}
    known = {name: curve for name, curve in curves.items() if not np.isnan(curve).any()}
    if not known:
        return {}
    *_, ranked = known.values()
    at = np.argmax(ranked) if table.headline == "best" else -1
    return {name: float(curve[at]) for name, curve in known.items()}


def paper_figures(setting: Setting, row: str) -> dict[str, float]:
    """The paper's figures of a row, by name; HM is that of the two others where there are both, whatever is printed."""
    given = setting.paper.get(row, {})
    if {"global", "local"} <= given.keys():
        hm = harmonic_mean(float(given["global"]), float(given["local"]))
        return {**given, "hm": round(float(hm), 2)}
    return given


def markdown(table: Table, cells: Mapping[Key, Cell], missing: Mapping[Key, str], reference: str) -> str:
    """The table as far as it is filled, with the paper's figures.

    Args:
      table: the table.
      cells: the cells that there are.
      missing: why cells could not be run.
      reference: the row that the t-test compares with.
    """
    columns = COLUMNS[table.columns]
    legend = columns.legend.format(round=HEADLINES[table.headline].format(title=columns.title))
    clients = "" if table.columns == "accuracy" else "mean accuracy over clients, "
    common = LEGEND.format(clients=clients, reference=table.rows[reference].label)
    parts = [f"# {table.paper}, {table.title}", f"{legend} {common}"]
    shown = [cell for key, cell in cells.items() if key[0] in table.settings and key[1] in table.rows]
    machines, commands = (dict.fromkeys(cell[what] for cell in shown) for what in ("machine", "command"))
    parts += [f"Machine: {machine}" for machine in machines]
    if commands:
        parts.append("\n".join(["```bash", *commands, "```"]))
    for key, setting in table.settings.items():
        lines = lines_of(table, key, cells, missing)
        if lines:
            parts += [f"## {setting.label}", grid(*comparison(table, setting, lines, reference))]
            parts += notes(table, setting, lines, reference)
            parts += reasons(table, {at: why for at, why in missing.items() if at[0] == key})
            if setting.target is not None:
                of = "" if table.columns == "accuracy" else f" {columns.title}"
                parts += [f"To {setting.target:g} %{of}:", grid(*to_target(setting, setting.target, lines))]
    return "\n\n".join(parts) + "\n"


def lines_of(table: Table, setting: str, cells: Mapping[Key, Cell], missing: Mapping[Key, str]) -> list[Line]:
    """The rows of a setting that have been run, or tried, in the paper's order."""
    tried = {key[1] for key in (*cells, *missing) if key[0] == setting}
    return [
        Line(name, row, table, {key[2]: cells[key] for key in sorted(cells) if key[:2] == (setting, name)})
        for name, row in table.rows.items()
        if name in tried
    ]


def comparison(
    table: Table, setting: Setting, lines: Sequence[Line], reference: str
) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a setting's main table."""
    names = COLUMNS[table.columns].figures
    best = max((line for line in lines if line.ranked), key=mean_ranked, default=None)
    base = next((line.ranked for line in lines if line.key == reference), {})
    rows = []
    for line in lines:
        paper = paper_figures(setting, line.key)
        row = {"method": line.row.label}
        for name in names:
            row[heading("paper", name, names)] = f"{paper[name]:g}" if name in paper else NONE
        for name in names:
            bold = "**" if line is best and name == table.ranked else ""
            row[heading("ours", name, names)] = f"{bold}{ours(line, name)}{bold}"
        if setting.paper_std:
            std = setting.paper_std.get(line.key)
            row["paper's client std"] = NONE if std is None else f"{std:g}"
            row["client std"] = line.show_spread("std_clients")
        for point in ("pre", "post"):
            row[point.upper()] = line.show("personal", point, "last", scale=100)
        if table.columns == "accuracy":
            row["worst 10 %"] = line.show_spread("worst_10_percent")
        row["MB"] = line.show("megabytes_total", digits=1)
        row["s per round"] = line.show("timing", "seconds_per_round", digits=3)
        row["p"] = show_p(None if line.key == reference else paired_p(line.ranked, base))
        rows.append(row)
    return list(rows[0]), [list(row.values()) for row in rows]


def paired_p(first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """p-value of the paired t-test; None where there is nothing to judge by."""
    found = paired_difference(first, second)
    return None if found is None or np.isnan(found.p) else found.p


def show_p(p: float | None) -> str:
    """A p-value for a table."""
    return NONE if p is None else f"{p:.3g}"


def heading(whose: str, name: str, names: Sequence[str]) -> str:
    """What stands above the paper's figures of that name, or above ours."""
    return f"{whose}: {name.replace('hm', 'HM')}" if len(names) > 1 else f"{whose} (%)"


def mean_ranked(line: Line) -> float:
    """Mean over seeds."""
    return float(np.mean(list(line.ranked.values())))


def ours(line: Line, name: str) -> str:
    """Our figure in %: the mean over seeds, with the sample standard deviation if there are two or more."""
    return mean_and_spread(100 * np.array(list(line.by_seed(name).values())))


def rank_correlation(paper: Sequence[float], ours: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None with fewer than three pairs, or where all figures of a side are the same."""
    if len(paper) < 3 or np.ptp(paper) == 0 or np.ptp(ours) == 0:
        return None
    return float(stats.spearmanr(paper, ours).statistic)


def notes(table: Table, setting: Setting, lines: Sequence[Line], reference: str) -> list[str]:
    """What stands below a setting's main table: what was run, the test against the best other row, the ranking."""
    found = runs([line for line in lines if line.cells])
    run = [line for line in lines if line.ranked]
    base = next((line for line in run if line.key == reference), None)
    best = max((line for line in run if line.key != reference), key=mean_ranked, default=None)
    p = paired_p(base.ranked, best.ranked) if base and best else None
    if base and best and p is not None:
        found.append(f"{base.row.label} against the best other row, {best.row.label}: p = {p:.3g}.")
    paper = {line.key: paper_figures(setting, line.key) for line in lines}
    ranked = [line for line in run if table.ranked in paper[line.key]]
    rho = rank_correlation([paper[line.key][table.ranked] for line in ranked], [mean_ranked(line) for line in ranked])
    if rho is not None:
        found.append(f"Rank correlation (Spearman) with the paper's figures over {len(ranked)} rows: {rho:.2f}.")
    for line in lines:
        printed, computed = setting.paper.get(line.key, {}).get("hm"), paper[line.key].get("hm")
        if printed is not None and computed is not None and abs(printed - computed) > 0.05:
            found.append(
                f"The paper prints an HM of {printed:g} for {line.row.label}; that of its columns is {computed:g}."
            )
    return found


def runs(lines: Sequence[Line]) -> list[str]:
    """Rounds, seeds and ``--set`` of the cells; a line for each group of rows where they differ between calls."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        seeds: dict[tuple, list[str]] = {}
        for seed, cell in line.cells.items():
            seeds.setdefault((cell["config"]["training"]["rounds"], *cell["set"]), []).append(str(seed))
        for (rounds, *changes), numbers in seeds.items():
            what = "; ".join([f"{rounds} rounds", f"seed {', '.join(numbers)}", *changes])
            groups.setdefault(what, []).append(line.row.label)
    if len(groups) == 1:
        return [f"All rows: {what}." for what in groups]
    return [f"**Not alike**, {', '.join(labels)}: {what}." for what, labels in groups.items()]


def reasons(table: Table, missing: Mapping[Key, str]) -> list[str]:
    """Which cells of a setting could not be run, and why: a line per reason."""
    groups: dict[str, list[str]] = {}
    for (_, row, seed), why in missing.items():
        groups.setdefault(why, []).append(f"{table.rows[row].label} ({seed})")
    return [f"Missing: {', '.join(cells)}: {why}." for why, cells in groups.items()]


def to_target(setting: Setting, target: float, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table of costs until the target is reached."""
    rows = []
    for line in lines:
        found = [(cell, curve_of(cell, line.table.ranked, line.row.point)) for cell in line.cells.values()]
        costs = [cost for cell, curve in found if (cost := cost_to(cell, curve, target))]
        paper = show_paper_costs(setting.paper_to_target.get(line.key, {}))
        rows.append([line.row.label, *show_costs(costs, line), paper])
    ours = ["rounds", "seconds", "of which compilation", "MB", "MB per client"]
    return ["method", *ours, "paper: rounds / minutes / MB"], rows


def cost_to(cell: Cell, values: np.ndarray, target: float) -> tuple[float, ...] | None:
    """What a run cost up to the first evaluated round whose figure is the target or more.

    Args:
      cell: the run.
      values: the figure in the evaluated rounds.
      target: the target in %.

    Returns:
      Rounds; seconds since the run began, compilation and evaluation included; seconds of compilation; megabytes of all
      clients, and per client. None where the target is never reached.
    """
    curve, at = cell["curve"], first_reached(values, target / 100)
    if at is None:
        return None
    traffic = curve["megabytes"][at]
    per_client = traffic / cell["config"]["data"]["clients"]
    return curve["round"][at], curve["seconds"][at], cell["timing"]["compile_seconds"], traffic, per_client


def show_costs(costs: Sequence[tuple[float, ...]], line: Line) -> list[str]:
    """Means over the seeds that reached the target, and how many did if not all."""
    if not line.cells:
        return [NONE] * 5
    if not costs:
        rounds = max(cell["curve"]["round"][-1] for cell in line.cells.values())
        return [f"{NONE} (not in {rounds} rounds)", *[NONE] * 4]
    rounds, *others = np.mean(costs, axis=0)
    some = f" ({len(costs)} of {len(line.cells)} seeds)" if len(costs) < len(line.cells) else ""
    return [f"{rounds:.1f}".removesuffix(".0") + some, *(f"{cost:.1f}" for cost in others)]


def show_paper_costs(paper: Mapping[str, float]) -> str:
    """The paper's own costs."""
    figures = [f"{paper[key]:g}" if key in paper else NONE for key in ("rounds", "minutes", "megabytes")]
    return " / ".join(figures) if paper else NONE
