"""FedProx (Li et al., MLSys 2020), Algorithm 2: FedAvg whose local loss is tied to the global model."""

from typing import Annotated

from annotated_types import Ge

from fedjax_pfl.method import Method
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.losses import cross_entropy, proximal
from fedjax_pfl.ops.training import Trainer, is_off


def fedprox(model: Model, train: Trainer, *, mu: Annotated[float, Ge(0)] = 0.01) -> Method:
    """FedProx: FedAvg with the local loss CE + (mu / 2) ||w - w^t||^2 over all parameters.

    Shared: w. Personal: nothing. Headline: PRE. Participants are sampled uniformly and averaged by n_i, as in FedAvg
    (the paper samples by n_i and averages uniformly). Stable for lr * mu < 2; mu = 0 is FedAvg, bit for bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      mu: strength of the proximal term; the paper's grid is 0.001, 0.01, 0.1, 1.

    Reference:
      T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in Heterogeneous
      Networks. MLSys 2020. arXiv:1812.06127.
    """

    def local(key, t, view, client, data):
        def loss(params, batch, key):
            del key
            ce = cross_entropy(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)
            return ce if is_off(mu) else ce + proximal(params, view, mu)

        params, info = train(key, t, loss, view, data)
        return client, params, info

    return fedavg(model, train)._replace(local=local)
