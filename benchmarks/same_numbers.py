"""Every method's metrics to the last bit, before and after a change of the code.

    python benchmarks/same_numbers.py record before.json     # in a checkout of the old code, by its absolute path
    python benchmarks/same_numbers.py record after.json      # in the new one
    python benchmarks/same_numbers.py compare before.json after.json

It uses only the public names. Each method is run on the quickstart (one device), and in a shorter run on two devices
with everything that makes rounds uneven: partial participation, drop-outs, new clients, momentum, decay, clipping. A
method that the quickstart's model does not fit gets enlarged digits and a suitable network, and fewer rounds. Numbers
are kept as the shortest text that reads back as the same float; of the final state, a digest of its leaves in any order
is kept.
"""

import argparse
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from listed import names_of

from fedjax_pfl import METHODS, Config, simulate

ROOT = Path(__file__).resolve().parent.parent
TIMES = {"seconds"}
NETWORKS = {"fedcpd": "cnn3", "pfedcspc": "cnn_proj", "fedbn": "resnet18"}
SELECTING = {"fedfomo", "fedsoup"}
UNEVEN = {
    "training": {"rounds": 6, "epochs": 2, "batch_size": 10, "lr": 0.05, "momentum": 0.5, "weight_decay": 1e-4}
    | {"lr_decay": 0.99, "clip_norm": 5.0},
    "participation": {"ratio": [0.3, 0.8], "dropout": 0.1},
    "run": {"eval_every": 2, "placement": "shard", "compilation_cache": "off"},
}
QUICKSTART = {
    "training": {"rounds": 30, "epochs": 1, "batch_size": 10, "lr": 0.05},
    "run": {"eval_every": 5, "placement": "map", "compilation_cache": "off"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run all methods and keep their numbers")
    record.add_argument("file", type=Path)
    record.add_argument("--methods", type=names_of(METHODS), default=METHODS)
    compare = commands.add_parser("compare", help="exit with 1 where a metric or a state differs")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        sys.exit(differences(json.loads(options.before.read_text()), json.loads(options.after.read_text())))
    jax.config.update("jax_num_cpu_devices", 2)
    found: dict[str, Any] = {"python": platform.python_version(), "jax": jax.__version__, "runs": {}}
    for name in options.methods:
        for what, tables in (("quickstart", QUICKSTART), ("uneven", UNEVEN)):
            found["runs"][f"{name} {what}"] = numbers(name, tables, new=what == "uneven")
            print(f"{name} {what}", file=sys.stderr, flush=True)
            options.file.write_text(json.dumps(found, indent=1) + "\n")


def numbers(name: str, tables: dict[str, Any], *, new: bool) -> dict[str, Any]:
    """The metrics and the state of one run."""
    network, data = NETWORKS.get(name), None
    partition = {"kind": "dirichlet", "beta": 0.1}
    spec = {"source": "digits", "clients": 20, "partition": partition, "new_clients": 0.2 if new else 0.0}
    training = tables["training"]
    if network:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = np.kron(digits.images, np.ones((1, 4, 4)))[..., None] * (255 / 16)
        data = images.astype(np.uint8)[::2], digits.target[::2]
        spec |= {"source": "arrays", "clients": 8}
        training = training | {"rounds": 1 if network == "resnet18" else 4}
    if name in SELECTING:
        spec |= {"validation_share": 0.2}
    config = Config(
        data=spec,
        model={"name": network or "mlp"},
        method={"name": name},
        **{**tables, "training": training, "run": tables["run"] | {"seed": 3}},
    )
    result = simulate(config, data)
    history = {key: [repr(float(x)) for x in column] for key, column in result.history.items() if key not in TIMES}
    leaves = sorted(hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for leaf in jax.tree.leaves(result.state))
    return {"history": history, "state": hashlib.sha256("".join(leaves).encode()).hexdigest()}


def differences(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints the differences; of metrics, only those that both have. Returns 1 if there are any."""
    status = 0
    for run, old in before["runs"].items():
        new = after["runs"].get(run)
        if new is None:
            print(f"{run}: not run afterwards")
            status = 1
            continue
        both = old["history"].keys() & new["history"].keys()
        gone = sorted(old["history"].keys() - both)
        moved = {key: gap(old["history"][key], new["history"][key]) for key in sorted(both)}
        moved = {key: size for key, size in moved.items() if size}
        alike = old["state"] == new["state"]
        if gone or moved or not alike:
            status = 1
        state = "state equal" if alike else "state differs"
        shown = ", ".join(f"{key} by {size:.2g}" for key, size in moved.items()) or f"all {len(both)} metrics equal"
        print(f"{run}: {shown}; {state}" + (f"; gone: {', '.join(gone)}" if gone else ""))
    return status


def gap(old: list[str], new: list[str]) -> float:
    """The largest difference of two columns; 0 if they are the same to the bit, infinity if their lengths differ."""
    if old == new:
        return 0.0
    if len(old) != len(new):
        return float("inf")
    return float(np.nanmax(np.abs(np.array(old, float) - np.array(new, float)), initial=0.0)) or float("inf")


if __name__ == "__main__":
    main()
