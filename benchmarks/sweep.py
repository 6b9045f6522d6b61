"""Times a sweep as one program, its runs or their clients over the cores, against one `simulate` per run.

FedRep, eight seeds x three learning rates.

    FEDJAX_PFL_DATA=FOLDER python benchmarks/sweep.py --json benchmarks/results/sweep.json

FOLDER holds fashion_mnist_70k.npz. Each side runs in a process of its own that starts with an empty cache of compiled
programs. It is timed from the first call to the last result, including compilation. The largest difference between the
accuracies of the first side and each other side is printed as well. `simulate` spreads a run's clients over the cores;
seed and learning rate are inputs of a program, so that its first call compiles for all of them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from fedjax_pfl import load_config, simulate, sweep
from fedjax_pfl.experiment.process import cores, prepare

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "fashion_mnist_dirichlet.toml"
SIDES = ("runs over the cores", "clients over the cores", "simulate")
FIXED = [
    "method.name=fedrep",
    "model.name=mlp",
    "data.samples_per_client=300",
    'data.partition={kind="dirichlet", beta=0.1}',
]


def measure(side: str, seeds: int, rates: list[float], overrides: list[str], cache: str) -> dict[str, Any]:
    """Seconds of one side, how much of this was compilation, and its accuracies; ``cache`` is an empty folder."""
    config = load_config(CONFIG, [*FIXED, *overrides, f"run.compilation_cache={cache}"])
    prepare(config.run)
    grid: dict[str, list[Any]] = {"run.seed": list(range(seeds)), "training.lr": rates}
    began = time.perf_counter()
    if side != "simulate":
        placement = "shard" if side == "clients over the cores" else "auto"
        swept = sweep(config.replace("run.placement", placement), grid)
        if swept.failed:
            raise RuntimeError(swept.failed[0].error)
        summaries = [cell.summary for cell in swept.cells]
    else:
        summaries = []
        for seed in grid["run.seed"]:
            for lr in rates:
                summaries.append(simulate(config.replace({"run.seed": seed, "training.lr": lr})).summary)
    seconds = time.perf_counter() - began
    complete = [summary for summary in summaries if summary is not None]
    return {
        "seconds": seconds,
        "compile_seconds": sum(summary["timing"]["compile_seconds"] for summary in complete),
        "accuracy": [summary["personal"][point]["last"] for summary in complete for point in ("pre", "post")],
    }


def main() -> None:
    """Prints the sides and their ratios, and writes them to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.01, 0.03, 0.1])
    parser.add_argument(
        "--set", nargs="*", default=["training.rounds=10"], metavar="KEY=VALUE", help="config overrides"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help="one side, as JSON on standard output")
    options = parser.parse_args()
    if options.side:
        with tempfile.TemporaryDirectory() as cache:
            print(json.dumps(measure(options.side, options.seeds, options.rates, options.set, cache)))
        return
    sides = {}
    for side in SIDES:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        sides[side] = json.loads(done.stdout.splitlines()[-1])
        print(f"{side}: {sides[side]['seconds']:.1f} s, of which compilation {sides[side]['compile_seconds']:.1f} s")
    against = {}
    for side in SIDES[1:]:
        pairs = zip(sides[SIDES[0]]["accuracy"], sides[side]["accuracy"], strict=True)
        ratio, difference = sides[side]["seconds"] / sides[SIDES[0]]["seconds"], max(abs(a - b) for a, b in pairs)
        against[side] = {"ratio": ratio, "largest_difference": difference}
        print(f"{side}: {ratio:.2f} times as long; largest difference of an accuracy {difference:.1e}")
    if options.json:
        machine = {"cores": cores(), "backend": jax.default_backend(), "jax": jax.__version__}
        setting = {"seeds": options.seeds, "rates": options.rates, "set": [*FIXED, *options.set]}
        found = {"machine": machine, **setting, "sides": sides, "against": against}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
