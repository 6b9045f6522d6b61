"""MOON, FedNTD, FedDecorr and FedASAM: rounds against NumPy, the limits where they are FedAvg, and their losses."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.method import TrainInfo
from fedjax_pfl.methods.base_loss import Last
from fedjax_pfl.methods.fedasam import asam_loss, fedasam
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.feddecorr import decorrelated, decorrelation, feddecorr
from fedjax_pfl.methods.fedntd import fedntd, not_true_distillation
from fedjax_pfl.methods.fedprox import fedprox
from fedjax_pfl.methods.grace import grace
from fedjax_pfl.methods.moon import moon
from fedjax_pfl.ops.losses import proximal
from fedjax_pfl.ops.training import Trainer
from tests.conftest import TRAIN_SIZES
from tests.play import KEY, SOME, N, exchanged, play, update_of
from tests.reference import (
    MLP,
    at,
    client,
    client_key,
    held,
    linear_gradient,
    now,
    softmax_loss,
    to_numpy,
    weighted_mean,
)

ROUNDS = 3
MU, TAU, BETA, RHO, ETA = 0.8, 0.4, 1.3, 0.3, 0.2

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def with_features(mlp, w, rows, d_logits, d_z):
    """The gradient, given that with respect to the logits, and what else reaches the features."""
    z = mlp.features(w, rows)
    extractor = mlp.extract_gradient(w["extractor"], rows, d_logits @ w["head"]["kernel"].T + d_z)
    return {"extractor": extractor, "head": linear_gradient(z, d_logits)}


def moon_gradient(mlp, w, rows, received, last):
    z, others = mlp.features(w, rows), [mlp.features(model, rows) for model in (last, received)]
    unit_last, unit_received = (other / np.sqrt((other**2).sum(1, keepdims=True) + 1e-12) for other in others)
    length = np.sqrt((z**2).sum(1, keepdims=True) + 1e-12)
    towards = (unit_last - unit_received) / TAU
    slope = 1 / (1 + np.exp(-((z / length) * towards).sum(1, keepdims=True))) / len(rows)
    d_z = MU * slope * (towards / length - z * (z * towards).sum(1, keepdims=True) / length**3)
    return with_features(mlp, w, rows, softmax_loss(mlp.logits(w, rows), mlp.y[rows])[1], d_z)


def ntd_gradient(mlp, w, rows, received, last):
    y, logits = mlp.y[rows], mlp.logits(w, rows)

    def among_others(logits):
        powers = np.exp(logits / TAU) * (np.arange(logits.shape[1]) != y[:, None])
        return powers / powers.sum(1, keepdims=True)

    apart = among_others(logits) - among_others(mlp.logits(received, rows))
    return with_features(mlp, w, rows, softmax_loss(logits, y)[1] + BETA * TAU * apart / len(rows), 0.0)


def decorr_gradient(mlp, w, rows, received, last):
    z, d_z = mlp.features(w, rows), 0.0
    b, k = z.shape
    if b > 1:
        c = z - z.mean(0)
        s = np.sqrt(c.var(0, ddof=1) + 1e-8)
        products = (c / s).T @ (c / s)
        g = 4 * (c / s) @ (products - np.diag(np.diag(products))) / (b * k * (k - 1))
        d_c = g / s - c * (g * c).sum(0) / (s**3 * (b - 1))
        d_z = BETA * (d_c - d_c.mean(0))
    return with_features(mlp, w, rows, softmax_loss(mlp.logits(w, rows), mlp.y[rows])[1], d_z)


def sam_gradient(mlp, w, rows, received, last):
    g = mlp.gradient(w, rows)
    length = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(g)))
    return mlp.gradient(jax.tree.map(lambda w, g: w + RHO * g / length, w, g), rows)


def asam_gradient(mlp, w, rows, received, last):
    g = mlp.gradient(w, rows)
    s = {
        part: {name: np.abs(leaf) + ETA if name == "kernel" else np.ones_like(leaf) for name, leaf in layer.items()}
        for part, layer in (("hidden_layer", w["extractor"]["hidden_layer"]), ("head", w["head"]))
    }
    s = {"extractor": {"hidden_layer": s["hidden_layer"]}, "head": s["head"]}
    length = np.sqrt(sum(np.sum((a * b) ** 2) for a, b in zip(*map(jax.tree.leaves, (s, g)), strict=True)))
    return mlp.gradient(jax.tree.map(lambda w, s, g: w + RHO * s**2 * g / length, w, s, g), rows)


METHODS = {
    "moon": (partial(moon, mu=MU, temperature=TAU), moon_gradient),
    "fedntd": (partial(fedntd, beta=BETA, temperature=TAU), ntd_gradient),
    "feddecorr": (partial(feddecorr, beta=BETA), decorr_gradient),
    "fedasam": (partial(fedasam, rho=RHO, eta=ETA), asam_gradient),
    "fedsam": (partial(fedasam, rho=RHO, adaptive=False), sam_gradient),
}


@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_numpys(name, model, trainer, federation):
    factory, gradient = METHODS[name]
    played = play(factory(model, trainer), federation, who=SOME, rounds=ROUNDS, scored=False)
    mlp, last = MLP(federation.x, federation.y), {}
    w = to_numpy(played.start.state.server)
    for t, cohort in enumerate(played.cohorts):
        trained = {}
        for i in cohort:
            rows, key = held(federation.train, i), client_key(KEY, t, i)
            step = partial(gradient, mlp, received=w, last=last.get(i, w))
            if name == "moon" and i not in last:
                jax.tree.map(near, step(w, rows), mlp.gradient(w, rows))  # a client's first round is FedAvg's
            trained[i], _ = mlp.train(w, key, t, rows, trainer, gradient=step)
        last |= trained
        if trained:
            w = weighted_mean(trained.values(), [TRAIN_SIZES[i] for i in trained])
    assert len(set(played.cohorts[0]) & set(played.cohorts[1])) > 0
    jax.tree.map(near, played.end.state.server, w)
    if name == "moon":
        kept = jax.tree.map(np.asarray, played.end.state.clients)
        assert kept.known.tolist() == [i in last for i in range(len(TRAIN_SIZES))]
        for i, params in last.items():
            jax.tree.map(near, client(kept.params, i), params)


def test_the_ratio_of_the_proximal_term_is_numpys(model, trainer, federation):
    """On the client's one batch, at the model that it has trained: at the received one the term has no gradient."""
    update = update_of(fedprox(model, replace(trainer, batch_size=32, diagnose=True), mu=MU), federation, 2)
    mlp, (w, received) = MLP(federation.x, federation.y), to_numpy((update.upload, model.init(KEY)))
    pull, ce = jax.tree.map(lambda w, w0: MU * (w - w0), w, received), mlp.gradient(w, held(federation.train, 2))
    lengths = [np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(part))) for part in (pull, ce)]
    assert float(update.diagnostics["gradient_ratio_term"]) == pytest.approx(lengths[0] / lengths[1], rel=1e-3)


