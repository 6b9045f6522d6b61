"""PGFedSplit (Algorithms 1, 2): heads combined now and then, and trained on features drawn around global prototypes."""

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from jax import lax
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Method, PerClass, SentIf, Static
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.distill import distillation
from fedjax_pfl.ops.heads import train_head
from fedjax_pfl.ops.losses import cross_entropy, masked_mean
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    Reduction,
    centre_loss,
    class_means,
    class_sums_under,
    update_prototypes,
)
from fedjax_pfl.ops.training import Trainer, cache_features, is_off, phase_key

Covariance = Literal["diagonal", "full"]
Scale = Literal["max", "proportion", "mean", "one"]

BISECTIONS = 20
RESOLUTION = 2.0**-BISECTIONS  # of a coefficient; means of equal ones differ by rounding, and count as equal


class Gaussians(NamedTuple):
    """How the clients' prototypes of a class are distributed.

    Attributes:
      prototypes: p_k, the mean over the clients that hold the class.
      spread: a root of Sigma_k: the standard deviations, [C, K], or R with R' R = Sigma_k, [C, K, K]; None if unused.
    """

    prototypes: Prototypes
    spread: Float[Array, "C ..."] | None


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
      reduction: the pull as mean or as sum over the features; the paper writes the sum, which is at the edge of
        divergence with its lambda.

    Reference:
      PGFedSplit: Algorithms 1, 2, Eqs. 4-17. Its numbers are in benchmarks/papers/.
    """
    if not interval_min <= interval <= interval_max:
        raise ValueError(f"the interval of {interval} rounds is not within {interval_min} ... {interval_max}")

    def init(key):
        params = model.init(key)
        means = jnp.zeros((model.classes, model.dim))
        roots = {"diagonal": means, "full": jnp.zeros((model.classes, model.dim, model.dim))}
        gaussians = Gaussians(
            Prototypes(means, jnp.zeros(model.classes, bool)), None if is_off(r) else roots[covariance]
        )
        none = jnp.zeros((), jnp.int32)
        head = SentIf(jnp.array(False), params["head"])
        server = Server(params["extractor"], gaussians, head, jnp.array(interval, jnp.int32), none, jnp.zeros(()))
        return server, Client(params["head"], none)

    def broadcast(server):
        prototypes, spread = server.gaussians
        return View(server.extractor, PerClass(prototypes.valid, (prototypes.mean, spread)), server.head)

    def adapt(t, received, client, mixed):
        """Eqs. 8 and 13: the mixture of the client's head and the received one, and the coefficient alpha_i."""
        if alpha is None:
            own, other = model.classify(client.head, mixed.x), model.classify(received, mixed.x)
            gap = (t - client.adapted).astype(jnp.float32)
            divergence = distillation(other, own, mixed.valid, temperature=temperature)
            coefficient = mixing_coefficient(own, other, mixed.y, mixed.valid, beta * gap * divergence)
        else:
            coefficient = jnp.asarray(alpha, jnp.float32)
        mixture = jax.tree.map(
            lambda mine, theirs: coefficient * mine + (1 - coefficient) * theirs, client.head, received
        )
        return mixture, coefficient

    def local(key, t, view, client, data):
        known, (means, spread) = view.per_class
        prototypes = Prototypes(means, known)
        features = cache_features(lambda x: model.features(view.extractor, x), data)
        mixed = features if is_off(r) else mix(key, features, Gaussians(prototypes, spread), r=r, scale=scale)

        head, coefficient = lax.cond(
            view.head.sent,
            lambda: adapt(t, view.head.value, client, mixed),
            lambda: (client.head, jnp.zeros(())),
        )
        adapted = jnp.where(view.head.sent, t, client.adapted)
        head = train_head(key, t, model, train, head, mixed)

        def loss(extractor, batch, key):
            del key
            z = model.features(extractor, batch.x, batch.mask)
            ce = cross_entropy(model.classify(head, z), batch.y, batch.mask)
            return (
                ce if is_off(lam) else ce + lam * centre_loss(z, batch.y, batch.mask, prototypes, reduction=reduction)
            )

        extractor, info = train(key, t, loss, view.extractor, data)
        sums = class_sums_under(model, extractor, data)
        upload = Upload(extractor, head, PerClass(data.class_counts, sums), SentIf(view.head.sent, coefficient))
        return Client(head, adapted), upload, info

    def aggregate(key, t, server, clients, uploads, cohort):
        del key, t
        present = cohort.weight > 0
        mean_alpha = masked_mean(uploads.alpha.value, present.astype(jnp.float32))
        interval, counter, alpha = next_interval(server, mean_alpha)
        due = counter >= interval
        new = Server(
            extractor=weighted_mean(uploads.extractor, cohort.weight),
            gaussians=update_gaussians(server.gaussians, uploads.per_class, cohort.ids),
            head=SentIf(due, weighted_mean(uploads.head, cohort.weight)),
            interval=interval,
            counter=jnp.where(due, 0, counter),
            alpha=alpha,
        )
        return new, clients

    def next_interval(server, mean_alpha):
        """Adaptive period adjustment, after a round in which the heads were mixed."""
        counter = server.counter + 1
        if not adaptive:
            return server.interval, counter, server.alpha
        rise = mean_alpha - server.alpha
        change = (rise < -RESOLUTION).astype(jnp.int32) - (rise > RESOLUTION).astype(jnp.int32)
        changed = jnp.clip(server.interval + change, interval_min, interval_max)
        mixed = server.head.sent
        return jnp.where(mixed, changed, server.interval), counter, jnp.where(mixed, mean_alpha, server.alpha)

    def predict(view, client, x):
        return model.apply({"extractor": view.extractor, "head": client.head}, x)

    def trained(view, client, upload):
        return view._replace(extractor=upload.extractor), client

    return Method(init, local, aggregate, predict, broadcast=broadcast, trained=trained)


