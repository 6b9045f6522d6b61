"""Clients that never train: nothing they have reaches anyone, and they are scored from their initial state."""

import csv
import json
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import Config, ConfigError, simulate, sweep
from fedjax_pfl.data.sources import load
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.experiment.build import attackers, divide
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.method import State
from fedjax_pfl.methods import METHODS
from tests import generator
from tests.conftest import TRAIN_SIZES
from tests.reference import MLP, at, client_key, held, to_numpy
from tests.toys import witness

KEY = generator.key(17)
N, NEW = len(TRAIN_SIZES), 2
OLD = N - NEW


def split(rows):
    """The clients that are not new, and those that are."""
    rows = jax.tree.map(np.asarray, rows)
    return jax.tree.map(lambda leaf: leaf[:OLD], rows), jax.tree.map(lambda leaf: leaf[OLD:], rows)


# The witness hears from its clients before round 0, and writes to them; FedPAC's clients train, and get heads from the
# server. What counts the clients that may take part is held against NumPy with new clients in test_scaffold.py.
@pytest.mark.parametrize("factory", [witness, METHODS["fedpac"]], ids=["witness", "fedpac"])
def test_the_others_train_as_though_there_were_no_new_clients(factory, model, trainer, federation, mesh):
    method = factory(model, trainer)
    who = Participation(0.5, 1.0, 0.2)
    with_new = Engine(method, N, who, Placement(mesh, 2), new=NEW)
    without = Engine(method, OLD, who, Placement(mesh, 2))
    fewer = federation._replace(train=split(federation.train)[0], test=split(federation.test)[0])
    start = jax.jit(with_new.init)(KEY, federation)
    end = jax.jit(with_new.rounds)(KEY, start, at(0), at(4), jnp.array(True), federation)
    expected = jax.jit(without.init)(KEY, fewer)
    expected = jax.jit(without.rounds)(KEY, expected, at(0), at(4), jnp.array(True), fewer)
    chex.assert_trees_all_equal(end.state.server, expected.state.server)
    chex.assert_trees_all_equal((end.loss, end.traffic), (expected.loss, expected.traffic))
    (rows, new), scores = split(end.state.clients), split(end.post)[0]
    chex.assert_trees_all_equal((rows, scores), (expected.state.clients, expected.post))
    chex.assert_trees_all_equal(new, split(start.state.clients)[1])


def test_their_scores_against_plain_loops(model, trainer, federation):
    engine = Engine(METHODS["fedavg"](model, trainer), N, new=NEW)
    run = jax.jit(engine.init)(KEY, federation)
    run = jax.jit(engine.rounds)(KEY, run, at(0), at(3), jnp.array(True), federation)
    scores = jax.jit(engine.post)(KEY, at(3), run, federation)
    chex.assert_trees_all_equal(split(scores)[0], split(run.post)[0])
    mlp = MLP(federation.x, federation.y)
    for i in range(OLD, N):
        w, _ = mlp.train(to_numpy(run.state.server), client_key(KEY, 3, i), 3, held(federation.train, i), trainer)
        expected = mlp.scores(w, held(federation.test, i))
        np.testing.assert_allclose([float(values[i]) for values in scores.test], expected, rtol=1e-4)


def test_pfedcspcs_new_clients_start_from_the_global_model(model_with_projection, trainer, federation, mesh):
    """Their scores are those of FedAvg with the same global model: adapted before PRE, or by the call of local."""
    parts = {"calibrate": False, "kappa": 0.0, "kp_weight": 0.0, "clusters": 1, "repeats": 1}
    every, adapting = (
        Engine(METHODS["pfedcspc"](model_with_projection, trainer, pmi=pmi, **parts), N, new=NEW)
        for pmi in ("every", "eval")
    )
    run = jax.jit(every.init)(KEY, federation)
    run = jax.jit(every.rounds)(KEY, run, at(0), at(3), jnp.array(True), federation)
    plain = replace(every, method=METHODS["fedavg"](model_with_projection, trainer))
    same = run._replace(state=State(run.state.server.params, ()))
    pre, trained, *_ = jax.jit(plain.score)(KEY, at(3), same, federation)
    chunks = replace(adapting, placement=Placement(mesh, 2))
    for engine, expected in ((every, (pre, trained)), (chunks, (trained, trained))):
        found = jax.jit(engine.score)(KEY, at(3), run, federation)
        scores = [(of_it.test, of_fedavg.test) for of_it, of_fedavg in zip(found[:2], expected, strict=True)]
        chex.assert_trees_all_close(*zip(*split(scores)[1], strict=True), rtol=1e-5)


