"""GRACE (Zhang et al., MICCAI 2023): meta-learning with aligned features; the server favours clients that agree."""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jax import lax
from jaxtyping import Array, Bool, Float, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.aggregate import Combine, interpolate, weighted_mean
from fedjax_pfl.ops.losses import label_loss, supervised
from fedjax_pfl.ops.meta import deal, inner_step
from fedjax_pfl.ops.training import Trainer, is_off


def grace(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    lam: Annotated[float, Ge(0)] = 0.1,
    inner_lr: Annotated[float, Ge(0)] | None = None,
    server_lr: Annotated[float, Gt(0)] = 1.0,
) -> Method:
    """GRACE: each step descends CE + lam Align on one half of its batch, after an inner step on the other half.

    Shared: w. Personal: nothing that is kept. Headline: POST, w_i as it is sent; the global model is for clients
    outside the federation.

    Align is CORAL between the features under the adapted and the received extractor. The server weights the
    participants by n_i r_i, where r_i is the mean cosine of w^t - w_i to the updates of the others (0 for an update of
    zeros), shifted so that none is negative. The public code has no client: this one is put together from the abstract
    and the other trainers in that code, with plain SGD where these mix in Adam. The half of the outer loss gets the odd
    sample. With lam = 0, inner_lr = 0 and equal r_i it is FedAvg on these halves.

    Args:
      model: extractor and head.
      train: the local trainer; b is its rate.
      combine: the server's rule for averaging models.
      lam: weight of the alignment; public code: 0.1; try 0.01, 0.1 and 1.
      inner_lr: a, the rate of the inner step, which decays as the local rate; equal to the local rate unless given.
      server_lr: eta_s, the server's step along the weighted mean of the updates.

    Reference:
      R. Zhang, Z. Fan, Q. Xu, J. Yao, Y. Zhang, Y. Wang. GRACE: A Generalized and Personalized Federated Learning
      Method for Medical Imaging. MICCAI 2023. doi:10.1007/978-3-031-43898-1_2.
    """
    base = fedavg(model, train, combine)

    def local(now: Round, view: Params, client: PyTree, data: ClientData) -> Update:
        rate = train.rate(now.t, lr=inner_lr)

        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            outer, inner = deal(batch, 2)
            adapted = inner_step(lambda w: supervised(model, w, inner), params, rate, statistics=False)
            z = model.features(adapted["extractor"], outer.x, outer.mask)
            ce = label_loss(model, z, model.classify(adapted["head"], z), outer)
            if is_off(lam):
                return ce
            return ce + lam * _coral(z, model.features(view["extractor"], outer.x), outer.mask)

        params, info = train(now, loss, view, data)
        return Update(client, params, info)

    def aggregate(
        now: Round, server: Params, clients: PyTree, uploads: Params, cohort: Cohort
    ) -> tuple[Params, PyTree]:
        agreement = _agreement(server, uploads, cohort.weight > 0)
        weight = cohort.weight * agreement
        # Updates of zeros, or of one participant, agree with nothing.
        weight = jnp.where(jnp.sum(weight) > 0, weight, cohort.weight)
        return interpolate(server, combine(uploads, weight), server_lr), clients

    return base._replace(local=local, aggregate=aggregate, headline="post")


def _coral(
    z: Float[Array, "batch K"], reference: Float[Array, "batch K"], mask: Float[Array, " batch"]
) -> Float[Array, ""]:
    """||Cov(z) - Cov(reference)||_F^2 / (4 K^2) (Sun and Saenko, arXiv:1607.01719); 0 for fewer than two samples."""
    apart = _covariance(z, mask) - _covariance(reference, mask)
    return jnp.sum(apart**2) / (4.0 * z.shape[1] ** 2)


def _covariance(z: Float[Array, "batch K"], mask: Float[Array, " batch"]) -> Float[Array, "K K"]:
    samples, valid = jnp.sum(mask), mask[:, None]
    away = valid * (z - jnp.sum(valid * z, axis=0) / jnp.maximum(samples, 1.0))
    # Full precision: two of these are subtracted.
    return jnp.matmul(away.T, away, precision=lax.Precision.HIGHEST) / jnp.maximum(samples - 1.0, 1.0)


def _agreement(server: Params, uploads: Params, present: Bool[Array, " K"]) -> Float[Array, " K"]:
    """r_k of the participants: the mean cosine of w^t - w_k to the others' updates, made positive and at most 1."""

    def flat(path: tuple, w: Array, rows: Array) -> Array:
        update = (w - rows).reshape(len(present), -1)
        return jnp.zeros_like(update) if is_statistic(path) else jnp.where(present[:, None], update, 0.0)

    updates = jax.tree.leaves(jax.tree.map_with_path(flat, server, uploads))
    length = jnp.sqrt(sum(jnp.sum(update**2, axis=1) for update in updates))
    unit = [update / jnp.maximum(length, 1e-6)[:, None] for update in updates]
    # The sum of the cosines to all is <u_k, sum_j u_j>, of which <u_k, u_k> is to itself.
    to_others = sum(jnp.sum(u * (jnp.sum(u, axis=0) - u), axis=1) for u in unit)
    r = to_others / jnp.maximum(jnp.sum(present) - 1, 1).astype(jnp.float32)
    lowest = jnp.min(jnp.where(present, r, jnp.inf))
    r = jnp.where(lowest < 0, r - lowest + 1e-3, r)
    return r / jnp.maximum(jnp.max(jnp.where(present, r, 0.0)), 1.0)
