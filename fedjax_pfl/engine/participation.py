"""Which clients take part in a round."""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key

from fedjax_pfl.engine.run import RoundKeys, round_keys

# The probability with which a round may draw more clients than it has rows for; then only those with the smallest draws
# take part.
_OVERFLOW = 1e-15
# Up to this number of clients, a cohort is the head of a random permutation: two sorts, 2 microseconds per client.
_MOST_SORTED = 20_000


@dataclass(frozen=True)
class Participation:
    """The rule by which a round selects its participants.

    Attributes:
      low: smallest share of the clients that is selected, in (0, 1].
      high: largest share; each round draws its share uniformly between the two.
      dropout: probability that a selected client drops out and has no effect on the round.
      sampling: ``fixed``: exactly this share of the clients, at random; ``poisson``: each client with this probability,
        independently of the others, so that a round may have no participants.
    """

    low: float = 1.0
    high: float = 1.0
    dropout: float = 0.0
    sampling: Literal["fixed", "poisson"] = "fixed"

    @property
    def full(self) -> bool:
        """Whether all clients take part in every round."""
        return self.low == 1.0 and self.dropout == 0.0

    @property
    def known(self) -> bool:
        """Whether every round has the same number of participants."""
        return self.full or (self.low == self.high and self.dropout == 0.0 and self.sampling == "fixed")

    def cohort_size(self, clients: int) -> int:
        """K, the largest number of clients in a round; with ``poisson`` the risk of more is less than 10^-15."""
        if self.sampling == "poisson":
            from scipy.special import bdtrc  # a tenth of a second, and hardly any run needs it

            more = bdtrc(np.arange(clients + 1), clients, self.high)
            return max(1, int(np.argmax(more < _OVERFLOW)))
        return max(1, round(self.high * clients))

    def draw(self, keys: RoundKeys, clients: int, absent: int) -> tuple[Int[Array, " K"], Int[Array, ""]]:
        """Draws the cohort of a round.

        Args:
          keys: the keys of the round.
          clients: number of clients that may take part, the first ones.
          absent: the id of a row for which no client is drawn, or whose client drops out; ``clients`` or more.

        Returns:
          The ids, [K], and the number of clients that were selected before any dropped out.
        """
        size, (key_order, key_ratio) = self.cohort_size(clients), jax.random.split(keys.select)
        ratio: Any = self.high
        if self.low < self.high:
            ratio = jax.random.uniform(key_ratio, minval=self.low, maxval=self.high)
        if self.low == 1.0:
            ids = jnp.arange(size)
        elif self.sampling == "poisson":
            draws, ids = lax.top_k(-jax.random.uniform(key_order, (clients,)), size)
            ids = jnp.where(-draws < ratio, ids, absent)
        elif clients <= _MOST_SORTED:
            ids = jax.random.permutation(key_order, clients)[:size]
        else:
            ids = lax.top_k(jax.random.uniform(key_order, (clients,)), size)[1]
        if self.low < self.high and self.sampling == "fixed":
            drawn = jnp.maximum(1, jnp.round(ratio * clients).astype(jnp.int32))
            ids = jnp.where(jnp.arange(size) < drawn, ids, absent)
        selected = jnp.sum(ids < absent)
        if self.dropout > 0.0:
            luck = jax.vmap(lambda client_id: jax.random.uniform(jax.random.fold_in(keys.dropout, client_id)))(ids)
            ids = jnp.where(luck >= self.dropout, ids, absent)
        return ids, selected


@functools.partial(jax.jit, static_argnums=(0, 1))
def rounds_participated(
    participation: Participation, clients: int, key: Key[Array, ""], rounds: Int[Array, ""]
) -> Int[Array, " clients"]:
    """The number of rounds in which each client takes part, [clients], which follows from the key alone.

    Args:
      participation: the rule by which a round selects its participants.
      clients: number of clients that may take part.
      key: the key of the run's rounds.
      rounds: number of rounds to count, from the first one on.
    """

    def one(t: Int[Array, ""], counts: Int[Array, " clients"]) -> Int[Array, " clients"]:
        ids, _ = participation.draw(round_keys(key, t), clients, clients)
        return counts.at[ids].add(1, mode="drop")

    return lax.fori_loop(0, rounds, one, jnp.zeros((clients,), jnp.int32))
