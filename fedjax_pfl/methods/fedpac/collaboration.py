"""What FedPAC's clients report of their features, and the weights that combine the heads of all for each."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.methods.fedpac.simplex import simplex_qp
from fedjax_pfl.ops.matrices import map_matrices
from fedjax_pfl.ops.prototypes import Prototypes
from fedjax_pfl.ops.tree import keep_rows

NEGLIGIBLE = 1e-3  # a head with a weight up to this is dropped, also the client's own, as in the official code


class Statistics(NamedTuple):
    """How a client's features are spread under the received extractor, before any training.

    Attributes:
      h: pi_ic mu_ic, the class means weighted by label frequency; zeros for classes not held, [C, K].
      v: variance of the estimate of h, [].
    """

    h: Float[Array, "C K"]
    v: Float[Array, ""]


def statistics(features: ClientData, means: Prototypes) -> Statistics:
    """The two statistics of a client; v as a sum of squares, which rounding cannot make negative.

    v n_i = mean ||z||^2 - sum_c pi_c^2 ||mu_c||^2 = mean ||z - mu_y||^2 + sum_c pi_c (1 - pi_c) ||mu_c||^2.
    """
    samples = jnp.maximum(jnp.sum(features.class_counts), 1.0)
    share = features.class_counts / samples
    within = jnp.sum(features.valid * jnp.sum((features.x - means.mean[features.y]) ** 2, axis=1)) / samples
    between = jnp.sum(share * (1.0 - share) * jnp.sum(means.mean**2, axis=1))
    return Statistics(share[:, None] * means.mean, (within + between) / samples)


def head_weights(
    h: Float[Array, "clients C K"], v: Float[Array, " clients"], present: Bool[Array, " clients"]
) -> Float[Array, "clients clients"]:
    """Row i: the weights a with which all heads are combined for client i; they minimise a' Q_i a over the simplex.

    Q_i = diag(v) + [<h_i - h_j, h_i - h_k>]_jk. Weights up to 1e-3 are dropped, and the rest sum to 1.
    With m > 500 clients present the cut is at half of 1 / m, which the largest weight exceeds: something always stays.
    The row of a client that is not present is zero.

    Args:
      h: weighted class means of each client.
      v: variance of each.
      present: who has a head that may be used; the h and v of the others are not read.
    """
    h, v = keep_rows(present, (h, v))
    flat = h.reshape(len(h), -1)
    cut = jnp.minimum(NEGLIGIBLE, 0.5 / jnp.sum(present, dtype=jnp.float32))

    def weights(own: Float[Array, " features"]) -> Float[Array, " clients"]:
        apart = own - flat
        a = simplex_qp(jnp.diag(v) + jnp.matmul(apart, apart.T, precision=lax.Precision.HIGHEST), present)
        a = jnp.where(a > cut, a, 0.0)
        return a / jnp.maximum(jnp.sum(a), 1e-12)

    found = jnp.where(present[:, None], map_matrices(weights, flat, batch_size=64), 0.0)
    # Heads are split over devices by rows. The index keeps that from reaching back into the solver, whose devices would
    # ask each other in every step whether to go on.
    return jnp.take(found, jnp.arange(len(h)), axis=0)
