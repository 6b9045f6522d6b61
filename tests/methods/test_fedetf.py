"""FedETF against rounds and fine-tuning in NumPy, its simplex, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedetf import _simplex, fedetf
from tests.conftest import CLASSES
from tests.play import KEY, SOME, N, exchanged, play
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

ROUNDS, GAMMA, DIM = 3, 0.7, 4
FINETUNE = {"finetune_loops": 2, "finetune_epochs": 2, "etf_lr": 0.2, "projection_lr": 0.03}

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


class OnSimplex(MLP):
    """Logits s V' mu, where mu is the projection of z, at length 1."""

    def logits(self, w, rows):
        return self.decide(w, self.features(w, rows))[0]

    def decide(self, w, z):
        projected = linear(w["projection"], z)
        length = np.sqrt(np.sum(projected**2, axis=1, keepdims=True) + 1e-12)
        mu = projected / length
        return w["scale"] * mu @ w["etf"], mu, length

    def gradients(self, w, z, y, prior):
        """Of each part but the extractor, and of the features."""
        logits, mu, length = self.decide(w, z)
        d = softmax_loss(logits + prior, y)[1]
        d_mu = w["scale"] * d @ w["etf"].T
        d_projected = (d_mu - mu * np.sum(d_mu * mu, axis=1, keepdims=True)) / length
        parts = {
            "projection": linear_gradient(z, d_projected),
            "scale": np.sum(d * (mu @ w["etf"])),
            "etf": w["scale"] * mu.T @ d,
        }
        return parts, d_projected @ w["projection"]["kernel"].T

    def balanced(self, w, rows, *, etf, prior):
        """The gradient of local training, in which V is fixed."""
        w = {**w, "etf": etf}
        parts, d_z = self.gradients(w, self.features(w, rows), self.y[rows], prior)
        extractor = self.extract_gradient(w["extractor"], rows, d_z)
        return {"extractor": extractor, "projection": parts["projection"], "scale": parts["scale"]}


def local_training(mlp, w, etf, key, t, rows, trainer, phase):
    prior = GAMMA * np.log(np.maximum(np.bincount(mlp.y[rows], minlength=CLASSES), 1))
    return train(w, partial(mlp.balanced, etf=etf, prior=prior), key, t, rows, trainer, phase=phase)


def fine_tuned(mlp, w, etf, key, t, rows, trainer):
    w = {**local_training(mlp, w, etf, key, t, rows, trainer, "finetune"), "etf": etf}

    def tuned(name, turn, trainer, lr):
        def gradient(part, rows):
            now = {**w, name: part}
            return mlp.gradients(now, mlp.features(now, rows), mlp.y[rows], 0.0)[0][name]

        epochs = FINETUNE["finetune_epochs"]
        part = train(w[name], gradient, turn, t, rows, trainer, phase=name, epochs=epochs, lr=lr)
        return {**w, name: part}

    plain = replace(trainer, momentum=0.0, weight_decay=0.0)
    for loop in range(FINETUNE["finetune_loops"]):
        turn = jax.random.fold_in(key, loop)
        w = tuned("etf", turn, plain, FINETUNE["etf_lr"])
        w = tuned("projection", turn, trainer, FINETUNE["projection_lr"])
    return w


def test_rounds_and_scores_are_numpys(model, trainer, federation):
    trainer = replace(trainer, weight_decay=0.01, lr_decay=0.9)
    method = fedetf(model, trainer, gamma=GAMMA, projection_dim=DIM, **FINETUNE)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp, rows = OnSimplex(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    w = to_numpy(start.state.server)
    etf, post = w.pop("etf"), {}
    for t, cohort in enumerate(cohorts):
        uploads = []
        for i in cohort:
            post[i] = local_training(mlp, w, etf, client_key(KEY, t, i), t, rows[i], trainer, "local")
            uploads.append(post[i])
        w = weighted_mean(uploads, [len(rows[i]) for i in cohort]) if cohort else w
    assert abs(float(w["scale"]) - 1) > 1e-2
    jax.tree.map(near, method.broadcast(end.state.server), w)
    for leaf in (end.state.server["etf"], *end.state.clients):
        np.testing.assert_array_equal(leaf, start.state.server["etf"])
    pre = jax.jit(Engine(method, N, SOME).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        tuned = fine_tuned(mlp, w, etf, client_key(KEY, ROUNDS, i), ROUNDS, rows[i], trainer)
        near([float(leaf[i]) for leaf in pre], mlp.scores(tuned, held(federation.test, i)))
        if i in post:
            near(
                [float(leaf[i]) for leaf in end.post.test],
                mlp.scores({**post[i], "etf": etf}, held(federation.test, i)),
            )
    pooled = jax.jit(method.global_predict)(end.state.server, federation.x)
    near(pooled, mlp.logits({**w, "etf": etf}, np.arange(len(mlp.y))), atol=1e-4)


@pytest.mark.parametrize(("dim", "classes"), [(3, 3), (7, 3), (5, 2)])
def test_the_etf_is_a_simplex_of_unit_vectors(dim, classes):
    found = np.asarray(_simplex(KEY, dim, classes))
    expected = classes / (classes - 1) * (np.eye(classes) - 1 / classes)
    np.testing.assert_allclose(found.T @ found, expected, atol=1e-6)
    other = np.asarray(_simplex(jax.random.key(1), dim, classes))
    assert np.abs(found - other).max() > 0.1


def test_the_projection_begins_within_1_over_the_root_of_the_features(model, trainer):
    server, _ = fedetf(model, trainer, projection_dim=40).init(KEY, N)
    assert 0.9 < np.abs(server["projection"]["kernel"]).max() * model.dim**0.5 <= 1


def test_the_scale_is_a_factor_of_the_first_logits(model, trainer):
    def logits(**scale):
        method = fedetf(model, trainer, **scale)
        server, etf = method.init(KEY, N)
        return method.predict(method.personal(method.broadcast(server), etf), jnp.ones((2, 16)))

    np.testing.assert_allclose(logits(scale=10.0), 10 * logits(), rtol=1e-6)
    assert np.abs(logits()).max() <= 1


def test_classes_that_are_equally_frequent_leave_nothing_of_the_prior(model, trainer, federation):
    def trained(gamma, row):
        method = fedetf(model, trainer, gamma=gamma)
        server, etf = method.init(KEY, N)
        data = client_data(federation.x, federation.y, row)
        return method.local(now(KEY, 0), method.broadcast(server), etf, data).upload

    trained, skewed = jax.jit(trained), client(federation.train, 4)
    uniform = skewed._replace(class_counts=jnp.full(CLASSES, 4.0))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, trained(1.0, uniform), trained(0.0, uniform))
    assert not np.allclose(trained(1.0, skewed)["scale"], trained(0.0, skewed)["scale"], rtol=1e-3)


def test_extractor_projection_and_scale_go_down_and_come_back(model, trainer, federation):
    extractor = 16 * model.dim + model.dim
    for dim, d in ((None, CLASSES), (6, 6)):
        both = extractor + model.dim * d + d + 1
        assert exchanged(fedetf(model, trainer, projection_dim=dim), federation) == (both, both, d * CLASSES)
    with pytest.raises(ValueError, match="projection_dim = 2 is less than the 3 classes"):
        fedetf(model, trainer, projection_dim=2)
    with pytest.raises(ValueError, match="two classes or more"):
        fedetf(model._replace(classes=1), trainer)
