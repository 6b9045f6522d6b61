"""The contract of a method: pure functions written for one client, which the engine maps over all of them.

Where a value lives says what it is. In ``server``: shared. In ``client``: personal, and kept between rounds. Returned
as ``upload``: sent up. ``broadcast(server)``, the view: sent down. A client field named ``inbox``: written for that
client by the server. Bytes per round follow from the shapes of these, so the accounting of communication cannot
disagree with what is exchanged.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import jax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from fedjax_pfl.data.augment import Augment


class State(NamedTuple):
    """All that survives a round, hence all that a checkpoint stores.

    Attributes:
      server: what the clients share; no client axis.
      clients: the personal state of every client; every leaf is [N, ...].
    """

    server: PyTree
    clients: PyTree


class Static:
    """Marks a number that decides shapes, and so cannot be a traced value: ``r: Annotated[float, Static] = 0.5``."""


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


class PerClass(NamedTuple):
    """A part of a view or an upload of which only the rows of some classes are sent; the traffic counts just these.

    Attributes:
      held: not 0 for a class whose row is sent (a flag, or the number of samples), [C]; itself sent whole.
      rows: arrays of one row per class, every leaf [C, ...]; nothing may be read from the rows that are not sent.
    """

    held: Shaped[Array, "*clients C"]
    rows: PyTree


class Sometimes(NamedTuple):
    """A part of a view or an upload that is sent in some rounds only; the traffic counts just these.

    Attributes:
      sent: whether it is sent, []; itself always sent.
      value: arrays of any shape; nothing may be read from them where they are not sent.
    """

    sent: Bool[Array, "*clients"]
    value: PyTree


Part = TypeVar("Part", PerClass, Sometimes)


def part_of(tree: PyTree, kind: type[Part]) -> Part | None:
    """The part of this kind in a view or an upload, if it has one; arrays that belong together share a part."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    parts = [node for node in nodes if isinstance(node, kind)]
    assert len(parts) <= 1, f"a view or an upload has one {kind.__name__} part at most"
    return parts[0] if parts else None


class Method(NamedTuple):
    """A federated method.

    A factory ``name(model, train, *, hyperparameters)`` builds it, closing over the model, the local trainer and the
    hyperparameters, whose names, types and defaults are the config schema of the method. Numeric hyperparameters may be
    traced values, unless marked :class:`Static`: no Python branch may depend on them, except on a coefficient that is
    off when the method is built. A factory raises ``ValueError`` for a model that the method cannot run on.

    Attributes:
      init: key -> (server, client): the state before round 0, the same for every client.
      local: key, t, view, client, data -> (client, upload, info): a participant's work in round t, for one client.
        ``data`` is a :class:`~fedjax_pfl.data.federated.ClientData` of training samples, ``info`` a
        :class:`~fedjax_pfl.ops.training.TrainInfo`.
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
      augment: what is done to the client's images before ``local`` and ``personalize`` see them, drawn afresh in every
        round; ``training.augment`` of a config overrides it.
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
    augment: Augment = "none"
    setup: Callable | None = None
