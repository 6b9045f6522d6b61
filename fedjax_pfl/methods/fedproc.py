"""FedProc (Mu et al., FGCS 2023): FedAvg that moves from a contrast with global prototypes to cross-entropy."""

from typing import Annotated, NamedTuple

import jax.numpy as jnp
from annotated_types import Ge, Gt
from jaxtyping import Array, Float, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, PerClass, Round, Samples, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import cross_entropies, label_loss, masked_mean
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    l2_normalize,
    pool_prototypes,
    prototype_contrast,
    sums_as_sent,
)
from fedjax_pfl.ops.training import Trainer


class Server(NamedTuple):
    """Shared: w and P."""

    params: Params
    prototypes: Prototypes


class Sent(NamedTuple):
    """What is sent down and, with class sums instead of the means, up."""

    params: Params
    per_class: PerClass


def fedproc(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    anneal_rounds: Annotated[int, Ge(1)] = 100,
    temperature: Annotated[float, Gt(0)] = 1.0,
) -> Method:
    """FedProc: the local loss is a CE + (1 - a) contrast, where a = min(1, t / T_a) grows from round to round.

    Shared: w, P. Personal: nothing. Headline: PRE, the global model.

    Only CE is used in round 0, and for a sample whose class has no prototype yet. In the rounds after, CE hardly
    counts: the head, and with it the accuracy, comes late. The official network has a projection head on top, whose
    normalised output is classified; here the head sees z, and only contrast and prototypes normalise it. a = 1 is
    FedAvg.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      anneal_rounds: T_a; in the paper the number of rounds, 100. Set it to ``training.rounds``.
      temperature: divides the cosines of the contrast; the paper has none.

    Reference:
      X. Mu, Y. Shen, K. Cheng, X. Geng, J. Fu, T. Zhang, Z. Zhang. FedProc: Prototypical Contrastive Federated Learning
      on Non-IID Data. Future Generation Computer Systems 143, 2023. arXiv:2109.12273.
    """
    normalized = model._replace(features=lambda theta, x, mask=None: l2_normalize(model.features(theta, x, mask)))

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, PyTree]:
        return Server(model.init(key), Prototypes.none(model.classes, model.dim)), ()

    def broadcast(server: Server) -> Sent:
        return Sent(server.params, server.prototypes.as_sent())

    def local(now: Round, view: Sent, client: PyTree, data: ClientData) -> Update:
        prototypes = Prototypes.as_received(view.per_class)
        contrast_share = jnp.where(now.t > 0, jnp.maximum(1.0 - now.t.astype(jnp.float32) / anneal_rounds, 0.0), 0.0)

        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            z = model.features(params["extractor"], batch.x, batch.mask)
            logits = model.classify(params["head"], z)
            # a CE + (1 - a) contrast as CE + (1 - a) (contrast - CE), of the samples that have a prototype.
            contrast = prototype_contrast(z, batch.y, batch.mask, prototypes, temperature=temperature)
            ce = jnp.where(prototypes.valid[batch.y], cross_entropies(logits, batch.y), 0.0)
            return label_loss(model, z, logits, batch) + contrast_share * (contrast - masked_mean(ce, batch.mask))

        params, info = train(now, loss, view.params, data)
        return Update(client, Sent(params, sums_as_sent(normalized, params["extractor"], data)), info)

    def aggregate(now: Round, server: Server, clients: PyTree, uploads: Sent, cohort: Cohort) -> tuple[Server, PyTree]:
        prototypes = pool_prototypes(server.prototypes, uploads.per_class)
        return Server(combine(uploads.params, cohort.weight), prototypes), clients

    def personal(view: Sent, client: PyTree) -> Params:
        return view.params

    def global_predict(server: Server, x: Samples) -> Logits:
        return model.apply(server.params, x)

    return Method(init, local, aggregate, personal, model.apply, broadcast, global_predict=global_predict)
