"""The run directory: what a run leaves on disk."""

import csv
import errno
import functools
import json
import os
import shlex
import shutil
import sys
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.rows import Holdings, save
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.kept import STATE, Kept, write_state
from fedjax_pfl.experiment.options import SELECTORS
from fedjax_pfl.experiment.reading import load_config, read_toml
from fedjax_pfl.experiment.sections import Run as RunSection
from fedjax_pfl.experiment.summary import POINTS, Line, flat, history_of, without_nan

# How a run is carried out: these may differ between a run that was begun and its continuation.
FREE = (
    "training.rounds",
    "run.checkpoint_every",
    "run.placement",
    "run.chunk",
    "run.client_state",
    "run.out",
    "run.tensorboard",
    "run.compilation_cache",
    "run.export",
    "run.export_clients",
    "run.keep",
    "run.client_history",
)
_CLIENT_HISTORY = "client_history.csv"
_PARTITION = "partition.npz"
# In the order of removal. The summary comes first: without it a directory does not count as a complete run, whatever
# else is left when a process dies. The config comes last: with it, comparisons and sweeps begin the run anew.
_AT_THE_END = ("summary.json", "clients.csv", "labels.csv", "export.npz", STATE)
_FILES = (*_AT_THE_END, "metrics.jsonl", _CLIENT_HISTORY, _PARTITION, "partition.json", "config.toml")
_CHECKPOINTS = "checkpoints"
_EVENTS = "tensorboard"
_LOCK = ".lock"
_ATTEMPTS = 10
# The folders that this process has taken, each with a token of its taker. A file lock belongs to the whole process, and
# would not keep out a second run of the same process.
_taken: dict[str, object] = {}


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
        self.checkpoints = self.path / _CHECKPOINTS
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
            there = [name for name in (*_FILES, _CHECKPOINTS, _EVENTS) if (self.path / name).exists()]
        if self._replaces and there and not _is_run(self.path):
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
        done: int = _read("summary", self.path / "summary.json", lambda text: json.loads(text)["rounds"])
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
        self._leave = weakref.finalize(self, _take(self.path, "run.out"))
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
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            shutil.rmtree(self.events, ignore_errors=True)
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
            write_atomically(self.path / "config.toml", config)
            write_atomically(self.path / "partition.json", json.dumps(partition) + "\n")
            save(self.path / _PARTITION, holdings)

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
            shutil.rmtree(self.events, ignore_errors=True)

    def append(self, metrics: Line, clients: dict[str, np.ndarray]) -> None:
        """Adds a line to ``metrics.jsonl`` and rows to ``client_history.csv``, at once.

        Args:
          metrics: the line.
          clients: column -> array [N], the round's rows; none without ``run.client_history``.
        """
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
        """Writes tables, exports, the state and, last of all, the summary: a directory with one is complete."""
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


def _is_left_over(entry: Path) -> bool:
    """Whether a process that was killed before its run began has left this: its lock, or a half-written file."""
    return entry.name == _LOCK or (entry.name.startswith(".") and entry.name.endswith(".partial"))


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Keeps other comparisons and sweeps out of a folder meanwhile: each would overwrite the other's table.

    Args:
      folder: the folder; None if nothing is written.

    Raises:
      ConfigError: somebody is at work there, or the folder cannot be created.
    """
    if folder is None:
        yield
        return
    new = not folder.exists()
    give_back = _take(folder, "out")
    try:
        yield
    finally:
        give_back()
        if new:
            with suppress(OSError):  # it holds something
                folder.rmdir()


def _take(folder: Path, field: str) -> Callable[[], None]:
    """Takes a folder until the returned function is called (once), or this process ends."""
    path, me = os.path.realpath(folder), object()
    if _taken.setdefault(path, me) is not me:
        allowed = "another directory, or wait: another run of this process goes on in this one"
        raise ConfigError(field, str(folder), allowed)
    try:
        lock = _lock(folder, field)
    except BaseException:
        del _taken[path]
        raise
    return functools.partial(_give_back, path, lock)


def _give_back(path: str, lock: int | None) -> None:
    if lock is not None:
        with suppress(OSError):
            os.unlink(os.path.join(path, _LOCK))
        os.close(lock)
    del _taken[path]


def _lock(folder: Path, field: str) -> int | None:
    """A lock that keeps other processes out of a folder while it is open; None on Windows, which has no such locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    lock = None
    for _ in range(_ATTEMPTS):  # not for ever: on some file systems the open file and the path never compare equal
        if lock is not None:
            os.close(lock)
        with writable(folder, field):
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(lock)
            allowed = "another directory, or wait: another process is running in this one"
            raise ConfigError(field, str(folder), allowed) from None
        except OSError:
            pass  # a file system without locks
        # One who ended since the file was opened has removed it: a third would not see this lock, but make a new file.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(folder / _LOCK)):
                break
    return lock


