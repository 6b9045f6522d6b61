"""Without collaboration: each client as a federation of its own, held against such federations and against Local."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import Config
from fedjax_pfl.data.augment import add_copies, augment
from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.experiment.build import DataShape, make_engine
from fedjax_pfl.method import Calibration, Update, personalize_nothing
from fedjax_pfl.methods import METHODS
from fedjax_pfl.methods.alone import Alone, alone
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.local import local
from tests import generator
from tests.conftest import CLASSES
from tests.reference import MLP, at, client, held, now, to_numpy
from tests.reference import class_means as numpy_class_means
from tests.toys import NO_STEPS

N, KEY = 7, generator.key(31)


class Inbox(NamedTuple):
    """A personal state that is nothing but a message."""

    inbox: jax.Array


near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def play(method, clients, federation, rounds=3):
    """The run after the rounds, and its scores."""
    engine = Engine(method, clients)
    before = jax.jit(engine.init)(KEY, federation)
    after = jax.jit(engine.rounds)(KEY, before, at(0), at(rounds), jnp.array(True), federation)
    return jax.tree.map(np.asarray, (after, jax.jit(engine.score)(KEY, at(rounds), after, federation)))


@pytest.fixture(scope="module")
def apart(model, trainer, federation):
    """name -> three rounds of a method without collaboration, and their scores."""
    return cache(lambda name: play(alone(METHODS[name](model, trainer)), N, federation))


def test_models_are_made_without_samples_where_the_method_makes_them_so(model, trainer):
    names = "fedavg", "ditto", "fedrep", "fedavg_ft", "ccvr"
    made = [name for name in names if alone(METHODS[name](model, trainer)).personalize is personalize_nothing]
    assert made == ["fedavg", "ditto"]


def test_a_server_that_acts_alone_does_so_for_a_client_without_samples(model, trainer, federation):
    def counted(acts_alone):
        method = fedavg(model, trainer)._replace(
            init=lambda key, clients: (jnp.zeros(()), ()),
            broadcast=lambda server: jax.tree.map(lambda leaf: leaf + server, w),
            aggregate=lambda now, server, clients, uploads, cohort: (server + 1, clients),
            acts_alone=acts_alone,
        )
        nothing = client_data(federation.x, federation.y, client(federation.train, 0))._replace(count=jnp.array(0))
        return jax.jit(lambda: alone(method).local(now(KEY, 0), (), Alone(jnp.zeros(()), ()), nothing).client.server)()

    w = model.init(KEY)
    assert (float(counted(True)), float(counted(False))) == (1, 0)


def test_fedavg_without_collaboration_is_local(apart, model, trainer, federation):
    found, scores = apart("fedavg")
    expected, local_scores = play(local(model, trainer), N, federation)
    jax.tree.map(near, found.state.clients.server, expected.state.clients)
    jax.tree.map(near, (scores.pre, scores.post), (local_scores.pre, local_scores.post))
    assert scores.shared is None


# FedPAC's server writes to its clients and remembers what they know of the classes, SCAFFOLD's counts its clients.
# FedBABU's clients fine-tune before they are scored.
@pytest.mark.parametrize("name", ["fedpac", "scaffold", "fedbabu"])
def test_a_client_is_the_federation_of_it_alone(name, apart, model, trainer, federation):
    tables = jax.tree.map(lambda leaf: np.asarray(leaf)[:1], (federation.train, federation.test))
    one = federation._replace(train=tables[0], test=tables[1])
    found, scores = apart(name)
    expected, scores_of_one = play(METHODS[name](model, trainer), 1, one)
    jax.tree.map(near, client(found.state.clients.server, 0), expected.state.server)
    jax.tree.map(near, client(found.state.clients.client, 0), client(expected.state.clients, 0))
    for point in ("pre", "post"):
        jax.tree.map(near, client(getattr(scores, point), 0), client(getattr(scores_of_one, point), 0))


def test_the_first_message_of_a_client_meets_its_own_server_alone(model, trainer, federation):
    """FedFCD's round -1: what the server knows of the classes are the client's own class means."""
    before = jax.jit(Engine(alone(METHODS["fedfcd"](model, trainer)), N).init)(KEY, federation)
    clients = jax.tree.map(np.asarray, before.state.clients)
    mlp, theta = MLP(federation.x, federation.y), to_numpy(client(clients.client, 0)["extractor"])
    for i in range(N):
        rows = held(federation.train, i)
        means, counts = numpy_class_means(mlp.extract(theta, rows), mlp.y[rows], CLASSES)
        representations = client(clients.server.representations, i)
        np.testing.assert_array_equal(representations.valid, counts > 0)
        near(representations.mean[counts > 0], means[counts > 0])


def test_messages_and_calibration_are_of_the_clients_own_server(model, trainer, federation):
    """A head calibrated to answer the client's largest class, times a message of the calibrated server."""

    def dispatch(now, server, clients, cohort):
        del now
        # As many rows as there are clients: here one, whoever it is.
        assert cohort.ids.shape == (1,)
        return jnp.sum(server["head"]["bias"]) * jnp.ones((1,))

    def calibrate(now, view, own, data):
        del now, own
        return data.class_counts

    def shift(now, server, uploads, cohort):
        del now, cohort
        return {**server, "head": {**server["head"], "bias": uploads[0]}}

    def predict(answer, x):
        return jnp.broadcast_to(answer, (len(x), CLASSES))

    method = fedavg(model, trainer)._replace(
        init=lambda key, clients: (model.init(key), Inbox(jnp.zeros(()))),
        personal=lambda view, own: view["head"]["bias"] * own.inbox,
        predict=predict,
        dispatch=dispatch,
        calibrate=Calibration(calibrate, shift),
    )
    engine = Engine(alone(method), N)
    before = jax.jit(engine.init)(KEY, federation)
    found = jax.jit(engine.pre)(KEY, at(0), before.state, federation).test.accuracy
    for i in range(N):
        counts = np.asarray(federation.train.class_counts)[i]
        rows = held(federation.test, i)
        expected = np.mean(np.asarray(federation.y)[rows] == counts.argmax()) if len(rows) else 0.0
        near(float(found[i]), expected)


