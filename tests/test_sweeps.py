"""Sweeps: rows of one program give what runs on their own give."""

import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedjax_pfl import Config, ConfigError, Result, compare, load_sweep, simulate, sweep
from fedjax_pfl.cli.commands import app
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment import programs
from fedjax_pfl.experiment.build import program_inputs
from fedjax_pfl.experiment.checkpoint import Checkpoints
from fedjax_pfl.experiment.executors import _run_on_ray
from fedjax_pfl.experiment.grid import _folder
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.programs import alike
from fedjax_pfl.experiment.resume import RunPlace
from fedjax_pfl.experiment.sweep import Sweep, _write_parquet
from fedjax_pfl.experiment.tables import Cell

GRID = {"method.name": ["fedprox", "fedcpd"], "training.lr": [0.05, 0.2], "run.seed": [0, 1]}


def config(**tables):
    base = {
        "data": {"source": "digits", "clients": 5, "partition": {"kind": "dirichlet", "beta": 0.3}},
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": "fedprox"},
        "training": {"rounds": 3, "batch_size": 16, "lr": 0.1},
        "participation": {"ratio": 0.6},
        "run": {"eval_every": 2},
    }
    for section, fields in tables.items():
        base[section] = {**base.get(section, {}), **fields}
    return Config(**base)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep") / "grid"


@pytest.fixture(scope="module")
def swept(out):
    """FedProx in one program of four runs; FedCPD asks for feature maps, which an MLP has not: it fails."""
    lines = []
    return sweep(config(), GRID, out=out, progress=lines.append), lines


def numbers(node):
    if isinstance(node, dict):
        return [number for key in node if key not in ("seconds", "timing") for number in numbers(node[key])]
    return [node] if isinstance(node, int | float) else []


def test_each_row_is_the_run_that_simulate_gives(swept, out):
    """Seeds have partitions of other sizes, so that index tables are padded: those of the seed that is looked at."""
    cells = swept[0].cells[:4]
    largest = {}
    for cell in cells:
        folder = (
            out / f"method.name=fedprox,training.lr={cell.values['training.lr']},run.seed={cell.values['run.seed']}"
        )
        largest[cell.values["run.seed"]] = max(json.loads((folder / "partition.json").read_text())["n_train"])
    padded = min(largest, key=largest.get)
    assert largest[padded] < max(largest.values())
    for cell in cells:
        lr, seed = cell.values["training.lr"], cell.values["run.seed"]
        if seed != padded:
            continue
        alone = simulate(config(training={"lr": lr}, run={"seed": seed}))
        for part in ("personal", "global", "traffic"):
            found, expected = (
                numbers(summary[part] if part != "global" else {"": summary[part]})
                for summary in (cell.summary, alone.summary)
            )
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert cell.summary["partition_hash"] == alone.summary["partition_hash"]
        folder = out / f"method.name=fedprox,training.lr={lr},run.seed={seed}"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == [2, 3]
        np.testing.assert_allclose([line["train_loss"] for line in lines], alone.history["train_loss"], rtol=1e-5)
        rows = list(csv.DictReader((folder / "clients.csv").read_text().splitlines()))
        np.testing.assert_allclose(
            [float(row["post_accuracy"]) for row in rows], alone.clients["post_accuracy"], rtol=1e-6
        )


def test_runs_that_share_shapes_share_a_program(swept):
    (line,) = [line for line in swept[1] if "compiling" in line]
    assert line.startswith("program 1 of 2 (fedprox, 4 runs): about")
    assert swept[0].cells[0].summary["timing"]["runs_in_the_program"] == 4


def test_a_failing_program_is_reported_and_stops_no_other(swept, out):
    assert [cell.values["method.name"] for cell in swept[0].failed] == ["fedcpd"] * 4
    assert "feature maps" in swept[0].failed[0].error
    assert "**Failed**: fedcpd, training.lr=0.05, seed 0" in (out / "sweep.md").read_text()
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert len(rows) == 8
    assert rows[7]["headline"] == ""
    assert "feature maps" in rows[7]["error"]


def test_complete_runs_are_not_run_again(swept, out):
    shutil.rmtree(out / "method.name=fedprox,training.lr=0.2,run.seed=1")
    lines = []
    grid = {"method.name": ["fedprox"], "training.lr": np.array([0.05, 0.2]), "run.seed": np.arange(2)}
    again = sweep(config(), grid, out=out, progress=lines.append)
    assert lines[0] == "3 of 4 runs are complete: they are read, not run again"
    assert lines[1].startswith("program 1 of 1 (fedprox, 1 run): about")
    for cell, before in zip(again.cells, swept[0].cells, strict=False):
        np.testing.assert_allclose(numbers(cell.summary["personal"]), numbers(before.summary["personal"]), rtol=1e-5)


