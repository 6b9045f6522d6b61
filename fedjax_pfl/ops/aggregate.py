"""How a server combines what its clients upload."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def weighted_mean(stacked: PyTree[Float[Array, "K ..."]], weight: Float[Array, " K"]) -> PyTree[Float[Array, "..."]]:
    """sum_k weight_k x_k / sum_k weight_k for every leaf; zeros where all weights are 0."""
    share = weight / jnp.maximum(jnp.sum(weight), 1e-12)
    return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, axes=1), stacked)
