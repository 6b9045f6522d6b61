"""The round step by step, and whole runs of FedAvg against NumPy and plain loops."""

import math
import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

from fedjax_pfl.data.augment import add_copies, augment
from fedjax_pfl.data.federated import client_data, pack
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import UPDATE_COSINE, Engine, mean_cosine
from fedjax_pfl.engine.scoring import Scores
from fedjax_pfl.experiment.summary import summarize
from fedjax_pfl.method import Calibration, Method, PerClass, SentIf, TrainInfo, Update, part_of
from fedjax_pfl.methods import METHODS
from fedjax_pfl.ops.training import Trainer
from tests import generator
from tests.conftest import TRAIN_SIZES
from tests.play import drawn
from tests.reference import MLP, at, client_key, held, to_numpy, weighted_mean
from tests.toys import witness

KEY = generator.key(15)


# --- Selection -------------------------------------------------------------------------------------------------------

SIZES = jnp.array([4, 9, 1, 7, 7, 2, 30, 5, 6, 11], jnp.int32)
T = 2000


def cohorts(participation, placement=None, most_sorted=100):
    """Who is drawn over many rounds, as it is done of few clients or of many."""
    engine = Engine(Method(None, None, None, None, None), len(SIZES), participation, placement or Placement())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedjax_pfl.engine.participation._MOST_SORTED", most_sorted)
        return drawn(engine, KEY, SIZES, T)


@pytest.fixture(scope="module", params=[100, 1], ids=["few clients", "many clients"])
def most_sorted(request):
    return request.param


@pytest.fixture(scope="module")
def partial(most_sorted):
    return cohorts(Participation(0.4, 0.4), most_sorted=most_sorted)


def test_a_cohort_holds_the_right_number_of_different_clients(partial):
    ids, selected = partial
    assert ids.shape == (T, 4)
    assert (selected == 4).all()
    assert (np.diff(np.sort(ids)) > 0).all()
    assert ids.min() == 0
    assert ids.max() == 9


def test_every_client_is_selected_equally_often(partial):
    share = np.bincount(partial[0].ravel(), minlength=10) / T
    np.testing.assert_allclose(share, 0.4, atol=4.5 * np.sqrt(0.24 / T))


def test_a_cohort_is_ordered_by_falling_size(partial):
    assert (np.diff(np.asarray(SIZES)[partial[0]]) <= 0).all()


def test_the_share_is_drawn_anew_each_round_from_its_whole_range():
    ids, selected = cohorts(Participation(0.2, 0.8))
    assert ((ids < 10).sum(axis=1) == selected).all()
    values, counts = np.unique(selected, return_counts=True)
    assert values.tolist() == [2, 3, 4, 5, 6, 7, 8]
    # The share is uniform, so that the two end values, which half as many shares round to, come half as often.
    np.testing.assert_allclose(counts / T, np.array([1, 2, 2, 2, 2, 2, 1]) / 12, atol=0.04)
    share = np.bincount(ids.ravel(), minlength=11)[:10] / T
    np.testing.assert_allclose(share, 0.5, atol=0.05)


def test_however_small_the_drawn_share_is_one_client_takes_part():
    ids, selected = cohorts(Participation(0.01, 0.2))
    assert sorted(set(selected.tolist())) == [1, 2]
    assert ((ids < 10).sum(axis=1) == selected).all()


def test_selected_clients_drop_out_with_the_given_probability():
    ids, selected = cohorts(Participation(dropout=0.3))
    assert (selected == 10).all()
    share = np.bincount(ids.ravel(), minlength=11)[:10] / T
    np.testing.assert_allclose(share, 0.7, atol=4.5 * np.sqrt(0.21 / T))
    # Failures are independent: the number that is left is binomial.
    assert np.var((ids < 10).sum(axis=1)) == pytest.approx(2.1, rel=0.15)


def test_full_participation_is_everyone_in_every_round():
    ids, selected = cohorts(Participation())
    assert (np.sort(ids) == np.arange(10)).all()
    assert (selected == 10).all()


def test_the_largest_cohort_is_the_rounded_share_and_at_least_one_client():
    shares = [0.01, 0.24, 0.26, 0.5, 1.0]
    assert [Participation(0.01, share).cohort_size(10) for share in shares] == [1, 2, 3, 5, 10]


@pytest.fixture(scope="module")
def poisson():
    """Who is there in each round, [T, 10], of a Poisson sample with probability 0.3."""
    ids, selected = cohorts(Participation(0.3, 0.3, sampling="poisson"))
    there = (ids[:, :, None] == np.arange(10)).any(axis=1)
    np.testing.assert_array_equal(there.sum(axis=1), selected)
    return there


def test_in_a_poisson_sample_each_client_is_there_by_itself(poisson):
    np.testing.assert_allclose(poisson.mean(axis=0), 0.3, atol=4.5 * np.sqrt(0.21 / T))
    # The number of participants is binomial: also nobody, in 56 of 2,000 rounds.
    assert np.var(poisson.sum(axis=1)) == pytest.approx(2.1, rel=0.15)
    assert 30 < (poisson.sum(axis=1) == 0).sum() < 90
    together = np.corrcoef(poisson.T)[~np.eye(10, dtype=bool)]
    assert np.abs(together).max() < 4.5 / np.sqrt(T)


def test_a_poisson_sample_has_a_row_for_everybody_but_in_one_round_of_10_to_the_15():
    who = Participation(0.01, 0.01, sampling="poisson")
    for clients in (10, 1000, 100_000):
        rows = who.cohort_size(clients)
        assert binom.sf(rows, clients, 0.01) < 1e-15 < binom.sf(rows - 1, clients, 0.01)
    assert who.cohort_size(100_000) < 1300
    assert Participation(1.0, 1.0, sampling="poisson").cohort_size(50) == 50


