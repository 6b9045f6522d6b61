"""FedPAC (Xu, Tong, Huang, ICLR 2023): features aligned to global prototypes, and heads combined per client."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jax import lax
from jaxtyping import Array, Bool, Float

from fedjax_pfl.method import Method, PerClass
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import simplex_qp, weighted_mean
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    centre_loss,
    class_means,
    class_sums,
    class_sums_under,
    update_prototypes,
)
from fedjax_pfl.ops.training import Trainer, cache_features, is_off

NEGLIGIBLE = 1e-3  # weights of other clients' heads up to this are dropped (official code)


class Server(NamedTuple):
    """Shared: theta, and the global prototypes P."""

    extractor: Params
    prototypes: Prototypes


class View(NamedTuple):
    """What is sent down besides the client's combined head."""

    extractor: Params
    prototypes: PerClass


class Client(NamedTuple):
    """Personal: phi_i, which the server writes as a combination of the participants' heads."""

    inbox: Params


class Statistics(NamedTuple):
    """How a client's features are spread under the received extractor, before any training.

    Attributes:
      h: pi_ic mu_ic, the class means weighted by label frequency; zeros for classes not held, [C, K].
      v: variance of the estimate of h, [].
    """

    h: Float[Array, "C K"]
    v: Float[Array, ""]


class Upload(NamedTuple):
    """What is sent up: (h, class sums under the trained extractor) with the class counts, and v."""

    extractor: Params
    head: Params
    per_class: PerClass
    v: Float[Array, ""]


def fedpac(
    model: Model,
    train: Trainer,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    head_lr: Annotated[float, Gt(0)] | None = 0.1,
    head_epochs: Annotated[int, Ge(0)] = 1,
) -> Method:
    """FedPAC: one epoch on the head, then the extractor under it, pulled to the prototypes of all participants.

    Shared: theta, P. Personal: phi_i, combined for each participant from all participants' heads by the weights that
    minimise a bound on its expected loss. Headline: PRE, the aggregated extractor under the combined head (the official
    code prints POST over participants). Prototypes are averaged by class counts. The weights need no repair of Q, which
    is positive semidefinite by construction.

    Args:
      model: extractor and head.
      train: the local trainer.
      lam: strength of the pull, mean over features; off in round 0. The paper's grid is 0.1, 1, 10.
      head_lr: eta_h of the head phase; None for the local learning rate.
      head_epochs: epochs of the head phase.

    Reference:
      J. Xu, X. Tong, S.-L. Huang. Personalized Federated Learning with Feature Alignment and Classifier Collaboration.
      ICLR 2023. arXiv:2306.11867.
    """

    def init(key):
        params = model.init(key)
        nothing = Prototypes(jnp.zeros((model.classes, model.dim)), jnp.zeros(model.classes, bool))
        return Server(params["extractor"], nothing), Client(params["head"])

    def broadcast(server):
        return View(server.extractor, PerClass(server.prototypes.valid, server.prototypes.mean))

    def local(key, t, view, client, data):
        features = cache_features(lambda x: model.features(view.extractor, x), data)
        means = class_means(class_sums(features.x, features.y, data.valid, model.classes), data.class_counts)
        h, v = _statistics(features.x, features.y, data.valid, means, data.class_counts)

        head = train_head(key, t, model, train, client.inbox, features, epochs=head_epochs, lr=head_lr)

        known = view.prototypes.held
        targets = Prototypes(jnp.where(known[:, None], view.prototypes.rows, means.mean), known | means.valid)
        strength = jnp.where(t == 0, 0.0, lam)

        def loss(extractor, batch, key):
            del key
            z = model.features(extractor, batch.x, batch.mask)
            ce = cross_entropy(model.classify(head, z), batch.y, batch.mask)
            return ce if is_off(lam) else ce + strength * centre_loss(z, batch.y, batch.mask, targets)

        extractor, info = train(key, t, loss, view.extractor, data)
        sums = class_sums_under(model, extractor, data)
        return client, Upload(extractor, head, PerClass(data.class_counts, (h, sums)), v), info

    def aggregate(key, t, server, clients, uploads, cohort):
        del key, t, clients
        h, sums = uploads.per_class.rows
        counts = jnp.sum(uploads.per_class.held, axis=0)
        new = class_means(jnp.sum(sums, axis=0), counts)
        prototypes = update_prototypes(server.prototypes, new)
        weights = head_weights(h, uploads.v, cohort.weight > 0)
        heads = jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1), uploads.head)
        return Server(weighted_mean(uploads.extractor, cohort.weight), prototypes), Client(heads)

    def predict(view, client, x):
        return model.apply({"extractor": view.extractor, "head": client.inbox}, x)

    def trained(view, client, upload):
        del client
        return view._replace(extractor=upload.extractor), Client(upload.head)

    return Method(init, local, aggregate, predict, broadcast=broadcast, trained=trained)


def _statistics(
    z: Float[Array, "samples K"], y: Array, valid: Float[Array, " samples"], means: Prototypes, counts: Array
) -> Statistics:
    """The two statistics of a client; v as a sum of squares, which rounding cannot make negative.

    v n_i = mean ||z||^2 - sum_c pi_c^2 ||mu_c||^2 = mean ||z - mu_y||^2 + sum_c pi_c (1 - pi_c) ||mu_c||^2.
    """
    samples = jnp.maximum(jnp.sum(counts), 1.0)
    share = counts / samples
    within = jnp.sum(valid * jnp.sum((z - means.mean[y]) ** 2, axis=1)) / samples
    between = jnp.sum(share * (1.0 - share) * jnp.sum(means.mean**2, axis=1))
    return Statistics(share[:, None] * means.mean, (within + between) / samples)


def head_weights(
    h: Float[Array, "clients C K"], v: Float[Array, " clients"], present: Bool[Array, " clients"]
) -> Float[Array, "clients clients"]:
    """Row i: the weights a of all heads in client i's, which minimise a' Q_i a over the simplex.

    Q_i = diag(v) + [<h_i - h_j, h_i - h_k>]_jk. Weights up to 1e-3 are dropped, and the rest sum to 1.

    Args:
      h: weighted class means of each client.
      v: variance of each.
      present: whose head may be used.
    """
    flat = h.reshape(len(h), -1)

    def weights(own: Float[Array, " features"]) -> Float[Array, " clients"]:
        apart = own - flat
        a = simplex_qp(jnp.diag(v) + jnp.matmul(apart, apart.T, precision=lax.Precision.HIGHEST), present)
        a = jnp.where(a > NEGLIGIBLE, a, 0.0)
        return a / jnp.maximum(jnp.sum(a), 1e-12)

    return lax.map(weights, flat, batch_size=64)
