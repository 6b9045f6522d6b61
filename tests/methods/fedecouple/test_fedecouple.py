"""FedeCouple against rounds in NumPy, its anchors, its teacher, its limits, and what it exchanges."""

import importlib
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from fedjax_pfl.data.augment import add_copies
from fedjax_pfl.data.federated import Clients, Federation, client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods import METHODS
from fedjax_pfl.methods.fedecouple import fedecouple
from fedjax_pfl.methods.fedecouple.method import Client
from fedjax_pfl.methods.fedrep import fedrep
from fedjax_pfl.models import MODELS, build
from fedjax_pfl.ops.prototypes import centre_loss
from fedjax_pfl.ops.training import Trainer, cache_features, phase_key
from fedjax_pfl.ops.tree import count, size
from tests import generator
from tests.conftest import CLASSES, TRAIN_SIZES
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
    train,
    weighted_mean,
)
from tests.toys import OnlyHeads, Untrained

N = 7
KEY, OTHER_KEY = generator.key(21), generator.key(22)

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trainer(trainer):
    return replace(trainer, weight_decay=0.01, lr_decay=0.9)


@pytest.fixture(scope="module")
def play(federation):
    """(method, rounds) -> the runs before and after."""

    def play(method, rounds):
        engine = Engine(method, N)
        before = jax.jit(engine.init)(KEY, federation)
        return before, jax.jit(engine.rounds)(KEY, before, at(0), at(rounds), jnp.array(True), federation)

    return play


@pytest.fixture(scope="module")
def uploads(model, trainer, federation):
    """The upload of client 2 in round 1, as a function of traced hyperparameters; the others are given here.

    The client's own model, OTHER_KEY's, is not the one that it receives.
    """
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    received, own = jax.jit(lambda: (model.init(KEY), model.init(OTHER_KEY)))()
    models = received, Client(own, jnp.array(True))

    @cache
    def uploads(**fixed):
        @jax.jit
        def upload(**traced):
            method = fedecouple(model, trainer, **fixed, **traced)
            return method.local(now(client_key(KEY, 1, 2), 1), *models, data).upload

        return lambda **traced: upload(**jax.tree.map(jnp.float32, traced))

    return uploads


# --- Rounds in NumPy -------------------------------------------------------------------------------------------------

BASE = {"lam": 0.6, "mu": 0.8, "tau": 1.7, "head_epochs": 3, "scale_by_temperature": True}
SPECIFIED = {
    "head_lr": None,
    "frozen_head_epochs": 1,
    "teacher": "adapted",
    "head_features": "local",
    "global_extractor": True,
    "anchor_on": "all",
    "anchor_coverage": 1.0,
    "anchor_reduction": "mse",
    "aggregation": "similarity",
}


def covered(key, counts, coverage):
    """The classes that get an anchor: a share of those held, by a draw of the phase "anchors"."""
    draws = np.asarray(jax.random.uniform(phase_key(key, "anchors"), (CLASSES,)))
    by_draw = sorted(np.flatnonzero(counts), key=lambda c: draws[c])
    return np.isin(np.arange(CLASSES), by_draw[: round(coverage * len(by_draw))])


