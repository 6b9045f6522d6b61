"""A search as one program against `simulate` once per trial, and against a process per trial: FedProx's lr and mu.

    python benchmarks/tuning.py --json benchmarks/results/tuning.json

Ten clients of scikit-learn's digits, 20 rounds, evaluated every fifth round. There are 24 trials, drawn at random and
none of them pruned, so that all sides run the same trials. The sides run in turns, each time in a fresh process that
finds its compiled programs in the disk cache; one untimed repeat comes first. Wall-clock seconds of a side are from its
first call to its last result. Imports and the data set, which every process needs once, come before; CPU seconds
include them. Each side then does the same once more in the same process, whose programs are then loaded. The side of
one process per trial is timed from start to end of the processes, which is the cost of such a search, and has no second
time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from fedjax_pfl import Config, LogUniform, Uniform, simulate, tune
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.process import cores, prepare

SPACE = {"training.lr": LogUniform(1e-3, 0.3), "method.mu": Uniform(0, 1)}
TIMES = ("seconds", "again", "cpu_seconds")
SIDES = ("one program", "simulate per trial", "process per trial")


def config(rounds: int) -> Config:
    return Config(
        data={
            "source": "digits",
            "clients": 10,
            "partition": {"kind": "dirichlet", "beta": 0.3},
            "validation_share": 0.2,
        },
        model={"name": "mlp"},
        method={"name": "fedprox"},
        training={"rounds": rounds, "batch_size": 10},
        run={"eval_every": 5},
    )


def drawn(trials: int) -> list[dict[str, float]]:
    """The fields of each trial, as the search draws them."""
    import optuna

    ranges = {field: (given.low, given.high, isinstance(given, LogUniform)) for field, given in SPACE.items()}
    distributions = {
        field: optuna.distributions.FloatDistribution(low, high, log=log) for field, (low, high, log) in ranges.items()
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [study.ask(distributions).params for _ in range(trials)]


def value(base: Config, fields: dict[str, float]) -> float:
    """The result of a trial, as a search would compute it, by `simulate`."""
    return float(simulate(base.replace(fields), progress=None).history["validation_pre.accuracy"][-1])


def measure(side: str, base: Config, trials: int) -> list[float]:
    """The values of all trials."""
    import optuna

    if side == "simulate per trial":
        return [value(base, fields) for fields in drawn(trials)]
    options = {"sampler": optuna.samplers.RandomSampler(seed=0), "pruner": optuna.pruners.NopPruner()}
    study = tune(base, SPACE, n_trials=trials, batch=trials, **options)
    return [trial.value for trial in study.trials]


def child(arguments: list[str], *more: str) -> Any:
    """What a fresh process prints in its last line."""
    command = [sys.executable, __file__, *arguments, *more]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def timed(side: str, arguments: list[str], trials: int) -> dict[str, Any]:
    """A side's seconds, the seconds of its repeat, CPU seconds from the start of its process, and its values."""
    if side != "process per trial":
        return child(arguments, "--side", side)
    began = time.perf_counter()
    found = [child(arguments, "--trial", json.dumps(fields)) for fields in drawn(trials)]
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": sum(one["cpu_seconds"] for one in found),
        "values": [one["value"] for one in found],
    }


def main() -> None:
    """Prints the sides and their ratios, and writes them to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help="one side, as JSON on standard output")
    parser.add_argument("--trial", type=json.loads, help="one trial, likewise")
    options = parser.parse_args()
    base = config(options.rounds)
    if options.trial:
        print(json.dumps({"value": value(base, options.trial), "cpu_seconds": time.process_time()}))
        return
    if options.side:
        prepare(base.run)
        load(base.data.source)
        began = time.perf_counter()
        values = measure(options.side, base, options.trials)
        found = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time(), "values": values}
        began = time.perf_counter()
        assert measure(options.side, base, options.trials) == values
        print(json.dumps({**found, "again": time.perf_counter() - began}))
        return
    arguments = ["--trials", str(options.trials), "--rounds", str(options.rounds)]
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        for repeat in range(options.repeats + 1):
            for side in options.sides:
                if repeat == 0 and side == "process per trial":  # its program is that of `simulate`
                    continue
                found = timed(side, arguments, options.trials)
                if repeat:
                    measured[side].append(found)
                    print(side, {name: round(found[name], 1) for name in TIMES if name in found}, flush=True)
    median = {
        side: {name: statistics.median(found[name] for found in runs) for name in TIMES if name in runs[0]}
        for side, runs in measured.items()
    }
    first, ratios = options.sides[0], {}
    for side in options.sides[1:]:
        ratios[side] = {name: seconds / median[first][name] for name, seconds in median[side].items()}
        pairs = zip(measured[first][0]["values"], measured[side][0]["values"], strict=True)
        ratios[side]["largest_difference"] = max(abs(a - b) for a, b in pairs)
        best = " and ".join(f"{max(measured[name][0]['values']):.4f}" for name in (first, side))
        print(f"{side} against {first}: {ratios[side]}; best value {best}")
    if options.json:
        machine = {"cores": cores(), "backend": jax.default_backend(), "jax": jax.__version__}
        setting = {"trials": options.trials, "rounds": options.rounds, "repeats": options.repeats}
        found = {"machine": machine, **setting, "median": median, "ratios": ratios, "measured": measured}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
