"""FedPAC against rounds in NumPy, its head weights against closed forms and enumeration, and what it exchanges."""

import importlib
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import Run
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.fedpac import fedpac
from fedjax_pfl.methods.fedpac.collaboration import NEGLIGIBLE, head_weights
from fedjax_pfl.methods.fedrep import fedrep
from fedjax_pfl.ops.tree import count
from tests import generator
from tests.conftest import CLASSES
from tests.play import cohorts, exchanged
from tests.reference import (
    MLP,
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

N, ROUNDS = 7, 4
# In this draw of SOME, class 2 has no prototype before round 1, and classes 0 and 1 keep an old one in round 2.
KEY = generator.key(16)
EVERYONE, SOME = Participation(), Participation(0.2, 0.6, 0.3)
LAM, HEAD_LR, HEAD_EPOCHS = 0.7, 0.2, 2

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)


@pytest.fixture(scope="module")
def trainer(trainer):
    return replace(trainer, weight_decay=0.01, lr_decay=0.9)


@pytest.fixture(scope="module")
def play(federation):
    """(method, who) -> the engine, and the runs before round 0 and after the last."""

    def play(method, who=EVERYONE):
        engine = Engine(method, N, who)
        start = jax.jit(engine.init)(KEY, federation)
        bounds = jnp.array(0, jnp.int32), jnp.array(ROUNDS, jnp.int32)
        return engine, start, jax.jit(engine.rounds)(KEY, start, *bounds, jnp.array(True), federation)

    return play


# --- Rounds in NumPy -------------------------------------------------------------------------------------------------


class Server(NamedTuple):
    extractor: dict
    prototypes: np.ndarray
    valid: np.ndarray


def statistics(z, y):
    """Step 2: the class means, h and v of one client, term by term as the paper has them."""
    means, counts = class_means(z, y, CLASSES)
    share = counts / len(y)
    squares = [share[c] * np.mean(np.sum(z[y == c] ** 2, axis=1)) for c in np.flatnonzero(counts)]
    v = (np.sum(squares) - np.sum(share**2 * np.sum(means**2, axis=1))) / len(y)
    return means, share[:, None] * means, v


def fedpac_client(mlp, key, t, server, phi, rows, trainer):
    """Steps 1 to 5: the trained extractor and head, h, v, and the class means under the trained extractor."""
    means, h, v = statistics(mlp.extract(server.extractor, rows), mlp.y[rows])
    targets = np.where(server.valid[:, None], server.prototypes, means)

    def head_gradient(phi, rows):
        z = mlp.extract(server.extractor, rows)
        return linear_gradient(z, softmax_loss(linear(phi, z), mlp.y[rows])[1])

    phi = train(phi, head_gradient, key, t, rows, trainer, phase="head", epochs=HEAD_EPOCHS, lr=HEAD_LR)

    def extractor_gradient(theta, rows):
        z, y = mlp.extract(theta, rows), mlp.y[rows]
        pull = 2 * (z - targets[y]) / z.size
        return mlp.extract_gradient(theta, rows, softmax_loss(linear(phi, z), y)[1] @ phi["kernel"].T + lam * pull)

    lam = LAM if t > 0 else 0.0
    theta = train(server.extractor, extractor_gradient, key, t, rows, trainer)
    return theta, phi, h, v, class_means(mlp.extract(theta, rows), mlp.y[rows], CLASSES)


def best_mixture(q):
    """The minimiser of a' q a over the simplex: the best of the stationary points of all faces."""
    found = []
    for face in chain.from_iterable(combinations(range(len(q)), size) for size in range(1, len(q) + 1)):
        face = list(face)
        # 2 q a = multiplier, and sum a = 1, on the face.
        bordered = np.block([[2 * q[np.ix_(face, face)], -np.ones((len(face), 1))], [np.ones(len(face)), 0.0]])
        on_face = np.linalg.solve(bordered, np.eye(len(face) + 1)[-1])[:-1]
        if (on_face >= 0).all():
            a = np.zeros(len(q))
            a[face] = on_face
            found.append(a)
    best = min(found, key=lambda a: a @ q @ a)
    slope = q @ best
    assert (slope >= best @ slope - 1e-9 * np.trace(q)).all(), "the optimality conditions of the whole simplex"
    return best


