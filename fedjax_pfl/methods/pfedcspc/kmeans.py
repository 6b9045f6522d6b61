"""K-means of each class's features on a client, with masks for padding and for clusters that stay empty."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key


class Clusters(NamedTuple):
    """The features of each class, in J groups.

    Attributes:
      centres: the mean of each group, [C, J, d]; nothing may be read where ``size`` is 0.
      member: the group of each sample, c J + j; C J for padding, [samples].
      size: samples in each group, [C, J]; 0 for a group too many for the different samples, or one that lost its last.
    """

    centres: Float[Array, "C J d"]
    member: Int[Array, " samples"]
    size: Float[Array, "C J"]


def kmeans(
    key: Key[Array, ""],
    z: Float[Array, "samples d"],
    y: Int[Array, " samples"],
    mask: Float[Array, " samples"],
    *,
    classes: int,
    clusters: int,
    steps: int,
) -> Clusters:
    """K-means++ and a fixed number of Lloyd's steps, for all classes at once: a sample meets its class's centres only.

    Args:
      key: the randomness of the first centres.
      z: features.
      y: labels.
      mask: 1 for a sample, 0 for padding.
      classes: C.
      clusters: J, groups per class.
      steps: Lloyd's steps; a group that loses its last sample keeps its centre.

    Reference:
      D. Arthur, S. Vassilvitskii. k-means++: The Advantages of Careful Seeding. SODA 2007. S. Lloyd. Least Squares
      Quantization in PCM. IEEE Transactions on Information Theory, 1982.
    """
    centres, exists = _first_centres(key, z, y, mask, classes, clusters)

    def assign(centres: Float[Array, "C J d"]) -> Int[Array, " samples"]:
        distance = jnp.sum((z[:, None, :] - centres[y]) ** 2, axis=-1)
        nearest = jnp.argmin(jnp.where(exists[y], distance, jnp.inf), axis=1)
        return jnp.where(mask > 0, y * clusters + nearest, classes * clusters)

    def lloyd(_: Int[Array, ""], centres: Float[Array, "C J d"]) -> Float[Array, "C J d"]:
        groups = jax.nn.one_hot(assign(centres), classes * clusters)
        size = jnp.sum(groups, axis=0).reshape(classes, clusters, 1)
        means = _sums(groups, z).reshape(centres.shape) / jnp.maximum(size, 1.0)
        return jnp.where(size > 0, means, centres)

    centres = lax.fori_loop(0, steps, lloyd, centres)
    member = assign(centres)
    size = jnp.sum(jax.nn.one_hot(member, classes * clusters), axis=0)
    return Clusters(centres, member, size.reshape(classes, clusters))


def sample_means(
    key: Key[Array, ""],
    z: Float[Array, "samples d"],
    clusters: Clusters,
    *,
    repeats: int,
    share: float | Float[Array, ""],
) -> Float[Array, "C J R d"]:
    """The mean of a random share of each group's samples, several times (pFedCSPC, Eq. 9); zeros for an empty group.

    Args:
      key: the randomness of the draws.
      z: the features that were clustered.
      clusters: their groups.
      repeats: R, means per group.
      share: r; max(1, ceil(r n)) of a group's n samples are drawn without replacement.
    """
    size = clusters.size.reshape(-1)
    start = jnp.append(jnp.cumsum(size) - size, 0.0)  # the padding, last in order, is never chosen
    # Float rounding must not make 0.7 * 10 a little more than 7.
    wanted = jnp.append(jnp.maximum(1.0, jnp.ceil(share * size - 1e-3)), 0.0)
    groups = jax.nn.one_hot(clusters.member, len(size))

    def one(number: Int[Array, ""]) -> Float[Array, "CJ d"]:
        draws = jax.random.uniform(jax.random.fold_in(key, number), clusters.member.shape)
        order = jnp.lexsort((draws, clusters.member))
        place = jnp.zeros(len(order)).at[order].set(jnp.arange(len(order), dtype=jnp.float32))
        chosen = place - start[clusters.member] < wanted[clusters.member]
        return _sums(jnp.where(chosen[:, None], groups, 0.0), z) / jnp.maximum(wanted[:-1], 1.0)[:, None]

    means = jnp.swapaxes(lax.map(one, jnp.arange(repeats)), 0, 1)
    return means.reshape(*clusters.size.shape, repeats, z.shape[-1])


def _first_centres(
    key: Key[Array, ""],
    z: Float[Array, "samples d"],
    y: Int[Array, " samples"],
    mask: Float[Array, " samples"],
    classes: int,
    clusters: int,
) -> tuple[Float[Array, "C J d"], Bool[Array, "C J"]]:
    """Greedy k-means++: each centre is the best of a few samples, drawn by their squared distance to the nearest.

    As in scikit-learn, 2 + log J candidates; the best one leaves the smallest sum of squared distances.
    """
    candidates = 2 + int(math.log(clusters))
    own = (y[None, :] == jnp.arange(classes)[:, None]) & (mask > 0)
    odds = jnp.ones(len(z))
    nearest = jnp.full(len(z), jnp.inf)
    centres, exists = [], []
    for number in range(clusters):
        # Gumbel-max trick, one draw per class.
        noise = jax.random.gumbel(jax.random.fold_in(key, number), (len(z), candidates))
        score = jnp.where(own[..., None], jnp.log(odds)[:, None] + noise, -jnp.inf)
        drawn, found = z[jnp.argmax(score, axis=1)], jnp.max(score, axis=(1, 2)) > -jnp.inf
        distance = jnp.sum((z[:, None, :] - drawn[y]) ** 2, axis=-1)
        left = jnp.where(found[y][:, None], jnp.minimum(nearest[:, None], distance), nearest[:, None])
        best = jnp.argmin(_sums(own.T.astype(z.dtype), jnp.where(mask[:, None] > 0, left, 0.0)), axis=1)
        centres.append(jnp.take_along_axis(drawn, best[:, None, None], axis=1)[:, 0])
        exists.append(found)
        odds = nearest = jnp.take_along_axis(left, best[y][:, None], axis=1)[:, 0]
    return jnp.stack(centres, axis=1), jnp.stack(exists, axis=1)


def _sums(groups: Float[Array, "samples groups"], z: Float[Array, "samples d"]) -> Float[Array, "groups d"]:
    # Full precision: the means are compared and subtracted, not only multiplied by weights.
    return jnp.matmul(groups.T, z, precision=lax.Precision.HIGHEST)
