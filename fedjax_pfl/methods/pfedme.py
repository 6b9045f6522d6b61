"""pFedMe (T. Dinh et al., NeurIPS 2020), Algorithm 1: personal models on the Moreau envelopes of the local losses."""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt
from jax import lax
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, interpolate, weighted_mean
from fedjax_pfl.ops.losses import proximal, supervised
from fedjax_pfl.ops.training import LossTotals, Trainer


def pfedme(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    lam: Annotated[float, Gt(0)] = 15.0,
    inner_steps: Annotated[int, Ge(1)] = 5,
    personal_lr: Annotated[float, Gt(0)] = 0.09,
    beta: Annotated[float, Ge(0)] = 1.0,
    local_steps: Annotated[int, Ge(1)] | None = None,
) -> Method:
    """pFedMe: per mini-batch, K steps of theta_i down CE + (lam / 2) ||theta_i - w_i||^2, then one of w_i towards it.

    Shared: w, averaged by n_i (the paper weights clients alike). Personal: theta_i. Headline: POST (equal to the next
    round's PRE).

    In every round theta_i starts from w, and on every mini-batch from where the last one left it, as in the official
    code. That code trains all clients and averages some of them, with a weight decay of 0.001 on theta_i. Here only
    participants train, and theta_i has the trainer's momentum, weight decay and clipping, which are off by default. The
    step of w_i has the rate ``training.lr``. Stable for training.lr * lam < 1 and personal_lr * lam < 2; above 1, where
    the defaults are, theta_i oscillates around its optimum. The official code and PFLlib overwrite theta_i by w_i
    before they score it, so that their personal accuracy is that of w_i.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      lam: lambda, strength of the tie between theta_i and w_i; official: 15, 20 or 30, by data and model.
      inner_steps: K, steps of theta_i on each mini-batch.
      personal_lr: eta_p, the rate of theta_i, which decays as the local one; official: 0.09, and 0.1 for a linear
        model.
      beta: the server's step towards the mean of the w_i: 1 moves to the mean, official also 2, and 0 does not move.
      local_steps: R, mini-batches per round, official: 20; as many as in the trainer's epochs unless given.

    Reference:
      C. T. Dinh, N. H. Tran, T. D. Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020.
      arXiv:2006.08848.
    """
    base = fedavg(model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Params, Params]:
        server, _ = base.init(key, clients)
        return server, server

    def local(now: Round, view: Params, client: Params, data: ClientData) -> Update:
        optimizer = train.optimizer(now.t, view, lr=personal_lr)
        share = train.rate(now.t) * lam

        def step(carry: tuple, batch: Batch, key: Key[Array, ""]) -> tuple:
            w, theta, opt_state, totals = carry

            def loss(theta: Params) -> Float[Array, ""]:
                return supervised(model, theta, batch) + proximal(theta, w, lam)

            def descend(number: Int[Array, ""], inner: tuple) -> tuple:
                theta, opt_state, mean = inner
                value, gradient = jax.value_and_grad(loss)(theta)
                updates, opt_state = optimizer.update(gradient, opt_state, theta)
                return optax.apply_updates(theta, updates), opt_state, mean + value / inner_steps

            start = theta, opt_state, jnp.zeros((), jnp.float32)
            theta, opt_state, value = lax.fori_loop(0, inner_steps, descend, start)
            # w - eta lam (w - theta)
            return interpolate(w, theta, share), theta, opt_state, totals.after(value, batch)

        begin = view, view, optimizer.init(view), LossTotals.none()
        w, theta, _, totals = train.over_batches(now, step, begin, data, steps=local_steps)
        own = jax.tree.map(lambda new, old: jnp.where(totals.steps > 0, new, old), theta, client)
        return Update(own, w, train.info(totals, data))

    def aggregate(
        now: Round, server: Params, clients: Params, uploads: Params, cohort: Cohort
    ) -> tuple[Params, Params]:
        mean, clients = base.aggregate(now, server, clients, uploads, cohort)
        return interpolate(server, mean, beta), clients

    def personal(view: Params, client: Params) -> Params:
        return client

    return base._replace(init=init, local=local, aggregate=aggregate, personal=personal, headline="post")
