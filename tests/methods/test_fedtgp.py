"""FedTGP's server against rounds in NumPy, its margin, its limits, and what is exchanged."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.engine.run import round_keys
from fedjax_pfl.method import Cohort, PerClass
from fedjax_pfl.methods.fedtgp import _margin, fedtgp
from fedjax_pfl.methods.local import local
from fedjax_pfl.ops.training import Trainer
from tests.conftest import CLASSES
from tests.methods.test_fedproto import gradient_towards
from tests.play import KEY, SOME, N, exchanged, play, update_of
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
)

ROUNDS, LAM, CAP = 3, 2.0, 0.2
SERVER = {"server_lr": 0.05, "server_epochs": 3, "server_batch_size": 4}

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def generate(generator):
    return linear(generator["out"], np.maximum(linear(generator["hidden"], generator["embedding"]), 0))


def margin_of(means, counted):
    """How far the class that is farthest from its nearest neighbour is from it; means over the clients."""
    centres = [means[counted[:, c], c].mean(axis=0) for c in np.flatnonzero(counted.any(axis=0))]
    nearest = [min(np.linalg.norm(a - b) for b in centres if b is not a) for a in centres]
    return max(nearest)


def server_loss(generator, z, y, margin, known):
    """The mean loss on these class means, and its gradient with respect to all that makes the prototypes."""
    embedding, points = generator["embedding"], generate(generator)
    apart = np.linalg.norm(z[:, None] - points, axis=2)
    value, d = softmax_loss(np.where(known, -apart - margin * np.eye(CLASSES)[y], -1e9), y)
    d_points = np.einsum("nc,nck->ck", -d / apart, points - z[:, None])
    hidden = linear(generator["hidden"], embedding)
    d_hidden = d_points @ generator["out"]["kernel"].T * (hidden > 0)
    return value, {
        "embedding": d_hidden @ generator["hidden"]["kernel"].T,
        "hidden": linear_gradient(embedding, d_hidden),
        "out": linear_gradient(np.maximum(hidden, 0), d_points),
    }


def server_step(generator, known, received, key, t):
    """The server after a round, and its loss before and after; ``received``: client -> class means and counts."""
    means, counts = map(np.array, zip(*(received[i] for i in sorted(received)), strict=True))
    z, y = means[counts > 0], np.nonzero(counts)[1]
    known, margin = known | (counts > 0).any(axis=0), margin_of(means, counts > 0)
    assert margin > CAP
    margin = CAP
    trainer = Trainer(epochs=SERVER["server_epochs"], batch_size=SERVER["server_batch_size"], lr=SERVER["server_lr"])

    def gradient(generator, rows):
        return server_loss(generator, z[rows], y[rows], margin, known)[1]

    trained = train(generator, gradient, key, t, np.arange(len(y)), trainer)
    return trained, known, [server_loss(at, z, y, margin, known)[0] for at in (generator, trained)]


def test_rounds_are_numpys(model, trainer, federation):
    start, end, cohorts = play(
        fedtgp(model, trainer, lam=LAM, margin_cap=CAP, **SERVER), federation, who=SOME, rounds=ROUNDS
    )
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    own, generator = (
        [to_numpy(client(start.state.clients, i)) for i in range(N)],
        to_numpy(start.state.server.generator),
    )
    known = np.zeros(CLASSES, bool)
    for t, cohort in enumerate(cohorts):
        received, towards = {}, gradient_towards(mlp, generate(generator), known, LAM)
        for i in cohort:
            own[i], _ = mlp.train(own[i], client_key(KEY, t, i), t, rows[i], trainer, gradient=towards)
            received[i] = class_means(mlp.features(own[i], rows[i]), mlp.y[rows[i]], CLASSES)
        generator, known, (before, after) = server_step(generator, known, received, round_keys(KEY, at(t)).aggregate, t)
        assert after < before
    jax.tree.map(near, end.state.server.generator, generator)
    np.testing.assert_array_equal(end.state.server.known, known)
    for i in range(N):
        jax.tree.map(near, client(end.state.clients, i), own[i])


@pytest.mark.parametrize(
    ("counted", "cap"),
    [([[1, 1, 1], [0, 1, 0]], 100.0), ([[1, 1, 1], [0, 1, 0]], 0.5), ([[1, 0, 1], [1, 0, 0]], 100.0)],
    ids=["all classes", "capped", "two classes"],
)
def test_the_margin_is_the_largest_distance_to_a_nearest_neighbour(counted, cap):
    counted = np.array(counted, bool)
    means = np.random.default_rng(2).normal(0, 3, (2, 3, 5))
    sent = jnp.asarray(means * counted[:, :, None], jnp.float32)
    expected = margin_of(means, counted)
    assert expected > 1
    near(_margin(sent, jnp.asarray(counted), cap), min(expected, cap))


@pytest.mark.parametrize("counted", [[[0, 1, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]]], ids=["one class", "nobody"])
def test_with_fewer_than_two_classes_there_is_no_margin(counted):
    assert float(_margin(jnp.ones((2, 3, 5)), jnp.array(counted, bool), 100.0)) == 0


@pytest.mark.parametrize(
    ("known", "part"),
    [([False, False, False], [True, False, True]), ([False, True, False], [True, True, True])],
    ids=["not yet", "before"],
)
def test_a_class_has_a_part_once_somebody_has_sent_it(known, part, model, trainer):
    """Rule R8: it is a candidate in the server's loss, and goes down, also from rounds in which nobody sends it."""
    method = fedtgp(model, trainer, **SERVER)
    server, _ = method.init(KEY, N)
    server = server._replace(known=jnp.array(known))
    counts = jnp.array([[2.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
    sums = np.random.default_rng(3).normal(0, 3, (2, CLASSES, model.dim)) * (np.asarray(counts) > 0)[:, :, None]
    cohort = Cohort(jnp.array([4, 1]), jnp.array([5.0, 1.0]), N, N)
    uploads = PerClass(counts, jnp.asarray(sums, jnp.float32))
    new, _ = jax.jit(method.aggregate)(now(KEY, 0), server, (), uploads, cohort)
    np.testing.assert_array_equal(method.broadcast(server).held, known)
    np.testing.assert_array_equal(method.broadcast(new).held, part)
    moved = np.any(new.generator["embedding"] != server.generator["embedding"], axis=1)
    np.testing.assert_array_equal(moved, part)


def test_read_by_prototypes_the_nearest_of_a_known_class_decides(model, trainer, federation):
    method = fedtgp(model, trainer, reading="prototype")
    server, own = method.init(jax.random.key(10), N)  # where every class is the nearest to some of the samples

    @jax.jit
    def answers(known):
        view = method.broadcast(server._replace(known=known))
        return jnp.argmax(method.predict(method.personal(view, own), federation.x), axis=1)

    z = MLP(federation.x, federation.y).features(to_numpy(own), np.arange(len(federation.y)))
    apart = np.linalg.norm(z[:, None] - generate(to_numpy(server.generator)), axis=2)
    for known in ([True, True, True], [True, False, True]):
        expected = np.where(known, apart, np.inf).argmin(axis=1)
        assert set(expected) == set(np.flatnonzero(known))
        np.testing.assert_array_equal(answers(np.array(known)), expected)


def test_without_the_pull_it_is_local_bit_for_bit(model, trainer, federation):
    """Whether or not the prototypes are of use for anything else."""
    methods = fedtgp(model, trainer, lam=0.0), fedtgp(model, trainer, lam=0.0, reading="prototype")
    expected = update_of(local(model, trainer), federation, 4)
    for found in (update_of(method, federation, 4) for method in methods):
        jax.tree.map(np.testing.assert_array_equal, (found.client, found.info), (expected.client, expected.info))


def test_prototypes_go_down_and_class_means_come_back(model, trainer, federation):
    floats = exchanged(fedtgp(model, trainer), federation)
    assert floats.down == floats.up == CLASSES * model.dim + CLASSES
    unread = exchanged(fedtgp(model, trainer, lam=0.0), federation)
    assert (unread.down, unread.up) == (0, 0)


def test_both_layers_of_the_generator_are_drawn_apart(model, trainer):
    server, _ = fedtgp(model, trainer).init(KEY, N)
    hidden, out = (np.ravel(server.generator[name]["kernel"]) for name in ("hidden", "out"))
    assert abs(np.corrcoef(hidden, out)[0, 1]) < 0.5