def test_a_run_killed_in_a_program_is_run_again(swept, out, tmp_path):
    copy = shutil.copytree(out, tmp_path / "copy")
    folder = copy / "method.name=fedprox,training.lr=0.05,run.seed=1"
    (folder / "summary.json").unlink()
    again = sweep(config(), {**GRID, "method.name": ["fedprox"]}, out=copy)
    assert not again.failed
    assert (folder / "summary.json").exists()


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    with warnings.catch_warnings():
        # It forks, which JAX warns of; the child becomes another program at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init("local", num_cpus=2)
    yield
    ray.shutdown()


def test_workers_of_ray_give_what_this_process_gives(swept, out, cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    parts = sweep(config(), GRID, out="grid", progress=lines.append, executor="ray")
    for cell, expected in zip(parts.cells, swept[0].cells, strict=True):
        assert cell.error == expected.error
        for part in ("personal", "traffic"):
            assert cell.summary is expected.summary is None or cell.summary[part] == expected.summary[part]
    assert (tmp_path / "grid" / "sweep.csv").exists()
    for path in out.glob("*/clients.csv"):
        assert (tmp_path / "grid" / path.parent.name / "clients.csv").read_text() == path.read_text()
    names = [f"program {number} of 2 ({name}, 4 runs)" for number, name in enumerate(GRID["method.name"], 1)]
    assert lines[:2] == [f"{name}: handed to Ray" for name in names]
    assert f"{names[0]}: done" in lines[2:]
    again = sweep(config(), {**GRID, "method.name": ["fedprox"]}, out="grid", progress=lines.append, executor="ray")
    assert [cell.summary for cell in again.cells] == [cell.summary for cell in parts.cells[:4]]
    assert lines[4:] == ["4 of 4 runs are complete: they are read, not run again"]


class Deadly(Config):
    """Ends the process that unpickles it, as a machine without memory would."""

    def __reduce__(self):
        return os._exit, (1,)


@pytest.fixture
def compilation_cache(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_worker_that_dies_is_reported_and_stops_no_other(cluster, compilation_cache):
    deadly = Deadly(data={"source": "digits"}, method={"name": "fedavg"})
    programs = [[deadly], [config(method={"name": "fedcpd"})]]
    outcomes = dict(_run_on_ray(programs, None, lambda program, line: None))
    (died,), (refused,) = outcomes[0], outcomes[1]
    assert died.startswith("WorkerCrashedError: The worker died")
    assert "feature maps" in refused
    assert any(compilation_cache.iterdir())  # JAX has the settings there that it has here


def test_executors_that_cannot_be_used_are_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)  # as though it were not installed
    for executor, message in [
        ("dask", "allowed: local, ray"),
        ("ray", r'it needs Ray: pip install "fedjax_pfl\[ray\]"'),
    ]:
        with pytest.raises(ConfigError, match=f"executor = '{executor}' is not usable: {message}"):
            sweep(config(), GRID, out=tmp_path / "out", executor=executor)
    assert not (tmp_path / "out").exists()


def synthetic():
    cells = []
    for lr, shift in ((0.1, 0.0), (0.2, 0.05)):
        for seed, accuracy in enumerate((0.6, 0.7, 0.65)):
            last = accuracy + shift * (1 + seed)
            point = {"last": last, "best": last, "std_clients": 0.1, "worst_10_percent": 0.3, "weighted_last": 0.4}
            summary = {
                "headline": "pre",
                "personal": {"pre": point, "post": {**point, "last": 0.5}},
                "global": None,
                "traffic": {"megabytes_total": 1.0},
                "timing": {"seconds_per_round": 0.1},
            }
            values = {"training.lr": lr, "run.seed": seed}
            own = last + np.array([-0.1, 0.1, np.nan])
            clients = {"pre_accuracy": own, "post_accuracy": np.full(3, 0.5)}
            cells.append(Cell(values, config(training={"lr": lr}, run={"seed": seed}), summary, clients))
    return Sweep(cells, {"training.lr": 0.1})


def table_of(sweep):
    """Row -> column -> text."""
    lines = [line.strip("| ").split(" | ") for line in sweep.markdown().splitlines() if line.startswith("| ")]
    headings, _, *rows = lines
    return {row[0]: dict(zip(headings, row, strict=True)) for row in rows}


def test_the_table_by_hand():
    first, second = np.array([0.6, 0.7, 0.65]), np.array([0.65, 0.8, 0.8])
    rows = table_of(synthetic())
    base, other = rows["training.lr=0.1"], rows["training.lr=0.2"]
    assert (base["seeds"], base["PRE"], base["POST"]) == ("3", "65.00 ± 5.00 *", "50.00 ± 0.00")
    mean, std = 100 * np.mean(second), 100 * np.std(second, ddof=1)
    assert other["PRE"] == f"**{mean:.2f} ± {std:.2f}** *"
    assert other["worst 10 %"] == "30.00 ± 0.00"
    low, high = stats.ttest_rel(second, first).confidence_interval(0.95)
    gap = np.mean(second - first)
    assert other["difference"] == f"{100 * gap:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
    # Every client of a run gains the same: whichever are drawn, the mean gain is the same.
    assert other["over clients"] == f"[{100 * gap:+.2f}, {100 * gap:+.2f}]"
    assert other["p"] == f"{stats.ttest_rel(second, first).pvalue:.3g}"
    assert [base[column] for column in ("difference", "over clients", "p")] == ["—"] * 3
    assert "**3 seeds**: too few" in synthetic().markdown()
    assert "global" not in base  # no run has a global model


def test_rows_are_compared_and_printed_in_bold_within_their_data_setting():
    cells = []
    for beta, shift in ((0.1, 0.0), (1.0, 0.3)):
        for cell in synthetic().cells:
            last = cell.summary["personal"]["pre"]["last"] + shift
            personal = {
                "pre": {**cell.summary["personal"]["pre"], "last": last},
                "post": cell.summary["personal"]["post"],
            }
            values = {"data.partition.beta": beta, **cell.values}
            cells.append(cell._replace(values=values, summary={**cell.summary, "personal": personal}))
    rows = table_of(Sweep(cells, {"data.partition.beta": 0.1, "training.lr": 0.1}))
    alone = table_of(synthetic())["training.lr=0.2"]
    for beta in (0.1, 1.0):
        base, other = (rows[f"data.partition.beta={beta}, training.lr={lr}"] for lr in (0.1, 0.2))
        assert base["difference"] == "—"
        assert other["difference"] == alone["difference"]
        assert other["PRE"].startswith("**")
        assert not base["PRE"].startswith("**")
    text = Sweep(cells, {"data.partition.beta": 0.1, "training.lr": 0.1}).markdown()
    assert "Difference: PRE minus that of training.lr=0.1 in the same data setting, mean of" in text


def test_what_guessing_gives_is_said_once_for_the_rows_that_share_it():
    def text(guess):
        cells = [
            cell._replace(
                values={"data.partition.kind": "iid", **cell.values},
                summary={**cell.summary, "majority_class": {"accuracy": guess(cell)}},
            )
            for cell in synthetic().cells
        ]
        return next(line for line in Sweep(cells, {"training.lr": 0.1}).markdown().splitlines() if "Always" in line)

    assert text(lambda cell: 0.25).endswith("most training samples of: 25.00 ± 0.00 % (data.partition.kind=iid).")
    # As where another share of the clients is malicious, whom no number is of.
    assert text(lambda cell: cell.values["training.lr"]).endswith(
        " of: 10.00 ± 0.00 % (data.partition.kind=iid, training.lr=0.1); "
        "20.00 ± 0.00 % (data.partition.kind=iid, training.lr=0.2)."
    )


def test_a_diverged_row_is_marked():
    cells = synthetic().cells
    cells[-1] = cells[-1]._replace(summary={**cells[-1].summary, "diverged_round": 2})
    text = Sweep(cells, {"training.lr": 0.1}).markdown()
    assert "| training.lr=0.2 † |" in text
    assert "| training.lr=0.1 |" in text
    assert "†: diverged" in text


@pytest.mark.parametrize(
    ("method", "swept_numbers", "others"),
    [
        ("fedprox", {"training.lr", "training.momentum", "method.mu"}, {"training.clip_norm", "training.epochs"}),
        ("pgfedsplit", {"method.beta"}, {"method.r"}),  # r decides shapes
        ("fedavg_ft", set(), {"method.finetune_epochs", "method.finetune_lr"}),  # no number until it is given
    ],
)
def test_only_numbers_that_no_shape_depends_on_share_a_program(method, swept_numbers, others):
    found = program_inputs(config(method={"name": method})).keys()
    assert swept_numbers <= found
    assert not others & found
    assert "method.finetune_lr" in program_inputs(config(method={"name": "fedavg_ft", "finetune_lr": 0.1}))


def test_other_fields_make_programs_of_their_own():
    grid = [(0.1, 0, 8), (0.2, 1, 8), (0.1, 0, 16), (0.2, 0, 8)]
    names = [
        alike(config(training={"lr": lr}, run={"seed": seed}, model={"name": "mlp", "hidden": hidden}))
        for lr, seed, hidden in grid
    ]
    assert names[0] == names[1] == names[3] != names[2]
    clipped, unclipped = (alike(config(training={"clip_norm": norm})) for norm in (5.0, None))
    assert clipped != unclipped == names[0]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "grid = {} is not usable: one field or more"),
        ([("training.lr", [0.1])], r"grid = \[\('training\.lr', \[0\.1\]\)\] is not usable: one field or more"),
        ({1: [0.1]}, r"grid = 1 is not usable: dotted fields such as training\.lr"),
        ({"training.lr": []}, r"grid\.training\.lr = \[\] is not usable: a list of one value or more"),
        ({"training.lr": 0.1}, r"grid\.training\.lr = 0\.1 is not usable: a list"),
        ({"training.lr": [0.1, 0.1]}, "each of them once"),
        ({"training.learning_rate": [0.1]}, r"training\.learning_rate = 0\.1 is not usable: no such key"),
        ({"trainings.lr": [0.1]}, r"trainings\.lr = 0\.1 is not usable: .*trainings is none of its tables"),
        ({"lr": [0.1]}, r"grid\.lr = 0\.1 is not usable: a dotted field"),
        ({"training.lr": [0.1, -1.0]}, r"training\.lr = -1\.0 "),
        ({"method.name": ["fedsgd"]}, r"method\.name = 'fedsgd' is not usable: allowed: "),
        ({"run.out": ["a", "b"]}, r"grid\.run\.out = .*may vary only run\.seed"),
    ],
)
def test_bad_grids_are_refused_before_anything_runs(grid, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        sweep(config(), grid, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_baseline_is_one_of_the_combinations():
    with pytest.raises(ConfigError, match=r"baseline = 'training\.lr=0\.3' is not usable: one of the combinations"):
        sweep(config(), {"training.lr": [0.1]}, baseline={"training.lr": 0.3})
    with pytest.raises(ConfigError, match=r"baseline = 0\.1 is not usable: one of the combinations"):
        sweep(config(), {"training.lr": [0.1]}, baseline=0.1)


def test_a_baseline_may_have_numpys_numbers(tmp_path):
    sizes = np.array([8, 16])
    found = sweep(config(), {"training.batch_size": sizes}, baseline={"training.batch_size": sizes[1]}, out=tmp_path)
    assert found.baseline == Sweep.load(tmp_path).baseline == {"training.batch_size": 16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"progress": "auto"}, r"progress = 'auto' is not usable: None or a function of a line of text"),
        ({"out": ""}, r"out = '' is not usable: a folder; \. is the working directory"),
    ],
)
def test_what_reports_can_be_called_and_a_folder_has_a_name(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        sweep(config(), {"training.lr": [0.1]}, **given)
    with pytest.raises(ConfigError, match=message):
        compare(config(), ["local"], **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_another_process_at_work_in_the_folder_is_left_in_peace(tmp_path):
    there = "import fcntl, sys; fcntl.lockf(file := open(sys.argv[1], 'a'), fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", there, str(tmp_path / ".lock")]
    message = r"out = '.*' is not usable: another directory, or wait: another process is running in this one"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ConfigError, match=message):
            sweep(config(), {"training.lr": [0.1]}, out=tmp_path)
        with pytest.raises(ConfigError, match=message):
            compare(config(), ["fedavg"], out=tmp_path)
        other.kill()
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_jax_has_not_started_when_the_first_program_begins(tmp_path):
    """Else a CPU's cores could not be made devices any more."""
    program = """
import sys, jax
from fedjax_pfl import Config, compare, sweep
from fedjax_pfl.experiment import comparison
def begin(*args):
    jax.config.update("jax_num_cpu_devices", 3)  # an error once JAX has started
    return []
comparison.run_cells = sys.modules["fedjax_pfl.experiment.sweep"].run_cells = begin
config = Config(data={"source": "digits"}, method={"name": "local"})
compare(config, ["local"], out=sys.argv[1])
sweep(config, {"training.lr": [0.1]}, out=sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_devices_that_xla_was_told_to_make_are_kept():
    program = """
