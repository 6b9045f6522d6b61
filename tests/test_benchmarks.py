"""The scripts in `benchmarks/` that go through all methods can do so; `tables` has a file of its own."""

import ast
from pathlib import Path

import pytest

from benchmarks import compile_time
from benchmarks.peers import case
from fedjax_pfl import METHODS
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
