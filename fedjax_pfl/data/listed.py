"""Partitions that somebody has listed, row by row, and the checks of such lists."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fedjax_pfl.data.dealing import Partition, named
from fedjax_pfl.data.rows import Holdings, Rows, union
from fedjax_pfl.errors import ConfigError


def partition_of(
    given: Holdings | list[Rows], labels: Int[np.ndarray, " samples"], clients: int, size: int | None, file: str
) -> Partition:
    """The partition that `indices` makes from a file's content, as returned by `read`."""
    if isinstance(given, Holdings):
        _check_holdings(given, len(labels), clients, file)
        note = f"the rows for training, validation and test are those of {file}"
        return Partition([union(split) for split in given.splits], (note,))
    if size is not None:
        raise ConfigError("data.samples_per_client", size, f"nothing: {file} says which samples each client gets")
    check_rows(given, len(labels), clients, "data.partition.file", file)
    return Partition([np.sort(rows) for rows in given], ())


def check_rows(parts: Sequence[Rows], samples: int, clients: int, field: str, value: object) -> None:
    """Checks row numbers that come from outside this module.

    Args:
      parts: for each client the numbers of its rows, integers.
      samples: number of rows of the data set.
      clients: the required number of clients.
      field: the field for an error message.
      value: the value for an error message.

    Raises:
      ConfigError: the number of clients differs, a row does not exist, a client has no row, or a row appears twice.
    """
    _check_clients(len(parts), clients, value)
    _check_trained(parts, "row", field, value)
    for client, rows in enumerate(parts):
        _check_range(rows, samples, f"client {client}", field, value)
        _check_once(rows, f"client {client} has row {{}} twice", field, value)
    _check_once(np.concatenate(parts), "two clients have row {}", field, value)


def _check_holdings(given: Holdings, samples: int, clients: int, file: str) -> None:
    """Checks the rows of a run; its clients may share training rows, or test rows."""
    field = "data.partition.file"
    _check_clients(len(given.splits), clients, file)
    _check_trained([split.train for split in given.splits], "training row", field, file)
    if not any(len(split.test) for split in given.splits):
        raise ConfigError(field, file, "one client or more needs a test row")
    if not len(given.pooled):
        raise ConfigError(field, file, "pooled needs a row or more; without pooled, it is all test rows")
    _check_range(given.pooled, samples, "the pooled test set", field, file)
    for client, split in enumerate(given.splits):
        _check_range(np.concatenate(split), samples, f"client {client}", field, file)
        for rows in (np.concatenate([split.train, split.validation]), split.test):
            _check_once(rows, f"client {client} has row {{}} twice", field, file)
    trained = union([rows for split in given.splits for rows in (split.train, split.validation)])
    tested = union([given.pooled, *(split.test for split in given.splits)])
    both = np.intersect1d(trained, tested)
    if len(both):
        raise ConfigError(field, file, f"each row for one use: row {both[0]} is for training (or validation) and test")


def _check_clients(found: int, clients: int, value: object) -> None:
    if found != clients:
        raise ConfigError("data.clients", clients, f"{found}, the number of clients in {value}")


def _check_trained(parts: Sequence[Rows], row: str, field: str, value: object) -> None:
    without = [client for client, rows in enumerate(parts) if not len(rows)]
    if without:
        allowed = f"each client needs a {row} or more; leave out those without, {named(without)}"
        raise ConfigError(field, value, allowed)


def _check_range(rows: Rows, samples: int, whose: str, field: str, value: object) -> None:
    outside = rows[(rows < 0) | (rows >= samples)]
    if len(outside):
        raise ConfigError(field, value, f"rows are numbered 0 to {samples - 1}, and {whose} has row {outside[0]}")


def _check_once(rows: Rows, what: str, field: str, value: object) -> None:
    held, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise ConfigError(field, value, what.format(held[counts > 1][0]))
