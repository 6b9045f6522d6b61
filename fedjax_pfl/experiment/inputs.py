"""The arguments of a program's compiled functions."""

from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Key, UInt32

from fedjax_pfl.data.federated import Clients, Federation, Samples
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import Run
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.method import State


class Row(NamedTuple):
    """The arguments in which one run differs from the other runs of its program.

    Attributes:
      keys: the keys of the initial state and of the rounds, as raw data.
      inputs: the numbers of its config that are inputs of the program, by dotted field.
      clients: index tables of the clients' training, validation and test samples, and of the pooled test set.
      malicious: whether each client is malicious, [N]; None if no client is.
      limit: the last round of the run, if runs are spread over the devices and may end before others; else None.
    """

    keys: UInt32[Array, "*runs 2 words"]
    inputs: dict[str, Float[Array, "*runs"]]
    clients: tuple[Clients, Clients | None, Clients, Clients]
    malicious: Bool[Array, "*runs N"] | None = None
    limit: Any = None  # int32 [*runs]

    def federation(self, x: Samples, y: Array) -> Federation:
        """The data of a run; its program holds the samples and labels once for all runs."""
        return Federation(x, y, *self.clients)


class Shared(NamedTuple):
    """The arguments that all runs of a program share: the samples, and the rounds to run."""

    x: Samples
    y: Array
    start: Any  # int32, traced or not
    stop: Any
    evaluate: Any


def keys_of(config: Config) -> Key[Array, "2"]:
    """The keys of a run's initial state and of its rounds."""
    return jax.random.split(jax.random.key(config.run.seed))


def layout_of(engine: Engine) -> Any:
    """The shardings of a run whose clients are spread over devices; None for one device."""
    shardings: tuple[Any, Any] = engine.placement.shardings(engine.clients)
    shared, per_client = shardings
    return None if shared is None else Run(State(shared, per_client), per_client, shared, shared, shared)


def rows_sharding(placement: Placement) -> NamedSharding | None:
    """The sharding of stacked runs."""
    return None if placement.mesh is None else NamedSharding(placement.mesh, P("clients"))
