"""The models of a run that has ended: kept, read back, asked, adapted and written out."""

import dataclasses
import json
import os
import pickle
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from fedjax_pfl import Config, ConfigError, Result, simulate
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.build import DataShape, divide, make_engine, shape_of
from fedjax_pfl.experiment.kept import Kept, fitted, read_state, write_state
from fedjax_pfl.experiment.trained import state_like
from fedjax_pfl.method import State
from fedjax_pfl.models import MODELS, build
from tests.interruption import KilledError, killed_after

DIGITS = load("digits")
CLIENTS, NEW = 4, 3  # the last one is new
METHODS = ("fedavg", "ditto", "ccvr", "fedrod")
# So that Ditto's own models are made of samples, too, and it matters which samples a batch holds.
TUNED = {"finetune": {"epochs": 2}, "training": {"batch_size": 5}}
HELD = {"samples_per_client": 24, "validation_share": 0.5}


def config(name="fedavg", out=None, **tables):
    base = {
        "data": {
            "source": "digits",
            "clients": CLIENTS,
            "samples_per_client": 16,
            "partition": {"kind": "dirichlet", "beta": 0.5},
        },
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": name},
        "training": {"rounds": 2, "epochs": 2, "batch_size": 16, "lr": 0.3},
        "run": {"seed": 3, "out": None if out is None else str(out)},
    }
    for section, fields in tables.items():
        base[section] = {**base.get(section, {}), **fields}
    return Config(**base)


def with_new_client(name, out=None, **tables):
    return config(name, out, **{"data": {"new_clients": 0.25}, **tables})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name -> the result of a method's run, and its directory."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def of(name):
        if name not in done:
            made = with_new_client if name in ("fedavg", "ditto", "ccvr") else config
            kept = {"export": ["predictions"], "client_history": True} if name == "fedavg" else {}
            tables = {"ditto": TUNED, "fedrod": {"data": HELD}}.get(name, {})
            out = folder / name
            done[name] = simulate(made(name, run={"seed": 3, "out": str(out), **kept}, **tables)), out
        return done[name]

    return of


@pytest.fixture(scope="module")
def fedavg(runs):
    return runs("fedavg")


def rows_of(table, client):
    return np.asarray(table.index)[client, : int(table.count[client])]


def features(params, x):
    """The MLP's hidden units, by hand; ``mean`` and ``std`` are 0.5."""
    flat = (x.reshape(len(x), -1) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    hidden = params["extractor"]["hidden_layer"]
    return flat, flat @ hidden["kernel"] + hidden["bias"]


def logits(params, x):
    _, before = features(params, x)
    return np.maximum(before, 0) @ params["head"]["kernel"] + params["head"]["bias"]


def softmax(z):
    powers = np.exp(z - z.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


# --- What is answered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_models_are_those_that_pre_scores(runs, name):
    """The global one, clients' own that are fine-tuned, calibrated, or of two heads: as read from the directory."""
    result, out = runs(name)
    federation, _ = divide(result.config, DIGITS)
    found, loaded = [], Result.load(out)
    for client in range(CLIENTS):
        rows = rows_of(federation.test, client)
        found.append(np.mean(loaded.predict(DIGITS.images[rows], client=client) == DIGITS.labels[rows]))
    np.testing.assert_allclose(found, result.clients["pre_accuracy"], atol=1e-6)
    assert len(set(found)) > 1  # it matters whose model answers
    if name == "ditto":
        tuned, trained = loaded.params(client=1), result.state.clients
        assert np.abs(tuned["head"]["kernel"] - trained["head"]["kernel"][1]).max() > 1e-3
    if name == "fedavg":
        answered = np.bincount(result.exported["client"], minlength=CLIENTS)
        np.testing.assert_array_equal(answered, result.clients["n_test"])


@pytest.mark.parametrize("name", ["fedavg", "ccvr"])
def test_the_global_model_is_the_one_that_is_scored(runs, name):
    result, _ = runs(name)
    federation, _ = divide(result.config, DIGITS)
    rows = np.concatenate([rows_of(federation.pooled, block) for block in range(len(federation.pooled.count))])
    answers = result.predict(DIGITS.images[rows])
    assert np.mean(answers == DIGITS.labels[rows]) == pytest.approx(result.summary["global"], abs=1e-6)
    np.testing.assert_array_equal(answers, logits(result.params(), DIGITS.images[rows]).argmax(axis=1))


def with_drawn_state(result, name):
    """As though a method's run had ended with numbers that are drawn here: nothing is compiled."""
    rng, of = np.random.default_rng(0), config(name)
    like = state_like(make_engine(of, shape_of(DIGITS)))
    state = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype), like)
    return dataclasses.replace(result, config=of, kept=Kept(1, shape_of(DIGITS), state))


