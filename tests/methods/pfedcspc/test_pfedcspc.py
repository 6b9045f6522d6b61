"""pFedCSPC against rounds in plain loops, its limits, what each of its models is, and what it exchanges."""

import inspect
import zlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from fedjax_pfl import METHODS, Config, ConfigError, simulate
from fedjax_pfl import method as contract
from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import Run, round_keys
from fedjax_pfl.experiment.build import DataShape, make_engine
from fedjax_pfl.method import Cohort, PerClass
from fedjax_pfl.methods import loss_by_name
from fedjax_pfl.methods.fedasam import fedasam
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedavg_ft import fedavg_ft
from fedjax_pfl.methods.fedntd import fedntd
from fedjax_pfl.methods.fedprox import fedprox
from fedjax_pfl.methods.moon import moon
from fedjax_pfl.methods.pfedcspc import pfedcspc
from fedjax_pfl.methods.pfedcspc.corpus import Corpus, augment_prototypes
from fedjax_pfl.methods.pfedcspc.kmeans import kmeans, sample_means
from fedjax_pfl.methods.pfedcspc.state import Client, Upload
from fedjax_pfl.ops.prototypes import Prototypes
from fedjax_pfl.ops.training import Trainer, phase_key
from fedjax_pfl.ops.tree import count, size
from tests.conftest import CLASSES
from tests.play import cohorts
from tests.reference import (
    MLP,
    at,
    batches,
    client,
    client_key,
    held,
    linear,
    now,
    sgd,
    softmax_loss,
    to_numpy,
    train,
    weighted_mean,
)

N, ROUNDS, WIDTH, ROWS = 7, 4, 4, 64
# In this draw of SOME, round 0 knows class 0 alone, class 1 keeps an old prototype in round 3, client 1 comes in rounds
# 0, 2 and 3, and client 6 never.
KEY = jax.random.key(790)
EVERYONE, SOME = Participation(), Participation(0.2, 0.6, 0.3)
OFF = {"calibrate": False, "kappa": 0.0, "pmi": "off", "kp_weight": 0.0}

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)
same = np.testing.assert_array_equal


@pytest.fixture(scope="module")
def model(model_with_projection):
    return model_with_projection


@pytest.fixture(scope="module")
def trainer(trainer):
    return replace(trainer, weight_decay=0.01, lr_decay=0.9)


# --- Limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def play(federation):
    """method -> its engine, and its runs before the last round and after it."""

    def play(method):
        engine = Engine(method, N)
        rounds, start = jax.jit(engine.rounds), jax.jit(engine.init)(KEY, federation)
        last = rounds(KEY, start, at(0), at(ROUNDS - 1), jnp.array(True), federation)
        return engine, last, rounds(KEY, last, at(ROUNDS - 1), at(ROUNDS), jnp.array(True), federation)

    return play


class SameBatches(Trainer):
    """Draws for every phase what local training would draw."""

    def __call__(self, *args, phase, **options):
        return super().__call__(*args, phase="local", **options)


BASES = {
    "fedprox": partial(fedprox, mu=0.7),
    "moon": partial(moon, mu=0.7),
    "fedntd": partial(fedntd, beta=0.7),
    "fedasam": partial(fedasam, rho=0.7),
}


def test_without_its_modules_it_is_fedavg_bit_for_bit(play, model, trainer, federation):
    """What it trains after the last aggregation is FedAvg-FT, if that draws the same batches."""
    method, plain = pfedcspc(model, trainer, **OFF), fedavg(model, trainer)
    (engine, _, found), (other, last, expected) = play(method), play(plain)
    jax.tree.map(same, found.state.server.params, expected.state.server)
    jax.tree.map(same, (found.post, found.loss, found.traffic), (expected.post, expected.loss, expected.traffic))
    same(
        method.global_predict(found.state.server, federation.x),
        plain.global_predict(expected.state.server, federation.x),
    )
    same(
        method.predict(method.personal(method.broadcast(found.state.server), Client(None, None)), federation.x),
        plain.predict(plain.personal(expected.state.server, ()), federation.x),
    )
    assert not jax.tree.leaves((found.state.server[1:], found.state.clients))
    bytes_of = [survey(e, federation)[1].sent_bytes(found.traffic) for e in (engine, other)]
    assert bytes_of[0] == bytes_of[1]
    tuned = Engine(fedavg_ft(model, SameBatches(**vars(trainer)), finetune_epochs=trainer.epochs), N)
    jax.tree.map(same, found.post, jax.jit(tuned.pre)(KEY, at(ROUNDS - 1), last.state, federation))


@pytest.mark.parametrize("base", BASES)
def test_without_its_modules_a_client_does_what_it_does_in_the_base_bit_for_bit(base, model, trainer, federation):
    """In two rounds, from what it kept of the first; how a round is put together is the same as on FedAvg."""
    methods = pfedcspc(model, trainer, **OFF, base=base, mu=0.7), BASES[base](model, trainer)

    @jax.jit
    def both(key, t, row, states):
        updates = []
        for method, (server, own) in zip(methods, states, strict=True):
            data = client_data(federation.x, federation.y, row)
            update = method.local(contract.Round(key, t), method.broadcast(server), own, data)
            updates.append((update.client, update.upload, update.info, method.personal(*update.trained)))
        return updates

    states = jax.jit(lambda: [method.init(KEY, N) for method in methods])()
    for t in (2, 3):
        jax.tree.map(same, *map(jax.tree.leaves, states))
        updates = both(client_key(KEY, t, 2), at(t), client(federation.train, 2), states)
        jax.tree.map(same, *map(jax.tree.leaves, updates))
        states = [(server, own) for (server, _), (own, *_) in zip(states, updates, strict=True)]
    assert not jax.tree.leaves(states[0][0][1:])
    sent = [survey(Engine(method, N), federation)[1] for method in methods]
    ours, theirs = ([size(each.down), size(each.up), size(each.client)] for each in sent)
    assert ours == theirs


