"""Ditto (Li et al., ICML 2021): FedAvg, and beside it a personal model that is tied to the global one."""

from typing import Annotated

from annotated_types import Ge

from fedjax_pfl.method import Method
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.losses import cross_entropy, proximal
from fedjax_pfl.ops.training import Trainer, is_off


def ditto(
    model: Model,
    train: Trainer,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    personal_epochs: Annotated[int, Ge(0)] | None = None,
) -> Method:
    """Ditto: the global branch is FedAvg; the personal branch trains v_i on CE + (lam / 2) ||v_i - w^t||^2.

    Shared: w. Personal: v_i. Headline: POST (equal to the next round's PRE). The anchor is the model that was received,
    in both branches; both see the same batches (the official code alternates single steps of the two). Participants are
    sampled uniformly and averaged by n_i, as in FedAvg. Stable for lr * lam < 2; lam = 0 trains v_i as Local does.

    Args:
      model: extractor and head.
      train: the local trainer.
      lam: strength of the tie; the paper's grid is 0.1, 1, 2.
      personal_epochs: epochs of the personal branch; those of local training unless given.

    Reference:
      T. Li, S. Hu, A. Beirami, V. Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.
      arXiv:2012.04221.
    """
    base = fedavg(model, train)

    def init(key):
        server, _ = base.init(key)
        return server, server

    def local(key, t, view, client, data):
        def loss(params, batch, key):
            del key
            ce = cross_entropy(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)
            return ce if is_off(lam) else ce + proximal(params, view, lam)

        _, upload, info = base.local(key, t, view, (), data)
        personal, _ = train(key, t, loss, client, data, epochs=personal_epochs)
        return personal, upload, info

    def predict(view, client, x):
        del view
        return model.apply(client, x)

    def trained(view, client, upload):
        del upload
        return view, client

    return base._replace(init=init, local=local, predict=predict, trained=trained, headline="post")
