"""Loss functions on masked mini-batches."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from fedjax_pfl.data.federated import Batch
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.training import Scalar, is_off


def masked_mean(values: Float[Array, " batch"], mask: Float[Array, " batch"]) -> Float[Array, ""]:
    """Mean over the samples of a padded batch, []; 0 for a batch that has only padding (rule R1)."""
    return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def cross_entropies(logits: Float[Array, "samples classes"], y: Int[Array, " samples"]) -> Float[Array, " samples"]:
    """Softmax cross-entropy of each sample; it differs from optax's in the last bits.

    On a CPU the entry of the label is read by its index. On accelerators it is selected by a comparison, because the
    derivative of an indexed read is an indexed write, which takes three separate kernels there.
    """
    logs = jax.nn.log_softmax(logits)
    return -lax.platform_dependent(logs, y, cpu=_by_index, default=_by_comparison)


# Not within the function above: JAX would trace both of them again at each of its calls.
def _by_index(logs: Array, y: Array) -> Array:
    return jnp.take_along_axis(logs, y[:, None], axis=1)[:, 0]


def _by_comparison(logs: Array, y: Array) -> Array:
    return jnp.sum(jnp.where(y[:, None] == jnp.arange(logs.shape[1]), logs, 0.0), axis=1)


def cross_entropy(
    logits: Float[Array, "batch classes"], y: Int[Array, " batch"], mask: Float[Array, " batch"]
) -> Float[Array, ""]:
    """Mean softmax cross-entropy over the samples of a padded batch, []."""
    return masked_mean(cross_entropies(logits, y), mask)


def balanced_cross_entropy(
    logits: Float[Array, "batch classes"],
    y: Int[Array, " batch"],
    mask: Float[Array, " batch"],
    class_counts: Float[Array, " classes"],
    *,
    strength: Scalar,
) -> Float[Array, ""]:
    """Balanced softmax: mean cross-entropy of logits + strength * log n_c over the samples of a padded batch, [].

    The logits themselves then need not express how frequent a class is (Ren et al., NeurIPS 2020, arXiv:2007.10740).

    Args:
      logits: the logits, without the prior log n_c.
      y: labels.
      mask: 1 for a sample, 0 for padding.
      class_counts: n_c, samples per class. A class without samples counts as if it had one, because log 0 would remove
        its logit from the softmax.
      strength: factor on the prior: 1 for balanced softmax, 0 for the plain loss.
    """
    if is_off(strength):
        return cross_entropy(logits, y, mask)
    return cross_entropy(logits + strength * jnp.log(jnp.maximum(class_counts, 1.0)), y, mask)


def regularized(
    model: Model, loss: Float[Array, ""], z: Float[Array, "batch K"], mask: Float[Array, " batch"]
) -> Float[Array, ""]:
    """A loss that trains the extractor on labels, plus the regulariser of the features z if the model has one."""
    return loss if model.regularizer is None else loss + model.regularizer(z, mask)


def label_loss(
    model: Model, z: Float[Array, "batch K"], logits: Float[Array, "batch classes"], batch: Batch
) -> Float[Array, ""]:
    """Cross-entropy of the logits, plus the regulariser of the features z if the model has one.

    For losses that also use z for other terms; other losses call :func:`supervised`.
    """
    return regularized(model, cross_entropy(logits, batch.y, batch.mask), z, batch.mask)


def supervised(model: Model, params: Params, batch: Batch) -> Float[Array, ""]:
    """The loss of plain supervised training, []: `label_loss` of the model on a batch, as a training pass."""
    z = model.features(params["extractor"], batch.x, batch.mask)
    return label_loss(model, z, model.classify(params["head"], z), batch)


def proximal(
    params: PyTree[Float[Array, "..."]], anchor: PyTree[Float[Array, "..."]], strength: float | Float[Array, ""]
) -> Float[Array, ""]:
    """(strength / 2) ||params - anchor||^2, [], over all trained leaves (running statistics are left out)."""

    def square(path: tuple, p: Array, a: Array) -> Array:
        return jnp.zeros((), p.dtype) if is_statistic(path) else jnp.sum((p - a) ** 2)

    squares = jax.tree.map_with_path(square, params, anchor)
    return 0.5 * strength * jax.tree.reduce(jnp.add, squares)
