"""The LSTM in NumPy, its size, and its initial values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.models import MODELS, build
from fedjax_pfl.models.char_lstm import CharLSTM
from tests.reference import to_numpy

KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(0, 7, (3, 5)).astype(np.uint8)


@functools.cache
def built(init="torch"):
    model = build(CharLSTM(7, 3, 16, init), (5,), 4, init=init)
    return model, jax.jit(model.init)(KEY)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(weights, sequence):
    """The hidden states of a layer, one step after the other; gates as in Hochreiter and Gers."""
    hidden = weights["hi"]["bias"].shape[0]
    h = c = np.zeros((len(sequence), hidden))
    states = []
    for x in np.moveaxis(sequence, 1, 0):
        i, f, g, o = (
            x @ weights[f"i{gate}"]["kernel"] + h @ weights[f"h{gate}"]["kernel"] + weights[f"h{gate}"]["bias"]
            for gate in "ifgo"
        )
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.stack(states, axis=1)


def test_the_feature_is_the_last_state_of_the_second_layer_in_numpy():
    model, params = built()
    w = to_numpy(params)
    theta, head = w["extractor"], w["head"]
    z = lstm(theta["lstm2"], lstm(theta["lstm1"], theta["embedding_layer"]["embedding"][TOKENS]))[:, -1]

    @jax.jit
    def found(params, x):
        return model.features(params["extractor"], x), model.apply(params, x)

    features, logits = found(params, jnp.asarray(TOKENS))
    np.testing.assert_allclose(features, z, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(logits, z @ head["kernel"] + head["bias"], rtol=1e-4, atol=1e-6)
    assert (model.dim, model.classes, model.maps, model.projection) == (16, 4, (), None)


def test_it_has_the_size_that_is_published_for_90_symbols():
    """820,522 parameters in Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295)."""
    shapes = jax.eval_shape(build(CharLSTM(90, 8, 256, "torch"), (80,), 90, init="torch").init, KEY)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 820_522


def test_the_options_are_those_of_the_benchmark_unless_given():
    assert MODELS["char_lstm"]() == CharLSTM(80, 8, 256, "torch")
    assert MODELS["char_lstm"](embedding=3, hidden=4, init="flax") == CharLSTM(80, 3, 4, "flax")


def test_torch_weights_and_biases_are_uniform_within_one_over_the_root_of_the_width():
    theta = to_numpy(built()[1]["extractor"])
    for layer in ("lstm1", "lstm2"):
        values = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(theta[layer])])
        assert 0.97 * 0.25 < np.abs(values).max() <= 0.25
        assert values.std() == pytest.approx(0.25 / 3**0.5, rel=0.1)
        assert all(np.abs(theta[layer][f"h{gate}"]["bias"]).min() > 0 for gate in "ifgo")
    assert theta["embedding_layer"]["embedding"].std() == pytest.approx(1, rel=0.3)


def test_flax_recurrent_kernels_are_orthogonal_and_biases_zero():
    theta = to_numpy(built("flax")[1]["extractor"])
    for layer in ("lstm1", "lstm2"):
        for gate in "ifgo":
            kernel = theta[layer][f"h{gate}"]["kernel"]
            np.testing.assert_allclose(kernel @ kernel.T, np.eye(16), atol=1e-5)
            assert not theta[layer][f"h{gate}"]["bias"].any()
    table = theta["embedding_layer"]["embedding"]
    assert table.std() == pytest.approx(table.shape[1] ** -0.5, rel=0.3)
    assert theta["lstm2"]["ii"]["kernel"].std() == pytest.approx(0.25, rel=0.15)
