"""Intervals and tests against SciPy, by hand, and in the limit."""

import numpy as np
import pytest
from scipy import stats

from fedjax_pfl.experiment.statistics import bootstrap_over_clients, holm, paired_difference

FIRST = {0: 0.61, 1: 0.7, 2: 0.66, 3: 0.8, 7: 0.1}
SECOND = {3: 0.75, 2: 0.6, 1: 0.71, 0: 0.55, 9: 0.9}


def test_a_difference_is_paired_by_the_seeds_that_both_have():
    found = paired_difference(FIRST, SECOND)
    gaps = np.array([FIRST[seed] - SECOND[seed] for seed in range(4)])
    test = stats.ttest_rel([FIRST[seed] for seed in range(4)], [SECOND[seed] for seed in range(4)])
    interval = test.confidence_interval(0.95)
    expected = (gaps.mean(), interval.low, interval.high, test.pvalue)
    assert (found.mean, found.low, found.high, found.p) == pytest.approx(expected)
    assert found.seeds == 4


def test_without_spread_or_pairs_there_is_no_test():
    assert paired_difference({0: 0.5}, {1: 0.5}) is None
    for first in ({0: 0.5}, {0: 0.5, 1: 0.7, 2: 0.6}):
        found = paired_difference(first, {seed: value - 0.1 for seed, value in first.items()})
        assert found.mean == pytest.approx(0.1)
        assert np.isnan([found.low, found.high, found.p]).all()


def test_holm_by_hand():
    # Rising: 4 * 0.01, 3 * 0.02, then 2 * 0.02 may not fall below it, and 1 * 0.5.
    assert holm([0.5, 0.01, float("nan"), 0.02, 0.02]) == pytest.approx([0.5, 0.04, np.nan, 0.06, 0.06], nan_ok=True)
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]


def test_holm_keeps_the_family_wise_error():
    rng = np.random.default_rng(0)
    wrong = np.mean([min(holm(rng.uniform(size=15))) < 0.05 for _ in range(2000)])
    assert 0.03 < wrong < 0.065  # uncorrected it would be 54 %


def test_the_bootstrap_has_the_width_of_the_standard_error():
    rng = np.random.default_rng(1)
    gaps = rng.normal(0.02, [[0.1], [0.2]], (2, 4000))  # other clients in each run
    low, high = bootstrap_over_clients(list(gaps))
    error = np.sqrt(np.sum(gaps.var(axis=1) / 4000)) / 2
    middle = np.mean(gaps)
    assert (low, high) == pytest.approx((middle - 1.96 * error, middle + 1.96 * error), abs=0.12 * error)


def test_a_seed_without_scores_does_not_count():
    nobody, gaps = np.full(4, np.nan), np.array([0.1, 0.2, 0.3, 0.4])
    assert bootstrap_over_clients([nobody, gaps]) == bootstrap_over_clients([gaps])
    assert bootstrap_over_clients([nobody, nobody]) is None


def test_runs_with_the_same_clients_tell_no_more_of_them_than_one():
    gap = np.random.default_rng(1).normal(0.02, 0.1, 20)
    assert bootstrap_over_clients([gap] * 3) == pytest.approx(bootstrap_over_clients([gap]))


def test_one_client_tells_nothing_of_others():
    one = np.array([np.nan, 0.1, np.nan])
    assert bootstrap_over_clients([one]) is None
    assert bootstrap_over_clients([one, 2 * one]) is None
    assert bootstrap_over_clients([one, one[[1, 0, 2]]]) is not None  # two of them, each with one seed


def test_the_bootstrap_leaves_out_clients_without_samples():
    assert bootstrap_over_clients([np.array([0.1, np.nan, 0.1])]) == pytest.approx((0.1, 0.1))
    # Who is malicious may hang on the seed: the difference is the mean of the seeds' means, over others in each.
    gaps = np.random.default_rng(2).normal([[0.5], [0.1]], 0.01, (2, 1000))
    gaps[0, :900] = np.nan
    assert np.mean(bootstrap_over_clients(list(gaps))) == pytest.approx(0.3, abs=0.002)
    assert bootstrap_over_clients([np.array([np.nan])]) is None
    assert bootstrap_over_clients([]) is None
