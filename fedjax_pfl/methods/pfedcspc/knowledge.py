"""KP: the global model predicts by logits and by similarities to the exemplars, on one scale (pFedCSPC, Eq. 15)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedjax_pfl.method import Logits
from fedjax_pfl.ops.prototypes import Prototypes, l2_normalize
from fedjax_pfl.ops.training import Scalar

Norm = Literal["minmax", "softmax", "none"]


class KnowledgePrediction(NamedTuple):
    """(1 - weight) logits + weight similarities.

    Attributes:
      weight: lambda.
      norm: how both are brought to one scale, per sample.
    """

    weight: Scalar
    norm: Norm

    def __call__(self, z: Float[Array, "batch K"], logits: Logits, exemplars: Prototypes) -> Logits:
        """The combined scores of projections z and their logits; a class without exemplar is as far as the farthest."""
        similarity = jnp.matmul(l2_normalize(z), l2_normalize(exemplars.mean).T)
        valid = exemplars.valid
        least = jnp.min(jnp.where(valid, similarity, jnp.inf), axis=1, keepdims=True)
        similarity = jnp.where(valid, similarity, jnp.where(jnp.any(valid), least, 0.0))
        return (1 - self.weight) * self._scaled(logits) + self.weight * self._scaled(similarity)

    def _scaled(self, scores: Float[Array, "batch C"]) -> Float[Array, "batch C"]:
        if self.norm == "softmax":
            return jax.nn.softmax(scores)
        if self.norm == "none":
            return scores
        least, most = jnp.min(scores, axis=1, keepdims=True), jnp.max(scores, axis=1, keepdims=True)
        return (scores - least) / (most - least + 1e-8)
