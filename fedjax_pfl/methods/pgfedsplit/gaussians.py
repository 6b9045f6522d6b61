"""How the clients' prototypes of a class are distributed, and features drawn from it (PGFedSplit, Eqs. 4, 15-17)."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import ClientData, Count
from fedjax_pfl.method import PerClass
from fedjax_pfl.ops.matrices import map_matrices
from fedjax_pfl.ops.prototypes import Prototypes, class_means, update_prototypes
from fedjax_pfl.ops.training import phase_key

Covariance = Literal["diagonal", "full"]
Scale = Literal["max", "proportion", "mean", "one"]


class Gaussians(NamedTuple):
    """How the clients' prototypes of a class are distributed.

    Attributes:
      prototypes: p_k, the mean over the clients that hold the class.
      spread: a root of Sigma_k: the standard deviations, [C, K], or R with R' R = Sigma_k, [C, K, K]; None if unused.
    """

    prototypes: Prototypes
    spread: Float[Array, "C ..."] | None

    @classmethod
    def none(cls, classes: int, dim: int, covariance: Covariance | None) -> "Gaussians":
        """Those before round 0; no spread is kept of the covariance None."""
        prototypes = Prototypes.none(classes, dim)
        shape = (classes, dim, dim) if covariance == "full" else (classes, dim)
        return cls(prototypes, None if covariance is None else jnp.zeros(shape))


def add_synthetic(
    key: Key[Array, ""], features: ClientData, gaussians: Gaussians, *, r: float, scale: Scale
) -> ClientData:
    """A client's features, followed by ceil(r / (1 - r) n_i) synthetic ones (Eqs. 15-17); none before any prototype.

    The class of a synthetic feature is drawn from the client's label shares among the classes that have a prototype,
    the feature from Normal(p_k, gamma_ik^2 Sigma_k). A draw depends on the key and its number alone.

    Args:
      key: the client's key of this round.
      features: the client's samples under the received extractor, as :func:`cache_features` leaves them.
      gaussians: of each class.
      r: share of synthetic features.
      scale: gamma_ik.
    """
    (means, known), spread = gaussians
    assert spread is not None
    counts = features.class_counts
    real = features.count
    # For each possible n_i: single precision, on the device, would round some of them up once more.
    wanted = np.ceil(r / (1 - r) * np.arange(features.capacity + 1) - 1e-6).astype(np.int32)
    share = counts / jnp.maximum(jnp.sum(counts), 1.0)
    unit = {"max": jnp.max(share), "proportion": jnp.ones(()), "mean": jnp.mean(share)}
    gamma = jnp.ones_like(share) if scale == "one" else share / jnp.maximum(unit[scale], 1e-12)
    drawable = jnp.where(known, share, 0.0)
    capacity = features.capacity + int(wanted[-1])

    def with_synthetic(count: Count) -> Count:
        return count + (wanted if isinstance(count, np.integer) else jnp.asarray(wanted))[count]

    longer = features._replace(
        index=jnp.pad(features.index, (0, capacity - features.capacity)),
        count=real + jnp.where(jnp.any(drawable > 0), jnp.asarray(wanted)[real], 0),
        most=features.most if features.most is None else with_synthetic(features.most),
    )
    key_class, key_noise = jax.random.split(phase_key(key, "synthetic"))

    def keys(key: Key[Array, ""], positions: Int[Array, " batch"]) -> Key[Array, " batch"]:
        return jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.maximum(positions - real, 0))

    def label(z: Array, positions: Int[Array, " batch"]) -> Int[Array, " batch"]:
        del z
        drawn = jax.vmap(lambda key: jax.random.categorical(key, jnp.log(drawable)))(keys(key_class, positions))
        return jnp.where(positions < real, longer.labels[positions], drawn)

    y = longer.map(label)

    def feature(z: Array, positions: Int[Array, " batch"]) -> Float[Array, "batch K"]:
        k = y[positions]
        noise = jax.vmap(lambda key: jax.random.normal(key, means.shape[1:]))(keys(key_noise, positions))
        apart = noise * spread[k] if spread.ndim == 2 else jnp.einsum("bi,bij->bj", noise, spread[k])
        return jnp.where((positions < real)[:, None], z, means[k] + gamma[k][:, None] * apart)

    # With full covariance a block gathers a matrix for each of its samples.
    x = longer.map(feature, batch_size=128 if spread.ndim == 2 else 8)
    return longer._replace(
        x=x,
        y=y,
        index=jnp.arange(capacity, dtype=jnp.int32),
        class_counts=jnp.zeros_like(counts).at[y].add(longer.valid),
    )


def update_gaussians(old: Gaussians, uploaded: PerClass, ids: Int[Array, " K"]) -> Gaussians:
    """p_k and the root of Sigma_k over the clients that hold class k, all alike (Eq. 4); absent classes keep theirs.

    Args:
      old: the last ones.
      uploaded: class sums, [clients, C, K], with their counts.
      ids: of the clients.
    """
    counts, sums = uploaded
    local, valid = jax.vmap(class_means)(sums, counts)
    held = valid.astype(jnp.float32)
    holders = jnp.sum(held, axis=0)
    new = Prototypes(jnp.sum(local, axis=0) / jnp.maximum(holders, 1.0)[:, None], holders > 0)
    prototypes = update_prototypes(old.prototypes, new)
    if old.spread is None:
        return Gaussians(prototypes, None)
    # From the deviations, never as a difference of squares.
    deviations = held[..., None] * (local - new.mean) / jnp.sqrt(jnp.maximum(holders, 1.0))[:, None]
    if old.spread.ndim == 2:
        spread = jnp.sqrt(jnp.sum(deviations**2, axis=0))
    else:
        # QR depends on the order of rows; sort by client id.
        spread = _root_of_covariance(deviations[jnp.argsort(ids)])
    keep = new.valid.reshape(-1, *(1,) * (spread.ndim - 1))
    return Gaussians(prototypes, jnp.where(keep, spread, old.spread))


def _root_of_covariance(deviations: Float[Array, "clients C K"]) -> Float[Array, "C K K"]:
    """R with R' R = D' D, the covariance of a class: as many rows as features, however many clients there are.

    QR of D itself; a Cholesky factor of the singular D' D would be NaN.
    """
    roots = map_matrices(partial(jnp.linalg.qr, mode="r"), deviations.swapaxes(0, 1))
    return jnp.pad(roots, ((0, 0), (0, deviations.shape[2] - roots.shape[1]), (0, 0)))
