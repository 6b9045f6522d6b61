"""LG-FedAvg (Liang et al., arXiv 2001.01523): personal extractors under a shared head."""

from fedjax_pfl.method import Method
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.training import Trainer


def lg_fedavg(model: Model, train: Trainer) -> Method:
    """LG-FedAvg: participants train extractor and head jointly; only the head (the last layer) is averaged.

    Shared: phi. Personal: theta_i. Headline: PRE. The original starts from a model that FedAvg has trained; from
    scratch, as here, it is close to Local.

    Reference:
      P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency. Think
      Locally, Act Globally: Federated Learning with Local and Global Representations. arXiv:2001.01523, 2020.
    """

    def init(key):
        params = model.init(key)
        return params["head"], params["extractor"]

    def loss(params, batch, key):
        del key
        return cross_entropy(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)

    def local(key, t, view, client, data):
        params, info = train(key, t, loss, {"extractor": client, "head": view}, data)
        return params["extractor"], params["head"], info

    def aggregate(key, t, server, clients, uploads, cohort):
        del key, t, server
        return weighted_mean(uploads, cohort.weight), clients

    def predict(view, client, x):
        return model.apply({"extractor": client, "head": view}, x)

    return Method(init, local, aggregate, predict)
