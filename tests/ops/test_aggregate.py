"""Weighted means, medians, and what lies between two models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.ops.aggregate import coordinate_median, interpolate, weighted_mean

RNG = np.random.default_rng(0)
STACKED = {"w": RNG.normal(size=(4, 3, 2)), "b": [RNG.normal(size=4)]}


def single(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


@pytest.mark.parametrize("weight", [(3, 1, 20, 6), (0, 5, 0, 2), (0, 0, 7, 0), (1, 1, 1, 1)])
def test_the_mean_weighs_each_row(weight):
    found = weighted_mean(single(STACKED), jnp.array(weight, jnp.float32))
    expected = jax.tree.map(
        lambda leaf: sum(n * row for n, row in zip(weight, leaf, strict=True)) / sum(weight), STACKED
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


def test_weights_of_zero_alone_give_zeros():
    found = weighted_mean(single(STACKED), jnp.zeros(4))
    assert not any(leaf.any() for leaf in jax.tree.leaves(found))
    assert jax.tree.map(jnp.shape, found) == {"w": (3, 2), "b": [()]}


@pytest.mark.parametrize("weight", [(3, 1, 20, 6), (0, 5, 9, 2), (0, 5, 0, 2), (0, 0, 7, 0), (0, 0, 0, 0)])
def test_the_median_is_numpys_over_the_rows_present_whatever_their_weight(weight):
    present = np.array(weight) > 0
    uploads = jax.tree.map(lambda leaf: np.where(present.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0.0), STACKED)
    found = jax.jit(coordinate_median)(single(uploads), jnp.array(weight, jnp.float32))
    expected = jax.tree.map(
        lambda leaf: np.median(leaf[present], axis=0) if present.any() else np.zeros(leaf.shape[1:]), STACKED
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_the_mean_multiplies_in_full_precision_whatever_layers_do():
    """With the operands rounded to bfloat16, the mean of equal models would be another model."""
    stacked = {"w": jnp.ones((3, 4))}
    with jax.default_matmul_precision("bfloat16"):
        traced = jax.make_jaxpr(weighted_mean)(stacked, jnp.ones(3))
    (product,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name in ("dot_general", "jit", "pjit"))
    inner = product.params["jaxpr"].jaxpr.eqns if "jaxpr" in product.params else [product]
    precision = [eqn.params["precision"] for eqn in inner if eqn.primitive.name == "dot_general"]
    assert precision == [(jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)]


def test_what_is_no_number_is_the_largest_in_a_median_wherever_absent_rows_are():
    values, three, two = np.array([[1.0, np.nan, 3.0, 7.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]], np.float32)
    median = jax.jit(coordinate_median)
    for order in itertools.permutations(range(4)):
        at = np.array(order)
        assert float(median({"w": values[at]}, three[at])["w"]) == 3.0
        assert float(median({"w": values[at]}, two[at])["w"]) == np.inf


def test_interpolation_goes_from_the_old_to_the_new_parameters_and_takes_the_new_statistics():
    rng = np.random.default_rng(7)
    old, new = ({"kernel": rng.normal(size=5), "running_mean": rng.normal(size=3)} for _ in range(2))
    for share in (0.0, 0.3, 1.0, 2.0):
        found = interpolate(single(old), single(new), share)
        np.testing.assert_allclose(found["kernel"], old["kernel"] + share * (new["kernel"] - old["kernel"]), rtol=1e-5)
        np.testing.assert_array_equal(found["running_mean"], np.float32(new["running_mean"]))
    for share, end in ((0.0, old), (1.0, new)):
        found = jax.jit(interpolate)(single(old), single(new), jnp.float32(share))
        np.testing.assert_array_equal(found["kernel"], np.float32(end["kernel"]))
