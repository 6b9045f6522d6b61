"""FedBABU (Oh, Kim, Yun, ICLR 2022): an extractor trained under one random head that never changes, then fine-tuned."""

from typing import Annotated

from annotated_types import Ge, Gt

from fedjax_pfl.method import Method
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.finetune import Scope, finetune
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.training import Trainer


def fedbabu(
    model: Model,
    train: Trainer,
    *,
    finetune_epochs: Annotated[int, Ge(0)] = 5,
    finetune_lr: Annotated[float, Gt(0)] | None = None,
    finetune_scope: Scope = "full",
) -> Method:
    """FedBABU: a FedAvg round on the extractor alone, under the initial head phi^0 everywhere; fine-tuned to evaluate.

    Shared: theta. Personal: nothing that lasts (phi^0 is the same on all clients, and is sent once). Headline: PRE,
    which is taken after fine-tuning; (theta, phi^0) is the global model. Averaged by n_i (official code: uniformly).

    Args:
      model: extractor and head.
      train: the local trainer.
      finetune_epochs: E_ft; the paper's is 5.
      finetune_lr: eta_ft; the local learning rate unless given.
      finetune_scope: ``"full"``, ``"head"`` or ``"extractor"``.

    Reference:
      J. Oh, S. Kim, S.-Y. Yun. FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022.
      arXiv:2106.06042.
    """

    def init(key):
        params = model.init(key)
        return params, params["head"]

    def broadcast(server):
        return server["extractor"]

    def local(key, t, view, client, data):
        def loss(extractor, batch, key):
            del key
            logits = model.apply({"extractor": extractor, "head": client}, batch.x, batch.mask)
            return cross_entropy(logits, batch.y, batch.mask)

        extractor, info = train(key, t, loss, view, data)
        return client, extractor, info

    def aggregate(key, t, server, clients, uploads, cohort):
        del key, t
        return {**server, "extractor": weighted_mean(uploads, cohort.weight)}, clients

    def predict(view, client, x):
        return model.apply({"extractor": view, "head": client}, x)

    def personalize(key, t, view, client, data):
        params = {"extractor": view, "head": client}
        epochs, lr, scope = finetune_epochs, finetune_lr, finetune_scope
        params = finetune(key, t, model, train, params, data, epochs=epochs, lr=lr, scope=scope)
        return params["extractor"], params["head"]

    return Method(
        init, local, aggregate, predict, broadcast=broadcast, personalize=personalize, global_predict=model.apply
    )
