"""A cache for data sets that take long to decode: one npz file per source, in the user's cache folder."""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedjax_pfl.data.dataset import Dataset

_VERSION = 1  # version of the file format and of the decoding of images; another number makes every file stale


def cached(source: str, folder: Path, build: Callable[[], Dataset]) -> Dataset:
    """Returns the cached data set of a source, or builds the data set and caches it.

    A stale cache file is replaced; a damaged one too, with a warning.

    Args:
      source: names the data and all options; there is one file per source.
      folder: the folder from which the data are read; a changed name, size or time of a file in it, or another
        target of a link, makes the cache stale.
      build: decodes the data.
    """
    path = _folder() / f"{hashlib.sha256(source.encode()).hexdigest()[:24]}.npz"
    fingerprint = _fingerprint(folder)
    found = _read(path, fingerprint)
    if found is None:
        found = build()
        _write(path, found, fingerprint)
    return found


def _folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "fedjax_pfl" / "data"


def _fingerprint(folder: Path) -> str:
    """Hash of the names, sizes and times of all files in a folder, and of what its links lead to."""
    entries: list[tuple[str | int, ...]] = [(".", os.path.realpath(folder))] if os.path.islink(folder) else []
    seen = {os.path.realpath(folder)}
    for parent, inside, names in os.walk(folder, followlinks=True):
        for name in sorted(inside):
            # Each folder once: one with a link to a folder above it would be walked for ever.
            inner = os.path.join(parent, name)
            real = os.path.realpath(inner)
            if real in seen:
                inside.remove(name)
            if real in seen or os.path.islink(inner):
                entries.append((os.path.relpath(inner, folder), real))
            seen.add(real)
        inside.sort()
        for name in names:
            file = os.path.join(parent, name)
            try:
                status = os.stat(file)
            except OSError:  # a link to nothing
                continue
            # Files behind a link and behind what it led to before may agree in size and time.
            target = (os.path.realpath(file),) if os.path.islink(file) else ()
            entries.append((os.path.relpath(file, folder), status.st_size, status.st_mtime_ns, *target))
    return hashlib.sha256(repr((_VERSION, sorted(entries))).encode()).hexdigest()


def _checksum(data: Dataset, fingerprint: str) -> str:
    parts = data.name, data.classes, data.train_rows, data.images.shape, data.images.dtype.str, data.labels.dtype.str
    digest = hashlib.sha256(repr((fingerprint, *parts)).encode())
    digest.update(np.ascontiguousarray(data.images).data)
    digest.update(np.ascontiguousarray(data.labels).data)
    return digest.hexdigest()


def _read(path: Path, fingerprint: str) -> Dataset | None:
    """The data set in a cache file; None if the file is missing, stale or damaged."""
    try:
        # Opened here: NumPy would leave a file open that is no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if str(archive["fingerprint"]) != fingerprint:
                return None
            train_rows = int(archive["train_rows"])
            data = Dataset(
                name=str(archive["name"]),
                images=archive["images"],
                labels=archive["labels"],
                classes=int(archive["classes"]),
                train_rows=None if train_rows < 0 else train_rows,
            )
            problem = None if str(archive["checksum"]) == _checksum(data, fingerprint) else "its checksum differs"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # zipfile and NumPy raise whatever the damaged bytes lead them to
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return data
    warnings.warn(f"the cached data in {path} cannot be used ({problem}) and are read anew", stacklevel=3)
    return None


def _write(path: Path, data: Dataset, fingerprint: str) -> None:
    """Writes a cache file; it gets its name only when it is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}-", delete=False) as file:
            try:
                np.savez(
                    file,
                    name=data.name,
                    images=data.images,
                    labels=data.labels,
                    classes=data.classes,
                    train_rows=-1 if data.train_rows is None else data.train_rows,
                    fingerprint=fingerprint,
                    checksum=_checksum(data, fingerprint),
                )
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        warnings.warn(f"the data are not cached, so that the next run decodes them again: {error}", stacklevel=3)
