"""Methods side by side: the runs behind the table, and the table."""

import csv
import json
import os
import shutil
import signal

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedjax_pfl import Config, ConfigError, FederatedData, compare, simulate, sweep
from fedjax_pfl.cli.commands import app
from fedjax_pfl.data.dataset import fingerprint
from fedjax_pfl.data.intake import as_dataset
from fedjax_pfl.experiment.comparison import Comparison, refusals
from fedjax_pfl.experiment.course import Course
from fedjax_pfl.experiment.statistics import holm
from fedjax_pfl.experiment.sweep import Sweep
from fedjax_pfl.experiment.tables import Cell, decimals
from fedjax_pfl.methods import METHODS as EVERY

METHODS = ("local", "fedprox", "fedcpd")  # the last one asks for feature maps, which an MLP has not: it fails
SEEDS = (0, 1)
DIRICHLET = {"kind": "dirichlet", "beta": 0.3}


def config(**tables):
    """Of clients with as many samples each, over the devices: all runs of a method go through one program."""
    base = {
        "data": {"source": "digits", "clients": 5, "samples_per_client": 24, "partition": DIRICHLET},
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": "fedprox"},
        "training": {"rounds": 3, "batch_size": 16, "lr": 0.1},
        "run": {"eval_every": 2, "placement": "shard"},
    }
    for section, fields in tables.items():
        base[section] = {**base.get(section, {}), **fields}
    return Config(**base)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("compare") / "table"


@pytest.fixture(scope="module")
def comparison(out):
    return compare(config(), METHODS, seeds=SEEDS, out=out)


def test_a_cell_is_the_run_that_simulate_gives(comparison, out):
    result = simulate(config(run={"seed": 1}))
    cell = next(cell for cell in comparison.cells if (cell.method, cell.seed) == ("fedprox", 1))
    for point, expected in result.summary["personal"].items():
        found = cell.summary["personal"][point]
        assert found == pytest.approx(expected)
    assert cell.figures["pre"] == cell.figures["headline"] == pytest.approx(result.summary["personal"]["pre"]["last"])
    assert cell.figures["weighted_best"] == pytest.approx(result.history["pre.weighted"].max())
    assert cell.figures["global"] == pytest.approx(result.summary["global"])
    assert json.loads((out / "fedprox-seed1" / "summary.json").read_text()) == cell.summary
    assert cell.summary["timing"]["runs_in_the_program"] == 2


def test_figures_of_what_was_not_compared_are_refused(comparison):
    for arguments, message in (
        (("fedsgd",), "method = 'fedsgd' .* one of those"),
        (("local", "mean"), "figure = 'mean'"),
    ):
        with pytest.raises(ConfigError, match=message):
            comparison.by_seed(*arguments)


def test_methods_share_partitions_which_seeds_do_not(comparison):
    hashes = {
        seed: {c.summary["partition_hash"] for c in comparison.cells if c.summary and c.seed == seed} for seed in SEEDS
    }
    assert all(len(found) == 1 for found in hashes.values())
    assert hashes[0] != hashes[1]


def test_a_failing_method_is_reported_and_stops_no_other(comparison, out):
    assert [(cell.method, cell.seed) for cell in comparison.failed] == [("fedcpd", 0), ("fedcpd", 1)]
    assert len(comparison.cells) == 6
    text = (out / "comparison.md").read_text()
    assert "**Failed**: fedcpd, seed 1: method.name = 'fedcpd' is not usable" in text
    assert text == comparison.markdown()


def test_complete_runs_are_not_run_again(comparison, out):
    called = []
    again = compare(config(), METHODS[:2], seeds=np.array(SEEDS), out=out, progress=called.append)
    assert called == ["4 of 4 runs are complete: they are read, not run again"]
    assert [cell.summary for cell in again.cells] == [cell.summary for cell in comparison.cells[:4]]


def test_a_comparison_says_how_long_the_others_would_take(monkeypatch):
    now, seconds, lines = [0.0], iter([100.0, 200.0, 300.0]), []

    def take_a_while(configs, dataset, say):
        now[0] += next(seconds)
        return ["not run"] * len(configs)

    monkeypatch.setattr("fedjax_pfl.experiment.executors.run_program", take_a_while)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    compare(config(), METHODS, seeds=SEEDS, progress=lines.append)
    assert lines == [
        "program 1 of 3 (local, 2 runs): ended; 3 min left if the 2 to come take as long",
        "program 2 of 3 (fedprox, 2 runs): ended; 2 min left if the 1 to come take as long",
    ]


