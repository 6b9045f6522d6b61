"""Fine-tuning of a shared model on one client's samples."""

from typing import Literal

from jaxtyping import Array, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Round
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Scalar, Trainer, cache_features

Scope = Literal["full", "head", "extractor"]


def finetune(
    now: Round,
    model: Model,
    train: Trainer,
    params: Params,
    data: ClientData,
    *,
    epochs: int,
    lr: Scalar | None,
    scope: Scope,
) -> Params:
    """FT(w): ``epochs`` of plain cross-entropy training from ``params``, without ``training.decorrelate``'s term.

    Args:
      now: the round, and the client's key in it.
      model: extractor and head.
      train: the local trainer.
      params: the model to start from.
      data: the client's training samples.
      epochs: E_ft.
      lr: eta_ft, which decays as the rate of local training does; None for that.
      scope: ``"full"`` trains everything, ``"extractor"`` all but the last layer, ``"head"`` only the last layer, on
        cached features.

    Returns:
      The fine-tuned parameters.
    """

    model = model._replace(regularizer=None)

    def full_loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Array:
        return supervised(model, params, batch)

    def extractor_loss(theta: Params, batch: Batch, key: Key[Array, ""]) -> Array:
        return full_loss({**params, "extractor": theta}, batch, key)

    if scope == "head":
        cached = cache_features(lambda x: model.features(params["extractor"], x), data)
        head = train_head(now, model, train, params["head"], cached, phase="finetune", epochs=epochs, lr=lr)
        return {**params, "head": head}
    if scope == "extractor":
        theta, _ = train(
            now, extractor_loss, params["extractor"], data, phase="finetune", epochs=epochs, lr=lr, record=False
        )
        return {**params, "extractor": theta}
    return train(now, full_loss, params, data, phase="finetune", epochs=epochs, lr=lr, record=False)[0]
