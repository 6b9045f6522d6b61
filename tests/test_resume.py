"""A run that was stopped goes on to the result of one that was not."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from fedjax_pfl import Callback, Config, ConfigError, Result, simulate
from fedjax_pfl.data.intake import as_dataset
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.checkpoint import Checkpoints, stop_on_signals
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.record import RunDirectory
from fedjax_pfl.experiment.resume import versions
from fedjax_pfl.experiment.saved import check_alike, complete_run
from fedjax_pfl.experiment.sections import Run
from tests.interruption import KilledError, killed_after


def config(out, **tables):
    base = {
        "data": {"source": "digits", "clients": 6, "partition": {"kind": "dirichlet", "beta": 0.3}},
        "model": {"name": "mlp", "hidden": 8},
        "method": {"name": "fedper"},
        "training": {"rounds": 6, "batch_size": 16, "lr": 0.1},
        "participation": {"ratio": 0.5},
        "run": {"eval_every": 4, "checkpoint_every": 2, "out": str(out)},
    }
    for section, fields in tables.items():
        base[section] = {**base.get(section, {}), **fields}
    return Config(**base)


def metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same(result, expected, out, expected_out):
    jax.tree.map(np.testing.assert_array_equal, result.state, expected.state)
    assert metrics(out) == metrics(expected_out)
    assert (out / "clients.csv").read_text() == (expected_out / "clients.csv").read_text()
    for key in ("personal", "global", "traffic", "rounds"):
        assert result.summary[key] == expected.summary[key]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted: its result and its directory."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return simulate(config(out)), out


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The directory of a run that was killed in round 4, after its evaluation, before its checkpoint was the newest."""
    out = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(KilledError):
        simulate(config(out), progress=killed_after(4))
    shutil.rmtree(out / "checkpoints" / "4")
    return out


@pytest.fixture
def copy(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "copy")


def test_a_killed_run_goes_on_to_the_same_result(whole, copy):
    assert len(metrics(copy)) == 1  # of round 4, which will be run again
    rounds = []
    result = simulate(config(copy), resume=copy, progress=lambda now: rounds.append(now.round))
    assert (rounds[0], rounds[-1]) == (2, 6)
    assert_same(result, whole[0], copy, whole[1])
    assert result.summary["timing"]["total_seconds"] > 0
    with pytest.raises(ConfigError, match=r"complete after 6 rounds.*larger training\.rounds"):
        simulate(config(copy), resume=copy)


def test_a_run_that_goes_on_elsewhere_is_left_in_peace(copy):
    """Reading its checkpoints would clear away the one that is being written."""
    written = copy / "checkpoints" / "3.orbax-checkpoint-tmp"
    written.mkdir()
    lock = os.open(copy / ".lock", os.O_WRONLY | os.O_CREAT)
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, os, sys; fcntl.lockf(os.open({str(copy / '.lock')!r}, os.O_WRONLY), "
         "fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(lock)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another process is running in this one"):
        simulate(config(copy), resume=copy)
    assert written.exists()
    holder.communicate("")
    simulate(config(copy), resume=copy)
    assert not written.exists()


def signal_in(round_number, number):
    def progress(now):
        if now.round == round_number:
            os.kill(os.getpid(), number)

    return progress


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_ends_the_run(number, whole, tmp_path):
    """Without ``checkpoint_every``; the signal comes while rounds are running."""
    out, handlers = tmp_path / "run", [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    without = config(out, run={"checkpoint_every": 0})
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as stopped:
        simulate(without, progress=signal_in(1, number))
    if number == signal.SIGTERM:
        assert stopped.value.code == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not (out / "summary.json").exists()
    assert 1 < Checkpoints(out / "checkpoints").rounds()[-1] < 6
    assert_same(simulate(without, resume=out), whole[0], out, whole[1])


def test_a_signal_whose_handler_is_not_pythons_is_left_alone(monkeypatch):
    """A host in which Python is embedded; `signal.getsignal` gives None for its handlers."""
    mine = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else mine(number))
    before = mine(signal.SIGTERM), mine(signal.SIGINT)
    with stop_on_signals() as stop:
        assert mine(signal.SIGTERM) is before[0]
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
    assert (mine(signal.SIGTERM), mine(signal.SIGINT)) == before


