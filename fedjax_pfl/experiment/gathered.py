"""Reads runs from their directories and names them by their differences, for reports, plots and `Sweep.load`."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.markdown_table import as_entry, entries_of
from fedjax_pfl.experiment.options import SELECTORS
from fedjax_pfl.experiment.registry import is_built_in
from fedjax_pfl.experiment.saved import FREE, Begun, read_begun, run_directories
from fedjax_pfl.experiment.summary import flat
from fedjax_pfl.experiment.tables import Cell, show, without_seed

WITHOUT_EFFECT = tuple(field for field in FREE if field != "training.rounds")
"""The fields that have no effect on a run's numbers."""
# Samples may differ under one source name (arrays, or a file that was replaced). No field of a config has this name.
_SAMPLES = "data.samples"


class Table(NamedTuple):
    """The table that a comparison or sweep has written to its folder.

    Attributes:
      folder: the folder.
      text: the table in Markdown, with the failed runs.
      written: time of writing, in nanoseconds.
      baseline: the values, without the seed, of the runs with which the others are compared.
      point: the evaluation point at which they are compared.
      runs: run directory -> ``values``, which name the run, and ``config``, the `_identity` of its config; in the order
        of the table. Empty if an earlier version has written the folder.
    """

    folder: Path
    text: str
    written: int
    baseline: dict[str, Any]
    point: str
    runs: dict[str, dict[str, Any]]


