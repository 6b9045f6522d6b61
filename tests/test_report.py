"""A report of runs that were written by hand: its numbers are the files', and it is one page that loads nothing."""

import csv
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import flax.linen as nn
import numpy as np
import pytest
from pandas.testing import assert_frame_equal
from typer.testing import CliRunner

from fedjax_pfl import (
    Config,
    ConfigError,
    Result,
    Sweep,
    compare,
    register_method,
    register_model,
    register_partition,
    sweep,
)
from fedjax_pfl.cli.commands import app
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.rows import Holdings, Split
from fedjax_pfl.experiment.gathered import differing_values, gather
from fedjax_pfl.experiment.headline import run_in_short
from fedjax_pfl.experiment.html import runs_html
from fedjax_pfl.experiment.record import RunDirectory
from fedjax_pfl.experiment.registry import put
from fedjax_pfl.experiment.report import report, report_html
from fedjax_pfl.experiment.summary import summary_of
from fedjax_pfl.methods import METHODS
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models import MODELS

NOTHING = Holdings([Split(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))], np.zeros(0, int), "")
CLIENTS, CLASSES = 3, 4
MEASURES = "weighted", "std_clients", "worst_10_percent", "macro_f1", "macro_f1_union", "loss", "i_local", "hm"
COSTS = {
    "traffic": {
        "floats_up_per_client_round": 7,
        "floats_down_per_client_round": 9,
        "megabytes_total": 4.5,
        "megabytes_dense": 6.25,
    },
    "timing": {"compile_seconds": 1.5, "seconds_per_round": 0.125, "total_seconds": 2.5},
    "environment": {"jax": "0.0.7", "platform": "abacus", "device_count": 3},
}


def config(method="fedavg", seed=0, source="digits", **training):
    return Config(
        data={"source": source, "clients": CLIENTS},
        model={"name": "mlp", "hidden": 8},
        method={"name": method} if isinstance(method, str) else method,
        training={"rounds": 4, "lr": 0.25, **training},
        run={"seed": seed},
    )


def line(number, start, **more):
    """An evaluated round: PRE is `start` plus a tenth per round, POST a little more; everything else differs, too."""
    of = {
        point: {"accuracy": start + 0.1 * number + more_there} | {name: 0.01 * at for at, name in enumerate(MEASURES)}
        for point, more_there in (("pre", 0.0), ("post", 0.03125))
    }
    shared = {"global": None, "global_macro_f1": None, "global_macro_f1_union": None}
    said = {"diagnostics": {"update_cosine": 0.5 - 0.01 * number}}
    cost = {"megabytes": 1.125 * number, "seconds": 2.0 + number}
    return {"round": number, "train_loss": 1 / number, **of, **shared, **said, **cost, **more}


def write(folder, given=None, start=0.1, rounds=4, ended=True, data=None):
    """A run directory: of a run that has ended, or of one that goes on; `data` is the fingerprint of its samples."""
    given = config() if given is None else given
    counts = [[client, 0, 10 * client, 1] for client in range(1, CLIENTS + 1)]
    partition = {
        "hash": f"hash{given.run.seed}",
        "sizes": [sum(row) for row in counts],
        "class_counts": counts,
        "n_train": [8, 16, 24],
        "n_test": [4, 7, 10],
        "notes": ["a <note>"],
        **({} if data is None else {"data": data}),
    }
    place = RunDirectory(folder)
    place.begin(given.to_toml(), partition, NOTHING)
    lines = [line(number, start) for number in range(1, rounds + 1)]
    clients = {
        "client": np.arange(CLIENTS),
        "pre_accuracy": np.array([start, start + 0.25, np.nan]),
        "post_accuracy": np.array([start + 0.5, start + 0.125, start]),
    }
    for of in lines:
        place.append(of, {} if ended else {"round": np.full(CLIENTS, of["round"]), **clients})
    if ended:
        identity = {
            "method": given.method["name"],
            "headline": "pre",
            "dataset": given.data.source,
            "clients": CLIENTS,
            "rounds": rounds,
            "seed": given.run.seed,
            "evaluated_on": "test",
        }
        summary = summary_of(lines, identity, COSTS, new=0)
        place.finish(clients, {"client": np.arange(CLIENTS)}, {}, summary, None)
    return folder


class Page(HTMLParser):
    """Reads a page as strictly as it can: every tag is closed, in order, no id comes twice, and nothing is loaded."""

    VOID = "meta", "link", "input"

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.links, self.tags = [], [], [], []
        self.tables, self.scripts, self.styles, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)
        assert {link.removeprefix("#") for link in self.links} <= set(self.ids)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        assert tag not in ("img", "iframe", "object", "embed", "base", "form")
        assert "src" not in given
        assert not any(name.startswith("on") for name in given)
        if tag == "link":
            assert given["href"] == "data:,"
        elif "href" in given:
            assert given["href"].startswith("#")
            self.links.append(given["href"])
        self.ids += [given["id"]] if "id" in given else []
        self.tags.append((tag, given))
        if tag in self.VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("script", "style"):
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] == ["style"]:
            self.styles[-1] += data
        else:
            self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def numbers(self):
        return json.loads(self.scripts[0])

    def table(self, *first):
        """The rows below the table's headings, of which these are the first."""
        return next(rows for heading, *rows in self.tables if heading[: len(first)] == list(first))


