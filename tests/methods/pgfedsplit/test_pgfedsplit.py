"""PGFedSplit against rounds in NumPy, its coefficient, its schedule, its synthetic features, and what it exchanges."""

import functools
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp

from fedjax_pfl import Config, ConfigError
from fedjax_pfl.data.federated import ClientData, client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.experiment.build import DataShape, make_engine
from fedjax_pfl.method import Cohort, PerClass, SentIf
from fedjax_pfl.methods.fedrep import fedrep
from fedjax_pfl.methods.pgfedsplit import pgfedsplit
from fedjax_pfl.methods.pgfedsplit.gaussians import Gaussians, update_gaussians
from fedjax_pfl.methods.pgfedsplit.method import Upload
from fedjax_pfl.methods.pgfedsplit.mixture import mixing_coefficient
from fedjax_pfl.methods.pgfedsplit.synthetic import add_synthetic
from fedjax_pfl.ops.prototypes import Prototypes
from fedjax_pfl.ops.training import phase_key
from fedjax_pfl.ops.tree import count
from tests import generator
from tests.conftest import CLASSES
from tests.play import cohorts
from tests.reference import (
    MLP,
    at,
    batches,
    class_means,
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
from tests.toys import OnlyHeads

N, ROUNDS, LONG = 7, 6, 20
# In this draw of SOME, class 2 has no prototype before round 1, and classes 0 and 1 keep an old one in round 2.
KEY = generator.key(16)
EVERYONE, SOME = Participation(), Participation(0.2, 0.6, 0.3)

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trainer(trainer):
    return replace(trainer, weight_decay=0.01, lr_decay=0.9)


# --- Rounds in NumPy -------------------------------------------------------------------------------------------------


class Schedule(NamedTuple):
    """tau, s, the mean coefficient of the last synchronisation, and whether there is a head to send."""

    interval: int
    counter: int = 0
    alpha: float = 0.0
    sent: bool = False


def after_a_round(schedule, alphas, *, low=1, high=20, adaptive=True):
    """Lines 13 to 27 of Algorithm 1; ``alphas`` are the participants', of no meaning in a round without a head."""
    interval, counter, previous, sent = schedule
    if sent:
        mean = np.mean(alphas)
        if adaptive:
            interval = min(max(interval - (mean > previous) + (mean < previous), low), high)
        previous = mean
    due = counter + 1 >= interval
    return Schedule(interval, 0 if due else counter + 1, previous, due)


class Server(NamedTuple):
    extractor: dict
    prototypes: np.ndarray
    valid: np.ndarray
    spread: np.ndarray
    head: dict
    schedule: Schedule


@jax.jit
def draws(key, share):
    """Rule R12: what the synthetic features with the numbers 0 ... 63 of a client draw; (classes, normal numbers)."""
    keys = jax.random.split(phase_key(key, "synthetic"))
    of_class, of_noise = jax.vmap(lambda key: jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(64)))(keys)
    classes = jax.vmap(lambda key: jax.random.categorical(key, jnp.log(share)))(of_class)
    return classes, jax.vmap(lambda key: jax.random.normal(key, (8,)))(of_noise)


def scales(share, scale):
    return {
        "max": share / share.max(),
        "proportion": share,
        "mean": share / share.mean(),
        "one": np.ones_like(share),
    }[scale]


def mixed_set(key, z, y, server, hyper):
    """Step 3: local features and synthetic ones."""
    share = np.bincount(y, minlength=CLASSES) / len(y)
    if not (share * server.valid).any():
        return z, y
    extra = math.ceil(hyper.r / (1 - hyper.r) * len(y) - 1e-6)
    classes, noise = (np.asarray(leaf)[:extra] for leaf in draws(key, jnp.float32(share * server.valid)))
    root = server.spread[classes]
    apart = noise * root if root.ndim == 2 else np.einsum("bi,bij->bj", noise, root)
    synthetic = server.prototypes[classes] + scales(share, hyper.scale)[classes][:, None] * apart
    return np.concatenate([z, synthetic]), np.concatenate([y, classes])


def objective(alpha, own, received, y, penalty):
    """Eq. 13 under a penalty beta Delta_i mean KL(p_i || p_g)."""
    logits = alpha * own + (1 - alpha) * received
    return np.mean(logsumexp(logits, axis=-1) - logits[np.arange(len(y)), y]) + penalty * alpha**2


def divergence(own, received, temperature):
    log_p, log_q = log_softmax(own / temperature, axis=1), log_softmax(received / temperature, axis=1)
    return np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=1))


def best_alpha(own, received, y, gap, hyper):
    if np.allclose(own, received, rtol=1e-9):  # any alpha is the best one, and 1 is asked for
        return 1.0
    penalty = hyper.beta * gap * divergence(own, received, hyper.temperature)
    of_alpha = partial(objective, own=own, received=received, y=y, penalty=penalty)
    inside = minimize_scalar(of_alpha, bounds=(0, 1), method="bounded", options={"xatol": 1e-9}).x
    return min((0.0, inside, 1.0), key=of_alpha)


