"""What a notebook shows: short `repr`, HTML that is valid and says what the summary says, progress, a warning."""

import io
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from fedjax_pfl import Comparison, Config, ConfigError, Sweep, partition_html, simulate
from fedjax_pfl.experiment import headline
from fedjax_pfl.experiment import progress as module
from fedjax_pfl.experiment.html import runs_html
from fedjax_pfl.experiment.progress import Progress, duration, lines, reporting
from fedjax_pfl.experiment.tables import Cell
from fedjax_pfl.experiment.worker import run_program

CONFIG = Config(
    data={"source": "digits", "clients": 4, "samples_per_client": 20, "partition": {"kind": "dirichlet", "beta": 0.5}},
    model={"name": "mlp", "hidden": 8},
    method={"name": "fedavg"},
    training={"rounds": 3, "lr": 0.1},
)


@pytest.fixture(scope="module")
def result():
    return simulate(CONFIG)


# Method -> accuracies of seeds 0 and 1, by hand: the best at PRE is not the best at POST.
ACCURACY = {"fedavg": {"pre": (0.5, 0.6), "post": (0.9, 0.9)}, "local": {"pre": (0.7, 0.8), "post": (0.8, 0.85)}}
MEANS = {"pre": {"fedavg": "55.00", "local": "75.00"}, "post": {"fedavg": "90.00", "local": "82.50"}}


def cell(result, method, seed):
    """A run of a method, as it might have been."""
    personal = {
        point: {**of, "last": ACCURACY[method][point][seed]} for point, of in result.summary["personal"].items()
    }
    values = {"method.name": method, "run.seed": seed}
    summary = {**result.summary, "method": method, "personal": personal}
    return Cell(values, CONFIG.replace(values), summary, result.clients)


@pytest.fixture(scope="module")
def comparison(result):
    return Comparison(CONFIG, [cell(result, method, seed) for method in ACCURACY for seed in (0, 1)], "fedavg")


@pytest.fixture(scope="module")
def swept(comparison):
    return Sweep(comparison.cells, {"method.name": "fedavg"}, "post")


