"""One or more runs as one compiled program: ``init``, ``rounds``, ``score``.

Runs of a program differ in their seed and in numbers that no shape depends on; both are inputs of the program. `layout`
makes a program of configs and data.
"""

import functools
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, Int, PyTree

from fedjax_pfl.data.federated import Federation, Samples
from fedjax_pfl.data.rows import Holdings
from fedjax_pfl.engine.hardware import release_freed
from fedjax_pfl.engine.memory import Memory
from fedjax_pfl.engine.metrics import METRICS
from fedjax_pfl.engine.participation import rounds_participated
from fedjax_pfl.engine.placement import Placement, map_clients
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import Run
from fedjax_pfl.engine.scoring import Evaluation, Outputs
from fedjax_pfl.engine.traffic import Exchange
from fedjax_pfl.experiment.build import NEEDS_VALUE, DataShape, make_engine, needs_value, program_inputs
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.distributed import to_host
from fedjax_pfl.experiment.export import export_of
from fedjax_pfl.experiment.inputs import Row, Shared, keys_of, layout_of, rows_sharding
from fedjax_pfl.experiment.offloaded import Offloaded, OffloadedFunctions, put_offloaded, traced_offloaded
from fedjax_pfl.experiment.process import cores
from fedjax_pfl.method import State
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS
from fedjax_pfl.models.own import values_read_by

Over = Literal["clients", "runs"]
# The number of compiled programs that a process keeps for later runs with the same shapes.
_KEPT = 8
# Fields that affect a program only through the shapes of arrays, or not at all: samples, rounds and seed are inputs.
_NOT_COMPILED = {
    "training": ("rounds",),
    "attack": ("share",),
    "privacy": ("delta",),
    "data": (
        "source",
        "partition",
        "split",
        "test_classes",
        "test_part_share",
        "test_share",
        "stratified",
        "samples_per_client",
        "seed",
    ),
    "run": (
        "seed",
        "eval_every",
        "checkpoint_every",
        "out",
        "tensorboard",
        "compilation_cache",
        "placement",
        "chunk",
        "export",
        "export_clients",
        "keep",
        "client_history",
    ),
}


class _Compiled(NamedTuple):
    """The functions of a run with all states on the devices; `Offloaded` has the same ones with states on the host."""

    init: Callable[[Shared, Row], Run]
    rounds: Callable[[Shared, Row, Run], Run]
    score: Callable[[Shared, Row, Run], Evaluation]


# What decides over the traces of a run; see `trace_key`.
TraceKey = tuple[str, tuple[Callable, ...], str]
_store: OrderedDict[TraceKey, _Compiled | Offloaded] = OrderedDict()


def alike(config: Config) -> str:
    """The part of a config that is equal for all runs of a program: without seed, directory and input numbers.

    Methods leave out a term whose coefficient is 0 (rule R12), and what only this term needs of states and messages; so
    a number that is 0 is no input.
    """
    tables = config.model_dump(mode="json")
    tables["run"] |= {"seed": None, "out": None}
    for number, value in program_inputs(config).items():
        section, _, key = number.partition(".")
        tables[section][key] = "input" if value else 0
    return json.dumps(tables, sort_keys=True)


