"""PMI: a personal initial model for each client, combined from the encoders of all (pFedCSPC, Eqs. 3, 4)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import cross_entropies, masked_mean
from fedjax_pfl.ops.training import Scalar


def project(model: Model, projection: Params, points: Float[Array, "*places d"]) -> Float[Array, "*places K"]:
    """H on points that may be arranged in any way."""
    assert model.projection is not None
    flat = model.projection.project({"projection": projection}, points.reshape(-1, points.shape[-1]))
    return flat.reshape(*points.shape[:-1], model.dim)


class InitialModels(NamedTuple):
    """What personal initial models are for, and how they are combined.

    Attributes:
      when: whether training starts from them in every round, or they are for evaluation alone.
      temperature: tau_p, of the weights.
    """

    when: Literal["every", "eval"]
    temperature: Scalar

    def weights(
        self,
        model: Model,
        params: Params,
        u: Float[Array, "K C M d"],
        valid: Bool[Array, "K C M"],
        present: Bool[Array, " K"],
    ) -> Float[Array, "K K"]:
        """p_k^{k'} falls with the loss of client k's prototypes under the heads of client k' (Eq. 4); rows sum to 1.

        Args:
          model: projects and classifies.
          params: of all clients' models, every leaf [K, ...].
          u: their prototypes, M places per client and class.
          valid: which of these hold one.
          present: whose heads count.
        """
        y = jnp.broadcast_to(jnp.arange(valid.shape[1])[None, :, None], valid.shape).reshape(-1)

        def losses_under(heads: tuple[Params, Params]) -> Float[Array, " K"]:
            projection, head = heads
            logits = model.classify(head, project(model, projection, u.reshape(-1, u.shape[-1])))
            losses = cross_entropies(logits, y).reshape(len(valid), -1)
            return jax.vmap(masked_mean)(losses, valid.reshape(len(valid), -1).astype(losses.dtype))

        losses = lax.map(losses_under, (params["extractor"]["projection"], params["head"]))
        return jax.nn.softmax(jnp.where(present[:, None], -losses / self.temperature, -1e9), axis=0).T
