"""Class sums, class means, their store, the centre loss and the contrast of prototypes, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_pfl.method import PerClass
from fedjax_pfl.ops.prototypes import (
    Prototypes,
    centre_loss,
    class_means,
    class_sums,
    distances,
    means_as_samples,
    pool_prototypes,
    prototype_contrast,
    update_prototypes,
)
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


# --- The store of prototypes (rule R8) -------------------------------------------------------------------------------


def test_a_class_without_a_new_prototype_keeps_its_old_one():
    old = Prototypes(jnp.asarray(CENTRES), jnp.array([True, True, False, False, True]))
    new = Prototypes(-2 * jnp.asarray(CENTRES), jnp.array([True, False, True, False, False]))
    found = update_prototypes(old, new)
    np.testing.assert_array_equal(found.valid, [True, True, True, False, True])
    np.testing.assert_array_equal(found.mean, CENTRES * np.array([-2, 1, -2, 1, 1], np.float32)[:, None])


def test_pooled_prototypes_are_the_means_over_the_samples_of_all_clients():
    old = Prototypes(jnp.asarray(CENTRES), jnp.array([True, False, False, False, True]))
    parts = [sums_and_counts(Z, Y, mask) for mask in (np.arange(N) < 5, np.arange(N) >= 5)]
    sums, counts = (jnp.asarray(np.stack(part), jnp.float32) for part in zip(*parts, strict=True))
    found = pool_prototypes(old, PerClass(counts, sums))
    for c in range(4):
        np.testing.assert_allclose(found.mean[c], Z[c == Y].mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(found.mean[4], CENTRES[4])  # that of a class without a sample
    assert found.valid.all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_class_sums_that_are_not_finite_count_as_not_held(bad):
    old = Prototypes(jnp.asarray(CENTRES), jnp.array([True, False, False, False, True]))
    counts = np.float32([[2, 1, 1, 0, 0], [3, 0, 1, 1, 0]])
    sums = RNG.normal(size=(2, C, K)).astype(np.float32) * (counts > 0)[..., None]
    wrong = sums.copy()
    wrong[0, :2, 1] = bad  # of class 0, which the other holds, and of class 1, which nobody else does
    without = counts.copy()
    without[0, :2] = 0
    found = pool_prototypes(old, PerClass(jnp.asarray(counts), jnp.asarray(wrong)))
    expected = pool_prototypes(old, PerClass(jnp.asarray(without), jnp.asarray(sums * (without > 0)[..., None])))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(found.valid, [True, False, True, True, True])


def test_prototypes_are_received_as_they_were_sent():
    held = Prototypes(jnp.asarray(CENTRES), jnp.array([True, False, True, False, True]))
    sent = held.as_sent()
    np.testing.assert_array_equal(sent.held, held.valid)
    jax.tree.map(np.testing.assert_array_equal, Prototypes.as_received(sent), held)


# --- The contrast of prototypes --------------------------------------------------------------------------------------

TAU = 0.5


@jax.jit
@jax.value_and_grad
def contrast(z, mask, prototypes, valid, tau):
    store = Prototypes(prototypes, valid)
    return prototype_contrast(z, jnp.asarray(Y), mask, store, temperature=tau)


def found_contrast(z, mask, valid, prototypes=CENTRES, tau=TAU):
    return contrast(*(jnp.asarray(a, jnp.float32) for a in (z, mask, prototypes)), jnp.asarray(valid), jnp.float32(tau))


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def expected_contrast(z, mask, valid, tau=TAU):
    """Sample by sample, from the definition."""
    z, total = np.asarray(z, np.float64), 0.0
    for row in np.flatnonzero(mask):
        if valid[Y[row]]:
            closeness = {c: np.exp(cosine(z[row], CENTRES[c].astype(float)) / tau) for c in np.flatnonzero(valid)}
            total -= np.log(closeness[Y[row]] / sum(closeness.values()))
    return total / mask.sum()


@every_mask
def test_the_contrast_and_its_gradient(mask):
    valid = np.array([True, False, True, True, True])
    value, gradient = found_contrast(Z, mask, valid)
    assert float(value) == pytest.approx(expected_contrast(Z, mask, valid), rel=1e-5)
    slopes, step = np.zeros(Z.shape), 1e-5
    for at in np.ndindex(Z.shape):
        ends = np.stack([Z, Z]).astype(np.float64)
        ends[0][at] += step
        ends[1][at] -= step
        slopes[at] = (expected_contrast(ends[0], mask, valid) - expected_contrast(ends[1], mask, valid)) / (2 * step)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-3, atol=1e-6)
    counted = (mask == 1) & valid[Y]
    assert not gradient[~counted].any()  # padding, and class 1
    assert gradient[counted].any(axis=1).all()


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("classes", [1, 2, 3])
def test_a_sample_at_its_prototype_and_orthogonal_to_the_others_has_a_closed_form(classes, tau):
    prototypes = np.zeros((C, K))
    prototypes[:classes] = np.diag([0.2, 1.0, 30.0])[:classes]  # of any length: it is the direction that counts
    valid, y = np.arange(C) < classes, np.minimum(Y, classes - 1)
    store = Prototypes(jnp.asarray(prototypes, jnp.float32), jnp.asarray(valid))
    z = jnp.asarray(7 * prototypes[y], jnp.float32)
    found = prototype_contrast(z, jnp.asarray(y), jnp.ones(N), store, temperature=tau)
    own = np.exp(1 / tau)
    assert float(found) == pytest.approx(-np.log(own / (own + classes - 1)), rel=1e-5, abs=1e-6)


def test_the_length_of_features_and_prototypes_does_not_matter():
    lengths = np.linspace(0.1, 9, N)[:, None]
    value, gradient = found_contrast(lengths * Z, np.ones(N), np.ones(C, bool), 5 * CENTRES)
    expected = found_contrast(Z, np.ones(N), np.ones(C, bool))
    assert float(value) == pytest.approx(float(expected[0]), rel=1e-5)
    np.testing.assert_allclose(gradient, expected[1] / lengths, rtol=1e-3, atol=1e-6)


def test_without_prototypes_or_samples_there_is_nothing_to_contrast():
    for mask, valid in ((np.zeros(N), np.ones(C, bool)), (np.ones(N), np.zeros(C, bool))):
        value, gradient = found_contrast(Z, mask, valid)
        assert float(value) == 0
        assert not gradient.any()  # nor NaN, which counts as true


def test_the_row_of_a_class_without_a_prototype_is_not_read():
    valid = np.array([True, False, True, True, False])
    other = np.where(valid[:, None], CENTRES, np.float32(1e6))
    jax.tree.map(
        np.testing.assert_array_equal, found_contrast(Z, np.ones(N), valid, other), found_contrast(Z, np.ones(N), valid)
    )


def test_a_dead_feature_and_a_dead_prototype_are_as_near_to_all_as_to_none():
    z, prototypes = Z.copy(), CENTRES.copy()
    z[2] = 0  # of class 1
    prototypes[3] = 0
    value, gradient = found_contrast(z, np.arange(N) == 2, np.ones(C, bool), prototypes)
    assert float(value) == pytest.approx(np.log(C), rel=1e-6)
    assert np.isfinite(gradient).all()
    value, gradient = found_contrast(z, np.ones(N), np.ones(C, bool), prototypes)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_class_means_as_samples_are_in_the_order_of_the_clients_whatever_their_rows():
    held = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool)
    means, ids = CENTRES[:3, None] + np.arange(3, dtype=np.float32)[:, None], np.array([5, 9, 2], np.int32)

    def pairs(rows):
        data = means_as_samples(*(jnp.asarray(part[rows]) for part in (means, held, ids)))
        batch = data.take(jnp.arange(data.capacity), jnp.arange(data.capacity) < data.count)
        assert int(data.count) == int(batch.mask.sum()) == 4
        np.testing.assert_array_equal(data.class_counts, [1, 1, 2])
        return np.asarray(batch.x)[:4], np.asarray(batch.y)[:4]

    for rows in ([0, 1, 2], [2, 0, 1]):
        x, y = pairs(rows)
        np.testing.assert_array_equal(y, [1, 2, 0, 2])
        np.testing.assert_array_equal(x, means[[2, 2, 0, 0], y])


def test_distances_to_points_and_their_gradient_where_a_row_is_one_of_them():
    z = jnp.asarray(np.concatenate([Z, CENTRES[:1]]))
    expected = np.linalg.norm(np.asarray(z, np.float64)[:, None] - CENTRES, axis=2)
    np.testing.assert_allclose(distances(z, jnp.asarray(CENTRES)), expected, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda z: distances(z, jnp.asarray(CENTRES))[-1, 0])(z)
    np.testing.assert_array_equal(gradient, 0)
