"""FedeCouple's weights by similarity to the mean model, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.methods.fedecouple.weights import cosine_weights
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.robust import RULES

RNG = np.random.default_rng(0)
# Rows that mostly agree, as uploads do.
UPLOADS = {"w": RNG.normal(size=(3, 2)) + 0.3 * RNG.normal(size=(5, 3, 2)), "b": [1 + 0.3 * RNG.normal(size=5)]}


def single(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def rows_of(stacked):
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(stacked)], axis=1)


def similarities(stacked, size):
    """cos(w_k, w_avg) in float64, w_avg weighted by size."""
    rows = rows_of(stacked)
    mean = np.average(rows, axis=0, weights=size)
    return rows @ mean / np.linalg.norm(rows, axis=1) / np.linalg.norm(mean)


def found_weights(stacked, size):
    size = jnp.asarray(size, jnp.float32)
    return np.asarray(cosine_weights(single(stacked), weighted_mean(single(stacked), size), size > 0))


@pytest.mark.parametrize("size", [(3, 1, 20, 6, 2), (1, 1, 1, 1, 1)])
def test_weights_are_in_proportion_to_the_cosine_with_the_mean(size):
    cosine = similarities(UPLOADS, size)
    assert 0.5 < cosine.min() < cosine.max() - 0.01
    np.testing.assert_allclose(found_weights(UPLOADS, size), cosine / cosine.sum(), rtol=1e-5)


def test_the_length_of_an_upload_does_not_count():
    size = jnp.ones(5)
    mean = weighted_mean(single(UPLOADS), size)
    longer = jax.tree.map(lambda leaf: leaf * np.array([1, 3, 0.1, 1, 50]).reshape(5, *[1] * (leaf.ndim - 1)), UPLOADS)
    plain, found = (cosine_weights(single(stacked), mean, size > 0) for stacked in (UPLOADS, longer))
    np.testing.assert_allclose(found, plain, rtol=1e-5)


def test_running_statistics_have_no_part_in_the_cosine():
    variances = {"running_var": np.array([500.0, 1, 1, 300, 1])[:, None] * np.ones(3)}
    np.testing.assert_allclose(found_weights({**UPLOADS, **variances}, np.ones(5)), found_weights(UPLOADS, np.ones(5)))


def test_the_absent_weigh_nothing():
    size = np.array([4.0, 0, 2, 0, 1])
    uploads = jax.tree.map(lambda leaf: leaf * (size > 0).reshape(5, *[1] * (leaf.ndim - 1)), UPLOADS)
    found = found_weights(uploads, size)
    assert (found[size == 0] == 0).all()
    cosine = similarities(jax.tree.map(lambda leaf: leaf[size > 0], UPLOADS), size[size > 0])
    np.testing.assert_allclose(found[size > 0], cosine / cosine.sum(), rtol=1e-5)
    assert not found_weights(jax.tree.map(np.zeros_like, UPLOADS), np.zeros(5)).any()


def test_an_upload_against_the_mean_weighs_a_millionth_of_one_along_it():
    rows = np.array([[1.0, 0], [1, 0], [-1, 0], [0, 0]])
    found = found_weights({"w": rows}, [5, 1, 1, 1])
    np.testing.assert_allclose(found, np.array([1, 1, 1e-6, 1e-6]) / 2, rtol=1e-4)


def test_equal_uploads_weigh_the_same_and_zeros_do_no_harm():
    equal = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape), UPLOADS)
    for uploads in (equal, jax.tree.map(np.zeros_like, equal)):
        np.testing.assert_allclose(found_weights(uploads, [3, 1, 20, 6, 2]), 0.2, rtol=1e-6)


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_a_robust_rule_stays_one_where_an_upload_is_senseless(rule, nonsense):
    """Its weight is the least; the rule, which asks for weights above 0, goes on to see all who are present."""
    combine, present = RULES[rule], np.array([True, True, False, True, True, True])
    spoilt = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[:1]]), UPLOADS)
    for leaf in jax.tree.leaves(spoilt):
        leaf[1] = nonsense
    uploads = single(spoilt)
    weigh = jax.jit(lambda uploads, weight: cosine_weights(uploads, combine(uploads, weight), jnp.asarray(present)))
    weights = np.asarray(weigh(uploads, jnp.asarray(present, jnp.float32)))
    assert (weights > 0).tolist() == present.tolist()
    assert weights.sum() == pytest.approx(1, rel=1e-5)
    assert weights[1] < 1e-5
    for leaf, honest in zip(
        jax.tree.leaves(jax.jit(combine)(uploads, jnp.asarray(weights))), jax.tree.leaves(UPLOADS), strict=True
    ):
        assert (leaf >= np.min(honest, axis=0) - 1e-6).all()
        assert (leaf <= np.max(honest, axis=0) + 1e-6).all()
