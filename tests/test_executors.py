"""Programs as jobs of SLURM: processes of this machine that signals end in the middle, and a SLURM of four scripts."""

import json
import os
import pickle
import signal
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_pfl import Config, ConfigError, compare, register_dataset, sweep
from fedjax_pfl.cli.commands import app
from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.experiment import jobs
from fedjax_pfl.experiment.checkpoint import Checkpoints, stop_on_signals
from fedjax_pfl.experiment.resume import RunPlace
from fedjax_pfl.experiment.worker import Finished, Surroundings

submitit = pytest.importorskip("submitit", reason="submitit is not installed")

GRID = {"method.name": ["fedprox", "fedcpd"], "run.seed": [0, 1]}


def config(source="troubled", **tables):
    base = {
        "data": {"source": source, "clients": 4, "partition": {"kind": "iid"}},
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": "fedprox"},
        "training": {"rounds": 4, "batch_size": 8, "lr": 0.1},
        "participation": {"ratio": 0.5},
        "run": {"eval_every": 1},
    }
    return Config(**{name: {**table, **tables.get(name, {})} for name, table in base.items()})


def troubled(notes):
    """Noise in three classes. In a job, a preemption comes: SIGTERM after round 2, SIGUSR2 in the save that follows."""
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 3
    images = (60 * labels[:, None, None, None] + rng.integers(0, 60, (120, 4, 4, 1))).astype(np.uint8)
    if "SUBMITIT_EXECUTOR" in os.environ:
        append, save = RunPlace.append, Checkpoints.save

        def noted(place, line, *more):
            append(place, line, *more)
            with open(notes, "a") as file:
                print(line["round"], file=file)
            if line["round"] == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def hurried(*of):
            os.kill(os.getpid(), signal.SIGUSR2)
            save(*of)

        RunPlace.append, Checkpoints.save = noted, hurried
    return images, labels


