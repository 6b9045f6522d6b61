"""``simulate(config) -> Result``, and the main loop: run a block of rounds, evaluate, record, write a checkpoint.

`drive` runs one run, or several runs as rows of one program (`programs`); a single run is R = 1.

The path from here to a gradient step: `drive` lays out a program (`layout.lay_out`, where `build.make_engine`
combines method, model and trainer) and calls its ``rounds``, which are compiled from `Engine.rounds`
(`engine/round.py`). Each round maps `Cohorts.local` (`engine/cohort.py`) over the clients of the cohort. This calls
``method.local`` (for example in `methods/fedavg.py`), which calls a `Trainer` (`ops/training.py`), whose ``step``
computes the gradient of the method's loss on a batch.
"""

import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import jax
import numpy as np

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.engine.metrics import Metric
from fedjax_pfl.engine.run import Run
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import dataset_of, of_data
from fedjax_pfl.experiment.callbacks import Callback, check_callbacks
from fedjax_pfl.experiment.checkpoint import Saved, Stop, stop_on_signals
from fedjax_pfl.experiment.clock import Clock
from fedjax_pfl.experiment.config import Config, check_config
from fedjax_pfl.experiment.course import Course
from fedjax_pfl.experiment.distributed import agree
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.parts import with_parts
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.programs import Program
from fedjax_pfl.experiment.progress import Progress, in_notebook, reporting
from fedjax_pfl.experiment.result import Result
from fedjax_pfl.experiment.resume import RunPlace, versions
from fedjax_pfl.experiment.summary import mean_line
from fedjax_pfl.method import Method, State


def simulate(
    config: Config,
    data: Any = None,
    *,
    model: Any = None,
    features: str | None = None,
    method: Callable[..., Method] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[Callback] = (),
    overwrite: bool = False,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[Progress], None] | Literal["auto"] | None = "auto",
    interrupt: Literal["auto", "raise", "return"] = "auto",
) -> Result:
    """Runs one federated experiment.

    With ``run.out``, SIGINT and SIGTERM write a checkpoint before they end the run; ``run.checkpoint_every`` writes one
    every few rounds, in case the process is killed in another way. A second run in the same process with the same
    shapes (for instance, with another seed, learning rate or real-valued hyperparameter) needs no compilation.

    Args:
      config: the config of the run.
      data: samples and labels instead of ``data.source``: arrays (x, y) or (x, y, x_test, y_test), where x is uint8
        images [n, h, w, c] or float32 [n, ...]; or other forms, see :func:`fedjax_pfl.data.intake.as_dataset`.
      model: a model instead of the config's: a Flax module, or other forms, see
        :func:`fedjax_pfl.models.own.own_model`.
      features: the layer of ``model`` after which it is cut into extractor and head.
      method: a factory of a method instead of the config's, as for `register_method`.
      metrics: name -> JAX function, measured in addition to the config's; see :mod:`fedjax_pfl.engine.metrics`.
      callbacks: called during the run; see :class:`fedjax_pfl.Callback`.
      overwrite: whether to replace the files of an earlier run in ``run.out``; not together with ``resume``. They are
        removed after compilation, before any callback is called.
      resume: the run directory of an interrupted run, which is continued from its newest checkpoint. On the same
        machine, with the same packages and placement, the result is the same, bit for bit, as without the interruption.
        The config must be the same, except that clients may be placed differently, ``training.rounds`` may be any
        number that is no smaller than the rounds done, and these fields of ``run``, which decide what is written, may
        change: ``checkpoint_every``, ``tensorboard``, ``compilation_cache``, ``export``, ``export_clients``,
        ``client_history`` and ``keep`` (but it cannot become ``"best"``). Output goes to this directory.
      progress: called before and after compilation, and after each block of rounds, with the rounds done so far;
        ``"auto"`` shows a bar on a terminal and a line in a notebook; None shows nothing.
      interrupt: what the first SIGINT does. ``"return"`` evaluates the next round at the latest, ends the run there and
        returns the result so far; ``"raise"`` raises, at once or, with ``run.out``, after the block of rounds in
        progress; ``"auto"`` is ``"return"`` at a prompt or in a notebook, else ``"raise"``. With ``run.out`` a
        checkpoint is written, from which the run can be resumed.

    Returns:
      Summary, history per evaluated round, per-client table, final state. The numbers depend on config and data and, up
      to rounding, on placement and hardware.

    Raises:
      ConfigError: config, data and method do not fit together; the run directory is not empty, holds no run that
        `overwrite` could replace, or is that of a run that goes on elsewhere; there is no matching checkpoint to resume
        from, or the run there is complete after as many rounds or more; or `overwrite` and `resume` are both given.
        Raised before anything is compiled or written. Later only if the run directory can no longer be written, such as
        on a full disk.
      KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM, after the checkpoint is written.
    """
    began = time.perf_counter()
    check_config(config)
    check_callbacks(callbacks)
    if interrupt not in ("auto", "raise", "return"):
        raise ConfigError("interrupt", interrupt, '"auto", "raise" or "return"')
    if overwrite and resume is not None:
        raise ConfigError("overwrite", True, "false with resume, which goes on with the run instead of replacing it")
    own = {"model": model, "features": features, "method": method, "metrics": metrics}
    with with_parts(of_data(config, data), **own) as config:
        if resume is not None:
            resume = os.path.expanduser(resume)
            config = config.replace({"run.out": resume})
        prepare(config.run)
        dataset = dataset_of(config, data)
        place = RunPlace(config, resume=resume, overwrite=overwrite)
        returns = interrupt == "return" or (interrupt == "auto" and is_interactive())
        with reporting(config, progress) as report:
            return drive(
                [config],
                dataset,
                [place],
                began=began,
                progress=report,
                callbacks=callbacks,
                returns=returns,
                data=data,
            )[0]


