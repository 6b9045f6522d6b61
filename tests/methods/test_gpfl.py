"""GPFL against rounds and gradients in NumPy, its conditional inputs, FedPer as its limit, and what it exchanges."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedper import fedper
from fedjax_pfl.methods.gpfl import Client, Shared, gpfl
from tests.conftest import CLASSES
from tests.play import KEY, SOME, Floats, N, exchanged, play
from tests.reference import (
    MLP,
    at,
    client,
    client_key,
    held,
    linear,
    linear_gradient,
    now,
    softmax_loss,
    to_numpy,
    train,
    weighted_mean,
)

ROUNDS = 3

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


class Layer:
    """LayerNorm(ReLU(linear(u))), and the gradient of what enters it."""

    def __init__(self, v, name, u):
        self.names, self.u, self.scale = (name, f"{name}_norm"), u, v[f"{name}_norm"]["scale"]
        self.hidden = np.maximum(linear(v[name], u), 0)
        self.std = np.sqrt(self.hidden.var() + 1e-5)
        self.unit = (self.hidden - self.hidden.mean()) / self.std
        self.out = self.scale * self.unit + v[f"{name}_norm"]["bias"]

    def gradient(self, d):
        d_unit = d * self.scale
        d_hidden = (d_unit - d_unit.mean() - self.unit * np.mean(d_unit * self.unit)) / self.std
        d_linear = d_hidden * (self.hidden > 0)
        norm = {"scale": d * self.unit, "bias": d}
        return dict(zip(self.names, ({"kernel": np.outer(self.u, d_linear), "bias": d_linear}, norm), strict=True))


class Valve:
    """V(z, u) on a batch, and the gradients of what enters it."""

    def __init__(self, v, z, u):
        self.z, self.gamma, self.beta = z, Layer(v, "gamma", u), Layer(v, "beta", u)
        self.out = np.maximum(z * (1 + self.gamma.out) + self.beta.out, 0)

    def gradient(self, d):
        d = d * (self.out > 0)
        layers = {**self.gamma.gradient(np.sum(d * self.z, axis=0)), **self.beta.gradient(d.sum(axis=0))}
        return d * (1 + self.gamma.out), layers


def lengths(rows):
    """Of a feature that the valve shuts off altogether almost 0, which no gradient gets past."""
    return np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)


def units(rows):
    return rows / lengths(rows)


def back_through_units(rows, d):
    """The gradient of the rows, given that of the rows of length 1."""
    unit = units(rows)
    return (d - unit * np.sum(unit * d, axis=1, keepdims=True)) / lengths(rows)


class Reference:
    """The client's loss on the pool of the federation, and its gradient, with what it has received."""

    def __init__(self, mlp, hyper):
        self.mlp, self.hyper = mlp, hyper

    def shares(self, rows):
        return np.bincount(self.mlp.y[rows], minlength=CLASSES) / len(rows)

    def gradient(self, w, rows, *, received, shares):
        (theta, g, v), phi = w
        y, z = self.mlp.y[rows], self.mlp.extract(theta, rows)
        own, shared = Valve(v, z, shares @ received), Valve(v, z, received.mean(axis=0))
        d_own = softmax_loss(linear(phi, own.out), y)[1]
        d_cosines = softmax_loss(units(shared.out) @ units(g).T, y)[1]
        d_shared = back_through_units(shared.out, d_cosines @ units(g))
        apart = shared.out - received[y]
        if self.hyper.magnitude == "frobenius":
            d_shared += self.hyper.lam * apart / np.linalg.norm(apart)
        else:
            d_shared += self.hyper.lam * units(apart) / len(rows)
        (dz_own, dv_own), (dz_shared, dv_shared) = own.gradient(d_own @ phi["kernel"].T), shared.gradient(d_shared)
        mu = self.hyper.mu
        dv = jax.tree.map(lambda a, b, w: a + b + mu * w, dv_own, dv_shared, v)
        dg = back_through_units(g, d_cosines.T @ units(shared.out)) + mu * g
        d_theta = self.mlp.extract_gradient(theta, rows, dz_own + dz_shared)
        return Shared(d_theta, dg, dv), linear_gradient(own.out, d_own)

    def trained(self, key, t, shared, phi, rows, trainer):
        gradient = partial(self.gradient, received=shared.embeddings, shares=self.shares(rows))
        return train((shared, phi), gradient, key, t, rows, trainer)

    def logits(self, shared, phi, shares, rows):
        z = self.mlp.extract(shared.extractor, rows)
        return linear(phi, Valve(shared.valve, z, shares @ shared.embeddings).out)


def assert_scores(scores, i, logits, y):
    if len(y):
        near(float(scores.accuracy[i]), np.mean(logits.argmax(axis=1) == y))
        near(float(scores.loss[i]), softmax_loss(logits, y)[0])


