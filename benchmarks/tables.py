"""Runs the experiments behind a paper's tables, and compares our figures with the paper's.

    python benchmarks/fedecouple_tables.py table2 --settings cifar10_s20 --seeds 0,1,2

``papers/<paper>.toml`` holds a paper's tables: settings, rows (methods, or the variants of an ablation) and figures.
``[controls]`` are rows of every table; a table with ``controls`` has only those named there. ``headline`` says whether
figures are of the last or of the best round, and ``columns`` what they measure (see `COLUMNS`; by default the accuracy
of the personal models).

A cell is one run: a row in a setting with a seed. ``results/<name>.json`` is rewritten after every program (the seeds
of a row), and a cell in it is run again only if its resolved config has changed. So a table can be filled by several
calls, one after the other or, with other rows, side by side. With ``--work FOLDER``, runs leave checkpoints there, and
an interrupted call continues in the middle of its runs, to the bit. A change of the code is not noticed; use another
``--name`` after one. ``results/<name>.md`` shows all cells so far. ``--plan`` writes it anew, and shows what a call
would run, and why, but runs nothing.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

from fedjax_pfl import Config, ConfigError, load_config
from fedjax_pfl.analysis.work import client_work
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.build import divide, make_engine, shape_of
from fedjax_pfl.experiment.cells import run_configs
from fedjax_pfl.experiment.folders import write_atomically
from fedjax_pfl.experiment.markdown_table import markdown_table
from fedjax_pfl.experiment.saved import complete_run
from fedjax_pfl.experiment.statistics import bootstrap_over_clients, paired_difference
from fedjax_pfl.experiment.summary import POINTS, figures_of, first_reached, flat, harmonic_mean, without_nan
from fedjax_pfl.experiment.tables import NONE, mean_and_spread
from fedjax_pfl.experiment.worker import Finished

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HEADLINES = {
    "last": "of the last round",
    "best": "of the round with the highest {title}, which is chosen on the samples that are scored",
}
# Sections of a config whose fields the paper's figures are of.
EXPERIMENT = ("data", "model", "training", "participation")
TIMES = {"pre": "PRE, after aggregation", "post": "POST, after local training"}
SEEDS = "mean over seeds ± sample standard deviation"
LEGEND = (
    "Columns PRE and POST: {clients}the last round. Passes: a participant's work in a round, in passes over its "
    "samples, forward and backward. MB: all clients, up and down. Behind {reference}: its figure minus "
    "the row's, mean of the paired differences in points with a 95 % interval over seeds{drawn}. p: two-sided paired "
    "t-test over seeds, not corrected for the number of rows."
)
DRAWN = (
    "; over clients: 95 % interval, after the last round, when clients are drawn anew, each with its figures of all "
    "seeds; where the best round counts, beside the last round's difference"
)


class Columns(NamedTuple):
    """Figures that are compared with the paper's; rows are ranked and tested by the last one, ``title`` in the text."""

    figures: tuple[str, ...]
    title: str
    legend: str


COLUMNS = {
    "accuracy": Columns(
        ("accuracy",),
        "mean",
        f"Accuracy in %, unweighted mean over clients, {SEEDS}. Ours, the worst 10 % of clients and, where shown, the "
        f"standard deviation over clients are {{round}}, {{point}}. By samples: the mean "
        "that counts every test sample alike, PFLlib's.",
    ),
    "weighted": Columns(
        ("weighted",),
        "sample-weighted mean",
        f"Accuracy in %, every test sample counted alike (PFLlib's number), {SEEDS}. Ours is {{round}}, {{point}}.",
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
        "{round}, {point}.",
    ),
    "global_local_hm": Columns(
        ("global", "local", "hm"),
        "HM",
        f"Figures in %, {SEEDS}. Ours are {{round}}. Global: accuracy of the global model on the pooled test set. "
        f"Local: harmonic mean of a client's accuracy and macro-F1, unweighted mean over clients, {{point}}. HM: "
        "harmonic mean of the two; rows are ranked and tested by it. The paper's HM is that of its two columns.",
    ),
}

