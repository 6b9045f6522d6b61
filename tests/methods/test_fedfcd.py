"""FedFCD against rounds in NumPy, its ablations, what a client depends on, and what it exchanges."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import Run, round_keys
from fedjax_pfl.engine.traffic import traffic_of
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.fedfcd import fedfcd
from fedjax_pfl.ops.training import Trainer
from fedjax_pfl.ops.tree import count
from tests.conftest import CLASSES
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
)

N, ROUNDS = 7, 4
# In this draw of SOME, classes 1 and 2 are absent from round 0, nobody is left of round 2, and two clients never come.
KEY, OTHER_KEY = jax.random.key(780), jax.random.key(22)
EVERYONE, SOME = Participation(), Participation(0.2, 0.6, 0.3)
ALONE = {"lam": 0.0, "fusion": False}
SERVER = {"server_lr": 0.3, "server_epochs": 2, "server_batch_size": 4}

near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def trainer(trainer):
    return replace(trainer, weight_decay=0.01, lr_decay=0.9)


@pytest.fixture(scope="module")
def init(model, trainer):
    """federation -> the run before round 0, of a server with the settings SERVER."""
    initial = jax.jit(Engine(fedfcd(model, trainer, **SERVER), N, SOME).init)
    return functools.partial(initial, KEY)


@pytest.fixture(scope="module")
def start(init, federation):
    return init(federation)


@pytest.fixture(scope="module")
def program(model, trainer):
    """(who, hyperparameters) -> the engine, and run, stop, federation -> the run after these rounds."""

    @functools.cache
    def program(who, **changed):
        engine = Engine(fedfcd(model, trainer, **changed), N, who)
        rounds = jax.jit(engine.rounds)
        return engine, lambda run, stop, data: rounds(KEY, run, at(0), at(stop), jnp.array(True), data)

    return program


# --- Rounds in NumPy -------------------------------------------------------------------------------------------------

SPECIFIED = {
    "lam": 1.0,
    "fusion": True,
    "hierarchical": True,
    "train_extractor_on": "fused",
    "server_lr": 0.01,
    "server_epochs": 1,
    "server_batch_size": 10,
    "reduction": "mse",
}


class Server(NamedTuple):
    head: dict
    representations: np.ndarray
    valid: np.ndarray


def fused(w, head, fusion=True):
    """Two linear heads whose logits are added up are one head: the sum of their parameters."""
    return {**w, "head": jax.tree.map(np.add, w["head"], head) if fusion else w["head"]}


def fedfcd_client(mlp, key, t, server, w, rows, trainer, hyper):
    """The trained model, its class means and counts, and the mean of the losses on the way."""
    losses = []

    def gradient(w, rows, fusion):
        w = fused(w, server.head, fusion)
        z, y = mlp.features(w, rows), mlp.y[rows]
        ce, d = softmax_loss(linear(w["head"], z), y)
        apart = (z - server.representations[y]) * server.valid[y][:, None]
        width = {"mse": z.shape[1], "mean_l2": 1}[hyper.reduction]
        losses.append((len(y), ce + hyper.lam * np.sum(apart**2) / len(y) / width))
        d_z = d @ w["head"]["kernel"].T + hyper.lam * 2 * apart / len(y) / width
        return {"extractor": mlp.extract_gradient(w["extractor"], rows, d_z), "head": linear_gradient(z, d)}

    def trained(name, fusion, epoch):
        """One pass over a part of the model; the other part is as it was before."""

        def gradient_of_part(params, rows):
            return gradient({**w, name: params}, rows, fusion)[name]

        key_epoch = jax.random.fold_in(key, epoch)
        return {**w, name: train(w[name], gradient_of_part, key_epoch, t, rows, trainer, phase=name, epochs=1)}

    if hyper.hierarchical:
        reported = []
        for epoch in range(trainer.epochs):
            losses.clear()
            w = trained("extractor", hyper.fusion and hyper.train_extractor_on == "fused", epoch)
            reported += losses
            w = trained("head", hyper.fusion, epoch)
    else:
        w = train(w, functools.partial(gradient, fusion=hyper.fusion), key, t, rows, trainer)
        reported = losses
    sizes, values = zip(*reported, strict=True)
    return w, class_means(mlp.features(w, rows), mlp.y[rows], CLASSES), np.average(values, weights=sizes)


def fedfcd_server(key, t, server, received, hyper):
    """``received``: client -> its class means and counts."""
    pairs = [(means[k], k) for _, (means, counts) in sorted(received.items()) for k in np.flatnonzero(counts)]
    z, y = map(np.array, zip(*pairs, strict=True))

    def gradient(phi, rows):
        return linear_gradient(z[rows], softmax_loss(linear(phi, z[rows]), y[rows])[1])

    trainer = Trainer(epochs=hyper.server_epochs, batch_size=hyper.server_batch_size, lr=hyper.server_lr)
    head = train(server.head, gradient, key, t, np.arange(len(y)), trainer)
    representations, valid = server.representations.copy(), server.valid.copy()
    for k in np.unique(y):
        n = np.array([counts[k] for _, counts in received.values()])
        representations[k] = sum(n_i / n.sum() * means[k] for n_i, (means, _) in zip(n, received.values(), strict=True))
        valid[k] = True
    return Server(head, representations, valid)


class Sent(NamedTuple):
    """Of one round: how many were selected, which classes had a representation, and whose uploads came back."""

    selected: int
    valid: np.ndarray
    cohort: list


class Played(NamedTuple):
    """NumPy's run."""

    server: Server
    clients: list
    post: dict  # client -> the decision that it made after its last training
    loss: float  # of the last round's participants
    sent: list


