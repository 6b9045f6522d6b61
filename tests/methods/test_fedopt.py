"""FedAdam and FedYogi against rounds in NumPy, and their limits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.fedopt import Server, fedadam, fedyogi
from tests.play import KEY, SOME, N, exchanged, play
from tests.reference import MLP, client_key, held, now, to_numpy, weighted_mean

ROUNDS = 4
HYPER = {"server_lr": 0.05, "beta1": 0.7, "beta2": 0.6, "adaptivity": 0.02}
COHORT = Cohort(jnp.arange(3), jnp.array([1.0, 3.0, 0.0]), 3, 3)

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
both = pytest.mark.parametrize("factory", [fedadam, fedyogi])


def adam(v, delta, beta2):
    return beta2 * v + (1 - beta2) * delta**2


def yogi(v, delta, beta2):
    return np.where(v > delta**2, v - (1 - beta2) * delta**2, v + (1 - beta2) * delta**2)


MOMENTS = {fedadam: adam, fedyogi: yogi}


def adaptive_step(moment, w, m, v, mean, *, server_lr, beta1, beta2, adaptivity):
    """Algorithm 2 on one array."""
    delta = mean - w
    m, v = beta1 * m + (1 - beta1) * delta, moment(v, delta, beta2)
    return w + server_lr * m / (np.sqrt(v) + adaptivity), m, v


def test_rounds_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9)
    method = fedadam(model, trainer, **HYPER)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS, scored=False)
    mlp, w = MLP(federation.x, federation.y), to_numpy(start.state.server.params)
    rows = [held(federation.train, i) for i in range(N)]
    m, v = (jax.tree.map(lambda leaf, to=to: np.full_like(leaf, to), w) for to in (0.0, HYPER["adaptivity"] ** 2))
    for t, cohort in enumerate(cohorts):
        trained = [mlp.train(w, client_key(KEY, t, i), t, rows[i], trainer)[0] for i in cohort]
        mean = weighted_mean(trained, [len(rows[i]) for i in cohort])
        stepped = jax.tree.map(partial(adaptive_step, adam, **HYPER), w, m, v, mean)
        w, m, v = jax.tree.transpose(jax.tree.structure(w), jax.tree.structure((0, 0, 0)), stepped)
    assert all(0 < len(cohort) < N for cohort in cohorts)
    jax.tree.map(near, tuple(end.state.server), (w, m, v))
    pooled = jax.jit(method.global_predict)(end.state.server, federation.x)
    near(pooled, mlp.logits(w, np.arange(len(mlp.y))), atol=1e-4)


def server_steps(method, start, uploads):
    """The server after each of its rounds, in which three clients upload a kernel."""
    aggregate = jax.jit(lambda server, sent: method.aggregate(now(KEY, 0), server, (), {"kernel": sent}, COHORT)[0])
    server = Server(*({"kernel": jnp.asarray(leaf, jnp.float32)} for leaf in start))
    for sent in jnp.asarray(uploads, jnp.float32):
        server = aggregate(server, sent)
        yield [part["kernel"] for part in server]


@both
def test_the_servers_steps_are_numpys(factory, model, trainer):
    uploads = np.random.default_rng(0).normal(0, 0.1, (6, 3, 8))
    at = np.zeros(8), np.zeros(8), np.full(8, HYPER["adaptivity"] ** 2)
    smaller = []
    for found, sent in zip(server_steps(factory(model, trainer, **HYPER), at, uploads), uploads, strict=True):
        mean = np.average(sent, axis=0, weights=COHORT.weight)
        smaller.append((mean - at[0]) ** 2 < at[2])
        at = adaptive_step(MOMENTS[factory], *at, mean, **HYPER)
        near(found, at)
    assert 5 < np.sum(smaller) < 43, "otherwise one side of Yogi's rule has not been seen"


@both
def test_with_a_large_adaptivity_it_is_fedavg(factory, model, trainer):
    """Then nothing is adapted: sqrt(v) is 0 for Adam, which forgets where v started, and tau for Yogi."""
    tau = 1e4
    rate = tau if factory is fedadam else 2 * tau
    method = factory(model, trainer, server_lr=rate, beta1=0.0, beta2=0.0, adaptivity=tau)
    uploads = np.random.default_rng(1).normal(size=(3, 3, 8))
    start = np.zeros(8), np.zeros(8), np.full(8, tau**2)
    for (found, *_), sent in zip(server_steps(method, start, uploads), uploads, strict=True):
        np.testing.assert_allclose(found, np.average(sent, axis=0, weights=COHORT.weight), rtol=1e-3, atol=1e-3)


@both
def test_moments_start_at_zero_and_tau_squared_and_stay_at_the_server(factory, model, trainer, federation):
    method = factory(model, trainer, adaptivity=0.03)
    server, client = jax.jit(lambda key: method.init(key, N))(KEY)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(server.m))
    jax.tree.map(partial(np.testing.assert_allclose, desired=0.03**2, rtol=1e-6), server.v)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(server.params))
    assert exchanged(method, federation) == (parameters, parameters, 0)
    assert client == ()


@both
def test_running_statistics_are_averaged(factory, model, trainer):
    params = {"kernel": jnp.ones(2), "norm": {"running_var": jnp.full(2, 5.0)}}
    zeros = jax.tree.map(jnp.zeros_like, params)
    uploads = jax.tree.map(lambda leaf: jnp.stack([leaf - 1, leaf + 1, leaf - leaf]), params)
    server, _ = factory(model, trainer).aggregate(now(KEY, 0), Server(params, zeros, zeros), (), uploads, COHORT)
    near(server.params["norm"]["running_var"], 5.5)
    assert (np.abs(server.params["kernel"] - 1.5) > 0.1).all()
