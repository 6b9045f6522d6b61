"""Compressed uploads: rounds against NumPy, what is lost, and that the bytes counted are those that are sent."""

import math
import zlib
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import Config, ConfigError, simulate
from fedjax_pfl.data.federated import client_data
from fedjax_pfl.data.sources import load
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.method import Cohort, Method, PerClass, SentIf, TrainInfo, Update
from fedjax_pfl.methods import METHODS
from fedjax_pfl.methods.compressed import Quantised, Sparse, compressed, int8, top_k
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.lg_fedavg import lg_fedavg
from fedjax_pfl.ops.layers import join_layers
from fedjax_pfl.ops.tree import size
from tests.conftest import TRAIN_SIZES
from tests.play import KEY, SOME, N, Unscored, play
from tests.reference import MLP, at, client, client_key, held, now, to_numpy, weighted_mean
from tests.test_conformance import computations_with_collectives

CODECS = {"top_k": top_k(0.1), "int8": int8()}


def fold(key, name):
    return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))


# --- One array -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_the_largest_entries_are_kept_as_they_are(share):
    array = np.random.default_rng(6).normal(size=(7, 9)).astype(np.float32)
    found = top_k(share)(KEY, jnp.asarray(array))
    kept = math.ceil(share * 63)
    assert (found.values.shape, found.indices.shape, found.indices.dtype) == ((kept,), (kept,), jnp.int32)
    smallest = np.sort(np.abs(array).ravel())[-kept]
    np.testing.assert_array_equal(found.dense(), np.where(np.abs(array) >= smallest, array, 0))


@pytest.mark.parametrize(("share", "entries", "kept"), [(0.07, 100, 7), (0.1, 21, 3)])
def test_a_share_is_taken_as_it_is_in_decimals(share, entries, kept):
    """0.07 * 100 is more than 7."""
    found = jax.eval_shape(top_k(share), KEY, jax.ShapeDtypeStruct((entries,), jnp.float32))
    assert found.values.shape == (kept,)


def test_a_byte_is_within_a_step_and_right_on_average():
    array = np.random.default_rng(6).normal(size=(5, 8)).astype(np.float32)

    @jax.jit
    def draw(key):
        found = jax.vmap(lambda key: int8()(key, jnp.asarray(array)))(jax.random.split(key, 4000))
        return found, found.dense()

    found, whole = draw(KEY)
    assert found.levels.dtype == jnp.int8
    step = np.abs(array).max() / 127
    np.testing.assert_allclose(found.scale, step, rtol=1e-6)
    whole = np.asarray(whole, np.float64)
    assert np.abs(whole - array).max() < 1.001 * step
    # A step up or down, with a standard deviation of half of one at most.
    np.testing.assert_allclose(whole.mean(axis=0), array, atol=5 * 0.5 * step / np.sqrt(4000))
    largest = np.abs(array) == np.abs(array).max()
    np.testing.assert_allclose(whole[:, largest], np.broadcast_to(array[largest], (4000, 1)), rtol=1e-6)
    arrays = jnp.array([[0.0, 0.0], [1.0, np.nan]])
    nothing, diverged = np.asarray(jax.jit(jax.vmap(lambda array: int8()(KEY, array).dense()))(arrays))
    assert not nothing.any()
    assert np.isnan(diverged).all(), "a diverged run stays one"


# --- Rounds ----------------------------------------------------------------------------------------------------------


def numpy_codec(kind, key, update):
    """What arrives of an update; an array's draws are of the phase "compression", under the path to it."""

    def array(path, u):
        if kind == "top_k":
            kept = math.ceil(0.1 * u.size)
            if 8 * kept >= 4 * u.size:
                return u
            return np.where(np.abs(u) >= np.sort(np.abs(u).ravel())[-kept], u, 0)
        draws = np.asarray(jax.random.uniform(fold(fold(key, "compression"), jax.tree_util.keystr(path)), u.shape))
        step = np.abs(u).max() / 127
        return step * np.floor(u / step + draws)

    return jax.tree.map_with_path(array, update)


