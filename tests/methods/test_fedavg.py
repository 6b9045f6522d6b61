"""FedAvg: reductions to plain SGD, and what is exchanged."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedavg import fedavg
from tests import generator
from tests.reference import MLP, client_key, held, now, to_numpy

KEY = generator.key(8)


def play(method, clients, rounds, federation):
    engine = Engine(method, clients)
    first = jax.jit(engine.init)(KEY, federation)
    bounds = jnp.zeros((), jnp.int32), jnp.array(rounds, jnp.int32)
    return first.state.server, jax.jit(engine.rounds)(KEY, first, *bounds, jnp.array(True), federation).state.server


def only(federation, rows):
    def take(clients):
        return jax.tree.map(lambda leaf: leaf[rows], clients)

    return federation._replace(train=take(federation.train), test=take(federation.test))


def assert_close(tree, expected, rtol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), tree, expected)


def test_one_client_alone_runs_plain_sgd(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.8)
    w, found = play(fedavg(model, trainer), 1, 3, only(federation, np.array([4])))
    w, mlp = to_numpy(w), MLP(federation.x, federation.y)
    for t in range(3):
        w, _ = mlp.train(w, client_key(KEY, t, 0), t, held(federation.train, 4), trainer)
    assert_close(found, w, 1e-4)


def test_identical_clients_agree_with_each_of_them(model, trainer, federation):
    trainer = replace(trainer, batch_size=32)
    w, found = play(fedavg(model, trainer), 4, 1, only(federation, np.array([2, 2, 2, 2])))
    mlp = MLP(federation.x, federation.y)
    w, _ = mlp.train(to_numpy(w), client_key(KEY, 0, 3), 0, held(federation.train, 2), trainer)
    assert_close(found, w, 1e-4)


def test_the_whole_model_goes_down_and_comes_back(model, trainer, federation):
    method = fedavg(model, trainer)
    params = jax.eval_shape(model.init, KEY)
    server, client = jax.eval_shape(lambda: method.init(KEY, 7))
    data = client_data(federation.x, federation.y, jax.tree.map(lambda leaf: leaf[0], federation.train))
    upload = jax.eval_shape(method.local, now(KEY, 0), server, client, data).upload
    assert jax.eval_shape(method.broadcast, server) == params == upload
    assert sum(leaf.size for leaf in jax.tree.leaves(upload)) == 16 * 8 + 8 + 8 * 3 + 3
    assert client == ()
