"""All measurements that an accelerator needs, in one command; it runs anywhere, so that it can be tried on a CPU.

    pip install -e ".[bench]"
    FEDJAX_PFL_DATA=FOLDER python benchmarks/gpu.py --json benchmarks/results/gpu.json --work FOLDER2 [--small]

- ``convolution``: a gradient step of clients side by side: `models/conv.py` against ``lax.conv`` under ``vmap``, which
  becomes a grouped convolution. Only ``models/conv.py`` chooses the way; if another way is faster, it has to choose
  that one.
- ``chunks``: seconds per FedAvg round of 100 clients, by the number of clients side by side.
- ``fedecouple``: seconds per round in FedeCouple's CIFAR-10 setting (Table II), and proof that nothing moves between
  host and device inside a block of rounds: the block gets only its first and last round, and it runs with transfers to
  the host and between devices disallowed.
- ``precision``: seconds per round and accuracy under each ``run.precision``.
- ``round_time``: `round_time.py` with the PyTorch loop on the same device, for 20 and for 500 clients.
- ``tables``: the papers' tables that the available data allow, at full length, with every row and three seeds side by
  side. Results are in ``results/gpu_TABLE.json`` and ``.md``. FOLDER2 holds the runs: an interrupted call continues
  there.

With --small all of them take fewer rounds and clients, and the tables' results are written to FOLDER2, too. FOLDER
holds cifar10_20k.npz, and for the tables cifar100_20k.npz and fashion_mnist_70k.npz. Without it, images are random,
accuracies mean nothing, and --parts has to leave out the tables.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from conv import LAYERS, direct, step_seconds
from listed import names_of

from fedjax_pfl import Config, load_config, simulate
from fedjax_pfl.data.dataset import Dataset, from_arrays
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.sections import Run
from fedjax_pfl.models.conv import conv2d

HERE = Path(__file__).resolve().parent
SETTING = HERE.parent / "configs" / "fedecouple" / "table2_weak_pathological.toml"
# Those that say most first.
TABLES = {
    "fedecouple_table2": "fedecouple_tables.py table2 --settings cifar10_s20",
    "fedcpd_table3": "fedcpd_tables.py table3 --set data.source=npz:cifar100_20k.npz",
    "pgfedsplit_table3": "pgfedsplit_tables.py table3 --settings cifar100 --set data.source=npz:cifar100_20k.npz",
    "pfedcspc_table2": "pfedcspc_tables.py table2 --settings cifar10",
    "fedfcd_table1": "fedfcd_tables.py table1 --settings fmnist_pat,fmnist_dir01",
    "pgfedsplit_table2": "pgfedsplit_tables.py table2 --settings fmnist_dir01",
    "fedcpd_table1": "fedcpd_tables.py table1 --settings fmnist_dir01",
}


def images() -> Dataset:
    """CIFAR-10, or random images of its shape."""
    if os.environ.get("FEDJAX_PFL_DATA"):
        return load("npz:cifar10_20k.npz")
    rng = np.random.default_rng(0)
    return from_arrays(rng.integers(0, 256, (20_000, 32, 32, 3), np.uint8), np.arange(20_000) % 10)


def setting(small: bool, *overrides: str) -> Config:
    """FedeCouple's CIFAR-10 setting, or a small setting like it."""
    fewer = ["data.clients=4", "data.samples_per_client=60", "training.epochs=1"] if small else []
    return load_config(SETTING, [*fewer, *overrides])


def convolution(small: bool) -> list[dict[str, Any]]:
    """Seconds of a gradient step per client, for both ways."""
    clients, steps, repeats = (2, 2, 1) if small else (20, 20, 3)
    rows = []
    for layer in LAYERS:
        ours, grouped = (step_seconds(layer, fn, clients, steps, repeats) for fn in (conv2d, direct))
        rows.append({"layer": layer.name, "clients": clients, "conv2d": ours, "grouped": grouped})
    return rows