def test_with_more_than_its_rows_a_poisson_sample_would_keep_those_drawn_first(poisson, monkeypatch):
    monkeypatch.setattr(Participation, "cohort_size", lambda *_: 2)
    ids, selected = cohorts(Participation(0.3, 0.3, sampling="poisson"))
    np.testing.assert_array_equal(selected, np.minimum(poisson.sum(axis=1), 2))
    assert all(poisson[t, i] for t in range(T) for i in ids[t] if i < 10)
    assert len(np.unique(ids)) == 11


def test_a_poisson_sample_may_have_a_share_of_each_round_and_lose_some():
    ids, selected = cohorts(Participation(0.2, 0.6, 0.5, sampling="poisson"))
    assert selected.mean() == pytest.approx(4.0, rel=0.05)
    assert (ids < 10).sum(axis=1).mean() == pytest.approx(2.0, rel=0.07)
    # Wider than a binomial of 0.4: the share itself varies, by (0.6 - 0.2)^2 / 12.
    assert np.var(selected) == pytest.approx(10 * 0.4 * 0.6 + 90 * 0.16 / 12, rel=0.15)
    everyone, _ = cohorts(Participation(sampling="poisson"))
    assert (np.sort(everyone) == np.arange(10)).all()


def test_who_is_selected_does_not_depend_on_the_placement(partial, most_sorted, mesh):
    ids, selected = cohorts(Participation(0.4, 0.4), Placement(mesh, 3), most_sorted)
    assert ids.shape == (T, 6)
    assert ((ids == 10).sum(axis=1) == 2).all()
    np.testing.assert_array_equal(np.sort(ids)[:, :4], np.sort(partial[0]))
    np.testing.assert_array_equal(selected, partial[1])


# --- Placement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "rows"), [(1, 5), (2, 8), (2, 2), (3, 12), (4, 20), (4, 24)])
def test_the_balanced_order_gives_each_device_its_fair_share_largest_first(devices, rows):
    # A stand-in for a placement on more devices than there are.
    order = Placement.balanced_order(SimpleNamespace(devices=devices), rows)
    assert sorted(order) == list(range(rows))
    hands = order.reshape(devices, -1)
    assert (np.diff(hands, axis=1) > 0).all()
    # There and back: with an even number of cards, hands of evenly falling cards are worth the same.
    assert hands.shape[1] % 2 or len(set(hands.sum(axis=1))) == 1
    sizes = np.sort(np.random.default_rng(rows).integers(1, 100, rows))[::-1]
    loads = sizes[hands].sum(axis=1)
    assert loads.max() - loads.min() <= sizes[0] - sizes[-1]


def test_rows_are_filled_up_to_whole_chunks_on_every_device(mesh):
    assert [Placement().padded(n) for n in (1, 7)] == [1, 7]
    assert [Placement(chunk=3).padded(n) for n in (1, 3, 7)] == [3, 3, 9]
    assert [Placement(mesh, 2).padded(n) for n in (1, 4, 7)] == [4, 4, 8]


def test_rows_per_client_are_split_only_if_the_devices_divide_their_number(mesh):
    assert Placement().shardings(8) == (None, None)
    shared, rows = Placement(mesh).shardings(8)
    assert shared.is_fully_replicated
    assert rows.shard_shape((8, 3)) == (4, 3)
    assert Placement(mesh).shardings(7)[1].is_fully_replicated


# --- Whole runs against NumPy ----------------------------------------------------------------------------------------

TRAINER = {"lr_decay": 0.9, "weight_decay": 0.01}
WHO = {"full": Participation(), "partial": Participation(0.3, 0.8, 0.25)}
ROUNDS = {"full": 3, "partial": 6}


def validated(federation):
    """The federation with some of the clients' training samples as validation samples, too; client 1 has none."""
    rows = [held(federation.train, i)[1::2] for i in range(7)]
    return federation._replace(validation=pack(rows, np.asarray(federation.y), 3))


class Reference:
    """FedAvg by plain loops over clients; only who takes part is asked of the engine."""

    def __init__(self, engine, w, federation, trainer, rounds):
        count = np.asarray(federation.train.count)
        tables = federation.train, federation.test, federation.validation
        train, *scored = ([held(part, i) for i in range(len(count))] for part in tables)
        mlp = MLP(federation.x, federation.y)

        def scores(w, i):
            """Client i's on its test samples, and on its validation samples."""
            return [mlp.scores(w, part[i]) for part in scored]

        post = [scores(w, i) for i in range(len(count))]
        self.down, self.up, self.loss = 0, 0, math.nan
        for t, (ids, selected) in enumerate(zip(*drawn(engine, KEY, federation.train.count, rounds), strict=True)):
            present = [i for i in ids.tolist() if i < len(count)]
            trained = {i: mlp.train(w, client_key(KEY, t, i), t, train[i], trainer) for i in present}
            self.down, self.up = self.down + int(selected), self.up + len(present)
            if present:
                self.loss = np.mean([loss for _, loss in trained.values()])
            for i in present:
                post[i] = scores(trained[i][0], i)
            if present:
                w = weighted_mean([trained[i][0] for i in present], count[present])
        for i in range(engine.trainers, len(count)):  # a new client's is that of one call of local
            post[i] = scores(mlp.train(w, client_key(KEY, rounds, i), rounds, train[i], trainer)[0], i)
        self.w, self.stale = w, engine.trainers - len(present)
        pre = [scores(w, i) for i in range(len(count))]
        # Of the test samples, then of the validation samples.
        self.pre, self.post = ([Scores(*np.transpose(part)) for part in zip(*of, strict=True)] for of in (pre, post))
        pooled = np.concatenate([held(federation.pooled, i) for i in range(len(federation.pooled.count))])
        self.pooled = Scores(*mlp.scores(w, pooled))


