"""FedCPD against rounds in NumPy and in plain loops, its limits, its teacher, and what it exchanges."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from fedjax_pfl import Config, ConfigError, simulate
from fedjax_pfl.data.augment import crop_flip
from fedjax_pfl.data.federated import Augmentation, client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import Run
from fedjax_pfl.method import Cohort, TrainInfo
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedcpd import fedcpd
from fedjax_pfl.methods.fedcpd.feature_distillation import feature_distillation
from fedjax_pfl.methods.fedrep import fedrep
from fedjax_pfl.ops.losses import cross_entropy
from fedjax_pfl.ops.prototypes import Prototypes, centre_loss, prototype_contrast
from fedjax_pfl.ops.training import Trainer
from fedjax_pfl.ops.tree import count, size
from tests.conftest import CLASSES, TRAIN_SIZES
from tests.play import cohorts, unscored
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

N, ROUNDS = 7, 5
# In this draw of SOME, class 2 has no prototype before round 1, classes 0 and 1 keep an old one in round 2, and three
# clients take part more than once.
KEY = jax.random.key(15)
EVERYONE, SOME = Participation(), Participation(0.2, 0.6, 0.3)
TAU, HEAD_EPOCHS = 0.4, 3
OFF = {"alpha": 0.0, "beta": 0.0, "gamma": 0.0}

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)
same = np.testing.assert_array_equal


@pytest.fixture(scope="module")
def trainer(trainer):
    return replace(trainer, weight_decay=0.01, lr_decay=0.9)


@pytest.fixture(scope="module")
def play(federation):
    """(method, who) -> the engine, and the runs before round 0 and after the last."""

    def play(method, who):
        engine = Engine(method, N, who)
        # Without the scores of models that nobody has trained yet.
        start = jax.jit(Engine(method, N).init)(KEY, federation)
        return engine, start, jax.jit(engine.rounds)(KEY, start, at(0), at(ROUNDS), jnp.array(True), federation)

    return play


# --- Limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["fedrep", "fedavg"])
def test_without_its_terms_it_is_its_base_bit_for_bit(base, model, trainer, federation):
    """Its parts, which the engine puts together without asking for their names."""
    method = fedcpd(model, trainer, **OFF, head_epochs=HEAD_EPOCHS, base=base)
    methods = method, fedrep(model, trainer, head_epochs=HEAD_EPOCHS) if base == "fedrep" else fedavg(model, trainer)
    data, x = client_data(federation.x, federation.y, client(federation.train, 2)), federation.x

    @jax.jit
    def parts(key):
        found = []
        for method in methods:
            server, own = method.init(KEY, N)
            view = method.broadcast(server)
            update = method.local(now(key, 2), view, own, data)
            uploads = jax.tree.map(lambda up, down: jnp.stack([up, down]), update.upload, view)
            cohort = Cohort(jnp.arange(2), jnp.array([3.0, 5.0]), N, N)
            after, new = method.aggregate(now(key, 2), server, update.client, uploads, cohort)
            post, params = method.personal(*update.trained), method.personal(method.broadcast(after), new)
            logits = method.predict(params, x), method.global_predict(after, x) if method.global_predict else ()
            found.append(((own, new), view, update.upload, update.info, post, after, logits))
        return found

    found, expected = parts(client_key(KEY, 2, 2))
    for ours, theirs in zip(found, expected, strict=True):
        jax.tree.map(same, jax.tree.leaves(ours), jax.tree.leaves(theirs))
    (_, new), view, upload, *_, after, logits = found
    assert (after.prototypes, view.per_class, new.teacher) == (None, None, None)
    assert (new.head is None) == (base == "fedavg")
    assert not np.allclose(*(tree.params["extractor"]["hidden_layer"]["bias"] for tree in (view, upload)))
    if base == "fedavg":
        same(*logits)
    sent = [survey(Engine(method, N), federation)[1] for method in methods]
    ours, theirs = ([size(each.down), size(each.up), size(each.client)] for each in sent)
    assert ours == theirs


def test_only_on_fedavg_there_is_a_global_model(model, trainer):
    assert fedcpd(model, trainer, **OFF).global_predict is None


# --- Rounds in NumPy, without distillation ---------------------------------------------------------------------------


class Server(NamedTuple):
    params: dict
    prototypes: np.ndarray
    valid: np.ndarray


class Case(NamedTuple):
    who: Participation
    base: str
    reduction: str
    alpha: float
    beta: float


CASES = {
    "some, on FedRep, means": Case(SOME, "fedrep", "mse", 1.5, 0.7),
    "everyone, on FedAvg, sums": Case(EVERYONE, "fedavg", "mean_l2", 0.2, 0.7),
}


def alignment_gradient(z, y, server, reduction):
    """By z, of the mean distance to the own class's prototype."""
    apart = (z - server.prototypes[y]) * server.valid[y][:, None]
    return 2 * apart / len(z) / (z.shape[1] if reduction == "mse" else 1)


