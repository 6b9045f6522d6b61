"""SCAFFOLD (Karimireddy et al., ICML 2020), Algorithm 1, option II: steps corrected by control variates."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Gt
from jax import lax
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, Round, Samples, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Scalar, Trainer, is_off


class Shared(NamedTuple):
    """Sent down: w and the server's control variate c. Sent up: what the client changes of each."""

    params: Params
    control: Params


def scaffold(
    model: Model, train: Trainer, combine: Combine = weighted_mean, *, server_lr: Annotated[float, Gt(0)] = 1.0
) -> Method:
    """SCAFFOLD: every local step is w <- w - eta (g - c_i + c), which takes the client's own direction out.

    Shared: w, c. Personal: c_i. Headline: PRE, the global model. Participants count alike, whatever their size, and c
    is the mean of the c_i over all clients that may take part; 2 |w| go down and up. c_i is the mean gradient on the
    client's way, (w - w_i) / (tau_i eta) with the rate of the round; with momentum, tau_i is the weight that it gives
    to all gradients together (FedNova, arXiv:2007.07481, section 4). Weight decay and clipping are part of the
    gradient. Running statistics are averaged, without control variates.

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
        del clients
        params = model.init(key)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Shared(params, zeros), zeros

    def local(now: Round, view: Shared, client: Params, data: ClientData) -> Update:
        correction = jax.tree.map(jnp.subtract, view.control, client)

        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            del key
            # The gradient of <c - c_i, w> is the correction; its value is no part of the loss that is reported.
            products = jax.tree.map(lambda c, w: jnp.sum(c * w), correction, params)
            tilt = jax.tree.reduce(jnp.add, products)
            return supervised(model, params, batch) + tilt - lax.stop_gradient(tilt)

        params, info = train(now, loss, view.params, data)
        change = jax.tree.map(jnp.subtract, params, view.params)
        length = _gradients(info.steps, train.momentum) * train.rate(now.t)

        def new_minus_old(path: tuple, change: Array, c: Array) -> Array:
            trained = jnp.zeros_like(c) if is_statistic(path) else -c - change / jnp.maximum(length, 1e-30)
            return jnp.where(info.steps > 0, trained, 0.0)

        control = jax.tree.map_with_path(new_minus_old, change, view.control)
        post = view._replace(params=params), client
        return Update(jax.tree.map(jnp.add, client, control), Shared(change, control), info, post)

    def aggregate(
        now: Round, server: Shared, clients: Params, uploads: Shared, cohort: Cohort
    ) -> tuple[Shared, Params]:
        del now
        present = (cohort.weight > 0).astype(jnp.float32)
        change, control = combine(uploads, present)
        share = jnp.sum(present) / cohort.trainers

        def step(path: tuple, w: Array, change: Array) -> Array:
            return w + change if is_statistic(path) else w + server_lr * change

        params = jax.tree.map_with_path(step, server.params, change)
        return Shared(params, jax.tree.map(lambda c, change: c + share * change, server.control, control)), clients

    def personal(view: Shared, client: Params) -> Params:
        del client
        return view.params

    def global_predict(server: Shared, x: Samples) -> Logits:
        return model.apply(server.params, x)

    return Method(init, local, aggregate, personal, model.apply, global_predict=global_predict)


def _gradients(steps: Int[Array, ""], momentum: Scalar) -> Float[Array, ""]:
    """How many times eta g so many steps along a constant gradient g go: tau without momentum, more with it."""
    tau = steps.astype(jnp.float32)
    if is_off(momentum):
        return tau
    return (tau - momentum * (1.0 - momentum**tau) / (1.0 - momentum)) / (1.0 - momentum)
