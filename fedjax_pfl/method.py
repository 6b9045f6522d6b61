"""The contract of a method: pure functions written for one client, which the engine maps over all clients.

The place of a value defines its role:

- in ``server``: shared;
- in ``client``: personal, and kept between rounds;
- returned as ``upload``: sent up, from the client to the server;
- in ``broadcast(server)``, called the view: sent down, from the server to the clients;
- in the field ``inbox`` of ``client``, a NamedTuple then: written for that client by the server, and sent down to it.

The bytes of a round follow from the shapes of these values, so the traffic that is counted cannot differ from what is
exchanged.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped

from fedjax_pfl.data.augment import Copies
from fedjax_pfl.data.federated import ClientData

Samples = Shaped[Array, "batch ..."]
Logits = Float[Array, "batch classes"]
Diagnostics = dict[str, Shaped[Array, ""]]
"""Named numbers that show whether the parts of a method have an effect; recorded as ``diagnostics.NAME``."""


class State(NamedTuple):
    """Everything that is kept from one round to the next, and so everything that a checkpoint stores.

    Its leaves are arrays of numbers with at least one entry; a random key is kept as ``jax.random.key_data(key)``.

    Attributes:
      server: what the clients share; no client axis.
      clients: the personal state of every client; every leaf is [N, ...].
    """

    server: PyTree
    clients: PyTree


class Round(NamedTuple):
    """The round in which a function of a method is called, and its randomness.

    Attributes:
      key: the key of the client, or of the server, in this round; a phase draws from ``phase_key(now.key, name)``.
      t: number of the round, from 0; -1 in ``setup``.
    """

    key: Key[Array, ""]
    t: Int[Array, ""]


class TrainInfo(NamedTuple):
    """What a client reports of its local training.

    Attributes:
      loss: mean training loss over all samples of all epochs; a batch's loss is taken before the step on that batch.
      steps: tau_i, the number of SGD steps taken.
    """

    loss: Float[Array, ""]
    steps: Int[Array, ""]


class Static:
    """Marks a hyperparameter on which shapes depend, so that it cannot be traced: ``r: Annotated[float, Static]``."""


class Cohort(NamedTuple):
    """The clients of one round, as K rows in the engine's order (largest client first on each device).

    Attributes:
      ids: number of the client in each row, [K]; ``total`` if the row is absent (no client was drawn for it, its client
        dropped out, or it only fills up a chunk).
      weight: n_k, the number of training samples of each client, [K]; 0 for an absent row.
      total: N, the number of clients, including new clients.
      trainers: how many clients, the first ones, may take part; a mean over "all clients" divides by this number.
    """

    ids: Int[Array, " K"]
    weight: Float[Array, " K"]
    total: int
    trainers: int


class PerClass(NamedTuple):
    """A part of a view or an upload of which only the rows of some classes are sent; the traffic counts only these.

    A view or an upload has one at most, and not within a `SentIf`.

    Attributes:
      held: not 0 for a class whose row is sent (a flag, or the number of samples), [C]; it is always sent whole.
      rows: arrays with one row per class, every leaf [C, ...]; the receiver must not read rows that are not sent.
    """

    held: Shaped[Array, "*clients C"]
    rows: PyTree


class SentIf(NamedTuple):
    """A part of a view or an upload that is sent only in rounds in which a flag is true; only these rounds count.

    A view or an upload has one at most.

    Attributes:
      sent: whether the part is sent, []; the flag is always sent.
      value: arrays of any shape; the receiver must not read them if they are not sent.
    """

    sent: Bool[Array, "*clients"]
    value: PyTree


Part = TypeVar("Part", PerClass, SentIf)


def is_part(node: PyTree) -> bool:
    """Whether a node of a view or an upload is a part that is not always sent whole."""
    return isinstance(node, PerClass | SentIf)


def part_of(tree: PyTree, kind: type[Part]) -> Part | None:
    """The part of this kind in a view or an upload, or None; there may be one at most (an AssertionError otherwise)."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    parts = [node for node in nodes if isinstance(node, kind)]
    assert len(parts) <= 1, f"a view or an upload has one {kind.__name__} part at most"
    return parts[0] if parts else None


class Update(NamedTuple):
    """The result of a participant's work in a round.

    Attributes:
      client: its new personal state.
      upload: what it sends to the server.
      info: loss and number of steps.
      post: the (view, client) from which ``personal`` makes the model of the POST evaluation, right after local
        training; (upload, client) unless given, which is right for methods whose upload is the trained view.
      diagnostics: this client's values, or None; their mean over the round's participants that took a step is recorded.
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
    """key, clients -> (server, client): the state before round 0.

    ``client`` is the state of one client, without a client axis; all N clients start from it (rule R5). ``clients`` is
    N, for a server that keeps something of each client.
    """

    def __call__(self, key: Key[Array, ""], clients: int, /) -> tuple[PyTree, PyTree]: ...  # noqa: D102


@runtime_checkable
class Local(Protocol):
    """now, view, client, data -> update: a participant's work in a round, for one client."""

    def __call__(self, now: Round, view: PyTree, client: PyTree, data: ClientData, /) -> Update: ...  # noqa: D102