import jax
from fedjax_pfl import Config
from fedjax_pfl.experiment.process import prepare
prepare(Config(data={"source": "digits"}, method={"name": "local"}).run)
print(jax.device_count())
"""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=5"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "5\n"


def test_other_settings_are_not_mixed_into_a_sweep(swept, out):
    with pytest.raises(
        ConfigError, match=r"training\.epochs=2.*what the run in .* was started with: training\.epochs=1"
    ):
        sweep(config(training={"epochs": 2}), GRID, out=out)


def test_a_sweep_file(swept, out, tmp_path):
    (tmp_path / "base.toml").write_text(config(training={"rounds": 9}).to_toml())
    path = tmp_path / "sweep.toml"
    text = """
        config = "base.toml"
        overrides = ["training.rounds=3"]
        [grid]
        method.name = ["fedprox"]
        training.lr = [0.05, 0.2]
        run.seed = [0, 1]
        [baseline]
        method.name = "fedprox"
        training.lr = 0.2
    """
    path.write_text(text)
    base, grid, baseline = load_sweep(path)
    assert (base.training.rounds, grid["training.lr"], baseline["training.lr"]) == (3, [0.05, 0.2], 0.2)
    assert load_sweep(path, ["training.rounds=5"])[0] == base.replace("training.rounds", 5)
    other = tmp_path / "other.toml"
    of_one = text.replace('"training.rounds=3"', '"method.name=fedprox", "method.mu=7.0"')
    other.write_text(of_one.replace('method.name = ["fedprox"]', ""))
    of_another = load_sweep(other, ["method.name=fedecouple"])[0]  # which has a mu, too
    assert of_another.method == base.replace("method.name", "fedecouple").method
    of_prox = text.replace("run.seed", "fedprox.mu = [0.1]\n        run.seed")
    other.write_text(of_prox)
    assert load_sweep(other)[1]["fedprox.mu"] == [0.1]
    shown = CliRunner().invoke(app, ["sweep", str(path), f"training.rounds={base.training.rounds}", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "training.lr=0.2" in shown.output
    of_tables = text.replace(
        "run.seed", 'data.partition = [{kind = "iid"}, {kind = "dirichlet", beta = 1.0}]\nrun.seed'
    )
    other.write_text(f'{of_tables}\ndata.partition = {{kind = "dirichlet", beta = 1.0}}')
    base, grid, baseline = load_sweep(other)
    assert baseline["data.partition"] == {"kind": "dirichlet", "beta": 1.0} == grid["data.partition"][1]
    unknown = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out), "--executor", "dask"])
    assert "executor = 'dask' is not usable" in str(unknown.exception)
    of_both = of_prox.replace('["fedprox"]', '["fedavg", "fedprox"]')
    for override, of in [
        ("training.lr=0.7", text),
        ("method.name=local", text),
        ("method.mu = 1.0", of_prox),
        ("fedprox.mu=0.5", of_both),
    ]:
        other.write_text(of)
        field = override.partition("=")[0].strip()
        with pytest.raises(
            ConfigError, match=rf"override = '{override}' .*\[grid\].*: change {field} there, in .*other"
        ):
            load_sweep(other, [override])
    for wrong, message in [
        (text.replace("[grid]", "[gird]"), r"sweep\.toml' is not usable: config \(a path\), \[grid\]; .*; it has gird"),
        ("", r"sweep\.toml' is not usable: .*; it has nothing"),
        (text + "[", "sweep file = .*not valid TOML"),
        (text.replace("base.toml", "none.toml"), "config file = .*none.toml' is not usable: cannot be read"),
    ]:
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=message):
            load_sweep(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_sweep(tmp_path / "nothing.toml")


SAVING = {"training.lr": [0.05, 0.2], "run.seed": [0, 1]}


def saving():
    return config(run={"checkpoint_every": 1, "eval_every": 1})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a sweep that nothing interrupted, of four runs that save after each of three rounds."""
    out = tmp_path_factory.mktemp("saved") / "whole"
    sweep(saving(), SAVING, out=out)
    return out


