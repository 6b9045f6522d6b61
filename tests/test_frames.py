"""Results, comparisons and sweeps as pandas frames, LaTeX and client history; grids with a method's own values."""

import csv
import itertools
import json
import math
import re
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import Comparison, Config, ConfigError, Sweep, compare, register_metric, simulate, sweep
from fedjax_pfl.experiment.tables import Cell
from tests.interruption import KilledError, killed_after

pandas = pytest.importorskip("pandas", reason="pandas is not installed")

GRID = {"method.name": ["fedcpd", "fedavg", "fedprox"], "fedprox.mu": [0.01, 5.0], "run.seed": [0, 1]}


def config(**tables):
    base = {
        "data": {"source": "digits", "clients": 4, "samples_per_client": 20, "partition": {"kind": "dirichlet"}},
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": "fedavg"},
        "training": {"rounds": 2, "batch_size": 16, "lr": 0.1},
        "run": {"placement": "shard"},  # several runs go through the program of one
    }
    for section, fields in tables.items():
        base[section] = {**base.get(section, {}), **fields}
    return Config(**base)


def recorded(out, rounds=4, **run):
    tables = {"eval_every": 1, "checkpoint_every": 2, "client_history": True, "out": str(out)}
    return config(training={"rounds": rounds}, run={**tables, **run})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four rounds, each evaluated, with the history of its clients; and its directory."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return simulate(recorded(out)), out


def read(path):
    """Column -> numbers, by the standard library."""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def assert_columns(frame, expected):
    assert list(frame.columns) == list(expected)
    assert list(frame.index) == list(range(len(frame)))  # tidy: everything is a column
    for name, values in expected.items():
        np.testing.assert_array_equal(frame[name].to_numpy(), values)


def flat(line):
    tables = {
        key: {f"{key}.{name}": x for name, x in value.items()} if isinstance(value, dict) else {key: value}
        for key, value in line.items()
    }
    return {name: x for table in tables.values() for name, x in table.items()}


def test_a_history_as_a_frame(whole):
    lines = [flat(json.loads(line)) for line in (whole[1] / "metrics.jsonl").read_text().splitlines()]
    frame = whole[0].to_frame()
    assert_columns(frame, {name: [line[name] for line in lines] for name in lines[0]})
    assert list(frame["round"]) == [1, 2, 3, 4]
    assert frame["round"].dtype.kind == "i"


def test_clients_as_a_frame(whole):
    frame = whole[0].clients_frame()
    assert_columns(frame, read(whole[1] / "clients.csv"))
    assert list(frame["client"]) == [0, 1, 2, 3]


def test_the_history_of_clients_is_what_shorter_runs_end_with(whole, tmp_path):
    """A run of t rounds ends with the clients' scores after round t."""
    result, out = whole
    columns = ["round", "client", "pre_accuracy", "pre_macro_f1", "post_accuracy", "post_macro_f1"]
    frame = result.clients_frame(history=True)
    assert_columns(frame, result.client_history)
    assert_columns(frame, read(out / "client_history.csv"))
    assert list(frame.columns) == columns
    assert list(zip(frame["round"], frame["client"], strict=True)) == list(itertools.product([1, 2, 3, 4], range(4)))
    ends = {2: simulate(recorded(tmp_path / "run", rounds=2)), 4: result}
    for round, ended in ends.items():
        held = frame[frame["round"] == round]
        for name in columns[1:]:
            np.testing.assert_array_equal(held[name], ended.clients[name])
    # NaN, of a client without test samples, counts in neither mean.
    means = frame.groupby("round")["post_accuracy"].mean()
    np.testing.assert_allclose(means, result.history["post.accuracy"], rtol=1e-6)
    assert means.nunique() > 1


def test_the_history_of_clients_is_off_unless_asked_for(whole, tmp_path):
    result = simulate(recorded(tmp_path / "run", rounds=2, client_history=False))
    assert result.client_history == {}
    assert not (tmp_path / "run" / "client_history.csv").exists()
    with pytest.raises(ConfigError, match=r"history = True is not usable: false, .* run\.client_history = true"):
        result.clients_frame(history=True)
    longer = simulate(recorded(tmp_path / "run"), resume=tmp_path / "run")  # from here on
    assert list(longer.clients_frame(history=True)["round"]) == [3] * 4 + [4] * 4
    expected = (whole[1] / "client_history.csv").read_text().splitlines()
    assert (tmp_path / "run" / "client_history.csv").read_text().splitlines() == expected[:1] + expected[9:]