@pytest.mark.parametrize(
    "broken",
    ["<b><i></b></i>", "<b>", '<p id="a"></p><p id="a"></p>', '<a href="#b">x</a>', '<script src="x"></script>'],
)
def test_the_reader_of_pages_finds_what_is_wrong(broken):
    with pytest.raises(AssertionError):
        Page(broken)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two methods with two seeds each, as a comparison leaves them, but for its table."""
    home = tmp_path_factory.mktemp("runs")
    for method, start in (("fedavg", 0.125), ("fedprox", 0.25)):
        for seed in (0, 1):
            write(home / f"{method}-seed{seed}", config(method, seed), start + 0.0625 * seed)
    return home


@pytest.fixture(scope="module")
def page(folder):
    return Page(report_html([folder]))


def lines_of(run):
    return [json.loads(text) for text in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_page_stands_alone(page):
    assert len(page.scripts) == 2
    assert len(page.styles) == 1
    assert [f"#{name}" for name in ("runs", "results", "curves", "clients")] == page.links[:4]
    for text in (*page.scripts[1:], *page.styles):
        assert not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|fetch\(|XMLHttp|WebSocket|import\(", text
        )
    policy = next(given["content"] for tag, given in page.tags if given.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_curves_are_drawn_from_the_numbers_of_the_files(folder, page):
    assert len(page.numbers["runs"]) == 4
    for run, there in zip(page.numbers["runs"], sorted(folder.iterdir()), strict=True):
        lines = lines_of(there)
        for across in ("round", "seconds", "megabytes"):
            assert run[across] == [of[across] for of in lines]
        assert run["values"]["train_loss"] == [of["train_loss"] for of in lines]
        assert run["values"]["diagnostics.update_cosine"] == [of["diagnostics"]["update_cosine"] for of in lines]
        for point in ("pre", "post"):
            for measure in ("accuracy", *MEASURES):
                assert run["values"][f"{point}.{measure}"] == [of[point][measure] for of in lines]
    assert "global" not in page.numbers["metrics"]  # no run has one
    assert page.numbers["metrics"]["pre.accuracy"]["scale"] == 100
    assert page.numbers["metrics"]["pre.loss"]["scale"] == 1
    options = [given["value"] for tag, given in page.tags if tag == "option"]
    metrics = list(page.numbers["metrics"])
    assert options == [*metrics, "", *metrics, "round", "seconds", "megabytes"]


def test_runs_that_differ_in_the_seed_alone_are_one_line(page):
    names = [run["name"] for run in page.numbers["runs"]]
    together = {of["name"]: [names[at] for at in of["runs"]] for of in page.numbers["combinations"]}
    assert together == {name: [f"{name}, seed 0", f"{name}, seed 1"] for name in ("fedavg", "fedprox")}
    assert page.numbers["shown"] == ["pre.accuracy"]


def test_clients_are_those_of_the_files(folder, page):
    strips, places = page.numbers["strips"], [(method, point) for method in (0, 1) for point in ("pre", "post")]
    assert [(strip["combination"], strip["point"].lower()) for strip in strips] == places
    samples = [4, 7, 10]
    for strip, (at, point) in zip(strips, places, strict=True):
        method = ("fedavg", "fedprox")[at]
        wanted, means = [], []
        for seed in (0, 1):
            run = folder / f"{method}-seed{seed}"
            rows = list(csv.DictReader((run / "clients.csv").read_text(encoding="utf-8").splitlines()))
            number = sorted(folder.iterdir()).index(run)
            for row in rows:
                if row[f"{point}_accuracy"] != "nan":
                    client = int(row["client"])
                    wanted.append([float(row[f"{point}_accuracy"]), number, client, samples[client], 0])
            means.append(lines_of(run)[-1][point]["accuracy"])
        assert strip["dots"] == sorted(wanted)
        assert strip["clients"] == len(wanted) == (4 if point == "pre" else 6)
        assert strip["mean"] == sum(means) / 2


def test_of_many_clients_dots_are_spread_evenly_over_the_order(tmp_path):
    run = write(tmp_path / "run")
    rows = ["client,pre_accuracy,post_accuracy", *(f"{at % 3},{at / 1000},0" for at in range(1000))]
    (run / "clients.csv").write_text("\n".join(rows), encoding="utf-8")
    strip = Page(report_html([run])).numbers["strips"][0]
    shown = [dot[0] for dot in strip["dots"]]
    assert strip["clients"] == 1000
    assert len(shown) == 400
    assert (shown[0], shown[-1]) == (0, 0.999)
    assert np.diff(shown).max() < 0.0035


def test_the_tables_say_what_was_run_and_what_came_of_it(folder, page):
    rows = page.table("method.name", "run.seed")
    assert [row[:-1] for row in rows] == [
        ["fedavg", "0", "52.50", "55.62", "ended after 4 rounds"],
        ["fedavg", "1", "58.75", "61.88", "ended after 4 rounds"],
        ["fedprox", "0", "65.00", "68.12", "ended after 4 rounds"],
        ["fedprox", "1", "71.25", "74.38", "ended after 4 rounds"],
    ]
    # What only one of the methods knows, once for all of its runs.
    assert page.text.count("fedprox: method.mu = 0.01") == page.text.count("method.mu") == 1
    assert [row[-1] for row in rows] == [str(run) for run in sorted(folder.iterdir())]
    # Sample standard deviations of two values 6.25 apart; the differences of pairs are all 12.5.
    results = page.table("method", "seeds")
    assert [row[:3] for row in results] == [["fedavg", "2", "55.62 ± 4.42 *"], ["fedprox", "2", "68.12 ± 4.42 *"]]
    assert results[1][4].startswith("+12.50")
    assert page.table("run", "MB so far") == [
        [name, "4.5", "6.2", "7", "9", "0.125", "1.5", "6.0"] for name in ("fedavg", "fedprox")
    ]
    assert page.table("run", "update_cosine") == [["fedavg", "0.4600"], ["fedprox", "0.4600"]]
    assert page.table("jax") == [["0.0.7", "abacus", "3"]]


def test_the_config_that_runs_share_is_without_what_differs_and_bold_where_it_is_not_the_default(folder):
    text = report_html([folder])
    changed = f'data.source = "digits"; data.clients = {CLIENTS}; model.name = "mlp"; model.hidden = 8; '
    assert f"{changed}training.rounds = 4; training.lr = 0.25" in Page(text).text
    assert "<strong>lr = 0.25</strong>" in text
    assert "<strong>hidden = 8</strong>" in text
    assert "momentum = 0.0" in text
    assert "seed = 0" not in text
    assert "[method]" not in text


def test_partitions_are_shown_once_for_the_runs_that_share_them(page):
    heat = [rows for heading, *rows in page.tables if heading[:2] == ["client", "size"]]
    assert len(heat) == 2  # of seeds 0 and 1
    assert heat[0][2] == ["2", "34", "24", "10", "3", "·", "30", "1"]
    assert "fedavg, seed 0; fedprox, seed 0" in page.text
    assert page.text.count("a <note>") == 2


def test_one_run_has_its_own_headline_and_both_points_as_curves(folder):
    page = Page(report_html([folder / "fedprox-seed1"]))
    assert [row[:2] for row in page.table("", "last")] == [["PRE *", "71.25"], ["POST", "74.38"]]
    assert page.numbers["shown"] == ["pre.accuracy", "post.accuracy"]
    assert page.numbers["combinations"] == [{"name": "fedprox", "runs": [0]}]
    assert "fedprox on digits, 3 clients, 4 rounds, seed 1" in page.text
    assert "4.5 MB exchanged" in page.text


def judged(home, run, headline):
    path = home / run / "summary.json"
    summary = {**json.loads(path.read_text(encoding="utf-8")), "headline": headline}
    path.write_text(json.dumps(summary), encoding="utf-8")


def test_runs_that_are_all_judged_after_training_are_shown_and_compared_there(folder, tmp_path):
    home = shutil.copytree(folder, tmp_path / "runs")
    for run in folder.iterdir():
        judged(home, run.name, "post")
    page = Page(report_html([home]))
    assert page.numbers["shown"] == ["post.accuracy"]
    assert "Difference: POST minus that of fedavg" in page.text
    assert Page(report_html([home / "fedavg-seed0"])).numbers["shown"] == ["post.accuracy", "pre.accuracy"]
    judged(home, "fedprox-seed1", "pre")
    page = Page(report_html([home]))
    assert page.numbers["shown"] == ["pre.accuracy"]
    assert "Difference: PRE minus that of fedavg" in page.text


def test_the_title_says_what_runs_share(folder, tmp_path):
    assert "4 runs: digits, dirichlet, mlp" in Page(report_html([folder])).text
    home = shutil.copytree(folder, tmp_path / "runs")
    write(home / "other", config(source="npz:x"))
    assert "5 runs: dirichlet, mlp" in Page(report_html([home])).text


def test_runs_from_several_machines_are_named_beside_theirs(folder, tmp_path):
    home = shutil.copytree(folder, tmp_path / "runs")
    path = home / "fedprox-seed0" / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**summary, "environment": {"jax": "0.0.8", "cpu": "new"}}), encoding="utf-8")
    page = Page(report_html([home]))
    assert page.table("jax") == [
        ["0.0.7", "abacus", "3", "—", "fedavg, seed 0; fedavg, seed 1; fedprox, seed 1"],
        ["0.0.8", "—", "—", "new", "fedprox, seed 0"],
    ]


def test_clients_that_are_scored_on_validation_samples_have_as_many_of_these(tmp_path):
    run = write(tmp_path / "run", config().replace({"data.validation_share": 0.2, "data.evaluate_on": "validation"}))
    partition = json.loads((run / "partition.json").read_text(encoding="utf-8"))
    (run / "partition.json").write_text(json.dumps({**partition, "n_validation": [2, 3, 5]}), encoding="utf-8")
    dots = Page(report_html([run])).numbers["strips"][1]["dots"]
    assert {client: samples for _, _, client, samples, _ in dots} == {0: 2, 1: 3, 2: 5}


def test_of_many_partitions_the_first_six_are_shown(tmp_path):
    for seed in range(8):
        write(tmp_path / str(seed), config(seed=seed), rounds=1, ended=False)
    page = Page(report_html([tmp_path]))
    assert len([rows for heading, *rows in page.tables if heading[:2] == ["client", "size"]]) == 6
    assert "2 more partitions are not shown" in page.text


COMPARED = """# digits, dirichlet, mlp

