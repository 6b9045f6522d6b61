"""The runner of the papers' tables, mostly with a stand-in for the simulator: what is tested is the book-keeping."""

import itertools
import json
import re
import runpy
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from benchmarks.tables import command, fill, page, store
from benchmarks.tables.command import without_folder
from benchmarks.tables.fill import cell_overrides, gradient_passes, machine_of
from benchmarks.tables.lines import Line, curve_of, figures, paired_p
from benchmarks.tables.page import majority, ranking
from benchmarks.tables.paper import ROOT, Row, read_table
from benchmarks.tables.store import alone, load_cells
from fedjax_pfl import ConfigError, load_config
from fedjax_pfl.experiment.worker import Finished

PAPERS = sorted((ROOT / "benchmarks" / "papers").glob("*.toml"))
RESULTS = sorted(path for path in store.RESULTS.glob("*.json") if "cells" in json.loads(path.read_text("utf-8")))
PAPER = """
paper = "Toy"
[methods.local]
label = "Local"
point = "post"
overrides = ["method.name=local"]
[methods.fedavg]
label = "FedAvg"
point = "pre"
overrides = ["method.name=fedavg"]
[methods.fedprox]
label = "FedProx"
point = "pre"
overrides = ["method.name=fedprox", "training.lr=0.2"]
[tables.table1]
title = "Table I: toy"
config = "CONFIG"
[tables.table1.settings.three]
label = "3 clients"
overrides = ["data.clients=3", "training.lr=0.4"]
paper = { local = 50, fedavg = 60.5, fedprox = 70 }
target = 60.0
paper_to_target = { fedprox = { minutes = 1.5, rounds = 29, megabytes = 24.4 }, local = { rounds = 7 } }
[tables.table1.settings.four]
label = "4 clients"
overrides = ["data.clients=4"]
paper = { local = 50 }
[tables.table2]
title = "Table II: rows of its own"
config = "CONFIG"
[tables.table2.settings.only]
label = "the only one"
overrides = []
[tables.table2.rows.mild]
label = "mild"
point = "pre"
overrides = ["method.name=fedprox", "method.mu=0.3"]
"""
# What pFedCSPC's tables report: figures of the global model, of the personal models, and their harmonic mean.
SCORES = """
[tables.table3]
title = "Table III: global and local"
config = "CONFIG"
columns = "global_local_hm"
[tables.table3.settings.five]
label = "5 clients"
overrides = []
target = 60.0
[tables.table3.settings.five.paper]
local = { local = 61.5, hm = 33 }
fedavg = { global = 66.78, local = 64.13, hm = 65.43 }
fedprox = { global = 47.81, local = 45.48, hm = 45.08 }
"""
CONFIG = """
[data]
source = "digits"
clients = 5
partition = { kind = "iid" }
[model]
name = "mlp"
hidden = 4
[method]
name = "fedavg"
[training]
rounds = 2
batch_size = 50
lr = 0.1
"""
# POST accuracy of two evaluated rounds, by method and seed; local's PRE is 0.2 lower, that of the others the same. The
# worst 10 % of clients have half of it, and its standard deviation over clients is a tenth. I_local is 0.1 lower than
# accuracy, and a global model (Local has none) 0.05 better than POST.
ACCURACY = {
    ("local", 0): (0.30, 0.60),
    ("local", 1): (0.30, 0.62),
    ("local", 2): (0.61, 0.67),
    ("fedavg", 0): (0.10, 0.20),
    ("fedavg", 1): (0.10, 0.21),
    ("fedavg", 2): (0.10, 0.25),
    ("fedprox", 0): (0.60, 0.65),
    ("fedprox", 1): (0.65, 0.70),
    ("fedprox", 2): (0.61, 0.69),
}


class Fake:
    """A simulator with known results, that remembers what it was asked for."""

    def __init__(self):
        self.configs = []
        self.diverged = {}

    def __call__(self, config):
        self.configs.append(config)
        post = np.array(ACCURACY[config.method["name"], config.run.seed])
        pre = post - 0.2 if config.method["name"] == "local" else post
        curves = {"pre": pre, "post": post}
        personal = {
            point: {
                "last": curve[-1],
                "best": curve.max(),
                "weighted_last": curve[-1] - 0.01,
                "weighted_best": curve.max() - 0.02,
                "worst_10_percent": curve[-1] / 2,
                "std_clients": curve[-1] / 10,
            }
            for point, curve in curves.items()
        }
        history = {
            "round": np.array([5, 10]),
            **{f"{point}.accuracy": curve for point, curve in curves.items()},
            **{f"{point}.worst_10_percent": curve / 2 for point, curve in curves.items()},
            **{f"{point}.std_clients": curve / 10 for point, curve in curves.items()},
            **{f"{point}.i_local": curve - 0.1 for point, curve in curves.items()},
            "global": post + (np.nan if config.method["name"] == "local" else 0.05),
            "megabytes": np.array([1.5, 3.0]),
            "seconds": np.array([8.0, 10.0 + config.run.seed]),
        }
        summary = {
            "personal": personal,
            "global": None,
            "diverged_round": self.diverged.get((config.method["name"], config.run.seed)),
            "timing": {"compile_seconds": 4.0, "seconds_per_round": 0.25, "total_seconds": 11.0},
            "traffic": {"megabytes_total": 3.0},
            "environment": {"jax": "1.2.3", "platform": "cpu", "device_count": 2},
            "partition_hash": f"seed {config.run.seed}",
            "majority_class": {"accuracy": 0.25 + 0.5 * config.run.seed, "weighted": 0.125},
            "metrics": {"pre.accuracy": {"last": 0.5}, "diagnostics.alpha": {"last": 0.75}},
        }
        # Two clients a tenth apart, around the mean of the last round.
        clients = {f"{point}_accuracy": curve[-1] + np.array([-0.05, 0.05]) for point, curve in curves.items()}
        return Finished(summary, history, clients)

    def asked(self):
        return [(config.method["name"], config.data.clients, config.run.seed) for config in self.configs]


