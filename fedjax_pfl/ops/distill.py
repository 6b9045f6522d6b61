"""Knowledge distillation between heads."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fedjax_pfl.ops.losses import masked_mean


def distillation(
    student: Float[Array, "batch classes"],
    teacher: Float[Array, "batch classes"],
    mask: Float[Array, " batch"],
    *,
    temperature: float | Float[Array, ""],
    scaled: bool = False,
) -> Float[Array, ""]:
    """KL(p_T || p_S) of the softened predictions, mean over the batch, [] (Hinton et al., arXiv:1503.02531).

    Args:
      student: logits of the model that is trained.
      teacher: logits of the model that it learns from; no gradient flows into them.
      mask: 1 for a sample, 0 for padding.
      temperature: tau; both logits are divided by it.
      scaled: whether to multiply by tau^2, so that the gradient does not shrink as tau grows.
    """
    log_p = jax.nn.log_softmax(lax.stop_gradient(teacher) / temperature)
    log_q = jax.nn.log_softmax(student / temperature)
    divergence = masked_mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=1), mask)
    return divergence * temperature**2 if scaled else divergence
