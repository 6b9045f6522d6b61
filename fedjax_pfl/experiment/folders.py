"""Folders that are written to: who may write there, and files that appear at once."""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedjax_pfl.errors import ConfigError

LOCK = ".lock"
_ATTEMPTS = 10
# The folders that this process has taken, each with a token of its taker. A file lock belongs to the whole process, and
# would not keep out a second run of the same process.
_taken: dict[str, object] = {}


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
    give_back = take_folder(folder, "out")
    try:
        yield
    finally:
        give_back()


def take_folder(folder: Path, field: str) -> Callable[[], None]:
    """Takes a folder until the returned function is called (once), or this process ends.

    The folder and those above it are created; if they are still empty when it is given back, they go again.
    """
    path, me = os.path.realpath(folder), object()
    new = [at for at in (Path(path), *Path(path).parents) if not at.exists()]
    if _taken.setdefault(path, me) is not me:
        allowed = "another directory, or wait: another run of this process goes on in this one"
        raise ConfigError(field, str(folder), allowed)
    try:
        lock = _lock(folder, field)
    except BaseException:
        del _taken[path]
        raise
    return functools.partial(_give_back, path, lock, new)


def _give_back(path: str, lock: int | None, new: Sequence[Path]) -> None:
    if lock is not None:
        with suppress(OSError):
            os.unlink(os.path.join(path, LOCK))
        os.close(lock)
    with suppress(OSError):  # it holds something
        for folder in new:
            folder.rmdir()
    del _taken[path]


def _lock(folder: Path, field: str) -> int | None:
    """A lock that keeps other processes out of a folder while it is open; None on Windows, which has no such locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    lock = None
    # Not for ever: on some file systems the open file and the path never compare equal.
    for attempt in range(1, _ATTEMPTS + 1):
        if lock is not None:
            os.close(lock)
            lock = None
        with writable(folder, field):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT)
            except FileNotFoundError:  # the last holder has just removed the folder, which was empty
                if attempt == _ATTEMPTS:
                    raise
                continue
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(lock)
            allowed = "another directory, or wait: another process is running in this one"
            raise ConfigError(field, str(folder), allowed) from None
        except OSError:
            pass  # a file system without locks
        # The last holder may have removed the file since it was opened. A lock on a removed file keeps nobody out.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to, and then replaces the file at once: no reader sees half of it, an error leaves the old.

    The folder is created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text, `replacing` the file."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