def is_interactive() -> bool:
    """Whether this process is an interactive prompt or a notebook."""
    return hasattr(sys, "ps1") or in_notebook()


def drive(
    configs: Sequence[Config],
    dataset: Dataset,
    places: Sequence[RunPlace],
    *,
    began: float,
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    returns: bool = False,
    room: int | None = None,
    data: Any = None,
) -> list[Result]:
    """Runs configs that differ only in seed and numbers (`programs.alike`), as rows of one program.

    Args:
      configs: the configs of the runs.
      dataset: the data that each run divides among its clients.
      places: where each run is recorded, and from where it is resumed.
      began: the time when the work on the runs began, by ``time.perf_counter``.
      progress: called before and after compilation, and after each block of rounds.
      callbacks: the callbacks of each run.
      returns: whether SIGINT ends the runs early and returns the results so far.
      room: as in `lay_out`. With room, a run that a callback stops ends alone, and the others go on; without room, all
        runs end.
      data: the data from Python from which the data set was made, or None; the results keep it for later use.

    Returns:
      The results of the runs.

    Raises:
      ConfigError: config, data, method and callbacks do not fit together or into memory, or a place cannot be used.
      KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM, after checkpoints are written.
    """
    first, runs, report = configs[0], len(configs), progress or (lambda now: None)
    every = first.run.checkpoint_every or first.training.rounds
    program = lay_out(configs, dataset, room=room)

    def state_of(run: int) -> State:
        # Copied: arrays from a CPU's devices, or of several runs, are views of buffers that the next rounds reuse.
        own: State = jax.tree.map(np.array, program.each(states)[run].state)
        return own

    def end_stopped(going: Sequence[Course], stopped: bool) -> None:
        for course in going:
            if stopped and (room is None or course.live.stopped):
                course.end_soon()
                program.end(course.run, course.end)

    with ExitStack() as at_end:
        for place in places:  # before they are read, which removes files that another process may be writing
            place.take()
            at_end.callback(place.leave)
        saved, restored = _read(program, places)
        courses = [
            Course(run, program, place, start, callbacks, functools.partial(state_of, run))
            for run, (place, start) in enumerate(zip(places, saved, strict=True))
        ]
        _begin(program, places, courses, saved, restored, report)
        states = program.init() if restored is None else program.put(restored)
        t, clock = saved[0].round, Clock(began, runs, saved[0])
        one_by_one = any(type(callback).on_round is not Callback.on_round for callback in callbacks)
        catches = returns or any(place.checkpoints for place in places)
        block, checkpointed = 1, False
        stopping = at_end.enter_context(stop_on_signals() if catches else nullcontext(Stop()))
        for course in courses:
            course.tell("on_start")
        stopped = any(course.live.stopped for course in courses)
        block, stopping.signal, stopped = agree(block, stopping.signal, stopped)
        end_stopped(courses, stopped)
        while going := [course for course in courses if course.end > t]:
            ends = [course.end for course in going]
            stop, evaluated = _next_block(t, 1 if one_by_one else block, ends, first.run.eval_every, every)
            with clock.rounds():
                states = program.rounds(states, t, stop, evaluate=evaluated)
                # Waits for the devices.
                losses = [float(loss) for loss in program.each([state.loss for state in states])]
            t, block = stop, clock.block(stop)
            for course in going:
                course.live.round, course.live.loss = t, losses[course.run]
                course.tell("on_round")
            if evaluated:
                scores, sent = program.score(states, t), program.each([state.traffic for state in states])
                seconds = clock.seconds
                for course in going:
                    course.record(scores[course.run], sent[course.run], seconds)
            stopped = any(course.live.stopped for course in courses)
            block, stopping.signal, stopped = agree(block, stopping.signal, stopped)
            returning = returns and stopping.signal == signal.SIGINT
            if returning:
                stopped = True
                for course in courses:
                    course.interrupt()
            end_stopped(going, stopped)
            end = max(course.end for course in courses)
            due = first.run.checkpoint_every and (t % every == 0 or t == end)
            interrupted = stopping.signal and (returning or t < end)
            # The returned result has one more round, which is evaluated only for it. A checkpoint after that round
            # would differ from the checkpoint of an uninterrupted run.
            if (due or interrupted) and not (returning and checkpointed):
                seconds = clock.seconds
                for course, state in zip(courses, program.each(states), strict=True):
                    course.save(state, t, seconds, clock.round_seconds)
                checkpointed = returning
            if interrupted and not returning:
                stopping.leave()
            last = mean_line([course.lines[-1] for course in going]) if going[0].lines else None
            loss = float(np.mean([losses[course.run] for course in going]))
            report(Progress(t, end, loss, last, clock.left(t, end), program.bytes(), runs))
        results = _results(program, courses, states, t, clock, dataset.name, data)
    if stopping.signal and not (returns and stopping.signal == signal.SIGINT):
        stopping.leave()  # the signal came when these runs were done, and is meant for the whole process
    return results