def contrast_gradient(z, y, server):
    """By z, of -log softmax of the cosines: first by the cosines, then by their argument."""
    held = np.flatnonzero(server.valid)
    length = np.sqrt(np.sum(z**2, axis=1, keepdims=True) + 1e-12)
    towards = server.prototypes[held] / np.linalg.norm(server.prototypes[held], axis=1, keepdims=True)
    cosines = z @ towards.T / length
    d = softmax(cosines / TAU, axis=1) - (y[:, None] == held) if len(held) else cosines
    d = d * server.valid[y][:, None] / TAU / len(z)
    return (d @ towards - np.sum(d * cosines, axis=1, keepdims=True) * z / length) / length


def fedcpd_client(mlp, key, t, server, phi, rows, trainer, case):
    """The trained extractor, head, and class means under the trained extractor."""
    theta = server.params["extractor"]

    def head_gradient(phi, rows):
        z = mlp.extract(theta, rows)
        return linear_gradient(z, softmax_loss(linear(phi, z), mlp.y[rows])[1])

    def gradient(w, rows):
        head = w.get("head", phi)
        z, y = mlp.extract(w["extractor"], rows), mlp.y[rows]
        d = softmax_loss(linear(head, z), y)[1]
        d_z = d @ head["kernel"].T + case.alpha * alignment_gradient(z, y, server, case.reduction)
        d_z = d_z + case.beta * contrast_gradient(z, y, server)
        found = {"extractor": mlp.extract_gradient(w["extractor"], rows, d_z)}
        return {**found, "head": linear_gradient(z, d)} if "head" in w else found

    if case.base == "fedrep":
        phi = train(phi, head_gradient, key, t, rows, trainer, phase="head", epochs=HEAD_EPOCHS)
    w = train(server.params, gradient, key, t, rows, trainer)
    return w, phi, class_means(mlp.extract(w["extractor"], rows), mlp.y[rows], CLASSES)


def fedcpd_server(server, uploads, means, sizes):
    of_class = sum(counts for _, counts in means)
    mean = sum(mean * counts[:, None] for mean, counts in means) / np.maximum(of_class, 1)[:, None]
    seen = of_class > 0
    prototypes = np.where(seen[:, None], mean, server.prototypes)
    return Server(weighted_mean(uploads, sizes), prototypes, seen | server.valid)


class Both(NamedTuple):
    """The engine's run and NumPy's."""

    case: Case
    engine: Engine
    end: Run
    server: Server
    heads: list
    post: dict  # the last model that each client trained
    sent: list  # of each round: how many were selected, which classes had a prototype, whose upload came back


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def both(request, play, model, trainer, federation):
    case = request.param
    terms = {"alpha": case.alpha, "beta": case.beta, "gamma": 0.0, "tau": TAU, "reduction": case.reduction}
    engine, start, end = play(fedcpd(model, trainer, **terms, head_epochs=HEAD_EPOCHS, base=case.base), case.who)
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    params = to_numpy(start.state.server.params)
    server = Server(params, np.zeros((CLASSES, model.dim)), np.zeros(CLASSES, bool))
    heads = [params["head"] if case.base == "fedavg" else to_numpy(client(start.state.clients.head, 0))] * N
    post, sent = {}, []
    for t, (present, selected) in enumerate(cohorts(engine, KEY, federation, ROUNDS)):
        sent.append((selected, server.valid, present))
        uploads, means = [], []
        for i in present:
            arguments = client_key(KEY, t, i), t, server, heads[i], rows[i], trainer, case
            w, heads[i], of_class = fedcpd_client(mlp, *arguments)
            post[i] = {"head": heads[i], **w}
            uploads.append(w)
            means.append(of_class)
        server = fedcpd_server(server, uploads, means, [len(rows[i]) for i in present])
    return Both(case, engine, end, server, heads, post, sent)


