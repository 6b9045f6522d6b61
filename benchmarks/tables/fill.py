"""Runs the cells of a table that are missing, and keeps of each run what the table shows."""

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl import Config, ConfigError, load_config
from fedjax_pfl.analysis.work import client_work
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.build import divide, make_engine, shape_of
from fedjax_pfl.experiment.cells import run_configs
from fedjax_pfl.experiment.saved import complete_run
from fedjax_pfl.experiment.summary import POINTS, flat, without_nan
from fedjax_pfl.experiment.worker import Finished

from .lines import figures
from .paper import COLUMNS, ROOT, Table
from .store import Cell, Key


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


def stem(options: argparse.Namespace, table: Table) -> str:
    """What the names of the result files and of the runs' folders begin with."""
    return options.name or f"{table.paper.lower()}_{table.name}"


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
