"""Where programs of several runs run: here, one after the other, or as tasks of a Ray cluster."""

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.sources import from_arrays, load
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import prepare
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.driver import Progress, drive
from fedjax_pfl.experiment.resume import RunPlace


class Finished(NamedTuple):
    """What is kept of a run among many: a `driver.Result` without its state.

    Attributes:
      summary: the content of ``summary.json``.
      history: metric -> array over evaluated rounds.
      clients: column -> array [N].
    """

    summary: dict[str, Any]
    history: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]


# The runs of a program, or why it failed.
Outcome = list[Finished] | str
Report = Callable[[int, str], None]
"""Program, line of text -> None."""
_Data = Sequence[np.ndarray] | None

# A line about a program that goes on comes this often.
_SECONDS_PER_LINE = 5.0


def _run_program(configs: Sequence[Config], dataset: Callable[[], Dataset], say: Callable[[str], None]) -> Outcome:
    began = last = time.perf_counter()

    def report(now: Progress) -> None:
        nonlocal last
        if now.last is not None and (now.round == now.rounds or time.perf_counter() - last > _SECONDS_PER_LINE):
            last = time.perf_counter()
            scores = ", ".join(f"{point} {100 * now.last[point]['accuracy']:.2f} %" for point in ("pre", "post"))
            say(f"round {now.round}/{now.rounds}, loss {now.loss:.4f}, {scores}, {last - began:.0f} s")
        elif now.last is None and np.isnan(now.loss):
            say(f"about {now.memory / 1e9:.2g} GB of memory; compiling")

    try:
        prepare(configs[0].run)
        places = [RunPlace(config, go_on=True) for config in configs]
        results = drive(configs, dataset(), places, began=began, progress=report)
    except ConfigError as error:
        return str(error)
    return [Finished(result.summary, result.history, result.clients) for result in results]


def _run_here(programs: Sequence[Sequence[Config]], data: _Data, report: Report) -> Iterator[tuple[int, Outcome]]:
    """Runs one program after the other."""
    loaded: dict[str, Dataset] = {}

    for number, configs in enumerate(programs):
        source = configs[0].data.source

        def dataset(source: str = source) -> Dataset:
            if source not in loaded:
                loaded.clear()
                loaded[source] = load(source) if data is None else from_arrays(*data)
            return loaded[source]

        yield number, _run_program(configs, dataset, functools.partial(report, number))


def _run_on_ray(programs: Sequence[Sequence[Config]], data: _Data, report: Report) -> Iterator[tuple[int, Outcome]]:
    """Runs programs as tasks of Ray, as many at once as there is room for; they come as they end."""
    import ray

    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init()
        except ConnectionError as error:
            allowed = f"the address of a Ray cluster that answers ({error})"
            raise ConfigError("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"), allowed) from None
    running: dict[Any, int] = {}
    try:
        node = max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
        gpu = "GPU" in ray.cluster_resources()
        # A process for each program: devices cannot be prepared twice, and JAX keeps a GPU's memory to its end.
        # No second try: a program too large for a machine's memory would take its workers down again and again.
        task = ray.remote(max_calls=1, max_retries=0)(_run_in_a_worker)
        shared = ray.put(data)
        for number, configs in enumerate(programs):
            room = {"num_cpus": 1, "num_gpus": 1} if gpu else {"num_cpus": max(1, min(len(configs), node))}
            running[task.options(**room).remote(configs, shared, dict(jax.config.values))] = number
            report(number, "handed to Ray")
        while running:
            (ended, *_), _ = ray.wait(list(running))
            number = running.pop(ended)
            try:
                outcome = ray.get(ended)
            except ray.exceptions.RayError as error:
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                outcome = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
            report(number, f"failed: {outcome}" if isinstance(outcome, str) else "done")
            yield number, outcome
    finally:
        for future in running:
            ray.cancel(future, force=True)
        if ours:
            ray.shutdown()


def _run_in_a_worker(configs: Sequence[Config], data: _Data, settings: dict[str, Any]) -> Outcome:
    """A program, under the settings of JAX that the sweep was called with."""
    for name, value in settings.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)

    def dataset() -> Dataset:
        return load(configs[0].data.source) if data is None else from_arrays(*data)

    return _run_program(configs, dataset, lambda line: None)


EXECUTORS = {"local": _run_here, "ray": _run_on_ray}


def check_executor(name: str) -> None:
    """Checks that programs can be run there.

    Raises:
      ConfigError: the executor is unknown, or not installed.
    """
    if name not in EXECUTORS:
        raise ConfigError("executor", name, f"allowed: {', '.join(EXECUTORS)}")
    if name == "ray":
        try:
            import ray  # noqa: F401  # only whether it can be
        except ImportError:
            raise ConfigError("executor", name, 'it needs Ray: pip install "fedjax_pfl[ray]"') from None
