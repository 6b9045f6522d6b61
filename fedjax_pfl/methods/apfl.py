"""APFL (Deng et al., arXiv 2003.13461), Algorithm 1: each client's model is a mix of its own and the global one."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Le
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import LossTotals, Trainer


class Client(NamedTuple):
    """Personal: v_i, and alpha_i if it is learned."""

    params: Params
    alpha: Float[Array, ""] | None


def apfl(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    alpha: Annotated[float, Ge(0), Le(1)] = 0.5,
    adaptive: bool = False,
) -> Method:
    """APFL: participants train w_i as FedAvg does, and v_i on the loss of the mix alpha v_i + (1 - alpha) w_i.

    Shared: w, averaged by n_i (the paper's clients count alike). Personal: v_i, and alpha_i if adaptive. Headline: PRE,
    the mix with the newest w. POST, which the authors' FedTorch and PFLlib score, is the mix with w_i. (In PFLlib v_i
    trains on its own loss, and the mix replaces it after each round.)

    Both models take their step on the same batch, and both gradients are taken before either step. The parameters are
    mixed, as in the paper. The authors' later FedTorch mixes logits; it also approximates the gradient of alpha_i and
    adds a decay to it, while here this gradient is exact. alpha = 0 scores as FedAvg does, and alpha = 1 as Local.
    v_i starts as w^0, so that PRE of a client that has never taken part mixes w with untrained parameters. Running
    statistics of v_i move towards those of the batches under the mix.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      alpha: the share of v_i in the mix, or its initial value if adaptive; the paper's grid is 0.25, 0.5, 0.75.
      adaptive: whether alpha_i takes one step of gradient descent, within [0, 1], on the first batch of each round.

    Reference:
      Y. Deng, M. M. Kamani, M. Mahdavi. Adaptive Personalized Federated Learning. arXiv:2003.13461, 2020.
    """
    base = fedavg(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Client]:
        server, _ = base.init(key, clients)
        return server, Client(server, jnp.asarray(alpha, jnp.float32) if adaptive else None)

    def local(now: Round, view: Params, client: Client, data: ClientData) -> Update:
        optimizer = train.optimizer(now.t, view)

        def step(carry: tuple, batch: Batch, key: Key[Array, ""]) -> tuple:
            (w, w_state), (v, v_state), a, totals = carry

            def loss(params: Params) -> Float[Array, ""]:
                return supervised(model, params, batch)

            def descend(params: Params, gradient: Params, opt_state: optax.OptState) -> tuple:
                updates, opt_state = optimizer.update(gradient, opt_state, params)
                return optax.apply_updates(params, updates), opt_state

            value, g_w = jax.value_and_grad(loss)(w)
            g_mix = jax.grad(loss)(with_statistics(mixed(a, v, w), v))
            g_v = jax.tree.map_with_path(lambda path, g: g if is_statistic(path) else a * g, g_mix)
            if adaptive:
                moved = jnp.clip(a - train.rate(now.t) * _slope(v, w, g_mix), 0.0, 1.0)
                a = jnp.where(totals.steps == 0, moved, a)
            return descend(w, g_w, w_state), descend(v, g_v, v_state), a, totals.after(value, batch)

        v, a = client.params, alpha_of(client)
        start = (view, optimizer.init(view)), (v, optimizer.init(v)), a, LossTotals.none()
        (w, _), (v, _), a, totals = train.over_batches(now, step, start, data)
        own = Client(v, a if adaptive else None)
        return Update(own, w, train.info(totals, data), diagnostics={"alpha": a} if adaptive else None)

    def alpha_of(client: Client) -> Float[Array, ""]:
        return jnp.asarray(alpha, jnp.float32) if client.alpha is None else client.alpha

    def mixed(a: Float[Array, ""], v: Params, w: Params) -> Params:
        return jax.tree.map(lambda v, w: a * v + (1.0 - a) * w, v, w)

    def with_statistics(mix: Params, v: Params) -> Params:
        """The mix with v's running statistics, so that their gradient points from these to the batch's statistics."""
        return jax.tree.map_with_path(lambda path, mix, v: v if is_statistic(path) else mix, mix, v)

    def personal(view: Params, client: Client) -> Params:
        return mixed(alpha_of(client), client.params, view)

    return base._replace(init=init, local=local, personal=personal)


def _slope(v: Params, w: Params, gradient: Params) -> Float[Array, ""]:
    """dF / d alpha at the mix of v and w: <v - w, gradient there>."""

    def product(path: tuple, v: Array, w: Array, g: Array) -> Array:
        return jnp.zeros((), g.dtype) if is_statistic(path) else jnp.sum((v - w) * g)

    return jax.tree.reduce(jnp.add, jax.tree.map_with_path(product, v, w, gradient))
