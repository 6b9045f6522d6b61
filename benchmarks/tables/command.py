"""The command line of a paper's tables."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl import ConfigError
from fedjax_pfl.cli.given import check_in_use
from fedjax_pfl.experiment.folders import write_atomically

from .fill import fill, stem
from .page import markdown, moved_by
from .paper import allow, read_table
from .store import Cell, Key, alone, load_cells, results_file, to_json


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
        check_in_use(options.set, {"run.seed": "--seeds instead"})
        path = results_file(stem(options, table))
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
    if cells or not options.plan:
        with alone():
            cells.update(load_cells(path, table))
            text = markdown(table, cells, missing, reference)
            write_atomically(path.with_suffix(".md"), text)
        print(text, end="")
    if missing:
        sys.exit(1)


def parser(paper: Path) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=f"Runs a table of {paper.name} and compares it with the paper's.")
    listed: dict[str, Any] = {"type": lambda text: text.split(",")}
    numbers: dict[str, Any] = {"type": whole_numbers, "default": [0]}
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
        help="run nothing: say which cells would be run, and why, and write the page from those that there are, if any",
    )
    changes: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "metavar": "SECTION.KEY=VALUE"}
    parser.add_argument("--set", **changes, help="wins over all overrides")
    return parser


def whole_numbers(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not usable: whole numbers, separated by commas") from None


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
