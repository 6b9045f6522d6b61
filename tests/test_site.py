"""What is made when the site is built: pages of methods, tables of config and leaderboard, links."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from fedjax_pfl.methods import METHODS

pytest.importorskip("mkdocs", reason="the package mkdocs is not installed")
HOME = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def build():
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("build_pages", HOME / "docs" / "build_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


def rows(markdown):
    """The cells of the rows of a table, by the first cell."""
    found = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in markdown.splitlines() if line[:2] == "| "
    ]
    return {cells[0]: cells[1:] for cells in found}


def test_a_method_has_its_hyperparameters_its_reference_and_its_cost(build):
    page = build.method_page("fedprox")
    table = rows(page)
    assert table["`mu`"] == [
        "number ≥ 0", "`0.01`", "strength of the proximal term; the paper's grid is 0.001, 0.01, 0.1, 1."
    ]  # fmt: skip
    assert "<p>FedProx: FedAvg with the local loss CE + (mu / 2) ||w - w^t||^2 over all parameters.</p>" in page
    assert "arXiv:1812.06127" in page.partition("## Reference")[2]
    measured = json.loads((HOME / "benchmarks/results/method_costs.json").read_text(encoding="utf-8"))["methods"][
        "fedprox"
    ]
    assert table["numbers sent by a participant"] == [f"{measured['up']:,}"]
    assert "Args" not in page


def test_every_method_has_a_page_without_markup_of_docstrings(build):
    for name in METHODS:
        page = build.method_page(name)
        assert page.startswith(f"# {name}\n\n<p>"), name
        assert "``" not in re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S), name
        assert "\n## Reference\n\n<p>" in page, name


def test_results_of_a_method_are_means_over_seeds_by_setting_and_row(build, monkeypatch):
    def cell(row, seed, pre, method="ditto"):
        config = {"method": {"name": method}, "training": {"rounds": 7}}
        personal = {"pre": {"last": pre}, "post": {"last": 0.5}}
        return {"setting": "s", "row": row, "seed": seed, "config": config, "personal": personal}

    cells = [cell("a", 0, 0.5), cell("a", 1, 0.7), cell("b", 0, 0.25), cell("c", 0, 0.9, "fedavg")]
    held = [(HOME / "benchmarks/results/toy_table1.json", {"paper": "Toy", "table": "table1", "cells": cells})]
    monkeypatch.setattr(build, "tables_of_results", lambda: held)
    found = build.results_of("ditto")[1]
    lines = [line for line in found.splitlines() if "toy_table1" in line]
    assert lines == [
        "| [toy_table1](../../benchmarks/results/toy_table1.json) | s | a | 7 | 2 | 60.00 ± 14.14 | 50.00 ± 0.00 |",
        "| [toy_table1](../../benchmarks/results/toy_table1.json) | s | b | 7 | 1 | 25.00 | 50.00 |",
    ]


def test_the_leaderboard_says_what_was_run(build, monkeypatch, tmp_path):
    def cell(row, seed, best):
        point = {"last": 0.5, "weighted_last": 0.5, "weighted_best": best, "best": 0.5, "best_round": 3}
        point |= {"mean_last_10": 0.5, "std_clients": 0.1, "worst_10_percent": 0.25, "macro_f1_last": 0.5}
        config = {"method": {"name": row}, "training": {"rounds": 50}, "data": {"clients": 20}}
        return {
            "setting": "fashion_mnist", "row": row, "seed": seed, "config": config, "set": [],
            "personal": {"pre": point, "post": point}, "best": {"pre": {}, "post": {}}, "global": None,
            "megabytes_total": 1.5, "timing": {"seconds_per_round": 2.0, "total_seconds": 9.0, "compile_seconds": 1.0},
            "gradient_passes": 1.0,
        }  # fmt: skip

    table = {
        "paper": "PFLlib",
        "table": "mlp",
        "cells": [cell("fedavg", 0, 0.6), cell("fedavg", 1, 0.8), cell("local", 0, 0.75)],
    }
    path = tmp_path / "pfllib_mlp.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    monkeypatch.setattr(build, "tables_of_results", lambda: [(path, table)])
    shown = build.leaderboard()
    assert f"2 of {len(METHODS) + 1} rows, 50 rounds, 1 to 2 seeds." in shown  # all methods, and FedRep's control
    table = rows(shown)
    assert table["[FedAvg](methods/fedavg.md)"][:5] == ["50", "2", "70.00 ± 14.14", "+15.00", "50.00 ± 0.00"]
    assert table["[Local](methods/local.md)"][:4] == ["50", "1", "75.00", "—"]
    monkeypatch.setattr(build, "tables_of_results", list)
    assert build.leaderboard() == "Nothing has been run yet."


def test_the_config_reference_has_types_bounds_and_defaults(build):
    table = rows(build.config_tables().partition("## [finetune]")[0])
    assert table["`batch_size`"] == ["whole number ≥ 1", "`10`", "B, samples per mini-batch."]
    assert table["`split`"][:2] == ['`"merge"`, `"official"`', '`"merge"`']
    assert table["`clip_norm`"][:2] == ['number > 0 or `"none"`', "left out"]
    assert table["`source`"][1] == "must be given"


def test_notebooks_become_pages_with_their_outputs(build):
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "[![Open](https://elsewhere/badge.svg)](https://elsewhere)"]},
        {
            "cell_type": "code",
            "source": ["1 + 1"],
            "outputs": [
                {"data": {"text/plain": ["2"]}},
                {"text": ["said\n"]},
                {"data": {"image/png": "QUJD\n", "text/plain": ["<Axes>"]}},
            ],
        },
    ]
    assert build.notebook_page({"cells": cells}) == (
        "# Title\n[Open](https://elsewhere)\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n```text\nsaid\n```\n\n"
        '<img alt="output" src="data:image/png;base64,QUJD">\n'
    )
