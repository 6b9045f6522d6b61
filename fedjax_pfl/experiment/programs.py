"""Runs that differ in their seed and in numbers that no shape depends on, as rows of one program."""

import math
import time
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Float, UInt32

from fedjax_pfl.data.federated import Clients, Federation
from fedjax_pfl.data.sources import Dataset
from fedjax_pfl.engine.memory import available, estimate, exchange
from fedjax_pfl.engine.placement import Placement, map_clients
from fedjax_pfl.engine.round import Engine, Run
from fedjax_pfl.engine.scoring import Scores
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import divide, make_engine
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.driver import client_table, environment, line_scores, summary_of, traffic_summary
from fedjax_pfl.experiment.record import RunDirectory
from fedjax_pfl.method import Static
from fedjax_pfl.methods import METHODS

_TRAINING_NUMBERS = ("lr", "lr_decay", "momentum", "weight_decay", "clip_norm")


def program_inputs(config: Config) -> dict[str, float]:
    """The numbers of a config, by dotted field, that a program can take as input."""
    numbers: dict[str, Any] = {f"training.{name}": getattr(config.training, name) for name in _TRAINING_NUMBERS}
    hints = typing.get_type_hints(METHODS[config.method["name"]], include_extras=True)
    numbers |= {f"method.{name}": value for name, value in config.method.items() if _is_number(hints.get(name))}
    return {field: value for field, value in numbers.items() if value is not None}


