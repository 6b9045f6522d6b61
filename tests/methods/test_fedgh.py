"""FedGH against rounds in NumPy, the server's step on its own, and what is exchanged."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import round_keys
from fedjax_pfl.method import Cohort, PerClass
from fedjax_pfl.methods.fedgh import fedgh
from fedjax_pfl.ops.training import Trainer
from tests.conftest import CLASSES
from tests.play import KEY, SOME, N, exchanged, play
from tests.reference import (
    MLP,
    at,
    class_means,
    client,
    client_key,
    held,
    linear,
    linear_gradient,
    now,
    softmax_loss,
    to_numpy,
    train,
)

ROUNDS = 3
SERVER = {"server_lr": 0.3, "server_epochs": 2, "server_batch_size": 4}

near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def server_head(phi, received, key, t):
    """phi after the server's passes over ``received``: client -> its class means and counts."""
    pairs = [(means[c], c) for _, (means, counts) in sorted(received.items()) for c in np.flatnonzero(counts)]
    z, y = map(np.array, zip(*pairs, strict=True))

    def gradient(phi, rows):
        return linear_gradient(z[rows], softmax_loss(linear(phi, z[rows]), y[rows])[1])

    trainer = Trainer(epochs=SERVER["server_epochs"], batch_size=SERVER["server_batch_size"], lr=SERVER["server_lr"])
    return train(phi, gradient, key, t, np.arange(len(y)), trainer, phase="head")


def test_rounds_and_scores_are_numpys(model, trainer, federation):
    trainer = replace(trainer, weight_decay=0.01, lr_decay=0.9)
    method = fedgh(model, trainer, **SERVER)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    phi, theta, post = to_numpy(start.state.server), [to_numpy(client(start.state.clients, i)) for i in range(N)], {}
    for t, cohort in enumerate(cohorts):
        received = {}
        for i in cohort:
            w = {"extractor": theta[i], "head": phi}
            w, _ = mlp.train(w, client_key(KEY, t, i), t, rows[i], trainer)
            theta[i], post[i] = w["extractor"], w
            received[i] = class_means(mlp.features(w, rows[i]), mlp.y[rows[i]], CLASSES)
        if received:
            phi = server_head(phi, received, round_keys(KEY, at(t)).aggregate, t)
    assert any(cohort != sorted(cohort) for cohort in cohorts), "the pairs are ordered by client"
    jax.tree.map(near, end.state.server, phi)
    pre = jax.jit(Engine(method, N, SOME).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        jax.tree.map(near, client(end.state.clients, i), theta[i])
        everyones = {"extractor": theta[i], "head": phi}
        near([float(leaf[i]) for leaf in pre], mlp.scores(everyones, held(federation.test, i)))
        if i in post:
            near([float(leaf[i]) for leaf in end.post.test], mlp.scores(post[i], held(federation.test, i)))


def test_a_small_step_of_the_server_lowers_the_loss_on_the_pairs_and_on_no_others(model, trainer):
    """Some classes are not held, and the last client is absent: what stands in their rows is no pair."""
    rng = np.random.default_rng(1)
    means = rng.normal(0, 2, (4, CLASSES, model.dim))
    counted = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    cohort = Cohort(jnp.array([3, 0, 5, N]), jnp.array([4.0, 9.0, 2.0, 0.0]), N, N)
    method = fedgh(model, trainer, server_lr=0.01, server_batch_size=64)
    phi, _ = method.init(KEY, N)

    @jax.jit
    def step(means):
        uploads = PerClass(jnp.asarray(counted), means)
        return method.aggregate(now(KEY, 0), phi, (), uploads, cohort)[0]

    z, y = means[counted], np.nonzero(counted)[1]
    before, d = softmax_loss(linear(to_numpy(phi), z), y)
    found = to_numpy(step(jnp.asarray(means, jnp.float32)))
    jax.tree.map(near, found, jax.tree.map(lambda w, g: w - 0.01 * g, to_numpy(phi), linear_gradient(z, d)))
    assert softmax_loss(linear(found, z), y)[0] < before
    filled = np.where(counted[:, :, None], means, 1e3)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(step(jnp.asarray(filled, jnp.float32))), found)


def test_the_head_goes_down_and_class_means_come_back(model, trainer, federation):
    floats = exchanged(fedgh(model, trainer), federation)
    head = model.dim * CLASSES + CLASSES
    assert floats == (head, CLASSES * model.dim + CLASSES, 16 * model.dim + model.dim)