@dataclass
class Program:
    """The runs of one program.

    Their states are a list: one stacked state if runs are spread over the devices, else one state per run.

    Attributes:
      configs: the configs of the runs.
      data: the shape of the data for which their models are built.
      engine: the engine, with the numbers of the first run and the placement of the clients.
      over: what is spread over the devices, runs or clients.
      runs_on: the placement of the runs, if runs are spread over the devices.
      manifests: the content of ``partition.json`` of each run.
      holdings: the content of ``partition.npz`` of each run.
      memory: the memory that one run needs.
      exchange: shapes of what clients and server exchange.
      samples: all samples and labels.
      rows: the inputs of the runs, stacked if runs are spread over the devices.
      order: the run to which each row belongs. If a run has several rows, the first one counts.
      precision: the precision of matrix products and convolutions.
      compile_seconds: the time that `compile` took.
    """

    configs: Sequence[Config]
    data: DataShape
    engine: Engine
    over: Over
    runs_on: Placement
    manifests: list[dict[str, Any]]
    holdings: list[Holdings]
    memory: Memory
    exchange: Exchange
    samples: tuple[Samples, Array]
    rows: list[Row]
    order: Int[np.ndarray, " rows"]
    precision: str
    compile_seconds: float = 0.0
    _compiled: _Compiled | Offloaded | None = None
    _ends: dict[int, int] = field(default_factory=dict)  # run -> its rounds, where runs go one by one

    def compile(self) -> None:
        """Compiles the program, unless this process has compiled an equal one; before `init`, `rounds` and `score`."""
        began = time.perf_counter()
        with jax.default_matmul_precision(self.precision):
            self._compiled = _compile(self)
        release_freed()
        self.compile_seconds = time.perf_counter() - began

    @property
    def offloaded(self) -> bool:
        """Whether the clients' states are kept on the host."""
        return self.configs[0].run.client_state == "host"

    @property
    def devices(self) -> int:
        """The number of devices over which runs or clients are spread."""
        return (self.runs_on if self.over == "runs" else self.engine.placement).devices

    def one_run(self) -> Run:
        """The shapes of one run's state."""
        x, y = self.samples
        clients = (
            self.rows[0].clients if self.over == "clients" else jax.tree.map(lambda leaf: leaf[0], self.rows[0].clients)
        )
        federation = Federation(x, y, *clients)
        return jax.eval_shape(self.engine.init, jax.random.key(0), federation)

    def bytes(self) -> int:
        """The memory that the program will need, in bytes: of the process on a CPU, else of a device."""
        memory, clients_on = self.memory, self.engine.placement
        if self.over == "clients":  # one run after the other
            others = (len(self.rows) - 1) * (memory.resident - memory.samples)
            return memory.total(clients_on.devices, clients_on.chunk) + others
        together = len(self.order) if memory.process else self.runs_on.chunk
        return memory.total(1, clients_on.chunk) + (together - 1) * memory.of_run(clients_on.chunk)

    def init(self) -> list[Run]:
        """The states before round 0."""
        return [self._ready.init(self._shared(0, 0), row) for row in self.rows]

    def rounds(self, states: list[Run], start: int, stop: int, *, evaluate: bool) -> list[Run]:
        """Runs the rounds start ... stop - 1 of all runs; the given states must not be used afterwards."""
        stops = [min(stop, self._ends.get(run, stop)) for run in range(len(states))]
        return [
            self._ready.rounds(self._shared(start, last, evaluate), row, state) if start < last else state
            for row, state, last in zip(self.rows, states, stops, strict=True)
        ]

    def end(self, run: int, t: int) -> None:
        """Stops a run after t rounds; a block of rounds must end there.

        Its state is kept, unless runs go side by side or the program has no ``room``: then the run goes on computing
        with the others. Later scores of the run are meaningless.
        """
        if self.over == "clients":
            self._ends[run] = t
        elif self.rows[0].limit is not None:
            limit = np.array(self.rows[0].limit)
            limit[self._at[run]] = t
            self.rows[0] = self.rows[0]._replace(limit=jax.device_put(limit, rows_sharding(self.runs_on)))

    def score(self, states: list[Run], t: int) -> list[Evaluation]:
        """The scores of each run after t rounds, on the host."""
        shared = self._shared(t, t)
        found = [self._ready.score(shared, row, state) for row, state in zip(self.rows, states, strict=True)]
        return self.each(found)

    def rounds_participated(self, run: int, t: int) -> Int[np.ndarray, " N"]:
        """The number of rounds, of the first t, in which each client of a run took part, [N]; 0 for new clients."""
        engine, keys = self.engine, keys_of(self.configs[run])
        if engine.participation.full:
            counts = np.full(engine.trainers, t, np.int32)
        else:
            counts = np.asarray(rounds_participated(engine.participation, engine.trainers, keys[1], jnp.int32(t)))
        return np.pad(counts, (0, engine.new))

    def export(self, states: Sequence[Run], t: int) -> list[dict[str, np.ndarray]]:
        """The tables for ``run.export`` after t rounds, one per run; empty if nothing is to be exported.

        Args:
          states: the states of the runs, from the host.
          t: rounds done.
        """
        config = self.configs[0]
        what, who = config.run.export, config.run.export_clients or range(config.data.clients)
        if not what:
            return [{} for _ in self.configs]

        @jax.jit
        def outputs(row: Row, server: PyTree, ids: Array, clients: PyTree, x: Samples, y: Array) -> Outputs:
            engine, key, federation = self._one(row, x, y)
            return engine.outputs(key, jnp.int32(t), server, ids, clients, federation)

        # One run after the other on one device: it is a single pass over some clients' samples.
        (x, y), rows = to_host(self.samples), to_host(self.rows)
        if self.over == "runs":
            rows = [jax.tree.map(lambda leaf, at=at: leaf[at], rows[0]) for at in self._at]
        # As many clients at once as take part in a round: where the host holds the states, a device may not hold more.
        most = self.engine.cohort_size
        groups = np.split(np.asarray(who, np.int32), range(most, len(who), most))
        samples = jax.device_put((x, y))

        def of_run(row: Row, server: PyTree, clients: PyTree) -> Outputs:
            states = (jax.tree.map(lambda leaf, ids=ids: leaf[ids], clients) for ids in groups)
            found = [
                jax.device_get(outputs(row, server, ids, of_group, *samples))
                for ids, of_group in zip(groups, states, strict=True)
            ]
            return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

        with jax.default_matmul_precision(self.precision):
            servers = self._calibrated(rows, states, t)
            return [
                # Each process computes all of them.
                export_of(of_run(row, server, state.state.clients), row.federation(x, y).test, y, who, what)
                for row, server, state in zip(rows, servers, states, strict=True)
            ]

    def _calibrated(self, rows: Sequence[Row], states: Sequence[Run], t: int) -> list[PyTree]:
        """The server states whose models are scored after t rounds; ``rows`` and ``states`` are on the host."""
        runs = list(zip(rows, states, strict=True))
        if self.engine.method.calibrate is None:
            return [state.state.server for _, state in runs]
        if isinstance(self._ready, Offloaded):
            shared, ready = self._shared(t, t), self._ready
            found = zip(self.rows, self.put(states), strict=True)
            return [to_host(ready.calibrated(shared, row, state)) for row, state in found]

        def calibrated(row: Row, state: State, x: Samples, y: Array) -> PyTree:
            engine, key, federation = self._one(row, x, y)
            return engine.calibrated(key, jnp.int32(t), state, federation).server

        program, (x, y) = jax.jit(calibrated), to_host(self.samples)
        return [program(row, state.state, x, y) for row, state in runs]

    def _one(self, row: Row, x: Samples, y: Array) -> tuple[Engine, Array, Federation]:
        """The engine of one run, the key of its rounds, and its data, on one device."""
        _, key = jax.random.wrap_key_data(row.keys)
        engine = make_engine(self.configs[0], self.data, row.inputs, malicious=row.malicious)
        return engine, key, row.federation(x, y)

    def each(self, groups: list[PyTree]) -> list[Any]:
        """States, or parts of them, as a list with one entry per run, on the host."""
        if self.over == "clients":
            return [to_host(group) for group in groups]
        whole = to_host(groups[0])
        return [jax.tree.map(lambda leaf, at=at: leaf[at], whole) for at in self._at]

    def put(self, states: Sequence[Run]) -> list[Run]:
        """The reverse of `each`: puts states from the host where the program expects them."""
        if self.over == "clients":
            put, layout = put_offloaded if self.offloaded else jax.device_put, layout_of(self.engine)
            return [put(state, layout) for state in states]
        stacked = jax.tree.map(lambda *leaves: np.stack([leaves[run] for run in self.order]), *states)
        return [jax.device_put(stacked, rows_sharding(self.runs_on))]

    @property
    def _at(self) -> list[int]:
        """The row of each run."""
        return np.searchsorted(self.order, np.arange(len(self.configs))).tolist()

    @property
    def _ready(self) -> _Compiled | Offloaded:
        assert self._compiled is not None, "compile() comes first"
        return self._compiled

    def _shared(self, start: int, stop: int, evaluate: bool = True) -> Shared:
        return Shared(*self.samples, np.int32(start), np.int32(stop), np.bool_(evaluate))


