"""From a data set in one piece to a federation: who trains on, validates on and is tested on which samples."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.federated import Clients, Federation, pack
from fedjax_pfl.data.partition import PARTITIONS, Rows
from fedjax_pfl.data.split import draw_test, manifest, own_test, set_aside, short_of_test_rows, split_rows
from fedjax_pfl.errors import ConfigError

# Samples of the pooled test set per block; a block is evaluated like a client.
_POOLED_BLOCK = 512


def divide(
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
    evaluate_on: Literal["test", "validation"] = "test",
    new_clients: float = 0.0,
    samples_per_client: int | None = None,
    seed: int,
) -> tuple[Federation, dict[str, Any]]:
    """Shares a data set out among clients.

    Args:
      dataset: the samples, which the federation holds once.
      clients: N.
      partition: the kind of partition and its options, ``{"kind": "dirichlet", "beta": 0.1}``; see `PARTITIONS`.
      split: ``"merge"`` shares all rows out and splits each client's; ``"official"`` shares the training part out and
        draws each client's test rows from the test part (`draw_test`), or takes those of its user (`own_test`).
      test_part_share: share of each class that becomes the test part of a source without one; for ``"official"``.
      test_share: share of a client's rows that it is tested on.
      test_classes: classes that ``"official"`` tests a client on, all that it holds or the dominant ones (`draw_test`).
      validation_share: share of a client's training rows that methods may select on.
      stratified: whether ``"merge"`` splits each class of a client in these shares (`split_rows`).
      evaluate_on: which of the two the federation's ``test`` and ``pooled`` hold.
      new_clients: share of the clients, drawn at random and numbered last, that never train.
      samples_per_client: training rows (validation included) of each client; all rows are shared out unless given.
      seed: seed of test part, partition, split and the choice of new clients.

    Returns:
      The federation, and the manifest that ``partition.json`` holds (see `manifest`).

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
        raise ConfigError("data.partition.kind", kind, f"{dataset.name} has no users; use one of {others}")

    # 1. The rows that are shared out, and how many of them a client gets.
    if official:
        shared, test_part = _official_parts(dataset, test_part_share, seed)
        if natural:
            shared = _of_users_in_both(groups, shared, test_part, dataset.name)
        size = samples_per_client
    else:
        shared, test_part = np.arange(len(dataset.labels)), None
        size = _with_test_samples(samples_per_client, test_share, clients, len(shared))

    # 2. Each client's rows, those of new clients last.
    dealt = PARTITIONS[kind](groups[shared], clients, seed, size, **options)
    dealt = dealt._replace(parts=_new_last([shared[part] for part in dealt.parts], new, seed))

    # 3. What each client does with them.
    held_out = {"test_share": test_share, "validation_share": validation_share}
    if test_part is None:
        splits = split_rows(dataset.labels, dealt.parts, seed, stratified=stratified, **held_out)
    elif natural:
        splits = own_test(groups, dealt.parts, test_part, seed, validation_share=validation_share)
    else:
        splits = draw_test(dataset.labels, dealt.parts, test_part, seed, test_classes=test_classes, **held_out)
        dealt = dealt._replace(notes=(*dealt.notes, *short_of_test_rows(splits, test_share)))

    # 4. What the global model is evaluated on: of a test part all rows, also those that no client is tested on.
    if evaluate_on == "test" and test_part is not None and not natural:
        pooled = test_part
    else:
        pooled = np.sort(np.concatenate([getattr(rows, evaluate_on) for rows in splits]))
    if not len(pooled):  # of test rows each client has one at least
        largest = max(len(rows.train) for rows in splits)
        allowed = f"a larger share: of {largest} training samples or fewer per client it leaves none to validate on"
        raise ConfigError("data.validation_share", validation_share, allowed)

    # 5. As index tables, for the device.
    def tables(rows: Sequence[Rows]) -> Clients:
        return pack(rows, dataset.labels, dataset.classes)

    federation = Federation(
        x=jnp.asarray(dataset.images),
        y=jnp.asarray(dataset.labels, jnp.int32),
        train=tables([rows.train for rows in splits]),
        validation=tables([rows.validation for rows in splits]) if validation_share else None,
        test=tables([getattr(rows, evaluate_on) for rows in splits]),
        pooled=tables(np.array_split(pooled, math.ceil(len(pooled) / _POOLED_BLOCK))),
    )
    if new:
        note = f"clients {clients - new} to {clients - 1} are new: they never train"
        dealt = dealt._replace(notes=(*dealt.notes, note))
    return federation, manifest(dataset.labels, dataset.classes, dealt, splits)


def count_new(share: float, clients: int) -> int:
    """The number of clients that never train.

    Raises:
      ConfigError: field ``data.new_clients``: the share is not 0, and yet means none or all of the clients.
    """
    new = round(share * clients)
    if share and not 0 < new < clients:
        raise ConfigError("data.new_clients", share, f"0, or a share that is some of the {clients} clients, not all")
    return new


def _official_parts(dataset: Dataset, share: float | None, seed: int) -> tuple[Rows, Rows]:
    """The rows of the training part and of the test part, which is the source's own or the given share."""
    if dataset.train_rows is None:
        if share is None:
            allowed = f'{dataset.name} has no test part of its own; use "merge", or give data.test_part_share'
            raise ConfigError("data.split", "official", allowed)
        return set_aside(dataset.labels, share, seed)
    if share is not None:
        raise ConfigError("data.test_part_share", share, f"{dataset.name} has a test part of its own; leave it out")
    return np.arange(dataset.train_rows), np.arange(dataset.train_rows, len(dataset.labels))


def _of_users_in_both(users: Int[np.ndarray, " samples"], train: Rows, test: Rows, name: str) -> Rows:
    """The training rows of the users who are in the test part, too: the others could not be tested on their own."""
    rows: Rows = train[np.isin(users[train], users[test])]
    if not len(rows):
        allowed = f'{name} has no user with samples in both parts (it was split by users); use "merge"'
        raise ConfigError("data.split", "official", allowed)
    return rows


def _with_test_samples(training: int | None, test_share: float, clients: int, samples: int) -> int | None:
    """The size of a client that has so many training samples, when its test samples come on top of them."""
    if training is None:
        return None
    size = math.ceil(training / (1 - test_share) - 1e-9)
    if size * clients > samples:
        most = math.floor(samples // clients * (1 - test_share))
        allowed = f"up to {most}: {samples} samples, {clients} clients, test_share = {test_share}"
        raise ConfigError("data.samples_per_client", training, allowed)
    return size


def _new_last(parts: Sequence[Rows], new: int, seed: int) -> list[Rows]:
    """The clients' rows, those of so many clients drawn at random at the end."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, 0, 0)))
    drawn = np.sort(rng.choice(len(parts), new, replace=False))
    return [parts[client] for client in (*np.setdiff1d(np.arange(len(parts)), drawn), *drawn)]