@pytest.mark.parametrize(("name", "holds"), [("feddc", True), ("fedetf", False)])
def test_the_global_model_is_found_in_the_servers_state(fedavg, name, holds):
    """Among others of the same shapes; FedETF's answers with more than that."""
    drawn = with_drawn_state(fedavg[0], name)
    if holds:
        jax.tree.map(np.testing.assert_array_equal, drawn.params(), drawn.state.server.params)
    else:
        with pytest.raises(ConfigError, match="the global model of fedetf is more than an extractor with a head"):
            drawn.params()


def test_answers_are_those_of_the_parameters(fedavg):
    """More samples than a block holds, and none."""
    result, _ = fedavg
    x = DIGITS.images[:150]
    expected = logits(result.state.server, x)
    labels, shares = result.predict(x, client=2), result.predict_proba(x, client=2)
    assert (labels.dtype.kind, shares.dtype) == ("i", np.float32)
    np.testing.assert_array_equal(labels, expected.argmax(axis=1))
    np.testing.assert_allclose(shares, softmax(expected), atol=1e-5)
    for form in (x[..., 0], x.reshape(len(x), -1)):
        np.testing.assert_array_equal(result.predict(form, client=2), labels)
    assert result.predict_proba(x[:0]).shape == (0, 10)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((result.params(1), result.state)))


def test_a_diverged_model_gives_no_answer(fedavg):
    result, _ = fedavg
    broken = result.at(1, State(jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), result.state.server), ()))
    assert broken.predict(DIGITS.images[:3]).tolist() == [-1, -1, -1]
    assert np.isnan(broken.predict_proba(DIGITS.images[:3])).all()


def test_a_result_that_was_asked_can_be_pickled(fedavg):
    result, _ = fedavg
    answers = result.predict(DIGITS.images[:9], client=0)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(result)).predict(DIGITS.images[:9], client=0), answers)


# --- A client that never took part ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "ditto", "ccvr"])
def test_a_newcomer_adapts_as_new_clients_of_a_run_do(runs, name):
    result, out = runs(name)
    federation, _ = divide(result.config, DIGITS)
    train, test = rows_of(federation.train, NEW), rows_of(federation.test, NEW)
    assert len(train) == 16 < len(DIGITS.labels)
    model = Result.load(out).adapt(DIGITS.images[train], DIGITS.labels[train], epochs=2, client=NEW)
    shares = model.predict_proba(DIGITS.images[test])[np.arange(len(test)), DIGITS.labels[test]]
    assert -np.log(shares).mean() == pytest.approx(result.history["new_post.loss"][-1], rel=1e-4)
    accuracy = np.mean(model.predict(DIGITS.images[test]) == DIGITS.labels[test])
    assert accuracy == pytest.approx(result.clients["post_accuracy"][NEW], abs=1e-6)
    assert np.abs(model.params["head"]["kernel"] - result.params(0)["head"]["kernel"]).max() > 1e-2


