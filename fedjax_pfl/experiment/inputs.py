"""What the compiled functions of a program are called with."""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, UInt32

from fedjax_pfl.data.federated import Clients, Federation, Samples
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import Run
from fedjax_pfl.method import State


class Row(NamedTuple):
    """What tells one run from the others of its program.

    Attributes:
      keys: of the initial state and of the rounds, as raw data.
      inputs: the numbers of its config that are inputs, by dotted field.
      clients: who trains on, validates on and is tested on what; and the pooled test set.
      malicious: which clients are; None where nobody is.
      limit: rounds that it goes to, where runs are over the devices and may end before others; else None.
    """

    keys: UInt32[Array, "*runs 2 words"]
    inputs: dict[str, Float[Array, "*runs"]]
    clients: tuple[Clients, Clients | None, Clients, Clients]
    malicious: Bool[Array, "*runs N"] | None = None
    limit: Any = None  # int32 [*runs]

    def federation(self, x: Samples, y: Array) -> Federation:
        """All data of a run, with the samples and labels that its program holds once."""
        return Federation(x, y, *self.clients)


class Shared(NamedTuple):
    """What all runs of a program see: the samples once, and which rounds are due."""

    x: Samples
    y: Array
    start: Any  # int32, traced or not
    stop: Any
    evaluate: Any


def layout_of(engine: Engine) -> Any:
    """Shardings of a run whose clients are spread over devices; None on one device."""
    shardings: tuple[Any, Any] = engine.placement.shardings(engine.clients)
    shared, per_client = shardings
    return None if shared is None else Run(State(shared, per_client), per_client, shared, shared, shared)