def test_an_interrupted_comparison_goes_on(comparison, tmp_path):
    class KilledError(Exception):
        pass

    def killed(line):
        if "fedprox" in line and "round" in line:  # a checkpoint has been written by then
            raise KilledError

    saving = config(run={"checkpoint_every": 1})
    with pytest.raises(KilledError):
        compare(saving, METHODS[:2], seeds=[0], out=tmp_path, progress=killed)
    assert not (tmp_path / "fedprox-seed0" / "summary.json").exists()
    shutil.rmtree(tmp_path / "fedprox-seed0" / "checkpoints" / "3", ignore_errors=True)
    resumed = []
    done = compare(saving, METHODS[:2], seeds=[0], out=tmp_path, progress=resumed.append)
    assert all("fedprox" in line for line in resumed[1:])
    expected = [simulate(config(method={"name": name})).summary["personal"] for name in METHODS[:2]]
    assert [cell.summary["personal"] for cell in done.cells] == expected
    # Complete runs go on to more rounds: from their checkpoints, and without losing the rounds that they had.
    longer = saving.replace("training.rounds", 4)
    more = compare(longer, METHODS[:1], seeds=[0], out=tmp_path)
    (cell,), whole = more.cells, simulate(config(method={"name": METHODS[0]}, training={"rounds": 4}))
    assert cell.history["round"].tolist() == [2, 3, 4]
    assert cell.summary["personal"]["pre"]["last"] == whole.summary["personal"]["pre"]["last"]
    with pytest.raises(ConfigError, match=r"training\.rounds = .*, as in the complete run in"):
        compare(saving, METHODS[:1], seeds=[0], out=tmp_path)


def test_hyperparameters_are_given_per_method(comparison, out, tmp_path):
    options = {"local": {}, "fedprox": {"mu": 0.5, "training.lr": 0.2}}
    found = compare(config(), options, seeds=[0], out=tmp_path / "table")
    assert [cell.config.method for cell in found.cells] == [{"name": "local"}, {"name": "fedprox", "mu": 0.5}]
    assert "its own: fedprox: mu=0.5, training.lr=0.2." in found.markdown()
    alone = simulate(config(method={"name": "fedprox", "mu": 0.5}).replace("training.lr", 0.2))
    assert found.by_seed("fedprox")[0] == alone.summary["personal"]["pre"]["last"]
    path = tmp_path / "config.toml"
    path.write_text(config().to_toml())
    command = ["compare", str(path), "--methods", "local,fedprox", "--out", str(tmp_path / "table")]
    changes = ["--set", "fedprox.mu=0.5", "--set", "fedprox.training.lr=0.2"]
    shown = CliRunner().invoke(app, [*command, *changes, "--quiet"])  # what is there is not run again
    assert shown.exit_code == 0, shown.output
    for wrong, message in [
        ("fedprox", r"--set = 'fedprox' is not usable: expected method\.key=value"),
        ("ditto.lam=1", "one of the methods compared: local, fedprox"),
        ("fedprox.nu=1.0", r"methods\.fedprox\.nu = 1\.0 is not usable: no such key of fedprox"),
        ("fedprox.data.clients=3", "methods.fedprox = 'data.clients' .* its hyperparameters, or a field of training"),
        ("fedprox.name=local", "methods.fedprox = 'name' .* its hyperparameters, or a field of training"),
    ]:
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, [*command, "--set", wrong], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"methods\.fedprox = 'method\.mu' is not usable: each field once"):
        compare(config(), {"fedprox": {"mu": 0.5, "method.mu": 1.0}})


