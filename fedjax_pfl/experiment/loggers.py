"""Callbacks that log the lines of ``metrics.jsonl`` to TensorBoard, Weights & Biases and MLflow."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.callbacks import Callback, Running
from fedjax_pfl.experiment.summary import Line, flat

if TYPE_CHECKING:
    from fedjax_pfl.experiment.result import Result

_TENSORBOARD = 'pip install "fedjax_pfl[tensorboard]"'


class TensorBoard(Callback):
    """Writes the lines of ``metrics.jsonl`` as scalars to a TensorBoard event file; the step is the round.

    ``run.tensorboard = true`` does the same in the run directory. The file is written record by record, because
    TensorBoard's own writer keeps a thread and an open file for every run, and a sweep has many runs at once.
    """

    def __init__(self, folder: str | Path):
        """Uses an event file in this folder; an earlier one is replaced.

        Raises:
          ConfigError: the package tensorboard is not installed.
        """
        if not _has_tensorboard():
            raise ConfigError("TensorBoard", "tensorboard", f"an installed package: {_TENSORBOARD}")
        # TensorBoard knows it by the part before the last.
        self._path = Path(os.path.expanduser(folder)) / "events.out.tfevents.metrics"

    def on_start(self, run: Running) -> None:
        """Begins the file, with the lines that were recorded before a resumption."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"), "wb")
        for line in run.lines:
            self.on_evaluate(run, line)

    def on_evaluate(self, run: Running, line: Line) -> None:
        """Adds the numbers of a line; values that are None are left out."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(line).items()]
        self._write(Event(wall_time=time.time(), step=line["round"], summary=Summary(value=values)), "ab")

    def _write(self, event: Any, mode: str) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self._path.open(mode) as file:
            RecordWriter(file).write(event.SerializeToString())


class WandbLogger(Callback):
    """Logs the lines of ``metrics.jsonl``, and at the end the summary, to Weights & Biases."""

    def __init__(self, **options: Any):
        """Takes options of ``wandb.init``: ``project="pfl"``, ``mode="offline"``, ``id=...`` to continue a run.

        Raises:
          ConfigError: the package wandb is not installed.
        """
        try:
            import wandb  # noqa: F401  # only whether it can be
        except ImportError:
            raise ConfigError("WandbLogger", "wandb", 'an installed package: pip install "fedjax_pfl[wandb]"') from None
        self._options = options
        self._run: Any = None

    def on_start(self, run: Running) -> None:
        """Begins the run there, with the config and the lines that were recorded before a resumption."""
        import wandb

        self._run = wandb.init(config=run.config.model_dump(mode="json"), **self._options)
        for line in run.lines:
            self.on_evaluate(run, line)

    def on_evaluate(self, run: Running, line: Line) -> None:
        """Logs a line; the step is the round."""
        self._run.log(_scalars(line), step=line["round"])

    def on_end(self, run: Running, result: "Result") -> None:
        """Writes the summary, and ends the run there."""
        self._run.summary.update(flat(result.summary["personal"]))
        self._run.finish()


class MLflowLogger(Callback):
    """Logs the lines of ``metrics.jsonl`` to a run of MLflow, with the config as its parameters."""

    def __init__(self, *, experiment: str | None = None, tracking_uri: str | None = None, **options: Any):
        """Takes the place to log to.

        Args:
          experiment: name of the experiment; MLflow's default unless given.
          tracking_uri: a server, or ``sqlite:///mlflow.db``; MLflow's default unless given.
          options: options of ``mlflow.client.MlflowClient.create_run``: ``run_name``, ``tags``.

        Raises:
          ConfigError: the package mlflow is not installed.
        """
        try:
            import mlflow  # noqa: F401  # only whether it can be
        except ImportError:
            raise ConfigError(
                "MLflowLogger", "mlflow", 'an installed package: pip install "fedjax_pfl[mlflow]"'
            ) from None
        self._experiment, self._uri, self._options = experiment, tracking_uri, options
        self._client: Any = None
        self._id = ""

    def on_start(self, run: Running) -> None:
        """Begins the run there, with the config and the lines that were recorded before a resumption."""
        from mlflow.client import MlflowClient

        self._client = MlflowClient(self._uri)
        name = self._experiment or "Default"
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, **self._options).info.run_id
        for field, value in flat(run.config.model_dump(mode="json")).items():
            self._client.log_param(self._id, field, value)
        for line in run.lines:
            self.on_evaluate(run, line)

    def on_evaluate(self, run: Running, line: Line) -> None:
        """Logs a line; the step is the round."""
        for name, value in _scalars(line).items():
            self._client.log_metric(self._id, name.replace("/", "."), value, step=line["round"])

    def on_end(self, run: Running, result: "Result") -> None:
        """Ends the run there."""
        self._client.set_terminated(self._id)


def check_tensorboard(out: Any, field: str = "run.out") -> None:
    """Checks that ``run.tensorboard = true`` is possible.

    Args:
      out: the run directory, or the folder of several run directories.
      field: what gives it.

    Raises:
      ConfigError: no directory is given, or the package tensorboard is not installed.
    """
    if not out:
        raise ConfigError("run.tensorboard", True, f"false without a run directory: give {field}")
    if not _has_tensorboard():
        raise ConfigError("run.tensorboard", True, f"false without the package tensorboard: {_TENSORBOARD}")


def _has_tensorboard() -> bool:
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401  # only whether they can be
    except ImportError:
        return False
    return True


def _scalars(line: Line) -> dict[str, float]:
    """The numbers of a line, by tag; values that are None are left out."""
    return {
        name.replace(".", "/"): value for name, value in flat(line).items() if value is not None and name != "round"
    }