@pytest.mark.parametrize("cut", ["", "1", "1,0,0.5,0.25,0.", "3,3,1.0,1.0,1.0,1.0\r"])
def test_a_killed_run_goes_on_to_the_same_history(cut, whole, tmp_path):
    """The kill comes after the evaluation of round 3, or in the middle of a row, back to the checkpoint of round 2."""
    out = tmp_path / "run"
    with pytest.raises(KilledError):
        simulate(recorded(out), progress=killed_after(3))
    path = out / "client_history.csv"
    kept = path.read_bytes().splitlines(keepends=True)
    assert len(kept) == 13  # a heading, and rounds 1 to 3
    path.write_bytes(b"".join(kept[:11]) + cut.encode())
    result = simulate(recorded(out), resume=out)
    assert path.read_bytes() == (whole[1] / "client_history.csv").read_bytes()
    for name, values in whole[0].client_history.items():
        np.testing.assert_array_equal(result.client_history[name], values)
        assert result.client_history[name].dtype == values.dtype


def test_a_run_killed_before_its_first_checkpoint_leaves_no_rows(whole, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KilledError):
        simulate(recorded(out), progress=killed_after(1))
    assert len((out / "client_history.csv").read_text().splitlines()) == 5  # a heading, and round 1
    assert not (out / "checkpoints").exists()
    again = simulate(recorded(out), overwrite=True)
    assert len(again.client_history["round"]) == 16
    assert (out / "client_history.csv").read_bytes() == (whole[1] / "client_history.csv").read_bytes()


def test_a_damaged_history_of_clients_is_named(whole, tmp_path):
    out = shutil.copytree(whole[1], tmp_path / "run")
    (out / "summary.json").unlink()
    (out / "client_history.csv").write_text("round,client\n1,0\nx,1\n")
    with pytest.raises(ConfigError, match=r"run\.client_history = '.*history\.csv' is not usable: a table of numbers"):
        simulate(recorded(out), resume=out)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep") / "grid"


@pytest.fixture(scope="module")
def swept(out):
    """FedCPD asks for feature maps, which an MLP has not: it fails, and comes first."""
    return sweep(config(), GRID, out=out)


def test_a_hyperparameter_of_one_method_is_combined_with_its_runs_only(swept, out):
    plain = [{"method.name": name, "run.seed": seed} for name in ("fedcpd", "fedavg") for seed in (0, 1)]
    of_prox = [{"method.name": "fedprox", "fedprox.mu": mu, "run.seed": seed} for mu in (0.01, 5.0) for seed in (0, 1)]
    assert [cell.values for cell in swept.cells] == plain + of_prox
    assert [cell.config.method.get("mu") for cell in swept.cells] == [None] * 4 + [0.01, 0.01, 5.0, 5.0]
    assert (out / "method.name=fedprox,fedprox.mu=5.0,run.seed=1" / "summary.json").exists()
    assert [cell.summary["timing"]["runs_in_the_program"] for cell in swept.cells[2:]] == [2, 2, 4, 4, 4, 4]
    losses = [cell.history["train_loss"][-1] for cell in swept.cells[2:]]
    assert losses[4] > losses[0]  # mu = 5 holds fedprox back
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-2)
    table = swept.markdown()
    assert "| fedprox, fedprox.mu=5.0 |" in table
    assert "| fedavg |" in table


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"fedprox.mu": [0.1]}, r"grid\.fedprox\.mu = \[0\.1\] is not usable: a hyperparameter of .* is run: fedavg"),
        (
            {"method.name": ["fedavg", "fedprox"], "fedprox.nu": [0.1]},
            r"method\.nu = 0\.1 is not usable: no such key of fedprox; allowed: mu",
        ),
        (
            {"method.name": ["fedprox"], "fedprox.mu": [0.1], "method.mu": [0.2]},
            r"grid\.fedprox\.mu = \[0\.1\] is not usable: nothing beside method\.mu",
        ),
        (
            {"method.name": ["fedprox", "fedavg"], "method.mu": [0.1]},
            r"method\.mu = 0\.1 is not usable: no such key of fedavg; .*; as METHOD\.mu, the grid gives it to that",
        ),
        ({"method.mu": [0.1]}, r"method\.mu = 0\.1 is not usable: no such key of fedavg; allowed: none$"),
        ({"fedproxx.mu": [0.1]}, r"fedproxx\.mu = 0\.1 is not usable: .*fedproxx is none of its tables"),
    ],
)
def test_hyperparameters_of_no_method_are_refused(grid, message):
    with pytest.raises(ConfigError, match=message):
        sweep(config(), grid)