@pytest.mark.parametrize("saves", [3, 5, 8])
def test_a_killed_sweep_goes_on_to_the_same_bits(saves, saved, tmp_path, monkeypatch):
    """The kill comes within a round's saves, or before the summaries."""

    class KilledError(BaseException):
        pass

    done, save = [], Checkpoints.save

    def dying(checkpoints, run, progress, best):
        if len(done) == saves:
            raise KilledError
        done.append(progress.round)
        save(checkpoints, run, progress, best)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", dying)
        with pytest.raises(KilledError):
            sweep(saving(), SAVING, out=tmp_path / "killed")
    assert not list((tmp_path / "killed").glob("*/summary.json"))
    lines = []
    sweep(saving(), SAVING, out=tmp_path / "killed", progress=lines.append)
    for whole in sorted(saved.glob("*/")):
        killed = tmp_path / "killed" / whole.name
        metrics = [
            [json.loads(line) | {"seconds": 0} for line in (run / "metrics.jsonl").read_text().splitlines()]
            for run in (killed, whole)
        ]
        assert metrics[0] == metrics[1]
        assert [line["round"] for line in metrics[0]] == [1, 2, 3]
        assert (killed / "clients.csv").read_text() == (whole / "clients.csv").read_text()
        jax.tree.map(np.testing.assert_array_equal, arrays(killed), arrays(whole))


