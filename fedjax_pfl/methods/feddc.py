"""FedDC (Gao et al., CVPR 2022), Algorithm 1: every client learns how far it drifts, and the server adds that up."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, Round, Samples, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import without_statistics
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import proximal, supervised
from fedjax_pfl.ops.training import Trainer, is_off
from fedjax_pfl.ops.variates import tilt, variate_change


class Shared(NamedTuple):
    """Sent down: w and the server's variate c."""

    params: Params
    control: Params


class Upload(NamedTuple):
    """Sent up: w_i - w, and the change of c_i."""

    change: Params
    control: Params


class Server(NamedTuple):
    """What is shared, and the mean drift of all clients, which only the server keeps."""

    params: Params
    control: Params
    drift: Params


class Client(NamedTuple):
    """Personal: the drift h_i and the variate c_i."""

    drift: Params
    control: Params


def feddc(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    alpha: Annotated[float, Ge(0)] = 0.01,
    mean_size: Annotated[float, Gt(0)] | None = None,
) -> Method:
    """FedDC: CE + (alpha / 2) ||w_i + h_i - w||^2 + <w_i, c - c_i>; then h_i <- h_i + w_i - w for the trained w_i.

    Shared: w, c. Personal: h_i, c_i. Headline: PRE, the global model, which is the mean of the participants' w_i plus
    the mean of the h_i over all clients that may take part.

    Participants count alike, whatever their size. The variates are those of SCAFFOLD, with each client's own number of
    steps and the rate of the round. (In the paper's text they are the updates of the last round. The official code has
    the number of steps of the average client and the rate of round 0, and steps with ``training.clip_norm = 10``.) The
    server computes h_i and w_i from w_i - w, so that 2 |w| numbers go down and up. Running statistics are averaged, and
    have neither drift nor variate. As in SCAFFOLD, a participant that took no step counts as one that has not moved.
    With another rule than the mean, or with altered uploads, the server's drift and c are its own estimates of the
    means. Stable for lr * alpha < 2; the drift adds up over rounds if lr * alpha * steps is far below 1.

    Args:
      model: extractor and head.
      train: the local trainer; the paper has no momentum.
      combine: the server's rule for averaging the changes of the participants.
      alpha: strength of the penalty on the drift; official: 0.01 on CIFAR, 0.1 on MNIST; try 0.005, 0.01 and 0.1.
      mean_size: the mean of n_i over the clients, to weight as the official code does if sizes differ: with u_i = n_i /
        mean_size, alpha / u_i and c / u_i are used locally, and u_i times the change of c_i in c. None for u_i = 1.

    Reference:
      L. Gao, H. Fu, L. Li, Y. Chen, M. Xu, C.-Z. Xu. FedDC: Federated Learning with Non-IID Data via Local Drift
      Decoupling and Correction. CVPR 2022. arXiv:2203.11751.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Client]:
        params = model.init(key)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Server(params, zeros, zeros), Client(zeros, zeros)

    def broadcast(server: Server) -> Shared:
        return Shared(server.params, server.control)

    def local(now: Round, view: Shared, client: Client, data: ClientData) -> Update:
        held = data if data.original is None else data.original  # copies are no further samples
        size = 1.0 if mean_size is None else jnp.maximum(held.count, 1).astype(jnp.float32) / mean_size
        control = jax.tree.map(lambda c: c / size, view.control)
        correction = jax.tree.map(jnp.subtract, control, client.control)
        anchor = jax.tree.map(jnp.subtract, view.params, client.drift)

        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            ce = supervised(model, params, batch) + tilt(params, correction)
            return ce if is_off(alpha) else ce + proximal(params, anchor, alpha / size)

        params, info = train(now, loss, view.params, data)
        change = jax.tree.map(jnp.subtract, params, view.params)
        learned = variate_change(now, train, info, change, control)
        own = jax.tree.map(jnp.add, client, Client(without_statistics(change), learned))
        upload = Upload(change, jax.tree.map(lambda c: size * c, learned))
        return Update(own, upload, info, post=(view._replace(params=params), client))

    def aggregate(
        now: Round, server: Server, clients: Client, uploads: Upload, cohort: Cohort
    ) -> tuple[Server, Client]:
        present = (cohort.weight > 0).astype(jnp.float32)
        change, learned = combine(uploads, present)
        share = jnp.sum(present) / cohort.trainers

        def mean_over_all(mean: Params, change: Params) -> Params:
            """The mean over all clients that may take part; only these participants' values have changed."""
            return jax.tree.map(lambda mean, change: mean + share * change, mean, change)

        drift = mean_over_all(server.drift, without_statistics(change))
        params = jax.tree.map(lambda w, change, h: w + change + h, server.params, change, drift)
        return Server(params, mean_over_all(server.control, learned), drift), clients

    def personal(view: Shared, client: Client) -> Params:
        return view.params

    def global_predict(server: Server, x: Samples) -> Logits:
        return model.apply(server.params, x)

    return Method(
        init, local, aggregate, personal, model.apply, broadcast, global_predict=global_predict, sends_change=True
    )
