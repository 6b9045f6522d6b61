"""Who takes part in a round."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import bdtrc

# How likely a round may be to draw more clients than it has rows for, of which those with the luckiest draws stay.
_OVERFLOW = 1e-15


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round.

    Attributes:
      low: smallest share of the clients that is selected, in (0, 1].
      high: largest share; the share of a round is drawn uniformly between the two.
      dropout: probability that a selected client fails and leaves no trace in the round.
      sampling: ``fixed``: just this share of the clients, at random; ``poisson``: each client with this probability,
        whoever else is selected, so that there may be nobody.
    """

    low: float = 1.0
    high: float = 1.0
    dropout: float = 0.0
    sampling: Literal["fixed", "poisson"] = "fixed"

    @property
    def full(self) -> bool:
        """Whether every client takes part in every round."""
        return self.low == 1.0 and self.dropout == 0.0

    @property
    def known(self) -> bool:
        """Whether every round has the same number of participants."""
        return self.full or (self.low == self.high and self.dropout == 0.0 and self.sampling == "fixed")

    def cohort_size(self, clients: int) -> int:
        """K, the most clients that a round selects; with ``poisson``, one round in 10^15 would have selected more."""
        if self.sampling == "poisson":
            more = bdtrc(np.arange(clients + 1), clients, self.high)
            return max(1, int(np.argmax(more < _OVERFLOW)))
        return max(1, round(self.high * clients))