def test_a_variant_of_a_method_has_a_name_of_its_own(tmp_path):
    variants = {"fedprox": {}, "a strong pull": {"method": "fedprox", "mu": 5.0}}
    found = compare(config(), variants, seeds=[0], out=tmp_path / "table", baseline="a strong pull")
    assert [cell.config.method["mu"] for cell in found.cells] == [0.01, 5.0]
    assert [cell.summary["timing"]["runs_in_the_program"] for cell in found.cells] == [2, 2]
    alone = simulate(config(method={"name": "fedprox", "mu": 5.0})).summary["personal"]["pre"]["last"]
    assert found.by_seed("a strong pull")[0] == pytest.approx(alone)
    assert "its own: a strong pull: fedprox, mu=5.0." in found.markdown()
    assert found.differences()["method"].tolist() == ["fedprox"]
    assert [row["method"] for row in found.rows()] == ["fedprox", "a strong pull"]
    path = tmp_path / "config.toml"
    path.write_text(config().to_toml())
    command = ["compare", str(path), "--methods", "fedprox, a strong pull = fedprox", "--set", "a strong pull.mu=5.0"]
    shown = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "table"), "--quiet"])  # nothing is run again
    assert shown.exit_code == 0, shown.output
    for methods, message in [
        (
            {"big": {"mu": 1.0}},
            r"methods = 'big' .*allowed: .*; or, of a variant, \{\"method\": \"fedprox\", \"mu\": 1.0\}",
        ),
        ([len], r"methods = <built-in function len> .*allowed: .*; register_method gives a function a name"),
        ({"big": {"method": ["fedprox"]}}, r"methods\.big = \['fedprox'\] is not usable: did you mean fedprox"),
        ({"big": {"method": "fedprx"}}, r"methods\.big = 'fedprx' is not usable: did you mean fedprox\?"),
        (
            {"local": {"method": "fedprox"}},
            "methods = 'local' is not usable: a name of its own for a variant of fedprox",
        ),
        ({"big": {"method": "fedprox", "nu": 1.0}}, r"methods\.big\.nu = 1\.0 is not usable: no such key of fedprox"),
    ]:
        with pytest.raises(ConfigError, match=message):
            compare(config(), methods, out=tmp_path / "table")


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_while_a_program_ends_ends_the_comparison(number, raised, tmp_path, monkeypatch):
    record = Course.record

    def with_a_signal(course, *arguments):
        record(course, *arguments)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Course, "record", with_a_signal)
    with pytest.raises(raised):
        compare(config(run={"eval_every": 3}), METHODS[:2], seeds=[0], out=tmp_path)
    assert [path.parent.name for path in tmp_path.glob("*/summary.json")] == ["local-seed0"]


def synthetic():
    """Three methods, the second judged by POST, with figures that are easy to follow."""

    def summary(headline, pre, post, shared):
        def judged(last):
            found = {"last": last, "best": last + 0.01, "std_clients": 0.1, "worst_10_percent": last - 0.2}
            return found | {"weighted_last": last, "weighted_best": last + 0.02}

        return {
            "headline": headline,
            "personal": {"pre": judged(pre), "post": judged(post)},
            "global": shared,
            "traffic": {"megabytes_total": 2.0},
            "timing": {"seconds_per_round": 0.5},
        }

    cells = []
    for seed, shift in enumerate((0.0, 0.01, 0.04)):
        cells += [
            cell("local", seed, summary("post", 0.5, 0.5 + shift, None)),
            cell("fedavg", seed, summary("pre", 0.7 + 2 * shift, 0.6, 0.4)),
            cell("ditto", seed, summary("post", 0.6, 0.72, 0.4 + shift)),
        ]
    return Comparison(config(), cells, "local")


def cell(method, seed, summary):
    values = {"method.name": method, "run.seed": seed}
    return Cell(values, config(method={"name": method}, run={"seed": seed}), summary)


