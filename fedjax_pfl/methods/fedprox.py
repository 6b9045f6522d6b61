"""FedProx (Li et al., MLSys 2020), Algorithm 2: FedAvg with a local loss that ties the model to the global one."""

from typing import Annotated

from annotated_types import Ge
from jaxtyping import Array, Float

from fedjax_pfl.data.federated import Batch
from fedjax_pfl.method import Logits, Method
from fedjax_pfl.methods.base_loss import BaseLoss, Term, fedavg_on
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import proximal
from fedjax_pfl.ops.training import Scalar, Trainer, is_off


def fedprox(
    model: Model, train: Trainer, combine: Combine = weighted_mean, *, mu: Annotated[float, Ge(0)] = 0.01
) -> Method:
    """FedProx: FedAvg with the local loss CE + (mu / 2) ||w - w^t||^2 over all parameters.

    Shared: w. Personal: nothing. Headline: PRE. Participants are sampled uniformly and averaged by n_i, as in FedAvg
    and the authors' code (the paper samples by n_i and averages uniformly). All participants do all their work; there
    are no stragglers. Stable for lr * mu < 2; mu = 0 is FedAvg, bit for bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      mu: strength of the proximal term; the paper's grid is 0.001, 0.01, 0.1, 1.

    Reference:
      T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in Heterogeneous
      Networks. MLSys 2020. arXiv:1812.06127.
    """

    return fedavg_on(fedprox_loss(model, mu), model, train, combine)


def fedprox_loss(model: Model, mu: Scalar = 0.01) -> BaseLoss:
    """CE + (mu / 2) ||w - w^t||^2."""
    if is_off(mu):
        return BaseLoss()

    def term(received: Params, last: Params) -> Term:

        def near(params: Params, z: Float[Array, "batch K"], logits: Logits, batch: Batch) -> Float[Array, ""]:
            return proximal(params, received, mu)

        return near

    return BaseLoss(term)
