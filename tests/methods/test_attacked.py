"""Malicious clients: rounds against NumPy, what is lied about and what is not, and what a run reports of them."""

import zlib
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import METHODS, Config, ConfigError, simulate, sweep
from fedjax_pfl.data.federated import client_data
from fedjax_pfl.experiment.build import attackers
from fedjax_pfl.experiment.tables import Group, _difference
from fedjax_pfl.method import Calibration, Method, PerClass, SentIf, TrainInfo, Update
from fedjax_pfl.methods.attacked import attacked
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.scaffold import scaffold
from tests.play import KEY, SOME, N, play
from tests.reference import MLP, client, client_key, held, now, to_numpy, weighted_mean

LIARS = np.array([0, 0, 1, 0, 1, 1, 0], bool)
SCALE = 3.0
near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


def fold(key, name):
    return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))


def noise(key, tree):
    """The draws of the phase "attack", an array's under the path to it."""
    key = fold(key, "attack")
    draw = lambda path, leaf: np.asarray(jax.random.normal(fold(key, jax.tree_util.keystr(path)), leaf.shape))  # noqa: E731
    return jax.tree.map_with_path(draw, tree)


def lie(key, update):
    """That of kind "gaussian"."""
    return jax.tree.map(lambda u, z: u + SCALE * np.sqrt(np.mean(u**2)) * z, update, noise(key, update))


@pytest.mark.parametrize("kind", ["label_flip", "gaussian"])
def test_rounds_of_fedavg_are_numpys(kind, model, trainer, federation):
    method = attacked(fedavg(model, trainer), kind, jnp.asarray(LIARS), SCALE)
    start, end, cohorts = play(method, federation, who=SOME, rounds=4)
    assert {bool(LIARS[i]) for ids in cohorts for i in ids} == {True, False}
    x, y = np.asarray(federation.x), np.asarray(federation.y)
    honest, flipped = MLP(x, y), MLP(x, 2 - y)
    w, trained = to_numpy(start.state.server), {}
    for t, cohort in enumerate(cohorts):
        uploads = []
        for i in cohort:
            rows, key = held(federation.train, i), client_key(KEY, t, i)
            mlp = flipped if kind == "label_flip" and LIARS[i] else honest
            trained[i], _ = mlp.train(w, key, t, rows, trainer)
            upload = trained[i]
            if kind != "label_flip" and LIARS[i]:
                upload = jax.tree.map(np.add, w, lie(key, jax.tree.map(np.subtract, upload, w)))
            uploads.append(upload)
        if uploads:
            w = weighted_mean(uploads, np.asarray(federation.train.count)[cohort])
    jax.tree.map(near, end.state.server, w)
    # POST is the model that a client has trained, whatever it says of it.
    for i, params in trained.items():
        near([float(leaf[i]) for leaf in end.post.test], honest.scores(params, held(federation.test, i)))


def uploads(method, federation):
    """What clients 1 and 2 send in round 0."""

    @jax.jit
    def work(key, i, row):
        server, own = method.init(KEY, N)
        data = client_data(federation.x, federation.y, row, i)
        return method.local(now(key, 0), method.broadcast(server), own, data).upload

    return [work(client_key(KEY, 0, i), jnp.array(i), client(federation.train, i)) for i in (1, 2)]


def test_who_does_not_lie_sends_the_same_bits(model, trainer, federation):
    plain = uploads(fedavg(model, trainer), federation)
    for kind in ("label_flip", "gaussian"):
        found = uploads(attacked(fedavg(model, trainer), kind, jnp.asarray(LIARS), SCALE), federation)
        same = [jax.tree.leaves(jax.tree.map(np.array_equal, *pair)) for pair in zip(found, plain, strict=True)]
        assert (all(same[0]), any(same[1])) == (True, False)


# --- What is lied about ----------------------------------------------------------------------------------------------

INFO = TrainInfo(jnp.zeros(()), jnp.array(0, jnp.int32))


class Sent(NamedTuple):
    w: dict
    per_class: PerClass
    sometimes: SentIf
    more: dict
    number: jax.Array


class Received(NamedTuple):
    w: dict
    per_class: PerClass
    sometimes: SentIf
    more: dict


VIEW = Received(
    w={"norm": {"scale": jnp.full(2, 5.0), "running_var": jnp.full(2, 0.5)}},
    per_class=PerClass(jnp.ones(3), jnp.ones((3, 2))),
    sometimes=SentIf(jnp.array(True), jnp.ones(2)),
    more={"kernel": jnp.ones(3)},
)
UPLOAD = Sent(
    w={"norm": {"scale": jnp.array([6.0, 4.0]), "running_var": jnp.array([0.25, 2.0])}},
    per_class=PerClass(jnp.array([2.0, 0.0, 1.0]), jnp.arange(6.0).reshape(3, 2)),
    sometimes=SentIf(jnp.array(False), jnp.array([1.0, -3.0])),
    more={"kernel": jnp.array([1.0, 2.0])},
    number=jnp.array(7, jnp.int32),
)


