"""FedProc against rounds in NumPy, its limits, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.method import PerClass
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedproc import Sent, fedproc
from tests.conftest import CLASSES
from tests.play import KEY, SOME, N, exchanged, play, update_of
from tests.reference import (
    MLP,
    class_means,
    client,
    client_key,
    held,
    linear,
    linear_gradient,
    now,
    softmax_loss,
    to_numpy,
    weighted_mean,
)

ROUNDS, ANNEAL, TEMPERATURE = 4, 3, 0.4

near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def normalised(z):
    return z / np.sqrt(np.sum(z**2, axis=1, keepdims=True) + 1e-12)


def contrast_gradient(z, y, points, valid, temperature):
    """-log softmax of cos(z, P_y) / temperature: of each sample, and its gradient; 0 where P_y is none."""
    unit, length = normalised(z), np.sqrt(np.sum(z**2, axis=1, keepdims=True) + 1e-12)
    logits = np.where(valid, unit @ normalised(points).T / temperature, -1e9)
    value = np.array([softmax_loss(logits[n : n + 1], y[n : n + 1])[0] for n in range(len(y))])
    d_unit = softmax_loss(logits, y)[1] * len(y) @ normalised(points) / temperature
    d_z = (d_unit - unit * np.sum(d_unit * unit, axis=1, keepdims=True)) / length
    return value * valid[y], d_z * valid[y][:, None]


def fedproc_gradient(mlp, points, valid, a):
    """(w, rows) -> the gradient of a CE + (1 - a) contrast, and of CE alone for a class without a prototype."""

    def gradient(w, rows):
        z, y = mlp.features(w, rows), mlp.y[rows]
        of_ce = np.where(valid[y], a, 1.0)[:, None]
        d = softmax_loss(linear(w["head"], z), y)[1] * of_ce
        d_contrast = contrast_gradient(z, y, points, valid, TEMPERATURE)[1] / len(y)
        d_z = d @ w["head"]["kernel"].T + (1 - a) * d_contrast
        return {"extractor": mlp.extract_gradient(w["extractor"], rows, d_z), "head": linear_gradient(z, d)}

    return gradient


def test_rounds_are_numpys(model, trainer, federation):
    trainer = replace(trainer, weight_decay=0.01, lr_decay=0.9)
    method = fedproc(model, trainer, anneal_rounds=ANNEAL, temperature=TEMPERATURE)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    w, points, valid = to_numpy(start.state.server.params), np.zeros((CLASSES, model.dim)), np.zeros(CLASSES, bool)
    post, mixed = {}, []
    for t, cohort in enumerate(cohorts):
        a = min(1, t / ANNEAL) if t else 1
        mixed.append(a < 1 and valid.any())
        uploads, sums, counts = [], np.zeros_like(points), np.zeros(CLASSES)
        for i in cohort:
            gradient = fedproc_gradient(mlp, points, valid, a)
            post[i], _ = mlp.train(w, client_key(KEY, t, i), t, rows[i], trainer, gradient=gradient)
            uploads.append(post[i])
            means, n = class_means(normalised(mlp.features(post[i], rows[i])), mlp.y[rows[i]], CLASSES)
            sums, counts = sums + means * n[:, None], counts + n
        w = weighted_mean(uploads, [len(rows[i]) for i in cohort]) if cohort else w
        valid = valid | (counts > 0)
        points = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], points)
    assert sum(mixed) >= 2
    jax.tree.map(near, end.state.server.params, w)
    near(end.state.server.prototypes.mean, points)
    np.testing.assert_array_equal(end.state.server.prototypes.valid, valid)
    for i, params in post.items():
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(params, held(federation.test, i)))
    pooled = jax.jit(method.global_predict)(end.state.server, federation.x)
    near(pooled, mlp.logits(w, np.arange(len(mlp.y))), atol=1e-4)


@pytest.fixture(scope="module")
def participate(model, trainer, federation):
    """t -> what client 2 uploads in round t, given prototypes of two of three classes; and these."""
    method = fedproc(model, trainer, anneal_rounds=ANNEAL, temperature=TEMPERATURE)
    points, valid = np.random.default_rng(0).normal(0, 1, (CLASSES, model.dim)), np.array([True, False, True])
    view = Sent(method.init(KEY, N)[0].params, PerClass(jnp.asarray(valid), jnp.asarray(points, jnp.float32)))
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    local = jax.jit(method.local)
    return lambda t: local(now(KEY, t), view, (), data).upload, view.params, (points, valid)


def test_a_sample_whose_class_has_no_prototype_has_cross_entropy_alone(participate, trainer, federation):
    upload, w, prototypes = participate
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, 2)
    assert set(mlp.y[rows]) == {0, 1, 2}
    gradient = fedproc_gradient(mlp, *prototypes, 1 / ANNEAL)
    expected, _ = mlp.train(to_numpy(w), KEY, 1, rows, trainer, gradient=gradient)
    jax.tree.map(near, upload(1).params, expected)


@pytest.mark.parametrize("t", [0, ANNEAL, ANNEAL + 4])
def test_in_round_0_and_after_the_annealing_it_is_fedavg(t, participate, model, trainer, federation):
    upload, w, _ = participate
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, 2)
    expected, _ = mlp.train(to_numpy(w), KEY, t, rows, trainer)
    jax.tree.map(near, upload(t).params, expected)


def test_round_0_is_fedavgs_bit_for_bit(model, trainer, federation):
    found = update_of(fedproc(model, trainer), federation, 4)
    expected = update_of(fedavg(model, trainer), federation, 4)
    jax.tree.map(np.testing.assert_array_equal, (found.upload.params, found.info), (expected.upload, expected.info))


def test_model_and_class_rows_go_down_and_come_back(model, trainer, federation):
    floats = exchanged(fedproc(model, trainer), federation)
    params = 16 * model.dim + model.dim + CLASSES * model.dim + CLASSES
    assert floats == (params + CLASSES * model.dim + CLASSES, params + CLASSES * model.dim + CLASSES, 0)