def test_the_table_by_hand():
    table = synthetic()
    lines = [line.strip("| ").split(" | ") for line in table.markdown().splitlines() if line.startswith("| ")]
    named = {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:]}
    fedavg = np.array([0.7, 0.72, 0.78])
    mean, std = 100 * np.mean(fedavg), 100 * np.std(fedavg, ddof=1)
    assert named["fedavg"]["PRE"] == f"**{mean:.2f} ± {std:.2f}** *"
    assert "\n\nAccuracy in % on test samples, mean over seeds" in table.markdown()
    assert named["ditto"]["PRE"] == "60.00 ± 0.00"  # compared at PRE, though judged by POST
    assert named["ditto"]["POST"] == "72.00 ± 0.00 *"
    columns = ("best", "best weighted", "std of clients", "worst 10 %")
    assert [named["ditto"][name] for name in columns] == [f"{x}.00 ± 0.00" for x in (73, 74, 10, 52)]
    assert (named["local"]["global"], named["fedavg"]["global"]) == ("—", "40.00 ± 0.00")
    assert (named["local"]["MB"], named["local"]["s per round"]) == ("2.0", "0.500")
    assert [f"{sent:.{decimals(sent)}f}" for sent in (0, 0.0187, 0.4, 12.34)] == ["0.0", "0.019", "0.40", "12.3"]
    test = stats.ttest_1samp(fedavg - 0.5, 0.0)
    low, high = test.confidence_interval(0.95)
    assert named["fedavg"]["difference"] == f"{mean - 50:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
    assert named["ditto"]["difference"] == "+10.00"  # the same three times over: no spread to judge by
    assert named["fedavg"]["p"] == f"{test.pvalue:.3g}"  # the only test: nothing to correct
    assert (named["ditto"]["p"], named["local"]["p"], named["local"]["difference"]) == ("—", "—", "—")
    at_post = table._replace(point="post").markdown()
    assert "**72.00 ± 0.00** *" in at_post
    rows = list(csv.DictReader(table.csv().splitlines()))
    assert len(rows) == 9
    assert rows[0]["global"] == ""
    assert float(rows[1]["headline"]) == 0.7


def test_p_values_are_corrected_and_other_clients_have_no_interval():
    found = synthetic().differences("post")  # at POST, both rows have a test
    assert found["p_holm"].tolist() == holm(found["p"].tolist()) != found["p"].tolist()
    cells = [
        cell._replace(clients={"pre_accuracy": np.full(3 + (cell.method == "fedavg"), 0.5)})
        for cell in synthetic().cells
    ]
    found = synthetic()._replace(cells=cells).differences().set_index("method")
    assert np.isnan(found.loc["fedavg", "clients_low"])
    assert not np.isnan(found.loc["ditto", "clients_low"])


def test_a_difference_says_on_how_many_seeds_it_stands():
    """Six seeds each, of which one is the same."""
    one = {cell.method: cell for cell in synthetic().cells if cell.seed == 0}
    seeds = {"local": range(6), "fedavg": range(5, 11), "ditto": range(6)}

    def row(text, method):
        headings, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
        return next(dict(zip(headings, row, strict=True)) for row in rows if row[0] == method)

    cells = [cell(method, seed, one[method].summary) for method, of in seeds.items() for seed in of]
    text = Comparison(config(), cells, "local").markdown()
    assert row(text, "fedavg")["difference"] == "+20.00 (1 seed)"
    assert row(text, "ditto")["difference"] == "+10.00"
    assert "**One seed**: too few" in text
    assert "Not compared" not in text
    text = Comparison(config(), [of for of in cells if of.seed != 5], "local").markdown()
    assert row(text, "fedavg")["difference"] == "—"
    assert "**Not compared**: fedavg: the baseline has no run of the same seed in the same data setting." in text
    assert "too few" not in text
    failed = cells[0]._replace(summary=None, error="it broke")
    text = Comparison(config(), [failed, *cells[6:]], "local").markdown()
    assert "**Not compared**: fedavg; ditto: the baseline" in text
    assert "Difference: " not in text


def test_rows_whose_means_print_alike_are_all_bold():
    local, fedavg, ditto = (of for of in synthetic().cells if of.seed == 0)
    alike = {**ditto.summary["personal"], "pre": fedavg.summary["personal"]["pre"] | {"last": 0.70001}}
    for other, bold in ((ditto, 1), (ditto._replace(summary={**ditto.summary, "personal": alike}), 2)):
        text = Comparison(config(), [local, fedavg, other], "local").markdown()
        assert text.count("**70.00**") == bold


def test_bold_goes_by_what_is_printed():
    """The means are equal, and are printed as 35.32 and 35.33."""
    one = next(of for of in synthetic().cells if of.method == "fedavg")
    figures = {"fedavg": (0.389, 0.392, 0.326, 0.306), "ditto": (0.392, 0.389, 0.328, 0.304)}
    cells = []
    for method, accuracies in figures.items():
        for seed, accuracy in enumerate(accuracies):
            personal = {**one.summary["personal"], "pre": one.summary["personal"]["pre"] | {"last": accuracy}}
            cells.append(cell(method, seed, {**one.summary, "personal": personal}))
    text = Comparison(config(), cells, "fedavg").markdown()
    assert "| 35.32 ± 4.38 * |" in text
    assert "| **35.33 ± 4.41** * |" in text


