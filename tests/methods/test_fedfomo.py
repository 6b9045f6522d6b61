"""FedFomo against rounds in NumPy, the choice and the weights of its candidates, and its limits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import round_keys
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods.fedfomo import fedfomo
from fedjax_pfl.methods.fedfomo.candidates import Candidates, choose, mix
from fedjax_pfl.methods.fedfomo.method import Client, Server, Upload
from fedjax_pfl.methods.local import local
from fedjax_pfl.ops.training import phase_key
from tests.play import KEY, SOME, N, exchanged, play, update_of
from tests.reference import MLP, at, client, client_key, held, now, to_numpy

ROUNDS, HYPER = 5, {"candidates": 3, "exploration": 0.9, "exploration_decay": 0.3}

near = partial(np.testing.assert_allclose, rtol=3e-4, atol=3e-5)


@pytest.fixture(scope="module")
def federation(federation):
    """With validation samples; client 3 has none."""
    return federation._replace(validation=federation.test)


def vector(w):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(w)])


def chosen(t, i, known, preference):
    """The other candidates of client i in round t, and how many of them were drawn at random."""
    of_round = phase_key(phase_key(round_keys(KEY, at(t)).aggregate, "dispatch"), "candidates")
    left, found, random = set(range(N)) - {i}, [], 0
    for key in jax.random.split(jax.random.fold_in(of_round, i), HYPER["candidates"] - 1):
        key_kind, key_tie = jax.random.split(key)
        pool = left & known or left
        explores = jax.random.uniform(key_kind) < HYPER["exploration"] - HYPER["exploration_decay"] * t
        best = max(preference[i, j] for j in pool)
        luck = np.asarray(jax.random.uniform(key_tie, (N,)))
        found.append(max((j for j in pool if explores or preference[i, j] == best), key=lambda j: luck[j]))
        left -= {found[-1]}
        random += bool(explores)
    return found, random


def mixed(mlp, reference, candidates, rows):
    """Steps 2 and 3: the mix, and a_j of all candidates, the own model first."""
    if not len(rows):
        return candidates[0], np.zeros(len(candidates))
    apart = [np.linalg.norm(vector(w) - vector(reference)) for w in candidates]
    better = [mlp.loss(reference, rows) - mlp.loss(w, rows) for w in candidates]
    a = np.array([gain / (distance + 1e-5) for gain, distance in zip(better, apart, strict=True)])
    weights = np.maximum(a, 0)
    if weights.sum() == 0:
        return reference, a
    return jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=weights), *candidates), a


def test_rounds_and_scores_before_training_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9)
    method = fedfomo(model, trainer, **HYPER)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp, w0 = MLP(federation.x, federation.y), to_numpy(client(start.state.clients, 0)).params
    rows = [held(federation.train, i) for i in range(N)]
    own, reference, known, preference = [w0] * N, [w0] * N, set(), np.zeros((N, N))
    post, cases, random = {}, [], []

    def start_of(i, t):
        others, drawn = chosen(t, i, known, preference)
        found, a = mixed(mlp, reference[i], [own[i], *(own[j] for j in others)], held(federation.validation, i))
        cases.append(((a > 0).sum(), (a < 0).sum()))
        random.append(drawn)
        assert ((np.abs(a) > 1e-4) | (a == 0)).all(), "too close to tell: take another key"
        return found, others, a

    for t, cohort in enumerate(cohorts):
        begun = {i: start_of(i, t) for i in cohort}
        for i, (begin, others, a) in begun.items():
            reference[i] = begin
            own[i], _ = mlp.train(begin, client_key(KEY, t, i), t, rows[i], trainer)
            preference[i, others] += np.where(np.isin(others, list(known)), a[1:], 0.0)
            post[i] = own[i]
        known |= set(cohort)
    for i in range(N):
        found = client(end.state.clients, i)
        jax.tree.map(near, (found.params, found.reference), (own[i], reference[i]))
        jax.tree.map(near, client(end.state.server.models, i), own[i])
    near(end.state.server.preference, preference, rtol=2e-3, atol=2e-4)
    np.testing.assert_array_equal(end.state.server.known, [i in known for i in range(N)])
    pre = jax.jit(Engine(method, N).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        near([float(leaf[i]) for leaf in pre], mlp.scores(start_of(i, ROUNDS)[0], held(federation.test, i)))
        if i in post:
            near([float(leaf[i]) for leaf in end.post.test], mlp.scores(post[i], held(federation.test, i)))
    better, worse = np.array(cases).T
    assert ((better > 1) & (worse > 0)).any()
    assert ((better == 0) & (worse > 0)).any(), "a client that goes back to its reference"
    assert {0, 1, 2} == set(random)
    assert all(0 < len(cohort) < N for cohort in cohorts)


def picks(known, preference, explore, *, own=0, number=3, keys=200):
    """How often each of six clients is chosen for client ``own``."""
    free = jnp.arange(6) != own
    some = jax.vmap(lambda key: choose(key, number, free, jnp.array(known), jnp.array(preference), jnp.array(explore)))
    ids = np.asarray(some(jax.random.split(KEY, keys)))
    assert all(len(set(row)) == number and own not in row for row in ids.tolist())
    return np.bincount(ids.ravel(), minlength=6) / keys


def test_the_largest_sums_are_chosen_and_ties_are_broken_at_random():
    found = picks([True] * 6, [9.0, 3.0, 1.0, 1.0, -2.0, 2.0], 0.0)
    assert found[1] == found[5] == 1.0
    assert found[4] == 0.0
    assert 0.35 < found[2] < 0.65


def test_exploration_chooses_any():
    found = picks([True] * 6, [9.0, 3.0, 1.0, 1.0, -2.0, 2.0], 1.0)
    np.testing.assert_allclose(found[1:], 0.6, atol=0.12)


@pytest.mark.parametrize("explore", [0.0, 1.0])
def test_those_who_have_not_taken_part_come_last(explore):
    found = picks([True, False, True, False, True, False], [0.0, 5.0, -1.0, 5.0, -2.0, 0.0], explore)
    assert found[2] == found[4] == 1.0
    assert found[1] + found[3] + found[5] == pytest.approx(1.0)
    assert (found[5] == 0) == (explore == 0)


@pytest.fixture(scope="module")
def mixtures(model, federation):
    """(reference, own, others as rows) -> what client 2 makes of them."""
    rows = client(federation.train, 2), client(federation.validation, 2)
    data = client_data(federation.x, federation.y, rows[0], validation=rows[1])
    return jax.jit(lambda *models: mix(model, *models, data.validation))


@pytest.fixture(scope="module")
def descent(model, federation):
    """Models down and up the validation loss of client 2, from the initial one."""
    mlp, w = MLP(federation.x, federation.y), to_numpy(model.init(KEY))
    g = mlp.gradient(w, held(federation.validation, 2))
    return lambda step: jax.tree.map(lambda w, g: jnp.asarray(w - step * g, jnp.float32), w, g)


def rows_of(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_the_mix_is_on_the_simplex_of_those_that_are_better(mixtures, descent):
    """On a line: a mean of the candidates down the slope, with a weight of its own for each."""
    found = mixtures(descent(0.0), descent(0.3), rows_of(descent(0.6), descent(-0.5)))
    steps = (vector(descent(0.0)) - vector(found.params)) / (vector(descent(0.0)) - vector(descent(1.0)))
    at_step = np.median(steps)
    near(found.params["head"]["kernel"], descent(at_step)["head"]["kernel"])
    assert 0.3 < at_step < 0.6
    assert found.gains[0] > 0 > found.gains[1]
    assert float(found.weight_of_others) == pytest.approx((at_step - 0.3) / 0.3, abs=1e-3)


def test_a_candidate_that_is_the_reference_gains_nothing(mixtures, descent):
    found = mixtures(descent(0.2), descent(0.2), rows_of(descent(0.2), descent(0.2)))
    np.testing.assert_array_equal(found.gains, 0.0)
    jax.tree.map(np.testing.assert_array_equal, found.params, descent(0.2))
    assert float(found.weight_of_others) == 0.0


def test_where_none_is_better_the_reference_comes_back(mixtures, descent):
    found = mixtures(descent(0.4), descent(0.0), rows_of(descent(-0.5), descent(0.1)))
    assert (np.asarray(found.gains) < 0).all()
    jax.tree.map(np.testing.assert_array_equal, found.params, descent(0.4))


@pytest.mark.parametrize("diverged", [np.nan, np.inf, 1e25], ids=["nan", "inf", "finite, with a loss that is not"])
def test_a_diverged_candidate_has_no_part_in_the_mix(mixtures, descent, diverged):
    broken = jax.tree.map(lambda w: jnp.full_like(w, diverged), descent(0.0))
    found = mixtures(descent(0.0), descent(0.3), rows_of(broken, descent(0.6)))
    expected = mixtures(descent(0.0), descent(0.3), rows_of(descent(0.0), descent(0.6)))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found.gains[0] == 0 < found.gains[1]


def test_alone_a_client_keeps_its_model_whenever_it_has_improved(model, trainer, federation, descent):
    method = fedfomo(model, trainer, candidates=1)
    data = client_data(
        federation.x, federation.y, client(federation.train, 2), validation=client(federation.validation, 2)
    )
    _, own = method.init(KEY, N)
    assert own.inbox == ()
    personalize = jax.jit(partial(method.personalize, None, ()))
    for before, after, best in ((0.1, 0.4, 0.4), (0.4, 0.1, 0.4)):
        own = own._replace(reference=descent(before), params=descent(after))
        jax.tree.map(near, personalize(own, data)[1].params, descent(best))
    # Without validation samples it cannot tell.
    for nothing in (None, data.validation._replace(count=jnp.array(0, jnp.int32))):
        found = personalize(own, data._replace(validation=nothing))[1].params
        jax.tree.map(np.testing.assert_array_equal, found, own.params)


def test_only_who_has_trained_becomes_known_and_nobodys_row_says_nothing(model, trainer):
    """Client 5 has no samples, and the last row is nobody's."""
    method, w = fedfomo(model, trainer, candidates=3), {"w": jnp.zeros((3, 1))}
    server = Server({"w": jnp.zeros((N, 1))}, jnp.arange(N) < 1, jnp.zeros((N, N)))
    ids = jnp.array([[0, 1], [2, 3], [4, 5]])
    clients = Client(w, w, Candidates({"w": jnp.zeros((3, 2, 1))}, ids))
    cohort = Cohort(jnp.array([2, 5, N]), jnp.array([4.0, 0.0, 0.0]), N, N)
    sent = Upload({"w": jnp.ones((3, 1))}, jnp.array([[1.0, -2.0], [0.0, 0.0], [7.0, 7.0]]))
    after, _ = method.aggregate(now(KEY, 0), server, clients, sent, cohort)
    assert np.flatnonzero(after.known).tolist() == [0, 2]
    expected = np.zeros((N, N))
    expected[2, 0] = 1  # what client 2 got as client 1's was the initial model
    np.testing.assert_array_equal(after.preference, expected)


