"""Factors of many matrices."""

from collections.abc import Callable
from functools import partial

import jax
from jax import lax
from jaxtyping import PyTree


def map_matrices(fn: Callable[[PyTree], PyTree], xs: PyTree, *, batch_size: int | None = None) -> PyTree:
    """``fn``, which factors a matrix, of every row of ``xs``: side by side on accelerators, one by one on a CPU.

    There, LAPACK's kernels spread a batch of larger matrices over the threads that they are called from. Two devices
    that do so at the same time wait for each other's threads for ever (jaxlib 0.10).

    Args:
      fn: row -> result.
      xs: every leaf has a leading axis.
      batch_size: rows side by side; all unless given.
    """
    together = jax.vmap(fn) if batch_size is None else partial(lax.map, fn, batch_size=batch_size)
    return lax.platform_dependent(xs, cpu=partial(lax.map, fn), default=together)