def fedecouple_client(mlp, key, t, server, personal, rows, originals, trainer, hyper):
    extractor = {"local": personal, "global": server}[hyper.head_features]["extractor"]

    def heads_gradient(heads, rows):
        z, y = mlp.extract(extractor, rows), mlp.y[rows]
        logits, taught = linear(heads["personal"], z), linear(heads.get("teacher", server["head"]), z)
        d = softmax_loss(logits, y)[1]
        if hyper.teacher != "off":
            # d KL(p || q) / d student logits = (q - p) / tau, of each sample.
            apart = softmax(logits / hyper.tau, axis=1) - softmax(taught / hyper.tau, axis=1)
            factor = hyper.tau**2 if hyper.scale_by_temperature else 1.0
            d = d + hyper.lam * factor * apart / hyper.tau / len(y)
        gradient = {"personal": linear_gradient(z, d)}
        if "teacher" in heads:
            gradient["teacher"] = linear_gradient(z, softmax_loss(taught, y)[1])
        return gradient

    heads = {"personal": personal["head"]}
    if hyper.teacher == "adapted":
        heads["teacher"] = server["head"]
    options = {"epochs": hyper.head_epochs, "lr": hyper.head_lr}
    heads = train(heads, heads_gradient, key, t, rows, trainer, phase="head", **options)

    anchored = {"all": rows, "original": originals}[hyper.anchor_on]
    anchors, counts = class_means(mlp.extract(server["extractor"], anchored), mlp.y[anchored], CLASSES)
    has_anchor = covered(key, counts, hyper.anchor_coverage)

    def under(phi):
        def gradient(theta, rows):
            z, y = mlp.extract(theta, rows), mlp.y[rows]
            pull = 2 * (z - anchors[y]) * has_anchor[y][:, None] / len(y)
            pull = pull / {"mse": z.shape[1], "mean_l2": 1}[hyper.anchor_reduction]
            d_z = softmax_loss(linear(phi, z), y)[1] @ phi["kernel"].T + hyper.mu * pull
            return mlp.extract_gradient(theta, rows, d_z)

        return gradient

    theta = (server if hyper.global_extractor else personal)["extractor"]
    epochs = hyper.frozen_head_epochs
    theta = train(theta, under(server["head"]), key, t, rows, trainer, phase="frozen head", epochs=epochs)
    theta = train(theta, under(heads["personal"]), key, t, rows, trainer)
    return {"extractor": theta, "head": heads["personal"]}


def fedecouple_server(uploads, sizes, hyper):
    mean = weighted_mean(uploads, sizes)
    if hyper.aggregation == "size":
        return mean

    def cosine(w):
        a, b = (np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in (w, mean))
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    return weighted_mean(uploads, [max(cosine(w), 1e-6) for w in uploads])


def compare(before, after, rounds, mlp, rows_of, federation, trainer, changed):
    """Plays the rounds in NumPy and compares server, clients, and the scores after training.

    ``rows_of`` is a function (t, i) -> rows of ``mlp`` that client i trains on in round t; the originals come first.
    """
    hyper = SimpleNamespace(**{**SPECIFIED, **BASE, **changed})
    server = to_numpy(before.state.server)
    clients = [to_numpy(client(before.state.clients.model, i)) for i in range(N)]
    for t in range(rounds):
        for i in range(N):
            rows, key = rows_of(t, i), client_key(KEY, t, i)
            originals = rows[: TRAIN_SIZES[i]]
            clients[i] = fedecouple_client(mlp, key, t, server, clients[i], rows, originals, trainer, hyper)
        server = fedecouple_server(clients, TRAIN_SIZES, hyper)
    jax.tree.map(near, after.state.server, server)
    for i in range(N):
        jax.tree.map(near, client(after.state.clients.model, i), clients[i])
        near([float(leaf) for leaf in client(after.post.test, i)], mlp.scores(clients[i], held(federation.test, i)))
    return server, clients


CASES = {
    "as specified": {},
    "fixed teacher by size, own extractor, anchors of half the originals' classes": {
        "head_lr": 0.3,
        "teacher": "fixed",
        "scale_by_temperature": False,
        "aggregation": "size",
        "global_extractor": False,
        "anchor_coverage": 0.5,
        "anchor_on": "original",
    },
}


@pytest.mark.parametrize("changed", CASES.values(), ids=CASES)
def test_rounds_are_numpys_on_augmented_copies_that_are_drawn_afresh(changed, play, model, trainer, federation):
    method = fedecouple(model, trainer, **{**BASE, **changed})
    assert method.copies == "concat"
    before, after = play(method, 2)
    draw = jax.jit(
        jax.vmap(lambda key, row: add_copies(key, client_data(federation.x, federation.y, row), "concat").x.rows)
    )
    x, y, rows = [np.asarray(federation.x)], [np.asarray(federation.y)], {}
    capacity = federation.train.index.shape[1]
    for t in range(2):
        keys = jnp.stack([phase_key(client_key(KEY, t, i), "augment") for i in range(N)])
        pools = np.asarray(draw(keys, federation.train)).reshape(N, -1, *federation.x.shape[1:])
        for i in range(N):
            originals, first = held(federation.train, i), sum(map(len, y))
            x.append(pools[i, capacity : capacity + len(originals)])
            y.append(y[0][originals])
            rows[t, i] = np.concatenate([originals, first + np.arange(len(originals))])
    mlp = MLP(np.concatenate(x), np.concatenate(y))
    assert not np.array_equal(mlp.x[rows[0, 2]], mlp.x[rows[1, 2]])
    compare(before, after, 2, mlp, lambda t, i: rows[t, i], federation, trainer, changed)