Key = tuple[str, str, int]  # setting, row, seed
Cell = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of a table; ``point``, ``pre`` or ``post``, is the accuracy that the paper reports.

    ``reading_of`` is another row, if this one reads in another way what the paper says of that row; beside it, it has
    no part in the rank correlation.
    """

    label: str
    point: str
    overrides: list[str]
    reading_of: str | None = None


@dataclass(frozen=True)
class Setting:
    """What the rows are compared on, with the paper's figures by row and name, in %, and the cost of the target.

    If a row has only one number, it is the last of the figures. ``paper_std`` holds standard deviations over the
    clients, in points; ``row_overrides`` are changes of a row in this setting only, after its own overrides.
    """

    label: str
    overrides: list[str]
    row_overrides: dict[str, list[str]] = field(default_factory=dict)
    paper: dict[str, float | dict[str, float]] = field(default_factory=dict)
    paper_std: dict[str, float] = field(default_factory=dict)
    target: float | None = None
    paper_to_target: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of a paper; it has ``columns``, a key of `COLUMNS`, of the round ``headline``, ``last`` or ``best``.

    Rows are compared with ``reference``, another row.
    """

    paper: str
    name: str
    title: str
    config: str
    headline: str
    columns: str
    reference: str
    rows: dict[str, Row]
    settings: dict[str, Setting]

    @property
    def ranked(self) -> str:
        """The figure by which rows are ranked and tested."""
        return COLUMNS[self.columns].figures[-1]


class Line(NamedTuple):
    """A row in a setting, with cells and `figures` by seed, which are empty if nothing could be run."""

    key: str
    row: Row
    cells: dict[int, Cell]
    figures: dict[int, dict[str, float]]

    def by_seed(self, name: str) -> dict[int, float]:
        """A figure of the runs that have it."""
        return {seed: found[name] for seed, found in self.figures.items() if not np.isnan(found[name])}

    def mean(self, name: str) -> float:
        """A figure's mean over seeds."""
        return float(np.mean(list(self.by_seed(name).values())))

    def show(self, name: str, scale: float = 100.0, digits: int = 2) -> str:
        """The mean for a table."""
        return f"{scale * self.mean(name):.{digits}f}" if self.by_seed(name) else NONE


def main(paper: Path, arguments: Sequence[str] | None = None) -> None:
    """Fills and prints a table of a paper's file.

    Raises:
      SystemExit: 2 for bad input, which is one line on stderr; 1 if a cell that was asked for could not be run.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser(paper).parse_args(arguments)
    try:
        table = read_table(paper, options.table)
        reference = options.reference or table.reference
        allow("--reference", [reference], table.rows)
        allow("--settings", options.settings or (), table.settings)
        allow("--methods", options.methods or (), table.rows)
        path = RESULTS / f"{stem(options, table)}.json"
        cells = load_cells(path, table)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *without_folder(arguments)])

    def save(done: Mapping[Key, Cell]) -> None:
        with alone():
            cells.update(load_cells(path, table))  # of other calls, since
            cells.update(done)
            write_atomically(path, to_json(table, cells))

    if moved := moved_by(options.set):
        print(f"note: --set moves {moved}: the paper's figures are of another setting", file=sys.stderr)
    missing = fill(table, cells, options, command, save)
    with alone():
        cells.update(load_cells(path, table))
        text = markdown(table, cells, missing, reference)
        write_atomically(path.with_suffix(".md"), text)
    print(text, end="")
    if missing:
        sys.exit(1)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets one call at a time write to the results; the others wait, except on Windows, which has no such locks."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    folder = os.open(RESULTS, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def parser(paper: Path) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=f"Runs a table of {paper.name} and compares it with the paper's.")
    listed: dict[str, Any] = {"type": lambda text: text.split(",")}
    numbers: dict[str, Any] = {"type": lambda text: [int(number) for number in text.split(",")], "default": [0]}
    parser.add_argument("table", metavar="TABLE", help="e.g. table2")
    parser.add_argument("--settings", **listed, metavar="A,B", help="all of the table's unless given")
    parser.add_argument("--methods", **listed, metavar="X,Y", help="rows, by key; all of the table's unless given")
    parser.add_argument("--rounds", type=int, help="the config's unless given")
    parser.add_argument("--seeds", **numbers, metavar="0,1,2", help="of the runs; 0 unless given")
    parser.add_argument(
        "--reference", metavar="ROW", help="what the t-test compares with; the table's, or the last row, unless given"
    )
    parser.add_argument("--name", help="stem of the result files; <paper>_<table> unless given")
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="of run directories, with checkpoints; none unless given"
    )
    parser.add_argument(
        "--checkpoint-every", type=at_least_one, default=10, metavar="ROUNDS", help="with --work; 10 unless given"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="run nothing: say which cells would be run, and why, and write the page from those that there are",
    )
    changes: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "metavar": "SECTION.KEY=VALUE"}
    parser.add_argument("--set", **changes, help="wins over all overrides")
    return parser


def stem(options: argparse.Namespace, table: Table) -> str:
    """What the names of the result files and of the runs' folders begin with."""
    return options.name or f"{table.paper.lower()}_{table.name}"


def at_least_one(text: str) -> int:
    """A positive number; argparse's error names the option otherwise."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def without_folder(arguments: Sequence[str]) -> list[str]:
    """A command line as it is recorded: without the folder of the runs, which is private and changes no figure."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith(("--work", "--checkpoint-every")):
            kept.append(argument)
        skip = not skip and argument in ("--work", "--checkpoint-every")
    return kept


