"""Partitions: which rows of a data set each client holds.

A kind of partition is a function ``kind(labels, clients, seed, size, *, ...) -> Partition`` in the table `PARTITIONS`.
Its keyword-only arguments are the schema of the config table ``data.partition``. All kinds share these rules:

- `labels` is int ``[samples]``, and a partition consists of its row numbers. No row belongs to two clients, unless
  `overlap` is set: each client then draws its rows independently of the others, each row at most once. `natural` gets
  the users of the samples instead of the labels. `indices` takes the rows from a file.
- `size` is the number of samples of every client; None divides all samples.
- The result depends on the arguments only, and every loop is bounded: a client with fewer than two samples (one for
  training, one for testing) is repaired; only ``"pfllib"`` of `dirichlet` draws again, up to ten times, before that.
- If the data cannot give what was asked for, a note in the result says so.
- Bad arguments raise a `ConfigError` that names the field of the config.

`fedjax_pfl/data/dealing.py` has the steps that the kinds share; `fedjax_pfl/data/split.py` then divides each client's
rows into training, validation and test rows.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from jaxtyping import Int

from fedjax_pfl.data.dealing import (
    MIN_SAMPLES,
    Partition,
    counted,
    deal_classes,
    deal_rows,
    deal_sizes,
    dirichlet_shares,
    largest_remainder,
    repair,
    rows_by_class,
    with_unused,
)
from fedjax_pfl.data.listed import partition_of
from fedjax_pfl.data.rows import Rows, read
from fedjax_pfl.errors import ConfigError

# PFLlib's settings: a client's test share of 1 - 0.75 should fill one batch of 10, hence at least 40 samples.
_PFLLIB_LEAST = 40
_PFLLIB_TRIES = 10

# Number of classes -> groups of dominant classes: those of FedPAC's code, and for 100 classes those of FedMate's code,
# which builds on it. With G groups, client i mostly holds the classes of group i mod G.
_FEDPAC_GROUPS: dict[int, tuple[tuple[int, ...], ...]] = {
    10: ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0)),
    100: tuple(tuple(range(first, first + 10)) for first in range(0, 100, 10)),
}


# --- Kinds of partition ----------------------------------------------------------------------------------------------


def iid(labels: Int[np.ndarray, " samples"], clients: int, seed: int, size: int | None) -> Partition:
    """Shuffled equal shares.

    Args:
      labels: int ``[samples]``; only their number matters here.
      clients: number of clients.
      seed: seed of the shuffle.
      size: samples per client; None divides all samples, with sizes that differ by at most one.

    Returns:
      A `Partition` without notes.

    Raises:
      ConfigError: there are too few samples.
    """
    _check_request(labels, clients, seed, size)
    order = np.random.default_rng(seed).permutation(len(labels))
    if size is not None:
        order = order[: clients * size]
    return Partition([np.sort(part) for part in np.array_split(order, clients)], ())


def pathological(
    labels: Int[np.ndarray, " samples"],
    clients: int,
    seed: int,
    size: int | None,
    *,
    classes_per_client: Annotated[int, Ge(1)] = 2,
    style: Literal["random", "pfllib"] = "random",
    overlap: bool = False,
) -> Partition:
    """Each client holds samples of a few classes only (McMahan et al. 2017, arXiv:1602.05629, shards of classes).

    Args:
      labels: int ``[samples]``.
      clients: number of clients.
      seed: seed of all draws.
      size: samples per client, in equal shares of its classes; None divides each class evenly among its holders.
      classes_per_client: number of classes of a client.
      style: ``"random"`` gives each client a random set of classes, so that all classes have about equally many holders
        (at least one if ``clients * classes_per_client`` allows it). ``"pfllib"`` is the ``pat`` of PFLlib
        (``separate_data`` with ``balance=False``, its default) sample by sample: groups of consecutive clients with the
        same classes and random unequal shares. It has no `size`. It rounds the number of holders of a class up, so that
        the last classes have none if the number of classes does not divide ``clients * classes_per_client`` (12 clients
        with 2 classes each hold 8 of 10 classes).
      overlap: whether each client draws its rows from all rows of its classes, so that two clients may hold the same
        row, as in the code of FedPAC and FedMate (with a `size` of 2,499 and three classes: 833 of each); only for
        ``"random"`` and with a `size`.

    Returns:
      A `Partition`. Rows of a class without a holder are left out, with a note.

    Raises:
      ConfigError: there are too few samples, fewer classes than `classes_per_client`, `overlap` is not possible, or
        `size` is given with ``"pfllib"``.
    """
    _check_request(labels, clients, seed, size, overlap)
    if overlap and style == "pfllib":
        raise ConfigError("data.partition.overlap", True, "false with style 'pfllib', which deals each sample once")
    if overlap and size is None:
        raise ConfigError("data.samples_per_client", None, "a number; clients that overlap are equal in size")
    classes = rows_by_class(labels)
    supply = np.array([len(rows) for rows in classes])
    if not 1 <= classes_per_client <= len(classes):
        allowed = f"the data have samples of {len(classes)} classes, so 1 to {len(classes)} are possible"
        raise ConfigError("data.partition.classes_per_client", classes_per_client, allowed)
    if style == "pfllib":
        _check_no_size(size)
        counts = _pfllib_pathological(supply, clients, seed, classes_per_client)
        repaired = repair(deal_rows(classes, counts), MIN_SAMPLES, np.random.default_rng(seed))
        return with_unused(repaired, supply, counts > 0)

    rng = np.random.default_rng(seed)
    classes = [rng.permutation(rows) for rows in classes]
    ask = 1.0 if size is None else size / classes_per_client  # the smallest number that one holder takes of a class
    capacity = np.full(len(classes), float(clients)) if overlap else np.maximum(supply / ask, 1)
    held = deal_classes(clients, classes_per_client, capacity, rng)
    if size is not None:
        return deal_sizes(classes, held.astype(float), size, rng, overlap)
    counts = np.zeros(held.shape, int)
    has_holder = held.any(axis=0)
    counts[:, has_holder] = largest_remainder(held[:, has_holder].T.astype(float), supply[has_holder], rng).T
    return with_unused(repair(deal_rows(classes, counts), MIN_SAMPLES, rng), supply, held)


def dirichlet(
    labels: Int[np.ndarray, " samples"],
    clients: int,
    seed: int,
    size: int | None,
    *,
    beta: Annotated[float, Gt(0), Le(1e6)] = 0.1,
    style: Literal["plain", "pfllib"] = "plain",
    min_samples: Annotated[int, Ge(2)] = MIN_SAMPLES,
) -> Partition:
    """Label skew by Dirichlet draws.

    Without `size`, each class is divided among the clients in proportions ~ Dir(beta) (Yurochkin et al. 2019,
    arXiv:1905.12022). With `size`, each client has its own label proportions ~ Dir(beta) and all clients are equal in
    size (Hsu et al. 2019, arXiv:1909.06335).

    Args:
      labels: int ``[samples]``.
      clients: number of clients.
      seed: seed of all draws.
      size: samples per client, or None.
      beta: concentration; small means few clients per class.
      style: ``"plain"`` is the above. ``"pfllib"`` is the ``dir`` of PFLlib (``separate_data``) sample by sample:
        clients that have reached the mean size get no more classes, and the draw is repeated until the smallest client
        has 40 samples (or half the mean size, if less); after 10 tries the last draw is repaired. It has no `size`.
      min_samples: the minimum number of samples of each client. If a draw gives a client fewer, samples of the largest
        clients are moved to it. Not for `size` and ``"pfllib"``, which determine the sizes themselves.

    Returns:
      A `Partition`. Without `size` it covers every row.

    Raises:
      ConfigError: there are too few samples, `min_samples` is not allowed, or `size` is given with ``"pfllib"``.
    """
    _check_request(labels, clients, seed, size)
    if min_samples != MIN_SAMPLES and (size is not None or style == "pfllib"):
        allowed = f"{MIN_SAMPLES} with data.samples_per_client or style = 'pfllib', which say how many a client has"
        raise ConfigError("data.partition.min_samples", min_samples, allowed)
    classes = rows_by_class(labels)
    if style == "pfllib":
        _check_no_size(size)
        return _pfllib_dirichlet(classes, clients, seed, beta)

    rng = np.random.default_rng(seed)
    classes = [rng.permutation(rows) for rows in classes]
    if size is not None:
        return deal_sizes(classes, dirichlet_shares(beta, (clients, len(classes)), rng), size, rng)
    supply = np.array([len(rows) for rows in classes])
    counts = largest_remainder(dirichlet_shares(beta, (len(classes), clients), rng), supply, rng).T
    return repair(deal_rows(classes, counts), min_samples, rng)


def weak_pathological(
    labels: Int[np.ndarray, " samples"],
    clients: int,
    seed: int,
    size: int | None,
    *,
    s: Annotated[float, Ge(0), Le(100)] = 20.0,
    dominant_classes: Annotated[int, Ge(1)] | None = None,
    style: Literal["random", "fedpac"] = "random",
    overlap: bool = False,
) -> Partition:
    """A share of each client's samples is uniform over all classes, the rest comes from a few dominant classes.

    The setting of FedPAC (Xu, Tong and Huang 2023, arXiv:2306.11867), which FedeCouple also uses.

    Args:
      labels: int ``[samples]``.
      clients: number of clients.
      seed: seed of all draws.
      size: samples per client; must be given.
      s: percentage of uniform samples, 0 to 100.
      dominant_classes: number of dominant classes of a client, which share the rest evenly. None: 30 % of the classes
        if there are up to 20, at least one (3 of 10), else a tenth (10 of 100).
      style: ``"random"`` gives random sets of dominant classes: each class is dominant for about equally many clients,
        as far as its samples suffice. ``"fedpac"`` has the groups of FedPAC's code: with ten classes, client i has
        group i mod 5 of {0,1,2}, {2,3,4}, {4,5,6}, {6,7,8}, {8,9,0}; with a hundred classes, as in FedMate's code,
        group i mod 10 of {0..9}, {10..19} and so on.
      overlap: whether each client draws its rows of a class from all rows of the class, so that two clients may hold
        the same row. In FedPAC's code clients overlap if a class runs out, which is then dealt from its start again.

    Returns:
      A `Partition` into equal sizes; a note says if a class ran out and was replaced by others.

    Raises:
      ConfigError: `size` is missing, there are too few samples, `dominant_classes` is out of range; or, for
        ``"fedpac"``, there are neither ten nor a hundred classes, or `dominant_classes` does not fit the groups.
    """
    _check_request(labels, clients, seed, size, overlap)
    if size is None:
        raise ConfigError("data.samples_per_client", None, "a number; weak_pathological clients are equal in size")
    rng = np.random.default_rng(seed)
    classes = [rng.permutation(rows) for rows in rows_by_class(labels)]
    C = len(classes)
    uniform = s / 100

    if style == "fedpac":
        if C not in _FEDPAC_GROUPS:
            raise ConfigError("data.partition.style", style, f"'fedpac' needs 10 or 100 classes, the data have {C}")
        groups = _FEDPAC_GROUPS[C]
        if dominant_classes not in (None, len(groups[0])):
            allowed = f"style 'fedpac' has {len(groups[0])} of {C}; leave it out"
            raise ConfigError("data.partition.dominant_classes", dominant_classes, allowed)
        held = np.zeros((clients, C), bool)
        for client in range(clients):
            held[client, list(groups[client % len(groups)])] = True
    else:
        default = max(1, round(0.3 * C)) if C <= 20 else C // 10
        dominant = default if dominant_classes is None else dominant_classes
        if not 1 <= dominant <= C:
            raise ConfigError("data.partition.dominant_classes", dominant, f"1 to {C}, the number of classes")
        supply = np.array([len(rows) for rows in classes])
        left = np.maximum(supply - clients * size * uniform / C, 0)
        ask = size * (1 - uniform) / dominant
        capacity = np.full(C, float(clients)) if overlap or not ask else left / ask
        held = deal_classes(clients, dominant, capacity, rng)

    proportions = uniform / C + (1 - uniform) * held / held.sum(axis=1, keepdims=True)
    return deal_sizes(classes, proportions, size, rng, overlap)


def natural(users: Int[np.ndarray, " samples"], clients: int, seed: int, size: int | None) -> Partition:
    """Each client is one user of the source, such as a writer or a role, and holds the samples of this user.

    Args:
      users: int ``[samples]``, the user of each sample.
      clients: number of users taken, at random from those with at least two samples, or at least `size` if given.
        (Taking the largest users would be biased.) If it is the number of all users, all are taken, whatever they have.
      seed: seed of the draw.
      size: samples per client, taken at random from those of its user; None takes all.

    Returns:
      A `Partition`; the clients are in the order of their users. A note says how many users had too few samples.

    Raises:
      ConfigError: there are fewer such users than `clients`, or `size` is below two.
    """
    least = MIN_SAMPLES if size is None else size
    if least < MIN_SAMPLES:
        raise ConfigError("data.samples_per_client", size, f"{MIN_SAMPLES} or more")
    everyone = rows_by_class(users)
    held = [rows for rows in everyone if len(rows) >= least]
    if size is None and clients == len(everyone):
        held = everyone
    if not 1 <= clients <= len(held):
        allowed = f"1 to {len(held)}, the number of users with {least} samples or more, and test samples if split apart"
        raise ConfigError("data.clients", clients, allowed if size is not None else f"{allowed}; or that of all users")
    rng = np.random.default_rng(seed)
    taken = [held[user] for user in np.sort(rng.choice(len(held), clients, replace=False))]
    if size is not None:
        taken = [np.sort(rng.choice(rows, size, replace=False)) for rows in taken]
    few = len(everyone) - len(held)
    note = f"{counted(few, 'user')} of {len(everyone)} with fewer than {least} samples to divide: left out"
    return Partition(taken, (note,) if few else ())


def indices(labels: Int[np.ndarray, " samples"], clients: int, seed: int, size: int | None, *, file: str) -> Partition:
    """Each client has the rows that a file lists: the rows of an earlier run with the same split, or your own lists.

    Args:
      labels: int ``[samples]``, of all rows of the source, a test part after the training part; files number these
        rows.
      clients: number of clients, as in the file.
      seed: not used, because nothing is drawn.
      size: must be None for lists; not used for the file of a run.
      file: the ``partition.npz`` of a run directory, or an npz file with the rows of client i under the name i (see
        `fedjax_pfl.data.rows`).

    Returns:
      A `Partition`; for a run's file, the split into training, validation and test rows is taken from the file.

    Raises:
      ConfigError: the file cannot be read, has another number of clients, or has rows that the data do not have. Lists:
        two clients share a row, one has a row twice or no row, or `size` is given. The file of a run: a client has a
        row twice or none to train on; no client has a test row; the pooled test set is empty; or a row is for training
        (or validation) and for testing.
    """
    return partition_of(read(file), labels, clients, size, file)


# --- PFLlib's counts -------------------------------------------------------------------------------------------------


def _pfllib_least(samples: int, clients: int) -> int:
    """PFLlib's ``least_samples``: the minimum per client that its partitions aim at."""
    return int(min(_PFLLIB_LEAST, samples / clients / 2))


