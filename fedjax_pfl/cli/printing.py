"""What the command line prints. Heavy modules are imported inside the functions, so that ``--help`` answers at once."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_pfl.experiment.config import Config
    from fedjax_pfl.experiment.driver import Progress

_CAPTION = (
    "Accuracy in %. PRE: after aggregation; POST: after local training; *: what the method is judged by.\n"
    "best is selected on {evaluated_on} data; weighted: by the clients' samples, as PFLlib does."
)


@contextmanager
def progress(config: "Config", quiet: bool) -> "Iterator[Callable[[Progress], None] | None]":
    """A progress bar on a terminal, plain lines elsewhere."""
    if quiet:
        yield None
    elif sys.stdout.isatty():
        with _bar(config) as report:
            yield report
    else:
        yield lambda now: print(_line(config, now), flush=True)


@contextmanager
def _bar(config: "Config") -> "Iterator[Callable[[Progress], None]]":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}")
    with Bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(config.method["name"], total=config.training.rounds, numbers="")
        yield lambda now: bar.update(task, completed=now.round, numbers=_numbers(now))


def _line(config: "Config", now: "Progress") -> str:
    if now.round == 0:
        return f"{config.method['name']} on {config.data.source}: {config.data.clients} clients; {_numbers(now)}"
    return f"round {now.round}/{now.rounds}  {_numbers(now)}  {now.seconds_left:.0f} s left"


def _numbers(now: "Progress") -> str:
    if now.round == 0:
        return f"about {now.memory / 1e9:.2g} GB of memory; compiling"
    shown = f"loss {now.loss:.4f}"
    if now.last is not None:
        for point in ("pre", "post"):
            shown += f"  {point} {100 * now.last[point]['accuracy']:.2f}%"
    return shown


def print_markdown(text: str) -> None:
    """Prints a table and what stands around it."""
    from rich.console import Console
    from rich.markdown import Markdown

    # Not cut to the width of a terminal where there is none.
    Console(width=None if sys.stdout.isatty() else 200).print(Markdown(text))


def print_summary(summary: dict[str, Any]) -> None:
    """Prints what a run came to."""
    from rich.console import Console
    from rich.table import Table

    title = f"{summary['method']} on {summary['dataset']}, {summary['clients']} clients, {summary['rounds']} rounds"
    table = Table(
        title=title,
        caption=_CAPTION.format(**summary),
        caption_justify="left",
        title_justify="left",
    )
    columns = {
        "last": "last",
        "best": "best",
        "by_validation": "by validation",
        "mean_last_10": "mean of last 10",
        "weighted_last": "weighted",
        "weighted_best": "best weighted",
        "std_clients": "std of clients",
        "worst_10_percent": "worst 10 %",
    }
    if summary["personal"]["pre"]["by_validation"] is None:
        del columns["by_validation"]
    table.add_column("")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for point in ("pre", "post"):
        scores = summary["personal"][point]
        mark = " *" if point == summary["headline"] else ""
        table.add_row(point.upper() + mark, *(f"{100 * scores[column]:.2f}" for column in columns))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if summary["new_clients"] is not None:
        new = summary["new_clients"]
        scored = ", ".join(f"{point.upper()} {100 * new[point]['last']:.2f}" for point in ("pre", "post"))
        console.print(f"new clients, which never trained: {scored}", highlight=False)
    if summary["global"] is not None:
        scored = f"{100 * summary['global']:.2f} %"
        hm = ", ".join(
            f"{point.upper()} {100 * summary['personal'][point]['hm_last']:.2f}" for point in ("pre", "post")
        )
        console.print(
            f"global model on the pooled {summary['evaluated_on']} set: {scored}\n"
            f"harmonic mean of it and I_local (accuracy and macro-F1 of the clients): {hm}",
            highlight=False,
        )
    if summary["diverged_round"] is not None:
        console.print(
            f"diverged: from round {summary['diverged_round']} on, answers are no numbers, which count as wrong; "
            "try a smaller training.lr",
            highlight=False,
        )
    timing, traffic = summary["timing"], summary["traffic"]
    console.print(
        f"{timing['seconds_per_round']:.3f} s per round, {timing['compile_seconds']:.1f} s compilation, "
        f"{timing['total_seconds']:.1f} s in all; {traffic['megabytes_total']:.1f} MB exchanged",
        highlight=False,
    )


def print_partition(manifest: dict[str, Any]) -> None:
    """Prints who holds what."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="samples per client and class", title_justify="left")
    classes = len(manifest["class_counts"][0])
    for heading in ("client", "size", "train", "test", *map(str, range(classes))):
        table.add_column(heading, justify="right")
    rows = zip(manifest["sizes"], manifest["n_train"], manifest["n_test"], manifest["class_counts"], strict=True)
    for client, (size, n_train, n_test, counts) in enumerate(rows):
        table.add_row(str(client), str(size), str(n_train), str(n_test), *(str(n) if n else "·" for n in counts))
    console = Console(width=None if sys.stdout.isatty() else 40 + 8 * classes)
    console.print(table)
    for note in manifest["notes"]:
        console.print(f"note: {note}", highlight=False)
    console.print(f"hash {manifest['hash']}", highlight=False)


def print_table(table: dict[str, Callable[..., Any]]) -> None:
    """Prints names and the first line of what each is documented by."""
    for name, factory in table.items():
        print(f"{name:12} {(inspect.getdoc(factory) or '').splitlines()[0]}")
