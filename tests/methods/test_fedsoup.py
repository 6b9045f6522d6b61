"""FedSoup against rounds in NumPy, its limits, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data, pack
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedsoup import Pool, fedsoup
from tests.play import KEY, SOME, N, exchanged, play
from tests.reference import MLP, client, client_key, held, now, to_numpy, weighted_mean

START, ROUNDS = 1, 7

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def federation(federation):
    """With validation samples of all kinds, so that other clients' models often help; client 3 has none."""
    everybodys = np.concatenate([held(federation.test, i) for i in range(N)])
    rows = [everybodys if i != 3 else everybodys[:0] for i in range(N)]
    return federation._replace(validation=pack(rows, np.asarray(federation.y), 3))


def mean(*models):
    return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *models)


def test_rounds_and_scores_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9)
    start, end, cohorts = play(fedsoup(model, trainer, start_round=START), federation, who=SOME, rounds=ROUNDS)
    mlp, server = MLP(federation.x, federation.y), to_numpy(start.state.server)
    pools, post, decisions = [[] for _ in range(N)], {}, set()
    for t, cohort in enumerate(cohorts):
        uploads, rows = [], [held(federation.train, i) for i in cohort]
        for i, held_rows in zip(cohort, rows, strict=True):
            own, _ = mlp.train(server, client_key(KEY, t, i), t, held_rows, trainer)
            if t >= START:
                candidates, valid = (pools[i], [*pools[i], server]), held(federation.validation, i)
                without, with_it = (mean(own, *pool) for pool in candidates)
                accepts = mlp.scores(with_it, valid)[0] > mlp.scores(without, valid)[0]
                decisions.add((bool(pools[i]), bool(accepts)))
                own, pools[i] = (with_it, candidates[1]) if accepts else (without, candidates[0])
            post[i] = own
            uploads.append(own)
        server = weighted_mean(uploads, list(map(len, rows)))
    assert decisions == {(False, False), (False, True), (True, False), (True, True)}
    jax.tree.map(near, end.state.server, server)
    np.testing.assert_array_equal(end.state.clients.size, [len(pool) for pool in pools])
    for i in range(N):
        expected = mean(*pools[i]) if pools[i] else to_numpy(start.state.server)
        jax.tree.map(near, client(end.state.clients.mean, i), expected)
        if i in post:
            near([float(leaf[i]) for leaf in end.post.test], mlp.scores(post[i], held(federation.test, i)))


@pytest.fixture(scope="module")
def soup(model, trainer):
    """A client's part."""
    return jax.jit(fedsoup(model, trainer, start_round=START).local)


def test_before_it_starts_and_with_nothing_to_select_on_it_is_fedavg_bit_for_bit(model, trainer, federation, soup):
    pool = Pool(model.init(KEY), jnp.zeros((), jnp.int32))
    received = jax.tree.map(lambda leaf: leaf + 0.1, pool.mean)
    data = client_data(federation.x, federation.y, client(federation.train, 4))
    valid = data._replace(validation=client_data(federation.x, federation.y, client(federation.validation, 4)))
    nobody = valid.validation._replace(count=jnp.array(0, jnp.int32))
    expected = jax.jit(fedavg(model, trainer).local)(now(KEY, 0), received, (), data).upload
    for t, samples in ((START - 1, valid), (START, data), (START, data._replace(validation=nobody))):
        update = soup(now(KEY, t), received, pool, samples)
        jax.tree.map(np.testing.assert_array_equal, (update.upload, update.client), (expected, pool))
    # Rejected with a pool: the mean with that alone.
    update = soup(now(KEY, START), received, pool._replace(size=jnp.array(3, jnp.int32)), data)
    jax.tree.map(near, update.upload, jax.tree.map(lambda own, mean: (own + 3 * mean) / 4, expected, pool.mean))
    none = valid._replace(count=jnp.array(0, jnp.int32))
    update = soup(now(KEY, START), received, pool._replace(size=jnp.array(3, jnp.int32)), none)
    jax.tree.map(np.testing.assert_array_equal, (update.upload, update.client.mean), (received, pool.mean))
    assert int(update.client.size) == 3


@pytest.mark.parametrize(("label", "padding"), [(0, 1), (1, 0)], ids=["it helps", "it does not"])
def test_padding_has_no_say_in_the_selection(label, padding, model, federation, soup):
    """All answers are class 0 with the received model, 1 without; the padding stands for samples of the other class."""
    w, y = model.init(KEY), np.asarray(federation.y)
    in_favour_of_0, in_favour_of_1 = (
        {**w, "head": {**w["head"], "bias": jnp.asarray(bias)}} for bias in np.diag(np.float32([220, 100, 0]))[:2]
    )
    # Of the biases, 1/4 and 3/4 remain without the received model, and 2/5 and 3/5 with it.
    index = np.full(federation.validation.index.shape[1], np.flatnonzero(y == padding)[0], np.int32)
    index[0] = np.flatnonzero(y == label)[0]
    samples = client(federation.validation, 4)._replace(index=jnp.asarray(index), count=jnp.array(1, jnp.int32))
    data = client_data(federation.x, federation.y, client(federation.train, 4), validation=samples)
    update = soup(now(KEY, START), in_favour_of_0, Pool(in_favour_of_1, jnp.array(3, jnp.int32)), data)
    assert int(update.client.size) == int(update.diagnostics["pool"]) == 3 + (label == 0)


def test_the_model_goes_down_and_comes_back_and_the_pool_stays(model, trainer, federation):
    parameters = 16 * 8 + 8 + 8 * 3 + 3
    assert exchanged(fedsoup(model, trainer), federation) == (parameters, parameters, parameters + 1)
