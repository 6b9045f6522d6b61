"""FedNTD (Lee et al., NeurIPS 2022), Algorithm 1: distils the global model's predictions for all but the true class."""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jaxtyping import Array, Float, Int

from fedjax_pfl.data.federated import Batch
from fedjax_pfl.method import Logits, Method
from fedjax_pfl.methods.base_loss import BaseLoss, Term, fedavg_on
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import masked_mean
from fedjax_pfl.ops.training import Scalar, Trainer, is_off


def fedntd(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    beta: Annotated[float, Ge(0)] = 1.0,
    temperature: Annotated[float, Gt(0)] = 1.0,
) -> Method:
    """FedNTD: FedAvg with the local loss CE + beta * tau^2 KL(q^g || q^l) over all classes but the label's.

    Shared: w. Personal: nothing. Headline: PRE.

    The term keeps what the received model knows of the other classes, and leaves the label's own logit to the
    cross-entropy. With two classes the term is 0. beta = 0 is FedAvg, bit for bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      beta: weight of the distillation; paper: 1.
      temperature: tau, which softens both predictions; paper: 1.

    Reference:
      G. Lee, M. Jeong, Y. Shin, S. Bae, S.-Y. Yun. Preservation of the Global Knowledge by Not-True Distillation in
      Federated Learning. NeurIPS 2022. arXiv:2106.03097.
    """
    return fedavg_on(ntd_loss(model, beta, temperature), model, train, combine)


def ntd_loss(model: Model, beta: Scalar = 1.0, temperature: Scalar = 1.0) -> BaseLoss:
    """CE + beta * the not-true distillation from the received model (Eqs. 5, 6)."""
    if is_off(beta):
        return BaseLoss()

    def term(received: Params, last: Params) -> Term:

        def distilled(params: Params, z: Float[Array, "batch K"], logits: Logits, batch: Batch) -> Float[Array, ""]:
            teacher = model.apply(received, batch.x)
            return beta * not_true_distillation(logits, teacher, batch.y, batch.mask, temperature=temperature)

        return distilled

    return BaseLoss(term)


def not_true_distillation(
    student: Logits, teacher: Logits, y: Int[Array, " batch"], mask: Float[Array, " batch"], *, temperature: Scalar
) -> Float[Array, ""]:
    """tau^2 KL(q^g || q^l) of the softmax over all classes but the label's, mean over the batch."""
    true = y[:, None] == jnp.arange(student.shape[1])

    def not_true(logits: Logits) -> Logits:
        return jax.nn.log_softmax(jnp.where(true, -jnp.inf, logits / temperature))

    log_p, log_q = not_true(teacher), not_true(student)
    # Both are minus infinity at the label, where 0 * (difference of infinities) would be no number.
    divergence = jnp.where(true, 0.0, jnp.exp(log_p) * jnp.where(true, 0.0, log_p - log_q))
    return temperature**2 * masked_mean(jnp.sum(divergence, axis=1), mask)