def test_a_folder_becomes_the_same_frames_again(swept, out):
    lines = []
    ran = {**GRID, "method.name": GRID["method.name"][1:]}
    again = sweep(config(), ran, out=shutil.copytree(out, out.parent / "copy"), progress=lines.append)
    assert lines == ["6 of 6 runs are complete: they are read, not run again"]
    for history in (False, True):
        before, now = (of.to_frame(history=history) for of in (swept._replace(cells=swept.cells[2:]), again))
        pandas.testing.assert_frame_equal(before, now)
    assert len(now) == 12  # two evaluated rounds of each
    folder = out.parent / "copy" / "method.name=fedavg,run.seed=0"
    for name, text in (("metrics.jsonl", ""), ("metrics.jsonl", "{}\n"), ("metrics.jsonl", "["), ("clients.csv", "")):
        whole = (folder / name).read_text()
        (folder / name).write_text(text)
        what = name.split(".")[0]
        with pytest.raises(ConfigError, match=rf"{what} = '.*{name}' is not usable: the {what} of a run; without summ"):
            sweep(config(), ran, out=out.parent / "copy")
        (folder / name).write_text(whole)


def test_runs_are_loaded_from_their_directories_as_a_sweep(swept, out, tmp_path):
    loaded, ended = Sweep.load(out), swept._replace(cells=swept.cells[2:])
    assert [cell.values for cell in loaded.cells] == [cell.values for cell in ended.cells]
    assert loaded.baseline == swept.baseline
    pandas.testing.assert_frame_equal(loaded.to_frame(), ended.to_frame())
    # Without the record, as an earlier version leaves it, fields go by the config's names and in its order.
    out = shutil.copytree(out, tmp_path / "old", ignore=shutil.ignore_patterns("sweep.json"))
    found = Sweep.load(out, baseline={"method.name": "fedavg"}, point="post")
    fields = [{"method.name": "fedavg", "run.seed": seed} for seed in (0, 1)]
    of_prox = [{"method.name": "fedprox", "run.seed": seed, "method.mu": mu} for mu in (0.01, 5.0) for seed in (0, 1)]
    assert [cell.values for cell in found.cells] == fields + of_prox
    before, now = ended.to_frame(), found.to_frame()
    pandas.testing.assert_frame_equal(now, before.rename(columns={"fedprox.mu": "method.mu"})[list(now.columns)])
    pandas.testing.assert_frame_equal(
        found.differences().drop(columns=["method.mu"]),
        swept._replace(baseline={"method.name": "fedavg"}, point="post").differences().drop(columns=["fedprox.mu"]),
    )
    one = out / "method.name=fedprox,fedprox.mu=5.0,run.seed=1"
    assert [cell.values for cell in Sweep.load(one).cells] == [{"method.name": "fedprox"}]
    two = Sweep.load(one, out / "method.name=fedavg,run.seed=1")
    assert [cell.values for cell in two.cells] == [{"method.name": "fedprox"}, {"method.name": "fedavg"}]
    assert two.cells[0].summary == swept.cells[-1].summary


def test_runs_that_have_not_ended_are_no_sweep(swept, out, tmp_path):
    begun = shutil.copytree(out / "method.name=fedavg,run.seed=0", tmp_path / "begun")
    (begun / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"paths = '.*begun' is not usable: runs of which one has ended"):
        Sweep.load(begun)
    ended = out / "method.name=fedavg,run.seed=1"
    assert [(cell.values, cell.seed) for cell in Sweep.load(begun, ended).cells] == [({"method.name": "fedavg"}, 1)]
    with pytest.raises(ConfigError, match=r"baseline = 'fedprox' is not usable: one of the combinations.*'fedavg'"):
        Sweep.load(ended, baseline={"method.name": "fedprox"})
    with pytest.raises(ConfigError, match="point = 'last' is not usable: pre"):
        Sweep.load(ended, point="last")
    with pytest.raises(ConfigError, match=r"paths = \(\[.*\],\) is not usable: directories, one by one: Sweep\.load"):
        Sweep.load([ended, begun])


def test_a_file_for_other_programs_has_all_columns_though_the_first_run_failed(swept, out):
    pytest.importorskip("pyarrow")
    frame = pandas.read_parquet(out / "sweep.parquet")
    assert list(frame.columns)[:3] == ["method.name", "fedprox.mu", "run.seed"]
    assert list(frame["headline"].isna()) == [True] * 2 + [False] * 6
    assert swept.csv().splitlines()[0].split(",") == list(frame.columns)


