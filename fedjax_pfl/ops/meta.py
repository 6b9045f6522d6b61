"""Meta-learning: a step on one part of a mini-batch, judged on another."""

from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array, Float

from fedjax_pfl.data.federated import Batch
from fedjax_pfl.models.base import Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.training import Scalar


def deal(batch: Batch, parts: int) -> tuple[Batch, ...]:
    """The samples of a mini-batch, dealt out in turn: the parts differ by one sample at most, the first has the most.

    A part is empty where there are fewer samples than parts; a mean over it is zero, and so is its gradient.

    Args:
      batch: its samples come before its padding.
      parts: how many.
    """
    return tuple(jax.tree.map(lambda leaf, part=part: leaf[part::parts], batch) for part in range(parts))


def inner_step(loss: Callable[[Params], Float[Array, ""]], params: Params, rate: Scalar) -> Params:
    """w - rate * grad loss(w), one step of plain SGD; running statistics take their update whole (``models/norm.py``).

    First-order: derivatives of the result take the step for a constant, so that losses need to be differentiable only
    once, which is all that convolutions here are.
    """
    gradient = jax.grad(loss)(lax.stop_gradient(params))

    def leaf(path: tuple, w: Array, g: Array) -> Array:
        return w - (g if is_statistic(path) else rate * g)

    return jax.tree.map_with_path(leaf, params, gradient)