def test_rounds_are_numpys_without_copies_and_teacher(play, model, trainer, federation):
    """And with the global extractor's features, sums over them, and two epochs under the global head."""
    changed = {
        "teacher": "off",
        "frozen_head_epochs": 2,
        "head_features": "global",
        "anchor_reduction": "mean_l2",
        "mu": 0.1,
    }
    method = fedecouple(model, trainer, **{**BASE, **changed})._replace(copies="none")
    before, after = play(method, 3)
    mlp = MLP(federation.x, federation.y)
    rows = [held(federation.train, i) for i in range(N)]
    server, clients = compare(before, after, 3, mlp, lambda t, i: rows[i], federation, trainer, changed)
    pre = method.predict(method.personal(after.state.server, client(after.state.clients, 2)), federation.x)
    w = {"extractor": server["extractor"], "head": clients[2]["head"]}
    near(pre, mlp.logits(w, np.arange(len(mlp.y))))


# --- Anchors ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def anchors(monkeypatch, model, trainer, federation):
    """(share, t, i) -> the anchors that the loss of client i is given in round t; it received KEY's model."""
    seen = []

    def spy(z, y, mask, centres, **options):
        seen.append(centres)
        return centre_loss(z, y, mask, centres, **options)

    monkeypatch.setattr(importlib.import_module("fedjax_pfl.methods.fedecouple.method"), "centre_loss", spy)

    @jax.jit
    def traced(share, key, row):
        method = fedecouple(model, trainer, anchor_coverage=share)
        data = client_data(federation.x, federation.y, row)
        method.local(now(key, 0), model.init(KEY), Client(model.init(OTHER_KEY), jnp.array(True)), data)
        return seen[-1]

    return lambda share, t, i: traced(jnp.float32(share), client_key(KEY, t, i), client(federation.train, i))


def test_anchors_are_the_class_means_of_the_received_extractors_features(anchors, model, federation):
    mlp, theta = MLP(federation.x, federation.y), to_numpy(model.init(KEY)["extractor"])
    for i in range(N):
        rows = held(federation.train, i)
        means, counts = class_means(mlp.extract(theta, rows), mlp.y[rows], CLASSES)
        found = anchors(1.0, 0, i)
        np.testing.assert_allclose(found.mean, means, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found.valid, counts > 0)


def test_coverage_is_a_share_of_the_classes_held_and_redrawn_in_every_round(anchors, federation):
    for i in range(N):
        has = np.asarray(federation.train.class_counts)[i] > 0
        drawn = [tuple(np.asarray(anchors(0.5, t, i).valid)) for t in range(8)]
        assert {sum(valid) for valid in drawn} == {round(0.5 * has.sum())}
        assert not np.any(np.array(drawn) & ~has)
        assert (len(set(drawn)) > 1) == (has.sum() > 1)
        assert not anchors(0.0, 0, i).valid.any()


def test_no_coverage_is_no_anchor_loss(uploads):
    without, traced = uploads(mu=0.0)(), partial(uploads(), lam=0.8)
    jax.tree.map(close, traced(anchor_coverage=0.0), without)
    kernels = (upload["extractor"]["hidden_layer"]["kernel"] for upload in (traced(anchor_coverage=1.0), without))
    assert not np.allclose(*kernels, atol=1e-3)


# --- Heads -----------------------------------------------------------------------------------------------------------


def test_no_teacher_is_no_distillation(uploads):
    without = uploads(teacher="off")()
    for upload in (partial(uploads(), anchor_coverage=1.0), uploads(teacher="fixed")):  # the first: "adapted"
        jax.tree.map(close, upload(lam=0.0), without)
        assert not np.allclose(upload(lam=0.8)["head"]["kernel"], without["head"]["kernel"], atol=1e-3)


