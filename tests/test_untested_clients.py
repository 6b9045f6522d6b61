"""Clients without test samples: they train, and no score counts them. Everything against scores by hand in NumPy."""

import csv
import json

import numpy as np
import pytest
from sklearn.metrics import f1_score

from fedjax_pfl import Config, ConfigError, Result, Sweep, plot_clients, simulate
from fedjax_pfl.cli.printing import print_summary
from fedjax_pfl.data.intake import as_dataset
from fedjax_pfl.experiment.build import attackers, divide
from fedjax_pfl.experiment.html import partition_html
from fedjax_pfl.experiment.report import report_html
from fedjax_pfl.experiment.statistics import bootstrap_over_clients
from tests.test_report import Page

CLASSES, N, NEW = 3, 10, 3
TRAIN = (1, 2, 9, 14, 6, 11, 1, 8, 5, 7)
TEST = (0, 5, 3, 0, 1, 7, 2, 0, 4, 6)
NOTE = "3 clients of 10 without test samples: scores on test samples leave them out"


def hospital(train, test):
    y = RNG.choice(CLASSES, train + test, p=RNG.dirichlet(np.ones(CLASSES)))
    x = (np.eye(CLASSES)[y] + RNG.normal(0, 0.8, (len(y), CLASSES))).astype(np.float32)
    return x[:train], y[:train], (x[train:] if test else []), (y[train:] if test else [])


RNG = np.random.default_rng(5)
HOSPITALS = [hospital(*sizes) for sizes in zip(TRAIN, TEST, strict=True)]


def config(method, out=None, **fields):
    data = {"source": "arrays", "clients": N, "partition": {"kind": "natural"}, "split": "official", "seed": 2}
    made = Config(
        data={**data, "new_clients": NEW / N},
        model={"name": "mlp", "hidden": 4},
        method={"name": method},
        training={"rounds": 2, "lr": 0.2, "batch_size": 4},
        run={"keep": "final", "client_history": True, "out": None if out is None else str(out)},
    )
    return made.replace(fields)


def test_a_result_says_what_is_to_be_known_of_its_data(run, capsys):
    _, result = run
    assert f"\n  note: {NOTE}" in repr(result)
    print_summary(result.summary)
    assert f"note: {NOTE}\n" in capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module", params=["fedavg_ft", "local"])
def run(request, folder):
    """FedAvg-FT personalises on training samples and has a global model; Local's PRE is its POST."""
    result = simulate(config(request.param, folder / request.param), HOSPITALS, metrics={"sure": sure})
    return request.param, result


def sure(logits, labels):
    return logits.max(axis=-1) - logits.min(axis=-1)


def test_the_manifest_says_who_is_not_tested(run):
    _, result = run
    users = result.partition["users"]
    assert result.partition["n_train"] == [TRAIN[user] for user in users]
    assert result.partition["n_test"] == [TEST[user] for user in users]
    assert NOTE in result.partition["notes"]
    assert "without test samples" in partition_html(result.partition)
    # Among those that train and among those that do not there are both.
    assert {0} < set(result.partition["n_test"][:-NEW])
    assert {0} < set(result.partition["n_test"][-NEW:])


def by_hand(answers, truth):
    """What `summarize` gives, from the answers and the labels of those clients that have test samples."""
    accuracy = np.array([np.mean(a == y) for a, y in zip(answers, truth, strict=True)])
    f1, union = (
        np.array(
            [
                f1_score(y, a, labels=labels(y), average="macro", zero_division=0)
                for a, y in zip(answers, truth, strict=True)
            ]
        )
        for labels in (np.unique, lambda y: None)
    )
    total = accuracy + f1
    both = np.divide(2 * accuracy * f1, total, out=np.zeros(len(f1)), where=total > 0)
    return {
        "accuracy": accuracy.mean(),
        "weighted": np.mean(np.concatenate(answers) == np.concatenate(truth)),
        "std_clients": accuracy.std(),
        "worst_10_percent": accuracy.min(),
        "macro_f1": f1.mean(),
        "macro_f1_union": union.mean(),
        "i_local": both.mean(),
    }


