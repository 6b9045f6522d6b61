"""``run.export``: what is kept of personal models beside their scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import Config, ConfigError, compare, simulate
from fedjax_pfl.data.sources import load
from fedjax_pfl.models import MODELS, build

HIDDEN, CLIENTS = 8, 5


def config(method, **run):
    return Config(
        data={"source": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "beta": 0.3}},
        model={"name": "mlp", "hidden": HIDDEN},
        method={"name": method},
        training={"rounds": 2, "lr": 0.05},
        run={"seed": 4, "export": ["features", "predictions"], **run},
    )


@pytest.fixture(scope="module")
def shared():
    return simulate(config("fedavg", export_clients=[1, 3]))


def test_predictions_are_those_that_were_scored(tmp_path):
    result = simulate(config("fedavg_ft", export=["predictions"], out=str(tmp_path / "run")))
    exported, clients = result.exported, result.clients
    assert list(exported) == ["client", "sample", "label", "prediction", "logits"]
    np.testing.assert_array_equal(np.bincount(exported["client"], minlength=CLIENTS), clients["n_test"])
    np.testing.assert_array_equal(exported["label"], load("digits").labels[exported["sample"]])
    assert len(np.unique(exported["sample"])) == len(exported["sample"])
    right = exported["prediction"] == exported["label"]
    for i in range(CLIENTS):
        assert right[exported["client"] == i].mean() == pytest.approx(clients["pre_accuracy"][i], abs=1e-6)
    np.testing.assert_array_equal(exported["prediction"], exported["logits"].argmax(axis=1))
    with np.load(tmp_path / "run" / "export.npz") as held:
        assert list(held) == list(exported)
        for name, column in exported.items():
            np.testing.assert_array_equal(held[name], column)


def test_features_are_what_the_last_layer_reads(shared):
    exported, params = shared.exported, shared.state.server
    assert set(exported["client"]) == {1, 3}
    z, digits = exported["features"], load("digits")
    assert z.shape == (len(exported["client"]), HIDDEN)
    head = params["head"]
    np.testing.assert_allclose(z @ head["kernel"] + head["bias"], exported["logits"], rtol=1e-4, atol=1e-4)
    extractor = MODELS["mlp"](hidden=HIDDEN)
    scale = {name: jnp.full(1, getattr(shared.config.data, name), jnp.float32) for name in ("mean", "std")}
    model = build(extractor, digits.images.shape[1:], digits.classes, init="torch", **scale)
    expected = jax.jit(model.features)(params["extractor"], digits.images[exported["sample"]])
    np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-5)


def test_a_seed_of_a_comparison_exports_what_it_does_alone(shared, tmp_path):
    compare(shared.config, ["fedavg"], seeds=[4, 5], out=tmp_path / "both")
    assert (tmp_path / "both" / "fedavg-seed5" / "export.npz").exists()
    with np.load(tmp_path / "both" / "fedavg-seed4" / "export.npz") as held:
        np.testing.assert_array_equal(held["sample"], shared.exported["sample"])
        for name in ("features", "logits"):
            np.testing.assert_allclose(held[name], shared.exported[name], rtol=1e-4, atol=1e-4)


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
