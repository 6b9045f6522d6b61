"""Divides a data set into a federation: the training, validation and test samples of every client."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.dealing import Partition, counted, named
from fedjax_pfl.data.federated import Clients, Federation, Pool, pack
from fedjax_pfl.data.listed import partition_of
from fedjax_pfl.data.partition import PARTITIONS, overlaps
from fedjax_pfl.data.rows import Holdings, Rows, Split, read, union
from fedjax_pfl.data.split import draw_test, manifest, own_test, set_aside, short_of_test_rows, split_rows
from fedjax_pfl.errors import ConfigError

# The number of samples in a block of the pooled test set; a block is evaluated like a client.
_POOLED_BLOCK = 512


def deal(
    dataset: Dataset,
    *,
    clients: int,
    partition: Mapping[str, Any],
    split: Literal["merge", "official"] = "merge",
    test_part_share: float | None = None,
    test_share: float = 0.25,
    test_classes: Literal["all", "dominant"] = "all",
    validation_share: float = 0.0,
    stratified: bool = False,
    new_clients: float = 0.0,
    samples_per_client: int | None = None,
    seed: int,
) -> tuple[Holdings, dict[str, Any]]:
    """Decides which rows of a data set each client uses for training, validation and testing.

    Args:
      dataset: the samples.
      clients: N.
      partition: the kind of partition and its options, ``{"kind": "dirichlet", "beta": 0.1}``; see `PARTITIONS`. With
        the file of a run (kind ``"indices"``) the rows are the file's; of the fields below only `split` (which decides
        what the manifest counts), `validation_share` (0 leaves the file's validation rows unused) and `new_clients`
        have an effect.
      split: ``"merge"`` divides all rows among the clients and splits the rows of each; ``"official"`` divides the
        training part and draws each client's test rows from the test part (`draw_test`), or takes those of its user
        (`own_test`). A client that comes with too few samples of its own trains and is not tested.
      test_part_share: share of each class that becomes the test part of a source without one; for ``"official"``.
      test_share: share of a client's rows that are test rows.
      test_classes: classes on which ``"official"`` tests a client: all that it holds, or the dominant ones
        (`draw_test`).
      validation_share: share of a client's training rows on which methods may select.
      stratified: whether ``"merge"`` splits each class of a client in these shares (`split_rows`).
      new_clients: share of the clients, drawn at random and numbered last, that never train; with the file of a run as
        the partition, its last clients.
      samples_per_client: training rows (validation included) of each client; all rows are used unless given.
      seed: seed of test part, partition, split and the choice of new clients.

    Returns:
      The rows of each client, and the manifest that ``partition.json`` holds (see `manifest`).

    Raises:
      ConfigError: field ``data.*``: the arguments do not fit the data set or each other.
    """
    new = count_new(new_clients, clients)
    options = dict(partition)
    kind = options.pop("kind")
    natural, official = kind == "natural", split == "official"
    groups = dataset.users if natural else dataset.labels
    if groups is None:
        others = ", ".join(name for name in PARTITIONS if name != "natural")
        allowed = f"{dataset.name} has no users{_besides(dataset)}; use one of {others}"
        raise ConfigError("data.partition.kind", kind, allowed)
    if dataset.divided and kind != "indices":
        _check_divided(dataset, clients, kind, official)

    listed = None
    if kind == "indices":
        given = read(options["file"])
        listed = partition_of(given, dataset.labels, clients, samples_per_client, options["file"])
        if isinstance(given, Holdings):
            return _as_in_the_run(dataset, listed, given, options["file"], validation_share, official, new)

    # 1. The rows to divide, and the number of rows per client.
    untested: tuple[str, ...] = ()
    if official:
        shared, test_part = _official_parts(dataset, test_part_share, seed)
        if natural and not dataset.divided:
            in_both, without = _of_users_in_both(groups, shared, test_part, dataset.name)
            if clients != len(np.unique(groups[shared])):  # all users are taken as they are
                shared, untested = in_both, without
        size = samples_per_client
    else:
        shared, test_part = np.arange(len(dataset.labels)), None
        size = _with_test_samples(samples_per_client, test_share, clients, len(shared))
    if natural and dataset.divided:
        shared = shared[groups[shared] >= 0]
        _check_shares(np.bincount(groups[shared], minlength=clients), size, samples_per_client, test_part_share)

    # 2. The rows of each client, new clients last.
    if listed is None:
        dealt = PARTITIONS[kind](groups[shared], clients, seed, size, **options)
        dealt = dealt._replace(parts=[shared[part] for part in dealt.parts])
    else:
        dealt = listed
        _check_training_rows(dealt.parts, shared, options["file"])
    dealt = dealt._replace(parts=_new_last(dealt.parts, new, seed))

    # 3. The split of each client's rows.
    held_out = {"test_share": test_share, "validation_share": validation_share}
    if test_part is None:
        splits = split_rows(dataset.labels, dealt.parts, seed, stratified=stratified, **held_out)
    elif natural:
        splits = own_test(groups, dealt.parts, test_part, seed, validation_share=validation_share)
    else:
        splits = draw_test(dataset.labels, dealt.parts, test_part, seed, test_classes=test_classes, **held_out)

    # Every client has at least one training row, but possibly no validation row, and on its own data no test row.
    if not any(len(rows.test) for rows in splits):
        way = 'use "merge"' if official else "one client or more needs two samples"
        raise ConfigError("data.split", split, f"no client would have test samples; {way}")
    if validation_share and not any(len(rows.validation) for rows in splits):
        largest = max(len(rows.train) for rows in splits)
        change = "a larger share" if largest > 1 else "0, or fewer clients"
        allowed = f"{change}: of {largest} training samples or fewer per client it leaves none to validate on"
        raise ConfigError("data.validation_share", validation_share, allowed)

    # 4. The pooled test set: all rows of a test part, including rows on which no client is tested.
    whole = None if natural else test_part
    pooled = np.sort(np.concatenate([rows.test for rows in splits])) if whole is None else whole

    notes = _notes(dataset, splits, partition, official, test_share, validation_share, new)
    dealt = dealt._replace(notes=(*dealt.notes, *untested, *notes))
    record = manifest(dataset.labels, dataset.classes, dealt, splits)
    if natural:
        users, names = [int(groups[part[0]]) for part in dealt.parts], dataset.user_names
        record["users"] = users if names is None else [names[user] for user in users]
    return Holdings(splits, pooled, record["hash"]), record


def federate(
    dataset: Dataset,
    holdings: Holdings,
    *,
    validation_share: float = 0.0,
    evaluate_on: Literal["test", "validation"] = "test",
) -> Federation:
    """Puts a data set on the device, with the rows of each client as index tables.

    Args:
      dataset: the samples, which the federation holds once.
      holdings: the rows of each client.
      validation_share: 0 for a federation without validation samples.
      evaluate_on: whether the federation's ``test`` and ``pooled`` hold the test or the validation samples.
    """
    splits, pooled, _ = holdings
    if evaluate_on == "validation":
        pooled = np.sort(np.concatenate([rows.validation for rows in splits]))

    def tables(rows: Sequence[Rows]) -> Clients:
        return pack(rows, dataset.labels, dataset.classes)

    return Federation(
        x=Pool.of(dataset.images),
        y=jax.device_put(dataset.labels.astype(np.int32)),
        train=tables([rows.train for rows in splits]),
        validation=tables([rows.validation for rows in splits]) if validation_share else None,
        test=tables([getattr(rows, evaluate_on) for rows in splits]),
        pooled=tables(np.array_split(pooled, math.ceil(len(pooled) / _POOLED_BLOCK))),
    )


def count_new(share: float, clients: int) -> int:
    """The number of clients that never train.

    Raises:
      ConfigError: field ``data.new_clients``: the share is not 0, but amounts to none or all of the clients.
    """
    new = round(share * clients)
    if share and not 0 < new < clients:
        raise ConfigError("data.new_clients", share, f"0, or a share that is some of the {clients} clients, not all")
    return new


def _as_in_the_run(
    dataset: Dataset, listed: Partition, held: Holdings, file: str, validation_share: float, official: bool, new: int
) -> tuple[Holdings, dict[str, Any]]:
    """The rows in a run's file, and their manifest; the hashes must agree, or the labels differ from that run's."""
    parts, notes = listed.parts, listed.notes
    if official:  # the manifest's sizes are of what was shared out
        parts = [union([rows.train, rows.validation]) for rows in held.splits]
    validating = sum(len(rows.validation) for rows in held.splits)
    if validation_share and not validating:
        raise ConfigError("data.validation_share", validation_share, f"0: {file} has no rows to validate on")
    if validating and not validation_share:
        notes = (*notes, f"its {validating} rows for validation are not used: data.validation_share is 0")
    notes = (*notes, *_of_untested(held.splits), *_of_new(len(parts), new))
    record = manifest(dataset.labels, dataset.classes, Partition(parts, notes), held.splits)
    if held.hash not in (None, record["hash"]):
        allowed = f"rows of the data that it was written for: the labels of {dataset.name} are others"
        raise ConfigError("data.partition.file", file, allowed)
    return held._replace(hash=record["hash"]), record


def _notes(
    dataset: Dataset,
    splits: Sequence[Split],
    partition: Mapping[str, Any],
    official: bool,
    test_share: float,
    validation_share: float,
    new: int,
) -> Iterator[str]:
    """Notes on the division of the rows, for readers of the numbers."""
    kind, clients = partition["kind"], len(splits)
    if official and kind != "natural":
        yield from short_of_test_rows(splits, test_share)
    if overlaps(partition):
        trained = np.concatenate([rows.train for rows in splits])
        yield f"clients overlap: together they train on {len(np.unique(trained))} different samples, of {len(trained)}"
    if dataset.users is not None and not dataset.divided and kind not in ("natural", "indices"):
        yield f'the users of {dataset.name} are not looked at: the partition is "{kind}", and theirs is "natural"'
    if dataset.own and not official and dataset.train_rows not in (None, len(dataset.labels)):
        yield 'the test part given is divided anew with the training part: data.split = "official" keeps it for testing'
    if dataset.vocabulary is None:
        empty = dataset.classes - len(np.unique(dataset.labels))
        if dataset.own and empty > dataset.classes / 2:
            yield f"{empty} of {dataset.classes} classes have no sample; are the labels the numbers of classes?"
        elif dataset.labels.min() == 1:
            yield "class 0 has no sample; do the labels count from 1?"
    if dataset.vocabulary is not None and (validation_share or not official):
        of = "validation" if official else "test"
        said = "if windows of the text overlap," if dataset.own else "windows of a text overlap:"
        yield f"{said} those of the {of} part share most characters with some of the training part"
    yield from _of_untested(splits)
    yield from _of_new(clients, new)


def _of_untested(splits: Sequence[Split]) -> Iterator[str]:
    """Notes on the clients without test samples, and on those without validation samples where others have some."""
    without = {"test": sum(not len(rows.test) for rows in splits)}
    unvalidated = sum(not len(rows.validation) for rows in splits)
    if unvalidated < len(splits):
        without["validation"] = unvalidated
    for use, number in without.items():
        if number:
            who = f"{counted(number, 'client')} of {len(splits)}"
            yield f"{who} without {use} samples: scores on {use} samples leave them out"


def _of_new(clients: int, new: int) -> Iterator[str]:
    """A note on the clients that never train, if there are any."""
    if new:
        yield f"clients {clients - new} to {clients - 1} are new: they never train"


def _check_divided(dataset: Dataset, clients: int, kind: str, official: bool) -> None:
    """Checks that data that came already divided among clients keep this division."""
    assert dataset.users is not None
    there = int(dataset.users.max()) + 1
    if kind != "natural":
        raise ConfigError("data.partition.kind", kind, f'"natural": {dataset.name} come divided among {there} clients')
    if clients != there:
        raise ConfigError(
            "data.clients", clients, f"{there}, the clients with samples that {dataset.name} come divided among"
        )
    if official and dataset.train_rows is not None:
        without = np.setdiff1d(np.arange(there), dataset.users[: dataset.train_rows])
        if len(without):
            ways = 'leave them out, or data.split = "merge", which divides the samples of each client anew'
            raise ConfigError("data", dataset.name, f"training samples are missing for {named(without)}: {ways}")


def _check_shares(
    counts: Rows, size: int | None, samples_per_client: int | None, test_part_share: float | None
) -> None:
    """Checks that every client of a given division has samples enough after the test part has been set apart."""
    if not counts.min():
        allowed = f"a smaller share: it leaves no training samples to {named(np.flatnonzero(counts == 0))}"
        raise ConfigError("data.test_part_share", test_part_share, allowed)
    if size is not None and counts.min() < size:
        few = f"client {counts.argmin()} has {counts.min()} samples"
        raise ConfigError("data.samples_per_client", samples_per_client, f"fewer: {few}, and {size} are asked for")


def _check_training_rows(parts: Sequence[Rows], shared: Rows, file: str) -> None:
    """Checks that no client holds a row of the test part."""
    for client, rows in enumerate(parts):
        outside = np.setdiff1d(rows, shared)
        if len(outside):
            allowed = f'rows of the training part with data.split = "official"; client {client} has row {outside[0]}'
            raise ConfigError("data.partition.file", file, allowed)


def _official_parts(dataset: Dataset, share: float | None, seed: int) -> tuple[Rows, Rows]:
    """The rows of the training part and of the test part: the source's own test part, or the given share."""
    if dataset.train_rows is None:
        if share is None:
            lacks = f"{dataset.name} has no test part of its own{_besides(dataset)}"
            raise ConfigError("data.split", "official", f'{lacks}; use "merge", or give data.test_part_share')
        return set_aside(dataset.labels, share, seed)
    if share is not None:
        raise ConfigError("data.test_part_share", share, f"{dataset.name} has a test part of its own; leave it out")
    return np.arange(dataset.train_rows), np.arange(dataset.train_rows, len(dataset.labels))


def _besides(dataset: Dataset) -> str:
    """The end of an error about missing data: what the source has, but nothing reads."""
    return f" (left out: {', '.join(dataset.left_out)})" if dataset.left_out else ""


def _of_users_in_both(
    users: Int[np.ndarray, " samples"], train: Rows, test: Rows, name: str
) -> tuple[Rows, tuple[str, ...]]:
    """The training rows of the users that also have test rows, and a note on the others, who could not be tested."""
    tested = np.isin(users[train], users[test])
    if not tested.any():
        allowed = f'{name} has no user with samples in both parts (it was split by users); use "merge"'
        raise ConfigError("data.split", "official", allowed)
    there, without = len(np.unique(users[train])), len(np.unique(users[train[~tested]]))
    note = f"{counted(without, 'user')} of {there} without test samples: left out"
    return train[tested], (note,) if without else ()


def _with_test_samples(training: int | None, test_share: float, clients: int, samples: int) -> int | None:
    """The total size of a client with this number of training samples, its test samples included."""
    if training is None:
        return None
    size = max(math.ceil(training / (1 - test_share) - 1e-9), training + 1)
    if size * clients > samples:
        held = samples // clients
        most = min(math.floor((held + 1e-9) * (1 - test_share)), held - 1)
        allowed = f"up to {most}: {samples} samples, {clients} clients, test_share = {test_share}"
        raise ConfigError("data.samples_per_client", training, allowed)
    return size


def _new_last(parts: Sequence[Rows], new: int, seed: int) -> list[Rows]:
    """The clients' rows, with ``new`` clients, drawn at random, moved to the end."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, 0, 0)))
    drawn = np.sort(rng.choice(len(parts), new, replace=False))
    return [parts[client] for client in (*np.setdiff1d(np.arange(len(parts)), drawn), *drawn)]
