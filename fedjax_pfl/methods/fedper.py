"""FedPer (Arivazhagan et al., arXiv 1912.00818): a shared extractor under personal heads, trained together."""

from fedjax_pfl.method import Method
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.training import Trainer


def fedper(model: Model, train: Trainer) -> Method:
    """FedPer: participants train extractor and head jointly; only the extractor is averaged, the head stays.

    Shared: theta. Personal: phi_i (one personal layer, K_P = 1). Headline: PRE, the aggregated extractor under each
    client's own head; the head of a client that was long absent is stale against it.

    Reference:
      M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary. Federated Learning with Personalization Layers.
      arXiv:1912.00818, 2019.
    """

    def init(key):
        params = model.init(key)
        return params["extractor"], params["head"]

    def loss(params, batch, key):
        del key
        return cross_entropy(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)

    def local(key, t, view, client, data):
        params, info = train(key, t, loss, {"extractor": view, "head": client}, data)
        return params["head"], params["extractor"], info

    def aggregate(key, t, server, clients, uploads, cohort):
        del key, t, server
        return weighted_mean(uploads, cohort.weight), clients

    def predict(view, client, x):
        return model.apply({"extractor": view, "head": client}, x)

    return Method(init, local, aggregate, predict)