def test_rounds_are_numpys(both, federation):
    server, clients = both.end.state
    jax.tree.map(near, server.params, both.server.params)
    near(server.prototypes.mean, both.server.prototypes)
    same(server.prototypes.valid, both.server.valid)
    assert clients.teacher is None
    if both.case.base == "fedrep":
        for i in range(N):
            jax.tree.map(near, client(clients.head, i), both.heads[i])
    mlp = MLP(federation.x, federation.y)
    for i, w in both.post.items():
        near([float(leaf[i]) for leaf in both.end.post.test], mlp.scores(w, held(federation.test, i)))


def test_the_model_before_training_is_what_is_shared_under_what_is_personal(both, federation):
    server, clients = both.end.state
    method = both.engine.method
    found = method.predict(method.personal(method.broadcast(server), client(clients, 4)), federation.x)
    w, rows = {"head": both.heads[4], **both.server.params}, np.arange(len(federation.y))
    near(found, MLP(federation.x, federation.y).logits(w, rows))


def test_some_rounds_lack_clients_and_classes(both, federation):
    """Otherwise the comparison above would say nothing of drop-outs and of rule R8."""
    if both.case.who == EVERYONE:
        assert len(both.post) == N
        return
    counts = np.asarray(federation.train.class_counts)
    assert any(selected > len(present) for selected, _, present in both.sent)
    assert len(both.post) < N
    assert any(np.any(valid & (counts[present].sum(axis=0) == 0)) for _, valid, present in both.sent)
    assert any(np.any(~valid & (counts[present].sum(axis=0) > 0)) for _, valid, present in both.sent[1:])


def test_bytes_are_a_hand_count_without_the_classes_not_held(both, model, federation):
    shapes = survey(both.engine, federation)[1]
    params = jax.eval_shape(model.init, KEY)
    parameters = count(params if both.case.base == "fedavg" else params["extractor"])
    assert count(shapes.up) == count(shapes.down) == parameters + CLASSES * model.dim + CLASSES
    assert not both.sent[0][1].any(), "no prototype is sent before there is one"
    row = 4 * model.dim
    down = sum(selected * (4 * parameters + CLASSES + row * valid.sum()) for selected, valid, _ in both.sent)
    classes = np.count_nonzero(federation.train.class_counts, axis=1)
    up = sum(4 * (parameters + CLASSES) + row * classes[i] for *_, present in both.sent for i in present)
    assert shapes.sent_bytes(both.end.traffic) == down + up < shapes.dense_bytes(both.end.traffic)


@pytest.mark.parametrize(
    ("alpha", "beta", "sends"), [(0.0, 0.0, False), (0.7, 0.0, True), (0.0, 0.7, True)], ids=["none", "align", "pcl"]
)
def test_prototypes_are_sent_for_a_term_that_needs_them(alpha, beta, sends, model, trainer, federation):
    method = fedcpd(model, trainer, alpha=alpha, beta=beta, gamma=0.0)
    shapes = survey(Engine(method, N), federation)[1]
    assert (shapes.view.per_class is not None) == (shapes.upload.per_class is not None) == sends


# --- The teacher -----------------------------------------------------------------------------------------------------

GAMMA = 2.0
TERMS = {"alpha": 1.5, "beta": 0.7, "tau": TAU, "head_epochs": HEAD_EPOCHS}


class Taught(NamedTuple):
    """Rounds of SOME with distillation."""

    runs: list[Run]  # before round 0, and after each
    untaught: list[Run]  # after each round, had gamma been 0 in it
    cohorts: list[list[int]]