@pytest.mark.parametrize("base", BASES)
def test_without_a_coefficient_a_base_has_that_of_the_method_of_its_name(base, model, monkeypatch):
    loss, given = loss_by_name._LOSSES[base], []
    monkeypatch.setitem(loss_by_name._LOSSES, base, lambda *arguments: given.append(arguments))
    for coefficient in (None, 0.3):
        loss_by_name.loss_named(base, model, coefficient)
    assert given == [(model,), (model, 0.3)]
    _, of_loss, *_ = inspect.signature(loss).parameters.values()
    assert of_loss.default == inspect.signature(METHODS[base]).parameters[of_loss.name].default > 0


# --- Rounds in plain loops -------------------------------------------------------------------------------------------

SPECIFIED = {
    "kappa": 0.1,
    "eta": 0.1,
    "pmi": "eval",
    "tau_p": 0.5,
    "pmi_weight": "loss",
    "calibrate": True,
    "clusters": 3,
    "repeats": 5,
    "share": 0.8,
    "kmeans_steps": 20,
    "augmented": 5,
    "margin": 1.0,
    "tau_l": 0.5,
    "tau_g": 0.5,
    "edge": "abs",
    "base": "fedavg",
    "mu": 0.01,
    "encoder_ce": 0.0,
    "server_lr": 0.01,
    "server_lr_drops": (6, 41),
    "server_epochs": 100,
    "server_epochs_per_drop": 30,
    "server_batch_size": 100,
    "server_weight_decay": 1e-5,
}


class Case(NamedTuple):
    """A run, and whether its clients train on augmented images: here, negatives."""

    who: Participation
    augmented: bool
    diagnosed: bool
    options: dict

    @property
    def hyper(self):
        return SimpleNamespace(**{**SPECIFIED, **self.options})


SERVER = {"server_epochs": 5, "server_epochs_per_drop": 2, "server_batch_size": 8, "server_weight_decay": 0.1}
CASES = {
    "personal models in every round, some": Case(
        SOME,
        True,
        True,
        {
            "kappa": 0.4,
            "eta": 0.5,
            "pmi": "every",
            "tau_p": 0.05,
            "pmi_weight": "count",
            "encoder_ce": 0.6,
            "clusters": 2,
            "repeats": 2,
            "share": 0.6,
            "kmeans_steps": 5,
            "augmented": 3,
            "margin": 0.3,
            "tau_g": 0.7,
            "server_lr_drops": (1, 3),
            "server_lr": 0.2,
            **SERVER,
        },
    ),
    "personal models for evaluation, on FedProx, some": Case(
        SOME,
        False,
        False,
        {
            "kappa": 0.3,
            "eta": 0.3,
            "clusters": 1,
            "repeats": 1,
            "share": 1.0,
            "kmeans_steps": 1,
            "augmented": 0,
            "tau_l": 0.3,
            "edge": "smooth_l1",
            "base": "fedprox",
            "mu": 0.7,
            **SERVER,
        },
    ),
    "without calibration and personal models": Case(
        EVERYONE,
        False,
        False,
        {"kappa": 0.8, "pmi": "off", "calibrate": False, "clusters": 2, "repeats": 1, "edge": "squared"},
    ),
}


def encode(xp, theta, x):
    x = ((x / 255 - 0.45) / 0.3).reshape(len(x), -1)
    return xp.maximum(linear(theta["encoder"]["hidden_layer"], x), 0)


def project(xp, theta, f):
    return linear(theta["projection"]["out"], xp.maximum(linear(theta["projection"]["hidden"], f), 0))


class Net(MLP):
    """The tiny model with a projection head on one pool of samples; forward pass alone."""

    def __init__(self, x, y):
        self.x, self.y = np.asarray(x, np.float64), np.asarray(y)

    def extract(self, theta, rows):
        return project(np, theta, encode(np, theta, self.x[rows]))


def entropies(logits, y):
    return jax.nn.logsumexp(logits, axis=1) - logits[np.arange(len(y)), y]


def units(rows):
    return rows / jnp.sqrt(jnp.sum(rows**2, axis=1, keepdims=True) + 1e-12)


def mean_of(values, chosen):
    return jnp.sum(jnp.where(chosen, values, 0.0)) / jnp.maximum(jnp.sum(chosen.astype(jnp.float32)), 1.0)


class Terms(NamedTuple):
    """The numbers of the two losses, and which of EDGES counts; inputs of the programs below."""

    kappa: float
    eta: float
    mu: float
    encoder_ce: float
    tau_l: float
    tau_g: float
    margin: float
    edge: np.ndarray

    @classmethod
    def of(cls, hyper, **changed):
        numbers = {**vars(hyper), "mu": hyper.mu if hyper.base == "fedprox" else 0.0, **changed}
        edge = np.float32([name == hyper.edge for name in EDGES])
        return cls(*(np.float32(numbers[name]) for name in cls._fields[:-1]), edge)


EDGES = "abs", "squared", "smooth_l1"


