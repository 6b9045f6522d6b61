"""Seconds until a run can start: to trace and lower, and to compile, each program of each method.

    python benchmarks/compile_time.py --json benchmarks/results/compile_time.json

A case is a method with a model, on 20 clients and random 28x28x1 images, with the clients spread over the devices as by
default. The programs are those that `simulate` compiles: the initial state, a block of rounds, and scores (PRE and, if
there is one, the global model's). A case runs in a process of its own, in which the programs are compiled one after the
other (`simulate` compiles them side by side). It then runs again in a second process, which finds the compiled programs
in the cache of the first one. Instructions are those of the program that XLA is given.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pfl import METHODS, Config, load_config
from fedjax_pfl.data.dataset import from_arrays
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.process import cores, prepare
from fedjax_pfl.experiment.programs import traced

MODELS = ("mlp", "cnn2")
# A model for the methods that run on no other, and what methods need: FedCPD where there are no feature maps, others to
# select on.
OWN_MODEL = {"pfedcspc": "cnn_proj", "fedbn": "resnet18"}
WITHOUT_MAPS = {"fedcpd": ["method.gamma=0.0"]}
SELECTING = {"fedfomo", "fedsoup"}


def measure(method: str, model: str, overrides: list[str], cache: str) -> dict[str, dict[str, float]]:
    """For each program of a case: seconds to trace and lower, seconds to compile, and instructions."""
    config = config_of(method, model, [f"run.compilation_cache={cache}", *overrides])
    prepare(config.run)
    rng = np.random.default_rng(0)
    samples = 40 * config.data.clients
    dataset = from_arrays(rng.integers(0, 256, (samples, 28, 28, 1), dtype=np.uint8), np.arange(samples) % 10)
    found = {}
    for name, (jitted, arguments) in traced(lay_out([config], dataset)).items():
        began = time.perf_counter()
        lowered = jitted.lower(*arguments)
        ready = time.perf_counter()
        lowered.compile({"xla_backend_optimization_level": 1} if name == "init" else None)  # as `simulate` does
        compiled = time.perf_counter()
        instructions = len(re.findall(r"^\s+\S+ = ", lowered.as_text("hlo"), re.MULTILINE))
        found[name] = {"trace": ready - began, "compile": compiled - ready, "instructions": instructions}
    return found


def config_of(method: str, model: str, overrides: list[str]) -> Config:
    """The config of a case: defaults, twenty clients, what the method needs, and the options of the command line."""
    without_maps = WITHOUT_MAPS.get(method, []) if model == "mlp" else []
    selecting = ["data.validation_share=0.2"] if method in SELECTING else []
    settings = [f"method.name={method}", f"model.name={model}", *without_maps, *selecting, *overrides]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write('[data]\nsource = "arrays"\nclients = 20\npartition = { kind = "iid" }\n')
        file.flush()
        return load_config(file.name, settings)


def main() -> None:
    """Runs every case, prints a table and, if asked to, writes all figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", default="cold,warm", choices=["cold", "cold,warm"])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="config overrides")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=3, metavar=("METHOD", "MODEL", "CACHE"), help="one case, as JSON")
    options = parser.parse_args()
    if options.case:
        method, model, cache = options.case
        print(json.dumps(measure(method, model, options.set, cache)))
        return
    print("| method | model | instructions | trace | compile: rounds | score | init | all, cold | all, warm |")
    print("|---|---|---|---|---|---|---|---|---|")
    cases = []
    machine = f"{cores()} {platform.machine()} cores, JAX {jax.__version__} on {jax.default_backend()}"
    for model in options.models:
        for method in options.methods:
            if method in OWN_MODEL and model != options.models[-1]:
                continue
            on = OWN_MODEL.get(method, model)
            case: dict[str, Any] = {"method": method, "model": on}
            with tempfile.TemporaryDirectory() as cache:
                for part in options.parts.split(","):
                    command = [sys.executable, __file__, *sys.argv[1:], "--case", method, on, cache]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    case[part] = json.loads(done.stdout.splitlines()[-1])
            cases.append(case)
            print(row(case), flush=True)
            if options.json:
                report = {"machine": machine, "set": options.set, "cases": cases}
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def row(case: dict[str, Any]) -> str:
    """A line of the table."""
    cold = case["cold"]

    def total(part: str, *figures: str) -> float:
        return sum(program[figure] for program in case[part].values() for figure in figures)

    compiled = [f"{cold[name]['compile']:.2f}" for name in ("rounds", "score", "init")]
    warm = f"{total('warm', 'trace', 'compile'):.2f}" if "warm" in case else "–"
    seconds = [f"{total('cold', 'trace'):.2f}", *compiled, f"{total('cold', 'trace', 'compile'):.2f}", warm]
    return f"| {case['method']} | {case['model']} | {total('cold', 'instructions'):.0f} | {' | '.join(seconds)} |"


if __name__ == "__main__":
    main()