def test_a_newcomer_starts_from_what_is_broadcast_and_not_from_what_is_scored(runs):
    x, y = DIGITS.images[200:213], DIGITS.labels[200:213]
    fedavg, ccvr = (runs(name)[0].adapt(x, y).params for name in ("fedavg", "ccvr"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ccvr, fedavg)


def test_a_newcomer_is_by_default_the_client_after_the_last(runs):
    """The order of its batches is that of no client of the run."""
    result, (x, y) = runs("ditto")[0], (DIGITS.images[200:213], DIGITS.labels[200:213])
    heads = [result.adapt(x, y, 2, client=client).params["head"]["kernel"] for client in (None, CLIENTS, 0)]
    np.testing.assert_array_equal(heads[0], heads[1])
    assert np.abs(heads[0] - heads[2]).max() > 1e-4


def test_a_newcomer_takes_the_steps_of_sgd(fedavg):
    """Five epochs of one batch each: gradient descent, by hand."""
    result, _ = fedavg
    x, y = DIGITS.images[200:213], DIGITS.labels[200:213]
    params, onehot = jax.tree.map(np.array, result.state.server), np.eye(10, dtype=np.float32)[y]
    for _ in range(5):
        flat, before = features(params, x)
        z = np.maximum(before, 0)
        of_logits = (softmax(logits(params, x)) - onehot) / len(x)
        of_hidden = (of_logits @ params["head"]["kernel"].T) * (before > 0)
        for layer, into, out in (
            (params["head"], z, of_logits),
            (params["extractor"]["hidden_layer"], flat, of_hidden),
        ):
            layer["kernel"] = layer["kernel"] - 0.3 * into.T @ out
            layer["bias"] = layer["bias"] - 0.3 * out.sum(axis=0)
    model = result.adapt(x, y)
    assert repr(model) == "TrainedModel: a client's model, with predict, predict_proba and params"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), model.params, params)
    np.testing.assert_array_equal(model.predict(x), logits(params, x).argmax(axis=1))
    np.testing.assert_allclose(model.predict_proba(x), softmax(logits(params, x)), atol=1e-3)


# --- What is written and read -----------------------------------------------------------------------------------------


def assert_tables_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column, err_msg=name)


def test_a_directory_gives_back_the_result(fedavg):
    result, out = fedavg
    loaded = Result.load(out)
    assert (loaded.summary, loaded.partition, loaded.config) == (result.summary, result.partition, result.config)
    for table in ("history", "clients", "labels", "exported", "client_history"):
        assert getattr(result, table)
        assert_tables_equal(getattr(loaded, table), getattr(result, table))
    assert (loaded.kept.round, loaded.kept.data) == (2, result.kept.data)
    jax.tree.map(np.testing.assert_array_equal, loaded.state, result.state)


def test_the_state_is_a_safetensors_file(runs):
    result, out = runs("ditto")
    arrays = load_file(out / "state.safetensors")
    assert arrays["server/extractor/hidden_layer/kernel"].shape == (64, 8)
    assert arrays["clients/extractor/hidden_layer/kernel"].shape == (CLIENTS, 64, 8)
    np.testing.assert_array_equal(arrays["server/head/bias"], result.state.server["head"]["bias"])
    with safetensors.safe_open(out / "state.safetensors", framework="numpy") as file:
        about = json.loads(file.metadata()["fedjax_pfl"])
    assert (about["round"], about["data"]["sample"], about["data"]["classes"]) == (2, [8, 8, 1], 10)


class Parts(NamedTuple):
    numbers: object
    nothing: object
    empty: object