def mixtures(h, v):
    """Step 7 without the cut: row i is the weights of all heads in participant i's."""
    apart = h[:, None] - h[None]
    return np.array([best_mixture(np.diag(v) + np.einsum("jck,lck->jl", d, d)) for d in apart])


def fedpac_server(server, extractors, heads, h, v, means, sizes):
    """Steps 6 and 7; returns the server and the participants' heads."""
    of_class = sum(counts for _, counts in means)
    sums = sum(mean * counts[:, None] for mean, counts in means)
    seen = of_class > 0
    prototypes = np.where(seen[:, None], sums / np.maximum(of_class, 1)[:, None], server.prototypes)
    weights = mixtures(np.array(h), np.array(v))
    assert not np.any(np.abs(weights / NEGLIGIBLE - 1) < 0.1), "too close to the cut to compare: take another key"
    weights *= weights > 1e-3
    mixed = [weighted_mean(heads, row) for row in weights]
    return Server(weighted_mean(extractors, sizes), prototypes, seen | server.valid), mixed


class Both(NamedTuple):
    """The engine's run and NumPy's."""

    engine: Engine
    end: Run
    server: Server
    heads: list
    post: dict  # the last model that each client trained
    sent: list  # of each round: how many were selected, which classes had a prototype, whose upload came back


@pytest.fixture(scope="module", params=[EVERYONE, SOME], ids=["everyone", "some"])
def both(request, play, model, trainer, federation):
    method = fedpac(model, trainer, lam=LAM, head_lr=HEAD_LR, head_epochs=HEAD_EPOCHS)
    engine, start, end = play(method, request.param)
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    server = Server(to_numpy(start.state.server.extractor), np.zeros((CLASSES, model.dim)), np.zeros(CLASSES, bool))
    heads = [to_numpy(client(start.state.clients, i)).inbox for i in range(N)]
    post, sent = {}, []
    for t, (cohort, selected) in enumerate(cohorts(engine, KEY, federation, ROUNDS)):
        results = [fedpac_client(mlp, client_key(KEY, t, i), t, server, heads[i], rows[i], trainer) for i in cohort]
        extractors, trained, h, v, means = zip(*results, strict=True)
        sent.append((selected, server.valid, cohort))
        post.update((i, {"extractor": theta, "head": phi}) for i, (theta, phi, *_) in zip(cohort, results, strict=True))
        server, mixed = fedpac_server(server, extractors, trained, h, v, means, [len(rows[i]) for i in cohort])
        for i, phi in zip(cohort, mixed, strict=True):
            heads[i] = phi
    return Both(engine, end, server, heads, post, sent)


def test_rounds_are_numpys(both, federation):
    server, clients = both.end.state
    jax.tree.map(near, server.extractor, both.server.extractor)
    near(server.prototypes.mean, both.server.prototypes)
    np.testing.assert_array_equal(server.prototypes.valid, both.server.valid)
    mlp = MLP(federation.x, federation.y)
    for i in range(N):
        jax.tree.map(near, client(clients, i).inbox, both.heads[i])
    for i, w in both.post.items():
        near([float(leaf[i]) for leaf in both.end.post.test], mlp.scores(w, held(federation.test, i)))


def test_the_model_before_training_is_the_shared_extractor_under_the_combined_head(both, federation):
    view = both.engine.method.broadcast(both.end.state.server)
    method = both.engine.method
    found = method.predict(method.personal(view, client(both.end.state.clients, 2)), federation.x)
    w, rows = {"extractor": both.server.extractor, "head": both.heads[2]}, np.arange(len(federation.y))
    near(found, MLP(federation.x, federation.y).logits(w, rows))


def test_some_rounds_lack_clients_and_classes(both, federation):
    """Otherwise the comparison above would say nothing of drop-outs and of rule R8."""
    if both.engine.participation == EVERYONE:
        assert [len(cohort) for *_, cohort in both.sent] == [N] * ROUNDS
        return
    counts = np.asarray(federation.train.class_counts)
    assert any(selected > len(cohort) for selected, _, cohort in both.sent)
    assert len(both.post) < N
    assert any(np.any(valid & (counts[cohort].sum(axis=0) == 0)) for _, valid, cohort in both.sent)
    assert any(np.any(~valid & (counts[cohort].sum(axis=0) > 0)) for _, valid, cohort in both.sent[1:])


