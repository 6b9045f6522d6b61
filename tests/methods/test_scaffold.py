"""SCAFFOLD against rounds in NumPy, its invariant, its limit, and what it exchanges."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data, pack
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.scaffold import scaffold
from fedjax_pfl.models import Model
from tests.play import EVERYONE, KEY, SOME, N, exchanged, play
from tests.reference import MLP, client, client_key, held, now, to_numpy

ROUNDS, SERVER_LR = 4, 0.7

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def scaffold_client(mlp, key, t, w, c, own, rows, trainer):
    """Lines 7 to 13 of Algorithm 1, with option II; the change of w and the new c_i."""

    def corrected(w, rows):
        return jax.tree.map(lambda g, own, c: g - own + c, mlp.gradient(w, rows), own, c)

    trained, _ = mlp.train(w, key, t, rows, trainer, gradient=corrected)
    # How far a constant gradient of 1 would have gone at a rate of 1: the number of steps, without momentum.
    velocity = distance = 0.0
    for _ in range(trainer.epochs * -(-len(rows) // trainer.batch_size)):
        velocity = trainer.momentum * velocity + 1
        distance += velocity
    distance *= trainer.lr * trainer.lr_decay**t
    new = jax.tree.map(lambda own, c, w, v: own - c + (w - v) / distance, own, c, w, trained)
    return jax.tree.map(np.subtract, trained, w), new


# A momentum of 0 is one that the program does not have.
@pytest.fixture(scope="module", params=[(0.0, EVERYONE, 0), (0.5, SOME, 2)], ids=["everyone", "some with momentum"])
def run(request, model, trainer, federation):
    momentum, who, new = request.param
    trainer = replace(trainer, momentum=momentum, weight_decay=0.01, lr_decay=0.9)
    method = scaffold(model, trainer, server_lr=SERVER_LR)
    start, end, cohorts = play(method, federation, who=who, new=new, rounds=ROUNDS)
    start, end = jax.tree.map(np.asarray, (start, end))
    return SimpleNamespace(start=start, end=end, cohorts=cohorts, method=method, trainer=trainer, trainers=N - new)


def test_rounds_are_numpys(run, federation):
    mlp = MLP(federation.x, federation.y)
    w = to_numpy(run.start.state.server.params)
    c = jax.tree.map(np.zeros_like, w)
    own, post = [c] * N, {}
    for t, cohort in enumerate(run.cohorts):
        changes, old = [], own.copy()
        for i in cohort:
            rows, key = held(federation.train, i), client_key(KEY, t, i)
            change, own[i] = scaffold_client(mlp, key, t, w, c, own[i], rows, run.trainer)
            changes.append(change)
            post[i] = jax.tree.map(np.add, w, change)
        if cohort:
            w = jax.tree.map(lambda w, *changes: w + SERVER_LR * np.mean(changes, axis=0), w, *changes)
        for i in cohort:
            c = jax.tree.map(lambda c, new, old: c + (new - old) / run.trainers, c, own[i], old[i])
    jax.tree.map(near, tuple(run.end.state.server), (w, c))
    for i in range(N):
        jax.tree.map(near, client(run.end.state.clients, i), own[i])
    for i, params in post.items():
        near([float(leaf[i]) for leaf in run.end.post.test], mlp.scores(params, held(federation.test, i)))
    pooled = jax.jit(run.method.global_predict)(run.end.state.server, federation.x)
    near(pooled, mlp.logits(w, np.arange(len(mlp.y))), atol=1e-4)


def test_the_servers_variate_is_the_mean_of_all_that_may_take_part(run):
    means = jax.tree.map(lambda leaf: np.mean(leaf[: run.trainers], axis=0), run.end.state.clients)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), run.end.state.server.control, means)
    assert np.abs(means["head"]["kernel"]).max() > 0.01


def test_clients_that_agree_have_nothing_to_correct_and_run_fedavg(model, trainer, federation):
    trainer = replace(trainer, batch_size=32)
    tables = jax.tree.map(np.asarray, (federation.train, federation.test))
    train, test = client(tables, np.full(N, 2))
    alike = federation._replace(train=train, test=test)
    start, end, _ = play(scaffold(model, trainer), alike, rounds=ROUNDS, scored=False)
    _, expected, _ = play(fedavg(model, trainer), alike, rounds=ROUNDS, scored=False)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, end.state.server.params, expected.state.server)
    assert float(end.loss) == pytest.approx(float(expected.loss), rel=1e-4)
    assert not np.allclose(end.state.server.params["head"]["kernel"], start.state.server.params["head"]["kernel"])


def test_a_client_without_samples_changes_nothing(model, trainer, federation):
    method = scaffold(model, trainer)
    nobody = jax.tree.map(lambda leaf: np.asarray(leaf)[0], pack([np.zeros(0, np.int64)], np.asarray(federation.y), 3))

    @jax.jit
    def work(nobody):
        view, own = method.init(KEY, N)
        control, own = (jax.tree.map(lambda leaf, to=to: jnp.full_like(leaf, to), own) for to in (0.3, 0.2))
        data = client_data(federation.x, federation.y, nobody)
        return own, method.local(now(KEY, 0), view._replace(control=control), own, data)

    own, update = work(nobody)
    jax.tree.map(np.testing.assert_array_equal, update.client, own)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(update.upload))


def test_running_statistics_are_averaged_without_variates(trainer, federation):
    """A linear model whose loss has a gradient with respect to its running mean: what is to be taken off it."""

    def features(theta, x, mask=None):
        return theta["scale"] * x.reshape(len(x), -1).astype(jnp.float32) / 255 - theta["norm"]["running_mean"]

    def classify(phi, z):
        return z @ phi["kernel"]

    theta = {"scale": jnp.ones(16), "norm": {"running_mean": jnp.full(16, 0.25)}}
    phi = {"kernel": jnp.asarray(np.random.default_rng(0).normal(0, 0.1, (16, 3)), jnp.float32)}
    model = Model(
        init=lambda key: {"extractor": theta, "head": phi},
        features=features,
        features_and_maps=lambda theta, x, mask=None: (features(theta, x), ()),
        classify=classify,
        apply=lambda params, x, mask=None: classify(params["head"], features(params["extractor"], x)),
        dim=16,
        classes=3,
        maps=(),
    )
    small = replace(trainer, lr=0.01)
    start, end, _ = play(scaffold(model, small, server_lr=0.5), federation, rounds=1, scored=False)

    def trained(key, row):
        data = client_data(federation.x, federation.y, row)
        return fedavg(model, small).local(now(key, 0), start.state.server.params, (), data).upload

    keys = jnp.stack([client_key(KEY, 0, i) for i in range(N)])
    uploads = jax.jit(lambda keys, rows: jax.lax.map(lambda row: trained(*row), (keys, rows)))(keys, federation.train)
    mean = jax.tree.map(lambda leaf: np.mean(leaf, axis=0), uploads)
    found = end.state.server.params["extractor"]
    np.testing.assert_allclose(found["scale"], 0.5 + 0.5 * mean["extractor"]["scale"], rtol=1e-5)
    np.testing.assert_allclose(found["norm"]["running_mean"], mean["extractor"]["norm"]["running_mean"], rtol=1e-5)
    assert not np.allclose(found["norm"]["running_mean"], 0.25, rtol=1e-2)
    for variate in (end.state.server.control, end.state.clients):
        assert np.any(variate["extractor"]["scale"])
        assert not np.any(variate["extractor"]["norm"]["running_mean"])


def test_parameters_and_variates_go_down_and_come_back(model, trainer, federation):
    found = exchanged(scaffold(model, trainer), federation)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    assert (found.down, found.up, found.kept) == (2 * parameters, 2 * parameters, parameters)