def test_the_time_of_a_program_is_shared_by_its_runs(saved, tmp_path, monkeypatch):
    """Of four runs: 40 seconds for compilation, 8 for each round; and of those that go on, 100 each before."""
    now, compiled, rounds, read = [0.0], programs._compile, programs.Program.rounds, Checkpoints.read

    def taking(seconds, function):
        def slow(*given, **options):
            now[0] += seconds
            return function(*given, **options)

        return slow

    begun = shutil.copytree(saved, tmp_path / "begun")
    for run in begun.glob("*/"):
        (run / "summary.json").unlink()
        shutil.rmtree(run / "checkpoints" / "3")
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(programs, "_compile", taking(40.0, compiled))
    monkeypatch.setattr(programs.Program, "rounds", taking(8.0, rounds))
    fresh = sweep(config(run={"eval_every": 1}), SAVING).cells
    monkeypatch.setattr(Checkpoints, "read", lambda *of: read(*of)._replace(seconds=100.0, round_seconds=20.0))
    for cells, seconds, per_round in (
        (fresh, [12.0, 14.0, 16.0], 2.0),
        (sweep(saving(), SAVING, out=begun).cells, [112.0], (20.0 + 2.0) / 3),
    ):
        assert len(cells) == 4
        for cell in cells:
            timing = cell.summary["timing"]
            assert timing["runs_in_the_program"] == 4
            assert cell.history["seconds"][-len(seconds) :].tolist() == pytest.approx(seconds)
            assert timing["total_seconds"] == pytest.approx(seconds[-1])
            assert (timing["compile_seconds"], timing["seconds_per_round"]) == pytest.approx((10.0, per_round))