def sender(**changed):
    """A method whose clients send UPLOAD at every occasion, and keep what they see of their data."""

    def seen(data):
        nothing = {"labels": data.labels, "counts": data.class_counts}
        return nothing if data.original is None else {**nothing, "original": seen(data.original)}

    return Method(
        init=lambda key, clients: (VIEW, ()),
        local=lambda now, view, client, data: Update(seen(data), UPLOAD, INFO, post=(VIEW, ())),
        aggregate=lambda now, server, clients, uploads, cohort: (server, clients),
        personal=lambda view, client: (),
        predict=lambda params, x: jnp.zeros((len(x), 3)),
        setup=lambda now, view, client, data: (seen(data), UPLOAD),
        calibrate=Calibration(lambda now, view, client, data: {**seen(data), "upload": UPLOAD}, None),
    )._replace(**changed)


@pytest.fixture(scope="module")
def data(federation):
    """Clients 1 and 2, as though their images had been augmented."""

    @cache
    def of(i):
        plain = client_data(federation.x, federation.y, client(federation.train, i), jnp.array(i))
        return plain._replace(original=plain)

    return of


def test_values_are_lied_about_and_counts_statistics_and_flags_are_not(data):
    method = attacked(sender(), "sign_flip", jnp.asarray(LIARS))
    honest = method.local(now(KEY, 0), VIEW, (), data(1))
    jax.tree.map(np.testing.assert_array_equal, honest.upload, UPLOAD)
    update = method.local(now(KEY, 0), VIEW, (), data(2))
    expected = Sent(
        w={"norm": {"scale": [4.0, 6.0], "running_var": UPLOAD.w["norm"]["running_var"]}},
        # Of classes, the client may have got nothing: all rows are theirs. The second is not sent.
        per_class=PerClass(UPLOAD.per_class.held, np.array([[0.0, -1.0], [2.0, 3.0], [-4.0, -5.0]])),
        sometimes=SentIf(False, [1.0, 5.0]),  # [1, 1] was sent down in this round
        # Received under the same name, but in another shape.
        more={"kernel": [-1.0, -2.0]},
        number=7,
    )
    jax.tree.map(np.testing.assert_array_equal, update.upload, expected)
    assert update.post[0] is VIEW
    jax.tree.map(np.testing.assert_array_equal, method.setup(now(KEY, -1), VIEW, (), data(2))[1], expected)
    found = method.calibrate.local(now(KEY, 0), VIEW, (), data(2))["upload"]
    scaled = attacked(sender(), "scaled", jnp.asarray(LIARS), SCALE).local(now(KEY, 0), VIEW, (), data(2)).upload
    np.testing.assert_array_equal(scaled.w["norm"]["scale"], [5 + SCALE, 5 - SCALE])
    np.testing.assert_array_equal(scaled.w["norm"]["running_var"], UPLOAD.w["norm"]["running_var"])
    np.testing.assert_array_equal(scaled.sometimes.value, [1, 1 - 4 * SCALE])
    # Under other names than what was sent down, so that a weight is all of an update.
    np.testing.assert_array_equal(found.w["norm"]["scale"], [-6.0, -4.0])


def test_noise_is_in_the_rows_that_are_sent_and_of_their_size(data):
    upload = attacked(sender(), "gaussian", jnp.asarray(LIARS), SCALE).local(now(KEY, 0), VIEW, (), data(2)).upload
    rows = np.arange(6.0).reshape(3, 2)
    draws = np.asarray(jax.random.normal(fold(fold(now(KEY, 0).key, "attack"), ".per_class"), rows.shape))
    expected = rows + SCALE * np.sqrt(np.mean(rows[[0, 2]] ** 2)) * draws
    expected[1] = rows[1]
    near(upload.per_class.rows, expected)


def test_numbers_of_steps_and_of_samples_and_variances_are_not_lied_about(model, trainer, federation):
    """A server would take a liar with negative ones for one that has done nothing, or draw from no distribution.

    FedPAC's would find no weights for anybody: with negative variances its problem has no solution.
    """

    def all_kinds(method):
        return [attacked(method, kind, jnp.asarray(LIARS), SCALE) for kind in ("sign_flip", "scaled", "gaussian")]

    spared = {
        "fednova": lambda upload: upload.steps,
        "fedfcd": lambda upload: upload.held,
        "fedpac": lambda upload: upload.variance,
    }
    for name, part in spared.items():
        method = METHODS[name](model, trainer)
        plain, *lies = (uploads(m, federation)[1] for m in (method, *all_kinds(method)))
        for lying in lies:
            jax.tree.map(np.testing.assert_array_equal, part(lying), part(plain))
            assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, lying, plain)))
    method = METHODS["ccvr"](model, trainer)

    @jax.jit
    def calibrations(key, row):
        of_two = client_data(federation.x, federation.y, row, jnp.array(2))
        view = method.init(KEY, N)[0]
        return [m.calibrate.local(now(key, 0), view, (), of_two) for m in (method, *all_kinds(method))]

    plain, *lies = calibrations(KEY, client(federation.train, 2))
    for lying in lies:
        np.testing.assert_array_equal(lying.rows.covariance, plain.rows.covariance)
        assert not np.array_equal(lying.rows.mean, plain.rows.mean)


