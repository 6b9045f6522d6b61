"""Small parameters as one vector: the same tree again, the same training, and what stays outside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl.models.norm import STATISTICS, is_statistic
from fedjax_pfl.ops.packing import pack

STATISTIC = sorted(STATISTICS)[0]


def parameters():
    rng = np.random.default_rng(0)
    shapes = {"bias": (7,), "kernel": (3, 5), "limit": (2048,), "large": (2049,), "scalar": ()}
    tree = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    return {"layer": tree, "norm": {STATISTIC: jnp.ones(4)}, "none": None, "half": jnp.ones(3, jnp.bfloat16)}


def test_packing_and_unpacking_is_the_identity():
    params = parameters()
    packed, unpack = pack(params)
    assert packed.small.shape == (7 + 15 + 2048 + 1,)
    found = unpack(packed)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_large_arrays_and_running_statistics_keep_their_places():
    large = pack(parameters())[0].large
    kept = {path[-1].key: is_statistic(path) for path, _ in jax.tree.leaves_with_path(large)}
    assert kept == {"large": False, STATISTIC: True, "half": False}


def test_what_counts_as_small_can_be_said():
    packed, unpack = pack(parameters(), largest=0)
    assert packed.small.size == 0
    jax.tree.map(np.testing.assert_array_equal, unpack(packed), parameters())


def test_nothing_small_and_nothing_at_all():
    for params in ({"kernel": jnp.ones((50, 50))}, {}):
        packed, unpack = pack(params)
        assert packed.small.size == 0
        assert jax.tree.structure(unpack(packed)) == jax.tree.structure(params)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_steps_on_the_packed_parameters_are_those_on_the_tree(clip):
    params = {name: leaf for name, leaf in parameters()["layer"].items() if name != "limit"}
    target = jax.tree.map(lambda leaf: 0.3 * leaf + 1.0, params)
    parts = [] if clip is None else [optax.clip_by_global_norm(clip)]
    optimizer = optax.chain(*parts, optax.add_decayed_weights(0.01), optax.sgd(0.1, momentum=0.9))

    def loss(params):
        squares = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, target)
        return jax.tree.reduce(jnp.add, squares)

    def steps(start, loss):
        state = optimizer.init(start)
        for _ in range(3):
            updates, state = optimizer.update(jax.grad(loss)(start), state, start)
            start = optax.apply_updates(start, updates)
        return start

    packed, unpack = pack(params)
    found = unpack(steps(packed, lambda packed: loss(unpack(packed))))
    for one, other in zip(*map(jax.tree.leaves, (found, steps(params, loss))), strict=True):
        # Clipping adds the squares up in another order.
        np.testing.assert_allclose(one, other, rtol=0 if clip is None else 1e-6)