def test_a_comparison_as_frames():
    found = compare(config(), ["fedcpd", "fedavg"], seeds=[0, 1])
    frame = found.to_frame()
    assert list(frame.columns)[:3] == ["method", "seed", "headline"]
    assert list(frame["method"]) == ["fedcpd", "fedcpd", "fedavg", "fedavg"]
    assert list(frame["error"].notna()) == [True, True, False, False]
    assert frame["diverged_round"].isna().all()
    figures = [cell.summary["personal"]["pre"]["last"] for cell in found.cells[2:]]
    np.testing.assert_array_equal(frame["pre"], [math.nan, math.nan, *figures])
    curves = found.to_frame(history=True)
    assert list(curves.columns)[:4] == ["method", "seed", "round", "train_loss"]
    assert list(zip(curves["method"], curves["seed"], curves["round"], strict=True)) == [
        ("fedavg", 0, 1),
        ("fedavg", 0, 2),
        ("fedavg", 1, 1),
        ("fedavg", 1, 2),
    ]
    np.testing.assert_array_equal(curves["pre.accuracy"][1::2], figures)
    clients = found.clients_frame()
    assert list(clients.columns)[:3] == ["method", "seed", "client"]
    assert clients[["method", "seed", "client"]].to_numpy().tolist() == [
        ["fedavg", seed, client] for seed in (0, 1) for client in range(4)
    ]
    accuracies = np.concatenate([cell.clients["pre_accuracy"] for cell in found.cells[2:]])
    np.testing.assert_array_equal(clients["pre_accuracy"], accuracies)
    assert list(found.pivot().index) == ["fedcpd", "fedavg"]
    np.testing.assert_allclose(found.pivot()["pre"], [math.nan, np.mean(figures)])
    assert "% Failed: fedcpd, seed 1: method.name = 'fedcpd' is not usable" in found.to_latex()
    assert "\nfedcpd & --- & --- \\\\\n" in found.to_latex()


def test_scores_in_the_history_are_figures(tables_as_before, tmp_path):
    """Built-in ones and an own one, which is known by hand: twice the share of wrong answers."""

    @register_metric("twice_wrong")
    def twice_wrong(logits, labels):
        return jnp.where(jnp.argmax(logits, axis=-1) == labels, 0.0, 2.0)

    given = config(run={"metrics": ["twice_wrong"]})
    ran = compare(given, ["fedavg"], seeds=[0, 1], out=tmp_path / "table")
    loaded = Sweep.load(tmp_path / "table")
    first, *_ = ran.cells
    assert first.history["post.twice_wrong"][0] != first.history["post.twice_wrong"][-1]
    for point in ("pre", "post"):
        by_seed = ran.by_seed("fedavg", f"{point}.twice_wrong")
        expected = [2 * (1 - accuracy) for accuracy in ran.by_seed("fedavg", point).values()]
        np.testing.assert_allclose([by_seed[0], by_seed[1]], expected, rtol=1e-6)
        for name in ("twice_wrong", "macro_f1", "loss", "weighted", "std_clients", "worst_10_percent"):
            figure = f"{point}.{name}"
            last = [cell.history[figure][-1] for cell in ran.cells]
            assert ran.by_seed("fedavg", figure) == dict(enumerate(last))
            for table in (ran.pivot(values=figure), loaded.pivot(values=figure)):
                np.testing.assert_allclose(table[figure], [np.mean(last)], rtol=1e-12)
    np.testing.assert_allclose(ran.pivot(values="global_twice_wrong"), 2 * (1 - ran.pivot(values="global")), rtol=1e-6)

    own = ["pre.twice_wrong", "post.twice_wrong", "global_twice_wrong"]
    for frame in (ran.to_frame(), loaded.to_frame()):
        assert list(frame.columns)[-6:] == ["seconds_per_round", *own, "diverged_round", "error"]
        for name in own:
            np.testing.assert_array_equal(frame[name], [cell.history[name][-1] for cell in ran.cells])
    header, *_ = csv.reader((tmp_path / "table" / "comparison.csv").read_text().splitlines())
    assert header == list(ran.to_frame())

    comments, (headings, row) = parse(ran.to_latex(["pre", "pre.macro_f1", "post.loss", "pre.twice_wrong"]))
    assert headings == ["method", "PRE", "PRE macro-F1", "POST loss", r"PRE twice\_wrong"]
    last = {name: np.array([cell.history[name][-1] for cell in ran.cells]) for name in first.history}
    assert row[2] == plus_minus(100 * last["pre.macro_f1"])
    for entry, name in ((row[3], "post.loss"), (row[4], "pre.twice_wrong")):
        assert entry == rf"{np.mean(last[name]):.4f} $\pm$ {np.std(last[name], ddof=1):.4f}"
    assert "In %, except POST loss, PRE twice_wrong, on test samples" in comments[0]

    known = r"headline, pre, .*seconds_per_round, pre\.twice_wrong, post\.twice_wrong, .*pre\.macro_f1, .*post\.loss"
    for ask in (lambda: ran.by_seed("fedavg", "twice_wrong"), lambda: loaded.pivot(values="pre.ece")):
        with pytest.raises(ConfigError, match=rf"(figure|values) = .* is not usable: .*allowed: {known}"):
            ask()


