"""FedPer (Arivazhagan et al., arXiv 1912.00818): a shared extractor under personal heads, trained together."""

from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer


def fedper(model: Model, train: Trainer, combine: Combine = weighted_mean) -> Method:
    """FedPer: participants train extractor and head jointly; only the extractor is averaged, the heads stay local.

    Shared: theta. Personal: phi_i (one personal layer, K_P = 1). Headline: PRE, the aggregated extractor under each
    client's own head.

    The head of a client that was absent for long is outdated relative to the extractor.

    Reference:
      M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary. Federated Learning with Personalization Layers.
      arXiv:1912.00818, 2019.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        params = model.init(key)
        return params["extractor"], params["head"]

    def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
        return supervised(model, params, batch)

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        params, info = train(now, loss, {"extractor": view, "head": client}, data)
        return Update(params["head"], params["extractor"], info)

    def aggregate(
        now: Round, server: Params, clients: Params, uploads: Params, cohort: Cohort
    ) -> tuple[Params, Params]:
        return combine(uploads, cohort.weight), clients

    def personal(view: Params, client: Params) -> Params:
        return {"extractor": view, "head": client}

    return Method(init, local, aggregate, personal, model.apply)
