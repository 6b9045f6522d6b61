"""A round of pFedCSPC against one of FedAvg with the same local epochs, and the cost of each of its parts.

    FEDJAX_PFL_DATA=FOLDER python benchmarks/pfedcspc_cost.py --json benchmarks/results/pfedcspc_cost.json

FOLDER holds cifar10_20k.npz. The setting is that of Table II on CIFAR-10. Parts are added one after the other, so that
each case has one part more than the case before. The programs run in turns, and the medians of their rounds are
compared.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax

from fedjax_pfl import load_config
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.process import cores, prepare

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "pfedcspc" / "table2_global_and_local.toml"
OFF = ["method.kappa=0.0", "method.pmi=off", "method.kp_weight=0.0"]
CASES = {
    "FedAvg": ["method.name=fedavg"],
    "all modules off": [*OFF, "method.calibrate=false"],
    "+ prototypes, exemplars": [*OFF[:2], "method.calibrate=false"],
    "+ calibration without augmented pairs": [*OFF[:2], "method.augmented=0"],
    "+ augmented pairs": OFF[:2],
    "+ personal encoders": OFF[:1],
    "+ alignment: all of pFedCSPC": [],
}


def compiled_rounds(overrides: list[str]) -> Callable[[int], float]:
    """A function that runs round t, starting from the state of the last call, and returns its seconds."""
    config = load_config(CONFIG, overrides)
    prepare(config.run)
    program = lay_out([config], load(config.data.source))
    program.compile()
    states = program.init()

    def one(t: int) -> float:
        nonlocal states
        began = time.perf_counter()
        states = jax.block_until_ready(program.rounds(states, t, t + 1, evaluate=False))
        return time.perf_counter() - began

    return one


def main() -> None:
    """Prints the table, and writes it to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each case, after one that is not")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="config overrides")
    options = parser.parse_args()
    programs = {name: compiled_rounds([*overrides, *options.set]) for name, overrides in CASES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for t in range(options.rounds + 1):
        for name, one in programs.items():
            seconds[name].append(one(t))
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    print("| case | s per round | ratio to FedAvg |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:.2f} | {median / medians['FedAvg']:.2f} |")
    if options.json:
        machine = {"cores": cores(), "backend": jax.default_backend(), "jax": jax.__version__}
        text = json.dumps({"machine": machine, "set": options.set, "seconds": seconds, "medians": medians}, indent=2)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
