"""``simulate(config) -> Result``, and the one loop of every experiment: block of rounds, evaluate, record, checkpoint.

`drive` takes one run, or several as rows of one program (`programs`); a single run is R = 1.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.sources import from_arrays, load
from fedjax_pfl.engine.round import Run
from fedjax_pfl.engine.scoring import Evaluation
from fedjax_pfl.engine.traffic import Traffic, count
from fedjax_pfl.experiment.build import prepare
from fedjax_pfl.experiment.checkpoint import Saved, Stop, stop_on_signals
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.distributed import agree
from fedjax_pfl.experiment.privacy import spent
from fedjax_pfl.experiment.programs import Program, lay_out
from fedjax_pfl.experiment.resume import RunPlace, versions
from fedjax_pfl.experiment.summary import (
    Line,
    client_table,
    first_reached,
    history_of,
    judged,
    label_accuracy,
    label_table,
    line_of,
    majority_class,
    mean_line,
    summary_of,
)
from fedjax_pfl.method import State

# A block of rounds should return to the host about this often, to report progress.
_SECONDS_PER_BLOCK = 2.0


class Progress(NamedTuple):
    """What is reported before compilation and after each block of rounds.

    Attributes:
      round: rounds done.
      rounds: rounds in all.
      loss: mean training loss of the last round's participants, mean over the runs of a program; NaN before the first.
      last: the newest line of ``metrics.jsonl``, mean over the runs of a program; None before the first evaluation.
      seconds_left: estimated time to the end; NaN before the first round.
      memory: estimated bytes that the program will take.
      runs: runs that go on together.
    """

    round: int
    rounds: int
    loss: float
    last: Line | None
    seconds_left: float
    memory: int
    runs: int = 1


@dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
      summary: the content of ``summary.json``.
      history: metric -> array over evaluated rounds, e.g. ``history["pre.accuracy"]``; ``history["round"]`` says which.
      clients: column -> array [N], as in ``clients.csv``.
      labels: column -> array, as in ``labels.csv``: a row per client and label that it is scored on.
      partition: the content of ``partition.json``.
      exported: column -> array, as in ``export.npz``: what ``run.export`` asks for; nothing unless it does.
      state: server and client state after the last round.
      config: the resolved config.
    """

    summary: dict[str, Any]
    history: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    partition: dict[str, Any]
    exported: dict[str, np.ndarray]
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
    writes one every so many rounds, against all other ways to die. A second run in the same process whose shapes are
    the same, with another seed, learning rate or real-valued hyperparameter, say, compiles nothing.

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
    prepare(config.run)
    dataset = load(config.data.source) if data is None else from_arrays(*data)
    place = RunPlace(config, resume=resume, overwrite=overwrite)
    return drive([config], dataset, [place], began=began, progress=progress)[0]


