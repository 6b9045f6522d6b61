"""Lays out a program for one or more runs: who holds which samples, and where runs and clients go.

A single run spreads its clients over the devices. Several runs are spread over the devices as a whole where that keeps
all of these busy, and otherwise go one after the other, each with its clients over all devices, through the same
program.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.federated import Clients, Federation, Samples
from fedjax_pfl.data.rows import Holdings
from fedjax_pfl.engine.hardware import Hardware, this_hardware
from fedjax_pfl.engine.memory import Memory, survey
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import UPDATE_COSINE, Engine
from fedjax_pfl.engine.traffic import Exchange
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import (
    NEEDS_VALUE,
    DataShape,
    attackers,
    deal,
    federate,
    make_engine,
    needs_value,
    program_inputs,
    shape_of,
)
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.distributed import put_everywhere
from fedjax_pfl.experiment.inputs import Row, keys_of, rows_sharding
from fedjax_pfl.experiment.placing import place, place_runs
from fedjax_pfl.experiment.privacy import check_accountant, check_privacy, without_privacy
from fedjax_pfl.experiment.programs import Over, Program, TraceKey, trace_key
from fedjax_pfl.experiment.summary import judged

# The default precision of a backend: the fastest one whose effect on accuracy is small compared with that of the seed
# (`benchmarks/results/precision.json`).
_PRECISION = {"cpu": "float32", "gpu": "tensorfloat32", "tpu": "bfloat16"}
# The limit of a run that ends with the others.
_UNLIMITED = np.int32(2**31 - 1)
# The number of surveys that a process keeps for later runs with the same shapes.
_KEPT = 16
_surveys: OrderedDict[TraceKey, tuple[Memory, Exchange]] = OrderedDict()


def lay_out(
    configs: Sequence[Config], dataset: Dataset, hardware: Hardware | None = None, room: int | None = None
) -> Program:
    """Divides the data among the clients of each run, and chooses where runs and clients go; compiles nothing.

    Args:
      configs: the configs of the runs; `alike` must be the same for all.
      dataset: the data that each run divides among its clients.
      hardware: the hardware for which the program is made; this machine's unless given.
      room: the number of runs for which the program is made, at least ``len(configs)``. Runs may then end before others
        (`Program.end`), and a later program with any number of runs up to it is the same program. None for no room.

    Raises:
      ConfigError: config, data and method do not fit together, or into memory.
    """
    first, data = configs[0], shape_of(dataset)
    hardware = hardware or this_hardware()
    federations, manifests, holdings = map(list, zip(*_divisions(configs, dataset), strict=True))
    rows = _rows(configs, federations)
    engine = make_engine(first, data)
    _check(configs, data, engine, federations)
    for config, manifest in zip(configs, manifests, strict=True):
        _check_scored(config, manifest, engine.new)
    precision = precision_of(first, hardware.backend)
    memory, exchange = _survey(first, data, engine, federations[0], hardware.backend, precision)
    names = exchange.diagnostics
    if first.run.diagnostics and exchange.comes_back:
        names += (UPDATE_COSINE,)
    # Not on a CPU, where clients run one by one: with a known number of steps, an absent row would cost as much as a
    # client.
    tables = [federation.train for federation in federations]
    full = len({table.index.shape for table in tables}) == 1 and all(map(_is_full, tables))
    engine = replace(engine, diagnostics=names, equal=full and hardware.backend != "cpu")
    over, runs_on, engine = _place(first, max(len(configs), room or 0), memory, engine, hardware)
    samples = federations[0].x, federations[0].y
    rows, samples, order = _spread(rows, samples, over, runs_on, engine.placement, room)
    return Program(
        configs, data, engine, over, runs_on, manifests, holdings, memory, exchange, samples, rows, order, precision
    )


def precision_of(config: Config, backend: str) -> str:
    """The precision of products that a config's run has on a backend."""
    asked = config.run.precision
    return _PRECISION.get(backend, "float32") if asked == "auto" else asked


def largest_batch(engine: Engine, samples: Any) -> Any:
    """The largest ``training.batch_size`` that leaves a client with so many samples a batch under ``drop_last``."""
    return samples * (2 if engine.method.copies == "concat" else 1) // engine.method.batches_per_step


