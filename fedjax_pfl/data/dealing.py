"""Deals rows to clients: the steps that the kinds of partition share."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from fedjax_pfl.data.rows import Rows
from fedjax_pfl.errors import ConfigError

MIN_SAMPLES = 2  # the minimum per client of a partition that is drawn: one for training and one for testing
_NAMED = 5  # of many clients, an error names the first


class Partition(NamedTuple):
    """The rows of each client.

    Attributes:
      parts: for each client the numbers of its rows, int64, ascending.
      notes: one sentence for each request that could not be met; empty if all were met.
    """

    parts: list[Rows]
    notes: tuple[str, ...]


def rows_by_class(labels: Int[np.ndarray, " samples"]) -> list[Rows]:
    """The row numbers of each class that has samples, ascending, in the order of the classes."""
    _, counts = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def deal_rows(classes: list[Rows], counts: Int[np.ndarray, "clients classes"]) -> list[Rows]:
    """Gives each client its count of each class; the first client gets the first rows of a class, and so on."""
    clients = len(counts)
    owners = np.concatenate([np.repeat(np.arange(clients), column) for column in counts.T])
    rows = np.concatenate([rows[:total] for rows, total in zip(classes, counts.sum(axis=0), strict=True)])
    return np.split(rows[np.lexsort((rows, owners))], np.cumsum(counts.sum(axis=1))[:-1])


def _draw_rows(classes: list[Rows], counts: Int[np.ndarray, " classes"], rng: np.random.Generator) -> Rows:
    """The rows of one client, ascending: its count of each class, drawn at random."""
    drawn = [rng.choice(rows, count, replace=False) for rows, count in zip(classes, counts, strict=True)]
    return np.sort(np.concatenate(drawn))


def with_unused(
    dealt: Partition, supply: Int[np.ndarray, " classes"], held: Bool[np.ndarray, "clients classes"]
) -> Partition:
    """The partition; if classes without a holder were left out, with a first note that says so."""
    without = np.flatnonzero(held.sum(axis=0) == 0)
    if not len(without):
        return dealt
    unused = int(supply[without].sum())
    note = f"{counted(len(without), 'class')} had no holder; {counted(unused, 'sample')} stayed unused"
    return dealt._replace(notes=(note, *dealt.notes))


def deal_sizes(
    classes: list[Rows],
    proportions: Float[np.ndarray, "clients classes"],
    size: int,
    rng: np.random.Generator,
    overlap: bool = False,
) -> Partition:
    """Gives each client `size` rows in its class proportions, as closely as the data allow.

    With `overlap`, each client draws from all rows of a class; otherwise the rows are dealt out in order.
    """
    clients = len(proportions)
    targets = largest_remainder(proportions, np.full(clients, size), rng)
    supply = np.array([len(rows) for rows in classes])
    if overlap:
        asked = targets.max(axis=0)
        counts = np.concatenate([fit_to_supply(target[np.newaxis], supply, rng) for target in targets])
        parts = [_draw_rows(classes, count, rng) for count in counts]
    else:
        asked = targets.sum(axis=0)
        counts = fit_to_supply(targets, supply, rng)
        parts = deal_rows(classes, counts)
    replaced = int(np.maximum(targets - counts, 0).sum())
    if not replaced:
        return Partition(parts, ())
    short = int((asked > supply).sum())
    note = (
        f"{counted(short, 'class')} had fewer samples than asked for; "
        f"{replaced} of {clients * size} samples were taken from other classes instead"
    )
    return Partition(parts, (note,))


def fit_to_supply(
    targets: Int[np.ndarray, "clients classes"], supply: Int[np.ndarray, " classes"], rng: np.random.Generator
) -> Int[np.ndarray, "clients classes"]:
    """The counts that are nearest to `targets` (in the sum of absolute differences) and do not exceed any supply.

    A class with too many requests is cut to its supply, evenly for all clients that request it. Each client fills its
    gap from the rest of other classes: first from classes that it requests, so that its set of classes grows only if
    necessary. The result is nearest, because every solution must cut at least as much.
    """
    counts = targets.copy()
    short = targets.sum(axis=0) > supply
    counts[:, short] = largest_remainder(targets[:, short].T.astype(float), supply[short], rng).T
    missing = targets.sum(axis=1) - counts.sum(axis=1)
    spare = supply - counts.sum(axis=0)
    for allowed in (targets > 0, np.ones(targets.shape, bool)):
        for client in rng.permutation(np.flatnonzero(missing)):
            available = spare * allowed[client]
            filled = min(missing[client], available.sum())
            if filled:
                extra = largest_remainder(available[np.newaxis].astype(float), np.array([filled]), rng)[0]
                counts[client] += extra
                spare -= extra
                missing[client] -= filled
    return counts


def deal_classes(
    clients: int, classes_per_client: int, capacity: Float[np.ndarray, " classes"], rng: np.random.Generator
) -> Bool[np.ndarray, "clients classes"]:
    """Gives each client a random set of classes; the numbers of holders per class are as equal as possible.

    The capacity of a class is the number of holders for which its samples suffice; it is exceeded only if the
    capacities of all classes are used up.
    """
    C = len(capacity)
    slots = clients * classes_per_client
    holders = np.zeros(C, int)
    for limit in (np.floor(np.minimum(capacity, clients) + 1e-9).astype(int), np.full(C, clients)):
        # Raise all classes together until they reach their limits. Each pass but the last fills at least one class.
        while slots > holders.sum() and (holders < limit).any():
            below = rng.permutation(np.flatnonzero(holders < limit))
            step, rest = divmod(slots - holders.sum(), len(below))
            if step:
                holders[below] = np.minimum(holders[below] + step, limit[below])
            else:
                holders[below[:rest]] += 1

    # Each client takes the classes that still need the most holders, so that no class needs more holders than there are
    # clients left. Random numbers break ties, which makes the sets random.
    held = np.zeros((clients, C), bool)
    for client in rng.permutation(clients):
        ranking = np.argsort(-(holders + rng.random(C)))
        held[client, ranking[:classes_per_client]] = True
        holders -= held[client]
    return held


def dirichlet_shares(
    beta: float, shape: tuple[int, int], rng: np.random.Generator
) -> Float[np.ndarray, "draws outcomes"]:
    """Draws from the symmetric Dirichlet distribution, one per row, for any beta in (0, 1e6].

    NumPy's own sampler normalises gamma variates, which underflow for a small beta. Here their logarithms are used, by
    Gamma(b) = Gamma(b + 1) U^(1/b) (Marsaglia and Tsang 2000), where -log U is exponential. The logarithms are kept
    multiplied by beta, so that dividing by beta cannot give inf - inf.
    """
    scaled = beta * np.log(rng.standard_gamma(beta + 1, shape)) - rng.standard_exponential(shape)
    with np.errstate(over="ignore"):  # -inf is a share of 0
        weights = np.exp((scaled - scaled.max(axis=1, keepdims=True)) / beta)
    return weights / weights.sum(axis=1, keepdims=True)


def largest_remainder(
    weights: Float[np.ndarray, "rows cells"], totals: Int[np.ndarray, " rows"], rng: np.random.Generator
) -> Int[np.ndarray, "rows cells"]:
    """Whole numbers in proportion to the weights of a row (not all 0), which add up exactly to the row's total.

    Every number is its exact share rounded down or up; the shares with the largest fractions are rounded up. Random
    numbers decide between equal fractions, because otherwise the first cells would always win.
    """
    exact = totals[:, np.newaxis] * (weights / weights.sum(axis=1, keepdims=True))
    counts = np.floor(exact).astype(int)
    fractions = np.round(exact - counts, 9)  # equal fractions must not differ by float error
    order = np.lexsort((rng.random(weights.shape), -fractions))
    rank = np.argsort(order, axis=1)
    return counts + (rank < (totals - counts.sum(axis=1))[:, np.newaxis])


def repair(parts: Sequence[Rows], least: int, rng: np.random.Generator) -> Partition:
    """Moves random samples from the largest clients to clients with fewer than `least`.

    Each sample comes from the client that is the largest at that moment, so that sizes change as little as possible.

    Args:
      parts: for each client the numbers of its rows; not changed.
      least: the minimum number of samples of every client.
      rng: chooses the samples that move.

    Returns:
      A `Partition` of the same rows, with a note if any were moved.

    Raises:
      ConfigError: field ``data.clients``: there are fewer than ``least`` samples per client.
    """
    sizes = [len(part) for part in parts]
    if sum(sizes) < least * len(parts):
        at_most = sum(sizes) // least
        then = f", so at most {at_most}" if at_most else ": ask for fewer of them, or bring more samples"
        allowed = f"{least} samples per client are needed and there are {sum(sizes)}{then}"
        raise ConfigError("data.clients", len(parts), allowed)
    missing = {client: least - size for client, size in enumerate(sizes) if size < least}
    if not missing:
        return Partition([np.sort(part) for part in parts], ())

    moved = sum(missing.values())
    donors = [(-size, client) for client, size in enumerate(sizes) if size > least]  # a heap, the largest first
    heapq.heapify(donors)
    for _ in range(moved):
        negative_size, client = donors[0]
        heapq.heapreplace(donors, (negative_size + 1, client))

    repaired, pool = list(parts), []
    for negative_size, client in donors:
        kept, given = np.split(rng.permutation(parts[client]), [-negative_size])
        repaired[client] = kept
        pool.append(given)
    gifts = np.split(rng.permutation(np.concatenate(pool)), np.cumsum(list(missing.values()))[:-1])
    for client, gift in zip(missing, gifts, strict=True):
        repaired[client] = np.concatenate([parts[client], gift])
    note = (
        f"{counted(len(missing), 'client')} had fewer than {least} samples; "
        f"{counted(moved, 'sample')} from the largest clients went to them"
    )
    return Partition([np.sort(part) for part in repaired], (note,))


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 client, 2 clients, 2 classes."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def named(clients: Sequence[int] | Rows) -> str:
    """Clients by their numbers, the first five of many: client 3; clients 0, 3, 5, 6, 9 and 2 more."""
    shown = ", ".join(map(str, clients[:_NAMED]))
    more = f" and {len(clients) - _NAMED} more" if len(clients) > _NAMED else ""
    return f"client{'' if len(clients) == 1 else 's'} {shown}{more}"
