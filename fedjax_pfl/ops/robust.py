"""Robust aggregation rules, for parameters of which some senders may be malicious; ``RULES`` lists all rules."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from fedjax_pfl.models.norm import without_statistics
from fedjax_pfl.ops.aggregate import coordinate_median, weighted_mean
from fedjax_pfl.ops.tree import by_row, finite_rows

Uploads = PyTree[Float[Array, "K ..."]]
Combined = PyTree[Float[Array, "..."]]


def whole_part(share: float, number: int) -> int:
    """floor(share number), without float error: 0.29 of 100 is 29."""
    return math.floor(round(share * number, 9))


def trimmed_mean(stacked: Uploads, weight: Float[Array, " K"], *, trim: float = 0.2) -> Combined:
    """The unweighted mean without the extremes, coordinate by coordinate; zeros if no row is present.

    From the n rows with a weight above 0, the floor(trim n) smallest and the floor(trim n) largest values are removed:
    none if there are fewer than 1 / trim rows. More NaN than are removed make the result infinite.

    Args:
      stacked: the uploads.
      weight: 0 for an absent row; other values do not matter.
      trim: beta, below 1/2. NaN counts as one of the largest values.

    Reference:
      D. Yin, Y. Chen, K. Ramchandran, P. Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical
      Rates. ICML 2018. arXiv:1803.01498.
    """
    present = weight > 0
    number = jnp.sum(present, dtype=jnp.int32)
    cut = jnp.array([whole_part(trim, rows) for rows in range(len(weight) + 1)])[number]
    rank = jnp.arange(len(weight))
    kept = (rank >= cut) & (rank < number - cut)

    def mean(leaf: Float[Array, "K ..."]) -> Float[Array, "..."]:
        ordered = jnp.sort(jnp.where(by_row(present, leaf) & ~jnp.isnan(leaf), leaf, jnp.inf), axis=0)
        return jnp.sum(jnp.where(by_row(kept, leaf), ordered, 0.0), axis=0) / _count(number - 2 * cut, leaf)

    return jax.tree.map(mean, stacked)


def krum(stacked: Uploads, weight: Float[Array, " K"], *, byzantine: float = 0.2) -> Combined:
    """Krum: the row that is closest to its nearest neighbours; zeros if no row is present.

    All parameters of a row form one vector. The score of a row is the sum of its squared distances to the n - f - 2
    nearest other rows (at least one), where n is the number of rows with a weight above 0 and f = floor(byzantine n).
    Rows with a value that is not finite are left out, unless all have one. f is still a share of all rows, and n counts
    those that are left, because the malicious ones may be among them.
    The row with the lowest score is returned. Rows with equal scores, such as two rows that are each other's only
    neighbour, are averaged; the paper takes the first of them, which would depend on the order of the rows. Running
    statistics are left out of the distances, because a variance can be larger than all parameters together; those of
    the chosen row are returned with it.

    Args:
      stacked: the uploads; distances between parameters equal distances between updates.
      weight: 0 for an absent row; other values do not matter.
      byzantine: the share of the rows that may be malicious; the paper's guarantee needs 2 f + 2 < n.

    Reference:
      P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer. Machine Learning with Adversaries: Byzantine Tolerant
      Gradient Descent. NeurIPS 2017. arXiv:1703.02757.
    """
    return _mean_of_best(stacked, weight, byzantine, alone=True)


def multi_krum(stacked: Uploads, weight: Float[Array, " K"], *, byzantine: float = 0.2) -> Combined:
    """Multi-Krum: the mean of the m = n - f rows with the lowest scores; arguments and reference as in :func:`krum`.

    At least one row; all of them if there are fewer than 1 / byzantine. The paper leaves m open.
    """
    return _mean_of_best(stacked, weight, byzantine, alone=False)


def _mean_of_best(stacked: Uploads, weight: Float[Array, " K"], byzantine: float, *, alone: bool) -> Combined:
    present = weight > 0
    senders = jnp.sum(present, dtype=jnp.int32)
    byzantine_rows = jnp.array([whole_part(byzantine, rows) for rows in range(len(weight) + 1)])[senders]
    # A row with a NaN or infinite value is never chosen, unless all rows have one.
    finite = finite_rows(stacked) & present
    present = jnp.where(jnp.any(finite), finite, present)
    weight = jnp.where(present, weight, 0.0)
    number = jnp.sum(present, dtype=jnp.int32)
    nearest = jnp.sort(_squared_distances(stacked, weight), axis=1)
    counts = jnp.arange(len(weight)) < jnp.maximum(number - byzantine_rows - 2, 1)
    score = jnp.where(present, jnp.sum(jnp.where(counts, nearest, 0.0), axis=1), jnp.inf)
    worst_chosen = jnp.sort(score)[0 if alone else jnp.maximum(number - byzantine_rows - 1, 0)]
    chosen = present & (score <= worst_chosen)

    def mean(leaf: Float[Array, "K ..."]) -> Float[Array, "..."]:
        # Not a product with 0: a row that is not chosen may hold anything.
        return jnp.sum(jnp.where(by_row(chosen, leaf), leaf, 0.0), axis=0) / _count(jnp.sum(chosen), leaf)

    return jax.tree.map(mean, stacked)


def _squared_distances(stacked: Uploads, weight: Float[Array, " K"]) -> Float[Array, "K K"]:
    """Squared distances between the parameters of any two rows; infinite on the diagonal, for absent rows and NaN."""
    stacked = without_statistics(stacked)
    # After subtracting the median, the rows are about as long as their distances, so that the products lose few digits.
    # With the mean instead, a single row could make all rows long.
    centre = coordinate_median(stacked, weight)

    def product(leaf: Float[Array, "K ..."], centre: Float[Array, "..."]) -> Float[Array, "K K"]:
        row = (leaf - centre).reshape(len(weight), -1)
        return jnp.matmul(row, row.T, precision=lax.Precision.HIGHEST)

    products = jax.tree.reduce(jnp.add, jax.tree.map(product, stacked, centre))
    squares = jnp.diagonal(products)
    found = jnp.maximum(squares[:, None] + squares - (products + products.T), 0.0)
    known = (weight > 0) & ~jnp.eye(len(weight), dtype=bool) & ~jnp.isnan(found)
    return jnp.where(known, found, jnp.inf)


def _count(number: Int[Array, ""], leaf: Float[Array, "K ..."]) -> Float[Array, ""]:
    return jnp.maximum(number, 1).astype(leaf.dtype)


RULES: dict[str, Callable[..., Combined]] = {
    "mean": weighted_mean,
    "median": coordinate_median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
}
"""``aggregation.rule`` -> (stacked uploads, weights) -> combined; the other fields are its keyword arguments."""
