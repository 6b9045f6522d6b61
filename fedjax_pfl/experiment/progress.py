"""Progress of a run: a bar on a terminal, one changing line in a notebook, lines in a log elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.summary import POINTS, Line

SECONDS_PER_LINE = 5.0
"""The shortest time between two lines of a log."""
# The shortest time between two changes of the line in a notebook.
_SECONDS_PER_CHANGE = 0.2


class Progress(NamedTuple):
    """The progress that is reported before compilation, after it, and after each block of rounds.

    Attributes:
      round: number of rounds done.
      rounds: number of the last round: ``training.rounds``, or fewer once the run is to end early.
      loss: mean training loss of the last round's participants, mean over the runs that have not ended before; NaN
        before the first round.
      last: the newest line of ``metrics.jsonl``, mean over these runs; None before the first evaluation.
      seconds_left: estimated time to the end, in seconds; NaN before the first round.
      memory: estimated memory of the program, in bytes.
      runs: number of runs in the program.
      compiled: whether compilation has ended.
    """

    round: int
    rounds: int
    loss: float
    last: Line | None
    seconds_left: float
    memory: int
    runs: int = 1
    compiled: bool = True


Report = Callable[[Progress], None]


@contextmanager
def reporting(config: Config, progress: Report | Literal["auto"] | None) -> Iterator[Report | None]:
    """The function that a run calls to report its progress, or None.

    Args:
      config: the config of the run.
      progress: a function, which is used as it is; None for no reports; ``"auto"`` for a bar on a terminal, a changing
        line in a notebook, and nothing elsewhere.

    Raises:
      ConfigError: ``progress`` is none of these.
    """
    if progress is None or callable(progress):
        yield progress
    elif progress != "auto":
        raise ConfigError("progress", progress, '"auto", None or a function of fedjax_pfl.experiment.progress.Progress')
    elif in_notebook():
        with _one_line(config) as report:
            yield report
    elif sys.stdout.isatty():
        with _bar(config) as report:
            yield report
    else:
        yield None


def lines(config: Config) -> Report:
    """A function for a log: it prints one line at the beginning, one every few seconds, and one at the end."""
    return _at_most_every(SECONDS_PER_LINE, lambda now: print(_line(config, now), flush=True))


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


@contextmanager
def _bar(config: Config) -> Iterator[Report]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}")
    with Bar(*columns) as bar:
        task = bar.add_task(config.method["name"], total=config.training.rounds, numbers="")
        yield lambda now: bar.update(task, completed=now.round, total=now.rounds, numbers=_numbers(now))


@contextmanager
def _one_line(config: Config) -> Iterator[Report]:
    """One changing line, because rich needs ipywidgets, which may be missing, to draw bars in a notebook."""
    longest = 0

    def write(now: Progress) -> None:
        nonlocal longest
        line = _line(config, now)
        longest = max(longest, len(line))
        print(f"\r{line:{longest}}", end="", flush=True)

    try:
        yield _at_most_every(_SECONDS_PER_CHANGE, write)
    finally:
        if longest:
            print()


def _at_most_every(seconds: float, report: Report) -> Report:
    """The same function, but skipping calls that follow too soon on the last one; the final call is never skipped."""
    last = -math.inf

    def sometimes(now: Progress) -> None:
        nonlocal last
        if now.round == now.rounds or time.perf_counter() - last >= seconds:
            last = time.perf_counter()
            report(now)

    return sometimes


def _line(config: Config, now: Progress) -> str:
    if math.isnan(now.seconds_left):
        return f"{config.method['name']} on {config.data.source}: {config.data.clients} clients; {_numbers(now)}"
    return f"round {now.round}/{now.rounds}  {_numbers(now)}"


def _numbers(now: Progress) -> str:
    if math.isnan(now.seconds_left):
        return (
            f"about {now.memory / 1e9:.2g} GB of memory; {f'in round {now.round + 1}' if now.compiled else 'compiling'}"
        )
    shown = f"loss {now.loss:.4f}"
    if now.last is not None:
        for point in POINTS:
            shown += f"  {point} {100 * now.last[point]['accuracy']:.2f}%"
    return f"{shown}  {duration(now.seconds_left)} left"


def duration(seconds: float) -> str:
    """A duration in words: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
