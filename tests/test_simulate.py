import csv
import itertools
import json
import math
import os
import platform
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from scipy.stats import hmean

from fedjax_pfl import Config, ConfigError, load_config, register_method, register_metric, register_model, simulate
from fedjax_pfl.data.dataset import fingerprint
from fedjax_pfl.data.federated import client_data
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.sources import load
from fedjax_pfl.data.split import draw_test, manifest
from fedjax_pfl.engine.hardware import Hardware
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.metrics import METRICS
from fedjax_pfl.engine.peak import peak_bytes
from fedjax_pfl.experiment import layout, programs
from fedjax_pfl.experiment.build import divide, make_engine, shape_of
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.placing import even_chunk
from fedjax_pfl.experiment.process import cores
from fedjax_pfl.experiment.programs import alike
from fedjax_pfl.experiment.summary import flat
from fedjax_pfl.method import Cohort
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS, mlp
from fedjax_pfl.ops.tree import count, size
from tests.reference import MLP, held, now, to_numpy
from tests.toys import witness

SOME = {"ratio": [0.3, 0.7], "dropout": 0.3}
CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def config(method="fedavg", **tables):
    base = {
        "data": {"source": "digits", "clients": 6, "partition": {"kind": "dirichlet", "beta": 0.3}},
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": method},
        "training": {"rounds": 4, "batch_size": 16, "lr": 0.1},
        "run": {"eval_every": 2},
    }
    for section, fields in tables.items():
        base[section] = {**base.get(section, {}), **fields}
    return Config(**base)


def numbers(summary):
    return {key: summary[key] for key in ("personal", "global", "partition_hash", "traffic")}


def flatten(tree):
    return np.array([leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, float)])