def folders_of(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The paths given by a caller; only their type is checked, not the file system.

    Raises:
      ConfigError: they are not a list of paths.
    """
    listed = isinstance(paths, Iterable) and not isinstance(paths, str | os.PathLike)
    if not listed or not all(isinstance(path, str | os.PathLike) for path in paths):
        allowed = 'directories, one by one: Sweep.load("runs/a", "runs/b"), report(["runs/a", "runs/b"])'
        raise ConfigError("paths", paths, allowed)
    return [Path(os.path.expanduser(path)) for path in paths]


def gather(paths: Sequence[Path]) -> list[Begun]:
    """The runs that have begun in these folders, each once, in the order of the folders.

    Args:
      paths: run directories, and folders of run directories, as comparisons and sweeps write them.

    Raises:
      ConfigError: one of them is not a folder, or no run has begun there; and the errors of `read_begun`.
    """
    if not paths:
        raise ConfigError("RUN", "(missing)", "one run directory or more, or a folder of a comparison or sweep")
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            allowed = "the folder, not a file in it" if path.exists() else "a folder that exists"
            raise ConfigError("RUN", str(path), f"a run directory, or a folder that holds some: {allowed}")
        runs = run_directories(path)
        if not runs:
            allowed = "a run directory, or a folder that holds some: in this one, no run has begun"
            raise ConfigError("RUN", str(path), allowed)
        for run in runs:
            found.setdefault(run.resolve(), run)
    return [read_begun(run) for run in found.values()]


def record_of(cells: Sequence[Cell], baseline: Mapping[str, Any], point: str) -> str:
    """The JSON file that a comparison or sweep writes beside its table, for `table_in`.

    Args:
      cells: all runs, including those that have not run yet.
      baseline: the values, without the seed, of the runs with which the others are compared.
      point: the evaluation point at which they are compared.
    """
    runs = {
        Path(str(cell.config.run.out)).name: {"config": _identity(cell.config), "values": cell.values} for cell in cells
    }
    return json.dumps({"baseline": baseline, "point": point, "runs": runs}, indent=1) + "\n"


def table_in(folders: Sequence[Path]) -> Table | None:
    """The table of the comparison or sweep in these folders; None if they are not one such folder.

    Raises:
      ConfigError: one of its files is damaged.
    """
    found = [folder / name for folder in folders for name in ("comparison.md", "sweep.md")]
    path = next((path for path in found if len(folders) == 1 and path.exists()), None)
    if path is None:
        return None
    text, written, record = path.read_text(encoding="utf-8"), path.stat().st_mtime_ns, path.with_suffix(".json")
    if not record.exists():
        return Table(path.parent, text, written, {}, "", {})
    try:
        of = json.loads(record.read_text(encoding="utf-8"))
        runs = {name: {"config": run["config"], "values": dict(run["values"])} for name, run in of["runs"].items()}
        return Table(path.parent, text, written, dict(of["baseline"]), of["point"], runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        allowed = "as it was written; without this file, rows go by the fields in which runs differ"
        raise ConfigError("record", str(record), allowed) from None


def is_current(table: Table, runs: Sequence[Begun]) -> bool:
    """Whether a table shows all runs that have ended, in their current state.

    A later call may have written the table for some of the runs only, and a run may have been continued since. Only the
    first table of the text counts: somebody may have appended another one. It is not current if a row has no number of
    seeds in its place.
    """
    heading_and_rule = 2
    below = itertools.dropwhile(lambda line: not line.startswith("| "), table.text.splitlines())
    rows = list(itertools.takewhile(lambda line: line.startswith("| "), below))[heading_and_rule:]
    seeds = ["".join(entries_of(row)[1:2]) for row in rows]
    ended = [run.path / "summary.json" for run in runs if run.summary is not None]
    return (
        all(map(str.isdecimal, seeds))
        and sum(map(int, seeds)) == len(ended)
        and all(path.stat().st_mtime_ns <= table.written for path in ended)
    )


def compared(runs: Sequence[Begun], table: Table | None) -> tuple[dict[str, Any], str] | None:
    """Baseline and point of the comparison or sweep to which these runs belong; None if they belong to none."""
    return None if table is None or _called(runs, table) is None else (table.baseline, table.point)


def names_of(runs: Sequence[Begun], table: Table | None = None) -> list[tuple[dict[str, Any], int]]:
    """The values that name each run, and a number by which to sort the runs.

    Args:
      runs: the runs.
      table: the table from `table_in`. If it has all of these runs in their current state, its names and order are
        used. Otherwise the runs are named by their differences, in the order of the rows of the table.
    """
    called = None if table is None else _called(runs, table)
    if table is not None and called is not None:
        order = [of["values"] for of in table.runs.values()]
        return [(values, order.index(values)) for values in called]
    text = "" if table is None else table.text
    found = [
        values or {"method.name": run.config.method["name"]}
        for values, run in zip(differing_values(runs), runs, strict=True)
    ]
    # Runs that are not in the table yet come last.
    return [(values, text.find(f"\n| {as_entry(show(without_seed(values)))} ") % (len(text) + 1)) for values in found]


def _called(runs: Sequence[Begun], table: Table) -> list[dict[str, Any]] | None:
    """The values under which a table has these runs; None if it lacks a run, or a run has changed since."""
    found = [table.runs.get(run.path.relative_to(table.folder).as_posix()) for run in runs]
    known = [of["values"] for of, run in zip(found, runs, strict=True) if of and of["config"] == _identity(run.config)]
    return known if runs and len(known) == len(runs) else None


def _identity(config: Config) -> str:
    """A short hash that identifies a run: of the config values that differ from the defaults.

    Of a user's own part, whose defaults are not known where it is not registered, it takes all options but those that
    are unset: ``config.toml`` leaves these out, or calls them "none".
    """
    values = flat(config.model_dump())
    own = tuple(_options_of(name) for name in SELECTORS if not is_built_in(name.split(".")[-2], values[name]))
    given = {field: value for field, value in flat(config.non_defaults()).items() if not field.startswith(own)}
    given |= {field: value for field, value in values.items() if field.startswith(own) and value not in (None, "none")}
    counted = {field: value for field, value in given.items() if field not in WITHOUT_EFFECT}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:12]


def differing_values(runs: Sequence[Begun]) -> list[dict[str, Any]]:
    """For each run, its values of the fields in which the runs differ.

    Options of a method are included if they differ between runs of that method; the same holds for models and
    partitions. Different samples under the same source name are included as ``data.samples``. Runs that are equal in
    all fields are distinguished by their directories; but the first of them stays with the other seeds of its
    combination, if there are any.
    """
    tables = [_fields(run.config) for run in runs]
    _set_unset_options(tables)
    for fields, run in zip(tables, runs, strict=True):
        if "data" in run.partition:  # version 0.1 has kept none
            fields[_SAMPLES] = run.partition["data"]
    names = dict.fromkeys(["method.name", *itertools.chain(*tables)])
    differing = [field for field in names if _differs(field, tables)]
    found = [{field: table[field] for field in differing if field in table} for table in tables]
    combinations = [without_seed(values) for values in found]

    def needs_its_directory(number: int) -> bool:
        copies = found.count(found[number])
        stays = found.index(found[number]) == number and combinations.count(combinations[number]) > copies
        return copies > 1 and not stays

    return [
        {**values, "run.out": str(run.path)} if needs_its_directory(number) else values
        for number, (run, values) in enumerate(zip(runs, found, strict=True))
    ]


def cells_of(runs: Sequence[Begun], table: Table | None = None) -> list[Cell]:
    """The runs that have ended, with their names among all of these runs, in order; see `names_of`.

    Args:
      runs: all runs, including those that have not ended.
      table: the table from `table_in`.
    """
    cells = [
        (place, Cell(values, run.config, run.summary, run.clients, run.history))
        for (values, place), run in zip(names_of(runs, table), runs, strict=True)
        if run.summary is not None
    ]
    return [cell for _, cell in sorted(cells, key=lambda of: of[0])]


def _fields(config: Config) -> dict[str, Any]:
    """The fields on which the numbers of a run depend."""
    return {
        field: value for field, value in flat(config.model_dump(mode="json")).items() if field not in WITHOUT_EFFECT
    }


def _set_unset_options(tables: Sequence[dict[str, Any]]) -> None:
    """Adds to the fields of runs, as None, the options that other runs of the same part have.

    ``config.toml`` leaves an unset option out, and where the part is not registered, nothing else tells of it.
    """
    for name in SELECTORS:
        options: dict[str, dict[str, None]] = {}
        for fields in tables:
            of_part = (field for field in fields if field.startswith(_options_of(name)))
            options.setdefault(fields[name], {}).update(dict.fromkeys(of_part))
        for fields in tables:
            fields.update({option: None for option in options[fields[name]] if option not in fields})


def _options_of(name: str) -> str:
    """How the options of a part begin, by the field that names it: ``"method."`` for ``"method.name"``."""
    return name.rpartition(".")[0] + "."


def _differs(field: str, tables: Sequence[dict[str, Any]]) -> bool:
    """Whether the runs have several values of a field; for an option, only runs of the same part are compared."""
    of_part = (name for name in SELECTORS if field != name and field.startswith(_options_of(name)))
    name = "data.source" if field == _SAMPLES else next(of_part, None)
    first: dict[Any, Any] = {}
    held = [table for table in tables if field in table]
    return any(first.setdefault(table.get(name) if name else None, table[field]) != table[field] for table in held)