def play(engine, start, rounds, federation, trainer, changed):
    hyper = SimpleNamespace(**{**SPECIFIED, **changed})
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    head, (representations, valid) = start.state.server
    server = Server(to_numpy(head), to_numpy(representations), np.asarray(valid))
    clients = [to_numpy(client(start.state.clients, i)) for i in range(N)]
    post, sent = {i: fused(w, server.head, hyper.fusion) for i, w in enumerate(clients)}, []
    select = jax.jit(engine.select)
    for t in range(rounds):
        keys = round_keys(KEY, at(t))
        ids, selected = select(KEY, at(t), federation.train.count)
        cohort = [int(i) for i in ids if i < N]
        sent.append(Sent(int(selected), server.valid, cohort))
        received, losses = {}, []
        for i in cohort:
            result = fedfcd_client(mlp, client_key(KEY, t, i), t, server, clients[i], rows[i], trainer, hyper)
            clients[i], received[i], loss = result
            post[i] = fused(clients[i], server.head, hyper.fusion)
            losses.append(loss)
        if cohort:
            server = fedfcd_server(keys.aggregate, t, server, received, hyper)
    return Played(server, clients, post, np.mean(losses), sent)


def check(run, expected, federation):
    """The engine's run is NumPy's: server, clients, scores after training, and loss."""
    head, (representations, valid) = run.state.server
    jax.tree.map(near, head, expected.server.head)
    near(representations, expected.server.representations)
    np.testing.assert_array_equal(valid, expected.server.valid)
    mlp = MLP(federation.x, federation.y)
    for i in range(N):
        jax.tree.map(near, client(run.state.clients, i), expected.clients[i])
        near([float(leaf[i]) for leaf in run.post.test], mlp.scores(expected.post[i], held(federation.test, i)))
    near(run.loss, expected.loss)


class Both(NamedTuple):
    """The engine's run and NumPy's."""

    engine: Engine
    run: Run
    expected: Played


@pytest.fixture(scope="module")
def some(program, start, trainer, federation):
    """Rounds of some clients, and of a server with the settings SERVER."""
    engine, rounds = program(SOME, **SERVER)
    expected = play(engine, start, ROUNDS, federation, trainer, SERVER)
    return Both(engine, rounds(start, ROUNDS, federation), expected)


def test_rounds_of_some_are_numpys(some, federation):
    check(some.run, some.expected, federation)


def test_rounds_of_clients_that_learn_alone_are_numpys(program, start, trainer, federation):
    """Without alignment and fusion; everyone takes part."""
    engine, rounds = program(EVERYONE, **ALONE)
    check(rounds(start, 3, federation), play(engine, start, 3, federation, trainer, ALONE), federation)


def test_some_rounds_lack_clients_and_classes(some, federation):
    """Otherwise the comparison above would say nothing of drop-outs, rule R8, and the order of pairs."""
    counts, cohorts = np.asarray(federation.train.class_counts), [sent.cohort for sent in some.expected.sent]
    assert any(sent.selected > len(sent.cohort) > 0 for sent in some.expected.sent)
    assert not all(cohorts)
    assert {i for cohort in cohorts for i in cohort} < set(range(N))
    absent = [np.any(counts[cohort].sum(axis=0) == 0) for cohort in cohorts if cohort]
    assert any(absent)
    assert not all(absent)
    assert any(cohort != sorted(cohort) for cohort in cohorts)
    assert max(np.count_nonzero(counts[cohort]) for cohort in cohorts) > SERVER["server_batch_size"]


def test_before_round_zero_the_server_hears_from_all_initial_extractors(start, model, federation):
    key_init, key_setup, _ = jax.random.split(KEY, 3)
    w, mlp = to_numpy(model.init(key_init)), MLP(federation.x, federation.y)
    rows = [held(federation.train, i) for i in range(N)]
    received = {i: class_means(mlp.features(w, rows[i]), mlp.y[rows[i]], CLASSES) for i in range(N)}
    nothing = Server(w["head"], np.zeros((CLASSES, model.dim)), np.zeros(CLASSES, bool))
    server = fedfcd_server(jax.random.split(key_setup)[1], -1, nothing, received, SimpleNamespace(**SERVER))
    check(start, Played(server, [w] * N, [fused(w, server.head)] * N, np.nan, []), federation)