@pytest.mark.parametrize("kind", CODECS)
def test_rounds_of_fedavg_are_numpys(kind, model, trainer, federation):
    start, end, cohorts = play(compressed(fedavg(model, trainer), CODECS[kind]), federation, who=SOME, rounds=4)
    mlp = MLP(federation.x, federation.y)
    w, trained, lost = to_numpy(start.state.server), {}, 0.0
    for t, cohort in enumerate(cohorts):
        uploads = []
        for i in cohort:
            key = client_key(KEY, t, i)
            trained[i], _ = mlp.train(w, key, t, held(federation.train, i), trainer)
            uploads.append(jax.tree.map(np.add, w, numpy_codec(kind, key, jax.tree.map(np.subtract, trained[i], w))))
            lost = max(lost, np.abs(uploads[-1]["head"]["kernel"] - trained[i]["head"]["kernel"]).max())
        if uploads:
            w = weighted_mean(uploads, np.asarray(federation.train.count)[cohort])
    assert lost > (0.05 if kind == "top_k" else 1e-3)
    near = partial(np.testing.assert_allclose, atol=2e-5)
    gaps = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.tree.map(np.subtract, end.state.server, w))])
    # An entry that lies on the border of a level may be rounded to the other side: one of a few hundred, by a step.
    assert np.sum(np.abs(gaps) > 5e-5) <= (2 if kind == "int8" else 0)
    assert np.abs(gaps).max() < 1e-3
    # POST is the model as it was trained.
    for i, params in trained.items():
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(params, held(federation.test, i)), rtol=1e-3)


def test_a_warm_up_of_lg_fedavg_is_fedavg_also_compressed(model, trainer, federation):
    """Its lower layers, which are sent in some rounds only, are updates of those that came down."""
    codec = CODECS["top_k"]
    warmed = compressed(lg_fedavg(model, trainer, warmup_rounds=9), codec)
    upper, (_, lower) = play(warmed, federation, who=SOME, rounds=3, scored=False).end.state.server
    w = play(compressed(fedavg(model, trainer), codec), federation, who=SOME, rounds=3, scored=False).end.state.server
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), jax.jit(join_layers)(lower, upper), w)


def test_what_would_not_become_smaller_is_sent_as_it_is(model, trainer, federation):
    plain, half, less = (
        survey(Engine(method, N), federation)[1].upload
        for method in (fedavg(model, trainer), *(compressed(fedavg(model, trainer), top_k(s)) for s in (0.5, 0.4)))
    )
    assert half == plain
    assert less["head"]["bias"] == plain["head"]["bias"]
    assert isinstance(less["head"]["kernel"], Sparse)


@pytest.mark.parametrize("name", ["fedfcd", "pgfedsplit"])
def test_bytes_change_little_whatever_the_method_sends(name, model, trainer, federation):
    """Parts for some classes, or in some rounds; a round -1. Wrong parts or origins would change a lot."""
    plain = METHODS[name](model, replace(trainer, epochs=1))
    methods = plain, compressed(plain, int8())
    plain, found = (play(method, federation, rounds=2, scored=False).end for method in methods)
    moved = 0.0
    for a, b in zip(*(map(np.float64, jax.tree.leaves(run.state)) for run in (plain, found)), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05 * np.abs(a).max(initial=0) + 1e-3)
        moved = max(moved, np.abs(a - b).max(initial=0))
    assert moved > 1e-4


def test_devices_do_the_same_and_exchange_nothing_inside_loops(model, trainer, federation, mesh):
    method, who = compressed(fedavg(model, trainer), top_k(0.2)), Participation(0.6, 1.0, 0.1)
    run, ends = jax.jit(Unscored(method, N, who).init)(KEY, federation), []
    for where in (Placement(), Placement(mesh, 2)):
        arguments = KEY, run, at(0), at(3), jnp.array(False), federation
        program = jax.jit(Unscored(method, N, who, where).rounds).lower(*arguments).compile()
        ends.append(program(*arguments).state.server)
        if where.mesh is not None:
            in_rounds, elsewhere = computations_with_collectives(program.as_text())
            assert in_rounds
            assert elsewhere == []
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *ends)


# --- What is sent, and counted ---------------------------------------------------------------------------------------


class Received(NamedTuple):
    w: dict


class Sent(NamedTuple):
    w: dict
    per_class: PerClass
    sometimes: SentIf
    steps: jax.Array


