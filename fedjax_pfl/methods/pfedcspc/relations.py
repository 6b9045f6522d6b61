"""PTA: aligns features, and the angles and distances between them, with the prototypes of their classes (pFedCSPC)."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fedjax_pfl.ops.losses import masked_mean
from fedjax_pfl.ops.prototypes import Prototypes, l2_normalize, prototype_contrast
from fedjax_pfl.ops.training import Scalar

Penalty = Literal["abs", "squared", "smooth_l1"]


class Alignment(NamedTuple):
    """L_align of a batch: the sum of node, angle and edge alignment (Eqs. 5-7).

    Attributes:
      weight: kappa, in the client's loss.
      temperature: tau_l, of the contrast with the prototypes.
      edge: how the edge alignment measures a difference.
    """

    weight: Scalar
    temperature: Scalar
    edge: Penalty

    def __call__(
        self, f: Float[Array, "batch d"], y: Int[Array, " batch"], mask: Float[Array, " batch"], prototypes: Prototypes
    ) -> Float[Array, ""]:
        """The loss of a batch with features f and labels y; there is one prototype per class."""
        node = prototype_contrast(f, y, mask, prototypes, temperature=self.temperature)
        angle = angle_alignment(f, y, mask, prototypes)
        return node + angle + edge_alignment(f, y, mask, prototypes, penalty=self.edge)


def angle_alignment(
    f: Float[Array, "batch d"], y: Int[Array, " batch"], mask: Float[Array, " batch"], prototypes: Prototypes
) -> Float[Array, ""]:
    """Mean |cos angle(f1, f2, f3) - cos angle(u1, u2, u3)|, the angle at the second point (Eq. 6).

    A triple is a sample and the two after it in the batch, the last sample followed by the first. It counts if its
    three labels differ and all of their classes have a prototype.

    Args:
      f: features.
      y: labels.
      mask: 1 for a sample, 0 for padding, which comes last.
      prototypes: u, one per class.
    """
    second, third = _following(mask, 1), _following(mask, 2)
    known = (mask > 0) & prototypes.valid[y]
    differ = (y != y[second]) & (y[second] != y[third]) & (y != y[third])
    triples = known & known[second] & known[third] & differ

    def cosines(points: Float[Array, "batch d"]) -> Float[Array, " batch"]:
        """Of each triple, the cosine of the angle at its second point; 0 where two of the points coincide."""
        middle = points[second]
        return jnp.sum(l2_normalize(points - middle) * l2_normalize(points[third] - middle), axis=1)

    distance = jnp.abs(cosines(f) - cosines(prototypes.mean[y]))
    return masked_mean(distance, triples.astype(f.dtype))


def edge_alignment(
    f: Float[Array, "batch d"],
    y: Int[Array, " batch"],
    mask: Float[Array, " batch"],
    prototypes: Prototypes,
    *,
    penalty: Penalty = "abs",
) -> Float[Array, ""]:
    """Mean penalty on ||f1 - f2|| - ||u1 - u2||, each distance divided by its mean over the batch (Eq. 7).

    A pair is a sample and the one after it, the last sample followed by the first. It counts if the labels differ and
    both of their classes have a prototype.

    Args:
      f: features.
      y: labels.
      mask: 1 for a sample, 0 for padding, which comes last.
      prototypes: u, one per class.
      penalty: absolute value, square, or smooth L1 (x^2 / 2 up to 1, |x| - 1/2 from there).
    """
    second = _following(mask, 1)
    known = (mask > 0) & prototypes.valid[y]
    pairs = (known & known[second] & (y != y[second])).astype(f.dtype)

    def relative_distances(points: Float[Array, "batch d"]) -> Float[Array, " batch"]:
        """Of each pair, the distance divided by the mean over the pairs that count; the root has a gradient at 0."""
        distance = jnp.sqrt(jnp.sum((points - points[second]) ** 2, axis=1) + 1e-12)
        return distance / jnp.maximum(masked_mean(distance, pairs), 1e-6)

    gap = relative_distances(f) - relative_distances(prototypes.mean[y])
    if penalty == "squared":
        values = gap**2
    elif penalty == "smooth_l1":
        values = optax.huber_loss(gap)
    else:
        values = jnp.abs(gap)
    return masked_mean(values, pairs)


def _following(mask: Float[Array, " batch"], steps: int) -> Int[Array, " batch"]:
    """The position so many steps after each one, around the samples of the batch: padding changes nothing."""
    samples = jnp.maximum(jnp.sum(mask > 0, dtype=jnp.int32), 1)
    return (jnp.arange(len(mask), dtype=jnp.int32) + steps) % samples
