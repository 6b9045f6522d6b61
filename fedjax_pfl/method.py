"""The contract of a method: pure functions written for one client, which the engine maps over all of them.

Where a value lives says what it is. In ``server``: shared. In ``client``: personal, and kept between rounds. Returned
as ``upload``: sent up. ``broadcast(server)``, the view: sent down. A client field named ``inbox``: written for that
client by the server. Bytes per round follow from the shapes of these, so the accounting of communication cannot
disagree with what is exchanged.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped

from fedjax_pfl.data.augment import Copies
from fedjax_pfl.data.federated import ClientData

Samples = Shaped[Array, "batch ..."]
Logits = Float[Array, "batch classes"]
Diagnostics = dict[str, Shaped[Array, ""]]
"""Named numbers that say whether the parts of a method are at work; recorded as ``diagnostics.NAME``."""


class State(NamedTuple):
    """All that survives a round, hence all that a checkpoint stores.

    Attributes:
      server: what the clients share; no client axis.
      clients: the personal state of every client; every leaf is [N, ...].
    """

    server: PyTree
    clients: PyTree


class Round(NamedTuple):
    """When a function of a method is called, and with which randomness.

    Attributes:
      key: of the client in this round, or of the server; a phase draws from ``phase_key(now.key, name)``.
      t: the round, from 0; -1 in ``setup``.
    """

    key: Key[Array, ""]
    t: Int[Array, ""]


class TrainInfo(NamedTuple):
    """What a client reports of its local training.

    Attributes:
      loss: mean training loss over all samples of all epochs, each taken before its step.
      steps: tau_i, the number of SGD steps taken.
    """

    loss: Float[Array, ""]
    steps: Int[Array, ""]


class Static:
    """Marks a number that decides shapes, and so cannot be a traced value: ``r: Annotated[float, Static] = 0.5``."""


class Cohort(NamedTuple):
    """The clients of one round, in the engine's order (largest first), with K rows.

    Attributes:
      ids: client of each row, [K]; ``total`` where the row is absent (dropped out, or there to fill up a chunk).
      weight: n_k, the training samples behind each upload, [K]; 0 for an absent row.
      total: N, the number of clients, the new ones included.
      trainers: how many of them, the first ones, may take part: what a mean over "all clients" divides by.
    """

    ids: Int[Array, " K"]
    weight: Float[Array, " K"]
    total: int
    trainers: int


class PerClass(NamedTuple):
    """A part of a view or an upload of which only the rows of some classes are sent; the traffic counts just these.

    Attributes:
      held: not 0 for a class whose row is sent (a flag, or the number of samples), [C]; itself sent whole.
      rows: arrays of one row per class, every leaf [C, ...]; nothing may be read from the rows that are not sent.
    """

    held: Shaped[Array, "*clients C"]
    rows: PyTree

    def if_used(self, *coefficients: float | Float[Array, ""]) -> "PerClass":
        """The part where a coefficient is not 0, else without a row: a term that is off sends nothing.

        By value, so that this costs the same alone and beside other coefficients in one program.
        """
        used = jnp.any(jnp.stack([jnp.asarray(weight, jnp.float32) for weight in coefficients]) != 0)
        return self._replace(held=jnp.where(used, self.held, jnp.zeros_like(self.held)))


class SentIf(NamedTuple):
    """A part of a view or an upload that is sent only when a flag is true; the traffic counts just these rounds.

    Attributes:
      sent: whether it is sent, []; itself always sent.
      value: arrays of any shape; nothing may be read from them where they are not sent.
    """

    sent: Bool[Array, "*clients"]
    value: PyTree


Part = TypeVar("Part", PerClass, SentIf)


def part_of(tree: PyTree, kind: type[Part]) -> Part | None:
    """The part of this kind in a view or an upload, if it has one; arrays that belong together share a part."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    parts = [node for node in nodes if isinstance(node, kind)]
    assert len(parts) <= 1, f"a view or an upload has one {kind.__name__} part at most"
    return parts[0] if parts else None


