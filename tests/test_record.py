"""Event files for TensorBoard hold what ``metrics.jsonl`` holds; no file is ever half of one."""

import errno
import importlib.util
import json
import math
import os
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from fedjax_pfl import Config, ConfigError, EarlyStopping, compare, simulate, sweep
from fedjax_pfl.data.rows import Holdings, Split
from fedjax_pfl.experiment.build import DataShape
from fedjax_pfl.experiment.callbacks import Running
from fedjax_pfl.experiment.checkpoint import Checkpoints, Saved
from fedjax_pfl.experiment.folders import write_atomically
from fedjax_pfl.experiment.kept import Kept, write_state
from fedjax_pfl.experiment.loggers import TensorBoard
from fedjax_pfl.experiment.record import _FILES, RunDirectory
from fedjax_pfl.experiment.saved import _not_kept
from fedjax_pfl.experiment.sections import Run

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the package tensorboard is not installed"
)
NONE = np.zeros(0, np.int64)
NOTHING = Holdings([Split(NONE, NONE, NONE)], NONE, "")


def config(**run):
    return Config(
        data={"source": "digits", "clients": 4, "partition": {"kind": "iid"}, "samples_per_client": 8},
        model={"name": "mlp", "hidden": 4},
        method={"name": "fedavg"},
        training={"rounds": 6, "batch_size": 8, "lr": 0.1},
        run={"eval_every": 2, "tensorboard": True, "placement": "shard", **run},
    )


def scalars(folder):
    """Tag -> {step: value}, as TensorBoard itself reads them; no step may come twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    events = {tag: read.Scalars(tag) for tag in read.Tags()["scalars"]}
    found = {tag: {event.step: event.value for event in events[tag]} for tag in events}
    assert all(len(found[tag]) == len(events[tag]) for tag in events)
    return found


def scalars_of(history):
    """The same, of a result's history."""
    columns = {name.replace(".", "/"): column.astype(np.float32).tolist() for name, column in history.items()}
    steps = columns.pop("round")
    return {tag: dict(zip(steps, column, strict=True)) for tag, column in columns.items()}


def killed(now):
    if now.round >= 4:
        raise TimeoutError


@needs_tensorboard
def test_lines_become_scalars(tmp_path):
    events, lines = TensorBoard(tmp_path / "run" / "tensorboard"), []
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    (tmp_path / "run" / "tensorboard" / "notes.txt").write_text("mine")
    now = Running(config(), "pre", 0, lines, dict)
    events.on_start(now)
    lines += [
        {"round": 2, "train_loss": 0.5, "pre": {"accuracy": 0.25, "new": {"accuracy": 0.125}}, "global": None},
        {"round": 4, "train_loss": math.nan, "pre": {"accuracy": 0.75, "new": {"accuracy": None}}, "global": 1},
    ]
    for line in lines:
        events.on_evaluate(now, line)
    found = scalars(tmp_path / "run")
    assert math.isnan(found["train_loss"].pop(4))
    assert found == {
        "train_loss": {2: 0.5},
        "pre/accuracy": {2: 0.25, 4: 0.75},
        "pre/new/accuracy": {2: 0.125},
        "global": {4: 1.0},
    }
    del lines[1]
    events.on_start(now)  # as a run that goes on
    assert scalars(tmp_path / "run")["pre/accuracy"] == {2: 0.25}
    assert (tmp_path / "run" / "tensorboard" / "notes.txt").read_text() == "mine"
    RunDirectory(tmp_path / "run", resume=True).begin("", {}, NOTHING)
    assert not (tmp_path / "run" / "tensorboard").exists()


