"""Per-FedAvg against rounds in NumPy, its closed form on a quadratic, its limits, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.perfedavg import perfedavg
from fedjax_pfl.ops.training import Trainer
from tests.play import KEY, SOME, N, exchanged, play
from tests.quadratics import curved, half_running, quadratic
from tests.reference import MLP, at, batches, client, client_key, held, now, sgd, to_numpy, weighted_mean

ROUNDS, INNER_LR = 3, 0.2
VERSIONS = ("first_order", "hessian_free", "exact")

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def minus(w, rate, gradient):
    return jax.tree.map(lambda w, g: w - rate * g, w, gradient)


def perfedavg_client(mlp, key, t, w, rows, trainer, version, delta=1e-6):
    """The local steps of one participation; the product of Hessian and gradient by central differences."""
    a, parts = INNER_LR * trainer.lr_decay**t, 2 if version == "first_order" else 3

    def gradient(w, rows):
        return mlp.gradient(w, rows) if len(rows) else jax.tree.map(np.zeros_like, w)

    def meta(w, rows):
        outer, inner, *rest = (rows[part::parts] for part in range(parts))
        g = gradient(minus(w, a, gradient(w, inner)), outer)
        for third in rest:
            above, below = (gradient(minus(w, h, g), third) for h in (-delta, delta))
            g = jax.tree.map(lambda g, above, below: g - a * (above - below) / (2 * delta), g, above, below)
        return g

    order = batches(key, len(rows), epochs=trainer.epochs, batch_size=parts * trainer.batch_size)
    steps = (partial(meta, rows=rows[positions]) for positions in order)
    rate = trainer.lr * trainer.lr_decay**t
    return sgd(w, steps, lr=rate, momentum=trainer.momentum, weight_decay=trainer.weight_decay)


def test_rounds_and_scores_after_one_step_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9, weight_decay=0.01)
    method = perfedavg(model, trainer, inner_lr=INNER_LR)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS, scored=False)
    mlp, server = MLP(federation.x, federation.y), to_numpy(start.state.server)
    for t, cohort in enumerate(cohorts):
        uploads = [
            perfedavg_client(mlp, client_key(KEY, t, i), t, server, held(federation.train, i), trainer, "first_order")
            for i in cohort
        ]
        server = weighted_mean(uploads, np.ones(len(cohort)))
    assert {1} < {len(held(federation.train, i)) for cohort in cohorts for i in cohort}, "a lone sample and others"
    jax.tree.map(near, end.state.server, server)
    pre = jax.jit(Engine(method, N, SOME).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        rows, key = held(federation.train, i), client_key(KEY, ROUNDS, i)
        first = next(batches(key, len(rows), epochs=1, batch_size=trainer.batch_size, phase="personalize"))
        w = minus(server, INNER_LR * trainer.lr_decay**ROUNDS, mlp.gradient(server, rows[first]))
        near([float(leaf[i]) for leaf in pre], mlp.scores(w, held(federation.test, i)))


@pytest.mark.parametrize(
    ("version", "options"), [("hessian_free", {}), ("hessian_free", {"delta": 1.0}), ("exact", {})]
)
def test_local_training_with_a_hessian_is_numpys(version, options, model, trainer, federation):
    trainer = replace(trainer, weight_decay=0.01)
    method, w = perfedavg(model, trainer, inner_lr=INNER_LR, version=version, **options), model.init(KEY)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    update = jax.jit(method.local)(now(KEY, 0), w, (), data)
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, 2)
    expected, plain, derived = (
        perfedavg_client(mlp, KEY, 0, to_numpy(w), rows, trainer, *how)
        for how in ((version, *options.values()), ("first_order",), ("exact",))
    )
    # Of the difference of two gradients, float32 has lost some digits.
    jax.tree.map(partial(near, atol=2e-5 if version == "exact" else 1e-4), update.upload, expected)
    assert np.abs(expected["head"]["kernel"] - plain["head"]["kernel"]).max() > 0.01
    assert (np.abs(expected["head"]["kernel"] - derived["head"]["kernel"]).max() > 1e-3) == bool(options)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_on_a_quadratic_is_its_closed_form(version, federation):
    """w <- w - b (I - a H) g(w - a g(w)), without (I - a H) to first order."""
    matrix, centre, w = curved()
    a, b = 0.3, 0.05
    method = perfedavg(quadratic(matrix, centre, w), Trainer(batch_size=32, lr=b), inner_lr=a, version=version)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    update = jax.jit(method.local)(now(KEY, 0), method.init(KEY, N)[0], (), data)
    shrink = np.eye(4) - a * matrix
    g = matrix @ (shrink @ (w - centre))
    expected = w - b * (g if version == "first_order" else shrink @ g)
    assert int(update.info.steps) == 1
    near(update.upload["extractor"]["point"], expected, atol=1e-4 if version == "hessian_free" else 1e-6)
    assert np.abs(b * (shrink @ g - g)).max() > 0.01


@pytest.mark.parametrize("version", VERSIONS)
def test_running_statistics_take_the_outer_update_whole_and_no_part_in_the_rest(version, federation):
    matrix, centre, w = curved()
    a, b, learnt = 0.3, 0.05, np.array([1, 1, 0, 0])
    model = half_running(quadratic(matrix, centre, w))
    method = perfedavg(model, Trainer(batch_size=32, lr=b), inner_lr=a, version=version)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    update = jax.jit(method.local)(now(KEY, 0), method.init(KEY, N)[0], (), data)
    g = matrix @ (w - centre)
    g = matrix @ (w - learnt * a * g - centre)
    curvature = 0 if version == "first_order" else learnt * (matrix @ (learnt * g))
    expected = w - np.where(learnt, b, 1) * (g - a * curvature)
    found = np.concatenate([update.upload["extractor"][name] for name in ("point", "running_mean")])
    near(found, expected, atol=1e-4 if version == "hessian_free" else 1e-6)


def test_without_an_inner_step_it_is_sgd_on_every_other_sample_and_a_client_without_any_stays(
    model, trainer, federation
):
    w, train = model.init(KEY), jax.jit(perfedavg(model, trainer, inner_lr=0.0).local)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, 2)
    order = batches(KEY, len(rows), epochs=trainer.epochs, batch_size=2 * trainer.batch_size)
    halves = (partial(mlp.gradient, rows=rows[positions[::2]]) for positions in order)
    expected = sgd(to_numpy(w), halves, lr=trainer.lr, momentum=trainer.momentum)
    jax.tree.map(near, train(now(KEY, 0), w, (), data).upload, expected)
    update = train(now(KEY, 0), w, (), data._replace(count=jnp.array(0, jnp.int32)))
    jax.tree.map(np.testing.assert_array_equal, update.upload, w)


def test_the_second_derivative_of_convolutions_is_the_limit_of_differences(model_with_maps, trainer, federation):
    w, data = jax.jit(model_with_maps.init)(KEY), client_data(federation.x, federation.y, client(federation.train, 2))

    def trained(**options):
        local = jax.jit(perfedavg(model_with_maps, trainer, **options).local)
        return ravel_pytree(local(now(KEY, 0), w, (), data).upload)[0]

    exact, first_order = trained(version="exact"), trained(version="first_order")
    error = jnp.abs(exact - trained(version="hessian_free", delta=1e-2)).max()
    assert error < 0.02 * jnp.abs(exact - first_order).max()


def test_participants_count_alike_or_by_their_samples():
    cohort = Cohort(jnp.arange(3), jnp.array([3.0, 0.0, 1.0]), N, N)
    for weighting, mean in (("uniform", 3.0), ("samples", 2.0)):
        method = perfedavg(quadratic(*curved()), Trainer(), weighting=weighting)
        server, _ = method.init(KEY, N)
        uploads = jax.tree.map(lambda w: jnp.stack([w + 1, 0 * w, w + 5]), server)
        found, _ = method.aggregate(now(KEY, 0), server, (), uploads, cohort)
        jax.tree.map(lambda found, w, mean=mean: near(found, w + mean), found, server)


def test_the_model_goes_down_and_comes_back_and_nothing_stays(model, trainer, federation):
    parameters = 16 * 8 + 8 + 8 * 3 + 3
    for version in VERSIONS:
        assert exchanged(perfedavg(model, trainer, version=version), federation) == (parameters, parameters, 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_loss_told_is_that_after_the_inner_step(version, federation):
    matrix, centre, w = curved()
    a = 0.3
    method = perfedavg(quadratic(matrix, centre, w), Trainer(batch_size=32, lr=0.05), inner_lr=a, version=version)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    update = jax.jit(method.local)(now(KEY, 0), method.init(KEY, N)[0], (), data)
    away = (np.eye(4) - a * matrix) @ (w - centre)
    near(update.info.loss, np.log(3) + 0.5 * away @ matrix @ away)
