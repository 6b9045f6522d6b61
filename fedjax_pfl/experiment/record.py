"""The run directory: what a run leaves on disk."""

import csv
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config, load_config
from fedjax_pfl.experiment.summary import Line, flat, without_nan

# How a run is carried out: these may differ between a run that was begun and its continuation.
_FREE = (
    "training.rounds",
    "run.checkpoint_every",
    "run.placement",
    "run.chunk",
    "run.out",
    "run.tensorboard",
    "run.compilation_cache",
    "run.export",
    "run.export_clients",
)
_FILES = ("config.toml", "partition.json", "metrics.jsonl", "clients.csv", "labels.csv", "export.npz", "summary.json")
_CHECKPOINTS = "checkpoints"
_EVENTS = "tensorboard"


class RunDirectory:
    """Writes ``config.toml``, ``partition.json``, ``metrics.jsonl``, tables of clients and labels, exports, summary.

    If wanted, the metrics also go to a TensorBoard event file, in the folder ``tensorboard``.

    Attributes:
      path: the directory.
      checkpoints: the folder in it that checkpoints go to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        resume: bool = False,
        tensorboard: bool = False,
    ):
        """Checks the directory; nothing is written yet.

        Args:
          path: the directory; it may exist if it is empty.
          overwrite: replace an earlier run's files; other files stay.
          resume: the directory is that of a run that goes on.
          tensorboard: write an event file, too; `check_tensorboard` says whether that is possible.

        Raises:
          ConfigError: the path is a file, or a directory that holds something or cannot be read.
        """
        self.path = Path(path)
        self.checkpoints = self.path / _CHECKPOINTS
        self._events = _EventFile(self.path / _EVENTS) if tensorboard else None
        with self._usable():
            is_file = any(at.is_file() for at in (self.path, *self.path.parents))
            holds_something = self.path.is_dir() and any(self.path.iterdir())
        if is_file:
            raise ConfigError("run.out", str(path), "it is a file, or inside one; name a directory")
        if holds_something and not (overwrite or resume):
            raise ConfigError(
                "run.out",
                str(path),
                "the directory is not empty; name another one, or replace it: overwrite=True, --overwrite",
            )

    @property
    def complete(self) -> bool:
        """Whether a run has ended here."""
        return (self.path / "summary.json").exists()

    def begin(self, config: str, partition: dict[str, Any]) -> None:
        """Creates the directory and writes config and partition; an earlier run's files go.

        Raises:
          ConfigError: the directory cannot be created or written.
        """
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            self._begin_events([])
            write_atomically(self.path / "config.toml", config)
            write_atomically(self.path / "partition.json", json.dumps(partition) + "\n")

    def resume(self, config: str, lines: Sequence[Line]) -> None:
        """Takes the directory back to a checkpoint: the metrics up to it, and no summary.

        Raises:
          ConfigError: the directory cannot be written.
        """
        metrics = "".join(json.dumps(without_nan(line)) + "\n" for line in lines)
        with self._usable():
            for name in ("summary.json", "clients.csv", "labels.csv", "export.npz"):
                (self.path / name).unlink(missing_ok=True)
            write_atomically(self.path / "config.toml", config)
            write_atomically(self.path / "metrics.jsonl", metrics)
            self._begin_events(lines)

    def append(self, metrics: Line) -> None:
        """Adds a line to ``metrics.jsonl`` and its scalars to the event file, at once."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan(metrics)) + "\n")
        if self._events:
            self._events.append(metrics)

    def finish(
        self,
        clients: dict[str, np.ndarray],
        labels: dict[str, np.ndarray],
        exported: dict[str, np.ndarray],
        summary: dict[str, Any],
    ) -> None:
        """Writes tables, exports and, last of all, the summary: a directory with one is complete."""
        for name, table in (("clients.csv", clients), ("labels.csv", labels)):
            with (self.path / name).open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(table)
                writer.writerows(zip(*(column.tolist() for column in table.values()), strict=True))
        if exported:
            np.savez_compressed(self.path / "export.npz", **exported)  # type: ignore[arg-type]  # its allow_pickle
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            allowed = f"name a directory that can be written ({error.strerror})"
            raise ConfigError("run.out", str(self.path), allowed) from None

    def _begin_events(self, lines: Sequence[Line]) -> None:
        """Replaces what an earlier run, or this one before it was stopped, has left of events."""
        shutil.rmtree(self.path / _EVENTS, ignore_errors=True)
        if self._events:
            self._events.begin(lines)


