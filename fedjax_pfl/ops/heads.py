"""Training of a head on features of a frozen extractor."""

from jaxtyping import Array, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Round
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.training import Scalar, Trainer


def train_head(
    now: Round,
    model: Model,
    train: Trainer,
    head: Params,
    features: ClientData,
    *,
    phase: str = "head",
    epochs: int | None = None,
    lr: Scalar | None = None,
) -> Params:
    """Trains a head with plain cross-entropy; returns the trained head.

    Args:
      now: the round, and the client's key in it.
      model: its ``classify`` applies the head to features.
      train: the local trainer.
      head: phi, the head to start from.
      features: the client's samples as features, from :func:`~fedjax_pfl.ops.training.cache_features`.
      phase: name of this phase.
      epochs: number of epochs, instead of the trainer's.
      lr: learning rate, instead of the trainer's.
    """

    def loss(phi: Params, batch: Batch, key: Key[Array, ""]) -> Array:
        return cross_entropy(model.classify(phi, batch.x), batch.y, batch.mask)

    return train(now, loss, head, features, phase=phase, epochs=epochs, lr=lr, record=False)[0]