@pytest.fixture(scope="module")
def data(federation):
    return client_data(federation.x, federation.y, client(federation.train, 2))


def test_a_client_without_samples_keeps_its_server(model, trainer, data):
    """The mean over nobody would be zeros."""
    idle = fedavg(model, trainer)._replace(local=lambda now, view, own, data: Update(own, view, NO_STEPS))
    _, own = alone(idle).init(KEY, N)
    update = jax.jit(alone(idle).local)(now(KEY, 0), (), own, data._replace(count=jnp.array(0, jnp.int32)))
    jax.tree.map(np.testing.assert_array_equal, update.client, own)


def test_a_client_calibrates_on_its_samples_without_copies_and_augmentation(model, trainer, data):
    seen = []

    def calibrate(now, view, own, data):
        seen.append(data)
        return ()

    method = fedavg(model, trainer)._replace(calibrate=Calibration(calibrate, lambda now, server, *_: server))
    augmented = augment(KEY, add_copies(KEY, data, "concat"), "crop_flip", every="epoch")
    _, own = alone(method).init(KEY, N)
    alone(method).personalize(now(KEY, 0), (), own, augmented)
    (found,) = seen
    assert (found.original, found.augmentation, int(found.id)) == (None, None, 0)
    np.testing.assert_array_equal(found.index, data.index)
    assert int(found.count) == int(data.count) < int(augmented.count)


def test_a_client_is_the_first_of_its_federation_in_all_that_it_does(model, trainer, data):
    """Whatever it is called among the others: the server that it meets has one row."""
    seen = []

    def told(data, answer):
        seen.append(int(data.id))
        return answer

    method = fedavg(model, trainer)._replace(
        init=lambda key, clients: ((), ()),
        setup=lambda now, view, own, data: told(data, (own, view)),
        local=lambda now, view, own, data: told(data, Update(own, view, NO_STEPS)),
        aggregate=lambda now, server, clients, uploads, cohort: (server, clients),
        personalize=lambda now, view, own, data: told(data, (view, own)),
    )
    _, own = alone(method).init(KEY, N)
    for work in (alone(method).setup, alone(method).local, alone(method).personalize):
        work(now(KEY, 0), (), own, data._replace(id=jnp.array(5)))
    assert seen == [0, 0, 0]