@needs_tensorboard
def test_a_resumed_run_counts_each_round_once(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(TimeoutError):
        simulate(config(out=str(out), checkpoint_every=3), progress=killed)
    without = shutil.copytree(out, tmp_path / "without")
    assert scalars(out)["train_loss"].keys() == {2, 4}  # the newest checkpoint is that of round 3
    result = simulate(config(out=str(out)), resume=out)
    assert result.history["round"].tolist() == [2, 4, 6]
    assert scalars(out) == scalars_of(result.history)
    simulate(config(tensorboard=False), resume=without)
    assert not (without / "tensorboard").exists()


@needs_tensorboard
def test_runs_of_comparisons_and_sweeps_have_event_files(tmp_path):
    compare(config(), ["fedavg"], out=tmp_path / "compare")
    assert scalars(tmp_path / "compare" / "fedavg-seed0")["pre/accuracy"].keys() == {2, 4, 6}
    sweep(config(), {"run.seed": [0, 1]}, out=tmp_path / "sweep")
    of_each = [scalars(tmp_path / "sweep" / f"run.seed={seed}")["train_loss"] for seed in (0, 1)]
    assert of_each[0].keys() == of_each[1].keys() == {2, 4, 6}
    assert of_each[0] != of_each[1]


def test_a_logger_says_what_it_needs_and_knows_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    if importlib.util.find_spec("tensorboard"):
        TensorBoard("~/logs").on_start(Running(config(), "pre", 0, [], dict))
        assert list((tmp_path / "logs").iterdir())
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"^TensorBoard = 'tensorboard' is not usable: an installed package: pip in"):
        TensorBoard(tmp_path)


