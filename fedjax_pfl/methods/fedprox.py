"""FedProx (Li et al., MLSys 2020), Algorithm 2: FedAvg whose local loss is tied to the global model."""

from typing import Annotated

from annotated_types import Ge
from jaxtyping import Array, Float, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import proximal, supervised
from fedjax_pfl.ops.training import Trainer, is_off


def fedprox(
    model: Model, train: Trainer, combine: Combine = weighted_mean, *, mu: Annotated[float, Ge(0)] = 0.01
) -> Method:
    """FedProx: FedAvg with the local loss CE + (mu / 2) ||w - w^t||^2 over all parameters.

    Shared: w. Personal: nothing. Headline: PRE. Participants are sampled uniformly and averaged by n_i, as in FedAvg
    (the paper samples by n_i and averages uniformly). Stable for lr * mu < 2; mu = 0 is FedAvg, bit for bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      mu: strength of the proximal term; the paper's grid is 0.001, 0.01, 0.1, 1.

    Reference:
      T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in Heterogeneous
      Networks. MLSys 2020. arXiv:1812.06127.
    """

    def local(now: Round, view: Params, client: PyTree, data: ClientData) -> Update:
        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            del key
            ce = supervised(model, params, batch)
            return ce if is_off(mu) else ce + proximal(params, view, mu)

        params, info = train(now, loss, view, data)
        return Update(client, params, info)

    return fedavg(model, train, combine)._replace(local=local)
