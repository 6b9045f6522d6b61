"""FedAvgM against rounds in NumPy, and its limits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedavgm import Server, fedavgm
from tests.play import KEY, SOME, N, exchanged, play
from tests.reference import MLP, client_key, held, now, to_numpy, weighted_mean

BETA, SERVER_LR, ROUNDS = 0.8, 0.6, 4
COHORT = Cohort(jnp.arange(3), jnp.array([1.0, 3.0, 0.0]), 3, 3)

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def momentum_step(w, u, mean, *, beta=BETA, server_lr=SERVER_LR, nesterov=False):
    d = jax.tree.map(np.subtract, w, mean)
    u = jax.tree.map(lambda u, d: beta * u + d, u, d)
    way = jax.tree.map(lambda d, u: d + beta * u, d, u) if nesterov else u
    return jax.tree.map(lambda w, way: w - server_lr * way, w, way), u


def test_rounds_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9)
    method = fedavgm(model, trainer, beta=BETA, server_lr=SERVER_LR)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS, scored=False)
    mlp, w = MLP(federation.x, federation.y), to_numpy(start.state.server.params)
    u, rows = jax.tree.map(np.zeros_like, w), [held(federation.train, i) for i in range(N)]
    for t, cohort in enumerate(cohorts):
        trained = [mlp.train(w, client_key(KEY, t, i), t, rows[i], trainer)[0] for i in cohort]
        w, u = momentum_step(w, u, weighted_mean(trained, [len(rows[i]) for i in cohort]))
    assert all(0 < len(cohort) < N for cohort in cohorts)
    jax.tree.map(near, tuple(end.state.server), (w, u))
    pooled = jax.jit(method.global_predict)(end.state.server, federation.x)
    near(pooled, mlp.logits(w, np.arange(len(mlp.y))), atol=1e-4)


def server_steps(method, uploads):
    """(w, u) after each of the server's rounds from w = u = 0, in which three clients upload a kernel of five."""
    server = Server({"kernel": jnp.zeros(5)}, {"kernel": jnp.zeros(5)})
    aggregate = jax.jit(lambda server, sent: method.aggregate(now(KEY, 0), server, (), {"kernel": sent}, COHORT)[0])
    for sent in jnp.asarray(uploads, jnp.float32):
        server = aggregate(server, sent)
        yield server.params["kernel"], server.velocity["kernel"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_servers_steps_are_numpys(nesterov, model, trainer):
    uploads = np.random.default_rng(0).normal(size=(4, 3, 5))
    w = u = np.zeros(5)
    method = fedavgm(model, trainer, beta=BETA, server_lr=SERVER_LR, nesterov=nesterov)
    for found, sent in zip(server_steps(method, uploads), uploads, strict=True):
        w, u = momentum_step(w, u, np.average(sent, axis=0, weights=COHORT.weight), nesterov=nesterov)
        near(found, (w, u))


def test_without_momentum_it_is_fedavg(model, trainer):
    uploads = np.random.default_rng(1).normal(size=(3, 3, 5))
    plain = fedavg(model, trainer)
    for (found, _), sent in zip(server_steps(fedavgm(model, trainer, beta=0.0), uploads), uploads, strict=True):
        expected, _ = plain.aggregate(now(KEY, 0), (), (), jnp.asarray(sent, jnp.float32), COHORT)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_steady_change_adds_up_but_statistics_are_averaged(model, trainer):
    """All clients always want 0.5 less: the velocity approaches 0.5 / (1 - beta). A variance is theirs at once."""
    method = fedavgm(model, trainer, beta=BETA, server_lr=0.1)
    zeros = {"kernel": jnp.zeros(2), "norm": {"running_var": jnp.zeros(2)}}
    sent = jnp.array([[4.0, 1.0], [0.0, 5.0], [0.0, 0.0]])

    @jax.jit
    def step(server):
        kernels = jnp.stack([server.params["kernel"] - 0.5] * 2 + [jnp.zeros(2)])
        uploads = {"kernel": kernels, "norm": {"running_var": sent}}
        return method.aggregate(now(KEY, 0), server, (), uploads, COHORT)[0]

    server = Server(zeros, zeros)
    for _ in range(60):
        before, server = server, step(server)
        near(server.params["norm"]["running_var"], [1.0, 4.0])
    near(server.velocity["kernel"], 0.5 / (1 - BETA))
    near(before.params["kernel"] - server.params["kernel"], 0.1 * 0.5 / (1 - BETA), atol=1e-4)


def test_the_velocity_stays_at_the_server(model, trainer, federation):
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    assert exchanged(fedavgm(model, trainer), federation) == (parameters, parameters, 0)