def arrays(run):
    """What the newest checkpoint holds."""
    newest = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    return ocp.StandardCheckpointer().restore((newest / "run").absolute())


def test_no_seed_of_a_program_may_be_one_in_which_nobody_trains():
    asked = config(training={"batch_size": 400, "drop_last": True})
    runs = [asked.replace("run.seed", seed) for seed in (0, 1)]  # the largest client has 432 samples, and 356
    lay_out(runs[:1], load("digits"))
    for refused in (runs[1:], runs):
        with pytest.raises(ConfigError, match=r"training\.batch_size = 400 .* at most 356 .* nobody has a whole batch"):
            lay_out(refused, load("digits"))


@pytest.mark.parametrize(
    ("changes", "most"), [({"training.copies": "concat"}, 864), ({"method.name": "perfedavg"}, 216)]
)
def test_a_whole_batch_is_of_copies_too_and_one_of_several_of_a_step(changes, most):
    """The largest client has 432 samples; Per-FedAvg's step takes two batches."""
    asked = config(training={"drop_last": True, "batch_size": most}).replace(changes)
    lay_out([asked], load("digits"))
    with pytest.raises(ConfigError, match=rf"training\.batch_size = {most + 1} is not usable: at most {most} with"):
        lay_out([asked.replace("training.batch_size", most + 1)], load("digits"))


@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)])
def test_a_seed_in_which_nobody_trains_stops_no_other(seeds, monkeypatch):
    def drive(configs, dataset, places, **_):
        lay_out(configs, dataset)
        return [SimpleNamespace(summary={"seed": config.run.seed}, history={}, clients={}) for config in configs]

    monkeypatch.setattr("fedjax_pfl.experiment.worker.drive", drive)
    asked = config(training={"batch_size": 400, "drop_last": True})
    cells = {cell.seed: cell for cell in sweep(asked, {"run.seed": seeds}).cells}
    assert (cells[0].error, cells[0].summary) == (None, {"seed": 0})
    assert "at most 356" in cells[1].error
    with pytest.raises(ConfigError, match="at most 356"):
        sweep(asked, {"run.seed": [1]})


