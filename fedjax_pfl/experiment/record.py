"""The run directory: what a run leaves on disk."""

import csv
import errno
import json
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.rows import Holdings, save
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.folders import LOCK, check_folder, take_folder, writable, write_atomically
from fedjax_pfl.experiment.kept import STATE, Kept, write_state
from fedjax_pfl.experiment.summary import Line, without_nan

_CLIENT_HISTORY = "client_history.csv"
_PARTITION = "partition.npz"
# In the order of removal. The summary comes first: without it a directory does not count as a complete run, whatever
# else is left when a process dies. The config comes last: with it, comparisons and sweeps begin the run anew.
_AT_THE_END = ("summary.json", "clients.csv", "labels.csv", "export.npz", STATE)
_FILES = (*_AT_THE_END, "metrics.jsonl", _CLIENT_HISTORY, _PARTITION, "partition.json", "config.toml")
# Is there while a run's files replace those of another one; a directory that has it may be written over again.
_BEGINNING = ".beginning.partial"
CHECKPOINTS = "checkpoints"
_EVENTS = "tensorboard"


class RunDirectory:
    """Writes config and partition, scores of evaluated rounds, tables of clients and labels, exports, summary.

    Attributes:
      path: the directory.
      checkpoints: the folder in it that checkpoints go to.
      events: the folder in it that TensorBoard's event file goes to, if it is wanted.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False, resume: bool = False):
        """Checks the directory; nothing is written yet.

        Args:
          path: the directory; it may exist if it is empty.
          overwrite: replace an earlier run's files; other files stay.
          resume: the directory is that of this run, which goes on or has been begun by another process.

        Raises:
          ConfigError: the path is a file, or a directory that holds something or cannot be read; or, with
            ``overwrite``, one without a run whose files would be lost.
        """
        self.path = Path(os.path.expanduser(path))
        self.checkpoints = self.path / CHECKPOINTS
        self.events = self.path / _EVENTS
        self._may_hold_something = overwrite or resume
        self._replaces = overwrite and not resume
        self._leave: Callable[[], object] | None = None
        self._check()

    def _check(self) -> None:
        """Checks that the run may write here."""
        check_folder(self.path, "run.out")
        with writable(self.path):
            holds_something = self.path.is_dir() and any(not _is_left_over(entry) for entry in self.path.iterdir())
        if holds_something and not self._may_hold_something:
            begun = any(self.checkpoints.glob("*")) and not self.complete
            go_on = "go on with the run that has begun there: resume=, --resume; " if begun else ""
            allowed = f"the directory is not empty; {go_on}name another one, or replace it: overwrite=True, --overwrite"
            raise ConfigError("run.out", str(self.path), allowed)
        with writable(self.path):
            if any((self.path / name).is_dir() for name in _FILES):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            there = [name for name in (*_FILES, CHECKPOINTS, _EVENTS) if (self.path / name).exists()]
        if self._replaces and there and not is_run(self.path) and not (self.path / _BEGINNING).exists():
            allowed = f"name another directory: there is no run in this one, and {', '.join(there)} would be lost"
            raise ConfigError("run.out", str(self.path), allowed)

    @property
    def complete(self) -> bool:
        """Whether a run has ended here."""
        return (self.path / "summary.json").exists()

    @property
    def rounds(self) -> int:
        """The number of rounds after which a run has ended here; 0 if none has.

        Raises:
          ConfigError: its summary is damaged.
        """
        if not self.complete:
            return 0
        done: int = read_part("summary", self.path / "summary.json", lambda text: json.loads(text)["rounds"])
        return done

    @property
    def started(self) -> bool:
        """Whether a run has written its config here."""
        return (self.path / "config.toml").exists()

    @property
    def begun(self) -> bool:
        """Whether a run has come to its first scores, or to a checkpoint, here."""
        return (self.path / "metrics.jsonl").exists() or any(self.checkpoints.glob("*"))

    def take(self) -> None:
        """Keeps other runs, of this process or another, out until `leave`, or until this one is finished.

        Raises:
          ConfigError: another run goes on here, or has done so since the directory was checked, or the directory
            cannot be created.
        """
        self._leave = weakref.finalize(self, take_folder(self.path, "run.out"))
        try:
            self._check()
        except ConfigError:
            self.leave()
            raise

    def leave(self) -> None:
        """Lets others in again."""
        if self._leave is not None:
            self._leave()

    def begin(self, config: str, partition: dict[str, Any], holdings: Holdings) -> None:
        """Creates the directory and writes config and partition; an earlier run's files go.

        Args:
          config: as TOML.
          partition: who holds how much, for ``partition.json``.
          holdings: who holds what, for ``partition.npz``.

        Raises:
          ConfigError: the directory cannot be created or written.
        """
        with writable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / _BEGINNING).touch()
            _remove(self.checkpoints)
            _remove(self.events)
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
            write_atomically(self.path / "config.toml", config)
            write_atomically(self.path / "partition.json", json.dumps(partition) + "\n")
            save(self.path / _PARTITION, holdings)
            (self.path / _BEGINNING).unlink()

    def resume(self, config: str, lines: Sequence[Line], *, client_history: bool) -> None:
        """Takes the directory back to a checkpoint: metrics and client history up to it, and no summary.

        Args:
          config: as TOML.
          lines: the evaluated rounds up to the checkpoint.
          client_history: whether the rows of these rounds stay; else the file goes.

        Raises:
          ConfigError: the directory cannot be written.
        """
        metrics = "".join(json.dumps(without_nan(line)) + "\n" for line in lines)
        with writable(self.path):
            for name in _AT_THE_END:
                (self.path / name).unlink(missing_ok=True)
            write_atomically(self.path / "config.toml", config)
            write_atomically(self.path / "metrics.jsonl", metrics)
            history = self._client_rows(lines[-1]["round"] if lines else 0) if client_history else ""
            if history:
                write_atomically(self.path / _CLIENT_HISTORY, history)
            else:
                (self.path / _CLIENT_HISTORY).unlink(missing_ok=True)
            _remove(self.events)

    def append(self, metrics: Line, clients: dict[str, np.ndarray]) -> None:
        """Adds a line to ``metrics.jsonl`` and rows to ``client_history.csv``, at once.

        Args:
          metrics: the line.
          clients: column -> array [N], the round's rows; none without ``run.client_history``.

        Raises:
          ConfigError: the directory cannot be written.
        """
        with writable(self.path):
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(without_nan(metrics)) + "\n")
            if clients:
                path = self.path / _CLIENT_HISTORY
                heading = [] if path.exists() else [list(clients)]
                with path.open("a", encoding="utf-8") as file:
                    rows = zip(*(column.tolist() for column in clients.values()), strict=True)
                    csv.writer(file, lineterminator="\n").writerows([*heading, *rows])

    def client_history(self, until: int) -> dict[str, np.ndarray]:
        """The rows of ``client_history.csv`` up to a round, column -> array; nothing where none are kept.

        Raises:
          ConfigError: the file is damaged.
        """
        try:
            rows = self._client_rows(until)
            return read_table(rows) if rows else {}
        except (OSError, ValueError, IndexError):
            path = str(self.path / _CLIENT_HISTORY)
            allowed = "a table of numbers; without this file, the run goes on and keeps the rounds from here on"
            raise ConfigError("run.client_history", path, allowed) from None

    def _client_rows(self, until: int) -> str:
        """The text of ``client_history.csv`` up to a round, with its heading; nothing where there is no row.

        A run that was killed while it wrote leaves a line that does not end.
        """
        path = self.path / _CLIENT_HISTORY
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        heading, *rows = [line for line in text.splitlines(keepends=True) if line.endswith("\n")] or [""]
        kept = [row for row in rows if int(row.partition(",")[0]) <= until]
        return "".join([heading, *kept]) if kept else ""

    def finish(
        self,
        clients: dict[str, np.ndarray],
        labels: dict[str, np.ndarray],
        exported: dict[str, np.ndarray],
        summary: dict[str, Any],
        kept: Kept | None,
    ) -> None:
        """Writes tables, exports, the state and, last of all, the summary: a directory with one is complete.

        Raises:
          ConfigError: the directory cannot be written.
        """
        with writable(self.path):
            for name, table in (("clients.csv", clients), ("labels.csv", labels)):
                with (self.path / name).open("w", encoding="utf-8", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    writer.writerow(table)
                    writer.writerows(zip(*(column.tolist() for column in table.values()), strict=True))
            if exported:
                np.savez_compressed(self.path / "export.npz", **exported)  # type: ignore[arg-type]  # its allow_pickle
            if kept is not None:
                write_state(self.path / STATE, kept)
            write_atomically(self.path / "summary.json", json.dumps(without_nan(summary), indent=2) + "\n")
        self.leave()


def _remove(folder: Path) -> None:
    """Removes a folder, if it is there. A link stays, and the folder that it leads to is emptied."""
    if not folder.exists():
        return
    if not folder.is_symlink():
        shutil.rmtree(folder)
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _is_left_over(entry: Path) -> bool:
    """Whether a process that was killed before its run began has left this: its lock, or a half-written file."""
    return entry.name == LOCK or (entry.name.startswith(".") and entry.name.endswith(".partial"))


def read_table(text: str) -> dict[str, np.ndarray]:
    """A CSV file of numbers, column -> array: whole numbers where all of a column are, or else floats.

    Raises:
      ValueError, IndexError: it holds something else.
    """
    heading, *rows = csv.reader(text.splitlines())

    def numbers(column: Sequence[str]) -> np.ndarray:
        try:
            return np.array([int(entry) for entry in column])
        except ValueError:
            return np.array([float(entry) for entry in column])

    return {name: numbers([row[at] for row in rows]) for at, name in enumerate(heading)}


def is_run(folder: Path) -> bool:
    """Whether a run has written its config and partition here."""
    return (folder / "config.toml").exists() and (folder / "partition.json").exists()


def read_part(
    what: str, path: Path, parse: Callable[[str], Any], remedy: str = "without summary.json it is run again"
) -> Any:
    """What a file of a run holds, in the form that `parse` makes of its text.

    Raises:
      ConfigError: the file cannot be read, or does not hold that.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ConfigError(what, str(path), f"the {what} of a run; {remedy}") from None
