"""FedALA against rounds in NumPy, and its limits."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine, round_keys
from fedjax_pfl.engine.traffic import count
from fedjax_pfl.methods.fedala import fedala
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.local import local
from fedjax_pfl.ops.training import phase_key
from tests.reference import MLP, at, batches, client, client_key, held, to_numpy, weighted_mean

N, ROUNDS = 7, 5
KEY = jax.random.key(41)
SOME = Participation(0.3, 0.7, 0.2)
HYPER = {"share": 0.7, "mix_lr": 3.0, "threshold": 0.002, "most_epochs": 16}

near = partial(np.testing.assert_allclose, rtol=5e-4, atol=2e-5)


def play(method, federation, who=SOME, start=None):
    """The engine, the runs before and after, and the PRE scores."""
    engine = Engine(method, N, who)
    start = jax.jit(engine.init)(KEY, federation) if start is None else start
    end = jax.jit(engine.rounds)(KEY, start, at(0), at(ROUNDS), jnp.array(True), federation)
    return engine, start, end, jax.jit(engine.pre)(KEY, at(ROUNDS), end.state, federation).test


def adapted(mlp, key, received, own, mix, visits, rows, trainer, hyper, layers):
    """The model that a client starts from, its A_i, and the epochs that these took (Algorithm 1, lines 5 to 12)."""

    def upper(w):
        return {"head": w["head"]} if layers == 1 else w

    def mixed():
        weigh = jax.tree.map(lambda a, w, own: own + (w - own) * a, mix, upper(received), own)
        return {**received, **weigh}

    draws = np.asarray(jax.random.uniform(phase_key(key, "sample"), (64,)))[: len(rows)]
    sample = rows[np.argsort(draws)][: max(1, round(hyper.share * len(rows)))]
    losses = []
    for epoch in range({0: 0, 1: hyper.most_epochs}.get(visits, 1)):
        if len(losses) > 10:
            assert abs(np.std(losses[-10:]) / hyper.threshold - 1) > 0.02, "too close to tell: take another threshold"
            if np.std(losses[-10:]) < hyper.threshold:
                break
        of_samples = []
        order = jax.random.fold_in(phase_key(key, "mix"), epoch)
        for positions in batches(order, len(sample), epochs=1, batch_size=trainer.batch_size, phase="mix"):
            batch, w = sample[positions], mixed()
            of_samples += [mlp.loss(w, batch)] * len(batch)
            mix = jax.tree.map(
                lambda a, g, w, own: np.clip(a - hyper.mix_lr * g * (w - own), 0, 1),
                mix,
                upper(mlp.gradient(w, batch)),
                upper(received),
                own,
            )
        losses.append(np.mean(of_samples))
    return mixed(), mix, len(losses)


@pytest.mark.parametrize("layers", [1, 2])
def test_rounds_and_scores_before_training_are_numpys(layers, model, trainer, federation):
    trainer, hyper = replace(trainer, lr_decay=0.9), SimpleNamespace(**HYPER)
    engine, start, end, pre = play(fedala(model, trainer, mixed_layers=layers, **HYPER), federation)
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    server = to_numpy(start.state.server)

    def upper(w):
        return {"head": w["head"]} if layers == 1 else w

    own, mix = [upper(server)] * N, [jax.tree.map(np.ones_like, upper(server))] * N
    visits, post, epochs = np.zeros(N, int), {}, []
    for t in range(ROUNDS):
        ids, _ = engine._select(round_keys(KEY, at(t)), federation.train.count)
        cohort, uploads = [int(i) for i in ids if i < N], []
        for i in cohort:
            key = client_key(KEY, t, i)
            w, mix[i], took = adapted(mlp, key, server, own[i], mix[i], visits[i], rows[i], trainer, hyper, layers)
            epochs.append((visits[i], took))
            post[i], _ = mlp.train(w, key, t, rows[i], trainer)
            own[i], visits[i] = upper(post[i]), visits[i] + 1
            uploads.append(post[i])
        server = weighted_mean(uploads, [len(rows[i]) for i in cohort]) if cohort else server
    jax.tree.map(near, end.state.server, server)
    np.testing.assert_array_equal(end.state.clients.visits, visits)
    for i in range(N):
        found = client(end.state.clients, i)
        parts = (found.upper, own[i]), (found.mix, mix[i])
        for tree, expected in parts:
            tree = tree if layers == 2 else {"head": tree["head"]}
            jax.tree.map(near, tree, expected)
        assert all(((leaf >= 0) & (leaf <= 1)).all() for leaf in jax.tree.leaves(found.mix))
        key = client_key(KEY, ROUNDS, i)
        w, *_ = adapted(mlp, key, server, own[i], mix[i], visits[i], rows[i], trainer, hyper, layers)
        near([float(leaf[i]) for leaf in pre], mlp.scores(w, held(federation.test, i)))
        if i in post:
            near([float(leaf[i]) for leaf in end.post.test], mlp.scores(post[i], held(federation.test, i)))
    first = {took for visits, took in epochs if visits == 1}
    assert first > {11}, "some adaptations converge at once, others later or never"
    assert {took for visits, took in epochs if visits != 1} == {0, 1}
    assert min(np.min(a["head"]["kernel"]) for a in mix) < 0.5


def test_weights_that_stay_at_one_are_fedavg(model, trainer, federation):
    _, start, end, pre = play(fedala(model, trainer, mix_lr=0.0), federation)
    _, _, expected, expected_pre = play(fedavg(model, trainer), federation)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (end.state.server, end.post, pre), (expected.state.server, expected.post, expected_pre))
    jax.tree.map(np.testing.assert_array_equal, end.state.clients.mix, start.state.clients.mix)


def test_weights_that_stay_at_zero_are_local_if_all_layers_are_mixed(model, trainer, federation):
    everyone = Participation()
    method = fedala(model, trainer, mix_lr=0.0, mixed_layers=2)
    start = jax.jit(Engine(method, N).init)(KEY, federation)
    clients = start.state.clients
    clients = clients._replace(mix=jax.tree.map(jnp.zeros_like, clients.mix))
    start = start._replace(state=start.state._replace(clients=clients))
    _, _, end, pre = play(method, federation, everyone, start)
    _, _, expected, expected_pre = play(local(model, trainer), federation, everyone)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (end.state.clients.upper, pre), (expected.state.clients, expected_pre))


def test_the_model_goes_down_and_comes_back_and_the_mixed_layers_stay(model, trainer, federation):
    params = jax.eval_shape(model.init, KEY)
    for layers, kept in ((1, params["head"]), (2, params)):
        _, shapes = survey(Engine(fedala(model, trainer, mixed_layers=layers), N), KEY, federation)
        assert count(shapes.down) == count(shapes.up) == count(params)
        assert count(shapes.client) == 2 * count(kept) + 1
    with pytest.raises(ValueError, match="3 layers are more than the 2 of the model"):
        fedala(model, trainer, mixed_layers=3)
