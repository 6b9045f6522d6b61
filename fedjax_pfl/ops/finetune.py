"""Fine-tuning of a shared model on one client's samples."""

from typing import Literal

from jaxtyping import Array, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.training import Scalar, Trainer, cache_features

Scope = Literal["full", "head", "extractor"]


def finetune(
    key: Key[Array, ""],
    t: Int[Array, ""],
    model: Model,
    train: Trainer,
    params: Params,
    data: ClientData,
    *,
    epochs: int,
    lr: Scalar | None,
    scope: Scope,
) -> Params:
    """FT(w): ``epochs`` of plain cross-entropy training from ``params`` (baselines, section 3).

    Args:
      key: the client's key of this round.
      t: the round, for the learning-rate decay.
      model: extractor and head.
      train: the local trainer.
      params: the model to start from.
      data: the client's training samples.
      epochs: E_ft.
      lr: eta_ft; None for the rate of local training.
      scope: ``"full"`` trains everything, ``"extractor"`` all but the last layer, ``"head"`` the last layer alone, on
        cached features.
    """

    def full_loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Array:
        del key
        return cross_entropy(model.apply(params, batch.x, batch.mask), batch.y, batch.mask)

    def extractor_loss(theta: Params, batch: Batch, key: Key[Array, ""]) -> Array:
        return full_loss({**params, "extractor": theta}, batch, key)

    if scope == "head":
        cached = cache_features(lambda x: model.features(params["extractor"], x), data)
        head = train_head(key, t, model, train, params["head"], cached, phase="finetune", epochs=epochs, lr=lr)
        return {**params, "head": head}
    if scope == "extractor":
        theta, _ = train(key, t, extractor_loss, params["extractor"], data, phase="finetune", epochs=epochs, lr=lr)
        return {**params, "extractor": theta}
    return train(key, t, full_loss, params, data, phase="finetune", epochs=epochs, lr=lr)[0]
