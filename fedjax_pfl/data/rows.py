"""Files that list the rows of each client: the ``partition.npz`` of a run directory, or a user's own lists."""

import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from fedjax_pfl.errors import ConfigError

Rows = Int[np.ndarray, "_"]  # row numbers into a data set; each client has its own number of them
_FIELD = "data.partition.file"
_USES = ("train", "validation", "test")


class Split(NamedTuple):
    """One client's rows by use, each an int64 array; validation may be empty."""

    train: Rows
    validation: Rows
    test: Rows


class Holdings(NamedTuple):
    """The rows of every client, by use.

    Attributes:
      splits: the split of each client.
      pooled: the rows of the global test set, ascending.
      hash: hash of rows and labels, as in ``partition.json``; None if a file does not have it.
    """

    splits: list[Split]
    pooled: Rows
    hash: str | None


def save(path: Path, holdings: Holdings) -> None:
    """Writes ``partition.npz``.

    For each of ``train``, ``validation`` and ``test`` it holds the rows of all clients one after the other, and the
    offsets (``train_offsets`` [N + 1] and so on): client i has ``train[train_offsets[i]:train_offsets[i + 1]]``. It
    also holds ``pooled`` and ``hash``.
    """
    arrays: dict[str, Any] = {"pooled": holdings.pooled, "hash": np.array(holdings.hash)}
    for use in _USES:
        rows = [getattr(split, use) for split in holdings.splits]
        arrays[use] = np.concatenate(rows)
        arrays[f"{use}_offsets"] = np.cumsum([0, *map(len, rows)])
    np.savez_compressed(path, **arrays)


def read(file: str) -> Holdings | list[Rows]:
    """Reads a file that `save` has written, or a file with the rows of each client.

    Args:
      file: an npz file: either the file of a run, in which ``validation``, ``pooled`` (all test rows) and ``hash`` may
        be missing; or a file with the rows of client i under the name i, ``numpy.savez(file, **{"0": rows0, "1":
        rows1})``.

    Returns:
      The `Holdings` of a run's file, or else the rows of each client. Whether the rows exist in a data set is not
      checked.

    Raises:
      ConfigError: field ``data.partition.file``: there is no such file, or it is of neither kind.
    """
    arrays = _arrays(file)
    if "train" not in arrays:
        names = [str(client) for client in range(len(arrays))]
        if not arrays or set(names) != set(arrays):
            needed = "either what a run's partition.npz holds, or rows for each client under 0, 1, ..."
            raise ConfigError(_FIELD, file, f"{needed}; present: {', '.join(arrays) or 'none'}")
        return [_checked(arrays[name], f"client {name}", file) for name in names]
    train, test = (_by_client(arrays, use, file) for use in ("train", "test"))
    nothing = np.zeros(0, np.int64)
    validation = _by_client(arrays, "validation", file) if "validation" in arrays else [nothing] * len(train)
    if not len(train) == len(validation) == len(test):
        raise ConfigError(_FIELD, file, f"it has {len(train)} clients that train, and {len(test)} that are tested")
    splits = [Split(*rows) for rows in zip(train, validation, test, strict=True)]
    pooled = _checked(arrays["pooled"], "pooled", file) if "pooled" in arrays else union(test)
    return Holdings(splits, pooled, str(arrays["hash"]) if "hash" in arrays else None)


def union(rows: Sequence[Rows]) -> Rows:
    """The union of several sets of rows, ascending, each row once."""
    return np.unique(np.concatenate(rows))


def _arrays(file: str) -> dict[str, np.ndarray]:
    path = Path(os.path.expanduser(file))
    if not os.path.isfile(path):
        raise ConfigError(_FIELD, file, f"there is no such file; looked for {path.absolute()}")
    if not zipfile.is_zipfile(path):
        raise ConfigError(_FIELD, file, "it is no npz file; numpy.savez writes one")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name]) for name in archive.files}
    except (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(_FIELD, file, f"it cannot be read as plain arrays ({error})") from None


def _by_client(arrays: dict[str, np.ndarray], use: str, file: str) -> list[Rows]:
    """The rows of each client for one use."""
    for name in (use, f"{use}_offsets"):
        if name not in arrays:
            raise ConfigError(_FIELD, file, f"it needs an array {name!r}; present: {', '.join(arrays)}")
    rows, offsets = _checked(arrays[use], use, file), _checked(arrays[f"{use}_offsets"], f"{use}_offsets", file)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(rows) or (np.diff(offsets) < 0).any():
        allowed = f"{use}_offsets must ascend from 0 to {len(rows)}, the number of rows in {use}"
        raise ConfigError(_FIELD, file, allowed)
    return np.split(rows, offsets[1:-1])


def _checked(rows: np.ndarray, what: str, file: str) -> Rows:
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise ConfigError(
            _FIELD, file, f"row numbers are integers [n], and those of {what} are {rows.dtype} {rows.shape}"
        )
    return rows.astype(np.int64)
