"""Prototypes and anchors: per-class means of features, each with a flag that says whether the class has one."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import PerClass
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import cross_entropies, masked_mean
from fedjax_pfl.ops.training import cache_features

Reduction = Literal["mse", "mean_l2"]


class Prototypes(NamedTuple):
    """One prototype (a point of the feature space) per class.

    Attributes:
      mean: the prototypes, [C, K]; zeros for a class without one.
      valid: whether the class has a prototype, [C] (rule R8).
    """

    mean: Float[Array, "C K"]
    valid: Bool[Array, " C"]

    @classmethod
    def none(cls, classes: int, dim: int) -> "Prototypes":
        """The prototypes before round 0: no class has one."""
        return cls(jnp.zeros((classes, dim)), jnp.zeros(classes, bool))

    @classmethod
    def as_received(cls, part: PerClass) -> "Prototypes":
        """The prototypes from the `PerClass` part of a view or an upload."""
        return cls(part.rows, part.held)

    def as_sent(self) -> PerClass:
        """The prototypes as a `PerClass` part of a view or an upload: only existing prototypes count as traffic."""
        return PerClass(self.valid, self.mean)


def class_sums(
    z: Float[Array, "samples K"], y: Int[Array, " samples"], mask: Float[Array, " samples"], classes: int
) -> Float[Array, "C K"]:
    """The sum of the features of each class, [C, K].

    Args:
      z: features.
      y: labels.
      mask: 1 for a sample, 0 for padding.
      classes: C.
    """
    held = jax.nn.one_hot(y, classes) * mask[:, None]
    # Full precision, because the means are later compared and subtracted.
    return jnp.matmul(held.T, z, precision=lax.Precision.HIGHEST)


def class_sums_under(model: Model, extractor: Params, data: ClientData) -> Float[Array, "C K"]:
    """The sum of one client's features under an extractor, for each class."""
    features = cache_features(lambda x: model.features(extractor, x), data)
    return class_sums(features.x, features.y, data.valid, model.classes)


def class_means(sums: Float[Array, "C K"], counts: Float[Array, " C"]) -> Prototypes:
    """Sums divided by counts; a class without samples has no prototype."""
    return Prototypes(sums / jnp.maximum(counts, 1.0)[:, None], counts > 0)


def mean_over_holders(means: Float[Array, "clients C K"], held: Bool[Array, "clients C"]) -> Prototypes:
    """For each class the mean over the clients that hold it, each with equal weight.

    Args:
      means: the clients' means; zeros for a class that a client does not hold.
      held: which clients hold which classes.
    """
    return class_means(jnp.sum(means, axis=0), jnp.sum(held, axis=0, dtype=means.dtype))


def update_prototypes(old: Prototypes, new: Prototypes) -> Prototypes:
    """The prototypes after a round: a class without a new prototype keeps its old one (rule R8)."""
    return Prototypes(jnp.where(new.valid[:, None], new.mean, old.mean), new.valid | old.valid)


def sums_as_sent(model: Model, extractor: Params, data: ClientData) -> PerClass:
    """A client's upload for `pool_prototypes`: class sums under an extractor, and the number of samples per class."""
    return PerClass(data.class_counts, class_sums_under(model, extractor, data))


def finite_classes(uploads: PerClass) -> PerClass:
    """The uploads [clients, C, K], where a class whose row is not finite counts as not held, and is zeros.

    A client that has diverged would otherwise be a part of every mean, and of all that is made of it.
    """
    finite = jnp.all(jnp.isfinite(uploads.rows), axis=2)
    held = jnp.where(finite, uploads.held, jnp.zeros_like(uploads.held))
    return PerClass(held, jnp.where(finite[..., None], uploads.rows, 0.0))