def test_a_frame_without_rows_has_the_columns_of_one_with_rows():
    nothing = Sweep([], {"training.lr": [0.1]})
    assert list(nothing.to_frame().columns) == list(sweep(config(), {"run.seed": [0]}).to_frame().columns[1:])
    assert len(nothing.to_frame()) == 0


# By hand: beta -> run -> PRE of three seeds. ditto wins at 0.1 by less than what everybody gains at 1.0.
BY_HAND = {
    0.1: {"local": [0.30, 0.32, 0.31], "fedprox": [0.40, 0.44, 0.42], "ditto": [0.50, 0.50, 0.53]},
    1.0: {"local": [0.60, 0.61, 0.62], "fedprox": [0.90, 0.92, 0.94], "ditto": [0.70, 0.75, 0.71]},
}


def cell(values, pre, history=None, post=0.5, **summary):
    def judged(last):
        return {"last": last, "best": last, "std_clients": 1 - last, "worst_10_percent": 0.1, "weighted_last": last}

    summary = {
        "headline": "pre",
        "personal": {"pre": judged(pre), "post": judged(post)},
        "global": None,
        "traffic": {"megabytes_total": 1.0},
        "timing": {"seconds_per_round": 0.1},
        **summary,
    }
    return Cell(values, config(run={"seed": values["run.seed"]}), summary, None, history)


def by_hand():
    cells = []
    for beta, method, seed in itertools.product(BY_HAND, BY_HAND[0.1], range(3)):
        values = {"data.partition.beta": beta, "method.name": method, "run.seed": seed}
        pre = BY_HAND[beta][method][seed]
        rounds = 1 + seed
        history = {"round": np.arange(1, rounds + 1), "pre.accuracy": np.full(rounds, pre)}
        if method == "ditto":
            history["diagnostics.gap"] = np.arange(rounds) + 0.5
        cells.append(cell(values, pre, history))
    return Sweep(cells, {"method.name": "local"})


