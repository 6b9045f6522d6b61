"""Runs from their directories, and what tells them apart: what reports, pictures and `Sweep.load` are made of."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import SELECTORS, Config
from fedjax_pfl.experiment.record import FREE, Begun, read_begun, run_directories
from fedjax_pfl.experiment.summary import flat
from fedjax_pfl.experiment.tables import Cell, show, without_seed

WITHOUT_EFFECT = tuple(field for field in FREE if field != "training.rounds")
"""The fields that no number depends on."""
# What sources of one name may differ in: arrays, a file that was replaced. No field of a config is called so.
_SAMPLES = "data.samples"


class Table(NamedTuple):
    """What a comparison or sweep has left in its folder besides its runs.

    Attributes:
      folder: where.
      text: its table in Markdown, which also says what failed.
      written: when, in nanoseconds.
      baseline: the values, without the seed, of the runs that the others are compared with.
      point: where they are compared.
      runs: run directory -> ``values``, what the run goes by, and ``config``, the `_identity` of its config; in the
        order of the table. Nothing where an earlier version has written.
    """

    folder: Path
    text: str
    written: int
    baseline: dict[str, Any]
    point: str
    runs: dict[str, dict[str, Any]]


def folders_of(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Paths that a caller has named, checked as far as it can be without looking.

    Raises:
      ConfigError: they are no list of paths.
    """
    listed = isinstance(paths, Iterable) and not isinstance(paths, str | os.PathLike)
    if not listed or not all(isinstance(path, str | os.PathLike) for path in paths):
        allowed = 'directories, one by one: Sweep.load("runs/a", "runs/b"), report(["runs/a", "runs/b"])'
        raise ConfigError("paths", paths, allowed)
    return [Path(path) for path in paths]


def gather(paths: Sequence[Path]) -> list[Begun]:
    """The runs that have begun in some folders, each once, in the order of the folders.

    Args:
      paths: run directories, and folders that hold them, as comparisons and sweeps leave them.

    Raises:
      ConfigError: one of them is no folder, or no run has begun there; as in `read_begun`.
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
    """What a comparison or sweep writes beside its table, in a file of that name, for `table_in`.

    Args:
      cells: all runs, also those that are still to come.
      baseline: the values, without the seed, of the runs that the others are compared with.
      point: where they are compared.
    """
    runs = {
        Path(str(cell.config.run.out)).name: {"config": _identity(cell.config), "values": cell.values} for cell in cells
    }
    return json.dumps({"baseline": baseline, "point": point, "runs": runs}, indent=1) + "\n"


def table_in(folders: Sequence[Path]) -> Table | None:
    """What the one comparison or sweep of these folders has left there.

    Raises:
      ConfigError: a file of it is damaged.
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
    """Whether a table is of all runs that have ended, as they are now.

    A later call may have written it for some of them, and a run may have gone on since.
    """
    heading_and_rule = 2
    rows = [line.split(" | ") for line in table.text.splitlines() if line.startswith("| ")][heading_and_rule:]
    ended = [run.path / "summary.json" for run in runs if run.summary is not None]
    return sum(int(seeds) for _, seeds, *_ in rows) == len(ended) and all(
        path.stat().st_mtime_ns <= table.written for path in ended
    )


def compared(runs: Sequence[Begun], table: Table | None) -> tuple[dict[str, Any], str] | None:
    """Baseline and point of the comparison or sweep that these runs are of; None where they are of none."""
    return None if table is None or _called(runs, table) is None else (table.baseline, table.point)


def named(runs: Sequence[Begun], table: Table | None = None) -> list[tuple[dict[str, Any], int]]:
    """What each run goes by, and its place, to sort by.

    Args:
      runs: the runs.
      table: that of `table_in`: its names and its order, if it knows all of these runs as they are now; or else what
        tells the runs apart, in the order of its rows.
    """
    called = None if table is None else _called(runs, table)
    if table is not None and called is not None:
        order = [of["values"] for of in table.runs.values()]
        return [(values, order.index(values)) for values in called]
    text = "" if table is None else table.text
    found = [
        values or {"method.name": run.config.method["name"]}
        for values, run in zip(differences(runs), runs, strict=True)
    ]
    # A row that is not there yet comes last.
    return [(values, text.find(f"\n| {show(without_seed(values))} ") % (len(text) + 1)) for values in found]


def _called(runs: Sequence[Begun], table: Table) -> list[dict[str, Any]] | None:
    """The values that a comparison or sweep has given these runs; None where one is of another, or has gone on."""
    found = [table.runs.get(run.path.relative_to(table.folder).as_posix()) for run in runs]
    known = [of["values"] for of, run in zip(found, runs, strict=True) if of and of["config"] == _identity(run.config)]
    return known if runs and len(known) == len(runs) else None


def _identity(config: Config) -> str:
    """A few digits that tell a run from others: of what its config says otherwise than the defaults."""
    given = {field: value for field, value in flat(config.non_defaults()).items() if field not in WITHOUT_EFFECT}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:12]


def differences(runs: Sequence[Begun]) -> list[dict[str, Any]]:
    """What tells runs apart: for each, the fields that differ between them, with its values.

    Options of a method are among them where they differ between runs of that method; those of models and partitions
    likewise. Samples that differ though their source is called the same are among them as ``data.samples``. Runs that
    are alike in all fields are told apart by their directories; but the first of them stays with the other seeds of its
    combination, if there are any.
    """
    tables = [_fields(run.config) for run in runs]
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
    """The runs that have ended, each by its name among all of these, in order; see `named`.

    Args:
      runs: those that have ended, and those that go on.
      table: that of `table_in`.
    """
    cells = [
        (place, Cell(values, run.config, run.summary, run.clients, run.history))
        for (values, place), run in zip(named(runs, table), runs, strict=True)
        if run.summary is not None
    ]
    return [cell for _, cell in sorted(cells, key=lambda of: of[0])]


def _fields(config: Config) -> dict[str, Any]:
    """The fields that numbers depend on."""
    return {
        field: value for field, value in flat(config.model_dump(mode="json")).items() if field not in WITHOUT_EFFECT
    }


def _differs(field: str, tables: Sequence[dict[str, Any]]) -> bool:
    """Whether runs have several values of a field; of an option, runs whose part is the same one."""
    parts = {name.rpartition(".")[0] + ".": name for name in SELECTORS} | {_SAMPLES: "data.source"}
    name = next((name for part, name in parts.items() if field != name and field.startswith(part)), None)
    first: dict[Any, Any] = {}
    held = [table for table in tables if field in table]
    return any(first.setdefault(table.get(name) if name else None, table[field]) != table[field] for table in held)