def _divisions(configs: Sequence[Config], dataset: Dataset) -> list[tuple[Federation, dict[str, Any], Holdings]]:
    """The division of the data for each config; configs with the same partition seed share it. All share samples."""
    made: dict[int, tuple[Federation, dict[str, Any], Holdings]] = {}
    for config in configs:
        if config.partition_seed not in made:
            holdings, manifest = deal(config, dataset)
            federation = federate(config, dataset, holdings)
            first = next(iter(made.values()))[0] if made else federation
            made[config.partition_seed] = federation._replace(x=first.x, y=first.y), manifest, holdings
    return [made[config.partition_seed] for config in configs]


def _rows(configs: Sequence[Config], federations: Sequence[Federation]) -> list[Row]:
    """The arguments in which each run differs from the others."""
    return [
        Row(
            jax.random.key_data(keys_of(config)),
            jax.device_put({field: np.float32(value) for field, value in program_inputs(config).items() if value}),
            (held.train, held.validation, held.test, held.pooled),
            jax.device_put(attackers(config)),
        )
        for config, held in zip(configs, federations, strict=True)
    ]


def _check(configs: Sequence[Config], data: DataShape, engine: Engine, federations: Sequence[Federation]) -> None:
    """Checks that need config, engine and data together.

    Raises:
      ConfigError: no client has a whole batch, the method cannot be private, or its states cannot be on the host.
    """
    first = configs[0]
    if first.training.drop_last:
        _check_whole_batches(first, engine, federations)
    for config in configs:
        check_accountant(config)
    if first.privacy.clip is not None:
        without = without_privacy(first)
        plain = make_engine(without, data)
        check_privacy(first, plain.method, _survey(without, data, plain, federations[0], "cpu", "float32")[1])
    if first.run.client_state == "host":
        _check_offloaded(engine)


def _check_whole_batches(config: Config, engine: Engine, federations: Sequence[Federation]) -> None:
    """Raises a ConfigError if, without short batches, nobody can train, or a robust rule would favour who cannot."""
    counts = [np.asarray(federation.train.count)[: engine.trainers] for federation in federations]
    held = [largest_batch(engine, count[count > 0]) for count in counts]
    # Of each run by itself: another one's clients may be larger.
    most, all_have = min(of_run.max() for of_run in held), min(of_run.min() for of_run in held)
    field, size, rule = "training.batch_size", config.training.batch_size, config.aggregation.rule
    if size > most:
        allowed = f"at most {most} with training.drop_last: nobody has a whole batch to train on"
        raise ConfigError(field, size, allowed)
    if rule != "mean" and size > all_have:
        # Such a client returns the model unchanged, in the middle of all others: Krum would choose it in every round.
        allowed = f'at most {all_have} with training.drop_last and aggregation.rule = "{rule}": a client has no more'
        raise ConfigError(field, size, allowed)


def _check_scored(config: Config, manifest: dict[str, Any], new: int) -> None:
    """Raises a ConfigError if only clients whose scores are not reported have validation samples, or test samples."""
    share, trained = config.data.validation_share, judged(manifest, new)
    if share and not np.asarray(manifest["n_validation"])[trained].any():
        allowed = "a larger share: it leaves validation samples only to clients that are new or malicious"
        raise ConfigError("data.validation_share", share, allowed)
    n_test = np.asarray(manifest["n_test"])
    if not n_test[trained].any() and not n_test[len(n_test) - new :].any():
        raise ConfigError("data", config.data.source, "only malicious clients have test samples")


def _check_offloaded(engine: Engine) -> None:
    """Checks that the clients' states can be kept on the host.

    Raises:
      ConfigError: field ``run.client_state``.
    """
    if engine.method.setup is not None:
        why = "the method's round before the first needs the states of all clients at once"
        raise ConfigError("run.client_state", "host", f'"device" here: {why}')
    if jax.process_count() > 1:
        raise ConfigError("run.client_state", "host", '"device" for a run of several processes')


