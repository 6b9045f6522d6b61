"""Who takes part in a round."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round.

    Attributes:
      low: smallest share of the clients that is selected, in (0, 1].
      high: largest share; the share of a round is drawn uniformly between the two.
      dropout: probability that a selected client fails and leaves no trace in the round.
    """

    low: float = 1.0
    high: float = 1.0
    dropout: float = 0.0

    @property
    def full(self) -> bool:
        """Whether every client takes part in every round."""
        return self.low == 1.0 and self.dropout == 0.0

    @property
    def known(self) -> bool:
        """Whether every round has the same number of participants."""
        return self.low == self.high and self.dropout == 0.0

    def cohort_size(self, clients: int) -> int:
        """K, the largest number of clients that a round selects."""
        return max(1, round(self.high * clients))
