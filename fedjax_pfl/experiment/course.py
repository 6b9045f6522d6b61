"""One run of a program: records its evaluations, calls its callbacks, and makes its `Result`."""

import platform
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import jax
import numpy as np

from fedjax_pfl.engine.run import Run
from fedjax_pfl.engine.scoring import Evaluation
from fedjax_pfl.engine.traffic import Traffic
from fedjax_pfl.experiment.callbacks import Callback, Running, check_run
from fedjax_pfl.experiment.checkpoint import Best, Saved
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.kept import Kept
from fedjax_pfl.experiment.parts import parts_of
from fedjax_pfl.experiment.privacy import spent
from fedjax_pfl.experiment.process import cores
from fedjax_pfl.experiment.programs import Program
from fedjax_pfl.experiment.result import Result
from fedjax_pfl.experiment.resume import RunPlace, versions
from fedjax_pfl.experiment.summary import (
    Line,
    client_rows,
    client_table,
    history_of,
    judged,
    label_accuracy,
    label_table,
    line_of,
    majority_class,
    metrics_of,
    stacked,
    summary_of,
)
from fedjax_pfl.method import State
from fedjax_pfl.ops.tree import count


class Course:
    """One run in progress, from its beginning or from a checkpoint.

    Attributes:
      run: number of the run in the program.
      live: the run as callbacks see it.
      lines: the lines of ``metrics.jsonl`` so far.
      scores: scores of the newest evaluation; None before the first one in this process.
      end: the last round of the run.
    """

    def __init__(
        self,
        run: int,
        program: Program,
        place: RunPlace,
        saved: Saved,
        callbacks: Sequence[Callback],
        state: Callable[[], State],
    ):
        """Takes over the record of the run so far.

        Args:
          run: number of the run in the program.
          program: the program, laid out.
          place: where the run is recorded.
          saved: the checkpoint from which it continues, or the beginning.
          callbacks: called in addition to those of ``place``.
          state: a function that copies its state to the host.
        """
        self.run, self.lines = run, list(saved.lines)
        self.scores: Evaluation | None = None
        self._config, self._program, self._place, self._saved = program.configs[run], program, place, saved
        self.end = self._config.training.rounds
        engine, said = program.engine, (*program.engine.diagnostics, *program.exchange.of_server)
        metrics = metrics_of(
            self._config.run.metrics,
            list(dict.fromkeys(said)),
            shared=engine.method.global_predict is not None,
            new=engine.new > 0,
            validated=engine.validate,
        )
        self.live = Running(self._config, engine.method.headline, saved.round, deepcopy(self.lines), state, metrics)
        self._callbacks = [*place.callbacks(), *callbacks]
        self._manifest = program.manifests[run]
        self._client_rows = [place.client_history]
        self._best = place.best
        self._interrupted = False

    def end_soon(self) -> None:
        """Ends the run: after the newest round if that was evaluated, else after the next one, which will be."""
        t = self.live.round
        evaluated = bool(self.lines) and self.lines[-1]["round"] == t
        self.end = min(self.end, t if evaluated else t + 1)

    def interrupt(self) -> None:
        """Has it end early because of a signal: it is not recorded as complete, so that it can be resumed."""
        self._interrupted = True
        self.live.stop("interrupted")

    def check(self) -> None:
        """Checks that the run has what its callbacks look at, as `check_run`."""
        check_run(self._callbacks, self.live)

    def tell(self, name: str, *arguments: Any) -> None:
        """Calls the function of this name of all its callbacks."""
        for callback in self._callbacks:
            getattr(callback, name)(self.live, *arguments)

    def record(self, scores: Evaluation, sent: Traffic, seconds: float) -> None:
        """Records an evaluation after the newest round, and calls the callbacks.

        Args:
          scores: the scores of the evaluation.
          sent: the traffic so far.
          seconds: time since the run began.
        """
        self.scores, t = scores, self.live.round
        evaluated_on, new = self._config.data.evaluate_on, self._program.engine.new
        cost = {"megabytes": self._program.exchange.sent_bytes(sent) / 1e6, "seconds": seconds}
        of = line_of(scores, self._manifest, evaluated_on, new)
        line = {"round": t, "train_loss": self.live.loss, **of, **cost}
        rows = client_rows(t, self._manifest, evaluated_on, scores) if self._config.run.client_history else {}
        self.lines.append(line)
        self.live.lines.append(deepcopy(line))
        self._client_rows.append(rows)
        self._place.append(line, rows)
        if self._config.run.keep == "best":
            *before, now = self.live.values(None)
            if all(now > value for value in before):
                self._best = None  # frees what it holds before the state is copied
                self._best = Best(np.asarray(t, np.int32), self.live.state)
        self.tell("on_evaluate", deepcopy(line))

    def save(self, state: Run, t: int, seconds: float, round_seconds: float) -> None:
        """Writes a checkpoint after round t."""
        now = self._saved._replace(
            round=t,
            lines=self.lines,
            seconds=seconds,
            round_seconds=round_seconds,
            # Of this process: that of the checkpoint from which it has gone on may have had others.
            config=self._config.model_dump(mode="json"),
            versions=versions(),
        )
        self._place.save(state, now, self._best)

    def result(
        self, ended: Run, exported: dict[str, np.ndarray], timing: dict[str, Any], dataset: str, data: Any
    ) -> Result:
        """The result of the run.

        Args:
          ended: the final state, on the host.
          exported: the table for ``run.export``.
          timing: the timing for the summary.
          dataset: name of the data set.
          data: the data from Python from which the data set was made, or None.
        """
        assert self.scores is not None
        config, program, manifest = self._config, self._program, self._manifest
        on = config.data.evaluate_on
        labels = label_table(manifest, on, self.scores)
        summary = _summary(program, config, self.end, dataset, manifest, self.lines, labels, ended.traffic, timing)
        if self.end < config.training.rounds:
            summary["stopped"] = self.live.stopped
        participated = program.rounds_participated(self.run, self.end)
        clients = client_table(manifest, on, self.scores, program.engine.new, participated)
        kept = Kept(self.end, program.data, ended.state)
        if self._best is not None:
            kept = Kept(int(self._best.round), program.data, self._best.state)
        history, client_history = history_of(self.lines), stacked(self._client_rows)
        numbers = summary, history, clients, labels, manifest, exported
        return Result(*numbers, kept, config, client_history, data, parts_of([config]))

    def finish(self, result: Result) -> None:
        """Records the end of the run, unless it was interrupted before its last round."""
        if not self._interrupted or self.end == self._config.training.rounds:
            self._place.finish(result)


def _summary(
    program: Program,
    config: Config,
    rounds: int,
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
        "rounds": rounds,
        "seed": config.run.seed,
        "partition_hash": manifest["hash"],
        "notes": manifest["notes"],
        "evaluated_on": config.data.evaluate_on,
        "majority_class": majority_class(manifest, config.data.evaluate_on, engine.new),
        "label_accuracy": label_accuracy(labels, program.data.classes, judged(manifest, engine.new)),
        **({"attackers": manifest["attackers"]} if "attackers" in manifest else {}),
        **({"privacy": spent(config, rounds)} if config.privacy.clip is not None else {}),
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
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": cores(),
            "platform": jax.default_backend(),
            "device_kind": jax.devices()[0].device_kind,
            "process_count": jax.process_count(),
            "device_count": program.devices,
            "clients_side_by_side": engine.placement.chunk,
        },
    }
    return summary_of(lines, identity, costs, new=engine.new)