def _survey(
    config: Config, data: DataShape, engine: Engine, federation: Federation, backend: str, precision: str
) -> tuple[Memory, Exchange]:
    """`survey`, once for all runs of the same shapes; what this process holds is looked up anew."""
    on_host = config.run.client_state == "host"
    key = trace_key(config, data, federation, [backend, precision, config.run.export])
    if key not in _surveys:
        try:
            _surveys[key] = survey(engine, federation, backend, precision=precision, on_host=on_host)
        except NEEDS_VALUE as error:
            raise needs_value(config.method["name"], error) from error
        while len(_surveys) > _KEPT:
            _surveys.popitem(last=False)
    _surveys.move_to_end(key)
    memory, exchange = _surveys[key]
    if not memory.process:
        return memory, exchange
    if config.run.keep == "best":  # a copy of the state, which has the memory of the process, too
        memory = memory._replace(resident=memory.resident + memory.resident - memory.samples)
    return memory.of_this_process(), exchange


def _place(
    config: Config, runs: int, memory: Memory, engine: Engine, hardware: Hardware
) -> tuple[Over, Placement, Engine]:
    """What is spread over the devices, the placement of the runs, and the engine with its clients' placement."""
    devices = len(hardware.devices)
    together = jax.process_count() > 1 or config.run.placement == "shard" or config.run.client_state == "host"
    # If spreading the runs leaves devices idle for too long, the runs go one by one, with their clients spread instead.
    idle = 1 - runs / (devices * math.ceil(runs / devices))
    if runs == 1 or together or idle > 0.3:
        placement = place(config, runs, memory, hardware, movable=engine.method.setup is None)
        return "clients", Placement(), replace(engine, placement=placement)
    runs_on, clients_on = place_runs(config, runs, memory, hardware)
    return "runs", runs_on, replace(engine, placement=clients_on)


def _spread(
    rows: list[Row],
    samples: tuple[Samples, Array],
    over: Over,
    runs_on: Placement,
    clients_on: Placement,
    room: int | None,
) -> tuple[list[Row], tuple[Samples, Array], Int[np.ndarray, " rows"]]:
    """Rows and samples on the devices, and the order of the rows; see the attributes of `Program`."""
    runs = len(rows)
    if over == "clients":
        if runs > 1:  # one program for all: index tables of the same width
            tables = _stack_tables([row.clients for row in rows])
            rows = [
                row._replace(clients=jax.tree.map(lambda leaf, at=at: leaf[at], tables)) for at, row in enumerate(rows)
            ]
        return *_replicate((rows, samples), clients_on), np.arange(runs)
    padded = runs_on.padded(max(runs, room or 0))
    order = np.arange(padded) * runs // padded  # what is to do is spread evenly over the devices
    rows = [rows[run] for run in order]
    stacked = Row(
        _stack([row.keys for row in rows]),
        _stack([row.inputs for row in rows]),
        _stack_tables([row.clients for row in rows]),
        _stack([row.malicious for row in rows]),
    )
    if room is not None and runs_on.chunk == 1:
        counts = np.append(True, order[1:] != order[:-1])
        stacked = stacked._replace(limit=np.where(counts, _UNLIMITED, np.int32(0)))
    return [jax.device_put(stacked, rows_sharding(runs_on))], _replicate(samples, runs_on), order


def _replicate(tree: PyTree, placement: Placement) -> Any:
    """The same arrays on every device."""
    if placement.mesh is None:
        return jax.device_put(tree)
    return put_everywhere(tree, NamedSharding(placement.mesh, P()))


def _is_full(table: Clients) -> bool:
    """Whether the number of samples of every client equals the width of the table."""
    return bool(np.all(np.asarray(table.count) == table.index.shape[-1]))


def _stack(trees: Sequence[PyTree]) -> Any:
    """Stacks trees of equal form, on the host, where this needs no compiled program."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _stack_tables(tables: Sequence[tuple[Clients | None, ...]]) -> Any:
    """Stacks the index tables of several federations, padded to the largest; padding only affects the last bits."""

    def stack(parts: Sequence[Clients]) -> Clients:
        rows = max(len(part.count) for part in parts)
        capacity = max(part.index.shape[1] for part in parts)

        def padded(part: Clients) -> tuple:
            more = 0, rows - len(part.count)
            index = np.pad(part.index, (more, (0, capacity - part.index.shape[1])))
            return index, np.pad(part.count, more), np.pad(part.class_counts, (more, (0, 0)))

        return Clients(*_stack([padded(part) for part in parts]))

    columns = zip(*tables, strict=True)
    return tuple(None if column[0] is None else stack([part for part in column if part]) for column in columns)