def client_loss(w, terms, start, u, valid, x, y, real):
    """Eq. 18 on a batch of WIDTH places, of which some are ``real``."""
    f = encode(jnp, w["extractor"], x.astype(jnp.float32))
    total = mean_of(entropies(linear(w["head"], project(jnp, w["extractor"], f)), y), real)
    both = zip(jax.tree.leaves(w), jax.tree.leaves(start), strict=True)
    total += terms.mu / 2 * sum(jnp.sum((a - b) ** 2) for a, b in both)
    if "encoder_head" in w:
        total += terms.encoder_ce * mean_of(entropies(linear(w["encoder_head"], f), y), real)
    known, own = real & valid[y], u[y]
    number = jnp.maximum(jnp.sum(real.astype(jnp.int32)), 1)  # they stand first, and the last is followed by the first
    second, third = ((jnp.arange(WIDTH) + shift) % number for shift in (1, 2))
    powers = jnp.where(valid, jnp.exp(units(f) @ units(u).T / terms.tau_l), 0.0)
    shares = jnp.where(known, powers[np.arange(WIDTH), y], 1.0) / jnp.where(known, jnp.sum(powers, axis=1), 1.0)

    def cosines(p):
        return jnp.sum(units(p - p[second]) * units(p[third] - p[second]), axis=1)

    def distances(p):
        found = jnp.sqrt(jnp.sum((p - p[second]) ** 2, axis=1) + 1e-12)
        return found / jnp.maximum(mean_of(found, pairs), 1e-6)

    pairs = known & known[second] & (y != y[second])
    triples = pairs & known[third] & (y != y[third]) & (y[second] != y[third])
    gaps = jnp.abs(distances(f) - distances(own))
    edges = gaps, gaps * gaps, jnp.where(gaps < 1, gaps * gaps / 2, gaps - 0.5)
    angle = mean_of(jnp.abs(cosines(f) - cosines(own)), triples)
    edge = sum(chosen * mean_of(each, pairs) for chosen, each in zip(terms.edge, edges, strict=True))
    return total + terms.kappa * (mean_of(-jnp.log(shares), real) + angle + edge)


def server_loss(w, terms, u, y, whose, real, positive, negative, exists):
    """Eq. 17 on a batch of prototypes, of which some are ``real``."""
    theta = {"projection": w["projection"]}
    z = project(jnp, theta, u)
    total = mean_of(entropies(linear(w["head"], z), y), real)
    alike, together = y[:, None] == y, whose[:, None] == whose
    others = real & ~jnp.eye(len(y), dtype=bool)
    strength = jnp.where(alike ^ together, 1.0, 0.5) * jnp.exp(units(z) @ units(z).T / terms.tau_g)
    logs = jnp.log(strength) - jnp.log(jnp.sum(jnp.where(others, strength, 0.0), axis=1, keepdims=True))
    number = jnp.sum((alike & others).astype(jnp.float32), axis=1)
    pulls = jnp.where(number > 0, -jnp.sum(jnp.where(alike & others, logs, 0.0), axis=1) / jnp.maximum(number, 1), 0.0)
    contrast = mean_of(pulls, real)
    if positive is not None:
        near, far = (
            jnp.sum((z[:, None] - project(jnp, theta, points)) ** 2, axis=-1) for points in (positive, negative)
        )
        hinges = jnp.mean(jnp.maximum(near - far + terms.margin, 0.0), axis=1)
        contrast += mean_of(hinges, real & exists)
    return total + terms.eta * contrast


by_client, by_server = jax.jit(jax.value_and_grad(client_loss)), jax.jit(jax.grad(server_loss))