class _EventFile:
    """The lines of ``metrics.jsonl`` as scalars for TensorBoard; a scalar's step is the round.

    Written record by record: the package's own event writer keeps a thread and an open file for every run, and a sweep
    has many runs at once.
    """

    def __init__(self, folder: Path):
        self._path = folder / "events.out.tfevents.metrics"  # TensorBoard knows it by the part before the last

    def begin(self, lines: Sequence[Line]) -> None:
        """Writes a new file that holds these lines."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._path.parent.mkdir(exist_ok=True)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"), "wb")
        for line in lines:
            self.append(line)

    def append(self, line: Line) -> None:
        """Adds a line's numbers; what is None has no scalar."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = {name.replace(".", "/"): value for name, value in flat(line).items()}
        known = {tag: value for tag, value in scalars.items() if value is not None and tag != "round"}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        self._write(Event(wall_time=time.time(), step=line["round"], summary=Summary(value=values)), "ab")

    def _write(self, event: Any, mode: str) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self._path.open(mode) as file:
            RecordWriter(file).write(event.SerializeToString())


def check_tensorboard(out: str | os.PathLike[str] | None) -> None:
    """Checks that ``run.tensorboard = true`` can be had.

    Args:
      out: the run directory, or the folder of several.

    Raises:
      ConfigError: there is no directory to write to, or the package is not installed.
    """
    if not out:
        raise ConfigError("run.tensorboard", True, "false without a run directory: give run.out")
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401  # only whether they can be
    except ImportError:
        allowed = 'false without the package tensorboard: pip install "fedjax_pfl[tensorboard]"'
        raise ConfigError("run.tensorboard", True, allowed) from None


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file at once: a reader, or a run that is stopped, never leaves or sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def complete_run(config: Config) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Summary and client table of the complete run in a config's directory, if it holds one.

    Raises:
      ConfigError: the run that was begun there is another one, or has another number of rounds.
    """
    folder = config.run.out
    if folder is None or not (Path(folder) / "config.toml").exists():
        return None
    check_alike(load_config(Path(folder) / "config.toml"), config, folder)
    path = Path(folder) / "summary.json"
    if not path.exists():
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rounds = summary["rounds"]
        with (Path(folder) / "clients.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        clients = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        raise ConfigError("summary", str(path), "the summary of a run; without this file it is run again") from None
    if rounds != config.training.rounds:
        allowed = f"{rounds}, as in the complete run in {folder}"
        raise ConfigError("training.rounds", config.training.rounds, allowed)
    return summary, clients


def check_alike(old: Config, new: Config, directory: str) -> None:
    """Checks that two configs lead to the same numbers, up to their number of rounds.

    Args:
      old: what the run in the directory was started with.
      new: what is to be run now.
      directory: the run directory, for the message.

    Raises:
      ConfigError: they differ; it names all fields that do.
    """
    # As JSON has it, a tuple equals the list that TOML makes of it.
    here, there = (flat(config.model_dump(mode="json")) for config in (new, old))
    fields = [name for name in sorted(here.keys() | there.keys()) if name not in _FREE]
    differing = [name for name in fields if here.get(name) != there.get(name)]
    if differing:
        given, wanted = (", ".join(f"{name}={tables.get(name)}" for name in differing) for tables in (here, there))
        raise ConfigError("config", given, f"what the run in {directory} was started with: {wanted}")
