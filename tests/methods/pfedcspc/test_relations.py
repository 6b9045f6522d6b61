"""Alignment of angles and distances with those of the prototypes, against plain loops in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.methods.pfedcspc.relations import angle_alignment, edge_alignment
from fedjax_pfl.ops.prototypes import Prototypes

RNG = np.random.default_rng(0)
N, C, K = 13, 5, 4
Y = np.array([0, 3, 1, 1, 3, 0, 3, 2, 0, 1, 2, 4, 1], np.int32)  # neighbours of one class, and 3, 0, 3
F = (RNG.normal(size=(N, K)) * RNG.choice([0.1, 1, 9], (N, 1))).astype(np.float32)  # gaps below and above 1
U = RNG.normal(size=(C, K)).astype(np.float32)
ALL = np.ones(C, bool)
VALID = np.arange(C) != 4
MASKS = {"samples alone": np.ones(N), "padding": np.arange(N) < 10}
LOSSES = {
    "angle": angle_alignment,
    "abs": partial(edge_alignment, penalty="abs"),
    "squared": partial(edge_alignment, penalty="squared"),
    "smooth_l1": partial(edge_alignment, penalty="smooth_l1"),
}
PENALTIES = {
    "abs": abs,
    "squared": lambda x: x**2,
    "smooth_l1": lambda x: x**2 / 2 if abs(x) < 1 else abs(x) - 1 / 2,
}

every_loss = pytest.mark.parametrize("name", LOSSES)


@partial(jax.jit, static_argnames="name")
def value_and_gradient(name, f, y, mask, mean, valid):
    return jax.value_and_grad(LOSSES[name])(f, y, mask, Prototypes(mean, valid))


def found(name, f, y=Y, mask=MASKS["samples alone"], mean=U, valid=ALL):
    f, mask, mean = (jnp.asarray(a, jnp.float32) for a in (f, mask, mean))
    return value_and_gradient(name, f, jnp.asarray(y), mask, mean, jnp.asarray(valid))


def cosine(a, b, c):
    """Of the angle at b."""
    return (a - b) @ (c - b) / np.linalg.norm(a - b) / np.linalg.norm(c - b)


def chains(length, y, mask, valid):
    """Neighbouring samples of different labels, all of them with a prototype; the first comes after the last."""
    number = int(np.sum(mask))
    for first in range(number):
        rows = [(first + step) % number for step in range(length)]
        if len({y[row] for row in rows}) == length and all(valid[y[row]] for row in rows):
            yield rows


def gaps(f, y, mask, mean, valid):
    """What the penalties of the edges are taken of."""
    pairs = list(chains(2, y, mask, valid))
    own = np.array([np.linalg.norm(f[a] - f[b]) for a, b in pairs])
    theirs = np.array([np.linalg.norm(mean[y[a]] - mean[y[b]]) for a, b in pairs])
    return own / own.mean() - theirs / theirs.mean() if pairs else []


def expected(name, f, y, mask, mean, valid):
    f, mean = np.asarray(f, np.float64), np.asarray(mean, np.float64)
    if name == "angle":
        values = [abs(cosine(*f[rows]) - cosine(*mean[y[rows]])) for rows in chains(3, y, mask, valid)]
    else:
        values = [PENALTIES[name](gap) for gap in gaps(f, y, mask, mean, valid)]
    return np.mean(values) if values else 0.0


def slopes(name, *args):
    """The gradient of the definition, by differences."""
    result, step = np.zeros(F.shape), 1e-6
    for at in np.ndindex(F.shape):
        ends = np.stack([F, F]).astype(np.float64)
        ends[0][at] += step
        ends[1][at] -= step
        result[at] = (expected(name, ends[0], *args) - expected(name, ends[1], *args)) / (2 * step)
    return result


@every_loss
@pytest.mark.parametrize("valid", [ALL, VALID], ids=["all prototypes", "class 4 has none"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_value_and_gradient(name, mask, valid):
    value, gradient = found(name, F, Y, mask, U, valid)
    assert float(value) == pytest.approx(expected(name, F, Y, mask, U, valid), rel=1e-4)
    np.testing.assert_allclose(gradient, slopes(name, Y, mask, U, valid), rtol=2e-3, atol=1e-5)
    counted = np.zeros(N, bool)
    for rows in chains(3 if name == "angle" else 2, Y, mask, valid):
        counted[rows] = True
    assert counted.any()
    assert not gradient[~counted].any()
    assert gradient[counted].any(axis=1).all()


def test_the_samples_above_have_small_and_large_gaps():
    sizes = np.abs(gaps(F.astype(np.float64), Y, MASKS["samples alone"], U, VALID))
    assert sizes.min() < 0.5 < 1.1 < sizes.max()  # smooth L1 turns at 1


@every_loss
def test_the_end_of_a_batch_is_joined_to_its_start(name):
    y = np.zeros(N, np.int32)  # the last sample with the first, and with the second
    y[[0, 1, 12]] = [1, 2, 3]
    value, gradient = found(name, F, y)
    assert float(value) == pytest.approx(expected(name, F, y, np.ones(N), U, ALL), rel=1e-4)
    assert gradient[12].any()


@every_loss
def test_features_that_lie_to_each_other_like_the_prototypes_cost_nothing(name):
    rotation = np.linalg.qr(RNG.normal(size=(K, K)))[0]
    moved = 3 * U[Y].astype(np.float64) @ rotation + RNG.normal(size=K)
    for f, close in ((U[Y], 0), (moved, 1e-5)):
        assert float(found(name, f)[0]) == pytest.approx(0, abs=close)
    assert float(found(name, F)[0]) > 0.05


@every_loss
def test_too_few_samples_or_classes_to_compare_cost_nothing(name):
    cases = [
        {"y": np.full(N, 2, np.int32)},
        {"valid": np.zeros(C, bool)},
        {"valid": np.arange(C) == 1},
        {"mask": np.zeros(N)},
        {"mask": np.arange(N) < 1},
    ]
    if name == "angle":
        cases += [{"mask": np.arange(N) < 2}, {"valid": np.arange(C) < 2}]
    for case in cases:
        value, gradient = found(name, F, **case)
        assert float(value) == 0
        assert not gradient.any()  # nor NaN, which counts as true


@every_loss
def test_padding_and_classes_without_a_prototype_are_not_read(name):
    mask = MASKS["padding"]
    f, y, mean = F.copy(), Y.copy(), U.copy()
    f[10:], y[10:], mean[4] = 1e6, 2, -1e6
    value, gradient = found(name, f, y, mask, mean, VALID)
    other_value, other_gradient = found(name, F, Y, mask, U, VALID)
    assert float(value) == float(other_value)
    np.testing.assert_array_equal(gradient, other_gradient)
    cut_value, cut_gradient = found(name, F[:10], Y[:10], np.ones(10), U, VALID)
    assert float(value) == pytest.approx(float(cut_value), rel=1e-6)
    np.testing.assert_allclose(gradient[:10], cut_gradient, rtol=1e-5, atol=1e-7)


@every_loss
def test_points_that_coincide_have_finite_gradients(name):
    dead, twins, prototypes = np.zeros_like(F), F.copy(), U.copy()
    twins[1], twins[3] = twins[0], 0
    prototypes[[1, 3]] = prototypes[0]
    for f in (dead, twins, F):
        for mean in (U, prototypes, np.zeros_like(U)):
            value, gradient = found(name, f, mean=mean)
            assert np.isfinite(value)
            assert np.isfinite(gradient).all()


def test_an_angle_at_two_points_that_coincide_is_a_right_one():
    f = F.copy()
    f[2] = f[1]  # of the classes 0, 3, 1; from the third point, the two lie in the same direction
    value, _ = found("angle", f, mask=np.arange(N) < 3)
    theirs = [cosine(*U[classes].astype(np.float64)) for classes in ([0, 3, 1], [3, 1, 0], [1, 0, 3])]
    assert float(value) == pytest.approx(np.mean(np.abs(np.array([0, 0, 1]) - theirs)), rel=1e-5)
