"""Draws the cohort of a round, gathers its states and samples, and maps the work of a client over it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from fedjax_pfl.data.augment import Augment, add_copies, augment
from fedjax_pfl.data.federated import ClientData, Clients, Federation, Samples, client_data
from fedjax_pfl.engine.contract import check_form, update_of
from fedjax_pfl.engine.metrics import Metric
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.placement import SIDE_BY_SIDE, Placement, map_clients
from fedjax_pfl.engine.run import round_keys
from fedjax_pfl.method import Cohort, Method, Round, State, Update
from fedjax_pfl.ops.training import phase_key
from fedjax_pfl.ops.tree import take_rows


class Group(NamedTuple):
    """Some clients with their states.

    Attributes:
      ids: their numbers, [K], in the order in which they work; N for an absent row.
      clients: the states. Without ``at``, every leaf is [K, ...], and row k belongs to ids[k] (it is arbitrary if this
        row is absent). With ``at``, every leaf is [M, ...], and row at[k] belongs to ids[k].
      at: the row of each client among the M rows, [K]; None if ``clients`` holds the rows of these clients only.
    """

    ids: Int[Array, " K"]
    clients: PyTree
    at: Int[Array, " K"] | None = None


@dataclass(frozen=True)
class Cohorts:
    """The clients of a method, and how their work is mapped; the base class of `Evaluator` and `Engine`.

    Attributes:
      method: the work of the clients and of the server.
      clients: N.
      participation: which clients take part, among those that are not new.
      placement: where clients run.
      new: number of clients, the last ones, that never take part and are only evaluated.
      validate: whether the clients' validation samples are scored in addition to the test samples.
      augment: augmentation of the clients' training images, in addition to the method's own copies.
      augment_every: whether each epoch draws anew, or all passes of a round see the same images.
      diagnostics: names of the entries of `Update.diagnostics` that are recorded, and `UPDATE_COSINE` if it is wanted.
      features: theta, x -> z of the model, if `outputs` is to return the features; else None.
      metrics: name -> metric of the config, measured in addition to the built-in ones.
      equal: whether all clients hold the same number of training samples. In a cohort of fixed size, the compiler then
        knows the number of steps.
    """

    method: Method
    clients: int
    participation: Participation = field(default_factory=Participation)
    placement: Placement = field(default_factory=Placement)
    new: int = 0
    validate: bool = False
    augment: Augment = "none"
    augment_every: Literal["epoch", "round"] = "epoch"
    diagnostics: tuple[str, ...] = ()
    features: Callable[..., Float[Array, "batch dim"]] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    equal: bool = False

    @property
    def trainers(self) -> int:
        """The number of clients that may take part, the first ones."""
        return self.clients - self.new

    @property
    def cohort_size(self) -> int:
        """K, the largest number of clients in a round."""
        return self.participation.cohort_size(self.trainers)

    def select(
        self, key: Key[Array, ""], t: Int[Array, ""], count: Int[Array, " N"]
    ) -> tuple[Int[Array, " rows"], Int[Array, ""]]:
        """Draws the cohort of round t: the ids (N if absent), and how many were selected before any dropped out."""
        ids, selected = self.participation.draw(round_keys(key, t), self.trainers, self.clients)
        return self._order(ids, count), selected

    def local(self, shared: tuple, row: tuple) -> Update:
        """The work of one participant in a round, which is mapped over the cohort.

        Args:
          shared: (key, t, view, x, y), the same for all clients.
          row: (id, client, training samples, validation samples or None) of one participant.

        Raises:
          ConfigError: the method's ``local`` returns something other than an `Update`.
        """
        return update_of(self.method.local(*self._at_client(shared, row)))

    def _at_client(self, shared: tuple, row: tuple) -> tuple[Round, PyTree, PyTree, ClientData]:
        """What a method's functions get at one client: round, view, state and samples; arguments as of `local`."""
        (key, t, view, x, y), (client_id, client, train, validation) = shared, row
        key = jax.random.fold_in(key, client_id)
        return Round(key, t), view, client, self._training_data(key, client_id, x, y, train, validation)

    def _training_data(
        self,
        key: Key[Array, ""],
        client_id: Int[Array, ""],
        x: Samples,
        y: Array,
        train: Clients,
        validation: Clients | None,
    ) -> ClientData:
        """The training samples of a client, with augmentation, in the round of this key."""
        data = client_data(x, y, train, client_id, validation)
        if self.equal and self.participation.known:
            data = data._replace(count=np.int32(data.capacity), most=np.int32(data.capacity))
        data = add_copies(phase_key(key, "augment"), data, self.method.copies)
        return augment(phase_key(key, "base augmentation"), data, self.augment, every=self.augment_every)

    def _map(self, fn: Callable, shared: PyTree, rows: PyTree, *, complete: bool = False) -> Any:
        """`map_clients`; clients that run side by side also get the number of samples of the largest of them.

        Args:
          fn: (shared, row) -> result.
          shared: values that are the same for all clients.
          rows: every leaf [K, ...].
          complete: whether the largest of all clients is among the rows.
        """
        side_by_side = self.placement.chunk
        if side_by_side == 1:
            return map_clients(fn, shared, rows, self.placement)
        # If all run in one chunk, the bound is the width of the index table, which the compiler knows.
        known = complete and len(jax.tree.leaves(rows)[0]) == side_by_side * self.placement.devices

        def aligned(node: Any) -> Any:
            if not isinstance(node, Clients):
                return node
            most = np.int32(node.index.shape[-1]) if known else lax.pmax(node.count, SIDE_BY_SIDE)
            return node._replace(most=most)

        def one(shared: PyTree, row: PyTree) -> Any:
            return fn(shared, jax.tree.map(aligned, row, is_leaf=lambda node: isinstance(node, Clients)))

        return map_clients(one, shared, rows, self.placement)

    def _map_group(self, fn: Callable, shared: PyTree, group: Group, rows: PyTree, *, complete: bool = False) -> Any:
        """`_map` of ``fn(shared, client, row)`` over a group, with each client's state.

        Each state is read in place when its client runs, because bringing all states into the group's order first would
        copy them.
        """
        if group.at is None:

            def at_hand(shared: PyTree, row: tuple) -> Any:
                return fn(shared, *row)

            return self._map(at_hand, shared, (group.clients, rows), complete=complete)

        def among_others(both: tuple, row: tuple) -> Any:
            (shared, clients), (at, own) = both, row
            client = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), clients)
            return fn(shared, client, own)

        return self._map(among_others, (shared, group.clients), (group.at, rows), complete=complete)

    def _order(self, ids: Int[Array, " K"], count: Int[Array, " N"]) -> Int[Array, " rows"]:
        """Ids by falling size, filled up to whole chunks with absent rows (id N), and spread over the devices."""
        absent = len(count)
        sizes = jnp.where(ids < absent, jnp.take(count, ids, mode="clip"), -1)
        ids = ids[jnp.argsort(-sizes)]
        rows = self.placement.padded(len(ids))
        return jnp.pad(ids, (0, rows - len(ids)), constant_values=absent)[self.placement.balanced_order(rows)]

    def _gather(self, ids: Int[Array, " K"], rows: PyTree) -> tuple[Bool[Array, " K"], PyTree]:
        """Flags of the present rows, and the rows; an absent client gets 0 samples, so that it does no work."""
        present = ids < len(jax.tree.leaves(rows)[0])

        def without_absent(node: Any) -> Any:
            return node._replace(count=jnp.where(present, node.count, 0)) if isinstance(node, Clients) else node

        taken = take_rows(rows, ids)
        return present, jax.tree.map(without_absent, taken, is_leaf=lambda node: isinstance(node, Clients))

    def _group(self, ids: Int[Array, " K"], state: State, data: Federation) -> Group:
        """These clients in the engine's order; their states are not moved."""
        ids = self._order(ids, data.train.count)
        return Group(ids, state.clients, jnp.minimum(ids, self.clients - 1))

    def _cohort(self, ids: Int[Array, " K"], count: Int[Array, " K"]) -> Cohort:
        """What the server knows about these clients; ``count`` is their number of training samples."""
        return Cohort(ids, count.astype(jnp.float32), self.clients, self.trainers)

    def _dispatch(
        self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, clients: PyTree, cohort: Cohort
    ) -> PyTree:
        """The states of some clients, with the message that the server writes to each of them before they work."""
        if self.method.dispatch is None:
            return clients
        now = Round(phase_key(key, "dispatch"), t)
        inbox = self.method.dispatch(now, server, clients, cohort)
        check_form("what the method's dispatch returns", inbox, clients.inbox, "as in the state of the clients")
        return clients._replace(inbox=inbox)

    def _dispatch_group(
        self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, group: Group, count: Int[Array, " K"]
    ) -> Group:
        """`_dispatch` for a group; if there is a message, its states are then in the group's own order."""
        if self.method.dispatch is None:
            return group
        ids, clients, at = group
        cohort = self._cohort(ids, count)
        return Group(ids, self._dispatch(key, t, server, clients if at is None else take_rows(clients, at), cohort))