def test_dispatch_work_and_aggregation_have_keys_of_their_own(model, trainer, data):
    def bits(now):
        return jax.random.key_data(now.key)

    method = fedavg(model, trainer)._replace(
        init=lambda key, clients: (jnp.zeros((3, 2), jnp.uint32), Inbox(jnp.zeros(2, jnp.uint32))),
        dispatch=lambda now, server, clients, cohort: bits(now)[None],
        local=lambda now, view, own, data: Update(own, bits(now), NO_STEPS),
        aggregate=lambda now, server, clients, sent, cohort: (
            jnp.stack([clients.inbox[0], sent[0], bits(now)]),
            clients,
        ),
    )
    _, own = alone(method).init(KEY, N)
    keys = jax.jit(alone(method).local)(now(KEY, 0), (), own, data).client.server
    assert len(np.unique(keys, axis=0)) == 3


def test_what_its_own_server_says_is_recorded(model, trainer, data):
    method = alone(METHODS["fedamp"](model, trainer))
    _, own = jax.eval_shape(lambda: method.init(KEY, N))
    update = jax.eval_shape(lambda own: method.local(now(KEY, 0), (), own, data), own)
    assert update.diagnostics.keys() == {"attention"}


def test_nothing_is_exchanged(apart, model, trainer, federation):
    for name in ("fedecouple", "pgfedsplit"):
        shapes = survey(Engine(alone(METHODS[name](model, trainer)), N), federation)[1]
        assert jax.tree.leaves((shapes.down, shapes.up)) == []
    run, _ = apart("fedpac")
    assert shapes.sent_bytes(run.traffic) == 0


def test_a_config_asks_for_it():
    tables = {"data": {"source": "digits", "clients": 4}, "method": {"name": "fedecouple"}}
    shape = DataShape("digits", (8, 8, 1), 10, None)
    together = make_engine(Config(**tables), shape).method
    apart = make_engine(Config(**tables, participation={"collaborate": False}), shape).method
    server, _ = jax.eval_shape(lambda key: apart.init(key, 4), KEY)
    assert (apart.broadcast(server), apart.headline, apart.copies) == ((), together.headline, together.copies)
    assert together.global_predict is not None
    assert apart.global_predict is None


def test_a_method_that_selects_does_so_alone_too(model, trainer):
    assert alone(METHODS["fedfomo"](model, trainer)).selects
    assert not alone(METHODS["fedavg"](model, trainer)).selects


def test_a_step_takes_as_many_batches_as_with_others(model, trainer):
    method = METHODS["perfedavg"](model, trainer)
    assert alone(method).batches_per_step == method.batches_per_step > 1


def test_after_training_a_client_is_scored_on_what_it_has_trained(model, trainer, data):
    """As with others; a server that takes half a step is not yet where its client is."""
    method = fedavg(model, trainer)._replace(
        init=lambda key, clients: (jnp.zeros(()), ()),
        local=lambda now, view, own, data: Update(own, view + 1, NO_STEPS),
        aggregate=lambda now, server, clients, uploads, cohort: (server + uploads[0] / 2, clients),
    )
    _, own = alone(method).init(KEY, N)
    update = alone(method).local(now(KEY, 0), (), own, data)
    assert alone(method).personal(*update.trained) == 1
    assert alone(method).personal((), update.client) == 0.5


def test_its_server_speaks_of_the_round_that_is_done(model, trainer, federation):
    counting = fedavg(model, trainer)._replace(
        init=lambda key, clients: (jnp.zeros(()), ()),
        local=lambda now, view, own, data: Update(own, view, NO_STEPS),
        aggregate=lambda now, server, clients, uploads, cohort: (server + 1, clients),
        diagnose=lambda server: {"rounds": server},
    )
    _, own = alone(counting).init(KEY, N)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    assert float(alone(counting).local(now(KEY, 0), (), own, data).diagnostics["rounds"]) == 1