def mixing_coefficient(
    own: Float[Array, "samples C"],
    received: Float[Array, "samples C"],
    y: Int[Array, " samples"],
    mask: Float[Array, " samples"],
    penalty: Float[Array, ""],
) -> Float[Array, ""]:
    """The alpha in [0, 1] that minimises ce(alpha own + (1 - alpha) received) + penalty alpha^2 (Eq. 13), to 2^-20.

    The objective is convex: its slope has one sign change, which is bisected. Where it is flat, as between equal heads,
    the client keeps its own.

    Args:
      own: logits of phi_i.
      received: logits of the received head.
      y: labels.
      mask: 1 for a sample, 0 for padding.
      penalty: beta Delta_i mean KL(p_i || p_g).
    """
    apart = own - received
    truth = jax.nn.one_hot(y, own.shape[1])

    def slope(alpha: Float[Array, ""]) -> Float[Array, ""]:
        surprise = jax.nn.softmax(received + alpha * apart) - truth
        return masked_mean(jnp.sum(surprise * apart, axis=1), mask) + 2 * penalty * alpha

    def halve(_: Int[Array, ""], bounds: tuple) -> tuple:
        low, high = bounds
        middle = (low + high) / 2
        falling = slope(middle) <= 0
        return jnp.where(falling, middle, low), jnp.where(falling, high, middle)

    return lax.fori_loop(0, BISECTIONS, halve, (jnp.zeros(()), jnp.ones(())))[1]