def test_bytes_are_a_hand_count_without_the_classes_not_held(both, model, federation):
    shapes = survey(both.engine, federation)[1]
    parameters, row = count(jax.eval_shape(model.init, KEY)), 4 * model.dim
    assert count(shapes.up) == parameters + 2 * CLASSES * model.dim + CLASSES + 1
    assert count(shapes.down) == parameters + CLASSES * model.dim + CLASSES
    assert not both.sent[0][1].any(), "no prototype is sent before there is one"
    down = sum(selected * (4 * parameters + CLASSES + row * valid.sum()) for selected, valid, _ in both.sent)
    classes = np.count_nonzero(federation.train.class_counts, axis=1)
    up = sum(4 * (parameters + CLASSES + 1) + 2 * row * classes[i] for *_, cohort in both.sent for i in cohort)
    assert shapes.sent_bytes(both.end.traffic) == down + up < shapes.dense_bytes(both.end.traffic)


def test_without_the_pull_no_prototypes_are_exchanged(model, trainer, federation):
    floats, parameters = exchanged(fedpac(model, trainer, lam=0.0), federation), count(jax.eval_shape(model.init, KEY))
    assert floats.down == parameters
    assert floats.up == parameters + CLASSES * model.dim + CLASSES + 1, "h, with its counts, and v"


# --- One client ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def upload(model, trainer, federation):
    """(extractor, row of the index table) -> what this client sends in round 0."""
    method = fedpac(model, trainer)
    server, personal = method.init(KEY, N)

    @jax.jit
    def upload(extractor, row):
        data = client_data(federation.x, federation.y, row)
        view = method.broadcast(server._replace(extractor=extractor))
        return method.local(now(KEY, 0), view, personal, data).upload

    return upload


def test_h_v_and_class_sums_of_an_upload_follow_the_formulas(upload, model, federation):
    mlp, extractor = MLP(federation.x, federation.y), model.init(KEY)["extractor"]
    kinds = set()
    for i in range(N):
        found, rows = upload(extractor, client(federation.train, i)), held(federation.train, i)
        y = mlp.y[rows]
        h, sums = found.per_class.rows
        _, expected_h, expected_v = statistics(mlp.extract(to_numpy(extractor), rows), y)
        np.testing.assert_allclose(h, expected_h, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.variance, expected_v, rtol=1e-5, atol=1e-7)
        means, counts = class_means(mlp.extract(to_numpy(found.extractor), rows), y, CLASSES)
        np.testing.assert_allclose(sums, means * counts[:, None], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found.per_class.held, counts)
        kinds.add((len(rows) > 1, len(np.unique(y)) > 1))
    assert kinds == {(False, False), (True, False), (True, True)}, "a single sample, a single class, several classes"


def test_rounding_makes_no_variance_negative(upload, model, federation):
    """Copies of one image have none, but large squares to subtract."""
    extractor = jax.tree.map(lambda leaf: 1e3 * leaf, model.init(KEY)["extractor"])
    for i in range(N):
        row = client(federation.train, i)
        copies = jnp.full_like(row.index, row.index[0])
        counts = jnp.zeros(CLASSES).at[federation.y[row.index[0]]].set(row.count.astype(jnp.float32))
        v = float(upload(extractor, row._replace(index=copies, class_counts=counts)).variance)
        assert 0 <= v < 1e-4


# --- Head weights ----------------------------------------------------------------------------------------------------


def weights_of(h, v, present=None):
    present = np.ones(len(v), bool) if present is None else present
    return np.asarray(jax.jit(head_weights)(jnp.float32(h), jnp.float32(v), jnp.asarray(present)))


def some_statistics(clients, seed=0):
    rng = np.random.default_rng(seed)
    return 0.3 * rng.normal(size=(clients, CLASSES, 5)), rng.uniform(0.2, 2, clients)


