"""Cross-silo prototypical calibration: what a server learns from the prototypes of all clients (pFedCSPC, IV-C2)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from fedjax_pfl.data.federated import Batch, ClientData
from fedjax_pfl.method import Round
from fedjax_pfl.methods.pfedcspc.initial import project
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import cross_entropy, masked_mean
from fedjax_pfl.ops.prototypes import l2_normalize
from fedjax_pfl.ops.training import Scalar, Trainer, is_off

STEPS = (0.1, 0.3, 0.5)  # lambda of the augmentation is one of these (section V-A3)


class Corpus(NamedTuple):
    """The prototypes of all clients without gaps: those of one client, and within it those of one class, side by side.

    Attributes:
      u: the prototypes; the first ``count`` rows mean something, [P, d].
      y: their classes, [P].
      client: whose they are, counted by rising id, [P].
      count: number of prototypes, [].
      class_start: where the prototypes of the row's client and class begin, [P].
      class_size: how many these are, [P].
      client_start: where the prototypes of the row's client begin, [P].
      client_size: how many these are, [P].
    """

    u: Float[Array, "P d"]
    y: Int[Array, " P"]
    client: Int[Array, " P"]
    count: Int[Array, ""]  # type: ignore[assignment]  # hides tuple.count
    class_start: Int[Array, " P"]
    class_size: Int[Array, " P"]
    client_start: Int[Array, " P"]
    client_size: Int[Array, " P"]


@dataclass(frozen=True)
class Calibrator:
    """How the server trains projection head and classifier on the prototypes of all clients (Eqs. 10-13, 17).

    Numeric fields but the counts may be traced values.

    Attributes:
      eta: weight of both contrastive losses.
      augmented: n_aug, pairs of augmented samples per prototype; 0 leaves their loss out.
      margin: alpha of their loss.
      temperature: tau_g, of the contrast between the clients' prototypes.
      lr: learning rate in the first rounds.
      lr_drops: rounds from which on it is a tenth of what it was.
      epochs: passes over the prototypes.
      epochs_per_drop: passes after which the learning rate is a tenth of what it was, within a round.
      batch_size: prototypes per step.
      weight_decay: L2 coefficient.
    """

    eta: Scalar
    augmented: int
    margin: Scalar
    temperature: Scalar
    lr: Scalar
    lr_drops: tuple[int, ...]
    epochs: int
    epochs_per_drop: int
    batch_size: int
    weight_decay: Scalar

    def __call__(
        self,
        now: Round,
        model: Model,
        params: Params,
        u: Float[Array, "K C M d"],
        valid: Bool[Array, "K C M"],
        ids: Int[Array, " K"],
    ) -> Params:
        """The global model with H and F retrained; E_g is frozen.

        Args:
          now: the round, and the server's key in it.
          model: projects and classifies.
          params: the averaged model.
          u: the prototypes of K clients, M places per class.
          valid: which of these hold one.
          ids: of the clients.
        """
        train = Trainer(batch_size=self.batch_size, weight_decay=self.weight_decay)
        corpus = gather(u, valid, ids)
        rows = jnp.arange(len(corpus.y), dtype=jnp.int32)
        data = ClientData(rows, corpus.y, rows, corpus.count, jnp.sum(valid, axis=(0, 2), dtype=jnp.float32))

        def loss(trained: tuple[Params, Params], batch: Batch, key: Key[Array, ""]) -> Float[Array, ""]:
            projection, head = trained
            z = project(model, projection, corpus.u[batch.x])
            total = cross_entropy(model.classify(head, z), batch.y, batch.mask)
            if is_off(self.eta):
                return total
            contrast = weighted_contrast(z, batch.y, corpus.client[batch.x], batch.mask, temperature=self.temperature)
            if self.augmented > 0:
                samples = augment_prototypes(key, corpus, batch.x, pairs=self.augmented)
                positive, negative = (project(model, projection, u) for u in (samples.positive, samples.negative))
                mask = batch.mask * samples.exists
                contrast += augmented_contrast(z, positive, negative, mask, margin=self.margin)
            return total + self.eta * contrast

        lr = self.lr * 0.1 ** sum((now.t >= drop).astype(jnp.float32) for drop in self.lr_drops)

        def epochs_at_one_rate(number: Int[Array, ""], trained: tuple[Params, Params]) -> tuple[Params, Params]:
            epochs = jnp.minimum(self.epochs_per_drop, self.epochs - number * self.epochs_per_drop)
            rate = lr * 0.1 ** number.astype(jnp.float32)
            turn = Round(jax.random.fold_in(now.key, number), now.t)
            return train(turn, loss, trained, data, epochs=epochs, lr=rate)[0]

        heads = params["extractor"]["projection"], params["head"]
        drops = math.ceil(self.epochs / self.epochs_per_drop)
        projection, head = lax.fori_loop(0, drops, epochs_at_one_rate, heads)
        return {"extractor": {**params["extractor"], "projection": projection}, "head": head}


class Augmented(NamedTuple):
    """Augmented samples of a batch of prototypes (Eq. 10).

    Attributes:
      positive: extrapolations away from a prototype of the same client and class, [batch, n, d].
      negative: interpolations towards a prototype of the same client and another class, [batch, n, d].
      exists: whether there were such prototypes, [batch].
    """

    positive: Float[Array, "batch n d"]
    negative: Float[Array, "batch n d"]
    exists: Float[Array, " batch"]


def gather(u: Float[Array, "K C M d"], valid: Bool[Array, "K C M"], ids: Int[Array, " K"]) -> Corpus:
    """Gathers the prototypes of K clients.

    Args:
      u: M places for prototypes per client and class.
      valid: which of these hold one.
      ids: of the clients; they order the corpus, which the placement must not.
    """
    clients, classes, places = valid.shape
    by_id = jnp.argsort(ids)
    u, valid = u[by_id], valid[by_id]
    order = jnp.argsort(~valid.reshape(-1), stable=True)
    group = order // places
    client, y = group // classes, group % classes
    class_size = jnp.sum(valid, axis=2, dtype=jnp.int32).reshape(-1)
    client_size = jnp.sum(class_size.reshape(clients, classes), axis=1)
    return Corpus(
        u=u.reshape(-1, u.shape[-1])[order],
        y=y,
        client=client,
        count=jnp.sum(client_size),
        class_start=(jnp.cumsum(class_size) - class_size)[group],
        class_size=class_size[group],
        client_start=(jnp.cumsum(client_size) - client_size)[client],
        client_size=client_size[client],
    )


def augment_prototypes(key: Key[Array, ""], corpus: Corpus, rows: Int[Array, " batch"], *, pairs: int) -> Augmented:
    """Draws pairs of augmented samples: u+ = (u - u2) lambda + u and u- = (u3 - u) lambda + u (Eq. 10).

    Args:
      key: the randomness of partners and of lambda.
      corpus: all prototypes.
      rows: the numbers of the prototypes u.
      pairs: n_aug, for each of them.
    """
    shape = (len(rows), pairs)
    key_positive, key_negative, key_steps = jax.random.split(key, 3)
    u, class_start, class_size = corpus.u[rows], corpus.class_start[rows, None], corpus.class_size[rows, None]

    def draw(key: Key[Array, ""], size: Int[Array, "batch 1"]) -> Int[Array, "batch n"]:
        number = jnp.floor(jax.random.uniform(key, shape) * size.astype(jnp.float32)).astype(jnp.int32)
        return jnp.clip(number, 0, jnp.maximum(size - 1, 0))

    # Draw an index with the excluded block removed, then shift past it: for u2 that block is u, for u3 it is u's class.
    same = class_start + draw(key_positive, class_size - 1)
    same += (same >= rows[:, None]).astype(jnp.int32)
    other = corpus.client_start[rows, None] + draw(key_negative, corpus.client_size[rows, None] - class_size)
    other += jnp.where(other >= class_start, class_size, 0)
    steps = jnp.array(STEPS)[jax.random.randint(key_steps, (2, *shape, 1), 0, len(STEPS))]
    exists = (class_size > 1) & (corpus.client_size[rows, None] > class_size)
    u = u[:, None, :]
    return Augmented(
        positive=u + steps[0] * (u - corpus.u[same]),
        negative=u + steps[1] * (corpus.u[other] - u),
        exists=exists[:, 0].astype(jnp.float32),
    )


def weighted_contrast(
    z: Float[Array, "batch K"],
    y: Int[Array, " batch"],
    client: Int[Array, " batch"],
    mask: Float[Array, " batch"],
    *,
    temperature: float | Float[Array, ""],
    easy: float = 0.5,
) -> Float[Array, ""]:
    """Supervised contrastive loss over a batch of prototypes, pairs weighted (Eq. 12); mean over the batch.

    Args:
      z: projections; compared by their cosines.
      y: classes.
      client: whose prototypes they are.
      mask: 1 for a prototype, 0 for padding; one without another of its class in the batch contributes zero.
      temperature: tau_g.
      easy: weight of pairs of the same class and client, or of different classes and clients. The others, which are
        harder to bring together or apart, have weight 1. With 1 this is the loss of Khosla et al. (NeurIPS 2020).
    """
    others = (mask > 0)[None, :] & ~jnp.eye(len(y), dtype=bool)
    alike = y[:, None] == y[None, :]
    hard = alike != (client[:, None] == client[None, :])
    z = l2_normalize(z)
    scores = jnp.matmul(z, z.T) / temperature + jnp.where(hard, 0.0, jnp.log(easy))
    log_p = scores - jax.nn.logsumexp(jnp.where(others, scores, -1e9), axis=1, keepdims=True)
    positive = (alike & others).astype(z.dtype)
    number = jnp.sum(positive, axis=1)
    return masked_mean(-jnp.sum(log_p * positive, axis=1) / jnp.maximum(number, 1.0), mask)


def augmented_contrast(
    z: Float[Array, "batch K"],
    positive: Float[Array, "batch n K"],
    negative: Float[Array, "batch n K"],
    mask: Float[Array, " batch"],
    *,
    margin: float | Float[Array, ""],
) -> Float[Array, ""]:
    """max(0, ||z - z+||^2 - ||z - z-||^2 + margin), mean over pairs and batch (Eq. 11, which omits the maximum).

    Args:
      z: projections of the prototypes.
      positive: projections of their positive augmented samples.
      negative: likewise of the negative ones.
      mask: 1 for a prototype that has such samples.
      margin: alpha.
    """
    near = jnp.sum((z[:, None, :] - positive) ** 2, axis=-1)
    far = jnp.sum((z[:, None, :] - negative) ** 2, axis=-1)
    return masked_mean(jnp.mean(jax.nn.relu(near - far + margin), axis=1), mask)