def assert_agree(result, expected):
    np.testing.assert_allclose(
        flatten(numbers(result.summary)), flatten(numbers(expected.summary)), rtol=1e-5, atol=1e-5
    )
    for a, b in zip(jax.tree.leaves(result.state), jax.tree.leaves(expected.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "reference"
    reports = []
    return simulate(config(run={"out": str(out)}), progress=reports.append), out, reports


def test_run_directory_holds_what_the_result_says(reference):
    result, out, _ = reference
    assert sorted(path.name for path in out.iterdir()) == [
        "clients.csv",
        "config.toml",
        "labels.csv",
        "metrics.jsonl",
        "partition.json",
        "partition.npz",
        "state.safetensors",
        "summary.json",
    ]
    assert json.loads((out / "summary.json").read_text()) == result.summary
    assert json.loads((out / "partition.json").read_text()) == result.partition
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [2, 4] == result.history["round"].tolist()
    assert [line["pre"]["accuracy"] for line in lines] == result.history["pre.accuracy"].tolist()
    assert [line["post"]["hm"] for line in lines] == result.history["post.hm"].tolist()
    assert [line["global_macro_f1"] for line in lines] == result.history["global_macro_f1"].tolist()
    rows = list(csv.DictReader((out / "clients.csv").read_text().splitlines()))
    assert [int(row["n_train"]) for row in rows] == result.partition["n_train"]
    np.testing.assert_allclose([float(row["post_accuracy"]) for row in rows], result.clients["post_accuracy"])
    correct = np.zeros(len(rows))
    for row in csv.DictReader((out / "labels.csv").read_text().splitlines()):
        correct[int(row["client"])] += int(row["post_correct"])
    np.testing.assert_allclose(correct / result.clients["n_test"], result.clients["post_accuracy"], rtol=1e-6)


def test_summary_has_the_promised_fields(reference):
    summary = reference[0].summary
    assert {"method", "dataset", "clients", "rounds", "seed", "personal", "global"} <= summary.keys()
    for point in ("pre", "post"):
        assert {
            "last",
            "best",
            "best_round",
            "mean_last_10",
            "std_clients",
            "worst_10_percent",
            "weighted_last",
        } <= summary["personal"][point].keys()
    assert summary["new_clients"] is None
    assert summary["timing"].keys() == {"compile_seconds", "seconds_per_round", "total_seconds"}
    environment = summary["environment"]
    assert (environment["platform"], environment["device_kind"]) == ("cpu", "cpu")
    assert environment["python"] == platform.python_version()
    assert environment["cores"] == cores()
    assert environment["device_count"] == 2
    assert environment["clients_side_by_side"] == 1


def test_summary_agrees_with_the_client_table(reference):
    result = reference[0]
    for point in ("pre", "post"):
        accuracy = result.clients[f"{point}_accuracy"]
        shown = result.summary["personal"][point]
        np.testing.assert_allclose(shown["last"], accuracy.mean(), rtol=1e-6)
        np.testing.assert_allclose(shown["std_clients"], accuracy.std(), rtol=1e-5)
        np.testing.assert_allclose(shown["worst_10_percent"], accuracy.min(), rtol=1e-6)
        weighted = np.average(accuracy, weights=result.clients["n_test"])
        np.testing.assert_allclose(shown["weighted_last"], weighted, rtol=1e-6)
        np.testing.assert_allclose(shown["best"], result.history[f"{point}.accuracy"].max())
        clients = [result.clients[f"{point}_{metric}"] for metric in ("accuracy", "macro_f1")]
        i_local = np.mean([hmean(pair) for pair in zip(*clients, strict=True)])
        np.testing.assert_allclose([shown["i_local_last"], result.history[f"{point}.i_local"][-1]], i_local, rtol=1e-6)
        np.testing.assert_allclose(shown["hm_last"], hmean([result.summary["global"], i_local]), rtol=1e-6)
        assert shown["hm_last"] == result.history[f"{point}.hm"][-1]
    # FedAvg's PRE model is the global model, and the clients' test sets together are the pooled one.
    np.testing.assert_allclose(result.summary["global"], result.summary["personal"]["pre"]["weighted_last"], rtol=1e-6)


def test_the_global_models_scores_are_those_on_all_test_samples(reference):
    result = reference[0]
    federation, _ = divide(config(), load("digits"))
    pooled = np.concatenate([held(federation.test, i) for i in range(6)])
    mlp = MLP(federation.x.rows, federation.y, mean=0.5, std=0.5)
    _, accuracy, macro_f1, union, _ = mlp.scores(to_numpy(result.state.server), pooled)
    summary, curve = result.summary, result.history["global"]
    found = [summary["global"], summary["global_macro_f1"], result.history["global_macro_f1_union"][-1]]
    assert found == pytest.approx([accuracy, macro_f1, union], rel=1e-6)
    assert [curve[-1], result.history["global_macro_f1"][-1]] == [summary["global"], summary["global_macro_f1"]]
    assert (summary["global_best"], summary["global_best_round"]) == (curve.max(), 2 * (1 + curve.argmax()))


def test_rounds_to_a_target_are_those_of_the_first_evaluated_round_that_reaches_it(reference):
    curve = {"round": np.array([5, 10, 15, 20]), "global": np.array([0.3, np.float32(0.42), 0.41, 0.6])}
    result = replace(reference[0], history={**curve, "pre.hm": np.array([np.nan, 0.1, np.nan, 0.2])})
    # The second value is 0.41999998.
    assert [result.rounds_to(target) for target in (0.0, 0.3, 0.42, 0.43, 0.6, 0.61)] == [5, 5, 10, 20, 20, None]
    assert [result.rounds_to(target, "pre.hm") for target in (0.05, 0.2, 0.3)] == [10, 20, None]
    with pytest.raises(ConfigError, match=r"metric = 'pre\.auc' is not usable: .*round, global, pre\.hm"):
        result.rounds_to(0.5, "pre.auc")


def test_traffic_counts_the_model_both_ways(reference):
    traffic = reference[0].summary["traffic"]
    floats = 64 * 8 + 8 + 8 * 10 + 10
    assert traffic["floats_up_per_client_round"] == traffic["floats_down_per_client_round"] == floats
    np.testing.assert_allclose(traffic["megabytes_total"], 4 * 6 * 2 * floats * 4 / 1e6)
    assert traffic["megabytes_dense"] == traffic["megabytes_total"]


@pytest.fixture(scope="module")
def fedpac(tmp_path_factory):
    """A run of a method that has no global model, with clients that hold two classes each; and its directory."""
    out = tmp_path_factory.mktemp("runs") / "fedpac"
    data = {"partition": {"kind": "pathological", "classes_per_client": 2}}
    return simulate(config("fedpac", data=data, run={"out": str(out)})), out


def test_without_a_global_model_there_are_no_global_scores(fedpac):
    result, out = fedpac
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert line["global"] is line["global_macro_f1"] is line["pre"]["hm"] is line["post"]["hm"] is None
    assert {result.summary[key] for key in result.summary if key.startswith("global")} == {None}
    assert result.summary["personal"]["post"]["hm_last"] is None
    assert np.isnan([result.history[metric] for metric in ("global", "global_macro_f1", "pre.hm", "post.hm")]).all()
    assert (result.history["post.i_local"] > 0).all()
    assert result.rounds_to(0.0) is None


def test_traffic_leaves_out_the_classes_that_are_not_held(fedpac):
    result, _ = fedpac
    held_classes = np.asarray(divide(result.config, load("digits"))[0].train.class_counts) > 0
    assert (held_classes.sum(axis=1) == 2).all()
    model, flags, classes = 64 * 8 + 8 + 8 * 10 + 10, 10, 10
    # Up: two rows of 8 features per class, the counts and one number; down: one row, once there are prototypes.
    up, down = 4 * (model + classes + 1), 4 * model + flags
    rows_up, rows_down = 4 * held_classes.sum(), 3 * 6 * held_classes.any(axis=0).sum()
    traffic = result.summary["traffic"]
    sent = 4 * 6 * (up + down) + 4 * 8 * (2 * rows_up + rows_down)
    dense = 4 * 6 * (up + down + 4 * 8 * 3 * classes)
    assert traffic["megabytes_total"] == result.history["megabytes"][-1] == pytest.approx(sent / 1e6, rel=1e-9)
    assert traffic["megabytes_dense"] == pytest.approx(dense / 1e6, rel=1e-9)
    assert traffic["megabytes_total"] < traffic["megabytes_dense"]
    assert traffic["floats_up_per_client_round"] == model + classes + 1 + 2 * 8 * classes
    assert traffic["floats_down_per_client_round"] == model + flags + 8 * classes


def test_progress_is_reported_up_to_the_last_round(reference):
    reports = reference[2]
    assert [report.compiled for report in reports] == [False] + [True] * (len(reports) - 1)
    rounds = [report.round for report in reports[1:]]  # from when it is compiled
    assert rounds == sorted(set(rounds))
    assert (rounds[0], rounds[-1]) == (0, 4)
    assert reports[-1].last["pre"]["accuracy"] == reference[0].summary["personal"]["pre"]["last"]


def test_the_same_seed_gives_the_same_bits_and_another_seed_other_numbers(reference):
    again = simulate(config())
    assert numbers(again.summary) == numbers(reference[0].summary)
    for a, b in zip(jax.tree.leaves(again.state), jax.tree.leaves(reference[0].state), strict=True):
        np.testing.assert_array_equal(a, b)
    other = simulate(config(run={"seed": 1}, data={"seed": 0}))
    assert other.summary["partition_hash"] == again.summary["partition_hash"]
    assert other.history["train_loss"].tolist() != again.history["train_loss"].tolist()


@pytest.mark.parametrize("run", [{"placement": "map"}, {"placement": "vmap", "chunk": 4}])
def test_placements_agree_to_1e_5(reference, run):
    assert_agree(simulate(config(run=run)), reference[0])


def test_diagnostics_arrive_in_the_history_and_move_no_number(reference):
    """FedAvg's clients send back the model that they got, and so have updates to compare; here all side by side."""
    found, expected = simulate(config(run={"diagnostics": True, "placement": "vmap"})), reference[0]
    cosine = found.history["diagnostics.update_cosine"]
    assert cosine.shape == (2,)
    assert (np.abs(cosine) < 1).all()
    assert cosine[0] != cosine[1]
    assert "diagnostics.update_cosine" not in expected.history
    assert_agree(found, expected)


def test_other_seeds_and_numbers_of_the_same_shapes_compile_nothing(reference, monkeypatch):
    data = {"seed": 0}
    monkeypatch.setattr("fedjax_pfl.experiment.programs.ThreadPoolExecutor", lambda **_: pytest.fail("compiled"))
    other = simulate(config(data=data, training={"lr": 0.3, "rounds": 2}, run={"seed": 5, "eval_every": 1}))
    again = simulate(config(data=data))
    assert numbers(again.summary) == numbers(reference[0].summary)
    assert other.history["train_loss"][-1] != again.history["train_loss"][0]


@pytest.mark.usefixtures("tables_as_before")
def test_runs_of_the_same_shapes_are_surveyed_once(monkeypatch):
    surveyed, data = [], load("digits")
    monkeypatch.setattr(layout, "_surveys", OrderedDict())
    monkeypatch.setattr(layout, "survey", lambda *of, **how: surveyed.append(of) or survey(*of, **how))

    def found(changes, hardware=None):
        surveyed.clear()
        return lay_out([config(data={"seed": 0}).replace(changes)], data, hardware), len(surveyed)

    first, surveys = found({})
    assert surveys == 1
    monkeypatch.setattr("fedjax_pfl.engine.memory.resident_set", lambda: 12345)
    again, surveys = found({"run.seed": 5, "training.lr": 0.3, "training.rounds": 9})
    assert surveys == 0
    assert again.memory == first.memory._replace(process=12345) != first.memory
    assert again.exchange == first.exchange
    for changes in ({"training.batch_size": 7}, {"run.export": ["features"]}, {"run.client_state": "host"}):
        assert found(changes)[1] == 1
    gpu = Hardware("gpu", tuple(jax.local_devices())[:1], 10**12)
    assert [found({}, gpu)[1] for _ in range(2)] == [1, 0]
    assert found({}, gpu)[0].memory.process == 0
    for _ in range(2):  # another function of the same name
        register_method("mine")(lambda model, train: METHODS["fedavg"](model, train))
        assert found({"method.name": "mine"})[1] == 1


def test_another_program_is_compiled_for_all_that_is_neither_input_nor_shape(monkeypatch):
    """A program is known by the fields of its config; the shapes of its arrays stay as they are here."""
    compiled, none = [], SimpleNamespace(lower=lambda: SimpleNamespace(compile=lambda options: None))
    parts = dict.fromkeys(("init", "rounds", "score"), (none, ()))
    monkeypatch.setattr(programs, "traced", lambda program: compiled.append(program) or parts)
    monkeypatch.setattr(programs, "_store", OrderedDict())
    monkeypatch.setattr(programs, "_KEPT", 100)
    given = config("fedprox", data={"validation_share": 0.2}, training={"augment": "crop_flip"}, run={"seed": 1})
    program = lay_out([given], load("digits"))

    def is_new(changes):
        compiled.clear()
        replace(program, configs=[given.replace(changes)]).compile()
        return bool(compiled)

    assert is_new({})
    shapes = {"data.seed": 4, "data.partition.kind": "iid", "data.test_share": 0.3, "training.rounds": 9}
    inputs = {"training.lr": 0.3, "training.lr_decay": 0.9, "method.mu": 0.5, "run.seed": 2}
    written = {"run.out": "here", "run.eval_every": 1, "run.checkpoint_every": 3, "run.keep": "best"}
    written |= {"run.export": ["predictions"], "run.client_history": True, "run.tensorboard": True}
    of_program = {
        "data.mean": 0.3,
        "data.std": 0.3,
        "data.evaluate_on": "validation",
        "data.validation_share": 0.0,
        "data.new_clients": 0.4,
        "model.init": "flax",
        "method.mu": 0.0,
        "training.epochs": 2,
        "training.batch_size": 8,
        "training.momentum": 0.9,
        "training.clip_norm": 1.0,
        "training.drop_last": True,
        "training.augment": "crop_flip_reflect",
        "training.augment_every": "round",
        "training.copies": "concat",
        "training.decorrelate": 0.1,
        "finetune.epochs": 1,
        "calibration.samples_per_class": 2,
        "participation.ratio": 0.5,
        "participation.dropout": 0.1,
        "participation.sampling": "poisson",
        "participation.collaborate": False,
        "aggregation.rule": "median",
        "attack.kind": "label_flip",
        "compression.kind": "int8",
        "run.precision": "bfloat16",
        "run.diagnostics": True,
    }
    assert [field for field, value in {**shapes, **inputs, **written}.items() if is_new({field: value})] == []
    assert [field for field, value in of_program.items() if not is_new({field: value})] == []


def test_a_coefficient_of_zero_is_left_out_of_the_program():
    off, on = (config("fedprox").replace({"method.mu": mu}) for mu in (0.0, 0.1))
    for given, fields in [(off, set()), (on, {"method.mu"})]:
        (row,) = lay_out([given], load("digits")).rows
        assert row.inputs.keys() == {"training.lr", "training.lr_decay"} | fields
    assert alike(off) != alike(on) == alike(on.replace("method.mu", 0.2))


def test_each_run_keeps_its_compiled_programs_where_its_config_says(tmp_path, monkeypatch):
    class CompiledError(Exception):
        pass

    numbers = itertools.count(1.5)

    def compile_something(*_):
        number = next(numbers)
        jax.jit(lambda x: x + number).lower(np.float32(0)).compile()
        raise CompiledError

    def kept():
        return [len(list((tmp_path / name).glob("jit__lambda*-cache"))) for name in ("a", "b", "of the user")]

    monkeypatch.setattr("fedjax_pfl.experiment.programs._compile", compile_something)
    before = {name: jax.config.values[name] for name in CACHE_SETTINGS}
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of the user"))
        for cache, expected in [
            (str(tmp_path / "a"), [1, 0, 0]),
            (str(tmp_path / "b"), [1, 1, 0]),
            ("off", [1, 1, 0]),
            (None, [1, 1, 1]),
            ("off", [1, 1, 1]),
            (str(tmp_path / "a"), [2, 1, 1]),
            (str(tmp_path / ("a" * 300) / "b"), [2, 1, 1]),  # as of a run on another machine: nothing can be kept there
        ]:
            with pytest.raises(CompiledError):
                simulate(config(run={"compilation_cache": cache}))
            assert kept() == expected
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("setting", "value"), [("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", False)]
)
def test_other_random_numbers_of_jax_are_refused(setting, value):
    before, wanted = jax.config.values[setting], config()
    jax.config.update(setting, value)
    try:
        with pytest.raises(ConfigError, match="the same seed is to give the same numbers") as caught:
            simulate(wanted)
    finally:
        jax.config.update(setting, before)
    assert caught.value.field == setting


def test_evaluating_more_often_changes_no_number(reference):
    often = simulate(config(run={"eval_every": 1}))
    assert often.history["round"].tolist() == [1, 2, 3, 4]
    assert often.history["pre.accuracy"][[1, 3]].tolist() == reference[0].history["pre.accuracy"].tolist()
    assert often.history["post.loss"][[1, 3]].tolist() == reference[0].history["post.loss"].tolist()


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """A run with validation samples, in which some clients take part, each round scored; and its directory."""
    out = tmp_path_factory.mktemp("runs") / "tested"
    return simulate(
        config(data={"validation_share": 0.2}, participation=SOME, run={"out": str(out), "eval_every": 1})
    ), out


@pytest.fixture(scope="module")
def validated():
    """The same run, scored on the validation samples."""
    data = {"validation_share": 0.2, "evaluate_on": "validation"}
    return simulate(config(data=data, participation=SOME, run={"eval_every": 1}))


def test_dropout_and_partial_participation_run_end_to_end(tested):
    result, _ = tested
    traffic = result.summary["traffic"]
    clients = traffic["megabytes_total"] * 1e6 / 4 / traffic["floats_up_per_client_round"]
    assert 8 <= clients < 4 * 2 * 5
    assert np.isfinite(result.history["train_loss"]).all()


@pytest.mark.usefixtures("tables_as_before")
@pytest.mark.parametrize(
    "participation", [SOME, {"ratio": 0.4, "sampling": "poisson"}, {}], ids=["some", "poisson", "everybody"]
)
def test_the_table_says_how_often_each_client_took_part(participation):
    # The witness's clients count for themselves; one of them is new, and never trains.
    result = simulate(config(data={"new_clients": 0.2}, participation=participation), method=witness)
    visits = result.state.clients.visits
    assert visits[-1] == 0 < visits.sum()
    np.testing.assert_array_equal(result.clients["rounds_participated"], visits)


def test_hyperparameters_can_be_chosen_on_validation_samples(tested, validated):
    tested, _ = tested
    # Only what is scored differs: these samples take the place of the test samples, and are not scored twice.
    assert not [metric for metric in validated.history if metric.startswith("validation")]
    assert tested.partition == validated.partition
    assert tested.history["train_loss"].tolist() == validated.history["train_loss"].tolist()
    jax.tree.map(np.testing.assert_array_equal, tested.state, validated.state)
    n_validation = validated.partition["n_validation"]
    assert validated.clients["n_test"].tolist() == n_validation != tested.clients["n_test"].tolist()
    federation, _ = divide(validated.config, load("digits"))
    rows = [held(federation.validation, i) for i in range(6)]
    mlp = MLP(federation.x.rows, federation.y, mean=0.5, std=0.5)
    correct = [mlp.scores(to_numpy(validated.state.server), own)[0] for own in rows]
    np.testing.assert_allclose(validated.clients["pre_accuracy"], np.array(correct) / n_validation, rtol=1e-6)
    assert validated.summary["global"] == pytest.approx(sum(correct) / sum(n_validation), rel=1e-6)


def test_validation_samples_are_scored_beside_the_test_samples(tested, validated):
    result, out = tested
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert flat(line).keys() == result.history.keys() == result.summary["metrics"].keys()
    for metric in ("accuracy", "weighted", "loss"):
        for point in ("pre", "post"):
            found = result.history[f"validation_{point}.{metric}"]
            np.testing.assert_allclose(found, validated.history[f"{point}.{metric}"], rtol=1e-6)
    assert {name for name in result.history if name.endswith(".hm")} == {"pre.hm", "post.hm"}
    best = int(np.argmax(result.history["validation_pre.accuracy"]))
    judged = result.summary["personal"]["pre"]
    assert judged["by_validation"] == result.history["pre.accuracy"][best]
    assert judged["by_validation_round"] == best + 1
    assert load_config(out / "config.toml") == result.config


def test_a_diverged_run_scores_no_points_for_class_zero(reference):
    result = simulate(config(training={"lr": 1e30, "rounds": 2}, run={"eval_every": 1}))
    assert result.summary["diverged_round"] == 1
    assert result.summary["personal"]["pre"]["last"] == 0.0
    assert result.summary["global"] == 0.0
    assert np.isnan(result.history["pre.loss"]).all()


def test_copies_of_the_config_take_the_place_of_the_methods_own():
    """What the engine makes of a method's copies is in tests/methods/fedecouple."""
    shape = shape_of(load("digits"))
    for copies, given in [("concat", {}), ("none", {"copies": "none"}), ("replace", {"copies": "replace"})]:
        assert make_engine(config("fedecouple", training=given), shape).method.copies == copies


def test_any_method_can_be_fine_tuned_and_decorrelated_by_configuration():
    dataset = load("digits")

    def method(name, options=None, **tables):
        changes = {f"method.{key}": value for key, value in (options or {}).items()}
        return make_engine(config(name, **tables).replace(changes), shape_of(dataset)).method

    federation, _ = divide(config(), dataset)
    row = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[2]), federation.train)
    one = client_data(federation.x, federation.y, row)
    at = now(jax.random.key(3), 0)
    # FedAvg, tuned by configuration, is the method FedAvg-FT.
    tuned, known = (
        method("fedavg", finetune={"epochs": 2, "lr": 0.05}),
        method("fedavg_ft", {"finetune_epochs": 2, "finetune_lr": 0.05}),
    )
    view, _ = jax.jit(tuned.init, static_argnums=1)(jax.random.key(0), 6)
    found, expected = (
        jax.jit(lambda view, m=m: m.personal(*m.personalize(at, view, (), one)))(view) for m in (tuned, known)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    plainly_tuned = expected
    # Calibrated by configuration, it is CCVR.
    options = {"samples_per_class": 5, "server_lr": 0.3, "server_epochs": 2}
    calibrated, known = (
        method("fedavg", calibration={"samples_per_class": 5, "lr": 0.3, "epochs": 2}),
        method("ccvr", options),
    )
    uploads = jax.tree.map(lambda leaf: leaf[None], jax.jit(known.calibrate.local)(at, view, (), one))
    cohort = Cohort(jnp.array([0]), jnp.array([1.0]), 1, 1)
    found, expected = (jax.jit(m.calibrate.server)(at, view, uploads, cohort) for m in (calibrated, known))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    # With the term in the loss of plain training it is FedDecorr; FedPer's loss has it, too. Fine-tuning has not.
    tuning = {"epochs": 2, "lr": 0.05}
    ours, theirs = (
        method("fedavg", finetune=tuning, training={"decorrelate": 0.3}),
        method("feddecorr", {"beta": 0.3}, finetune=tuning),
    )
    found, expected = (jax.jit(m.local)(at, view, (), one).upload for m in (ours, theirs))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for m in (ours, theirs):
        tuned = jax.jit(lambda view, m=m: m.personal(*m.personalize(at, view, (), one)))(view)
        jax.tree.map(np.testing.assert_array_equal, tuned, plainly_tuned)
    fedper = method("fedper", training={"decorrelate": 0.3})
    extractor = jax.jit(fedper.local)(at, view["extractor"], view["head"], one).upload
    for a, b in zip(jax.tree.leaves(extractor), jax.tree.leaves(found["extractor"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_arrays_can_be_passed_directly_and_give_what_the_source_gives(reference):
    digits = load("digits")
    result = simulate(config(data={"source": "arrays"}), data=(digits.images, digits.labels))
    assert numbers(result.summary) == numbers(reference[0].summary)


def test_official_split_trains_on_one_part_and_tests_on_the_other():
    digits = load("digits")
    wanted = config(data={"source": "arrays", "split": "official", "validation_share": 0.2, "samples_per_client": 100})
    federation, shares = divide(wanted, load("digits")._replace(train_rows=1000))
    assert shares["n_train"] == [80] * 6
    assert shares["n_validation"] == [20] * 6
    assert shares["n_test"] == [33] * 6
    held = np.asarray(federation.train.index)
    assert held.max() < 1000
    assert np.asarray(federation.test.index).min() >= 1000
    assert int(federation.pooled.count.sum()) == len(digits.labels) - 1000
    counts = np.asarray(federation.train.class_counts)
    np.testing.assert_array_equal(counts.sum(axis=1), 80)


def test_a_share_of_a_source_without_a_test_part_becomes_its_test_part():
    digits = load("digits")
    fields = {"split": "official", "test_part_share": 0.2, "validation_share": 0.1}
    federation, shares = divide(config(data=fields), digits)
    pooled = np.concatenate([held(federation.pooled, i) for i in range(len(federation.pooled.count))])
    per_class = np.bincount(digits.labels)
    np.testing.assert_array_equal(np.bincount(digits.labels[pooled]), np.rint(0.2 * per_class))
    trained = np.concatenate([held(part, i) for part in (federation.train, federation.validation) for i in range(6)])
    # The partition shares out each of the other rows once, and every client is tested on rows of the test part alone.
    np.testing.assert_array_equal(np.sort(np.concatenate([trained, pooled])), np.arange(len(digits.labels)))
    for i in range(6):
        assert set(held(federation.test, i)) <= set(pooled)
    np.testing.assert_array_equal(federation.x[np.arange(len(digits.labels))], digits.images)
    np.testing.assert_array_equal(np.asarray(federation.train.class_counts).sum(axis=1), shares["n_train"])
    again, larger, reseeded = (
        divide(config(data={**fields, **more}), digits)[1] for more in ({}, {"test_part_share": 0.3}, {"seed": 1})
    )
    assert again == shares
    assert len({record["hash"] for record in (shares, larger, reseeded)}) == 3


def test_the_sources_own_test_part_is_divided_as_ever():
    digits = load("digits")._replace(train_rows=1000)
    partition = PARTITIONS["iid"](digits.labels[:1000], 6, 0, None)
    splits = draw_test(digits.labels, partition.parts, np.arange(1000, 1797), 0, test_share=0.25)
    wanted = config(data={"source": "arrays", "split": "official", "partition": {"kind": "iid"}})
    expected = manifest(digits.labels, 10, partition, splits)
    assert divide(wanted, digits)[1] == expected | {"data": fingerprint(digits)}
    with pytest.raises(ConfigError, match=r"data\.test_part_share = 0\.2 .* test part of its own") as caught:
        divide(config(data={"source": "arrays", "split": "official", "test_part_share": 0.2}), digits)
    assert caught.value.field == "data.test_part_share"


@pytest.mark.parametrize(("wanted", "share"), [(5, 0.3), (600, 0.25), (7, 0.1), (100, 1 / 3), (20, 1e-12)])
def test_samples_per_client_counts_training_samples(wanted, share):
    data = {"samples_per_client": wanted, "test_share": share, "clients": 2, "partition": {"kind": "iid"}}
    _, shares = divide(config(data=data), load("digits"))
    assert shares["n_train"] == [wanted] * 2


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ({"data": {"source": "digit"}}, "data.source"),
        ({"data": {"source": "npz:/no/such/file.npz"}}, "data.source"),
        ({"data": {"clients": 2000}}, "data.clients"),
        ({"data": {"split": "official"}}, "data.split"),
        ({"data": {"split": "official", "test_part_share": 0.2, "samples_per_client": 260}}, "data.samples_per_client"),
        ({"data": {"samples_per_client": 5000, "partition": {"kind": "iid"}}}, "data.samples_per_client"),
        (
            {"data": {"partition": {"kind": "pathological", "classes_per_client": 11}}},
            "data.partition.classes_per_client",
        ),
        (
            {"data": {"evaluate_on": "validation", "validation_share": 0.01, "samples_per_client": 9}},
            "data.validation_share",
        ),
        ({"data": {"mean": [0.5, 0.5, 0.5]}}, "data.mean"),
        ({"model": {"name": "cnn2", "hidden": 1}}, "model.hidden"),
    ],
)
def test_what_does_not_fit_the_data_is_an_error_before_compilation(tables, field, monkeypatch):
    monkeypatch.setattr("fedjax_pfl.experiment.programs._compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ConfigError) as caught:
        simulate(config(**tables))
    assert caught.value.field == field


@pytest.mark.usefixtures("tables_as_before")
def test_the_parts_of_a_refused_call_are_not_registered():
    def sure(logits, labels):
        return jnp.max(logits, axis=-1)

    def scalar(logits, labels):
        return jnp.mean(logits)

    def net(*, init: str = "torch"):
        return mlp(hidden=8, init=init)

    def net_of_before(*, init: str = "torch"):
        return mlp(hidden=4, init=init)

    register_metric("sure")(sure)
    register_method("witness")(METHODS["fedavg"])
    register_model("net")(net_of_before)
    tables = METHODS, MODELS, METRICS
    before = [dict(table) for table in tables]
    refused = [({"sure": scalar, "oops": scalar}, r"run\.metrics = 'sure'"), ({"oops": sure, "loss": sure}, "= 'loss'")]
    for given, message in refused:
        with pytest.raises(ConfigError, match=message):
            simulate(config(), method=witness, model=net, metrics=given)
        assert [dict(table) for table in tables] == before


def test_a_model_that_does_not_fit_the_images_says_so():
    fields = {"data": {"source": "digits"}, "method": {"name": "fedavg"}, "model": {"name": "cnn2"}}
    with pytest.raises(ConfigError, match="8x8x1 images") as caught:
        simulate(Config(**fields))
    assert caught.value.field == "model.name"


def test_a_run_that_does_not_fit_into_memory_says_so(monkeypatch):
    monkeypatch.setattr("fedjax_pfl.engine.hardware.available", lambda: 10_000)
    with pytest.raises(ConfigError, match="GB") as caught:
        simulate(config())
    assert caught.value.field == "data.clients"
    memory = lay_out([config()], load("digits"), Hardware("cpu", tuple(jax.devices()[:1]), 10**10)).memory
    each = -(-memory.needed(chunk=1) // 2)
    monkeypatch.setattr("fedjax_pfl.engine.hardware.available", lambda: each)  # of each of two devices
    with pytest.raises(ConfigError, match=r"at most 1: .* GB") as caught:
        simulate(config(run={"placement": "vmap", "chunk": 100}))
    assert caught.value.field == "run.chunk"


@pytest.mark.parametrize(
    ("clients", "fitting", "chunk"),
    [(500, 900, 500), (500, 437, 250), (500, 100, 100), (7, 3, 3), (5, 0, 1), (5, -2, 1)],
)
def test_chunks_are_as_few_as_fit_and_of_one_size(clients, fitting, chunk):
    assert even_chunk(clients, fitting) == chunk


def test_a_chunk_is_not_padded_beyond_the_clients_of_a_round():
    given = config(participation={"ratio": 0.5}, run={"placement": "vmap", "chunk": 100})
    assert lay_out([given], load("digits")).engine.placement.chunk == math.ceil(given.data.clients / 2)


def test_a_full_directory_is_kept_unless_overwritten(reference, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        simulate(config(run={"out": str(tmp_path)}))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    simulate(config(run={"out": str(tmp_path)}), overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "summary.json").exists()
    with pytest.raises(ConfigError, match="is a file"):
        simulate(config(run={"out": str(tmp_path / "notes.txt")}))


def test_memory_estimate_counts_what_can_be_counted_by_hand():
    engine, data = _tiny()
    memory, shapes = survey(engine, data)
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    assert (count(shapes.up), count(shapes.down), count(shapes.client)) == (0, 0, parameters)
    # All six clients' models; and the cohort's old and new rows.
    assert memory.resident == size(data) + 6 * 4 * parameters
    assert (memory.participants, memory.exchanged) == (6, 2 * 6 * 4 * parameters)
    # The gradient and the batch must be there at once, next to the parameters.
    batch = 16 * 64 * 4
    assert 4 * parameters + batch < memory.per_client < 10 * (4 * parameters + batch)


def test_peak_bytes_of_a_chain_is_two_links_and_of_a_fan_all_of_them():
    """One link where they go from element to element; and a loop's step puts its result where it was given x."""

    def chain(x, link=lambda x: jax.lax.rev(x, (0,))):
        for _ in range(5):
            x = link(x)
        return x

    def in_place(x):
        return chain(x, lambda x: x + 1.0)

    def loop(x):
        return jax.lax.fori_loop(0, 9, lambda _, x: x - 0.1 * x, x)

    def fan(x):
        parts = [x + float(i) for i in range(5)]
        return sum(parts[1:], start=parts[0])

    x = np.zeros(100, np.float32)
    assert peak_bytes(jax.make_jaxpr(chain)(x).jaxpr) == 800
    assert peak_bytes(jax.make_jaxpr(in_place)(x).jaxpr) == 400
    assert peak_bytes(jax.make_jaxpr(fan)(x).jaxpr) == 2000
    # What is carried, a tenth of it, and the loop's numbers.
    assert 800 <= peak_bytes(jax.make_jaxpr(loop)(x).jaxpr) < 850


def _tiny():
    wanted = config("local")
    dataset = load("digits")
    data, _ = divide(wanted, dataset)
    return make_engine(wanted, shape_of(dataset)), data


needs_data = pytest.mark.skipif(
    not (Path(os.environ.get("FEDJAX_PFL_DATA", "")) / "cifar10_20k.npz").is_file(),
    reason="FEDJAX_PFL_DATA names no folder with cifar10_20k.npz",
)


@needs_data
def test_fedavg_learns_on_real_cifar10():
    data = {"source": "npz:cifar10_20k.npz", "clients": 4, "samples_per_client": 300, "partition": {"kind": "iid"}}
    training = {"rounds": 6, "epochs": 2, "batch_size": 10, "lr": 0.05, "momentum": 0.5}
    result = simulate(
        Config(data=data, model={"name": "cnn3"}, method={"name": "fedavg"}, training=training, run={"eval_every": 6})
    )
    assert result.summary["global"] > 0.25


@pytest.mark.parametrize("precision", ["auto", "float32", "tensorfloat32", "bfloat16"])
def test_programs_are_compiled_with_the_precision_that_the_config_has(monkeypatch, precision):
    class SeenError(Exception):
        pass

    def compile_nothing(*args):
        raise SeenError(jax.config.jax_default_matmul_precision)

    monkeypatch.setattr("fedjax_pfl.experiment.programs._compile", compile_nothing)
    with pytest.raises(SeenError, match=f"^{'float32' if precision == 'auto' else precision}$"):
        simulate(config(run={} if precision == "auto" else {"precision": precision}))


def test_runs_that_do_not_fit_side_by_side_say_how_much_they_need():
    hardware = Hardware("gpu", tuple(jax.devices()[:1]), 1000)
    with pytest.raises(ConfigError, match=r"^batch = 2 is not usable: fewer at once: they need about 0.00 GB"):
        lay_out([config(run={"seed": seed}) for seed in (0, 1)], load("digits"), hardware)


@pytest.mark.parametrize(("backend", "precision"), [("cpu", "float32"), ("gpu", "tensorfloat32"), ("tpu", "bfloat16")])
def test_each_backend_has_a_precision_of_its_own(backend, precision):
    hardware = Hardware(backend, tuple(jax.devices()[:1]), 10**10)
    program = lay_out([config()], load("digits"), hardware)
    assert program.precision == precision
    assert (program.engine.placement.chunk > 1) == (backend != "cpu")
