"""LG-FedAvg (Liang et al., arXiv 2001.01523): personal extractors under a shared head."""

from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, Round, Samples, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer


def lg_fedavg(model: Model, train: Trainer, combine: Combine = weighted_mean) -> Method:
    """LG-FedAvg: participants train extractor and head jointly; only the head (the last layer) is averaged.

    Shared: phi. Personal: theta_i. Headline: PRE. The original starts from a model that FedAvg has trained; from
    scratch, as here, it is close to Local.

    Reference:
      P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency. Think
      Locally, Act Globally: Federated Learning with Local and Global Representations. arXiv:2001.01523, 2020.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        del clients
        params = model.init(key)
        return params["head"], params["extractor"]

    def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
        del key
        return supervised(model, params, batch)

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        params, info = train(now, loss, {"extractor": client, "head": view}, data)
        return Update(params["extractor"], params["head"], info)

    def aggregate(
        now: Round, server: Params, clients: Params, uploads: Params, cohort: Cohort
    ) -> tuple[Params, Params]:
        del now, server
        return combine(uploads, cohort.weight), clients

    def predict(view: Params, client: Params, x: Samples) -> Logits:
        return model.apply({"extractor": client, "head": view}, x)

    return Method(init, local, aggregate, predict)
