"""Splits a client's rows into training, validation and test rows; and makes the manifest of the division."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from fedjax_pfl.data.dealing import Partition, counted, fit_to_supply, largest_remainder
from fedjax_pfl.data.rows import Rows, Split
from fedjax_pfl.errors import ConfigError


def split_rows(
    labels: Int[np.ndarray, " samples"],
    parts: Sequence[Rows],
    seed: int,
    *,
    test_share: float,
    validation_share: float,
    stratified: bool = False,
) -> list[Split]:
    """Splits each client's rows at random into training, validation and test rows (split ``"merge"``).

    A client's split depends on its rows, its number and the seed, not on the other clients.

    Args:
      labels: int ``[samples]``; used only if the split is stratified.
      parts: for each client the numbers of its rows, at least one; the only row of a client becomes a training row.
      seed: seed of the permutations.
      test_share: share of a client's rows for testing, above 0 and below 1; of two rows or more, both training and
        test rows get at least one. The number of training rows is rounded down, as in scikit-learn's
        ``train_test_split``, which PFLlib uses.
      validation_share: share of the training rows for validation, 0 or more and below 1, rounded down; at least one
        training row is left.
      stratified: whether each class of a client is split in these shares, rounded up or down so that the totals are the
        same as without stratification. A class with two or more rows always keeps one for training, so that a client is
        not tested on a class that it could have trained on but did not. The only row of a class becomes a test row only
        if no other rows are left. Because of this, there may be fewer test rows if `test_share` is above one half, and
        fewer validation rows if classes are small. PFLlib's split is not stratified.

    Returns:
      A `Split` for each client.

    Raises:
      ConfigError: for a client without rows.
    """
    splits = []
    for client, part in enumerate(parts):
        if not len(part):
            raise ConfigError("data.clients", len(parts), f"client {client} has no samples")
        rng = _client_rng(seed, client)
        order = rng.permutation(part)
        n_train = max(min(_floor((1 - test_share) * len(part)), len(part) - 1), 1)
        if stratified:
            train, test = _by_class(order, labels[order], len(part) - n_train, rng, spend_lone=True)
            n_validation = _n_validation(len(train), validation_share)
            train, validation = _by_class(train, labels[train], n_validation, rng, spend_lone=False)
            splits.append(Split(train, validation, test))
        else:
            splits.append(_split(order[:n_train], order[n_train:], validation_share))
    return splits


def set_aside(labels: Int[np.ndarray, " samples"], share: float, seed: int) -> tuple[Rows, Rows]:
    """Sets a share of each class aside at random, as the test part of a source that has none.

    A class with two or more samples has at least one in each part; the only sample of a class stays in the training
    part.

    Args:
      labels: int ``[samples]``.
      share: above 0 and below 1; a class of n samples gives ``share * n`` samples, rounded.
      seed: seed of the draw; its random stream differs from those of the partition and the clients.

    Returns:
      The row numbers of the training part and of the test part, each in ascending order.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, 0)))
    in_test = np.zeros(len(labels), bool)
    for k in np.unique(labels):
        rows = np.flatnonzero(labels == k)
        count = min(max(round(share * len(rows)), 1), len(rows) - 1)
        in_test[rng.choice(rows, count, replace=False)] = True
    return np.flatnonzero(~in_test), np.flatnonzero(in_test)