def test_a_class_without_a_representation_pulls_nothing_until_it_has_one(
    program, start, shapes, trainer, model, federation
):
    server = start.state.server
    mean, valid = map(np.array, server.representations)
    mean[0], valid[0] = 9, False
    without = server.representations._replace(mean=jnp.asarray(mean), valid=jnp.asarray(valid))
    start = start._replace(state=start.state._replace(server=server._replace(representations=without)))
    engine, rounds = program(SOME, **SERVER)
    run, expected = rounds(start, 2, federation), play(engine, start, 2, federation, trainer, SERVER)
    check(run, expected, federation)
    assert [sum(sent.valid) for sent in expected.sent] == [CLASSES - 1, CLASSES]
    check_bytes(shapes, run, expected, model, federation)


@pytest.mark.parametrize(
    "changed",
    [
        {"lam": 0.0},
        {"fusion": False},
        {"hierarchical": False},
        {"train_extractor_on": "local", "reduction": "mean_l2", "lam": 0.3},
    ],
    ids=["no alignment", "no fusion", "one pass", "extractor on the local decision, L2"],
)
def test_every_switch_is_numpys(changed, start, model, trainer, federation):
    """A participation in round 1, of clients whose model is not the one that the server started from."""
    method, own = fedfcd(model, trainer, **changed), model.init(OTHER_KEY)
    view = method.broadcast(start.state.server)

    @jax.jit
    def participate(key, view, own, row):
        update = method.local(now(key, 1), view, own, client_data(federation.x, federation.y, row))
        return update.client, update.upload, update.info, method.predict(method.personal(*update.trained), federation.x)

    head, (representations, valid) = start.state.server
    server = Server(to_numpy(head), to_numpy(representations), np.asarray(valid))
    mlp, hyper = MLP(federation.x, federation.y), SimpleNamespace(**{**SPECIFIED, **changed})
    for i in (0, 1, 5):  # a single class, a single sample, all classes
        key, rows = client_key(KEY, 1, i), held(federation.train, i)
        found, upload, info, decision = participate(key, view, own, client(federation.train, i))
        w, (means, counts), loss = fedfcd_client(mlp, key, 1, server, to_numpy(own), rows, trainer, hyper)
        jax.tree.map(near, found, w)
        near(info.loss, loss)
        near(decision, mlp.logits(fused(w, server.head, hyper.fusion), np.arange(len(mlp.y))))
        near(upload.rows, means * counts[:, None])
        np.testing.assert_array_equal(upload.held, counts)


# --- What is exchanged -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shapes(some, federation):
    return survey(some.engine, federation)[1]


def check_bytes(shapes, run, expected, model, federation):
    """Up: K floats for each class that the client holds; down: the head, and K floats for each class known.

    Beside these, a count for each class goes up, and a byte that says whether its row is there down. All clients upload
    once before round 0.
    """
    held_by = np.count_nonzero(federation.train.class_counts, axis=1)
    uploads = [*range(len(held_by)), *(i for sent in expected.sent for i in sent.cohort)]
    up = sum(4 * held_by[i] * model.dim + 4 * CLASSES for i in uploads)
    head = CLASSES * (model.dim + 1)
    down = sum(sent.selected * (4 * (head + sent.valid.sum() * model.dim) + CLASSES) for sent in expected.sent)
    assert shapes.sent_bytes(run.traffic) == up + down < shapes.dense_bytes(run.traffic)


def test_bytes_are_a_hand_count_of_the_classes_held(some, shapes, model, federation):
    assert count(shapes.up) == CLASSES * model.dim + CLASSES, "no parameters"
    assert count(shapes.down) == CLASSES * (model.dim + 1) + CLASSES * model.dim + CLASSES
    check_bytes(shapes, some.run, some.expected, model, federation)


@pytest.mark.parametrize(
    ("changed", "heads", "classes"),
    [({"lam": 0.0}, 1, 0), ({"fusion": False}, 0, 1), ({"lam": 0.0, "fusion": False}, 0, 0)],
    ids=["no alignment", "no fusion", "neither"],
)
def test_what_a_variant_does_not_use_is_not_sent_down(changed, heads, classes, model, trainer, federation, start):
    """By hand: the head, and for the classes a flag each and K floats for each that is known."""
    method = fedfcd(model, trainer, **changed)
    shapes = survey(Engine(method, N), federation)[1]
    head = CLASSES * (model.dim + 1)
    down = 4 * heads * head + classes * (4 * CLASSES * model.dim + CLASSES)
    traffic = traffic_of(at(5), method.broadcast(start.state.server), at(0), ())
    assert shapes.sent_bytes(traffic) == 5 * down


