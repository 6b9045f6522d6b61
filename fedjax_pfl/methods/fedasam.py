"""FedASAM with SWA (Caldarola et al., ECCV 2022): steps that look for flat minima, and an average of late models."""

from dataclasses import replace
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Calibration, Cohort, Logits, Method, Round, Samples, Update
from fedjax_pfl.methods.base_loss import BaseLoss, fedavg_on
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.training import Loss, Scalar, Trainer, is_off


class Averaged(NamedTuple):
    """Shared: w, the average w_swa of the models at the ends of cycles, and the number of these models."""

    params: Params
    average: Params
    captured: Int[Array, ""]


def fedasam(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    rho: Annotated[float, Ge(0)] = 0.7,
    eta: Annotated[float, Ge(0)] = 0.2,
    adaptive: bool = True,
    swa_start: Annotated[int, Ge(0)] | None = None,
    swa_cycle: Annotated[int, Ge(1)] = 10,
    swa_lr: Annotated[float, Gt(0)] = 1e-4,
) -> Method:
    """FedASAM: FedAvg with the gradient taken where the loss around w is highest; with SWA, an average is scored.

    Shared: w; with SWA the server also keeps w_swa. Personal: nothing. Headline: PRE. From round ``swa_start`` on, the
    learning rate falls linearly to ``swa_lr`` in every cycle, and the model at the end of each cycle is captured. The
    mean of the captured models is scored, PRE and as the global model, while w itself continues to be trained and sent.
    ``training.lr_decay`` is applied in addition. The official code starts its average with a copy that it then
    discards, counts its cycles from round 0, and captures one round after a cycle has ended. Here cycles begin with
    ``swa_start``, and each ends with a capture, unless nobody takes part in its last round; the first captured model is
    the first of the average. rho = 0 without SWA is FedAvg, bit for bit.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: the server's rule for averaging models.
      rho: radius of the neighbourhood; official: 0.7 on CIFAR-10, and 0.1 with ``adaptive = false``.
      eta: added to |w| in the scale of a weight; official: 0.2.
      adaptive: whether this is ASAM; otherwise it is SAM, in whose neighbourhood every parameter counts alike.
      swa_start: t_0, the first round of SWA, in the paper after three quarters of all rounds; None for no SWA.
      swa_cycle: c, number of rounds in a cycle; with 1 every round's model is captured, and the rate does not change.
      swa_lr: the learning rate at the end of a cycle; official: 1e-4, from 0.01.

    Reference:
      D. Caldarola, B. Caputo, M. Ciccone. Improving Generalization in Federated Learning by Seeking Flat Minima.
      ECCV 2022. arXiv:2203.11834. ASAM: Kwon et al., ICML 2021, arXiv:2102.11600.
    """
    flat = asam_loss(model, rho, eta, adaptive)
    if swa_start is None:
        return fedavg_on(flat, model, train, combine)
    return _averaged(flat, model, train, combine, swa_start, swa_cycle, swa_lr)


def asam_loss(model: Model, rho: Scalar = 0.7, eta: Scalar = 0.2, adaptive: bool = True) -> BaseLoss:
    """The loss at w, with the gradient at w + e.

    e = rho s^2 g / ||s g||, with s = |w| + eta for weights and 1 for biases; in SAM s = 1 for all parameters.
    """
    if is_off(rho):
        return BaseLoss()

    def around(loss: Loss[Params]) -> Loss[Params]:
        def worst(params: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            # At constants: this value is only reported, and this gradient only says where w + e is.
            value, gradient = jax.value_and_grad(loss)(lax.stop_gradient(params), batch, key)

            def scale(path: tuple, w: Array) -> Array:
                if is_statistic(path):
                    return jnp.zeros_like(w)
                return jnp.abs(w) + eta if adaptive and getattr(path[-1], "key", None) != "bias" else jnp.ones_like(w)

            scales = jax.tree.map_with_path(scale, lax.stop_gradient(params))
            squares = jax.tree.map(lambda s, g: jnp.sum((s * g) ** 2), scales, gradient)
            length = jnp.sqrt(jax.tree.reduce(jnp.add, squares)) + 1e-16
            # What the step sees is the gradient there; how e depends on w is left out.
            there = jax.tree.map(
                lambda w, s, g: w + lax.stop_gradient(rho * s**2 * g / length), params, scales, gradient
            )
            highest = loss(there, batch, key)
            # Reported is the loss at w, as for every method; the gradient is that at w + e.
            return value + (highest - lax.stop_gradient(highest))

        return worst

    return BaseLoss(around=around)


def _averaged(
    flat: BaseLoss, model: Model, train: Trainer, combine: Combine, start: int, cycle: int, lowest: Scalar
) -> Method:
    """The rounds with stochastic weight averaging on the server."""
    method = fedavg_on(flat, model, train, combine)

    def init(key: Key[Array, ""], clients: int) -> tuple[Averaged, PyTree]:
        server, client = method.init(key, clients)
        return Averaged(server, server, jnp.zeros((), jnp.int32)), client

    def local(now: Round, view: Params, client: PyTree, data: ClientData) -> Update:
        share = ((now.t - start) % cycle + 1).astype(jnp.float32) / cycle
        falling = (now.t >= start) & (cycle > 1)
        rate = jnp.where(falling, (1.0 - share) * train.lr + share * lowest, train.lr)
        return fedavg_on(flat, model, replace(train, lr=rate), combine).local(now, view, client, data)

    def aggregate(
        now: Round, server: Averaged, clients: PyTree, uploads: Params, cohort: Cohort
    ) -> tuple[Averaged, PyTree]:
        params, clients = method.aggregate(now, server.params, clients, uploads, cohort)
        ends = (now.t >= start) & ((now.t - start) % cycle == cycle - 1)
        captured = server.captured + ends.astype(jnp.int32)
        number = jnp.maximum(captured, 1).astype(jnp.float32)
        mean = jax.tree.map(lambda old, new: jnp.where(ends, old + (new - old) / number, old), server.average, params)
        return Averaged(params, mean, captured), clients

    def scored(now: Round, server: Averaged, uploads: PyTree, cohort: Cohort) -> Averaged:
        averaged = server.captured > 0
        scored_params = jax.tree.map(lambda mean, w: jnp.where(averaged, mean, w), server.average, server.params)
        return server._replace(params=scored_params)

    def global_predict(server: Averaged, x: Samples) -> Logits:
        return model.apply(server.params, x)

    return method._replace(
        init=init,
        local=local,
        aggregate=aggregate,
        broadcast=lambda server: server.params,
        global_predict=global_predict,
        calibrate=Calibration(lambda now, view, client, data: (), scored),
    )