@pytest.fixture(scope="module", autouse=True)
def own_data():
    """A source that jobs learn of only with the job, since this module is none that they could import."""
    register_dataset("troubled")(troubled)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    del SOURCES["troubled"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("executors")


@pytest.fixture(scope="module")
def here(folder):
    return sweep(config(f"troubled:{folder / 'notes'}"), GRID, out=folder / "here")


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module")
def there(folder, lines):
    executor = {"name": "submitit", "cluster": "local", "timeout_min": 5}
    source = f"troubled:{folder / 'notes'}"
    return sweep(config(source), GRID, out=folder / "there", progress=lines.append, executor=executor)


def test_jobs_that_signals_end_go_on_to_the_bits_of_this_process(here, there, folder):
    """No checkpoints are asked for: those are left that the signals lead to."""
    assert (folder / "notes").read_text().split() == [str(round) for round in (1, 2, 3, 4) for _ in range(2)]
    for cell, expected in zip(there.cells[:2], here.cells[:2], strict=True):
        assert cell.values == expected.values
        for part in ("personal", "global", "traffic", "partition_hash"):
            assert cell.summary[part] == expected.summary[part]
        mine, other = (folder / of / f"method.name=fedprox,run.seed={cell.seed}" for of in ("there", "here"))
        metrics = [
            [json.loads(line) | {"seconds": 0} for line in (run / "metrics.jsonl").read_text().splitlines()]
            for run in (mine, other)
        ]
        assert metrics[0] == metrics[1]
        assert [line["round"] for line in metrics[0]] == [1, 2, 3, 4]
        assert (mine / "clients.csv").read_text() == (other / "clients.csv").read_text()


def test_a_job_that_fails_names_its_log_and_stops_no_other(here, there, folder, lines):
    assert [cell.values["method.name"] for cell in there.failed] == ["fedcpd"] * 2
    error, _, log = there.failed[0].error.removesuffix(")").partition(" (log: ")
    assert error == here.failed[0].error
    assert "feature maps" in error
    assert log.startswith(str(folder / "there" / "jobs"))
    assert f"failed: {error}" in Path(log).read_text()
    assert [line for line in lines if line.startswith("program 2 of 2 (fedcpd, 2 runs): failed: ")]
    assert lines[-1] == "program 1 of 2 (fedprox, 2 runs): done"
    assert sum("is running" in line for line in lines) == 2


def test_complete_runs_are_no_jobs(there, folder):
    source = f"troubled:{folder / 'notes'}"
    executor = {"name": "submitit", "cluster": "local"}
    again = sweep(config(source), {**GRID, "method.name": ["fedprox"]}, out=folder / "there", executor=executor)
    assert [cell.summary for cell in again.cells] == [cell.summary for cell in there.cells[:2]]
    assert len(list((folder / "there" / "jobs").glob("*_submitted.pkl"))) == 2


class Slurm:
    """Scripts that stand in for SLURM: jobs get the number 7, and are in whatever state the test says."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        folder.mkdir()
        self.says("srun", "")
        self.says("sbatch", "Submitted batch job 7")
        self.is_in("PENDING")
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 0)
        monkeypatch.setattr(jobs, "_SECONDS_BETWEEN_LOOKS", 0.01)
        submitit.SlurmJob.watcher.clear()

    def says(self, command, text, code=0):
        path = self.folder / command
        called = self.folder / f"{command}.calls"
        to = 2 if code else 1
        path.write_text(f'#!/bin/sh\necho "$@" >> {called}\ncat >&{to} << END\n{text}\nEND\nexit {code}\n')
        path.chmod(0o755)

    def is_in(self, state, accounting=None):
        """What the queue and the accounting say of the jobs."""
        self.says("squeue", state)
        listed = "\n".join(f"7_{task}|{accounting or state}|node1" for task in range(3))
        self.says("sacct", f"JobID|State|NodeList\n7|{accounting or state}|node1\n{listed}")
        submitit.SlurmJob.watcher.clear()

    def calls(self, command):
        path = self.folder / f"{command}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return Slurm(tmp_path / "bin", monkeypatch)


def test_programs_are_one_array_under_the_parameters_given(slurm, tmp_path):
    slurm.is_in("", "OUT_OF_MEMORY")
    asked = {"slurm_partition": "gpu", "gpus_per_node": 1, "mem_gb": 8, "slurm_array_parallelism": 2}
    executor = {"name": "submitit", **asked}
    logs = tmp_path / "out" / "jobs"
    logs.mkdir(parents=True)
    (logs / "7_0_0_log.out").write_text("round 3/4\nslurmstepd: error: Detected 1 oom_kill event\n\n")
    found = compare(config("digits"), ["fedprox", "fedavg"], out=tmp_path / "out", executor=executor)
    (script,) = slurm.calls("sbatch")
    given = {line for line in Path(script).read_text().splitlines() if line.startswith("#SBATCH")}
    wanted = ["--partition=gpu", "--gpus-per-node=1", "--mem=8GB", "--array=0-1%2", "--requeue", "--time=60"]
    assert {f"#SBATCH {option}" for option in [*wanted, "--job-name=fedjax_pfl", "--signal=USR2@90"]} <= given
    assert [cell.error for cell in found.cells] == [
        "the job ended without a result (OUT_OF_MEMORY); the last that it said: slurmstepd: error: Detected 1 oom_kill "
        f"event (log: {logs}/7_0_0_log.out)",
        f"the job ended without a result (OUT_OF_MEMORY); the last that it said: nothing (log: {logs}/7_1_0_log.out)",
    ]


def test_jobs_that_are_at_work_are_found_by_the_same_call(slurm, tmp_path):
    grid, out, lines = {"method.name": ["fedprox", "fedavg"], "run.seed": [0, 1]}, tmp_path / "out", []

    def run(progress, seeds=(0, 1), **tables):
        these = {**grid, "run.seed": seeds}
        return sweep(config("digits", **tables), these, out=out, progress=progress, executor="submitit").cells

    def interrupt(line):
        lines.append(line)
        if "pending" in line:
            raise KeyboardInterrupt

    def refuse(line):
        raise AssertionError(line)

    def end(line):
        lines.append(line)
        for task in (0, 1):
            (out / "jobs" / f"7_{task}_0_result.pkl").write_bytes(
                pickle.dumps(("success", [f"{task} failed there"] * 2))
            )

    with pytest.raises(KeyboardInterrupt):
        run(interrupt)
    names = [f"program {number} of 2 ({name}, 2 runs)" for number, name in enumerate(grid["method.name"], 1)]
    handed = [f"{name}: handed over as job 7_{task}" for task, name in enumerate(names)]
    assert lines == [*handed, f"{names[0]}: job 7_0 is pending"]
    clash = "is at work on some of these runs: wait for its end, or cancel it"
    assert [cell.error for cell in run(refuse, (0, 1, 2))] == [f"job 7_{task} {clash}" for task in (0, 0, 0, 1, 1, 1)]
    clash = "is at work on these runs under another config: wait for its end, or cancel it"
    changed = run(refuse, training={"rounds": 50})
    assert [cell.error for cell in changed] == [f"job 7_{task} {clash}" for task in (0, 0, 1, 1)]
    found = run(end)
    assert [cell.error.partition(" (log")[0] for cell in found] == [f"{task} failed there" for task in (0, 0, 1, 1)]
    assert len(slurm.calls("sbatch")) == 1
    assert lines[3:5] == [f"{name}: found as job 7_{task}" for task, name in enumerate(names)]
    for result in (out / "jobs").glob("*_result.pkl"):
        result.unlink()
    slurm.is_in("", "CANCELLED by 4")
    assert "without a result (CANCELLED by 4)" in run(None)[0].error
    assert len(slurm.calls("sbatch")) == 2


@pytest.fixture
def begun(slurm, tmp_path):
    """Of two seeds, whose job is at work: seeds -> what another call says first, or its cells."""

    def call(seeds):
        def interrupt(line):
            said.append(line)
            raise KeyboardInterrupt

        said, grid = [], {"run.seed": seeds}
        try:
            return sweep(config("digits"), grid, out=tmp_path / "out", progress=interrupt, executor="submitit").cells
        except KeyboardInterrupt:
            return said[0]

    assert call([0, 1]).endswith("handed over as job 7")
    return call


def test_a_job_at_work_on_these_runs_in_another_order_is_not_taken_for_theirs(begun):
    """Its results would come in that order."""
    clash = "job 7 is at work on some of these runs: wait for its end, or cancel it"
    assert [cell.error for cell in begun([1, 0])] == [clash] * 2


def test_a_job_that_has_left_its_result_is_not_waited_for_while_slurm_ends_it(begun, slurm, tmp_path):
    assert begun([0, 1]).endswith("found as job 7")
    slurm.is_in("COMPLETING")
    (tmp_path / "out" / "jobs" / "7_0_result.pkl").write_bytes(pickle.dumps(("success", ["it failed"] * 2)))
    assert begun([0, 1]).endswith("handed over as job 7")


@pytest.fixture
def handlers():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "state", "ends", "queued_again"),
    [
        ([signal.SIGUSR2], "RUNNING", SystemExit, True),
        ([signal.SIGTERM], "RUNNING", SystemExit, True),
        ([signal.SIGTERM, signal.SIGUSR2], "RUNNING", SystemExit, True),
        ([signal.SIGTERM], "COMPLETING", SystemExit, False),  # scancel, or SLURM queues the job again itself
        ([signal.SIGINT], "RUNNING", KeyboardInterrupt, False),
    ],
)
def test_a_job_of_slurm_is_queued_again_unless_it_is_cancelled(
    signals, state, ends, queued_again, slurm, handlers, monkeypatch
):
    slurm.is_in(state)
    for name, value in {"JOB_ID": "8", "ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    requests, asked = [], []

    def program(configs, data, around, say):
        first, *others = signals
        os.kill(os.getpid(), first)  # while it compiles, say
        with stop_on_signals() as stop:
            for number in others:
                os.kill(os.getpid(), number)
            asked.append(stop.signal)
            stop.leave()

    monkeypatch.setattr(jobs, "run_elsewhere", program)
    signal.signal(signal.SIGUSR2, lambda *of: requests.append(of))  # as submitit does, before it calls
    with pytest.raises(ends):
        jobs.Job([config("digits")], None, Surroundings({}, {}))()
    assert asked == signals[-1:]
    assert bool(requests) == queued_again
    assert set(slurm.calls("squeue")) <= {"--noheader --format=%T --jobs=7_1"}


def test_a_job_that_is_asked_to_stop_when_all_is_done_is_not_queued_again(slurm, handlers, monkeypatch):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    done, requests, outcomes = Finished({}, {}, {}), [], {0: None, 1: "refused"}

    def program(configs, data, around, say):
        outcomes[0] = done  # on disk, in the last block
        signal.getsignal(signal.SIGUSR2).__self__.ask(signal.SIGUSR2, None)
        raise SystemExit(128 + signal.SIGUSR2)

    monkeypatch.setattr(jobs, "run_elsewhere", program)
    monkeypatch.setattr(jobs, "settled", lambda config: outcomes[config.run.seed])
    signal.signal(signal.SIGUSR2, lambda *of: requests.append(of))
    runs = [config("digits", run={"seed": seed}) for seed in (0, 1)]
    assert jobs.Job(runs, None, Surroundings({}, {}))() == [done, "refused"]
    assert not requests


def test_jobs_on_this_machine_end_with_the_call(folder):
    def interrupt(line):
        raise KeyboardInterrupt

    executor = {"name": "submitit", "cluster": "local"}
    for calls in (1, 2):  # the second finds no job of the first
        with pytest.raises(KeyboardInterrupt):
            compare(config("digits"), ["fedprox"], out=folder / "cut", progress=interrupt, executor=executor)
        submitted = list((folder / "cut" / "jobs").glob("*_submitted.pkl"))
        assert len(submitted) == calls
        assert not any(os.path.exists(f"/proc/{path.name.partition('_')[0]}") for path in submitted)
    assert not list((folder / "cut").glob("*/summary.json"))


def test_what_slurm_does_not_take_is_said_in_its_words(slurm, tmp_path):
    slurm.says("sbatch", "sbatch: error: invalid partition specified: gpx", code=1)
    executor = {"name": "submitit", "slurm_partition": "gpx"}
    with pytest.raises(ConfigError, match=r"executor = .*: sbatch: error: invalid partition specified: gpx"):
        compare(config("digits"), ["fedprox"], out=tmp_path / "out", executor=executor)


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        ({"name": "submitit", "partition_of": 1}, "parameters of submitit's AutoExecutor: .*partition_of"),
        ({"name": "submitit", "timeout_min": "1h"}, 'executor = .*Parameter "timeout_min" expected type .*1h'),
        ({"name": "submitit", "cluster": "slrum"}, "did you mean slurm[?] allowed: slurm, local"),
        ("submitt", "executor = 'submitt' is not usable: did you mean submitit[?] allowed: local, ray, submitit"),
        ({"name": "submitit", "slurm_additional_parameters": "account=a"}, "executor = .*: parameters of submitit's"),
        ({"name": "submitit", "cluster": "pbs"}, r"executor\.cluster = 'pbs' is not usable: allowed: slurm, local"),
        ({"name": "submitit", "max_num_timeout": -1}, r"executor\.max_num_timeout = -1 is not usable: a whole number"),
        ({"name": "submitit", "nodes": 2}, r"executor\.nodes = 2 is not usable: .*: a program is one process"),
        ({"name": "submitit", "slurm_ntasks_per_node": 2}, r"executor\.slurm_ntasks_per_node = 2 .*one process"),
        ({"name": "ray", "timeout_min": 9}, r"executor\.timeout_min = 9 is not usable: .*: ray has no options"),
        ({"cluster": "slurm"}, "executor = .* is not usable: a name, or a table with a name and options"),
        (None, "executor = None is not usable: a name, or a table"),
    ],
)
def test_options_that_no_executor_has_are_refused(executor, message, slurm, tmp_path):
    with pytest.raises(ConfigError, match=message):
        compare(config("digits"), ["fedprox"], out=tmp_path / "out", executor=executor)
    assert not (tmp_path / "out").exists()


def test_jobs_need_a_folder_slurm_and_submitit(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="executor = 'submitit' is not usable: it needs out: a folder on a file"):
        compare(config("digits"), ["fedprox"], executor="submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"executor\.cluster = 'slurm' is not usable: .* srun is found on"):
        compare(config("digits"), ["fedprox"], out=out, executor="submitit")
    monkeypatch.setitem(sys.modules, "submitit", None)  # as though it were not installed
    with pytest.raises(ConfigError, match=r'executor = .*: it needs submitit: pip install "fedjax_pfl\[submitit\]"'):
        compare(config("digits"), ["fedprox"], out=out, executor="submitit")
    assert not out.exists()


def test_options_on_the_command_line(tmp_path):
    (tmp_path / "base.toml").write_text(config("digits").to_toml())
    path = tmp_path / "sweep.toml"
    path.write_text('config = "base.toml"\n[grid]\nrun.seed = [0, 1]\n')
    command = ["sweep", str(path), "--out", str(tmp_path / "out"), "--executor", "submitit"]
    for given, message in [
        (["cluster=local", "nodes=2"], "executor.nodes = 2 is not usable"),
        (["cluster=local", "slurm_setup=[1", "timeout_min=x"], "expected type <class 'int'> (but value: \"x\")"),
        (["cluster = local", "nodes = 2"], "executor.nodes = 2 is not usable"),
        (["timeout_min"], "--job = 'timeout_min' is not usable: expected key=value"),
        (["name=ray"], "--job = 'name=ray' is not usable: expected key=value"),
    ]:
        options = [part for option in given for part in ("--job", option)]
        assert message in str(CliRunner().invoke(app, [*command, *options]).exception)
    assert not (tmp_path / "out").exists()