def test_the_teacher_adapts_as_though_it_taught_nobody(model, trainer, federation):
    seen = []

    class Spy(Trainer):
        def __call__(self, *args, **options):
            trained = super().__call__(*args, **options)
            if options.get("phase") == "head":
                seen.append(trained[0].teacher)
            return trained

    spy = Spy(**vars(trainer))

    @jax.jit
    def teacher(lam):
        data = client_data(federation.x, federation.y, client(federation.train, 2))
        method = fedecouple(model, spy, lam=lam, head_epochs=3)
        method.local(
            now(client_key(KEY, 1, 2), 1), model.init(KEY), Client(model.init(OTHER_KEY), jnp.array(True)), data
        )
        return seen[-1]

    mlp, theta = MLP(federation.x, federation.y), to_numpy(model.init(OTHER_KEY)["extractor"])

    def gradient(phi, rows):
        z = mlp.extract(theta, rows)
        return linear_gradient(z, softmax_loss(linear(phi, z), mlp.y[rows])[1])

    phi, rows = to_numpy(model.init(KEY)["head"]), held(federation.train, 2)
    alone = train(phi, gradient, client_key(KEY, 1, 2), 1, rows, trainer, phase="head", epochs=3)
    for lam in (0.1, 5.0):
        jax.tree.map(near, teacher(jnp.float32(lam)), alone)


@pytest.mark.parametrize("name", ["fedrep", "fedpac", "fedecouple"])
def test_heads_on_cached_features_are_those_on_features_computed_for_every_batch(
    name, monkeypatch, model, trainer, federation
):
    calls = []

    def uncached(features, data, **options):
        class Uncached(type(data)):
            def batches(self, order, batch_size):
                calls.append(order)
                stored = data.batches(order, batch_size)

                def batch(number):
                    return stored(number)._replace(x=features(stored(number).x))

                return batch

        return Uncached(*cache_features(features, data, **options))

    method = METHODS[name](model, OnlyHeads(**vars(trainer)), head_epochs=3)
    server, personal = jax.jit(lambda: method.init(KEY, N))()

    def trained():
        @jax.jit
        def local(row):
            data = client_data(federation.x, federation.y, row)
            return method.local(now(KEY, 1), method.broadcast(server), personal, data)[:2]

        return [local(client(federation.train, i)) for i in (1, 2)]

    cached = trained()
    monkeypatch.setattr(importlib.import_module(METHODS[name].__module__), "cache_features", uncached)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), trained(), cached)
    assert calls


# --- The first participation -----------------------------------------------------------------------------------------


def test_before_its_first_participation_a_client_has_what_it_receives(model, trainer, federation):
    """A late joiner works and is scored as though its own model were the one it receives; later it has its own."""
    received, other = jax.jit(lambda: (model.init(KEY), model.init(OTHER_KEY)))()
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    x = federation.x[:20]

    @partial(jax.jit, static_argnames="first")
    def play(own, seen, first):
        method = fedecouple(model, trainer, head_epochs=2, first=first)
        state = Client(own, seen)
        update = method.local(now(KEY, 3), received, state, data)
        return update.upload, update.client, method.predict(method.personal(received, state), x)

    def seen():
        methods = (fedecouple(model, trainer, first=first) for first in ("received", "initial"))
        return [method.init(KEY, N)[1].seen for method in methods]

    assert [bool(flag) for flag in jax.jit(seen)()] == [False, True]
    late, expected, own = (
        play(other, jnp.array(False), "received"),
        play(received, jnp.array(True), "received"),
        play(other, jnp.array(True), "received"),
    )
    jax.tree.map(np.testing.assert_array_equal, late, expected)
    assert bool(late[1].seen)
    close(late[2], model.apply(received, x))
    assert not np.allclose(late[2], own[2], atol=1e-3)
    # With "initial" it is the model of round 0, whatever is received.
    jax.tree.map(np.testing.assert_array_equal, play(other, jnp.array(True), "initial"), own)


def test_without_a_step_a_client_goes_on_with_the_head_that_it_receives(model, trainer, federation):
    """Where short batches are left out, and it has no whole one; so, too, where it has no samples."""
    received, other = jax.jit(lambda: (model.init(KEY), model.init(OTHER_KEY)))()
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    no_batch = replace(trainer, batch_size=64, drop_last=True)
    empty = data._replace(count=jnp.int32(0), class_counts=jnp.zeros(CLASSES))
    for without, samples in ((no_batch, data), (trainer, empty)):
        method = fedecouple(model, without)
        update = jax.jit(method.local)(now(KEY, 0), received, Client(other, jnp.array(False)), samples)
        jax.tree.map(np.testing.assert_array_equal, update.upload, received)
        newer = model.init(jax.random.key(5))
        jax.tree.map(np.testing.assert_array_equal, method.personal(newer, update.client), newer)


