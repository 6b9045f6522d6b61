"""PMI: a personal initial model for each client, combined from the participants' encoders (pFedCSPC, Eq. 4)."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from fedjax_pfl.method import Cohort, Diagnostics
from fedjax_pfl.methods.pfedcspc.cluster import Received
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import cross_entropies, masked_mean
from fedjax_pfl.ops.training import Scalar
from fedjax_pfl.ops.tree import put_rows, take_rows, where_rows

When = Literal["every", "eval"]
ClassWeight = Literal["loss", "class", "count"]


def project(model: Model, projection: Params, points: Float[Array, "*places d"]) -> Float[Array, "*places K"]:
    """H on points that may be arranged in any way."""
    assert model.projection is not None
    flat = model.projection.project({"projection": projection}, points.reshape(-1, points.shape[-1]))
    return flat.reshape(*points.shape[:-1], model.dim)


class Known(NamedTuple):
    """What the server has of all N clients, so that a round serves each of them, not its participants alone.

    It takes the memory of N encoders and of N C M d floats: for ten clients, 2.4 and 0.5 MB with CIFAR-10 and
    ``cnn_proj``, 447 and 31 MB with CIFAR-100 and ``resnet18_proj`` (M = 15).

    Attributes:
      encoders: of the initial models m_k, every leaf [N, ...]; the global encoder for a client that never took part.
      u: U_k, the prototypes of each client's last participation, [N, C, M, d].
      valid: which of the M places per class hold one, [N, C, M]; none before a client's first participation.
      weight: of each class in a client's loss, [N, C].
    """

    encoders: Params
    u: Float[Array, "N C M d"]
    valid: Bool[Array, "N C M"]
    weight: Float[Array, "N C"]


class InitialModels(NamedTuple):
    """What personal initial models are for, and how they are combined.

    Attributes:
      when: whether training starts from them in every round, or they are for evaluation alone.
      temperature: tau_p, of the weights.
      weigh_by: what counts alike in a client's loss: each of its prototypes (Eq. 4), classes, or samples.
    """

    when: When
    temperature: Scalar
    weigh_by: ClassWeight

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Names of the diagnostics of :meth:`update`."""
        return "p_kk", "effective_clients"

    def before_round_0(self, encoder: Params, clients: int, shape: tuple[int, int, int]) -> Known:
        """Everybody has the common encoder, and nobody has sent prototypes, of ``shape`` [C, M, d]."""
        encoders = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients, *leaf.shape)), encoder)
        points = jnp.zeros((clients, *shape))
        return Known(encoders, points, jnp.zeros(points.shape[:3], bool), jnp.zeros(points.shape[:2]))

    def update(
        self, model: Model, known: Known, uploads: Params, sent: Received, cohort: Cohort, encoder: Params
    ) -> tuple[Known, Diagnostics]:
        """The initial models of all N clients, from the participants' encoders and everybody's newest prototypes.

        Args:
          model: projects and classifies.
          known: what the last round left.
          uploads: the participants' models, every leaf [K, ...].
          sent: their prototypes.
          cohort: who they are.
          encoder: the averaged one.

        Returns:
          What is known now. For the record, as means over the participants: ``p_kk``, the weight of a client's own
          encoder in its m_k, and ``effective_clients``, 1 / sum_k' (p_k^{k'})^2: their number where all weigh alike.
        """
        present = cohort.weight > 0
        number = jnp.sum(sent.valid, axis=2, dtype=jnp.float32)
        of_class = {"loss": number, "class": jnp.minimum(number, 1.0), "count": sent.held.astype(jnp.float32)}
        newest = sent.u, sent.valid, of_class[self.weigh_by]
        u, valid, weight = put_rows((known.u, known.valid, known.weight), cohort.ids, newest)
        p = self.weights(model, uploads, u, valid, weight, present)
        mean = partial(jnp.tensordot, p, axes=1, precision=lax.Precision.HIGHEST)
        combined = jax.tree.map(mean, uploads["extractor"]["encoder"])
        encoders = where_rows(jnp.any(valid, axis=(1, 2)), combined, encoder)
        own = take_rows(p, cohort.ids)  # row j is that of participant j, whose encoder stands in column j
        of_participants = jnp.diagonal(own), 1 / jnp.maximum(jnp.sum(own**2, axis=1), 1e-12)
        means = [masked_mean(values, present.astype(jnp.float32)) for values in of_participants]
        return Known(encoders, u, valid, weight), dict(zip(self.diagnostics, means, strict=True))

    def weights(
        self,
        model: Model,
        uploads: Params,
        u: Float[Array, "N C M d"],
        valid: Bool[Array, "N C M"],
        weight: Float[Array, "N C"],
        present: Bool[Array, " K"],
    ) -> Float[Array, "N K"]:
        """p_k^{k'} falls with the loss of client k's prototypes under the heads of client k' (Eq. 4); rows sum to 1.

        Args:
          model: projects and classifies.
          uploads: the participants' models, every leaf [K, ...].
          u: the prototypes of all clients, M places per client and class.
          valid: which of these hold one.
          weight: of each class in a client's loss.
          present: whose heads count.
        """
        y = jnp.broadcast_to(jnp.arange(valid.shape[1])[None, :, None], valid.shape).reshape(-1)
        number = jnp.maximum(jnp.sum(valid, axis=2, dtype=jnp.float32), 1.0)
        share = weight / jnp.maximum(jnp.sum(weight, axis=1, keepdims=True), 1.0)

        def losses_under(heads: tuple[Params, Params]) -> Float[Array, " N"]:
            projection, head = heads
            logits = model.classify(head, project(model, projection, u.reshape(-1, u.shape[-1])))
            losses = jnp.where(valid, cross_entropies(logits, y).reshape(valid.shape), 0.0)
            return jnp.sum(share * jnp.sum(losses, axis=2) / number, axis=1)

        losses = lax.map(losses_under, (uploads["extractor"]["projection"], uploads["head"]))
        return jax.nn.softmax(jnp.where(present[:, None], -losses / self.temperature, -1e9), axis=0).T
