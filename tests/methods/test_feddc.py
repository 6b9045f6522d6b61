"""FedDC against rounds in NumPy, its first round, and what is left of it without drift."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import Clients, client_data
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.feddc import Client, Server, Shared, Upload, feddc
from fedjax_pfl.methods.scaffold import scaffold
from tests.conftest import TRAIN_SIZES
from tests.play import KEY, SOME, N, exchanged, play, update_of
from tests.reference import MLP, client, client_key, held, now, to_numpy

ROUNDS, ALPHA, MEAN_SIZE, NEW = 4, 0.3, float(np.mean(TRAIN_SIZES)), 2

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def tree_sum(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


def feddc_client(mlp, key, t, w, c, h, own, rows, trainer, u=1.0):
    """w_i - w and the new c_i, with the weights u_i of the official code."""

    def gradient(params, rows):
        def terms(g, w_i, w, h, own, c):
            return g + ALPHA / u * (w_i + h - w) + c / u - own

        return jax.tree.map(terms, mlp.gradient(params, rows), params, w, h, own, c)

    trained, _ = mlp.train(w, key, t, rows, trainer, gradient=gradient)
    length = trainer.epochs * -(-len(rows) // trainer.batch_size) * trainer.lr * trainer.lr_decay**t
    d = jax.tree.map(np.subtract, trained, w)
    return d, jax.tree.map(lambda own, c, d: own - c / u - d / length, own, c, d)


@pytest.fixture(scope="module")
def trainer(trainer):
    return replace(trainer, lr_decay=0.9, momentum=0.0)


def test_rounds_are_numpys(model, trainer, federation):
    trainers, method = N - NEW, feddc(model, trainer, alpha=ALPHA)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS, new=NEW)
    mlp, w = MLP(federation.x, federation.y), to_numpy(start.state.server.params)
    c = jax.tree.map(np.zeros_like, w)
    h, own, post = [c] * N, [c] * N, {}
    for t, cohort in enumerate(cohorts):
        changes = {}
        for i in cohort:
            rows, key = held(federation.train, i), client_key(KEY, t, i)
            d, learned = feddc_client(mlp, key, t, w, c, h[i], own[i], rows, trainer)
            changes[i] = jax.tree.map(np.subtract, learned, own[i])
            h[i], own[i], post[i] = tree_sum(h[i], d), learned, tree_sum(w, d)
        mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *(post[i] for i in cohort))
        w = jax.tree.map(lambda mean, *h: mean + np.sum(h, axis=0) / trainers, mean, *h)
        c = jax.tree.map(lambda c, *changes: c + np.sum(changes, axis=0) / trainers, c, *changes.values())
    assert all(0 < len(cohort) < trainers for cohort in cohorts)
    jax.tree.map(near, tuple(end.state.server[:2]), (w, c))
    for i in range(N):
        jax.tree.map(near, tuple(client(end.state.clients, i)), (h[i], own[i]))
    for i, params in post.items():
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(params, held(federation.test, i)))
    pooled = jax.jit(method.global_predict)(end.state.server, federation.x)
    near(pooled, mlp.logits(w, np.arange(len(mlp.y))), atol=1e-4)


@pytest.fixture(scope="module")
def arrays(model):
    """Numbers -> trees like the parameters, with random leaves that have these many rows, or none."""
    shapes = jax.eval_shape(model.init, KEY)

    def draw(seed, *rows):
        rng = np.random.default_rng(seed)
        return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, (*rows, *leaf.shape)), jnp.float32), shapes)

    return draw


def test_the_first_round_with_everybody_goes_twice_as_far_as_the_mean(model, trainer, arrays):
    method = feddc(model, trainer)
    server, _ = method.init(KEY, 4)
    change = arrays(1, 4)
    cohort = Cohort(jnp.arange(4), jnp.full(4, 5.0), 4, 4)
    after, _ = method.aggregate(now(KEY, 0), server, (), Upload(change, arrays(2, 4)), cohort)
    w0, w1 = to_numpy((server.params, after.params))
    trained = jax.tree.map(lambda w0, change: np.mean(w0 + change, axis=0), w0, change)
    jax.tree.map(lambda w0, w1, mean: near(w1, 2 * mean - w0), w0, w1, trained)


def test_without_drift_and_penalty_it_is_scaffold(model, trainer, federation, arrays):
    method, plain = feddc(model, trainer, alpha=0.0), scaffold(model, trainer)
    zeros = jax.tree.map(jnp.zeros_like, arrays(0))
    view, own, when = Shared(arrays(3), arrays(4)), arrays(5), now(KEY, 0)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    found = jax.jit(method.local)(when, view, Client(zeros, own), data)
    expected = jax.jit(plain.local)(when, view, own, data)
    jax.tree.map(near, tuple(found.upload), tuple(expected.upload))
    jax.tree.map(near, found.client.control, expected.client)
    jax.tree.map(near, found.client.drift, expected.upload.params)
    assert float(found.info.loss) == pytest.approx(float(expected.info.loss), rel=1e-5)

    uploads = arrays(6, 3), arrays(7, 3)
    cohort = Cohort(jnp.array([2, 0, 5]), jnp.array([4.0, 9.0, 0.0]), 5, 5)
    server, _ = method.aggregate(when, Server(*view, zeros), (), Upload(*uploads), cohort)
    (params, control), _ = plain.aggregate(when, view, (), Shared(*uploads), cohort)
    jax.tree.map(near, server.control, control)
    jax.tree.map(lambda found, drift, expected: near(found - drift, expected), server.params, server.drift, params)


@pytest.fixture(scope="module")
def local_by_size(model, trainer):
    return jax.jit(feddc(model, trainer, alpha=ALPHA, mean_size=MEAN_SIZE).local)


@pytest.mark.parametrize("i", [0, 2])
def test_clients_that_are_weighed_by_size_are_numpys(i, local_by_size, trainer, federation, arrays):
    w, c, h, own = (arrays(seed) for seed in range(4))
    data = client_data(federation.x, federation.y, client(federation.train, i))
    update = local_by_size(now(client_key(KEY, 1, i), 1), Shared(w, c), Client(h, own), data)
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, i)
    u, before = len(rows) / MEAN_SIZE, to_numpy((w, c, h, own))
    d, learned = feddc_client(mlp, client_key(KEY, 1, i), 1, *before, rows, trainer, u)
    assert abs(u - 1) > 0.4
    jax.tree.map(near, tuple(update.client), (tree_sum(h, d), learned))
    jax.tree.map(near, tuple(update.upload), (d, jax.tree.map(lambda new, old: u * (new - old), learned, before[3])))


def test_copies_are_no_further_samples(local_by_size, trainer, federation, arrays):
    w, c, h, own = (arrays(seed) for seed in range(4))
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    rows = held(federation.train, 2)
    copied = data._replace(original=data._replace(count=jnp.int32(len(rows) // 3)))
    update = local_by_size(now(client_key(KEY, 1, 2), 1), Shared(w, c), Client(h, own), copied)
    u, mlp = len(rows) // 3 / MEAN_SIZE, MLP(federation.x, federation.y)
    d, _ = feddc_client(mlp, client_key(KEY, 1, 2), 1, *to_numpy((w, c, h, own)), rows, trainer, u)
    jax.tree.map(near, update.upload.change, d)


def test_a_client_without_samples_changes_nothing(local_by_size, federation, arrays):
    w, c, h, own = (arrays(seed) for seed in range(4))
    nobody = jnp.zeros_like(federation.train.index[0]), jnp.array(0, jnp.int32), jnp.zeros(3)
    data = client_data(federation.x, federation.y, Clients(*nobody))
    update = local_by_size(now(client_key(KEY, 1, 0), 1), Shared(w, c), Client(h, own), data)
    jax.tree.map(np.testing.assert_array_equal, update.client, Client(h, own))
    assert not any(leaf.any() for leaf in jax.tree.leaves(update.upload))


def test_running_statistics_are_averaged_without_drift(model_with_norm, trainer, federation):
    method = feddc(model_with_norm, trainer)
    update = update_of(method, federation, 2)
    for tree, moves in ((update.upload.change, True), (update.client.drift, False), (update.client.control, False)):
        norm = tree["extractor"]["norm"]
        assert (np.abs(norm["running_var"]) > 0.01).all() == moves
        assert norm["running_var"].any() == moves
        assert norm["scale"].any()

    w = {"kernel": jnp.ones(2), "norm": {"running_var": jnp.full(2, 5.0)}}
    zeros = jax.tree.map(jnp.zeros_like, w)
    change = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, 0 * leaf]), w)
    uploads = Upload(change, jax.tree.map(jnp.zeros_like, change))
    cohort = Cohort(jnp.arange(3), jnp.array([1.0, 3.0, 0.0]), 4, 4)
    server = Server(w, zeros, zeros)
    server, _ = method.aggregate(now(KEY, 0), server, (), uploads, cohort)
    near(server.params["norm"]["running_var"], 5 + 7.5)
    near(server.params["kernel"], 1 + 1.5 + (1 + 2) / 4)
    near(server.drift["norm"]["running_var"], 0.0)


def test_parameters_and_variates_go_down_and_come_back(model, trainer, federation):
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    assert exchanged(feddc(model, trainer), federation) == (2 * parameters, 2 * parameters, 2 * parameters)