def pgfedsplit_client(mlp, key, t, server, personal, rows, trainer, hyper):
    """Steps 2 to 7: trained extractor, head and t_i_last, alpha_i, and the class means under the trained extractor."""
    phi, adapted = personal
    z, y = mixed_set(key, mlp.extract(server.extractor, rows), mlp.y[rows], server, hyper)
    alpha = None
    if server.schedule.sent:
        alpha = best_alpha(linear(phi, z), linear(server.head, z), y, t - adapted, hyper)
        phi = jax.tree.map(lambda mine, theirs: alpha * mine + (1 - alpha) * theirs, phi, server.head)
        adapted = t

    def head_gradient(phi, rows):
        return linear_gradient(z[rows], softmax_loss(linear(phi, z[rows]), y[rows])[1])

    phi = train(phi, head_gradient, key, t, np.arange(len(y)), trainer, phase="head")

    def extractor_gradient(theta, rows):
        z, y = mlp.extract(theta, rows), mlp.y[rows]
        pull = 2 * (z - server.prototypes[y]) * server.valid[y][:, None] / len(y)
        pull = pull / {"mse": z.shape[1], "mean_l2": 1}[hyper.reduction]
        d_z = softmax_loss(linear(phi, z), y)[1] @ phi["kernel"].T + hyper.lam * pull
        return mlp.extract_gradient(theta, rows, d_z)

    theta = train(server.extractor, extractor_gradient, key, t, rows, trainer)
    return theta, (phi, adapted), alpha, class_means(mlp.extract(theta, rows), mlp.y[rows], CLASSES)


def spread_of(deviations, covariance):
    """Of one class, from a row per participant, by id, which is 0 for those that do not hold it; or its root R."""
    if covariance == "diagonal":
        return np.sqrt(np.sum(deviations**2, axis=0))
    # Any R with R' R = D' D would do; this one is unique up to signs, and the engine has the same.
    root = np.linalg.qr(deviations, mode="r")
    return np.concatenate([root, np.zeros((deviations.shape[1] - len(root), deviations.shape[1]))])


def pgfedsplit_server(server, results, sizes, hyper):
    """Step 8, of participants by id."""
    extractors, personal, alphas, means = zip(*results, strict=True)
    prototypes, valid, spread = server.prototypes.copy(), server.valid.copy(), server.spread.copy()
    for k in range(CLASSES):
        holds = np.array([counts[k] > 0 for _, counts in means])
        if holds.any():
            own = np.array([mean[k] for mean, _ in means])
            prototypes[k], valid[k] = own[holds].mean(axis=0), True
            spread[k] = spread_of(holds[:, None] * (own - prototypes[k]) / np.sqrt(holds.sum()), hyper.covariance)
    schedule = after_a_round(server.schedule, alphas)
    head = weighted_mean([phi for phi, _ in personal], sizes) if schedule.sent else None
    return Server(weighted_mean(extractors, sizes), prototypes, valid, spread, head, schedule)


class Recorded(NamedTuple):
    """A server that also keeps the ids and coefficients of the last round's cohort."""

    server: NamedTuple
    ids: jax.Array
    alphas: jax.Array


def recording(method, cohort_size):
    def init(key, clients):
        server, client = method.init(key, clients)
        return Recorded(server, jnp.full(cohort_size, N, jnp.int32), jnp.zeros(cohort_size)), client

    def aggregate(now, server, clients, uploads, cohort):
        new, clients = method.aggregate(now, server.server, clients, uploads, cohort)
        return Recorded(new, cohort.ids, uploads.alpha.value), clients

    return method._replace(
        init=init,
        aggregate=aggregate,
        broadcast=lambda server: method.broadcast(server.server),
        diagnose=lambda server: method.diagnose(server.server),
    )


BASE = {"lam": 0.7, "r": 0.5, "beta": 0.1, "temperature": 1.0}
SPECIFIED = {"covariance": "diagonal", "scale": "max", "reduction": "mse"}
OTHERWISE = {"r": 0.4, "lam": 0.1, "beta": 0.5, "temperature": 2.0}
CASES = {
    "as specified": (EVERYONE, {"interval": 1}),
    "readings": (SOME, {"interval": 2, **OTHERWISE, "covariance": "full", "scale": "mean", "reduction": "mean_l2"}),
}


class Round(NamedTuple):
    """What happened in a round."""

    selected: int
    cohort: list
    sent: bool
    valid: np.ndarray
    alphas: dict


class Both(NamedTuple):
    """The engine's runs after 0 ... LONG rounds, and NumPy's after ROUNDS."""

    engine: Engine
    hyper: SimpleNamespace
    runs: list
    server: Server
    personal: list
    post: dict  # the last model that each client trained
    rounds: list


@pytest.fixture(scope="module", params=CASES)
def both(request, model, trainer, federation):
    who, changed = CASES[request.param]
    hyper = SimpleNamespace(**{**SPECIFIED, **BASE, **changed})
    method = pgfedsplit(model, trainer, **{**BASE, **changed})
    engine = Engine(recording(method, who.cohort_size(N)), N, who)
    runs, play = [jax.jit(engine.init)(KEY, federation)], jax.jit(engine.rounds)
    for t in range(LONG):
        runs.append(play(KEY, runs[-1], at(t), at(t + 1), jnp.array(True), federation))
    runs = jax.tree.map(np.asarray, runs)

    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    start = to_numpy(jax.jit(model.init)(jax.random.split(KEY, 3)[0]))
    means = np.zeros((CLASSES, model.dim))
    spread = means if hyper.covariance == "diagonal" else np.zeros((CLASSES, model.dim, model.dim))
    server = Server(start["extractor"], means, means[:, 0] > 0, spread, None, Schedule(hyper.interval))
    personal, post, rounds = [(start["head"], 0)] * N, {}, []
    for t, (present, selected) in enumerate(cohorts(engine, KEY, federation, ROUNDS)):
        cohort = sorted(present)
        results = [
            pgfedsplit_client(mlp, client_key(KEY, t, i), t, server, personal[i], rows[i], trainer, hyper)
            for i in cohort
        ]
        alphas = {i: alpha for i, (_, _, alpha, _) in zip(cohort, results, strict=True)}
        rounds.append(Round(selected, cohort, server.schedule.sent, server.valid, alphas))
        for i, (theta, own, _, _) in zip(cohort, results, strict=True):
            personal[i], post[i] = own, {"extractor": theta, "head": own[0]}
        server = pgfedsplit_server(server, results, [len(rows[i]) for i in cohort], hyper)
    return Both(engine, hyper, runs, server, personal, post, rounds)