def traced(program: Program, on: Sharding | None = None) -> dict[str, tuple[Any, tuple]]:
    """The functions of a program, to be lowered: name -> (jitted, its arguments or their shapes).

    Args:
      program: the program, laid out.
      on: the sharding of samples, index tables and everything else that no placement splits; given to compile for
        devices that this machine does not have.
    """
    config, data, over, runs_on = program.configs[0], program.data, program.over, program.runs_on
    clients_on = program.engine.placement

    def of(row: Row, shared: Shared) -> tuple[Engine, Array, Array, Federation]:
        key_init, key_rounds = jax.random.wrap_key_data(row.keys)
        federation = row.federation(shared.x, shared.y)
        engine = make_engine(config, data, row.inputs, clients_on, row.malicious)
        engine = replace(engine, diagnostics=program.engine.diagnostics, equal=program.engine.equal)
        return engine, key_init, key_rounds, federation

    number, flag = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool)
    shared, row = _laid(Shared(*program.samples, number, number, flag), on), _laid(program.rows[0], on)
    if program.offloaded:
        return traced_offloaded(of, program.engine, shared, row, on)

    def init(shared: Shared, row: Row) -> Run:
        engine, key, _, federation = of(row, shared)
        return engine.init(key, federation)

    def rounds(shared: Shared, row: Row, run: Run) -> Run:
        engine, _, key, federation = of(row, shared)
        stop = shared.stop if row.limit is None else jnp.minimum(shared.stop, row.limit)
        return engine.rounds(key, run, shared.start, stop, shared.evaluate, federation)

    def score(shared: Shared, row: Row, run: Run) -> Evaluation:
        engine, _, key, federation = of(row, shared)

        def scores() -> Evaluation:
            return engine.score(key, shared.stop, run, federation)

        if row.limit is None:
            return scores()
        shapes = jax.eval_shape(scores)
        nothing = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return lax.cond(shared.stop <= row.limit, scores, nothing)

    def over_runs(fn: Callable) -> Callable:
        if over == "clients":
            return fn
        return lambda shared, *rows: map_clients(lambda shared, row: fn(shared, *row), shared, rows, runs_on)

    layout = layout_of(program.engine) if over == "clients" else rows_sharding(runs_on)
    layout = on if layout is None else layout
    scores_on = layout if over == "runs" else clients_on.shardings(config.data.clients)[0] or on  # on all devices

    def jitted(fn: Callable, out: Any, donate: int | None = None) -> Any:
        return jax.jit(over_runs(fn), out_shardings=out, donate_argnums=donate)

    begin = jitted(init, layout)
    run = _laid(jax.eval_shape(begin, shared, row), layout)  # its trace is kept for the program itself
    return {
        "rounds": (jitted(rounds, layout, donate=2), (shared, row, run)),
        "init": (begin, (shared, row)),
        "score": (jitted(score, scores_on), (shared, row, run)),
    }