def drive(
    configs: Sequence[Config],
    dataset: Dataset,
    places: Sequence[RunPlace],
    *,
    began: float,
    progress: Callable[[Progress], None] | None = None,
) -> list[Result]:
    """Runs configs that are alike but for seed and numbers (`programs.alike`), as rows of one program.

    Args:
      configs: of the runs.
      dataset: what they share out.
      places: where each is recorded, and goes on from.
      began: when the work on them began, by ``time.perf_counter``.
      progress: called before compilation, and after each block of rounds.
    """
    first, runs, report = configs[0], len(configs), progress or (lambda now: None)
    rounds, every = first.training.rounds, first.run.checkpoint_every or first.training.rounds
    program = lay_out(configs, dataset)
    done, held = _begin(program, places)
    report(Progress(done[0].round, rounds, float("nan"), None, float("nan"), program.bytes(), runs))
    program.compile()
    states = program.init() if held is None else program.put(held)
    t, round_seconds, lines = done[0].round, done[0].round_seconds, [list(saved.lines) for saved in done]
    began -= runs * done[0].seconds
    scores: list[Evaluation] | None = None
    block, started_running = 1, time.perf_counter()
    catching = stop_on_signals() if any(place.checkpoints for place in places) else nullcontext(Stop())
    with catching as stopping:
        while t < rounds:
            next_evaluation = min(rounds, (t // first.run.eval_every + 1) * first.run.eval_every)
            stop = min(t + block, next_evaluation, (t // every + 1) * every)
            started, evaluated = time.perf_counter(), stop == next_evaluation
            states = program.rounds(states, t, stop, evaluate=evaluated)
            losses = [float(loss) for loss in program.each([state.loss for state in states])]  # waits for the devices
            round_seconds += (time.perf_counter() - started) / runs
            t = stop
            block = max(
                1, int(_SECONDS_PER_BLOCK * (t - done[0].round) / (runs * (round_seconds - done[0].round_seconds)))
            )
            block, stopping.signal = agree(block, stopping.signal)
            if evaluated:
                scores = program.score(states, t)
                sent = program.each([state.traffic for state in states])
                seconds = (time.perf_counter() - began) / runs
                for run, (config, place) in enumerate(zip(configs, places, strict=True)):
                    of = line_of(scores[run], program.manifests[run], config.data.evaluate_on, program.engine.new)
                    cost = {"megabytes": program.exchange.sent_bytes(sent[run]) / 1e6, "seconds": seconds}
                    lines[run].append({"round": t, "train_loss": losses[run], **of, **cost})
                    place.append(lines[run][-1])
            due = first.run.checkpoint_every and (t % every == 0 or t == rounds)
            interrupted = stopping.signal and t < rounds
            if due or interrupted:
                seconds = (time.perf_counter() - began) / runs
                for run, state in enumerate(program.each(states)):
                    now = done[run]._replace(round=t, lines=lines[run], seconds=seconds, round_seconds=round_seconds)
                    places[run].save(state, now)
            if interrupted:
                stopping.leave()
            left = (time.perf_counter() - started_running) / (t - done[0].round) * (rounds - t)
            last = mean_line([found[-1] for found in lines]) if lines[0] else None
            report(Progress(t, rounds, float(np.mean(losses)), last, left, program.bytes(), runs))
    if scores is None:  # the checkpoint was that of the last round
        scores = program.score(states, t)
    timing = {
        **({"runs_in_the_program": runs} if runs > 1 else {}),
        "compile_seconds": program.compile_seconds / runs,
        "seconds_per_round": round_seconds / rounds,
        "total_seconds": (time.perf_counter() - began) / runs,
    }
    results, ended = [], program.each(states)
    for run, (state, exported) in enumerate(zip(ended, program.export(ended, t), strict=True)):
        config, manifest = configs[run], program.manifests[run]
        labels = label_table(manifest, config.data.evaluate_on, scores[run])
        summary = _summary(program, config, dataset.name, manifest, lines[run], labels, state.traffic, timing)
        clients = client_table(manifest, config.data.evaluate_on, scores[run], program.engine.new)
        history = history_of(lines[run])
        results.append(Result(summary, history, clients, labels, manifest, exported, state.state, config))
    for place, result in zip(places, results, strict=True):
        place.finish(result.clients, result.labels, result.exported, result.summary)
    return results


def _begin(program: Program, places: Sequence[RunPlace]) -> tuple[list[Saved], list[Run] | None]:
    """What each run goes on from: the newest checkpoint that all of them have, with its arrays, or the beginning.

    All is read before anything is written.
    """
    common = set.intersection(*(set(place.found()) for place in places))
    pairs = list(zip(places, program.manifests, strict=True))
    if not common:
        for place, manifest in pairs:
            place.begin(manifest)
        hashes = [
            (config.model_dump(mode="json"), manifest["hash"])
            for config, (_, manifest) in zip(program.configs, pairs, strict=True)
        ]
        return [Saved(0, [], 0.0, 0.0, *known, versions()) for known in hashes], None
    like = program.one_run()
    found = [place.read(max(common), manifest, like) for place, manifest in pairs]
    for place, (saved, _) in zip(places, found, strict=True):
        place.go_back(saved)
    done, states = zip(*found, strict=True)
    return list(done), list(states)


def _summary(
    program: Program,
    config: Config,
    dataset: str,
    manifest: dict[str, Any],
    lines: Sequence[Line],
    labels: dict[str, np.ndarray],
    traffic: Traffic,
    timing: dict[str, Any],
) -> dict[str, Any]:
    """The content of ``summary.json``."""
    exchange, memory, engine = program.exchange, program.memory, program.engine
    identity = {
        "method": config.method["name"],
        "headline": engine.method.headline,
        "dataset": dataset,
        "model": config.model["name"],
        "clients": config.data.clients,
        "rounds": config.training.rounds,
        "seed": config.run.seed,
        "partition_hash": manifest["hash"],
        "evaluated_on": config.data.evaluate_on,
        "majority_class": majority_class(manifest, config.data.evaluate_on, engine.new),
        "label_accuracy": label_accuracy(labels, program.data.classes, judged(manifest, engine.new)),
        **({"attackers": manifest["attackers"]} if "attackers" in manifest else {}),
        **({"privacy": spent(config)} if config.privacy.clip is not None else {}),
    }
    costs = {
        "timing": timing,
        "traffic": {
            "floats_up_per_client_round": count(exchange.up),
            "floats_down_per_client_round": count(exchange.down),
            "megabytes_total": exchange.sent_bytes(traffic) / 1e6,
            "megabytes_dense": exchange.dense_bytes(traffic) / 1e6,
        },
        "memory": {"estimate_bytes": program.bytes(), **memory._asdict()},
        "environment": {
            **versions(),
            "platform": jax.default_backend(),
            "process_count": jax.process_count(),
            "device_count": program.devices,
            "clients_side_by_side": engine.placement.chunk,
        },
    }
    return summary_of(lines, identity, costs, new=engine.new)