def sender(classes=3):
    """Sends w, of which it got an array; ten numbers per class held, and forty by clients of an even size."""

    def local(now, view, client, data):
        norm = {"scale": view.w["norm"]["scale"] + jnp.arange(30.0), "running_var": jnp.full(30, 7.0)}
        rows = jnp.arange(1.0, 1 + 10 * classes).reshape(classes, 10) * data.count.astype(jnp.float32)
        sometimes = SentIf(data.count % 2 == 0, jnp.arange(40.0))
        upload = Sent({"norm": norm, "bias": jnp.ones(1)}, PerClass(data.class_counts, rows), sometimes, data.count)
        return Update(client, upload, TrainInfo(jnp.zeros(()), data.count), post=(view, client))

    def aggregate(now, server, clients, uploads, cohort):
        return {**server, "got": uploads}, clients

    nothing = Sent(
        {"norm": {"scale": jnp.zeros((N, 30)), "running_var": jnp.zeros((N, 30))}, "bias": jnp.zeros((N, 1))},
        PerClass(jnp.zeros((N, classes)), jnp.zeros((N, classes, 10))),
        SentIf(jnp.zeros(N, bool), jnp.zeros((N, 40))),
        jnp.zeros(N, jnp.int32),
    )
    return Method(
        init=lambda key, clients: ({"scale": jnp.full(30, 100.0), "got": nothing}, ()),
        local=local,
        aggregate=aggregate,
        personal=lambda view, client: (),
        predict=lambda params, x: jnp.zeros((len(x), classes)),
        broadcast=lambda server: Received({"norm": {"scale": server["scale"]}}),
    )


@pytest.fixture(scope="module")
def after_a_round(federation):
    """kind, or None where nothing is compressed -> the engine, and its run."""

    @cache
    def of(kind):
        engine = Engine(compressed(sender(), CODECS[kind]) if kind else sender(), N)
        one_round = jax.jit(lambda run: engine.round(KEY, at(0), run, jnp.array(False), federation))
        return engine, jax.tree.map(np.asarray, one_round(jax.jit(engine.init)(KEY, federation)))

    return of


@pytest.mark.parametrize(("kind", "norm", "row", "forty"), [("top_k", 8 * 3, 8, 8 * 4), ("int8", 34, 14, 44)])
def test_traffic_is_that_of_what_is_sent(kind, norm, row, forty, after_a_round, federation):
    engine, run = after_a_round(kind)
    _, shapes = survey(engine, federation)
    classes = np.asarray(federation.train.class_counts) > 0
    even = sum(n % 2 == 0 for n in TRAIN_SIZES)
    assert 0 < even < N
    assert classes.sum() < 3 * N
    # The scales of the norm, its statistics whole, a bias of one number; counts, steps and flag.
    always = norm + 30 * 4 + 4 + 3 * 4 + 4 + 1
    down = N * 30 * 4
    assert shapes.sent_bytes(run.traffic) == down + N * always + row * classes.sum() + forty * even
    assert shapes.dense_bytes(run.traffic) == down + N * (always + 3 * row + forty)


@pytest.mark.parametrize("kind", CODECS)
def test_the_server_gets_the_form_back_and_nothing_but_values_is_touched(kind, after_a_round):
    plain, found = (after_a_round(each)[1].state.server["got"] for each in (None, kind))
    assert jax.tree.structure(plain) == jax.tree.structure(found)
    for a, b in (
        (plain.steps, found.steps),
        (plain.w["bias"], found.w["bias"]),
        (plain.w["norm"]["running_var"], found.w["norm"]["running_var"]),
        (plain.per_class.held, found.per_class.held),
        (plain.sometimes.sent, found.sometimes.sent),
    ):
        np.testing.assert_array_equal(a, b)
    scale, rows = found.w["norm"]["scale"], found.per_class.rows
    if kind == "int8":
        # Each class's row has a step of its own.
        lost = np.abs(rows - plain.per_class.rows)
        assert (lost < 1.01 * plain.per_class.rows.max(axis=-1, keepdims=True) / 127).all()
        np.testing.assert_array_less(np.abs(scale - plain.w["norm"]["scale"]), 29 / 127 + 1e-4)
    else:
        expected = np.where(np.arange(30) >= 27, 100.0 + np.arange(30), 100.0)
        np.testing.assert_array_equal(scale, np.tile(expected, (N, 1)))
        np.testing.assert_array_equal(rows, np.where(np.arange(10) == 9, plain.per_class.rows, 0))


def test_what_the_absent_send_is_zeros_to_the_server_as_well(federation):
    """And not what it had sent down."""
    method, data = compressed(sender(), int8()), client_data(federation.x, federation.y, client(federation.train, 2))

    @jax.jit
    def aggregated():
        server, _ = method.init(KEY, N)
        sent = method.local(now(KEY, 0), method.broadcast(server), (), data).upload
        rows = jax.tree.map(lambda leaf: jnp.stack([leaf, jnp.zeros_like(leaf)]), sent)
        cohort = Cohort(jnp.array([2, N]), jnp.array([4.0, 0.0]), N, N)
        return method.aggregate(now(KEY, 0), server, (), rows, cohort)[0]["got"].w["norm"]["scale"]

    found = np.asarray(aggregated())
    assert (found[0] >= 100).all()
    assert not found[1].any()