@pytest.fixture(scope="module")
def taught(model_with_maps, trainer, federation):
    def engine(gamma):
        return Engine(unscored(fedcpd(model_with_maps, trainer, **TERMS, gamma=gamma)), N, SOME)

    @jax.jit
    def one_round(gamma, t, run):
        return engine(gamma).round(KEY, t, run, jnp.array(False), federation)

    runs = [jax.jit(replace(engine(GAMMA), participation=EVERYONE).init)(KEY, federation)]
    untaught = []
    for t in range(ROUNDS):
        run, without = (one_round(jnp.float32(gamma), at(t), runs[-1]) for gamma in (GAMMA, 0.0))
        runs.append(run)
        untaught.append(without)
    runs, untaught = jax.tree.map(np.asarray, (runs, untaught))
    return Taught(runs, untaught, [present for present, _ in cohorts(engine(0.0), KEY, federation, ROUNDS)])


def test_a_client_has_a_teacher_from_its_own_first_participation_on(taught):
    taught_before = np.zeros(N, bool)
    same(taught.runs[0].state.clients.teacher.exists, taught_before)
    for run, present in zip(taught.runs[1:], taught.cohorts, strict=True):
        taught_before[present] = True
        same(run.state.clients.teacher.exists, taught_before)
    assert 0 < taught_before.sum() < N


def test_in_its_first_participation_nobody_teaches_a_client(taught):
    """Bit for bit as without distillation, which from the second on makes a difference."""
    seen, differ = set(), 0
    for run, without, present in zip(taught.runs[1:], taught.untaught, taught.cohorts, strict=True):
        for i in present:
            found, expected = (client(r.state.clients, i) for r in (run, without))
            if i in seen:
                kernels = [
                    (c.teacher.extractor["conv1"]["kernel"], c.teacher.distiller[1]["plain"]["cv2"])
                    for c in (found, expected)
                ]
                assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(*kernels, strict=True))
                differ += 1
            else:
                jax.tree.map(same, found, expected)
        seen.update(present)
    assert differ > 2
    assert len(set(taught.cohorts[1]) - set(taught.cohorts[0])) > 0, "the first participation is not round 0"


class Weights(NamedTuple):
    """Of the terms of the loss."""

    ce: float
    alpha: float
    beta: float
    gamma: float


@pytest.fixture(scope="module")
def gradients(model_with_maps, trainer, federation):
    """Of what the two phases minimise: constants -> a function (what is trained, rows of a batch) -> its gradient."""
    model = model_with_maps

    def entropies(phi, z, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(model.classify(phi, z)), y[:, None], axis=1)[:, 0]

    def head_loss(phi, theta, x, y, mask):
        return mask @ entropies(phi, model.features(theta, x), y) / mask.sum()

    def unit(rows):
        return rows / jnp.sqrt(jnp.sum(rows**2, axis=1, keepdims=True) + 1e-12)

    def loss(trained, phi, prototypes, teacher, weights, x, y, mask):
        params, psi = trained
        z, maps = model.features_and_maps(params["extractor"], x)
        _, targets = model.features_and_maps(teacher, x)
        cosines = jnp.where(prototypes.valid, unit(z) @ unit(prototypes.mean).T / TAU, -1e9)
        contrast = -jnp.take_along_axis(jax.nn.log_softmax(cosines), y[:, None], axis=1)[:, 0]
        align = jnp.mean((z - prototypes.mean[y]) ** 2, axis=1)
        pull = jnp.where(prototypes.valid[y], weights.alpha * align + weights.beta * contrast, 0.0)
        supervised = mask @ (weights.ce * entropies(phi, z, y) + pull) / mask.sum()
        return supervised + weights.gamma * feature_distillation(psi, maps, targets, mask)

    def of(loss):
        gradient, x, y = jax.jit(jax.grad(loss)), np.asarray(federation.x), np.asarray(federation.y)

        def with_constants(*constants):
            def on_rows(trained, rows):
                padded = np.resize(rows, trainer.batch_size)
                mask = np.float32(np.arange(trainer.batch_size) < len(rows))
                return to_numpy(gradient(trained, *constants, x[padded], y[padded], mask))

            return on_rows

        return with_constants

    return of(head_loss), of(loss)


