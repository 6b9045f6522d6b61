"""The generator: it makes a feature of a class from noise (FedPA)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedjax_pfl.models.base import Mask, dense, initializers
from fedjax_pfl.models.norm import BatchNorm


class Generator(nn.Module):
    """Noise and a one-hot label -> a feature: a hidden layer with batch normalisation and ReLU, and a linear one.

    The hidden layer has no bias, which the normalisation takes off again: its gradient would be rounding errors alone,
    and Adam takes full steps along these.
    """

    hidden: int
    classes: int
    dim: int

    @nn.compact
    def __call__(
        self, noise: Float[Array, "batch noise"], y: Int[Array, " batch"], mask: Mask = None
    ) -> Float[Array, "batch K"]:
        """Applies it; with a mask as in training, without as in evaluation."""
        x = jnp.concatenate([noise, jax.nn.one_hot(y, self.classes)], axis=1)
        kernel = initializers("torch", x.shape[1]).kernel
        hidden = nn.Dense(self.hidden, use_bias=False, kernel_init=kernel, name="hidden")(x)
        normed = BatchNorm(name="norm")(hidden[:, None, None], mask)[:, 0, 0]
        feature: Array = dense(self.dim, "torch", self.hidden, "feature")(nn.relu(normed))
        return feature


def diversity(
    noise: Float[Array, "batch noise"], z: Float[Array, "batch K"], y: Int[Array, " batch"]
) -> Float[Array, ""]:
    """exp of minus the mean, over all pairs, of their distance in noise times that in features; 1 at most.

    The distances are the mean square and the mean absolute difference; those of two features of one class count as 0.
    """
    apart_in_noise = jnp.mean((noise[:, None] - noise) ** 2, axis=2)
    apart = jnp.mean(jnp.abs(z[:, None] - z), axis=2)
    return jnp.exp(-jnp.mean(jnp.where(y[:, None] != y, apart_in_noise * apart, 0.0)))
