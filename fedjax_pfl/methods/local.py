"""Local: every client trains alone. The control without communication."""

from fedjax_pfl.method import Method
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.training import Trainer


def local(model: Model, train: Trainer) -> Method:
    """Local: every client trains its own model on its own samples; nothing is exchanged.

    Shared: nothing. Personal: w_i. Headline: POST (equal to the next round's PRE). A client trains in the rounds that
    it is selected for; with full participation that is rounds x epochs epochs in all.

    Reference:
      The no-communication control of every comparison (baselines, section 1).
    """

    def init(key):
        return (), model.init(key)

    def loss(params, batch, key):
        del key
        return cross_entropy(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)

    def local(key, t, view, client, data):
        del view
        params, info = train(key, t, loss, client, data)
        return params, (), info

    def aggregate(key, t, server, clients, uploads, cohort):
        del key, t, uploads, cohort
        return server, clients

    def predict(view, client, x):
        del view
        return model.apply(client, x)

    def trained(view, client, upload):
        del upload
        return view, client

    return Method(init, local, aggregate, predict, trained=trained, headline="post")