class Update(NamedTuple):
    """What a participant's work in a round comes to.

    Attributes:
      client: its new personal state.
      upload: what it sends up.
      info: loss and number of steps.
      post: the (view, client) that ``personal`` is given in a POST evaluation, the model right after local training;
        (upload, client) unless given, which serves methods whose upload is the trained view.
      diagnostics: of this client; the mean over the participants of a round is recorded. None for none.
    """

    client: PyTree
    upload: PyTree
    info: TrainInfo
    post: tuple[PyTree, PyTree] | None = None
    diagnostics: Diagnostics | None = None

    @property
    def trained(self) -> tuple[PyTree, PyTree]:
        """The (view, client) of the POST evaluation."""
        return (self.upload, self.client) if self.post is None else self.post


@runtime_checkable
class Init(Protocol):
    """key, clients -> (server, client): the state before round 0; that of a client is the same for all N of them."""

    def __call__(self, key: Key[Array, ""], clients: int, /) -> tuple[PyTree, PyTree]: ...  # noqa: D102


@runtime_checkable
class Local(Protocol):
    """now, view, client, data -> update: a participant's work in a round, for one client."""

    def __call__(self, now: Round, view: PyTree, client: PyTree, data: ClientData, /) -> Update: ...  # noqa: D102


@runtime_checkable
class Aggregate(Protocol):
    """now, server, clients, uploads, cohort -> (server, clients): the server's work at the end of a round.

    Every leaf of ``clients`` and ``uploads`` has K rows. Absent rows have weight 0 and uploads of zeros, and what is
    returned for them is discarded.
    """

    def __call__(  # noqa: D102
        self, now: Round, server: PyTree, clients: PyTree, uploads: PyTree, cohort: Cohort, /
    ) -> tuple[PyTree, PyTree]: ...


@runtime_checkable
class Personal(Protocol):
    """view, client -> the parameters of the client's model."""

    def __call__(self, view: PyTree, client: PyTree, /) -> PyTree: ...  # noqa: D102


@runtime_checkable
class Predict(Protocol):
    """params, x -> logits [batch, classes] of such a model; sees inputs only, never labels."""

    def __call__(self, params: PyTree, x: Samples, /) -> Logits: ...  # noqa: D102


@runtime_checkable
class Broadcast(Protocol):
    """server -> view: exactly what is sent down."""

    def __call__(self, server: PyTree, /) -> PyTree: ...  # noqa: D102


@runtime_checkable
class Personalize(Protocol):
    """now, view, client, data -> (view, client): what ``personal`` is given in a PRE evaluation, after aggregation.

    Fine-tuning, or a meta step. Sees training data only; the result is never fed back into training.
    """

    def __call__(  # noqa: D102
        self, now: Round, view: PyTree, client: PyTree, data: ClientData, /
    ) -> tuple[PyTree, PyTree]: ...


@runtime_checkable
class GlobalPredict(Protocol):
    """server, x -> logits of the global model."""

    def __call__(self, server: PyTree, x: Samples, /) -> Logits: ...  # noqa: D102


@runtime_checkable
class Setup(Protocol):
    """now, view, client, data -> (client, upload): a client's part in round -1, in which nothing is sent down."""

    def __call__(  # noqa: D102
        self, now: Round, view: PyTree, client: PyTree, data: ClientData, /
    ) -> tuple[PyTree, PyTree]: ...


@runtime_checkable
class Dispatch(Protocol):
    """now, server, clients, cohort -> inbox: what the server writes for each of K clients before they work.

    Every leaf of the result has K rows, and takes the place of the field ``inbox`` of these clients.
    """

    def __call__(self, now: Round, server: PyTree, clients: PyTree, cohort: Cohort, /) -> PyTree: ...  # noqa: D102


