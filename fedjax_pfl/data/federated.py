"""The federation on the device: samples are stored once; a client is a row of an index table and a count."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt8


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["sample"])
@dataclass(frozen=True)
class Pool:
    """Samples stored as flat rows, which can be indexed like an array of samples.

    A TPU pads the axes of images when it gathers some of them: a pool of 32x32 pixels would need four times its size.

    Attributes:
      rows: every sample, [samples, scalars].
      sample: the shape of one sample.
    """

    rows: Any  # an array, or something that stands for it in a tree: its shape, or its sharding
    sample: tuple[int, ...]

    @classmethod
    def of(cls, x: Shaped[np.ndarray, "samples ..."]) -> "Pool":
        """The pool of an array of samples, on the device."""
        return cls(jnp.asarray(x.reshape(len(x), -1)), x.shape[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array of the samples, (samples, ...)."""
        return (len(self.rows), *self.sample)

    def __getitem__(self, index: Int[Array | np.ndarray, " batch"]) -> Shaped[Array | np.ndarray, "batch ..."]:
        """Samples by their numbers."""
        return self.rows[index].reshape(*index.shape, *self.sample)


Samples = Shaped[Array, "samples ..."] | Pool
"""All samples of a run; the clients' index tables refer to them."""


class Batch(NamedTuple):
    """One padded mini-batch.

    Attributes:
      x: samples, as stored, [batch, ...].
      y: labels, [batch].
      mask: 1 for a sample, 0 for padding, [batch].
    """

    x: Shaped[Array, "batch ..."]
    y: Int[Array, " batch"]
    mask: Float[Array, " batch"]


@partial(jax.tree_util.register_dataclass, data_fields=["key", "places"], meta_fields=["draw", "anew"])
@dataclass(frozen=True)
class Augmentation:
    """The augmentation of a client's images, applied whenever they are read.

    Attributes:
      draw: keys [batch], x -> x, one key for each image (`fedjax_pfl.data.augment`).
      key: the key of the round's draw.
      anew: whether every training epoch draws anew; else all passes of a round see the same images.
      places: for a client whose list was reordered, the position of each image before that, from which it is drawn;
        else None.
    """

    draw: Callable[[Key[Array, " batch"], UInt8[Array, "batch h w c"]], UInt8[Array, "batch h w c"]]
    key: Key[Array, ""]
    anew: bool
    places: Int[Array, " capacity"] | None = None

    def in_epoch(self, key: Key[Array, ""]) -> "Augmentation":
        """The augmentation for a training epoch with this key."""
        return replace(self, key=key) if self.anew else self

    def __call__(self, x: UInt8[Array, "batch h w c"], positions: Int[Array, " batch"]) -> UInt8[Array, "batch h w c"]:
        """The images at these positions of the client's list; a draw depends on key and position alone."""
        positions = positions if self.places is None else self.places[positions]
        return self.draw(jax.vmap(partial(jax.random.fold_in, self.key))(positions), x)


Count = np.int32 | Int[Array, ""]
"""A number of samples; a NumPy number is known when the program is compiled."""


