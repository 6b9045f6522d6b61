"""Where the programs of a sweep run: here, one after the other, or as tasks of a Ray cluster."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl.data.sources import from_arrays, load
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import prepare_devices
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.programs import run_together

# The summaries of a program's runs, or why it failed.
Outcome = list[dict[str, Any]] | str
_Data = Sequence[np.ndarray] | None
_Say = Callable[[str], None]


def _run_program(configs: Sequence[Config], data: _Data, say: _Say) -> Outcome:
    prepare_devices(configs[0].run.placement)
    try:
        dataset = load(configs[0].data.source) if data is None else from_arrays(*data)
        with jax.default_matmul_precision(configs[0].run.precision):
            return run_together(configs, dataset, say)
    except ConfigError as error:
        return str(error)


def _run_locally(
    programs: Sequence[Sequence[Config]], data: _Data, say: _Say, take: Callable[[int, Outcome], None]
) -> None:
    """Runs one program after the other; `take` gets the number and the outcome of each."""
    for number, configs in enumerate(programs):
        take(number, _run_program(configs, data, say))


def _run_on_ray(
    programs: Sequence[Sequence[Config]], data: _Data, say: _Say, take: Callable[[int, Outcome], None]
) -> None:
    """Runs programs as tasks of Ray, as many at once as there is room for; `take` gets them as they end."""
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
            say(f"program {number + 1} of {len(programs)}, {len(configs)} runs: handed to Ray")
        while running:
            (ended, *_), _ = ray.wait(list(running))
            number = running.pop(ended)
            try:
                outcome = ray.get(ended)
            except ray.exceptions.RayError as error:
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                outcome = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
            how = f"failed: {outcome}" if isinstance(outcome, str) else "done"
            say(f"program {number + 1} of {len(programs)}: {how}")
            take(number, outcome)
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
    return _run_program(configs, data, lambda line: None)


EXECUTORS = {"local": _run_locally, "ray": _run_on_ray}


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
