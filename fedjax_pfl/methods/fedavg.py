"""FedAvg (McMahan et al., AISTATS 2017), Algorithm 1: one global model, averaged by client size."""

from jaxtyping import Array, Float, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer


def fedavg(model: Model, train: Trainer, combine: Combine = weighted_mean) -> Method:
    """FedAvg: every participant trains the global model; the server averages the results, weighted by n_i.

    Shared: w. Personal: nothing. Headline: PRE, the global model on each client's test samples (POST is what some
    papers print as "FedAvg, local").

    Reference:
      H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas. Communication-Efficient Learning of Deep
      Networks from Decentralized Data. AISTATS 2017. arXiv:1602.05629.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, PyTree]:
        return model.init(key), ()

    def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
        return supervised(model, params, batch)

    def local(now: Round, view: Params, client: PyTree, data: ClientData) -> Update:
        params, info = train(now, loss, view, data)
        return Update(client, params, info)

    def aggregate(
        now: Round, server: Params, clients: PyTree, uploads: Params, cohort: Cohort
    ) -> tuple[Params, PyTree]:
        return combine(uploads, cohort.weight), clients

    def personal(view: Params, client: PyTree) -> Params:
        return view

    return Method(init, local, aggregate, personal, model.apply, global_predict=model.apply)
