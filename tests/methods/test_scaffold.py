"""SCAFFOLD against rounds in NumPy, its invariant, its limit, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data, pack
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine, round_keys
from fedjax_pfl.engine.traffic import count
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.scaffold import scaffold
from fedjax_pfl.models import Model
from tests.reference import MLP, at, client, client_key, held, now, to_numpy

N, ROUNDS, SERVER_LR = 7, 4, 0.7
KEY = jax.random.key(31)
SOME = Participation(0.3, 0.8, 0.2)

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def play(method, federation, *, clients=N, who=SOME, new=0, rounds=ROUNDS):
    engine = Engine(method, clients, who, new=new)
    start = jax.jit(engine.init)(KEY, federation)
    return engine, start, jax.jit(engine.rounds)(KEY, start, at(0), at(rounds), jnp.array(True), federation)


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


@pytest.mark.parametrize(("who", "new"), [(Participation(), 0), (SOME, 2)], ids=["everyone", "some"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_are_numpys(momentum, who, new, model, trainer, federation):
    trainer = replace(trainer, momentum=momentum, weight_decay=0.01, lr_decay=0.9)
    method = scaffold(model, trainer, server_lr=SERVER_LR)
    engine, start, end = play(method, federation, who=who, new=new)
    mlp = MLP(federation.x, federation.y)
    w = to_numpy(start.state.server.params)
    c = jax.tree.map(np.zeros_like, w)
    own, post, trainers = [c] * N, {}, N - new
    for t in range(ROUNDS):
        ids, _ = engine._select(round_keys(KEY, at(t)), federation.train.count)
        cohort = [int(i) for i in ids if i < N]
        changes, old = [], own.copy()
        for i in cohort:
            rows, key = held(federation.train, i), client_key(KEY, t, i)
            change, own[i] = scaffold_client(mlp, key, t, w, c, own[i], rows, trainer)
            changes.append(change)
            post[i] = jax.tree.map(np.add, w, change)
        if cohort:
            w = jax.tree.map(lambda w, *changes: w + SERVER_LR * np.mean(changes, axis=0), w, *changes)
        for i in cohort:
            c = jax.tree.map(lambda c, new, old: c + (new - old) / trainers, c, own[i], old[i])
    jax.tree.map(near, tuple(end.state.server), (w, c))
    for i in range(N):
        jax.tree.map(near, client(end.state.clients, i), own[i])
    for i, params in post.items():
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(params, held(federation.test, i)))
    pooled = jax.jit(method.global_predict)(end.state.server, federation.x)
    near(pooled, mlp.logits(w, np.arange(len(mlp.y))), atol=1e-4)


@pytest.mark.parametrize("new", [0, 3])
def test_with_everybody_the_servers_variate_is_the_mean_of_the_clients(new, model, trainer, federation):
    _, _, end = play(scaffold(model, trainer), federation, who=Participation(), new=new)
    means = jax.tree.map(lambda leaf: np.mean(leaf[: N - new], axis=0), end.state.clients)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), end.state.server.control, means)
    assert np.abs(means["head"]["kernel"]).max() > 0.01


def test_clients_that_agree_have_nothing_to_correct_and_run_fedavg(model, trainer, federation):
    trainer = replace(trainer, batch_size=32)
    rows = np.array([2, 2, 2, 2])
    four = federation._replace(**{part: client(getattr(federation, part), rows) for part in ("train", "test")})
    options = {"clients": 4, "who": Participation()}
    _, start, end = play(scaffold(model, trainer), four, **options)
    _, _, expected = play(fedavg(model, trainer), four, **options)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, end.state.server.params, expected.state.server)
    assert float(end.loss) == pytest.approx(float(expected.loss), rel=1e-4)
    assert not np.allclose(end.state.server.params["head"]["kernel"], start.state.server.params["head"]["kernel"])


def test_a_client_without_samples_changes_nothing(model, trainer, federation):
    method = scaffold(model, trainer)
    (params, _), _ = method.init(KEY, N)
    control, own = (jax.tree.map(lambda leaf, to=to: jnp.full_like(leaf, to), params) for to in (0.3, 0.2))
    nobody = jax.tree.map(lambda leaf: leaf[0], pack([np.zeros(0, np.int64)], np.asarray(federation.y), 3))
    data = client_data(federation.x, federation.y, nobody)
    view = method.init(KEY, N)[0]._replace(control=control)
    update = jax.jit(method.local)(now(KEY, 0), view, own, data)
    jax.tree.map(np.testing.assert_array_equal, update.client, own)
    assert not any(leaf.any() for leaf in jax.tree.leaves(update.upload))


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
    everyone, small = Participation(), replace(trainer, lr=0.01)
    _, start, end = play(scaffold(model, small, server_lr=0.5), federation, who=everyone, rounds=1)
    local = jax.jit(fedavg(model, small).local)
    trained = []
    for i in range(N):
        data = client_data(federation.x, federation.y, client(federation.train, i))
        trained.append(local(now(client_key(KEY, 0, i), 0), start.state.server.params, (), data).upload)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *trained)
    found = end.state.server.params["extractor"]
    np.testing.assert_allclose(found["scale"], 0.5 + 0.5 * mean["extractor"]["scale"], rtol=1e-5)
    np.testing.assert_allclose(found["norm"]["running_mean"], mean["extractor"]["norm"]["running_mean"], rtol=1e-5)
    assert not np.allclose(found["norm"]["running_mean"], 0.25, rtol=1e-2)
    for variate in (end.state.server.control, end.state.clients):
        assert variate["extractor"]["scale"].any()
        assert not variate["extractor"]["norm"]["running_mean"].any()


def test_parameters_and_variates_go_down_and_come_back(model, trainer, federation):
    _, shapes = survey(Engine(scaffold(model, trainer), N), KEY, federation)
    parameters = count(jax.eval_shape(model.init, KEY))
    assert count(shapes.down) == count(shapes.up) == 2 * parameters
    assert count(shapes.client) == parameters
