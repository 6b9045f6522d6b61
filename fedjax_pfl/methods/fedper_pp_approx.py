"""An approximation of FedPer++ (Xu, Yan, Huang, IJCNN 2022), not the method: FedPer with two changes of its loss."""

from typing import Annotated

import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Method, Round, Update
from fedjax_pfl.methods.fedper import fedper
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import balanced_cross_entropy, masked_mean, regularized
from fedjax_pfl.ops.training import Trainer, is_off


def fedper_pp_approx(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    gamma: Annotated[float, Ge(0)] = 0.0,
    lam: Annotated[float, Ge(0)] = 1.0,
) -> Method:
    """An approximation of FedPer++: FedPer with losses against drift of the features and imbalance of the classes.

    Shared: theta. Personal: phi_i. Headline: PRE, as in FedPer.

    Neither the text nor the code of FedPer++ was at hand. Its title and the authors' FedPAC say what it works against,
    and both losses are ours. Mark its numbers as those of an approximation. The local loss is CE(l + gamma log n_ic, y)
    + (lam / K) ||f_theta(x) - f_theta^t(x)||^2; the model predicts with l. gamma = lam = 0 is FedPer, bit for bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging extractors.
      gamma: strength of the class prior, 0 or 1. 1 removes the prior from the head, which costs accuracy if the test
        samples are as imbalanced as the training samples.
      lam: lambda, weight of the distance between the features and those of the received extractor.

    Reference:
      J. Xu, Y. Yan, S.-L. Huang. FedPer++: Toward Improved Personalized Federated Learning on Heterogeneous and
      Imbalanced Data. IJCNN 2022.
    """

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            z = model.features(params["extractor"], batch.x, batch.mask)
            logits = model.classify(params["head"], z)
            ce = balanced_cross_entropy(logits, batch.y, batch.mask, data.class_counts, strength=gamma)
            total = regularized(model, ce, z, batch.mask)
            if is_off(lam):
                return total
            drift = jnp.mean((z - model.features(view, batch.x)) ** 2, axis=1)
            return total + lam * masked_mean(drift, batch.mask)

        params, info = train(now, loss, {"extractor": view, "head": client}, data)
        return Update(params["head"], params["extractor"], info)

    return fedper(model, train, combine)._replace(local=local)