def config(**tables):
    base = {
        "data": {"source": "digits", "clients": 6, "new_clients": 0.34, "partition": {"kind": "dirichlet"}},
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": "fedavg"},
        "training": {"rounds": 2, "batch_size": 16, "lr": 0.1},
        "run": {"placement": "map"},
    }
    for section, fields in tables.items():
        base[section] = {**base.get(section, {}), **fields}
    return Config(**base)


def test_they_are_drawn_at_random_and_numbered_last():
    dataset = load("digits")
    drawn = []
    for seed in range(5):
        none, some = (
            divide(config(data={"new_clients": share}, run={"seed": seed}), dataset)[1] for share in (0.0, 0.34)
        )
        order = [none["class_counts"].index(counts) for counts in some["class_counts"]]
        assert sorted(order) == list(range(6))
        assert order[:4] == sorted(order[:4])
        assert "clients 4 to 5 are new: they never train" in some["notes"]
        drawn.append(tuple(order[4:]))
    assert len(set(drawn)) > 2


def test_a_run_reports_them_apart(tmp_path):
    out = tmp_path / "run"
    result = simulate(config(run={"out": str(out)}))
    with (out / "clients.csv").open() as file:
        table = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert [row["new"] for row in table] == [0, 0, 0, 0, 1, 1]
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    for point in ("pre", "post"):
        accuracy = np.array([row[f"{point}_accuracy"] for row in table])
        assert line[point]["accuracy"] == pytest.approx(accuracy[:4].mean())
        assert line[f"new_{point}"]["accuracy"] == pytest.approx(accuracy[4:].mean())
        assert result.summary["personal"][point]["last"] == line[point]["accuracy"]
        assert result.summary["new_clients"][point]["last"] == line[f"new_{point}"]["accuracy"]
        assert result.history[f"new_{point}.accuracy"][-1] == line[f"new_{point}"]["accuracy"]
    assert line["new_post"]["loss"] != line["new_pre"]["loss"]
    swept = sweep(config(), {"run.seed": [0, 1]}).cells[0].summary
    for point, scores in result.summary["new_clients"].items():
        found = swept["new_clients"][point]
        assert found.keys() == scores.keys()
        for name, value in scores.items():  # without validation samples, there is no round that is best on them
            assert (found[name] is None) if value is None else (found[name] == pytest.approx(value, rel=1e-5))


@pytest.mark.parametrize("share", [0.05, 0.95])
def test_a_share_leaves_some_of_either_kind(share):
    with pytest.raises(
        ConfigError, match=rf"data.new_clients = {share} is not usable: .*a share that is some of the 6 clients"
    ):
        divide(config(data={"new_clients": share}), load("digits"))


def with_rows(path, **uses):
    """A config of clients with these rows of digits: use -> the rows of each client."""
    rows = {use: np.concatenate(of_clients).astype(int) for use, of_clients in uses.items()}
    ends = {f"{use}_offsets": np.cumsum([0, *map(len, of_clients)]) for use, of_clients in uses.items()}
    np.savez(path, **rows, **ends)
    partition = {"kind": "indices", "file": str(path)}
    data = {"source": "digits", "clients": len(uses["test"]), "partition": partition}
    data["validation_share"] = 0.2 if "validation" in uses else 0.0
    return Config(data=data, model={"name": "mlp", "hidden": 4}, method={"name": "fedavg"})


def test_a_batch_that_only_a_new_client_fills_trains_nobody(tmp_path):
    given = with_rows(tmp_path / "rows.npz", train=[[0, 1], [2, 3, 4], range(5, 12)], test=[[12], [13], [14]])
    given = given.replace({"training.drop_last": True, "training.batch_size": 4})
    lay_out([given], load("digits"))
    with pytest.raises(
        ConfigError, match=r"training\.batch_size = 4 is not usable: at most 3 with training\.drop_last"
    ):
        lay_out([given.replace("data.new_clients", 0.34)], load("digits"))


def test_validation_samples_that_nobody_has_whose_scores_are_reported_are_refused(tmp_path):
    """The last of three clients has the only one: it is new, or malicious."""
    uses = {"train": [[0], [1], [2]], "validation": [[], [], [3]], "test": [[4], [5], [6]]}
    honest = with_rows(tmp_path / "rows.npz", **uses)
    lying = [
        honest.replace({"attack.kind": "sign_flip", "attack.share": 0.34, "data.seed": seed}) for seed in range(30)
    ]
    last = next(config for config in lying if attackers(config)[2])
    lay_out([honest], load("digits"))
    for refused in (honest.replace("data.new_clients", 0.34), last):
        for evaluate_on in ("test", "validation"):
            with pytest.raises(ConfigError, match=r"data\.validation_share = 0\.2 .* only to clients that are new or"):
                lay_out([refused.replace("data.evaluate_on", evaluate_on)], load("digits"))