@pytest.mark.parametrize("hyper", [{}, {"lam": 0.5, "mu": 0.0, "magnitude": "mean_norm"}], ids=["default", "mean"])
def test_rounds_and_scores_are_numpys(hyper, model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9)
    method = gpfl(model, trainer, **hyper)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp = MLP(federation.x, federation.y)
    reference = Reference(mlp, SimpleNamespace(**{"lam": 0.01, "mu": 0.1, "magnitude": "frobenius", **hyper}))
    rows = [held(federation.train, i) for i in range(N)]
    shared = to_numpy(start.state.server)
    heads, post, received = [to_numpy(client(start.state.clients.head, i)) for i in range(N)], {}, {}
    for t, cohort in enumerate(cohorts):
        for i in cohort:
            post[i], heads[i] = reference.trained(client_key(KEY, t, i), t, shared, heads[i], rows[i], trainer)
            received[i] = shared.embeddings
        if cohort:
            shared = weighted_mean([post[i] for i in cohort], [len(rows[i]) for i in cohort])
    assert 1 < len(post) < N
    jax.tree.map(near, end.state.server, shared)
    pre = jax.jit(Engine(method, N, SOME).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        shares, tested = reference.shares(rows[i]), held(federation.test, i)
        jax.tree.map(near, client(end.state.clients.head, i), heads[i])
        near(end.state.clients.shares[i], shares if i in post else np.full(CLASSES, 1 / CLASSES))
        assert_scores(pre, i, reference.logits(shared, heads[i], shares, tested), mlp.y[tested])
        if i in post:
            trained = post[i]._replace(embeddings=received[i])  # under whose conditional input the rest was trained
            assert_scores(end.post.test, i, reference.logits(trained, heads[i], shares, tested), mlp.y[tested])


def test_with_a_valve_that_lets_all_pass_it_is_fedper_and_a_head_of_cosines(model, trainer, federation):
    """For one step, after which the valve is another."""
    trainer = replace(trainer, epochs=1, batch_size=32)
    method, data = (
        gpfl(model, trainer, lam=0.0, mu=0.0),
        client_data(federation.x, federation.y, client(federation.train, 4)),
    )
    shared, own = method.init(KEY, N)
    shared = shared._replace(valve=jax.tree.map(jnp.zeros_like, shared.valve))
    found = jax.jit(method.local)(now(KEY, 0), shared, own, data)
    expected = jax.jit(fedper(model, trainer).local)(now(KEY, 0), shared.extractor, own.head, data)
    jax.tree.map(near, found.client.head, expected.client)
    mlp, rows, (theta, g, _) = MLP(federation.x, federation.y), held(federation.train, 4), to_numpy(shared)
    z = mlp.extract(theta, rows)
    d_cosines = softmax_loss(units(z) @ units(g).T, mlp.y[rows])[1]
    pull = mlp.extract_gradient(theta, rows, back_through_units(z, d_cosines @ units(g)))
    jax.tree.map(
        lambda found, plain, pull: near(found, plain - trainer.lr * pull, atol=1e-6),
        found.upload.extractor,
        expected.upload,
        pull,
    )
    assert np.abs(pull["hidden_layer"]["kernel"]).max() > 1e-3


def test_of_a_client_that_holds_all_classes_alike_both_conditional_inputs_are_one(model, trainer, federation):
    method = gpfl(model, trainer)
    view, own = method.init(KEY, N)
    data = client_data(federation.x, federation.y, client(federation.train, 0))
    for counts in ([4, 4, 4], [0, 2, 6]):
        held = data._replace(class_counts=jnp.array(counts, jnp.float32))
        condition = method.personal(*method.personalize(now(KEY, 0), view, own, held))["condition"]
        near(condition, np.average(view.embeddings, axis=0, weights=counts))


def test_a_client_without_samples_changes_nothing(model, trainer, federation):
    method = gpfl(model, trainer)
    view, own = method.init(KEY, N)
    own = Client(own.head, jnp.array([0.5, 0.25, 0.25]))
    data = client_data(federation.x, federation.y, client(federation.train, 0))
    data = data._replace(count=jnp.int32(0), class_counts=jnp.zeros(CLASSES))
    update = jax.jit(method.local)(now(KEY, 0), view, own, data)
    jax.tree.map(np.testing.assert_array_equal, (update.client, update.upload), (own, view))


def test_extractor_embeddings_and_valve_go_down_and_come_back(model, trainer, federation):
    C, K, extractor, head = CLASSES, 8, 16 * 8 + 8, 8 * 3 + 3
    shared = extractor + C * K + 2 * (K * K + K) + 4 * K
    assert exchanged(gpfl(model, trainer), federation) == Floats(shared, shared, head + C)
