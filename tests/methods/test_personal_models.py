"""Ditto, LG-FedAvg, FedPer, FedRep and FedBABU against two rounds in NumPy, and their limits."""

from dataclasses import replace
from functools import cache
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.method import Cohort, SentIf
from fedjax_pfl.methods import METHODS
from fedjax_pfl.ops.aggregate import coordinate_median
from fedjax_pfl.ops.robust import krum
from fedjax_pfl.ops.training import Trainer
from fedjax_pfl.ops.tree import count
from tests import generator
from tests.conftest import TRAIN_SIZES
from tests.play import KEY as PLAY_KEY
from tests.play import SOME, cohorts, play
from tests.reference import MLP, at, client, client_key, held, now, to_numpy, weighted_mean

KEY = generator.key(1)
N = 7
LAM = 0.6
HYPERPARAMETERS = {"ditto": {"lam": LAM, "personal_epochs": 3}, "fedrep": {"head_epochs": 3}}


@pytest.fixture(scope="module")
def two_rounds(model, trainer, federation):
    """(name, hyperparameters) -> the states before and after, as arrays of NumPy."""

    @cache
    def play(name, **hyperparameters):
        engine = Engine(METHODS[name](model, trainer, **hyperparameters), N)
        start = jax.jit(engine.init)(KEY, federation)
        end = jax.jit(engine.rounds)(KEY, start, at(0), at(2), jnp.array(True), federation)
        return jax.tree.map(np.asarray, (start.state, end.state))

    return play


def join(theta, phi):
    return {"extractor": theta, "head": phi}


def ditto_client(mlp, train, server, personal):
    def tied(w, rows):
        return jax.tree.map(lambda g, v, anchor: g + LAM * (v - anchor), mlp.gradient(w, rows), w, server)

    upload = train(server)
    return upload, train(personal, gradient=tied, epochs=3)


def fedper_client(mlp, train, theta, phi):
    w = train(join(theta, phi))
    return w["extractor"], w["head"]


def lg_fedavg_client(mlp, train, upper, lower):
    w = train(join({**lower, **upper["extractor"]}, upper["head"]))
    shared = {name: w["extractor"][name] for name in upper["extractor"]}
    return join(shared, w["head"]), {name: w["extractor"][name] for name in lower}


def fedrep_client(mlp, train, theta, phi):
    w = train(join(theta, phi), gradient=mlp.head_gradient, phase="head", epochs=3)
    w = train(w, gradient=mlp.extractor_gradient)
    return w["extractor"], w["head"]


@pytest.mark.parametrize(
    ("name", "client"),
    [
        ("ditto", ditto_client),
        ("fedper", fedper_client),
        ("lg_fedavg", lg_fedavg_client),
        ("fedrep", fedrep_client),
    ],
)
def test_two_rounds_are_numpys(name, client, two_rounds, trainer, federation):
    start, found = two_rounds(name, **HYPERPARAMETERS.get(name, {}))
    compare(start, found, client, weighted_mean, trainer, federation)


def test_fedrep_with_the_coordinate_median_is_numpys(two_rounds, trainer, federation):
    def median(trees, weights):
        return jax.tree.map(lambda *leaves: np.median(leaves, axis=0), *trees)

    start, found = two_rounds("fedrep", combine=coordinate_median, head_epochs=3)
    compare(start, found, fedrep_client, median, trainer, federation)
    _, mean = two_rounds("fedrep", **HYPERPARAMETERS["fedrep"])
    kernels = (run.server["hidden_layer"]["kernel"] for run in (found, mean))
    assert not np.allclose(*kernels, atol=1e-3)


def compare(start, found, client, combine, trainer, federation):
    """Plays two rounds of all clients by plain loops and compares server and clients."""
    mlp = MLP(federation.x, federation.y)
    rows = [held(federation.train, i) for i in range(N)]
    server = to_numpy(start.server)
    personal = [to_numpy(jax.tree.map(lambda leaf, i=i: leaf[i], start.clients)) for i in range(N)]
    for t in range(2):
        uploads = []
        for i in range(N):

            def train(w, i=i, t=t, **options):
                return mlp.train(w, client_key(KEY, t, i), t, rows[i], trainer, **options)[0]

            upload, personal[i] = client(mlp, train, server, personal[i])
            uploads.append(upload)
        server = combine(uploads, [len(held) for held in rows])
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(near, found.server, server)
    for i in range(N):
        jax.tree.map(lambda leaf, expected, i=i: near(leaf[i], expected), found.clients, personal[i])


