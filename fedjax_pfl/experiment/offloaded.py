"""Clients' states in the host's memory (``run.client_state = "host"``): devices hold those of running clients only.

A round is one compiled function of the states of its cohort, which the host sends and takes back. Work on all clients,
above all their evaluation, is done in groups of the size of a cohort.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int, Key, PyTree

from fedjax_pfl.data.federated import Federation
from fedjax_pfl.engine.cohort import Group
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import Run
from fedjax_pfl.engine.scoring import Evaluation, Scored
from fedjax_pfl.experiment.inputs import Row, Shared, layout_of
from fedjax_pfl.method import State

# From a run's inputs: the engine with its numbers, the keys of the initial state and of the rounds, and the data.
Reader = Callable[[Row, Shared], tuple[Engine, Key[Array, ""], Key[Array, ""], Federation]]


class OffloadedFunctions(NamedTuple):
    """The functions of such a run; those that its method does not need are None.

    Attributes:
      start: shared, row -> run, with one initial client state for all clients.
      select: shared, row -> (ids of the cohort, number of selected clients) of the round ``shared.start``.
      round: shared, row, run, states of the cohort, its ids, number of selected clients -> (run, new states).
      pre: shared, row, server, group -> PRE scores.
      of_server: shared, row, run -> the rest of an `Evaluation`, without the clients' scores.
      initial: as ``pre``, scores of the initial models; needed if not all clients take part in every round.
      post: as ``pre``, POST scores; needed if there are new clients.
      upload: as ``pre``, the uploads of the calibration.
      calibrate: shared, row, server, ids, uploads -> server.
    """

    start: Any
    select: Any
    round: Any
    pre: Any
    of_server: Any
    initial: Any = None
    post: Any = None
    upload: Any = None
    calibrate: Any = None


def _functions(read: Reader, engine: Engine) -> OffloadedFunctions:
    """The functions of a run; arguments as in `traced_offloaded`."""

    def start(shared: Shared, row: Row) -> Run:
        engine, key, _, data = read(row, shared)
        return engine.start(key, data)

    def select(shared: Shared, row: Row) -> tuple[Array, Array]:
        engine, _, key, data = read(row, shared)
        return engine.select(key, shared.start, data.train.count)

    def round_(shared: Shared, row: Row, run: Run, states: PyTree, ids: Array, selected: Array) -> tuple[Run, PyTree]:
        engine, _, key, data = read(row, shared)
        return engine.round_of(key, shared.start, run, Group(ids, states), selected, shared.evaluate, data)

    def pre(shared: Shared, row: Row, server: PyTree, group: Group) -> Scored:
        engine, _, key, data = read(row, shared)
        return engine.pre_of(key, shared.stop, server, group, data)

    def of_server(shared: Shared, row: Row, run: Run) -> tuple:
        engine, _, _, data = read(row, shared)
        return engine.of_server(run, data)

    def initial(shared: Shared, row: Row, server: PyTree, group: Group) -> Scored:
        engine, key, _, data = read(row, shared)
        return engine.initial_of(key, server, group, data)

    def post(shared: Shared, row: Row, server: PyTree, group: Group) -> Scored:
        engine, _, key, data = read(row, shared)
        return engine.post_of(key, shared.stop, server, group, data)

    def upload(shared: Shared, row: Row, server: PyTree, group: Group) -> PyTree:
        engine, _, key, data = read(row, shared)
        return engine.calibration_of(key, shared.stop, server, group, data)

    def calibrate(shared: Shared, row: Row, server: PyTree, ids: Array, uploads: PyTree) -> PyTree:
        engine, _, key, data = read(row, shared)
        return engine.calibrate(key, shared.stop, server, ids, uploads, data)

    calibrates = engine.method.calibrate is not None
    return OffloadedFunctions(
        start,
        select,
        round_,
        pre,
        of_server,
        None if engine.participation.full else initial,
        post if engine.new else None,
        upload if calibrates else None,
        calibrate if calibrates else None,
    )


def traced_offloaded(
    read: Reader, engine: Engine, shared: Shared, row: Row, on: Sharding | None = None
) -> dict[str, tuple[Any, tuple]]:
    """The functions of a run, to be lowered: name of a part -> (jitted, shapes of its arguments).

    Args:
      read: makes an engine from a run's inputs.
      engine: an engine like it, with the placement of the clients.
      shared: the arguments that all runs share, or their shapes.
      row: the arguments of this run, or their shapes.
      on: the sharding of everything that no placement splits.
    """
    parts, rows = _functions(read, engine), group_size(engine)
    split_as = engine.placement.shardings
    everywhere, per_client, split = (place or on for place in (*split_as(engine.clients), split_as(rows)[1]))

    def laid(tree: PyTree, where: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree)

    def stacked(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype, sharding=split)

    first = jax.eval_shape(parts.start, shared, row)
    run = laid(first._replace(state=State(first.state.server, None)), everywhere)._replace(
        post=laid(first.post, per_client)
    )
    number = jax.ShapeDtypeStruct((), np.int32, sharding=everywhere)
    group = Group(stacked(number), jax.tree.map(stacked, first.state.clients))
    of_group = shared, row, run.state.server, group
    layout = layout_of(engine)
    held = None if layout is None else layout._replace(state=everywhere)
    scored, calibration = run.state.server, None
    if parts.calibrate is not None:
        groups = -(-engine.trainers // rows)
        ids, uploads = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((groups * leaf.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=split),
            (group.ids, jax.eval_shape(parts.upload, *of_group)),
        )
        calibrate, arguments = jax.jit(parts.calibrate, out_shardings=everywhere), (shared, row, scored, ids, uploads)
        calibration = calibrate, arguments
        scored = laid(jax.eval_shape(calibrate, *arguments), everywhere)  # may have parts that a round's has not
    found: dict[str, tuple[Any, tuple]] = {
        "round": (
            jax.jit(parts.round, out_shardings=None if held is None else (held, split), donate_argnums=(2, 3)),
            (shared, row, run, group.clients, group.ids, number),
        ),
        "pre": (jax.jit(parts.pre, out_shardings=everywhere), (shared, row, scored, group)),
        "start": (jax.jit(parts.start, out_shardings=held), (shared, row)),
        "select": (jax.jit(parts.select, out_shardings=everywhere), (shared, row)),
        "of_server": (
            jax.jit(parts.of_server, out_shardings=everywhere),
            (shared, row, run._replace(state=State(scored, None))),
        ),
    }
    for name in ("initial", "post", "upload"):
        if (part := getattr(parts, name)) is not None:
            found[name] = jax.jit(part, out_shardings=everywhere), of_group
    if calibration is not None:
        found["calibrate"] = calibration
    return found


def put_offloaded(run: Run, layout: Any) -> Run:
    """Puts a run from the host's memory where `Offloaded` expects it; the clients' arrays are then changed in place.

    Args:
      run: the run with the states of all its clients.
      layout: the shardings of its parts; None for one device.
    """
    server, clients = run.state
    placed: Run = jax.device_put(run._replace(state=State(server, None)), layout)
    clients = jax.tree.map(lambda leaf: np.require(leaf, requirements=["C", "W"]), clients)
    return placed._replace(state=State(placed.state.server, clients))


def group_size(engine: Engine) -> int:
    """The number of rows of the clients' states that the devices hold together."""
    return engine.placement.padded(engine.cohort_size)