def mix(key: Key[Array, ""], features: ClientData, gaussians: Gaussians, *, r: float, scale: Scale) -> ClientData:
    """A client's features, followed by ceil(r / (1 - r) n_i) synthetic ones (Eqs. 15-17); none before any prototype.

    The class of a synthetic feature is drawn from the client's label shares among the classes that have a prototype,
    the feature from Normal(p_k, gamma_ik^2 Sigma_k). A draw depends on the key and its number alone.

    Args:
      key: the client's key of this round.
      features: the client's samples under the received extractor, as :func:`cache_features` leaves them.
      gaussians: of each class.
      r: share of synthetic features.
      scale: gamma_ik.
    """
    (means, known), spread = gaussians
    assert spread is not None
    counts = features.class_counts
    real = features.count
    # For each possible n_i: single precision, on the device, would round some of them up once more.
    wanted = np.ceil(r / (1 - r) * np.arange(features.capacity + 1) - 1e-6).astype(np.int32)
    share = counts / jnp.maximum(jnp.sum(counts), 1.0)
    unit = {"max": jnp.max(share), "proportion": jnp.ones(()), "mean": jnp.mean(share)}
    gamma = jnp.ones_like(share) if scale == "one" else share / jnp.maximum(unit[scale], 1e-12)
    drawable = jnp.where(known, share, 0.0)
    capacity = features.capacity + int(wanted[-1])
    longer = features._replace(
        index=jnp.pad(features.index, (0, capacity - features.capacity)),
        count=real + jnp.where(jnp.any(drawable > 0), jnp.asarray(wanted)[real], 0),
    )
    key_class, key_noise = jax.random.split(phase_key(key, "synthetic"))

    def keys(key: Key[Array, ""], positions: Int[Array, " batch"]) -> Key[Array, " batch"]:
        return jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.maximum(positions - real, 0))

    def label(z: Array, positions: Int[Array, " batch"]) -> Int[Array, " batch"]:
        del z
        drawn = jax.vmap(lambda key: jax.random.categorical(key, jnp.log(drawable)))(keys(key_class, positions))
        return jnp.where(positions < real, longer.labels[positions], drawn)

    y = longer.map(label)

    def feature(z: Array, positions: Int[Array, " batch"]) -> Float[Array, "batch K"]:
        k = y[positions]
        noise = jax.vmap(lambda key: jax.random.normal(key, means.shape[1:]))(keys(key_noise, positions))
        apart = noise * spread[k] if spread.ndim == 2 else jnp.einsum("bi,bij->bj", noise, spread[k])
        return jnp.where((positions < real)[:, None], z, means[k] + gamma[k][:, None] * apart)

    # With full covariance a block gathers a matrix for each of its samples.
    x = longer.map(feature, batch_size=128 if spread.ndim == 2 else 8)
    return longer._replace(
        x=x,
        y=y,
        index=jnp.arange(capacity, dtype=jnp.int32),
        class_counts=jnp.zeros_like(counts).at[y].add(longer.valid),
    )


def update_gaussians(old: Gaussians, uploaded: PerClass, ids: Int[Array, " K"]) -> Gaussians:
    """p_k and the root of Sigma_k over the clients that hold class k, all alike (Eq. 4); absent classes keep theirs.

    Args:
      old: the last ones.
      uploaded: class sums, [clients, C, K], with their counts.
      ids: of the clients.
    """
    counts, sums = uploaded
    local, valid = jax.vmap(class_means)(sums, counts)
    held = valid.astype(jnp.float32)
    holders = jnp.sum(held, axis=0)
    new = Prototypes(jnp.sum(local, axis=0) / jnp.maximum(holders, 1.0)[:, None], holders > 0)
    prototypes = update_prototypes(old.prototypes, new)
    if old.spread is None:
        return Gaussians(prototypes, None)
    # From the deviations, never as a difference of squares.
    deviations = held[..., None] * (local - new.mean) / jnp.sqrt(jnp.maximum(holders, 1.0))[:, None]
    if old.spread.ndim == 2:
        spread = jnp.sqrt(jnp.sum(deviations**2, axis=0))
    else:
        spread = _root_of_covariance(deviations[jnp.argsort(ids)])
    keep = new.valid.reshape(-1, *(1,) * (spread.ndim - 1))
    return Gaussians(prototypes, jnp.where(keep, spread, old.spread))


def _root_of_covariance(deviations: Float[Array, "clients C K"]) -> Float[Array, "C K K"]:
    """R with R' R = D' D, the covariance of a class: as many rows as features, however many clients there are.

    QR of D itself; a Cholesky factor of the singular D' D would be NaN. Clients are ordered, so that the placement,
    which orders them otherwise, does not turn R.
    """
    roots = jnp.linalg.qr(deviations.swapaxes(0, 1), mode="r")
    return jnp.pad(roots, ((0, 0), (0, deviations.shape[2] - roots.shape[1]), (0, 0)))