def draw_test(
    labels: Int[np.ndarray, " samples"],
    parts: Sequence[Rows],
    test_rows: Rows,
    seed: int,
    *,
    test_share: float,
    validation_share: float = 0.0,
    test_classes: Literal["all", "dominant"] = "all",
) -> list[Split]:
    """Draws each client's test rows from an official test part in its own label proportions (split ``"official"``).

    A client with n training rows gets about ``n * test_share / (1 - test_share)`` test rows, at least one, so that they
    are `test_share` of all its rows. No client has a test row twice, but clients may share test rows.

    Args:
      labels: int ``[samples]``, of the training and the test part together.
      parts: for each client the numbers of its training rows.
      test_rows: row numbers of the test part.
      seed: seed of all draws.
      test_share: above 0 and below 1.
      validation_share: share of a client's training rows to validate on, as in `split_rows`.
      test_classes: ``"dominant"`` tests a client, with the same number of rows, only on its dominant classes: those
        that make up more than an even share of its rows (as in `weak_pathological`). FedMate's code does so on
        CIFAR-100, where its share of uniform test images per class, 60 // 100, is 0.

    Returns:
      A `Split` for each client. If the test part has too few samples of a class, the client gets those that there are,
      without replacement by other classes (`short_of_test_rows` makes a note of this), unless it would get none.

    Raises:
      ConfigError: a client has no rows, a client has no dominant class but is to be tested on these, or the test part
        has no samples of a client's classes.
    """
    classes, present = int(labels.max()) + 1, len(np.unique(labels))
    test_by_class = [test_rows[labels[test_rows] == k] for k in range(classes)]
    supply = np.array([len(rows) for rows in test_by_class])
    splits = []
    for client, part in enumerate(parts):
        if not len(part):
            raise ConfigError("data.clients", len(parts), f"client {client} has no samples")
        rng = _client_rng(seed, client)
        train = rng.permutation(part)
        total = _n_drawn(len(part), test_share)
        held = np.bincount(labels[part], minlength=classes).astype(float)
        if test_classes == "dominant":
            held *= held > len(part) / present
            if not held.any():
                allowed = f'"all": client {client} has equally many samples of all classes'
                raise ConfigError("data.test_classes", test_classes, allowed)
        counts = np.minimum(largest_remainder(held[np.newaxis], np.array([total]), rng)[0], supply)
        if not counts.any():  # its few rows went to classes that the test part lacks
            held *= supply > 0
            if not held.any():
                allowed = f"client {client} holds no class of which the official test part has samples; use 'merge'"
                raise ConfigError("data.split", "official", allowed)
            counts = np.minimum(largest_remainder(held[np.newaxis], np.array([total]), rng)[0], supply)
        test = [rng.choice(rows, count, replace=False) for rows, count in zip(test_by_class, counts, strict=True)]
        splits.append(_split(train, rng.permutation(np.concatenate(test)), validation_share))
    return splits


def short_of_test_rows(splits: Sequence[Split], test_share: float) -> tuple[str, ...]:
    """A note on clients that got fewer test samples than their share, if there are any.

    Args:
      splits: the result of `draw_test`.
      test_share: the share that `draw_test` was given.
    """
    wanted = [_n_drawn(len(split.train) + len(split.validation), test_share) for split in splits]
    short = [(n, len(split.test)) for n, split in zip(wanted, splits, strict=True) if len(split.test) < n]
    if not short:
        return ()
    asked, got = map(sum, zip(*short, strict=True))
    return (
        f"{counted(len(short), 'client')} of {len(splits)} got fewer test samples than their share, {got} of {asked}: "
        "the test part has no more of their classes",
    )


def own_test(
    users: Int[np.ndarray, " samples"],
    parts: Sequence[Rows],
    test_rows: Rows,
    seed: int,
    *,
    validation_share: float = 0.0,
) -> list[Split]:
    """Tests each client on all test samples of its user (split ``"official"`` with partition ``"natural"``).

    Args:
      users: int ``[samples]``, of the training and the test part together.
      parts: for each client the numbers of its rows of the training part, all of one user.
      test_rows: row numbers of the test part; it may lack samples of a client's user, who is then not tested.
      seed: seed of the order of the rows.
      validation_share: share of a client's training rows to validate on, as in `split_rows`.

    Returns:
      A `Split` for each client.
    """
    splits = []
    for client, part in enumerate(parts):
        rng = _client_rng(seed, client)
        own = test_rows[users[test_rows] == users[part[0]]]
        splits.append(_split(rng.permutation(part), rng.permutation(own), validation_share))
    return splits