def test_only_a_client_that_has_trained_has_a_last_model():
    none, received, trained = ({"w": jnp.array(value)} for value in (0.0, 1.0, 2.0))
    last = Last(none, jnp.array(False))
    for steps, kept in ((0, received), (3, trained), (0, trained)):
        last = last.replaced(trained, TrainInfo(jnp.zeros(()), jnp.array(steps)))
        assert last.or_received(received) == kept


OFF = {
    "moon": {"mu": 0.0},
    "fedntd": {"beta": 0.0},
    "feddecorr": {"beta": 0.0},
    "fedasam": {"rho": 0.0},
}


@pytest.fixture(scope="module")
def programs(federation):
    """Method -> what its initial state and its rounds compute, step by step."""

    def of(method):
        engine = Engine(method, len(TRAIN_SIZES), SOME)
        init, start = jax.make_jaxpr(engine.init, return_shape=True)(KEY, federation)
        rounds = jax.make_jaxpr(engine.rounds)(KEY, start, at(0), at(ROUNDS), jnp.array(True), federation)
        return str(init), str(rounds)

    return of


@pytest.fixture(scope="module")
def fedavgs(programs, model, trainer):
    return programs(fedavg(model, trainer))


@pytest.mark.parametrize("name", OFF)
def test_with_its_term_off_it_is_the_very_program_of_fedavg(name, model, trainer, programs, fedavgs):
    factory = METHODS[name][0].func
    assert programs(factory(model, trainer, **OFF[name])) == fedavgs