def test_without_validation_samples_it_trains_as_local_does(model, trainer, federation):
    found, expected = (update_of(factory(model, trainer), federation, 2) for factory in (fedfomo, local))
    jax.tree.map(np.testing.assert_array_equal, (found.upload.params, found.info), (expected.client, expected.info))
    np.testing.assert_array_equal(found.upload.gains, np.zeros(4))


def test_the_others_models_go_down_and_one_model_comes_back(model, trainer, federation):
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))
    found = exchanged(fedfomo(model, trainer, candidates=4), federation)
    assert found == (3 * (parameters + 1), parameters + 3, 5 * parameters + 3)
    assert exchanged(fedfomo(model, trainer, candidates=1), federation) == (0, parameters, 2 * parameters)
    assert exchanged(fedfomo(model, trainer, candidates=20), federation).up == parameters + N - 1


def test_a_client_says_how_much_of_its_mix_is_the_others(model, trainer, federation, mixtures, descent):
    method = fedfomo(model, trainer, candidates=3)
    rows = client(federation.train, 2), client(federation.validation, 2)
    data = client_data(federation.x, federation.y, rows[0], validation=rows[1])
    others = rows_of(descent(0.6), descent(-0.5))
    own = Client(descent(0.3), descent(0.0), Candidates(others, jnp.array([1, 4])))
    update = jax.jit(method.local)(now(KEY, 0), (), own, data)
    expected = mixtures(descent(0.0), descent(0.3), others)
    near(update.diagnostics["weight_of_others"], expected.weight_of_others)
    near(update.upload.gains, expected.gains)
    assert 0.1 < float(expected.weight_of_others) < 0.9
