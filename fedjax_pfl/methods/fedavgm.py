"""FedAvgM (Hsu, Qi, Brown, arXiv 1909.06335): FedAvg whose server takes its steps with momentum."""

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
from fedjax_pfl.ops.training import Trainer


class Server(NamedTuple):
    """Shared: w. Kept by the server only: the velocity u."""

    params: Params
    velocity: Params


def fedavgm(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    beta: Annotated[float, Ge(0), Lt(1)] = 0.9,
    server_lr: Annotated[float, Gt(0)] = 1.0,
    nesterov: bool = False,
) -> Method:
    """FedAvgM: with d = w - mean(w_i), the server keeps u <- beta u + d and takes w <- w - server_lr u.

    Shared: w. Personal: nothing. Headline: PRE.

    Three forms of the momentum are in use: this one (heavy ball), Nesterov's, and a moving average u <- beta u + (1 -
    beta) d. The last is this one with a ``server_lr`` of 1 - beta. Running statistics are averaged without momentum,
    which could make a variance negative. beta = 0 with a ``server_lr`` of 1 is FedAvg.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      beta: the server's momentum; the paper's values include 0, 0.7, 0.9, 0.97 and 0.99.
      server_lr: the server's learning rate; use at most 0.5 for a beta of 0.97 and more, with which the steps are long.
      nesterov: whether the step is along d + beta u instead.

    Reference:
      T.-M. H. Hsu, H. Qi, M. Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
      Classification. 2019. arXiv:1909.06335.
    """
    base = fedavg(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, PyTree]:
        params, client = base.init(key, clients)
        return Server(params, jax.tree.map(jnp.zeros_like, params)), client

    def broadcast(server: Server) -> Params:
        return server.params

    def aggregate(
        now: Round, server: Server, clients: PyTree, uploads: Params, cohort: Cohort
    ) -> tuple[Server, PyTree]:
        mean = combine(uploads, cohort.weight)
        d = jax.tree.map(jnp.subtract, server.params, mean)
        velocity = jax.tree.map(lambda u, d: beta * u + d, server.velocity, d)
        direction = jax.tree.map(lambda d, u: d + beta * u, d, velocity) if nesterov else velocity

        def step(path: tuple, w: Array, mean: Array, direction: Array) -> Array:
            return mean if is_statistic(path) else w - server_lr * direction

        return Server(jax.tree.map_with_path(step, server.params, mean, direction), velocity), clients

    def global_predict(server: Server, x: Samples) -> Logits:
        return model.apply(server.params, x)

    return base._replace(init=init, broadcast=broadcast, aggregate=aggregate, global_predict=global_predict)