def read_table(path: Path, name: str) -> Table:
    """A table of a paper's file; ConfigError if it has no such table, or a figure belongs to no row or column."""
    paper = tomllib.loads(path.read_text(encoding="utf-8"))
    allow("TABLE", [name], paper["tables"])
    fields = dict(paper["tables"][name])
    headline = fields.pop("headline", paper.get("headline", "last"))
    allow(f"{name}.headline", [headline], HEADLINES)
    columns = fields.pop("columns", "accuracy")
    allow(f"{name}.columns", [columns], COLUMNS)
    names = COLUMNS[columns].figures
    own, controls = fields.pop("rows", paper.get("methods", {})), paper.get("controls", {})
    wanted = fields.pop("controls", list(controls))
    allow(f"{name}.controls", wanted, controls)
    rows = {key: Row(**row) for key, row in ({key: controls[key] for key in wanted if key not in own} | own).items()}
    reference = fields.pop("reference", paper.get("reference", list(rows)[-1]))
    allow(f"{name}.reference", [reference], rows)
    allow(f"{name}.reading_of", [row.reading_of for row in rows.values() if row.reading_of], rows)
    settings = {key: Setting(**setting) for key, setting in fields.pop("settings").items()}
    for key, setting in settings.items():
        for what in ("row_overrides", "paper", "paper_to_target"):
            allow(f"{name}.{key}.{what}", getattr(setting, what), rows)
        allow(f"{name}.{key}.paper_std", setting.paper_std, rows if columns == "accuracy" else ())
        for row, given in setting.paper.items():
            allow(f"{name}.{key}.paper.{row}", given if isinstance(given, dict) else (), names)
    known = {"headline": headline, "columns": columns, "reference": reference, "rows": rows, "settings": settings}
    return Table(paper["paper"], name, **known, **fields)


