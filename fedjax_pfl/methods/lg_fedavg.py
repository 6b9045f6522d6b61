"""LG-FedAvg (Liang et al., arXiv 2001.01523): personal lower layers under shared upper ones."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Bool, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, SentIf, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.layers import join_layers, last_layers, split_layers
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer


def lg_fedavg(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    shared_layers: Annotated[int, Ge(1)] = 1,
    warmup_rounds: Annotated[int, Ge(0)] = 0,
) -> Method:
    """LG-FedAvg: participants train all layers jointly; only the last ones are averaged.

    Shared: the head phi and the layers next to it. Personal: the layers below, all of theta by default. Headline: PRE.

    The official code shares the last three layers of its MLP, but the convolutions of its CNN, whose dense layers stay
    with the clients. It starts from a model that FedAvg has trained, averages uniformly, and reports each client's best
    model by its test samples. Here the average is weighted by n_i. Trained from scratch it is close to Local.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging layers.
      shared_layers: how many of the last layers are shared, including the head; with all layers it is FedAvg.
      warmup_rounds: rounds of FedAvg, on all layers, before the lower ones become personal.

    Raises:
      ValueError: the model has fewer layers than ``shared_layers``.

    Reference:
      P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency. Think
      Locally, Act Globally: Federated Learning with Local and Global Representations. arXiv:2001.01523, 2020.
    """
    names = last_layers(model, shared_layers)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        lower, upper = split_layers(model.init(key), names)
        return upper, lower

    def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
        return supervised(model, params, batch)

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        params, info = train(now, loss, join_layers(client, view), data)
        lower, upper = split_layers(params, names)
        return Update(lower, upper, info)

    def aggregate(
        now: Round, server: Params, clients: Params, uploads: Params, cohort: Cohort
    ) -> tuple[Params, Params]:
        return combine(uploads, cohort.weight), clients

    def personal(view: Params, client: Params) -> Params:
        return join_layers(client, view)

    without_warmup = Method(init, local, aggregate, personal, model.apply)
    return _warmed_up(without_warmup, combine, warmup_rounds) if warmup_rounds > 0 else without_warmup


class Shared(NamedTuple):
    """With a warm-up: the upper layers, and the lower layers as long as FedAvg averages them."""

    upper: Params
    lower: SentIf


class Personal(NamedTuple):
    """With a warm-up: the client's lower layers, and whether it has trained them as its own."""

    lower: Params
    own: Bool[Array, ""]


def _warmed_up(without_warmup: Method, combine: Combine, rounds: int) -> Method:
    """The method after ``rounds`` rounds of FedAvg.

    The lower layers are sent down once more in the round after the warm-up. A client whose first participation is later
    is assumed to have received them with the others.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Shared, Personal]:
        upper, lower = without_warmup.init(key, clients)
        return Shared(upper, SentIf(jnp.array(True), lower)), Personal(lower, jnp.array(False))

    def lower_in_use(view: Shared, client: Personal) -> Params:
        return jax.tree.map(lambda own, shared: jnp.where(client.own, own, shared), client.lower, view.lower.value)

    def local(now: Round, view: Shared, client: Personal, data: ClientData) -> Update:
        lower, upper, info, *_ = without_warmup.local(now, view.upper, lower_in_use(view, client), data)
        warming = now.t < rounds
        return Update(Personal(lower, ~warming), Shared(upper, SentIf(warming, lower)), info)

    def aggregate(
        now: Round, server: Shared, clients: Personal, uploads: Shared, cohort: Cohort
    ) -> tuple[Shared, Personal]:
        warming = now.t < rounds
        sent = jax.tree.map(lambda lower: jnp.where(warming, lower, 0.0), uploads.lower.value)
        upper, lower = combine((uploads.upper, sent), cohort.weight)
        lower = jax.tree.map(lambda new, old: jnp.where(warming, new, old), lower, server.lower.value)
        return Shared(upper, SentIf(warming, lower)), clients

    def personal(view: Shared, client: Personal) -> Params:
        return without_warmup.personal(view.upper, lower_in_use(view, client))

    return Method(init, local, aggregate, personal, without_warmup.predict)