class Offloaded:
    """A run made of its compiled parts; it has the same functions as a program with all states on the device.

    The state of a run is a `Run` whose client states are arrays of the host, which every round changes in place.
    """

    def __init__(self, parts: OffloadedFunctions, engine: Engine):
        """Takes the compiled parts, and an engine like that of the runs (for sizes and placement)."""
        self._parts, self._engine = parts, engine

    def init(self, shared: Shared, row: Row) -> Run:
        """The state before round 0."""
        run = self._parts.start(shared, row)
        everyone = self._engine.clients
        clients = jax.tree.map(
            # In C order: a copy would otherwise keep the order of the strides, and the rows would not be contiguous.
            lambda leaf: np.array(np.broadcast_to(leaf, (everyone, *leaf.shape)), order="C"),
            jax.device_get(run.state.clients),
        )
        run = run._replace(state=State(run.state.server, clients))
        if self._parts.initial is None:
            return run
        scores = self._of_everyone(self._parts.initial, shared, row, run.state)
        places = jax.tree.map(lambda leaf: leaf.sharding, run.post)
        return run._replace(post=jax.device_put(scores, places))

    def rounds(self, shared: Shared, row: Row, run: Run) -> Run:
        """Rounds ``shared.start`` ... ``shared.stop`` - 1; the states given are used up."""
        (server, clients), full = run.state, self._engine.participation.full
        run = run._replace(state=State(server, None))
        for t in range(int(shared.start), int(shared.stop)):
            score_now = (bool(shared.evaluate) and t == shared.stop - 1) if full else True
            now = shared._replace(start=np.int32(t), evaluate=np.bool_(score_now))
            ids, selected = self._parts.select(now, row)
            ids = np.asarray(ids)
            group = self._group(ids, clients)
            run, new = self._parts.round(now, row, run, group.clients, group.ids, selected)
            _put(clients, ids, new)
        return run._replace(state=State(run.state.server, clients))

    def score(self, shared: Shared, row: Row, run: Run) -> Evaluation:
        """All scores after ``shared.stop`` rounds."""
        state = State(self.calibrated(shared, row, run), run.state.clients)
        pre, post = self._of_everyone(self._parts.pre, shared, row, state), run.post
        if self._parts.post is not None:
            new = self._engine.trainers, self._engine.clients
            ids, scores = self._by_groups(self._parts.post, shared, row, run.state, *new)
            post = jax.tree.map(np.array, jax.device_get(post))
            _put(post, ids, scores)
        without_clients = run._replace(state=State(state.server, None))
        return Evaluation(pre, post, *self._parts.of_server(shared, row, without_clients))

    def calibrated(self, shared: Shared, row: Row, run: Run) -> PyTree:
        """The server's state whose models are scored after ``shared.stop`` rounds."""
        if self._parts.calibrate is None:
            return run.state.server
        ids, uploads = self._by_groups(self._parts.upload, shared, row, run.state, 0, self._engine.trainers)
        return self._parts.calibrate(shared, row, run.state.server, *self._on_devices((ids, uploads)))

    def _of_everyone(self, part: Callable, shared: Shared, row: Row, state: State) -> PyTree:
        """The results of a part for all clients, in the order of their numbers; every leaf [N, ...]."""
        ids, rows = self._by_groups(part, shared, row, state, 0, self._engine.clients)
        whole = jax.tree.map(lambda leaf: np.zeros((self._engine.clients, *leaf.shape[1:]), leaf.dtype), rows)
        _put(whole, ids, rows)
        return whole

    def _by_groups(
        self, part: Callable, shared: Shared, row: Row, state: State, first: int, end: int
    ) -> tuple[Int[np.ndarray, " rows"], PyTree]:
        """Applies a part to the clients first ... end - 1; returns their ids (N for an absent row) and the results."""
        groups = list(self._groups(np.asarray(row.federation(shared.x, shared.y).train.count), first, end))
        found: list[PyTree] = []
        for ids in groups:
            if len(found) > 1:  # at most one group computes while the states of the next are transferred
                jax.block_until_ready(found[-2])
            found.append(part(shared, row, state.server, self._group(ids, state.clients)))
        return np.concatenate(groups), jax.tree.map(lambda *leaves: np.concatenate(leaves), *jax.device_get(found))

    def _groups(self, count: Int[np.ndarray, " N"], first: int, end: int) -> Iterator[Int[np.ndarray, " K"]]:
        """Groups of clients by falling size, in the order of the engine."""
        size, absent = group_size(self._engine), self._engine.clients
        ids = np.arange(first, end, dtype=np.int32)
        ids = ids[np.argsort(-count[ids], kind="stable")]
        ids = np.pad(ids, (0, -len(ids) % size), constant_values=absent)
        order = self._engine.placement.balanced_order(size)
        return (group[order] for group in ids.reshape(-1, size))

    def _group(self, ids: Int[np.ndarray, " K"], clients: PyTree) -> Group:
        """These clients with their states, on the devices."""
        states = jax.tree.map(lambda leaf: np.take(leaf, ids, axis=0, mode="clip"), clients)
        return Group(*self._on_devices((ids, states)))

    def _on_devices(self, rows: PyTree) -> Any:
        placement = self._engine.placement
        return (
            rows if placement.mesh is None else jax.device_put(rows, placement.shardings(group_size(self._engine))[1])
        )


def _put(tree: PyTree, ids: Int[np.ndarray, " K"], rows: PyTree) -> None:
    """Writes row k into row ids[k] of every leaf on the host; an id past the end writes nothing."""

    def put(leaf: np.ndarray, row: Any) -> None:
        present = ids < len(leaf)
        leaf[ids[present]] = np.asarray(row)[present]

    jax.tree.map(put, tree, rows)
