"""Splits: which of a client's rows it trains on, validates on and is tested on; and the manifest of it all."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from fedjax_pfl.data.partition import MIN_SAMPLES, Partition, Rows, check_seed, largest_remainder
from fedjax_pfl.errors import ConfigError


class Split(NamedTuple):
    """One client's rows by use, each an int64 array in random order; validation may be empty."""

    train: Rows
    validation: Rows
    test: Rows


def split_rows(
    labels: Int[np.ndarray, "samples"],
    parts: Sequence[Rows],
    seed: int,
    *,
    test_share: float,
    validation_share: float,
) -> list[Split]:
    """Splits each client's rows at random into training, validation and test rows (split ``"merge"``).

    A client's split depends on its rows, its number and the seed, not on the other clients.

    Args:
      labels: int ``[samples]``; not used, because the split is not stratified (PFLlib's is not either). It is there so
        that both splits are called alike.
      parts: for each client the numbers of its rows, at least two.
      seed: seed of the permutations.
      test_share: share of a client's rows to test on, above 0 and below 1; each side gets at least one row. The
        training side is rounded down, as scikit-learn's ``train_test_split`` in PFLlib does.
      validation_share: share of the training side to validate on, 0 or more and below 1, rounded down; at least one
        row is left to train on.

    Returns:
      A `Split` for each client.

    Raises:
      ConfigError: for a share out of range or a client with fewer than two rows.
    """
    del labels
    _check_split(seed, test_share, validation_share)
    splits = []
    for client, part in enumerate(parts):
        if len(part) < MIN_SAMPLES:
            allowed = f"client {client} has {len(part)} samples, {MIN_SAMPLES} are needed to train and to test"
            raise ConfigError("data.clients", len(parts), allowed)
        order = _client_rng(seed, client).permutation(part)
        n_train = min(max(_floor((1 - test_share) * len(part)), 1), len(part) - 1)
        splits.append(_split(order[:n_train], order[n_train:], validation_share))
    return splits


def set_aside(labels: Int[np.ndarray, "samples"], share: float, seed: int) -> tuple[Rows, Rows]:
    """Sets a share of each class aside at random, as the test part of a source that has none.

    A class of two samples or more has at least one on either side; a lone sample stays in the training part.

    Args:
      labels: int ``[samples]``.
      share: above 0 and below 1; a class of n samples gives ``share * n``, rounded.
      seed: seed of the draw, whose stream is neither that of the partition nor a client's with the same seed.

    Returns:
      The row numbers of the training part and of the test part, each in ascending order.

    Raises:
      ConfigError: for a seed or a share out of range.
    """
    check_seed(seed)
    if not 0 < share < 1:
        raise ConfigError("data.test_part_share", share, "a number above 0 and below 1")
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, 0)))
    in_test = np.zeros(len(labels), bool)
    for k in np.unique(labels):
        rows = np.flatnonzero(labels == k)
        count = min(max(round(share * len(rows)), 1), len(rows) - 1)
        in_test[rng.choice(rows, count, replace=False)] = True
    return np.flatnonzero(~in_test), np.flatnonzero(in_test)


def draw_test(
    labels: Int[np.ndarray, "samples"],
    parts: Sequence[Rows],
    test_rows: Rows,
    seed: int,
    *,
    test_share: float,
    validation_share: float = 0.0,
) -> list[Split]:
    """Draws each client's test rows from an official test part in its own label proportions (split ``"official"``).

    A client with n rows gets about ``n * test_share / (1 - test_share)`` test rows, at least one, so that they are
    `test_share` of all it has. No row comes twice to one client, but clients may share test rows.

    Args:
      labels: int ``[samples]``, of the training and the test part together.
      parts: for each client the numbers of its rows of the training part.
      test_rows: row numbers of the test part.
      seed: seed of all draws.
      test_share: above 0 and below 1.
      validation_share: share of a client's training rows to validate on, as in `split_rows`.

    Returns:
      A `Split` for each client. Where the test part holds fewer of a class than the proportions ask for, the client
      gets those there are and no others instead.

    Raises:
      ConfigError: for a share out of range, a client without rows, or one whose classes the test part does not have.
    """
    _check_split(seed, test_share, validation_share)
    classes = int(labels.max()) + 1
    test_by_class = [test_rows[labels[test_rows] == k] for k in range(classes)]
    supply = np.array([len(rows) for rows in test_by_class])
    splits = []
    for client, part in enumerate(parts):
        if not len(part):
            raise ConfigError("data.clients", len(parts), f"client {client} has no samples")
        rng = _client_rng(seed, client)
        train = rng.permutation(part)
        total = max(round(len(part) * test_share / (1 - test_share)), 1)
        held = np.bincount(labels[part], minlength=classes).astype(float)
        counts = np.minimum(largest_remainder(held[np.newaxis], np.array([total]), rng)[0], supply)
        if not counts.any():
            allowed = f"the official test part has no samples of the classes that client {client} holds; use 'merge'"
            raise ConfigError("data.split", "official", allowed)
        test = [rng.choice(rows, count, replace=False) for rows, count in zip(test_by_class, counts, strict=True)]
        splits.append(_split(train, rng.permutation(np.concatenate(test)), validation_share))
    return splits


