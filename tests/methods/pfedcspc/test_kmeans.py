"""K-means per class against scikit-learn and plain NumPy; the means of random shares of the groups."""

import math
from fractions import Fraction
from functools import partial
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits, make_blobs

from fedjax_pfl.methods.pfedcspc import kmeans as kmeans_module
from fedjax_pfl.methods.pfedcspc.kmeans import Clusters, kmeans, sample_means
from tests import generator

RNG = np.random.default_rng(0)
KEY = generator.key(0)
C, J, R = 6, 3, 4
ONE, TWO = (0.1, -0.7), ((0.1, 0.2), (5.0, 5.1))  # all the different samples of class 1, of class 2; 3 has none
LABELS = np.repeat([0, 1, 2, 4, 5], [20, 7, 7, 1, 11])
HELD, CAPACITY = len(LABELS), 52


@partial(jax.jit, static_argnames="steps")
def compress(key, z, y, mask, share, steps):
    key_centres, key_draws = jax.random.split(key)
    groups = kmeans(key_centres, z, y, mask, classes=C, clusters=J, steps=steps)
    return groups, sample_means(key_draws, z, groups, repeats=R, share=share)


def samples():
    """Of class 0 and 5 all samples differ; they come in no order."""
    z = RNG.normal(0, 2, (HELD, 2))
    z[LABELS == 1] = ONE
    z[LABELS == 2] = np.array(TWO)[[0, 1, 0, 0, 1, 1, 1]]
    order = RNG.permutation(HELD)
    return z[order].astype(np.float32), LABELS[order].astype(np.int32)


Z, Y = samples()
GAPS = np.sort(RNG.permutation(CAPACITY)[:HELD])


def padded(fill=0.0, label=0, gaps=False):
    """Z and Y in a table of more rows than there are samples; with gaps, the padding is not at the end."""
    places = GAPS if gaps else np.arange(HELD)
    z, y, mask = np.full((CAPACITY, 2), fill, np.float32), np.full(CAPACITY, label, np.int32), np.zeros(CAPACITY)
    z[places], y[places], mask[places] = Z, Y, 1
    return z, y, mask.astype(np.float32)


def compressed(z, y, mask, *, key=KEY, share=0.8, steps=20):
    found = compress(key, jnp.asarray(z), jnp.asarray(y), jnp.asarray(mask), jnp.float32(share), steps=steps)
    return jax.tree.map(np.asarray, found)


def nearest(z, y, mask, centres):
    """The group of each sample: the nearest centre of its class; C J for padding."""
    groups = np.full(len(z), C * J)
    for row in np.flatnonzero(mask):
        groups[row] = y[row] * J + np.argmin(np.sum((z[row].astype(np.float64) - centres[y[row]]) ** 2, axis=1))
    return groups


def lloyd(z, y, mask, centres, steps):
    centres = np.array(centres, np.float64)
    for _ in range(steps):
        member = nearest(z, y, mask, centres)
        for group in np.unique(member[member < C * J]):
            centres[divmod(group, J)] = z[member == group].mean(axis=0, dtype=np.float64)
    return centres


# --- The groups ------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("classes", "clusters", "steps"))
def kmeans_per_key(keys, z, y, classes, clusters, steps):
    def one(key):
        return kmeans(key, z, y, jnp.ones(len(z)), classes=classes, clusters=clusters, steps=steps)

    return jax.vmap(one)(keys)


def separate_blobs():
    z, blob = make_blobs(300, 4, centers=12, cluster_std=0.5, random_state=0)
    return z, blob // 4, 4


def digits():
    """Real features without clear groups, 40 of each class."""
    z, y = load_digits(return_X_y=True)
    rows = np.concatenate([np.flatnonzero(y == c)[:40] for c in range(10)])
    return z[rows], y[rows], 3


@pytest.mark.parametrize(("data", "each"), [(separate_blobs, 1.001), (digits, 1.03)], ids=["blobs", "digits"])
def test_the_inertia_is_that_of_scikit_learn(data, each):
    z, y, clusters = data()
    seeds, classes = 12, y.max() + 1
    args = jnp.asarray(z, jnp.float32), jnp.asarray(y, jnp.int32)
    found = kmeans_per_key(jax.random.split(KEY, seeds), *args, classes=int(classes), clusters=clusters, steps=20)
    member, centres = np.asarray(found.member), np.asarray(found.centres).reshape(seeds, -1, z.shape[1])
    ours, theirs = np.zeros((2, classes))
    for seed in range(seeds):
        ours += np.bincount(y, np.sum((z - centres[seed, member[seed]]) ** 2, axis=1)) / seeds
        for c in range(classes):
            theirs[c] += KMeans(clusters, n_init=1, random_state=seed).fit(z[y == c]).inertia_ / seeds
    assert ours.sum() == pytest.approx(theirs.sum(), rel=0.01)
    assert np.all(ours < each * theirs)