class ClientData(NamedTuple):
    """The samples of one client.

    Attributes:
      x: all samples, to which ``index`` refers, shared by all clients, [samples, ...]; a `Pool` when clients train.
      y: labels of all samples, [samples].
      index: rows of this client's samples in x, [capacity]; only the first ``count`` entries are valid.
      count: n_i, the number of samples of the client, [].
      class_counts: n_ic, its number of samples per class, [classes].
      original: the same client before augmentation; None if nothing was augmented.
      id: number of the client, from 0, []; 0 for all with ``participation.collaborate = false``, where each is the only
        client of its server; None if a server trains on other data than a client's samples.
      validation: the client's validation samples, for selection (rule R11); None without ``data.validation_share``.
      augmentation: the augmentation that is applied when samples are read, or None.
      most: the number of samples of the largest client that runs side by side with this one, which bounds the loops of
        all of them; None for a client that runs alone.
    """

    x: Shaped[Array, "samples ..."]
    y: Int[Array, " samples"]
    index: Int[Array, " capacity"]  # type: ignore[assignment]  # hides tuple.index
    count: Count  # type: ignore[assignment]  # hides tuple.count
    class_counts: Float[Array, " classes"]
    original: Optional["ClientData"] = None
    id: Int[Array, ""] | None = None
    validation: Optional["ClientData"] = None
    augmentation: Augmentation | None = None
    most: Count | None = None

    @property
    def capacity(self) -> int:
        """The length of the index row: the size of the largest client."""
        return self.index.shape[0]

    def take(self, positions: Int[Array, " batch"], valid: Bool[Array, " batch"]) -> Batch:
        """The samples at these positions of this client's list, [batch, ...]; padding where not valid."""
        rows = self.index[jnp.where(valid, positions, 0)]
        return Batch(self._read(rows, positions), self.y[rows], valid.astype(jnp.float32))

    def _read(self, rows: Int[Array, " batch"], positions: Int[Array, " batch"]) -> Shaped[Array, "batch ..."]:
        return self.x[rows] if self.augmentation is None else self.augmentation(self.x[rows], positions)

    def batches(self, order: Int[Array, " capacity"], batch_size: int) -> Callable[[Int[Array, ""]], Batch]:
        """A function from the number of a batch to the batch, of the client's samples in this order.

        The last batch is padded. The rows of all batches of an epoch are looked up at once, which saves a kernel in
        every step.

        Args:
          order: positions in this client's list; only the first ``count`` entries are valid.
          batch_size: samples per batch, at most the capacity.
        """
        slots = jnp.arange(math.ceil(self.capacity / batch_size) * batch_size)
        valid = slots < self.count
        positions = order[jnp.where(valid, slots, 0)]
        rows = self.index[jnp.where(valid, positions, 0)]
        listed = rows, positions, self.y[rows]

        def batch(number: Int[Array, ""]) -> Batch:
            begin = number * batch_size
            rows, positions, y = (lax.dynamic_slice_in_dim(column, begin, batch_size) for column in listed)
            mask = (begin + jnp.arange(batch_size) < self.count).astype(jnp.float32)
            return Batch(self._read(rows, positions), y, mask)

        return batch

    def reordered(self, order: Int[Array, " capacity"]) -> "ClientData":
        """The client with its list in another order, in which each image keeps its augmentation."""
        drawn = self.augmentation
        return self._replace(
            index=self.index[order], augmentation=None if drawn is None else replace(drawn, places=order)
        )

    def in_epoch(self, key: Key[Array, ""]) -> "ClientData":
        """The client as seen by a training epoch with this key."""
        return self if self.augmentation is None else self._replace(augmentation=self.augmentation.in_epoch(key))

    @property
    def labels(self) -> Int[Array, " capacity"]:
        """The label at each position of this client's list, [capacity]; arbitrary at the padding."""
        return self.y[self.index]

    @property
    def valid(self) -> Float[Array, " capacity"]:
        """1 at the positions that hold a sample, 0 at the padding, [capacity]."""
        return (jnp.arange(self.capacity) < self.count).astype(jnp.float32)

    @property
    def longest(self) -> Count:
        """The bound of loops over this client's samples: its own number, or ``most`` if it runs side by side."""
        return self.count if self.most is None else self.most

    def map(self, fn: Callable[..., Array], *, batch_size: int = 128) -> Shaped[Array, "capacity ..."]:
        """Applies a function to all samples of the client, in blocks; only the last block is padded.

        Args:
          fn: (x [batch, ...], positions [batch]) -> [batch, ...].
          batch_size: samples per block; half of it side by side with other clients, whose blocks are also in memory.

        Returns:
          The result for each position, [capacity, ...]; arbitrary but finite at the padding.
        """
        width = min(batch_size if self.most is None else max(batch_size // 2, 1), self.capacity)

        def block(number: Int[Array, ""]) -> Array:
            positions = number * width + jnp.arange(width)
            return fn(self.take(positions, positions < self.count).x, positions)

        shape = jax.eval_shape(block, jnp.zeros((), jnp.int32))
        table = jnp.zeros((math.ceil(self.capacity / width) * width, *shape.shape[1:]), shape.dtype)

        def fill(number: Int[Array, ""], table: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(table, block(number), number * width, axis=0)

        return lax.fori_loop(0, (self.longest + width - 1) // width, fill, table)[: self.capacity]


class Clients(NamedTuple):
    """The index table of the samples that clients hold: one row per client.

    Attributes:
      index: rows of the samples in the pool, padded with 0, [N, capacity].
      count: number of samples, [N].
      class_counts: samples per class, [N, classes].
      most: `ClientData.most`, in a row of clients that run side by side; else None.
    """

    index: Int[Array, "N capacity"]  # type: ignore[assignment]  # hides tuple.index
    count: Int[Array, " N"]  # type: ignore[assignment]  # hides tuple.count
    class_counts: Float[Array, "N classes"]
    most: Count | None = None


class Federation(NamedTuple):
    """All data of a run, on the device.

    Attributes:
      x: every sample once, as stored, [samples, ...], or a `Pool` of them.
      y: every label once, [samples].
      train: the clients' training samples.
      validation: the clients' validation samples; None without a validation share.
      test: the clients' test samples, which no method sees.
      pooled: the global test set, divided into blocks, in the same form as clients.
    """

    x: Samples
    y: Int[Array, " samples"]
    train: Clients
    validation: Clients | None
    test: Clients
    pooled: Clients


def pack(rows: Sequence[Int[np.ndarray, " _"]], labels: Int[np.ndarray, " samples"], classes: int) -> Clients:
    """Pads lists of sample rows, one list per client, into index tables."""
    count = np.array([len(held) for held in rows], np.int32)
    index = np.zeros((len(rows), max(1, count.max())), np.int32)
    class_counts = np.zeros((len(rows), classes), np.float32)
    for client, held in enumerate(rows):
        index[client, : len(held)] = held
        class_counts[client] = np.bincount(labels[held], minlength=classes)
    return Clients(*jax.device_put((index, count, class_counts)))


def client_data(
    x: Samples,
    y: Array,
    held: Clients,
    client_id: Int[Array, ""] | None = None,
    validation: Clients | None = None,
) -> ClientData:
    """Combines one row of :class:`Clients`, and the row of its validation samples, with the samples and labels."""
    select = None if validation is None else client_data(x, y, validation, client_id)
    index, count, class_counts, most = held
    samples: Any = x  # a pool is indexed like an array, and nothing else is done with a client's samples
    return ClientData(samples, y, index, count, class_counts, id=client_id, validation=select, most=most)
