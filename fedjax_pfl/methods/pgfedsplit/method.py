"""PGFedSplit (Algorithms 1, 2): heads averaged once per interval, and trained on features drawn around prototypes."""

from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Le, Lt
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Diagnostics, Method, PerClass, Round, SentIf, Static, Update
from fedjax_pfl.methods.pgfedsplit.gaussians import Covariance, Gaussians, update_gaussians
from fedjax_pfl.methods.pgfedsplit.mixture import mix_heads, next_interval
from fedjax_pfl.methods.pgfedsplit.synthetic import Scale, add_synthetic, synthetic_ratio
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import label_loss, masked_mean
from fedjax_pfl.ops.prototypes import Prototypes, Reduction, centre_loss, sums_as_sent
from fedjax_pfl.ops.training import Scalar, Trainer, cache_features, is_off


class Server(NamedTuple):
    """Shared.

    Attributes:
      extractor: theta.
      gaussians: of the clients' prototypes of each class.
      head: phi_tmp, if it is to be sent in the next round.
      interval: tau, rounds from one synchronisation of the heads to the next, [].
      counter: s, rounds since the last synchronisation, [].
      alpha: alpha_prev, the participants' mean coefficient at the last synchronisation, [].
    """

    extractor: Params
    gaussians: Gaussians
    head: SentIf
    interval: Int[Array, ""]
    counter: Int[Array, ""]
    alpha: Float[Array, ""]


class View(NamedTuple):
    """What is sent down: theta, (p_k, root of Sigma_k) of each class with a prototype, and in some rounds phi_tmp."""

    extractor: Params
    per_class: PerClass
    head: SentIf


class Client(NamedTuple):
    """Personal: phi_i, and t_i_last, the last round in which it was mixed with a received head."""

    head: Params
    adapted: Int[Array, ""]


class Upload(NamedTuple):
    """What is sent up: theta_i, phi_i, class sums with their counts, and alpha_i in a round in which it was needed."""

    extractor: Params
    head: Params
    per_class: PerClass
    alpha: SentIf


