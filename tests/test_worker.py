"""What a program of several runs says while it goes on."""

import math

from fedjax_pfl import Config
from fedjax_pfl.experiment import worker
from fedjax_pfl.experiment.progress import Progress

CONFIG = Config(data={"source": "digits", "clients": 4}, method={"name": "fedavg"}, training={"rounds": 600})
SCORES = {"pre": {"accuracy": 0.25}, "post": {"accuracy": 0.5}}


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
        return []

    monkeypatch.setattr(worker, "drive", drive)
    monkeypatch.setattr(worker, "prepare", lambda run: None)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert worker.run_program([CONFIG], lambda: None, said.append) == []
    assert said == [
        "about 2 GB of memory; compiling",
        "compiled",
        "round 1/600, loss 2.5000, 16 s, 10 min left",
        "round 100/600, loss nan, 30 s, 2 min left",
        "round 300/600, loss 1.5000, pre 25.00 %, post 50.00 %, 120 s, 60 s left",
        "round 600/600, loss 1.2500, pre 25.00 %, post 50.00 %, 121 s",
    ]
