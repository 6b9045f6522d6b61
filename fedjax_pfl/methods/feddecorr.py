"""FedDecorr (Shi et al., ICLR 2023): a loss that keeps a client's features from collapsing onto few directions."""

from typing import Annotated, Literal

import jax.numpy as jnp
from annotated_types import Ge
from jax import lax
from jaxtyping import Array, Float

from fedjax_pfl.method import Method
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.training import Scalar, Trainer, is_off

Norm = Literal["code", "paper"]


def feddecorr(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    beta: Annotated[float, Ge(0)] = 0.1,
    norm: Norm = "code",
) -> Method:
    """FedDecorr: FedAvg with the local loss CE + beta R(z), R the squared correlations between features of a batch.

    Shared: w. Personal: nothing. Headline: PRE. ``training.decorrelate`` adds the term to any other method.
    beta = 0 is FedAvg, bit for bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      beta: weight of the term; the official 0.1 belongs to ``norm = "code"``, with which 0.01 to 0.3 are as good.
      norm: scale of the term, see :func:`decorrelation`.

    Reference:
      Y. Shi, J. Liang, W. Zhang, V. Y. F. Tan, S. Bai. Towards Understanding and Mitigating Dimensional Collapse in
      Heterogeneous Federated Learning. ICLR 2023. arXiv:2210.00226.
    """
    return fedavg(decorrelated(model, beta, norm), train, combine)


def decorrelated(model: Model, beta: Scalar, norm: Norm = "code") -> Model:
    """The model with FedDecorr's term added to every loss that trains the extractor on labels."""
    if is_off(beta):
        return model

    def regularizer(z: Float[Array, "batch K"], mask: Float[Array, " batch"]) -> Float[Array, ""]:
        return beta * decorrelation(z, mask, norm=norm)

    return model._replace(regularizer=regularizer)


def decorrelation(z: Float[Array, "batch K"], mask: Float[Array, " batch"], *, norm: Norm = "code") -> Float[Array, ""]:
    """R(z) of the features of b samples; 0 for fewer than two samples or, with ``"code"``, fewer than two features.

    Args:
      z: features.
      mask: 1 for a sample, 0 for padding.
      norm: ``"paper"``: ||corr||_F^2 / K^2 (Eq. 5). ``"code"``, as in the official code: with M = (b - 1) corr, the
        mean of M_jk^2 over the pairs j != k, divided by b; this is about b times as much.
    """
    samples = jnp.sum(mask)
    centred = mask[:, None] * (z - jnp.sum(mask[:, None] * z, axis=0) / jnp.maximum(samples, 1.0))
    variance = jnp.sum(centred**2, axis=0) / jnp.maximum(samples - 1.0, 1.0)
    scaled = centred * lax.rsqrt(variance + 1e-8)
    products = jnp.matmul(scaled.T, scaled)
    dim = z.shape[1]
    if norm == "paper":
        found = jnp.sum((products / jnp.maximum(samples - 1.0, 1.0)) ** 2) / dim**2
    else:
        apart = products - jnp.diag(jnp.diagonal(products))
        found = jnp.sum(apart**2) / (dim * max(dim - 1, 1) * jnp.maximum(samples, 1.0))
    return jnp.where(samples < 2, 0.0, found)