def test_a_second_signal_acts_at_once(capfd):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert capfd.readouterr().err == "\nstopping after the next round; a second signal ends it at once\n"


def test_a_signal_that_comes_after_the_last_round_is_passed_on_when_the_run_is_complete(whole, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulate(config(out), progress=signal_in(6, signal.SIGINT))
    assert (out / "summary.json").exists()
    assert_same(Result.load(out), whole[0], out, whole[1])


def test_more_rounds_can_be_added_to_a_complete_run(whole, tmp_path):
    out = shutil.copytree(whole[1], tmp_path / "run")
    longer = config(tmp_path / "elsewhere", training={"rounds": 8})
    result = simulate(longer, resume=out)
    assert (result.config.run.out, (tmp_path / "elsewhere").exists()) == (str(out), False)
    expected = simulate(config(tmp_path / "other", training={"rounds": 8}))
    jax.tree.map(np.testing.assert_array_equal, result.state, expected.state)
    assert [line["round"] for line in metrics(out)] == [4, 6, 8]  # 6 was the last round once
    assert "rounds = 8" in (out / "config.toml").read_text()


@pytest.mark.parametrize("rounds", [4, 6])
def test_a_complete_run_is_not_run_again_from_an_older_checkpoint(rounds, whole, tmp_path):
    """Of a signal, in a run without ``run.checkpoint_every``; the first rounds of it would replace the whole."""
    out = shutil.copytree(whole[1], tmp_path / "run")
    newest = max((out / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(newest)
    assert any((out / "checkpoints").iterdir())
    match = "resume = .*: the run is complete after 6 rounds; to go on, give a larger training.rounds"
    fails_untouched(out, match, config(out, training={"rounds": rounds}))


def test_a_run_killed_before_its_summary_only_sums_up(whole, tmp_path):
    out = shutil.copytree(whole[1], tmp_path / "run")
    (out / "summary.json").unlink()
    assert_same(simulate(config(out), resume=out), whole[0], out, whole[1])


def test_clients_may_be_placed_otherwise(whole, copy):
    result = simulate(config(copy, run={"placement": "map"}), resume=copy)
    for leaf, expected in zip(jax.tree.leaves(result.state), jax.tree.leaves(whole[0].state), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)


def fails_untouched(out, match, run, **options):
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=match):
        simulate(run, resume=out, **options)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_another_config_is_refused_with_the_fields_that_differ(copy):
    other = config(copy, training={"lr": 0.2}, method={"name": "fedprox", "mu": 0.5})
    match = (
        r"config = 'method\.mu=0\.5, .*training\.lr=0\.2'.*was started with: .*method\.name=fedper.* training\.lr=0\.1"
    )
    fails_untouched(copy, match, other)
    fails_untouched(copy, r"training\.rounds = 1 is not usable: 3 or more", config(copy, training={"rounds": 1}))


def test_what_a_run_is_written_to_and_where_it_runs_may_change_but_nothing_that_its_numbers_depend_on():
    given, refused = config("run", run={"export": ["predictions"]}), []
    others = {
        "seed": 1,
        "eval_every": 3,
        "checkpoint_every": 5,
        "placement": "vmap",
        "chunk": 2,
        "client_state": "host",
        "precision": "float32",
        "out": "elsewhere",
        "diagnostics": True,
        "export": ["features"],
        "export_clients": [0],
        "keep": "none",
        "client_history": True,
        "metrics": ["mine"],
        "tensorboard": True,
        "compilation_cache": "off",
    }
    assert others.keys() == Run.model_fields.keys()
    for field, value in others.items():
        try:
            check_alike(given, given.replace(f"run.{field}", value), "run")
        except ConfigError:
            refused.append(field)
    # The rounds that are evaluated are those of the history, and of POST scores.
    assert refused == ["seed", "eval_every", "precision", "diagnostics", "metrics"]


def test_other_data_are_refused(copy):
    x, y = np.zeros((400, 8, 8, 1), np.uint8), np.arange(400) % 10
    fails_untouched(copy, r"config = 'data\.source=arrays' ", config(copy), data=(x, y))
    fails_untouched(copy, r"data\.source.*another partition", config(copy), data=as_dataset((x, y)))
    digits = load("digits")
    inverted = digits._replace(images=255 - digits.images)
    fails_untouched(copy, r"resume = .*a directory for other samples", config(copy), data=inverted)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path, copy):
    with pytest.raises(ConfigError, match=r"resume = .*a run directory that holds a checkpoint"):
        simulate(config(tmp_path / "run"), resume=tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    # One that was being written when the process was killed is none, and stays until another is written.
    (copy / "checkpoints" / "2").rename(copy / "checkpoints" / "2.orbax-checkpoint-tmp")
    fails_untouched(copy, "a run directory that holds a checkpoint", config(copy))
    shutil.rmtree(copy / "checkpoints" / "2.orbax-checkpoint-tmp")
    fails_untouched(copy, "a run directory that holds a checkpoint", config(copy))


def test_a_complete_run_without_a_checkpoint_cannot_be_extended_and_says_what_can_be_done(whole, tmp_path):
    out = shutil.copytree(whole[1], tmp_path / "run")
    shutil.rmtree(out / "checkpoints")
    match = (
        r"resume = .*run' is not usable: a run directory that holds a checkpoint: its run is complete and wrote none, "
        r"so that it cannot be extended; run it again from the start \(.*--overwrite\), with run\.checkpoint_every"
    )
    longer = config(out, training={"rounds": 8})
    fails_untouched(out, match, longer)
    # As in a comparison or sweep, which takes complete runs as they are.
    match = r"training\.rounds = 8 is not usable: 6, as in the complete run in .*, or another folder \(out=, --out\)"
    with pytest.raises(ConfigError, match=match):
        complete_run(longer)
    assert complete_run(config(whole[1], training={"rounds": 8})) is None, "with checkpoints, it goes on"


def test_a_checkpoint_that_is_empty_is_named_with_the_way_out(whole, tmp_path):
    """As a loss of power may leave it, where the system has written the names of files before what is in them."""
    out = shutil.copytree(whole[1], tmp_path / "run")
    (out / "summary.json").unlink()
    for path in (out / "checkpoints" / "6").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    match = r"resume = .*checkpoints/6.* a readable checkpoint \(.*; without this folder, the run resumes from the one"
    fails_untouched(out, match, config(out))
    shutil.rmtree(out / "checkpoints" / "6")
    assert_same(simulate(config(out), resume=out), whole[0], out, whole[1])


def test_a_damaged_checkpoint_is_named_once(copy, caplog):
    for path in (copy / "checkpoints" / "2" / "run").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    fails_untouched(copy, r"resume = .*checkpoints/2.* a readable checkpoint \(", config(copy))
    # When Python collects the reads of the other arrays, asyncio logs that nobody looked at their errors.
    for file in (copy / "checkpoints" / "2" / "run" / "d", copy.parent / "elsewhere"):
        logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: %s", file)
    assert [message for message in caplog.messages if "checkpoints" in message] == []
    assert "elsewhere" in caplog.text


def test_a_checkpoint_with_arrays_of_another_shape_is_named(copy):
    """As of a method whose state has changed since."""

    def wider(leaf):
        return jax.ShapeDtypeStruct((*leaf.shape, 2), leaf.dtype)

    checkpoints, like = Checkpoints(copy / "checkpoints"), lay_out([config(copy)], load("digits")).one_run()
    assert checkpoints.run(2, like).loss.shape == ()
    with pytest.raises(ConfigError, match=r"a readable checkpoint \(\.loss is float32\[\] instead of float32\[2\]\)"):
        checkpoints.run(2, like._replace(loss=wider(like.loss)))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda saved: saved["checksums"].update(run=1), "its arrays have changed since they were written"),
        (lambda saved: saved["checksums"].pop("run"), "its arrays have changed since they were written"),
        (lambda saved: saved["checksums"].pop("progress"), "its progress has changed since it was written"),
        (lambda saved: saved.update(seconds=0.5), "its progress has changed since it was written"),
        (lambda saved: saved.update(round=1), "its progress has changed since it was written"),
    ],
    ids=["arrays", "no arrays", "nothing", "seconds", "round"],
)
def test_a_checkpoint_that_has_changed_since_it_was_written_is_refused(change, what, copy):
    """As by a bit of a disk, which orbax reads as it finds it."""
    progress = copy / "checkpoints" / "2" / "progress" / "metadata"
    saved = json.loads(progress.read_text())
    change(saved)
    progress.write_text(json.dumps(saved))
    fails_untouched(copy, rf"checkpoints/2' is not usable: a readable checkpoint \({what}\); there is no", config(copy))