def test_not_true_distillation_leaves_the_label_alone():
    rng = np.random.default_rng(0)
    student, teacher = (rng.normal(0, 2, (6, 4)).astype(np.float32) for _ in range(2))
    y, mask = np.array([0, 1, 2, 3, 1, 1], np.int32), jnp.array([1.0, 1, 1, 1, 1, 0])
    other = student + 7 * np.eye(4, dtype=np.float32)[y]

    @jax.jit
    def loss(student, teacher, y):
        return not_true_distillation(student, teacher=teacher, y=y, mask=mask, temperature=1.5)

    value, gradient = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(student, teacher, y))
    assert value > 0.1
    assert float(loss(other, teacher, y)) == pytest.approx(float(value), rel=1e-6)
    np.testing.assert_array_equal(gradient[np.arange(6), y], 0)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient.any(axis=1), np.asarray(mask) > 0)
    assert float(loss(student[:, :2], teacher[:, :2], y % 2)) == 0


@pytest.mark.parametrize("norm", ["code", "paper"])
def test_decorrelation_sees_correlations_alone(norm, model):
    rng = np.random.default_rng(1)
    z = rng.normal(0, 1, (9, 5)) @ rng.normal(0, 1, (5, 5))
    mask = np.array([1.0] * 7 + [0.0] * 2)
    correlation = np.corrcoef(z[:7].T)
    apart = correlation - np.eye(5)
    expected = BETA * {"paper": (correlation**2).sum() / 25, "code": 36 * (apart**2).sum() / 20 / 7}[norm]
    z, mask = z.astype(np.float32), mask.astype(np.float32)
    found = jax.jit(decorrelated(model, BETA, norm).regularizer)
    assert float(found(z, mask)) == pytest.approx(expected, rel=1e-4)
    moved = 3 * z + np.arange(5, dtype=np.float32) - 2
    assert float(found(moved, mask)) == pytest.approx(expected, rel=1e-4)
    assert float(found(z, np.float32(np.arange(9) == 0))) == 0


@pytest.mark.parametrize(("norm", "expected"), [("code", 0.0), ("paper", 1.0)])
def test_a_single_feature_is_correlated_with_itself_alone(norm, expected):
    z = np.random.default_rng(2).normal(size=(6, 1)).astype(np.float32)
    assert float(decorrelation(z, np.ones(6, np.float32), norm=norm)) == pytest.approx(expected, rel=1e-5)


def test_fedasam_scores_the_mean_of_what_it_captured(model, federation):
    train = Trainer(epochs=1, batch_size=4, lr=0.2)
    method = fedasam(model, train, rho=RHO, eta=ETA, swa_start=1, swa_cycle=2, swa_lr=0.02)
    mlp, engine = MLP(federation.x, federation.y), Engine(method, len(TRAIN_SIZES))
    start, rounds = jax.jit(engine.init)(KEY, federation), jax.jit(engine.rounds)
    before, end = (rounds(KEY, start, at(0), at(t), jnp.array(False), federation).state.server for t in (2, 5))
    w, models = to_numpy(start.state.server.params), []
    # Round 0 at the configured rate; then from half-way down to the lowest, twice.
    for t, rate in enumerate([0.2, 0.11, 0.02, 0.11, 0.02]):
        trained = []
        for i in range(len(TRAIN_SIZES)):
            rows, key = held(federation.train, i), client_key(KEY, t, i)
            step = partial(asam_gradient, mlp, received=w, last=w)
            trained.append(mlp.train(w, key, t, rows, train, gradient=step, lr=rate)[0])
        w = weighted_mean(trained, TRAIN_SIZES)
        models.append(w)
    assert int(end.captured) == 2
    jax.tree.map(near, end.params, models[-1])
    jax.tree.map(near, end.average, jax.tree.map(lambda a, b: (a + b) / 2, models[2], models[4]))
    scored = method.calibrate.server(None, end, (), None)
    jax.tree.map(np.testing.assert_array_equal, method.broadcast(scored), end.average)
    assert int(before.captured) == 0
    jax.tree.map(np.testing.assert_array_equal, method.calibrate.server(None, before, (), None).params, before.params)


def test_with_cycles_of_a_round_the_rate_stays_and_every_model_is_captured(model, federation):
    train = Trainer(epochs=1, batch_size=4, lr=0.2)
    method = fedasam(model, train, rho=RHO, eta=ETA, swa_start=1, swa_cycle=1, swa_lr=0.02)
    plain = Engine(fedasam(model, train, rho=RHO, eta=ETA), len(TRAIN_SIZES))
    engine = Engine(method, len(TRAIN_SIZES))
    run = jax.jit(engine.init)(KEY, federation)
    end = jax.jit(engine.rounds)(KEY, run, at(0), at(3), jnp.array(False), federation).state.server
    expected, rounds = [jax.jit(plain.init)(KEY, federation)], jax.jit(plain.rounds)
    for t in range(3):
        expected.append(rounds(KEY, expected[-1], at(t), at(t + 1), jnp.array(False), federation))
    models = [run.state.server for run in expected]
    assert int(end.captured) == 2
    jax.tree.map(near, end.params, models[3])
    jax.tree.map(near, end.average, jax.tree.map(lambda a, b: (a + b) / 2, models[2], models[3]))