@pytest.fixture
def paper(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text(CONFIG, encoding="utf-8")
    path = tmp_path / "toy.toml"
    path.write_text(PAPER.replace("CONFIG", str(tmp_path / "config.toml")), encoding="utf-8")
    monkeypatch.setattr(store, "RESULTS", tmp_path / "results")
    return path


def each_by(simulate):
    """Stands in for `run_configs`: every config is a program of its own."""

    def run_configs(configs):
        for place, config in enumerate(configs):
            try:
                yield [place], [simulate(config)]
            except ConfigError as error:
                yield [place], [str(error)]

    return run_configs


@pytest.fixture
def fake(monkeypatch):
    simulator = Fake()
    monkeypatch.setattr(fill, "run_configs", each_by(simulator))
    monkeypatch.setattr(fill, "gradient_passes", lambda config: 2.5)
    return simulator


@pytest.fixture
def scores(paper, tmp_path):
    """The paper with a table of global and local figures."""
    text = paper.read_text() + SCORES.replace("CONFIG", str(tmp_path / "config.toml"))
    paper.write_text(text, encoding="utf-8")
    return paper


def call(paper, arguments):
    command.main(paper, arguments.split())


def markdown(name="toy_table1"):
    return (store.RESULTS / f"{name}.md").read_text(encoding="utf-8")


def cells(name="toy_table1"):
    held = json.loads((store.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {(cell["setting"], cell["row"], cell["seed"]): cell for cell in held["cells"]}


def rows(text, label):
    """The cells of each table row of that label."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [line.strip("| ").split(" | ") for line in lines]


def test_guessing_is_judged_on_the_partition_that_most_rows_have():
    def cell(seed, partition, accuracy):
        found = {"accuracy": accuracy, "weighted": 0.5}
        return {"seed": seed, "partition_hash": partition, "majority_class": found}

    usual = [cell(0, "a", 0.25), cell(0, "a", 0.25), cell(1, "b", 0.75), cell(1, "b", 0.75)]
    assert majority([cell(0, "with validation samples", 0.9), *usual]) == majority(usual)
    assert "50.00 ± 35.36 %, by samples 50.00 ± 0.00 %" in majority(usual)[0]


def test_runs_that_diverged_are_named(paper, fake):
    fake.diverged = {("fedavg", 1): 10}
    call(paper, "table1 --settings three --seeds 0,1")
    said = [line for line in markdown().splitlines() if "iverged" in line]
    assert said == ["**Diverged** in round 10, from when on answers count as wrong: FedAvg (seed 1)."]


def test_the_recorded_command_does_not_say_where_runs_were_kept():
    given = "table1 --work /home/me/runs --seeds 0,1 --checkpoint-every 5 --rounds 2 --work=/tmp/x --name mine"
    assert without_folder(given.split()) == ["table1", "--seeds", "0,1", "--rounds", "2", "--name", "mine"]


def test_a_setting_that_is_moved_is_named_beside_the_papers_figures(paper, fake, capsys):
    """But for a part of the same data set, and what is not of the experiment."""
    call(paper, "table1 --settings three --methods local --set run.eval_every=5")
    assert "Not the paper's setting" not in markdown()
    call(paper, "table1 --settings three --methods local --set training.lr=0.2 run.eval_every=5 data.clients=4")
    assert "**Not the paper's setting**: `--set` moves training.lr, data.clients." in markdown()
    assert "note: --set moves training.lr, data.clients: the paper's" in capsys.readouterr().err


def test_figures_agree_with_those_computed_by_hand(paper, fake, capsys):
    call(paper, "table1 --settings three --seeds 0,1,2")
    text = markdown()
    assert capsys.readouterr().out == text
    # fedprox - local = .05, .08, .02: mean .05, deviation .03, t = 2.886751 with 2 degrees of freedom, for which
    # p = 1 - t / sqrt(t^2 + 2) = 0.10197, and the half interval is 4.30265 * .03 / sqrt(3) = .0745; fedprox - fedavg =
    # .45, .49, .44: mean .46, deviation .02646, t = 30.1232, p = 0.0011, half interval .0657. The two clients of a run
    # lie apart by the same in all rows, so that drawing them anew changes no difference.
    local, fedavg, fedprox = (rows(text, label)[0] for label in ("Local", "FedAvg", "FedProx"))
    behind = ["+5.00 [-2.45, +12.45]", "[+5.00, +5.00]", "0.102"]
    assert local == ["Local", "50", "63.00 ± 3.61", "43.00", "63.00", "31.50", "62.00", "2.5", "3.0", "0.250", *behind]
    behind = ["+46.00 [+39.43, +52.57]", "[+46.00, +46.00]", "0.0011"]
    assert fedavg == [
        "FedAvg",
        "60.5",
        "22.00 ± 2.65",
        "22.00",
        "22.00",
        "11.00",
        "21.00",
        "2.5",
        "3.0",
        "0.250",
        *behind,
    ]
    assert fedprox == [
        "FedProx",
        "70",
        "**68.00 ± 2.65**",
        "68.00",
        "68.00",
        "34.00",
        "67.00",
        "2.5",
        "3.0",
        "0.250",
        *"———",
    ]
    # 0.25, 0.75 and 1.25 of seeds 0, 1, 2.
    assert "has most training samples of: 75.00 ± 50.00 %, by samples 12.50 ± 0.00 %." in text
    assert "FedProx against the best other row, Local: p = 0.102." in text
    # Ranks 1 2 3 and 2 1 3: 1 - 6 * (1 + 1) / (3 * 8).
    assert "over 3 rows: 0.50." in text
    assert "All rows: 2 rounds; seed 0, 1, 2." in text
    assert "jax 1.2.3" in text
    assert "table1 --settings three --seeds 0,1,2" in text
    assert "4 clients" not in text


def test_where_the_best_round_counts_clients_are_compared_after_the_last(paper, fake, monkeypatch):
    monkeypatch.setitem(ACCURACY, ("fedprox", 0), (0.75, 0.65))
    paper.write_text(paper.read_text().replace('title = "Table I: toy"', 'title = "Table I: toy"\nheadline = "best"'))
    call(paper, "table1 --settings three")
    # In the best rounds .75 against .60 and .20, in the last ones .65.
    for label, best, last in (("Local", "+15.00", "+5.00"), ("FedAvg", "+55.00", "+45.00")):
        assert rows(markdown(), label)[0][-3:] == [best, f"last: {last} [{last}, {last}]", "—"]


def test_a_cell_of_a_cpu_is_kept_whichever_name_its_precision_has(paper, fake):
    call(paper, "table1 --settings three --methods local --set run.precision=float32")
    call(paper, "table1 --settings three --methods local")
    assert len(fake.configs) == 1
    call(paper, "table1 --settings three --methods local --set run.precision=bfloat16")
    call(paper, "table1 --settings three --methods local")
    assert len(fake.configs) == 3


def test_a_plan_says_what_would_be_run_and_why_and_runs_nothing(paper, fake, capsys):
    call(paper, "table1 --settings three --methods local --plan")
    assert capsys.readouterr() == ("", "would run  three local seed 0: not there yet\n")
    assert not store.RESULTS.exists()  # a page without a cell says nothing
    call(paper, "table1 --settings three --methods local,fedavg")
    page, held = markdown(), cells()
    capsys.readouterr()
    call(paper, "table1 --settings three --methods local,fedprox --rounds 3 --set run.eval_every=3 --plan")
    assert capsys.readouterr().err.splitlines() == [
        "would run  three local seed 0: training.rounds was 2, is 3; run.eval_every was 1, is 3",
        "would run  three fedprox seed 0: not there yet",
    ]
    call(paper, "table1 --settings three --methods local --plan")
    assert capsys.readouterr().err.endswith("three local seed 0: kept, post 60.00 %\n")
    assert (len(fake.configs), markdown(), cells()) == (2, page, held)


def test_paired_p_needs_two_common_seeds_and_a_spread():
    first, second = {0: 0.60, 1: 0.62, 2: 0.67}, {0: 0.65, 1: 0.70, 2: 0.69, 7: 0.1}
    assert paired_p(first, second) == pytest.approx(1 - 2.8867513 / np.sqrt(2.8867513**2 + 2), abs=1e-7)
    assert paired_p(second, first) == pytest.approx(paired_p(first, second))
    assert paired_p({0: 0.1, 1: 0.2}, {1: 0.3, 2: 0.2}) is None
    assert paired_p(first, {seed: accuracy + 0.1 for seed, accuracy in first.items()}) is None


def test_the_machine_is_that_of_the_run():
    """Not of the process that writes the table, which may find a run complete."""
    recorded = {"platform": "abacus", "device_count": 2, "jax": "1.2.3"}
    assert machine_of(recorded) == "JAX on abacus (devices: 2), jax 1.2.3"
    recorded |= {"cores": 3, "machine": "wood", "python": "4.5.6"}
    assert machine_of(recorded) == "3 wood cores, JAX on abacus (devices: 2), jax 1.2.3, Python 4.5.6"


def test_one_seed_has_neither_deviation_nor_p_value(paper, fake):
    call(paper, "table1 --settings three")
    assert rows(markdown(), "Local")[0][2] == "60.00"
    assert [rows(markdown(), label)[0][-1] for label in ("Local", "FedAvg")] == ["—", "—"]
    assert "p = " not in markdown()


def test_the_reference_can_be_chosen(paper, fake):
    call(paper, "table1 --settings three --seeds 0,1,2 --reference local")
    assert [rows(markdown(), label)[0][-1] for label in ("Local", "FedProx")] == ["—", "0.102"]
    assert "Behind Local:" in markdown()
    assert "Local against the best other row, FedProx: p = 0.102." in markdown()
    paper.write_text('reference = "fedavg"\n' + paper.read_text())
    call(paper, "table1 --settings three --seeds 0,1,2")
    assert "Behind FedAvg:" in markdown()
    paper.write_text(paper.read_text().replace('"fedavg"\n', '"best"\n', 1))
    with pytest.raises(ConfigError, match=r"table1.reference = 'best' is not usable: allowed: local, fedavg, fedprox"):
        read_table(paper, "table1")


def test_the_legend_says_what_the_table_shows(scores, fake):
    call(scores, "table1 --settings three")
    assert "the paper reports: PRE, after aggregation, or POST, after local training. " in markdown()
    assert "over clients: 95 %" in markdown()
    call(scores, "table2")  # all of its rows are at PRE
    assert "of the last round, at PRE, after aggregation. " in markdown("toy_table2")
    call(scores, "table3")
    assert "over clients: 95 %" not in markdown("toy_table3")


def test_target_is_the_first_evaluated_round_that_reaches_it(paper, fake):
    call(paper, "table1 --settings three --seeds 0,1,2")
    # local: seeds 0 and 1 in round 10, after 10 and 11 s; seed 2 in round 5, after 8 s. 0.60 itself counts.
    local, fedavg, fedprox = (rows(markdown(), label)[1] for label in ("Local", "FedAvg", "FedProx"))
    assert local == ["Local", "8.3", "9.7", "4.0", "2.5", "0.8", "7 / — / —"]
    assert fedavg == ["FedAvg", "— (not in 10 rounds)", *"—————"]
    assert fedprox == ["FedProx", "5", "8.0", "4.0", "1.5", "0.5", "29 / 1.5 / 24.4"]


def test_target_counts_the_seeds_that_reach_it_at_the_point_of_the_row(paper, fake):
    paper.write_text(paper.read_text().replace("target = 60.0", "target = 65.0"))
    call(paper, "table1 --settings three --seeds 0,1,2")
    assert rows(markdown(), "Local")[1][:3] == ["Local", "10 (1 of 3 seeds)", "12.0"]
    assert rows(markdown(), "FedProx")[1][:3] == ["FedProx", "8.3", "10.0"]


def test_finished_cells_are_reused_and_the_table_fills_over_several_calls(paper, fake, capsys):
    call(paper, "table1 --settings three --methods fedprox --rounds 3")
    call(paper, "table1 --settings three,four --methods fedprox,local --rounds 3")
    assert fake.asked() == [("fedprox", 3, 0), ("local", 3, 0), ("local", 4, 0), ("fedprox", 4, 0)]
    assert {config.training.rounds for config in fake.configs} == {3}
    assert "three fedprox seed 0: kept, pre 65.00 %" in capsys.readouterr().err
    # In the paper's order, whatever the order of the calls.
    text = markdown()
    headings = ["3 clients", "| Local", "| FedProx", "To 60 %", "| Local", "| FedProx", "4 clients", "| Local"]
    places = [text.find(headings[0])]
    for heading in headings[1:]:
        places.append(text.find(heading, places[-1] + 1))
    assert places == sorted(places)
    assert -1 not in places
    assert text.count("--rounds 3\n") == 2


def test_a_cell_whose_config_has_changed_is_run_again_and_replaced(paper, fake):
    call(paper, "table1 --settings three --methods local,fedavg")
    call(paper, "table1 --settings three --methods local --set training.lr=0.5")
    assert fake.asked() == [("local", 3, 0), ("fedavg", 3, 0), ("local", 3, 0)]
    assert len(cells()) == 2
    assert cells()["three", "local", 0]["config"]["training"]["lr"] == 0.5
    assert cells()["three", "fedavg", 0]["config"]["training"]["lr"] == 0.4
    assert "**Not alike**, Local: 2 rounds; seed 0; training.lr=0.5." in markdown()
    assert "**Not alike**, FedAvg: 2 rounds; seed 0." in markdown()


def test_a_cell_from_before_a_field_of_the_config_is_kept_and_one_with_a_field_that_is_gone_run_again(paper, fake):
    call(paper, "table1 --settings three --methods local,fedavg,fedprox")
    path = store.RESULTS / "toy_table1.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    local, fedavg, fedprox = (cell["config"] for cell in held["cells"])
    del local["training"]["momentum"], fedprox["method"]["mu"]
    fedavg["training"]["momenta"] = 0.0
    path.write_text(json.dumps(held), encoding="utf-8")
    call(paper, "table1 --settings three --methods local,fedavg,fedprox")
    assert fake.asked()[3:] == [("fedavg", 3, 0)]
    call(paper, "table1 --settings three --methods local --set training.momentum=0.5")
    call(paper, "table1 --settings three --methods fedprox --set method.mu=0.5")
    assert fake.asked()[4:] == [("local", 3, 0), ("fedprox", 3, 0)]


def test_a_run_is_not_replaced_by_one_of_fewer_rounds(paper, fake, capsys):
    call(paper, "table1 --settings three --methods local")
    before = (store.RESULTS / "toy_table1.json").read_bytes()
    with pytest.raises(SystemExit) as ended:
        call(paper, "table1 --settings three --methods fedavg,local --rounds 1")
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        "error: 1 rounds are fewer: three local seed 0 has 2 rounds, which would be lost; give another --name\n"
    )
    assert ((store.RESULTS / "toy_table1.json").read_bytes(), len(fake.configs)) == (before, 1)
    call(paper, "table1 --settings three --methods fedavg,local --rounds 1 --name short")
    assert len(cells("short")) == 2


def test_the_papers_figures_do_not_stand_beside_another_data_set(paper, fake):
    text = paper.read_text().replace('["data.clients=3", ', '["data.clients=3", "data.source=npz:cifar100_20k.npz", ')
    paper.write_text(text, encoding="utf-8")
    for source, shown in (("npz:A/cifar100.npz", "60.5"), ("npz:cifar10.npz", "—")):
        name = shown.replace("—", "other")
        call(paper, f"table1 --settings three --methods local,fedavg --set data.source={source} --name {name}")
        assert rows(markdown(name), "FedAvg")[0][1] == shown
        assert ("## 3 clients" in markdown(name)) == (shown != "—")
    assert "## cifar10 instead of the data of 3 clients" in markdown("other")
    assert "Spearman" not in markdown("other")


def test_passes_do_not_count_diagnostics_nor_depend_on_the_rule(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG, encoding="utf-8")
    plain = ["method.name=fedecouple", "training.copies=none"]
    more = ["run.diagnostics=true", "aggregation.rule=trimmed_mean", "aggregation.trim=0.3"]
    found = [gradient_passes(load_config(tmp_path / "config.toml", chosen)) for chosen in (plain, plain + more)]
    assert found[0] == found[1] > 2


def test_later_overrides_win_and_set_wins_over_all(paper, fake):
    call(paper, "table1 --settings three --methods fedprox")
    call(paper, "table1 --settings three --methods fedprox --rounds 7 --set training.lr=0.9 training.rounds=8")
    assert [config.training.lr for config in fake.configs] == [0.2, 0.9]
    assert [config.training.rounds for config in fake.configs] == [2, 8]


def test_a_table_may_have_rows_of_its_own(paper, fake):
    call(paper, "table2 --name mine")
    assert [config.method["mu"] for config in fake.configs] == [0.3]
    assert rows(markdown("mine"), "mild")[0][1:3] == ["—", "**65.00**"]


CONTROLS = """
[controls.local]
label = "on its own"
point = "pre"
overrides = ["method.name=local"]
[controls.fedavg]
label = "FedAvg, before training"
point = "pre"
overrides = ["method.name=fedavg"]
"""


def test_controls_come_before_the_rows_of_every_table_but_where_it_has_them_itself(paper):
    own = {name: list(read_table(paper, name).rows) for name in ("table1", "table2")}
    with paper.open("a") as file:
        file.write(CONTROLS)
    assert list(read_table(paper, "table2").rows) == ["local", "fedavg", *own["table2"]]
    table = read_table(paper, "table1")
    assert list(table.rows) == own["table1"]
    assert table.rows["local"].label != "on its own"
    assert table.reference == own["table1"][-1]


def test_a_table_may_choose_its_controls(paper):
    title = 'title = "Table II: rows of its own"\n'
    text = paper.read_text() + CONTROLS
    for chosen in (["fedavg"], []):
        paper.write_text(text.replace(title, f"{title}controls = {json.dumps(chosen)}\n"))
        assert list(read_table(paper, "table2").rows) == [*chosen, "mild"]
    paper.write_text(text.replace(title, f'{title}controls = ["ditto"]\n'))
    with pytest.raises(ConfigError, match=r"table2\.controls.*ditto.*local, fedavg"):
        read_table(paper, "table2")


SYSTEMS = ("fedecouple", "fedfcd", "pgfedsplit", "fedcpd", "pfedcspc")


@pytest.mark.parametrize("path", [path for path in PAPERS if path.stem in SYSTEMS], ids=lambda path: path.stem)
def test_personal_models_stand_beside_local_fine_tuning_and_the_method_without_collaboration(path):
    seen = set()
    for name, fields in tomllib.loads(path.read_text(encoding="utf-8"))["tables"].items():
        table = read_table(path, name)
        overrides = [row.overrides for row in table.rows.values()]
        wanted = "method.name=local", "method.name=fedavg_ft", "participation.collaborate=false"
        found = [any(value in given for given in overrides) for value in wanted]
        assert all(found) or fields.get("controls") == [], name
        # Only a search on validation samples, or of a global model, which Local does not have, goes without.
        assert fields.get("controls") != [] or name == "tuning" or table.columns == "global", name
        seen.add(all(found))
    assert True in seen


def test_a_setting_may_change_a_row(paper, fake):
    label = 'label = "3 clients"\n'
    paper.write_text(paper.read_text().replace(label, label + 'row_overrides.fedprox = ["method.mu=0.7"]\n'))
    call(paper, "table1 --methods local,fedprox")
    assert [config.method.get("mu") for config in fake.configs] == [None, 0.7, None, 0.01]
    call(paper, "table1 --settings three --methods fedprox --set method.mu=0.9")
    assert fake.configs[-1].method["mu"] == 0.9


def test_a_row_with_another_model_is_named(paper, fake):
    call(paper, "table1 --settings three")
    assert "Another model" not in markdown()
    label = 'label = "3 clients"\n'
    paper.write_text(paper.read_text().replace(label, label + 'row_overrides.fedprox = ["model.name=cnn_digits"]\n'))
    call(paper, "table1 --settings three --seeds 0,1")
    assert "**Another model**, FedProx: cnn_digits, not mlp." in markdown()


def test_a_paper_may_report_the_best_round(paper, fake, monkeypatch, capsys):
    monkeypatch.setitem(ACCURACY, ("fedprox", 0), (0.75, 0.65))
    call(paper, "table1 --settings three --name last")
    paper.write_text('headline = "best"\n' + paper.read_text())
    call(paper, "table1 --settings three")
    # Ours and the worst 10 % are of round 5; PRE and POST are those of the last round all the same.
    assert rows(markdown("last"), "FedProx")[0][2:6] == ["**65.00**", "65.00", "65.00", "32.50"]
    assert rows(markdown(), "FedProx")[0][2:6] == ["**75.00**", "65.00", "65.00", "37.50"]
    assert "three fedprox seed 0: done, pre 75.00 %" in capsys.readouterr().err
    assert "of the last round" in markdown("last")
    assert "of the round with the highest mean" in markdown()


def test_a_table_may_report_another_round_than_its_paper(paper):
    text = paper.read_text().replace('title = "Table I: toy"', 'title = "Table I: toy"\nheadline = "last"')
    paper.write_text('headline = "best"\n' + text)
    assert [read_table(paper, name).headline for name in ("table1", "table2")] == ["last", "best"]
    paper.write_text('headline = "first"\n' + text)
    with pytest.raises(ConfigError, match="allowed: last, best"):
        read_table(paper, "table2")


def test_the_spread_over_clients_is_shown_where_the_paper_has_it(paper, fake):
    label = 'label = "3 clients"\n'
    paper.write_text(paper.read_text().replace(label, label + "paper_std = { fedprox = 4.5 }\n"))
    call(paper, "table1 --seeds 0,1,2")
    three, four = (line for line in markdown().splitlines() if line.startswith("| method | paper (%)"))
    assert "| paper's client std | client std | PRE |" in three
    assert "std" not in four
    assert rows(markdown(), "FedProx")[0][1:6] == ["70", "**68.00 ± 2.65**", "4.5", "6.80", "68.00"]
    assert rows(markdown(), "Local")[0][1:6] == ["50", "63.00 ± 3.61", "—", "6.30", "43.00"]


def test_a_table_may_compare_global_and_local_figures_and_their_harmonic_mean(scores, fake, capsys):
    call(scores, "table3 --seeds 0,1,2")
    text = markdown("toy_table3")
    local, fedavg, fedprox = (rows(text, label)[0] for label in ("Local", "FedAvg", "FedProx"))
    headings = next(line for line in text.splitlines() if line.startswith("| method")).strip("| ").split(" | ")
    assert headings[1:4] == ["paper: global", "paper: local", "paper: HM"]
    assert headings[4:] == [
        "ours: global",
        "ours: local",
        "ours: HM",
        "PRE",
        "POST",
        "passes",
        "MB",
        "s per round",
        "behind",
        "p",
    ]
    # The paper's HM is that of its columns: 2 * 66.78 * 64.13 / 130.91 = 65.43, 2 * 47.81 * 45.48 / 93.29 = 46.62.
    assert fedavg[1:4] == ["66.78", "64.13", "65.43"]
    assert fedprox[1:4] == ["47.81", "45.48", "46.62"]
    assert "The paper prints an HM of 45.08 for FedProx; that of its columns is 46.62." in text
    assert text.count("The paper prints") == 1
    # Ours is the mean of the seeds' harmonic means: 2 * .25 * .10 / .35, 2 * .26 * .11 / .37 and 2 * .30 * .15 / .45.
    expected = {"FedAvg": [0.25, 0.26, 0.30], "FedProx": [0.70, 0.75, 0.74]}
    shown = {}
    for label, found in (("FedAvg", fedavg), ("FedProx", fedprox)):
        accuracy = np.array(expected[label])
        hms = shown[label] = 2 / (1 / accuracy + 1 / (accuracy - 0.15))
        columns = [f"{100 * np.mean(figures):.2f}" for figures in (accuracy, accuracy - 0.15, hms)]
        assert [cell.strip("*").split(" ± ")[0] for cell in found[4:7]] == columns
        assert float(found[6].strip("*").split(" ± ")[1]) == pytest.approx(100 * hms.std(ddof=1), abs=0.005)
    assert fedprox[6].startswith("**")
    assert text.count("**") == 2
    # Local has no global model: it is shown, but neither ranked nor tested.
    assert local[1:7] == ["—", "61.5", "33", "—", "53.00 ± 3.61", "—"]
    assert local[-1] == "—"
    assert fedavg[-1] == f"{ttest_rel(shown['FedAvg'], shown['FedProx']).pvalue:.3g}"
    assert f"FedProx against the best other row, FedAvg: p = {fedavg[-1]}." in text
    assert "All rows: 2 rounds" in text
    assert "of the last round" in text
    assert "five local seed 2: done, local 57.00 %\n" in capsys.readouterr().err


def test_ranks_are_those_of_the_harmonic_means(scores, fake):
    row = '[methods.mild]\nlabel = "mild"\npoint = "post"\noverrides = ["method.name=fedprox", "method.mu=0.3"]\n'
    text = scores.read_text().replace("[tables.table1]", row + "[tables.table1]", 1)
    paper = """paper.local = { global = 1, local = 1 }
    paper.fedavg = { global = 35, local = 28, hm = 50 }
    paper.fedprox = { global = 30, local = 60, hm = 40 }
    paper.mild = { global = 95, local = 25 }
    """
    scores.write_text(text[: text.index("[tables.table3.settings.five.paper]")] + paper)
    call(scores, "table3")
    # The paper's HM are 31.1, 40 and 39.6: ranks 1 3 2, ours 1 2.5 2.5. The global or the local figures have
    # ranks 2 1 3 and 2 3 1: a correlation of 0. Local, which has no HM here, is none of the rows.
    assert "over 3 rows: 0.87." in markdown("toy_table3")


def test_rows_of_different_length_are_ranked_in_the_last_round_that_all_have():
    def line(*accuracy):
        rounds = [20 * (number + 1) for number in range(len(accuracy))]
        cell = {"config": {"training": {"rounds": rounds[-1]}}, "curve": {"round": rounds, "pre": list(accuracy)}}
        return Line("a", Row("a", "pre", []), {0: cell}, {0: {"accuracy": accuracy[-1]}})

    # The paper's order is 1 2 3; after the last rounds, 40, 20 and 20, ours is 3 1 2, in round 20 it is 2 1 3.
    runs = [(line(0.5, 0.9), 60.0), (line(0.4), 70.0), (line(0.6), 80.0)]
    assert ranking(runs, "accuracy") == [
        "Rank correlation (Spearman) with the paper's figures over 3 rows after 20 rounds: 0.50."
    ]
    alike = [(line(0.1, 0.2), 60.0), (line(0.3, 0.3), 70.0), (line(0.2, 0.4), 80.0)]
    assert ranking(alike, "accuracy")[0].endswith("over 3 rows: 1.00.")
    level = [(line(0.3), 60.0), (line(0.3 - 1e-9), 70.0), (line(0.4), 80.0)]  # to the rounding of float32
    assert ranking(level, "accuracy")[0].endswith("over 3 rows: 0.87.")


def test_of_two_readings_of_a_row_one_is_ranked():
    cell = {"config": {"training": {"rounds": 1}}, "curve": {"round": [1]}}

    def line(key, accuracy, reading_of=None):
        row = Row(key, "pre", [], reading_of)
        return Line(key, row, {0: cell}, {0: {"accuracy": accuracy}})

    other, *rows = (line("a'", 0.1, "a"), 70.0), (line("a", 0.9), 70.0), (line("b", 0.5), 60.0), (line("c", 0.4), 50.0)
    (shown,) = ranking([other, *rows], "accuracy")
    assert shown.endswith("over 3 rows: 1.00.")
    assert ranking([other, rows[0], rows[1]], "accuracy") == []  # of two rows there is no order to speak of
    (shown,) = ranking([other, *rows[1:]], "accuracy")
    assert shown.endswith("over 3 rows: -0.50.")


def test_the_best_round_is_that_of_the_figure_that_rows_are_ranked_by(scores, fake, monkeypatch):
    monkeypatch.setitem(ACCURACY, ("fedprox", 0), (0.75, 0.65))
    text = scores.read_text().replace('columns = "global_local_hm"', 'columns = "global_local_hm"\nheadline = "best"')
    scores.write_text(text)
    call(scores, "table3")
    # 2 * .80 * .65 / 1.45; Local, without a global model, by its local figure.
    assert rows(markdown("toy_table3"), "FedProx")[0][4:8] == ["80.00", "65.00", "**71.72**", "65.00"]
    assert rows(markdown("toy_table3"), "Local")[0][4:7] == ["—", "50.00", "—"]
    assert "of the round with the highest HM, which" in markdown("toy_table3")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [("global", ("70.00", "—")), ("i_local", ("55.00", "50.00")), ("weighted", ("64.00", "59.00"))],
)
def test_a_table_may_compare_one_figure_alone(scores, fake, columns, shown):
    one = scores.read_text().replace('"global_local_hm"', f'"{columns}"')
    scores.write_text(one[: one.index("[tables.table3.settings.five.paper]")] + "paper = { fedprox = 63.5 }\n")
    call(scores, "table3")
    text = markdown("toy_table3")
    fedprox, local = (rows(text, label)[0] for label in ("FedProx", "Local"))
    assert fedprox[1:4] == ["63.5", f"**{shown[0]}**", "65.00"]
    assert local[1:3] == ["—", shown[1]]
    assert "| method | paper (%) | ours (%) | PRE | POST | passes | MB |" in text


def test_a_target_is_one_of_the_figure_that_rows_are_ranked_by(scores, fake):
    text = scores.read_text()
    for columns, heading, rounds in (
        # fedprox: global .65 in round 5; local .50, .55; HM .565, .616. Local's own is .20, .50.
        ("global", "To 60 % global accuracy:", "5"),
        ("i_local", "To 60 % local figure:", "— (not in 10 rounds)"),
        ("global_local_hm", "To 60 % HM:", "10"),
    ):
        table = text.replace('"global_local_hm"', f'"{columns}"')
        scores.write_text(table[: table.index("[tables.table3.settings.five.paper]")])
        call(scores, f"table3 --name {columns}")
        assert heading in markdown(columns)
        assert rows(markdown(columns), "FedProx")[1][1] == rounds
        assert rows(markdown(columns), "Local")[1][1] == "— (not in 10 rounds)"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"global_local_hm"', '"hm"', "columns = 'hm' is not usable: allowed: accuracy, weighted, global, i_local"),
        (
            "{ local = 61.5, hm = 33 }",
            "{ i_local = 61.5 }",
            "paper.local = 'i_local' is not usable: allowed: global, lo",
        ),
        ("target = 60.0\n[tables.table3.", "paper_std.fedavg = 1.5\n[tables.table3.", "paper_std = 'fedavg'"),
    ],
)
def test_columns_and_figures_that_there_are_not_are_errors(scores, old, new, message):
    text = scores.read_text()
    assert text.count(old) == 1
    read_table(scores, "table3")
    scores.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_table(scores, "table3")


def test_a_stopped_call_keeps_its_finished_cells_and_goes_on(paper, fake, monkeypatch):
    def stops(config):
        if len(fake.configs) == 2:
            raise KeyboardInterrupt
        return fake(config)

    monkeypatch.setattr(fill, "run_configs", each_by(stops))
    with pytest.raises(KeyboardInterrupt):
        call(paper, "table1 --settings three")
    assert list(cells()) == [("three", "local", 0), ("three", "fedavg", 0)]
    monkeypatch.setattr(fill, "run_configs", each_by(fake))
    call(paper, "table1 --settings three")
    assert fake.asked() == [("local", 3, 0), ("fedavg", 3, 0), ("fedprox", 3, 0)]
    assert sorted(path.name for path in store.RESULTS.iterdir()) == ["toy_table1.json", "toy_table1.md"]


def test_what_another_call_fills_in_meanwhile_is_kept(paper, fake, monkeypatch):
    def during(config):
        if config.method["name"] == "fedavg":
            monkeypatch.setattr(fill, "run_configs", each_by(fake))
            call(paper, "table1 --settings three --methods fedprox")
        return fake(config)

    monkeypatch.setattr(fill, "run_configs", each_by(during))
    call(paper, "table1 --settings three --methods local,fedavg")
    assert list(cells()) == [("three", "local", 0), ("three", "fedprox", 0), ("three", "fedavg", 0)]
    assert all(rows(markdown(), label) for label in ("Local", "FedProx", "FedAvg"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_one_call_at_a_time_writes(paper):
    done, begun = [], threading.Event()

    def other():
        begun.set()
        with alone():
            done.append("other")

    thread = threading.Thread(target=other)
    with alone():
        thread.start()
        begun.wait()
        thread.join(timeout=0.2)
        done.append("first")
    thread.join()
    assert done == ["first", "other"]


def test_the_file_stays_as_it_was_when_writing_fails(paper, fake, monkeypatch):
    call(paper, "table1 --settings three --methods local")
    before = (store.RESULTS / "toy_table1.json").read_bytes()
    whole = Path.write_text

    def half(path, text, encoding):
        whole(path, text[: len(text) // 2], encoding=encoding)
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="disk full"):
            call(paper, "table1 --settings three")
    assert (store.RESULTS / "toy_table1.json").read_bytes() == before
    call(paper, "table1 --settings three")
    assert len(cells()) == 3


def test_missing_data_is_reported_and_the_rest_is_run(paper, fake, monkeypatch, capsys):
    def simulate(config):
        if config.method["name"] == "fedavg":
            raise ConfigError("data.source", "npz:no.npz", "no such file")
        return fake(config)

    monkeypatch.setattr(fill, "run_configs", each_by(simulate))
    with pytest.raises(SystemExit) as caught:
        call(paper, "table1 --settings three")
    assert caught.value.code == 1
    assert list(cells()) == [("three", "local", 0), ("three", "fedprox", 0)]
    assert rows(markdown(), "FedAvg") == [["FedAvg", "60.5", *"———————————"], ["FedAvg", *"——————"]]
    reason = "data.source = 'npz:no.npz' is not usable: no such file"
    assert f"Missing: FedAvg (0): {reason}." in markdown()
    assert f"three fedavg seed 0: missing, {reason}" in capsys.readouterr().err


def test_a_table_of_nothing_but_missing_cells_is_still_written(paper):
    with pytest.raises(SystemExit) as caught:
        call(paper, "table1 --set data.source=npz:/no/such/file.npz")
    assert caught.value.code == 1
    assert markdown().count("Missing: Local (0), FedAvg (0), FedProx (0): data.source = ") == 2
    assert not (store.RESULTS / "toy_table1.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("table9", "TABLE = 'table9' is not usable: allowed: table1, table2"),
        ("table1 --settings three,five", "--settings = 'five' is not usable: allowed: three, four"),
        ("table1 --methods fedper", "--methods = 'fedper' is not usable: allowed: local, fedavg, fedprox"),
        ("table2 --methods local", "--methods = 'local' is not usable: allowed: mild"),
        ("table1 --reference best", "--reference = 'best' is not usable: allowed: local, fedavg, fedprox"),
        ("table1 --seeds 0-2", "argument --seeds: '0-2' is not usable: whole numbers, separated by commas"),
        ("table1 --set run.seed=5", "override = 'run.seed=5' is not usable: --seeds instead"),
        (
            "table1 --set training.rounds=0",
            "training.rounds = 0 is not usable: input should be greater than or equal to 1",
        ),
    ],
)
def test_unknown_names_are_one_line_that_lists_what_is_allowed(paper, fake, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        call(paper, arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {message}\n")
    assert not fake.configs
    assert not store.RESULTS.exists()


def test_results_of_another_table_are_not_overwritten(paper, fake, capsys):
    call(paper, "table1 --settings three --methods local")
    with pytest.raises(SystemExit):
        call(paper, "table2 --name toy_table1")
    assert "holds table1 of Toy" in capsys.readouterr().err
    assert list(cells()) == [("three", "local", 0)]


@pytest.mark.parametrize("what", ["paper = { local = 50 }", "paper_std.local = 1.5", "row_overrides.local = []"])
def test_what_belongs_to_no_row_is_an_error(paper, what):
    text = paper.read_text().replace("paper = { local = 50 }", what)
    paper.write_text(text)
    assert "local" in read_table(paper, "table1").rows
    paper.write_text(text.replace(what, what.replace("local", "locally")))
    with pytest.raises(ConfigError, match="locally"):
        read_table(paper, "table1")


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_every_cell_of_every_paper_has_a_config_of_its_own(path):
    used, paper = set(), tomllib.loads(path.read_text(encoding="utf-8"))
    for name in paper["tables"]:
        table = read_table(path, name)
        used.add(ROOT / table.config)
        assert {row.point for row in table.rows.values()} <= {"pre", "post"}, name
        options = command.parser(path).parse_args([name])
        cells: dict[tuple, tuple] = {}
        for cell in itertools.product(table.settings, table.rows, [0]):
            config = load_config(ROOT / table.config, cell_overrides(table, cell, options))
            # One run may stand for two rows at two points: pFedCSPC's FedAvg with and without local adaptation.
            twin = cells.setdefault((config.model_dump_json(), table.rows[cell[1]].point), cell)
            # Rows of FedeCouple's Table IX are the same run by our reading, as its comment says. A control is one run
            # for settings that differ in the method's options.
            same = twin == cell or (path.stem, name) == ("fedecouple", "table9")
            assert same or twin[1] == cell[1] in paper.get("controls", {}), (name, twin, cell)
    # A config per experiment: none is left over.
    assert used >= set((ROOT / "configs" / path.stem).glob("*.toml"))


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_pixels_are_normalised_by_the_constants_of_their_own_data_set(path):
    """A setting with another source keeps the constants of its table's config unless it overrides them, too."""
    red = {0.4914: "cifar10[._]", 0.5071: "cifar100", 0.4789: "cinic10", 0.1307: "fashion_mnist|emnist"}
    red |= {0.485: "tiny_imagenet|vireofood", 0.5: ""}
    for name in tomllib.loads(path.read_text(encoding="utf-8"))["tables"]:
        table = read_table(path, name)
        options = command.parser(path).parse_args([name])
        for setting in table.settings:
            cell = setting, next(iter(table.rows)), 0
            data = load_config(ROOT / table.config, cell_overrides(table, cell, options)).data
            assert re.search(red[np.ravel(data.mean)[0]], data.source), (name, setting)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_results_so_far_can_be_shown(path):
    held = json.loads(path.read_text(encoding="utf-8"))
    papers = {tomllib.loads(paper.read_text(encoding="utf-8"))["paper"]: paper for paper in PAPERS}
    table = read_table(papers[held["paper"]], held["table"])
    found = load_cells(path, table)
    text = page.markdown(table, found, {}, list(table.rows)[-1])
    assert found
    for setting, row, _ in found:
        assert re.search(rf"^## .*{re.escape(table.settings[setting].label)}$", text, re.MULTILINE)
        assert rows(text, table.rows[row].label)


def test_a_real_run_fills_the_table(paper):
    options = "table1 --settings three --methods local,fedavg --seeds 0,1 --set run.diagnostics=true"
    call(paper, options)
    cell = cells()["three", "fedavg", 1]
    assert cell["curve"]["round"] == [1, 2]
    noted = cell["curve"]["diagnostics"]
    assert [len(values) for values in noted.values()] == [2]
    assert {name: values[-1] for name, values in noted.items()} == pytest.approx(cell["diagnostics"], abs=1e-6)
    assert cell["curve"]["pre"][-1] == pytest.approx(cell["personal"]["pre"]["last"], abs=1e-6)
    assert cell["curve"]["megabytes"][-1] == pytest.approx(cell["megabytes_total"], abs=1e-3)
    assert 0 < cell["timing"]["compile_seconds"] < cell["curve"]["seconds"][0] < cell["curve"]["seconds"][1]
    assert cell["global"] == pytest.approx(cell["personal"]["pre"]["weighted_last"], abs=1e-6)
    assert [cells()["three", name, 1]["gradient_passes"] for name in ("local", "fedavg")] == [
        cell["config"]["training"]["epochs"]
    ] * 2
    assert cell["curve"]["global"][-1] == pytest.approx(cell["global"], abs=1e-6)
    for point, name in itertools.product(("pre", "post"), ("i_local", "hm")):
        curve = curve_of(cell, name.removeprefix("i_"), point)
        assert curve[-1] == pytest.approx(cell["personal"][point][f"{name}_last"], abs=2e-6)
    assert cells()["three", "local", 1]["curve"]["global"] == [None, None]
    assert {"last", "best", "mean_last_10", "std_clients", "worst_10_percent"} <= cell["personal"]["post"].keys()
    for point in ("pre", "post"):
        table = read_table(paper, "table1")
        last, best = (figures(cell, point, replace(table, headline=headline)) for headline in ("last", "best"))
        assert best["accuracy"] == cell["personal"][point]["best"] >= last["accuracy"] == last[point]
        if cell["personal"][point]["best_round"] == 2:
            assert best == last
    shown = np.mean([cells()["three", "local", seed]["personal"]["post"]["last"] for seed in (0, 1)])
    assert f"{100 * shown:.2f} ± " in rows(markdown(), "Local")[0][2]
    before = (store.RESULTS / "toy_table1.json").read_bytes()
    call(paper, options)
    assert (store.RESULTS / "toy_table1.json").read_bytes() == before


def test_a_script_starts():
    script = ROOT / "benchmarks" / "fedecouple_tables.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--reference ROW" in done.stdout


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_every_paper_has_a_script(path, monkeypatch, capsys):
    script = ROOT / "benchmarks" / f"{path.stem}_tables.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(script), run_name="__main__")
    assert caught.value.code == 0
    assert path.name in capsys.readouterr().out


def test_runs_can_be_kept_in_directories_with_checkpoints(paper, fake, monkeypatch, tmp_path):
    """The directory is none of a cell's config: a later call without it finds the cell."""
    seen = []

    def simulate(config):
        seen.append((config.run.out, config.run.checkpoint_every))
        return fake(config)

    monkeypatch.setattr(fill, "run_configs", each_by(simulate))
    call(paper, f"table1 --settings three --methods local --work {tmp_path} --checkpoint-every 4")
    ((out, every),) = seen
    assert (Path(out).parent, every) == (tmp_path, 4)
    assert Path(out).name.startswith("toy_table1_three_local_0_")
    assert cells()["three", "local", 0]["config"]["run"]["out"] is None
    call(paper, "table1 --settings three --methods local")
    assert len(seen) == 1
    call(paper, f"table1 --settings three --methods local --rounds 20 --work {tmp_path}")
    call(paper, f"table1 --settings three --methods local --rounds 20 --set training.lr=0.5 --work {tmp_path}")
    assert seen[1][0] == out != seen[2][0]  # more rounds go on from what there is, another rate does not


def test_a_run_that_was_complete_before_its_cell_was_written_is_not_run_again(paper, tmp_path, monkeypatch):
    arguments = f"table1 --settings three --methods local --seeds 0,1 --work {tmp_path / 'kept'}"
    call(paper, arguments)
    before, path = cells(), store.RESULTS / "toy_table1.json"
    path.unlink()
    monkeypatch.setattr(fill, "run_configs", lambda configs: pytest.fail(str(configs)) if configs else [])
    call(paper, arguments)
    assert cells() == before
