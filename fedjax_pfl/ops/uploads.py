"""Uploads seen as updates of what was sent down; used by compression, attacks and diagnostics for any method."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedjax_pfl.method import Method, PerClass, SentIf, is_part
from fedjax_pfl.models.norm import is_statistic

_VARIANCES = ("variance", "covariance")


def has_form_of(view: PyTree, upload: PyTree) -> bool:
    """Whether an upload has the form of the view: only real numbers, in the same tree of arrays of the same shapes."""

    def form(tree: PyTree) -> tuple:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

    leaves = jax.tree.leaves(upload)
    return bool(leaves) and all(map(_is_real, leaves)) and form(view) == form(upload)


def origin_of(method: Method, view: PyTree, upload: PyTree) -> PyTree:
    """The origin of an upload, array by array: upload - origin is the update.

    The origin of an array is the view's array of the same name, shape and type, from which it was trained. The origin
    is zero, so that the whole array is an update, if there is no such array; in a `PerClass`, of which the client may
    not have received all rows; in a `SentIf` that was not sent; and if the method sends changes. A client's ``inbox``
    is not considered here.
    """
    received = {} if method.sends_change else dict(jax.tree.leaves_with_path(_received(view)))

    def leaf(path: tuple, sent: Array) -> Array:
        got = received.get(path)
        if got is None or (got.shape, got.dtype) != (sent.shape, sent.dtype):
            return jnp.zeros_like(sent)
        return jnp.asarray(got)

    return jax.tree.map_with_path(leaf, upload)


def _received(view: PyTree) -> PyTree:
    """What every participant has received of a view; zeros instead of a `SentIf` that was not sent."""

    def node(part: PyTree) -> PyTree:
        if isinstance(part, PerClass):
            return None
        if isinstance(part, SentIf):
            sent = jax.tree.map(lambda leaf: jnp.where(part.sent, leaf, jnp.zeros_like(leaf)), part.value)
            return part._replace(sent=None, value=sent)  # type: ignore[arg-type]  # the flag is not compared
        return part

    return jax.tree.map(node, view, is_leaf=is_part)


def map_values(
    fn: Callable[..., PyTree], upload: PyTree, *others: PyTree, in_rows: Callable[..., PyTree] | None = None
) -> PyTree:
    """Applies fn to the arrays of real numbers in an upload.

    Other arrays stay unchanged. So do running statistics and fields called ``variance`` or ``covariance``, which
    operations other than averaging can make invalid (below 0), and the flags of a `PerClass` or `SentIf`.

    Args:
      fn: (path, array, corresponding array of each of ``others``) -> new array.
      upload: the upload of one client.
      others: trees of the same structure.
      in_rows: replaces fn for the arrays [C, ...] in a `PerClass`; its first argument is the part's ``held``.
    """

    def inside(fn: Callable[..., PyTree], outer: tuple, tree: PyTree, *rest: PyTree) -> PyTree:
        def leaf(path: tuple, value: Array, *rest: PyTree) -> PyTree:
            path = (*outer, *path)
            spared = is_statistic(path) or any(getattr(step, "name", None) in _VARIANCES for step in path[-1:])
            return fn(path, value, *rest) if _is_real(value) and not spared else value

        return jax.tree.map_with_path(leaf, tree, *rest)

    def node(path: tuple, part: PyTree, *rest: PyTree) -> PyTree:
        if isinstance(part, PerClass):
            of_rows = fn if in_rows is None else partial(in_rows, part.held)
            return part._replace(rows=inside(of_rows, path, part.rows, *(other.rows for other in rest)))
        if isinstance(part, SentIf):
            return part._replace(value=inside(fn, path, part.value, *(other.value for other in rest)))
        return inside(fn, path, part, *rest)

    return jax.tree.map_with_path(node, upload, *others, is_leaf=is_part)


def _is_real(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))
