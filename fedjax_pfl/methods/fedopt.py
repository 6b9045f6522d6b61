"""FedAdam and FedYogi (Reddi et al., ICLR 2021), Algorithm 2: the server takes adaptive steps along the mean change."""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Lt
from jaxtyping import Array, Key, PyTree

from fedjax_pfl.method import Cohort, Logits, Method, Round, Samples
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.training import Scalar, Trainer


class Server(NamedTuple):
    """Shared: w. Kept by the server only: m and v, the first and second moment of the mean change."""

    params: Params
    m: Params
    v: Params


def fedadam(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    server_lr: Annotated[float, Gt(0)] = 0.01,
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9,
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99,
    adaptivity: Annotated[float, Gt(0)] = 1e-3,
) -> Method:
    """FedAdam: FedAvg whose server passes the mean change of the participants to Adam, as if it were a gradient.

    Shared: w. Personal: nothing. Headline: PRE.

    With Delta = mean(w_i) - w: m <- beta1 m + (1 - beta1) Delta, v <- beta2 v + (1 - beta2) Delta^2, w <- w + server_lr
    m / (sqrt(v) + tau), without bias correction; v starts at tau^2. (The authors' code is Keras's Adam and Yogi, which
    correct the bias, with v from 0 and a beta2 of 0.999; a steady Delta moves w up to twice as far here in the first
    tens of rounds.) Participants are averaged by n_i, as in the paper's experiments. Running statistics are averaged
    without moments.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      server_lr: eta; tune it with the local rate. The paper's grid is 10^-3 to 10^1 in steps of half a decade.
      beta1: decay of the first moment; paper: 0.9.
      beta2: decay of the second moment; paper: 0.99.
      adaptivity: tau; coordinates that change by less are hardly scaled up. The paper's grid is 10^-5 to 10^-1, its
        default 10^-3.

    Reference:
      S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, H. B. McMahan. Adaptive Federated
      Optimization. ICLR 2021. arXiv:2003.00295.
    """

    def second_moment(v: Array, delta: Array) -> Array:
        return beta2 * v + (1.0 - beta2) * delta**2

    return _adaptive(model, train, combine, second_moment, server_lr, beta1, adaptivity)


def fedyogi(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    server_lr: Annotated[float, Gt(0)] = 0.01,
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9,
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99,
    adaptivity: Annotated[float, Gt(0)] = 1e-3,
) -> Method:
    """FedYogi: FedAdam with Yogi's second moment, v <- v - (1 - beta2) Delta^2 sign(v - Delta^2).

    Shared: w. Personal: nothing. Headline: PRE.

    Where v is much larger than Delta^2, it shrinks only by (1 - beta2) Delta^2, so that the steps grow slowly. All else
    is as in FedAdam.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      server_lr: eta; tune it with the local rate. The paper's grid is 10^-3 to 10^1 in steps of half a decade.
      beta1: decay of the first moment; paper: 0.9.
      beta2: 1 - beta2 is the speed with which the second moment follows; paper: 0.99.
      adaptivity: tau; the paper's grid is 10^-5 to 10^-1, its default 10^-3.

    Reference:
      S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, H. B. McMahan. Adaptive Federated
      Optimization. ICLR 2021. arXiv:2003.00295.
    """

    def second_moment(v: Array, delta: Array) -> Array:
        return v - (1.0 - beta2) * delta**2 * jnp.sign(v - delta**2)

    return _adaptive(model, train, combine, second_moment, server_lr, beta1, adaptivity)


def _adaptive(
    model: Model,
    train: Trainer,
    combine: Combine,
    second_moment: Callable[[Array, Array], Array],
    server_lr: Scalar,
    beta1: Scalar,
    adaptivity: Scalar,
) -> Method:
    """Algorithm 2 with a rule for the second moment: (v, Delta) -> v."""
    base = fedavg(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, PyTree]:
        params, client = base.init(key, clients)
        v = jax.tree.map(lambda w: jnp.full_like(w, adaptivity**2), params)
        return Server(params, jax.tree.map(jnp.zeros_like, params), v), client

    def broadcast(server: Server) -> Params:
        return server.params

    def aggregate(
        now: Round, server: Server, clients: PyTree, uploads: Params, cohort: Cohort
    ) -> tuple[Server, PyTree]:
        mean = combine(uploads, cohort.weight)
        delta = jax.tree.map(jnp.subtract, mean, server.params)
        m = jax.tree.map(lambda m, delta: beta1 * m + (1.0 - beta1) * delta, server.m, delta)
        v = jax.tree.map(second_moment, server.v, delta)

        def step(path: tuple, w: Array, mean: Array, m: Array, v: Array) -> Array:
            return mean if is_statistic(path) else w + server_lr * m / (jnp.sqrt(v) + adaptivity)

        return Server(jax.tree.map_with_path(step, server.params, mean, m, v), m, v), clients

    def global_predict(server: Server, x: Samples) -> Logits:
        return model.apply(server.params, x)

    return base._replace(init=init, broadcast=broadcast, aggregate=aggregate, global_predict=global_predict)
