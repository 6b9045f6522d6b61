"""FedAvg (McMahan et al., AISTATS 2017), Algorithm 1: one global model, averaged by client size."""

from fedjax_pfl.method import Method
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.training import Trainer


def fedavg(model: Model, train: Trainer) -> Method:
    """FedAvg: every participant trains the global model; the server averages the results, weighted by n_i.

    Shared: w. Personal: nothing. Headline: PRE, the global model on each client's test samples (POST is what some
    papers print as "FedAvg, local").

    Reference:
      H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas. Communication-Efficient Learning of Deep
      Networks from Decentralized Data. AISTATS 2017. arXiv:1602.05629.
    """

    def init(key):
        return model.init(key), ()

    def loss(params, batch, key):
        del key
        return cross_entropy(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)

    def local(key, t, view, client, data):
        params, info = train(key, t, loss, view, data)
        return client, params, info

    def aggregate(key, t, server, clients, uploads, cohort):
        del key, t, server
        return weighted_mean(uploads, cohort.weight), clients

    def predict(view, client, x):
        del client
        return model.apply(view, x)

    return Method(init, local, aggregate, predict, global_predict=model.apply)