def test_a_legend_is_of_the_columns_that_there_are():
    text = synthetic().markdown()
    assert "Difference: PRE minus that of local, mean of" in text
    assert "p: paired t-test" in text
    assert "Over clients: " not in text, "nothing is known of the clients"
    alone = Comparison(config(), [cell for cell in synthetic().cells if cell.method == "local"], "local").markdown()
    assert "| difference |" not in alone
    for column in ("Difference: ", "Over clients: ", "p: "):
        assert column not in alone
    assert "Not compared" not in alone


def test_one_row_is_compared_with_none_whatever_its_seeds():
    alone = Comparison(config(), [cell for cell in synthetic().cells if cell.method == "local"], "local").markdown()
    assert "too few" in synthetic().markdown()
    assert "too few" not in alone


def test_a_table_says_if_its_runs_were_made_with_several_versions():
    versions = {"local": {"fedjax_pfl": "0.1.0", "jax": "0.9"}, "fedavg": {"fedjax_pfl": "0.2.0", "jax": "0.9"}}

    def text(of):
        cells = [
            cell._replace(summary={**cell.summary, "environment": {**of.get(cell.method, {}), "platform": cell.method}})
            for cell in synthetic().cells
        ]
        return Comparison(config(), cells, "local").markdown()

    assert "**Several versions**: runs were made with fedjax_pfl 0.1.0; fedjax_pfl 0.2.0: their numbers may" in text(
        versions
    )
    assert "Several versions" not in text({"local": versions["local"]})
    assert "Several versions" not in synthetic().markdown()


def test_a_table_says_once_what_is_to_be_known_of_the_data():
    notes = {0: ["some users"], 1: ["some users", "one client is short"], 2: ["some users", "one client is short"]}
    cells = [cell._replace(summary={**cell.summary, "notes": notes[cell.seed]}) for cell in synthetic().cells]
    said = [line for line in Comparison(config(), cells, "local").markdown().splitlines() if "**Data**" in line]
    assert said == ["**Data**: some users", "**Data**: one client is short (seed 1; seed 2)"]
    assert "**Data**" not in synthetic().markdown(), "version 0.1 recorded none"


def test_differences_are_the_tables_as_numbers():
    table = synthetic()
    found = table.differences().set_index("method")
    assert list(found.index) == ["fedavg", "ditto"]
    test = stats.ttest_1samp(np.array([0.7, 0.72, 0.78]) - 0.5, 0.0)
    low, high = test.confidence_interval(0.95)
    expected = [np.mean([0.2, 0.22, 0.28]), low, high, test.pvalue, test.pvalue, 3]
    np.testing.assert_allclose(found.loc["fedavg", ["difference", "low", "high", "p", "p_holm", "seeds"]], expected)
    assert found.loc["ditto", "difference"] == pytest.approx(0.1)
    assert found.loc[:, ["clients_low", "clients_high"]].isna().all(axis=None), "nothing is known of the clients"
    at_post = table.differences("post").set_index("method")
    assert at_post.loc["fedavg", "difference"] == pytest.approx(0.6 - np.mean([0.5, 0.51, 0.54]))
    with pytest.raises(ConfigError, match="point = 'last'"):
        table.differences("last")


def test_numbers_are_of_the_point_at_which_the_table_compares():
    post = synthetic()._replace(point="post")
    assert post.by_seed("local") == pytest.approx({0: 0.5, 1: 0.51, 2: 0.54})
    assert synthetic().by_seed("local") == pytest.approx(dict.fromkeys(range(3), 0.5))
    assert post.differences().equals(synthetic().differences("post"))
    assert not post.differences().equals(synthetic().differences())
    assert post.pivot().loc["local", "post"] == pytest.approx(np.mean([0.5, 0.51, 0.54]))
    cells = [cell for cell in synthetic().cells if cell.method != "ditto"]
    swept = Sweep(cells, {"method.name": "local"}, "post")
    assert swept.differences().equals(Sweep(cells, {"method.name": "local"}).differences("post"))
    assert swept.pivot().loc["local", "post"] == pytest.approx(np.mean([0.5, 0.51, 0.54]))


