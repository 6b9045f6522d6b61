"""Factors of many matrices: the same on every platform, and one by one on a CPU."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.methods.fedpac.collaboration import head_weights
from fedjax_pfl.ops.matrices import map_matrices


def factors_in(compiled):
    """The shapes that LAPACK's factorisations are given."""
    return set(re.findall(r"f32\[([\d,]*)\][^\n]*custom-call[^\n]*lapack_s(?:potrf|geqrf)", compiled.as_text()))


@pytest.mark.parametrize(("fn", "shape"), [(jnp.linalg.cholesky, "3,3"), (partial(jnp.linalg.qr, mode="r"), "3,3")])
def test_a_cpu_factors_matrix_by_matrix(fn, shape):
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(5, 3, 3))
    matrices = jnp.asarray(roots @ roots.swapaxes(1, 2) + np.eye(3), jnp.float32)
    program = jax.jit(partial(map_matrices, fn)).lower(matrices).compile()
    assert factors_in(program) == {shape}
    assert factors_in(jax.jit(jax.vmap(fn)).lower(matrices).compile()) == {f"5,{shape}"}
    np.testing.assert_allclose(program(matrices), jax.vmap(fn)(matrices), rtol=1e-5, atol=1e-6)


def test_the_weights_of_a_hundred_heads_come_to_an_end_on_two_devices(mesh):
    """Factored as a batch, two CPU devices waited for each other for ever here."""
    rng = np.random.default_rng(0)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    h, v = rng.normal(size=(100, 10, 8)).astype(np.float32), 50 * rng.random(100).astype(np.float32)
    weights = jax.jit(head_weights)
    for _ in range(3):
        found = weights(*jax.device_put((h, v, np.ones(100, bool)), everywhere))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
