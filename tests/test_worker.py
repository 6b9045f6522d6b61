"""What a program of several runs says while it goes on, and which of its runs are run."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedjax_pfl import Config, ConfigError
from fedjax_pfl.experiment import worker
from fedjax_pfl.experiment.progress import Progress

CONFIG = Config(data={"source": "digits", "clients": 4}, method={"name": "fedavg"}, training={"rounds": 600})
SCORES = {"pre": {"accuracy": 0.25}, "post": {"accuracy": 0.5}}


FINISHED = worker.Finished({"rounds": 600}, {}, {})


@pytest.fixture(autouse=True)
def unprepared(monkeypatch):
    monkeypatch.setattr(worker, "prepare", lambda run: None)


def test_lines_come_before_the_first_evaluation_and_say_how_long_is_left(monkeypatch):
    begun = Progress(0, 600, math.nan, None, math.nan, 2 * 10**9)
    reports = {
        0.0: begun._replace(compiled=False),
        15.0: begun,
        16.0: Progress(1, 600, 2.5, None, 599.0, 0),
        17.0: Progress(2, 600, 2.25, None, 600.0, 0),  # too soon
        30.0: Progress(100, 600, math.nan, None, 150.0, 0),  # it has diverged
        120.0: Progress(300, 600, 1.5, SCORES, 60.0, 0),
        121.0: Progress(600, 600, 1.25, SCORES, 0.0, 0),
    }
    now, said = [0.0], []

    def drive(*_, progress, **__):
        for now[0], report in reports.items():
            progress(report)
        return [SimpleNamespace(**FINISHED._asdict())]

    monkeypatch.setattr(worker, "drive", drive)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert worker.run_program([CONFIG], lambda: None, said.append) == [FINISHED]
    assert said == [
        "about 2 GB of memory; compiling",
        "compiled",
        "round 1/600, loss 2.5000, 16 s, 10 min left",
        "round 100/600, loss nan, 30 s, 2 min left",
        "round 300/600, loss 1.5000, pre 25.00 %, post 50.00 %, 120 s, 60 s left",
        "round 600/600, loss 1.2500, pre 25.00 %, post 50.00 %, 121 s",
    ]


def summary(rounds):
    empty = {"personal": {}, "timing": {}, "traffic": {}, "environment": {}}
    return {"headline": "pre", "rounds": rounds, "global": None, **empty}


def runs_in(folder):
    """Three runs, with files as they are once the first is complete, and the second may go on to more rounds."""
    runs = [CONFIG.replace({"run.seed": seed, "run.out": str(folder / str(seed))}) for seed in range(3)]
    for run, rounds in zip(runs, (600, 500), strict=False):
        out = Path(run.run.out)
        out.mkdir()
        (out / "config.toml").write_text(run.replace("training.rounds", rounds).to_toml())
        (out / "summary.json").write_text(json.dumps(summary(rounds)))
        (out / "metrics.jsonl").write_text(json.dumps({"round": rounds, "pre": {"accuracy": 0.5}}))
        (out / "clients.csv").write_text("client,pre_accuracy\n0,0.5\n")
        (out / "checkpoints" / str(rounds)).mkdir(parents=True)
    return runs


def test_complete_runs_of_a_job_that_is_queued_again_are_taken_as_they_are(tmp_path, monkeypatch):
    runs, driven = runs_in(tmp_path), []

    def drive(some, dataset, places, **_):
        driven.append([config.run.seed for config in some])
        assert len(places) == len(some)
        return [SimpleNamespace(**FINISHED._asdict())] * len(some)

    monkeypatch.setattr(worker, "drive", drive)
    complete, *others = worker.run_program(runs, lambda: None, print)
    assert (driven, others) == ([[1, 2]], [FINISHED] * 2)
    assert complete.summary == summary(600)
    assert complete.history["pre.accuracy"].tolist() == [0.5]
    assert worker.run_program(runs[:1], lambda: None, print)[0].summary == complete.summary
    (other,) = worker.run_program([runs[0].replace("training.lr", 0.7)], lambda: None, print)
    assert other.startswith("config = 'training.lr=0.7' is not usable: what the run in ")
    (shorter,) = worker.run_program([runs[0].replace("training.rounds", 400)], lambda: None, print)
    assert shorter.startswith("training.rounds = 400 is not usable: 600, as in the complete run in ")
    assert len(driven) == 1


def test_a_run_that_is_refused_has_its_own_reason_and_stops_no_other(monkeypatch):
    driven, compiled, refused = [], Progress(0, 600, math.nan, None, math.nan, 0), {1: "nobody trains"}

    def drive(some, *_, progress, **__):
        seeds = [config.run.seed for config in some]
        driven.append(seeds)
        for seed in seeds:
            if seed in refused:
                raise ConfigError("run.seed", seed, refused[seed])
        progress(compiled)
        if 3 in seeds:
            raise ConfigError("run.seed", 3, "it has\nfailed")
        return [SimpleNamespace(**FINISHED._asdict())] * len(some)

    monkeypatch.setattr(worker, "drive", drive)
    outcome = worker.run_program(
        [CONFIG.replace("run.seed", seed) for seed in range(4)], lambda: None, lambda line: None
    )
    failed = "run.seed = 3 is not usable: it has failed"
    assert outcome == [FINISHED, "run.seed = 1 is not usable: nobody trains", failed, failed]
    assert driven == [[0, 1, 2, 3], [0, 1], [0], [1], [2, 3]]
    assert worker.in_short(outcome) == "3 runs failed: run.seed = 1 is not usable: nobody trains"


def test_data_that_cannot_be_loaded_are_loaded_once():
    def dataset():
        asked.append(1)
        raise ConfigError("data.source", "npz:x", "it is missing")

    asked = []
    outcome = worker.run_program([CONFIG, CONFIG.replace("run.seed", 1)], dataset, print)
    assert outcome == ["data.source = 'npz:x' is not usable: it is missing"] * 2
    assert len(asked) == 1
