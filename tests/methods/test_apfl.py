"""APFL against rounds in NumPy, its limits, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data, pack
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.apfl import Client, apfl
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models.norm import MOMENTUM, STATISTICS, is_statistic
from fedjax_pfl.ops.training import Trainer
from tests.play import KEY, SOME, N, exchanged, play
from tests.quadratics import curved, quadratic
from tests.reference import MLP, at, batches, client, client_key, held, now, to_numpy, weighted_mean

ROUNDS = 4

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def mixed(alpha, v, w):
    return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, v, w)


def apfl_client(mlp, key, t, w, v, alpha, rows, trainer):
    """One participation; the derivative with respect to alpha by central differences."""
    rate, momentum = trainer.lr * trainer.lr_decay**t, trainer.momentum
    velocity_w = velocity_v = jax.tree.map(np.zeros_like, w)
    order = batches(key, len(rows), epochs=trainer.epochs, batch_size=trainer.batch_size)
    for number, positions in enumerate(order):
        batch, a = rows[positions], alpha
        if number == 0:
            above, below = (mlp.loss(mixed(a + h, v, w), batch) for h in (1e-6, -1e-6))
            alpha = np.clip(a - rate * (above - below) / 2e-6, 0, 1)
        g_w, g_mix = mlp.gradient(w, batch), mlp.gradient(mixed(a, v, w), batch)
        velocity_w = jax.tree.map(lambda old, g, w: momentum * old + g + trainer.weight_decay * w, velocity_w, g_w, w)
        velocity_v = jax.tree.map(
            lambda old, g, v, a=a: momentum * old + a * g + trainer.weight_decay * v, velocity_v, g_mix, v
        )
        w, v = (jax.tree.map(lambda p, step: p - rate * step, *pair) for pair in ((w, velocity_w), (v, velocity_v)))
    return w, v, alpha


def test_rounds_and_scores_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9, weight_decay=0.01, lr=0.3)
    method = apfl(model, trainer, alpha=0.4, adaptive=True)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp, server = MLP(federation.x, federation.y), to_numpy(start.state.server)
    own, alpha, post = [server] * N, np.full(N, 0.4), {}
    for t, cohort in enumerate(cohorts):
        uploads, rows = [], [held(federation.train, i) for i in cohort]
        for i, held_rows in zip(cohort, rows, strict=True):
            key = client_key(KEY, t, i)
            w, own[i], alpha[i] = apfl_client(mlp, key, t, server, own[i], alpha[i], held_rows, trainer)
            post[i] = mixed(alpha[i], own[i], w)
            uploads.append(w)
        server = weighted_mean(uploads, list(map(len, rows)))
    jax.tree.map(near, end.state.server, server)
    near(end.state.clients.alpha, alpha)
    assert len(np.unique(alpha)) > 4
    assert alpha.max() == 0.4, "that of a client that never took part"
    pre = jax.jit(Engine(method, N, SOME).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        jax.tree.map(near, client(end.state.clients.params, i), own[i])
        rows = held(federation.test, i)
        near([float(leaf[i]) for leaf in pre], mlp.scores(mixed(alpha[i], own[i], server), rows))
        if i in post:
            near([float(leaf[i]) for leaf in end.post.test], mlp.scores(post[i], rows))


@pytest.fixture(scope="module")
def data(federation):
    return client_data(federation.x, federation.y, client(federation.train, 4))


@pytest.fixture(scope="module")
def models(model):
    """A global and a personal model."""
    w = model.init(KEY)
    return w, jax.tree.map(lambda leaf: leaf + 0.1, w)


def test_a_fixed_share_of_nothing_is_fedavg_and_of_everything_is_local(model, trainer, data, models):
    w, v = models

    @jax.jit
    def trained(alpha):
        method = apfl(model, trainer, alpha=alpha)
        update = method.local(now(KEY, 0), w, Client(v, None), data)
        return update, method.personal(*update.trained)

    (averaging, nothing), (alone, everything) = trained(0.0), trained(1.0)
    train = jax.jit(fedavg(model, trainer).local)
    close = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6))
    expected = train(now(KEY, 0), w, (), data)
    close((averaging.upload, averaging.info), (expected.upload, expected.info))
    close(alone.upload, expected.upload)
    close(nothing, expected.upload)
    jax.tree.map(np.testing.assert_array_equal, averaging.client.params, v)
    # Local trains the client's own model as FedAvg trains the received one.
    close((everything, alone.client.params), (train(now(KEY, 0), v, (), data).upload,) * 2)


def test_a_learned_share_never_leaves_the_unit_interval(model, trainer, data, models):
    """In the middle the slopes from one model to the other and back are opposite, and steps this long go too far."""
    local = jax.jit(apfl(model, replace(trainer, lr=1e3), adaptive=True).local)
    updates = [local(now(KEY, 0), w, Client(v, jnp.array(0.5)), data) for w, v in (models, models[::-1])]
    assert sorted(float(update.client.alpha) for update in updates) == [0.0, 1.0]
    assert all(float(update.diagnostics["alpha"]) == float(update.client.alpha) for update in updates)


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_running_statistics_of_the_personal_model_follow_the_batches_of_the_mix(alpha, model_with_norm, trainer, data):
    """With each batch they go a tenth of the way to its own: so no variance can fall below zero.

    The parameters are those of the received model: no share of them is better, whatever the statistics say.
    """
    w = model_with_norm.init(KEY)
    other = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf + 3.0 * is_statistic(path), w)
    local = jax.jit(apfl(model_with_norm, trainer, adaptive=True).local)
    updates = [local(now(KEY, 0), w, Client(v, jnp.array(alpha)), data) for v in (w, other)]
    assert [float(update.client.alpha) for update in updates] == [alpha, alpha]
    (low, high), steps = (update.client.params for update in updates), int(updates[0].info.steps)
    for name in STATISTICS:
        gap = high["extractor"]["norm"][name] - low["extractor"]["norm"][name]
        near(gap, 3.0 * (1 - MOMENTUM) ** steps)
    assert (low["extractor"]["norm"]["running_var"] > 0).all()


def test_a_client_without_samples_keeps_what_it_has_and_sends_what_it_received(federation):
    rows = jax.tree.map(lambda leaf: leaf[0], pack([np.zeros(0, np.int64)], np.asarray(federation.y), 3))
    method = apfl(quadratic(*curved()), Trainer(batch_size=4, lr=0.05), adaptive=True)
    received, own = method.init(KEY, N)
    own = own._replace(params=jax.tree.map(lambda leaf: leaf + 0.5, own.params))
    update = jax.jit(method.local)(now(KEY, 0), received, own, client_data(federation.x, federation.y, rows))
    jax.tree.map(np.testing.assert_array_equal, (update.upload, update.client), (received, own))


def test_the_model_goes_down_and_comes_back_and_another_stays_with_its_share(model, trainer, federation):
    parameters = 16 * 8 + 8 + 8 * 3 + 3
    assert exchanged(apfl(model, trainer), federation) == (parameters, parameters, parameters)
    assert exchanged(apfl(model, trainer, adaptive=True), federation) == (parameters, parameters, parameters + 1)
