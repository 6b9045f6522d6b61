"""The cost of a round of every method relative to FedAvg: time, work of a client, numbers sent, numbers kept.

    python benchmarks/method_costs.py --json benchmarks/results/method_costs.json

All methods run on one federation: 20 clients that share scikit-learn's digits, Dir(0.1), batches of 10, one local
epoch, with the model of ``configs/all_methods.toml``. A method that cannot run on it is left out, with the reason:
FedBN, which needs normalisation layers and otherwise computes what FedAvg does. A round is timed without evaluation, in
blocks of ``--rounds`` rounds, each block of a method between two blocks of FedAvg; the median of the ratios is
reported. Numbers follow from the shapes of what is exchanged: a part that is sent per class, or in some rounds only, is
counted whole.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import jax
from listed import names_of

from fedjax_pfl import METHODS, Config, ConfigError, load_config
from fedjax_pfl.analysis.work import client_work
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.federated import Federation
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.programs import Program
from fedjax_pfl.ops.tree import count

ROOT = Path(__file__).resolve().parent.parent


def config_of(name: str) -> Config:
    """The config of a method; all set a fifth of the training samples aside, since some methods select on them."""
    return load_config(ROOT / "configs" / "all_methods.toml", [f"method.name={name}", "data.validation_share=0.2"])


class Timed:
    """A method's program, which can be run for more and more rounds."""

    def __init__(self, config: Config, dataset: Dataset):
        self.program = lay_out([config], dataset)
        self.program.compile()
        self.states, self.t = self.program.init(), 0
        self.block(2)  # what later rounds start from

    def block(self, rounds: int) -> float:
        """Runs this many more rounds and returns the seconds per round."""
        began = time.perf_counter()
        self.states = jax.block_until_ready(self.program.rounds(self.states, self.t, self.t + rounds, evaluate=False))
        self.t += rounds
        return (time.perf_counter() - began) / rounds


def work_of(program: Program) -> float:
    """The work of a client in a round, in floating-point operations."""
    federation = Federation(*program.samples, *program.rows[0].clients)
    return client_work(program.engine, jax.random.key(0), federation).flops


def main() -> None:
    """Measures, prints a table, and writes the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=names_of(METHODS), default=METHODS, help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=10, help="of a block")
    parser.add_argument("--blocks", type=int, default=5, help="of each method")
    parser.add_argument("--json", type=Path, help="where the figures are kept; other methods' stay")
    options = parser.parse_args()
    about, rows = {"jax": jax.__version__, "cpu": platform.machine(), "rounds": options.rounds}, {}
    if options.json and options.json.exists():
        held = json.loads(options.json.read_text(encoding="utf-8"))
        rows = held.pop("methods")
        if held != about:
            parser.error(f"{options.json} was measured with {held}, this would be with {about}; choose another --json")
    dataset = load("digits")
    prepare(config_of("fedavg").run)
    base = Timed(config_of("fedavg"), dataset)
    work = work_of(base.program)
    print("| method | time | work | down | up | kept |\n|---|---|---|---|---|---|")
    for name in options.methods:
        try:
            own = Timed(config_of(name), dataset)
        except ConfigError as error:
            print(f"left out: {error}")
            continue
        ratios = []
        for _ in range(options.blocks):
            before, here, after = base.block(options.rounds), own.block(options.rounds), base.block(options.rounds)
            ratios.append(2 * here / (before + after))
        exchange = own.program.exchange
        rows[name] = {
            "time": round(statistics.median(ratios), 3),
            "times": [round(ratio, 3) for ratio in ratios],
            "work": round(work_of(own.program) / work, 3),
            "down": count(exchange.down),
            "up": count(exchange.up),
            "kept": count(exchange.client),
        }
        row = rows[name]
        print(f"| {name} | {row['time']:.2f} | {row['work']:.2f} | {row['down']} | {row['up']} | {row['kept']} |")
        sys.stdout.flush()
        if options.json:
            text = json.dumps({**about, "methods": {key: rows[key] for key in METHODS if key in rows}}, indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
