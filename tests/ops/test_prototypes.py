"""Class sums, class means and the centre loss, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_pfl.ops.prototypes import Prototypes, centre_loss, class_means, class_sums
from tests.data.labels import fixed

RNG = np.random.default_rng(0)
C, K, N = 5, 3, 12
Z = RNG.normal(0, 2, (N, K)).astype(np.float32)
Y = np.array([0, 3, 1, 1, 3, 0, 3, 3, 1, 0, 2, 2], np.int32)  # nobody holds class 4
MASKS = {"samples alone": np.ones(N), "padding": np.arange(N) < 10, "gaps": RNG.random(N) < 0.5}
CENTRES = RNG.normal(size=(C, K)).astype(np.float32)

every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
both_reductions = pytest.mark.parametrize("reduction", ["mse", "mean_l2"])


def sums_and_counts(z, y, mask):
    z, y, mask = np.asarray(z, np.float64), np.asarray(y), np.asarray(mask)
    return np.array([[z[(y == c) & (mask == 1), k].sum() for k in range(K)] for c in range(C)]), np.array(
        [np.sum((y == c) & (mask == 1)) for c in range(C)]
    )


def found_sums(z, y, mask):
    return class_sums(jnp.asarray(z), jnp.asarray(y), jnp.asarray(mask, jnp.float32), C)


@every_mask
def test_sums_and_means_of_each_class(mask):
    expected, counts = sums_and_counts(Z, Y, mask)
    sums = found_sums(Z, Y, mask)
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-6)
    means = class_means(sums, jnp.asarray(counts, jnp.float32))
    np.testing.assert_array_equal(means.valid, counts > 0)
    np.testing.assert_allclose(means.mean, expected / np.maximum(counts, 1)[:, None], rtol=1e-5, atol=1e-6)
    assert not means.valid[4]
    assert not means.mean[4].any()


@fixed
@given(order=st.permutations(range(N)), mask=st.lists(st.booleans(), min_size=N, max_size=N))
def test_the_order_of_the_samples_does_not_matter(order, mask):
    order, mask = np.array(order), np.array(mask)
    np.testing.assert_allclose(found_sums(Z[order], Y[order], mask[order]), found_sums(Z, Y, mask), atol=1e-5)


def test_padding_may_hold_anything_finite():
    z, y = Z.copy(), Y.copy()
    z[10:], y[10:] = 1e30, 4
    np.testing.assert_array_equal(found_sums(z, y, np.arange(N) < 10), found_sums(Z, Y, np.arange(N) < 10))


def centre(z, mask, valid, reduction):
    centres = Prototypes(jnp.asarray(CENTRES), jnp.asarray(valid))
    return centre_loss(z, jnp.asarray(Y), jnp.asarray(mask, jnp.float32), centres, reduction=reduction)


@both_reductions
@every_mask
def test_the_centre_loss_and_its_gradient(mask, reduction):
    valid = np.array([True, False, True, True, True])
    value, gradient = jax.value_and_grad(centre)(jnp.asarray(Z), mask, valid, reduction)
    counted = mask * valid[Y]
    apart = Z.astype(np.float64) - CENTRES[Y]
    # The samples of a class without a centre stay in the denominator: they contribute zero.
    scale = counted[:, None] / mask.sum() / (K if reduction == "mse" else 1)
    assert float(value) == pytest.approx(np.sum(scale * apart**2), rel=1e-5)
    np.testing.assert_allclose(gradient, 2 * scale * apart, rtol=1e-4, atol=1e-7)
    assert not gradient[counted == 0].any()
    assert gradient[counted == 1].all()


@both_reductions
def test_a_batch_of_padding_alone_and_a_client_without_centres_cost_nothing(reduction):
    for mask, valid in ((np.zeros(N), np.ones(C, bool)), (np.ones(N), np.zeros(C, bool))):
        value, gradient = jax.value_and_grad(centre)(jnp.asarray(Z), mask, valid, reduction)
        assert float(value) == 0
        assert not gradient.any()  # nor NaN, which counts as true


@both_reductions
def test_features_at_their_own_means_cost_their_variance(reduction):
    means = class_means(found_sums(Z, Y, np.ones(N)), jnp.asarray(np.bincount(Y, minlength=C), jnp.float32))
    z, y, mask = jnp.asarray(Z), jnp.asarray(Y), jnp.ones(N)
    assert float(centre_loss(means.mean[Y], y, mask, means, reduction=reduction)) == 0
    within = sum(np.sum(c == Y) * np.var(Z[c == Y], axis=0).sum() for c in range(4)) / N
    expected = within / K if reduction == "mse" else within
    assert float(centre_loss(z, y, mask, means, reduction=reduction)) == pytest.approx(expected, rel=1e-5)
