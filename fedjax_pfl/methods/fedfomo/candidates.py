"""FedFomo's candidates: which models a client is sent, and how it mixes them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.models.base import Model, Params
from fedjax_pfl.ops.losses import cross_entropy, proximal


class Candidates(NamedTuple):
    """The last models of M - 1 other clients, every leaf [M - 1, ...], and the numbers of these clients."""

    models: Params
    ids: Int[Array, " others"]


class Mix(NamedTuple):
    """The mixed model, a_j of the other clients' models, and the total weight of these in the mix, from 0 to 1."""

    params: Params
    gains: Float[Array, " others"]
    weight_of_others: Float[Array, ""]


def choose(
    key: Key[Array, ""],
    number: int,
    free: Bool[Array, " N"],
    known: Bool[Array, " N"],
    preference: Float[Array, " N"],
    explore: Float[Array, ""],
) -> Int[Array, " number"]:
    """The clients whose models one client is sent, all different.

    Args:
      key: the client's randomness.
      number: how many clients to choose.
      free: who may be chosen: all other clients.
      known: which clients have a model to send; the rest are chosen only when no more of these are left.
      preference: the client's gain from each other client so far; the largest is chosen, with ties broken at random.
      explore: the probability that a choice is made at random instead.
    """

    def slot(free: Bool[Array, " N"], key: Key[Array, ""]) -> tuple[Bool[Array, " N"], Int[Array, ""]]:
        key_kind, key_tie = jax.random.split(key)
        pool = jnp.where(jnp.any(free & known), free & known, free)
        best = pool & (preference == jnp.max(jnp.where(pool, preference, -jnp.inf)))
        among = jnp.where(jax.random.uniform(key_kind) < explore, pool, best)
        chosen = jnp.argmax(jnp.where(among, jax.random.uniform(key_tie, among.shape), -1.0))
        return free.at[chosen].set(False), chosen

    return lax.scan(slot, free, jax.random.split(key, number))[1]


def mix(model: Model, reference: Params, own: Params, others: Params | None, validation: ClientData) -> Mix:
    """ref + sum_j a_j (w_j - ref) / sum_j a_j over the a_j > 0, or ref where there is none.

    A model whose loss or distance is not finite has a_j = 0.

    Args:
      model: extractor and head.
      reference: ref, the model from which the client's model was trained.
      own: the client's model, the first candidate.
      others: the other candidates, every leaf with a row for each; None if there are none.
      validation: the client's validation samples; without any, the result is the own model.
    """

    def loss(params: Params) -> Float[Array, ""]:
        logits = validation.map(lambda x, positions: model.apply(params, x))
        return cross_entropy(logits, validation.labels, validation.valid)

    def add(sums: tuple[Array, Params], params: Params) -> tuple[tuple[Array, Params], Float[Array, ""]]:
        distance = jnp.sqrt(proximal(params, reference, 2.0))
        # The distance decides: the losses of one and the same model, computed twice, may differ by rounding.
        gain = jnp.where(distance > 0, (at_reference - loss(params)) / (distance + 1e-5), 0.0)
        gain = jnp.where(jnp.isfinite(gain), gain, 0.0)
        # Not multiplied by 0: a model that has diverged would be a part of the mix.
        difference = jax.tree.map(lambda w, ref: jnp.where(gain > 0, gain * (w - ref), 0.0), params, reference)
        return jax.tree.map(jnp.add, sums, (jnp.maximum(gain, 0.0), difference)), gain

    at_reference = loss(reference)
    of_own, _ = add((jnp.zeros(()), jax.tree.map(jnp.zeros_like, reference)), own)
    (weight, direction), gains = (of_own, jnp.zeros(0)) if others is None else lax.scan(add, of_own, others)
    scale = 1.0 / jnp.where(weight > 0, weight, 1.0)
    mixed = jax.tree.map(lambda ref, direction: ref + scale * direction, reference, direction)
    params = jax.tree.map(lambda mixed, own: jnp.where(validation.count > 0, mixed, own), mixed, own)
    return Mix(params, gains, scale * (weight - of_own[0]))