The *legend*.

| method | seeds | PRE |
| --- | ---: | ---: |
| fedprox | 2 | **12.34 ± 5.67** |
| fedavg | 2 | 1.00 ± 0.10 |

**Failed**: local, seed 0: it <broke>
"""


@pytest.mark.parametrize("name", ["comparison.md", "sweep.md"])
def test_the_table_of_a_comparison_or_sweep_is_the_one_that_it_wrote(folder, tmp_path, name):
    home = shutil.copytree(folder, tmp_path / "runs")
    (home / name).write_text(COMPARED, encoding="utf-8")
    page = Page(report_html([home]))
    assert page.table("method", "seeds") == [["fedprox", "2", "12.34 ± 5.67"], ["fedavg", "2", "1.00 ± 0.10"]]
    assert "Failed: local, seed 0: it <broke>" in page.text
    # Lines come in the order of its rows, whatever their folders are called.
    assert [of["name"] for of in page.numbers["combinations"]] == ["fedprox", "fedavg"]
    # Of some of its runs, or of others besides, it is not the table.
    alone = Page(report_html([home / "fedavg-seed0", home / "fedavg-seed1"]))
    assert alone.table("run", "seeds")[0][:3] == ["all", "2", "55.62 ± 4.42 *"]


def test_a_table_that_was_written_for_some_of_the_methods_is_not_that_of_all(folder, tmp_path):
    home = shutil.copytree(folder, tmp_path / "runs")
    of_one = "\n".join(line for line in COMPARED.splitlines() if not line.startswith("| fedavg"))
    failed = COMPARED.replace("| fedavg | 2 | 1.00 ± 0.10 |", "| local | 0 | — |")
    of_one_seed = COMPARED.replace("| 2 |", "| 1 |")
    for written in (of_one, failed, of_one_seed):
        assert written != COMPARED
        (home / "comparison.md").write_text(written, encoding="utf-8")
        table = Page(report_html([home])).table("method", "seeds")
        assert [row[:2] for row in table] == [["fedprox", "2"], ["fedavg", "2"]]
        assert "12.34" not in str(table)


def test_a_table_is_not_shown_for_a_run_that_has_changed_since(folder, tmp_path):
    home = shutil.copytree(folder, tmp_path / "runs")
    (home / "comparison.md").write_text(COMPARED, encoding="utf-8")
    assert "12.34" in str(Page(report_html([home])).table("method", "seeds"))
    summary, written = home / "fedavg-seed0" / "summary.json", (home / "comparison.md").stat().st_mtime_ns
    os.utime(summary, ns=(written + 1, written + 1))
    table = Page(report_html([home])).table("method", "seeds")
    assert [row[:3] for row in table] == [["fedprox", "2", "68.12 ± 4.42 *"], ["fedavg", "2", "55.62 ± 4.42 *"]]
    os.utime(summary, ns=(written, written))
    assert "12.34" in str(Page(report_html([home])).table("method", "seeds"))  # as where a clock has coarse steps
    summary.unlink()  # it goes on
    table = Page(report_html([home])).table("method", "seeds")
    assert [row[:3] for row in table] == [["fedprox", "2", "68.12 ± 4.42 *"], ["fedavg", "1", "58.75 *"]]


def test_only_the_first_table_of_a_text_says_whether_it_is_current(folder, tmp_path):
    home = shutil.copytree(folder, tmp_path / "runs")
    (home / "comparison.md").write_text(f"{COMPARED}\n| mine | of it |\n| --- | --- |\n| a | b |\n", encoding="utf-8")
    page = Page(report_html([home]))
    assert [row[2] for row in page.table("method", "seeds")] == ["12.34 ± 5.67", "1.00 ± 0.10"]
    assert page.table("mine") == [["a", "b"]]


@pytest.mark.parametrize("name", ["fedprox | b", "fedprox | 2 | x", "fedprox |", "2"])
def test_a_table_whose_rows_cannot_be_read_is_not_current(name, folder, tmp_path):
    """Bars in names have once been written as they are."""
    home = shutil.copytree(folder, tmp_path / "runs")
    row = f"| {name} |" if name == "2" else f"| {name} | 2 | 12.34 |"
    text = COMPARED.replace("| fedprox | 2 | **12.34 ± 5.67** |", row)
    (home / "sweep.md").write_text(text.replace("| fedavg | 2 | 1.00 ± 0.10 |\n", ""), encoding="utf-8")
    table = Page(report_html([home])).table("method", "seeds")
    assert {row[0]: row[2] for row in table} == {"fedprox": "68.12 ± 4.42 *", "fedavg": "55.62 ± 4.42 *"}


VARIANTS = {"fedprox": {}, "fast": {"method": "fedavg", "training.lr": 0.5}, "fedavg": {}}


@pytest.fixture
def compared(tmp_path):
    """A comparison of runs that are there, so that none is run: its folder, and what `compare` gave."""
    configs = {"fedprox": config("fedprox"), "fast": config(lr=0.5), "fedavg": config()}
    for at, (name, given) in enumerate(configs.items()):
        for seed in (0, 1):
            out = tmp_path / "table" / f"{name}-seed{seed}"
            write(out, given.replace("run.seed", seed), 0.125 * (1 + at) + 0.0625 * seed * at)
    options = {"seeds": [0, 1], "baseline": "fast", "point": "post"}
    return tmp_path / "table", compare(config(), VARIANTS, out=tmp_path / "table", **options)


def test_the_folder_of_a_comparison_has_its_names_order_baseline_and_point(compared):
    home, found = compared
    loaded = Sweep.load(home)
    assert [cell.values for cell in loaded.cells] == [cell.values for cell in found.cells]
    assert (loaded.baseline, loaded.point) == ({"method.name": "fast"}, "post")
    assert found.markdown().endswith(loaded.markdown().partition("\n\n")[2].replace("| run ", "| method "))
    chosen = Sweep.load(home, baseline={"method.name": "fedavg"}, point="pre")
    assert (chosen.baseline, chosen.point) == ({"method.name": "fedavg"}, "pre")
    several = Sweep.load(home, write(home.parent / "other", config("local")))  # of which the table is not
    assert (len(several.cells), several.point) == (7, "pre")
    page = Page(report_html([home]))
    assert [of["name"] for of in page.numbers["combinations"]] == list(VARIANTS)
    assert [row[0] for row in page.table("run", "MB so far")] == list(VARIANTS)
    text = (home / "comparison.md").read_text(encoding="utf-8")
    os.utime(home / "comparison.md", ns=(0, 0))  # the report makes the table itself
    made = Page(report_html([home])).table("method", "seeds")
    assert made == page.table("method", "seeds")
    assert f"| {' | '.join(made[0])} |" in text.replace("**", "")


def test_names_of_a_comparison_are_not_those_of_runs_that_have_changed_or_are_others(compared):
    home, _ = compared
    shutil.rmtree(home / "fast-seed0")
    write(home / "fast-seed0", config(lr=0.5, rounds=5), 0.25, rounds=5)
    fields = ["method.name", "training.rounds", "training.lr", "run.seed"]
    values = {tuple(cell.values[field] for field in fields) for cell in Sweep.load(home).cells}
    assert ("fedavg", 5, 0.5, 0) in values
    assert ("fedavg", 4, 0.5, 1) in values
    shutil.rmtree(home / "fast-seed0")
    assert len(Sweep.load(home).cells) == 5
    assert Sweep.load(home).cells[2].values == {"method.name": "fast", "run.seed": 1}
    write(home / "more", config(lr=0.125))
    assert {"method.name": "fedavg", "training.lr": 0.125, "run.seed": 0} in [
        cell.values for cell in Sweep.load(home).cells
    ]
    (home / "comparison.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"record = '.*comparison\.json' is not usable: as it was written; without"):
        Sweep.load(home)


@pytest.fixture
def elsewhere(tmp_path):
    """A comparison of FedAvg with two variants of a method of one's own, on a model and a partition of one's own.

    Its folder, what is made of it where the parts are registered, and how to forget them.
    """

    @register_method("own_method")
    def own_method(
        model, train, *, mu: float = 0.5, cap: float | None = None, low: float | None = 0.25, of: tuple[int, ...] = (1,)
    ):
        return fedavg(model, train)

    @register_model("own_model")
    class Net(nn.Module):
        width: int = 4

        @nn.compact
        def __call__(self, x):
            return nn.Dense(CLASSES)(nn.Dense(self.width)(x.reshape(len(x), -1)))

    @register_partition("own_partition")
    def own_partition(labels, clients, seed, size, *, share: float = 0.5):
        return np.array_split(np.arange(len(labels)), clients)

    def forget():
        put(METHODS, "own_method", None)
        put(MODELS, "own_model", None)
        put(PARTITIONS, "own_partition", None)

    home = tmp_path / "table"
    shared = config().replace({"model.name": "own_model", "data.partition.kind": "own_partition"})
    variants = {"own_method": {}, "fedavg": {}, "capped": {"method": "own_method", "cap": 0.5, "low": None}}
    for at, (name, changes) in enumerate(variants.items()):
        options = {f"method.{option}": value for option, value in changes.items() if option != "method"}
        given = shared.replace({"method.name": changes.get("method", name), **options})
        for seed in (0, 1):
            write(home / f"{name}-seed{seed}", given.replace("run.seed", seed), 0.125 * (1 + at) + 0.0625 * seed * at)
    compare(shared, variants, seeds=[0, 1], baseline="fedavg", point="post", out=home)
    yield home, Sweep.load(home), Page(report_html([home])), forget
    forget()


def lines_drawn(found):
    return [(line.get_label(), line.get_xydata().tolist()) for line in found.plot().get_lines()]


def test_recorded_runs_are_read_where_their_parts_are_not_registered(elsewhere, tmp_path):
    home, there, page_there, forget = elsewhere
    assert (there.baseline, there.point) == ({"method.name": "fedavg"}, "post")
    assert [cell.values["method.name"] for cell in there.cells[::2]] == ["own_method", "fedavg", "capped"]
    forget()
    here = Sweep.load(home)
    assert (here.baseline, here.point) == (there.baseline, there.point)
    assert here.markdown() == there.markdown()
    assert here.to_latex() == there.to_latex()
    assert_frame_equal(here.pivot(), there.pivot())
    assert_frame_equal(here.to_frame(history=True), there.to_frame(history=True))
    assert lines_drawn(here) == lines_drawn(there) != []
    assert repr(here) == repr(there)
    for command, name in (("report", "out.html"), ("plot", "out.svg")):
        said = CliRunner().invoke(app, [command, str(home), "-o", str(tmp_path / name)])
        assert said.output == f"written to {tmp_path / name}\n", said.exception
    page = Page((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert page.numbers == page_there.numbers
    assert page.table("method", "seeds") == page_there.table("method", "seeds")
    unknown = "not registered here, so that its defaults are not known"
    assert f"(model.name: {unknown}) (data.partition.kind: {unknown})" in page.text
    assert unknown not in page_there.text
    assert f"[method] {unknown}" in Page(report_html([home / "capped-seed0"])).text


def test_what_is_run_needs_its_parts(elsewhere):
    home, _, _, forget = elsewhere
    forget()
    run = home / "own_method-seed0"
    read = Sweep.load(run).cells[0].config
    missing = r"is not usable: registered in this process; register yours \(register_method, \.\.\.\) before you load"
    with pytest.raises(
        ConfigError, match=rf"partition\.kind = 'own_partition' {missing} .*own_method-seed0\. .* Tables,"
    ):
        Result.load(run)
    said = CliRunner().invoke(app, ["run", "--resume", str(run), "training.rounds=45"])
    assert re.match(rf"data\.partition\.kind = 'own_partition' {missing}", str(said.exception))
    with pytest.raises(
        ConfigError, match=r"data\.partition\.kind = 'own_partition' is not usable: .*allowed: .*dirichlet"
    ):
        Config(**read.model_dump())
    with pytest.raises(
        ConfigError, match=r"data\.partition\.kind = 'own_partition' is not usable: .*allowed: .*dirichlet"
    ):
        read.replace("training.lr", 0.5)
    with pytest.raises(ConfigError, match=r"methods = 'own_method' is not usable: allowed: .*fedavg"):
        compare(config(), ["fedavg", "own_method"], out=home)


def test_options_that_are_unset_differ_where_their_part_is_not_registered(elsewhere):
    """Seeds of one combination have the same options, and config.toml has none that is unset."""
    home, _, _, forget = elsewhere
    forget()
    assert "cap =" not in (home / "own_method-seed0" / "config.toml").read_text(encoding="utf-8")
    runs = gather([home / "own_method-seed0", home / "capped-seed1"])
    assert differing_values(runs) == [
        {"method.low": 0.25, "run.seed": 0, "method.cap": None},
        {"method.low": "none", "run.seed": 1, "method.cap": 0.5},
    ]


def test_the_folder_of_a_sweep_has_the_names_and_the_order_of_its_grid(tmp_path):
    grid = {
        "training.lr": [0.5, 0.25],
        "model.hidden": [8],
        "method.name": ["fedprox", "fedavg"],
        "fedprox.mu": [0.5],
        "run.seed": [0, 1],
    }
    for method, lr, seed in itertools.product(grid["method.name"], grid["training.lr"], grid["run.seed"]):
        mu = "fedprox.mu=0.5," if method == "fedprox" else ""
        out = tmp_path / f"training.lr={lr},model.hidden=8,method.name={method},{mu}run.seed={seed}"
        write(out, config({"name": method, **({"mu": 0.5} if mu else {})}, seed, lr=lr), 0.25 * lr + 0.1 * seed)
    found = sweep(config(), grid, out=tmp_path)
    loaded = Sweep.load(tmp_path)
    assert len(found.cells) == 8
    assert [cell.values for cell in loaded.cells] == [cell.values for cell in found.cells]
    assert loaded.baseline == found.baseline
    assert loaded.baseline["training.lr"] == 0.5
    assert loaded.markdown() == found.markdown() == (tmp_path / "sweep.md").read_text(encoding="utf-8")


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(tmp_path):
    run = write(tmp_path / "run", rounds=2, ended=False)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"round": 3, "train_lo')  # it is being written
    page = Page(report_html([run]))
    assert "not ended: round 2 of 4" in page.text
    assert "No run has ended yet" in page.text
    assert page.numbers["runs"][0]["round"] == [1, 2]
    # NaN is no JSON: a client without a score has no dot.
    assert [dot[:3] for dot in page.numbers["strips"][0]["dots"]] == [[0.1, 0, 0], [0.35, 0, 1]]
    assert "environment" not in page.ids


@pytest.mark.parametrize("ended", [False, True])
def test_malicious_and_new_clients_are_told_apart_before_a_run_has_ended(ended, tmp_path):
    given = config().replace({"data.new_clients": 0.33, "attack.kind": "sign_flip", "attack.share": 0.5})
    run = write(tmp_path / "run", given, ended=ended)
    partition = json.loads((run / "partition.json").read_text(encoding="utf-8"))
    (run / "partition.json").write_text(json.dumps({**partition, "attackers": [1]}), encoding="utf-8")
    if ended:  # as `summary.client_table` has them
        rows = ["client,new,attacker,pre_accuracy,post_accuracy", "0,0,0,0.5,1", "1,0,1,0.5,1", "2,1,0,0.5,1"]
        (run / "clients.csv").write_text("\n".join(rows), encoding="utf-8")
    dots = Page(report_html([run])).numbers["strips"][1]["dots"]
    assert {client: kind for _, _, client, _, kind in dots} == {0: 0, 1: 2, 2: 1}


def test_a_run_before_its_first_evaluation_has_no_curves(tmp_path):
    page = Page(report_html([write(tmp_path / "run", rounds=0, ended=False)]))
    assert "not ended: no round evaluated yet" in page.text
    assert [link for link in page.links if link in ("#curves", "#clients")] == []
    assert page.numbers["runs"] == [{"name": "fedavg", "values": {}}]


def test_a_run_that_goes_on_stands_beside_those_that_have_ended(tmp_path):
    write(tmp_path / "a", config("fedavg", 0))
    write(tmp_path / "b", config("fedavg", 1), rounds=1, ended=False)
    page = Page(report_html([tmp_path]))
    assert [row[-2] for row in page.table("run.seed")] == ["ended after 4 rounds", "not ended: round 1 of 4"]
    assert [row[:2] for row in page.table("run", "seeds")] == [["all", "1"]]
    assert page.numbers["combinations"] == [{"name": "fedavg", "runs": [0, 1]}]


def test_a_run_that_diverged_or_was_stopped_says_so_and_its_loss_is_null(tmp_path):
    run = write(tmp_path / "run")
    bad = [{**of, "train_loss": None} for of in lines_of(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(of) + "\n" for of in bad[:1] + lines_of(run)[1:]), "utf-8")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    changed = {**summary, "diverged_round": 3, "stopped": "enough", "rounds": 2}
    (run / "summary.json").write_text(json.dumps(changed), encoding="utf-8")
    page = Page(report_html([run]))
    assert "ended after 2 rounds of 4: enough; diverged in round 3" in page.text
    assert page.numbers["runs"][0]["values"]["train_loss"][:2] == [None, 0.5]


HOSTILE = 'npz:</script><b onclick="x">&amp;'


def test_what_names_say_is_text(tmp_path):
    run = write(tmp_path / "<i>&", config(source=HOSTILE))
    other = write(tmp_path / "b", config(source="digits"))
    for paths in ([run], [run, other]):
        page = Page(report_html(paths))
        assert not {"b", "i"} & {tag for tag, _ in page.tags}
        assert len(page.scripts) == 2
        assert HOSTILE in page.text
    assert "<i>&" in page.text
    assert [of["name"] for of in page.numbers["combinations"]] == [f"data.source={HOSTILE}", "data.source=digits"]


def test_a_bar_in_a_value_ends_no_cell_of_the_table(tmp_path):
    for name, source in {"a": "digits", "b": "npz:a | b.npz"}.items():
        write(tmp_path / name, config(source=source))
    expected = [["data.source=digits", "1"], ["data.source=npz:a | b.npz", "1"]]
    text = Sweep.load(tmp_path).markdown()
    assert r"| data.source=npz:a \| b.npz | 1 |" in text
    assert [row[:2] for row in Page(runs_html(text)).table("run", "seeds")] == expected
    order = text.splitlines()
    first = next(at for at, line in enumerate(order) if line.startswith("| data.source=digits"))
    order[first : first + 2] = order[first + 1], order[first]
    (tmp_path / "sweep.md").write_text("\n".join(order) + "\n", encoding="utf-8")
    page = Page(report_html([tmp_path]))
    assert [row[:2] for row in page.table("run", "seeds")] == expected[::-1], "the table that was written, as it is"
    assert [of["name"] for of in page.numbers["combinations"]] == [name for name, _ in expected[::-1]]


def test_options_differ_only_between_runs_of_one_method(tmp_path):
    write(tmp_path / "a", config("fedavg"))
    write(tmp_path / "b", config({"name": "fedprox", "mu": 0.5}))
    assert differing_values(gather([tmp_path])) == [{"method.name": "fedavg"}, {"method.name": "fedprox"}]
    write(tmp_path / "c", config({"name": "fedprox", "mu": 0.25}, lr_decay=0.5))
    found = differing_values(gather([tmp_path]))
    assert found == [
        {"method.name": "fedavg", "training.lr_decay": 1.0},
        {"method.name": "fedprox", "method.mu": 0.5, "training.lr_decay": 1.0},
        {"method.name": "fedprox", "method.mu": 0.25, "training.lr_decay": 0.5},
    ]


def test_neither_options_of_other_parts_nor_how_a_run_is_carried_out_are_differences(tmp_path):
    """Both partitions have a style, each its own; both models have hidden units."""
    others = {"data.partition.kind": "pathological", "data.partition.style": "pfllib", "run.keep": "none"}
    others |= {"model.name": "mlp_proj", "model.hidden": 16, "run.placement": "map", "run.out": str(tmp_path / "b")}
    write(tmp_path / "a", config())
    write(tmp_path / "b", config().replace(others))
    assert differing_values(gather([tmp_path])) == [
        {"model.name": "mlp", "data.partition.kind": "dirichlet"},
        {"model.name": "mlp_proj", "data.partition.kind": "pathological"},
    ]


def test_a_field_of_the_data_differs_between_sources_too(tmp_path):
    write(tmp_path / "a", config().replace("data.samples_per_client", 50))
    write(tmp_path / "b", config().replace({"data.source": "npz:other.npz", "data.samples_per_client": 40}))
    assert differing_values(gather([tmp_path])) == [
        {"data.source": "digits", "data.samples_per_client": 50},
        {"data.source": "npz:other.npz", "data.samples_per_client": 40},
    ]


def test_runs_that_are_alike_are_told_apart_by_their_folders_and_none_counts_twice(tmp_path):
    paths = [write(tmp_path / name, config()) for name in "ab"]
    assert differing_values(gather([*paths, tmp_path])) == [{"run.out": str(path)} for path in paths]
    assert differing_values(gather([paths[0], paths[0]])) == [{}]


def test_a_run_by_two_names_counts_once(tmp_path, monkeypatch):
    run = write(tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    assert [begun.path for begun in gather([Path("run"), run, tmp_path / "link"])] == [Path("run")]


def test_a_run_that_is_there_twice_leaves_its_other_seeds_only_once(tmp_path):
    first, copy = (write(tmp_path / name, config()) for name in "ab")
    other = write(tmp_path / "c", config(seed=1))
    assert differing_values(gather([first, copy, other])) == [
        {"run.seed": 0},
        {"run.seed": 0, "run.out": str(copy)},
        {"run.seed": 1},
    ]
    combinations = Page(report_html([first, copy, other])).numbers["combinations"]
    assert [of["runs"] for of in combinations] == [[0, 2], [1]]


def test_runs_on_other_samples_are_other_data_settings(tmp_path):
    folders = []
    for method, data in (("fedavg", "0a"), ("fedprox", "0b")):
        folders += [write(tmp_path / f"{method}{seed}", config(method, seed), data=data) for seed in (0, 1)]
    found = Sweep.load(tmp_path)
    assert found.cells[0].values == {"method.name": "fedavg", "run.seed": 0, "data.samples": "0a"}
    text = found.markdown()
    assert "| difference |" not in text
    assert "**Not compared**: fedprox, data.samples=0b: the baseline has no run of the same seed in the same" in text
    # That sources of several names have other samples goes without saying; version 0.1 did not say what it had.
    other = write(tmp_path / "other", config(source="npz:x"), data="0c")
    assert differing_values(gather([folders[0], other])) == [{"data.source": "digits"}, {"data.source": "npz:x"}]
    old = write(tmp_path / "old", config(seed=2))
    assert differing_values(gather([folders[0], old])) == [{"run.seed": 0}, {"run.seed": 2}]


def test_a_config_of_another_version_is_named(folder, tmp_path):
    home = shutil.copytree(folder, tmp_path / "runs")
    path = home / "fedprox-seed1" / "config.toml"
    path.write_text(path.read_text(encoding="utf-8").replace("[run]", "[run]\nfuture_field = 3"), encoding="utf-8")
    message = rf"run\.future_field = 3 is not usable: no such key; .*; so says {path}, which another version may"
    for read in (
        lambda: report_html([home]),
        lambda: compare(config(), ["fedavg", "fedprox"], seeds=[0, 1], out=home),
    ):
        with pytest.raises(ConfigError, match=message):
            read()


def test_diagnostics_of_seeds_are_of_the_newest_round_that_all_have(tmp_path):
    write(tmp_path / "a", config("fedavg", 0), rounds=2)
    write(tmp_path / "b", config("fedavg", 1), rounds=4)
    assert Page(report_html([tmp_path])).table("run", "update_cosine") == [["fedavg", "0.4800"]]


def test_diagnostics_of_a_run_that_has_diverged_are_none(tmp_path):
    for name, method in (("a", "fedavg"), ("b", "fedprox")):
        write(tmp_path / name, config(method, 0), rounds=2)
    lines = tmp_path / "b" / "metrics.jsonl"
    lines.write_text(re.sub(r'"update_cosine": [0-9.]+', '"update_cosine": null', lines.read_text(encoding="utf-8")))
    assert Page(report_html([tmp_path])).table("run", "update_cosine") == [["fedavg", "0.4800"], ["fedprox", "—"]]


def of_script(numbers, expression):
    """The value of an expression in the script itself, with the page that it looks for left out."""
    page = f"const document = {{ getElementById: () => ({{ textContent: {json.dumps(json.dumps(numbers))} }}) }};"
    text = files("fedjax_pfl.experiment").joinpath("report.js").read_text(encoding="utf-8")
    start = '  if (byId("curves-figure")) curves();'
    assert text.count(start) == 1
    script = f"{page}\n{text[: text.index(start)]}console.log(JSON.stringify({expression}));}})();"
    return json.loads(subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout)


def test_a_run_of_version_0_1_has_a_report_and_is_told_in_two_lines(tmp_path):
    write(tmp_path / "run")
    file = tmp_path / "run" / "summary.json"
    summary = json.loads(file.read_text(encoding="utf-8"))
    del summary["diverged_round"]
    for point in ("pre", "post"):
        for name in ("by_validation", "by_validation_round", "weighted_best", "weighted_best_round"):
            del summary["personal"][point][name]
    file.write_text(json.dumps(summary), encoding="utf-8")
    assert "mean of last 10" in report_html([tmp_path / "run"])
    assert run_in_short(summary).splitlines()[1].startswith("  PRE 50.00 % (best 50.00 %), POST 53.1")


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_an_axis_marks_the_evaluated_rounds_where_their_numbers_have_room():
    rounds = [[5, 10, 15, 20], [7], [1, 2, 40], [*range(0, 201, 10)]]
    marked = of_script({}, f"{json.dumps(rounds)}.map((of) => roundTicks(of, (round) => 15 * round, 5))")
    assert marked == [[5, 10, 15, 20], [7], [10, 20, 30, 40], [*range(0, 201, 10)]]
    close = of_script({}, f"roundTicks({json.dumps(rounds[3])}, (round) => 3 * round, 5)")
    assert close == [0, 50, 100, 150, 200]


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_a_curve_ends_with_the_last_round_that_all_its_runs_have():
    runs = [
        {"round": [1, 2, 3], "values": {"m": [0.5, 0.6, 0.65]}},
        {"round": [1, 2, 3, 4, 5], "values": {"m": [0.8, None, 0.92, 0.93, 0.94]}},
        {"round": [1], "values": {"m": [None]}},
        {"values": {}},
    ]
    numbers = {"metrics": {"m": {"scale": 100, "label": "m"}}, "runs": runs}
    together, alone = of_script(numbers, '[numbers.runs, [numbers.runs[1]]].map((of) => pointsOf(of, "m", "round"))')
    assert [(point["round"], point["runs"]) for point in together] == [(1, 2), (3, 2)]
    assert [point["y"] for point in together] == pytest.approx([65, 78.5])
    assert [point["round"] for point in alone] == [1, 3, 4, 5]


def test_the_command_writes_the_file_and_replaces_none_unasked(folder, tmp_path):
    out = tmp_path / "new" / "report.html"
    said = CliRunner().invoke(
        app, ["report", str(folder / "fedavg-seed0"), str(folder / "fedavg-seed1"), "-o", str(out)]
    )
    assert said.output == f"written to {out}\n"
    assert Page(out.read_text(encoding="utf-8")).numbers["combinations"] == [{"name": "fedavg", "runs": [0, 1]}]
    before = out.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"report\.html' is not usable: it exists; .* --overwrite"):
        report([folder], out)
    assert out.read_text(encoding="utf-8") == before
    report([folder], out, overwrite=True)
    assert len(Page(out.read_text(encoding="utf-8")).numbers["runs"]) == 4


def damaged(home, name, text):
    run = write(home / "damaged", ended=name != "client_history.csv")
    (run / name).write_text(text, encoding="utf-8")
    return run


@pytest.mark.parametrize(
    ("paths", "out", "message"),
    [
        (lambda home: [home / "none"], "r", "RUN = '.*none' is not usable: .*a folder that exists"),
        (lambda home: [home / "empty"], "r", "RUN = '.*empty' is not usable: .*in this one, no run has begun"),
        (lambda home: [home / "file"], "r", "RUN = '.*file' is not usable: .*the folder, not a file in it"),
        (lambda home: [], "r", "RUN = .* is not usable: one run directory or more"),
        (lambda home: str(home), "r", "paths = '.*' is not usable: directories, one by one"),
        (lambda home: home, "r", "paths = .* is not usable: directories, one by one"),
        (lambda home: [[home]], "r", "paths = .* is not usable: directories, one by one"),
        (lambda home: [write(home / "run")], "r.pdf", r"out = '.*r\.pdf' is not usable: a file that ends in \.html"),
        (lambda home: [home], "empty", "out = '.*empty' is not usable: the name of a file"),
        (lambda home: [write(home / "run")], "file/r", "out = '.*' is not usable: a file that can be written"),
        (lambda home: [damaged(home, "metrics.jsonl", '{"round": 1\n')], "r", "metrics = .*: the metrics of a run"),
        (lambda home: [damaged(home, "metrics.jsonl", "")], "r", "metrics = .*: the metrics of a run"),
        (
            lambda home: [damaged(home, "partition.json", "{")],
            "r",
            "partition = .*: the partition of a run; .*config.toml --out",
        ),
        (lambda home: [damaged(home, "partition.json", "[]")], "r", "partition = .*: the partition of a run"),
        (
            lambda home: [damaged(home, "partition.json", '{"hash": "a"}')],
            "r",
            "partition = .*: the partition of a run",
        ),
        (lambda home: [damaged(home, "summary.json", "7")], "r", "summary = .*: the summary of a run; without"),
        (lambda home: [damaged(home, "summary.json", '{"rounds": 4}')], "r", "summary = .*: the summary of a run"),
        (lambda home: [damaged(home, "clients.csv", "a,b\n1\n")], "r", "clients = .*: the clients of a run"),
        (lambda home: [damaged(home, "config.toml", "[")], "r", "config file = .*not valid TOML"),
        (
            lambda home: [damaged(home, "config.toml", '[data]\nsource = "digits"\n[method]\nname = "fedavg"\nmu = 1')],
            "r",
            r"method\.mu = 1 is not usable: no such key of fedavg; .*config\.toml, which another version may have",
        ),
    ],
)
def test_a_mistake_is_one_line(paths, out, message, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        report(paths(tmp_path), tmp_path / out)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "r").exists()


def test_a_report_of_twelve_runs_of_a_hundred_rounds_is_there_in_two_seconds(tmp_path):
    for seed in range(12):
        write(tmp_path / str(seed), config(seed=seed, rounds=100), rounds=100)
    began = time.process_time()
    report([tmp_path], tmp_path / "report.html")
    assert time.process_time() - began < 2


# What a person does, done in the page: it says what there is to be seen then.
DRIVER = """<script>
addEventListener("load", () => {
  const one = (query) => document.querySelector(query), all = (query) => [...document.querySelectorAll(query)];
  const names = () => all("#curve .line").map((line) => line.dataset.name);
  const press = (target, key) => one(target).dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
  const choose = (target, value) => { one(target).value = value; one(target).dispatchEvent(new Event("change")); };
  const dots = (line) => [...line.querySelectorAll("circle")].map((dot) => dot.dataset);
  const points = (line) => Object.fromEntries(dots(line).map((dot) => [dot.round, Number(dot.value)]));
  const values = () => all("#curve .line").map(points);
  const told = { lines: names(), values: values() };
  one("#lines input").click();
  told.toggled = names();
  one("#lines input").click();
  told.again = names();
  press("#curve", "ArrowLeft");
  told.last = one("#curves-figure .tip").textContent;
  press("#curve", "Escape");
  told.hidden = one("#curves-figure .tip").hidden;
  const dot = one("#curve circle").getBoundingClientRect();
  one("#curve").dispatchEvent(new PointerEvent("pointermove", { clientX: dot.x + 3, clientY: dot.y + 3 }));
  told.pointed = one("#curves-figure .tip").textContent;
  one("#every").click();
  told.thin = all("#curve .thin").length;
  choose("#metric", "train_loss");
  told.loss = values();
  choose("#beside", "pre.accuracy");
  told.both = names();
  choose("#across", "megabytes");
  told.axis = all("#curve text").map((text) => text.textContent);
  press("#strips", "ArrowDown");
  told.below = one("#clients-figure .tip").textContent;
  press("#strips", "Escape");
  press("#strips", "ArrowRight");
  told.client = one("#clients-figure .tip").textContent;
  told.dots = all("#strips [data-client]").length;
  told.width = [document.documentElement.scrollWidth, innerWidth];
  told.page = getComputedStyle(document.body).backgroundColor;
  told.text = getComputedStyle(one("#curve .name")).fill;
  parent.postMessage(told, "*");
});
</script>"""
FRAME = """<!DOCTYPE html><iframe src="driven.html" width="WIDTH" height="900"></iframe><pre></pre><script>
addEventListener("message", (told) => { document.querySelector("pre").textContent = JSON.stringify(told.data); });
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_a_browser_draws_what_the_files_say_and_does_what_it_is_asked(folder, tmp_path, width, dark):
    text = report_html([folder])
    (tmp_path / "driven.html").write_text(text.replace("</body>", f"{DRIVER}</body>"), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr", "--dump-dom"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--window-size=1500,1000"]
    options += [f"--blink-settings=preferredColorScheme={int(not dark)}"]
    done = subprocess.run(
        ["chromium", *options, f"file://{tmp_path / 'frame.html'}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    told = json.loads(unescape(re.search("<pre>(.*)</pre>", done.stdout, re.S)[1]))
    runs = {name: [lines_of(folder / f"{name}-seed{seed}") for seed in (0, 1)] for name in ("fedavg", "fedprox")}
    assert told["lines"] == told["again"] == ["fedavg", "fedprox"]
    assert told["toggled"] == ["fedprox"]
    for drawn, (one, other) in zip(told["values"], runs.values(), strict=True):
        wanted = {
            str(a["round"]): 50 * (a["pre"]["accuracy"] + b["pre"]["accuracy"]) for a, b in zip(one, other, strict=True)
        }
        assert drawn == pytest.approx(wanted)
    assert told["last"] == "round 4fedprox: 68.13 % ± 4.42 % (2 runs)fedavg: 55.63 % ± 4.42 % (2 runs)"
    assert told["hidden"] is True
    assert told["pointed"].startswith("round 1fedprox: 38.13 % ± 4.42 %")
    assert told["thin"] == 4
    assert told["loss"] == [{str(at): pytest.approx(1 / at) for at in range(1, 5)}] * 2
    assert told["both"] == [f"{name}, {label}" for label in ("training loss", "PRE accuracy (%)") for name in runs]
    assert "megabytes" in told["axis"]
    assert told["below"] == told["client"], "the first row comes first"
    assert told["client"].startswith("fedavg, PRE: 12.50 %client 0, 4 samples scored; fedavg, seed 0")
    assert told["dots"] == 20
    assert told["width"][0] <= told["width"][1] == width
    assert (told["page"] == "rgb(255, 255, 255)") is not dark
    assert told["text"] == ("rgb(228, 232, 236)" if dark else "rgb(29, 35, 41)")
