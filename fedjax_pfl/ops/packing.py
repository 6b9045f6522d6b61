"""Packs small parameters into one vector while they are trained.

On an accelerator the update of every array is a separate kernel. A kernel that adds 32 numbers takes as long as one
that adds a million: the time of its launch. When packed, the biases, the scales of the norms and the small convolution
kernels of a network are updated by one kernel.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from fedjax_pfl.models.norm import is_statistic

Params = TypeVar("Params")
SMALL = 2048  # numbers; larger arrays are updated by the kernel that computes their gradient


class Packed(NamedTuple):
    """The arrays of a tree of parameters.

    Attributes:
      small: the small arrays, one after the other, [numbers].
      large: the tree with the other arrays (including running statistics) in their places, and None for small arrays.
    """

    small: Float[Array, " numbers"]
    large: PyTree


def pack(params: Params, *, largest: int = SMALL) -> tuple[Packed, Callable[[Packed], Params]]:
    """The parameters with their small arrays packed into one vector, and the function that unpacks them.

    Args:
      params: any tree of arrays.
      largest: an array with at most this number of entries counts as small.
    """
    paths, structure = jax.tree.flatten_with_path(params)
    leaves = [(jnp.asarray(leaf), is_statistic(path)) for path, leaf in paths]
    is_small = [leaf.size <= largest and leaf.dtype == jnp.float32 and not statistic for leaf, statistic in leaves]
    chosen = [(leaf, small) for (leaf, _), small in zip(leaves, is_small, strict=True)]
    vector, split = ravel_pytree([leaf for leaf, small in chosen if small])
    large = jax.tree.unflatten(structure, [None if small else leaf for leaf, small in chosen])

    def unpack(packed: Packed) -> Params:
        pieces, others = iter(split(packed.small)), iter(jax.tree.leaves(packed.large))
        return jax.tree.unflatten(structure, [next(pieces if small else others) for small in is_small])

    return Packed(vector, large), unpack
