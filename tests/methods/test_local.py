"""Local: nobody hears of anybody."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.local import local
from tests import generator
from tests.reference import MLP, client_key, held, to_numpy

KEY = generator.key(2)


@pytest.fixture(scope="module")
def play(model, trainer):
    engine = Engine(local(model, trainer), 7)
    init, rounds, pre = jax.jit(engine.init), jax.jit(engine.rounds), jax.jit(engine.pre)

    def run(federation):
        two = jnp.array(2, jnp.int32)
        last = rounds(KEY, init(KEY, federation), jnp.zeros((), jnp.int32), two, jnp.array(True), federation)
        return last, pre(KEY, two, last.state, federation)

    return run


def row(tree, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), tree)


def test_the_data_of_other_clients_change_nothing_bit_for_bit(play, federation):
    mine = 4
    kept = held(federation.train, mine)
    others = np.setdiff1d(np.arange(len(federation.y)), kept)
    rng = np.random.default_rng(1)
    x, y = np.array(federation.x), np.array(federation.y)
    x[others], y[others] = rng.permutation(255 - x[others]), rng.permutation(y[others])
    # The others also change places, so that client 4 is mapped in another position.
    order = np.array([6, 5, 2, 0, mine, 1, 3])
    train = jax.tree.map(lambda leaf: leaf[order], federation.train)
    changed = federation._replace(x=jnp.asarray(x), y=jnp.asarray(y), train=train)
    (before, _), (after, _) = play(federation), play(changed)
    assert all(
        jax.tree.leaves(jax.tree.map(np.array_equal, row(before.state.clients, mine), row(after.state.clients, mine)))
    )
    assert not any(
        jax.tree.leaves(jax.tree.map(np.array_equal, row(before.state.clients, 2), row(after.state.clients, 2)))
    )


def test_each_client_runs_plain_sgd_from_the_common_start(play, model, trainer, federation):
    clients = to_numpy(play(federation)[0].state.clients)
    start = to_numpy(model.init(jax.random.split(KEY, 3)[0]))
    mlp = MLP(federation.x, federation.y)
    for i in range(7):
        w = start
        for t in range(2):
            w, _ = mlp.train(w, client_key(KEY, t, i), t, held(federation.train, i), trainer)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), row(clients, i), w)


def test_pre_of_the_next_round_is_post(play, federation):
    last, pre = play(federation)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), last.post, pre)


def test_nothing_is_exchanged_and_there_is_no_global_model(model, trainer, federation, play):
    method = local(model, trainer)
    state = play(federation)[0].state
    assert jax.tree.leaves((state.server, method.broadcast(state.server))) == []
    assert method.global_predict is None