def test_in_round_minus_one_rows_are_packed_with_draws_of_their_own_and_nothing_stays_nothing():
    rows = jnp.full((3, 40), 0.3).at[:, 0].set(1.0)
    upload = {"rows": PerClass(jnp.ones(3), rows), "nothing": jnp.zeros(0)}
    method = compressed(sender()._replace(setup=lambda now, view, client, data: (client, upload)), int8())
    sent = jax.jit(lambda: method.setup(now(KEY, -1), (), (), None)[1])()
    assert isinstance(sent["rows"].rows, Quantised)
    levels = np.asarray(sent["rows"].rows.levels)
    assert len(np.unique(levels, axis=0)) == 3
    assert sent["nothing"].shape == (0,)


def test_packed_arrays_stand_for_many_at_once():
    arrays = jnp.asarray(np.random.default_rng(7).normal(size=(2, 3, 4, 5)), jnp.float32)
    for encode, kind in ((top_k(0.3), Sparse), (int8(), Quantised)):
        packed = jax.jit(jax.vmap(jax.vmap(partial(encode, KEY))))(arrays)
        assert isinstance(packed, kind)
        alone = jax.jit(lambda array, encode=encode: encode(KEY, array).dense())
        one_by_one = [[alone(array) for array in row] for row in np.asarray(arrays)]
        # Not to the bit: a program for many may divide by 127 otherwise than one for a single array.
        np.testing.assert_allclose(packed.dense(), np.array(one_by_one), rtol=1e-6)


# --- Runs ------------------------------------------------------------------------------------------------------------

TABLES = {
    "data": {"source": "digits", "clients": 6},
    "model": {"name": "mlp", "hidden": 8},
    "method": {"name": "fedavg"},
    "training": {"rounds": 3, "batch_size": 32, "lr": 0.1},
    "run": {"eval_every": 3},
}


@pytest.mark.parametrize(
    ("compression", "of"),
    [
        ({"kind": "top_k"}, lambda n: 8 * math.ceil(n / 10)),
        ({"kind": "top_k", "share": 0.3}, lambda n: min(8 * math.ceil(0.3 * n), 4 * n)),
        ({"kind": "int8"}, lambda n: n + 4),
    ],
)
def test_a_config_asks_for_it(compression, of):
    config = Config(**TABLES, compression=compression)
    exchange = lay_out([config], load("digits")).exchange
    assert size(exchange.up) == sum(map(of, (64 * 8, 8, 8 * 10, 10)))


def test_a_method_that_sends_nothing_has_nothing_to_compress():
    plain = {**TABLES, "method": {"name": "local"}, "training": {"rounds": 1, "batch_size": 32}}
    packed, whole = (
        simulate(Config(**plain, compression=kind)).clients["pre_accuracy"] for kind in ({"kind": "int8"}, {})
    )
    np.testing.assert_array_equal(packed, whole)


def test_a_run_counts_and_learns_by_what_is_sent():
    result = simulate(Config(**TABLES, compression={"kind": "int8"}))
    numbers, arrays = 64 * 8 + 8 + 8 * 10 + 10, 4
    megabytes = 3 * 6 * (4 * numbers + numbers + 4 * arrays) / 1e6
    assert result.summary["traffic"]["megabytes_total"] == result.history["megabytes"][-1] == pytest.approx(megabytes)
    assert result.summary["global"] > 0.3


@pytest.mark.parametrize(
    ("changes", "field", "allowed"),
    [
        ({"compression": {"kind": "zip"}}, "compression.kind", "'top_k'"),
        ({"compression": {"kind": "int8", "share": 0.1}}, "compression.share", 'belongs to "top_k"'),
        ({"compression": {"kind": "top_k", "share": 0.5}}, "compression.share", "less than 0.5"),
        (
            {"compression": {"kind": "int8"}, "participation": {"collaborate": False}},
            "compression.kind",
            "participation.collaborate = false",
        ),
    ],
)
def test_mistakes_are_one_error(changes, field, allowed):
    with pytest.raises(ConfigError) as caught:
        Config(**{**TABLES, **changes})
    assert caught.value.field == field
    assert allowed in caught.value.allowed
