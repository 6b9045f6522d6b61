"""What the command line prints. Heavy modules are imported inside the functions, so that ``--help`` answers at once."""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fedjax_pfl.experiment.saved import Listed

# The letters of a user's name in one line.
_USER = 40


def print_markdown(text: str) -> None:
    """Prints a table and what stands around it: headings, tables and ``**bold**``; all else is plain text."""
    from rich.markdown import Markdown

    console, parts = _console(200), text.split("\n\n")
    shown = "\n\n".join(_within(console.width, part) for part in parts)
    # Names and messages may have any letters; a bar within a cell is escaped already.
    console.print(Markdown(re.sub(r"(?<!\*)\*(?!\*)|\\(?!\|)|[`_~<\[&]", r"\\\g<0>", shown)))


def _console(width: int) -> "Console":
    """A console that prints names as they are, and does not cut to the width of a terminal where there is none."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, markup=False, emoji=False)


def _within(width: int, part: str) -> str:
    """A Markdown table that is wider than the terminal as several, each with the first column; else as it is."""
    if not part.startswith("| "):
        return part
    columns = list(zip(*(line[2:-2].split(" | ") for line in part.splitlines()), strict=True))
    wide = [max(map(len, column)) + 3 for column in columns]
    return "\n\n".join(
        "\n".join(f"| {' | '.join(row)} |" for row in zip(*(columns[at] for at in table), strict=True))
        for table in _that_fit(wide, width)
    )


def _that_fit(wide: Sequence[int], width: int) -> list[list[int]]:
    """Deals columns of these widths to tables of at most ``width``, each with column 0; returns the columns of each."""
    tables: list[list[int]] = [[0]]
    for at in range(1, len(wide)):
        if sum(wide[column] for column in tables[-1]) + wide[at] > width and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(at)
    return tables


def print_summary(summary: dict[str, Any]) -> None:
    """Prints what a run came to, and what is to be known of its data."""
    from rich.table import Table

    from fedjax_pfl.experiment import headline

    table = Table(
        title=headline.title(summary),
        caption=headline.caption(summary),
        caption_justify="left",
        title_justify="left",
    )
    headings, *rows = headline.table(summary)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*row)
    console = _console(120)
    console.print(table)
    for remark in [*headline.remarks(summary), *headline.notes(summary)]:
        console.print(remark, highlight=False)


def print_partition(manifest: dict[str, Any]) -> None:
    """Prints who holds what: several tables, each with the clients, where the classes do not fit beside each other."""
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Table

    from fedjax_pfl.experiment import headline
    from fedjax_pfl.experiment.html import SIZES

    columns: dict[str, list[str]] = {"client": [str(client) for client in range(len(manifest["sizes"]))]}
    if users := manifest.get("users"):
        columns["user"] = [str(user) for user in users]
    columns |= {name: [str(n) for n in manifest[key]] for name, key in SIZES.items()}
    by_class = enumerate(zip(*manifest["class_counts"], strict=True))
    columns |= {str(label): [str(n) if n else "·" for n in counts] for label, counts in by_class}
    gap = 2  # Rich puts two spaces after each column, and one before the first
    wide = [max(map(cell_len, [name, *column])) + gap for name, column in columns.items()]
    if users:
        wide[1] = min(wide[1], _USER + gap)
    console = _console(max(120, sum(wide) + 1))
    headings, entries = list(columns), list(columns.values())
    for number, part in enumerate(_that_fit(wide, console.width - 1)):
        title = "samples per client and class" if number == 0 else None
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for at in part:
            table.add_column(headings[at], justify="right", overflow="fold", max_width=wide[at] - gap)
        for row in zip(*(entries[at] for at in part), strict=True):
            table.add_row(*row)
        console.print(table)
    for note in headline.notes(manifest):
        console.print(note, highlight=False)
    console.print(f"hash {manifest['hash']}", highlight=False, soft_wrap=True)


def print_table(table: dict[str, Callable[..., Any]]) -> None:
    """Prints names and the first line of what each is documented by."""
    wide = max(map(len, table))
    for name, factory in table.items():
        said = (inspect.getdoc(factory) or "your own").splitlines()[0].replace("``", "`")
        print(f"{name:{wide}} {said}")


def print_runs(runs: "Sequence[Listed]", folder: Path) -> None:
    """Prints a line per run in a folder: how far it is, and what it came to."""
    from rich.table import Table

    from fedjax_pfl.experiment.summary import POINTS
    from fedjax_pfl.experiment.tables import NONE

    table = Table(title=f"in {folder}", title_justify="left")
    for heading in ("run", "method", "data", "seed"):
        table.add_column(heading, overflow="fold")
    for heading in ("rounds", "PRE", "POST"):
        table.add_column(heading, justify="right")
    table.add_column("state")
    for run in runs:
        config = run.config
        done = f"{run.round}/{config['training']['rounds']}"
        found = [run.accuracy.get(point) for point in POINTS]
        scores = [NONE if value is None else f"{100 * value:.2f}" for value in found]  # None: no client was scored
        of = [config["method"]["name"], config["data"]["source"], str(config["run"]["seed"])]
        ended = "diverged" if run.diverged else ""
        state = ended if run.ended else "not ended" if run.begun else "not begun"
        path = run.path.relative_to(folder)
        table.add_row(str(path if path.parts else run.path), *of, done, *scores, state)
    _console(200).print(table)
