"""Operations on pytrees, above all on those whose leaves have a leading client axis."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped


def count(tree: PyTree) -> int:
    """Number of scalars in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def size(tree: PyTree) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def by_row(values: Shaped[Array, " K"], leaf: Shaped[Array, "K ..."]) -> Shaped[Array, "K ..."]:
    """One value per row, [K] -> [K, 1, ..., 1], so that it broadcasts against a leaf [K, ...]."""
    return values.reshape(-1, *(1,) * (leaf.ndim - 1))


def where_rows(mask: Bool[Array, " K"], new: PyTree, old: PyTree) -> PyTree:
    """Takes row k of every leaf from ``new`` if mask[k], else from ``old``."""
    return jax.tree.map(lambda new, old: jnp.where(by_row(mask, new), new, old), new, old)


def keep_rows(mask: Bool[Array, " K"], tree: PyTree) -> PyTree:
    """Row k of every leaf if mask[k], else zeros."""
    return where_rows(mask, tree, jax.tree.map(jnp.zeros_like, tree))


def finite_rows(tree: PyTree) -> Bool[Array, " K"]:
    """Whether row k of every leaf is free of NaN and infinite values."""
    of_leaves = jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf.reshape(len(leaf), -1)), axis=1), tree)
    return jax.tree.reduce(jnp.logical_and, of_leaves)


def take_rows(tree: PyTree, ids: Int[Array, " K"]) -> PyTree:
    """Rows ``ids`` of every leaf; an id past the end gives the last row."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, ids, axis=0, mode="clip"), tree)


def put_rows(tree: PyTree, ids: Int[Array, " K"], rows: PyTree) -> PyTree:
    """Writes row k into row ids[k] of every leaf; an id past the end writes nothing."""
    return jax.tree.map(lambda leaf, row: leaf.at[ids].set(row, mode="drop"), tree, rows)
