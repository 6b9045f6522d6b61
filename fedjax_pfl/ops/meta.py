"""Meta-learning: a step on one part of a mini-batch, judged on another."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fedjax_pfl.data.federated import Batch
from fedjax_pfl.models.base import Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.training import Scalar


def deal(batch: Batch, parts: int) -> tuple[Batch, ...]:
    """Deals the samples of a mini-batch in turn into parts of equal size (up to one sample; the first is the largest).

    If there are fewer samples than parts, some parts are empty; a mean over an empty part, and its gradient, are zero.

    Args:
      batch: the mini-batch; its samples come before its padding.
      parts: number of parts.
    """
    missing = max(0, parts - len(batch.mask))  # a batch is no longer than the largest client's list
    rows = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, missing), *[(0, 0)] * (leaf.ndim - 1)]), batch)
    return tuple(jax.tree.map(lambda leaf, part=part: leaf[part::parts], rows) for part in range(parts))


def inner_step(
    loss: Callable[[Params], Float[Array, ""]], params: Params, rate: Scalar, *, statistics: bool = True
) -> Params:
    """w - rate * grad loss(w), one step of plain SGD.

    First-order: derivatives of the result treat the step as a constant, so that no loss is differentiated twice.

    Args:
      loss: of the parameters.
      params: w.
      rate: of the step.
      statistics: whether running statistics take their update, in full (``models/norm.py``). Where a loss judges the
        result they must not: the amount by which that loss changes them is subtracted from those before the step.
    """
    gradient = jax.grad(loss)(lax.stop_gradient(params))

    def leaf(path: tuple, w: Array, g: Array) -> Array:
        if is_statistic(path):
            return w - g if statistics else w
        return w - rate * g

    return jax.tree.map_with_path(leaf, params, gradient)