# --- What is recorded of the terms -----------------------------------------------------------------------------------


def test_gradient_ratios_are_those_of_the_terms_in_numpy(model, trainer, federation):
    """On the client's one batch.

    Of the anchors at the trained extractor under the trained head; of the distillation for the trained head, on the own
    extractor's features, with the adapted teacher; of the whole loss under the frozen head, beside that under the
    trained one, at the received extractor.
    """
    hyper = {"mu": 0.8, "lam": 0.6, "head_epochs": 2}
    whole = replace(trainer, batch_size=1000, diagnose=True)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    received, own = model.init(KEY), model.init(OTHER_KEY)

    def play(diagnose):
        method = fedecouple(model, replace(whole, diagnose=diagnose), **hyper)
        update = method.local(now(KEY, 0), received, Client(own, jnp.array(True)), data)
        return update.upload, update.diagnostics

    upload, said = jax.jit(partial(play, True))()
    assert jax.eval_shape(partial(play, False))[1] == {}
    mlp, rows, w = MLP(federation.x, federation.y), held(federation.train, 2), to_numpy(upload)
    models, of_all = map(to_numpy, (received, own)), {**SPECIFIED, **hyper, "tau": 2.0, "scale_by_temperature": False}
    alone = fedecouple_client(mlp, KEY, 0, *models, rows, rows, whole, SimpleNamespace(**of_all))
    jax.tree.map(near, upload, alone)  # measuring changes nothing
    y, view = mlp.y[rows], to_numpy(received)
    means, _ = class_means(mlp.extract(view["extractor"], rows), y, CLASSES)

    def norms(extractor, head):
        """Of the gradients of the anchors' pull, the cross-entropy and their sum."""
        z = mlp.extract(extractor, rows)
        pull = hyper["mu"] * 2 * (z - means[y]) / len(y) / z.shape[1]
        labels = softmax_loss(linear(head, z), y)[1] @ head["kernel"].T
        trees = (mlp.extract_gradient(extractor, rows, d_z) for d_z in (pull, labels, pull + labels))
        return [np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(tree))) for tree in trees]

    pull, labels, _ = norms(w["extractor"], w["head"])
    assert float(said["gradient_ratio_anchors"]) == pytest.approx(pull / labels, rel=1e-3)
    frozen, adapted = (norms(view["extractor"], head)[2] for head in (view["head"], w["head"]))
    assert float(said["gradient_ratio_frozen_head"]) == pytest.approx(frozen / adapted, rel=1e-3)
    assert frozen != pytest.approx(adapted, rel=0.01)
    own_extractor = to_numpy(own)["extractor"]
    z = mlp.extract(own_extractor, rows)

    def adapting(phi, rows):
        z = mlp.extract(own_extractor, rows)
        return linear_gradient(z, softmax_loss(linear(phi, z), mlp.y[rows])[1])

    teacher = train(view["head"], adapting, KEY, 0, rows, whole, phase="head", epochs=hyper["head_epochs"])
    logits, taught = linear(w["head"], z), linear(teacher, z)
    lesson = hyper["lam"] * (softmax(logits / 2, axis=1) - softmax(taught / 2, axis=1)) / 2 / len(y)
    lesson, own_labels = (
        np.sqrt(sum(np.sum(leaf**2) for leaf in linear_gradient(z, d).values()))
        for d in (lesson, softmax_loss(logits, y)[1])
    )
    assert float(said["gradient_ratio_distillation"]) == pytest.approx(lesson / own_labels, rel=1e-3)
    assert set(said) == {"gradient_ratio_anchors", "gradient_ratio_distillation", "gradient_ratio_frozen_head"}


# --- Server, limits and traffic --------------------------------------------------------------------------------------