@runtime_checkable
class Aggregate(Protocol):
    """now, server, clients, uploads, cohort -> (server, clients): the server's work at the end of a round.

    Every leaf of ``clients`` and ``uploads`` is [K, ...], one row per row of the cohort. Absent rows have weight 0 and
    uploads of zeros, and the client states that are returned for them are discarded.
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
    """params, x -> logits [batch, classes] of the model with parameters from `Personal`; it never sees labels."""

    def __call__(self, params: PyTree, x: Samples, /) -> Logits: ...  # noqa: D102


@runtime_checkable
class Broadcast(Protocol):
    """server -> view: exactly what is sent down."""

    def __call__(self, server: PyTree, /) -> PyTree: ...  # noqa: D102


@runtime_checkable
class Personalize(Protocol):
    """now, view, client, data -> (view, client), from which ``personal`` makes the model of a PRE evaluation.

    For example fine-tuning, or a step of meta-learning. It sees training samples and, in a method that ``selects``,
    validation samples, never test samples; its result is discarded after the evaluation.
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
    """now, view, client, data -> (client, upload): a client's part in round -1, in which nothing is sent down.

    Both have the form of ``local``'s, since ``aggregate`` combines them as well.
    """

    def __call__(  # noqa: D102
        self, now: Round, view: PyTree, client: PyTree, data: ClientData, /
    ) -> tuple[PyTree, PyTree]: ...


@runtime_checkable
class Dispatch(Protocol):
    """now, server, clients, cohort -> inbox: the message of the server to each of K clients, before their work.

    Every leaf of the result is [K, ...]; it replaces the field ``inbox`` of these clients' states.
    """

    def __call__(self, now: Round, server: PyTree, clients: PyTree, cohort: Cohort, /) -> PyTree: ...  # noqa: D102


class Calibration(NamedTuple):
    """A federated pass before scoring, for methods that score another model than they broadcast.

    Its result is used for scoring only, never for training.

    Attributes:
      local: now, view, client, data -> upload, for one client.
      server: now, server, uploads, cohort -> the server state whose broadcast and global model are scored.
    """

    local: Callable[[Round, PyTree, PyTree, ClientData], PyTree]
    server: Callable[[Round, PyTree, PyTree, Cohort], PyTree]


def broadcast_all(server: PyTree) -> PyTree:
    """The default of ``Method.broadcast``: sends the whole server state down."""
    return server


def personalize_nothing(now: Round, view: PyTree, client: PyTree, data: ClientData) -> tuple[PyTree, PyTree]:
    """The default of ``Method.personalize``: scores what the client has received and kept, unchanged."""
    return view, client


def no_diagnostics(server: PyTree) -> Diagnostics:
    """The default of ``Method.diagnose``: no numbers."""
    return {}


class Method(NamedTuple):
    """A federated method.

    A factory ``name(model, train, combine=weighted_mean, *, hyperparameters)`` builds it. The factory closes over the
    model, the local trainer, the server's rule for averaging parameters (:mod:`fedjax_pfl.ops.aggregate`; methods that
    average none leave ``combine`` out) and the hyperparameters, whose names, types and defaults are the config schema
    of the method. Numeric hyperparameters may be traced values, unless marked :class:`Static`: no Python branch may
    depend on them, except on a coefficient that is off when the method is built. A factory raises ``ValueError`` for a
    model that the method cannot use.

    Attributes:
      init: the state before round 0.
      local: a participant's work in a round.
      aggregate: the server's work. It sees a client axis, as do ``dispatch`` and the server's part of ``calibrate``.
      personal: the parameters of a client's model: ``{"extractor": theta, "head": phi}``, as a model's ``init`` returns
        them, and anything else that ``predict`` needs.
      predict: the logits of such a model; ``model.apply`` itself, unless it is more than an extractor with one head.
      broadcast: what is sent down; the whole server state unless given.
      personalize: the client's personalisation before a PRE evaluation; none unless given.
      global_predict: the logits of the global model, if the method has one.
      headline: the evaluation point at which the method is judged, ``"pre"`` or ``"post"``.
      copies: augmented copies of a client's images that the method adds to them, or uses instead of them, drawn anew
        in every round; ``training.copies`` of a config overrides it.
      setup: for methods whose first round needs information that only the clients have: runs once for all clients
        before round 0, and is aggregated with the full cohort at t = -1.
      dispatch: for methods whose server computes a message for each client from its newest state, before ``local`` and
        before a PRE evaluation. It is not needed for an ``inbox`` that ``aggregate`` writes.
      calibrate: for methods that score another model than they broadcast.
      diagnose: server -> named numbers about its state, recorded as ``diagnostics.NAME``; none unless given.
      selects: whether clients select on their validation samples, ``data.validation``; the config must then set some
        aside (rule R11). In either case ``data.validation`` may be None if a method is called by hand.
      sends_change: whether an upload that has the names and shapes of the view holds changes to it. If false, such an
        upload is taken for trained values, from which compression, attacks, privacy and diagnostics subtract the view.
      batches_per_step: number of batches that one step uses; with ``training.drop_last`` a client with fewer samples
        takes no step.
      acts_alone: whether ``aggregate`` changes the server even in a round in which no participant has a sample;
        otherwise such a round leaves the server as it was.
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