class Reference:
    """The parts of a round, on the pool of the federation."""

    def __init__(self, case, federation, trainer):
        self.hyper, self.trainer, self.federation = case.hyper, trainer, federation
        self.x = np.asarray(255 - federation.x if case.augmented else federation.x)
        self.y, self.rows = np.asarray(federation.y), [held(federation.train, i) for i in range(N)]
        hyper, self.terms = self.hyper, Terms.of(self.hyper)

        @jax.jit
        def cluster(key, f, y, mask):
            key_centres, key_draws = jax.random.split(phase_key(key, "prototypes"))
            options = {"classes": CLASSES, "clusters": hyper.clusters, "steps": hyper.kmeans_steps}
            groups = kmeans(key_centres, f, y, mask, **options)
            return sample_means(key_draws, f, groups, repeats=hyper.repeats, share=hyper.share), groups.size > 0

        @jax.jit
        def augment(key, corpus, rows):
            return augment_prototypes(key, corpus, rows, pairs=hyper.augmented)

        self.cluster, self.augment = cluster, augment

    def adapted(self, key, t, start, known, i):
        """Client i's model after local training from ``start``, and the mean loss."""
        losses, sizes = [], []

        def gradient(w, rows):
            padded, real = np.resize(rows, WIDTH), np.arange(WIDTH) < len(rows)
            # What fills a batch up counts for nothing: here, one more of its samples.
            value, found = by_client(w, self.terms, start, *known, self.x[padded], self.y[padded], real)
            losses.append(float(value))
            sizes.append(len(rows))
            return to_numpy(found)

        w = train(start, gradient, key, t, self.rows[i], self.trainer)
        return w, np.average(losses, weights=sizes)

    def prototypes(self, key, w, i):
        """Class -> U_ki, [prototypes, dim], of the images as they are."""
        rows = np.zeros(self.federation.train.index.shape[1], int)
        rows[: len(self.rows[i])] = self.rows[i]
        f = encode(np, w["extractor"], np.asarray(self.federation.x, np.float64)[rows])
        mask = np.float32(np.arange(len(rows)) < len(self.rows[i]))
        means, exists = to_numpy(self.cluster(key, jnp.float32(f), jnp.int32(self.y[rows]), mask))
        found = {c: means[c][exists[c] > 0].reshape(-1, f.shape[1]) for c in range(CLASSES)}
        return {c: points for c, points in found.items() if len(points)}

    def initialization(self, prototypes, models):
        """Client -> its weights p_k^{k'}, in the order of ``models``, for all that ever sent ``prototypes``."""
        found = {}
        for k, u in prototypes.items():
            counts = [np.sum(self.y[self.rows[k]] == c) for c in u]
            emphasis = {"loss": [len(points) for points in u.values()], "class": np.ones(len(u)), "count": counts}
            losses = []
            for w in models:
                of_class = [entropy_under(w, points, np.full(len(points), c)) for c, points in u.items()]
                losses.append(np.average(of_class, weights=emphasis[self.hyper.pmi_weight]))
            found[k] = softmax(-np.array(losses) / self.hyper.tau_p)
        return found

    def batch_of(self, key, corpus, positions):
        """Prototypes in a step of the server, with their augmented samples, as `server_loss` takes them."""
        width = min(self.hyper.server_batch_size, int(corpus.count))
        rows, real = np.zeros(width, int), np.arange(width) < len(positions)
        rows[: len(positions)] = positions
        drawn = self.augment(key, corpus, jnp.int32(rows)) if self.hyper.augmented else (None, None, np.ones(width))
        positive, negative, exists = drawn
        return *(leaf[rows] for leaf in (corpus.u, corpus.y, corpus.client)), real, positive, negative, exists > 0

    def calibrated(self, key, t, w, uploads):
        """The averaged model with H and F retrained."""
        hyper, corpus, pairs = self.hyper, *corpus_of(uploads)
        heads = {"projection": w["extractor"]["projection"], "head": w["head"]}

        def step(key, positions):
            batch = self.batch_of(key, corpus, positions)
            return lambda heads: to_numpy(by_server(heads, self.terms, *batch))

        for number in range(-(-hyper.server_epochs // hyper.server_epochs_per_drop)):
            epochs = min(hyper.server_epochs_per_drop, hyper.server_epochs - number * hyper.server_epochs_per_drop)
            key_number, steps = jax.random.fold_in(key, number), []
            order = batches(key_number, pairs, epochs=epochs, batch_size=hyper.server_batch_size)
            for epoch in range(epochs):
                key_local = jax.random.fold_in(key_number, np.uint32(zlib.crc32(b"local")))
                key_steps = jax.random.split(jax.random.fold_in(key_local, epoch))[1]
                for j in range(-(-pairs // hyper.server_batch_size)):
                    steps.append(step(jax.random.fold_in(key_steps, j), next(order)))
            rate = hyper.server_lr / 10 ** (sum(t >= drop for drop in hyper.server_lr_drops) + number)
            heads = sgd(heads, steps, lr=rate, weight_decay=hyper.server_weight_decay)
        return {**w, "extractor": {**w["extractor"], "projection": heads["projection"]}, "head": heads["head"]}


def entropy_under(w, points, y):
    """The mean cross-entropy of prototypes under a model's H and F."""
    return softmax_loss(linear(w["head"], project(np, w["extractor"], points)), y)[0]


def corpus_of(uploads):
    """All prototypes, by client, class and place, filled up to ROWS; and their number."""
    u, y, whose, starts, sizes = [], [], [], [], []
    for k in sorted(uploads):
        of_client, first = uploads[k][1], len(u)
        number = sum(map(len, of_client.values()))
        for c, points in of_client.items():
            begin = len(u)
            u += list(points)
            y += [c] * len(points)
            whose += [k] * len(points)
            starts += [(begin, first)] * len(points)
            sizes += [(len(points), number)] * len(points)
    (class_start, client_start), (class_size, client_size) = np.transpose(starts), np.transpose(sizes)
    rows = y, whose, class_start, class_size, client_start, client_size
    y, whose, *rest = (jnp.int32(np.pad(row, (0, ROWS - len(row)))) for row in rows)
    points = jnp.float32(np.pad(u, ((0, ROWS - len(u)), (0, 0))))
    return Corpus(points, y, whose, at(len(u)), *rest), len(u)


def mean_over_holders(old, valid, of_clients):
    """Eqs. 14, 16; ``of_clients``: for each client, class -> points. A class that nobody holds keeps its old mean."""
    mean, valid = np.array(old, np.float64), np.array(valid)
    for c in range(CLASSES):
        means = [points[c].mean(axis=0) for points in of_clients if c in points]
        if means:
            mean[c], valid[c] = np.mean(means, axis=0), True
    return mean, valid


class Round(NamedTuple):
    """A round of the engine and of the reference."""

    t: int
    before: Run
    after: Run
    present: list
    selected: int
    starts: dict  # client -> what it trained from
    uploads: dict  # client -> (w, prototypes)
    loss: float
    weights: dict  # client -> weights of its initial model, if it ever sent prototypes
    averaged: dict
    params: dict


class Both(NamedTuple):
    case: Case
    engine: Engine
    reference: Reference
    rounds: list


def with_negatives(method):
    """Clients train on negatives of their images, the originals at hand."""

    def local(now, view, client, data):
        return method.local(now, view, client, data._replace(x=255 - data.x, original=data))

    return method._replace(local=local)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def both(request, model, trainer, federation):
    case = request.param
    terms = ("gradient_ratio_kappa", "gradient_ratio_encoder_ce") if case.diagnosed else ()
    method = pfedcspc(model, replace(trainer, diagnose=case.diagnosed), **case.options)
    engine = Engine(with_negatives(method) if case.augmented else method, N, case.who, diagnostics=terms)
    reference, hyper = Reference(case, federation, trainer), case.hyper
    rounds, one_round = [], jax.jit(engine.round)
    # Without the scores of models that nobody has trained yet.
    start = jax.jit(replace(engine, participation=EVERYONE).init)(KEY, federation)
    # Nothing may be read from the prototypes of classes that have none.
    nines = jnp.full((CLASSES, model.projection.width), 9.0, jnp.float32)
    prototypes = start.state.server.prototypes._replace(mean=nines)
    after = start._replace(state=start.state._replace(server=start.state.server._replace(prototypes=prototypes)))
    newest = {}
    for t, (present, selected) in enumerate(cohorts(engine, KEY, federation, ROUNDS)):
        before, after = after, one_round(KEY, at(t), after, jnp.array(True), federation)
        params, known = to_numpy(before.state.server.params), tuple(before.state.server.prototypes)
        starts, uploads, losses = {}, {}, []
        for i in present:
            starts[i] = params
            if hyper.pmi == "every":
                starts[i] = with_encoder(params, client(before.state.server.known.encoders, i))
            key = client_key(KEY, t, i)
            w, loss = reference.adapted(key, t, starts[i], known, i)
            uploads[i] = w, reference.prototypes(key, w, i)
            losses.append(loss)
        averaged = weighted_mean([w for w, _ in uploads.values()], [len(reference.rows[i]) for i in uploads])
        key = round_keys(KEY, at(t)).aggregate
        params = reference.calibrated(key, t, averaged, uploads) if hyper.calibrate else averaged
        newest |= {i: u for i, (_, u) in uploads.items()}
        weights = {} if hyper.pmi == "off" else reference.initialization(newest, [w for w, _ in uploads.values()])
        rounds.append(
            Round(t, before, after, present, selected, starts, uploads, np.mean(losses), weights, averaged, params)
        )
    return Both(case, engine, reference, rounds)


def with_encoder(w, encoder):
    return {**w, "extractor": {**w["extractor"], "encoder": to_numpy(encoder)}}


def test_the_global_model_is_the_calibrated_mean(both):
    for each in both.rounds:
        jax.tree.map(near, each.after.state.server.params, each.params)
        near(each.after.loss, each.loss)


def test_prototypes_and_exemplars_are_means_over_the_holders(both):
    """Exemplars in the space of the calibrated projection, which is not that of the averaged one.

    That of a class that nobody holds is where this projection has the prototype that the class keeps.
    """
    for each in both.rounds:
        old, new = each.before.state.server, each.after.state.server
        of_clients = [u for _, u in each.uploads.values()]
        mean, valid = mean_over_holders(*old.prototypes, of_clients)
        near(new.prototypes.mean, mean)
        for theta, agrees in (
            (each.params["extractor"], True),
            (each.averaged["extractor"], not both.case.hyper.calibrate),
        ):
            projected = [{c: project(np, theta, points) for c, points in u.items()} for u in of_clients]
            expected, _ = mean_over_holders(project(np, theta, mean), valid, projected)
            assert np.allclose(new.exemplars.mean, expected, rtol=2e-4, atol=1e-5) == agrees
        same(new.prototypes.valid, valid)
        same(new.exemplars.valid, valid)


def test_encoders_are_combined_anew_for_all_that_ever_took_part(both):
    """By their newest prototypes, from the participants' encoders; the others have the averaged one."""
    for each in both.rounds:
        if both.case.hyper.pmi == "off":
            assert each.after.state.server.known is None
            continue
        encoders = [w["extractor"]["encoder"] for w, _ in each.uploads.values()]
        for i in range(N):
            expected = each.averaged["extractor"]["encoder"]
            if i in each.weights:
                expected = weighted_mean(encoders, each.weights[i])
            jax.tree.map(near, client(each.after.state.server.known.encoders, i), expected)


def test_a_client_keeps_what_it_trained_from_and_nothing_where_training_starts_from_the_global_model(both):
    for each in both.rounds:
        if both.case.hyper.pmi != "every":
            assert not jax.tree.leaves(each.after.state.clients)
            continue
        for i in range(N):
            server, clients = each.before.state
            rows = server.known.encoders if i in each.present else clients.inbox
            jax.tree.map(same, client(each.after.state.clients.inbox, i), client(rows, i))


def test_the_server_says_how_much_a_participant_has_of_its_own(both):
    for each in both.rounds:
        own = [(p[each.present.index(i)], 1 / np.sum(p**2)) for i, p in each.weights.items() if i in each.present]
        expected = dict(zip(("p_kk", "effective_clients"), np.mean(own, axis=0), strict=True)) if own else {}
        said = both.engine.method.diagnose(each.after.state.server)
        assert said.keys() == expected.keys() | ({"gradient_ratio_eta"} if both.case.diagnosed else set())
        for name, value in expected.items():
            near(said[name], value)


def test_scores_after_training_are_those_of_the_uploaded_model(both, federation):
    net = Net(federation.x, federation.y)
    for each in both.rounds:
        for i, (w, _) in each.uploads.items():
            near([float(leaf[i]) for leaf in each.after.post.test], net.scores(w, held(federation.test, i)))


def test_before_training_a_client_has_its_encoder_under_the_newest_heads(both, federation):
    """Adapted first, where the personal initial model is for evaluation only."""
    hyper, end, net = both.case.hyper, both.rounds[-1].after, Net(federation.x, federation.y)
    params, known = to_numpy(end.state.server.params), tuple(end.state.server.prototypes)

    @jax.jit
    def scores(t, state):
        return both.engine.pre(KEY, t, both.engine.calibrated(KEY, t, state, federation), federation)

    pre = scores(at(ROUNDS), end.state)
    for i in range(N):
        w = params if hyper.pmi == "off" else with_encoder(params, client(end.state.server.known.encoders, i))
        if hyper.pmi == "eval":
            w, _ = both.reference.adapted(client_key(KEY, ROUNDS, i), ROUNDS, w, known, i)
        near([float(leaf[i]) for leaf in pre.test], net.scores(w, held(federation.test, i)))


def test_round_zero_starts_from_one_common_model(both, model):
    params = model.init(jax.random.split(KEY, 3)[0])
    server, clients = both.rounds[0].before.state
    second = server.params.get("encoder_head")
    assert (second is not None) == (both.case.hyper.encoder_ce > 0)
    if second is not None:  # as PyTorch draws a linear layer of eight inputs
        drawn = np.concatenate([second["kernel"], second["bias"][None]])
        assert drawn.shape == (8 + 1, CLASSES)
        assert len(np.unique(drawn)) == drawn.size
        assert 0.5 / np.sqrt(8) < np.abs(drawn).max() < 1 / np.sqrt(8)
        params = {**params, "encoder_head": second}
    jax.tree.map(same, server.params, params)
    assert not server.prototypes.valid.any()
    assert not server.exemplars.valid.any()
    for start in both.rounds[0].starts.values():
        jax.tree.map(near, start, params)
    personal = ([server.known.encoders] if server.known else []) + ([clients.inbox] if clients.inbox else [])
    for rows in personal:
        jax.tree.map(lambda leaf, one: same(leaf, [one] * N), rows, params["extractor"]["encoder"])


def test_calibrated_heads_know_the_prototypes_better_than_averaged_ones(both):
    for each in both.rounds:
        u = [(points, c) for _, of_client in each.uploads.values() for c, points in of_client.items()]
        y = np.concatenate([np.full(len(points), c) for points, c in u])
        points = np.concatenate([points for points, _ in u])
        before, after = (entropy_under(w, points, y) for w in (each.averaged, to_numpy(each.after.state.server.params)))
        assert (after < before - 1e-4) == both.case.hyper.calibrate


def test_some_rounds_lack_clients_and_classes(both, federation):
    """Otherwise the comparisons above would say nothing of drop-outs, kept prototypes and kept encoders."""
    cohorts = [each.present for each in both.rounds]
    if both.case.who == EVERYONE:
        assert all(len(present) == N for present in cohorts)
        return
    counts = np.asarray(federation.train.class_counts)
    assert any(each.selected > len(each.present) for each in both.rounds)
    assert any(present != sorted(present) for present in cohorts)
    assert [1 in present for present in cohorts] == [True, False, True, True], "a kept encoder"
    seen = [counts[present].sum(axis=0) > 0 for present in cohorts]
    valid = [np.asarray(each.before.state.server.prototypes.valid) for each in both.rounds]
    assert any(np.any(old & ~new) for old, new in zip(valid, seen, strict=True)), "a kept prototype"
    assert any(np.any(~old & new) for old, new in zip(valid[1:], seen[1:], strict=True)), "a late prototype"
    assert valid[2].all(), "triples of three classes"
    assert 2 in cohorts[2], "and a client that holds them"


def norm_of(tree):
    return np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def test_it_records_how_strongly_each_term_pulls(both):
    """Where local training starts, as means over the participants, and where that of the server starts; on a batch."""
    hyper, reference, each = both.case.hyper, both.reference, both.rounds[-1]
    if not both.case.diagnosed:
        assert not each.after.diagnostics
        return
    server = each.before.state.server

    def pulls(gradient, *names):
        """batch -> ||grad of the loss with a term - without|| / ||without||; the loss is linear in each coefficient."""
        none = {"kappa": 0.0, "encoder_ce": 0.0, "eta": 0.0}
        terms = [Terms.of(hyper, **{**none, **one}) for one in ({}, *({name: getattr(hyper, name)} for name in names))]

        def shares(w, *batch):
            without, *others = (to_numpy(gradient(w, each, *batch)) for each in terms)
            return [norm_of(jax.tree.map(np.subtract, other, without)) / norm_of(without) for other in others]

        return shares

    names, shares = ("kappa", "encoder_ce"), []
    of_clients = pulls(lambda *arguments: by_client(*arguments)[1], *names)
    for i in each.present:
        order = batches(client_key(KEY, each.t, i), len(reference.rows[i]), epochs=1, batch_size=4, phase="diagnostics")
        rows = reference.rows[i][next(order)]
        padded, real = np.resize(rows, WIDTH), np.arange(WIDTH) < len(rows)
        start = each.starts[i]
        shares.append(of_clients(start, start, *server.prototypes, reference.x[padded], reference.y[padded], real))
    expected = np.mean(shares, axis=0)
    assert expected.min() > 1e-3
    found = [each.after.diagnostics[f"gradient_ratio_{name}"] for name in names]
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    key, (corpus, number) = round_keys(KEY, at(each.t)).aggregate, corpus_of(each.uploads)
    options = {"epochs": 1, "batch_size": hyper.server_batch_size}
    positions = next(batches(key, number, **options, phase="diagnostics"))
    key_epoch = jax.random.fold_in(jax.random.fold_in(key, np.uint32(zlib.crc32(b"diagnostics"))), 0)
    batch = reference.batch_of(jax.random.fold_in(jax.random.split(key_epoch)[1], 0), corpus, positions)
    heads = {"projection": each.averaged["extractor"]["projection"], "head": each.averaged["head"]}
    found = both.engine.method.diagnose(each.after.state.server)["gradient_ratio_eta"]
    np.testing.assert_allclose(found, pulls(by_server, "eta")(heads, *batch)[0], rtol=1e-3)


def test_bytes_are_a_hand_count(both, federation):
    """One encoder goes down, the client's own or the global one; class rows count where there is a prototype."""
    hyper, shapes = both.case.hyper, survey(both.engine, federation)[1]
    encoder, projection, head, dim = 16 * 8 + 8, 8 * 8 + 8 + 8 * 6 + 6, 6 * 3 + 3, 8
    parameters = encoder + projection + head + (8 * 3 + 3 if hyper.encoder_ce else 0)
    assert count(shapes.down) == parameters + CLASSES * (dim + 1)
    places = hyper.clusters * hyper.repeats
    assert count(shapes.up) == parameters + CLASSES * (places * dim + hyper.clusters + 1)
    held_as = 4 if hyper.pmi_weight == "count" else 1  # samples per class, or a flag
    classes, total = np.count_nonzero(federation.train.class_counts, axis=1), 0
    for each in both.rounds:
        known = int(each.before.state.server.prototypes.valid.sum())
        total += each.selected * (4 * (parameters + known * dim) + CLASSES)
        for i in each.present:
            total += 4 * parameters + CLASSES * held_as + classes[i] * (4 * places * dim + hyper.clusters)
    traffic = both.rounds[-1].after.traffic
    assert shapes.sent_bytes(traffic) == total < shapes.dense_bytes(traffic)


@pytest.mark.parametrize(
    ("module", "up", "down"),
    [
        ({}, False, False),
        ({"kappa": 0.1}, True, True),
        ({"calibrate": True}, True, False),
        ({"kp_weight": 0.5}, True, False),
        ({"pmi": "every"}, True, False),
        ({"pmi": "eval"}, True, False),
    ],
    ids=["none", "PTA", "CA", "KP", "PMI", "PMI for evaluation"],
)
def test_prototypes_go_up_for_any_module_and_down_for_the_alignment_alone(module, up, down, model, trainer, federation):
    shapes = survey(Engine(pfedcspc(model, trainer, **{**OFF, **module}), N), federation)[1]
    assert (shapes.upload.prototypes is not None, shapes.view.prototypes is not None) == (up, down)


# --- The server ------------------------------------------------------------------------------------------------------

IDS, ROW_WEIGHTS = (4, 7, 0, 6, 7), (12.0, 0.0, 5.0, 8.0, 0.0)  # the second and the last row are absent
PRESENT = np.array(ROW_WEIGHTS) > 0
# Groups with samples of classes 0, 1, 2, of two each; nobody holds class 1.
EXISTS = np.array(
    [
        [[1, 1], [0, 0], [1, 0]],
        [[0, 0], [0, 0], [0, 0]],
        [[1, 0], [0, 0], [0, 0]],
        [[1, 1], [0, 0], [1, 1]],
        [[0, 0], [0, 0], [0, 0]],
    ]
)
REPEATS = 2


@pytest.fixture(scope="module")
def aggregate(model, trainer):
    """(u, exists, held, tau_p, pmi_weight) -> uploads, and the server; row k's encoder has a bias of 1 at k, else 0."""
    method = partial(pfedcspc, model, trainer, calibrate=False, clusters=2, repeats=REPEATS)

    @partial(jax.jit, static_argnames="pmi_weight")
    def aggregate(uploads, tau_p, server, pmi_weight):
        cohort = Cohort(jnp.array(IDS), jnp.array(ROW_WEIGHTS), N, N)
        return method(tau_p=tau_p, pmi_weight=pmi_weight).aggregate(now(KEY, 1), server, (), uploads, cohort)[0]

    params = jax.jit(jax.vmap(model.init))(jax.random.split(jax.random.key(3), len(IDS)))
    params = jax.tree.map(lambda leaf: 3 * np.asarray(leaf), params)
    bias = np.eye(len(IDS), model.projection.width, dtype=np.float32)
    params["extractor"]["encoder"] = jax.tree.map(np.zeros_like, params["extractor"]["encoder"])
    params["extractor"]["encoder"]["hidden_layer"]["bias"] = bias
    params = jax.tree.map(lambda leaf: leaf * PRESENT.reshape(-1, *[1] * (leaf.ndim - 1)).astype(leaf.dtype), params)
    old = jax.tree.map(np.asarray, jax.jit(lambda: method().init(KEY, N)[0])())
    old = old._replace(prototypes=Prototypes(old.prototypes.mean + 5, np.array([True, True, False])))

    def call(u, exists, held, tau_p=0.5, pmi_weight="loss"):
        uploads = Upload(params, PerClass(np.asarray(held), (np.float32(u), np.asarray(exists, bool))))
        return uploads, aggregate(uploads, np.float32(tau_p), old, pmi_weight)

    return call


@pytest.fixture(scope="module")
def uploaded(model):
    """Prototypes of EXISTS."""
    u = np.random.default_rng(4).normal(size=(*EXISTS.shape, REPEATS, model.projection.width))
    return np.where(EXISTS[..., None, None], u, 0)


def encoder_weights(server):
    """The weight of each row's encoder, for all N clients; no encoder but these is in the sum."""
    same(server.known.encoders["hidden_layer"]["kernel"], 0)
    return np.asarray(server.known.encoders["hidden_layer"]["bias"])[:, : len(IDS)]


# What the prototypes of a class count for, [rows, classes]: what the client holds differs from what it sends.
SAMPLES = np.where(EXISTS.any(axis=2), [[9, 0, 1], [0, 0, 0], [4, 0, 0], [2, 0, 30], [0, 0, 0]], 0)
EMPHASIS = {"loss": EXISTS.sum(axis=2), "class": EXISTS.any(axis=2), "count": SAMPLES}


@pytest.mark.parametrize("pmi_weight", EMPHASIS)
def test_an_initial_model_favours_the_heads_that_know_the_clients_prototypes(aggregate, uploaded, pmi_weight):
    """Weights add up to 1 over the participants, the lowest loss has the largest, and tau_p says by how much."""
    held = SAMPLES.astype(np.float32) if pmi_weight == "count" else EXISTS.any(axis=2)
    weights, rows = {}, np.array(IDS)[PRESENT]
    for tau_p in (0.01, 0.5, 1e4):
        uploads, server = aggregate(uploaded, EXISTS, held, tau_p, pmi_weight)
        weights[tau_p] = encoder_weights(server)[rows]
        assert np.all(weights[tau_p] >= 0)
        near(weights[tau_p].sum(axis=1), 1)
        same(weights[tau_p][:, ~PRESENT], 0)
    losses = np.empty((len(IDS), len(IDS)))
    for k, other in np.argwhere(np.outer(PRESENT, PRESENT)):
        w, of_class = client(to_numpy(uploads.params), other), np.zeros(CLASSES)
        for c in np.flatnonzero(EXISTS[k].any(axis=1)):
            points = uploaded[k, c][EXISTS[k, c] > 0].reshape(-1, uploaded.shape[-1])
            of_class[c] = entropy_under(w, points, np.full(len(points), c))
        losses[k, other] = np.average(of_class, weights=EMPHASIS[pmi_weight][k])
    losses = losses[PRESENT][:, PRESENT]
    order = np.argsort(losses, axis=1)
    assert len(set(order[:, 0])) > 1, "not one client whose heads are best for all"
    same(np.argsort(-weights[0.5][:, PRESENT], axis=1), order)
    near(weights[0.5][:, PRESENT], softmax(-losses / 0.5, axis=1))
    assert weights[0.01].max(axis=1).min() > 0.99
    np.testing.assert_allclose(weights[1e4][:, PRESENT], 1 / 3, atol=1e-3)


def test_clients_that_never_took_part_have_the_averaged_encoder(aggregate, uploaded):
    server = aggregate(uploaded, EXISTS, EXISTS.any(axis=2))[1]
    others = np.setdiff1d(np.arange(N), np.array(IDS)[PRESENT])
    assert len(others) == N - PRESENT.sum()
    near(encoder_weights(server)[others], [np.array(ROW_WEIGHTS) / np.sum(ROW_WEIGHTS)] * len(others))
    assert not server.known.valid[others].any()


def test_a_class_that_nobody_holds_keeps_its_prototype_and_nothing_else_is_read(aggregate, uploaded, model):
    held = EXISTS.any(axis=2)
    _, server = aggregate(uploaded, EXISTS, held)
    same(server.prototypes.mean[1], 5)
    same(server.prototypes.valid, True)
    same(server.exemplars.valid, True)
    near(
        server.exemplars.mean[1],
        project(np, to_numpy(server.params)["extractor"], np.full(model.projection.width, 5.0)),
    )
    near(server.prototypes.mean[2], np.mean([uploaded[0, 2, 0].mean(axis=0), uploaded[3, 2].mean(axis=(0, 1))], axis=0))
    # Rows that are not sent, and groups without samples.
    junk = np.where(EXISTS[..., None, None], uploaded, 50.0)
    claimed = np.where(held[..., None], EXISTS, 1)
    _, found = aggregate(junk, claimed, held)
    jax.tree.map(same, *(each._replace(known=each.known._replace(u=None)) for each in (found, server)))


NORMS = {
    "minmax": lambda row: (row - row.min()) / (row.max() - row.min() + 1e-8),
    "softmax": softmax,
    "none": lambda row: row,
}


@pytest.mark.parametrize("known", [(True, True, True), (True, False, True), (False, False, False)])
def test_the_global_model_predicts_by_logits_and_exemplars(known, model, trainer, federation):
    """Classes without an exemplar are as far as the farthest; before any round all are alike."""
    method = partial(pfedcspc, model, trainer)
    server, _ = method().init(KEY, N)
    x, w = federation.x[:12], to_numpy(server.params)
    net = Net(x, np.zeros(12, int))
    z, logits = net.features(w, np.arange(12)), net.logits(w, np.arange(12))
    means = np.random.default_rng(5).normal(size=(CLASSES, model.dim))
    means[1] = -z.mean(axis=0)  # were it known, it would be the farthest
    server = server._replace(exemplars=Prototypes(jnp.float32(means), jnp.array(known)))
    similarity = np.array([[row @ e / np.linalg.norm(row) / np.linalg.norm(e) for e in means] for row in z])
    for row in similarity:
        row[~np.array(known)] = row[list(known)].min() if any(known) else 0.0
    found = jax.jit(
        lambda server: {name: method(kp_norm=name, kp_weight=0.3).global_predict(server, x) for name in NORMS}
    )(server)
    for name, norm in NORMS.items():
        near(found[name], [0.7 * norm(a) + 0.3 * norm(b) for a, b in zip(logits, similarity, strict=True)])
    near(method(kp_weight=0.0).global_predict(server, x), logits)


# --- What it cannot run on -------------------------------------------------------------------------------------------


def test_it_needs_a_projection_head(model_with_maps, trainer):
    with pytest.raises(ValueError, match="projection head"):
        pfedcspc(model_with_maps, trainer)
    config = Config(data={"source": "digits"}, model={"name": "mlp"}, method={"name": "pfedcspc"})
    with pytest.raises(ConfigError, match="projection head") as caught:
        simulate(config)
    assert caught.value.field == "method.name"


def test_a_coefficient_needs_a_base_that_has_one(model, trainer):
    with pytest.raises(ValueError, match='mu must not be given with base "fedavg"'):
        pfedcspc(model, trainer, mu=0.0)
    options = {"name": "pfedcspc", "mu": 5.0}
    config = Config(data={"source": "digits"}, model={"name": "cnn_proj"}, method=options)
    with pytest.raises(ConfigError, match="mu must not be given") as caught:
        make_engine(config, DataShape("some", (28, 28, 1), 2, None))
    assert caught.value.field == "method.name"


def test_a_config_gives_the_servers_rounds_as_a_list():
    table = {"name": "pfedcspc", "server_lr_drops": [1, 2]}
    config = Config(data={"source": "digits"}, model={"name": "cnn_proj"}, method=table)
    assert make_engine(config, DataShape("some", (28, 28, 1), 2, None)).method.headline == "pre"


def test_the_headline_is_the_point_after_local_adaptation(model, trainer):
    found = {pmi: pfedcspc(model, trainer, pmi=pmi).headline for pmi in ("eval", "every", "off")}
    assert found == {"eval": "pre", "every": "post", "off": "post"}
