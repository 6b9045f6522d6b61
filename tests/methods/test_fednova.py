"""FedNova against rounds in NumPy, and its limits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data, pack
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fednova import Upload, fednova
from fedjax_pfl.ops.training import effective_steps
from tests.play import KEY, SOME, N, exchanged, play
from tests.reference import MLP, at, client, client_key, held, now, sgd, to_numpy, weighted_mean

ROUNDS = 3

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def constant_gradient_distance(steps, momentum):
    """How far PyTorch's SGD goes at a rate of 1 where every gradient is 1."""
    return -float(sgd(np.zeros(()), [np.ones_like] * steps, lr=1.0, momentum=momentum))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_effective_steps_are_the_way_along_a_constant_gradient(momentum):
    for steps in (0, 1, 2, 7, 40):
        expected = constant_gradient_distance(steps, momentum)
        assert float(effective_steps(at(steps), momentum)) == pytest.approx(expected, rel=1e-5)
        assert float(effective_steps(at(steps), jnp.array(momentum))) == pytest.approx(expected, rel=1e-5)
    assert (expected > 40) == (momentum > 0)


def test_rounds_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9, weight_decay=0.01)
    method = fednova(model, trainer)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp, w = MLP(federation.x, federation.y), to_numpy(start.state.server)
    rows, post = [held(federation.train, i) for i in range(N)], {}
    for t, cohort in enumerate(cohorts):
        sizes = np.array([len(rows[i]) for i in cohort])
        p, steps = sizes / sizes.sum(), trainer.epochs * -(-sizes // trainer.batch_size)
        a = np.array([constant_gradient_distance(tau, trainer.momentum) for tau in steps])
        assert len(set(steps)) > 1
        trained = [mlp.train(w, client_key(KEY, t, i), t, rows[i], trainer)[0] for i in cohort]
        d = [jax.tree.map(lambda w, w_i, a=a: (w - w_i) / a, w, w_i) for w_i, a in zip(trained, a, strict=True)]
        mean, a_eff = weighted_mean(d, p), p @ a
        w = jax.tree.map(lambda w, d, a_eff=a_eff: w - a_eff * d, w, mean)
        post.update(zip(cohort, trained, strict=True))
    assert all(0 < len(cohort) < N for cohort in cohorts)
    jax.tree.map(near, end.state.server, w)
    for i, params in post.items():
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(params, held(federation.test, i)))


def test_clients_of_as_many_steps_each_run_fedavg(model, trainer, federation):
    """One batch holds all samples of a client, whatever its size."""
    trainer = replace(trainer, batch_size=32)
    _, found, _ = play(fednova(model, trainer), federation)
    start, expected, _ = play(fedavg(model, trainer), federation)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (found.state, found.post, found.loss), (expected.state, expected.post, expected.loss))
    assert not np.allclose(expected.state.server["head"]["kernel"], start.state.server["head"]["kernel"])


def test_a_client_without_samples_sends_zeros(model, trainer, federation):
    nobody = client(pack([np.zeros(0, np.int64)], np.asarray(federation.y), 3), 0)
    data = client_data(federation.x, federation.y, nobody)
    method, view = fednova(model, trainer), model.init(KEY)
    update = jax.jit(method.local)(now(KEY, 0), view, (), data)
    assert not any(leaf.any() for leaf in jax.tree.leaves(update.upload))
    jax.tree.map(np.testing.assert_array_equal, update.post[0], view)


def test_a_client_with_less_than_a_batch_that_is_dropped_is_in_no_mean(model, trainer, federation):
    trainer = replace(trainer, drop_last=True, batch_size=9)
    sizes = np.array([len(held(federation.train, i)) for i in range(N)])
    some = np.flatnonzero(sizes >= 9)
    assert 1 < len(some) < np.sum(sizes > 0)
    method, view = fednova(model, trainer), model.init(KEY)
    local = jax.jit(method.local)
    data = [client_data(federation.x, federation.y, client(federation.train, i)) for i in range(N)]
    sent = [local(now(KEY, 0), view, (), each).upload for each in data]
    uploads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sent)
    cohort = Cohort(jnp.arange(N), jnp.asarray(sizes, jnp.float32), N, N)
    found, _ = method.aggregate(now(KEY, 0), view, (), uploads, cohort)
    p = sizes[some] / sizes[some].sum()
    a = [constant_gradient_distance(int(sent[i].steps), trainer.momentum) for i in some]
    a_eff = np.dot(p, a)
    mean = weighted_mean([to_numpy(sent[i].change) for i in some], p)
    jax.tree.map(near, found, jax.tree.map(lambda w, d: w + a_eff * d, to_numpy(view), mean))


def test_running_statistics_are_averaged_as_they_are(model_with_norm, trainer, federation):
    method, view = fednova(model_with_norm, trainer), model_with_norm.init(KEY)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    update = jax.jit(method.local)(now(KEY, 0), view, (), data)
    change, steps = update.upload
    moved, sent = (part["extractor"]["norm"] for part in (jax.tree.map(jnp.subtract, update.post[0], view), change))
    assert int(steps) == 14
    near(sent["running_var"], moved["running_var"])
    near(sent["scale"], moved["scale"] / constant_gradient_distance(14, trainer.momentum))
    assert (np.abs(moved["running_var"]) > 0.01).all()

    # Of two clients with 2 and 6 steps of their own, and one that is absent.
    uploads = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, 0 * leaf]), change)
    cohort = Cohort(jnp.arange(3), jnp.array([1.0, 3.0, 0.0]), 3, 3)
    server, _ = method.aggregate(now(KEY, 0), view, (), Upload(uploads, jnp.array([2, 6, 0])), cohort)
    before, after = (params["extractor"]["norm"] for params in (view, server))
    near(after["running_var"] - before["running_var"], (1 + 3 * 2) / 4 * sent["running_var"])
    a_eff = np.dot([0.25, 0.75], [constant_gradient_distance(tau, trainer.momentum) for tau in (2, 6)])
    near(after["scale"] - before["scale"], a_eff * (1 + 3 * 2) / 4 * sent["scale"])


def test_the_change_and_the_number_of_steps_go_up(model, trainer, federation):
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    assert exchanged(fednova(model, trainer), federation) == (parameters, parameters + 1, 0)
