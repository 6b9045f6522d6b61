"""Several processes, on one machine or many, that run one simulation together under ``jax.distributed``.

Every process runs the same program on the same config and data. Clients are spread over the devices of all of them; the
first process alone writes files. With one process, each of these functions does the obvious.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import prepare
from fedjax_pfl.experiment.config import Run


def start(run: Run) -> None:
    """Joins the other processes of the job, which JAX finds by itself (SLURM, Open MPI, Kubernetes, TPU pods).

    Args:
      run: the run section of the config: placement and cache of compiled programs.

    Raises:
      ConfigError: no such job is found, or the others do not answer.
    """
    prepare(run)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours: it leaves a checkpoint
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        allowed = f"a job of several processes that JAX can detect, such as one of SLURM's srun ({error})"
        raise ConfigError("--distributed", "true", allowed) from None


def is_first() -> bool:
    """Whether this process is the one that writes files and reports; asking does not start JAX."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def put_everywhere(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Puts arrays, the same on every process, on all devices of all of them."""

    # From the host's memory, the devices of a CPU share one buffer.
    on_host = jax.tree.map(np.asarray, tree) if jax.default_backend() == "cpu" else tree
    return jax.device_put(on_host, sharding)


def to_host(tree: PyTree) -> PyTree:
    """The whole of each array, also where its rows are spread over processes, on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def agree(block: int, signal: int | None, stopped: bool) -> tuple[int, int | None, bool]:
    """What all processes do next.

    Args:
      block: how many rounds this process would run; the first process decides.
      signal: the signal that this process has caught, if any; one is enough for all.
      stopped: whether a callback has asked this process to stop; likewise.
    """
    if jax.process_count() == 1:
        return block, signal, stopped
    proposed = multihost_utils.process_allgather(np.array([block, signal or 0, stopped], np.int32))
    return int(proposed[0, 0]), int(proposed[:, 1].max()) or None, bool(proposed[:, 2].any())