def first_centre_odds(points, centres, candidates=3):
    """Greedy k-means++: the odds of each ordered choice of centres, by counting all draws of the candidates."""
    odds = {(): 1.0}
    distance = (points[:, None] - points) ** 2.0
    for _ in range(centres):
        longer = {}
        for chosen, p in odds.items():
            now = distance[:, list(chosen)].min(axis=1) if chosen else np.ones(len(points))
            left = distance if not chosen else np.minimum(distance, now[:, None])
            for drawn in product(range(len(points)), repeat=candidates):
                best = min(drawn, key=lambda i: left[:, i].sum())
                longer[(*chosen, best)] = longer.get((*chosen, best), 0) + p * np.prod(now[list(drawn)] / now.sum())
        odds = {chosen: p for chosen, p in longer.items() if p > 0}
    return odds


def test_the_first_centres_are_drawn_by_greedy_kmeans_plus_plus():
    draws, points = 4000, [np.array([0.0, 1.0, 2.6, 7.0]), np.array([-3.0, 0.0, 0.3, 11.0])]
    z, y = np.stack(points, axis=1).reshape(-1, 1), np.tile([0, 1], 4)
    args = jnp.asarray(z, jnp.float32), jnp.asarray(y, jnp.int32)
    # Three candidates for each of three centres, as in scikit-learn.
    keys = jax.random.split(KEY, draws)
    centres = np.asarray(kmeans_per_key(keys, *args, classes=2, clusters=3, steps=0).centres)[..., 0]
    for c in range(2):
        chosen = np.argmin(np.abs(centres[:, c, :, None] - points[c]), axis=-1)
        np.testing.assert_allclose(points[c][chosen], centres[:, c], rtol=1e-6)
        odds = first_centre_odds(points[c], 3)
        counts = dict.fromkeys(odds, 0)
        for choice in chosen:
            counts[tuple(choice)] += 1
        expected, seen = np.array(list(odds.values())) * draws, np.array(list(counts.values()))
        few = expected < 5
        if few.any():
            expected, seen = (np.append(a[~few], a[few].sum()) for a in (expected, seen))
        assert len(expected) > 5
        assert chisquare(seen, expected).pvalue > 1e-3


@pytest.mark.parametrize("steps", [1, 20])
def test_lloyds_steps_from_the_same_first_centres(steps):
    data, key = padded(fill=9.0, gaps=True), jax.random.key(2)  # three steps until nothing moves
    first = compressed(*data, key=key, steps=0)[0].centres
    found, _ = compressed(*data, key=key, steps=steps)
    centres = lloyd(*data, first, steps)
    held = found.size > 0
    np.testing.assert_allclose(found.centres[held], centres[held], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.member, nearest(*data, np.where(held[..., None], centres, np.inf)))
    np.testing.assert_array_equal(found.size.reshape(-1), np.bincount(found.member, minlength=C * J + 1)[:-1])
    moved = np.abs(lloyd(*data, centres, 1) - centres)[held].max()
    if steps == 1:
        assert moved > 0.1
    else:
        assert moved < 1e-9
        means = np.stack([data[0][found.member == group].mean(axis=0) for group in np.flatnonzero(held.reshape(-1))])
        np.testing.assert_allclose(found.centres[held], means, rtol=1e-5, atol=1e-6)


def kmeans_from(monkeypatch, start, exists, steps):
    """Of the samples 0, 2, 10 and 12 with a given start: k-means++ hardly ever comes to the ones asked about here."""
    first = jnp.array(start).reshape(1, 3, 1), jnp.array([exists])
    monkeypatch.setattr(kmeans_module, "_first_centres", lambda *args: first)
    z, y = jnp.array([[0.0], [2.0], [10.0], [12.0]]), jnp.zeros(4, jnp.int32)
    return kmeans(KEY, z, y, jnp.ones(4), classes=1, clusters=3, steps=steps)


def test_a_group_that_loses_its_samples_keeps_its_centre(monkeypatch):
    found = kmeans_from(monkeypatch, [0.5, 60.0, 8.0], [True, True, True], 3)
    np.testing.assert_allclose(found.centres[0, :, 0], [1, 60, 11])
    np.testing.assert_array_equal(found.size, [[2, 0, 2]])
    np.testing.assert_array_equal(found.member, [0, 0, 2, 2])


def test_no_sample_joins_a_group_that_does_not_exist(monkeypatch):
    found = kmeans_from(monkeypatch, [0.5, 12.0, 8.0], [True, False, True], 0)
    np.testing.assert_array_equal(found.size, [[2, 0, 2]])
    np.testing.assert_array_equal(found.member, [0, 0, 2, 2])


