"""Factorisations of many matrices."""

from collections.abc import Callable
from functools import partial

import jax
from jax import lax
from jaxtyping import PyTree


def map_matrices(fn: Callable[[PyTree], PyTree], xs: PyTree, *, batch_size: int | None = None) -> PyTree:
    """Maps ``fn``, which factorises a matrix, over the rows of ``xs``: side by side, but one by one on a CPU.

    On a CPU, LAPACK's kernels spread a batch of larger matrices over the threads that call them. Two devices that do
    this at the same time wait for each other's threads for ever (jaxlib 0.10).

    Args:
      fn: row -> result.
      xs: every leaf has a leading axis.
      batch_size: number of rows side by side; all unless given.
    """
    together = jax.vmap(fn) if batch_size is None else partial(lax.map, fn, batch_size=batch_size)
    return lax.platform_dependent(xs, cpu=partial(lax.map, fn), default=together)
