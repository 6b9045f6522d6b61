"""Contrastive losses of the server, between prototypes and with their augmented samples (pFedCSPC, Eqs. 11, 12)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedjax_pfl.ops.losses import masked_mean
from fedjax_pfl.ops.prototypes import l2_normalize
from fedjax_pfl.ops.training import Scalar


def weighted_contrast(
    z: Float[Array, "batch K"],
    y: Int[Array, " batch"],
    client: Int[Array, " batch"],
    mask: Float[Array, " batch"],
    *,
    temperature: Scalar,
    easy: float = 0.5,
) -> Float[Array, ""]:
    """Supervised contrastive loss over a batch of prototypes, pairs weighted (Eq. 12); mean over the batch.

    Args:
      z: projections; compared by their cosines.
      y: classes.
      client: whose prototypes they are.
      mask: 1 for a prototype, 0 for padding; one without another of its class in the batch contributes zero.
      temperature: tau_g.
      easy: weight of pairs of the same class and client, or of different classes and clients. The others, which are
        harder to bring together or apart, have weight 1. With 1 this is the loss of Khosla et al. (NeurIPS 2020).
    """
    others = (mask > 0)[None, :] & ~jnp.eye(len(y), dtype=bool)
    alike = y[:, None] == y[None, :]
    hard = alike != (client[:, None] == client[None, :])
    z = l2_normalize(z)
    scores = jnp.matmul(z, z.T) / temperature + jnp.where(hard, 0.0, jnp.log(easy))
    log_p = scores - jax.nn.logsumexp(jnp.where(others, scores, -1e9), axis=1, keepdims=True)
    positive = (alike & others).astype(z.dtype)
    number = jnp.sum(positive, axis=1)
    return masked_mean(-jnp.sum(log_p * positive, axis=1) / jnp.maximum(number, 1.0), mask)


def augmented_contrast(
    z: Float[Array, "batch K"],
    positive: Float[Array, "batch n K"],
    negative: Float[Array, "batch n K"],
    mask: Float[Array, " batch"],
    *,
    margin: Scalar,
) -> Float[Array, ""]:
    """max(0, ||z - z+||^2 - ||z - z-||^2 + margin), mean over pairs and batch (Eq. 11, which omits the maximum).

    Args:
      z: projections of the prototypes.
      positive: projections of their positive augmented samples.
      negative: likewise of the negative ones.
      mask: 1 for a prototype that has such samples.
      margin: alpha.
    """
    near = jnp.sum((z[:, None, :] - positive) ** 2, axis=-1)
    far = jnp.sum((z[:, None, :] - negative) ** 2, axis=-1)
    return masked_mean(jnp.mean(jax.nn.relu(near - far + margin), axis=1), mask)
