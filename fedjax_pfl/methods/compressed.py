"""Any method with compressed uploads. The compressed arrays are what is uploaded, so their bytes are counted."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Cohort, Method, Round, Update
from fedjax_pfl.ops.training import phase_key
from fedjax_pfl.ops.tree import keep_rows, size
from fedjax_pfl.ops.uploads import map_values, origin_of


@partial(jax.tree_util.register_dataclass, data_fields=["values", "indices"], meta_fields=["shape"])
@dataclass(frozen=True)
class Sparse:
    """An array, or one per leading index, of which only some entries are not 0: their values and positions."""

    values: Float[Array, "*many k"]
    indices: Int[Array, "*many k"]
    shape: tuple[int, ...]

    def dense(self) -> Float[Array, "..."]:
        """The full array."""
        if self.values.ndim > 1:
            whole: Array = jax.vmap(Sparse.dense)(self)
            return whole
        zeros = jnp.zeros(math.prod(self.shape), self.values.dtype)
        return zeros.at[self.indices].set(self.values).reshape(self.shape)


@partial(jax.tree_util.register_dataclass, data_fields=["levels", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Quantised:
    """An array, or one per leading index, as integer multiples of one number."""

    levels: Int[Array, "..."]
    scale: Float[Array, "*many"]

    def dense(self) -> Float[Array, "..."]:
        """The full array."""
        scale = self.scale.reshape(*self.scale.shape, *(1,) * (self.levels.ndim - self.scale.ndim))
        return scale * self.levels.astype(scale.dtype)


Packed = Sparse | Quantised
# key, array -> what is sent of it
Codec = Callable[[Key[Array, ""], Array], Packed]


def top_k(share: float) -> Codec:
    """Keeps the entries of largest magnitude, a share of all, rounded up; each costs 4 bytes, and 4 for its index.

    Reference:
      A. F. Aji, K. Heafield. Sparse Communication for Distributed Gradient Descent. EMNLP 2017. arXiv:1704.05021.
    """

    def encode(key: Key[Array, ""], array: Array) -> Sparse:
        flat = array.reshape(-1)
        _, indices = lax.top_k(jnp.abs(flat), math.ceil(round(share * flat.size, 9)))
        return Sparse(flat[indices], indices, array.shape)

    return encode


def int8() -> Codec:
    """One byte per entry: integer multiples of the largest magnitude / 127, rounded up or down at random, unbiased.

    Reference:
      D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic. QSGD: Communication-Efficient SGD via Gradient
      Quantization and Encoding. NeurIPS 2017. arXiv:1610.02132. (There, the scale is the 2-norm.)
    """

    def encode(key: Key[Array, ""], array: Array) -> Quantised:
        scale = jnp.max(jnp.abs(array)) / 127.0
        up = jax.random.uniform(key, array.shape, array.dtype)
        levels = jnp.floor(array / jnp.where(scale > 0, scale, 1.0) + up)
        return Quantised(jnp.clip(levels, -127, 127).astype(jnp.int8), scale)

    return encode


def compressed(method: Method, encode: Codec) -> Method:
    """The method with uploads compressed array by array, without error feedback.

    The update in each array is compressed (see `origin_of`), and the server adds it to what it sent. In a `PerClass`,
    the row of each class is an array. Not compressed: arrays that are not real, running statistics, counts of classes
    held, arrays that would not shrink, all that goes down, and what is for evaluation only. POST scores w_i as trained.

    Args:
      method: the method whose uploads are compressed.
      encode: the compression of one array.
    """

    def packed(now: Round, view: PyTree, upload: PyTree) -> PyTree:
        key = phase_key(now.key, "compression")

        def array(path: tuple, sent: Array, origin: Array) -> PyTree:
            own = phase_key(key, jax.tree_util.keystr(path))
            return encode(own, sent - origin) if _shrinks(encode, own, sent) else sent

        def rows(_: Array, path: tuple, sent: Array, origin: Array) -> PyTree:
            own = jax.random.split(phase_key(key, jax.tree_util.keystr(path)), len(sent))
            return jax.vmap(encode)(own, sent - origin) if _shrinks(encode, own[0], sent[0]) else sent

        return map_values(array, upload, origin_of(method, view, upload), in_rows=rows)

    def unpacked(view: PyTree, upload: PyTree) -> PyTree:
        whole = jax.tree.map(lambda node: node.dense() if _is_packed(node) else node, upload, is_leaf=_is_packed)

        def add(node: PyTree, sent: Array, origin: Array) -> Array:
            return origin + sent if _is_packed(node) else sent

        return jax.tree.map(add, upload, whole, origin_of(method, view, whole), is_leaf=_is_packed)

    def local(now: Round, view: PyTree, client: PyTree, data: ClientData) -> Update:
        update = method.local(now, view, client, data)
        return update._replace(upload=packed(now, view, update.upload), post=update.trained)

    def setup(now: Round, view: PyTree, client: PyTree, data: ClientData) -> tuple[PyTree, PyTree]:
        assert method.setup is not None
        client, upload = method.setup(now, view, client, data)
        return client, packed(now, view, upload)

    def aggregate(
        now: Round, server: PyTree, clients: PyTree, uploads: PyTree, cohort: Cohort
    ) -> tuple[PyTree, PyTree]:
        whole = jax.vmap(partial(unpacked, method.broadcast(server)))(uploads) if jax.tree.leaves(uploads) else uploads
        whole = keep_rows(cohort.ids < cohort.total, whole)
        return method.aggregate(now, server, clients, whole, cohort)

    return method._replace(local=local, aggregate=aggregate, setup=None if method.setup is None else setup)


def _is_packed(node: PyTree) -> bool:
    return isinstance(node, Packed)


def _shrinks(encode: Codec, key: Key[Array, ""], array: Array) -> bool:
    return array.size > 0 and size(jax.eval_shape(encode, key, array)) < size(array)
