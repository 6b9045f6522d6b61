"""One simulation in several processes, on one machine or several, under ``jax.distributed``.

Every process runs the same program on the same config and data. The clients are spread over the devices of all
processes; only the first process writes files. The functions also work with a single process.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.sections import Run as RunSection


def start(run: RunSection) -> None:
    """Joins the other processes of the job, which JAX detects (SLURM, Open MPI, Kubernetes, TPU pods).

    Args:
      run: the run section of the config, for placement and the cache of compiled programs.

    Raises:
      ConfigError: no such job is found, or the other processes do not answer.
    """
    prepare(run)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # the driver handles SIGTERM, and writes a checkpoint
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        allowed = f"a job of several processes that JAX can detect, such as one of SLURM's srun ({error})"
        raise ConfigError("--distributed", "true", allowed) from None


def is_first() -> bool:
    """Whether this process writes files and reports; the call does not start JAX."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def put_everywhere(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Puts arrays, which are equal in every process, on all devices of all processes."""

    # From the host's memory, the devices of a CPU share one buffer.
    on_host = jax.tree.map(np.asarray, tree) if jax.default_backend() == "cpu" else tree
    return jax.device_put(on_host, sharding)


def to_host(tree: PyTree) -> PyTree:
    """The complete arrays in every process, also if their rows are spread over processes."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def agree(block: int, signal: int | None, stopped: bool) -> tuple[int, int | None, bool]:
    """Makes all processes agree on what to do next.

    Args:
      block: number of rounds that this process would run; the first process decides.
      signal: the signal that this process has caught, or None; a signal in one process counts for all.
      stopped: whether a callback has asked this process to stop; this also counts for all.

    Returns:
      The three values for all processes.
    """
    if jax.process_count() == 1:
        return block, signal, stopped
    proposed = multihost_utils.process_allgather(np.array([block, signal or 0, stopped], np.int32))
    return int(proposed[0, 0]), int(proposed[:, 1].max()) or None, bool(proposed[:, 2].any())
