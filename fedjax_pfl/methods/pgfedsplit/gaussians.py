"""The distribution of the clients' prototypes of each class (PGFedSplit, Eq. 4)."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedjax_pfl.method import PerClass
from fedjax_pfl.ops.matrices import map_matrices
from fedjax_pfl.ops.prototypes import Prototypes, class_means, finite_classes, mean_over_holders, update_prototypes
from fedjax_pfl.ops.tree import by_row

Covariance = Literal["diagonal", "full"]


class Gaussians(NamedTuple):
    """The distribution of the clients' prototypes of each class.

    Attributes:
      prototypes: p_k, the mean over the clients that hold the class.
      spread: a root of Sigma_k: the standard deviations, [C, K], or R with R' R = Sigma_k, [C, K, K]; None if unused.
    """

    prototypes: Prototypes
    spread: Float[Array, "C ..."] | None

    @classmethod
    def none(cls, classes: int, dim: int, covariance: Covariance | None) -> "Gaussians":
        """The state before round 0; no spread is kept if the covariance is None."""
        prototypes = Prototypes.none(classes, dim)
        shape = (classes, dim, dim) if covariance == "full" else (classes, dim)
        return cls(prototypes, None if covariance is None else jnp.zeros(shape))


def update_gaussians(old: Gaussians, uploaded: PerClass, ids: Int[Array, " clients"]) -> Gaussians:
    """p_k and the root of Sigma_k over the clients that hold class k, unweighted (Eq. 4); absent classes keep theirs.

    Sigma_k is the dispersion of these clients' prototypes, and so 0 with a single one. The paper speaks of embeddings,
    whose dispersion is larger, but Algorithm 1 sends up prototypes alone. Sums that are not finite are left out.

    Args:
      old: the previous Gaussians.
      uploaded: class sums, [clients, C, K], with their counts.
      ids: numbers of the clients.
    """
    counts, sums = finite_classes(uploaded)
    local, valid = jax.vmap(class_means)(sums, counts)
    new = mean_over_holders(local, valid)
    prototypes = update_prototypes(old.prototypes, new)
    if old.spread is None:
        return Gaussians(prototypes, None)
    held = valid.astype(jnp.float32)
    holders = jnp.sum(held, axis=0)
    # From the deviations, never as a difference of squares.
    deviations = held[..., None] * (local - new.mean) / jnp.sqrt(jnp.maximum(holders, 1.0))[:, None]
    if old.spread.ndim == 2:
        spread = jnp.sqrt(jnp.sum(deviations**2, axis=0))
    else:
        # QR depends on the order of rows; sort by client id.
        spread = _root_of_covariance(deviations[jnp.argsort(ids)])
    return Gaussians(prototypes, jnp.where(by_row(new.valid, spread), spread, old.spread))


def _root_of_covariance(deviations: Float[Array, "clients C K"]) -> Float[Array, "C K K"]:
    """R with R' R = D' D, the covariance of a class: as many rows as features, whatever the number of clients.

    It is from a QR decomposition of D itself; a Cholesky factor of the singular D' D would be NaN.
    """
    roots = map_matrices(partial(jnp.linalg.qr, mode="r"), deviations.swapaxes(0, 1))
    return jnp.pad(roots, ((0, 0), (0, deviations.shape[2] - roots.shape[1]), (0, 0)))
