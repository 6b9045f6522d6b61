"""FedAMP (Huang et al., AAAI 2021): every client is pulled towards a mixture of the models that resemble its own."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Diagnostics, Method, Round, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.losses import proximal, supervised
from fedjax_pfl.ops.training import Scalar, Trainer, is_off
from fedjax_pfl.ops.tree import finite_rows, keep_rows, put_rows, take_rows


class Server(NamedTuple):
    """Kept by the server only: the last upload of each of the N clients, and which clients have sent a finite one."""

    models: Params
    known: Bool[Array, " N"]


class Client(NamedTuple):
    """Personal: w_i, and u_i, which the server writes."""

    params: Params
    inbox: Params


class Pairs(NamedTuple):
    """K models against all N, over all parameters except running statistics: <w_i, w_j>, squared lengths, and |w|."""

    products: Float[Array, "K N"]
    own: Float[Array, "K 1"]
    all: Float[Array, " N"]
    size: int


# pairs, whether j is another client that has sent a model -> xi_ij of these; 0 elsewhere
Attention = Callable[[Pairs, Bool[Array, "K N"]], Float[Array, "K N"]]


def fedamp(
    model: Model,
    train: Trainer,
    *,
    alpha: Annotated[float, Ge(0)] = 5e-5,
    sigma: Annotated[float, Gt(0)] = 1e-3,
    lam: Annotated[float, Ge(0)] = 0.1,
) -> Method:
    """FedAMP: client i trains its own w_i on CE + (lam / 2) ||w - u_i||^2, where u_i = sum_j xi_ij w_j.

    Shared: only the u_i. Personal: w_i. Headline: POST (equal to the next round's PRE).

    xi_ij = alpha A'(d_ij) with A'(d) = exp(-d / sigma) / sigma, and xi_ii is the rest up to 1. If the xi_ij of the
    other clients add up to more than 1, they are divided by their sum. d_ij is the mean of (w_i - w_j)^2 over the
    parameters, so that one sigma suits models of any size; the paper uses the sum, and its alpha and sigma are |w|
    times these. Models much farther apart than sigma do not influence each other (as in Local), and models much closer
    than sigma all get the same weight. The diagnostic ``attention``, the mean of 1 - xi_ii, shows which is the case.
    The last models of all clients that have ever taken part are mixed; server and clients hold 3 N models. In PFLlib
    the pull has no gradient, so that its clients train as in Local. The paper's alpha_k depends on the round; here
    alpha and lam are constants, with defaults of our own. Training starts from w_i, as in PFLlib; other public code
    starts from u_i.

    Args:
      model: extractor and head.
      train: the local trainer.
      alpha: alpha_k; alpha / sigma is the weight of another client's model if it equals the own one. 0 is Local.
      sigma: scale of the distances; try 0.0001, 0.001 and 0.01.
      lam: strength of the pull, lambda / alpha_k in the paper; stable for lr * lam < 2. 0 is Local.

    Reference:
      Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang. Personalized Cross-Silo Federated Learning on
      Non-IID Data. AAAI 2021. arXiv:2007.03797.
    """

    def attention(pairs: Pairs, others: Bool[Array, "K N"]) -> Float[Array, "K N"]:
        distance = jnp.maximum(pairs.own - 2.0 * pairs.products + pairs.all, 0.0) / pairs.size
        xi = jnp.where(others, alpha * jnp.exp(-distance / sigma) / sigma, 0.0)
        return xi / jnp.maximum(jnp.sum(xi, axis=1, keepdims=True), 1.0)

    return drawn_together(model, train, attention, 0.0 if is_off(alpha) else lam)


def drawn_together(model: Model, train: Trainer, attention: Attention, pull: Scalar) -> Method:
    """Attentive message passing with these weights, and a pull of this strength towards u_i."""

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Client]:
        params = model.init(key)
        models = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients, *leaf.shape)), params)
        return Server(models, jnp.zeros(clients, bool)), Client(params, params)

    def weights(server: Server, own: Params, ids: Int[Array, " K"]) -> Float[Array, "K N"]:
        """xi of the models ``own`` of these clients; every row sums to 1."""
        is_own = ids[:, None] == jnp.arange(len(server.known))
        xi = attention(_pairs(own, server.models), server.known & ~is_own)
        return jnp.where(is_own, 1.0 - jnp.sum(xi, axis=1, keepdims=True), xi)

    def dispatch(now: Round, server: Server, clients: Client, cohort: Cohort) -> Params:
        # From the server's copies (the initial model before a first upload): a client sends nothing before it trains.
        xi = weights(server, take_rows(server.models, cohort.ids), cohort.ids)
        return jax.tree.map(lambda w: jnp.tensordot(xi, w, axes=1, precision=lax.Precision.HIGHEST), server.models)

    def local(now: Round, view: tuple[()], client: Client, data: ClientData) -> Update:
        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            ce = supervised(model, params, batch)
            return ce if is_off(pull) else ce + proximal(params, client.inbox, pull)

        params, info = train(now, loss, client.params, data)
        return Update(client._replace(params=params), params, info)

    def aggregate(
        now: Round, server: Server, clients: Client, uploads: Params, cohort: Cohort
    ) -> tuple[Server, Client]:
        # 0 * NaN is NaN: a model that has diverged would be a part of every mixture.
        finite = finite_rows(uploads)
        sent = Server(keep_rows(finite, uploads), finite & (cohort.weight > 0))
        return put_rows(server, cohort.ids, sent), clients

    def diagnose(server: Server) -> Diagnostics:
        xi = weights(server, server.models, jnp.arange(len(server.known)))
        given = jnp.sum(jnp.where(server.known, 1.0 - jnp.diagonal(xi), 0.0))
        return {"attention": given / jnp.maximum(jnp.sum(server.known, dtype=jnp.float32), 1.0)}

    def personal(view: tuple[()], client: Client) -> Params:
        return client.params

    method = Method(init, local, aggregate, personal, model.apply, broadcast=lambda server: (), headline="post")
    return method._replace(dispatch=dispatch, diagnose=diagnose)


def _pairs(own: Params, models: Params) -> Pairs:
    def flat(tree: Params) -> list[Float[Array, "rows size"]]:
        leaves = jax.tree.leaves_with_path(tree)
        return [leaf.reshape(len(leaf), -1) for path, leaf in leaves if not is_statistic(path)]

    both, total = list(zip(flat(own), flat(models), strict=True)), partial(jax.tree.reduce, jnp.add)
    return Pairs(
        products=total([jnp.matmul(a, b.T, precision=lax.Precision.HIGHEST) for a, b in both]),
        own=total([jnp.sum(a**2, axis=1, keepdims=True) for a, _ in both]),
        all=total([jnp.sum(b**2, axis=1) for _, b in both]),
        size=sum(b.shape[1] for _, b in both),
    )