@pytest.fixture(scope="module", params=["full", "partial"])
def fedavg(request, model, trainer, federation):
    """A run of the engine, and the same run in NumPy.

    The partial one has a new client, and scores validation samples.
    """
    trainer, some, federation = replace(trainer, **TRAINER), request.param == "partial", validated(federation)
    engine = Engine(METHODS["fedavg"](model, trainer), 7, WHO[request.param], new=int(some), validate=some)
    rounds = ROUNDS[request.param]
    first = jax.jit(engine.init)(KEY, federation)
    last = jax.jit(engine.rounds)(KEY, first, at(0), at(rounds), jnp.array(True), federation)
    scored = jax.jit(engine.score)(KEY, at(rounds), last, federation)
    expected = Reference(engine, to_numpy(first.state.server), federation, trainer, rounds)
    return SimpleNamespace(name=request.param, first=first, last=last, scored=scored, expected=expected)


def assert_close(tree, expected, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), tree, expected)


def test_the_global_model_is_numpys(fedavg):
    assert_close(to_numpy(fedavg.last.state.server), fedavg.expected.w)
    assert fedavg.last.state.clients == ()


def test_the_training_loss_is_the_mean_over_participants(fedavg):
    assert np.isnan(fedavg.first.loss)  # nobody has trained
    assert float(fedavg.last.loss) == pytest.approx(fedavg.expected.loss, rel=1e-4)


def test_traffic_counts_downloads_of_the_selected_and_uploads_of_the_present(fedavg):
    assert int(fedavg.last.traffic.down) == fedavg.expected.down
    assert int(fedavg.last.traffic.up) == fedavg.expected.up


def test_pre_scores_are_those_of_the_new_global_model(fedavg):
    assert_close(fedavg.scored.pre.test, fedavg.expected.pre[0])


def test_post_scores_are_those_of_the_last_participation(fedavg):
    assert_close(fedavg.scored.post.test, fedavg.expected.post[0])


def test_validation_samples_are_scored_beside_the_test_samples_if_at_all(fedavg):
    for point in ("pre", "post"):
        found, expected = getattr(fedavg.scored, point).validation, getattr(fedavg.expected, point)[1]
        if fedavg.name == "full":
            assert found is None
        else:
            assert_close(found, expected)


def test_global_scores_are_those_on_the_pooled_test_samples_as_a_whole(fedavg):
    assert_close(fedavg.scored.shared, fedavg.expected.pooled)


def test_partial_rounds_saw_failures_and_stale_scores(fedavg):
    """The partial run would prove little if everybody had been present in its last round."""
    up, down, stale = fedavg.expected.up, fedavg.expected.down, fedavg.expected.stale
    if fedavg.name == "partial":
        assert up < down < 6 * ROUNDS["partial"]
        assert stale > 0
    else:
        assert (up, down, stale) == (7 * ROUNDS["full"], 7 * ROUNDS["full"], 0)


# --- Corners ---------------------------------------------------------------------------------------------------------


def test_the_server_stands_still_when_the_present_clients_have_no_samples(model, trainer, federation):
    empty = np.zeros(0, np.int64)
    train = pack([empty, empty, held(federation.train, 2)], np.asarray(federation.y), model.classes)
    test = jax.tree.map(lambda leaf: np.asarray(leaf)[:3], federation.test)
    federation = federation._replace(train=train, test=test)
    engine = Engine(METHODS["fedavg"](model, trainer), 3, Participation(0.34, 0.34))
    start = jax.jit(engine.init)(KEY, federation)
    step = jax.jit(engine.round)
    present = drawn(engine, KEY, train.count, 8)[0][:, 0].tolist()
    for t, who in enumerate(present):
        new = step(KEY, at(t), start, jnp.array(True), federation)
        assert np.isnan(new.loss) == (who != 2), "there is no loss before anybody has trained"
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new._replace(loss=0.0)))
        same = jax.tree.map(np.array_equal, new.state.server, start.state.server)
        assert all(jax.tree.leaves(same)) == (who != 2)
    assert {2} < set(present)


def test_a_clients_randomness_depends_on_seed_round_and_id_alone(model, trainer, federation, mesh):
    cases = [(Participation(), Placement()), (Participation(0.3, 0.9, 0.3), Placement(mesh, 2))]
    engines = [Engine(witness(model, trainer), 7, who, where) for who, where in cases]
    start = jax.tree.map(np.asarray, jax.jit(engines[0].init)(KEY, federation))
    draws = np.array([[jax.random.uniform(client_key(KEY, t, i)) for i in range(7)] for t in range(4)])
    for engine in engines:
        old, step = start, jax.jit(engine.round)
        for t in range(4):
            new = jax.tree.map(np.asarray, step(KEY, at(t), old, jnp.array(False), federation))
            present = new.state.clients.visits > old.state.clients.visits
            expected = np.where(present, draws[t], old.state.clients.draw)
            np.testing.assert_array_equal(new.state.clients.draw, expected)
            old = new
        visits = old.state.clients.visits
        full = engine.participation.full
        assert (visits == 4).all() if full else visits.sum() == int(old.traffic.up) - 7 > 0  # setup