def test_runs_that_go_one_by_one_are_all_announced_but_share_the_samples():
    configs = [config(run={"seed": seed, "placement": "shard"}) for seed in range(3)]
    program = lay_out(configs, load("digits"))
    assert program.over == "clients"
    memory, alone = program.memory, dataclasses.replace(program, rows=program.rows[:1])
    assert program.bytes() - alone.bytes() == 2 * (memory.resident - memory.samples) > 0


def test_a_folder_for_many_runs_is_none_of_a_single_run(tmp_path):
    given = config(run={"out": str(tmp_path)})
    for run in (lambda **to: sweep(given, {"run.seed": [0]}, **to), lambda **to: compare(given, ["local"], **to)):
        with pytest.raises(ConfigError, match=r"run\.out = '.*' is not usable: leave it out, and give out=\"\.\.\.\""):
            run()
        for name in ("config.toml", "metrics.jsonl"):
            (tmp_path / name).write_text("")
        with pytest.raises(ConfigError, match=r"out = '.*' is not usable: a folder for many runs: this is the run dir"):
            run(out=tmp_path)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"checkpoint_every": 2}, r"run\.checkpoint_every = 2 is not usable: nothing without out, a folder"),
        ({"tensorboard": True}, r"run\.tensorboard = True is not usable: false without a run directory: give out$"),
    ],
)
def test_what_needs_a_folder_for_all_runs_says_so(run, message):
    with pytest.raises(ConfigError, match=message):
        sweep(config(run=run), {"run.seed": [0, 1]})


def test_runs_that_are_added_do_not_throw_back_those_that_have_begun(tmp_path):
    base, said = config(run={"checkpoint_every": 1}), []
    whole = sweep(base, {"run.seed": [0, 1]}, out=tmp_path).cells
    begun = {}
    for cell in whole:
        out = Path(cell.config.run.out)
        (out / "summary.json").unlink()
        shutil.rmtree(out / "checkpoints" / str(cell.config.training.rounds))
        begun[out] = (out / "metrics.jsonl").read_text().splitlines()
    more = sweep(base, {"run.seed": [0, 2, 1]}, out=tmp_path, progress=said.append).cells
    assert [line for line in said if line.startswith("program 1 of 2 (fedprox, 2 runs)")]
    for out, lines in begun.items():  # with the seconds of the first call
        assert (out / "metrics.jsonl").read_text().splitlines()[: len(lines) - 1] == lines[:-1]
    for cell, before in zip((more[0], more[2]), whole, strict=True):
        assert cell.history["pre.accuracy"].tolist() == before.history["pre.accuracy"].tolist()


def test_a_run_that_has_just_begun_does_not_throw_back_complete_ones(saved, tmp_path, monkeypatch):
    """The complete runs have a single checkpoint, of their last round; one was killed before its first checkpoint."""

    def run_programs(executor, programs, data, report):
        for number, configs in enumerate(programs):
            places = [RunPlace(config, go_on=True) for config in configs]
            together.append((len(configs), set.intersection(*(place.beginnings() for place in places))))
            yield number, ["not run"] * len(configs)

    together, runs = [], sorted(shutil.copytree(saved, tmp_path / "out").glob("*/"))
    for run in runs:
        shutil.rmtree(run / "checkpoints" / "2")
    for name in ("metrics.jsonl", "summary.json"):
        (runs[0] / name).unlink()
    shutil.rmtree(runs[0] / "checkpoints")
    monkeypatch.setattr("fedjax_pfl.experiment.cells.run_programs", run_programs)
    sweep(saving().replace({"training.rounds": 6, "run.checkpoint_every": 3}), SAVING, out=tmp_path / "out")
    assert together == [(1, {-1, 0}), (3, {3})]


