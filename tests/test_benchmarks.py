"""The scripts in `benchmarks/` that go through all methods, and `balanced`; `tables` has a file of its own."""

import ast
from pathlib import Path

import numpy as np
import pytest

from benchmarks import balanced, compile_time
from benchmarks.peers import case
from fedjax_pfl import METHODS
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.experiment.build import DataShape, make_engine

PEERS = Path(case.__file__).parent


def test_the_peers_have_the_methods_that_they_are_asked_for():
    """By reading, since PyTorch is not there."""
    tree = ast.parse((PEERS / "pytorch_methods.py").read_text(encoding="utf-8"))
    (table,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "METHODS")
    assert [key.value for key in table.keys] == list(case.PEERED)
    assert set(case.PEERED) <= METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_the_time_to_compile_is_taken_of_every_method(method):
    for model in compile_time.MODELS:
        config = compile_time.config_of(method, compile_time.OWN_MODEL.get(method, model), [])
        assert make_engine(config, DataShape("images", (28, 28, 1), 10, None)).clients == 20


def test_models_are_tested_on_equally_many_images_of_each_class():
    labels = np.array([2, 0, 1, 1, 0, 2, 2, 0, 1, 2])
    data = Dataset("toy", np.zeros((10, 2, 2, 1), np.uint8), labels, 3, train_rows=None)
    tested = balanced.balanced(data, np.array([0, 1, 3, 4, 6, 8, 9]))  # classes 2, 0, 1, 0, 2, 1, 2
    np.testing.assert_array_equal(tested, [[1, 4], [3, 8], [0, 6]])


def test_classes_are_told_apart_by_what_a_client_has_of_them():
    columns = balanced.columns_of(np.array([[0, 1, 700], [20, 21, 0]]))
    accuracy = np.array([[1.0, 30.0, 90.0], [50.0, 70.0, 3.0]])
    found = {name: balanced.per_client(accuracy, of).tolist() for name, of in columns.items()}
    np.testing.assert_equal(found.pop("101 to 500"), [np.nan, np.nan])
    np.testing.assert_equal(found.pop("21 to 100"), [np.nan, 70])
    np.testing.assert_equal(found.pop("more"), [90, np.nan])
    np.testing.assert_allclose(found.pop("all"), [121 / 3, 41])
    assert found == {"none": [1, 3], "1 to 20": [30, 50], "the most frequent": [90, 70]}
    assert balanced.difference(np.array([2.0, 2.0, np.nan])) == "+2.0 [+2.0, +2.0]"
    assert balanced.difference(np.array([2.0, np.nan])) == "+2.0"
