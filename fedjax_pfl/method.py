"""The contract of a method: pure functions written for one client, which the engine maps over all of them.

Where a value lives says what it is. In ``server``: shared. In ``client``: personal, and kept between rounds. Returned
as ``upload``: sent up. ``broadcast(server)``, the view: sent down. A client field named ``inbox``: written for that
client by the server. Bytes per round follow from the shapes of these, so the accounting of communication cannot
disagree with what is exchanged.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Array, Float, Int, PyTree


class State(NamedTuple):
    """All that survives a round, hence all that a checkpoint stores.

    Attributes:
      server: what the clients share; no client axis.
      clients: the personal state of every client; every leaf is [N, ...].
    """

    server: PyTree
    clients: PyTree


class Cohort(NamedTuple):
    """The clients of one round, in the engine's order (largest first), with K rows.

    Attributes:
      ids: client of each row, [K]; ``total`` where the row is absent (dropped out, or there to fill up a chunk).
      weight: n_k, the training samples behind each upload, [K]; 0 for an absent row.
      total: N, the number of clients.
    """

    ids: Int[Array, " K"]
    weight: Float[Array, " K"]
    total: int


class Method(NamedTuple):
    """A federated method.

    A factory ``name(model, train, *, hyperparameters)`` builds it, closing over the model, the local trainer and the
    hyperparameters, whose names, types and defaults are the config schema of the method. Numeric hyperparameters may be
    traced values: no Python branch may depend on them, except on a coefficient that is off when the method is built.

    Attributes:
      init: key -> (server, client): the state before round 0, the same for every client.
      local: key, t, view, client, data -> (client, upload, info): a participant's work in round t, for one client.
        ``data`` is a :class:`~fedjax_pfl.data.federated.ClientData` of training samples, ``info`` a
        :class:`~fedjax_pfl.ops.local.TrainInfo`.
      aggregate: key, t, server, clients, uploads, cohort -> (server, clients): the only function that sees a client
        axis, K rows of it. Absent rows have weight 0 and uploads of zeros, and what it returns for them is discarded.
      predict: view, client, x -> logits [batch, classes]. Sees inputs only, never labels.
      broadcast: server -> view: exactly what is sent down.
      personalize: key, t, view, client, data -> (view, client): what ``predict`` is given in a PRE evaluation, after
        aggregation (fine-tuning, a meta step). Sees training data only; the result is never fed back into training.
      trained: view, client, upload -> (view, client): the same for a POST evaluation, the model right after local
        training. The default serves methods whose upload is the trained view.
      global_predict: server, x -> logits, where the method has a global model.
      headline: the evaluation point that the method is judged by, ``"pre"`` or ``"post"``.
      setup: key, view, client, data -> (client, upload), once for all N clients before round 0, aggregated with the
        full cohort at t = -1; for methods whose first round needs what only the clients know.
    """

    init: Callable
    local: Callable
    aggregate: Callable
    predict: Callable
    broadcast: Callable = lambda server: server
    personalize: Callable = lambda key, t, view, client, data: (view, client)
    trained: Callable = lambda view, client, upload: (upload, client)
    global_predict: Callable | None = None
    headline: Literal["pre", "post"] = "pre"
    setup: Callable | None = None
