"""FedPAC (Xu, Tong, Huang, ICLR 2023): features aligned to global prototypes, and heads combined per client."""

import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jax import lax
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, PerClass, Round, Update
from fedjax_pfl.methods.fedpac.collaboration import head_weights, statistics
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import label_loss
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    centre_loss,
    class_means,
    class_sums,
    class_sums_under,
    pool_prototypes,
    update_prototypes,
)
from fedjax_pfl.ops.training import Trainer, cache_features, is_off
from fedjax_pfl.ops.tree import finite_rows, keep_rows, where_rows


class Server(NamedTuple):
    """Shared: theta, and the global prototypes P; None without the pull to them."""

    extractor: Params
    prototypes: Prototypes | None


class View(NamedTuple):
    """What is sent down besides the client's combined head."""

    extractor: Params
    prototypes: PerClass | None


class Client(NamedTuple):
    """Personal: phi_i, which the server writes as a combination of the participants' heads."""

    inbox: Params


class Upload(NamedTuple):
    """What is sent up: (h, and class sums under the trained extractor) with the class counts, and v, a variance."""

    extractor: Params
    head: Params
    per_class: PerClass
    variance: Float[Array, ""]


def fedpac(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    head_lr: Annotated[float, Gt(0)] | None = 0.1,
    head_epochs: Annotated[int, Ge(0)] = 1,
) -> Method:
    """FedPAC: one epoch on the head, then the extractor under it, pulled to the prototypes of all participants.

    Shared: theta, P. Personal: phi_i, combined for each participant from all participants' heads by the weights that
    minimise a bound on its expected loss. Headline: PRE, the aggregated extractor under the combined head (the official
    code prints PRE and POST over participants). Prototypes are averaged by class counts. The weights need no repair of
    Q, which is positive semidefinite by construction. With ``training.copies = "concat"`` copies count as samples: the
    variances are half as large, and a client's own head weighs more.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging extractors; heads are combined by the weights above.
      lam: strength of the pull, mean over features; off in round 0. Official: 1; try 0.1, 1 and 10. With 0, P is
        not exchanged.
      head_lr: eta_h of the head phase, which decays as the local rate, where the official code has a constant; None
        for the local learning rate.
      head_epochs: epochs of the head phase.

    Reference:
      J. Xu, X. Tong, S.-L. Huang. Personalized Federated Learning with Feature Alignment and Classifier Collaboration.
      ICLR 2023. arXiv:2306.11867.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Client]:
        params = model.init(key)
        prototypes = None if is_off(lam) else Prototypes.none(model.classes, model.dim)
        return Server(params["extractor"], prototypes), Client(params["head"])

    def broadcast(server: Server) -> View:
        return View(server.extractor, None if server.prototypes is None else server.prototypes.as_sent())

    def local(now: Round, view: View, client: Client, data: ClientData) -> Update:
        features = cache_features(lambda x: model.features(view.extractor, x), data)
        means = class_means(class_sums(features.x, features.y, data.valid, model.classes), data.class_counts)
        h, v = statistics(features, means)

        head = train_head(now, model, train, client.inbox, features, epochs=head_epochs, lr=head_lr)

        # Of a class without a global prototype, the client's own mean.
        known = view.prototypes
        targets = None if known is None else update_prototypes(means, Prototypes.as_received(known))
        strength = jnp.where(now.t == 0, 0.0, lam)

        def loss(extractor: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            z = model.features(extractor, batch.x, batch.mask)
            ce = label_loss(model, z, model.classify(head, z), batch)
            return ce if targets is None else ce + strength * centre_loss(z, batch.y, batch.mask, targets)

        extractor, info = train(now, loss, view.extractor, data)
        rows = h, None if targets is None else class_sums_under(model, extractor, data)
        post = view._replace(extractor=extractor), Client(head)
        return Update(client, Upload(extractor, head, PerClass(data.class_counts, rows), v), info, post)

    def aggregate(
        now: Round, server: Server, clients: Client, uploads: Upload, cohort: Cohort
    ) -> tuple[Server, Client]:
        (h, sums), prototypes = uploads.per_class.rows, server.prototypes
        if prototypes is not None:
            prototypes = pool_prototypes(prototypes, uploads.per_class._replace(rows=sums))
        # A client that has diverged has no part in the heads: 0 * NaN is NaN.
        present = (jnp.sum(uploads.per_class.held, axis=1) > 0) & finite_rows((h, uploads.variance, uploads.head))
        weights = head_weights(h, uploads.variance, present)
        combined = functools.partial(jnp.tensordot, weights, axes=1, precision=lax.Precision.HIGHEST)
        heads = jax.tree.map(combined, keep_rows(present, uploads.head))
        # Who has no weights, without a sample or with an upload that has diverged, keeps what it has received.
        heads = where_rows(jnp.sum(weights, axis=1) > 0, heads, clients.inbox)
        return Server(combine(uploads.extractor, cohort.weight), prototypes), Client(heads)

    def personal(view: View, client: Client) -> Params:
        return {"extractor": view.extractor, "head": client.inbox}

    return Method(init, local, aggregate, personal, model.apply, broadcast=broadcast)