def manifest(
    labels: Int[np.ndarray, " samples"], classes: int, partition: Partition, splits: Sequence[Split]
) -> dict[str, Any]:
    """A record of the samples that each client holds, ready for JSON.

    Args:
      labels: int ``[samples]``.
      classes: number of classes.
      partition: the rows of each client before the split.
      splits: the split of each client.

    Returns:
      A dict with ``hash`` (SHA-256 over the clients' training, validation and test rows and the labels, the same on
      every platform); before the split, ``sizes`` ``[clients]`` and ``class_counts`` ``[clients][classes]``; after it,
      ``n_train``, ``n_validation`` and ``n_test`` ``[clients]``, and ``train_class_counts``,
      ``validation_class_counts`` and ``test_class_counts`` ``[clients][classes]``; and ``notes``. The accuracy of
      always answering a client's most frequent class follows from these counts.
    """
    digest = hashlib.sha256()
    for array in [rows for split in splits for rows in split] + [labels]:
        # The length first, or else moving a row from one array to the next could leave the hash as it was.
        digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())

    def class_counts(parts: Sequence[Rows]) -> list[list[int]]:
        return [np.bincount(labels[part], minlength=classes).tolist() for part in parts]

    return {
        "hash": digest.hexdigest(),
        "sizes": [len(part) for part in partition.parts],
        "class_counts": class_counts(partition.parts),
        "n_train": [len(split.train) for split in splits],
        "n_validation": [len(split.validation) for split in splits],
        "n_test": [len(split.test) for split in splits],
        "train_class_counts": class_counts([split.train for split in splits]),
        "validation_class_counts": class_counts([split.validation for split in splits]),
        "test_class_counts": class_counts([split.test for split in splits]),
        "notes": list(partition.notes),
    }


def _client_rng(seed: int, client: int) -> np.random.Generator:
    """A separate random stream for each client, different from that of the partition with the same seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(client,)))


def _split(train: Rows, test: Rows, validation_share: float) -> Split:
    """A split whose validation rows are the last of the training rows."""
    kept = len(train) - _n_validation(len(train), validation_share)
    return Split(train[:kept], train[kept:], test)


def _n_drawn(n_train: int, test_share: float) -> int:
    """The number of test rows for this number of training rows, so that they are this share of all rows."""
    return max(round(n_train * test_share / (1 - test_share)), 1)


def _n_validation(n_train: int, share: float) -> int:
    """The number of validation rows among this number of training rows."""
    return min(_floor(share * n_train), n_train - 1)


def _by_class(
    rows: Rows, labels: Int[np.ndarray, " _"], count: int, rng: np.random.Generator, *, spend_lone: bool
) -> tuple[Rows, Rows]:
    """Splits rows into rows to keep and ``count`` rows to set apart, in proportion to the classes.

    A class is never set apart completely.

    Args:
      rows: row numbers in random order, which both results keep.
      labels: the class of each row.
      count: number of rows to set apart, smaller than the number of rows.
      rng: decides between equal fractions.
      spend_lone: whether the only row of a class may be set apart after all, if there are too few others.
    """
    classes, held = np.unique(labels, return_inverse=True, return_counts=True)[1:]
    asked = largest_remainder(held[np.newaxis].astype(float), np.array([count]), rng)
    counts = fit_to_supply(asked, held - 1, rng)[0]
    if spend_lone:
        lone = np.flatnonzero(held == 1)
        counts[rng.choice(lone, min(count - counts.sum(), len(lone)), replace=False)] = 1
    # The place of each row among those of its class.
    by_class = np.argsort(classes, kind="stable")
    place = np.empty(len(rows), int)
    place[by_class] = np.arange(len(rows)) - np.repeat(np.cumsum(held) - held, held)
    apart = place < counts[classes]
    return rows[~apart], rows[apart]


def _floor(value: float) -> int:
    """Rounds down; a whole number that float error has made slightly smaller (0.29 * 100) stays that number."""
    return math.floor(value + 1e-9)
