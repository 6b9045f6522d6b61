"""Any method in which some clients are malicious, the same clients during the whole run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key, PyTree

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Method, Round, Update
from fedjax_pfl.ops.training import Scalar, phase_key
from fedjax_pfl.ops.tree import by_row
from fedjax_pfl.ops.uploads import map_values, origin_of

# key, one array of an update, which of its entries are sent, scale -> what an attacker sends in its place
Lie = Callable[[Key[Array, ""], Array, Bool[Array, "..."], Scalar], Array]


def _gaussian(key: Key[Array, ""], update: Array, sent: Bool[Array, "..."], scale: Scalar) -> Array:
    size = jnp.sqrt(jnp.mean(update**2, where=sent))
    return update + scale * size * jax.random.normal(key, update.shape, update.dtype)


LIES: dict[str, Lie] = {
    "sign_flip": lambda key, update, sent, scale: -update,
    "gaussian": _gaussian,
    "scaled": lambda key, update, sent, scale: scale * update,
}


def attacked(method: Method, kind: str, attackers: Bool[Array, " N"], scale: Scalar = 1.0) -> Method:
    """The method with some malicious clients.

    With ``label_flip``, an attacker trains on labels C - 1 - y. With the other kinds it trains honestly and falsifies
    what it sends. Let u be the update in one array (see `origin_of`; u is the whole array if the array is no update of
    anything sent down). The attacker sends -u (``sign_flip``), scale u (``scaled``), or u plus noise whose standard
    deviation is ``scale`` times the root mean square of u (``gaussian``). Of a `PerClass`, only the rows of the classes
    that it holds are falsified. Running statistics, (co)variances, integers, counts of classes held, and n_i, by which
    the server weights, are never falsified. An attacker falsifies every upload, also that of round -1.

    Args:
      method: the method that is attacked.
      kind: ``label_flip``, or one of ``LIES``.
      attackers: whether each client is an attacker.
      scale: factor of ``gaussian`` and ``scaled``.
    """

    everything = jnp.array(True)

    def seen(data: ClientData) -> ClientData:
        return _relabelled(data, attackers[data.id]) if kind == "label_flip" else data

    def sent(now: Round, view: PyTree, upload: PyTree, data: ClientData) -> PyTree:
        if kind == "label_flip":
            return upload
        key, lies = phase_key(now.key, "attack"), attackers[data.id]

        def lie(path: tuple, honest: Array, origin: Array, sent: Bool[Array, "..."] = everything) -> Array:
            own = phase_key(key, jax.tree_util.keystr(path))
            return jnp.where(lies & sent, origin + LIES[kind](own, honest - origin, sent, scale), honest)

        def in_rows(held: Array, path: tuple, honest: Array, origin: Array) -> Array:
            return lie(path, honest, origin, by_row(held.astype(bool), honest))

        return map_values(lie, upload, origin_of(method, view, upload), in_rows=in_rows)

    def local(now: Round, view: PyTree, client: PyTree, data: ClientData) -> Update:
        update = method.local(now, view, client, seen(data))
        return update._replace(upload=sent(now, view, update.upload, data), post=update.trained)

    def setup(now: Round, view: PyTree, client: PyTree, data: ClientData) -> tuple[PyTree, PyTree]:
        assert method.setup is not None
        client, upload = method.setup(now, view, client, seen(data))
        return client, sent(now, view, upload, data)

    def calibrate(now: Round, view: PyTree, client: PyTree, data: ClientData) -> PyTree:
        assert method.calibrate is not None
        return sent(now, view, method.calibrate.local(now, view, client, seen(data)), data)

    return method._replace(
        local=local,
        setup=None if method.setup is None else setup,
        calibrate=None if method.calibrate is None else method.calibrate._replace(local=calibrate),
    )


def _relabelled(data: ClientData, flipped: Bool[Array, ""]) -> ClientData:
    """The client's training samples with labels C - 1 - y if flipped; its validation samples are unchanged."""
    counts = data.class_counts
    original = None if data.original is None else _relabelled(data.original, flipped)
    labels = jnp.where(flipped, counts.shape[-1] - 1 - data.y, data.y)
    return data._replace(y=labels, class_counts=jnp.where(flipped, counts[::-1], counts), original=original)
