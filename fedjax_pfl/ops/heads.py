"""Training of a head alone, on features."""

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
    """Trains a head with plain cross-entropy.

    Args:
      now: the round, and the client's key in it.
      model: classifies features with a head.
      train: the local trainer.
      head: phi, to start from.
      features: samples as an extractor sees them, from :func:`~fedjax_pfl.ops.training.cache_features`.
      phase: name of this phase.
      epochs: instead of the trainer's number.
      lr: instead of the trainer's rate.
    """

    def loss(phi: Params, batch: Batch, key: Key[Array, ""]) -> Array:
        del key
        return cross_entropy(model.classify(phi, batch.x), batch.y, batch.mask)

    return train(now, loss, head, features, phase=phase, epochs=epochs, lr=lr, record=False)[0]
