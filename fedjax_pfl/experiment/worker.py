"""Runs a program of several runs, in the process that an executor has chosen."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import dataset_of
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.driver import drive
from fedjax_pfl.experiment.parts import parts_of
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.progress import SECONDS_PER_LINE, Progress, duration
from fedjax_pfl.experiment.registry import OwnParts, add_parts
from fedjax_pfl.experiment.resume import RunPlace
from fedjax_pfl.experiment.saved import complete_run


class Finished(NamedTuple):
    """The numbers that are kept of a run among many: a `Result` without its state.

    Attributes:
      summary: the content of ``summary.json``.
      history: metric -> array over the evaluated rounds.
      clients: column -> array [N].
    """

    summary: dict[str, Any]
    history: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]


# The results of a program's runs; of a run that failed, the reason why.
Outcome = list[Finished | str]
Report = Callable[[int, str], None]
"""(number of the program, line of text) -> None."""

_log = logging.getLogger(__name__)


class Surroundings(NamedTuple):
    """The state that another process needs to run a program in the same way as this process.

    Attributes:
      settings: the settings of JAX, ``jax.config``.
      parts: the user's own methods, models, ... that the configs name.
    """

    settings: dict[str, Any]
    parts: OwnParts


def surroundings(programs: Sequence[Sequence[Config]]) -> Surroundings:
    """The surroundings of this process, for these programs."""
    configs = [config for configs in programs for config in configs]
    return Surroundings(dict(jax.config.values), parts_of(configs))


def run_program(configs: Sequence[Config], dataset: Callable[[], Dataset], say: Callable[[str], None]) -> Outcome:
    """Runs what is not complete of a program, in this process. Errors are returned, so that others can go on.

    Runs that are refused together are tried in halves: a run that is refused stops no other, and has its own reason. An
    unforeseen error is also logged with its traceback.

    Args:
      configs: the configs of its runs.
      dataset: returns the data set that they share.
      say: called with a line of text before compilation, every few seconds, and after the last round; its exceptions
        are raised.
    """
    raised: list[Exception] = []
    began = last = time.perf_counter()
    loaded: Dataset | None = None
    divisible = False

    def tell(line: str) -> None:
        try:
            say(line)
        except Exception as error:
            raised.append(error)
            raise

    def report(now: Progress) -> None:
        nonlocal last, divisible
        divisible = False  # it compiles: what fails from here on has cost time, and concerns the program
        if np.isnan(now.seconds_left):
            tell("compiled" if now.compiled else f"about {now.memory / 1e9:.2g} GB of memory; compiling")
        elif now.round == now.rounds or time.perf_counter() - last > SECONDS_PER_LINE:
            last = time.perf_counter()
            said = [f"round {now.round}/{now.rounds}", f"loss {now.loss:.4f}"]
            if now.last is not None:
                said += [f"{point} {100 * now.last[point]['accuracy']:.2f} %" for point in ("pre", "post")]
            said.append(f"{last - began:.0f} s")
            if now.round < now.rounds:
                said.append(f"{duration(now.seconds_left)} left")
            tell(", ".join(said))

    def run(some: Sequence[Config]) -> Outcome:
        nonlocal began, loaded, divisible
        began = time.perf_counter()
        try:
            if loaded is None:
                prepare(some[0].run)
                loaded = dataset()
            divisible = len(some) > 1
            places = [RunPlace(config, go_on=True) for config in some]
            results = drive(some, loaded, places, began=began, progress=report)
            return [Finished(result.summary, result.history, result.clients) for result in results]
        except ConfigError as error:
            if not divisible:
                return [_in_one_line(error)] * len(some)
        except Exception as error:
            if error in raised:
                raise
            _log.exception("%s failed", some[0].method["name"])
            return [f"{type(error).__name__}: {error}".splitlines()[0]] * len(some)
        # Not in the handler, where the error still holds the arrays of the program.
        middle = len(some) // 2
        return run(some[:middle]) + run(some[middle:])

    known = [settled(config) for config in configs]
    left = [config for config, outcome in zip(configs, known, strict=True) if outcome is None]
    ran = iter(run(left) if left else [])
    return [next(ran) if outcome is None else outcome for outcome in known]


def settled(config: Config) -> Finished | str | None:
    """The outcome of a run whose directory holds it, or why it cannot go there; None if there is something to run."""
    try:
        complete = complete_run(config)
    except ConfigError as error:
        return _in_one_line(error)
    return None if complete is None else Finished(*complete)


def in_short(outcome: Outcome) -> str:
    """How a program has ended, in a line."""
    failed = [reason for reason in outcome if isinstance(reason, str)]
    if not failed:
        return "done"
    return f"failed: {failed[0]}" if len(failed) == len(outcome) else f"{len(failed)} runs failed: {failed[0]}"


def run_elsewhere(
    configs: Sequence[Config], data: Any, around: Surroundings, say: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Runs a program in a separate process, with the surroundings of the calling process."""
    for name, value in around.settings.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)
    add_parts(around.parts)
    return run_program(configs, lambda: dataset_of(configs[0], data), say)


def _in_one_line(error: ConfigError) -> str:
    """Its message in one line, as all that is said of a failed run."""
    return " ".join(str(error).split())
