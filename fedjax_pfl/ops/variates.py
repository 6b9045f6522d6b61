"""Control variates: estimates of the mean gradients of clients and server, by which local steps are corrected."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fedjax_pfl.method import Round, TrainInfo
from fedjax_pfl.models.base import Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.training import Trainer, effective_steps


def tilt(params: Params, correction: Params) -> Float[Array, ""]:
    """A loss term with value 0 and gradient ``correction``: with it, steps follow g + correction.

    Args:
      params: w.
      correction: the constant that is added to the gradient, for instance c - c_i.
    """
    products = jax.tree.map(lambda c, w: jnp.sum(c * w), correction, params)
    total = jax.tree.reduce(jnp.add, products)
    return total - lax.stop_gradient(total)


def variate_change(now: Round, train: Trainer, info: TrainInfo, change: Params, control: Params) -> Params:
    """c_i' - c_i for the client's new variate c_i' = c_i - c + (w - w_i) / (tau_i eta) (SCAFFOLD, option II).

    tau_i is the number of `effective_steps` (which includes momentum), and eta the learning rate of the round. Running
    statistics have no variate: their change is 0. So is the change of a client that has taken no step.

    Args:
      now: the round.
      train: the trainer that the client has used.
      info: loss and number of steps of this training.
      change: w_i - w.
      control: c.
    """
    length = effective_steps(info.steps, train.momentum) * train.rate(now.t)

    def of_leaf(path: tuple, change: Array, c: Array) -> Array:
        trained = jnp.zeros_like(c) if is_statistic(path) else -c - change / jnp.maximum(length, 1e-30)
        return jnp.where(info.steps > 0, trained, 0.0)

    return jax.tree.map_with_path(of_leaf, change, control)