def test_fedbabu_trains_the_extractor_under_a_head_that_never_changes(two_rounds, trainer, federation):
    start, found = two_rounds("fedbabu")
    jax.tree.map(np.testing.assert_array_equal, found.clients, start.clients)
    jax.tree.map(np.testing.assert_array_equal, found.server["head"], start.server["head"])
    mlp, w = MLP(federation.x, federation.y), to_numpy(start.server)
    for t in range(2):
        uploads = []
        for i in range(N):
            rows = held(federation.train, i)
            key = client_key(KEY, t, i)
            uploads.append(mlp.train(w, key, t, rows, trainer, gradient=mlp.extractor_gradient)[0])
        w = weighted_mean(uploads, federation.train.count)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(near, found.server["extractor"], w["extractor"])


def test_dittos_global_branch_is_fedavg_and_without_the_tie_its_personal_branch_is_local(two_rounds):
    same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)  # noqa: E731
    fedavg, local = two_rounds("fedavg")[1], two_rounds("local")[1]
    tied, untied = two_rounds("ditto", lam=1.0)[1], two_rounds("ditto", lam=0.0)[1]
    same(tied.server, fedavg.server)
    same(untied.server, fedavg.server)
    same(untied.clients, local.clients)
    distance = [
        sum(np.sum((v - w) ** 2) for v, w in zip(*map(jax.tree.leaves, run), strict=True))
        for run in ((tied.clients, tied.server), (untied.clients, untied.server))
    ]
    assert distance[0] < distance[1]


def test_fedper_and_fedrep_without_head_epochs_differ_only_in_the_head(two_rounds):
    _, fedrep = two_rounds("fedrep", head_epochs=0)
    start, fedbabu = two_rounds("fedbabu")
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(near, fedrep.server, fedbabu.server["extractor"])
    jax.tree.map(np.testing.assert_array_equal, fedrep.clients, start.clients)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("ditto", ("extractor", "head")),
        ("fedper", ("extractor",)),
        ("lg_fedavg", ("head",)),
        ("fedrep", ("extractor",)),
        ("fedbabu", ("extractor",)),
    ],
)
def test_only_the_shared_part_is_exchanged(name, parts, model, trainer, federation):
    engine = Engine(METHODS[name](model, trainer), N)
    params = jax.eval_shape(model.init, KEY)
    shapes = survey(engine, federation)[1]
    assert count(shapes.up) == count(shapes.down) == sum(count(params[part]) for part in parts)


# --- LG-FedAvg: more than the head, and after a warm-up --------------------------------------------------------------


def test_lg_fedavg_with_all_layers_shared_is_fedavg(two_rounds):
    start, found = two_rounds("lg_fedavg", shared_layers=2)
    assert jax.tree.leaves(start.clients) == []
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(near, found.server, two_rounds("fedavg")[1].server)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_lg_fedavg_exchanges_its_last_layers_alone(layers, model_with_maps, trainer, federation):
    params = jax.eval_shape(model_with_maps.init, KEY)
    upper = [params["head"], *(params["extractor"][name] for name in ("dense", "conv2", "conv1"))][:layers]
    engine = Engine(METHODS["lg_fedavg"](model_with_maps, trainer, shared_layers=layers), N)
    _, shapes = survey(engine, federation)
    assert count(shapes.up) == count(shapes.down) == count(upper)
    assert count(shapes.client) == count(params) - count(upper)
    with pytest.raises(ValueError, match="5 layers are more than the 4"):
        METHODS["lg_fedavg"](model_with_maps, trainer, shared_layers=5)


def test_layers_that_lg_fedavg_no_longer_sends_do_not_decide_what_is_kept(model):
    """Of five heads, Krum takes one, whatever lies below them."""
    method = METHODS["lg_fedavg"](model, Trainer(epochs=1, batch_size=4, lr=0.1), krum, warmup_rounds=1)
    server, _ = jax.jit(method.init, static_argnums=1)(KEY, 5)
    rng = np.random.default_rng(0)

    def drawn(tree, scale):
        return jax.tree.map(lambda leaf: jnp.asarray(scale * rng.normal(size=(5, *leaf.shape)), leaf.dtype), tree)

    upper, cohort = drawn(server.upper, 1.0), Cohort(jnp.arange(5), jnp.ones(5), 5, 5)
    aggregate = jax.jit(lambda uploads: method.aggregate(now(KEY, 1), server, (), uploads, cohort)[0])
    kept = []
    for scale in (0.0, 1.0, 10.0):
        lower = SentIf(jnp.zeros(5, bool), drawn(server.lower.value, scale))
        kept.append(aggregate(server._replace(upper=upper, lower=lower)))
    for other in kept[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, kept[0])


