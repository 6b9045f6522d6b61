"""GRACE against rounds in NumPy, its weights, its limits, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.grace import grace
from fedjax_pfl.ops.training import Trainer
from tests.play import KEY, SOME, N, exchanged, play, update_of
from tests.quadratics import curved, half_running, quadratic
from tests.reference import MLP, batches, client, client_key, held, linear_gradient, now, sgd, softmax_loss, to_numpy

ROUNDS = 4
HYPER = {"lam": 40.0, "inner_lr": 0.2, "server_lr": 0.7}

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def aligned_gradient(mlp, w, received, rows):
    """Of the cross-entropy plus lam ||Cov(z) - Cov(z under the received extractor)||_F^2 / (4 K^2)."""
    z, old = mlp.features(w, rows), mlp.features(received, rows)
    d_logits = softmax_loss(mlp.logits(w, rows), mlp.y[rows])[1]
    d_z = d_logits @ w["head"]["kernel"].T
    if len(rows) > 1:
        apart = np.cov(z, rowvar=False) - np.cov(old, rowvar=False)
        d_z = d_z + HYPER["lam"] * (z - z.mean(0)) @ apart / (len(rows) - 1) / z.shape[1] ** 2
    return {"extractor": mlp.extract_gradient(w["extractor"], rows, d_z), "head": linear_gradient(z, d_logits)}


def grace_client(mlp, key, t, received, rows, trainer):
    """One participation: on the first, third ... sample of a batch after a step on the others."""

    def meta(w, rows):
        if len(rows) > 1:
            rate = HYPER["inner_lr"] * trainer.lr_decay**t
            w = jax.tree.map(lambda w, g: w - rate * g, w, mlp.gradient(w, rows[1::2]))
        return aligned_gradient(mlp, w, received, rows[::2])

    order = batches(key, len(rows), epochs=trainer.epochs, batch_size=trainer.batch_size)
    steps = (partial(meta, rows=rows[positions]) for positions in order)
    return sgd(received, steps, lr=trainer.lr * trainer.lr_decay**t, momentum=trainer.momentum)


def grace_weights(updates, sizes):
    """q, from all pairs of cosines."""
    updates, sizes = np.asarray(updates, np.float64), np.asarray(sizes, np.float64)
    if len(updates) == 1:
        return np.ones(1)
    lengths = np.linalg.norm(updates, axis=1)
    cosines = updates @ updates.T / np.outer(lengths, lengths)
    r = np.array([np.delete(row, i).mean() for i, row in enumerate(cosines)])
    if r.min() < 0:
        r = r - r.min() + 1e-3
    if r.max() > 1:
        r = r / r.max()
    return sizes * r / np.sum(sizes * r)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_rounds_and_scores_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9, batch_size=7)
    start, end, cohorts = play(grace(model, trainer, **HYPER), federation, who=SOME, rounds=ROUNDS)
    mlp, server = MLP(federation.x, federation.y), to_numpy(start.state.server)
    post, weights = {}, []
    for t, cohort in enumerate(cohorts):
        rows = [held(federation.train, i) for i in cohort]
        trained = [
            grace_client(mlp, client_key(KEY, t, i), t, server, held_rows, trainer)
            for i, held_rows in zip(cohort, rows, strict=True)
        ]
        post |= dict(zip(cohort, trained, strict=True))
        updates = [flat(server) - flat(w) for w in trained]
        weights.append(grace_weights(updates, list(map(len, rows))))
        server = jax.tree.map(
            lambda w, *new, q=weights[-1]: (
                w - HYPER["server_lr"] * sum(q * (w - own) for q, own in zip(q, new, strict=True))
            ),
            server,
            *trained,
        )
    assert max(map(len, weights)) > 2
    jax.tree.map(near, end.state.server, server)
    for i, w in post.items():
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(w, held(federation.test, i)))


SIZES = np.array([5.0, 0.0, 3.0, 8.0])


@pytest.fixture(scope="module")
def moved(model, trainer):
    """updates [4, |w|], sizes -> the way that the server goes; an upload of zeros where the size is 0."""
    server = model.init(KEY)
    vector, unflatten = jax.flatten_util.ravel_pytree(server)

    @jax.jit
    def aggregate(updates, sizes):
        uploads = jax.vmap(unflatten)(jnp.where(sizes[:, None] > 0, vector - updates, 0))
        return grace(model, trainer).aggregate(now(KEY, 0), server, (), uploads, Cohort(jnp.arange(4), sizes, N, N))[0]

    return lambda updates, sizes: flat(server) - flat(aggregate(jnp.float32(updates), jnp.float32(sizes)))


@pytest.mark.parametrize("opposed", [False, True])
def test_weights_are_those_of_all_pairs_of_cosines(opposed, moved):
    rng = np.random.default_rng(4)
    updates = rng.normal(0, [[0.3], [1], [1], [3]], (4, 163)) + rng.normal(0, 1, 163)
    if opposed:
        updates[3] -= 4 * updates[0]
    found = np.linalg.lstsq(updates.T, moved(updates, SIZES), rcond=None)[0]
    here = SIZES > 0
    near(found[here], grace_weights(updates[here], SIZES[here]), atol=1e-5)
    assert abs(found[1]) < 1e-5
    assert found.sum() == pytest.approx(1, abs=1e-5)
    assert found.min() > -1e-5
    assert np.abs(found - SIZES / SIZES.sum()).max() > 0.05


def test_parallel_updates_a_lone_one_and_none_count_by_their_samples(moved):
    way = np.random.default_rng(5).normal(0, 1, 163)
    updates = way * np.array([[1.0], [1.0], [2.0], [4.0]])
    near(moved(updates, SIZES), SIZES @ updates / SIZES.sum())
    near(moved(updates, np.array([0.0, 0.0, 3.0, 0.0])), updates[2])
    near(moved(0 * updates, SIZES), 0 * way)


def test_running_statistics_take_the_outer_update_whole(federation):
    matrix, centre, w = curved()
    a, b, learnt = 0.3, 0.05, np.array([1, 1, 0, 0])
    model = half_running(quadratic(matrix, centre, w))
    method = grace(model, Trainer(batch_size=32, lr=b), lam=0.0, inner_lr=a)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    update = jax.jit(method.local)(now(KEY, 0), method.init(KEY, N)[0], (), data)
    adapted = w - learnt * a * (matrix @ (w - centre))
    expected = w - np.where(learnt, b, 1) * (matrix @ (adapted - centre))
    near(np.concatenate([update.upload["extractor"][name] for name in ("point", "running_mean")]), expected)


def test_running_statistics_have_no_say_in_the_weights(model, trainer):
    rng = np.random.default_rng(6)
    cohort = Cohort(jnp.arange(4), jnp.asarray(SIZES, jnp.float32), N, N)
    kernels = jnp.asarray(rng.normal(1, 1, (4, 5)), jnp.float32)

    @jax.jit
    def kernel(statistics):
        server = {"kernel": jnp.zeros(5), "norm": {"running_var": jnp.zeros(3)}}
        sent = {"kernel": kernels, "norm": {"running_var": statistics}}
        return grace(model, trainer).aggregate(now(KEY, 0), server, (), sent, cohort)[0]["kernel"]

    found = [kernel(scale * rng.normal(size=(4, 3)).astype(np.float32)) for scale in (0, 10)]
    np.testing.assert_array_equal(*found)


def test_without_alignment_and_inner_step_it_is_sgd_on_every_other_sample_and_a_client_without_any_stays(
    model, trainer, federation
):
    w, train = model.init(KEY), jax.jit(grace(model, trainer, lam=0.0, inner_lr=0.0).local)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, 2)
    order = batches(KEY, len(rows), epochs=trainer.epochs, batch_size=trainer.batch_size)
    halves = (partial(mlp.gradient, rows=rows[positions[::2]]) for positions in order)
    expected = sgd(to_numpy(w), halves, lr=trainer.lr, momentum=trainer.momentum)
    jax.tree.map(near, train(now(KEY, 0), w, (), data).upload, expected)
    update = train(now(KEY, 0), w, (), data._replace(count=jnp.array(0, jnp.int32)))
    jax.tree.map(np.testing.assert_array_equal, update.upload, w)


def test_the_model_goes_down_and_comes_back_and_nothing_stays(model, trainer, federation):
    parameters = 16 * 8 + 8 + 8 * 3 + 3
    assert exchanged(grace(model, trainer), federation) == (parameters, parameters, 0)


def test_running_statistics_are_averaged_whatever_the_servers_rate(model, trainer):
    server = {"kernel": jnp.zeros(5), "norm": {"running_var": jnp.ones(3)}}
    kernels = np.random.default_rng(7).normal(1, 1, (4, 5)).astype(np.float32)
    here, values = SIZES > 0, np.array([4.0, 0.0, 1.0, 8.0])
    rows = jnp.asarray(values[:, None] * np.ones(3), jnp.float32)
    sent = {"kernel": jnp.asarray(kernels), "norm": {"running_var": rows}}
    cohort = Cohort(jnp.arange(4), jnp.asarray(SIZES, jnp.float32), N, N)
    found, _ = grace(model, trainer, server_lr=0.5).aggregate(now(KEY, 0), server, (), sent, cohort)
    near(found["norm"]["running_var"], grace_weights(-kernels[here], SIZES[here]) @ values[here])


def test_unless_given_the_inner_rate_is_the_local_one(model, trainer, federation):
    usual, given = (
        update_of(grace(model, trainer, **options), federation, 2).upload for options in ({}, {"inner_lr": trainer.lr})
    )
    jax.tree.map(np.testing.assert_array_equal, usual, given)
