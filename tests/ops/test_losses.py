"""Losses on padded batches, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pfl.data.federated import Batch, client_data
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.ops.finetune import finetune
from fedjax_pfl.ops.losses import balanced_cross_entropy, cross_entropy, label_loss, masked_mean, proximal, supervised
from tests.play import KEY, update_of
from tests.reference import MLP, client, client_key, held, now, softmax_loss, to_numpy

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 3, (6, 4)).astype(np.float32)
Y = np.array([0, 3, 1, 1, 2, 0], np.int32)


def test_the_mean_is_over_the_samples_alone():
    values = jnp.array([1.0, 2.0, 9.0, 100.0])
    assert float(masked_mean(values, jnp.array([1.0, 1.0, 1.0, 0.0]))) == pytest.approx(4)
    assert float(masked_mean(values, jnp.array([0.0, 1.0, 0.0, 0.0]))) == pytest.approx(2)
    assert float(masked_mean(values, jnp.zeros(4))) == 0


@pytest.mark.parametrize("backend", ["cpu", "an accelerator"])
@pytest.mark.parametrize("samples", [1, 4, 6])
def test_cross_entropy_and_its_gradient(samples, backend, monkeypatch):
    if backend != "cpu":
        monkeypatch.setattr(lax, "platform_dependent", lambda *operands, default, cpu: default(*operands))
    mask = (jnp.arange(6) < samples).astype(jnp.float32)
    value, gradient = jax.value_and_grad(cross_entropy)(jnp.asarray(LOGITS), jnp.asarray(Y), mask)
    expected, d = softmax_loss(LOGITS[:samples].astype(np.float64), Y[:samples])
    assert float(value) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient[:samples], d, rtol=1e-4, atol=1e-6)
    assert not gradient[samples:].any()


def test_an_empty_batch_has_no_loss_and_no_gradient():
    value, gradient = jax.value_and_grad(cross_entropy)(jnp.asarray(LOGITS), jnp.asarray(Y), jnp.zeros(6))
    assert float(value) == 0
    assert not gradient.any()


def test_cross_entropy_of_extreme_logits_is_finite():
    logits = jnp.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]])
    y = jnp.array([0, 0], jnp.int32)
    value, gradient = jax.value_and_grad(cross_entropy)(logits, y, jnp.ones(2))
    assert float(value) == pytest.approx(1e4)
    np.testing.assert_allclose(gradient, [[0, 0, 0], [-0.5, 0.5, 0]], atol=1e-6)


@pytest.mark.parametrize("strength", [0.4, 1.0])
def test_balanced_softmax_is_the_softmax_weighted_by_powers_of_the_class_counts(strength):
    counts, samples = np.array([8.0, 1.0, 0.0, 5.0]), 4
    mask = (jnp.arange(6) < samples).astype(jnp.float32)
    balanced = jax.value_and_grad(balanced_cross_entropy)
    value, gradient = balanced(jnp.asarray(LOGITS), jnp.asarray(Y), mask, jnp.float32(counts), strength=strength)
    odds = np.exp(LOGITS[:samples].astype(np.float64)) * np.array([8.0, 1.0, 1.0, 5.0]) ** strength
    p = odds / odds.sum(axis=1, keepdims=True)
    assert float(value) == pytest.approx(-np.log(p[np.arange(samples), Y[:samples]]).mean(), rel=1e-5)
    np.testing.assert_allclose(gradient[:samples], (p - np.eye(4)[Y[:samples]]) / samples, rtol=1e-4, atol=1e-6)


def test_balanced_softmax_is_plain_without_strength_and_of_equal_counts():
    logits, y, mask = jnp.asarray(LOGITS), jnp.asarray(Y), jnp.ones(6)
    plain = cross_entropy(logits, y, mask)
    off = balanced_cross_entropy(logits, y, mask, jnp.array([8.0, 1.0, 0.0, 5.0]), strength=0.0)
    np.testing.assert_array_equal(off, plain)
    equal = balanced_cross_entropy(logits, y, mask, jnp.full(4, 7.0), strength=1.0)
    assert float(equal) == pytest.approx(float(plain), rel=1e-5)


def test_the_proximal_gradient_is_strength_times_the_distance():
    w = {"a": jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32), "b": [jnp.asarray(RNG.normal(size=4), jnp.float32)]}
    anchor = jax.tree.map(lambda leaf: leaf * 0.5 + 1, w)
    value, gradient = jax.value_and_grad(proximal)(w, anchor, 0.7)
    drift = jax.tree.map(lambda p, a: np.asarray(p, np.float64) - np.asarray(a), w, anchor)
    squares = sum(np.sum(leaf**2) for leaf in jax.tree.leaves(drift))
    assert float(value) == pytest.approx(0.35 * squares, rel=1e-5)
    jax.tree.map(lambda g, d: np.testing.assert_allclose(g, 0.7 * d, rtol=1e-5), gradient, drift)
    assert float(proximal(w, w, 0.7)) == 0


def test_the_proximal_term_leaves_running_statistics_out():
    w = {"scale": jnp.array([1.0, 2.0]), "running_mean": jnp.array([3.0, 4.0]), "running_var": jnp.array([5.0, 6.0])}
    value, gradient = jax.value_and_grad(proximal)(w, jax.tree.map(jnp.zeros_like, w), 2.0)
    assert float(value) == 5
    jax.tree.map(np.testing.assert_array_equal, gradient, {**jax.tree.map(jnp.zeros_like, w), "scale": [2.0, 4.0]})


# --- A model's regulariser -------------------------------------------------------------------------------------------


def mean_square(z, mask):
    return 0.3 * masked_mean(jnp.sum(z**2, axis=1), mask)


def test_the_regulariser_is_a_term_of_the_supervised_loss_over_the_samples_alone(model, federation):
    params = model.init(jax.random.key(0))
    rows = np.arange(5)
    batch = Batch(federation.x[rows], federation.y[rows], jnp.array([1.0, 1, 1, 0, 0]))
    mlp, w = MLP(federation.x, federation.y), to_numpy(params)
    plain = mlp.loss(w, rows[:3])
    expected = plain + 0.3 * np.mean(np.sum(mlp.features(w, rows[:3]) ** 2, axis=1))
    regular = model._replace(regularizer=mean_square)
    assert float(supervised(model, params, batch)) == pytest.approx(plain, rel=1e-5)
    assert float(supervised(regular, params, batch)) == pytest.approx(expected, rel=1e-5)
    z = model.features(params["extractor"], batch.x)
    assert float(label_loss(regular, z, model.classify(params["head"], z), batch)) == pytest.approx(expected, rel=1e-5)


def test_the_regulariser_acts_where_a_model_is_trained(model, trainer, federation):
    mlp = MLP(federation.x, federation.y)

    def gradient(w, rows):
        plain, pull = mlp.gradient(w, rows), 0.6 * mlp.features(w, rows) / len(rows)
        extra = mlp.extract_gradient(w["extractor"], rows, pull)
        return {**plain, "extractor": jax.tree.map(np.add, plain["extractor"], extra)}

    found = update_of(fedavg(model._replace(regularizer=mean_square), trainer), federation, 4).upload
    start, rows = to_numpy(model.init(KEY)), held(federation.train, 4)
    expected, _ = mlp.train(start, client_key(KEY, 0, 4), 0, rows, trainer, gradient=gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
    plain = update_of(fedavg(model, trainer), federation, 4).upload
    assert not np.allclose(found["extractor"]["hidden_layer"]["kernel"], plain["extractor"]["hidden_layer"]["kernel"])


@pytest.mark.parametrize("scope", ["full", "extractor"])  # to train the head alone, features are cached
def test_the_regulariser_does_not_act_where_a_model_is_fine_tuned(scope, model, trainer, federation):
    params = model.init(jax.random.key(0))
    data = client_data(federation.x, federation.y, client(federation.train, 4))

    def tuned(model):
        options = {"epochs": 2, "lr": None, "scope": scope}
        return jax.jit(lambda: finetune(now(jax.random.key(1), 0), model, trainer, params, data, **options))()

    jax.tree.map(np.testing.assert_array_equal, tuned(model._replace(regularizer=mean_square)), tuned(model))