def test_every_participation_matches_a_plain_loop(taught, gradients, model_with_maps, trainer, federation):
    """And the server's part in the round. A teacher is the extractor that this client left when it last took part."""
    by_head, by_rest = gradients
    features, y = jax.jit(model_with_maps.features), np.asarray(federation.y)
    teachers = {}
    for t, present in enumerate(taught.cohorts):
        before, after = taught.runs[t].state, taught.runs[t + 1].state
        params, prototypes = before.server
        uploads, means, sizes = [], [], [TRAIN_SIZES[i] for i in present]
        for i in present:
            rows, key = held(federation.train, i), client_key(KEY, t, i)
            old, new = client(before.clients, i), client(after.clients, i)
            gradient = by_head(params["extractor"])
            phi = train(to_numpy(old.head), gradient, key, t, rows, trainer, phase="head", epochs=HEAD_EPOCHS)
            jax.tree.map(near, new.head, phi)
            teacher, gamma = (teachers[i], GAMMA) if i in teachers else (params["extractor"], 0.0)
            gradient = by_rest(phi, prototypes, teacher, Weights(1.0, TERMS["alpha"], TERMS["beta"], gamma))
            w, psi = train(to_numpy((params, old.teacher.distiller)), gradient, key, t, rows, trainer)
            jax.tree.map(near, new.teacher.extractor, w["extractor"])
            jax.tree.map(near, new.teacher.distiller, psi)
            teachers[i] = new.teacher.extractor
            uploads.append(w)
            z = to_numpy(features(new.teacher.extractor, federation.x))[rows]
            means.append(class_means(z, y[rows], CLASSES))
        expected = fedcpd_server(Server(None, prototypes.mean, prototypes.valid), uploads, means, sizes)
        jax.tree.map(near, after.server.params, expected.params)
        near(after.server.prototypes.mean, expected.prototypes)
        same(after.server.prototypes.valid, expected.valid)


@pytest.fixture(scope="module")
def beginning(taught):
    """(server, a client that has a teacher) before round 0; the teacher is what the client receives, times -1."""
    server, clients = taught.runs[0].state
    personal = client(clients, 0)
    old = jax.tree.map(np.negative, personal.teacher.extractor)
    return server, personal._replace(teacher=personal.teacher._replace(extractor=old, exists=np.array(True)))


def test_any_terms_add_up_on_fedavg_and_the_teacher_stays_with_the_client(model_with_maps, federation, beginning):
    """By the loss of a batch, in a participation whose training just adds 1 to everything."""
    model, losses = model_with_maps, []
    data = client_data(federation.x, federation.y, client(federation.train, 4))
    eight = jnp.arange(8), jnp.ones(8, bool)
    batch = data.take(*eight)
    (begun, own), teacher = beginning, beginning[1].teacher
    params = {**begun.params, "head": own.head}
    prototypes = Prototypes(jnp.eye(CLASSES, model.dim), jnp.array([True, False, True]))
    subsets = list(product((0.0, 1.5), (0.0, 0.7), (0.0, GAMMA)))

    class AddOne(Trainer):
        def __call__(self, now, loss, trained, data, **options):
            losses.append(loss(trained, data.take(*eight), now.key))
            return jax.tree.map(lambda leaf: leaf + 1, trained), TrainInfo(losses[-1], now.t)

    @jax.jit
    def participate(params, teacher):
        found = []
        for alpha, beta, gamma in subsets:
            method = fedcpd(model, AddOne(), alpha=alpha, beta=beta, gamma=gamma, tau=TAU, base="fedavg")
            server = begun._replace(params=params, prototypes=prototypes if alpha or beta else None)
            personal = own._replace(head=None, teacher=teacher if gamma else None)
            initial = jax.eval_shape(lambda method=method: method.init(KEY, N))
            assert jax.tree.structure(initial) == jax.tree.structure((server, personal))
            after, upload, *_ = method.local(now(KEY, 1), method.broadcast(server), personal, data)
            assert (upload.per_class is not None, after.teacher is not None) == (alpha + beta > 0, gamma > 0)
            found.append((losses.pop(), upload.params, after.teacher))
        z, maps = model.features_and_maps(params["extractor"], batch.x)
        _, targets = model.features_and_maps(teacher.extractor, batch.x)
        terms = (
            centre_loss(z, batch.y, batch.mask, prototypes),
            prototype_contrast(z, batch.y, batch.mask, prototypes, temperature=TAU),
            feature_distillation(teacher.distiller, maps, targets, batch.mask),
        )
        return found, cross_entropy(model.classify(params["head"], z), batch.y, batch.mask), terms

    more, distiller = jax.tree.map(lambda leaf: leaf + np.float32(1), (params, teacher.distiller))
    for exists in (False, True):
        found, supervised, terms = participate(params, teacher._replace(exists=np.array(exists)))
        assert min(terms) > 0.01
        for (alpha, beta, gamma), (loss, upload, left) in zip(subsets, found, strict=True):
            expected = supervised + np.dot([alpha, beta, gamma * exists], terms)
            assert float(loss) == pytest.approx(float(expected), rel=1e-5)
            jax.tree.map(same, upload, more)
            if gamma:
                jax.tree.map(same, tuple(left), (more["extractor"], True, distiller))


