"""The mixture of a client's own and the received head, and the interval to the next (PGFedSplit, Eqs. 8, 10, 13)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import SentIf
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.distill import distillation
from fedjax_pfl.ops.training import Scalar

BISECTIONS = 20
RESOLUTION = 2.0**-BISECTIONS  # of a coefficient; means of equal ones differ by rounding, and count as equal


def mix_heads(
    model: Model,
    own: Params,
    received: SentIf,
    features: ClientData,
    alpha: Scalar | None,
    strength: Float[Array, ""],
    temperature: Scalar,
) -> tuple[Params, Float[Array, ""]]:
    """alpha own + (1 - alpha) received, and alpha (Eq. 8); the own head, and 0, if none was received.

    Args:
      model: classifies features with a head.
      own: phi_i.
      received: phi_tmp, if it was sent.
      features: the features on which alpha is chosen.
      alpha: the coefficient; None for the minimiser of Eq. 13.
      strength: beta Delta_i, weight of alpha^2 times the divergence of the two heads.
      temperature: T_KD of the divergence.
    """

    def mixed() -> tuple[Params, Float[Array, ""]]:
        if alpha is None:
            mine, theirs = model.classify(own, features.x), model.classify(received.value, features.x)
            divergence = distillation(theirs, mine, features.valid, temperature=temperature)
            coefficient = mixing_coefficient(mine, theirs, features.y, features.valid, strength * divergence)
        else:
            coefficient = jnp.asarray(alpha, jnp.float32)
        return jax.tree.map(lambda a, b: coefficient * a + (1 - coefficient) * b, own, received.value), coefficient

    return lax.cond(received.sent, mixed, lambda: (own, jnp.zeros(())))


def mixing_coefficient(
    own: Float[Array, "samples C"],
    received: Float[Array, "samples C"],
    y: Int[Array, " samples"],
    mask: Float[Array, " samples"],
    penalty: Float[Array, ""],
) -> Float[Array, ""]:
    """The alpha in [0, 1] that minimises ce(alpha own + (1 - alpha) received) + penalty alpha^2 (Eq. 13), to 2^-20.

    The objective is convex: its slope changes sign once, and the place is found by bisection. Where the objective is
    flat, as between equal heads, the client keeps its own head. The slope uses the logits relative to the true class's,
    whose own part is then 0. As (softmax - truth) times the logits, the slope would be lost in single precision where
    both heads are sure of the true class.

    Args:
      own: logits of phi_i.
      received: logits of the received head.
      y: labels.
      mask: 1 for a sample, 0 for padding.
      penalty: beta Delta_i mean KL(p_i || p_g).
    """
    apart = own - received
    ahead = apart - jnp.take_along_axis(apart, y[:, None], axis=1)
    share = mask / jnp.maximum(jnp.sum(mask), 1.0)

    def slope(alpha: Float[Array, ""]) -> Float[Array, ""]:
        rises = jnp.sum(jax.nn.softmax(received + alpha * apart) * ahead, axis=1)
        return jnp.sum(share * rises) + 2 * penalty * alpha

    def halve(_: Int[Array, ""], bounds: tuple) -> tuple:
        low, high = bounds
        middle = (low + high) / 2
        falling = slope(middle) <= 0
        return jnp.where(falling, middle, low), jnp.where(falling, high, middle)

    return lax.fori_loop(0, BISECTIONS, halve, (jnp.zeros(()), jnp.ones(())))[1]


def next_interval(interval: Int[Array, ""], rise: Float[Array, ""], bounds: tuple[int, int]) -> Int[Array, ""]:
    """Adaptive period adjustment (Eq. 10): tau is a round shorter if the mean alpha has risen, longer if it has fallen.

    Args:
      interval: the last tau, in rounds.
      rise: the mean alpha of this synchronisation minus that of the one before; 0 in rounds without one.
      bounds: tau_min and tau_max; both the same for a fixed interval.
    """
    change = (rise < -RESOLUTION).astype(jnp.int32) - (rise > RESOLUTION).astype(jnp.int32)
    return jnp.clip(interval + change, *bounds)