@pytest.mark.parametrize("run", [simulate, lambda given, **_: sweep(given, {"run.seed": [0]}, out=given.run.out)])
def test_what_event_files_need(run, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.tensorboard = True is not usable: false without a run directory"):
        run(config())
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as though it were not installed
    with pytest.raises(ConfigError, match=r'without the package .*: pip install "fedjax_pfl\[tensorboard\]"'):
        run(config(out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_file_that_cannot_be_written_to_its_end_stays_as_it_was(tmp_path, monkeypatch):
    def write_half(path, text, **_):
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("no space left on device")

    write_atomically(tmp_path / "a.json", "as it was")
    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(tmp_path / "a.json", "something else")
    assert (tmp_path / "a.json").read_text() == "as it was"


@pytest.mark.parametrize(
    ("there", "lost"),
    [
        (["notes.txt"], None),
        (["config.toml", "partition.json", "summary.json", "checkpoints/3"], None),
        (["config.toml", "notes.txt"], "config.toml"),
        (["partition.json", "checkpoints/mine.pt", "tensorboard/events", "export.npz"], "export.npz, partition.json, "),
    ],
)
def test_only_runs_are_replaced(there, lost, tmp_path):
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    if lost is None:
        RunDirectory(tmp_path, overwrite=True).begin("", {}, NOTHING)
        return
    message = rf"run\.out = .* is not usable: name another directory: there is no run in this one, and {lost}"
    with pytest.raises(ConfigError, match=message):
        simulate(config(out=str(tmp_path), tensorboard=False), overwrite=True)
    assert all((tmp_path / name).read_text() == "mine" for name in there)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights on Windows")
def test_a_link_to_checkpoints_stays_and_what_it_leads_to_goes(tmp_path):
    scratch, out = tmp_path / "scratch", tmp_path / "run"
    for folder in (scratch / "8", out):
        folder.mkdir(parents=True)
    (scratch / "notes.txt").write_text("old")
    for name in ("config.toml", "partition.json"):
        (out / name).write_text("old")
    (out / "checkpoints").symlink_to(scratch)
    RunDirectory(out, overwrite=True).begin("", {}, NOTHING)
    assert (out / "checkpoints").is_symlink()
    assert not list(scratch.iterdir())


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc")
def test_a_folder_that_cannot_be_made_is_named():
    with pytest.raises(ConfigError, match=r"run\.out = '/proc/nothing' is not usable: name a directory that can be wr"):
        RunDirectory("/proc/nothing").take()


def test_folders_that_a_refused_run_has_made_go_again(tmp_path):
    (tmp_path / "mine").mkdir()
    for out, left in (("new/run", ["mine"]), ("mine", ["mine"])):
        with pytest.raises(ConfigError, match="typo"):
            simulate(config(out=str(tmp_path / out), tensorboard=False), callbacks=[EarlyStopping("typo")])
        assert [entry.name for entry in tmp_path.iterdir()] == left
    assert not list((tmp_path / "mine").iterdir())


def test_a_directory_that_is_being_replaced_can_be_used_whenever_that_is_cut_short(tmp_path, monkeypatch):
    """What has no summary is no complete run; what has a config, and nothing at all, is begun anew."""
    unlink, cut = Path.unlink, 0

    class KilledError(BaseException):
        pass

    for steps in range(len(_FILES)):
        run = RunDirectory(tmp_path / str(steps), overwrite=True)
        (run.checkpoints / "3").mkdir(parents=True)
        for name in _FILES:
            (run.path / name).write_text("of another run", "utf-8")
        left = iter(range(steps))

        def dying(path, missing_ok=False, left=left):
            if next(left, None) is None:
                raise KilledError
            unlink(path, missing_ok=missing_ok)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", dying)
            with pytest.raises(KilledError):
                run.begin("", {}, NOTHING)
        there = {path.name for path in run.path.iterdir()} - {".beginning.partial"}
        assert len(there) == len(_FILES) - steps
        assert "config.toml" in there
        assert run.complete == (steps == 0)
        RunDirectory(run.path, overwrite=True).begin("", {}, NOTHING)
        assert {path.name for path in run.path.iterdir()} == {"config.toml", "partition.json", "partition.npz"}
        cut += 1
    assert cut == len(_FILES) > 5


def test_a_run_that_goes_on_leaves_nothing_of_what_its_end_had_written(tmp_path):
    """Its continuation may not export or keep what the first part did."""
    for name in _FILES:
        (tmp_path / name).write_text("of the first part", "utf-8")
    RunDirectory(tmp_path, resume=True).resume("", [], client_history=False)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "partition.json",
        "partition.npz",
    }


def test_a_run_is_not_complete_before_all_of_it_is_written(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    directory, column = RunDirectory(tmp_path), {"client": np.arange(2)}
    for where, exported in (("numpy.savez_compressed", column), ("fedjax_pfl.experiment.record.write_state", {})):
        with monkeypatch.context() as patched:
            patched.setattr(where, full)
            with pytest.raises(ConfigError, match=r"run.out = .* \(No space left on device\)"):
                directory.finish(column, column, exported, {"rounds": 1}, Kept(1, DataShape("", (), 2, None), ()))
        assert not directory.complete


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_names_the_run_directory(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"run.out = .* \(No space left on device\)"):
        RunDirectory(tmp_path, resume=True).append({"round": 1}, {})

    def refuse(*_, **__):
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("fedjax_pfl.experiment.kept.save_file", refuse)
    with pytest.raises(OSError, match="No space left on device"):
        write_state(tmp_path / "state.safetensors", Kept(1, DataShape("", (), 2, None), ()))


def test_a_checkpoint_that_cannot_be_written_is_one_error(tmp_path, caplog):
    state, usual = np.random.default_rng(0).normal(size=100_000), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, usual[1]))  # bytes of a file, as though the disk were full
    try:
        with pytest.raises(ConfigError, match=r"run.out = .* checkpoints can be written \(File too large\)"):
            Checkpoints(tmp_path / "checkpoints").save({"state": state}, Saved(1, [], 0.0, 0.0, {}, "", {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert not caplog.records


@pytest.mark.parametrize(
    ("had", "asked", "lacking"),
    [
        ({}, {"keep": "best"}, ["keep"]),
        ({"keep": "best"}, {}, ["keep"]),
        ({"keep": "best"}, {"keep": "none"}, []),
        ({"export": ["features"]}, {"export": ["features"], "export_clients": [3]}, []),
        ({"export": ["features"], "export_clients": [1, 2]}, {"export": ["features"], "export_clients": [2]}, []),
        (
            {"export": ["features"], "export_clients": [1, 2]},
            {"export": ["features"], "export_clients": [2, 3]},
            ["export_clients"],
        ),
        ({"client_history": True}, {}, []),
    ],
)
def test_a_complete_run_has_what_is_asked_for_or_it_is_named(had, asked, lacking):
    assert list(_not_kept(Run(**had), Run(**asked))) == lacking


def test_what_is_no_finite_number_is_null(tmp_path):
    """As all of JSON's readers take it, of which many know neither NaN nor Infinity."""
    directory = RunDirectory(tmp_path)
    directory.append({"round": 1, "pre": {"loss": math.inf, "accuracy": 0.5}, "train_loss": -math.inf}, {})
    directory.finish({}, {}, {}, {"rounds": 1, "timing": [math.nan, math.inf]}, None)
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"round": 1, "pre": {"loss": null, "accuracy": 0.5}, "train_loss": null}\n'
    )
    assert json.loads((tmp_path / "summary.json").read_text()) == {"rounds": 1, "timing": [None, None]}
