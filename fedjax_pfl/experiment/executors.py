"""Executors of programs: in this process one after the other, as tasks of a Ray cluster, or as jobs of SLURM."""

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.errors import ConfigError, one_of
from fedjax_pfl.experiment.build import dataset_of
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.jobs import check_jobs, run_as_jobs
from fedjax_pfl.experiment.progress import duration
from fedjax_pfl.experiment.worker import Outcome, Report, in_short, run_elsewhere, run_program, surroundings

Executor = str | Mapping[str, Any]
"""A name, or a table with a name and options: ``{"name": "submitit", "slurm_partition": "gpu"}``."""


def _run_here(programs: Sequence[Sequence[Config]], data: Any, report: Report) -> Iterator[tuple[int, Outcome]]:
    """Runs the programs in this process, one after the other."""
    loaded: dict[str, Dataset] = {}
    began = time.perf_counter()

    for number, configs in enumerate(programs):

        def dataset(first: Config = configs[0]) -> Dataset:
            source = first.data.source
            if source not in loaded:
                loaded.clear()
                loaded[source] = dataset_of(first, data)
            return loaded[source]

        outcome = run_program(configs, dataset, functools.partial(report, number))
        if others := len(programs) - number - 1:
            left = (time.perf_counter() - began) / (number + 1) * others
            report(number, f"ended; {duration(left)} left if the {others} to come take as long")
        yield number, outcome


def _run_on_ray(programs: Sequence[Sequence[Config]], data: Any, report: Report) -> Iterator[tuple[int, Outcome]]:
    """Runs programs as tasks of Ray, as many at once as fit; yields outcomes in the order in which they end."""
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
        # One process for each program: devices cannot be prepared twice, and JAX keeps a GPU's memory until it ends.
        # No second try: a program that is too large for a machine's memory would kill its workers again and again.
        task = ray.remote(max_calls=1, max_retries=0)(run_elsewhere)
        shared, around = ray.put(data), surroundings(programs)
        for number, configs in enumerate(programs):
            room = {"num_cpus": 1, "num_gpus": 1} if gpu else {"num_cpus": max(1, min(len(configs), node))}
            running[task.options(**room).remote(configs, shared, around)] = number
            report(number, "handed to Ray")
        while running:
            (ended, *_), _ = ray.wait(list(running))
            number = running.pop(ended)
            try:
                outcome = ray.get(ended)
            except ray.exceptions.RayError as error:
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                outcome = [f"{type(cause).__name__}: {' '.join(str(cause).split())}"] * len(programs[number])
            report(number, in_short(outcome))
            yield number, outcome
    finally:
        for future in running:
            ray.cancel(future, force=True)
        if ours:
            ray.shutdown()


EXECUTORS: dict[str, Callable[..., Iterator[tuple[int, Outcome]]]] = {
    "local": _run_here,
    "ray": _run_on_ray,
    "submitit": run_as_jobs,
}


def run_programs(
    executor: Executor, programs: Sequence[Sequence[Config]], data: Any, report: Report
) -> Iterator[tuple[int, Outcome]]:
    """Runs programs.

    Args:
      executor: where to run them; it must have passed `check_executor`.
      programs: the configs of each program.
      data: as in `simulate`.
      report: called with the number of a program and a line of text from time to time.

    Yields:
      The number of a program and its outcome, in the order in which programs end.
    """
    name, options = name_and_options(executor)
    yield from EXECUTORS[name](programs, data, report, **options)


def check_executor(executor: Executor, out: str | os.PathLike[str] | None) -> None:
    """Checks that programs can be run with an executor.

    Args:
      executor: the executor.
      out: the folder of the runs.

    Raises:
      ConfigError: the executor is unknown, not installed, or has an option that cannot be used.
    """
    name, options = name_and_options(executor)
    if name not in EXECUTORS:
        raise ConfigError("executor", name, one_of(name, EXECUTORS))
    if name == "submitit":
        check_jobs(options, out)
    elif options:
        option, value = next(iter(options.items()))
        raise ConfigError(f"executor.{option}", value, f"leave it out: {name} has no options")
    if name == "ray":
        try:
            import ray  # noqa: F401  # only whether it can be
        except ImportError:
            raise ConfigError("executor", name, 'it needs Ray: pip install "fedjax_pfl[ray]"') from None


def name_and_options(executor: Executor) -> tuple[str, dict[str, Any]]:
    """The name and the options of an executor.

    Raises:
      ConfigError: it is neither a name nor a table with a name.
    """
    table = {"name": executor} if isinstance(executor, str) else executor
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        allowed = 'a name, or a table with a name and options: {"name": "submitit", "timeout_min": 60}'
        raise ConfigError("executor", executor, allowed)
    return table["name"], {key: value for key, value in table.items() if key != "name"}