def pool_prototypes(old: Prototypes, uploads: PerClass) -> Prototypes:
    """The prototypes after a round: class means over the samples of all clients together.

    A class without samples keeps its old prototype, and sums that are not finite are left out (rule R8).

    Args:
      old: the prototypes before the round.
      uploads: class sums [clients, C, K] and samples per class [clients, C]; zeros for absent clients.
    """
    counts, sums = (jnp.sum(leaf, axis=0) for leaf in finite_classes(uploads))
    return update_prototypes(old, class_means(sums, counts))


def means_as_samples(means: Float[Array, "N C K"], held: Bool[Array, "N C"], ids: Int[Array, " N"]) -> ClientData:
    """The pairs (mean feature of a class at a client, class), in the form of one client's samples.

    For servers that train on the class means that their clients have uploaded.

    Args:
      means: mean feature of each client and class.
      held: which of these exist.
      ids: number of each client; the pairs are ordered by it, so that their order does not depend on the placement.
    """
    clients, classes = held.shape
    rank = (ids[:, None] * classes + jnp.arange(classes)).reshape(-1)
    index = jnp.argsort(jnp.where(held.reshape(-1), rank, jnp.iinfo(rank.dtype).max))
    x, y = means.reshape(clients * classes, -1), jnp.tile(jnp.arange(classes), clients)
    return ClientData(x, y, index, jnp.sum(held, dtype=jnp.int32), jnp.sum(held, axis=0, dtype=jnp.float32))


def distances(z: Float[Array, "rows K"], points: Float[Array, "C K"]) -> Float[Array, "rows C"]:
    """||z - p|| of every row to every point; the gradient is finite, also at distance zero.

    Not computed as |z|^2 - 2 z p + |p|^2, whose rounding can make the square of a small distance negative.
    """
    return jnp.sqrt(jnp.sum((z[:, None] - points) ** 2, axis=2) + 1e-12)


def l2_normalize(vectors: Float[Array, "rows K"]) -> Float[Array, "rows K"]:
    """Rows of length 1, and rows of zeros as they are; the gradient is finite, also at zero."""
    return vectors * lax.rsqrt(jnp.sum(vectors**2, axis=1, keepdims=True) + 1e-12)


def prototype_contrast(
    z: Float[Array, "batch K"],
    y: Int[Array, " batch"],
    mask: Float[Array, " batch"],
    prototypes: Prototypes,
    *,
    temperature: float | Float[Array, ""],
) -> Float[Array, ""]:
    """Contrast with prototypes, mean over the batch, [] (FedProc, FedCPD; Eq. 5 of pFedCSPC).

    -log softmax, over all prototypes, of the cosine between a feature and the prototype of its own class.

    Args:
      z: features.
      y: labels.
      mask: 1 for a sample, 0 for padding.
      prototypes: one per class; a class without one is left out of the softmax, and its samples contribute zero.
      temperature: tau; the cosines are divided by it.
    """
    similarity = jnp.matmul(l2_normalize(z), l2_normalize(prototypes.mean).T)
    losses = cross_entropies(jnp.where(prototypes.valid, similarity / temperature, -1e9), y)
    return masked_mean(jnp.where(prototypes.valid[y], losses, 0.0), mask)


def centre_loss(
    z: Float[Array, "batch K"],
    y: Int[Array, " batch"],
    mask: Float[Array, " batch"],
    centres: Prototypes,
    *,
    reduction: Reduction = "mse",
) -> Float[Array, ""]:
    """Squared distance of each feature to the centre of its class, mean over the batch, [] (FedProto).

    Samples of a class without a centre contribute zero.

    Args:
      z: features.
      y: labels.
      mask: 1 for a sample, 0 for padding.
      centres: one per class.
      reduction: ``"mse"`` takes the mean over the K features, ``"mean_l2"`` the sum over them.
    """
    squares = (z - centres.mean[y]) ** 2
    distance = jnp.mean(squares, axis=1) if reduction == "mse" else jnp.sum(squares, axis=1)
    return masked_mean(jnp.where(centres.valid[y], distance, 0.0), mask)
