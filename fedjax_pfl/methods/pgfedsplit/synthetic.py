"""Features drawn from the Gaussians of the classes, to train a head on (GAU; PGFedSplit, Eqs. 15-17)."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import ClientData, Count
from fedjax_pfl.method import Diagnostics
from fedjax_pfl.methods.pgfedsplit.gaussians import Gaussians
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import cross_entropies
from fedjax_pfl.ops.training import phase_key

Scale = Literal["max", "proportion", "mean", "one"]


def add_synthetic(
    key: Key[Array, ""], features: ClientData, gaussians: Gaussians, *, r: float, scale: Scale
) -> ClientData:
    """A client's features, followed by ceil(r / (1 - r) n_i) synthetic ones (Eqs. 15-17); none before any prototype.

    The class of a synthetic feature is drawn from the client's label shares among the classes that have a prototype;
    the feature is drawn from Normal(p_k, gamma_ik^2 Sigma_k). A draw depends only on the key and its number.

    Args:
      key: the client's key of this round.
      features: the client's samples under the received extractor, as :func:`cache_features` leaves them.
      gaussians: the Gaussian of each class.
      r: share of synthetic features.
      scale: how gamma_ik follows from the label shares.
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


def synthetic_ratio(model: Model, head: Params, mixed: ClientData, real: Count) -> Diagnostics:
    """A diagnostic: how strongly synthetic features pull at a head, relative to real ones: ||gradient|| / ||gradient||.

    It is over all features of a client, since a mini-batch may have few of one kind.

    Args:
      model: classifies features with a head.
      head: phi_i, before it is trained on them.
      mixed: features from `add_synthetic`.
      real: number of features of real samples; they come first.
    """

    def norm(counted: Float[Array, " capacity"]) -> Float[Array, ""]:
        def loss(phi: Params) -> Float[Array, ""]:
            return jnp.sum(counted * cross_entropies(model.classify(phi, mixed.x), mixed.y))

        return optax.tree.norm(jax.grad(loss)(head))

    of_samples = (jnp.arange(mixed.capacity) < real).astype(jnp.float32)
    return {"gradient_ratio_r": norm(mixed.valid - of_samples) / jnp.maximum(norm(of_samples), 1e-12)}