def _is_number(hint: Any) -> bool:
    """Whether a hyperparameter of this type is a real number that no shape depends on."""
    if typing.get_origin(hint) is Annotated:
        return Static not in hint.__metadata__ and _is_number(hint.__origin__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        return all(map(_is_number, kinds))
    return hint is float


class _Row(NamedTuple):
    """One run in a program of several.

    Attributes:
      keys: of the initial state and of the rounds, as raw data.
      values: the numbers in which it differs from the others.
      clients: who trains on, validates on and is tested on what; and the pooled test set.
    """

    keys: UInt32[Array, "*runs 2 words"]
    values: dict[str, Float[Array, "*runs"]]
    clients: tuple[Clients | None, ...]


def run_together(configs: Sequence[Config], dataset: Dataset, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Runs configs that differ in seed and numbers only, as rows of one program, and gives their summaries."""
    began = time.perf_counter()
    first, rounds = configs[0], configs[0].training.rounds
    numbers = [program_inputs(config) for config in configs]
    swept = {field: [found[field] for found in numbers] for field in numbers[0]}
    swept = {field: values for field, values in swept.items() if len(set(values)) > 1}
    federations, shares = zip(*_divisions(configs, dataset), strict=True)
    x, y = federations[0].x, federations[0].y
    keys = [jax.random.key_data(jax.random.split(jax.random.key(config.run.seed))) for config in configs]
    rows = _Row(
        jnp.stack(keys),
        {field: jnp.asarray(values, jnp.float32) for field, values in swept.items()},
        _stack([federation[2:] for federation in federations]),
    )
    engine = make_engine(first, dataset)
    key = jax.random.key(first.run.seed)
    memory = estimate(engine, key, federations[0])
    exchanged = exchange(engine, key, federations[0])
    placement = _place(len(configs), memory.resident + memory.per_client)
    fill = placement.padded(len(configs)) - len(configs)  # the last one once more
    rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, *[leaf[-1:]] * fill]), rows)

    def one(row: _Row, x: Array, y: Array) -> tuple[Engine, Array, Array, Federation]:
        key_init, key_rounds = jax.random.wrap_key_data(row.keys)
        federation = Federation(x, y, *row.clients)  # type: ignore[arg-type]  # the fields after x and y, in order
        return make_engine(first, dataset, row.values), key_init, key_rounds, federation

    def init(shared: tuple, row: _Row) -> Run:
        engine, key_init, _, federation = one(row, *shared)
        return engine.init(key_init, federation)

    def some_rounds(shared: tuple, row: tuple[_Row, Run]) -> Run:
        x, y, start, stop = shared
        engine, _, key_rounds, federation = one(row[0], x, y)
        return engine.rounds(key_rounds, row[1], start, stop, jnp.array(True), federation)

    def scores(shared: tuple, row: tuple[_Row, Run]) -> tuple[tuple[Scores, Scores], Scores | None]:
        x, y, t = shared
        engine, _, key_rounds, federation = one(row[0], x, y)
        run = row[1]
        shared_model = engine.global_scores(run.state, federation) if engine.method.global_predict else None
        points = engine.pre(key_rounds, t, run.state, federation), engine.post(key_rounds, t, run, federation)
        return points, shared_model

    def program(fn: Callable) -> Any:
        return jax.jit(lambda rows, shared: map_clients(fn, shared, rows, placement))

    records = [
        RunDirectory(config.run.out, overwrite=_begun(config.run.out), tensorboard=config.run.tensorboard)
        if config.run.out
        else None
        for config in configs
    ]
    for record, config, share in zip(records, configs, shares, strict=True):
        if record:
            record.begin(config.to_toml(), share)
    say(f"{len(configs)} runs in one program: compiling")
    run = jax.block_until_ready(program(init)(rows, (x, y)))
    step, score = program(some_rounds), program(scores)
    lines: list[list[dict[str, Any]]] = [[] for _ in configs]
    t, round_seconds, compile_seconds = 0, 0.0, time.perf_counter() - began
    while t < rounds:
        stop = min(rounds, t + first.run.eval_every)
        started = time.perf_counter()
        if t == 0:
            step = step.lower((rows, run), (x, y, jnp.int32(0), jnp.int32(stop))).compile()
            compile_seconds += time.perf_counter() - started
            started = time.perf_counter()
        run = jax.block_until_ready(step((rows, run), (x, y, jnp.int32(t), jnp.int32(stop))))
        round_seconds += time.perf_counter() - started
        t = stop
        points, shared_model = score((rows, run), (x, y, jnp.int32(t)))
        for number, share in enumerate(shares):
            found = jax.tree.map(lambda leaf, number=number: np.asarray(leaf[number]), (points, shared_model, run))
            (pre, post), of_all, now = found
            of_all = (None, None) if of_all is None else (float(of_all.accuracy), float(of_all.macro_f1))
            n_test = np.asarray(share[f"n_{first.data.evaluate_on}"])
            lines[number].append(
                {
                    "round": t,
                    "train_loss": float(now.loss),
                    **line_scores(pre, post, of_all, n_test, engine.new),
                    "megabytes": exchanged.sent_bytes(now.traffic) / 1e6,
                    "seconds": (time.perf_counter() - began) / len(configs),
                }
            )
            if (record := records[number]) is not None:
                record.append(lines[number][-1])
        say(f"round {t}/{rounds} of {len(configs)} runs, {time.perf_counter() - began:.0f} s")

    summaries = []
    for number, (config, share, record) in enumerate(zip(configs, shares, records, strict=True)):
        (pre, post), last = jax.tree.map(lambda leaf, number=number: np.asarray(leaf[number]), (points, run))
        timing = {
            "runs_in_the_program": len(configs),
            "compile_seconds": compile_seconds / len(configs),
            "seconds_per_round": round_seconds / rounds / len(configs),
            "total_seconds": (time.perf_counter() - began) / len(configs),
        }
        traffic = traffic_summary(exchanged, last.traffic)
        space = {"estimate_bytes": memory.resident + memory.per_client, **memory._asdict()}
        where = environment(placement)
        named = config, engine.method.headline, engine.new, dataset.name
        summary = summary_of(*named, share, lines[number], timing, traffic, space, where)
        if record:
            record.finish(client_table(share, config.data.evaluate_on, pre, post, engine.new), summary)
        summaries.append(summary)
    return summaries


def _divisions(configs: Sequence[Config], dataset: Dataset) -> list[tuple[Federation, dict[str, Any]]]:
    """Federation and manifest of each config; those with the same seed of the partition share one."""
    made: dict[int, tuple[Federation, dict[str, Any]]] = {}
    for config in configs:
        seed = config.run.seed if config.data.seed is None else config.data.seed
        if seed not in made:
            made[seed] = divide(config, dataset)
    return [made[config.run.seed if config.data.seed is None else config.data.seed] for config in configs]


def _stack(tables: Sequence[tuple[Clients | None, ...]]) -> tuple[Clients | None, ...]:
    """Index tables of several federations on one axis, padded to the largest; padding changes no number."""

    def stack(parts: Sequence[Clients]) -> Clients:
        rows = max(len(part.count) for part in parts)
        capacity = max(part.index.shape[1] for part in parts)
        padded = [
            Clients(
                jnp.pad(part.index, ((0, rows - len(part.count)), (0, capacity - part.index.shape[1]))),
                jnp.pad(part.count, (0, rows - len(part.count))),
                jnp.pad(part.class_counts, ((0, rows - len(part.count)), (0, 0))),
            )
            for part in parts
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *padded)

    columns = zip(*tables, strict=True)
    return tuple(None if column[0] is None else stack([part for part in column if part]) for column in columns)


def _place(runs: int, bytes_per_run: int) -> Placement:
    """Where the runs of a program go: spread over cores one by one, or side by side on accelerators."""
    devices = min(jax.local_device_count(), runs)
    if available() * devices < runs * bytes_per_run:
        need, have = runs * bytes_per_run / 1e9, available() * devices / 1e9
        raise ConfigError(
            "grid", f"{runs} runs", f"fewer at once: they need about {need:.2f} GB, there are {have:.2f} GB"
        )
    chunk = 1 if jax.default_backend() == "cpu" else math.ceil(runs / devices)
    mesh = jax.make_mesh((devices,), ("clients",), (AxisType.Auto,), devices=jax.local_devices()[:devices])
    return Placement(mesh if devices > 1 else None, chunk)


def _begun(folder: str) -> bool:
    return (Path(folder) / "config.toml").exists()
