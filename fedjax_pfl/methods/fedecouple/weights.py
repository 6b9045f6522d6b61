"""The weights with which FedeCouple's server averages the clients' models."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from fedjax_pfl.models.norm import without_statistics


def cosine_weights(
    stacked: PyTree[Float[Array, "K ..."]], mean: PyTree[Float[Array, "..."]], present: Bool[Array, " K"]
) -> Float[Array, " K"]:
    """Weights in proportion to cos(w_k, w_avg) over the concatenated leaves (Eq. 7); they sum to 1.

    Running statistics are not part of the cosine: a variance can be larger than all parameters together.

    Args:
      stacked: the uploads w_k.
      mean: w_avg.
      present: which uploads count; the others get weight 0. A present upload gets a similarity of at least 1e-6. An
        upload with a value that is not a number gets 1e-6, too: a robust rule has to see which uploads are present.
    """
    stacked, mean = without_statistics(stacked), without_statistics(mean)
    dots = jax.tree.map(lambda w, mean: jnp.sum((w * mean).reshape(len(present), -1), axis=1), stacked, mean)
    squares = jax.tree.map(lambda w: jnp.sum((w * w).reshape(len(present), -1), axis=1), stacked)
    norms = jnp.sqrt(jax.tree.reduce(jnp.add, squares) + 1e-12)
    mean_norm = jnp.sqrt(jax.tree.reduce(jnp.add, jax.tree.map(lambda mean: jnp.sum(mean * mean), mean)) + 1e-12)
    cosine = jax.tree.reduce(jnp.add, dots) / (norms * mean_norm)
    cosine = jnp.where(jnp.isfinite(cosine), cosine, 0.0)
    similarity = jnp.where(present, jnp.maximum(cosine, 1e-6), 0.0)
    return similarity / jnp.maximum(jnp.sum(similarity), 1e-12)
