"""CPM: a client's features in prototypes, several per class, and the means of all clients' (pFedCSPC)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Shaped

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import PerClass
from fedjax_pfl.methods.pfedcspc.kmeans import kmeans, sample_means
from fedjax_pfl.ops.prototypes import Prototypes, mean_over_holders
from fedjax_pfl.ops.training import Scalar, cache_features, phase_key


class Received(NamedTuple):
    """The prototypes of K clients, as they have arrived.

    Attributes:
      u: the points, M = J R places per class, [K, C, M, d].
      valid: which of these hold one, [K, C, M].
      held: the client's samples per class, or flags where these are not sent, [K, C].
    """

    u: Float[Array, "K C M d"]
    valid: Bool[Array, "K C M"]
    held: Shaped[Array, "K C"]


class ClusterPrototypes(NamedTuple):
    """How a client makes prototypes of its features (Eqs. 8, 9).

    Attributes:
      clusters: j, clusters per class.
      repeats: n_repeat, prototypes per cluster.
      share: r, the share of a cluster's samples in a prototype.
      steps: Lloyd's steps.
      counts: whether the client sends its number of samples per class with them, or just which classes it holds.
    """

    clusters: int
    repeats: int
    share: Scalar
    steps: int
    counts: bool

    @property
    def places(self) -> int:
        """M, the most prototypes of a class."""
        return self.clusters * self.repeats

    def prototypes_of(self, key: Key[Array, ""], encode: Callable[[Array], Array], data: ClientData) -> PerClass:
        """U_k of one client's samples before augmentation: means [C, J, R, d], and which clusters have samples, [C, J].

        Args:
          key: the client's key of this round.
          encode: x -> f, the trained encoder.
          data: the client's samples.
        """
        features = cache_features(encode, data if data.original is None else data.original)
        classes = len(features.class_counts)
        key_centres, key_draws = jax.random.split(phase_key(key, "prototypes"))
        options = {"classes": classes, "clusters": self.clusters, "steps": self.steps}
        groups = kmeans(key_centres, features.x, features.y, features.valid, **options)
        means = sample_means(key_draws, features.x, groups, repeats=self.repeats, share=self.share)
        held = features.class_counts if self.counts else features.class_counts > 0
        return PerClass(held, (means, groups.size > 0))

    def received(self, uploads: PerClass) -> Received:
        """What the uploads of K clients hold."""
        means, exists = uploads.rows
        valid = jnp.repeat(exists & uploads.held.astype(bool)[..., None], self.repeats, axis=2)
        return Received(means.reshape(*means.shape[:2], -1, means.shape[-1]), valid, uploads.held)


def mean_over_clients(points: Float[Array, "K C M d"], valid: Bool[Array, "K C M"]) -> Prototypes:
    """The mean over the clients that hold a class of each client's mean (Eqs. 14, 16, which divide by all clients).

    Args:
      points: M places per client and class.
      valid: which of these hold one.
    """
    number = jnp.sum(valid, axis=2, dtype=points.dtype)
    own = jnp.sum(jnp.where(valid[..., None], points, 0.0), axis=2) / jnp.maximum(number, 1.0)[..., None]
    return mean_over_holders(own, number > 0)