# --- Augmentation ----------------------------------------------------------------------------------------------------

NOTHING = TrainInfo(jnp.zeros(()), jnp.array(0, jnp.int32))
WEIGHTS = np.random.default_rng(0).integers(1, 1000, (54, 4, 4, 1)).astype(np.int32)
MATRIX = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)


def digest(data):
    """An exact number that tells apart what a client sees, and in which order."""
    x = data.take(jnp.arange(data.capacity), data.valid > 0).x.astype(jnp.int32) * WEIGHTS[: data.capacity]
    return jnp.sum(jnp.where(data.valid > 0, jnp.sum(x, axis=(1, 2, 3)), 0))


@pytest.mark.parametrize(("batch", "counted"), [(8, [n for n in TRAIN_SIZES if n >= 8]), (99, [])])
def test_a_client_that_takes_no_step_has_no_part_in_mean_loss_and_diagnostics(batch, counted, federation):
    """As where short batches are dropped; where nobody takes one, the loss stays that of the round before."""

    def local(now, view, client, data):
        steps = data.count // batch
        info = TrainInfo(jnp.where(steps > 0, data.count.astype(jnp.float32), 0.0), steps)
        return Update((), (), info, post=(view, client), diagnostics={"twice": 2 * info.loss})

    method = Method(
        init=lambda key, clients: (jnp.int32(0), ()),
        local=local,
        aggregate=lambda now, server, clients, uploads, cohort: (server, clients),
        personal=lambda view, client: view,
        predict=one_answer,
    )
    engine = Engine(method, len(TRAIN_SIZES), diagnostics=("twice",))
    run = jax.jit(engine.init)(KEY, federation)._replace(loss=jnp.array(5.0))
    run = jax.jit(engine.round)(KEY, at(0), run, jnp.array(True), federation)
    assert float(run.loss) == pytest.approx(np.mean(counted) if counted else 5.0)
    assert float(run.diagnostics["twice"]) == pytest.approx(2 * np.mean(counted) if counted else 0.0)


def test_the_mean_cosine_of_two_updates_is_that_of_all_pairs():
    rng = np.random.default_rng(2)
    updates = {"a": rng.normal(size=(5, 3, 2)).astype(np.float32), "b": rng.normal(size=(5, 4)).astype(np.float32)}
    present = np.array([True, True, False, True, True])
    flat = np.concatenate([updates["a"].reshape(5, -1), updates["b"]], axis=1)[present]
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    pairs = [unit[i] @ unit[j] for i in range(4) for j in range(i)]
    found = jax.jit(mean_cosine)
    assert float(found(updates, present)) == pytest.approx(np.mean(pairs), abs=1e-6)
    assert np.isnan(float(found(updates, np.arange(5) == 2)))
    opposite = {"a": np.array([[1, 2], [-2, -4]], np.float32)}
    assert float(found(opposite, np.array([True, True]))) == pytest.approx(-1.0)
    opposite["running_var"] = np.full((2, 1), 100.0, np.float32)
    assert float(found(opposite, np.array([True, True]))) == pytest.approx(-1.0)


def standing_still(local, **fields):
    """A method whose server keeps its view, which is far from zeros, whatever it is sent."""
    return Method(
        init=lambda key, clients: (jnp.full(2, 50.0), ()),
        local=local,
        aggregate=lambda now, server, clients, uploads, cohort: (server, clients),
        personal=lambda view, client: jnp.int32(0),
        predict=one_answer,
        **fields,
    )


@pytest.mark.parametrize("change", [False, True])
def test_updates_are_compared_whether_the_method_sends_them_or_what_became_of_the_view(change, federation):
    """Two directions at right angles, of clients of even and odd size; the view is far from both."""
    sizes = np.array(TRAIN_SIZES)
    cosine = np.mean([(sizes[i] + sizes[j]) % 2 == 0 for i in range(7) for j in range(i)])

    def local(now, view, client, data):
        step = jax.nn.one_hot(data.count % 2, 2)
        return Update((), step if change else view + step, NOTHING, post=(view, ()))

    engine = Engine(standing_still(local, sends_change=change), 7, diagnostics=(UPDATE_COSINE,))
    run = jax.jit(engine.init)(KEY, federation)
    run = jax.jit(engine.round)(KEY, at(0), run, jnp.array(False), federation)
    assert float(run.diagnostics[UPDATE_COSINE]) == pytest.approx(cosine, abs=1e-5)
    assert 0.2 < cosine < 0.8


class Sent(NamedTuple):
    params: jax.Array
    control: jax.Array


def test_of_what_is_sent_besides_parameters_nothing_is_compared(federation):
    """As SCAFFOLD's variates, which are far longer than its parameters' changes."""
    sizes = np.array(TRAIN_SIZES)
    cosine = np.mean([(sizes[i] + sizes[j]) % 2 == 0 for i in range(7) for j in range(i)])

    def local(now, view, client, data):
        return Update((), Sent(jax.nn.one_hot(data.count % 2, 2), jnp.full(2, 1e3)), NOTHING, post=(view, ()))

    still = standing_still(local, sends_change=True)
    method = still._replace(init=lambda key, clients: (Sent(jnp.full(2, 50.0), jnp.zeros(2)), ()))
    engine = Engine(method, 7, diagnostics=(UPDATE_COSINE,))
    run = jax.jit(engine.init)(KEY, federation)
    run = jax.jit(engine.round)(KEY, at(0), run, jnp.array(False), federation)
    assert float(run.diagnostics[UPDATE_COSINE]) == pytest.approx(cosine, abs=1e-5)