def test_a_checkpoint_without_checksums_can_be_read(copy, whole):
    """Those from before there were any."""
    progress = copy / "checkpoints" / "2" / "progress" / "metadata"
    saved = json.loads(progress.read_text())
    del saved["checksums"]
    progress.write_text(json.dumps(saved))
    assert_same(simulate(config(copy), resume=copy), whole[0], copy, whole[1])


@pytest.mark.parametrize("name", ["w[1]", "[2024] runs", "a\\b"])
def test_a_path_in_which_checkpoints_cannot_be_kept_is_refused(name, tmp_path):
    """orbax writes to the first two, and does not find what it has written; the third it takes for a folder b in a."""
    with pytest.raises(ConfigError, match=r"^run\.out = .* is not usable: a path without \[\.\.\.\] and backslashes"):
        simulate(config(tmp_path / name / "run"))
    assert not any(tmp_path.iterdir())
    Checkpoints(tmp_path / "[x" / "]*?" / "checkpoints")


def test_a_checkpoint_of_another_version_is_named(copy):
    progress = copy / "checkpoints" / "2" / "progress" / "metadata"
    saved = json.loads(progress.read_text())
    saved["config"]["method"]["name"] = "of_long_ago"
    del saved["checksums"]
    progress.write_text(json.dumps(saved))
    match = (
        r"resume = '.*copy' is not usable: a checkpoint of this version; its config has method\.name = 'of_long_ago'"
    )
    fails_untouched(copy, match, config(copy))