def chunks(small: bool) -> list[dict[str, Any]]:
    """Seconds per round of FedAvg, for more and more clients side by side."""
    clients, samples = (4, 20) if small else (100, 150)
    rows = []
    for chunk in (1, 2, 4) if small else (1, 5, 20, 100):
        config = Config(
            data={"source": "arrays", "clients": clients, "samples_per_client": samples, "partition": {"kind": "iid"}},
            model={"name": "cnn2"},
            method={"name": "fedavg"},
            training={"rounds": 3 if small else 20, "lr": 0.005},
            run={"placement": "vmap", "chunk": chunk, "eval_every": 100},
        )
        dataset = images()
        taken = simulate(config, (dataset.images, dataset.labels)).summary["timing"]["seconds_per_round"]
        rows.append({"clients_side_by_side": chunk, "seconds_per_round": taken})
    return rows


def fedecouple(small: bool) -> dict[str, Any]:
    """Seconds per round, in blocks of rounds during which no transfer is allowed."""
    block, taken = 2 if small else 10, []
    program = lay_out([setting(small)], images())
    program.compile()
    states = program.init()
    for start in range(0, 4 * block, block):
        began = time.perf_counter()
        with jax.transfer_guard_device_to_host("disallow"), jax.transfer_guard_device_to_device("disallow"):
            states = jax.block_until_ready(program.rounds(states, start, start + block, evaluate=False))
        taken.append((time.perf_counter() - began) / block)
    return {"rounds_per_block": block, "seconds_per_round": statistics.median(taken[1:]), "transfers_in_a_block": 0}


def precision(small: bool) -> list[dict[str, Any]]:
    """Time and accuracy under each precision."""
    dataset, rows = images(), []
    for name in ("float32", "tensorfloat32", "bfloat16"):
        rounds = 2 if small else 50
        config = setting(small, f"run.precision={name}", f"training.rounds={rounds}", f"run.eval_every={rounds}")
        summary = simulate(config, (dataset.images, dataset.labels)).summary
        accuracy = summary["personal"][summary["headline"]]["last"]
        rows.append({"precision": name, "accuracy": accuracy, **summary["timing"]})
    return rows


def round_time(small: bool) -> list[dict[str, Any]]:
    """Rows of `round_time.py`."""
    cases = "mlp_100_clients_b10" if small else "cnn2_b10,cnn2_b10_500_clients"
    short = ["--processes", "1", "--rounds", "1"] if small else []
    out = Path(os.environ.get("TMPDIR", "/tmp")) / f"round_time_{os.getpid()}.json"
    subprocess.run(
        [sys.executable, str(HERE / "round_time.py"), "--cases", cases, "--json", str(out), *short], check=True
    )
    rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return rows


def tables(small: bool, work: Path) -> list[dict[str, Any]]:
    """The seconds that each table took in this call; the figures of a table are in its own files."""
    rows = []
    for name, arguments in TABLES.items():
        short = ["--rounds", "1", "--methods", "local"] if small else ["--seeds", "0,1,2"]
        results = work.absolute() / name if small else f"gpu_{name}"
        script, *rest = arguments.split()
        command = [sys.executable, str(HERE / script), *rest, *short, "--name", str(results), "--work", str(work)]
        began = time.perf_counter()
        ended = subprocess.run(command, check=False).returncode
        rows.append({"table": name, "seconds": time.perf_counter() - began, "exit_code": ended})
    return rows


PARTS: dict[str, Callable[..., Any]] = {
    part.__name__: part for part in (convolution, chunks, fedecouple, precision, round_time, tables)
}


def main() -> None:
    """Runs the parts, and writes the results so far after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="parts that it holds and that are not asked for stay in it")
    parser.add_argument("--work", type=Path, help="of the tables: a folder for their runs")
    parser.add_argument("--small", action="store_true", help="to try the script")
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS), help="of: " + ", ".join(PARTS))
    options = parser.parse_args()
    if "tables" in options.parts and not (os.environ.get("FEDJAX_PFL_DATA") and options.work):
        parser.error("tables need FEDJAX_PFL_DATA, a folder with the data, and --work; or leave them out of --parts")
    # Else this process would keep three quarters of the device's memory from those of `round_time` and `tables`.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    prepare(Run())
    device = jax.devices()[0]
    here = {"device": device.device_kind, "jax": jax.__version__, "small": options.small}
    results: dict[str, Any] = dict(here)
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))
        if {name: results.get(name) for name in here} != here:
            parser.error(f"{options.json} was measured elsewhere; choose another --json")
    for name in options.parts:
        results[name] = PARTS[name](options.small, *([options.work] if name == "tables" else []))
        print(name, json.dumps(results[name], indent=2), flush=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
