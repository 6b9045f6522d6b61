"""The prototypes of all clients, as a server trains on them, and their augmentation (pFedCSPC, IV-C2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

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

    # u2 is one of the class's prototypes, but not u; u3 is one of the client's prototypes of other classes. An index is
    # drawn from as many as are left, and shifted by what is left out if it is not below that.
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