def test_a_checkpoint_has_config_and_versions_of_the_process_that_wrote_it(copy):
    progress = copy / "checkpoints" / "2" / "progress" / "metadata"
    saved = json.loads(progress.read_text())
    saved["versions"]["jax"] = "0.0.1"
    del saved["checksums"]
    progress.write_text(json.dumps(saved))
    with pytest.warns(UserWarning, match=r"was run with .*'jax': '0\.0\.1'.*: the last bits may differ"):
        simulate(config(copy, run={"checkpoint_every": 3}), resume=copy)
    newest = Checkpoints(copy / "checkpoints").read(6)
    assert (newest.versions, newest.config["run"]["checkpoint_every"]) == (versions(), 3)


def test_a_run_that_goes_on_is_not_overwritten(copy):
    match = r"overwrite = True is not usable: false with resume, which goes on"
    fails_untouched(copy, match, config(copy), overwrite=True)


def test_a_run_directory_may_be_in_the_home_directory(copy, monkeypatch):
    monkeypatch.setenv("HOME", str(copy.parent))
    assert simulate(config(copy), resume=f"~/{copy.name}").config.run.out == str(copy)


def test_a_history_of_clients_that_is_not_wanted_any_more_goes(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KilledError):
        simulate(config(out, run={"client_history": True}), progress=killed_after(4))
    assert (out / "client_history.csv").exists()
    assert simulate(config(out), resume=out).client_history == {}
    assert not (out / "client_history.csv").exists()