def test_updates_of_the_present_alone_are_compared(federation):
    """What stands in the row of an absent client would be as far from the view as zeros are."""
    sizes = np.array(TRAIN_SIZES)

    def local(now, view, client, data):
        return Update((), view + jax.nn.one_hot(data.count % 2, 2), NOTHING, post=(view, ()))

    engine = Engine(standing_still(local), 7, Participation(0.6, 0.9, 0.3), diagnostics=(UPDATE_COSINE,))
    run, step = jax.jit(engine.init)(KEY, federation), jax.jit(engine.round)
    numbers = set()
    for t, ids in enumerate(drawn(engine, KEY, federation.train.count, 6)[0]):
        present = [i for i in ids.tolist() if i < 7]
        numbers.add(len(present))
        run = step(KEY, at(t), run, jnp.array(False), federation)
        alike = [(sizes[i] + sizes[j]) % 2 == 0 for i in present for j in present if j < i]
        if present:
            expected = np.mean(alike) if alike else np.nan
            np.testing.assert_allclose(run.diagnostics[UPDATE_COSINE], expected, atol=1e-5)
    assert max(numbers) > 2
    assert min(numbers) < engine.cohort_size


@pytest.mark.parametrize("acts", [False, True])
def test_an_empty_round_is_none_but_for_a_server_that_acts_alone(acts, federation):
    method = Method(
        init=lambda key, clients: (jnp.int32(0), ()),
        local=lambda now, view, client, data: Update((), (), NOTHING, post=(view, ())),
        aggregate=lambda now, server, clients, uploads, cohort: (server + 1, clients),
        personal=lambda view, client: jnp.int32(0),
        predict=one_answer,
        acts_alone=acts,
    )
    engine = Engine(method, 7, Participation(0.2, 0.2, sampling="poisson"))
    run = jax.jit(engine.init)(KEY, federation)
    run = jax.jit(engine.rounds)(KEY, run, at(0), at(12), jnp.array(False), federation)
    _, selected = drawn(engine, KEY, federation.train.count, 12)
    assert 0 < (empty := sum(selected == 0)) < 12
    assert int(run.state.server) == (12 if acts else 12 - empty)


def recorder(kind):
    """Clients keep a digest of their training data; where ``personalize`` sees other data, all answers are turned."""

    def predict(sign, x):
        return sign * (x.reshape(len(x), -1).astype(jnp.float32) @ MATRIX)

    return Method(
        init=lambda key, clients: ((), jnp.array(0, jnp.int32)),
        local=lambda now, view, client, data: Update(digest(data), (), NOTHING, post=(digest(data), digest(data))),
        aggregate=lambda now, server, clients, uploads, cohort: (server, clients),
        personal=lambda view, client: jnp.where(view == client, 1.0, -1.0),
        predict=predict,
        personalize=lambda now, view, client, data: (digest(data), client),
        copies=kind,
    )


@pytest.mark.parametrize(
    ("kind", "crop", "where"), [("replace", "crop_flip_reflect", "map"), ("concat", "none", "sharded chunks")]
)
def test_training_data_are_augmented_afresh_each_round_and_test_data_never(kind, crop, where, federation, mesh):
    placement = Placement() if where == "map" else Placement(mesh, 2)
    engine = Engine(recorder(kind), 7, placement=placement, augment=crop)

    @jax.jit
    @jax.vmap
    def expected(key, client):
        of_copies, of_crops = (
            jax.random.fold_in(key, np.uint32(zlib.crc32(phase))) for phase in (b"augment", b"base augmentation")
        )
        data = add_copies(of_copies, client_data(federation.x, federation.y, client), kind)
        return digest(augment(of_crops, data, crop, every="epoch"))

    def hits(sign):
        x = np.asarray(federation.x, np.float64).reshape(-1, 16)
        right = np.argmax(sign * x @ MATRIX, axis=1) == np.asarray(federation.y)
        return np.array([right[held(federation.test, i)].sum() for i in range(7)])

    run, step, pre = jax.jit(engine.init)(KEY, federation), jax.jit(engine.round), jax.jit(engine.pre)
    seen = []
    for t in range(2):
        run = step(KEY, at(t), run, jnp.array(True), federation)
        keys = jnp.stack([client_key(KEY, t, i) for i in range(7)])
        np.testing.assert_array_equal(run.state.clients, expected(keys, federation.train))
        # Training and evaluation with the key of one round see the same copies, with that of the next one others.
        for scores, sign in ((run.post, 1), (pre(KEY, at(t), run.state, federation), 1)):
            np.testing.assert_array_equal(scores.test.correct, hits(sign))
        np.testing.assert_array_equal(pre(KEY, at(t + 1), run.state, federation).test.correct, hits(-1))
        seen.append(np.asarray(run.state.clients))
    assert (hits(1) != hits(-1)).any()
    assert (seen[0] != seen[1]).all()


# --- Who a client is, its validation samples, and who is counted ------------------------------------------------------