def test_a_class_has_no_more_groups_than_different_samples():
    z, y, mask = padded()
    for number in range(5):
        found, means = compressed(z, y, mask, key=jax.random.key(number))
        assert all(np.isfinite(a).all() for a in (found.centres, found.size, means))
        np.testing.assert_array_equal(found.size.sum(axis=1), np.bincount(Y, minlength=C))
        np.testing.assert_array_equal(
            found.size > 0, [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]]
        )
        np.testing.assert_allclose(found.centres[1, 0], ONE, rtol=1e-6)
        order = np.argsort(found.centres[2, :2, 0])
        np.testing.assert_allclose(found.centres[2, order], TWO, rtol=1e-6)
        np.testing.assert_array_equal(found.size[2, order], [3, 4])
        np.testing.assert_array_equal(found.centres[4, 0], z[mask * (y == 4) > 0][0])
        assert not means[found.size == 0].any()
        np.testing.assert_allclose(means[1, 0], [ONE] * R, rtol=1e-6)
        np.testing.assert_array_equal(means[4, 0], [found.centres[4, 0]] * R)


def test_padding_changes_nothing():
    expected = compressed(Z, Y, np.ones(HELD, np.float32))
    for fill, label in ((0.0, 0), (1e30, 3), (Z[0], Y[0])):
        found = compressed(*padded(fill, label))
        assert np.all(found[0].member[HELD:] == C * J)
        found = found[0]._replace(member=found[0].member[:HELD]), found[1]
        held = expected[0].size > 0
        # The same draws and groups; their sums, which a longer table adds up in other blocks, up to rounding.
        jax.tree.map(np.testing.assert_array_equal, found[0][1:], expected[0][1:])
        np.testing.assert_allclose(found[0].centres[held], expected[0].centres[held], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)


def test_a_client_without_samples_has_no_groups():
    z, y, mask = padded(fill=3.0)
    found, means = compressed(z, y, np.zeros_like(mask))
    assert not found.size.any()
    assert np.all(found.member == C * J)
    assert not means.any()  # nor NaN, which counts as true


# --- The means of random shares --------------------------------------------------------------------------------------

SIZES = (1000, 0, 100, 50, 10, 7, 5, 3, 2, 1)
MEMBER = RNG.permutation(np.repeat(np.arange(11), (*SIZES, 7)))  # the last seven are padding
GROUPS = Clusters(jnp.zeros((2, 5, 1)), jnp.asarray(MEMBER, jnp.int32), jnp.asarray(SIZES, jnp.float32).reshape(2, 5))


@jax.jit
def shares(key, z, share):
    return sample_means(key, z, GROUPS, repeats=2, share=share)


# In single precision 0.15 * 100, 0.3 * 50, 0.3 * 100 and 0.6 * 50 are a little more than a whole number.
@pytest.mark.parametrize("share", ["0.0001", "0.15", "0.3", "0.6", "0.7", "0.8", "0.99", "1"])
def test_a_mean_is_over_the_share_of_its_group_rounded_up(share):
    means = np.asarray(shares(KEY, jnp.eye(len(MEMBER)), jnp.float32(share)))  # row i of a mean: weight of sample i
    for group, size in enumerate(SIZES):
        if not size:
            assert not means[divmod(group, 5)].any()
            continue
        wanted = max(1, math.ceil(Fraction(share) * size))
        first, second = means[divmod(group, 5)]
        for mean in (first, second):
            chosen = np.flatnonzero(mean)
            assert len(chosen) == wanted
            assert np.all(MEMBER[chosen] == group)
            np.testing.assert_allclose(mean[chosen], 1 / wanted, rtol=1e-6)
        if size >= 50 and wanted < size:
            assert np.any(first != second)


def test_all_of_a_group_is_its_mean():
    z = RNG.normal(size=(len(MEMBER), len(MEMBER))).astype(np.float32)
    means = shares(KEY, jnp.asarray(z), jnp.float32(1))
    for group in np.flatnonzero(SIZES):
        expected = z[group == MEMBER].mean(axis=0, dtype=np.float64)
        np.testing.assert_allclose(means[divmod(group, 5)], [expected] * 2, rtol=1e-5, atol=1e-6)


def test_all_choices_are_equally_likely():
    member, repeats = np.array([1, 0, 2, 1, 0, 1, 2, 0, 1, 1, 0]), 1200
    groups = Clusters(jnp.zeros((2, 1, 1)), jnp.asarray(member, jnp.int32), jnp.array([[4.0], [5.0]]))
    means = np.asarray(sample_means(KEY, jnp.eye(len(member)), groups, repeats=repeats, share=0.4))
    for group in range(2):
        pairs = list(combinations(np.flatnonzero(member == group), 2))
        drawn = [tuple(np.flatnonzero(mean)) for mean in means[group, 0]]
        counts = [drawn.count(pair) for pair in pairs]
        assert sum(counts) == repeats
        assert chisquare(counts).pvalue > 1e-3