def test_a_directory_that_cannot_be_written_is_named(copy):
    (copy / "clients.csv").mkdir()
    fails_untouched(copy, r"run\.out = '.*copy' is not usable: name a directory that can be written", config(copy))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_a_directory_in_which_another_process_runs_is_refused(whole, copy):
    there = "import fcntl, sys; fcntl.lockf(file := open(sys.argv[1], 'a'), fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", there, str(copy / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        fails_untouched(copy, r"run\.out = '.*copy'.*or wait: another process is running in this one", config(copy))
        with pytest.raises(ConfigError, match="another process"):
            simulate(config(copy), overwrite=True)
        other.kill()
    assert_same(simulate(config(copy), resume=copy), whole[0], copy, whole[1])
    assert not (copy / ".lock").exists()


def test_a_directory_left_while_it_is_taken_is_locked_for_others_too(tmp_path, monkeypatch):
    """The one who leaves removes the file that this process has opened and not yet locked."""
    fcntl = pytest.importorskip("fcntl", reason="Windows has no such locks")
    path, lockf, calls = tmp_path / ".lock", fcntl.lockf, []

    def locked_too_late(file, how):
        if not calls:
            path.unlink()
        calls.append(file)
        lockf(file, how)

    monkeypatch.setattr(fcntl, "lockf", locked_too_late)
    directory = RunDirectory(tmp_path)
    directory.take()
    assert len(calls) == 2
    there = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", there, str(path)], stderr=subprocess.PIPE, text=True)
    assert "BlockingIOError" in other.stderr
    directory.leave()
    assert not path.exists()


def test_a_run_that_failed_leaves_its_directory_even_if_its_error_is_kept(copy):
    with pytest.raises(KilledError) as kept:
        simulate(config(copy), resume=copy, progress=killed_after(4))
    assert kept.traceback
    assert not (copy / ".lock").exists()


def test_a_directory_is_taken_once_in_a_process_too(tmp_path):
    folder = tmp_path / "run"
    first, second = RunDirectory(folder), RunDirectory(tmp_path / "elsewhere" / ".." / "run")
    first.take()
    with pytest.raises(ConfigError, match=r"run\.out = .* or wait: another run of this process goes on in this one"):
        second.take()
    first.leave()
    second.take()
    first.leave()
    del first
    assert (folder / ".lock").exists(), "only the one who has taken it gives it back"
    second.leave()
    assert not folder.exists(), "it was new, and is empty"


class Stops(Callback):
    def on_start(self, run):
        run.stop("enough")


def test_a_run_that_a_callback_ends_where_it_goes_on_is_evaluated(whole, copy, tmp_path):
    """After its newest checkpoint where that has an evaluation, else after one more round."""
    result = simulate(config(copy), resume=copy, callbacks=[Stops()])
    assert (result.history["round"].tolist(), result.summary["rounds"], result.summary["stopped"]) == ([3], 3, "enough")
    evaluated = shutil.copytree(whole[1], tmp_path / "evaluated")
    (evaluated / "summary.json").unlink()
    shutil.rmtree(evaluated / "checkpoints" / "6")
    result = simulate(config(evaluated), resume=evaluated, callbacks=[Stops()])
    assert (result.history["round"].tolist(), result.summary["rounds"]) == ([4], 4)


def test_a_run_cannot_end_at_a_checkpoint_that_was_not_evaluated(copy):
    match = r"training\.rounds = 2 is not usable: 3 or more: 2 are done, the last of them without an evaluation"
    fails_untouched(copy, match, config(copy, training={"rounds": 2}))


def test_a_run_that_has_ended_in_a_directory_since_it_was_checked_is_not_replaced(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.out = .* is not usable: the directory is not empty"):
        directory.take()
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["summary.json"]


def test_the_last_round_has_a_checkpoint_whichever_it_is(tmp_path):
    simulate(config(tmp_path / "run", training={"rounds": 3}))
    assert Checkpoints(tmp_path / "run" / "checkpoints").rounds() == [2, 3]


def test_checkpoints_need_a_run_directory():
    with pytest.raises(ConfigError, match=r"run\.checkpoint_every = 2 is not usable: 0 without a run directory"):
        simulate(config("", run={"out": None}))


def test_an_overwritten_run_leaves_no_checkpoint_behind(copy):
    with pytest.raises(KilledError):
        simulate(config(copy, run={"checkpoint_every": 0}), overwrite=True, progress=killed_after(1))
    with pytest.raises(ConfigError, match="holds a checkpoint"):
        simulate(config(copy), resume=copy)


def test_the_time_before_an_interruption_counts(copy, monkeypatch):
    read = Checkpoints.read
    monkeypatch.setattr(Checkpoints, "read", lambda self, round: read(self, round)._replace(seconds=1e6))
    result = simulate(config(copy), resume=copy)
    assert result.history["seconds"].min() > 1e6
    assert result.summary["timing"]["total_seconds"] > 1e6


def test_the_rounds_before_an_interruption_count_in_the_time_per_round(copy, monkeypatch):
    read = Checkpoints.read
    monkeypatch.setattr(Checkpoints, "read", lambda self, round: read(self, round)._replace(round_seconds=6e6))
    assert simulate(config(copy), resume=copy).summary["timing"]["seconds_per_round"] == pytest.approx(1e6, rel=1e-3)
