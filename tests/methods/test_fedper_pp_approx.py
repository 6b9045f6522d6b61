"""The approximation of FedPer++ against rounds in NumPy, its limit, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedper import fedper
from fedjax_pfl.methods.fedper_pp_approx import fedper_pp_approx
from tests.conftest import CLASSES
from tests.play import KEY, SOME, N, exchanged, play, update_of
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
    weighted_mean,
)

ROUNDS, GAMMA, LAM = 3, 0.6, 4.0

near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def balanced_gradient(mlp, received, counts):
    """(w, rows) -> the gradient of the balanced cross-entropy and of the distance to the received features."""

    def gradient(w, rows):
        z, y = mlp.features(w, rows), mlp.y[rows]
        d = softmax_loss(linear(w["head"], z) + GAMMA * np.log(np.maximum(counts, 1)), y)[1]
        d_z = d @ w["head"]["kernel"].T + LAM * 2 * (z - mlp.extract(received, rows)) / z.size
        return {"extractor": mlp.extract_gradient(w["extractor"], rows, d_z), "head": linear_gradient(z, d)}

    return gradient


def test_rounds_and_scores_are_numpys(model, trainer, federation):
    trainer = replace(trainer, weight_decay=0.01, lr_decay=0.9)
    method = fedper_pp_approx(model, trainer, gamma=GAMMA, lam=LAM)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS, scored=False)
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    theta, phi = to_numpy(start.state.server), [to_numpy(client(start.state.clients, i)) for i in range(N)]
    for t, cohort in enumerate(cohorts):
        uploads = []
        for i in cohort:
            gradient = balanced_gradient(mlp, theta, np.bincount(mlp.y[rows[i]], minlength=CLASSES))
            w = {"extractor": theta, "head": phi[i]}
            w, _ = mlp.train(w, client_key(KEY, t, i), t, rows[i], trainer, gradient=gradient)
            phi[i] = w["head"]
            uploads.append(w["extractor"])
        theta = weighted_mean(uploads, [len(rows[i]) for i in cohort]) if cohort else theta
    jax.tree.map(near, end.state.server, theta)
    pre = jax.jit(Engine(method, N, SOME).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        jax.tree.map(near, client(end.state.clients, i), phi[i])
        plain = mlp.scores({"extractor": theta, "head": phi[i]}, held(federation.test, i))
        near([float(leaf[i]) for leaf in pre], plain)


def test_without_its_two_terms_it_is_fedper_bit_for_bit(model, trainer, federation):
    found = update_of(fedper_pp_approx(model, trainer, gamma=0.0, lam=0.0), federation, 4)
    expected = update_of(fedper(model, trainer), federation, 4)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_received_extractor_is_looked_at_as_in_evaluation(model, trainer, federation):
    """By the masks of all looks: what it makes of a sample does not depend on the rest of the batch."""
    looks = set()

    def features(theta, x, mask=None):
        looks.add("evaluation" if mask is None else "training")
        return model.features(theta, x, mask)

    for lam, expected in ((0.0, {"training"}), (LAM, {"training", "evaluation"})):
        looks.clear()
        method = fedper_pp_approx(model._replace(features=features), trainer, lam=lam)
        server, own = jax.eval_shape(partial(method.init, clients=N), KEY)
        data = client_data(federation.x, federation.y, client(federation.train, 4))
        jax.eval_shape(method.local, now(KEY, 0), jax.eval_shape(method.broadcast, server), own, data)
        assert looks == expected


def test_the_extractor_goes_down_and_comes_back(model, trainer, federation):
    floats = exchanged(fedper_pp_approx(model, trainer), federation)
    extractor, head = 16 * model.dim + model.dim, model.dim * CLASSES + CLASSES
    assert floats == (extractor, extractor, head)