def test_pull_and_fusion_are_measured_beside_the_cross_entropy(model, trainer, federation, start):
    """On the client's own model as it begins the round, on one mini-batch."""
    diagnosed, own = replace(trainer, diagnose=True), model.init(OTHER_KEY)
    method = fedfcd(model, diagnosed, lam=0.7)
    view = method.broadcast(start.state.server)

    @jax.jit
    def participate(row):
        return method.local(now(KEY, 1), view, own, client_data(federation.x, federation.y, row)).diagnostics

    found = participate(client(federation.train, 2))
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, 2)
    rows = rows[next(batches(KEY, len(rows), epochs=1, batch_size=trainer.batch_size, phase="diagnostics"))]
    head, (means, _) = to_numpy(start.state.server)
    personal = to_numpy(own)
    w = fused(personal, head)
    z, y = mlp.features(w, rows), mlp.y[rows]
    both, alone = (softmax_loss(linear(phi, z), y)[1] @ phi["kernel"].T for phi in (w["head"], personal["head"]))
    pull, fusion, ce = [
        np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(mlp.extract_gradient(w["extractor"], rows, d_z))))
        for d_z in (0.7 * 2 * (z - means[y]) / z.size, both - alone, both)
    ]
    assert found.keys() == {"gradient_ratio_lam", "gradient_ratio_fusion"}
    near(found["gradient_ratio_lam"], pull / ce)
    near(found["gradient_ratio_fusion"], fusion / ce)
    assert min(pull, fusion) > 0.01 * ce
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    for changed, ratio in (
        ({"fusion": False}, "lam"),
        ({"train_extractor_on": "local"}, "lam"),
        ({"lam": 0.0}, "fusion"),
    ):
        other = fedfcd(model, diagnosed, **{"lam": 0.7, **changed})
        sent = other.broadcast(start.state.server)
        said = jax.eval_shape(other.local, now(KEY, 1), sent, own, data).diagnostics
        assert said.keys() == {f"gradient_ratio_{ratio}"}


# --- Clients and server ----------------------------------------------------------------------------------------------


def test_before_training_the_newest_global_head_decides_and_after_it_the_received_one(some, federation):
    pre = jax.jit(some.engine.pre)(KEY, at(ROUNDS), some.run.state, federation)
    mlp = MLP(federation.x, federation.y)
    for i in range(N):
        rows = held(federation.test, i)
        newest = mlp.scores(fused(some.expected.clients[i], some.expected.server.head), rows)
        near([float(leaf[i]) for leaf in pre.test], newest)
        if len(rows):
            assert abs(newest[-1] - mlp.scores(some.expected.post[i], rows)[-1]) > 1e-3


def test_without_alignment_and_fusion_a_client_depends_on_no_other_clients_data(program, init, federation):
    other = 6
    rows = held(federation.train, other)
    y, counts = np.array(federation.y), np.array(federation.train.class_counts)
    y[rows], counts[other] = (y[rows] + 1) % CLASSES, np.roll(counts[other], 1)
    train = federation.train._replace(class_counts=jnp.asarray(counts))
    relabelled = federation._replace(y=jnp.asarray(y), train=train)

    def play(who, **changed):
        _, rounds = program(who, **changed)
        return [rounds(init(data), ROUNDS, data) for data in (federation, relabelled)]

    def same(a, b):
        return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))

    alone = play(EVERYONE, **ALONE)
    for i in range(N):
        assert same(*(client((run.state.clients, run.post), i) for run in alone)) == (i != other)
    assert not same(*(run.state.server for run in alone))
    together = play(SOME, **SERVER)
    for i in (0, 1, 2, 5):  # who ever comes, other than the relabelled one
        assert not same(*(client(run.state.clients, i) for run in together))


def test_a_single_class_or_sample_gives_no_nan(some, federation):
    counts = np.asarray(federation.train.class_counts)[[i for sent in some.expected.sent for i in sent.cohort]]
    kinds = {(n.sum() > 1, np.count_nonzero(n) > 1) for n in counts}
    assert kinds == {(False, False), (True, False), (True, True)}, "a single sample, a single class, several classes"
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(np.isfinite(leaf), True), some.run)


def test_without_pairs_the_server_stands_still(some, start, shapes):
    uploads = jax.tree.map(lambda leaf: jnp.zeros((3, *leaf.shape), leaf.dtype), shapes.upload)
    nobody = Cohort(jnp.full(3, N), jnp.zeros(3), N, N)
    server, _ = jax.jit(some.engine.method.aggregate)(now(KEY, 1), start.state.server, None, uploads, nobody)
    jax.tree.map(np.testing.assert_array_equal, server, start.state.server)
