"""The approximation of FedCRL against rounds in NumPy, its limit, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.method import PerClass
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedcrl_approx import Client, fedcrl_approx
from fedjax_pfl.methods.fedproc import Sent
from tests.conftest import CLASSES
from tests.methods.test_fedproc import contrast_gradient
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
    weighted_mean,
)

ROUNDS, LAM, TEMPERATURE = 4, 0.7, 0.4

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def fedcrl_client(mlp, start, points, valid, key, t, rows, trainer):
    """The trained model, and the mean cross-entropy and contrast on the way."""
    losses = []

    def gradient(w, rows):
        z, y = mlp.features(w, rows), mlp.y[rows]
        ce, d = softmax_loss(linear(w["head"], z), y)
        contrast, d_contrast = contrast_gradient(z, y, points, valid, TEMPERATURE)
        losses.append((len(y), ce, contrast.mean()))
        d_z = d @ w["head"]["kernel"].T + LAM * d_contrast / len(y)
        return {"extractor": mlp.extract_gradient(w["extractor"], rows, d_z), "head": linear_gradient(z, d)}

    w, _ = mlp.train(start, key, t, rows, trainer, gradient=gradient)
    sizes, *values = zip(*losses, strict=True)
    return w, *(np.average(value, weights=sizes) for value in values)


def test_rounds_and_scores_are_numpys(model, trainer, federation):
    trainer = replace(trainer, weight_decay=0.01, lr_decay=0.9)
    method = fedcrl_approx(model, trainer, lam=LAM, temperature=TEMPERATURE)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    w, points, valid = to_numpy(start.state.server.params), np.zeros((CLASSES, model.dim)), np.zeros(CLASSES, bool)
    own, share, visits = [w] * N, np.ones(N), np.zeros(N, int)

    def mixed(i):
        return jax.tree.map(lambda own, w: own + share[i] * (w - own), own[i], w)

    loss = None
    for t, cohort in enumerate(cohorts):
        uploads, received, losses = [], [], []
        for i in cohort:
            key = client_key(KEY, t, i)
            own[i], ce, contrast = fedcrl_client(mlp, mixed(i), points, valid, key, t, rows[i], trainer)
            share[i] = contrast / (contrast + ce) if valid[mlp.y[rows[i]]].any() else share[i]
            visits[i] += 1
            uploads.append(own[i])
            received.append(class_means(mlp.features(own[i], rows[i]), mlp.y[rows[i]], CLASSES))
            losses.append(ce + LAM * contrast)
        if cohort:
            w, loss = weighted_mean(uploads, [len(rows[i]) for i in cohort]), np.mean(losses)
        for c in range(CLASSES):
            counts = np.array([n[c] for _, n in received])
            if counts.any():
                points[c], valid[c] = np.average([means[c] for means, _ in received], axis=0, weights=counts), True
    assert visits.max() > 1
    assert visits.min() < ROUNDS
    assert len({*share[share < 1]}) > 2, "several clients have changed their k"
    jax.tree.map(near, end.state.server.params, w)
    near(end.state.server.prototypes.mean, points)
    near(end.state.clients.share, share)
    near(end.loss, loss)
    pre = jax.jit(Engine(method, N, SOME).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        jax.tree.map(near, client(end.state.clients.params, i), own[i])
        near([float(leaf[i]) for leaf in pre], mlp.scores(mixed(i), held(federation.test, i)))
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(own[i], held(federation.test, i)))
    pooled = jax.jit(method.global_predict)(end.state.server, federation.x)
    near(pooled, mlp.logits(w, np.arange(len(mlp.y))), atol=1e-4)
    view, data = (
        method.broadcast(end.state.server),
        client_data(federation.x, federation.y, client(federation.train, 2)),
    )
    update = jax.jit(method.local)(now(KEY, ROUNDS), view, client(end.state.clients, 2), data)
    assert float(update.diagnostics["global_share"]) == float(update.client.share) not in (0, 1)


def test_without_the_contrast_and_with_k_held_at_1_it_is_fedavg(model, trainer, federation):
    """A client's part to the bit."""
    held_at_1 = fedcrl_approx(model, trainer, lam=0.0, weigh_by_loss=False)
    found, expected = update_of(held_at_1, federation, 4), update_of(fedavg(model, trainer), federation, 4)
    jax.tree.map(np.testing.assert_array_equal, (found.upload.params, found.info), (expected.upload, expected.info))
    _, end, _ = play(held_at_1, federation, who=SOME)
    _, averaged, _ = play(fedavg(model, trainer), federation, who=SOME)
    jax.tree.map(near, (end.state.server.params, end.post), (averaged.state.server, averaged.post))
    np.testing.assert_array_equal(end.state.clients.share, 1)
    assert end.state.server.prototypes.valid.any()


def test_a_client_keeps_its_share_in_a_round_without_a_step_or_a_prototype_of_its_classes(model, trainer, federation):
    """Else k = 0 / 0; taken for 0, it would cut the client off from the global model for good."""
    method = fedcrl_approx(model, replace(trainer, drop_last=True))
    points = jnp.asarray(np.random.default_rng(0).normal(size=(CLASSES, model.dim)), jnp.float32)

    @jax.jit
    def share_after(row, known):
        server, own = method.init(KEY, N)
        view = method.broadcast(server)._replace(per_class=PerClass(known, points))
        data = client_data(federation.x, federation.y, row)
        update = method.local(now(KEY, 1), view, own._replace(share=jnp.array(0.3)), data)
        return update.client.share, update.info.steps

    # Five samples, all of class 2, and less than a batch.
    steady, short = client(federation.train, 0), client(federation.train, 1)
    np.testing.assert_array_equal(np.flatnonzero(steady.class_counts), [2])
    for row, known, keeps in ((steady, [0, 0, 1], False), (steady, [1, 1, 0], True), (short, [1, 1, 1], True)):
        share, steps = share_after(row, np.array(known, bool))
        assert (float(share) == np.float32(0.3)) == keeps
        assert (steps == 0) == (row is short)


def test_a_round_starts_from_the_global_running_statistics_whatever_the_share(model, trainer):
    method = fedcrl_approx(model, trainer)
    own, w = ({"kernel": jnp.array(value), "running_var": jnp.array(value)} for value in (1.0, 5.0))
    view, _ = method.personalize(now(KEY, 0), Sent(w, None), Client(own, jnp.array(0.25)), None)
    assert jax.tree.map(float, view.params) == {"kernel": 2.0, "running_var": 5.0}


def test_model_and_class_rows_go_down_and_come_back(model, trainer, federation):
    floats = exchanged(fedcrl_approx(model, trainer), federation)
    params = 16 * model.dim + model.dim + CLASSES * model.dim + CLASSES
    assert floats == (params + CLASSES * model.dim + CLASSES, params + CLASSES * model.dim + CLASSES, params + 1)