def test_rounds_are_numpys(both, federation):
    end, expected = both.runs[ROUNDS], both.server
    server = end.state.server.server
    jax.tree.map(near, server.extractor, expected.extractor)
    near(server.gaussians.prototypes.mean, expected.prototypes)
    np.testing.assert_array_equal(server.gaussians.prototypes.valid, expected.valid)
    near(*map(covariances, (server.gaussians.spread, expected.spread)))
    near([server.interval, server.counter, server.alpha, server.head.sent], expected.schedule)
    if expected.schedule.sent:
        jax.tree.map(near, server.head.value, expected.head)
    mlp = MLP(federation.x, federation.y)
    for i, (phi, adapted) in enumerate(both.personal):
        found = client(end.state.clients, i)
        jax.tree.map(near, found.head, phi)
        assert int(found.adapted) == adapted
    for i, w in both.post.items():
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(w, held(federation.test, i)))


def covariances(spread):
    """Sigma_k, or its diagonal."""
    spread = np.asarray(spread, np.float64)
    return spread**2 if spread.ndim == 2 else np.einsum("cki,ckj->cij", spread, spread)


def test_coefficients_are_numpys(both):
    for t, expected in enumerate(both.rounds):
        _, ids, alphas = both.runs[t + 1].state.server
        found = {int(i): float(alpha) for i, alpha in zip(ids, alphas, strict=True) if i < N}
        assert found.keys() == expected.alphas.keys()
        for i in expected.cohort if expected.sent else ():
            np.testing.assert_allclose(found[i], expected.alphas[i], atol=1e-4)
    assert any(0.01 < alpha < 0.99 for alpha in expected_alphas(both)), "some minimum is inside"


def expected_alphas(both):
    return [alpha for each in both.rounds if each.sent for alpha in each.alphas.values()]


def test_the_model_before_training_is_the_shared_extractor_under_the_clients_head(both, federation):
    state, method = both.runs[ROUNDS].state, both.engine.method

    @jax.jit
    def logits(server, own):
        return method.predict(method.personal(method.broadcast(server), own), federation.x)

    for i in (2, 6):
        found = logits(state.server, client(state.clients, i))
        w, rows = {"extractor": both.server.extractor, "head": both.personal[i][0]}, np.arange(len(federation.y))
        near(found, MLP(federation.x, federation.y).logits(w, rows))


def test_some_rounds_lack_heads_clients_and_classes(both, federation):
    """Otherwise the comparisons above would say nothing of drop-outs, of t_i_last and of rule R8."""
    assert {each.sent for each in both.rounds} == {False, True}
    if both.engine.participation == EVERYONE:
        assert [len(each.cohort) for each in both.rounds] == [N] * ROUNDS
        return
    assert any(each.selected > len(each.cohort) for each in both.rounds)
    assert len({adapted for _, adapted in both.personal}) > 2
    counts = np.asarray(federation.train.class_counts)
    present = [counts[each.cohort].sum(axis=0) > 0 for each in both.rounds]
    assert any(np.any(each.valid & ~here) for each, here in zip(both.rounds, present, strict=True))
    assert any(np.any(~each.valid & here) for each, here in zip(both.rounds[1:], present[1:], strict=True))


def test_bytes_are_a_hand_count_with_heads_and_coefficients_in_some_rounds_only(both, model, federation):
    shapes = survey(both.engine, federation)[1]
    theta, phi = (4 * count(part) for part in jax.eval_shape(model.init, KEY).values())
    spread = {"diagonal": 1, "full": model.dim}[both.hyper.covariance]
    row = 4 * model.dim
    classes = np.count_nonzero(federation.train.class_counts, axis=1)
    total = 0
    for each in both.rounds:
        view = theta + CLASSES + row * (1 + spread) * each.valid.sum() + 1 + each.sent * phi
        uploads = [theta + phi + 4 * CLASSES + row * classes[i] + 1 + each.sent * 4 for i in each.cohort]
        total += each.selected * view + sum(uploads)
    traffic = both.runs[ROUNDS].traffic
    assert shapes.sent_bytes(traffic) == total < shapes.dense_bytes(traffic)


# --- Schedule --------------------------------------------------------------------------------------------------------


def test_the_schedule_follows_the_coefficients_of_the_participants(both):
    schedule, intervals = Schedule(both.hyper.interval), []
    for old, new in pairwise(both.runs):
        server, ids, alphas = new.state.server
        if new.traffic.up > old.traffic.up:  # a round without participants did not happen
            schedule = after_a_round(schedule, np.asarray(alphas, np.float64)[np.asarray(ids) < N])
        found = server.interval, server.counter, server.alpha, server.head.sent
        np.testing.assert_allclose(np.float64(found), np.float64(schedule), rtol=1e-6)
        intervals.append(schedule.interval)
    assert {-1, 1} <= set(np.diff(intervals))