def distilled(model, train, gamma, beginning, data):
    """What a client makes of the distillation alone."""
    method = fedcpd(model, train, alpha=0.0, beta=0.0, gamma=gamma, head_epochs=0)
    server, personal = beginning
    return method.local(now(KEY, 3), method.broadcast(server._replace(prototypes=None)), personal, data)


def images_of(federation, i, draw=None, *, anew=True):
    """The samples of a client, behind an augmentation if one is given."""
    data = client_data(federation.x, federation.y, client(federation.train, i))
    return data if draw is None else data._replace(augmentation=Augmentation(draw, jax.random.key(8), anew))


@pytest.fixture(scope="module")
def play_distilled(model_with_maps, trainer, federation):
    """(beginning, client, anew in each epoch, lr, gamma, whether its images are cropped and flipped) -> its update."""

    @partial(jax.jit, static_argnames="anew")
    def work(beginning, row, anew, lr, gamma, moved):
        data = client_data(federation.x, federation.y, row)
        draw = lambda keys, x: jnp.where(moved, crop_flip(keys, x), x)  # noqa: E731
        data = data._replace(augmentation=Augmentation(draw, jax.random.key(8), anew))
        return distilled(model_with_maps, replace(trainer, lr=lr), gamma, beginning, data)

    def play(beginning, i, *, anew, lr, gamma, moved):
        return work(beginning, client(federation.train, i), anew, np.float32(lr), np.float32(gamma), np.bool_(moved))

    return play


def test_a_teacher_that_looks_once_per_round_teaches_what_it_would_batch_by_batch(play_distilled, trainer, beginning):
    """An augmentation that leaves the images alone, anew in each epoch, is what keeps it from looking just once."""
    for i in (2, 1):  # 27 samples, of which the last batch holds 3, and a single one
        options = {"lr": trainer.lr, "gamma": GAMMA, "moved": False}
        once, by_batch = (play_distilled(beginning, i, anew=anew, **options) for anew in (False, True))
        jax.tree.map(near, once, by_batch)


@pytest.mark.parametrize(
    ("draw", "anew", "epochs", "once"),
    [(None, False, 2, True), (crop_flip, False, 2, True), (crop_flip, True, 2, False), (None, False, 1, False)],
    ids=["as they are", "one draw", "a draw per epoch", "one epoch"],
)
def test_a_teacher_looks_at_all_images_first_where_they_come_again(
    draw, anew, epochs, once, model_with_maps, trainer, federation, beginning
):
    """By the number of images in each of the teacher's looks: those that are not a pass of training."""
    looks = []

    def features_and_maps(theta, x, mask=None):
        if mask is None:
            looks.append(len(x))
        return model_with_maps.features_and_maps(theta, x, mask)

    watched = model_with_maps._replace(features_and_maps=features_and_maps)
    data = images_of(federation, 2, draw, anew=anew)
    jax.eval_shape(partial(distilled, watched, replace(trainer, epochs=epochs), GAMMA), beginning, data)
    assert set(looks) == {data.capacity if once else trainer.batch_size}