def allow(option: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raises ConfigError if a name is not among those allowed."""
    for name in given:
        if name not in allowed:
            raise ConfigError(option, name, f"allowed: {', '.join(allowed)}")


def load_cells(path: Path, table: Table) -> dict[Key, Cell]:
    """The cells of earlier calls; ConfigError if the file holds another table."""
    if not path.exists():
        return {}
    held = json.loads(path.read_text(encoding="utf-8"))
    if (held["paper"], held["table"]) != (table.paper, table.name):
        raise ConfigError("--name", path.stem, f"{path} holds {held['table']} of {held['paper']}; choose another name")
    return {(cell["setting"], cell["row"], cell["seed"]): cell for cell in held["cells"]}


def to_json(table: Table, cells: Mapping[Key, Cell]) -> str:
    """JSON with one line per cell, so that a replaced cell is one line in a diff."""
    lines = ",\n".join(json.dumps(cell) for cell in cells.values())
    return f'{{"paper": {json.dumps(table.paper)}, "table": {json.dumps(table.name)}, "cells": [\n{lines}\n]}}\n'


def fill(
    table: Table,
    cells: Mapping[Key, Cell],
    options: argparse.Namespace,
    command: str,
    save: Callable[[Mapping[Key, Cell]], None],
) -> dict[Key, str]:
    """Runs the cells that are asked for and missing, and says which ones could not be run.

    ``save`` gets the cells of each program when it ends, and puts them among ``cells``.
    """
    began, missing, wanted = time.perf_counter(), {}, {}

    def say(key: Key, outcome: str, why: str | None = None) -> None:
        if why is None:
            point = table.rows[key[1]].point
            found = figures(cells[key], point, table)
            known = {name: found[name] for name in COLUMNS[table.columns].figures if not np.isnan(found[name])}
            shown = [f"{point if name == 'accuracy' else name} {100 * x:.2f} %" for name, x in known.items()]
        else:
            missing[key], shown = why, [why]
        told = ", ".join([outcome, *shown])
        print(f"{time.perf_counter() - began:8.1f} s  {key[0]} {key[1]} seed {key[2]}: {told}", file=sys.stderr)

    settings, rows, refused = options.settings or table.settings, options.methods or table.rows, {}
    every = itertools.product(table.settings, table.rows, options.seeds)
    asked = [key for key in every if key[0] in settings and key[1] in rows]
    for key in asked:
        try:
            wanted[key] = load_config(ROOT / table.config, cell_overrides(table, key, options))
        except ConfigError as error:
            refused[key] = str(error)
    if len(refused) == len(asked):
        print(f"error: {refused[asked[0]]}", file=sys.stderr)
        sys.exit(2)
    for key, why in refused.items():
        say(key, "missing", why)
    for key, config in list(wanted.items()):
        if key in cells and (had := cells[key]["config"]["training"]["rounds"]) > config.training.rounds:
            lost = f"{key[0]} {key[1]} seed {key[2]} has {had} rounds, which would be lost; give another --name"
            print(f"error: {config.training.rounds} rounds are fewer: {lost}", file=sys.stderr)
            sys.exit(2)
        changes = changes_since(cells[key], config) if key in cells else ["not there yet"]
        if not changes:
            del wanted[key]
            say(key, "kept")
        elif options.plan:
            del wanted[key]
            print(f"would run  {key[0]} {key[1]} seed {key[2]}: {'; '.join(changes)}", file=sys.stderr)

    def keep(keys: Sequence[Key], results: Sequence[Finished]) -> None:
        done: dict[Key, Cell] = {}
        passes: dict[tuple[str, str], float] = {}  # of a row: a program may hold several
        for key, result in zip(keys, results, strict=True):
            if key[:2] not in passes:
                passes[key[:2]] = gradient_passes(wanted[key])
            asked = {**dict(zip(("setting", "row", "seed"), key, strict=True)), "set": options.set, "command": command}
            resolved = {"overrides": cell_overrides(table, key, options), "config": wanted[key].model_dump(mode="json")}
            done[key] = asked | resolved | measures(result) | {"gradient_passes": passes[key[:2]]}
        save(done)
        for key in done:
            say(key, "done")

    to_run = {key: kept_in(options, table, key, config) for key, config in wanted.items()}
    for key, config in list(to_run.items()):
        # A call may have been stopped between the last round of a run and the writing of its cell.
        if (complete := complete_in(config)) is not None:
            del to_run[key]
            keep([key], [complete])
    # The seeds of a row are rows of one program; a call that is stopped has the rows that were done.
    keys = list(to_run)
    for places, outcome in run_configs(list(to_run.values())):
        done: dict[Key, Finished] = {}
        for place, ended in zip(places, outcome, strict=True):
            if isinstance(ended, str):
                say(keys[place], "missing", ended)
            else:
                done[keys[place]] = ended
        if done:
            keep(list(done), list(done.values()))
    return missing


def kept_in(options: argparse.Namespace, table: Table, key: Key, config: Config) -> Config:
    """The config of a cell, with the directory in which its run is kept, if any.

    A cell whose config has changed in more than the number of rounds has another directory.
    """
    if options.work is None:
        return config
    held = config.model_dump(mode="json")
    del held["training"]["rounds"]
    digest = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:8]
    folder = options.work / "_".join((stem(options, table), *map(str, key), digest))
    return config.replace({"run.out": str(folder), "run.checkpoint_every": options.checkpoint_every})


def complete_in(config: Config) -> Finished | None:
    """The run in a config's directory, if it is complete; errors of an incomplete one are reported when it is run."""
    try:
        found = complete_run(config)
    except ConfigError:
        return None
    return None if found is None else Finished(*found)


def changes_since(cell: Cell, config: Config) -> list[str]:
    """What has changed since a cell was run; a field that was added to configs since then had its default."""
    try:
        held = Config(**cell["config"])
    except ConfigError as error:
        return [f"run with a config of an earlier version: {error}"]
    if "JAX on cpu" in cell["machine"] and {held.run.precision, config.run.precision} <= {"auto", "float32"}:
        held = held.replace("run.precision", config.run.precision)  # which are one and the same there
    then, now = (flat(each.model_dump(mode="json")) for each in (held, config))
    fields = dict.fromkeys([*then, *now])
    return [
        f"{name} was {then.get(name)!r}, is {now.get(name)!r}" for name in fields if then.get(name) != now.get(name)
    ]


def cell_overrides(table: Table, key: Key, options: argparse.Namespace) -> list[str]:
    """The changes of a cell to the table's config; later ones win."""
    setting, row, seed = key
    rounds = [] if options.rounds is None else [f"training.rounds={options.rounds}"]
    chosen = table.settings[setting]
    both = [*chosen.overrides, *table.rows[row].overrides, *chosen.row_overrides.get(row, ())]
    return [*both, *rounds, f"run.seed={seed}", *options.set]


def machine_of(ran_on: dict[str, Any]) -> str:
    """What a run ran on; an earlier version did not record all of it, so that its run may be from another machine."""
    host = f"{ran_on['cores']} {ran_on['machine']} cores, " if "cores" in ran_on else ""
    python = f", Python {ran_on['python']}" if "python" in ran_on else ""
    return f"{host}JAX on {ran_on['platform']} (devices: {ran_on['device_count']}), jax {ran_on['jax']}{python}"


def measures(result: Finished) -> Cell:
    """What is kept of a run; ``best`` holds the clients' figures in the round with the highest mean accuracy."""
    summary, history = result.summary, result.history

    def curve(name: str, digits: int = 6) -> Any:
        return without_nan(history[name].round(digits).tolist())

    def best(point: str) -> dict[str, float]:
        at = np.argmax(history[f"{point}.accuracy"])
        return {name: float(history[f"{point}.{name}"][at]) for name in ("accuracy", "std_clients", "worst_10_percent")}

    return {
        "machine": machine_of(summary["environment"]),
        "personal": summary["personal"],
        "best": {point: best(point) for point in POINTS},
        "global": summary["global"],
        "diverged_round": summary["diverged_round"],
        "clients": {
            point: without_nan(np.float64(result.clients[f"{point}_accuracy"]).round(6).tolist()) for point in POINTS
        },
        "partition_hash": summary["partition_hash"],
        "majority_class": summary["majority_class"],
        "diagnostics": {name: found["last"] for name, found in summary["metrics"].items() if name.startswith("diag")},
        "timing": summary["timing"],
        "megabytes_total": summary["traffic"]["megabytes_total"],
        "curve": {
            "round": history["round"].tolist(),
            **{point: curve(f"{point}.accuracy") for point in POINTS},
            "i_local": {point: curve(f"{point}.i_local") for point in POINTS},
            "global": curve("global"),
            "megabytes": curve("megabytes", 3),
            "seconds": curve("seconds", 3),
            "diagnostics": {name: curve(name) for name in history if name.startswith("diag")},
        },
    }


def gradient_passes(config: Config) -> float:
    """A participant's work in a round, as the number of forward and backward passes over its samples that cost as much.

    It is counted in operations of products and convolutions, for a client with the mean number of samples, without the
    work of diagnostics.
    """
    dataset = load(config.data.source)
    federation, _ = divide(config, dataset)
    undiagnosed = config.replace("run.diagnostics", False)
    plain = {
        "method.name": "fedavg",
        "training.epochs": 1,
        "training.copies": "none",
        "participation.collaborate": True,
        "aggregation.rule": "mean",
        "aggregation.trim": None,
        "aggregation.byzantine": None,
    }
    both = undiagnosed, undiagnosed.replace(plain)
    engines = [make_engine(each, shape_of(dataset)) for each in both]
    work, one_pass = (client_work(engine, jax.random.key(0), federation).flops for engine in engines)
    return round(work / one_pass, 3)


def curve_of(cell: Cell, name: str, point: str) -> np.ndarray:
    """A figure of `COLUMNS` in the evaluated rounds; NaN if it needs a global model and the run has none."""
    if name == "hm":
        return harmonic_mean(curve_of(cell, "global", point), curve_of(cell, "local", point))
    curve = cell["curve"]
    values = curve[point] if name == "accuracy" else curve["i_local"][point] if name == "local" else curve["global"]
    return np.array(values, np.float64)


def figures(cell: Cell, point: str, table: Table) -> dict[str, float]:
    """The figures of a run: of its summary, and the table's, in the headline's round; NaN for what it does not have."""
    found = figures_of({**cell, "headline": point, "traffic": {"megabytes_total": cell["megabytes_total"]}})
    if table.columns == "accuracy":
        return found | {"accuracy": found["headline"]} | (cell["best"][point] if table.headline == "best" else {})
    if table.columns == "weighted":
        return found | {"weighted": found["weighted_best"] if table.headline == "best" else found["weighted"]}
    curves = {name: curve_of(cell, name, point) for name in COLUMNS[table.columns].figures}
    known = [curve for curve in curves.values() if not np.isnan(curve).any()]
    at = int(np.argmax(known[-1])) if known and table.headline == "best" else -1
    return found | {name: float(curve[at]) for name, curve in curves.items()}


def paper_figures(table: Table, setting: Setting, row: str) -> dict[str, float]:
    """The paper's figures of a row; HM is computed from the two others, if it has both, and its own is ``printed``."""
    given = setting.paper.get(row, {})
    found = given if isinstance(given, dict) else {table.ranked: given}
    if {"global", "local"} <= found.keys():
        hm = round(float(harmonic_mean(float(found["global"]), float(found["local"]))), 2)
        return found | {"hm": hm} | ({"printed": found["hm"]} if "hm" in found else {})
    return found


def markdown(table: Table, cells: Mapping[Key, Cell], missing: Mapping[Key, str], reference: str) -> str:
    """The table so far, with the paper's figures, and why cells are missing."""
    columns = COLUMNS[table.columns]
    points = {row.point for row in table.rows.values()}
    paper = "" if len(points) == 1 else "the point that the paper reports: "
    point = f"at {paper}{', or '.join(time for name, time in TIMES.items() if name in points)}"
    legend = columns.legend.format(round=HEADLINES[table.headline].format(title=columns.title), point=point)
    clients, of = ("", "") if table.columns == "accuracy" else ("mean accuracy over clients, ", f" {columns.title}")
    drawn = DRAWN if table.columns == "accuracy" else ""
    common = LEGEND.format(clients=clients, reference=table.rows[reference].label, drawn=drawn)
    parts = [f"# {table.paper}, {table.title}", f"{legend} {common}"]
    known = [cell for key, cell in cells.items() if key[0] in table.settings and key[1] in table.rows]
    parts += [f"Machine: {machine}" for machine in dict.fromkeys(cell["machine"] for cell in known)]
    if known:
        parts.append("\n".join(["```bash", *dict.fromkeys(cell["command"] for cell in known), "```"]))
    for key, setting in table.settings.items():
        lines = lines_of(table, key, cells, missing)
        if lines:
            setting = as_run(table, setting, lines)
            parts += [f"## {setting.label}", *comparison(table, setting, lines, reference)]
            reasons = [(why, f"{table.rows[at[1]].label} ({at[2]})") for at, why in missing.items() if at[0] == key]
            parts += [f"Missing: {', '.join(found)}: {why}." for why, found in together(reasons).items()]
            if setting.target is not None:
                parts += [f"To {setting.target:g} %{of}:", to_target(table, setting, setting.target, lines)]
    return "\n\n".join(parts) + "\n"


def as_run(table: Table, setting: Setting, lines: Sequence[Line]) -> Setting:
    """The setting; without the paper's figures if it was run on another data set (a part of the same is no other)."""

    def name(source: str) -> str:
        return re.sub(r"(_\d+k)?(\.npz)?$", "", re.split("[:/]", source)[-1])

    meant = name(load_config(ROOT / table.config, setting.overrides).data.source)
    found = {name(cell["config"]["data"]["source"]) for line in lines for cell in line.cells.values()} - {meant}
    if not found:
        return setting
    label = f"{', '.join(sorted(found))} instead of the data of {setting.label}"
    return replace(setting, label=label, paper={}, paper_std={}, paper_to_target={})


def lines_of(table: Table, setting: str, cells: Mapping[Key, Cell], missing: Mapping[Key, str]) -> list[Line]:
    """The rows of a setting that have been run or tried, in the paper's order."""
    lines = []
    for name, row in table.rows.items():
        found = {key[2]: cells[key] for key in sorted(cells) if key[:2] == (setting, name)}
        if found or any(key[:2] == (setting, name) for key in missing):
            known = {seed: figures(cell, row.point, table) for seed, cell in found.items()}
            lines.append(Line(name, row, found, known))
    return lines


def comparison(table: Table, setting: Setting, lines: Sequence[Line], reference: str) -> list[str]:
    """The main table of a setting, and below it what was run, the test against the best other row, and the ranking."""
    names, ranked = COLUMNS[table.columns].figures, table.ranked
    title = "{0}: {1}" if len(names) > 1 else "{0} (%)"
    run = sorted((line for line in lines if line.by_seed(ranked)), key=lambda line: -line.mean(ranked))
    base = next((line for line in lines if line.key == reference), None)
    paper = {line.key: paper_figures(table, setting, line.key) for line in lines}
    rows = []
    for line in lines:
        given, row = paper[line.key], {"method": line.row.label}
        for name in names:
            row[title.format("paper", name.replace("hm", "HM"))] = f"{given[name]:g}" if name in given else NONE
        for name in names:
            ours = mean_and_spread([100 * x for x in line.by_seed(name).values()])
            bold = "**" if name == ranked and line in run[:1] else ""
            row[title.format("ours", name.replace("hm", "HM"))] = f"{bold}{ours}{bold}"
        if setting.paper_std:
            std = setting.paper_std.get(line.key)
            row |= {"paper's client std": NONE if std is None else f"{std:g}", "client std": line.show("std_clients")}
        row |= {point.upper(): line.show(point) for point in POINTS}
        if table.columns == "accuracy":
            row["worst 10 %"] = line.show("worst_10_percent")
            row["by samples"] = line.show("weighted_best" if table.headline == "best" else "weighted")
        passes = {cell["gradient_passes"] for cell in line.cells.values() if "gradient_passes" in cell}
        row["passes"] = f"{max(passes):.1f}" if passes else NONE
        row |= {"MB": line.show("megabytes", 1, 1), "s per round": line.show("seconds_per_round", 1, 3)}
        behind = None if base is None or line is base else base
        row |= lead(table, behind, line)
        rows.append(row)
    shown = [
        name
        for name in rows[0]
        if name not in ("by samples", "passes", "behind", "over clients") or any(row[name] != NONE for row in rows)
    ]
    parts = [
        markdown_table(shown, [[row[name] for name in shown] for row in rows]),
        *runs([line for line in lines if line.cells]),
    ]
    parts += majority([cell for line in lines for cell in line.cells.values()])
    parts += other_models(lines)
    parts += diverged(lines)
    best = next((line for line in run if line is not base), None)
    if base and best and (p := paired_p(base.by_seed(ranked), best.by_seed(ranked))) is not None:
        parts.append(f"{base.row.label} against the best other row, {best.row.label}: p = {p:.3g}.")
    parts += ranking([(line, paper[line.key][ranked]) for line in run if ranked in paper[line.key]], ranked)
    for line in lines:
        printed, hm = paper[line.key].get("printed"), paper[line.key].get("hm")
        if printed is not None and hm is not None and abs(printed - hm) > 0.05:
            parts.append(f"The paper prints an HM of {printed:g} for {line.row.label}; that of its columns is {hm:g}.")
    return parts


def lead(table: Table, base: Line | None, line: Line) -> dict[str, str]:
    """How far a row is behind another one, with intervals over seeds and over clients."""
    gap = base and paired_difference(base.by_seed(table.ranked), line.by_seed(table.ranked))
    if not base or not gap:
        return {"behind": NONE, "over clients": NONE, "p": NONE}
    row = {"behind": f"{100 * gap.mean:+.2f}" + ("" if np.isnan(gap.low) else interval(gap.low, gap.high))}
    pairs = [(base.cells[seed], cell) for seed, cell in line.cells.items() if seed in base.cells]
    row |= {"over clients": NONE, "p": NONE if np.isnan(gap.p) else f"{gap.p:.3g}"}
    if table.columns == "accuracy" and all("clients" in cell for pair in pairs for cell in pair):
        gaps = [
            np.subtract(clients_at(first, base.row.point), clients_at(second, line.row.point))
            for first, second in pairs
        ]
        if ends := bootstrap_over_clients(gaps):
            row["over clients"] = interval(*ends).strip()
            if table.headline == "best":  # of that round, the clients are not kept
                last = np.mean([np.nanmean(of_run) for of_run in gaps])
                row["over clients"] = f"last: {100 * last:+.2f} {row['over clients']}"
    return row


def clients_at(cell: Cell, point: str) -> np.ndarray:
    """The clients' accuracies after the last round; NaN for a client that cannot be scored."""
    return np.array([np.nan if value is None else value for value in cell["clients"][point]])


def interval(low: float, high: float) -> str:
    """The two ends of an interval, in points."""
    return f" [{100 * low:+.2f}, {100 * high:+.2f}]"


def majority(cells: Sequence[Cell]) -> list[str]:
    """The accuracy of guessing on the data of the rows; nothing for cells that do not record it.

    For each seed it uses the partition that most rows have: a method with validation samples divides its samples
    differently.
    """
    told = [cell for cell in cells if "majority_class" in cell]
    if not told:
        return []
    of_seed = {
        seed: Counter(found).most_common(1)[0][0]
        for seed, found in together((cell["seed"], cell["partition_hash"]) for cell in told).items()
    }
    known = {
        cell["partition_hash"]: cell["majority_class"] for cell in told if cell["partition_hash"] in of_seed.values()
    }
    plain, weighted = (
        mean_and_spread([100 * found[name] for found in known.values()]) for name in ("accuracy", "weighted")
    )
    return [
        f"Always answering the class that a client has most training samples of: {plain} %, by samples {weighted} %."
    ]


def other_models(lines: Sequence[Line]) -> list[str]:
    """Rows whose model is not that of most rows; a difference between the two is not one between methods alone."""
    used = together((cell["config"]["model"]["name"], line.row.label) for line in lines for cell in line.cells.values())
    by_rows = sorted(used, key=lambda name: -len(used[name]))
    others = [(name, ", ".join(dict.fromkeys(used[name]))) for name in by_rows[1:]]
    return [f"**Another model**, {labels}: {name}, not {by_rows[0]}." for name, labels in others]


def diverged(lines: Sequence[Line]) -> list[str]:
    """Rows with runs whose predictions are no longer numbers; these predictions count as wrong."""
    found = [
        (cell.get("diverged_round"), f"{line.row.label} (seed {seed})")
        for line in lines
        for seed, cell in line.cells.items()
    ]
    return [
        f"**Diverged** in round {at}, from when on answers count as wrong: {', '.join(rows)}."
        for at, rows in together(pair for pair in found if pair[0] is not None).items()
    ]


def paired_p(first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """p-value of the paired t-test; None if the pairs allow no test."""
    found = paired_difference(first, second)
    return None if found is None or np.isnan(found.p) else found.p


def ranking(paper: Sequence[tuple[Line, float]], ranked: str) -> list[str]:
    """How well the order of the rows agrees with the paper's figures, in the last round that all rows have scores of.

    Of two rows that read the same line of the paper in two ways, one counts.
    This is the headline's round if all rows have been run for the same number of rounds. Empty if they share no round.
    """
    there = {line.key for line, _ in paper}
    paper = [(line, figure) for line, figure in paper if line.row.reading_of not in there]
    cells = [cell for line, _ in paper for cell in line.cells.values()]
    pairs, after = [(figure, line.mean(ranked)) for line, figure in paper], ""
    if len({cell["config"]["training"]["rounds"] for cell in cells}) > 1:
        shared = set.intersection(*(set(cell["curve"]["round"]) for cell in cells))
        if not shared or ranked == "weighted":  # of which no curve is kept
            return []
        at = max(shared)
        pairs, after = [(figure, mean_in(at, line, ranked)) for line, figure in paper], f" after {at} rounds"
    rho = rank_correlation(pairs)
    if rho is None:
        return []
    return [f"Rank correlation (Spearman) with the paper's figures over {len(pairs)} rows{after}: {rho:.2f}."]


def mean_in(round: int, line: Line, name: str) -> float:
    """A figure of a row in a round, as the mean over seeds."""
    curves = [(cell["curve"]["round"], curve_of(cell, name, line.row.point)) for cell in line.cells.values()]
    return float(np.mean([curve[rounds.index(round)] for rounds, curve in curves]))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation; None with fewer than three pairs, or if all figures of a side are the same."""
    level = np.round(pairs, 6)  # figures that only the rounding of float32 parts have the same rank
    if len(pairs) < 3 or (np.ptp(level, axis=0) == 0).any():
        return None
    return float(stats.spearmanr(level).statistic)


def runs(lines: Sequence[Line]) -> list[str]:
    """Rounds, seeds and ``--set`` of the cells; a line for each group of rows if they differ between calls."""
    labelled = []
    for line in lines:
        cells = [((cell["config"]["training"]["rounds"], *cell["set"]), str(seed)) for seed, cell in line.cells.items()]
        for (rounds, *changes), seeds in together(cells).items():
            labelled.append(("; ".join([f"{rounds} rounds", f"seed {', '.join(seeds)}", *changes]), line.row.label))
    groups = together(labelled)
    moved = moved_by(change for line in lines for cell in line.cells.values() for change in cell["set"])
    noted = [f"**Not the paper's setting**: `--set` moves {moved}."] if moved else []
    if len(groups) == 1:
        return [*(f"All rows: {what}." for what in groups), *noted]
    return [*(f"**Not alike**, {', '.join(labels)}: {what}." for what, labels in groups.items()), *noted]


def moved_by(changes: Iterable[str]) -> str:
    """What ``--set`` changes of the experiment, except the source, which is reported elsewhere if it is other data."""
    names = dict.fromkeys(change.partition("=")[0] for change in changes)
    return ", ".join(name for name in names if name.partition(".")[0] in EXPERIMENT and name != "data.source")


def together(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """Groups the second entries by their first entry."""
    groups: dict[Any, list[str]] = {}
    for what, beside in pairs:
        groups.setdefault(what, []).append(beside)
    return groups


def to_target(table: Table, setting: Setting, target: float, lines: Sequence[Line]) -> str:
    """The table of costs until the target, in %, is reached: means over the seeds that reach it."""
    ours = ["rounds", "seconds", "of which compilation", "MB", "MB per client"]
    rows = []
    for line in lines:
        cells = line.cells.values()
        at = [first_reached(curve_of(cell, table.ranked, line.row.point), target / 100) for cell in cells]
        costs = [costs_at(cell, place) for cell, place in zip(cells, at, strict=True) if place is not None]
        shown = [NONE] * len(ours)
        if costs:
            rounds, *others = np.mean(costs, axis=0)
            some = f" ({len(costs)} of {len(cells)} seeds)" if len(costs) < len(cells) else ""
            shown = [f"{rounds:.1f}".removesuffix(".0") + some, *(f"{cost:.1f}" for cost in others)]
        elif cells:
            shown[0] += f" (not in {max(cell['curve']['round'][-1] for cell in cells)} rounds)"
        paper = setting.paper_to_target.get(line.key, {})
        printed = [f"{paper[key]:g}" if key in paper else NONE for key in ("rounds", "minutes", "megabytes")]
        rows.append([line.row.label, *shown, " / ".join(printed) if paper else NONE])
    return markdown_table(["method", *ours, "paper: rounds / minutes / MB"], rows)


def costs_at(cell: Cell, at: int) -> tuple[float, ...]:
    """Up to an evaluated round: rounds; seconds, in all and of compilation; MB of all clients, and per client."""
    curve, clients = cell["curve"], cell["config"]["data"]["clients"]
    sent = curve["megabytes"][at]
    return curve["round"][at], curve["seconds"][at], cell["timing"]["compile_seconds"], sent, sent / clients
