"""The results of a table: a JSON file of cells, a line for each, which calls may fill side by side."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedjax_pfl import ConfigError

from .paper import ROOT, Table

RESULTS = ROOT / "benchmarks" / "results"
Key = tuple[str, str, int]  # setting, row, seed
Cell = dict[str, Any]


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


def results_file(name: str) -> Path:
    """Where the cells are; the page lies beside it."""
    return RESULTS / f"{name}.json"


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
