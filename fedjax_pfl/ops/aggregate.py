"""Rules by which a server combines the uploads of its clients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.tree import by_row


def weighted_mean(stacked: PyTree[Float[Array, "K ..."]], weight: Float[Array, " K"]) -> PyTree[Float[Array, "..."]]:
    """sum_k weight_k x_k / sum_k weight_k for every leaf, [K, ...] -> [...]; zeros if all weights are 0."""
    share = weight / jnp.maximum(jnp.sum(weight), 1e-12)
    # On accelerators, layers may multiply at reduced precision; parameters would lose the small changes of a round.
    return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, axes=1, precision=lax.Precision.HIGHEST), stacked)


def coordinate_median(
    stacked: PyTree[Float[Array, "K ..."]], weight: Float[Array, " K"]
) -> PyTree[Float[Array, "..."]]:
    """The unweighted median of the rows with a weight above 0, coordinate by coordinate; zeros if there are none.

    NaN counts as the largest value.

    Reference:
      D. Yin, Y. Chen, K. Ramchandran, P. Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical
      Rates. ICML 2018. arXiv:1803.01498.
    """
    present = weight > 0
    number = jnp.sum(present, dtype=jnp.int32)
    low, high = jnp.maximum(number - 1, 0) // 2, number // 2

    def median(leaf: Float[Array, "K ..."]) -> Float[Array, "..."]:
        ordered = jnp.sort(jnp.where(by_row(present, leaf) & ~jnp.isnan(leaf), leaf, jnp.inf), axis=0)
        middle = (jnp.take(ordered, low, axis=0) + jnp.take(ordered, high, axis=0)) / 2
        return jnp.where(number > 0, middle, 0.0)

    return jax.tree.map(median, stacked)


def interpolate(
    old: PyTree[Float[Array, "..."]], new: PyTree[Float[Array, "..."]], share: float | Float[Array, ""]
) -> PyTree[Float[Array, "..."]]:
    """(1 - share) old + share new for parameters; running statistics are taken from ``new``.

    A share of 0 gives the old parameters, and a share of 1 the new ones, bit for bit, if both are finite. It may be
    larger than 1.
    """

    def leaf(path: tuple, old: Array, new: Array) -> Array:
        return new if is_statistic(path) else (1.0 - share) * old + share * new

    return jax.tree.map_with_path(leaf, old, new)


Combine = Callable[[PyTree, Float[Array, " K"]], PyTree]
"""Stacked uploads [K, ...], weights [K] -> combined [...]: how a server combines its participants' parameters."""
