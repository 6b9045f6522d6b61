"""Weighted means of uploads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.ops.aggregate import weighted_mean

RNG = np.random.default_rng(0)
STACKED = {"w": RNG.normal(size=(4, 3, 2)), "b": [RNG.normal(size=4)]}


@pytest.mark.parametrize("weight", [(3, 1, 20, 6), (0, 5, 0, 2), (0, 0, 7, 0), (1, 1, 1, 1)])
def test_the_mean_weighs_each_row(weight):
    stacked = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), STACKED)
    found = weighted_mean(stacked, jnp.array(weight, jnp.float32))
    expected = jax.tree.map(
        lambda leaf: sum(n * row for n, row in zip(weight, leaf, strict=True)) / sum(weight), STACKED
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


def test_weights_of_zero_alone_give_zeros():
    found = weighted_mean(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), STACKED), jnp.zeros(4))
    assert not any(leaf.any() for leaf in jax.tree.leaves(found))
    assert jax.tree.map(jnp.shape, found) == {"w": (3, 2), "b": [()]}