def _pfllib_pathological(
    supply: Int[np.ndarray, " classes"], clients: int, seed: int, classes_per_client: int
) -> Int[np.ndarray, "clients classes"]:
    """The number of samples of each class that PFLlib's ``pat`` gives each client, with its random numbers."""
    rng = np.random.RandomState(seed)
    C = len(supply)
    least = _pfllib_least(int(supply.sum()), clients)
    quota = np.full(clients, classes_per_client)
    counts = np.zeros((clients, C), int)
    for k, samples in enumerate(supply):
        holders = np.flatnonzero(quota)[: math.ceil(clients / C * classes_per_client)]
        if not len(holders):
            break  # every client has its classes; PFLlib leaves out the other classes
        mean = samples / len(holders)
        # PFLlib draws from [low, high) and fails on an empty range; there, each holder gets the mean.
        high = int(mean)
        low = min(int(max(mean / 10, least / C)), high)
        counts[holders[:-1], k] = rng.randint(low, max(high, low + 1), len(holders) - 1)
        counts[holders[-1], k] = samples - counts[:, k].sum()
        quota[holders] -= 1
    return counts


def _pfllib_dirichlet(classes: list[Rows], clients: int, seed: int, beta: float) -> Partition:
    """PFLlib's ``dir`` with its random numbers, but with at most `_PFLLIB_TRIES` draws and then a repair."""
    rng = np.random.RandomState(seed)
    samples = sum(len(rows) for rows in classes)
    least = _pfllib_least(samples, clients)
    for _ in range(_PFLLIB_TRIES):
        shuffled = [rows.copy() for rows in classes]
        counts = np.zeros((clients, len(classes)), int)
        for k, rows in enumerate(shuffled):
            rng.shuffle(rows)
            below_mean = counts.sum(axis=1) < samples / clients
            shares = np.where(below_mean, rng.dirichlet(np.full(clients, beta)), 0.0)
            # A small beta underflows to 0, NaN or inf. Its limit is one random client that takes all.
            if not 0 < shares.sum() < np.inf:
                shares = np.eye(clients)[rng.choice(np.flatnonzero(below_mean))]
            cuts = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
            counts[:, k] = np.diff(cuts, prepend=0, append=len(rows))
        if counts.sum(axis=1).min() >= least:
            break
    return repair(deal_rows(shuffled, counts), max(least, MIN_SAMPLES), np.random.default_rng(seed))


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check_request(
    labels: Int[np.ndarray, " samples"], clients: int, seed: int, size: int | None, overlap: bool = False
) -> None:
    """Raises a ConfigError unless there are enough samples for this number of clients of this size."""
    samples = len(labels)
    if samples < MIN_SAMPLES:
        raise ConfigError("data.clients", clients, f"possible with {MIN_SAMPLES} samples or more, there is {samples}")
    if not 1 <= clients <= samples // MIN_SAMPLES:
        allowed = f"1 to {samples // MIN_SAMPLES}, because {samples} samples must give each client {MIN_SAMPLES}"
        raise ConfigError("data.clients", clients, allowed)
    most = samples if overlap else samples // clients
    if size is not None and not MIN_SAMPLES <= size <= most:
        why = f"there are {samples} samples" if overlap else f"{clients} clients share {samples} samples"
        raise ConfigError("data.samples_per_client", size, f"{MIN_SAMPLES} to {most}, because {why}")


def _check_no_size(size: int | None) -> None:
    """Raises a ConfigError if a size is given to a style that cannot use it."""
    if size is not None:
        allowed = "another style with data.samples_per_client: 'pfllib' shares out all samples"
        raise ConfigError("data.partition.style", "pfllib", allowed)


def overlaps(partition: Mapping[str, Any]) -> bool:
    """Whether clients may hold the same rows; of a user's own kind they never do, whatever its options are called."""
    return partition["kind"] in ("pathological", "weak_pathological") and bool(partition.get("overlap"))


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "pathological": pathological,
    "dirichlet": dirichlet,
    "weak_pathological": weak_pathological,
    "natural": natural,
    "indices": indices,
}
