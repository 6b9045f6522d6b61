"""Checkpoints: what a run needs to go on as though it had never stopped."""

import json
import logging
import os
import re
import signal
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fedjax_pfl.engine.run import Run
from fedjax_pfl.errors import ConfigError, first_line
from fedjax_pfl.experiment.summary import Line
from fedjax_pfl.method import State

# The one before the last stays until the next is complete.
_KEPT = 2


class Saved(NamedTuple):
    """What a checkpoint holds besides the arrays.

    Attributes:
      round: rounds done.
      lines: the evaluated rounds so far, as in ``metrics.jsonl``.
      seconds: time spent on the run so far.
      round_seconds: the part of it that rounds took.
      config: the resolved config of the process that wrote it.
      partition: hash of the partition.
      versions: package -> version that this process used.
      checksums: part -> checksum of the arrays in it, or, of "progress", of all that is above; None in checkpoints
        from before there were any, and until it is written.
    """

    round: int
    lines: list[Line]
    seconds: float
    round_seconds: float
    config: dict[str, Any]
    partition: str
    versions: dict[str, str]
    checksums: dict[str, int] | None = None


class Best(NamedTuple):
    """The evaluated round that is best on validation samples so far, and its state.

    Attributes:
      round: int32, [].
      state: on the host.
    """

    round: np.ndarray
    state: State