class Page(HTMLParser):
    """Reads HTML as strictly as it can: every tag is closed, in order; nothing is run or fetched."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.tables, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "style", "link", "img", "iframe", "object")
        given = dict(attributes)
        assert len(given) == len(attributes)
        assert not any(name.startswith("on") or name in ("src", "href") for name in given)
        assert "url(" not in str(given)
        self.open.append(tag)
        self.tags.append((tag, given))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append({"text": "", "bold": False, "style": given["style"]})
        elif tag == "strong" and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1]["bold"] = True

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1]["text"] += data

    def rows(self, table):
        return [[cell["text"] for cell in row] for row in self.tables[table]]

    def bold(self, table):
        return [cell["text"] for row in self.tables[table] for cell in row if cell["bold"]]


@pytest.mark.parametrize("broken", ["<b><i></b></i>", "<b>", "<script></script>", '<a href="http://x">x</a>'])
def test_the_reader_of_pages_finds_what_is_wrong(broken):
    with pytest.raises(AssertionError):
        Page(broken)


def percent(value):
    return f"{100 * value:.2f}"


def distinct(result):
    """The same with numbers of which no two are equal, so that none can be taken for another."""
    personal = {
        point: {name: (start + at) / 100 for at, name in enumerate(of)}
        for start, (point, of) in zip((10, 60), result.summary["personal"].items(), strict=True)
    }
    return replace(result, summary={**result.summary, "personal": personal, "global": 0.0125})


def test_a_result_is_two_lines(result):
    told = distinct(result)
    pre, post = (told.summary["personal"][point] for point in ("pre", "post"))
    scores = f"PRE {percent(pre['last'])} % (best {percent(pre['best'])} %), "
    scores += f"POST {percent(post['last'])} % (best {percent(post['best'])} %), global 1.25 %"
    assert repr(told) == f"fedavg on digits, 4 clients, 3 rounds, seed 0\n  {scores}"
    assert str(told) == repr(told)


def test_one_client_and_one_round_are_singular_and_a_diverged_run_is_marked(result):
    told = replace(result, summary={**result.summary, "clients": 1, "rounds": 1, "seed": 7, "diverged_round": 1})
    assert repr(told).startswith("fedavg on digits, 1 client, 1 round, seed 7\n")
    assert repr(told).endswith(", diverged in round 1")
    assert "diverged" not in repr(result)


def test_no_runs_are_a_table_without_rows(comparison, swept):
    for of in (comparison, swept):
        empty = of._replace(cells=[])
        assert empty.markdown().endswith("No runs.\n")
        assert "No runs." in Page(empty._repr_html_()).text


def test_many_runs_are_two_lines_with_the_best_of_them(comparison, swept):
    assert repr(comparison) == "Comparison of 4 runs\n  highest mean PRE: local 75.00 %"
    assert repr(swept) == "Sweep of 4 runs\n  highest mean POST: fedavg 90.00 %"
    failed = comparison.cells[2]._replace(summary=None, error="why")
    broken = comparison._replace(cells=[comparison.cells[0], failed])
    assert repr(broken) == "Comparison of 2 runs, 1 failed\n  highest mean PRE: fedavg 50.00 %"
    assert repr(broken._replace(cells=[failed])).endswith("highest mean PRE: —")


def test_of_each_data_setting_the_best_is_named(comparison):
    cells = [
        cell._replace(values={**cell.values, "data.partition.beta": beta})
        for beta, cell in zip((0.1, 0.1, 0.5, 0.5), comparison.cells, strict=True)
    ]
    best = "fedavg, data.partition.beta=0.1 55.00 %; local, data.partition.beta=0.5 75.00 %"
    assert repr(comparison._replace(cells=cells)).endswith(f"highest mean PRE: {best}")


@pytest.mark.parametrize(
    "given",
    [
        {"data": {"source": "digits"}, "method": {"name": "fedavg"}},
        {"data": {"source": "digits"}, "method": {"name": "pfedcspc", "kappa": 0.2, "server_lr_drops": [1]}},
        {"data": {"source": "digits", "mean": [0.5, 0.1]}, "method": {"name": "ditto"}, "model": {"name": "cnn2"}},
        {
            "data": {"source": "digits", "partition": {"kind": "pathological"}},
            "method": {"name": "fedavg"},
            "participation": {"ratio": [0.2, 0.5]},
            "run": {"export": ["features"]},
        },
    ],
)
def test_the_repr_of_a_config_is_python_that_makes_it_and_holds_no_defaults(given):
    config = Config(**given)
    assert eval(repr(config)) == config
    assert str(config) == repr(config)
    shown = config.non_defaults()
    assert {section: set(table) for section, table in shown.items()} == {
        section: set(table) for section, table in given.items()
    }


def test_values_that_are_the_defaults_are_none_of_the_difference():
    spelt_out = {**CONFIG.model_dump(), "method": {"name": "ditto", "lam": 1.0}, "training": {"rounds": 100, "lr": 0.1}}
    assert Config(**spelt_out).non_defaults() == {
        "data": {
            "source": "digits",
            "clients": 4,
            "samples_per_client": 20,
            "partition": {"kind": "dirichlet", "beta": 0.5},
        },
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": "ditto"},
        "training": {"lr": 0.1},
    }


def test_a_result_shows_the_numbers_of_its_summary(result):
    result = distinct(result)
    page = Page(result._repr_html_())
    headings, *rows = page.rows(0)
    keys = {"last": "last", "best": "best", "weighted": "weighted_last", "worst 10 %": "worst_10_percent"}
    personal = result.summary["personal"]
    assert [row[0] for row in rows] == ["PRE *", "POST"]
    for row, point in zip(rows, ("pre", "post"), strict=True):
        shown = dict(zip(headings, row, strict=True))
        assert {name: shown[name] for name in keys} == {name: percent(personal[point][keys[name]]) for name in keys}
    assert f"global model on the pooled test set: {percent(result.summary['global'])} %" in page.text
    assert f"{result.summary['timing']['seconds_per_round']:.3f} s per round" in page.text
    assert f"{result.summary['traffic']['megabytes_total']:.3f} MB exchanged" in page.text
    assert result.partition["hash"] in page.text
    assert "lr = 0.1" in page.text
    assert "background:transparent" in result._repr_html_()


def test_the_other_columns_of_a_result_are_its_numbers_too(result):
    told = distinct(result).summary
    keys = {"by validation": "by_validation", "mean of last 10": "mean_last_10"}
    keys |= {"best weighted": "weighted_best", "std of clients": "std_clients"}
    headings, *rows = headline.table(told)
    for row, point in zip(rows, ("pre", "post"), strict=True):
        shown = dict(zip(headings, row, strict=True))
        expected = {name: percent(told["personal"][point][key]) for name, key in keys.items()}
        assert {name: shown[name] for name in keys} == expected
    without = headline.table(result.summary)  # which has no validation samples
    assert without[0] == [name for name in headings if name != "by validation"]
    assert {len(row) for row in without} == {len(headings) - 1}


def test_what_is_special_about_a_run_is_said(result):
    special = {"stopped": "low enough", "diverged_round": 2, "global": None}
    other = replace(result, summary={**result.summary, **special})
    text = Page(other._repr_html_()).text
    assert "ended early: low enough" in text
    assert "diverged: from round 2 on" in text
    assert "global" not in text.partition("partition")[0]
    assert "global" not in repr(other)


def test_remarks_have_their_own_numbers_of_the_summary(result):
    told = distinct(result).summary
    pre, post = (percent(told["personal"][point]["hm_last"]) for point in ("pre", "post"))
    told |= {
        "evaluated_on": "validation",
        "new_clients": {"pre": {"last": 0.31, "best": 0.32}, "post": {"last": 0.33, "best": 0.34}},
        "majority_class": {"accuracy": 0.41, "weighted": 0.42},
        "timing": {"seconds_per_round": 0.125, "compile_seconds": 1.5, "total_seconds": 2.5},
        "traffic": {"megabytes_total": 4.5, "megabytes_dense": 6.25},
    }
    assert headline.remarks(told) == [
        "always answering the class that a client has most of: 41.00 %",
        "new clients, which never trained: PRE 31.00, POST 33.00",
        "global model on the pooled validation set: 1.25 %",
        f"harmonic mean of it and I_local (accuracy and macro-F1 of the clients): PRE {pre}, POST {post}",
        "0.125 s per round, 1.5 s compilation, 2.5 s in all; 4.5 MB exchanged",
    ]
    assert "best is selected on validation data;" in headline.caption(told)


def points_of(text):
    """The places of both curves, [points, 2]."""
    found = [given["points"] for tag, given in Page(text).tags if tag == "polyline"]
    return [np.array([place.split(",") for place in line.split()], float).reshape(-1, 2) for line in found]


def test_the_curve_is_that_of_the_history(result):
    pre, post = points_of(result._repr_html_())
    drawn = np.concatenate([pre[:, 1], post[:, 1]])
    values = np.concatenate([result.history["pre.accuracy"], result.history["post.accuracy"]])
    assert len(pre) == len(post) == 3
    assert np.ptp(values) > 0
    slope, offset = np.polyfit(values, drawn, 1)
    assert slope < 0  # up is more
    np.testing.assert_allclose(drawn, slope * values + offset, atol=0.06)  # written with one digit
    np.testing.assert_allclose(np.diff(pre[:, 0]), np.ptp(pre[:, 0]) / 2, atol=0.11)
    labels = [int(number) for number in re.findall(r">(\d+) %</text>", result._repr_html_())]
    heights = [offset + slope * label / 100 for label in labels]
    np.testing.assert_allclose(heights, [160 - 18, 18], atol=0.5)  # the ends of the axis


def test_the_axis_of_a_curve_ends_at_100_percent(result):
    history = {**result.history, "pre.accuracy": np.ones(3), "post.accuracy": np.ones(3)}
    html = replace(result, history=history)._repr_html_()
    assert re.findall(r">(\d+) %</text>", html) == ["90", "100"]
    assert {place[1] for places in points_of(html) for place in places} == {18}


def test_a_round_without_a_number_is_left_out_of_the_curve(result):
    history = {**result.history, "pre.accuracy": np.array([0.1, np.nan, 0.3])}
    other = replace(result, history=history)
    assert [len(places) for places in points_of(other._repr_html_())] == [2, 3]
    nothing = {name: np.full(3, np.nan) for name in ("pre.accuracy", "post.accuracy")} | {"round": history["round"]}
    assert points_of(replace(result, history=nothing)._repr_html_()) == []


def test_a_single_evaluated_round_is_a_point(result):
    history = {name: values[:1] for name, values in result.history.items()}
    other = replace(result, history=history)
    assert [len(places) for places in points_of(other._repr_html_())] == [1, 1]
    assert "round 1<" in other._repr_html_()


def test_many_runs_are_the_table_with_the_best_in_bold_and_the_notes_below(comparison, swept):
    for found, best in ((comparison, "75.00 ± 7.07"), (swept, "90.00 ± 0.00")):
        html = found._repr_html_()
        page = Page(html)
        headings, *rows = page.rows(0)
        assert [row[0] for row in rows] == ["fedavg", "local"]
        for point in ("pre", "post"):
            shown = [row[headings.index(point.upper())].split(" ±")[0] for row in rows]
            assert shown == list(MEANS[point].values())
        assert [bold.removesuffix(" *") for bold in page.bold(0)] == [best]
        assert html.index("</table>") < html.index("Accuracy in %") < html.index("2 seeds")
        assert "**" not in html


def test_what_people_write_is_no_html(comparison, result):
    mean = "<script>alert(1)</script>"
    failed = comparison.cells[0]._replace(summary=None, clients=None, error=mean)
    config = CONFIG.replace("data.source", "npz:<b>&amp;.npz")
    manifest = {**result.partition, "notes": [mean]}
    title = comparison._replace(cells=[failed, *comparison.cells[1:]], config=config)
    other = replace(result, partition=manifest, summary={**result.summary, "dataset": mean})
    for shown in (title, other):
        assert mean in Page(shown._repr_html_()).text
    for shown in (title, config):
        assert "npz:<b>&amp;.npz" in Page(shown._repr_html_()).text


def test_an_error_of_several_lines_is_one_line(comparison):
    error = "it broke:\n\n| a | b |\n\n| --- |\n"
    failed = comparison.cells[0]._replace(summary=None, clients=None, error=error)
    broken = comparison._replace(cells=[failed, *comparison.cells[1:]])
    assert "\n\n**Failed**: fedavg, seed 0: it broke: | a | b | | --- |\n" in broken.markdown()
    page = Page(broken._repr_html_())
    assert "Failed: fedavg, seed 0: it broke: | a | b | | --- |" in page.text
    assert len(page.tables) == 1


def test_a_mistake_of_several_lines_fails_a_program_in_one():
    def data():
        raise ConfigError("data", "x", "no\n\n| table")

    assert run_program([CONFIG], data, print) == ["data = 'x' is not usable: no | table"]


def test_the_samples_of_a_sweep_are_all_named(swept):
    samples = ["test", "validation", "test", "validation"]
    cells = [
        cell._replace(
            values={**cell.values, "data.evaluate_on": of},
            config=cell.config.replace({"data.validation_share": 0.2, "data.evaluate_on": of}),
        )
        for of, cell in zip(samples, swept.cells, strict=True)
    ]
    found = swept._replace(cells=cells)
    assert found.markdown().startswith("Accuracy in % on test or validation samples, mean")
    assert "In % on test or validation samples: mean" in found.to_latex()
    assert swept.markdown().startswith("Accuracy in % on test samples, mean")


def test_the_partition_is_a_table_of_counts_the_darker_the_more(result):
    page = Page(partition_html(result.partition))
    headings, *rows = page.tables[0]
    assert [cell["text"] for cell in headings] == ["client", "size", "train", "test", *map(str, range(10))]
    counts = np.array(result.partition["class_counts"])
    for client, row in enumerate(rows):
        assert [cell["text"] for cell in row[:4]] == [
            str(client),
            *(str(result.partition[name][client]) for name in ("sizes", "n_train", "n_test")),
        ]
        assert [cell["text"] for cell in row[4:]] == [str(n) if n else "·" for n in counts[client]]
    shades = [[float((re.findall(r"([\d.]+)\)", cell["style"]) or ["0"])[0]) for cell in row[4:]] for row in rows]
    np.testing.assert_allclose(shades, 0.6 * counts / counts.max(), atol=0.005)
    assert "background" not in rows[0][0]["style"]


def test_of_a_large_partition_the_beginning_is_shown():
    large = {"class_counts": np.ones((70, 50), int).tolist(), "notes": ["a note"], "hash": "abc"}
    large |= {name: [50] * 70 for name in ("sizes", "n_train", "n_test")}
    page = Page(partition_html(large))
    assert (len(page.rows(0)), {len(row) for row in page.rows(0)}) == (41, {44})
    assert "the first 40 of 70 clients and the first 40 of 50 classes" in page.text
    assert "a note" in page.text


def test_a_config_shows_all_fields_and_marks_what_is_no_default():
    page = Page(CONFIG._repr_html_())
    bold = {cell.split(" = ")[0] for table in range(len(page.tables)) for cell in page.bold(table)}
    assert bold == {"source", "clients", "samples_per_client", "partition", "name", "hidden", "rounds", "lr"}
    fields = [row[0].split(" = ")[0] for table in range(len(page.tables)) for row in page.rows(table)]
    assert fields == [field for table in CONFIG.model_dump().values() for field in table]
    opened = [("open" in given) for tag, given in page.tags if tag == "details"]
    assert opened == [section in ("data", "model", "method", "training") for section in CONFIG.model_dump()]
    assert "eta, the learning rate in round 0." in page.text


def test_markdown_of_several_tables_keeps_their_order():
    page = Page(
        runs_html("# one\n\n| a | b |\n| --- | ---: |\n| x | **1** |\n\nnote\n\n# two\n\n| c |\n| --- |\n| 2 |\n")
    )
    assert (page.rows(0), page.rows(1)) == ([["a", "b"], ["x", "1"]], [["c"], ["2"]])
    assert page.text.index("one") < page.text.index("two") < page.text.index("note")


BEGIN = Progress(0, 4, float("nan"), None, float("nan"), 25 * 10**8, compiled=False)
SCORES = {"pre": {"accuracy": 0.5}, "post": {"accuracy": 0.625}}


def at(round, seconds_left=9.0, loss=1.25):
    return Progress(round, 4, loss, SCORES, seconds_left, 25 * 10**8)


@pytest.fixture
def notebook(monkeypatch):
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    return shell


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(time=0.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now.time)
    return now


def test_in_a_notebook_one_line_changes(notebook, clock, capsys):
    with reporting(CONFIG, "auto") as report:
        for now in (BEGIN, at(1), at(2), at(4)):
            report(now)
            clock.time += 0.15
    written = capsys.readouterr().out
    _, begin, second, last = written.split("\r")  # the first round came too soon after the beginning
    assert begin == "fedavg on digits: 4 clients; about 2.5 GB of memory; compiling"
    assert second.rstrip() == "round 2/4  loss 1.2500  pre 50.00%  post 62.50%  9 s left"
    assert (len(second), last[-1]) == (len(begin), "\n")  # nothing of the longer line is left
    assert last.startswith("round 4/4")


def test_a_time_to_wait_is_said_in_a_unit_that_fits_it():
    said = ["0 s", "89 s", "2 min", "46 min", "1.5 h", "30.0 h"]
    assert [duration(seconds) for seconds in (0.2, 89, 91, 2777, 5400, 108000)] == said


def test_what_is_compiled_is_said_to_run(notebook, clock, capsys):
    with reporting(CONFIG, "auto") as report:
        report(BEGIN)
        clock.time += 20.0
        report(BEGIN._replace(compiled=True))
    assert capsys.readouterr().out.split("\r")[-1].rstrip().endswith("about 2.5 GB of memory; in round 1")


def test_a_diverged_loss_is_not_taken_for_the_beginning(notebook, capsys):
    with reporting(CONFIG, "auto") as report:
        report(at(4, loss=float("nan")))
    assert "round 4/4  loss nan  pre 50.00%" in capsys.readouterr().out


def test_a_shell_without_a_kernel_is_no_notebook(notebook, capsys):
    notebook.kernel = None
    with reporting(CONFIG, "auto") as report:
        assert report is None


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(sys, "stdout", terminal)
    with reporting(CONFIG.replace("training.rounds", 4), "auto") as report:
        report(BEGIN)
        report(at(4))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"fedavg\s+━+\s+4/4\s+loss 1.2500  pre 50.00%  post 62.50%  9 s left", plain)


def test_elsewhere_auto_is_silent_and_a_log_gets_a_line_every_few_seconds(clock, capsys):
    with reporting(CONFIG, "auto") as report:
        assert report is None
    log = lines(CONFIG)
    for now, seconds in ((BEGIN, 3), (at(1), 3), (at(2), 1), (at(3), 1), (at(4), 0)):
        log(now)
        clock.time += seconds
    written = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in written] == ["on", "2/4", "4/4"]


def test_a_function_is_called_as_it_is_and_anything_else_is_refused():
    given = [].append
    with reporting(CONFIG, given) as report:
        assert report is given
    with reporting(CONFIG, None) as report:
        assert report is None
    with pytest.raises(ConfigError, match=r"^progress = 'bar' is not usable: \"auto\", None or a function"):
        simulate(CONFIG, progress="bar")


def test_simulate_reports_to_a_notebook_unless_told_otherwise(notebook, capsys):
    simulate(CONFIG)
    written = capsys.readouterr().out
    assert "; compiling" in written
    assert "round 3/3  loss " in written
    simulate(CONFIG, progress=None)
    assert capsys.readouterr().out == ""


EARLY = """
import warnings, jax
jax.devices()
import fedjax_pfl, fedjax_pfl.experiment.process
fedjax_pfl.experiment.process.cores = lambda: 2
warnings.simplefilter("error", UserWarning)
config = fedjax_pfl.Config(data={"source": "digits"}, method={"name": "local"})
runs = {
    "simulate": lambda: fedjax_pfl.simulate(config),
    "compare": lambda: fedjax_pfl.compare(config, ["local"]),
    "sweep": lambda: fedjax_pfl.sweep(config, {"run.seed": [0]}),
}
for name, run in runs.items():
    try:
        run()
    except UserWarning as warning:
        print(name, warning)
fedjax_pfl.experiment.process.cores = lambda: 1
fedjax_pfl.experiment.process.prepare(config.run)  # one device is all that one core can be
"""


def test_all_that_runs_says_that_jax_was_started_before_and_how_to_avoid_it():
    environment = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run([sys.executable, "-c", EARLY], env=environment, capture_output=True, text=True, check=True)
    said = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in said] == ["simulate", "compare", "sweep"]
    assert all("one CPU device" in text for _, text in said)
    assert all('begin with jax.config.update("jax_num_cpu_devices", 2)' in text for _, text in said)