def _laid(tree: PyTree, where: Any) -> Any:
    """The shapes of a tree with a sharding; the tree itself if that is None."""
    if where is None:
        return tree

    def shape(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shape, tree, jax.tree.broadcast(where, tree))


def trace_key(config: Config, data: DataShape, arrays: PyTree, others: list[Any]) -> TraceKey:
    """What decides over the traces of a run: its config, the shapes of its arrays, the functions, and ``others``."""
    tables = json.loads(alike(config))
    for section, keys in _NOT_COMPILED.items():
        for key in keys:
            del tables[section][key]
    shapes = jax.tree.flatten(jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), arrays))
    described = repr((tables, data._replace(name=""), shapes, others, sorted(jax.config.values.items())))
    # The functions and what they read are part of the key: in a notebook, a name or value may be set again.
    metrics = tuple(METRICS[metric] for metric in config.run.metrics)
    functions = METHODS[config.method["name"]], MODELS[config.model["name"]], *metrics
    return described, functions, repr([values_read_by(function) for function in functions])


def _compile(program: Program) -> _Compiled | Offloaded:
    """The compiled functions of a program, taken from this process's store if they are there."""
    config, data, over, runs_on = program.configs[0], program.data, program.over, program.runs_on
    clients_on = program.engine.placement
    where = [
        over,
        program.engine.equal,
        *((_devices(placement), placement.chunk) for placement in (runs_on, clients_on)),
    ]
    key = trace_key(config, data, (program.samples, program.rows[0]), where)
    if key in _store:
        _store.move_to_end(key)
        return _store[key]

    # While XLA compiles one function, the next is traced; on few cores fewer at a time, so that they fit into memory.
    with ThreadPoolExecutor(max_workers=min(3, cores())) as pool:
        # The longest first.
        options = dict.fromkeys(("init", "start"), drawn_once())
        try:
            found = {
                part: pool.submit(jitted.lower(*arguments).compile, options.get(part, {}))
                for part, (jitted, arguments) in traced(program).items()
            }
        except NEEDS_VALUE as error:  # with plain numbers for the options, `survey` met none
            raise needs_value(config.method["name"], error) from error
    compiled = {part: future.result() for part, future in found.items()}
    if program.offloaded:
        _store[key] = Offloaded(OffloadedFunctions(**compiled), program.engine)
    else:
        _store[key] = _Compiled(**compiled)
    while len(_store) > _KEPT:
        _store.popitem(last=False)
    return _store[key]


def drawn_once() -> dict[str, int]:
    """Compiler options for the initial state: it is mostly random numbers, so LLVM need not optimise it much."""
    return {} if jax.config.values["jax_disable_most_optimizations"] else {"xla_backend_optimization_level": 1}


def _devices(placement: Placement) -> str:
    return "one" if placement.mesh is None else str(placement.mesh.devices.tolist())