@pytest.fixture(scope="module")
def aggregated(model, trainer):
    """(options) -> a function of alphas and weights, [rounds, clients]: the schedules after each of these rounds."""

    @functools.cache
    def aggregated(**options):
        method = pgfedsplit(model, trainer, r=0.0, **options)
        start, _ = method.init(KEY, N)

        def step(server, row):
            alphas, weight = row
            total = len(weight)
            same = jax.tree.map(lambda leaf: jnp.zeros((total, *leaf.shape)), model.init(KEY))
            sums = PerClass(jnp.zeros((total, CLASSES)), jnp.zeros((total, CLASSES, model.dim)))
            sent = SentIf(jnp.broadcast_to(server.head.sent, total), alphas)
            uploads = Upload(same["extractor"], same["head"], sums, sent)
            cohort = Cohort(jnp.arange(total), weight, total, total)
            server, _ = method.aggregate(now(KEY, 0), server, None, uploads, cohort)
            return server, (server.interval, server.counter, server.alpha, server.head.sent)

        play = jax.jit(lambda rows: jax.lax.scan(step, start, rows)[1])
        return lambda alphas, weight: np.array(play((jnp.float32(alphas * (weight > 0)), jnp.float32(weight))), float).T

    return aggregated


def some_weights(rounds, seed=0):
    """Random cohorts of one to all clients; the others weigh nothing."""
    rng = np.random.default_rng(seed)
    present = rng.permuted(np.arange(N) < rng.integers(1, N + 1, rounds)[:, None], axis=1)
    return present * rng.integers(1, 30, (rounds, N))


@pytest.mark.parametrize(
    ("interval", "low", "high", "adaptive"),
    [(5, 1, 20, True), (2, 1, 3, True), (4, 4, 5, True), (3, 1, 20, False)],
    ids=["default", "short", "long", "fixed"],
)
def test_any_coefficients_give_the_schedule_of_algorithm_1(interval, low, high, adaptive, aggregated):
    options = {"interval": interval, "interval_min": low, "interval_max": high, "adaptive": adaptive}
    play = aggregated(**options)
    intervals = set()
    for seed in range(3):
        # Quarters, so that there are ties; in rounds without a head, too, where they must not be read.
        alphas = np.random.default_rng(seed).integers(0, 5, (80, N)) / 4
        weight = some_weights(80, seed)
        found = play(alphas, weight)
        schedule = Schedule(interval)
        for row, alpha, present in zip(found, alphas, weight > 0, strict=True):
            schedule = after_a_round(schedule, alpha[present], low=low, high=high, adaptive=adaptive)
            np.testing.assert_allclose(row, np.float64(schedule), rtol=1e-6)
        assert low <= found[:, 0].min() <= found[:, 0].max() <= high
        intervals |= set(found[:, 0])
    if high < 20:
        assert {low, high} <= intervals, "both bounds are reached"


def test_extractor_and_head_are_combined_as_one_upload(model, trainer):
    """A rule that chooses one client, such as Krum, could otherwise choose one for each."""
    given = []

    def combine(stacked, weight):
        given.append(stacked)
        return jax.tree.map(lambda leaf: leaf[0], stacked)

    method = pgfedsplit(model, trainer, combine)
    server, _ = jax.eval_shape(lambda: method.init(KEY, 1))
    one = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), tree)  # noqa: E731
    sums = PerClass(jnp.zeros((1, CLASSES)), jnp.zeros((1, CLASSES, model.dim)))
    uploads = Upload(one(server.extractor), one(server.head.value), sums, SentIf(jnp.zeros(1, bool), jnp.zeros(1)))
    cohort = Cohort(jnp.zeros(1, int), jnp.ones(1), 1, 1)
    jax.eval_shape(
        lambda server, uploads: method.aggregate(now(KEY, 0), server, None, uploads, cohort), server, uploads
    )
    assert [len(stacked) for stacked in given] == [2]


@pytest.mark.parametrize("everyone", [True, False], ids=["everyone", "cohorts of all sizes"])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 0.7, 1.0])
def test_a_constant_coefficient_shortens_the_interval_once(alpha, everyone, aggregated):
    weight = np.ones((28, N)) if everyone else some_weights(28)
    sent = aggregated()(np.full((28, N), alpha), weight)[:, 3]
    delivered = np.flatnonzero(sent) + 1
    np.testing.assert_array_equal(delivered, np.arange(5, 29, 4 if alpha > 0 else 5))


# --- Coefficient -----------------------------------------------------------------------------------------------------

coefficients = jax.jit(jax.vmap(mixing_coefficient))


def heads(seed, samples=30, classes=5, padding=9):
    """Logits of both heads, labels and mask of six clients: the first head is ever better, and so the second worse."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, (6, samples + padding))
    truth = np.eye(classes)[y]
    better = np.linspace(-3, 3, 6)[:, None, None]
    own = 1.5 * rng.normal(size=truth.shape) + better * truth
    received = 1.5 * rng.normal(size=truth.shape) - better * truth
    own[:, samples:] *= 50  # padding, which must not matter
    return own, received, y, np.broadcast_to(np.arange(samples + padding) < samples, y.shape)


def losses_on(grid, own, received, y):
    logits = grid[:, None, None] * own + (1 - grid)[:, None, None] * received
    return np.mean(np.log(np.sum(np.exp(logits), axis=2)) - logits[:, np.arange(len(y)), y], axis=1)


def test_the_coefficient_is_the_best_on_a_grid():
    grid, best = np.linspace(0, 1, 10001), []
    for seed in range(2):
        own, received, y, mask = heads(seed)
        losses = [losses_on(grid, own[i, mask[i]], received[i, mask[i]], y[i, mask[i]]) for i in range(6)]
        given = jnp.float32(own), jnp.float32(received), jnp.int32(y), jnp.float32(mask)
        for penalty in (0.0, 0.05, 2.0):
            expected = grid[np.argmin(losses + penalty * grid**2, axis=1)]
            np.testing.assert_allclose(coefficients(*given, jnp.full(6, penalty)), expected, atol=1e-4)
            best += [(penalty, alpha) for alpha in expected]
    assert {(0.0, 0.0), (0.0, 1.0), (0.05, 0.0), (0.05, 1.0), (2.0, 0.0)} <= set(best), "minima at the ends"
    assert {penalty for penalty, alpha in best if 0.1 < alpha < 0.9} == {0.0, 0.05, 2.0}, "and inside"


def mean_loss(alpha, own, received, y):
    """The cross-entropy as log(1 + ...) of the logits relative to the truth's, which keeps its digits near 0."""
    logits = alpha * own + (1 - alpha) * received
    behind = np.exp(logits - np.take_along_axis(logits, y[:, None], axis=1))
    return np.mean(np.log1p(np.sum(np.where(np.eye(logits.shape[1])[y] > 0, 0.0, behind), axis=1)))


