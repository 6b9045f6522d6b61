"""How a server combines what its clients upload."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree


def weighted_mean(stacked: PyTree[Float[Array, "K ..."]], weight: Float[Array, " K"]) -> PyTree[Float[Array, "..."]]:
    """sum_k weight_k x_k / sum_k weight_k for every leaf; zeros where all weights are 0."""
    share = weight / jnp.maximum(jnp.sum(weight), 1e-12)
    return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, axes=1), stacked)


def coordinate_median(
    stacked: PyTree[Float[Array, "K ..."]], weight: Float[Array, " K"]
) -> PyTree[Float[Array, "..."]]:
    """The median of the rows with a weight above 0, coordinate by coordinate, all alike; zeros where there is none.

    Reference:
      D. Yin, Y. Chen, K. Ramchandran, P. Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical
      Rates. ICML 2018. arXiv:1803.01498.
    """
    present = weight > 0
    number = jnp.sum(present, dtype=jnp.int32)
    low, high = jnp.maximum(number - 1, 0) // 2, number // 2

    def median(leaf: Float[Array, "K ..."]) -> Float[Array, "..."]:
        absent_last = jnp.where(present.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.inf)
        ordered = jnp.sort(absent_last, axis=0)
        middle = (jnp.take(ordered, low, axis=0) + jnp.take(ordered, jnp.minimum(high, len(leaf) - 1), axis=0)) / 2
        return jnp.where(number > 0, middle, 0.0)

    return jax.tree.map(median, stacked)


# stacked uploads, weights -> one: how a server combines the parameters of its participants.
Combine = Callable[[PyTree, Float[Array, " K"]], PyTree]

RULES: dict[str, Combine] = {"mean": weighted_mean, "median": coordinate_median}
"""What ``aggregation.rule`` names."""


def cosine_weights(
    stacked: PyTree[Float[Array, "K ..."]], mean: PyTree[Float[Array, "..."]], present: Bool[Array, " K"]
) -> Float[Array, " K"]:
    """Weights in proportion to cos(w_k, w_avg) over the concatenated leaves (FedeCouple, Eq. 7); they sum to 1.

    Args:
      stacked: the uploads w_k.
      mean: w_avg.
      present: whose upload counts; the others get weight 0. A present one gets a similarity of at least 1e-6.
    """
    dots = jax.tree.map(lambda w, mean: jnp.sum((w * mean).reshape(len(present), -1), axis=1), stacked, mean)
    squares = jax.tree.map(lambda w: jnp.sum((w * w).reshape(len(present), -1), axis=1), stacked)
    norms = jnp.sqrt(jax.tree.reduce(jnp.add, squares) + 1e-12)
    mean_norm = jnp.sqrt(jax.tree.reduce(jnp.add, jax.tree.map(lambda mean: jnp.sum(mean * mean), mean)) + 1e-12)
    cosine = jax.tree.reduce(jnp.add, dots) / (norms * mean_norm)
    similarity = jnp.where(present, jnp.maximum(cosine, 1e-6), 0.0)
    return similarity / jnp.maximum(jnp.sum(similarity), 1e-12)


def simplex_qp(
    q: Float[Array, "K K"], present: Bool[Array, " K"], *, sweeps: int = 300, most: int = 10, gap: float = 1e-4
) -> Float[Array, " K"]:
    """The a that minimises a' Q a over the simplex; 0 for the absent.

    Minimising (1/2) x' Q x - 1' x over x >= 0 and dividing x by its sum is the same problem without the equality
    constraint, and cyclic coordinate descent solves it, in blocks of sweeps. It stops when the optimality conditions
    hold: no slope (Qa)_j is below the level a' Q a by more than a share of it. For FedPAC's Q one block is enough with
    50 clients (error below 1e-6 in float32) and mostly with 100; a nearly singular Q takes more, or all of them.

    Args:
      q: symmetric and positive semidefinite.
      present: the coordinates that may differ from 0; with none, all weights are 0.
      sweeps: passes over the coordinates in a block.
      most: blocks after which it stops in any case.
      gap: the share of the level.
    """
    clients = len(present)
    trace = jnp.sum(jnp.where(present, jnp.diagonal(q), 0.0))
    q = q * (jnp.sum(present).astype(q.dtype) / jnp.maximum(trace, 1e-30))
    # A flat direction (zero variance, zero bias) is as good as weight gets, but must not become infinite.
    q = q + jnp.diag(jnp.where(jnp.diagonal(q) > 1e-8, 0.0, 1e-8))

    def coordinate(step: Int[Array, ""], x: Float[Array, " K"]) -> Float[Array, " K"]:
        j = step % clients
        others = jnp.dot(q[j], x, precision=lax.Precision.HIGHEST) - q[j, j] * x[j]
        return x.at[j].set(jnp.where(present[j], jnp.maximum(0.0, (1.0 - others) / q[j, j]), 0.0))

    def unsolved(carry: tuple[Int[Array, ""], Float[Array, " K"]]) -> Bool[Array, ""]:
        block, x = carry
        slope = jnp.matmul(q, x, precision=lax.Precision.HIGHEST)
        level = jnp.sum(x * slope) / jnp.maximum(jnp.sum(x), 1e-30)
        lowest = jnp.min(jnp.where(present, slope, jnp.inf))
        return (block == 0) | ((block < most) & (lowest < (1.0 - gap) * level))

    def descend(carry: tuple[Int[Array, ""], Float[Array, " K"]]) -> tuple[Int[Array, ""], Float[Array, " K"]]:
        block, x = carry
        return block + 1, lax.fori_loop(0, sweeps * clients, coordinate, x)

    _, x = lax.while_loop(unsolved, descend, (jnp.zeros((), jnp.int32), jnp.zeros(clients, q.dtype)))
    return x / jnp.maximum(jnp.sum(x), 1e-30)