def test_the_interval_over_clients_is_of_those_that_the_mean_is_over():
    """The last two of five clients are new, and fare otherwise."""
    cells = []
    for method, gap in (("local", 0.0), ("fedavg", 0.1)):
        one = next(cell for cell in synthetic().cells if cell.method == method)
        accuracy = np.array([0.5, 0.6, 0.7, 0.0, 0.0]) + gap * np.array([1, 1, 1, 9, 9])
        cells.append(one._replace(clients={"pre_accuracy": accuracy, "new": np.array([0, 0, 0, 1, 1])}))
    found = Comparison(config(), cells, "local").differences().iloc[0]
    np.testing.assert_allclose(found[["clients_low", "clients_high"]].astype(float), [0.1, 0.1])


def test_runs_on_other_samples_are_not_mixed_into_a_table(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 16)).astype(np.float32), np.arange(300) % 10
    of_arrays = config(data={"source": "arrays"}, training={"rounds": 1}, run={"checkpoint_every": 1})
    assert not compare(of_arrays, ["local"], data=(x, y), out=tmp_path).failed
    for methods in (["local"], ["local", "fedprox"]):
        with pytest.raises(
            ConfigError, match=r"out = '.*local-seed0' .* other samples: the run in this one had others"
        ):
            compare(of_arrays, methods, data=(x + 1, y), out=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["local-seed0"]
    assert len(compare(of_arrays, ["local"], data=(x, y), out=tmp_path).cells) == 1
    longer = of_arrays.replace({"method.name": "local", "training.rounds": 2})
    with pytest.raises(ConfigError, match=r"resume = .*local-seed0' .* other samples"):
        simulate(longer, (x + 1, y), resume=tmp_path / "local-seed0")


def test_runs_on_other_rows_of_the_same_file_are_not_mixed_into_a_table(tmp_path):
    file, out = tmp_path / "rows.npz", tmp_path / "out"

    def write(first):
        np.savez(file, **{str(client): np.arange(first, first + 20) + 20 * client for client in range(5)})

    def methods(*names):
        changes = {"data.partition": {"kind": "indices", "file": str(file)}, "data.samples_per_client": None}
        return compare(config(training={"rounds": 1}).replace(changes), names, out=out)

    write(0)
    assert not methods("local").failed
    write(100)
    with pytest.raises(ConfigError, match=r"data.partition.file = .*rows.npz' .* of the run in .*local-seed0"):
        methods("local", "fedavg")
    write(0)
    assert not methods("local", "fedavg").failed


def test_the_same_samples_of_other_users_or_with_another_test_part_are_other_data():
    x, y = np.zeros((30, 4), np.float32), np.arange(30) % 3
    users, others = np.arange(30) % 5, np.arange(30) % 6
    divided = [[(x[of == user], y[of == user]) for user in range(5)] for of in (np.sort(users), np.sort(others) % 5)]
    data = [
        (x, y),
        (x[:20], y[:20], x[20:], y[20:]),
        (x[:15], y[:15], x[15:], y[15:]),
        FederatedData(x, y, users=users),
        FederatedData(x, y, users=others),
        *divided,
    ]
    assert len({fingerprint(as_dataset(of)) for of in data}) == len(data)


def test_what_a_kill_before_the_first_round_leaves_is_begun_anew(comparison, tmp_path):
    folder = tmp_path / "local-seed0"
    folder.mkdir()
    for name in (".lock", ".config.toml.partial"):
        (folder / name).write_text("")
    (cell,) = compare(config(), METHODS[:1], seeds=[0], out=tmp_path).cells
    assert cell.error is None
    assert (folder / "summary.json").exists()


def test_the_table_says_what_guessing_gives_and_what_one_method_has_of_its_own():
    table = synthetic()
    assert "Always answering" not in table.markdown(), "summaries of version 0.1 do not say"
    for number, cell in enumerate(table.cells):
        cell.summary["majority_class"] = {"accuracy": 0.25 + 0.25 * (number // 3), "weighted": 0.0}
    cells = [
        cell._replace(config=cell.config.replace("training.lr", 0.3)) if cell.method == "fedavg" else cell
        for cell in table.cells
    ]
    text = table._replace(cells=cells).markdown()
    assert "that a client has most training samples of: 50.00 ± 25.00 %." in text
    assert "What one method has of its own: fedavg: training.lr=0.3." in text


@pytest.mark.parametrize(
    ("kept", "asked", "refusal"),
    [
        ({"keep": "none"}, {}, r"run\.keep = 'final' is not usable: \"none\""),
        ({}, {"client_history": True}, r"run\.client_history = True is not usable: false"),
        ({"export": ["features"]}, {"export": ["predictions"]}, r"run\.export = .* is not usable: \[\"features\"\]"),
        (
            {"export": ["features"], "export_clients": [1, 2]},
            {"export": ["features"]},
            r"run\.export_clients = None",
        ),
    ],
)
def test_what_complete_runs_have_not_kept_cannot_be_asked_for(kept, asked, refusal, out, comparison, tmp_path):
    run = shutil.copytree(out / "local-seed0", tmp_path / "local-seed0")
    (run / "config.toml").write_text(config(method={"name": "local"}, run={**kept, "out": str(run)}).to_toml())
    with pytest.raises(ConfigError, match=f"{refusal}.*, as in the complete run in"):
        compare(config(run=asked), ["local"], seeds=[0], out=tmp_path)
    less = compare(config(run={"keep": "none"}), ["local"], seeds=[0], out=tmp_path)
    assert less.cells[0].summary == comparison.cells[0].summary


def test_other_settings_are_not_mixed_into_a_table(comparison, out):
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"config = 'training\.lr=0\.2' is not usable: what the run in .*local-seed0"):
        compare(config(training={"lr": 0.2}), METHODS[:2], seeds=SEEDS, out=out)
    with pytest.raises(ConfigError, match=r"training\.rounds = 5 is not usable: 3, as in the complete run"):
        compare(config(training={"rounds": 5}), METHODS[:1], seeds=[0], out=out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_damaged_summary_is_named(comparison, out, tmp_path):
    shutil.copytree(out, tmp_path / "table")
    path = tmp_path / "table" / f"{METHODS[0]}-seed0" / "summary.json"
    for damaged in ("{", "[]", "{}"):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=rf"summary = '{path}' is not usable: the summary of a run"):
            compare(config(), METHODS[:1], seeds=[0], out=tmp_path / "table")


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        (["fedavg", "fedsgd"], {}, r"methods = 'fedsgd' is not usable: allowed: local, fedavg, "),
        (["fedavg", "fedavg"], {}, r"methods = .* one or more, each of them once"),
        ([["fedavg"]], {}, r"methods = \['fedavg'\] is not usable: "),
        (["fedavg"], {"seeds": [[0]]}, r"run\.seed = \[0\] "),
        (["fedavg"], {"seeds": []}, r"seeds = \[\] is not usable: one or more"),
        (["fedavg"], {"seeds": [-1]}, r"run\.seed = -1 "),
        (
            {"fedprox": {"nu": 1.0}},
            {},
            r"methods\.fedprox\.nu = 1\.0 is not usable: no such key of fedprox; allowed: mu",
        ),
        ("fedavg", {}, r"methods = 'fedavg' is not usable: a list of names"),
        ({"fedavg": None}, {}, r"methods\.fedavg = None is not usable: a mapping"),
        (["fedavg"], {"seeds": 3}, r"seeds = 3 is not usable: a list of seeds"),
        (["local", "fedcpd"], {"data": (np.ones((9, 4)), np.ones(8, int))}, r"8 labels"),
        (["fedavg"], {"point": "best"}, r"point = 'best' is not usable: pre \(after"),
        (["fedavg"], {"baseline": "local"}, r"baseline = 'local' is not usable: one of the methods compared: fedavg"),
        ({"a|b": {"method": "fedprox"}}, {}, r"methods = 'a\|b' is not usable: .* without \"\|\" and line breaks"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(methods, options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        compare(config(), methods, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_directory_of_a_single_run_is_no_folder_for_many(comparison, out):
    with pytest.raises(ConfigError, match=r"^out = .* a folder for many runs: this is the run directory of a single"):
        compare(config(), METHODS, out=out / "fedprox-seed0")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"data": {"clients": 500}}, r"data\.samples_per_client = 24 "),
        ({"data": {"samples_per_client": None, "clients": 900}}, r"data\.clients = 900 "),
        ({"training": {"drop_last": True, "batch_size": 60}}, r"training\.batch_size = 60 "),
        ({"run": {"checkpoint_every": 1}}, r"run\.checkpoint_every = 1 .* nothing without out"),
        ({"run": {"export": ["predictions"]}}, r"run\.export = .* nothing without out"),
        ({"run": {"client_history": True}}, r"run\.client_history = True .* nothing without out"),
        (
            {"run": {"out": "runs/x"}},
            r"run\.out = 'runs/x' is not usable: leave it out, and give out=\"\.\.\.\", a folder",
        ),
    ],
)
def test_what_is_wrong_with_all_runs_is_one_error(tables, message, monkeypatch):
    monkeypatch.setattr("fedjax_pfl.experiment.programs._compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ConfigError, match=message):
        compare(config(**tables), ["fedavg", "local"])


def test_data_from_python_stand_in_the_place_of_the_source(tmp_path):
    x, y = np.zeros((200, 4), np.float32), np.arange(200) % 3
    result = simulate(config(training={"rounds": 1}, run={"out": str(tmp_path / "run")}), (x, y))
    assert (result.config.data.source, result.summary["dataset"]) == ("arrays", "arrays")
    assert 'source = "arrays"' in (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(ConfigError, match=r"grid\.data\.source = .*nothing: data are given in its place"):
        sweep(config(), {"data.source": ["digits", "npz:no"]}, data=(x, y))


def test_the_command_prints_the_table(comparison, out, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(config().to_toml())
    arguments = ["compare", str(path), "--methods", "local,fedprox", "--seeds", "0,1", "--out", str(out)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "fedprox" in shown.output
    assert "worst 10 %" in shown.output
    failing = CliRunner().invoke(app, [*arguments[:3], "fedcpd,local", *arguments[4:], "--quiet"])
    assert failing.exit_code == 1
    assert "Failed: fedcpd" in failing.output


def test_methods_that_cannot_run_say_why(monkeypatch):
    found = refusals(config(), list(EVERY))
    assert "it needs a model with a projection head" in found["pfedcspc"]
    assert "needs a model with feature maps" in found["fedcpd"]
    assert not {"local", "fedavg", "fedrep", "ditto", "scaffold", "fedala"} & found.keys()
    assert "fedcpd" not in refusals(config().replace({"model.name": "cnn_digits"}), ["fedavg", "fedcpd"])
    monkeypatch.setitem(EVERY, "fedrep", lambda *args: EVERY["fedavg"](*args)._replace(selects=True))
    assert "selects on validation samples" in refusals(config(), ["fedavg", "fedrep"])["fedrep"]
    assert not refusals(config(data={"validation_share": 0.2}), ["fedavg", "fedrep"])
    with pytest.raises(ConfigError, match=r"model\.name = 'char_lstm' is not usable: it reads text"):
        refusals(config().replace({"model.name": "char_lstm"}), ["fedavg", "fedrep"])


def test_an_unforeseen_failure_is_reported_and_stops_no_other(monkeypatch, caplog):
    def broken(*args):
        def local(now, view, client, data):
            raise ArithmeticError("of someone's own\nand more")

        return EVERY["fedavg"](*args)._replace(local=local)

    monkeypatch.setitem(EVERY, "fedprox", broken)
    found = compare(config(), ["fedprox", "local"], seeds=[0])
    assert [cell.error for cell in found.cells] == ["ArithmeticError: of someone's own", None]
    assert "Traceback" in caplog.text


def test_methods_that_cannot_be_private_say_why():
    private = config().replace({"privacy.clip": 1.0, "privacy.noise": 0.0, "participation.ratio": 1.0})
    assert list(refusals(private, ["fedavg", "scaffold"])) == ["scaffold"]


def test_of_all_methods_the_command_leaves_out_those_that_cannot_run(comparison, out, tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text(config().to_toml())
    monkeypatch.setattr("fedjax_pfl.methods.METHODS", {name: EVERY[name] for name in METHODS})
    arguments = ["compare", str(path), "--methods", "all", "--seeds", "0,1", "--out", str(out)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[0].startswith("fedcpd is left out: method.name = 'fedcpd' is not usable: ")
    assert "feature maps" in shown.output.splitlines()[0]
    assert shown.output.count("fedcpd") == 2
    assert "fedprox" in shown.output
    meant = CliRunner().invoke(app, [*arguments, "--set", "fedcpd.gamma=2.0", "--quiet"])
    assert meant.exit_code == 1
    assert "Failed: fedcpd" in meant.output