@pytest.mark.parametrize("margin", [1, 5, 15, 20, 25, 50])
def test_the_coefficient_is_as_exact_where_both_heads_are_sure(margin):
    """By this margin both are right, up to noise; against the least mean loss in float64."""
    rng = np.random.default_rng(margin)
    y = rng.integers(0, 5, (6, 30))
    own, received = (np.float32(margin * np.eye(5)[y] + rng.normal(size=(6, 30, 5))) for _ in range(2))
    expected = [
        minimize_scalar(mean_loss, args=each, bounds=(0, 1), method="bounded", options={"xatol": 1e-9}).x
        for each in zip(np.float64(own), np.float64(received), y, strict=True)
    ]
    assert all(0.1 < alpha < 0.9 for alpha in expected)
    found = coefficients(own, received, jnp.int32(y), jnp.ones((6, 30)), jnp.zeros(6))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_equal_heads_leave_the_clients_own():
    own, _, y, mask = heads(0)
    same = jnp.float32(own)
    found = coefficients(same, same, jnp.int32(y), jnp.float32(mask), jnp.zeros(6))
    np.testing.assert_array_equal(found, 1)


@pytest.fixture(scope="module")
def mixture(model, trainer, federation):
    """(view's head, own head, hyperparameters) -> what client 2 makes of them in round 7 without any training."""

    @functools.partial(jax.jit, static_argnames="learned")
    def mixture(received, own, adapted, value, learned):
        options = {"beta": value} if learned else {"alpha": value}
        method = pgfedsplit(model, replace(trainer, epochs=0), r=0.0, lam=0.0, **options)
        server, personal = method.init(KEY, N)
        data = client_data(federation.x, federation.y, client(federation.train, 2))
        view = method.broadcast(server._replace(head=received))
        new, upload, *_ = method.local(now(KEY, 7), view, personal._replace(head=own, adapted=adapted), data)
        return new, upload

    return lambda received, own, adapted, value, learned: mixture(
        received, own, at(adapted), jnp.float32(value), learned
    )


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_a_given_coefficient_is_every_clients(alpha, mixture, model):
    own, theirs = (model.init(jax.random.key(i))["head"] for i in range(2))
    new, upload = mixture(SentIf(jnp.array(True), theirs), own, 3, alpha, learned=False)
    jax.tree.map(close, new.head, jax.tree.map(lambda a, b: alpha * a + (1 - alpha) * b, own, theirs))
    jax.tree.map(np.testing.assert_array_equal, upload.head, new.head)
    assert (int(new.adapted), bool(upload.alpha.sent)) == (7, True)
    assert float(upload.alpha.value) == np.float32(alpha)
    new, upload = mixture(SentIf(jnp.array(False), theirs), own, 3, alpha, learned=False)
    jax.tree.map(np.testing.assert_array_equal, new.head, own)
    assert (int(new.adapted), bool(upload.alpha.sent)) == (3, False)


def test_the_penalty_grows_with_the_rounds_since_the_last_mixture(mixture, model, federation):
    own, theirs = (jax.tree.map(lambda leaf: 6 * leaf, model.init(jax.random.key(i))["head"]) for i in (1, 0))
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, 2)
    z = mlp.extract(to_numpy(model.init(KEY)["extractor"]), rows)
    logits = [linear(to_numpy(phi), z) for phi in (own, theirs)]
    found = []
    for gap, beta in [(0, 1.0), (1, 0.1), (7, 0.1), (3, 1.0)]:
        _, upload = mixture(SentIf(jnp.array(True), theirs), own, 7 - gap, beta, learned=True)
        found.append(float(upload.alpha.value))
        expected = best_alpha(*logits, mlp.y[rows], gap, SimpleNamespace(beta=beta, temperature=1.0))
        np.testing.assert_allclose(found[-1], expected, atol=2e-5)
    assert 1 > found[0] > found[1] > found[2] > found[3] > 0.01


def test_a_client_that_receives_its_own_head_keeps_it(mixture, model):
    own = model.init(jax.random.key(1))["head"]
    new, upload = mixture(SentIf(jnp.array(True), own), own, 0, 0.5, learned=True)
    assert float(upload.alpha.value) == 1
    jax.tree.map(np.testing.assert_array_equal, new.head, own)


# --- Synthetic features ----------------------------------------------------------------------------------------------

# Two classes can be drawn: of class 2 there is no sample, of class 3 no prototype.
HELD, KNOWN, DIM = (120, 60, 0, 20), (True, True, True, False), 3


