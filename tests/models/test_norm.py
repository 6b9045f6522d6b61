"""Batch normalisation: the three kinds of pass, and what they hand over as the gradient of the statistics."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.models.norm import BatchNorm, is_statistic

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(2, 3, (5, 2, 3, 4)), jnp.float32)
WEIGHT = RNG.normal(size=X.shape).astype(np.float32)
PARAMS = {
    "scale": RNG.uniform(0.5, 2, 4).astype(np.float32),
    "bias": RNG.normal(size=4).astype(np.float32),
    "running_mean": RNG.normal(size=4).astype(np.float32),
    "running_var": RNG.uniform(0.5, 2, 4).astype(np.float32),
}
SCALING = ("scale", "bias")


def plain(params, x, mean, var):
    return (x - mean) / jnp.sqrt(var + 1e-5) * params["scale"] + params["bias"]


def value_and_gradients(fn, params, x, weight):
    y, pullback = jax.vjp(fn, params, x)
    return y, *pullback(weight)


@jax.jit
def apply(x, mask):
    weight = WEIGHT * mask[:, None, None, None]
    return value_and_gradients(lambda params, x: BatchNorm().apply({"params": params}, x, mask), PARAMS, x, weight)


def mask_of(samples):
    return (jnp.arange(5) < samples).astype(jnp.float32)


@pytest.mark.parametrize("samples", [5, 3, 2])
def test_a_training_pass_normalises_with_the_samples_of_the_batch(samples):
    def batch_alone(params, x):
        return plain(params, x, jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2)))

    y, d_params, dx = value_and_gradients(batch_alone, PARAMS, X[:samples], jnp.asarray(WEIGHT[:samples]))
    found_y, found_d_params, found_dx = apply(X, mask_of(samples))
    np.testing.assert_allclose(found_y[:samples], y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found_dx[:samples], dx, rtol=1e-3, atol=1e-5)
    assert not np.asarray(found_dx[samples:]).any()
    for name in SCALING:
        np.testing.assert_allclose(found_d_params[name], d_params[name], rtol=1e-4, atol=1e-5)


def test_channels_that_hardly_vary_are_divided_by_the_root_of_epsilon():
    """PyTorch's, 1e-5, which is as much as their variance is here."""
    x = 1e-3 * (X - 2)
    expected = plain(PARAMS, x, jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2)))
    np.testing.assert_allclose(apply(x, mask_of(5))[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("samples", [5, 3, 2])
def test_it_hands_over_the_way_to_the_batch_statistics(samples):
    _, gradient, _ = apply(X, mask_of(samples))
    own = np.asarray(X[:samples], np.float64)
    mean, var = own.mean((0, 1, 2)), own.var((0, 1, 2), ddof=1)
    after = {name: PARAMS[name] - gradient[name] for name in ("running_mean", "running_var")}
    np.testing.assert_allclose(after["running_mean"], 0.9 * PARAMS["running_mean"] + 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(after["running_var"], 0.9 * PARAMS["running_var"] + 0.1 * var, rtol=1e-5)


def test_padding_changes_nothing():
    clean, dirty = apply(X, mask_of(3)), apply(X.at[3:].set(1e3), mask_of(3))
    np.testing.assert_array_equal(dirty[0][:3], clean[0][:3])
    jax.tree.map(np.testing.assert_array_equal, dirty[1:], clean[1:])


@pytest.mark.parametrize("samples", [1, 0])
def test_fewer_than_two_samples_use_the_running_statistics_and_leave_them(samples):
    y, gradient, _ = apply(X, mask_of(samples))
    np.testing.assert_allclose(y, plain(PARAMS, X, PARAMS["running_mean"], PARAMS["running_var"]), rtol=1e-4, atol=1e-5)
    assert not gradient["running_mean"].any()
    assert not gradient["running_var"].any()


def test_other_passes_use_the_running_statistics_as_constants():
    def evaluation(params, x):
        return BatchNorm().apply({"params": params}, x)

    def with_constants(params, x):
        return plain(params, x, PARAMS["running_mean"], PARAMS["running_var"])

    found = value_and_gradients(evaluation, PARAMS, X, WEIGHT)
    expected = value_and_gradients(with_constants, PARAMS, X, WEIGHT)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    assert not found[1]["running_var"].any()


def test_the_update_does_not_depend_on_the_loss():
    def gradient(scale):
        def loss(params):
            return scale * jnp.sum(BatchNorm().apply({"params": params}, X, mask_of(3)) ** 2)

        return jax.grad(loss)(PARAMS)

    one, hundred = jax.jit(gradient)(1.0), jax.jit(gradient)(100.0)
    assert one["running_mean"].all()
    jax.tree.map(np.testing.assert_array_equal, *({k: g[k] for k in g if k not in SCALING} for g in (one, hundred)))
    np.testing.assert_allclose(hundred["scale"], 100 * one["scale"], rtol=1e-5)


def test_statistics_are_told_by_the_last_key_of_their_path():
    class Pair(NamedTuple):
        running_mean: dict
        other: list

    tree = Pair({"norm": {"running_mean": 0.0, "running_var": 0.0, "scale": 0.0}}, [0.0])
    found = jax.tree.leaves(jax.tree.map_with_path(lambda path, _: is_statistic(path), tree))
    assert found == [True, True, False, False]
    assert not is_statistic(())
