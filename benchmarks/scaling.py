"""How the cost of a run grows: with the clients of a round, with clients that are not in it, and with uneven sizes.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

- ``clients``: seconds per client-step (one mini-batch of one client) and per evaluated client, all clients in every
  round, for more and more clients of 20 images each (MLP, batch 10).
- ``cohort``: FedRep on N clients x 20 training images, 100 of them in each round: the seconds per round are to depend
  on these 100 and not on N, and the memory to stay bounded.
- ``ragged``: the sizes of Dir(0.1) against equal sizes with the same total. Side by side, a chunk runs as long as its
  largest client; waste is the share of steps that its smaller ones sit out.
- ``memory``: bytes per client that runs, as estimated before compilation, and as XLA sets them aside.

Each case runs in a process of its own. Images are random.
"""

import argparse
import itertools
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pfl import Config, simulate
from fedjax_pfl.build import cores, divide, make_engine
from fedjax_pfl.data.sources import from_arrays
from fedjax_pfl.engine import Placement
from fedjax_pfl.memory import estimate

BATCH = 10
COHORT = 100


def images(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images in the shape of Fashion-MNIST, ten classes in equal shares."""
    return np.random.default_rng(0).integers(0, 256, (samples, 28, 28, 1), np.uint8), np.arange(samples) % 10


def config(clients: int, method: str, rounds: int, **tables: dict[str, Any]) -> Config:
    """A run that evaluates at its end alone."""
    base: dict[str, dict[str, Any]] = {
        "data": {"source": "arrays", "clients": clients, "partition": {"kind": "iid"}, "test_share": 0.2},
        "model": {"name": "mlp"},
        "method": {"name": method},
        "training": {"rounds": rounds, "epochs": 1, "batch_size": BATCH, "lr": 0.01},
        "run": {"eval_every": rounds},
    }
    for section, fields in tables.items():
        base[section] = {**base.get(section, {}), **fields}
    return Config(**base)


def run(given: Config, samples: int) -> dict[str, Any]:
    """Seconds per round (median over blocks of rounds, without the first), and seconds of the evaluation."""
    seen: list[tuple[int, float]] = []
    result = simulate(given, images(samples), progress=lambda now: seen.append((now.round, time.perf_counter())))
    blocks = itertools.pairwise(seen[1:-1])
    per_round = [(late[1] - early[1]) / (late[0] - early[0]) for early, late in blocks]
    whole = seen[-1][1] - seen[-2][1]
    return {
        "seconds_per_round": statistics.median(per_round),
        "evaluation_seconds": max(0.0, whole - (seen[-1][0] - seen[-2][0]) * statistics.median(per_round)),
        "peak_bytes": peak(),
        "sizes": result.partition["n_train"],
    }


def peak() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def clients(number: int) -> dict[str, Any]:
    """FedAvg on so many clients, all in every round."""
    measured = run(config(number, "fedavg", max(4, 4000 // number)), number * 25)
    steps = number * math.ceil(20 / BATCH)
    return {
        "clients": number,
        "microseconds_per_client_step": 1e6 * measured["seconds_per_round"] / steps,
        "microseconds_per_evaluated_client": 1e6 * measured["evaluation_seconds"] / number,
        "peak_gigabytes": measured["peak_bytes"] / 1e9,
    }


def cohort(number: int, model: str) -> dict[str, Any]:
    """FedRep on so many clients, 100 of them in each round."""
    who = {"ratio": COHORT / number}
    measured = run(config(number, "fedrep", 60, participation=who, model={"name": model}), number * 25)
    return {
        "clients": number,
        "model": model,
        "seconds_per_round": measured["seconds_per_round"],
        "evaluation_milliseconds_per_client": 1e3 * measured["evaluation_seconds"] / number,
        "peak_gigabytes": measured["peak_bytes"] / 1e9,
    }


def ragged(placement: str, chunk: int) -> dict[str, Any]:
    """FedAvg on 100 clients with sizes of Dir(0.1) and with equal ones."""
    shares = {"iid": {"kind": "iid"}, "dirichlet": {"kind": "dirichlet", "beta": 0.1}}
    where = {"placement": placement} | ({"chunk": chunk} if placement == "vmap" else {})
    seconds, waste = {}, {}
    for name, partition in shares.items():
        given = config(100, "fedavg", 12, data={"partition": partition}, run=where)
        measured = run(given, 20_000)
        seconds[name] = measured["seconds_per_round"]
        steps = np.sort(np.ceil(np.array(measured["sizes"]) / BATCH))[::-1]
        longest = np.repeat(steps[::chunk], chunk)[: len(steps)]
        waste[name] = float(longest.sum() / steps.sum() - 1)
    ratio = seconds["dirichlet"] / seconds["iid"]
    return {"placement": placement, "chunk": chunk, "waste": waste["dirichlet"], "ragged_to_equal": ratio}


def memory(method: str) -> dict[str, Any]:
    """Bytes per client that runs: what the estimate says, and what XLA sets aside for a chunk of four."""
    side_by_side = 4
    given = config(4, method, 1, model={"name": "cnn2"}, training={"batch_size": 32})
    dataset = from_arrays(*images(1000))
    federation, _ = divide(given, dataset)
    key = jax.random.key(0)
    engine = replace(make_engine(given, dataset), placement=Placement(chunk=side_by_side))
    number, flag = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.bool_)
    state = jax.eval_shape(engine.init, key, federation)
    compiled = jax.jit(engine.rounds, donate_argnums=1).lower(key, state, number, number, flag, federation).compile()
    taken = compiled.memory_analysis().temp_size_in_bytes / side_by_side
    return {
        "method": method,
        "estimate_megabytes": estimate(engine, key, federation).per_client / 1e6,
        "xla_megabytes": taken / 1e6,
    }


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], list[tuple]]] = {
    "clients": (clients, [(10,), (100,), (1_000,), (10_000,)]),
    "cohort": (cohort, [(100, "mlp"), (1_000, "mlp"), (10_000, "mlp"), (100, "cnn2"), (10_000, "cnn2")]),
    "ragged": (ragged, [("map", 1), ("vmap", 10), ("vmap", 20)]),
    "memory": (memory, [("fedavg",), ("fedrep",), ("fedecouple",)]),
}


def main() -> None:
    """Runs the parts, and writes what there is after each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help="of: " + ", ".join(PARTS))
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        part, number = options.case
        measure, cases = PARTS[part]
        print(json.dumps(measure(*cases[int(number)])))
        return
    machine = f"{cores()} {platform.machine()} cores, JAX {jax.__version__}"
    results: dict[str, Any] = {"machine": machine}
    for part in options.parts.split(","):
        results[part] = []
        for number in range(len(PARTS[part][1])):
            command = [sys.executable, __file__, "--case", part, str(number)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[part].append(json.loads(done.stdout.splitlines()[-1]))
            print(part, json.dumps(results[part][-1]), flush=True)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