def test_histories_of_runs_that_measure_other_things():
    frame = by_hand().to_frame(history=True)
    expected = [
        (beta, method, seed, round + 1, BY_HAND[beta][method][seed], round + 0.5 if method == "ditto" else math.nan)
        for beta, method, seed in itertools.product(BY_HAND, BY_HAND[0.1], range(3))
        for round in range(1 + seed)
    ]
    names = ["data.partition.beta", "method.name", "run.seed", "round", "pre.accuracy", "diagnostics.gap"]
    assert list(frame.columns) == names
    for name, column in zip(names, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(frame[name], column)
    assert frame["round"].dtype.kind == "i"


def test_a_pivot_by_hand():
    swept = by_hand()
    for aggregate, by_numpy in (("mean", np.mean), ("std", lambda of: np.std(of, ddof=1)), ("count", len)):
        table = swept.pivot(aggregate=aggregate)
        assert (list(table.index), list(table.columns)) == (["local", "fedprox", "ditto"], [0.1, 1.0])
        assert (table.index.name, table.columns.name) == ("method.name", "data.partition.beta")
        for beta, method in itertools.product(BY_HAND, BY_HAND[0.1]):
            assert table.loc[method, beta] == pytest.approx(by_numpy(BY_HAND[beta][method]))
    turned = swept.pivot("data.partition.beta", "method.name", "post")
    assert (list(turned.index), list(turned.columns)) == ([0.1, 1.0], ["local", "fedprox", "ditto"])
    assert (turned == 0.5).all(axis=None)
    by_seed = swept.pivot(index=["method.name", "data.partition.beta"], columns="run.seed")
    assert list(by_seed.loc[("ditto", 1.0)]) == BY_HAND[1.0]["ditto"]
    assert swept.pivot(values="global").isna().all(axis=None)
    assert list(swept.pivot(["data.partition.beta", "method.name"]).columns) == ["pre"]
    at_post = swept._replace(point="post").pivot(["data.partition.beta", "method.name"])
    assert list(at_post.columns) == ["post"]
    assert (at_post == 0.5).all(axis=None)


def test_a_pivot_of_lists_of_what_one_method_has_and_of_data_alone():
    shares = ({"participation.ratio": [0.1, 0.5]}, {"participation.ratio": 1.0})
    mus = ({"method.name": "fedavg"}, {"method.name": "fedprox", "fedprox.mu": 0.1})
    cells = [
        cell({**mu, **share, "run.seed": seed}, 0.1 + 0.2 * which + 0.02 * seed)
        for which, (mu, share) in enumerate(itertools.product(mus, shares))
        for seed in range(2)
    ]
    table = Sweep(cells, {}).pivot(columns="participation.ratio")
    assert list(table.columns) == ["[0.1, 0.5]", 1.0]
    assert [name for name, _ in table.index] == ["fedavg", "fedprox"]
    np.testing.assert_array_equal([mu for _, mu in table.index], [math.nan, 0.1])
    np.testing.assert_allclose(table.to_numpy(), [[0.11, 0.31], [0.51, 0.71]])
    betas = [
        cell({"data.partition.beta": beta, "run.seed": seed}, beta + seed / 10)
        for beta in (0.1, 0.5)
        for seed in (0, 1)
    ]
    table = Sweep(betas, {}).pivot()
    np.testing.assert_allclose(table["pre"], [0.15, 0.55])
    assert list(table.index) == [0.1, 0.5]


def test_a_pivot_of_seeds_alone_is_their_mean():
    runs = [cell({"run.seed": seed}, 0.2 + 0.2 * seed) for seed in range(2)]
    table = Sweep(runs, {}).pivot()
    assert (list(table.index), list(table.columns)) == (["all"], ["pre"])
    assert table.loc["all", "pre"] == pytest.approx(0.3)
    assert list(Sweep(runs, {}).pivot("run.seed")["pre"]) == pytest.approx([0.2, 0.4])
    one_value = [run._replace(values={"training.lr": 0.1, **run.values}) for run in runs]
    table = Sweep(one_value, {}).pivot()
    assert (table.index.name, list(table.index)) == ("training.lr", [0.1])
    with pytest.raises(ConfigError, match=r"index = None is not usable: one field or more that is not in columns"):
        Sweep(one_value, {}).pivot(columns="training.lr")


def test_tables_of_a_grid_are_labels_of_a_pivot():
    kinds = ({"kind": "iid"}, {"kind": "dirichlet", "beta": 1.0})
    cells = [
        cell({"data.partition": kind, "method.name": method, "run.seed": 0}, 0.1 + 0.2 * at + 0.4 * other)
        for at, kind in enumerate(kinds)
        for other, method in enumerate(("fedavg", "local"))
    ]
    table = Sweep(cells, {"method.name": "fedavg"}).pivot()
    assert list(table.columns) == [str(kind) for kind in kinds]
    np.testing.assert_allclose(table.to_numpy(), [[0.1, 0.3], [0.5, 0.7]])


def test_differences_without_a_row_have_their_columns_all_the_same():
    both = Sweep(by_hand().cells, {"method.name": "local"}).differences()
    alone = Sweep([of for of in by_hand().cells if of.values["method.name"] == "local"], {"method.name": "local"})
    assert len(both) > len(alone.differences()) == 0
    assert list(alone.differences().columns) == list(both.columns)
    compared = Comparison(config(), alone.cells[:3], "local").differences()
    assert list(compared.columns)[:1] + list(compared.columns)[-1:] == ["data.partition.beta", "seeds"]
    assert "method" in compared.columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"index": "method"},
            r"index = 'method' is not usable: one or more, .*data\.partition\.beta, method\.name, run",
        ),
        ({"columns": ["run.seed", "run.seed"]}, r"columns = .* each of them once"),
        ({"index": "method.name", "columns": "method.name"}, r"index = 'method\.name' .* that is not in columns"),
        (
            {"columns": "run.seed", "index": "method.name"},
            r"index = 'method\.name' .*: data\.partition\.beta is missing",
        ),
        ({"index": []}, r"index = \[\] is not usable: one field or more"),
        ({"values": "score"}, r"values = 'score' is not usable: allowed: headline, pre, post, best"),
        ({"aggregate": "median"}, r"aggregate = 'median' is not usable: one of mean, std, count"),
    ],
)
def test_a_pivot_that_would_mix_runs_or_has_no_such_field_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        by_hand().pivot(**arguments)


