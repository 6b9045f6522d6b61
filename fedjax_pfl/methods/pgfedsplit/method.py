"""PGFedSplit (Algorithms 1, 2): heads combined now and then, and trained on features drawn around global prototypes."""

from typing import Annotated, NamedTuple

import jax.numpy as jnp
from annotated_types import Ge, Gt, Le, Lt
from jax import lax
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Cohort, Logits, Method, PerClass, Round, Samples, SentIf, Static, Update
from fedjax_pfl.methods.pgfedsplit.gaussians import Covariance, Gaussians, Scale, add_synthetic, update_gaussians
from fedjax_pfl.methods.pgfedsplit.mixture import RESOLUTION, mix_heads
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import label_loss, masked_mean
from fedjax_pfl.ops.prototypes import Prototypes, Reduction, centre_loss, class_sums_under
from fedjax_pfl.ops.training import Trainer, cache_features, is_off


class Server(NamedTuple):
    """Shared.

    Attributes:
      extractor: theta.
      gaussians: of the features of each class.
      head: phi_tmp, if it is to be sent in the next round.
      interval: tau, rounds from one synchronisation of the heads to the next, [].
      counter: s, rounds since the last one, [].
      alpha: alpha_prev, the participants' mean coefficient at the last one, [].
    """

    extractor: Params
    gaussians: Gaussians
    head: SentIf
    interval: Int[Array, ""]
    counter: Int[Array, ""]
    alpha: Float[Array, ""]


class View(NamedTuple):
    """What is sent down: theta, (p_k, root of Sigma_k) of each class that has a prototype, and now and then phi_tmp."""

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
    ``training.epochs`` is E, of the head phase and of the extractor phase. The paper states neither beta, which was
    chosen on validation samples (benchmarks/README.md), nor the bounds of the interval.

    Args:
      model: extractor and head.
      train: the local trainer.
      combine: how the server averages extractors and heads.
      lam: lambda, weight of the pull to the prototypes (Eq. 14).
      r: share of synthetic features in what a head is trained on (Eq. 17); 0 for none (without GAU).
      beta: weight of alpha^2 times the divergence of the two heads, per round since the last mixture (Eq. 13).
      temperature: T_KD of that divergence.
      alpha: share of the client's own head in the mixture (Eq. 8); None: the minimiser of Eq. 13, for each client.
      interval: tau in round 0.
      adaptive: whether the interval follows the mean alpha (APA), or stays.
      interval_min: smallest tau.
      interval_max: largest tau.
      covariance: what is sent and used of Sigma_k.
      scale: gamma_ik, the scale of a class's synthetic features, from the client's label shares: each by the largest,
        as it is, by their mean, or 1.
      reduction: the pull as mean over the features, or as the paper's sum, at the edge of divergence with its lambda.

    Raises:
      ValueError: the interval is not within its bounds.

    Reference:
      PGFedSplit: Algorithms 1, 2, Eqs. 4-17. Its numbers are in benchmarks/papers/.
    """
    if not interval_min <= interval <= interval_max:
        raise ValueError(f"the interval of {interval} rounds is not within {interval_min} ... {interval_max}")

    def init(key: Key[Array, ""], clients: int) -> tuple[Server, Client]:
        del clients
        params: Params = model.init(key)
        none = jnp.zeros((), jnp.int32)
        gaussians = Gaussians.none(model.classes, model.dim, None if is_off(r) else covariance)
        head = SentIf(jnp.array(False), params["head"])
        server = Server(params["extractor"], gaussians, head, jnp.array(interval, jnp.int32), none, jnp.zeros(()))
        return server, Client(params["head"], none)

    def broadcast(server: Server) -> View:
        prototypes, spread = server.gaussians
        return View(server.extractor, PerClass(prototypes.valid, (prototypes.mean, spread)), server.head)

    def local(now: Round, view: View, client: Client, data: ClientData) -> Update:
        known, (means, spread) = view.per_class
        targets = Prototypes(means, known)
        mixed = cache_features(lambda x: model.features(view.extractor, x), data)
        if not is_off(r):
            mixed = add_synthetic(now.key, mixed, Gaussians(targets, spread), r=r, scale=scale)
        gap = (now.t - client.adapted).astype(jnp.float32)
        head, coefficient = lax.cond(
            view.head.sent,
            lambda: mix_heads(model, client.head, view.head.value, mixed, alpha, beta * gap, temperature),
            lambda: (client.head, jnp.zeros(())),
        )
        head = train_head(now, model, train, head, mixed)

        def loss(extractor: Params, batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            del key
            z = model.features(extractor, batch.x, batch.mask)
            ce = label_loss(model, z, model.classify(head, z), batch)
            return ce if is_off(lam) else ce + lam * centre_loss(z, batch.y, batch.mask, targets, reduction=reduction)

        extractor, info = train(now, loss, view.extractor, data)
        per_class = PerClass(data.class_counts, class_sums_under(model, extractor, data))
        upload = Upload(extractor, head, per_class, SentIf(view.head.sent, coefficient))
        client = Client(head, jnp.where(view.head.sent, now.t, client.adapted))
        return Update(client, upload, info, post=(view._replace(extractor=extractor), client))

    def aggregate(
        now: Round, server: Server, clients: Client, uploads: Upload, cohort: Cohort
    ) -> tuple[Server, Client]:
        del now
        present = (cohort.weight > 0).astype(jnp.float32)
        interval, previous = next_interval(server, masked_mean(uploads.alpha.value, present))
        due = server.counter + 1 >= interval
        extractor, head = combine(uploads.extractor, cohort.weight), combine(uploads.head, cohort.weight)
        gaussians = update_gaussians(server.gaussians, uploads.per_class, cohort.ids)
        counter = jnp.where(due, 0, server.counter + 1)
        return Server(extractor, gaussians, SentIf(due, head), interval, counter, previous), clients

    def next_interval(server: Server, mean_alpha: Float[Array, ""]) -> tuple[Int[Array, ""], Float[Array, ""]]:
        """Adaptive period adjustment, after a round in which the heads were mixed: (tau, alpha_prev)."""
        if not adaptive:
            return server.interval, server.alpha
        rise = mean_alpha - server.alpha
        change = (rise < -RESOLUTION).astype(jnp.int32) - (rise > RESOLUTION).astype(jnp.int32)
        tau, sent = jnp.clip(server.interval + change, interval_min, interval_max), server.head.sent
        return jnp.where(sent, tau, server.interval), jnp.where(sent, mean_alpha, server.alpha)

    def predict(view: View, client: Client, x: Samples) -> Logits:
        return model.apply({"extractor": view.extractor, "head": client.head}, x)

    return Method(init, local, aggregate, predict, broadcast=broadcast)
