"""Callbacks of a run: early stopping, the best model. ``simulate(config, callbacks=[...])``; more in `loggers.py`."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjax_pfl.data.dealing import counted
from fedjax_pfl.errors import ConfigError, one_of
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.summary import Line, flat
from fedjax_pfl.method import State

if TYPE_CHECKING:
    from fedjax_pfl.experiment.result import Result


class Running:
    """A run in progress, as callbacks see it.

    Attributes:
      config: the config of the run.
      headline: ``pre`` or ``post``, the evaluation point at which its method is judged.
      round: number of rounds done.
      loss: mean training loss of the last round's participants; NaN before the first round that this
        process runs.
      lines: the lines of ``metrics.jsonl`` so far; copies of those recorded.
      metrics: the names of the metrics that its lines have, as in ``history``.
      stopped: the reason why the run is to end early, or None.
    """

    def __init__(
        self,
        config: Config,
        headline: str,
        round: int,
        lines: list[Line],
        state: Callable[[], State],
        metrics: Sequence[str] = (),
    ):
        """A run at its beginning, or where it was resumed; ``state`` copies its state to the host."""
        self.config, self.headline, self.round, self.lines, self.metrics = config, headline, round, lines, metrics
        self.loss = math.nan
        self.stopped: str | None = None
        self._state = state

    @property
    def state(self) -> State:
        """The current state of server and clients, as NumPy arrays; copied from the devices at each access."""
        return self._state()

    def stop(self, reason: str = "a callback asked for it") -> None:
        """Ends the run after this block of rounds; it is evaluated and recorded like a complete run."""
        self.stopped = reason or "no reason given"

    def values(self, metric: str | None) -> list[float]:
        """The values of a metric in the evaluated rounds so far.

        Args:
          metric: a name in ``history``, such as ``train_loss``; the accuracy on validation samples at the headline
            point unless given. ``pre.accuracy``, ``pre.NAME`` of your own metric and all others at PRE and POST are of
            the samples that are scored: test samples, unless ``data.evaluate_on = "validation"``.

        Returns:
          One value per evaluation; NaN if an evaluation has none (such as a loss before any client has trained).

        Raises:
          ConfigError: there is no such metric, or there are no validation samples.
        """
        data = self.config.data
        if metric is None:
            if data.evaluate_on == "test" and data.validation_share == 0:
                allowed = "a metric such as train_loss, or give data.validation_share for one on validation samples"
                raise ConfigError("metric", None, allowed)
            metric = f"{'validation_' if data.evaluate_on == 'test' else ''}{self.headline}.accuracy"
        if metric not in self.metrics:
            raise ConfigError("metric", metric, one_of(metric, self.metrics))
        found = [flat(line).get(metric) for line in self.lines]
        return [math.nan if value is None else value for value in found]


class Callback:
    """Base class of callbacks, which are called during a run; override the functions that you need.

    In a run of several processes, each process calls its own copy.
    """

    def on_start(self, run: Running) -> None:
        """Called after compilation, before the first round (of a resumed run: the first round that it runs)."""

    def on_round(self, run: Running) -> None:
        """Called after every round. If overridden, rounds run one by one, which costs time if they are short."""

    def on_evaluate(self, run: Running, line: Line) -> None:
        """Called after every evaluation, with a copy of its line of ``metrics.jsonl``."""

    def on_end(self, run: Running, result: "Result") -> None:
        """Called after the last round, with the result of the run."""


class EarlyStopping(Callback):
    """Ends a run whose metric has not improved for a number of evaluations.

    It uses only the recorded lines, so that a resumed run stops in the same round as an uninterrupted run.
    """

    def __init__(
        self,
        metric: str | None = None,
        *,
        patience: int = 10,
        min_delta: float = 0.0,
        mode: Literal["max", "min"] = "max",
    ):
        """Checks the arguments.

        Args:
          metric: as in :meth:`Running.values`: by default the accuracy on validation samples. A metric at PRE or POST
            chooses the round on test samples, unless the config has ``data.evaluate_on = "validation"``.
          patience: number of evaluations without a better value, after which the run ends.
          min_delta: by how much a value must be better to count as better.
          mode: whether larger (``max``) or smaller (``min``) values are better.

        Raises:
          ConfigError: one of these values is not allowed.
        """
        if not isinstance(patience, int | np.integer) or patience < 1:
            raise ConfigError("patience", patience, "a whole number of evaluations, 1 or more")
        if not isinstance(min_delta, int | float | np.integer | np.floating) or not 0 <= min_delta < math.inf:
            raise ConfigError("min_delta", min_delta, "a number, 0 or more")
        _check_goal(metric, mode)
        self.metric, self.patience, self.min_delta, self.sign = metric, patience, min_delta, 1 if mode == "max" else -1

    def on_start(self, run: Running) -> None:
        """Looks at the evaluations that were recorded before a resumption."""
        if run.lines:
            self.on_evaluate(run, run.lines[-1])

    def on_evaluate(self, run: Running, line: Line) -> None:
        """Ends the run if the best value is too long ago."""
        best, since = -math.inf, 0
        for value in run.values(self.metric):
            if math.isnan(value) and best == -math.inf:
                continue  # nothing to improve on yet, such as a loss before anybody has trained
            since += 1
            if self.sign * value > best + self.min_delta:
                best, since = self.sign * value, 0
        if since >= self.patience:
            run.stop(f"no better {self.metric or 'accuracy on validation samples'} in {counted(since, 'evaluation')}")


class BestModel(Callback):
    """Keeps the state of the evaluated round with the best metric (the first of equals).

    Attributes:
      round: that round; None before the first evaluation.
      value: the metric in that round.
      result: after the run, its result with the state of that round instead of the last one, for predictions.
    """

    def __init__(self, metric: str | None = None, *, mode: Literal["max", "min"] = "max"):
        """Args as in `EarlyStopping`."""
        _check_goal(metric, mode)
        self.metric, self.sign = metric, 1 if mode == "max" else -1
        self.round: int | None = None
        self.value = math.nan
        self.result: Result | None = None
        self._state: State | None = None

    def on_start(self, run: Running) -> None:
        """Begins with the state from which a run is resumed, if it was evaluated."""
        self.round, self.value, self.result, self._state = None, math.nan, None, None  # of an earlier run
        if run.lines:
            self.on_evaluate(run, run.lines[-1])

    def on_evaluate(self, run: Running, line: Line) -> None:
        """Copies the state if the metric is better."""
        value = run.values(self.metric)[-1]
        if self._state is None or math.isnan(self.value) or self.sign * value > self.sign * self.value:
            self.round, self.value, self._state = line["round"], value, run.state

    def on_end(self, run: Running, result: "Result") -> None:
        """Makes the result with the best state."""
        assert self._state is not None
        assert self.round is not None
        self.result = result.at(self.round, self._state)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Checks that these are callbacks, whose functions can be called.

    Raises:
      ConfigError: one is not a callback, has a function with other arguments than that of `Callback`, or one named
        ``on_...`` that `Callback` lacks, which nothing would call.
    """
    known = {name: list(inspect.signature(vars(Callback)[name]).parameters)[1:] for name in _functions(Callback)}
    if not isinstance(callbacks, Sequence):
        raise ConfigError("callbacks", callbacks, "a list of callbacks")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            allowed = "an object of a class that inherits from fedjax_pfl.Callback"
            allowed += ", not the class itself" if isinstance(callback, type) else ""
            raise ConfigError("callbacks", callback, allowed)
        for name in _functions(callback):
            function = getattr(callback, name)
            if name in known:
                try:
                    inspect.signature(function).bind(*known[name])
                except TypeError:
                    allowed = f"one whose {name} takes the arguments {', '.join(known[name])}"
                    raise ConfigError("callbacks", callback, allowed) from None
            elif callable(function):
                allowed = f"one without {name}, which nothing calls; {one_of(name, known)}"
                raise ConfigError("callbacks", callback, allowed)