def own_test(
    users: Int[np.ndarray, "samples"],
    parts: Sequence[Rows],
    test_rows: Rows,
    seed: int,
    *,
    validation_share: float = 0.0,
) -> list[Split]:
    """Tests each client on all that its user has in the test part (split ``"official"`` of partition ``"natural"``).

    Args:
      users: int ``[samples]``, of the training and the test part together.
      parts: for each client the numbers of its rows of the training part, all of one user.
      test_rows: row numbers of the test part, with some of every client's user.
      seed: seed of the order of the rows.
      validation_share: share of a client's training rows to validate on, as in `split_rows`.

    Returns:
      A `Split` for each client.

    Raises:
      ConfigError: for a seed or a share out of range.
    """
    check_seed(seed)
    _check_validation_share(validation_share)
    splits = []
    for client, part in enumerate(parts):
        rng = _client_rng(seed, client)
        own = test_rows[users[test_rows] == users[part[0]]]
        splits.append(_split(rng.permutation(part), rng.permutation(own), validation_share))
    return splits


def manifest(
    labels: Int[np.ndarray, "samples"], classes: int, partition: Partition, splits: Sequence[Split]
) -> dict[str, Any]:
    """A record of who holds what, ready for JSON.

    Args:
      labels: int ``[samples]``.
      classes: number of classes.
      partition: the rows of each client before the split.
      splits: the split of each client.

    Returns:
      A dict of ``hash`` (SHA-256 over the clients' training, validation and test rows and over the labels, the same on
      every platform), ``sizes`` ``[clients]`` and ``class_counts`` ``[clients][classes]`` before the split,
      ``n_train``, ``n_validation`` and ``n_test`` ``[clients]``, and ``notes``.
    """
    digest = hashlib.sha256()
    for array in [rows for split in splits for rows in split] + [labels]:
        # The length first, or else moving a row from one array to the next could leave the hash as it was.
        digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    return {
        "hash": digest.hexdigest(),
        "sizes": [len(part) for part in partition.parts],
        "class_counts": [np.bincount(labels[part], minlength=classes).tolist() for part in partition.parts],
        "n_train": [len(split.train) for split in splits],
        "n_validation": [len(split.validation) for split in splits],
        "n_test": [len(split.test) for split in splits],
        "notes": list(partition.notes),
    }


def _client_rng(seed: int, client: int) -> np.random.Generator:
    """A stream of its own for each client, different from that of the partition with the same seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(client,)))


def _split(train: Rows, test: Rows, validation_share: float) -> Split:
    """A split whose validation rows are the last of the training rows."""
    n_validation = min(_floor(validation_share * len(train)), len(train) - 1)
    return Split(train[: len(train) - n_validation], train[len(train) - n_validation :], test)


def _floor(value: float) -> int:
    """Rounds down, but takes a whole number that float error made a little smaller (0.29 * 100) for what it is."""
    return math.floor(value + 1e-9)


def _check_split(seed: int, test_share: float, validation_share: float) -> None:
    """Raises a ConfigError for a seed out of range and for shares that leave nothing to train or to test on."""
    check_seed(seed)
    if not 0 < test_share < 1:
        raise ConfigError("data.test_share", test_share, "a number above 0 and below 1")
    _check_validation_share(validation_share)


def _check_validation_share(validation_share: float) -> None:
    """Raises a ConfigError for a share that leaves nothing to train on."""
    if not 0 <= validation_share < 1:
        raise ConfigError("data.validation_share", validation_share, "a number from 0 to below 1")