class Checkpoints:
    """The checkpoints of one run: a folder per round, each complete or not there at all (orbax renames it last)."""

    def __init__(self, path: Path):
        """Opens the folder; nothing is written yet.

        Args:
          path: the folder, in the run directory.

        Raises:
          ConfigError: orbax could write to such a path, and could not read what it has written.
        """
        self._path = path.absolute()
        if re.search(r"\[[^/]+\]|\\", self._path.as_posix()):
            allowed = "a path without [...] and backslashes, in which checkpoints cannot be kept; a link to it may be"
            raise ConfigError("run.out", str(self._path.parent), allowed)
        self._manager: Any = None

    def save(self, run: Run, saved: Saved, best: Best | None = None) -> None:
        """Writes a checkpoint; the one before the last goes once this one is complete.

        Raises:
          ConfigError: it cannot be written, such as on a full disk.
        """
        import orbax.checkpoint as ocp

        arrays = {"run": jax.device_get(run)} if best is None else {"run": jax.device_get(run), "best": best}
        checksums = {part: _checksum(tree) for part, tree in arrays.items()} | {"progress": _checksum_of_text(saved)}
        parts = {part: ocp.args.StandardSave(tree) for part, tree in arrays.items()}
        parts["progress"] = ocp.args.JsonSave(saved._replace(checksums=checksums)._asdict())
        try:
            with self._one_error():
                self._open().save(saved.round, args=ocp.args.Composite(**parts), force=True)
        except Exception as error:  # orbax raises whatever its storage layers do
            # Of the layers' line, the last of its reasons, without their settings in brackets.
            why = getattr(error, "strerror", None) or first_line(error).partition(" [")[0].rpartition(": ")[2]
            allowed = f"a directory in which checkpoints can be written ({why})"
            raise ConfigError("run.out", str(self._path.parent), allowed) from error

    def rounds(self) -> list[int]:
        """The rounds after which there is a complete checkpoint, in rising order."""
        # Not by orbax, which would also begin to remove an incomplete one, and say so if the process ends meanwhile.
        return sorted(int(path.name) for path in self._path.glob("*") if path.name.isdigit())

    def read(self, round: int) -> Saved:
        """A checkpoint, without its arrays.

        Raises:
          ConfigError: it cannot be read.
        """
        import orbax.checkpoint as ocp

        read = self._restore(round, progress=ocp.args.JsonRestore())
        try:
            saved = Saved(**read["progress"])
        except TypeError:
            raise self._unreadable(round, "it holds something else") from None
        sums = saved.checksums
        if saved.round != round or (sums is not None and sums.get("progress") != _checksum_of_text(saved)):
            raise self._unreadable(round, "its progress has changed since it was written")
        return saved

    def run(self, round: int, like: Run) -> Run:
        """The arrays of a checkpoint, on the host.

        Args:
          round: one of `rounds`.
          like: shapes and types that the run has.

        Raises:
          ConfigError: it cannot be read, or holds arrays of other shapes.
        """
        run: Run = self._arrays(round, "run", like)
        return run

    def best(self, round: int, like: State) -> Best:
        """The best round up to a checkpoint, and its state.

        Args:
          round: one of `rounds`.
          like: shapes and types that the state has.

        Raises:
          ConfigError: the checkpoint has none, or it cannot be read.
        """
        if not (self._path / str(round) / "best").is_dir():
            allowed = (
                '"final" or "none" for this run: it was begun or continued so, and has not kept the best state so far'
            )
            raise ConfigError("run.keep", "best", allowed)
        best: Best = self._arrays(round, "best", Best(np.zeros((), np.int32), like))
        return best

    def forget_after(self, round: int) -> None:
        """Removes the checkpoints of later rounds, which a run that goes on from this one will write again."""
        for later in self.rounds():
            if later > round:
                self._open().delete(later)

    def _open(self) -> Any:
        if self._manager is None:
            import orbax.checkpoint as ocp

            # Of several processes, one writes and all read, each as though it were alone.
            me = jax.process_index()
            alone = ocp.options.MultiprocessingOptions(
                primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
            )
            self._path.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT,
                create=False,
                enable_async_checkpointing=False,
                cleanup_tmp_directories=me == 0,
                multiprocessing_options=alone,
            )
            self._manager = ocp.CheckpointManager(self._path, options=options)
        return self._manager

    def _restore(self, step: int, **arguments: Any) -> Any:
        import orbax.checkpoint as ocp

        try:
            with self._one_error():
                return self._open().restore(step, args=ocp.args.Composite(**arguments))
        except Exception as error:  # orbax raises whatever its storage layers do
            raise self._unreadable(step, f"{type(error).__name__}: {first_line(error)[:200]}") from error

    @contextmanager
    def _one_error(self) -> Iterator[None]:
        """Drops what orbax's threads print of an error with these checkpoints, which orbax raises as well."""
        hook = sys.unraisablehook
        sys.unraisablehook = lambda late: None if str(late.exc_value) == "Event loop is closed" else hook(late)
        logs, here = [logging.getLogger("absl"), logging.getLogger("asyncio")], str(self._path)

        def is_news(record: logging.LogRecord) -> bool:
            said = record.getMessage()
            return record.levelno < logging.ERROR or not (here in said or "_SignalingThread" in said)

        for log in logs:
            log.addFilter(is_news)
        yield
        # After an error, hook and filters stay: what is still under way fails later, some on the event loop that orbax
        # has closed by then, others when Python collects them.
        for log in logs:
            log.removeFilter(is_news)
        sys.unraisablehook = hook

    def _arrays(self, round: int, part: str, like: PyTree) -> Any:
        """The arrays of a part of a checkpoint."""
        import orbax.checkpoint as ocp

        empty = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), like)
        arrays = self._restore(round, **{part: ocp.args.StandardRestore(empty)})[part]
        for (path, leaf), wanted in zip(jax.tree.leaves_with_path(arrays), jax.tree.leaves(like), strict=True):
            if (leaf.shape, leaf.dtype) != (wanted.shape, wanted.dtype):
                name, found = jax.tree_util.keystr(path), f"{leaf.dtype}{list(leaf.shape)}"
                raise self._unreadable(round, f"{name} is {found} instead of {wanted.dtype}{list(wanted.shape)}")
        sums = self.read(round).checksums
        if sums is not None and sums.get(part) != _checksum(arrays):
            raise self._unreadable(round, "its arrays have changed since they were written")
        return arrays

    def _unreadable(self, step: int, reason: str) -> ConfigError:
        way = "without this folder, the run resumes from the one before"
        if min(self.rounds(), default=step) >= step:
            way = "there is no earlier one to resume from"
        return ConfigError("resume", str(self._path / str(step)), f"a readable checkpoint ({reason}); {way}")


def _checksum(arrays: PyTree) -> int:
    """Of the bytes of all arrays; orbax keeps none, and reads what a disk has changed."""
    total = 0
    for leaf in jax.tree.leaves(arrays):
        total = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, total)
    return total


def _checksum_of_text(saved: Saved) -> int:
    return zlib.crc32(json.dumps(saved._replace(checksums=None)._asdict(), sort_keys=True).encode())


class Stop:
    """Whether the process was asked to stop."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.signal: int | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        """A signal handler that records the request to stop."""
        del frame
        self.signal = number

    def leave(self) -> None:
        """Does what the signal would have done: KeyboardInterrupt, or exit with 128 + its number."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.signal or 0))


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Turns the first SIGINT or SIGTERM into a request, so that there is time to save; a second one acts at once.

    Where a `Stop` handles SIGTERM already, it is that one, and handlers stay as they are. Signals reach the main thread
    only: elsewhere, nothing is caught. Nor is a signal whose handler is not Python's, which could not be put back.
    """
    asked = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    stop = asked if isinstance(asked, Stop) else Stop()
    if stop is asked or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if handler is not None}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        del frame
        stop.signal = number
        restore()
        # Not print: the signal may have come while something is printed.
        os.write(2, b"\nstopping after the next round; a second signal ends it at once\n")

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()
