"""MOON (Li et al., CVPR 2021), Algorithm 1: pulls features to the global model's, away from the last local model's."""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jaxtyping import Array, Float

from fedjax_pfl.data.federated import Batch
from fedjax_pfl.method import Logits, Method
from fedjax_pfl.methods.base_loss import BaseLoss, Term, fedavg_on
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import masked_mean
from fedjax_pfl.ops.prototypes import l2_normalize
from fedjax_pfl.ops.training import Scalar, Trainer, is_off


def moon(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    mu: Annotated[float, Ge(0)] = 1.0,
    temperature: Annotated[float, Gt(0)] = 0.5,
) -> Method:
    """MOON: FedAvg with the local loss CE + mu * a contrast of the features under three models.

    Shared: w. Personal: the last local model, which the contrast needs. Headline: PRE.

    The contrast is on the features z that the head reads, so that all methods share one architecture. The official code
    puts a projection head of two layers between them; the classifier reads its output, too. In its first participation
    a client uses the received model as its last one. The term is then mu log 2 (0 in round 0 of the official code),
    without a gradient; if a client first takes part later, that code compares with a random model. mu = 0 is FedAvg,
    bit for bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      mu: weight of the contrast; the paper's grid is 0.1, 1, 5, 10, its best value 5 on CIFAR-10 and 1 on CIFAR-100.
      temperature: tau of the contrast; paper: 0.5.

    Reference:
      Q. Li, B. He, D. Song. Model-Contrastive Federated Learning. CVPR 2021. arXiv:2103.16257.
    """
    return fedavg_on(moon_loss(model, mu, temperature), model, train, combine)


def moon_loss(model: Model, mu: Scalar = 1.0, temperature: Scalar = 0.5) -> BaseLoss:
    """CE + mu * -log [exp(s_glob / tau) / (exp(s_glob / tau) + exp(s_prev / tau))] (Eqs. 2, 3)."""
    if is_off(mu):
        return BaseLoss()

    def term(received: Params, last: Params) -> Term:
        def contrast(params: Params, z: Float[Array, "batch K"], logits: Logits, batch: Batch) -> Float[Array, ""]:
            own = l2_normalize(z)

            def similarity(other: Params) -> Float[Array, " batch"]:
                return jnp.sum(own * l2_normalize(model.features(other["extractor"], batch.x)), axis=1)

            # softplus(s_prev - s_glob) is -log softmax of the two, without an exponential that could overflow.
            losses = jax.nn.softplus((similarity(last) - similarity(received)) / temperature)
            return mu * masked_mean(losses, batch.mask)

        return contrast

    return BaseLoss(term, keeps_last=True)
