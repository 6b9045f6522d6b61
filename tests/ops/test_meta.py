"""Dealing out mini-batches, and inner steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import Batch
from fedjax_pfl.ops.meta import deal, inner_step


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("samples", [0, 1, 2, 5, 7])
def test_every_sample_goes_to_one_part_and_the_parts_are_of_equal_size(samples, parts):
    y = np.arange(7, dtype=np.int32)
    batch = Batch(jnp.asarray(y * 10), jnp.asarray(y), jnp.asarray(y < samples, jnp.float32))
    dealt = [np.asarray(part.y)[np.asarray(part.mask) > 0] for part in deal(batch, parts)]
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), y[:samples])
    sizes = [len(part) for part in dealt]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    for part in deal(batch, parts):
        np.testing.assert_array_equal(part.x, part.y * 10)


@pytest.mark.parametrize(("samples", "parts", "sizes"), [(1, 2, [1, 0]), (1, 3, [1, 0, 0]), (2, 3, [1, 1, 0])])
def test_parts_for_which_there_is_no_sample_have_padding_alone(samples, parts, sizes):
    batch = Batch(jnp.ones((samples, 4)), jnp.ones(samples, jnp.int32), jnp.ones(samples))
    dealt = deal(batch, parts)
    assert [float(jnp.sum(part.mask)) for part in dealt] == sizes
    assert {part.x.shape for part in dealt} == {(1, 4)}
    for part, size in zip(dealt, sizes, strict=True):
        assert float(jnp.sum(part.x)) == 4 * size


@pytest.mark.parametrize(("how", "statistics"), [({}, [2.0, 2.0]), ({"statistics": False}, [3.0, 4.0])])
def test_an_inner_step_is_one_of_plain_sgd_and_gives_statistics_their_update_whole_or_not_at_all(how, statistics):
    w = {"scale": jnp.array([1.0, 2.0]), "running_mean": jnp.array([3.0, 4.0])}
    gradient = {"scale": jnp.array([0.5, -1.0]), "running_mean": jnp.array([1.0, 2.0])}

    def loss(w):
        return sum(jnp.sum(gradient[name] * w[name]) for name in w)

    stepped = inner_step(loss, w, 0.1, **how)
    np.testing.assert_allclose(stepped["scale"], [0.95, 2.1], rtol=1e-6)
    np.testing.assert_allclose(stepped["running_mean"], statistics, rtol=1e-6)


def test_derivatives_of_an_inner_step_are_first_order():
    def judged(w):
        return jnp.sum(inner_step(lambda w: jnp.sum(w["w"] ** 3) / 3, {"w": w}, 0.1)["w"] ** 2)

    w = jnp.array([1.0, -2.0])
    np.testing.assert_allclose(jax.grad(judged)(w), 2 * (w - 0.1 * w**2), rtol=1e-6)