class Rate(Trainer):
    """Trains nothing, and reports its learning rate as the loss."""

    def __call__(self, now, loss, params, data, **options):
        return params, TrainInfo(self.rate(now.t), now.t)


def test_the_rate_within_a_cycle_decays_from_round_to_round_as_any_other(model, federation):
    method = fedasam(model, Rate(lr=0.2, lr_decay=0.5), swa_start=2, swa_cycle=3, swa_lr=0.05)
    w, data = model.init(KEY), client_data(federation.x, federation.y, client(federation.train, 2))
    found = [float(method.local(now(KEY, t), w, (), data).info.loss) for t in range(6)]
    assert found == pytest.approx(np.array([0.2, 0.2, 0.15, 0.1, 0.05, 0.15]) * 0.5 ** np.arange(6), rel=1e-6)


def test_fedasam_looks_around_without_touching_running_statistics(model_with_norm):
    seen = []
    w = model_with_norm.init(KEY)

    def loss(params, batch, key):
        seen.append(params)
        return sum(jnp.sum(jnp.sin(leaf + 1.0)) for leaf in jax.tree.leaves(params))

    asam_loss(model_with_norm, RHO, ETA).around(loss)(w, None, KEY)
    _, there = seen
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), w, there)
    norm = moved["extractor"].pop("norm")
    assert norm == {"scale": True, "bias": True, "running_mean": False, "running_var": False}
    assert all(jax.tree.leaves(moved))


def test_fedasam_reports_the_loss_at_the_model_that_it_steps_from(model, trainer, federation):
    one_step = replace(trainer, epochs=1, batch_size=32)
    methods = fedasam(model, one_step, rho=RHO, eta=ETA), fedavg(model, one_step)
    found, expected = (update_of(method, federation, 4) for method in methods)
    assert float(found.info.loss) == pytest.approx(float(expected.info.loss), rel=1e-6)
    assert not np.allclose(found.upload["head"]["bias"], expected.upload["head"]["bias"], rtol=1e-3)


def test_at_a_minimum_fedasam_stays(model):
    w = model.init(KEY)
    around = asam_loss(model, RHO, ETA).around(lambda params, batch, key: proximal(params, w, 1.0))
    gradient = jax.jit(jax.grad(around))(w, None, KEY)
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), gradient)


@pytest.mark.parametrize(("name", "kept"), [("moon", 1), ("fedntd", 0), ("feddecorr", 0), ("fedasam", 0)])
def test_the_model_goes_down_and_comes_back(name, kept, model, trainer, federation):
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    found = exchanged(METHODS[name][0](model, trainer), federation)
    assert (found.down, found.up, found.kept) == (parameters, parameters, kept * (parameters + 1))


@pytest.mark.parametrize(("factory", "off"), [(moon, {"mu": 0.0}), (grace, {"lam": 0.0})])
def test_models_that_are_not_trained_are_looked_at_as_in_evaluation(factory, off, model, trainer, federation):
    """With batch norm: by their running statistics, not by the batch's."""
    looks = set()

    def features(theta, x, mask=None):
        looks.add("evaluation" if mask is None else "training")
        return model.features(theta, x, mask)

    data = client_data(federation.x, federation.y, client(federation.train, 4))
    for options, expected in ((off, {"training"}), ({}, {"training", "evaluation"})):
        looks.clear()
        method = factory(model._replace(features=features), trainer, **options)
        server, own = jax.eval_shape(partial(method.init, clients=N), KEY)
        jax.eval_shape(method.local, now(KEY, 0), server, own, data)
        assert looks == expected


def test_feddecorr_scales_its_term_as_it_is_told(model, trainer, federation):
    own, paper, usual = (
        update_of(method, federation, 4).upload
        for method in (
            fedavg(decorrelated(model, BETA, "paper"), trainer),
            feddecorr(model, trainer, beta=BETA, norm="paper"),
            feddecorr(model, trainer, beta=BETA),
        )
    )
    jax.tree.map(np.testing.assert_array_equal, paper, own)
    assert not all(jax.tree.leaves(jax.tree.map(np.allclose, paper, usual)))
