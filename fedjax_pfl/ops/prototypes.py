"""Prototypes and anchors: per-class means of features, each with a flag that says whether the class has one."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fedjax_pfl.ops.losses import masked_mean

Reduction = Literal["mse", "mean_l2"]


class Prototypes(NamedTuple):
    """One point of the feature space per class.

    Attributes:
      mean: the points, [C, K]; zeros where there is none.
      valid: whether the class has a point, [C] (rule R8).
    """

    mean: Float[Array, "C K"]
    valid: Bool[Array, " C"]


def class_sums(
    z: Float[Array, "samples K"], y: Int[Array, " samples"], mask: Float[Array, " samples"], classes: int
) -> Float[Array, "C K"]:
    """The sum of the features of each class.

    Args:
      z: features.
      y: labels.
      mask: 1 for a sample, 0 for padding.
      classes: C.
    """
    held = jax.nn.one_hot(y, classes) * mask[:, None]
    # Full precision: the means are compared and subtracted, not only multiplied by weights.
    return jnp.matmul(held.T, z, precision=lax.Precision.HIGHEST)


def class_means(sums: Float[Array, "C K"], counts: Float[Array, " C"]) -> Prototypes:
    """Sums divided by counts; a class without samples has no prototype."""
    return Prototypes(sums / jnp.maximum(counts, 1.0)[:, None], counts > 0)


def centre_loss(
    z: Float[Array, "batch K"],
    y: Int[Array, " batch"],
    mask: Float[Array, " batch"],
    centres: Prototypes,
    *,
    reduction: Reduction = "mse",
) -> Float[Array, ""]:
    """Mean squared distance of each feature to the centre of its class; a class without a centre contributes zero.

    Args:
      z: features.
      y: labels.
      mask: 1 for a sample, 0 for padding.
      centres: one per class.
      reduction: ``"mse"`` means over the K features, ``"mean_l2"`` sums over them; both are means over the batch.
    """
    squares = (z - centres.mean[y]) ** 2
    distance = jnp.mean(squares, axis=1) if reduction == "mse" else jnp.sum(squares, axis=1)
    return masked_mean(jnp.where(centres.valid[y], distance, 0.0), mask)