def parse(text):
    """Comments, column specification, rows of entries and groups of headings, of a table that LaTeX can read."""
    lines = text.splitlines()
    comments = [line for line in lines if line.startswith("%")]
    assert text.endswith("\\end{tabular}\n")
    body = "\n".join(line for line in lines if not line.startswith("%"))
    depth, bare = 0, re.sub(r"\\[a-zA-Z]+|\\.", lambda found: "\0" * len(found[0]), body)
    for letter in bare:
        depth += (letter == "{") - (letter == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    outside_math = re.sub(r"\$[^$]*\$", "", bare)
    assert not set("%#_^~<>|") & set(outside_math.replace("&", ""))
    specification = re.search(r"\\begin\{tabular\}\{(l+r+)\}", body)[1]
    assert [body.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    rows = []
    for line in body.splitlines():
        if line.endswith(r" \\"):
            entries = [entry.strip() for entry in re.split(r"(?<!\\)&", line.removesuffix(r" \\"))]
            spans = [re.match(r"\\multicolumn\{(\d+)\}", entry) for entry in entries]
            assert sum(int(span[1]) if span else 1 for span in spans) == len(specification)
            rows.append(entries)
    return comments, rows


def plus_minus(values):
    return rf"{np.mean(values):.2f} $\pm$ {np.std(values, ddof=1):.2f}"


def test_latex_prints_the_winner_of_each_data_setting_in_bold():
    comments, (settings, headings, *rows) = parse(by_hand().to_latex(["pre", "std_clients"]))
    groups = [rf"\multicolumn{{2}}{{c}}{{data.partition.beta={beta}}}" for beta in BY_HAND]
    assert settings == ["", *groups]
    assert headings == ["run", "PRE", "std of clients", "PRE", "std of clients"]
    assert [row[0] for row in rows] == ["local", "fedprox", "ditto"]
    for at, beta in enumerate(BY_HAND):
        winner = max(BY_HAND[beta], key=lambda method: np.mean(BY_HAND[beta][method]))
        for method, *entries in rows:
            values = 100 * np.array(BY_HAND[beta][method])
            expected = plus_minus(values)
            assert entries[2 * at] == (rf"\textbf{{{expected}}}" if method == winner else expected)
            assert entries[2 * at + 1] == plus_minus(100 - values)
    assert {rows[1][3][:7], rows[2][1][:7]} == {r"\textbf"}  # not the same one
    assert comments == [
        r"% Needs \usepackage{booktabs}. In % on test samples: mean and sample standard deviation over 3 seeds; "
        "bold: the highest mean of a column."
    ]
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}" in by_hand().to_latex(["pre", "std_clients"])
    assert r"\textbf" not in by_hand().to_latex(bold=False)
    assert parse(by_hand().to_latex(["weighted"]))[1][1] == ["run", "weighted", "weighted"]


def test_latex_prints_in_bold_only_what_is_known_to_be_better():
    names = ["pre.macro_f1", "pre.std_clients", "pre.loss", "pre.ece"]

    def measured(method, *values):
        metrics = {name: {"last": value} for name, value in zip(names, values, strict=True)}
        return cell({"method.name": method, "run.seed": 0}, 0.5, metrics=metrics)

    cells = [measured("local", 0.5, 0.1, 1.0, 0.03), measured("ditto", 0.6, 0.2, 2.0, 0.04)]
    cells.append(cell({"method.name": "fedrep", "run.seed": 0}, 0.5))  # of another run, which measured nothing more
    comments, (headings, *rows) = parse(Sweep(cells, {}).to_latex(names))
    assert headings == ["run", "PRE macro-F1", "PRE std of clients", "PRE loss", "PRE ece"]
    assert rows == [
        ["local", "50.00", "10.00", "1.0000", "0.0300"],
        ["ditto", r"\textbf{60.00}", "20.00", "2.0000", "0.0400"],
        ["fedrep", "---", "---", "---", "---"],
    ]
    assert comments == [
        r"% Needs \usepackage{booktabs}. In %, except PRE loss, PRE ece, on test samples: mean and sample standard "
        "deviation over one seed; bold: the highest mean of a column in %."
    ]


def test_p_values_are_of_one_data_setting():
    """What is printed of a setting in a sweep over two is what is printed of it alone."""
    swept = by_hand()
    lines = [
        line.split(" | ") for line in swept.markdown().splitlines() if line.startswith("| data.partition.beta=1.0")
    ]
    alone = Sweep([run for run in swept.cells if run.values["data.partition.beta"] == 1.0], swept.baseline)
    expected = [line.split(" | ") for line in alone.markdown().splitlines() if line.startswith("| data.partition.beta")]
    assert [line[1:] for line in lines] == [line[1:] for line in expected]
    assert [line[0] for line in lines if "**" in line[2]] == ["| data.partition.beta=1.0, fedprox"]


def test_latex_of_ties_divergence_one_seed_and_what_failed():
    cells = [
        cell({"method.name": "local", "run.seed": 0}, 0.70001),
        cell({"method.name": "fedprox", "run.seed": 0}, 0.70004, diverged_round=2),
        cell({"method.name": "ditto", "run.seed": 0}, 0.6),
        Cell({"method.name": "fedrep", "run.seed": 0}, config(), error="a\nline of 100 %"),
    ]
    comments, (headings, *rows) = parse(Sweep(cells, {}).to_latex(["pre", "global"]))
    assert headings == ["run", "PRE", "global"]
    assert rows == [
        ["local", r"\textbf{70.00}", "---"],  # as they are printed, both are the highest
        ["fedprox", r"\textbf{70.00}$^\dagger$", "---"],
        ["ditto", "60.00", "---"],
        ["fedrep", "---", "---"],
    ]
    assert comments[0].endswith("over one seed; bold: the highest mean of a column.")
    assert "Dagger: diverged" in comments[1]
    assert comments[2] == "% Failed: fedrep, seed 0: a line of 100 %"
    assert "\n\n**Failed**: fedrep, seed 0: a line of 100 %\n" in Sweep(cells, {}).markdown()
    alone = Sweep(cells[:1], {}).to_latex()
    assert r"\textbf" not in alone  # nothing to win against
    assert "over one seed;" in alone


def test_latex_says_of_how_many_seeds_its_means_are():
    comments, _ = parse(Sweep(by_hand().cells[1:], {"method.name": "local"}).to_latex())
    assert comments[0].endswith("over 2 to 3 seeds; bold: the highest mean of a column.")


def test_the_round_of_a_divergence_is_a_whole_number_or_nothing():
    cells = [cell({"run.seed": 0}, 0.5), cell({"run.seed": 1}, 0.5, diverged_round=2)]
    found = Sweep(cells, {}).to_frame()["diverged_round"]
    assert (str(found.dtype), found.isna().tolist(), found[1]) == ("Int64", [True, False], 2)


def test_latex_escapes_what_it_would_take_for_commands():
    value = r"50% of a_b & {c}~^<>|#$\d"
    _, (headings, row) = parse(Sweep([cell({"model.kind": value, "run.seed": 0}, 0.5)], {}).to_latex(["headline"]))
    assert headings == ["run", "accuracy"]
    named = {"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^"}
    named |= {"textless": "<", "textgreater": ">", "textbar": "|"}
    shown = re.sub(r"\\([a-z]+)\{\}|\\(.)", lambda found: named[found[1]] if found[1] else found[2], row[0])
    assert shown == f"model.kind={value}"


def test_a_row_that_begins_with_a_star_or_a_bracket_is_no_argument_of_the_line_before():
    cells = [cell({"method.name": name, "run.seed": 0}, 0.5) for name in ("*ours", "[1] theirs", "mine*")]
    rows = re.findall(r"^(.+) & ", Sweep(cells, {}).to_latex(["pre"]), re.MULTILINE)
    assert rows[1:] == ["{}*ours", "{}[1] theirs", "mine*"]


@pytest.mark.parametrize("figures", ["pre", [], ["accuracy"], ["megabytes"]])
def test_latex_of_no_share_is_refused(figures):
    with pytest.raises(
        ConfigError, match=r"figures = .* is not usable: a list of one or more of headline, pre, post, "
    ):
        by_hand().to_latex(figures)


def test_latex_needs_no_pandas_and_frames_say_that_they_do(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # as though it were not installed
    found = by_hand()
    assert found.to_latex()
    compared = Comparison(config(), found.cells, "local")
    for call in (found.to_frame, found.pivot, compared.pivot, whole[0].to_frame, whole[0].clients_frame):
        with pytest.raises(ConfigError, match=r'pandas = None .*: frames need it: pip install "fedjax_pfl\[pandas\]"'):
            call()