def test_of_a_method_that_sends_changes_all_is_the_update(model, trainer, federation, data):
    method = attacked(sender(sends_change=True), "scaled", jnp.asarray(LIARS), 2.0)
    found = method.local(now(KEY, 0), VIEW, (), data(2)).upload
    np.testing.assert_array_equal(found.w["norm"]["scale"], [12.0, 8.0])
    plain = scaffold(model, trainer)
    changes, lies = (uploads(m, federation) for m in (plain, attacked(plain, "sign_flip", jnp.asarray(LIARS))))
    jax.tree.map(np.testing.assert_array_equal, lies[0], changes[0])
    jax.tree.map(lambda a, b: near(a, -b), lies[1], changes[1])


def test_labels_are_flipped_wherever_an_attacker_works(data):
    method = attacked(sender(), "label_flip", jnp.asarray(LIARS))
    for i in (1, 2):
        turn = (lambda y: 2 - y) if LIARS[i] else (lambda y: y)
        labels, counts = data(i).labels, data(i).class_counts
        own = {"labels": turn(labels), "counts": np.bincount(turn(labels[: data(i).count]), minlength=3)}
        expected = {**own, "original": own}
        update = method.local(now(KEY, 0), VIEW, (), data(i))
        prepared, upload = method.setup(now(KEY, -1), VIEW, (), data(i))
        calibrated = method.calibrate.local(now(KEY, 0), VIEW, (), data(i))
        for found in (update.client, prepared, {name: calibrated[name] for name in expected}):
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        for sent in (update.upload, upload, calibrated["upload"]):
            assert sent is UPLOAD
        assert (np.asarray(counts) != np.asarray(own["counts"])).any() == LIARS[i]


def test_the_labels_that_an_attacker_selects_by_stay(data):
    held_out = data(2)._replace(validation=data(1))
    seen = sender(local=lambda now, view, client, data: Update(data.validation.labels, UPLOAD, INFO, post=(VIEW, ())))
    found = attacked(seen, "label_flip", jnp.asarray(LIARS)).local(now(KEY, 0), VIEW, (), held_out)
    np.testing.assert_array_equal(found.client, data(1).labels)


# --- Runs ------------------------------------------------------------------------------------------------------------

TABLES = {
    "data": {"source": "digits", "clients": 8, "partition": {"kind": "dirichlet", "beta": 0.5}, "new_clients": 0.25},
    "model": {"name": "mlp", "hidden": 8},
    "method": {"name": "fedavg"},
    "training": {"rounds": 6, "batch_size": 32, "lr": 0.1},
    "run": {"eval_every": 6},
}
ATTACK = {"kind": "scaled", "share": 0.34, "scale": 30.0}