class Calibration(NamedTuple):
    """A federated pass before scoring, for methods that do not score what they broadcast; training never sees it.

    Attributes:
      local: now, view, client, data -> upload, for one client.
      server: now, server, uploads, cohort -> server, the one whose broadcast and global model are scored.
    """

    local: Callable[[Round, PyTree, PyTree, ClientData], PyTree]
    server: Callable[[Round, PyTree, PyTree, Cohort], PyTree]


def broadcast_all(server: PyTree) -> PyTree:
    """Sends all of the server's state down."""
    return server


def personalize_nothing(now: Round, view: PyTree, client: PyTree, data: ClientData) -> tuple[PyTree, PyTree]:
    """Scores what the client has received and kept, as it is."""
    del now, data
    return view, client


def no_diagnostics(server: PyTree) -> Diagnostics:
    """Nothing to say."""
    del server
    return {}


class Method(NamedTuple):
    """A federated method.

    A factory ``name(model, train, combine, *, hyperparameters)`` builds it, closing over the model, the local trainer,
    the server's rule for averaging parameters (left out by methods that average none) and the hyperparameters, whose
    names, types and defaults are the config schema of the method. Numeric hyperparameters may be traced values, unless
    marked :class:`Static`: no Python branch may depend on them, except on a coefficient that is off when the method is
    built. A factory raises ``ValueError`` for a model that the method cannot run on.

    Attributes:
      init: the state before round 0.
      local: a participant's work in a round.
      aggregate: the server's work; besides it, ``dispatch`` and the server of ``calibrate`` see a client axis.
      personal: the parameters of a client's model: ``{"extractor": theta, "head": phi}``, as a model's ``init`` returns
        them, with whatever else ``predict`` needs.
      predict: what such a model answers; ``model.apply``, unless it is more than an extractor with one head.
      broadcast: what is sent down; all of the server's state unless given.
      personalize: what comes before a PRE evaluation; nothing unless given.
      global_predict: the global model, where the method has one.
      headline: the evaluation point that the method is judged by, ``"pre"`` or ``"post"``.
      copies: augmented copies that the method adds to a client's images, or puts in their place, afresh in every round;
        ``training.copies`` of a config overrides it.
      setup: for methods whose first round needs what only the clients know: once for all clients before round 0,
        aggregated with the full cohort at t = -1.
      dispatch: for methods whose server computes a message for each client from its newest state, before ``local`` and
        before a PRE evaluation; what ``aggregate`` writes into a client's ``inbox`` needs none.
      calibrate: for methods that score another model than they broadcast.
      diagnose: server -> named numbers about its state, recorded as ``diagnostics.NAME``; none unless given.
      selects: whether clients select on their validation samples, ``data.validation``: a config then has to set some
        aside (rule R11). Whether true or false, ``data.validation`` may be None where a method is called by hand.
      sends_change: whether an upload that has the names and shapes of the view holds changes to it. If false, such an
        upload is taken for trained values, from which compression, attacks, privacy and diagnostics subtract the view.
      batches_per_step: how many batches a step takes, so that with ``training.drop_last`` a client with fewer samples
        takes none.
      acts_alone: whether ``aggregate`` changes the server even in a round in which no participant has a sample; such a
        round otherwise leaves the server as it was.
    """

    init: Init
    local: Local
    aggregate: Aggregate
    personal: Personal
    predict: Predict
    broadcast: Broadcast = broadcast_all
    personalize: Personalize = personalize_nothing
    global_predict: GlobalPredict | None = None
    headline: Literal["pre", "post"] = "pre"
    copies: Copies = "none"
    setup: Setup | None = None
    dispatch: Dispatch | None = None
    calibrate: Calibration | None = None
    diagnose: Callable[[PyTree], Diagnostics] = no_diagnostics
    selects: bool = False
    sends_change: bool = False
    batches_per_step: int = 1
    acts_alone: bool = False
