"""The values that a run carries from round to round, and the randomness of a round."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int, Key

from fedjax_pfl.engine.scoring import Scored
from fedjax_pfl.engine.traffic import Traffic
from fedjax_pfl.method import Diagnostics, State


class Run(NamedTuple):
    """The values that are carried from round to round.

    Attributes:
      state: the state of server and clients.
      post: each client's POST scores, from its last participation that was evaluated; every leaf [N].
      loss: mean training loss over the participants that took a step, in the last round in which one did (or, for a
        method that counts no steps, reported a loss); NaN before the first such round.
      traffic: communication so far.
      diagnostics: means of the method's diagnostics in the last round with participants, over those that took a step,
        or over all if none did; NaN before the first such round.
    """

    state: State
    post: Scored
    loss: Float[Array, ""]
    traffic: Traffic
    diagnostics: Diagnostics


class RoundKeys(NamedTuple):
    """The keys of a round; the key of a client is ``fold_in(clients, id)`` (rule R12)."""

    select: Key[Array, ""]
    dropout: Key[Array, ""]
    aggregate: Key[Array, ""]
    clients: Key[Array, ""]


def round_keys(key: Key[Array, ""], t: Int[Array, ""]) -> RoundKeys:
    """The keys of round t; they depend only on the run's key and t."""
    return RoundKeys(*jax.random.split(jax.random.fold_in(key, t), 4))
