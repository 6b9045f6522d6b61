"""Distillation, against SciPy's relative entropy and the gradient in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import rel_entr, softmax

from fedjax_pfl.ops.distill import distillation

RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.normal(0, 3, (2, 6, 4)).astype(np.float32)
MASKS = {"samples alone": np.ones(6), "padding": np.arange(6) < 4, "one sample": np.arange(6) == 2}

every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
temperatures = pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 10.0])


def loss(student, teacher, mask, tau, scaled=False):
    return distillation(student, teacher, jnp.asarray(mask, jnp.float32), temperature=tau, scaled=scaled)


def soft(logits, tau):
    return softmax(np.asarray(logits, np.float64) / tau, axis=1)


@every_mask
@temperatures
def test_the_divergence_and_its_gradient(tau, mask):
    value, (gradient, into_teacher) = jax.value_and_grad(loss, (0, 1))(
        jnp.asarray(STUDENT), jnp.asarray(TEACHER), mask, tau
    )
    p, q, share = soft(TEACHER, tau), soft(STUDENT, tau), mask / mask.sum()
    assert float(value) == pytest.approx(share @ rel_entr(p, q).sum(axis=1), rel=1e-4)
    np.testing.assert_allclose(gradient, share[:, None] * (q - p) / tau, rtol=1e-4, atol=1e-7)
    assert not gradient[mask == 0].any()
    assert not into_teacher.any()


@temperatures
def test_scaling_is_by_the_squared_temperature_given_or_traced(tau):
    arguments = jnp.asarray(STUDENT), jnp.asarray(TEACHER), np.ones(6)
    plain, scaled = (jax.value_and_grad(loss)(*arguments, tau, scaled) for scaled in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(tau**2 * a, b, rtol=1e-4, atol=1e-7), plain, scaled)
    for how in (False, True):
        traced = jax.jit(lambda tau, how=how: loss(*arguments, tau, how))(jnp.array(tau))
        assert float(traced) == pytest.approx(float(loss(*arguments, tau, how)), rel=1e-6)


def test_equal_predictions_cost_nothing():
    # Logits that differ by a constant per sample predict the same.
    for teacher in (STUDENT, STUDENT + np.arange(6, dtype=np.float32)[:, None]):
        value, gradient = jax.value_and_grad(loss)(jnp.asarray(STUDENT), jnp.asarray(teacher), np.ones(6), 2.0)
        assert float(value) == pytest.approx(0, abs=1e-6)
        np.testing.assert_allclose(gradient, 0, atol=1e-7)


def test_an_empty_batch_costs_nothing():
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(STUDENT), jnp.asarray(TEACHER), np.zeros(6), 2.0)
    assert float(value) == 0
    assert not gradient.any()


def test_extreme_logits_give_finite_values_and_gradients():
    student = jnp.array([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0], [0.0, 0.0, 0.0]])
    teacher = jnp.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [1e4, -1e4, 0.0]])
    value, gradient = jax.value_and_grad(loss)(student, teacher, np.ones(3), 2.0)
    # Agreement costs nothing, the opposite the whole range, indifference log 3.
    assert float(value) == pytest.approx((0 + 1e4 + np.log(3)) / 3, rel=1e-6)
    expected = np.array([[0, 0, 0], [1, -1, 0], [-2 / 3, 1 / 3, 1 / 3]]) / 2 / 3
    np.testing.assert_allclose(gradient, expected, atol=1e-7)
