"""How a server combines what its clients upload."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Bool, Float, Int, PyTree

from fedjax_pfl.models.norm import is_statistic, without_statistics
from fedjax_pfl.ops.tree import by_row


def weighted_mean(stacked: PyTree[Float[Array, "K ..."]], weight: Float[Array, " K"]) -> PyTree[Float[Array, "..."]]:
    """sum_k weight_k x_k / sum_k weight_k for every leaf; zeros where all weights are 0."""
    share = weight / jnp.maximum(jnp.sum(weight), 1e-12)
    # On accelerators, products of layers may round what they multiply: parameters would lose what a round has changed.
    return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, axes=1, precision=lax.Precision.HIGHEST), stacked)


def coordinate_median(
    stacked: PyTree[Float[Array, "K ..."]], weight: Float[Array, " K"]
) -> PyTree[Float[Array, "..."]]:
    """The unweighted median of the rows with a weight above 0, coordinate by coordinate; zeros where there is none.

    A value that is no number counts as the largest.

    Reference:
      D. Yin, Y. Chen, K. Ramchandran, P. Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical
      Rates. ICML 2018. arXiv:1803.01498.
    """
    present = weight > 0
    number = jnp.sum(present, dtype=jnp.int32)
    low, high = jnp.maximum(number - 1, 0) // 2, number // 2

    def median(leaf: Float[Array, "K ..."]) -> Float[Array, "..."]:
        ordered = jnp.sort(jnp.where(by_row(present, leaf) & ~jnp.isnan(leaf), leaf, jnp.inf), axis=0)
        middle = (jnp.take(ordered, low, axis=0) + jnp.take(ordered, jnp.minimum(high, len(leaf) - 1), axis=0)) / 2
        return jnp.where(number > 0, middle, 0.0)

    return jax.tree.map(median, stacked)


def interpolate(
    old: PyTree[Float[Array, "..."]], new: PyTree[Float[Array, "..."]], share: float | Float[Array, ""]
) -> PyTree[Float[Array, "..."]]:
    """(1 - share) old + share new of parameters; running statistics are the new ones, as no rate applies to them.

    A share of 0 gives the old parameters, and one of 1 the new, to the bit; it may be larger.
    """

    def leaf(path: tuple, old: Array, new: Array) -> Array:
        return new if is_statistic(path) else (1.0 - share) * old + share * new

    return jax.tree.map_with_path(leaf, old, new)


# stacked uploads, weights -> one: how a server combines the parameters of its participants.
Combine = Callable[[PyTree, Float[Array, " K"]], PyTree]


def cosine_weights(
    stacked: PyTree[Float[Array, "K ..."]], mean: PyTree[Float[Array, "..."]], present: Bool[Array, " K"]
) -> Float[Array, " K"]:
    """Weights in proportion to cos(w_k, w_avg) over the concatenated leaves (FedeCouple, Eq. 7); they sum to 1.

    Running statistics have no part in the cosine: a variance can be larger than all parameters together.

    Args:
      stacked: the uploads w_k.
      mean: w_avg.
      present: whose upload counts; the others get weight 0. A present one gets a similarity of at least 1e-6.
    """
    stacked, mean = without_statistics(stacked), without_statistics(mean)
    dots = jax.tree.map(lambda w, mean: jnp.sum((w * mean).reshape(len(present), -1), axis=1), stacked, mean)
    squares = jax.tree.map(lambda w: jnp.sum((w * w).reshape(len(present), -1), axis=1), stacked)
    norms = jnp.sqrt(jax.tree.reduce(jnp.add, squares) + 1e-12)
    mean_norm = jnp.sqrt(jax.tree.reduce(jnp.add, jax.tree.map(lambda mean: jnp.sum(mean * mean), mean)) + 1e-12)
    cosine = jax.tree.reduce(jnp.add, dots) / (norms * mean_norm)
    similarity = jnp.where(present, jnp.maximum(cosine, 1e-6), 0.0)
    return similarity / jnp.maximum(jnp.sum(similarity), 1e-12)


class _Pivoting(NamedTuple):
    free: Bool[Array, " K"]  # the coordinates that may be positive
    x: Float[Array, " K"]  # the minimiser over the free coordinates, whatever their signs; 0 elsewhere
    wrong: Bool[Array, " K"]  # which of them should be exchanged
    fewest: Int[Array, ""]  # the smallest number of wrong ones so far
    chances: Int[Array, ""]  # full exchanges left before it goes on one coordinate at a time
    step: Int[Array, ""]


def simplex_qp(
    q: Float[Array, "K K"], present: Bool[Array, " K"], *, most: int = 100, tolerance: float = 1e-5
) -> Float[Array, " K"]:
    """The a that minimises a' Q a over the simplex; 0 for the absent.

    Minimising (1/2) x' Q x - 1' x over x >= 0 and dividing x by its sum is the same problem without the equality
    constraint. Block principal pivoting solves it (Portugal, Judice and Vicente, 1994; Kim and Park, 2011): all
    coordinates that are negative, or 0 where a positive one would be better, change sides at once, and only the last
    of them where that has not helped for a while. A step is a Cholesky factor of Q among the free coordinates, with
    one refinement; 6 to 13 of them are exact up to rounding for FedPAC's Q with 20 to 500 clients.

    Args:
      q: symmetric and positive semidefinite.
      present: the coordinates that may differ from 0; with none, all weights are 0.
      most: steps after which it stops in any case.
      tolerance: slopes below this share of the slope at 0 count as rounding.
    """
    clients = len(present)
    diagonal = jnp.diagonal(q)
    # A diagonal of 0 (no variance, no bias) would get infinite weight.
    floor = 1e-8 * jnp.sum(jnp.where(present, diagonal, 0.0)) / jnp.maximum(jnp.sum(present), 1).astype(q.dtype)
    diagonal = jnp.maximum(diagonal, jnp.maximum(floor, 1e-30))
    scale = jnp.where(present, lax.rsqrt(diagonal), 0.0)
    scale = scale / jnp.maximum(jnp.max(scale), 1e-30)
    # With a diagonal of 1, up to a common factor, which the weights do not see.
    ends = jnp.eye(clients, dtype=q.dtype)
    unit = jnp.where(ends > 0, 1.0, q * lax.rsqrt(diagonal)[:, None] * lax.rsqrt(diagonal))

    def solution(free: Bool[Array, " K"]) -> tuple[Float[Array, " K"], Bool[Array, " K"]]:
        held = free.astype(q.dtype)
        # The added diagonal makes a singular matrix factorable; the refinement corrects for it.
        among = jnp.where(ends > 0, 1.0 + 1e-5, unit * held[:, None] * held)
        factor = jnp.linalg.cholesky(among), True
        x = held * cho_solve(factor, scale * held)
        x += held * cho_solve(factor, (scale - _times(unit, x)) * held)
        uphill = _times(unit, x) - scale
        return x, jnp.where(free, x < 0, present & (uphill < -tolerance * scale))

    def unsolved(at: _Pivoting) -> Bool[Array, ""]:
        return jnp.any(at.wrong) & (at.step < most)

    def exchange(at: _Pivoting) -> _Pivoting:
        number = jnp.sum(at.wrong)
        fewer = number < at.fewest
        last = jnp.max(jnp.where(at.wrong, jnp.arange(clients), -1))
        moved = jnp.where(fewer | (at.chances > 0), at.wrong, jnp.arange(clients) == last)
        free = at.free ^ moved
        chances = jnp.where(fewer, 3, jnp.maximum(at.chances - 1, 0))
        return _Pivoting(free, *solution(free), jnp.minimum(number, at.fewest), chances, at.step + 1)

    zero = jnp.zeros((), jnp.int32)
    end = lax.while_loop(unsolved, exchange, _Pivoting(present, *solution(present), zero + clients + 1, zero + 3, zero))
    x = jnp.maximum(end.x, 0.0) * scale
    return x / jnp.maximum(jnp.sum(x), 1e-30)


def _times(matrix: Float[Array, "K K"], vector: Float[Array, " K"]) -> Float[Array, " K"]:
    return jnp.matmul(matrix, vector, precision=lax.Precision.HIGHEST)
