"""Per-FedAvg (Fallah et al., NeurIPS 2020), Algorithm 1: a global model from which one step on own samples goes far."""

from dataclasses import replace
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jax import lax
from jaxtyping import Array, Float, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic, without_statistics
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.meta import deal, inner_step
from fedjax_pfl.ops.training import Trainer
from fedjax_pfl.ops.variates import tilt


def perfedavg(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    inner_lr: Annotated[float, Ge(0)] | None = None,
    version: Literal["first_order", "hessian_free", "exact"] = "first_order",
    delta: Annotated[float, Gt(0)] = 1e-3,
    weighting: Literal["uniform", "samples"] = "uniform",
) -> Method:
    """Per-FedAvg: every local step descends the loss on D' after an inner step on D, w <- w - b (I - a H) g(w - a g).

    Shared: w. Personal: nothing that is kept. Headline: PRE, after one inner step on one mini-batch of training
    samples; POST is w_i as it is sent. b is ``training.lr``; FedTorch has 0.001, and PFLlib a = b = ``lr``.

    A step takes 2 B samples, or 3 B if D'' is used for the Hessian H, so that an epoch is one pass over the samples.
    They are dealt in turn to D', D and D'': each gets its share of a short batch, and a single sample makes a plain
    step. With ``training.drop_last`` a client with fewer than 2 B (3 B) samples makes no step. Momentum, weight decay
    and clipping, off by default, belong to the outer step; the inner step is plain.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      inner_lr: a, the rate of the inner step, which decays as the local rate; equal to the local rate unless given;
        paper: 0.01.
      version: how H g on D'' is computed: left out (FO), by a difference of two gradients (HF), or by the derivative of
        one gradient, at about HF's cost. HF loses precision where ||g|| is small.
      delta: HF takes its gradients at w +- delta g.
      weighting: whether participants are weighted alike, as in the paper, or by n_i.

    Reference:
      A. Fallah, A. Mokhtari, A. Ozdaglar. Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
      Meta-Learning Approach. NeurIPS 2020. arXiv:2002.07948.
    """
    base = fedavg(model, train, combine)
    parts = 2 if version == "first_order" else 3
    meta = replace(train, batch_size=parts * train.batch_size)

    def gradient(params: Params, batch: Batch) -> Params:
        return jax.grad(supervised, argnums=1)(model, params, batch)

    def hessian_times(params: Params, direction: Params, batch: Batch) -> Params:
        if version == "exact":
            # Twice in reverse: `conv2d` has no forward-mode derivative.
            return jax.grad(lambda w: tilt(gradient(w, batch), direction))(params)

        def away(distance: float | Float[Array, ""]) -> Params:
            return gradient(jax.tree.map(lambda w, g: w + distance * g, params, direction), batch)

        return jax.tree.map(lambda above, below: (above - below) / (2.0 * delta), away(delta), away(-delta))

    def local(now: Round, view: Params, client: PyTree, data: ClientData) -> Update:
        rate = train.rate(now.t, lr=inner_lr)

        def loss(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            outer, inner, *rest = deal(batch, parts)
            here = params if version == "first_order" else lax.stop_gradient(params)
            adapted = inner_step(lambda w: supervised(model, w, inner), here, rate, statistics=False)
            if version == "first_order":
                return supervised(model, adapted, outer)
            value, g = jax.value_and_grad(supervised, argnums=1)(model, adapted, outer)
            curvature = hessian_times(here, without_statistics(g), *rest)

            def corrected(path: tuple, g: Array, h: Array) -> Array:
                return g if is_statistic(path) else g - rate * h

            descended = lax.stop_gradient(jax.tree.map_with_path(corrected, g, curvature))
            # A loss of this value whose gradient, as far as the trainer sees, is what the step descends.
            return lax.stop_gradient(value) + tilt(params, descended)

        params, info = meta(now, loss, view, data)
        return Update(client, params, info)

    def aggregate(
        now: Round, server: Params, clients: PyTree, uploads: Params, cohort: Cohort
    ) -> tuple[Params, PyTree]:
        present = (cohort.weight > 0).astype(jnp.float32)
        alike = cohort if weighting == "samples" else cohort._replace(weight=present)
        return base.aggregate(now, server, clients, uploads, alike)

    def personalize(now: Round, view: Params, client: PyTree, data: ClientData) -> tuple[Params, PyTree]:
        rate = train.rate(now.t, lr=inner_lr)

        def step(params: Params, batch: Batch, key: Key[Array, ""]) -> Params:
            return inner_step(lambda w: supervised(model, w, batch), params, rate)

        return train.over_batches(now, step, view, data, phase="personalize", steps=1), client

    return base._replace(local=local, aggregate=aggregate, personalize=personalize, batches_per_step=parts)