def check_run(callbacks: Sequence[Callback], run: Running) -> None:
    """Checks, before anything is compiled or written, that a run has what these callbacks look at.

    Raises:
      ConfigError: it has no such metric; or its best model is wanted, and the best round lies before the checkpoint
        from which it is resumed: the states of earlier rounds are lost.
    """
    for callback in callbacks:
        if not isinstance(callback, EarlyStopping | BestModel):
            continue
        values = np.nan_to_num(callback.sign * np.asarray(run.values(callback.metric)), nan=-math.inf)
        # Of rounds without a value, `BestModel` keeps the newest.
        best = run.lines[int(values.argmax())]["round"] if np.isfinite(values).any() else run.round
        if isinstance(callback, BestModel) and best < run.round:
            allowed = 'run.keep = "best" instead: the state of the best round was lost with the interrupted process'
            raise ConfigError("BestModel", best, allowed)


def _functions(callback: Any) -> list[str]:
    """The names of what is called during a run, or looks like it."""
    return [name for name in dir(callback) if name.startswith("on_")]


def _check_goal(metric: str | None, mode: str) -> None:
    if metric is not None and not isinstance(metric, str):
        raise ConfigError("metric", metric, "a name in history, such as train_loss, or None")
    if mode not in ("max", "min"):
        raise ConfigError("mode", mode, '"max" or "min"')