def parts_of(result, clients):
    """Client -> its test samples and labels, of these clients those that have any."""
    users = result.partition["users"]
    return {client: HOSPITALS[users[client]][2:] for client in clients if TEST[users[client]]}


@pytest.mark.parametrize("who", ["", "new_"])
def test_pre_scores_are_those_of_the_tested_clients(run, who):
    _, result = run
    clients = range(N - NEW, N) if who else range(N - NEW)
    held = parts_of(result, clients)
    assert 0 < len(held) < len(clients)
    answers = [result.predict(x, client) for client, (x, _) in held.items()]
    logs = [np.log(result.predict_proba(x, client)) for client, (x, _) in held.items()]
    losses = [-log[np.arange(len(y)), y].mean() for log, (_, y) in zip(logs, held.values(), strict=True)]
    expected = by_hand(answers, [y for _, y in held.values()]) | {
        "loss": np.mean(losses),
        "sure": np.mean([np.mean(log.max(1) - log.min(1)) for log in logs]),
    }
    for name, value in expected.items():
        assert result.history[f"{who}pre.{name}"][-1] == pytest.approx(value, rel=1e-4), name


def test_post_scores_are_those_of_the_tested_clients(run):
    name, result = run
    if name == "local":  # after a round in which all took part
        for metric in ("accuracy", "weighted", "std_clients", "worst_10_percent", "macro_f1", "i_local", "loss"):
            np.testing.assert_array_equal(result.history[f"post.{metric}"], result.history[f"pre.{metric}"])
        return
    held = parts_of(result, range(N - NEW, N))
    users = result.partition["users"]
    models = {client: result.adapt(*HOSPITALS[users[client]][:2], epochs=1, client=client) for client in held}
    expected = by_hand([models[client].predict(x) for client, (x, _) in held.items()], [y for _, y in held.values()])
    for metric, value in expected.items():
        assert result.history[f"new_post.{metric}"][-1] == pytest.approx(value, rel=1e-5), metric


def test_the_global_model_is_scored_on_the_test_samples_that_there_are(run):
    name, result = run
    if name == "local":
        assert result.summary["global"] is None
        return
    held = parts_of(result, range(N))
    x, y = (np.concatenate(parts) for parts in zip(*held.values(), strict=True))
    assert len(y) == sum(TEST)
    assert result.summary["global"] == pytest.approx(np.mean(result.predict(x) == y))
    expected = f1_score(y, result.predict(x), labels=np.unique(y), average="macro", zero_division=0)
    assert result.summary["global_macro_f1"] == pytest.approx(expected)


def test_majority_class_and_labels_count_the_tested_clients(run):
    _, result = run
    held, users = parts_of(result, range(N - NEW)), result.partition["users"]
    guesses = {client: np.bincount(HOSPITALS[users[client]][1], minlength=CLASSES).argmax() for client in held}
    hits = {client: y == guesses[client] for client, (_, y) in held.items()}
    majority = result.summary["majority_class"]
    assert majority["accuracy"] == pytest.approx(np.mean([np.mean(hit) for hit in hits.values()]))
    assert majority["weighted"] == pytest.approx(np.mean(np.concatenate(list(hits.values()))))
    right = np.concatenate([result.predict(x, client) == y for client, (x, y) in held.items()])
    truth = np.concatenate([y for _, y in held.values()])
    assert result.summary["label_accuracy"]["pre"] == pytest.approx([right[truth == k].mean() for k in range(CLASSES)])


def test_tables_and_files_have_nothing_where_nothing_is_scored(run, folder):
    name, result = run
    untested = np.array(result.partition["n_test"]) == 0
    for table, rows in ((result.clients, untested), (result.client_history, None)):
        rows = untested[table["client"]] if rows is None else rows
        for column in ("pre_accuracy", "post_accuracy", "pre_macro_f1", "post_macro_f1", "pre_sure", "post_sure"):
            np.testing.assert_array_equal(np.isnan(table[column]), rows)
    for file in ("clients.csv", "client_history.csv"):
        for row in csv.DictReader((folder / name / file).read_text().splitlines()):
            assert (row["pre_accuracy"] == "nan") == untested[int(row["client"])]
    scored = {row["client"] for row in csv.DictReader((folder / name / "labels.csv").read_text().splitlines())}
    assert scored == set(map(str, np.flatnonzero(~untested)))
    assert json.loads((folder / name / "partition.json").read_text())["notes"] == result.partition["notes"]
    assert result.summary["notes"] == result.partition["notes"]
    again = Result.load(folder / name, HOSPITALS)
    np.testing.assert_array_equal(again.clients["pre_accuracy"], result.clients["pre_accuracy"])


