"""Runs from their directories, and what tells them apart: what reports, pictures and `Sweep.load` are made of."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import SELECTORS, Config
from fedjax_pfl.experiment.record import FREE, Begun, read_begun, run_directories
from fedjax_pfl.experiment.summary import flat
from fedjax_pfl.experiment.tables import Cell, show, without_seed

WITHOUT_EFFECT = tuple(field for field in FREE if field != "training.rounds")
"""The fields that no number depends on."""


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


def table_in(folders: Sequence[Path]) -> str | None:
    """The table that the one comparison or sweep of these folders has written, which also says what failed."""
    found = [folder / name for folder in folders for name in ("comparison.md", "sweep.md")]
    return next((path.read_text(encoding="utf-8") for path in found if len(folders) == 1 and path.exists()), None)


def holds_all(table: str, cells: Sequence[Cell]) -> bool:
    """Whether such a table is of as many runs that have ended: a later call may have written it for some of them."""
    heading_and_rule = 2
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][heading_and_rule:]
    return sum(int(seeds) for _, seeds, *_ in rows) >= len(cells)


def row_in(table: str | None, name: str) -> int:
    """Where the row of a method or combination is in such a table, to sort by; one that is not there yet comes last."""
    return 0 if table is None else table.find(f"\n| {name} ") % (len(table) + 1)


def differences(runs: Sequence[Begun]) -> list[dict[str, Any]]:
    """What tells runs apart: for each, the fields that differ between them, with its values.

    Options of a method are among them where they differ between runs of that method; those of models and partitions
    likewise. Runs that are alike in all fields are told apart by their directories; but the first of them stays with
    the other seeds of its combination, if there are any.
    """
    tables = [_fields(run.config) for run in runs]
    fields = dict.fromkeys(["method.name", *itertools.chain(*tables)])
    differing = [field for field in fields if _differs(field, tables)]
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


def cells_of(runs: Sequence[Begun], table: str | None = None) -> list[Cell]:
    """The runs that have ended, each with what tells it apart from all of these.

    Args:
      runs: those that have ended, and those that go on.
      table: that of `table_in`, whose order they get.
    """
    cells = [
        Cell(values or {"method.name": run.config.method["name"]}, run.config, run.summary, run.clients, run.history)
        for values, run in zip(differences(runs), runs, strict=True)
        if run.summary is not None
    ]
    return sorted(cells, key=lambda cell: row_in(table, show(without_seed(cell.values))))


def _fields(config: Config) -> dict[str, Any]:
    """The fields that numbers depend on."""
    return {
        field: value for field, value in flat(config.model_dump(mode="json")).items() if field not in WITHOUT_EFFECT
    }


def _differs(field: str, tables: Sequence[dict[str, Any]]) -> bool:
    """Whether runs have several values of a field; of an option, runs whose part is the same one."""
    name = next((name for name in SELECTORS if field != name and field.startswith(name.rpartition(".")[0] + ".")), None)
    first: dict[Any, Any] = {}
    held = [table for table in tables if field in table]
    return any(first.setdefault(table.get(name) if name else None, table[field]) != table[field] for table in held)
