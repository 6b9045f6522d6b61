"""Uploads as updates of what was sent down, for compression, attacks and diagnostics of any method."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedjax_pfl.method import Method, PerClass, SentIf
from fedjax_pfl.models.norm import is_statistic


def has_form_of(view: PyTree, upload: PyTree) -> bool:
    """Whether an upload has the form of what was sent down: real numbers alone, in arrays of the same shapes."""

    def form(tree: PyTree) -> tuple:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

    leaves = jax.tree.leaves(upload)
    return bool(leaves) and all(map(_is_real, leaves)) and form(view) == form(upload)


def origin_of(method: Method, view: PyTree, upload: PyTree) -> PyTree:
    """What an upload is an update of, array by array: upload - origin is the update.

    It is the view's array of the same name, shape and type, which the upload's was trained from. It is zero where there
    is none, in a `PerClass` or `SentIf`, of which the client may not have got anything, and where the method sends
    changes: all of such an array is an update. What the server wrote into a client's ``inbox`` does not count here.
    """
    received = {} if method.sends_change else dict(jax.tree.leaves_with_path(view, is_leaf=_is_part))

    def leaf(path: tuple, sent: Array) -> Array:
        got = received.get(path)
        if got is None or _is_part(got) or (got.shape, got.dtype) != (sent.shape, sent.dtype):
            return jnp.zeros_like(sent)
        return jnp.asarray(got)

    return jax.tree.map_with_path(leaf, upload)


def map_values(
    fn: Callable[..., PyTree], upload: PyTree, *others: PyTree, in_rows: Callable[..., PyTree] | None = None
) -> PyTree:
    """Applies fn to the arrays of real numbers in an upload.

    Others stay as they are, and so do running statistics and fields called ``covariance``, which anything but an
    average can make impossible (a variance below 0), and what says which part of a `PerClass` or `SentIf` is sent.

    Args:
      fn: (path, array, its like in each of the others) -> what takes its place.
      upload: of one client.
      others: trees of the same structure.
      in_rows: in the place of fn for the arrays [C, ...] in a `PerClass`, whose ``held`` it is given first.
    """

    def inside(fn: Callable[..., PyTree], outer: tuple, tree: PyTree, *rest: PyTree) -> PyTree:
        def leaf(path: tuple, value: Array, *rest: PyTree) -> PyTree:
            path = (*outer, *path)
            spared = is_statistic(path) or any(getattr(step, "name", None) == "covariance" for step in path[-1:])
            return fn(path, value, *rest) if _is_real(value) and not spared else value

        return jax.tree.map_with_path(leaf, tree, *rest)

    def node(path: tuple, part: PyTree, *rest: PyTree) -> PyTree:
        if isinstance(part, PerClass):
            of_rows = fn if in_rows is None else partial(in_rows, part.held)
            return part._replace(rows=inside(of_rows, path, part.rows, *(other.rows for other in rest)))
        if isinstance(part, SentIf):
            return part._replace(value=inside(fn, path, part.value, *(other.value for other in rest)))
        return inside(fn, path, part, *rest)

    return jax.tree.map_with_path(node, upload, *others, is_leaf=_is_part)


def _is_part(node: PyTree) -> bool:
    return isinstance(node, PerClass | SentIf)


def _is_real(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))
