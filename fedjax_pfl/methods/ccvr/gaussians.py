"""The features of each class as a Gaussian: of one client, of all clients, and draws from it (CCVR, section 4)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.matrices import map_matrices
from fedjax_pfl.ops.prototypes import class_means, class_sums
from fedjax_pfl.ops.training import cache_features

JITTER = 1e-4  # on the diagonal of a covariance, relative to its mean
EXACT = lax.Precision.HIGHEST


class Gaussians(NamedTuple):
    """The distribution of the features of each class.

    Attributes:
      mean: means, [C, K].
      covariance: covariances with Bessel's correction, [C, K, K].
      size: number of features behind each Gaussian, [C].
    """

    mean: Float[Array, "C K"]
    covariance: Float[Array, "C K K"]
    size: Float[Array, " C"]


class Moments(NamedTuple):
    """What a client sends for each class: the mean of its features, and the upper half of their covariance, by rows."""

    mean: Float[Array, "C K"]
    covariance: Float[Array, "C triangle"]


def class_gaussians(model: Model, extractor: Params, data: ClientData) -> Gaussians:
    """The Gaussians of one client under an extractor; the covariance of fewer than two samples is zero."""
    z = cache_features(lambda x: model.features(extractor, x), data)
    count = data.class_counts
    mean = class_means(class_sums(z.x, z.y, data.valid, model.classes), count).mean

    def covariance(c: Array) -> Float[Array, "K K"]:
        centred = (z.x - mean[c]) * jnp.where(z.y == c, data.valid, 0.0)[:, None]
        return jnp.matmul(centred.T, centred, precision=EXACT) / jnp.maximum(count[c] - 1.0, 1.0)

    # One class after the other: all at once would hold C copies of the features.
    return Gaussians(mean, lax.map(covariance, jnp.arange(model.classes)), count)


def pool(counts: Float[Array, "N C"], means: Float[Array, "N C K"], upper: Float[Array, "N C triangle"]) -> Gaussians:
    """The Gaussians of the features of N clients together, from what each client has sent.

    A class with a single sample gets the covariance within classes, pooled over all classes.

    Args:
      counts: number of samples of each client and class; where it is 0, the other arguments must be finite.
      means: means of their features.
      upper: the upper halves of their covariances, row by row.
    """
    count = jnp.sum(counts, axis=0)
    mean = jnp.einsum("nc,nck->ck", counts, means, precision=EXACT) / jnp.maximum(count, 1.0)[:, None]
    apart = means - mean
    # Sums of squares about the pooled mean, between the clients and within them; never a difference of squares.
    between = jnp.einsum("nci,ncj->cij", counts[..., None] * apart, apart, precision=EXACT)
    half = jnp.einsum("nc,nct->ct", jnp.maximum(counts - 1.0, 0.0), upper, precision=EXACT)
    rows, columns = jnp.triu_indices(means.shape[-1])
    within = jnp.zeros_like(between).at[:, rows, columns].set(half).at[:, columns, rows].set(half)
    squares, freedom = between + within, jnp.maximum(count - 1.0, 0.0)
    of_any_class = jnp.sum(squares, axis=0) / jnp.maximum(jnp.sum(freedom), 1.0)
    of_class = squares / jnp.maximum(freedom, 1.0)[:, None, None]
    return Gaussians(mean, jnp.where((count > 1)[:, None, None], of_class, of_any_class), count)


def draw(key: Key[Array, ""], gaussians: Gaussians, number: int) -> ClientData:
    """Draws ``number`` features of each class that has a Gaussian, in the form of a client's samples."""
    mean, covariance, size = gaussians
    classes, dim = mean.shape
    variance = jnp.trace(covariance, axis1=1, axis2=2)[:, None, None] / dim

    def root(jitter: float) -> Float[Array, "C K K"]:
        return map_matrices(jnp.linalg.cholesky, covariance + (jitter * variance + 1e-12) * jnp.eye(dim))

    # Of a few samples with thousands of features, rounding may outweigh the usual jitter, and the root is NaN.
    usual = root(JITTER)
    usable = jnp.all(jnp.isfinite(usual), axis=(1, 2), keepdims=True)
    noise = jax.random.normal(key, (classes, number, dim))
    apart = jnp.einsum("cij,cmj->cmi", jnp.where(usable, usual, root(100 * JITTER)), noise, precision=EXACT)
    exists = size > 0
    y = jnp.repeat(jnp.arange(classes, dtype=jnp.int32), number)
    return ClientData(
        x=(mean[:, None] + apart).reshape(-1, dim),
        y=y,
        index=jnp.argsort(~exists[y], stable=True),
        count=number * jnp.sum(exists, dtype=jnp.int32),
        class_counts=number * exists.astype(jnp.float32),
    )