def test_lg_fedavg_starts_from_the_model_of_the_warm_up(model, trainer, federation):
    """By plain loops, with clients that take part before, after, or never: two rounds of FedAvg, and three."""
    warm, rounds, who = 2, 5, Participation(0.3, 0.6, 0.1)
    engine = Engine(METHODS["lg_fedavg"](model, trainer, warmup_rounds=warm), N, who)
    start = jax.jit(engine.init)(KEY, federation)
    end = jax.jit(engine.rounds)(KEY, start, at(0), at(rounds), jnp.array(True), federation)
    mlp, w = MLP(federation.x, federation.y), to_numpy(model.init(jax.random.split(KEY, 3)[0]))
    own, down, up, present = {}, [], [], []
    for t, (cohort, selected) in enumerate(cohorts(engine, KEY, federation, rounds)):
        present.append(cohort)
        trained = []
        for i in cohort:
            rows = held(federation.train, i)
            begin = join(own.get(i, w["extractor"]), w["head"])
            trained.append(mlp.train(begin, client_key(KEY, t, i), t, rows, trainer)[0])
            if t >= warm:
                own[i] = trained[-1]["extractor"]
        mean = weighted_mean(trained, [TRAIN_SIZES[i] for i in cohort])
        w = mean if t < warm else {**w, "head": mean["head"]}
        down.append((selected, t <= warm))
        up.append((len(cohort), t < warm))
    assert all(present)
    early, late = (set(chain(*part)) for part in (present[: warm + 1], present[warm + 1 :]))
    assert set(chain(*present[:warm])) - set(own), "a client of the warm-up alone"
    assert late - early, "a client that comes late"
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(near, end.state.server.upper["head"], w["head"])
    jax.tree.map(near, end.state.server.lower.value, w["extractor"])
    np.testing.assert_array_equal(end.state.clients.own, [i in own for i in range(N)])
    pre = jax.jit(engine.pre)(KEY, at(rounds), end.state, federation).test
    for i in range(N):
        if i in own:
            jax.tree.map(near, jax.tree.map(lambda leaf, i=i: leaf[i], end.state.clients.lower), own[i])
        params = join(own.get(i, w["extractor"]), w["head"])
        near([float(leaf[i]) for leaf in pre], mlp.scores(params, held(federation.test, i)))
    # The lower layers are sent in the warm-up, and once more to those who go on from it.
    head, theta = 4 * count(w["head"]), 4 * count(w["extractor"])
    sent = sum(n * (head + 1 + theta * whole) for n, whole in down + up)
    _, shapes = survey(engine, federation)
    assert shapes.sent_bytes(end.traffic) == sent < shapes.dense_bytes(end.traffic)


# --- What comes before a PRE evaluation ------------------------------------------------------------------------------


def personalized(method, federation, view, client, i):
    data = client_data(federation.x, federation.y, jax.tree.map(lambda leaf: leaf[i], federation.train))
    return jax.jit(method.personalize)(now(client_key(KEY, 2, i), 2), view, client, data)


@pytest.mark.parametrize("i", [1, 2, 6])
def test_fedreps_final_head_epochs_train_the_head_alone(i, model, trainer, federation):
    params = model.init(KEY)
    method = METHODS["fedrep"](model, trainer, final_head_epochs=4)
    view, head = personalized(method, federation, params["extractor"], params["head"], i)
    jax.tree.map(np.testing.assert_array_equal, view, params["extractor"])
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, i)
    options = {"gradient": mlp.head_gradient, "phase": "final head", "epochs": 4}
    expected, _ = mlp.train(to_numpy(params), client_key(KEY, 2, i), 2, rows, trainer, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), head, expected["head"])


@pytest.mark.parametrize("scope", ["full", "head", "extractor"])
def test_fedbabu_fine_tunes_what_it_is_told_to(scope, model, trainer, federation):
    params, i = model.init(KEY), 6
    trainer = replace(trainer, lr_decay=0.8)
    method = METHODS["fedbabu"](model, trainer, finetune_epochs=3, finetune_lr=0.05, finetune_scope=scope)
    found = method.personal(*personalized(method, federation, params["extractor"], params["head"], i))
    mlp, rows = MLP(federation.x, federation.y), held(federation.train, i)
    gradient = {"full": mlp.gradient, "head": mlp.head_gradient, "extractor": mlp.extractor_gradient}[scope]
    options = {"gradient": gradient, "phase": "finetune", "epochs": 3, "lr": 0.05}
    expected, _ = mlp.train(to_numpy(params), client_key(KEY, 2, i), 2, rows, trainer, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


# --- Scores of Ditto -------------------------------------------------------------------------------------------------


def test_dittos_scores_are_those_of_its_personal_models(model, trainer, federation):
    method = METHODS["ditto"](model, trainer, lam=LAM)
    _, end, _ = play(method, federation, who=SOME, rounds=2)
    pre = jax.jit(Engine(method, N, SOME).pre)(PLAY_KEY, at(2), end.state, federation).test
    mlp = MLP(federation.x, federation.y)
    for i in range(N):
        expected = mlp.scores(to_numpy(client(end.state.clients, i)), held(federation.test, i))
        for found in (pre, end.post.test):
            np.testing.assert_allclose([float(leaf[i]) for leaf in found], expected, rtol=2e-4, atol=2e-5)