def test_the_server_weighs_by_similarity_alone(model, trainer):
    w = jax.tree.map(np.asarray, jax.jit(model.init)(KEY))

    @partial(jax.jit, static_argnames="aggregation")
    def combined(uploads, sizes, aggregation):
        method = fedecouple(model, trainer, aggregation=aggregation)
        cohort = Cohort(jnp.arange(len(sizes)), sizes, len(sizes), len(sizes))
        return method.aggregate(now(KEY, 0), w, None, uploads, cohort)[0]

    def aggregate(factors, sizes, aggregation="similarity"):
        uploads = jax.tree.map(lambda leaf: np.stack([np.float32(factor) * leaf for factor in factors]), w)
        return combined(uploads, np.float32(sizes), aggregation)

    def check(found, factor):
        jax.tree.map(lambda a, b: close(a, factor * b), found, w)

    # Uploads of one direction weigh 1/N each, whatever their sizes; one in the opposite direction nothing.
    check(aggregate([1, 0.5], [1, 9]), 0.75)
    check(aggregate([1, 0.5, 0.3], [2, 7, 1]), 0.6)
    check(aggregate([1, 0.5, -1], [5, 5, 1]), 0.75)
    check(aggregate([1, 0.5], [1, 9], aggregation="size"), 0.55)


def test_the_headline_is_that_of_the_extractor_that_heads_were_trained_on(model, trainer):
    """Of the client's own, which it has after local training, or of the one received, as FedRep's."""
    assert fedecouple(model, trainer).headline == "post"
    assert fedecouple(model, trainer, head_features="global").headline == fedrep(model, trainer).headline == "pre"


def test_with_everything_off_it_is_fedrep_that_also_averages_heads(model, trainer, federation):
    """What a client does of it from a model of its own, and what the server does; FedRep's in place of both."""
    off = {"head_features": "global", "lam": 0.0, "mu": 0.0, "frozen_head_epochs": 0, "aggregation": "size"}
    method = fedecouple(model, trainer, head_epochs=3, **off)._replace(copies="none")
    rep = fedrep(model, trainer, head_epochs=3)
    data = client_data(federation.x, federation.y, client(federation.train, 2))

    @jax.jit
    def parts(key):
        received, own = model.init(KEY), model.init(OTHER_KEY)
        ours = method.local(now(key, 1), received, Client(own, jnp.array(True)), data)
        head, extractor, info, *_ = rep.local(now(key, 1), received["extractor"], own["head"], data)
        trained = {"extractor": extractor, "head": head}
        uploads = jax.tree.map(lambda *leaves: jnp.stack(leaves), trained, own)
        cohort = Cohort(jnp.arange(2), jnp.array([3.0, 5.0]), N, N)
        mean, _ = method.aggregate(now(key, 1), received, ours.client, uploads, cohort)
        theta, _ = rep.aggregate(now(key, 1), received["extractor"], head, uploads["extractor"], cohort)
        post = method.personal(*ours.trained)
        pre = method.personal(mean, ours.client)
        theirs = trained, trained, info, trained, theta, {"extractor": theta, "head": head}
        return (ours.client.model, ours.upload, ours.info, post, mean["extractor"], pre), theirs, mean, uploads

    found, expected, mean, uploads = parts(client_key(KEY, 1, 2))
    jax.tree.map(close, found, expected)
    jax.tree.map(lambda a, rows: close(a, np.average(rows, axis=0, weights=[3, 5])), mean["head"], uploads["head"])


def test_traffic_is_the_papers():
    """All parameters go up and down, of which there are this many."""
    mean = std = jnp.full(3, 0.5)
    for classes in (100, 10):
        model = build(MODELS["cnn3"](), (32, 32, 3), classes, init="torch", mean=mean, std=std)
        params = jax.eval_shape(model.init, KEY)
        assert count(params) == 106_400 + 129 * classes
        kilobytes = 2 * size(params) / 1024
        assert kilobytes == pytest.approx(2 * (415.6 + 0.504 * classes), rel=1e-4)
    shape = jax.ShapeDtypeStruct
    rows = Clients(shape((20, 600), jnp.int32), shape((20,), jnp.int32), shape((20, classes), jnp.float32))
    pool = shape((12000, 32, 32, 3), jnp.uint8), shape((12000,), jnp.int32)
    shapes = survey(Engine(fedecouple(model, Untrained()), 20), Federation(*pool, rows, None, rows, rows))[1]
    assert [count(shapes.up), count(shapes.down)] == [count(params)] * 2
    assert [size(shapes.up), size(shapes.down)] == [size(params)] * 2
    assert round(29 * kilobytes / 1000, 1) == 24.4