@pytest.mark.parametrize("anew", [False, True], ids=["one draw", "a draw per epoch"])
def test_teacher_and_student_see_the_same_images(anew, play_distilled, beginning):
    """A student that stays where its teacher is pays nothing for the distillation, whatever is drawn."""
    server, personal = beginning
    itself = server, personal._replace(teacher=personal.teacher._replace(extractor=server.params["extractor"]))
    options = {"anew": anew, "lr": 0.0, "moved": True}
    with_it, without = (play_distilled(itself, 2, gamma=gamma, **options).info.loss for gamma in (1000.0, 0.0))
    np.testing.assert_allclose(with_it, without, rtol=1e-6)


class Measuring(Trainer):
    """Trains nothing, which spares most of the compilation."""

    def __call__(self, now, loss, params, data, **options):
        return params, TrainInfo(jnp.zeros(()), now.t)


def test_the_terms_are_measured_beside_the_cross_entropy(gradients, model_with_maps, trainer, federation, beginning):
    """On the extractor as it is received, on one mini-batch."""
    model, data, (server, personal) = model_with_maps, images_of(federation, 2), beginning
    method = fedcpd(model, Measuring(batch_size=trainer.batch_size, diagnose=True), **TERMS, gamma=GAMMA)
    server = server._replace(prototypes=Prototypes(jnp.eye(CLASSES, model.dim), jnp.array([True, False, True])))
    update = jax.jit(method.local)(now(KEY, 3), method.broadcast(server), personal, data)
    size = trainer.batch_size
    first = next(batches(KEY, TRAIN_SIZES[2], epochs=1, batch_size=size, phase="diagnostics"))
    rows, trained = held(federation.train, 2)[first], (server.params, personal.teacher.distiller)

    def length(**weights):
        weights = Weights(**{**dict.fromkeys(Weights._fields, 0.0), **weights})
        constants = personal.head, server.prototypes, personal.teacher.extractor, weights
        params, _ = gradients[1](*constants)(trained, rows)
        return np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(params["extractor"])))

    weights = {"alpha": TERMS["alpha"], "beta": TERMS["beta"], "gamma": GAMMA}
    expected = {f"gradient_ratio_{name}": length(**{name: weight}) / length(ce=1.0) for name, weight in weights.items()}
    jax.tree.map(near, update.diagnostics, expected)
    assert min(expected.values()) > 0.01


@pytest.mark.parametrize("base", ["fedrep", "fedavg"])
def test_neither_teacher_nor_distiller_is_ever_exchanged(base, model_with_maps, trainer, federation):
    with_teacher, without = (
        survey(Engine(fedcpd(model_with_maps, trainer, gamma=gamma, base=base), N), federation)[1]
        for gamma in (GAMMA, 0.0)
    )
    assert (with_teacher.view, with_teacher.upload) == (without.view, without.upload)
    params, (channels, deepest) = jax.eval_shape(model_with_maps.init, KEY), (c for *_, c in model_with_maps.maps)
    shared = count(params if base == "fedavg" else params["extractor"])
    assert count(with_teacher.up) == count(with_teacher.down) == shared + CLASSES * model_with_maps.dim + CLASSES
    head = 0 if base == "fedavg" else count(params["head"])
    assert count(without.client) == head
    # With one hidden unit of the channel gate, and two fusions, of F and of A.
    psi = sum(2 * c + 2 * 7 * 7 + 2 * (1 + 9 + 9) * c * deepest for c in (channels, deepest))
    assert count(with_teacher.client) == head + count(params["extractor"]) + 1 + psi


# --- What it cannot run on -------------------------------------------------------------------------------------------


def test_distillation_needs_feature_maps(model, trainer):
    with pytest.raises(ValueError, match="feature maps"):
        fedcpd(model, trainer)
    with pytest.raises(ValueError, match="feature maps"):
        fedcpd(model, trainer, gamma=1e-6, base="fedavg")
    fedcpd(model, trainer, gamma=0.0)
    fields = {"data": {"source": "digits"}, "model": {"name": "mlp"}, "method": {"name": "fedcpd"}}
    with pytest.raises(ConfigError, match="feature maps") as caught:
        simulate(Config(**fields))
    assert caught.value.field == "method.name"
