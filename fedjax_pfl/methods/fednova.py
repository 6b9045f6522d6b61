"""FedNova (Wang et al., NeurIPS 2020): FedAvg that corrects for the number of steps of each participant."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.training import Trainer, effective_steps


class Upload(NamedTuple):
    """Sent up: (w_i - w) / A_i, the unscaled change of running statistics, and the number of steps, which gives A_i."""

    change: Params
    steps: Int[Array, ""]


def fednova(model: Model, train: Trainer, combine: Combine = weighted_mean) -> Method:
    """FedNova: w <- w + A_eff * mean((w_i - w) / A_i) with A_eff = mean(A_i), both means weighted by n_i.

    Shared: w. Personal: nothing. Headline: PRE, the global model.

    A_i is the number of steps that the client took or, with momentum, the total weight that momentum gives to all its
    gradients; weight decay and clipping are part of the gradient. A client with more batches has no more influence than
    its n_i gives it; if all clients take the same number of steps, it is FedAvg. A client that took no step, because it
    has less than one batch with ``training.drop_last``, is in neither mean. Running statistics are averaged as they
    are. With another rule than the mean, A_eff remains the mean weighted by n_i. The official code's options of a
    server momentum and of a proximal term are left out.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging the changes per step.

    Reference:
      J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. Tackling the Objective Inconsistency Problem in Heterogeneous
      Federated Optimization. NeurIPS 2020. arXiv:2007.07481.
    """
    base = fedavg(model, train, combine)
    steps_of = partial(effective_steps, momentum=train.momentum)

    def local(now: Round, view: Params, client: PyTree, data: ClientData) -> Update:
        update = base.local(now, view, client, data)
        steps = steps_of(update.info.steps)

        def per_step(path: tuple, w_i: Array, w: Array) -> Array:
            # A client without samples has taken no step, and has not changed.
            return w_i - w if is_statistic(path) else (w_i - w) / jnp.maximum(steps, 1.0)

        change = jax.tree.map_with_path(per_step, update.upload, view)
        return update._replace(upload=Upload(change, update.info.steps), post=(update.upload, client))

    def aggregate(
        now: Round, server: Params, clients: PyTree, uploads: Upload, cohort: Cohort
    ) -> tuple[Params, PyTree]:
        weight = jnp.where(uploads.steps > 0, cohort.weight, 0.0)
        change, steps = combine(uploads.change, weight), weighted_mean(steps_of(uploads.steps), weight)

        def step(path: tuple, w: Array, change: Array) -> Array:
            return w + change if is_statistic(path) else w + steps * change

        return jax.tree.map_with_path(step, server, change), clients

    return base._replace(local=local, aggregate=aggregate)