@pytest.mark.parametrize("where", ["map", "sharded chunks"])
def test_clients_know_who_they_are_and_hold_their_validation_samples(where, federation, mesh):
    federation = validated(federation)

    def seen(data):
        return {"id": data.id, "validation": digest(data.validation), "its id": data.validation.id}

    def aggregate(now, server, clients, uploads, cohort):
        counted = {"total": jnp.int32(cohort.total), "trainers": jnp.int32(cohort.trainers)}
        return counted, clients

    zeros = {"id": jnp.int32(-1), "validation": jnp.int32(0), "its id": jnp.int32(-1)}
    method = Method(
        init=lambda key, clients: ({"total": jnp.int32(clients), "trainers": jnp.int32(0)}, zeros),
        local=lambda now, view, client, data: Update(seen(data), (), NOTHING, post=(view, client)),
        aggregate=aggregate,
        personal=lambda view, client: client["id"] + client["validation"],
        predict=one_answer,
        personalize=lambda now, view, client, data: (view, seen(data)),
    )
    engine = Engine(method, 7, placement=Placement() if where == "map" else Placement(mesh, 2), new=2)
    run = jax.jit(engine.init)(KEY, federation)
    assert int(run.state.server["total"]) == 7
    run = jax.jit(engine.round)(KEY, at(0), run, jnp.array(True), federation)
    pool = federation.x, federation.y
    rows = jax.jit(jax.vmap(lambda client: digest(client_data(*pool, client))))(federation.validation)
    found = run.state.clients
    for name in ("id", "its id"):
        np.testing.assert_array_equal(found[name], [0, 1, 2, 3, 4, -1, -1])
    np.testing.assert_array_equal(found["validation"], [*rows[:5], 0, 0])
    assert len(np.unique(rows[:5])) == 5
    # New clients take part in no round, but count among all; PRE shows what they hold.
    assert {k: int(v) for k, v in run.state.server.items()} == {"total": 7, "trainers": 5}
    pre = jax.jit(engine.pre)(KEY, at(1), run.state, federation).test.correct
    right = np.asarray(federation.test.class_counts)
    np.testing.assert_array_equal(pre, right[np.arange(7), (np.arange(7) + np.asarray(rows)) % 3])


# --- What the server does before clients work, and before they are scored ---------------------------------------------


def one_answer(number, x):
    """Logits of the class that a number stands for, whatever x is."""
    return jnp.broadcast_to(jax.nn.one_hot(number % 3, 3), (len(x), 3))


class Folder(NamedTuple):
    filed: jax.Array
    inbox: dict


@pytest.mark.parametrize("where", ["map", "sharded chunks"])
def test_the_server_writes_to_each_client_before_it_works(where, federation, mesh):
    note = {name: jnp.int32(-1) for name in ("id", "t", "server", "filed")}

    def dispatch(now, server, clients, cohort):
        like = jnp.ones_like(cohort.ids)
        return {"id": cohort.ids, "t": now.t * like, "server": server * like, "filed": clients.filed}

    def local(now, view, client, data):
        return Update(client._replace(filed=client.filed + client.inbox["t"] + 1), (), NOTHING, post=(view, client))

    method = Method(
        init=lambda key, clients: (jnp.int32(clients), Folder(jnp.int32(0), note)),
        local=local,
        aggregate=lambda now, server, clients, uploads, cohort: (server + 1, clients),
        personal=lambda view, client: client.inbox["filed"] + client.inbox["t"],
        predict=one_answer,
        dispatch=dispatch,
    )
    placement = Placement() if where == "map" else Placement(mesh, 2)
    engine = Engine(method, 7, Participation(0.3, 0.7, 0.2), placement, new=1)
    run, step = jax.jit(engine.init)(KEY, federation), jax.jit(engine.round)
    filed, notes = np.zeros(7, int), np.full((4, 7), -1)
    for t, present in enumerate(drawn(engine, KEY, federation.train.count, 6)[0]):
        present = present[present < 7]
        many = np.ones(len(present), int)
        notes[:, present] = present, t * many, int(run.state.server) * many, filed[present]
        filed[present] += t + 1
        run = step(KEY, at(t), run, jnp.array(True), federation)
        np.testing.assert_array_equal(run.state.clients.filed, filed)
        np.testing.assert_array_equal([run.state.clients.inbox[name] for name in note], notes)
    assert 1 < len(np.unique(filed)) < 7
    # Before a PRE evaluation every client gets a new note.
    pre, post, *_ = jax.jit(engine.score)(KEY, at(6), run, federation)
    right = np.asarray(federation.test.class_counts)
    np.testing.assert_array_equal(pre.test.correct, right[np.arange(7), (filed + 6) % 3])
    of_new = post.test.correct[6]
    assert of_new == right[6, 6 % 3], "a new client's POST is a call of local's, with a note as well"


def test_scores_see_the_calibrated_server_and_training_does_not(federation):
    calibration = Calibration(
        local=lambda now, view, client, data: data.count % 3,
        server=lambda now, server, uploads, cohort: server + jnp.sum(uploads),
    )
    method = Method(
        init=lambda key, clients: (jnp.int32(clients), ()),
        local=lambda now, view, client, data: Update((), (), NOTHING, post=(view, client)),
        aggregate=lambda now, server, clients, uploads, cohort: (server + 1, clients),
        personal=lambda view, client: view,
        predict=one_answer,
        global_predict=one_answer,
    )
    right = np.asarray(federation.test.class_counts)
    extra = sum(n % 3 for n in TRAIN_SIZES[:6])
    assert [extra % 3, (extra + TRAIN_SIZES[6]) % 3] == [1, 0], (
        "calibration matters, and that the new client has no say"
    )
    engines = [Engine(method._replace(calibrate=calibrate), 7, new=1) for calibrate in (calibration, None)]
    run = jax.jit(engines[0].init)(KEY, federation)
    run = jax.jit(engines[0].rounds)(KEY, run, at(0), at(2), jnp.array(True), federation)
    assert int(run.state.server) == 7 + 2
    for engine, more in zip(engines, (extra, 0), strict=True):
        found = jax.jit(engine.score)(KEY, at(2), run, federation)
        np.testing.assert_array_equal(found.pre.test.correct, right[:, (9 + more) % 3])
        assert float(found.shared.correct) == right[:, (9 + more) % 3].sum()
        # POST is what was trained; a new client, too, starts from what is broadcast.
        np.testing.assert_array_equal(found.post.test.correct[:6], right[:6, 8 % 3])
        assert float(found.post.test.correct[6]) == right[6, 9 % 3]


