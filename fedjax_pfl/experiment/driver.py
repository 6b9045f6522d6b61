"""``simulate(config) -> Result``: build, run blocks of rounds, evaluate, record."""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from fedjax_pfl.data.federated import Federation
from fedjax_pfl.data.sources import from_arrays, load
from fedjax_pfl.engine.memory import exchange
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine, Run
from fedjax_pfl.engine.scoring import Scores, harmonic_mean, summarize
from fedjax_pfl.engine.traffic import Exchange, Traffic, count
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import divide, make_engine, place, prepare_devices
from fedjax_pfl.experiment.checkpoint import Checkpoints, Saved, Stop, check_resumable, stop_on_signals, versions
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.distributed import agree, is_first, put_everywhere, to_host
from fedjax_pfl.experiment.record import RunDirectory, check_tensorboard
from fedjax_pfl.method import State

# A block of rounds should return to the host about this often, to report progress.
_SECONDS_PER_BLOCK = 2.0


class Progress(NamedTuple):
    """What a run reports before compilation and after each block of rounds.

    Attributes:
      round: rounds done.
      rounds: rounds in all.
      loss: mean training loss of the last round's participants; NaN before the first.
      last: the newest line of ``metrics.jsonl``; None before the first evaluation.
      seconds_left: estimated time to the end; NaN before the first round.
      memory: estimated bytes that the run needs.
    """

    round: int
    rounds: int
    loss: float
    last: dict[str, Any] | None
    seconds_left: float
    memory: int


@dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
      summary: the content of ``summary.json``.
      history: metric -> array over evaluated rounds, e.g. ``history["pre.accuracy"]``; ``history["round"]`` says which.
      clients: column -> array [N], as in ``clients.csv``.
      partition: the content of ``partition.json``.
      state: server and client state after the last round.
      config: the resolved config.
    """

    summary: dict[str, Any]
    history: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    partition: dict[str, Any]
    state: State
    config: Config

    def rounds_to(self, target: float, metric: str = "global") -> int | None:
        """The first evaluated round after which a metric is the target or more; see `first_reached`.

        Args:
          target: in the metric's own unit: 0.66 for an accuracy of 66 %.
          metric: a name in ``history``; by default the accuracy of the global model.

        Returns:
          The number of rounds; None where the target is never reached, or there is no global model to reach it.

        Raises:
          ValueError: ``history`` has no such metric.
        """
        if metric not in self.history:
            raise ValueError(f"no metric {metric!r} in the history; there are {', '.join(self.history)}")
        at = first_reached(self.history[metric], target)
        return None if at is None else int(self.history["round"][at])


def first_reached(values: Sequence[float | None] | np.ndarray, target: float) -> int | None:
    """The first position at which a metric is the target or more; None where it never is.

    Six digits count: 4200 of 10,000 in float32 is a little less than 0.42, and yet 42 %.
    """
    reached = np.flatnonzero(np.asarray(values, np.float64).round(6) >= round(target, 6))
    return int(reached[0]) if len(reached) else None


def simulate(
    config: Config,
    data: Sequence[np.ndarray] | None = None,
    *,
    overwrite: bool = False,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Runs one federated experiment.

    With ``run.out``, SIGINT and SIGTERM leave a checkpoint behind before they end the run; ``run.checkpoint_every``
    writes one every so many rounds, against all other ways to die.

    Args:
      config: what to run.
      data: (images, labels) or (images, labels, test_images, test_labels) instead of ``data.source``; images are
        [n, h, w, c] uint8.
      overwrite: replace what an earlier run left in ``run.out``.
      resume: the run directory of an interrupted run, which goes on from its newest checkpoint and ends, on the same
        machine and with the same packages and placement, bit for bit where it would have ended. The config must be the
        same, except that clients may be placed otherwise, and ``training.rounds`` may grow; output goes to this
        directory.
      progress: called before compilation, with round 0, and after each block of rounds.

    Returns:
      Summary, history per evaluated round, per-client table, final state. The numbers depend on config and data alone.

    Raises:
      ConfigError: config, data and method do not fit together, the run directory holds something, or there is no
        matching checkpoint to resume from; raised before anything is compiled or written.
      KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM, after the checkpoint is written.
    """
    began = time.perf_counter()
    prepare_devices(config.run.placement)
    dataset = load(config.data.source) if data is None else from_arrays(*data)
    federation, shares = divide(config, dataset)
    key_init, key_rounds = jax.random.split(jax.random.key(config.run.seed))
    engine, memory = place(make_engine(config, dataset), config, key_init, federation)
    exchanged = exchange(engine, key_init, federation)
    record, checkpoints, saved = _open(config, shares["hash"], overwrite=overwrite, resume=resume)
    run = checkpoints.run(jax.eval_shape(engine.init, key_init, federation)) if checkpoints and saved else None
    if not is_first():
        record = None
    if record:
        if saved:
            record.resume(config.to_toml(), saved.lines)
        else:
            record.begin(config.to_toml(), shares)

    rounds, n_test = config.training.rounds, np.asarray(shares[f"n_{config.data.evaluate_on}"])
    every = config.run.checkpoint_every or rounds
    memory_bytes = memory.resident + engine.placement.chunk * memory.per_client
    done = saved or Saved(0, [], 0.0, 0.0, config.model_dump(mode="json"), shares["hash"], versions())
    t, lines, round_seconds = done.round, list(done.lines), done.round_seconds
    began -= done.seconds
    if progress:
        progress(Progress(t, rounds, float("nan"), None, float("nan"), memory_bytes))
    with jax.default_matmul_precision(config.run.precision):
        programs, keys, federation, compile_seconds = _compile(engine, (key_init, key_rounds), federation)
    key_init, key_rounds = keys
    run = programs.init(key_init, federation) if run is None else programs.place(run)
    pre: Scores | None = None
    block, started_running = 1, time.perf_counter()
    with stop_on_signals() if checkpoints else nullcontext(Stop()) as stopping:
        while t < rounds:
            next_evaluation = min(rounds, (t // config.run.eval_every + 1) * config.run.eval_every)
            stop = min(t + block, next_evaluation, (t // every + 1) * every)
            started = time.perf_counter()
            evaluated = stop == next_evaluation
            run = programs.rounds(key_rounds, run, np.int32(t), np.int32(stop), np.bool_(evaluated), federation)
            loss = float(run.loss)  # waits for the device
            round_seconds += time.perf_counter() - started
            t = stop
            block = max(1, int(_SECONDS_PER_BLOCK * (t - done.round) / (round_seconds - done.round_seconds)))
            block, stopping.signal = agree(block, stopping.signal)
            if evaluated:
                pre = programs.pre(key_rounds, np.int32(t), run.state, federation)
                post = programs.post(key_rounds, np.int32(t), run, federation)
                of_all = programs.global_scores(run.state, federation)
                scores = line_scores(pre, post, of_all, n_test, engine.new)
                cost = {
                    "megabytes": exchanged.sent_bytes(run.traffic) / 1e6,
                    "seconds": time.perf_counter() - began,
                }
                lines.append({"round": t, "train_loss": loss, **scores, **cost})
                if record:
                    record.append(lines[-1])
            due = config.run.checkpoint_every and (t % every == 0 or t == rounds)
            interrupted = stopping.signal and t < rounds
            if checkpoints and (due or interrupted):
                seconds = time.perf_counter() - began
                now = done._replace(round=t, lines=lines, seconds=seconds, round_seconds=round_seconds)
                whole = to_host(run)
                if is_first():
                    checkpoints.save(whole, now)
            if interrupted:
                stopping.leave()
            if progress:
                left = (time.perf_counter() - started_running) / (t - done.round) * (rounds - t)
                progress(Progress(t, rounds, loss, lines[-1] if lines else None, left, memory_bytes))
    if pre is None:  # the checkpoint was that of the last round
        pre = programs.pre(key_rounds, np.int32(t), run.state, federation)
        post = programs.post(key_rounds, np.int32(t), run, federation)

    clients = client_table(shares, config.data.evaluate_on, pre, post, engine.new)
    timing = {
        "compile_seconds": compile_seconds,
        "seconds_per_round": round_seconds / rounds,
        "total_seconds": time.perf_counter() - began,
    }
    traffic = traffic_summary(exchanged, run.traffic)
    space = {"estimate_bytes": memory_bytes, **memory._asdict()}
    where = environment(engine.placement)
    named = config, engine.method.headline, engine.new, dataset.name
    summary = summary_of(*named, shares, lines, timing, traffic, space, where)
    if record:
        record.finish(clients, summary)
    return Result(summary, _history(lines), clients, shares, to_host(run.state), config)


def summary_of(
    config: Config,
    headline: str,
    new: int,
    dataset: str,
    shares: dict[str, Any],
    lines: list[dict[str, Any]],
    timing: dict[str, float],
    traffic: dict[str, float],
    memory: dict[str, int],
    where: dict[str, Any],
) -> dict[str, Any]:
    """The content of ``summary.json``."""
    return {
        "method": config.method["name"],
        "headline": headline,
        "dataset": dataset,
        "model": config.model["name"],
        "clients": config.data.clients,
        "rounds": config.training.rounds,
        "seed": config.run.seed,
        "partition_hash": shares["hash"],
        "evaluated_on": config.data.evaluate_on,
        "personal": {point: _headline(lines, point) for point in ("post", "pre")},
        "new_clients": {point: _headline(lines, f"new_{point}") for point in ("post", "pre")} if new else None,
        **_global_headline(lines),
        "timing": timing,
        "traffic": traffic,
        "memory": memory,
        "environment": where,
    }


def traffic_summary(exchanged: Exchange, traffic: Traffic) -> dict[str, float]:
    """What was exchanged, as in ``summary.json``."""
    return {
        "floats_up_per_client_round": count(exchanged.up),
        "floats_down_per_client_round": count(exchanged.down),
        "megabytes_total": exchanged.sent_bytes(traffic) / 1e6,
        "megabytes_dense": exchanged.dense_bytes(traffic) / 1e6,
    }


def environment(placement: Placement) -> dict[str, Any]:
    """Where a run took place, as in ``summary.json``."""
    return {
        **versions(),
        "platform": jax.default_backend(),
        "process_count": jax.process_count(),
        "device_count": placement.devices,
        "clients_side_by_side": placement.chunk,
    }


def _open(
    config: Config, partition: str, *, overwrite: bool, resume: str | os.PathLike[str] | None
) -> tuple[RunDirectory | None, Checkpoints | None, Saved | None]:
    """The run directory and its checkpoints, if there is one, and the checkpoint to go on from; writes nothing."""
    if config.run.tensorboard:
        check_tensorboard(resume or config.run.out)
    if resume is None and not config.run.out:
        if config.run.checkpoint_every:
            allowed = "0 without a run directory: give run.out"
            raise ConfigError("run.checkpoint_every", config.run.checkpoint_every, allowed)
        return None, None, None
    record = RunDirectory(
        resume or config.run.out or "",
        overwrite=overwrite or not is_first(),  # the first one has looked, and may have begun
        resume=resume is not None,
        tensorboard=config.run.tensorboard,
    )
    checkpoints = Checkpoints(record.checkpoints)
    if resume is None:
        return record, checkpoints, None
    saved = checkpoints.newest()
    check_resumable(saved, config, partition, str(resume))
    if saved.round == config.training.rounds and record.complete:
        allowed = f"the run is complete after {saved.round} rounds; to go on, give a larger training.rounds"
        raise ConfigError("resume", str(resume), allowed)
    if saved.versions != versions():
        message = f"{resume} was run with {saved.versions}, here are {versions()}: the last bits may differ"
        warnings.warn(message, stacklevel=3)
    return record, checkpoints, saved


_Keys = tuple[Key[Array, ""], Key[Array, ""]]
"""The randomness of the initial state, and that of the rounds."""


class _Programs(NamedTuple):
    init: Callable[..., Run]
    place: Callable[[Run], Run]
    rounds: Callable[..., Run]
    pre: Callable[..., Scores]
    post: Callable[..., Scores]
    global_scores: Callable[..., tuple[float | None, float | None]]


def _compile(engine: Engine, keys: _Keys, data: Federation) -> tuple[_Programs, _Keys, Federation, float]:
    """Compiles all that a run calls, and puts keys and data where the programs expect them."""
    began = time.perf_counter()
    layout: Any = engine.placement.shardings(engine.clients)
    shared, per_client = layout
    run_layout = None
    if shared is not None:
        data, keys = put_everywhere((data, keys), shared)
        run_layout = Run(State(shared, per_client), per_client, shared, shared)

    key, _ = keys
    number, flag = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool)
    run = jax.eval_shape(engine.init, key, data)
    if run_layout is not None:
        run = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            run,
            jax.tree.broadcast(run_layout, run),
        )
    with ThreadPoolExecutor() as pool:  # while XLA compiles one, the next is traced

        def compiling(fn: Callable, layout: Any, *args: Any, donate: int | None = None, **options: Any) -> Future:
            jitted = jax.jit(fn, out_shardings=layout, donate_argnums=donate)
            return pool.submit(jitted.lower(*args).compile, options)

        # The longest first. Most of the initial state's are random numbers, drawn once: not worth LLVM's best efforts.
        rounds = compiling(engine.rounds, run_layout, key, run, number, number, flag, data, donate=1)
        init = compiling(engine.init, run_layout, key, data, xla_backend_optimization_level=1)
        pre = compiling(engine.pre, shared, key, number, run.state, data)
        post = compiling(engine.post, shared, key, number, run, data)
        scorer = compiling(engine.global_scores, shared, run.state, data) if engine.method.global_predict else None

    def global_scores(state: State, data: Federation) -> tuple[float | None, float | None]:
        if scorer is None:
            return None, None
        scores = scorer.result()(state, data)
        return float(scores.accuracy), float(scores.macro_f1)

    def place_run(run: Run) -> Run:
        placed: Run = jax.device_put(run, run_layout)
        return placed

    programs = _Programs(init.result(), place_run, rounds.result(), pre.result(), post.result(), global_scores)
    return programs, keys, data, time.perf_counter() - began


def line_scores(
    pre: Scores,
    post: Scores,
    global_scores: tuple[float | None, float | None],
    n_test: Int[np.ndarray, " N"],
    new: int,
) -> dict[str, Any]:
    """What ``metrics.jsonl`` says of the models; ``hm`` is the harmonic mean of global accuracy and ``i_local``."""
    accuracy, macro_f1 = global_scores

    def personal(scores: Scores, who: slice) -> dict[str, float | None]:
        summary = summarize(Scores(*(values[who] for values in scores)), n_test[who])
        hm = None if accuracy is None else float(harmonic_mean(accuracy, summary["i_local"]))
        return {**summary, "hm": hm}

    points, trainers = {"pre": pre, "post": post}, len(n_test) - new
    line: dict[str, Any] = {point: personal(scores, slice(trainers)) for point, scores in points.items()}
    if new:
        line |= {f"new_{point}": personal(scores, slice(trainers, None)) for point, scores in points.items()}
    return {**line, "global": accuracy, "global_macro_f1": macro_f1}


def _global_headline(lines: list[dict[str, Any]]) -> dict[str, float | None]:
    """The headline numbers of the global model, None where there is none; ``best`` is selected like that of PRE."""
    best = None if lines[-1]["global"] is None else max(lines, key=lambda line: line["global"])
    return {
        "global": lines[-1]["global"],
        "global_macro_f1": lines[-1]["global_macro_f1"],
        "global_best": best and best["global"],
        "global_best_round": best and best["round"],
    }


def _headline(lines: list[dict[str, Any]], point: str) -> dict[str, float | None]:
    """The headline numbers of PRE or POST; ``best`` is selected on the data that are scored."""
    accuracy = np.array([line[point]["accuracy"] for line in lines])
    last = lines[-1][point]
    best = int(np.argmax(accuracy))
    return {
        "last": last["accuracy"],
        "best": float(accuracy[best]),
        "best_round": lines[best]["round"],
        "mean_last_10": float(accuracy[-10:].mean()),
        "std_clients": last["std_clients"],
        "worst_10_percent": last["worst_10_percent"],
        "weighted_last": last["weighted"],
        "macro_f1_last": last["macro_f1"],
        "i_local_last": last["i_local"],
        "hm_last": last["hm"],
    }


def _history(lines: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Columns of the evaluated rounds; nested metrics get dotted names, NaN stands for a missing global model."""
    columns: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            for key, number in value.items() if isinstance(value, dict) else [("", value)]:
                column = f"{name}.{key}" if key else name
                columns.setdefault(column, []).append(np.nan if number is None else number)
    return {name: np.array(column) for name, column in columns.items()}


def client_table(
    shares: dict[str, Any], evaluated_on: str, pre: Scores, post: Scores, new: int
) -> dict[str, np.ndarray]:
    """One row per client, as in ``clients.csv``; the scores of a client without test samples are NaN."""
    n_test = np.asarray(shares[f"n_{evaluated_on}"])
    client = np.arange(len(n_test))
    table = {"client": client, "n_train": np.asarray(shares["n_train"]), "n_test": n_test}
    if new:
        table["new"] = (client >= len(n_test) - new).astype(int)
    for point, scores in (("pre", pre), ("post", post)):
        for metric in ("accuracy", "macro_f1"):
            table[f"{point}_{metric}"] = np.where(n_test > 0, np.asarray(getattr(scores, metric)), np.nan)
    return table
