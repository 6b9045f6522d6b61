"""FedProto against rounds in NumPy, its limits, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.method import PerClass
from fedjax_pfl.methods.fedproto import fedproto
from fedjax_pfl.methods.local import local
from tests.conftest import CLASSES
from tests.play import KEY, SOME, N, exchanged, play, update_of
from tests.reference import (
    MLP,
    at,
    class_means,
    client,
    client_key,
    held,
    linear,
    linear_gradient,
    now,
    softmax_loss,
    to_numpy,
)

ROUNDS, LAM = 3, 3.0

near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


class ByPrototypes(MLP):
    """The nearest of the prototypes (P, valid) decides."""

    def __init__(self, federation, prototypes):
        super().__init__(federation.x, federation.y)
        self.prototypes = prototypes

    def logits(self, w, rows):
        points, valid = self.prototypes
        z = self.features(w, rows)
        apart = np.stack([np.linalg.norm(z - point, axis=1) for point in points], axis=1)
        return np.where(valid, -apart, -1e9)


def gradient_towards(mlp, points, valid, lam):
    """(w, rows) -> the gradient of CE + lam MSE(z, P_y) over the samples whose class has a prototype."""

    def gradient(w, rows):
        z, y = mlp.features(w, rows), mlp.y[rows]
        d = softmax_loss(linear(w["head"], z), y)[1]
        d_z = d @ w["head"]["kernel"].T + lam * 2 * (z - points[y]) * valid[y][:, None] / z.size
        return {"extractor": mlp.extract_gradient(w["extractor"], rows, d_z), "head": linear_gradient(z, d)}

    return gradient


def server_step(points, valid, received, weighting):
    """The prototypes after a round; ``received``: the class means and counts of each participant."""
    points, valid = points.copy(), valid.copy()
    for c in range(CLASSES):
        holders = [(means[c], counts[c]) for means, counts in received if counts[c] > 0]
        if holders:
            means, counts = zip(*holders, strict=True)
            points[c] = np.average(means, axis=0, weights=counts if weighting == "samples" else None)
            valid[c] = True
    return points, valid


@pytest.mark.parametrize(("weighting", "reading"), [("samples", "head"), ("uniform", "prototype")])
def test_rounds_and_scores_are_numpys(weighting, reading, model, trainer, federation):
    trainer = replace(trainer, weight_decay=0.01, lr_decay=0.9)
    method = fedproto(model, trainer, lam=LAM, weighting=weighting, reading=reading)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    own, post = [to_numpy(client(start.state.clients, i)) for i in range(N)], {}
    points, valid = np.zeros((CLASSES, model.dim)), np.zeros(CLASSES, bool)

    def scores(w, i):
        reader = mlp if reading == "head" else ByPrototypes(federation, (points, valid))
        return reader.scores(w, held(federation.test, i))

    known = []
    for t, cohort in enumerate(cohorts):
        known.append(valid.sum())
        received = []
        for i in cohort:
            towards = gradient_towards(mlp, points, valid, LAM)
            own[i], _ = mlp.train(own[i], client_key(KEY, t, i), t, rows[i], trainer, gradient=towards)
            post[i] = scores(own[i], i)
            received.append(class_means(mlp.features(own[i], rows[i]), mlp.y[rows[i]], CLASSES))
        points, valid = server_step(points, valid, received, weighting)
    assert len({tuple(cohort) for cohort in cohorts}) == ROUNDS
    assert known[-1] > 0, "prototypes pull"
    near(end.state.server.mean, points)
    np.testing.assert_array_equal(end.state.server.valid, valid)
    pre = jax.jit(Engine(method, N, SOME).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        jax.tree.map(near, client(end.state.clients, i), own[i])
        near([float(leaf[i]) for leaf in pre], scores(own[i], i))
        if i in post:
            near([float(leaf[i]) for leaf in end.post.test], post[i])


def test_a_class_without_a_prototype_pulls_nothing_and_is_no_answer(model, trainer, federation):
    """Rule R8; what stands in its row means nothing, were it as near as can be."""
    method, who = fedproto(model, trainer, lam=LAM, reading="prototype"), 2
    server, own = method.init(KEY, N)
    points, valid = np.random.default_rng(0).normal(0, 1, server.mean.shape), np.array([True, False, True])
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, who)
    points[1] = mlp.features(to_numpy(own), rows).mean(axis=0)
    view = PerClass(jnp.asarray(valid), jnp.asarray(points, jnp.float32))

    @jax.jit
    def participate(view, row):
        update = method.local(now(KEY, 1), view, own, client_data(federation.x, federation.y, row))
        return update.client, method.predict(method.personal(*update.trained), federation.x)

    found, answers = participate(view, client(federation.train, who))
    towards = gradient_towards(mlp, points, valid, LAM)
    expected, _ = mlp.train(to_numpy(own), KEY, 1, rows, trainer, gradient=towards)
    jax.tree.map(near, found, expected)
    assert set(mlp.y[rows]) == {0, 1, 2}
    assert set(np.argmax(answers, axis=1).tolist()) == {0, 2}


def test_without_the_pull_it_is_local_bit_for_bit(model, trainer, federation):
    found, expected = (
        update_of(method, federation, 4) for method in (fedproto(model, trainer, lam=0.0), local(model, trainer))
    )
    jax.tree.map(np.testing.assert_array_equal, (found.client, found.info), (expected.client, expected.info))
    read = update_of(fedproto(model, trainer, lam=0.0, reading="prototype"), federation, 4)
    jax.tree.map(np.testing.assert_array_equal, (read.client, read.info), (expected.client, expected.info))


def test_under_one_extractor_prototypes_are_the_means_of_all_samples(model, trainer, federation):
    start, end, _ = play(fedproto(model, replace(trainer, lr=0.0)), federation, rounds=1, scored=False)
    rows = np.concatenate([held(federation.train, i) for i in range(N)])
    mlp = MLP(federation.x, federation.y)
    means, counts = class_means(mlp.features(to_numpy(client(start.state.clients, 0)), rows), mlp.y[rows], CLASSES)
    near(end.state.server.mean, means)
    assert counts.all()


def test_class_means_are_all_that_is_exchanged(model, trainer, federation):
    floats = exchanged(fedproto(model, trainer), federation)
    assert floats.down == floats.up == CLASSES * model.dim + CLASSES
    read = exchanged(fedproto(model, trainer, lam=0.0, reading="prototype"), federation)
    assert (read.down, read.up) == (floats.down, floats.up)
    unread = exchanged(fedproto(model, trainer, lam=0.0), federation)
    assert (unread.down, unread.up) == (0, 0)
    assert fedproto(model, trainer, lam=0.0).headline == fedproto(model, trainer).headline
    assert fedproto(model, trainer).global_predict is None