def test_attackers_are_drawn_by_the_seed_of_the_partition_among_those_that_train():
    config = Config(**TABLES, attack=ATTACK)
    found = attackers(config)
    assert found.shape == (8,)
    assert (found.sum(), found[6:].sum()) == (2, 0)
    assert attackers(config.replace({"run.seed": 3, "data.seed": 0})).tolist() == found.tolist()
    drawn = {tuple(attackers(config.replace({"data.seed": seed}))) for seed in range(20)}
    assert len(drawn) > 5
    assert np.any(list(drawn), axis=0).tolist() == [True] * 6 + [False] * 2
    for seed in range(10):
        few, more = (attackers(config.replace({"data.seed": seed, "attack.share": share})) for share in (0.34, 0.5))
        assert (few <= more).all(), "with a larger share, others join them"
    assert attackers(config.replace({"attack.share": 0.0})) is None
    assert attackers(Config(**TABLES)) is None
    for share in (0.05, 0.95):
        with pytest.raises(ConfigError, match=r"attack\.share = .*some of the 6 clients that train, not all"):
            attackers(config.replace({"attack.share": share}))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run, and its directory."""
    out = tmp_path_factory.mktemp("attacked") / "run"
    return simulate(Config(**TABLES, attack=ATTACK).replace({"run.out": str(out)})), out


def test_a_run_reports_of_the_benign_clients_and_marks_the_others(run):
    result, out = run
    liars = np.flatnonzero(attackers(Config(**TABLES, attack=ATTACK)))
    assert result.summary["attackers"] == result.partition["attackers"] == liars.tolist()
    assert np.flatnonzero(result.clients["attacker"]).tolist() == liars.tolist()
    assert "attacker" in (out / "clients.csv").read_text().splitlines()[0]
    benign = np.setdiff1d(np.arange(6), liars)
    weights = result.clients["n_test"][benign]
    for point in ("pre", "post"):
        accuracy, shown = result.clients[f"{point}_accuracy"], result.summary["personal"][point]
        assert shown["last"] == pytest.approx(accuracy[benign].mean(), rel=1e-6)
        assert shown["weighted_last"] == pytest.approx(np.average(accuracy[benign], weights=weights), rel=1e-6)
        assert shown["last"] != pytest.approx(accuracy[:6].mean(), rel=1e-6)
        assert result.summary["new_clients"][point]["last"] == pytest.approx(accuracy[6:].mean(), rel=1e-6)
        rows = np.isin(result.labels["client"], benign) & (result.labels["label"] == 0)
        share = result.labels[f"{point}_correct"][rows].sum() / result.labels["n_test"][rows].sum()
        assert result.summary["label_accuracy"][point][0] == pytest.approx(share)
    counts = (np.array(result.partition[f"{part}_class_counts"])[benign] for part in ("train", "test"))
    guesses = [test[train.argmax()] / test.sum() for train, test in zip(*counts, strict=True)]
    assert result.summary["majority_class"]["accuracy"] == pytest.approx(np.mean(guesses))


def test_seeds_and_strengths_share_a_program_and_krum_withstands_what_the_mean_does_not(run):
    config = Config(**TABLES, attack=ATTACK)
    mean = sweep(config, {"attack.scale": [1.0, 30.0], "run.seed": [0, 2]})
    assert all(cell.summary["timing"].get("runs_in_the_program") == 4 for cell in mean.cells)
    assert mean.cells[0].summary["attackers"] != mean.cells[1].summary["attackers"]
    alone, _ = run
    for point in ("pre", "post"):
        found = mean.cells[2].clients[f"{point}_accuracy"]
        np.testing.assert_allclose(found, alone.clients[f"{point}_accuracy"], atol=1e-5)
    robust = simulate(config.replace({"aggregation.rule": "multi_krum", "aggregation.byzantine": 0.34}))
    honest, spoilt = (mean.cells[at].summary["personal"]["pre"]["last"] for at in (0, 2))
    assert robust.summary["personal"]["pre"]["last"] > 0.9 * honest > spoilt + 0.2


def test_differences_over_clients_leave_attackers_out():
    """A liar's score, far from the others', would widen the interval."""
    clients = [
        {"pre_accuracy": np.array([0.5, 0.6, 0.0]), "attacker": np.array([0, 0, 1])},
        {"pre_accuracy": np.array([0.4, 0.5, 1.0])},
    ]
    cells = [SimpleNamespace(clients=table, figures={"pre": 0.5}) for table in clients]
    found, interval = _difference(*(Group({}, (), {0: cell}) for cell in cells), "pre")
    assert interval == pytest.approx((0.1, 0.1))
    assert found.mean == pytest.approx(0.1), "each run's own mean is over other clients: a difference of 0"


def test_runs_without_a_client_that_is_honest_in_both_are_not_compared():
    clients = [{"pre_accuracy": np.ones(2), "attacker": np.array(who)} for who in ([0, 1], [1, 0])]
    cells = [SimpleNamespace(clients=table, figures={"pre": 1.0}) for table in clients]
    assert _difference(*(Group({}, (), {0: cell}) for cell in cells), "pre") == (None, None)


@pytest.mark.parametrize(
    ("changes", "field", "allowed"),
    [
        ({"attack": {"kind": "fgsm"}}, "attack.kind", "'label_flip'"),
        ({"attack": {"share": 0.3}}, "attack.share", 'leave it out with attack.kind = "none"'),
        ({"attack": {"kind": "sign_flip", "scale": 2.0}}, "attack.scale", '"scaled" or "gaussian"'),
        ({"attack": {"kind": "scaled", "scale": 0.0}}, "attack.scale", "greater than 0"),
        ({"attack": {"kind": "scaled", "share": 1.0}}, "attack.share", "less than 1"),
        (
            {"attack": {"kind": "scaled"}, "participation": {"collaborate": False}},
            "attack.kind",
            "participation.collaborate = false",
        ),
        (
            {"aggregation": {"rule": "krum"}, "participation": {"collaborate": False}},
            "aggregation.rule",
            "participation.collaborate = false",
        ),
    ],
)
def test_mistakes_are_one_error(changes, field, allowed):
    with pytest.raises(ConfigError) as caught:
        Config(**{**TABLES, **changes})
    assert caught.value.field == field
    assert allowed in caught.value.allowed