# --- Traffic of parts of which some classes are sent -----------------------------------------------------------------


def chatter(classes):
    """Sent up: three numbers for each class held, one more by clients of an even size. Sent down: two for each class
    that anybody has reported, and five once all have been."""

    def local(now, view, client, data):
        rows = jnp.zeros((classes, 2)), jnp.zeros(classes)
        sometimes = SentIf(data.count % 2 == 0, jnp.ones(()))
        upload = {"sometimes": sometimes, "part": PerClass(data.class_counts, rows)}
        return Update(client, upload, NOTHING, post=(view, client))

    return Method(
        init=lambda key, clients: (jnp.zeros(classes), ()),
        local=local,
        aggregate=lambda now, server, clients, uploads, cohort: (server + jnp.sum(uploads["part"].held, 0), clients),
        personal=lambda view, client: (),
        predict=lambda params, x: jnp.zeros((len(x), classes)),
        broadcast=lambda known: (
            PerClass(known > 0, [jnp.zeros((classes, 2))]),
            SentIf(jnp.all(known > 0), jnp.zeros(5)),
        ),
    )


def test_traffic_counts_the_rows_of_the_classes_held_and_what_is_sent_sometimes(federation):
    engine = Engine(chatter(3), 7, Participation(0.1, 0.4, 0.4))
    run, step = jax.jit(engine.init)(KEY, federation), jax.jit(engine.round)
    _, shapes = survey(engine, federation)
    held_classes = np.asarray(federation.train.class_counts) > 0
    known, down, up, rows_down, rows_up, sent_if_down, sent_if_up = np.zeros(3, bool), 0, 0, 0, 0, 0, 0
    for t, (ids, selected) in enumerate(zip(*drawn(engine, KEY, federation.train.count, 8), strict=True)):
        present = [i for i in ids.tolist() if i < 7]
        down, up = down + int(selected), up + len(present)
        rows_down += int(selected) * known.sum()
        rows_up += held_classes[present].sum()
        sent_if_down += int(selected) * known.all()
        sent_if_up += sum(TRAIN_SIZES[i] % 2 == 0 for i in present)
        known = known | held_classes[present].any(axis=0)
        run = step(KEY, at(t), run, jnp.array(False), federation)
        assert tuple(map(int, run.traffic)) == (down, up, rows_down, rows_up, sent_if_down, sent_if_up)
    sent_down = down * (3 + 1) + rows_down * 2 * 4 + sent_if_down * 5 * 4
    sent_up = up * (3 * 4 + 1) + rows_up * 3 * 4 + sent_if_up * 4
    assert shapes.sent_bytes(run.traffic) == sent_down + sent_up
    assert shapes.dense_bytes(run.traffic) == down * (3 + 1 + 3 * 2 * 4 + 5 * 4) + up * (3 * 4 + 1 + 3 * 3 * 4 + 4)
    assert rows_down < 3 * down
    assert rows_up < 3 * up < 3 * down
    assert 0 < sent_if_down < down
    assert 0 < sent_if_up < up


def test_a_tree_has_one_part_of_a_kind_at_most():
    part = PerClass(jnp.ones(3), jnp.ones((3, 2)))
    assert part_of({"a": jnp.ones(2), "b": (part, SentIf(jnp.array(True), jnp.ones(2)))}, PerClass) is part
    assert part_of({"a": jnp.ones(2), "b": part}, SentIf) is None
    with pytest.raises(AssertionError, match="one PerClass part"):
        part_of([part, part], PerClass)


# --- Loops of clients side by side -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def equal_federation(federation):
    """Seven clients with nine samples each, two of them short of a batch in every epoch."""
    rng = np.random.default_rng(8)
    rows = rng.integers(0, len(federation.y), (7, 9))
    return federation._replace(train=pack(list(rows), np.asarray(federation.y), 3))


def loops(jaxpr):
    """How many loops of unknown length a program has, and the lengths of the others."""
    unknown, known = 0, []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            unknown += 1
        elif eqn.primitive.name == "scan":
            known.append(eqn.params["length"])
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                deeper, lengths = loops(inner.jaxpr) if hasattr(inner, "jaxpr") else (0, [])
                unknown, known = unknown + deeper, known + lengths
    return unknown, known


# FedALA trains on a share of the samples, a number that the compiler does not know, and in a loop of its own; FedRep
# keeps the features of its samples, here of two copies of each.
@pytest.mark.parametrize(
    ("name", "copies", "chunks"), [("fedavg", "none", (4, 7)), ("fedala", "none", (4,)), ("fedrep", "concat", (4,))]
)
def test_clients_of_one_size_take_a_number_of_steps_that_the_compiler_knows(
    name, copies, chunks, model, trainer, equal_federation
):
    method, data = METHODS[name](model, trainer)._replace(copies=copies), equal_federation
    one_by_one = Engine(method, 7)
    start = jax.jit(one_by_one.init)(KEY, data)

    def rounds(engine):
        return jax.jit(engine.rounds)(KEY, start, at(0), at(2), jnp.array(True), data)

    expected = rounds(one_by_one)
    for chunk in chunks:
        found = rounds(Engine(method, 7, placement=Placement(chunk=chunk), equal=True))
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


