"""DP-FedAvg (McMahan et al., ICLR 2018), Algorithm 1, around a method whose server averages what clients send back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedjax_pfl.method import Cohort, Method, Round
from fedjax_pfl.ops.training import Scalar, is_off, phase_key
from fedjax_pfl.ops.tree import by_row


def private(method: Method, *, clip: Scalar, noise: Scalar, expected: float) -> Method:
    """The method with a server that sees of each round only w + (sum_k clipped(w_k - w) + N(0, (z S)^2)) / E[K].

    The server treats this as it would treat a single upload. Every participant counts alike. A round in which nobody
    takes part adds noise, too: the number of participants is secret, and does not divide the sum. Updates are clipped
    where they arrive, whatever the clients do; an update with a value that is not a number, or longer than 1e19, counts
    as zero.

    Private is what leaves the server and what follows from it, the models that clients receive. A client's own state,
    which it keeps, is not private; nor are the scores, losses and diagnostics that a simulation reports.

    Args:
      method: its uploads have the form of what is sent down (`fedjax_pfl.experiment.privacy` checks what else is
        required).
      clip: S, the largest 2-norm of a client's update, all arrays together.
      noise: z, the standard deviation of the noise on the sum, as a multiple of S.
      expected: E[K], how many clients take part on average.

    Reference:
      H. B. McMahan, D. Ramage, K. Talwar, L. Zhang. Learning Differentially Private Recurrent Language Models. ICLR
      2018. arXiv:1710.06963. (Its estimator f_f, with equal weights.)
    """

    def mean(now: Round, view: PyTree, uploads: PyTree, present: Array) -> PyTree:
        updates = jax.tree.map(jnp.subtract, uploads, view)
        squares = jax.tree.map(lambda leaf: jnp.sum(leaf.reshape(len(present), -1) ** 2, axis=1), updates)
        length = jnp.sqrt(jax.tree.reduce(jnp.add, squares))
        counted = present & jnp.isfinite(length)
        factor = jnp.where(counted, jnp.minimum(1.0, clip / jnp.maximum(length, 1e-30)), 0.0)

        def moved(path: tuple, w: Array, leaf: Array) -> Array:
            total = jnp.sum(jnp.where(by_row(counted, leaf), by_row(factor, leaf) * leaf, 0.0), axis=0)
            if not is_off(noise):
                key = phase_key(phase_key(now.key, "privacy"), jax.tree_util.keystr(path))
                total += noise * clip * jax.random.normal(key, w.shape, w.dtype)
            return w + total / expected

        return jax.tree.map_with_path(moved, view, updates)

    def aggregate(
        now: Round, server: PyTree, clients: PyTree, uploads: PyTree, cohort: Cohort
    ) -> tuple[PyTree, PyTree]:
        combined = mean(now, method.broadcast(server), uploads, cohort.ids < cohort.total)
        nobody = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), clients)
        one = Cohort(jnp.zeros((1,), jnp.int32), jnp.ones((1,)), cohort.total, cohort.trainers)
        server, _ = method.aggregate(now, server, nobody, jax.tree.map(lambda leaf: leaf[None], combined), one)
        return server, clients

    return method._replace(aggregate=aggregate, acts_alone=True)
