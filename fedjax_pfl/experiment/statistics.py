"""Statistics of the difference between two methods: intervals and tests over seeds, and over clients."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

# The power of the paired t-test for an effect of one standard deviation is 40 % with five seeds, 18 % with three.
ENOUGH_SEEDS = 5
_RESAMPLES = 2000
# Differences that are closer than this are equal: runs of earlier versions have their scores in float32.
_ROUNDING = 1e-7


class Difference(NamedTuple):
    """A paired difference.

    Attributes:
      mean: mean over the seeds that both have.
      low: lower end of the 95 % interval; NaN with fewer than two seeds, or if all differences are equal.
      high: upper end of the interval; NaN in the same cases.
      p: p-value of the two-sided paired t-test; NaN in the same cases.
      seeds: number of seeds that both have.
    """

    mean: float
    low: float
    high: float
    p: float
    seeds: int


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """The mean of first - second over common seeds, with Student's 95 % interval and test; None without common seeds.

    Args:
      first: seed -> figure.
      second: likewise.
    """
    from scipy import stats  # half a second

    gaps = np.array([first[seed] - second[seed] for seed in first if seed in second])
    if not len(gaps):
        return None
    mean, nan = float(gaps.mean()), float("nan")
    if len(gaps) < 2 or np.ptp(gaps) < _ROUNDING:  # no variance, so no test
        return Difference(mean, nan, nan, nan, len(gaps))
    half = float(stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps)))
    return Difference(mean, mean - half, mean + half, float(stats.ttest_1samp(gaps, 0.0).pvalue), len(gaps))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm, Scandinavian Journal of Statistics, 1979); NaNs are not counted."""
    p = np.asarray(p_values, float)
    corrected = np.full(len(p), np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    largest = 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, p[at] * (len(order) - rank)))
        corrected[at] = largest
    return corrected.tolist()


def bootstrap_over_clients(gaps: Sequence[Float[np.ndarray, " clients"]]) -> tuple[float, float] | None:
    """95 % percentile interval of a mean difference, by a bootstrap over clients.

    A client is drawn with its scores of all seeds, because it may be the same client in each seed (``data.seed``, users
    of the source). The interval does not include the variance over seeds; it shows how much the difference depends on
    which clients there happened to be. From one client alone, this cannot be told.

    Args:
      gaps: for each seed, the differences of the clients' scores, the same number for each seed; NaN for a client
        without samples to be scored on. A seed without any score does not count.

    Returns:
      The two ends of the interval; None if fewer than two clients have scores.
    """
    rng = np.random.default_rng(0)
    of_seeds = [gap for gap in np.asarray(gaps, float) if not np.isnan(gap).all()]
    if not of_seeds:
        return None
    known = np.stack(of_seeds)[:, ~np.isnan(of_seeds).all(axis=0)]
    if known.shape[1] < 2:
        return None
    drawn = rng.integers(known.shape[1], size=(_RESAMPLES, known.shape[1]))

    def means(gaps: Float[np.ndarray, " clients"]) -> Float[np.ndarray, " resamples"]:
        scored = ~np.isnan(gaps)
        total, number = np.where(scored, gaps, 0.0)[drawn].sum(axis=1), scored[drawn].sum(axis=1)
        return np.where(number > 0, total / np.maximum(number, 1), np.nan)

    low, high = np.nanpercentile(np.mean([means(gaps) for gaps in known], axis=0), [2.5, 97.5])
    return float(low), float(high)