def _begin(
    program: Program,
    places: Sequence[RunPlace],
    courses: Sequence[Course],
    saved: Sequence[Saved],
    restored: Sequence[Run] | None,
    report: Callable[[Progress], None],
) -> None:
    """Checks callbacks, compiles, and only then writes to the directories: an error leaves them as they were.

    Args:
      program: the program, laid out.
      places: where each run is recorded.
      courses: the runs.
      saved: the checkpoint from which each run continues, or the beginning.
      restored: the states in these checkpoints; None at the beginning.
      report: called before and after compilation.
    """
    for course in courses:
        course.check()
    rounds = program.configs[0].training.rounds
    at_start = Progress(saved[0].round, rounds, math.nan, None, math.nan, program.bytes(), len(courses))
    report(at_start._replace(compiled=False))
    program.compile()
    report(at_start)
    for place, start, manifest, holdings in zip(places, saved, program.manifests, program.holdings, strict=True):
        if restored is None:
            place.begin(manifest, holdings)
        else:
            place.go_back(start)


def _next_block(t: int, most: int, ends: Sequence[int], eval_every: int, checkpoint_every: int) -> tuple[int, bool]:
    """The last round of the block that begins after round t, and whether the block ends with an evaluation.

    Args:
      t: rounds done.
      most: the largest number of rounds of a block.
      ends: the last rounds of the active runs; these are always evaluated.
      eval_every: rounds between evaluations.
      checkpoint_every: rounds between checkpoints.
    """
    evaluation = min(*ends, (t // eval_every + 1) * eval_every)
    stop = min(t + most, evaluation, (t // checkpoint_every + 1) * checkpoint_every)
    return stop, stop == evaluation


def _results(
    program: Program,
    courses: Sequence[Course],
    states: list[Run],
    t: int,
    clock: Clock,
    dataset: str,
    data: Any,
) -> list[Result]:
    """The results of the runs after t rounds; records them and calls the callbacks."""
    runs = len(courses)
    if courses[0].scores is None:  # the checkpoint was that of the last round
        for course, scored in zip(courses, program.score(states, t), strict=True):
            course.scores = scored
    timing = {
        **({"runs_in_the_program": runs} if runs > 1 else {}),
        "compile_seconds": program.compile_seconds / runs,
        "seconds_per_round": clock.round_seconds / t,
        "total_seconds": clock.seconds,
    }
    ended = program.each(states)
    exports = program.export(ended, t)
    results = [
        course.result(state, exported, timing, dataset, data)
        for course, state, exported in zip(courses, ended, exports, strict=True)
    ]
    for course, result in zip(courses, results, strict=True):
        course.finish(result)
    for course, result in zip(courses, results, strict=True):
        course.tell("on_end", result)
    return results


def _read(program: Program, places: Sequence[RunPlace]) -> tuple[list[Saved], list[Run] | None]:
    """The state from which each run starts: the newest checkpoint that all runs have, or the beginning."""
    common = set.intersection(*(set(place.found()) for place in places))
    if common:
        like, pairs = program.one_run(), zip(places, program.manifests, strict=True)
        found = [place.read(max(common), manifest, like) for place, manifest in pairs]
        saved, states = zip(*found, strict=True)
        return list(saved), list(states)
    hashes = [
        (config.model_dump(mode="json"), manifest["hash"])
        for config, manifest in zip(program.configs, program.manifests, strict=True)
    ]
    return [Saved(0, [], 0.0, 0.0, *known, versions()) for known in hashes], None
