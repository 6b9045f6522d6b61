"""Batch normalisation for federated training: how its running statistics are stored and updated.

The running mean and variance are part of theta (rule R10 in docs/protocol.md): uploaded, averaged and kept with it. A
training pass (one with a mask) normalises with the mean and variance of the batch's samples, without the padding, and
gradients flow through these; every other pass uses the running statistics, as constants. A batch of fewer than two
samples is normalised with the running statistics and leaves them as they are.

Losses are pure functions of theta. So a training pass returns the update as the "gradient" of the statistics: the
amount to subtract from them. The trainer applies it unchanged, without learning rate, momentum, weight decay and
clipping. (Flax does the same for the scales of 8-bit floats, in its collection ``_overwrite_with_gradient``.) A loss
without a training pass leaves the statistics unchanged; a loss with several passes adds up their updates.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from fedjax_pfl.models.base import Mask
from fedjax_pfl.models.passes import differs

STATISTICS = ("running_mean", "running_var")
FLAX_STATISTICS = dict(zip(("mean", "var"), STATISTICS, strict=True))
"""Flax's name of a statistic of its batch normalisation -> ours."""
# PyTorch's defaults.
EPSILON = 1e-5
MOMENTUM = 0.1


def is_statistic(path: tuple) -> bool:
    """Whether the leaf at this path of a parameter tree is a running statistic, which no optimiser may change."""
    return any(getattr(step, "key", None) in STATISTICS for step in path[-1:])


def without_statistics(params: PyTree) -> PyTree:
    """Parameters, or a gradient or change of parameters, with zeros in the place of running statistics."""
    return jax.tree.map_with_path(lambda path, leaf: jnp.zeros_like(leaf) if is_statistic(path) else leaf, params)


class BatchNorm(nn.Module):
    """Normalises every channel of [batch, h, w, c] maps, then scales and shifts it; see the module's docstring."""

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"], mask: Mask = None) -> Float[Array, "batch h w c"]:
        """Applies it: as in training if a mask is given, otherwise as in evaluation."""
        channels = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones_init(), channels)
        bias = self.param("bias", nn.initializers.zeros_init(), channels)
        running = (
            self.param("running_mean", nn.initializers.zeros_init(), channels),
            self.param("running_var", nn.initializers.ones_init(), channels),
        )
        return batch_norm(x, mask, running, scale, bias)


def batch_norm(
    x: Float[Array, "batch *space c"],
    mask: Mask,
    running: tuple[Float[Array, " c"], Float[Array, " c"]],
    scale: Float[Array, " c"] | float,
    bias: Float[Array, " c"] | float,
    *,
    momentum: float = MOMENTUM,
    epsilon: float = EPSILON,
) -> Float[Array, "batch *space c"]:
    """Normalises every channel, then scales and shifts it; see the module's docstring.

    Args:
      x: the input, with any number of axes between the batch and the channels.
      mask: 1 for a sample, 0 for padding, in a training pass; None in an evaluation.
      running: running mean and variance, from theta; their gradient is the amount to subtract from them.
      scale: scale of each channel.
      bias: bias of each channel.
      momentum: the share by which the running statistics move towards those of the batch.
      epsilon: added to the variance.
    """
    differs()
    mean, var = lax.stop_gradient(running)
    if mask is not None:
        samples, all_but_channels = jnp.sum(mask), tuple(range(x.ndim - 1))
        values = jnp.maximum(samples, 1.0)
        for size in x.shape[1:-1]:
            values = values * size
        valid = mask[(slice(None), *(None,) * (x.ndim - 1))]
        batch_mean = jnp.sum(valid * x, axis=all_but_channels) / values
        batch_var = jnp.sum(valid * (x - batch_mean) ** 2, axis=all_but_channels) / values
        enough = samples >= 2
        # The unbiased variance is stored, the biased one is used, as in PyTorch.
        towards = batch_mean, batch_var * values / jnp.maximum(values - 1.0, 1.0)
        update = jax.tree.map(lambda old, new: jnp.where(enough, momentum * (old - new), 0.0), (mean, var), towards)
        x = _with_update(x, running, lax.stop_gradient(update))
        mean, var = jnp.where(enough, batch_mean, mean), jnp.where(enough, batch_var, var)
    return (x - mean) * (lax.rsqrt(var + epsilon) * scale) + bias


@jax.custom_vjp
def _with_update(x: Array, statistics: PyTree, update: PyTree) -> Array:
    """x itself; the gradient of the statistics is the update, whatever the loss."""
    return x


_with_update.defvjp(
    lambda x, statistics, update: (x, update), lambda update, dx: (dx, update, jax.tree.map(jnp.zeros_like, update))
)