def test_a_run_whose_coefficient_is_0_is_what_it_is_alone(tmp_path):
    """Its state and messages lack what only the term needs, and a file of it is read as such."""
    base = config(
        method={"name": "fedcpd", "beta": 0.0, "gamma": 0.0}, run={"checkpoint_every": 1, "diagnostics": True}
    )
    grid = {"method.alpha": [0.0, 0.5]}
    cells = sweep(base, grid, out=tmp_path).cells
    assert [sorted(name for name in cell.history if "ratio" in name) for cell in cells] == [
        [],
        ["diagnostics.gradient_ratio_alpha"],
    ]
    for cell in cells:
        alone = simulate(cell.config.replace({"run.out": None, "run.checkpoint_every": 0}))
        assert cell.summary["traffic"] == alone.summary["traffic"]
        out = Path(cell.config.run.out)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), Result.load(out).state, alone.state)
        (out / "summary.json").unlink()
        shutil.rmtree(out / "checkpoints" / str(cell.config.training.rounds))
    again = sweep(base, grid, out=tmp_path).cells
    for cell, before in zip(again, cells, strict=True):
        assert cell.error is None
        assert cell.history["pre.accuracy"].tolist() == before.history["pre.accuracy"].tolist()


def test_columns_of_several_types_are_written_as_json_and_none_fails_a_sweep(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    ratios, clips = [0.5, [0.5, 1.0], None], [True, 0.5, "none"]
    rows = [{"ratio": ratio, "clip": clip, "lr": 0.1} for ratio, clip in zip(ratios, clips, strict=True)]
    _write_parquet(tmp_path / "sweep.parquet", rows)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.parquet"]
    frame = pandas.read_parquet(tmp_path / "sweep.parquet")
    for name, values in (("ratio", ratios), ("clip", clips)):
        assert [json.loads(text) if isinstance(text, str) else None for text in frame[name]] == values
    assert frame["lr"].tolist() == [0.1] * 3
    before = (tmp_path / "sweep.parquet").read_bytes()
    with pytest.warns(UserWarning, match=r"sweep\.parquet is not written: "):
        _write_parquet(tmp_path / "sweep.parquet", [{"nothing": {}}])  # which the format does not have
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"sweep.parquet": before}
    with pytest.warns(UserWarning, match=r"inside\.parquet is not written: "):
        _write_parquet(tmp_path / "sweep.parquet" / "inside.parquet", rows)


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_alone_writes_tables(first, tmp_path, monkeypatch):
    def run_nothing(cells, data, write, progress, executor):
        done = [cell._replace(error="not run") for cell in cells]
        write(done)
        return done

    for module in ("sweep", "comparison"):
        monkeypatch.setattr(f"fedjax_pfl.experiment.{module}.run_cells", run_nothing)
        monkeypatch.setattr(f"fedjax_pfl.experiment.{module}.is_first", lambda: first)
    sweep(config(), {"training.lr": [0.1]}, out=tmp_path)
    compare(config(), ["fedprox"], out=tmp_path)
    written = {f"{name}.{kind}" for name in ("sweep", "comparison") for kind in ("md", "csv", "json")}
    assert {path.name for path in tmp_path.iterdir()} - {"sweep.parquet"} == (written if first else set())
    assert first or not (tmp_path / "sweep.parquet").exists()


def test_the_folder_may_be_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("fedjax_pfl.experiment.sweep.run_cells", lambda cells, *_: list(cells))
    (cell,) = sweep(config(), {"run.seed": [0]}, out="~/grid").cells
    assert cell.config.run.out == str(tmp_path / "grid" / "run.seed=0")


def test_all_tables_of_an_interrupted_sweep_have_the_same_runs(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")

    def interrupted(cells, data, write, progress, executor):
        write([cells[0]._replace(error="not run")])
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_pfl.experiment.sweep.run_cells", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(config(), {"training.lr": [0.1, 0.2]}, out=tmp_path)
    tables = pandas.read_csv(tmp_path / "sweep.csv"), pandas.read_parquet(tmp_path / "sweep.parquet")
    assert [table["training.lr"].tolist() for table in tables] == [[0.1], [0.1]]


def test_a_run_directory_is_of_one_combination():
    folders = [
        _folder(values)
        for values in (
            {"training.lr": 0.1, "run.seed": 0},
            {"data.source": "npz:a/b.npz"},
            {"data.source": "npz:a_b.npz"},
            {f"method.field{at}": "a long value, all in all" for at in range(12)},
            {f"method.field{at}": "a long value, all in all" for at in range(13)},
            {"data.source": "\u5b57" * 120},
            {"data.source": "\u5b57" * 121},
            {"data.source": "\u5b57" * 80},
        )
    ]
    assert folders[0] == "training.lr=0.1,run.seed=0"
    assert folders[-1] == "data.source=" + "\u5b57" * 80
    assert len(set(folders)) == 8
    assert all(len(folder.encode()) <= 255 and "/" not in folder for folder in folders)
