"""FedBABU (Oh, Kim, Yun, ICLR 2022): an extractor trained under one random head that never changes, then fine-tuned."""

from typing import Annotated

from annotated_types import Ge, Gt
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.methods.finetuned import finetuned
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.finetune import Scope
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer


def fedbabu(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    finetune_epochs: Annotated[int, Ge(0)] = 5,
    finetune_lr: Annotated[float, Gt(0)] | None = None,
    finetune_scope: Scope = "full",
) -> Method:
    """FedBABU: FedAvg rounds of the extractor only, under one initial head phi^0; fine-tuned before evaluation.

    Shared: theta. Personal: nothing that is kept (phi^0 is the same on all clients, and is sent once). Headline: PRE,
    which is measured after fine-tuning; (theta, phi^0) is the global model.

    Extractors are averaged by n_i (the official code averages uniformly).

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging extractors.
      finetune_epochs: E_ft; the paper has 5.
      finetune_lr: eta_ft; the local learning rate unless given. It decays as that does.
      finetune_scope: ``"full"``, ``"head"`` or ``"extractor"``.

    Reference:
      J. Oh, S. Kim, S.-Y. Yun. FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022.
      arXiv:2106.06042.
    """

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        params = model.init(key)
        return params, params["head"]

    def broadcast(server: Params) -> Params:
        return server["extractor"]

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        def loss(extractor: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            return supervised(model, {"extractor": extractor, "head": client}, batch)

        extractor, info = train(now, loss, view, data)
        return Update(client, extractor, info)

    def aggregate(
        now: Round, server: Params, clients: Params, uploads: Params, cohort: Cohort
    ) -> tuple[Params, Params]:
        return {**server, "extractor": combine(uploads, cohort.weight)}, clients

    def personal(view: Params, client: Params) -> Params:
        return {"extractor": view, "head": client}

    base = Method(init, local, aggregate, personal, model.apply, broadcast, global_predict=model.apply)
    return finetuned(base, model, train, epochs=finetune_epochs, lr=finetune_lr, scope=finetune_scope)