def test_two_clients_have_a_closed_form():
    h, v = some_statistics(2)
    d = np.sum((h[0] - h[1]) ** 2)
    expected = np.array([[v[1] + d, v[0]], [v[1], v[0] + d]]) / (v.sum() + d)
    np.testing.assert_allclose(weights_of(h, v), expected, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_weights_are_those_of_enumerated_supports(seed):
    h, v = some_statistics(4, seed)
    expected = mixtures(h, v)
    np.testing.assert_allclose(weights_of(2 * h, 4 * v), expected, atol=2e-6)
    np.testing.assert_allclose(weights_of(h, v).sum(axis=1), 1, rtol=1e-6)
    assert len(np.unique(expected)) == expected.size


@pytest.mark.parametrize("longer", [1e4, 1e6])
def test_long_means_of_one_client_do_not_hide_the_variances_of_the_others(longer):
    h, v = some_statistics(4)
    h[3] *= longer
    expected = mixtures(h, v)
    np.testing.assert_allclose(weights_of(h, v), expected, atol=2e-6)
    assert np.ptp(expected[0, :3]) > 0.1, "their variances differ"


def test_clients_that_agree_are_weighed_by_the_inverse_of_their_variance_and_small_weights_dropped():
    h = np.ones((3, CLASSES, 5))
    v = np.array([1.0, 2.0, 1800.0])
    expected = np.array([2 / 3, 1 / 3, 0.0])
    np.testing.assert_allclose(weights_of(h, v), np.tile(expected, (3, 1)), rtol=1e-5, atol=0)
    kept = 1 / np.array([1.0, 2.0, 600.0])
    np.testing.assert_allclose(weights_of(h, [1, 2, 600]), np.tile(kept / kept.sum(), (3, 1)), rtol=1e-4)


@pytest.mark.parametrize(("clients", "absent"), [(1200, 0), (2000, 800), (400, 0)])
def test_among_a_thousand_the_cut_is_at_half_of_an_equal_share(clients, absent, monkeypatch):
    """Equal shares are kept though they are below a thousandth; the tenth of a share is dropped."""
    present = np.arange(clients) < clients - absent
    share = np.where(np.arange(clients) < 20, 0.1, 1.0) * present
    share /= share.sum()
    qp = lambda q, present: jnp.float32(share)  # noqa: E731
    monkeypatch.setattr(importlib.import_module("fedjax_pfl.methods.fedpac.collaboration"), "simplex_qp", qp)
    found = weights_of(np.zeros((clients, 1, 1)), np.ones(clients), present)[0]
    np.testing.assert_array_equal(found > 0, present & (np.arange(clients) >= 20))
    np.testing.assert_allclose(found.sum(), 1, rtol=1e-5)


def test_where_nobody_has_a_sample_all_keep_the_head_that_they_received(model, trainer, federation):
    method = fedpac(model, trainer)
    cohort = Cohort(jnp.arange(2), jnp.zeros(2), N, N)

    @jax.jit
    def kept_and_after(row):
        server, one = method.init(KEY, N)
        data = client_data(federation.x, federation.y, row)
        upload = method.local(now(KEY, 0), method.broadcast(server), one, data).upload
        nobody = upload._replace(per_class=jax.tree.map(jnp.zeros_like, upload.per_class))
        rows, kept = (jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), tree) for tree in (nobody, one))
        return kept, method.aggregate(now(KEY, 0), server, kept, rows, cohort)[1]

    kept, after = kept_and_after(client(federation.train, 2))
    jax.tree.map(np.testing.assert_array_equal, after, kept)


def test_absent_clients_get_no_weight():
    h, v = some_statistics(4)
    present = np.array([True, False, True, True])
    found = weights_of(h * present[:, None, None], v * present, present)
    np.testing.assert_array_equal(found[:, 1], 0)
    np.testing.assert_array_equal(found[1], 0)
    np.testing.assert_allclose(found[np.ix_(present, present)], mixtures(h[present], v[present]), atol=2e-6)
    alone = weights_of(h, v, [False, False, True, False])
    np.testing.assert_array_equal(alone[2], [0, 0, 1, 0])
    h[1], v[1] = np.nan, np.inf  # they are not read
    np.testing.assert_array_equal(weights_of(h, v, present), found)