def test_every_kind_of_array_survives(tmp_path):
    rng = np.random.default_rng(0)
    server = {
        "whole": [np.int32(7), np.arange(4, dtype=np.uint8)],
        "flags": np.array([True, False]),
        "turned": np.asfortranarray(rng.normal(size=(3, 5)).astype(np.float32)),
        "half": rng.normal(size=(2, 2)).astype(ml_dtypes.bfloat16),
        "none of them": np.zeros((0, 3), np.float32),
    }
    state = State(server, Parts(np.arange(3, dtype=np.float32), None, ()))
    write_state(tmp_path / "state.safetensors", Kept(5, DataShape("x", (2, 3), 4, None), state))
    round, shape, arrays = read_state(tmp_path / "state.safetensors")
    assert (round, shape) == (5, DataShape("x", (2, 3), 4, None))
    found = fitted(arrays, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, state)), "here")
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert (leaf.dtype, leaf.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(leaf, expected)


def test_who_may_read_the_other_files_may_read_the_state(tmp_path):
    path, other = tmp_path / "state.safetensors", tmp_path / "summary.json"
    before = os.umask(0o027)
    try:
        write_state(path, Kept(1, DataShape("x", (2, 3), 4, None), State({"bias": np.arange(3)}, ())))
        other.touch()
    finally:
        os.umask(before)
    assert oct(path.stat().st_mode) == oct(other.stat().st_mode)


def test_a_state_that_cannot_be_written_to_its_end_leaves_the_one_before(tmp_path, monkeypatch):
    def write_half(arrays, path, about):
        save_file(arrays, path, about)
        half(path)
        raise OSError("no space left on device")

    path, of = tmp_path / "state.safetensors", DataShape("x", (2, 3), 4, None)
    write_state(path, Kept(1, of, State({"bias": np.arange(3)}, ())))
    monkeypatch.setattr("fedjax_pfl.experiment.kept.save_file", write_half)
    with pytest.raises(OSError, match="no space left"):
        write_state(path, Kept(2, of, State({"bias": np.zeros(3)}, ())))
    round, _, arrays = read_state(path)
    assert (round, arrays["server/bias"].tolist()) == (1, [0, 1, 2])


def test_arrays_that_no_state_of_the_config_has_are_refused():
    like = State({"bias": jax.ShapeDtypeStruct((3,), jnp.float32)}, ())
    arrays = {"server/bias": np.zeros(3, np.float32), "server/scale": np.ones(3, np.float32)}
    assert fitted({"server/bias": arrays["server/bias"]}, like, "here").server["bias"] is arrays["server/bias"]
    for given, message in (
        (arrays, r"fits the config: server/scale is float32\[3\] instead of missing"),
        ({}, r"fits the config: server/bias is missing instead of float32\[3\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            fitted(given, like, "here")


def test_a_result_without_a_directory_can_be_saved(fedavg, tmp_path):
    result, out = fedavg
    result.save(tmp_path / "saved")
    names = sorted(path.name for path in out.iterdir())
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names
    for name in names:
        written, expected = tmp_path / "saved" / name, out / name
        if name.endswith(".npz"):
            with np.load(written) as found, np.load(expected) as wanted:
                assert_tables_equal(dict(found), dict(wanted))
        elif name == "metrics.jsonl":
            lines = ([json.loads(line) for line in path.read_text().splitlines()] for path in (written, expected))
            assert next(lines) == next(lines)
        else:
            assert written.read_bytes() == expected.read_bytes(), name
    with pytest.raises(ConfigError, match="overwrite=True"):
        result.save(tmp_path / "saved")


def test_a_model_can_be_written_for_flax(runs, tmp_path):
    result, _ = runs("ditto")
    path = tmp_path / "models" / "one.safetensors"
    result.save_params(path, client=1)
    params = unflatten_dict(load_file(path), sep="/")
    scale = {name: jnp.full(1, 0.5) for name in ("mean", "std")}
    model = build(MODELS["mlp"](hidden=8), (8, 8, 1), 10, init="torch", **scale)
    x = DIGITS.images[:30]
    found = jax.jit(model.apply)(params, x)
    np.testing.assert_array_equal(found.argmax(axis=1), result.predict(x, client=1))
    assert np.abs(found - logits(result.params(2), x)).max() > 0.1
    with pytest.raises(ConfigError, match="it exists; name another file, or replace it: overwrite=True"):
        result.save_params(path, client=2)
    result.save_params(path, client=2, overwrite=True)
    np.testing.assert_array_equal(load_file(path)["head/bias"], result.params(2)["head"]["bias"])
    with pytest.raises(ConfigError, match=r"path = .* a file that can be written"):
        result.save_params(path / "inside", client=2)
    with pytest.raises(ConfigError, match=r"path = 'p\.npz' is not usable: a file that ends with \.safetensors"):
        result.save_params("p.npz", client=2)


@pytest.mark.parametrize(
    ("metric", "target", "round"),
    [
        ("train_loss", 1.2, 4),
        ("train_loss", 1.0, None),
        ("pre.loss", 2.0, 4),
        ("pre.std_clients", 0.2, 2),
        ("pre.mine", 3.0, 4),
        ("pre.accuracy", 1.0, 4),
    ],
)
def test_a_loss_comes_down_to_its_target(fedavg, metric, target, round):
    history = {
        "train_loss": [1.63, 1.123],
        "pre.loss": [np.nan, 1.9],
        "pre.std_clients": [0.1, 0.3],
        "pre.mine": [1, 3],
        "pre.accuracy": [0.5, 1.0],
    }
    arrays = {name: np.array(values) for name, values in history.items()}
    result = dataclasses.replace(fedavg[0], history={"round": np.array([2, 4]), **arrays})
    assert result.rounds_to(target, metric) == round


# --- Which state is kept ----------------------------------------------------------------------------------------------


def test_the_best_state_is_that_of_the_best_round_also_after_an_interruption(tmp_path):
    def best_of(out, **run):
        training = {"rounds": 6, "lr": 2.5}
        return config("fedrod", data=HELD, training=training, run={"keep": "best", "out": str(tmp_path / out), **run})

    result = simulate(best_of("whole"))
    accuracy = result.history["validation_pre.accuracy"]
    best = int(accuracy.argmax()) + 1
    assert best < 4 < 6  # before the checkpoint that the killed run goes on from
    assert result.kept.round == best
    until = simulate(best_of("until", keep="final").replace({"training.rounds": best}))
    jax.tree.map(np.testing.assert_array_equal, result.state, until.state)
    with pytest.raises(KilledError):
        simulate(best_of("killed", checkpoint_every=4), progress=killed_after(5))
    assert not (tmp_path / "killed" / "state.safetensors").exists()
    simulate(best_of("killed", checkpoint_every=4), resume=tmp_path / "killed")
    kept = [(tmp_path / out / "state.safetensors").read_bytes() for out in ("whole", "killed")]
    assert kept[0] == kept[1]
    assert Result.load(tmp_path / "killed").kept.round == best

    with pytest.raises(KilledError):
        simulate(best_of("other", checkpoint_every=4, keep="final"), progress=killed_after(5))
    with pytest.raises(ConfigError, match=r"run\.keep = 'best' is not usable: .final. or .none. for this run"):
        simulate(best_of("other", checkpoint_every=4), resume=tmp_path / "other")


def test_of_equally_good_rounds_the_first_is_kept():
    result = simulate(config("fedrod", data=HELD, training={"lr": 1e-12}, run={"keep": "best"}))
    assert len(set(result.history["validation_pre.accuracy"])) == 1
    assert result.kept.round == result.summary["personal"]["pre"]["by_validation_round"] == 1


def test_the_best_needs_validation_samples():
    with pytest.raises(ConfigError, match=r"run\.keep = 'best' is not usable: .*data\.validation_share a value above"):
        config(run={"keep": "best"})


def test_without_a_state_the_tables_can_be_read(fedavg, tmp_path):
    out = tmp_path / "run"
    simulate(with_new_client("fedavg", run={"keep": "none", "out": str(out)}))
    assert not (out / "state.safetensors").exists()
    old = Result.load(out)
    assert_tables_equal(old.clients, fedavg[0].clients)
    for ask in (lambda: old.state, lambda: old.predict(DIGITS.images[:2], client=0), lambda: old.params()):
        with pytest.raises(
            ConfigError, match=r'state = None is not usable: kept: run it again, with run\.keep = "final"'
        ):
            ask()


def test_results_may_be_in_the_home_directory(fedavg, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    fedavg[0].save("~/saved")
    assert_tables_equal(Result.load("~/saved").clients, Result.load(tmp_path / "saved").clients)
    fedavg[0].save_params("~/model.safetensors")
    assert (tmp_path / "model.safetensors").exists()


# --- The data of the run ----------------------------------------------------------------------------------------------


def test_models_that_are_made_of_samples_take_the_data_of_the_run(runs, tmp_path):
    result, _ = runs("ditto")
    data = DIGITS.images, DIGITS.labels
    given = {"source": "arrays", "new_clients": 0.25}
    own = simulate(config("ditto", tmp_path / "run", data=given, **TUNED), data)
    x, expected = DIGITS.images[:40], result.predict(DIGITS.images[:40], client=2)
    np.testing.assert_array_equal(own.predict(x, client=2), expected)
    np.testing.assert_array_equal(Result.load(tmp_path / "run", data).predict(x, client=2), expected)
    with pytest.raises(ConfigError, match=r"data = None is not usable: .*Result\.load\(directory, data=\.\.\.\)"):
        Result.load(tmp_path / "run").predict(x, client=2)
    with pytest.raises(ConfigError, match="another partition came out"):
        Result.load(tmp_path / "run", (DIGITS.images, DIGITS.labels[::-1].copy())).predict(x, client=2)
    others = Result.load(tmp_path / "run", (255 - DIGITS.images, DIGITS.labels))
    with pytest.raises(ConfigError, match="these are other samples"):
        others.predict(x, client=2)
    with pytest.raises(ConfigError, match="these are other samples"):
        others.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


# --- Mistakes ---------------------------------------------------------------------------------------------------------

X, Y = DIGITS.images[:4], DIGITS.labels[:4]
MISTAKES = {
    "client 4": (lambda result: result.predict(X, client=4), r"client = 4 is not usable: a client from 0 to 3"),
    "client -1": (lambda result: result.params(client=-1), r"client = -1 is not usable: a client from 0 to 3"),
    "client 1.0": (lambda result: result.params(client=1.0), r"client = 1\.0 is not usable: a client from 0 to 3"),
    "a float image": (
        lambda result: result.predict(X / 255.0, client=1),
        r"x = 'float64\[4, 8, 8, 1\]' is not usable: samples like those of digits: uint8\[n, 8, 8, 1\]",
    ),
    "one image": (lambda result: result.predict(X[0], client=1), r"x = 'uint8\[8, 8, 1\]'"),
    "other images": (lambda result: result.predict_proba(X[:, :4]), r"x = 'uint8\[4, 4, 8, 1\]'"),
    "too few labels": (
        lambda result: result.adapt(X, Y[:3]),
        r"y = 'int32\[3\]' is not usable: a label for each of the 4 samples, one or more, whole numbers from 0 to 9",
    ),
    "labels as floats": (lambda result: result.adapt(X, Y * 1.0), r"y = 'float64\[4\]'"),
    "a label too large": (lambda result: result.adapt(X, Y + 9), "whole numbers from 0 to 9"),
    "nothing to adapt to": (lambda result: result.adapt(X[:0], Y[:0]), r"y = 'int32\[0\]'"),
    "a target in %": (
        lambda result: result.rounds_to(66, "pre.accuracy"),
        r"target = 66 is not usable: a share from 0 to 1, such as 0\.66",
    ),
    "no epochs": (lambda result: result.adapt(X, Y, epochs=0), r"^epochs = 0 is not usable: a whole number, 1 or more"),
    "half an epoch": (lambda result: result.adapt(X, Y, epochs=1.5), r"^epochs = 1\.5 is not usable"),
    "a newcomer's number": (lambda result: result.adapt(X, Y, client=-2), "a whole number, 0 or more"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(fedavg, mistake):
    ask, message = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=message):
        ask(fedavg[0])


def test_what_a_method_has_not_is_said(fedavg):
    no_global = with_drawn_state(fedavg[0], "fedrep")
    for ask in (lambda: no_global.predict(X), lambda: no_global.params()):
        with pytest.raises(ConfigError, match=r"client = None is not usable: fedrep has no global model; .* 0 to 3$"):
            ask()
    with pytest.raises(ConfigError, match=r"adapt = 'fedamp' is not usable: a method whose server"):
        with_drawn_state(fedavg[0], "fedamp").adapt(X, Y)
    dropping = dataclasses.replace(fedavg[0], config=fedavg[0].config.replace("training.drop_last", True))
    with pytest.raises(ConfigError, match=r"x = 'uint8\[4, 8, 8, 1\]' is not usable: more samples: .* no batch of 16"):
        dropping.adapt(X, Y)


def changed(out, name, old, new):
    text = (out / name).read_text()
    assert old in text
    (out / name).write_text(text.replace(old, new))


def without_summary(out):
    (out / "summary.json").unlink()


def half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"directory = .* a run directory: there is no config\.toml in this one"),
        (without_summary, r"directory = .* a run that has ended; this one goes on with simulate\(config, resume="),
        (
            lambda out: half(out / "export.npz"),
            r"export = '.*export\.npz' is not usable: a table that a run has exported \(.*; without this file",
        ),
        (
            lambda out: half(out / "state.safetensors"),
            r"state = '.*state\.safetensors' is not usable: a state that a run has written \(",
        ),
        (lambda out: changed(out, "summary.json", "{", "["), r"summary = '.*summary\.json' is not usable"),
        (
            lambda out: changed(out, "config.toml", "hidden = 8", "hidden = 9"),
            r"state = .* is not usable: one that fits the config: server/extractor/hidden_layer/bias is float32\[8\] "
            r"instead of float32\[9\]",
        ),
        (
            lambda out: changed(out, "config.toml", 'name = "fedavg"', 'name = "of_mine"'),
            r"method\.name = 'of_mine' is not usable: registered in this process; register yours",
        ),
    ],
)
def test_a_directory_that_cannot_be_read_is_one_line(fedavg, tmp_path, damage, message):
    out = shutil.copytree(fedavg[1], tmp_path / "run")
    damage(out)
    with pytest.raises(ConfigError, match=message):
        Result.load(out)


def test_a_method_that_has_changed_since_is_noticed(fedavg):
    other = dataclasses.replace(fedavg[0], config=fedavg[0].config.replace({"model.hidden": 9}))
    with pytest.raises(ConfigError, match=r"state = 'this result' is not usable: one that fits the config"):
        other.predict(X)


def test_models_that_are_made_of_what_the_server_writes_are_those_that_pre_scores():
    """FedFomo's are mixed of the others' newest models, not of those that a client was sent in its last round."""
    result = simulate(config("fedfomo", data={**HELD, "partition": {"kind": "iid"}}, training={"lr": 0.05}))
    federation, _ = divide(result.config, DIGITS)
    losses, own, before = [], result.state.clients.params, result.state.clients.reference
    for client in range(CLIENTS):
        rows, params = rows_of(federation.test, client), result.params(client)
        for alone in (own, before):  # the others have a part in it
            assert np.abs(params["head"]["kernel"] - alone["head"]["kernel"][client]).max() > 1e-4
        shares = result.predict_proba(DIGITS.images[rows], client=client)[np.arange(len(rows)), DIGITS.labels[rows]]
        losses.append(-np.log(shares).mean())
    np.testing.assert_allclose(np.mean(losses), result.history["pre.loss"][-1], rtol=1e-4)


def test_a_newcomers_rate_has_decayed_as_that_of_the_round():
    result = simulate(with_new_client("fedavg", training={"lr_decay": 0.3}))
    federation, _ = divide(result.config, DIGITS)
    train, test = rows_of(federation.train, NEW), rows_of(federation.test, NEW)
    model = result.adapt(DIGITS.images[train], DIGITS.labels[train], epochs=2, client=NEW)
    shares = model.predict_proba(DIGITS.images[test])[np.arange(len(test)), DIGITS.labels[test]]
    assert -np.log(shares).mean() == pytest.approx(result.history["new_post.loss"][-1], rel=1e-4)