def features_of(counts, capacity):
    """A client with so many samples of each class, and junk where its rows are filled up to the capacity."""
    rng = np.random.default_rng(5)
    n = sum(counts)
    y = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    x = rng.normal(size=(n, DIM))
    filled = np.full((capacity - n, DIM), 99.0), np.full(capacity - n, len(counts) - 1)
    x, y = np.concatenate([x, filled[0]]), np.concatenate([y, filled[1]])
    return ClientData(jnp.float32(x), jnp.int32(y), jnp.arange(capacity), at(n), jnp.float32(counts))


def some_gaussians(covariance, known=KNOWN):
    rng = np.random.default_rng(6)
    means = 5 * rng.normal(size=(len(known), DIM))
    shape = {"diagonal": (len(known), DIM), "full": (len(known), DIM, DIM)}[covariance]
    return Gaussians(Prototypes(jnp.float32(means), jnp.array(known)), jnp.float32(rng.uniform(0.5, 2, shape)))


READ = [("diagonal", scale) for scale in ("max", "proportion", "mean", "one")] + [("full", "max")]


@pytest.fixture(scope="module")
def mixed():
    """(covariance, scale) -> a client's features and 9,800 synthetic ones."""

    @jax.jit
    def mixed(features):
        return {
            (covariance, scale): add_synthetic(KEY, features, some_gaussians(covariance), r=0.98, scale=scale)
            for covariance, scale in READ
        }

    return mixed(features_of(HELD, 230))


def real_and_synthetic(mixed):
    x, y, n = np.asarray(mixed.x, np.float64), np.asarray(mixed.y), sum(HELD)
    return (x[:n], y[:n]), (x[n : int(mixed.count)], y[n : int(mixed.count)])


@pytest.mark.parametrize(("covariance", "scale"), READ)
def test_synthetic_features_have_the_mean_and_the_covariance_asked_for(covariance, scale, mixed):
    (_, spread), means = some_gaussians(covariance), np.asarray(some_gaussians(covariance).prototypes.mean)
    sigma = covariances(spread)
    if covariance == "diagonal":
        sigma = np.array([np.diag(variances) for variances in sigma])
    gamma = scales(np.array(HELD) / sum(HELD), scale)
    _, (x, y) = real_and_synthetic(mixed[covariance, scale])
    for k in (0, 1):
        own = x[y == k]
        expected, errors = gamma[k] ** 2 * sigma[k], 4.5 / np.sqrt(len(own))
        sd = np.sqrt(np.diag(expected))
        assert np.all(np.abs(own.mean(axis=0) - means[k]) < errors * sd)
        assert np.all(np.abs(np.cov(own.T, bias=True) - expected) < errors * np.sqrt(2) * np.outer(sd, sd))


def test_classes_are_drawn_by_the_clients_shares_among_those_with_a_prototype(mixed):
    _, (_, y) = real_and_synthetic(mixed["diagonal", "max"])
    drawn = np.bincount(y, minlength=4) / len(y)
    assert len(y) == 9800
    np.testing.assert_array_equal(drawn[2:], 0)
    np.testing.assert_allclose(drawn[:2], [2 / 3, 1 / 3], atol=4 * np.sqrt(2 / 9 / 9800))


def test_a_mixed_set_starts_with_the_clients_own_features_and_counts_all(mixed):
    features = features_of(HELD, 230)
    for found in mixed.values():
        (x, y), _ = real_and_synthetic(found)
        np.testing.assert_array_equal(x, features.x[:200])
        np.testing.assert_array_equal(y, features.y[:200])
        n = int(found.count)
        assert n == 10000 <= found.capacity
        np.testing.assert_array_equal(found.class_counts, np.bincount(found.y[:n], minlength=4))
        rows = found.index[np.arange(n)]
        np.testing.assert_array_equal(rows, np.arange(n))


def test_what_is_drawn_depends_on_the_key_and_not_on_the_capacity():
    jitted = jax.jit(partial(add_synthetic, r=0.3, scale="max"))
    gaussians = some_gaussians("diagonal")
    found = [jitted(KEY, features_of((7, 4, 0, 2), capacity), gaussians) for capacity in (13, 40)]
    n = 13 + math.ceil(3 / 7 * 13)
    for mixed in found:
        assert int(mixed.count) == n
        np.testing.assert_array_equal(mixed.x[:n], found[0].x[:n])
        np.testing.assert_array_equal(mixed.y[:n], found[0].y[:n])
        np.testing.assert_array_equal(mixed.class_counts, found[0].class_counts)
    other = jitted(jax.random.key(1), features_of((7, 4, 0, 2), 13), gaussians)
    np.testing.assert_array_equal(other.x[:13], found[0].x[:13])
    assert not np.any(np.isclose(other.x[13:n], found[0].x[13:n]))


@pytest.mark.parametrize("r", [0.001, 0.35, 0.5, 0.6, 0.9])
def test_the_number_of_synthetic_features_is_a_share_of_all_rounded_up(r):
    """The counts alone, so that nothing else is compiled; the last client fills the capacity."""
    sizes = np.array([0, *range(1, 200), 1000, 3900])

    def total(n, known):
        counts = jnp.zeros(4).at[0].set(n.astype(jnp.float32))
        features = features_of((1, 0, 0, 0), int(sizes[-1]))._replace(count=n, class_counts=counts)
        gaussians = some_gaussians("diagonal")
        prototypes = gaussians.prototypes._replace(valid=known)
        mixed = add_synthetic(KEY, features, gaussians._replace(prototypes=prototypes), r=r, scale="max")
        return mixed.count, jnp.array(mixed.capacity)

    totals = jax.jit(jax.vmap(total, in_axes=(0, None)))
    synthetic = [math.ceil(r / (1 - r) * n - 1e-6) for n in sizes.tolist()]
    found, capacity = totals(jnp.int32(sizes), jnp.array(KNOWN))
    np.testing.assert_array_equal(found - sizes, synthetic)
    assert min(synthetic[1:]) >= 1
    assert found.max() <= capacity[0]
    # Of none that it holds is there a prototype.
    np.testing.assert_array_equal(totals(jnp.int32(sizes), jnp.array([False, True, True, True]))[0], sizes)