def of_four(method, federation):
    """The initial server, the states of four clients, and uploads of theirs that differ by factors."""
    server, one = method.init(KEY, N)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    upload = method.local(now(KEY, 0), method.broadcast(server), one, data).upload
    rng = np.random.default_rng(0)
    rows = jax.tree.map(lambda leaf: np.float32(leaf * rng.uniform(0.5, 2, (4, *(1,) * leaf.ndim))), to_numpy(upload))
    return server, jax.tree.map(lambda leaf: np.stack([leaf] * 4), one), rows


@pytest.mark.parametrize("what", ["nothing is finite", "its squares are not"])
def test_a_client_that_has_diverged_is_left_out_and_gets_finite_heads(what, model, trainer, federation):
    """It keeps the one that it had."""
    method = fedpac(model, trainer)
    server, kept, rows = of_four(method, federation)

    def with_last(tree, value):
        return jax.tree.map(lambda leaf: np.concatenate([leaf[:3], np.full_like(leaf[3:], value)]), tree)

    h, sums = rows.per_class.rows
    diverged = with_last(rows, np.nan)._replace(per_class=rows.per_class._replace(rows=with_last((h, sums), np.nan)))
    if what == "its squares are not":
        diverged = rows._replace(per_class=rows.per_class._replace(rows=(with_last(h, 1e20), sums)))
    aggregate = jax.jit(lambda rows: method.aggregate(now(KEY, 0), server, kept, rows, cohort)[1])
    cohort = Cohort(jnp.arange(4), jnp.ones(4), N, N)
    found, expected = aggregate(diverged), aggregate(with_last(rows, 0))
    for leaf, of_others in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        near(leaf[:3], of_others[:3])
        assert np.isfinite(leaf).all()
        assert np.any(leaf[:3])
    jax.tree.map(lambda leaf, own: np.testing.assert_array_equal(leaf[3], own[3]), found, kept)


def test_a_participant_without_samples_keeps_the_head_that_it_received(model, trainer, federation):
    method = fedpac(model, trainer)
    server, kept, rows = of_four(method, federation)
    nobody = jax.tree.map(lambda leaf: np.concatenate([leaf[:3], np.zeros_like(leaf[3:])]), rows.per_class)
    cohort = Cohort(jnp.arange(4), jnp.array([1.0, 1.0, 1.0, 0.0]), N, N)
    aggregate = jax.jit(lambda rows: method.aggregate(now(KEY, 0), server, kept, rows, cohort)[1])
    after = aggregate(rows._replace(per_class=nobody))
    jax.tree.map(lambda leaf, own: np.testing.assert_array_equal(leaf[3], own[3]), after, kept)
    assert all(np.any(leaf[0] != own[0]) for leaf, own in zip(*map(jax.tree.leaves, (after, kept)), strict=True))


def test_a_head_that_has_diverged_on_features_that_have_not_is_left_out(model, trainer, federation):
    """As in the round in which a client diverges: its statistics are of the extractor that it received."""
    method = fedpac(model, trainer)
    server, kept, rows = of_four(method, federation)
    for leaf in jax.tree.leaves(rows.head):
        leaf[3] = np.nan
    cohort = Cohort(jnp.arange(4), jnp.ones(4), N, N)
    heads = jax.jit(lambda rows: method.aggregate(now(KEY, 0), server, kept, rows, cohort)[1])(rows)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(heads))


def test_without_variance_a_client_keeps_its_own_head_or_all_share():
    h, _ = some_statistics(3)
    np.testing.assert_allclose(weights_of(h, np.zeros(3)), np.eye(3), atol=1e-6)
    np.testing.assert_allclose(weights_of(np.ones_like(h), np.zeros(3)), np.full((3, 3), 1 / 3), rtol=1e-5)


# --- Limits ----------------------------------------------------------------------------------------------------------


def test_a_lone_participant_without_the_pull_does_fedrep(play, model, trainer):
    lone = Participation(1 / N, 1 / N)
    _, _, found = play(fedpac(model, trainer, lam=0.0, head_lr=None, head_epochs=2), lone)
    _, start, expected = play(fedrep(model, trainer, head_epochs=2), lone)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found.state.server.extractor, expected.state.server)
    jax.tree.map(close, found.state.clients.inbox, expected.state.clients)
    assert not np.allclose(expected.state.server["hidden_layer"]["bias"], start.state.server["hidden_layer"]["bias"])
