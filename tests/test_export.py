"""``run.export``: what is kept of personal models beside their scores."""

import numpy as np
import pytest

from fedjax_pfl import Config, ConfigError, Result, compare
from fedjax_pfl.data.federated import Clients
from fedjax_pfl.data.sources import load
from fedjax_pfl.engine.scoring import Outputs
from fedjax_pfl.experiment.export import export_of

HIDDEN, CLIENTS = 8, 5
WHO, SEEDS = [1, 3], (4, 5)


def config(method, **run):
    return Config(
        data={"source": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "beta": 0.3}},
        model={"name": "mlp", "hidden": HIDDEN},
        method={"name": method},
        training={"rounds": 2, "lr": 0.05},
        participation={"ratio": 0.2},
        run={"export": ["features", "predictions"], **run},
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("export") / "table"


@pytest.fixture(scope="module")
def results(out):
    """Two seeds, side by side in one program, of two of the clients each, whose models are fine-tuned.

    A round is for one client, so that these two are exported one after the other.

    An export of all clients, and of a run on its own, is in tests/test_result.py and tests/test_registry.py.
    """
    compare(config("fedavg_ft", export_clients=WHO), ["fedavg_ft"], seeds=SEEDS, out=out)
    return [Result.load(out / f"fedavg_ft-seed{seed}") for seed in SEEDS]


def test_predictions_are_those_that_were_scored(results, out):
    for result, seed in zip(results, SEEDS, strict=True):
        exported, clients = result.exported, result.clients
        assert list(exported) == ["client", "sample", "label", "prediction", "logits", "features"]
        counts = np.where(np.isin(range(CLIENTS), WHO), clients["n_test"], 0)
        np.testing.assert_array_equal(np.bincount(exported["client"], minlength=CLIENTS), counts)
        np.testing.assert_array_equal(exported["label"], load("digits").labels[exported["sample"]])
        assert len(np.unique(exported["sample"])) == len(exported["sample"])
        right = exported["prediction"] == exported["label"]
        for i in WHO:
            assert right[exported["client"] == i].mean() == pytest.approx(clients["pre_accuracy"][i], abs=1e-6)
        np.testing.assert_array_equal(exported["prediction"], exported["logits"].argmax(axis=1))
        with np.load(out / f"fedavg_ft-seed{seed}" / "export.npz") as held:
            assert list(held) == list(exported)
            for name, column in exported.items():
                np.testing.assert_array_equal(held[name], column)


def test_features_are_what_the_last_layer_of_a_kept_model_reads(results):
    """By hand, of the state that the run has kept: each seed its own."""
    digits = load("digits")
    for result in results:
        exported = result.exported
        assert exported["features"].shape == (len(exported["client"]), HIDDEN)
        for client in WHO:
            rows, params = exported["client"] == client, result.params(client=client)
            z, hidden, head = exported["features"][rows], params["extractor"]["hidden_layer"], params["head"]
            logits = z @ head["kernel"] + head["bias"]
            np.testing.assert_allclose(logits, exported["logits"][rows], rtol=1e-4, atol=1e-4)
            x = digits.images[exported["sample"][rows]].reshape(rows.sum(), -1) / 255
            x = (x - result.config.data.mean) / result.config.data.std
            np.testing.assert_allclose(z, np.maximum(x @ hidden["kernel"] + hidden["bias"], 0), rtol=1e-4, atol=1e-4)


def test_rows_are_samples_and_a_model_that_has_diverged_has_no_answer_to_them():
    """Behind a client's samples are padding and its arbitrary outputs."""
    index, labels = np.array([[4, 2, 0], [1, 0, 0], [3, 0, 5]], np.int32), np.array([2, 1, 0, 1, 2, 0], np.int32)
    scored = Clients(index, np.array([2, 1, 3], np.int32), np.zeros((3, 3), np.float32))
    logits = np.float32([[[0, 1, 2], [5, np.nan, 0], [9, 9, 9]], [[0, 3, 1], [np.inf, 0, 0], 3 * [-np.inf]]])
    found = export_of(Outputs(logits, None), scored, labels, [0, 2], ["predictions"])
    rows = [(0, 4, 2, 2), (0, 2, 0, -1), (2, 3, 1, 1), (2, 0, 2, -1), (2, 5, 0, -1)]
    columns = dict(zip(("client", "sample", "label", "prediction"), zip(*rows, strict=True), strict=True))
    assert {name: tuple(found[name].tolist()) for name in columns} == columns
    np.testing.assert_array_equal(found["logits"], [*logits[0, :2], *logits[1]])
    assert "features" not in found


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"export_clients": [0, CLIENTS]}, "clients from 0 to 4"),
        ({"export_clients": [2, 1]}, "in ascending order"),
        ({"export_clients": [1, 1]}, "each once"),
        ({"export_clients": [0], "export": []}, "run.export says"),
        ({"export": ["gradients"]}, "run.export"),
    ],
)
def test_what_cannot_be_exported_is_one_error(run, message):
    with pytest.raises(ConfigError, match=message):
        config("fedavg", **run)
