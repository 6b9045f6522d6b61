"""pFedMe against rounds in NumPy, its closed form on a quadratic, its limits, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.federated import client_data, pack
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.pfedme import pfedme
from fedjax_pfl.ops.training import Trainer
from tests.play import KEY, SOME, N, exchanged, play
from tests.quadratics import curved, half_running, quadratic
from tests.reference import MLP, batches, client, client_key, held, now, to_numpy, weighted_mean

HYPER = {"lam": 4.0, "inner_steps": 3, "personal_lr": 0.07, "beta": 1.4}

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def pfedme_client(mlp, key, t, received, rows, trainer):
    """Lines 5 to 11 of Algorithm 1, with one personal model throughout; the local and the personal model."""
    w = theta = received
    velocity = jax.tree.map(np.zeros_like, theta)
    decay, lam = trainer.lr_decay**t, HYPER["lam"]
    for positions in batches(key, len(rows), epochs=trainer.epochs, batch_size=trainer.batch_size):
        for _ in range(HYPER["inner_steps"]):
            g = jax.tree.map(
                lambda g, theta, w: g + lam * (theta - w) + trainer.weight_decay * theta,
                mlp.gradient(theta, rows[positions]),
                theta,
                w,
            )
            velocity = jax.tree.map(lambda v, g: trainer.momentum * v + g, velocity, g)
            theta = jax.tree.map(lambda theta, v: theta - HYPER["personal_lr"] * decay * v, theta, velocity)
        w = jax.tree.map(lambda w, theta: w - trainer.lr * decay * lam * (w - theta), w, theta)
    return w, theta


def test_rounds_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9, weight_decay=0.01)
    start, end, cohorts = play(pfedme(model, trainer, **HYPER), federation, who=SOME)
    mlp, server = MLP(federation.x, federation.y), to_numpy(start.state.server)
    own = [server] * N
    for t, cohort in enumerate(cohorts):
        uploads, rows = [], [held(federation.train, i) for i in cohort]
        for i, held_rows in zip(cohort, rows, strict=True):
            upload, own[i] = pfedme_client(mlp, client_key(KEY, t, i), t, server, held_rows, trainer)
            uploads.append(upload)
        mean, beta = weighted_mean(uploads, list(map(len, rows))), HYPER["beta"]
        server = jax.tree.map(lambda w, mean, beta=beta: (1 - beta) * w + beta * mean, server, mean)
    assert 1 < len({i for cohort in cohorts for i in cohort}) < N
    jax.tree.map(near, end.state.server, server)
    for i in range(N):
        jax.tree.map(near, client(end.state.clients, i), own[i])
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(own[i], held(federation.test, i)))


def local(method, federation, rows):
    """One call of `local` on these samples, with another personal model than the received one."""
    received, _ = method.init(KEY, N)
    kept = jax.tree.map(lambda leaf: leaf + 0.5, received)
    data = client_data(federation.x, federation.y, rows)
    return received, kept, jax.jit(method.local)(now(KEY, 0), received, kept, data)


def test_an_exact_inner_solution_moves_w_as_the_moreau_envelope_says(federation):
    """theta = argmin F(theta) + (lam / 2) ||theta - w||^2, whatever the personal model was before."""
    matrix, centre, w = curved()
    lam, lr, steps = 2.0, 0.2, 3
    options = {"lam": lam, "inner_steps": 300, "personal_lr": 0.1, "local_steps": steps}
    method = pfedme(quadratic(matrix, centre, w), Trainer(epochs=1, batch_size=4, lr=lr), **options)
    _, _, update = local(method, federation, client(federation.train, 4))
    theta = None
    for _ in range(steps):
        theta = np.linalg.solve(matrix + lam * np.eye(4), matrix @ centre + lam * w)
        w = w - lr * lam * (w - theta)
    assert int(update.info.steps) == steps
    near(update.upload["extractor"]["point"], w)
    near(update.client["extractor"]["point"], theta)


def test_running_statistics_of_w_are_those_of_theta(federation):
    method = pfedme(half_running(quadratic(*curved())), Trainer(lr=0.05), inner_steps=2, local_steps=1)
    received, _, update = local(method, federation, client(federation.train, 4))
    before, w, theta = (tree["extractor"] for tree in (received, update.upload, update.client))
    np.testing.assert_array_equal(w["running_mean"], theta["running_mean"])
    for other, name in ((theta, "point"), (before, "point"), (before, "running_mean")):
        assert np.abs(w[name] - other[name]).max() > 1e-3


def test_a_client_without_samples_keeps_its_model_and_sends_what_it_received(federation):
    rows = jax.tree.map(lambda leaf: leaf[0], pack([np.zeros(0, np.int64)], np.asarray(federation.y), 3))
    method = pfedme(quadratic(*curved()), Trainer(batch_size=4, lr=0.05))
    received, kept, update = local(method, federation, rows)
    jax.tree.map(np.testing.assert_array_equal, (update.upload, update.client), (received, kept))
    assert (float(update.info.loss), int(update.info.steps)) == (0, 0)


def test_beta_says_how_far_the_server_goes_towards_the_mean_whose_running_statistics_it_takes():
    cohort = Cohort(jnp.arange(3), jnp.array([3.0, 0.0, 1.0]), N, N)
    for beta in (0.0, 1.0, 2.0):
        method = pfedme(half_running(quadratic(*curved())), Trainer(), beta=beta)
        server, _ = method.init(KEY, N)
        uploads = jax.tree.map(lambda w: jnp.stack([w + 1, 0 * w, w + 5]), server)
        found, _ = method.aggregate(now(KEY, 0), server, (), uploads, cohort)
        # The mean of the two that are present is at a distance of (3 * 1 + 1 * 5) / 4.
        moved = jax.tree.map(np.subtract, found, server)
        near(moved["extractor"].pop("running_mean"), 2)
        jax.tree.map(partial(near, desired=2 * beta), moved)


def test_the_model_goes_down_and_comes_back_and_another_stays(model, trainer, federation):
    parameters = 16 * 8 + 8 + 8 * 3 + 3
    assert exchanged(pfedme(model, trainer), federation) == (parameters, parameters, parameters)


def test_the_loss_of_a_batch_is_the_mean_over_the_steps_of_the_personal_model(federation):
    matrix, centre, w = curved()
    lam, rate, steps = 2.0, 0.1, 3
    options = {"lam": lam, "inner_steps": steps, "personal_lr": rate, "local_steps": 1}
    method = pfedme(quadratic(matrix, centre, w), Trainer(batch_size=4, lr=0.2), **options)
    _, _, update = local(method, federation, client(federation.train, 4))
    theta, losses = w, []
    for _ in range(steps):
        away, apart = theta - centre, theta - w
        losses.append(np.log(3) + 0.5 * away @ matrix @ away + 0.5 * lam * apart @ apart)
        theta = theta - rate * (matrix @ away + lam * apart)
    near(update.info.loss, np.mean(losses))
    assert np.ptp(losses) > 0.1