def test_without_synthetic_features_and_pull_a_client_does_fedrep(model, trainer, federation):
    method, rep = pgfedsplit(model, trainer, r=0.0, lam=0.0), fedrep(model, trainer, head_epochs=trainer.epochs)
    server, personal = method.init(KEY, N)
    personal = personal._replace(head=model.init(jax.random.key(1))["head"])

    @jax.jit
    def both(row):
        key, data = client_key(KEY, 3, 2), client_data(federation.x, federation.y, row)
        _, upload, *_ = method.local(now(key, 3), method.broadcast(server), personal, data)
        return upload, rep.local(now(key, 3), server.extractor, personal.head, data)

    for i in (1, 2, 5):
        upload, (head, extractor, *_) = both(client(federation.train, i))
        jax.tree.map(close, (upload.head, upload.extractor), (head, extractor))
    assert not np.allclose(head["kernel"], personal.head["kernel"], atol=1e-3)
    sent = count(method.broadcast(server))
    assert sent == count(jax.eval_shape(model.init, KEY)) + CLASSES * (model.dim + 1) + 1, "nor is any spread sent"


def test_synthetic_features_do_not_make_a_client_train_that_fills_no_batch(model, trainer, federation):
    """Rule R1 under ``drop_last``: five samples do not fill a batch of eight, but ten features would."""
    method = pgfedsplit(model, replace(trainer, batch_size=8, drop_last=True), r=0.5)
    server, personal = method.init(KEY, N)
    known = Prototypes(jnp.ones((CLASSES, model.dim)), jnp.ones(CLASSES, bool))
    server = server._replace(gaussians=server.gaussians._replace(prototypes=known))

    @jax.jit
    def participate(row):
        data = client_data(federation.x, federation.y, row)
        return method.local(now(KEY, 1), method.broadcast(server), personal, data)

    for i, trains in ((0, False), (2, True)):
        update = participate(client(federation.train, i))
        assert (int(update.info.steps) > 0) == trains
        for head in (update.upload.head, update.client.head):
            assert np.array_equal(head["kernel"], personal.head["kernel"]) != trains
    assert int(federation.train.count[0]) == 5


# --- Gaussians -------------------------------------------------------------------------------------------------------

updated = jax.jit(update_gaussians)
# Class 0 is held by all, 1 by two, 2 by one, and 3 and 4 by none, of which 3 has an old prototype.
HOLDERS = np.array([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 0, 0]])


def uploaded(dim, offset=0.0):
    """The class means of five clients, and their upload, with class counts that are far from equal."""
    rng = np.random.default_rng(7)
    counts = HOLDERS * rng.integers(1, 50, HOLDERS.shape)
    means = np.float32(offset + rng.normal(size=(*HOLDERS.shape, dim))) * HOLDERS[..., None]
    return means, PerClass(jnp.float32(counts), jnp.float32(means * counts[..., None]))


def old_gaussians(dim, covariance):
    shape = (5, dim) if covariance == "diagonal" else (5, dim, dim)
    valid = jnp.array([True, False, True, True, False])
    return Gaussians(Prototypes(jnp.full((5, dim), 3.0), valid), jnp.full(shape, 2.0))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("dim", [3, 8])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_prototypes_and_covariances_are_those_of_the_holders_all_alike(covariance, dim, offset):
    means, upload = uploaded(dim, offset)
    old = old_gaussians(dim, covariance)
    (found, valid), spread = updated(old, upload, jnp.arange(5))
    np.testing.assert_array_equal(valid, [True, True, True, True, False])
    # Means of about 1000 are rounded to 1e-4, and their deviations with them.
    check = partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5 if offset == 0 else 2e-3)
    for k in (0, 1, 2):
        own = means[HOLDERS[:, k] > 0, k]
        check(found[k], own.mean(axis=0))
        sigma = np.cov(own.T, bias=True) if len(own) > 1 else np.zeros((dim, dim))
        check(covariances(spread)[k], np.diag(sigma) if covariance == "diagonal" else sigma)
    np.testing.assert_array_equal(covariances(spread)[2], 0)
    for k in (3, 4):
        np.testing.assert_array_equal(found[k], old.prototypes.mean[k])
        np.testing.assert_array_equal(spread[k], old.spread[k])


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_the_order_of_the_clients_and_absent_rows_change_no_root(covariance):
    _, upload = uploaded(8)
    old, ids = old_gaussians(8, covariance), jnp.array([4, 0, 6, 2, 3])
    expected = updated(old, upload, ids)
    for order in ([3, 0, 4, 1, 2], [4, 3, 2, 1, 0]):
        rows, same = client((upload, ids), jnp.array(order))
        found = updated(old, rows, same)
        jax.tree.map(close, found, expected)
    # As a chunk is filled up, or as a client drops out.
    filled = jax.tree.map(lambda leaf: jnp.concatenate([jnp.zeros_like(leaf[:2]), leaf]), upload)
    jax.tree.map(close, updated(old, filled, jnp.concatenate([jnp.array([7, 7]), ids])), expected)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_class_sums_that_are_not_finite_count_as_not_held(covariance):
    _, (counts, sums) = uploaded(8)
    old, ids = old_gaussians(8, covariance), jnp.arange(5)
    found = updated(old, PerClass(counts, sums.at[3].set(jnp.nan)), ids)
    expected = updated(old, PerClass(counts.at[3].set(0), sums.at[3].set(0)), ids)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# --- What is recorded ------------------------------------------------------------------------------------------------


