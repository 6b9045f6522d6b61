"""Control variates: the term that corrects the local steps."""

import jax
import numpy as np

from fedjax_pfl.ops.variates import tilt


def test_the_tilt_has_no_value_and_the_correction_as_its_gradient():
    rng = np.random.default_rng(0)
    w, correction = ({"kernel": rng.normal(size=(2, 3)), "bias": [rng.normal(size=3)]} for _ in range(2))
    w, correction = jax.tree.map(np.float32, (w, correction))
    value, gradient = jax.jit(jax.value_and_grad(tilt))(w, correction)
    assert float(value) == 0.0
    jax.tree.map(np.testing.assert_array_equal, gradient, correction)