def check_folder(path: Path, field: str) -> None:
    """Checks that a path is a folder, or can become one.

    Raises:
      ConfigError: of this field: it is a file or inside one, or cannot be read.
    """
    with writable(path, field):
        is_file = any(at.is_file() for at in (path, *path.parents))
    if is_file:
        raise ConfigError(field, str(path), "it is a file, or inside one; name a directory")


@contextmanager
def writable(folder: Path, field: str = "run.out") -> Iterator[None]:
    """Turns an OSError inside (a folder cannot be created, read or written) into a ConfigError of this field."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, str(folder), f"name a directory that can be written ({error.strerror})") from None


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file at once: no reader sees half of it, and a run that is stopped leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


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


def _history(text: str) -> dict[str, np.ndarray]:
    """Metric -> array, from the lines of ``metrics.jsonl``, of which there is one or more."""
    found = history_of([json.loads(line) for line in text.splitlines()])
    return {"round": found.pop("round"), **found}


def _history_so_far(text: str) -> dict[str, np.ndarray]:
    """The same while a run goes on: there may be no line yet, or half of one."""
    whole = text[: text.rfind("\n") + 1]
    return _history(whole) if whole else {}


def complete_run(config: Config) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]] | None:
    """Summary, history and client table of the complete run in a config's directory, if it holds one.

    None also for a run of fewer rounds that has a checkpoint, from which it can go on.

    Raises:
      ConfigError: the run that was begun there is another one, has another number of rounds, or did not keep what is
        asked for now; a file is damaged, or none of this version.
    """
    if config.run.out is None:
        return None
    path = Path(config.run.out)
    if not (path / "config.toml").exists():
        return None
    old = _config_in(path)
    check_alike(old, config, config.run.out)
    if not (path / "summary.json").exists():
        return None
    summary, rounds = _read("summary", path / "summary.json", lambda text: ((of := json.loads(text)), of["rounds"]))
    history = _read("metrics", path / "metrics.jsonl", _history)
    clients = _read("clients", path / "clients.csv", read_table)
    other_folder = f"as in the complete run in {config.run.out}, or another folder (out=, --out)"
    if rounds < config.training.rounds and any((path / _CHECKPOINTS).glob("*")):
        return None  # it goes on from there
    if rounds != config.training.rounds:
        raise ConfigError("training.rounds", config.training.rounds, f"{rounds}, {other_folder}")
    for field in _not_kept(old.run, config.run):
        had = getattr(old.run, field)
        raise ConfigError(f"run.{field}", getattr(config.run, field), f"{json.dumps(had)}, {other_folder}")
    return summary, history, clients


def _not_kept(had: RunSection, asked: RunSection) -> Iterator[str]:
    """What is asked for, but not in the directory of a run that has ended without it."""
    if asked.keep not in ("none", had.keep):
        yield "keep"
    if asked.client_history and not had.client_history:
        yield "client_history"
    if not set(asked.export) <= set(had.export):
        yield "export"
    elif asked.export and not _covers(had.export_clients, asked.export_clients):
        yield "export_clients"


def _covers(had: list[int] | None, asked: list[int] | None) -> bool:
    """Whether the first clients include the second; None are all."""
    return had is None or (asked is not None and set(asked) <= set(had))


def check_same_data(path: Path, data: str, field: str) -> None:
    """Checks that a run directory's run had the samples with this `fingerprint`; version 0.1 has kept none.

    Raises:
      ConfigError: of this field: it had others.
    """
    held = _partition_in(path).get("data", data)
    if held != data:
        raise ConfigError(field, str(path), "a directory for other samples: the run in this one had others than these")


def read_run(folder: Path) -> tuple[Config, dict[str, Any]]:
    """Config of a complete run, and what else its directory holds but for the state, by the fields of a `Result`.

    Raises:
      ConfigError: there is no complete run, a part that it names is not registered here, or a file is damaged.
    """
    if not (folder / "config.toml").exists():
        raise ConfigError("directory", str(folder), "a run directory: there is no config.toml in this one")
    config = _config_in(folder)
    if not (folder / "summary.json").exists():
        begun = RunDirectory(folder, resume=True).begun
        how = f"this one goes on with simulate(config, resume={str(folder)!r})" if begun else "this one has not begun"
        raise ConfigError("directory", str(folder), f"a run that has ended; {how}")
    history = _read("metrics", folder / "metrics.jsonl", _history)
    found = {
        "summary": _read("summary", folder / "summary.json", json.loads),
        "history": history,
        "clients": _read("clients", folder / "clients.csv", read_table),
        "labels": _read("labels", folder / "labels.csv", read_table),
        "partition": _partition_in(folder),
        "exported": _exported_in(folder),
        "client_history": RunDirectory(folder, resume=True).client_history(int(history["round"][-1])),
    }
    return config, found


class Begun(NamedTuple):
    """A run that has begun, and may have ended.

    Attributes:
      path: its directory.
      config: its config.
      partition: the content of ``partition.json``.
      history: metric -> array over evaluated rounds; empty before the first.
      clients: column -> array, as in ``clients.csv``; while the run goes on, the newest rows of
        ``client_history.csv``, and nothing where none is kept.
      summary: the content of ``summary.json``; None while the run goes on.
    """

    path: Path
    config: Config
    partition: dict[str, Any]
    history: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    summary: dict[str, Any] | None


def read_begun(folder: Path) -> Begun:
    """What a run has left so far in its directory, which holds ``config.toml`` and ``partition.json``.

    Raises:
      ConfigError: a part that its config names is not registered here, or a file is damaged.
    """
    config, metrics = _config_in(folder), folder / "metrics.jsonl"
    partition = _partition_in(folder)
    if (folder / "summary.json").exists():
        summary = _read("summary", folder / "summary.json", json.loads)
        clients = _read("clients", folder / "clients.csv", read_table)
        return Begun(folder, config, partition, _read("metrics", metrics, _history), clients, summary)
    history = _read("metrics", metrics, _history_so_far) if metrics.exists() else {}
    newest = int(history["round"][-1]) if history else 0
    rows = RunDirectory(folder, resume=True).client_history(newest)
    last = {name: column[rows["round"] == newest] for name, column in rows.items() if name != "round"}
    return Begun(folder, config, partition, history, last, None)


def _exported_in(folder: Path) -> dict[str, np.ndarray]:
    """The columns of ``export.npz``; none where a run exported nothing.

    Raises:
      ConfigError: the file is damaged.
    """
    path = folder / "export.npz"
    if not path.exists():
        return {}
    try:
        with path.open("rb") as file, np.load(file) as columns:  # of a damaged file, NumPy leaves its own open
            return dict(columns)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        allowed = f"a table that a run has exported ({error}); without this file, the rest of the run can be read"
        raise ConfigError("export", str(path), allowed) from None


def _config_in(folder: Path) -> Config:
    """The config of a run.

    Raises:
      ConfigError: the file is damaged, none of this version, or names a part that is not registered here.
    """
    path = folder / "config.toml"
    try:
        return load_config(path)
    except ConfigError as error:
        if error.value == str(path):  # which says where
            raise
        allowed = f"{error.allowed}; so says {path}, which another version may have written"
        if error.field in SELECTORS:
            allowed = (
                f"registered in this process; register yours (register_method, ...) before you load {folder}. The "
                "command line knows the parts of installed packages (entry points); for those of a script, use Python"
            )
        raise ConfigError(error.field, error.value, allowed) from None


class Listed(NamedTuple):
    """A run directory in a few words.

    Attributes:
      path: the directory.
      config: what its config.toml says.
      round: of the newest evaluation; 0 before the first.
      ended: whether the run has ended.
      accuracy: point -> mean accuracy after that round; empty before the first.
      begun: whether the run is at work, or has left scores or a checkpoint.
      diverged: whether it has ended, and some of its answers were no numbers.
    """

    path: Path
    config: dict[str, Any]
    round: int
    ended: bool
    accuracy: dict[str, float]
    begun: bool
    diverged: bool


def run_directories(folder: Path) -> list[Path]:
    """The folder itself, if a run has begun there, and all run directories in it, at any depth, by path."""
    found = sorted(config.parent for config in folder.rglob("config.toml"))
    return [path for path in found if _is_run(path)]


def _is_run(folder: Path) -> bool:
    """Whether a run has written its config and partition here."""
    return (folder / "config.toml").exists() and (folder / "partition.json").exists()


def runs_in(folder: Path) -> list[Listed]:
    """The run directories in a folder, at any depth, by path; also of runs whose method is not registered here.

    Raises:
      ConfigError: there is no such folder, or a file of a run is damaged.
    """
    if not folder.is_dir():
        raise ConfigError("FOLDER", str(folder), "a folder that holds runs")
    found = []
    for path in run_directories(folder):
        lines = path / "metrics.jsonl"
        last: Line = _read("metrics", lines, _newest) if lines.exists() else {"round": 0}
        accuracy = {point: last[point]["accuracy"] for point in POINTS if point in last}
        run, config = RunDirectory(path, resume=True), _tables_in(path)
        begun = run.begun or (path / _LOCK).exists()
        summary = _read("summary", path / "summary.json", json.loads) if run.complete else {}
        diverged = summary.get("diverged_round") is not None
        found.append(Listed(path, config, last["round"], run.complete, accuracy, begun, diverged))
    return found


def _tables_in(folder: Path) -> dict[str, Any]:
    """What the config of a run says, whose parts need not be registered here.

    Raises:
      ConfigError: the file is damaged.
    """
    path = folder / "config.toml"
    tables = read_toml(path, "config file")
    if missing := {"data.source", "method.name", "training.rounds", "run.seed"} - flat(tables).keys():
        raise ConfigError("config file", str(path), f"the config of a run: it has no {', '.join(sorted(missing))}")
    return tables


def _newest(text: str) -> Line:
    """The last line of metrics that is written to its end."""
    whole = text[: text.rfind("\n") + 1].splitlines()
    newest: Line = json.loads(whole[-1]) if whole else {"round": 0}
    return newest


def _partition_in(folder: Path) -> dict[str, Any]:
    config = shlex.quote(str(folder / "config.toml"))
    anew = f"`fedjax-pfl partition {config} --out FOLDER` writes the same file again"
    partition: dict[str, Any] = _read("partition", folder / "partition.json", json.loads, anew)
    return partition


def _read(
    what: str, path: Path, parse: Callable[[str], Any], remedy: str = "without summary.json it is run again"
) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ConfigError(what, str(path), f"the {what} of a run; {remedy}") from None


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
    fields = [name for name in sorted(here.keys() | there.keys()) if name not in FREE]
    differing = [name for name in fields if here.get(name) != there.get(name)]
    if differing:
        given, wanted = (", ".join(f"{name}={tables.get(name)}" for name in differing) for tables in (here, there))
        raise ConfigError("config", given, f"what the run in {directory} was started with: {wanted}")