def test_loops_of_clients_side_by_side_have_known_lengths_where_sizes_allow(
    model, trainer, federation, equal_federation
):
    method = METHODS["fedavg"](model, trainer)

    def of(data, **settings):
        engine = Engine(method, 7, **settings)
        run = jax.eval_shape(engine.init, KEY, data)
        return loops(jax.make_jaxpr(engine.rounds)(KEY, run, at(0), at(2), jnp.array(True), data).jaxpr)

    together, chunks = Placement(chunk=7), Placement(chunk=4)
    # The rounds themselves; epochs, batches of four and blocks of test samples.
    assert of(equal_federation, placement=together, equal=True) == (1, [1, 2, 3, 1])
    assert of(federation, placement=together) == (1, [1, 2, 7, 1])
    # In several chunks the largest of each decides: training and scoring.
    assert of(federation, placement=chunks)[0] == 3
    assert of(equal_federation, placement=chunks, equal=True)[0] == 2
    # Not for a cohort that may be smaller, whose last chunks would work for nobody.
    some = Participation(0.5, 1.0)
    assert of(equal_federation, placement=chunks, equal=True, participation=some)[0] == 3


def test_clients_side_by_side_stand_still_after_their_own_last_step(model, federation):
    """With momentum and weight decay, a step on an empty batch would still move a client."""
    train = Trainer(epochs=2, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.1)
    method = METHODS["local"](model, train)
    start = jax.jit(Engine(method, 7).init)(KEY, federation)

    def after(placement):
        engine = Engine(method, 7, placement=placement)
        return jax.jit(engine.round)(KEY, at(0), start, jnp.array(False), federation).state

    expected = after(Placement())
    for chunk in (3, 7):
        chex.assert_trees_all_close(after(Placement(chunk=chunk)), expected, rtol=1e-5, atol=1e-6)


# --- Sums over clients -----------------------------------------------------------------------------------------------


def test_a_summary_covers_the_clients_that_have_test_samples():
    rng = np.random.default_rng(0)
    n_test = rng.integers(1, 40, 35)
    n_test[[3, 8]] = 0
    correct = rng.integers(0, n_test + 1)
    accuracy = correct / np.maximum(n_test, 1)
    f1, union, loss = rng.uniform(size=(3, 35)) * (n_test > 0)
    found = summarize(Scores(*map(jnp.asarray, (correct.astype(np.float32), accuracy, f1, union, loss))), n_test)
    keep = np.setdiff1d(np.arange(35), [3, 8])
    assert found == pytest.approx(
        {
            "accuracy": sum(accuracy[keep]) / 33,
            "weighted": sum(correct) / sum(n_test),
            "std_clients": np.sqrt(np.mean((accuracy[keep] - np.mean(accuracy[keep])) ** 2)),
            "worst_10_percent": sum(sorted(accuracy[keep])[:3]) / 3,
            "macro_f1": sum(f1[keep]) / 33,
            "macro_f1_union": sum(union[keep]) / 33,
            "loss": sum(loss[keep]) / 33,
            "i_local": sum(2 / (1 / accuracy[i] + 1 / f1[i]) for i in keep if accuracy[i] > 0) / 33,
        },
        rel=1e-5,
    )


def test_the_worst_tenth_of_few_clients_is_one_client():
    accuracy = jnp.array([0.5, 0.25, 1.0])
    scores = Scores(accuracy * 4, accuracy, accuracy, accuracy, accuracy)
    assert summarize(scores, np.full(3, 4))["worst_10_percent"] == 0.25


@pytest.mark.parametrize(("sampling", "most_sorted"), [("fixed", 100), ("fixed", 1), ("poisson", 100)])
def test_new_clients_are_never_drawn(sampling, most_sorted, monkeypatch):
    monkeypatch.setattr("fedjax_pfl.engine.participation._MOST_SORTED", most_sorted)
    engine = Engine(Method(*[None] * 5), len(SIZES), Participation(0.4, 0.4, sampling=sampling), new=4)
    ids, _ = drawn(engine, KEY, SIZES, T)
    assert set(np.unique(ids[ids < len(SIZES)])) == set(range(6))


def test_a_client_that_was_never_selected_is_scored_on_the_initial_model_as_it_is(model, trainer, federation):
    """Not after fine-tuning, which comes before PRE."""
    tuned, plain = (
        jax.jit(Engine(METHODS[name](model, trainer), 7, WHO["partial"]).init)(KEY, federation).post
        for name in ("fedavg_ft", "fedavg")
    )
    chex.assert_trees_all_close(tuned, plain, rtol=1e-6)


def test_in_an_empty_round_diagnostics_stay_those_of_the_last_participants(federation):
    method = Method(
        init=lambda key, clients: (jnp.int32(0), ()),
        local=lambda now, view, client, data: Update((), (), NOTHING, (view, ()), {"t": now.t.astype(jnp.float32)}),
        aggregate=lambda now, server, clients, uploads, cohort: (server, clients),
        personal=lambda view, client: jnp.int32(0),
        predict=one_answer,
    )
    engine = Engine(method, 7, Participation(0.2, 0.2, sampling="poisson"), diagnostics=("t",))
    _, selected = drawn(engine, KEY, federation.train.count, 12)
    run, step = jax.jit(engine.init)(KEY, federation), jax.jit(engine.round)
    newest, empty = math.nan, 0
    assert np.isnan(run.diagnostics["t"])
    for t in range(12):
        run = step(KEY, at(t), run, jnp.array(False), federation)
        newest, empty = (t, empty) if selected[t] else (newest, empty + 1)
        np.testing.assert_equal(float(run.diagnostics["t"]), float(newest))
    assert 0 < empty < 12