def norm(tree):
    return np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def test_the_parts_are_measured_beside_the_cross_entropy(model, trainer, federation):
    """The pull on the extractor as it is received, under the head as it was just trained, on one mini-batch.

    Synthetic features on the head before that, beside all real ones.
    """
    method = pgfedsplit(model, OnlyHeads(**{**vars(trainer), "diagnose": True}), **BASE)
    server, personal = jax.jit(lambda: method.init(KEY, N))()
    rng = np.random.default_rng(0)
    prototypes = rng.uniform(-1, 1, (CLASSES, model.dim)).astype(np.float32)
    spread = rng.uniform(0, 1, (CLASSES, model.dim)).astype(np.float32)
    valid = np.array([True, False, True])
    gaussians = Gaussians(Prototypes(jnp.asarray(prototypes), jnp.asarray(valid)), jnp.asarray(spread))
    server = server._replace(gaussians=gaussians)

    @jax.jit
    def participate(row):
        data = client_data(federation.x, federation.y, row)
        return method.local(now(KEY, 3), method.broadcast(server), personal, data)

    update = participate(client(federation.train, 2))
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, 2)
    theta, before, phi = to_numpy((server.extractor, personal.head, update.upload.head))
    known = Server(theta, prototypes, valid, spread, before, Schedule(1))
    z, y = mixed_set(KEY, mlp.extract(theta, rows), mlp.y[rows], known, SimpleNamespace(r=BASE["r"], scale="max"))
    d_logits = softmax_loss(linear(before, z), y)[1]
    real, synthetic = (norm(linear_gradient(z[of], d_logits[of])) for of in (slice(len(rows)), slice(len(rows), None)))
    assert len(rows) < len(z)
    assert synthetic != pytest.approx(real, rel=0.1)
    assert update.diagnostics.keys() == {"gradient_ratio_r", "gradient_ratio_lam"}
    near(update.diagnostics["gradient_ratio_r"], synthetic / real)

    rows = rows[next(batches(KEY, len(rows), epochs=1, batch_size=trainer.batch_size, phase="diagnostics"))]
    z, y = mlp.extract(theta, rows), mlp.y[rows]
    ce = softmax_loss(linear(phi, z), y)[1] @ phi["kernel"].T
    pull = BASE["lam"] * 2 * (z - prototypes[y]) * valid[y][:, None] / z.size
    expected = norm(mlp.extract_gradient(theta, rows, pull)) / norm(mlp.extract_gradient(theta, rows, ce))
    near(update.diagnostics["gradient_ratio_lam"], expected)
    assert expected > 0.01
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    for off, ratio in (("r", "lam"), ("lam", "r")):
        without = pgfedsplit(model, replace(trainer, diagnose=True), **{**BASE, off: 0.0})
        state = jax.eval_shape(lambda method=without: method.init(KEY, N))
        said = jax.eval_shape(
            lambda w, own, method=without: method.local(now(KEY, 3), method.broadcast(w), own, data), *state
        ).diagnostics
        assert said.keys() == {f"gradient_ratio_{ratio}"}


def test_the_mean_coefficient_and_the_interval_are_told_by_the_server(both):
    """Of the last synchronisation, whether or not the interval follows them."""
    for run in both.runs:
        server = run.state.server.server
        said = both.engine.method.diagnose(run.state.server)
        assert {name: float(value) for name, value in said.items()} == {
            "alpha": float(server.alpha),
            "interval": float(server.interval),
        }
    assert float(both.runs[0].state.server.server.alpha) == 0 < float(both.runs[-1].state.server.server.alpha) <= 1


# --- Bounds ----------------------------------------------------------------------------------------------------------


def test_a_fixed_interval_has_no_bounds(model, trainer):
    server, _ = pgfedsplit(model, trainer, interval=30, adaptive=False).init(KEY, N)
    assert int(server.interval) == 30


@pytest.mark.parametrize(
    "options", [{"interval": 21}, {"interval_min": 6}, {"interval": 1, "interval_min": 4, "interval_max": 2}]
)
def test_an_interval_outside_its_bounds_is_refused(options, model, trainer):
    with pytest.raises(ValueError, match="interval"):
        pgfedsplit(model, trainer, **options)
    config = Config(data={"source": "digits"}, model={"name": "mlp"}, method={"name": "pgfedsplit", **options})
    with pytest.raises(ConfigError, match=r"method\.name") as refusal:
        make_engine(config, DataShape("some", (4, 4, 1), 2, None))
    assert "interval" in str(refusal.value)


def test_a_client_that_fills_no_batch_keeps_the_mixture_with_the_head_that_it_receives(model, trainer, federation):
    method = pgfedsplit(model, replace(trainer, batch_size=8, drop_last=True), r=0.5, alpha=0.25)
    server, personal = method.init(KEY, N)
    known = Prototypes(jnp.ones((CLASSES, model.dim)), jnp.ones(CLASSES, bool))
    head = server.head._replace(sent=jnp.array(True), value=jax.tree.map(lambda leaf: leaf + 1, personal.head))
    server = server._replace(gaussians=server.gaussians._replace(prototypes=known), head=head)
    data = client_data(federation.x, federation.y, client(federation.train, 0))
    update = jax.jit(method.local)(now(KEY, 1), method.broadcast(server), personal, data)
    assert int(update.info.steps) == 0
    for kept in (update.upload.head, update.client.head):
        jax.tree.map(lambda kept, own: near(kept, own + 0.75), kept, personal.head)