def test_plots_the_report_and_the_bootstrap_leave_them_out(run, folder):
    name, result = run
    held = parts_of(result, range(N - NEW))
    dots = plot_clients(result, kind="strip").collections[0].get_offsets()[:, 0]
    accuracies = [100 * np.mean(result.predict(x, client) == y) for client, (x, y) in held.items()]
    np.testing.assert_allclose(sorted(dots), sorted(accuracies), rtol=1e-6)
    page = Page(report_html([folder / name]))
    for strip in page.numbers["strips"]:
        assert {client for _, _, client, *_ in strip["dots"]} == set(parts_of(result, range(N)))
        point = strip["point"].lower()
        assert strip["mean"] == pytest.approx(result.history[f"{point}.accuracy"][-1])
    if name == "local":  # now there are both
        (row,) = Sweep.load(folder).differences("pre").to_dict("records")
        first, second = (Result.load(folder / one, HOSPITALS).clients["pre_accuracy"] for one in ("fedavg_ft", "local"))
        gaps = (first - second)[list(held)]
        assert np.isfinite(gaps).all()
        gaps = gaps if row["method.name"] == "fedavg_ft" else -gaps
        assert (row["clients_low"], row["clients_high"]) == pytest.approx(bootstrap_over_clients([gaps]))


def test_on_validation_samples_those_are_scored_that_have_some():
    fields = {"data.validation_share": 0.2, "data.evaluate_on": "validation", "data.new_clients": 0.0}
    result = simulate(config("local", **fields), HOSPITALS)
    validated = [int(0.2 * n) for n in TRAIN]
    assert result.partition["n_validation"] == validated
    np.testing.assert_array_equal(np.isnan(result.clients["pre_accuracy"]), np.array(validated) == 0)
    known = result.clients["pre_accuracy"][np.array(validated) > 0]
    assert result.history["pre.accuracy"][-1] == pytest.approx(known.mean())
    assert TEST[3] == 0 < validated[3]


def test_if_only_new_clients_have_test_samples_the_others_have_no_scores():
    """Which clients are new follows from the seed; their test samples are all that there is."""
    users = divide(config("fedavg_ft"), as_dataset(HOSPITALS))[1]["users"]
    only = [(x, y, *(part if user in users[-NEW:] else ([], []))) for user, (x, y, *part) in enumerate(HOSPITALS)]
    result = simulate(config("fedavg_ft"), only)
    assert np.isnan(result.history["pre.accuracy"]).all()
    assert (result.summary["personal"]["pre"]["last"], result.summary["majority_class"]) == (None, None)
    held = parts_of(result, range(N - NEW, N))
    expected = by_hand([result.predict(x, client) for client, (x, _) in held.items()], [y for _, y in held.values()])
    assert result.summary["new_clients"]["pre"]["last"] == pytest.approx(expected["accuracy"])


def test_somebody_else_than_malicious_clients_must_have_test_samples(monkeypatch):
    wanted = config("fedavg", **{"data.new_clients": 0.0, "attack.kind": "sign_flip", "attack.share": 0.1})
    (bad,) = np.flatnonzero(attackers(wanted))
    monkeypatch.setattr("fedjax_pfl.experiment.programs._compile", lambda *_: pytest.fail("compiled"))
    x, y = HOSPITALS[1][:2]
    only = [(*hospital[:2], *((x, y) if client == bad else ([], []))) for client, hospital in enumerate(HOSPITALS)]
    with pytest.raises(ConfigError, match="only malicious clients have test samples"):
        simulate(wanted, only)
