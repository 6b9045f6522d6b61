"""SCAFFOLD (Karimireddy et al., ICML 2020), Algorithm 1, option II: steps corrected by control variates."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Gt
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, Round, Samples, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer
from fedjax_pfl.ops.variates import tilt, variate_change


class Shared(NamedTuple):
    """Sent down: w and the server's control variate c. Sent up: the client's change of each."""

    params: Params
    control: Params


def scaffold(
    model: Model, train: Trainer, combine: Combine = weighted_mean, *, server_lr: Annotated[float, Gt(0)] = 1.0
) -> Method:
    """SCAFFOLD: every local step is w <- w - eta (g - c_i + c), which removes the client's own direction.

    Shared: w, c. Personal: c_i. Headline: PRE, the global model.

    Participants count alike, whatever their size, and c is the mean of the c_i over all clients that may take part; 2
    |w| numbers go down and up. c_i is the mean gradient on the client's way, (w - w_i) / (tau_i eta) with the rate of
    the round; with momentum, tau_i is the total weight that it gives to all gradients (FedNova, arXiv:2007.07481,
    section 4). Weight decay is part of the gradient. ``training.clip_norm`` limits the corrected gradient g - c_i + c;
    where it does, c_i is no mean gradient any more. Running statistics are averaged, without control variates. A
    participant that took no step, because it has less than one batch with ``training.drop_last``, counts as
    one that has not moved. With another rule than the mean, or with altered uploads, c is the server's own estimate of
    the mean.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging the changes of the participants.
      server_lr: eta_g, the server's step on the mean change.

    Reference:
      S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. SCAFFOLD: Stochastic Controlled
      Averaging for Federated Learning. ICML 2020. arXiv:1910.06378.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Shared, Params]:
        params = model.init(key)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Shared(params, zeros), zeros

    def local(now: Round, view: Shared, client: Params, data: ClientData) -> Update:
        correction = jax.tree.map(jnp.subtract, view.control, client)

        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            return supervised(model, params, batch) + tilt(params, correction)

        params, info = train(now, loss, view.params, data)
        change = jax.tree.map(jnp.subtract, params, view.params)
        learned = variate_change(now, train, info, change, view.control)
        post = view._replace(params=params), client
        return Update(jax.tree.map(jnp.add, client, learned), Shared(change, learned), info, post)

    def aggregate(
        now: Round, server: Shared, clients: Params, uploads: Shared, cohort: Cohort
    ) -> tuple[Shared, Params]:
        present = (cohort.weight > 0).astype(jnp.float32)
        change, learned = combine(uploads, present)
        share = jnp.sum(present) / cohort.trainers

        def step(path: tuple, w: Array, change: Array) -> Array:
            return w + change if is_statistic(path) else w + server_lr * change

        params = jax.tree.map_with_path(step, server.params, change)
        return Shared(params, jax.tree.map(lambda c, change: c + share * change, server.control, learned)), clients

    def personal(view: Shared, client: Params) -> Params:
        return view.params

    def global_predict(server: Shared, x: Samples) -> Logits:
        return model.apply(server.params, x)

    return Method(init, local, aggregate, personal, model.apply, global_predict=global_predict, sends_change=True)