def pgfedsplit(
    model: Model,
    train: Trainer,
    combine: Combine = weighted_mean,
    *,
    lam: Annotated[float, Ge(0)] = 5.0,
    r: Annotated[float, Ge(0), Lt(1), Static] = 0.5,
    beta: Annotated[float, Ge(0)] = 0.01,
    temperature: Annotated[float, Gt(0)] = 1.0,
    alpha: Annotated[float, Ge(0), Le(1)] | None = None,
    interval: Annotated[int, Ge(1)] = 5,
    adaptive: bool = True,
    interval_min: Annotated[int, Ge(1)] = 1,
    interval_max: Annotated[int, Ge(1)] = 20,
    covariance: Covariance = "diagonal",
    scale: Scale = "max",
    reduction: Reduction = "mse",
) -> Method:
    """PGFedSplit: the extractor is averaged in every round, the heads once per interval, which adapts itself.

    Shared: theta, prototypes, their dispersion. Personal: phi_i. Headline: PRE, the aggregated extractor under phi_i.
    ``training.epochs`` is E, of the head phase and of the extractor phase. The paper states neither beta, chosen on
    validation samples in 12 rounds, one seed (benchmarks/accuracy.md), nor the bounds of tau. A longer tau gives a
    larger Delta, a smaller alpha, and so a longer tau. Recorded: tau, and alpha, the mean at the last synchronisation
    (0 before it). Traffic counts what the selected clients receive, although Algorithm 1 broadcasts to all.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: how the server averages extractors and heads.
      lam: lambda, weight of the pull to the prototypes (Eq. 14).
      r: share of synthetic features among those that a head is trained on (Eq. 15); 0 for none (without GAU).
      beta: weight of alpha^2 times the heads' divergence, per round since the last mixture (Eq. 13).
      temperature: T_KD of that divergence.
      alpha: share of the client's own head in the mixture (Eq. 8); None: the minimiser of Eq. 13, for each client.
      interval: tau in round 0.
      adaptive: whether the interval follows the mean alpha (APA); otherwise it is fixed.
      interval_min: smallest adaptive tau.
      interval_max: largest adaptive tau.
      covariance: which part of Sigma_k, here the dispersion of prototypes (`update_gaussians`), is sent and used.
      scale: gamma_ik, from the client's label shares: divided by the largest, as they are, divided by their mean, or 1.
      reduction: the pull as mean over the K features, lambda / K of the paper's (512 in `cnn2`), or as the paper's sum.

    Raises:
      ValueError: the interval is adaptive, and not within its bounds.

    Reference:
      Y. Kang, J. Song. Separate Aggregation of Split Network for Personalized Federated Learning. 2026.
      arXiv:2605.26571. Algorithms 1, 2, Eqs. 4-17.
    """
    if adaptive and not interval_min <= interval <= interval_max:
        raise ValueError(f"the interval of {interval} rounds is not within {interval_min} ... {interval_max}")
    bounds = (interval_min, interval_max) if adaptive else (interval, interval)

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Client]:
        params: Params = model.init(key)
        zero, tau = jnp.zeros((), jnp.int32), jnp.array(interval, jnp.int32)
        gaussians = Gaussians.none(model.classes, model.dim, None if is_off(r) else covariance)
        head = SentIf(jnp.array(False), params["head"])
        return Server(params["extractor"], gaussians, head, tau, zero, jnp.zeros(())), Client(params["head"], zero)

    def broadcast(server: Server) -> View:
        prototypes, spread = server.gaussians
        return View(server.extractor, PerClass(prototypes.valid, (prototypes.mean, spread)), server.head)

    def local(now: Round, view: View, client: Client, data: ClientData) -> Update:
        known, (means, spread) = view.per_class
        targets = Prototypes(means, known)
        mixed = cache_features(lambda x: model.features(view.extractor, x), data)
        if not is_off(r):
            mixed = add_synthetic(now.key, mixed, Gaussians(targets, spread), r=r, scale=scale)
        elapsed = (now.t - client.adapted).astype(jnp.float32)
        head, coefficient = mix_heads(model, client.head, view.head, mixed, alpha, beta * elapsed, temperature)
        said = synthetic_ratio(model, head, mixed, data.count) if train.diagnose and not is_off(r) else {}
        trained = train_head(now, model, train, head, mixed)

        def loss(theta: Params, batch: Batch, key: Key[Array, ""], *, ce: float = 1.0, pull: Scalar = lam) -> Array:
            z = model.features(theta, batch.x, batch.mask)
            total = ce * label_loss(model, z, model.classify(trained, z), batch)
            apart = 0.0 if is_off(pull) else centre_loss(z, batch.y, batch.mask, targets, reduction=reduction)
            return total + pull * apart

        extractor, info = train(now, loss, view.extractor, data)
        if train.drop_last:  # synthetic features may fill a batch where the client's own samples fill none (rule R1)
            trained = jax.tree.map(lambda new, old: jnp.where(info.steps > 0, new, old), trained, head)
        terms = {} if is_off(lam) else {"lam": partial(loss, ce=0.0)}
        said |= train.gradient_ratios(now, partial(loss, pull=0.0), terms, view.extractor, data)
        upload = Upload(extractor, trained, sums_as_sent(model, extractor, data), SentIf(view.head.sent, coefficient))
        client = Client(trained, jnp.where(view.head.sent, now.t, client.adapted))
        return Update(client, upload, info, (view._replace(extractor=extractor), client), said)

    def aggregate(
        now: Round, server: Server, clients: Client, uploads: Upload, cohort: Cohort
    ) -> tuple[Server, Client]:
        present = (cohort.weight > 0).astype(jnp.float32)
        mean = jnp.where(server.head.sent, masked_mean(uploads.alpha.value, present), server.alpha)
        interval = next_interval(server.interval, mean - server.alpha, bounds)
        due = server.counter + 1 >= interval
        extractor, head = combine((uploads.extractor, uploads.head), cohort.weight)
        gaussians = update_gaussians(server.gaussians, uploads.per_class, cohort.ids)
        counter = jnp.where(due, 0, server.counter + 1)
        return Server(extractor, gaussians, SentIf(due, head), interval, counter, mean), clients

    def personal(view: View, client: Client) -> Params:
        return {"extractor": view.extractor, "head": client.head}

    def diagnose(server: Server) -> Diagnostics:
        return {"alpha": server.alpha, "interval": server.interval.astype(jnp.float32)}

    return Method(init, local, aggregate, personal, model.apply, broadcast=broadcast, diagnose=diagnose)
