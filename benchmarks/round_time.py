"""One communication round of 16 methods, against a PyTorch loop that does the same work, and FedAvg against peers.

    pip install -e ".[bench]"
    python benchmarks/round_time.py --json benchmarks/results/round_time.json

``--cases a,b`` and ``--methods x,y`` run a part of it; FILE keeps its other rows. ``--peer-python fedjax=PYTHON`` adds
a peer that PYTHON can import (`benchmarks/speed.md` explains the setup).

The reference, ``loop``, is a compact implementation of each method that runs a round as PFLlib does
(`peers/pytorch_loop.py`, `peers/pytorch_methods.py`): clients one after the other in one process, each with its own
model and SGD, a shuffling ``DataLoader`` over normalised tensors in memory, and parameters averaged on the server. It
has the same model, mini-batches of the same size, and the same epochs, losses and server work as ours, and it draws
what we draw in every round (augmentation, synthetic features, clusters). One difference is by design: we compute the
features of a frozen extractor once per round, and the loop computes them in every head epoch. ``without_loader`` is
PyTorch at its best: the mini-batches are slices of the tensors. For FedAvg it starts from our weights and takes our
mini-batches, and the two averaged models must agree. Evaluation is not timed, and neither is what only evaluation
needs: FedAvg-FT, FedProx-FT and FedBABU fine-tune there.

Each side runs in a process of its own, since memory allocators and thread pools of two frameworks in one process
disturb each other. It runs in several processes, in turns with the other side, since two runs of one program differ by
more than two rounds of one run. A process first runs a round on two mini-batches per client, which does not count: it
compiles the program, and leaves the state from which later rounds start (prototypes, teachers). A process counts with
the median of its rounds, and a side with the median of its processes. The results are ratios.

The floor is the arithmetic that a round needs in any case, at the rate of a large float32 matrix product. It consists
of the matrix products and convolutions, forward and backward, of clients and server. ``torch.utils.flop_counter``
counts them while the loop runs a round in which features of frozen extractors are computed once
(`peers/pytorch_round.py`). It does not include elementwise work (distances in k-means, augmentation, the steps of SGD)
and FedPAC's quadratic programs.
"""

import argparse
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from listed import names_of
from peers import case as exchange

from fedjax_pfl import METHODS, Config
from fedjax_pfl.data.dataset import Dataset, from_arrays
from fedjax_pfl.data.federated import Clients, pack
from fedjax_pfl.engine.run import round_keys
from fedjax_pfl.experiment.build import divide, make_engine, shape_of
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.process import cores, prepare
from fedjax_pfl.ops.training import permutation, phase_key

PEERS = Path(__file__).resolve().parent / "peers"
PEER_SCRIPTS = {"fedjax": "fedjax_round.py", "pfl": "pfl_round.py"}
# Convolutions (channels, kernel size, padding), each followed by 2x2 max-pooling; widths of the dense layers.
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"blocks": [], "dense": [100], "activation": "relu", "projection": None},
    "cnn2": {"blocks": [(32, 5, 0), (64, 5, 0)], "dense": [512], "activation": "relu", "projection": None},
    "cnn3": {
        "blocks": [(16, 5, 0), (32, 5, 1), (64, 3, 1)],
        "dense": [128],
        "activation": "leaky_relu",
        "projection": None,
    },
    "cnn_proj": {"blocks": [(6, 5, 0), (16, 5, 0)], "dense": [120, 84], "activation": "relu", "projection": 256},
}
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A setting that is timed.

    Attributes:
      name: of the case.
      model: of all methods, except those that need another.
      clients: N.
      samples: training images per client.
      shape: of an image.
      batch_size: B.
      epochs: E.
      lr: learning rate.
      methods: what is run, with hyperparameters that are not the defaults.
      models: of the methods that need another.
      processes: per side.
      rounds: timed rounds per process.
      against: sides besides ``ours`` and ``loop``; peers only if they are installed.
    """

    name: str
    model: str
    clients: int
    samples: int
    shape: tuple[int, int, int]
    batch_size: int
    epochs: int
    lr: float
    methods: Mapping[str, Mapping[str, Any]]
    models: Mapping[str, str] = field(default_factory=dict)
    processes: int = 3
    rounds: int = 2
    against: tuple[str, ...] = ()

    def config(self, method: str) -> Config:
        """The config of our side."""
        return Config(
            data={"source": "arrays", "clients": self.clients, "partition": {"kind": "iid"}, "test_share": 0.2},
            model={"name": self.models.get(method, self.model)},
            method={"name": method, **self.methods[method]},
            training={"batch_size": self.batch_size, "epochs": self.epochs, "lr": self.lr},
        )

    def dataset(self) -> Dataset:
        """Random images; a fifth of them is for testing."""
        samples = self.clients * self.samples * 5 // 4
        images = np.random.default_rng(0).integers(0, 256, (samples, *self.shape), dtype=np.uint8)
        return from_arrays(images, np.arange(samples) % CLASSES)

    @property
    def warm_up(self) -> int:
        """Samples per client in the round that does not count."""
        return min(self.samples, 2 * self.batch_size)


FEDAVG: dict[str, dict[str, Any]] = {"fedavg": {}}
IN_MEMORY = ("without_loader", *PEER_SCRIPTS)
COLOUR = (32, 32, 3)
CASES = {
    case.name: case
    for case in (
        Case("cnn2_b10", "cnn2", 20, 600, COLOUR, 10, 1, 0.005, FEDAVG, against=IN_MEMORY),
        Case("cnn3_b32", "cnn3", 20, 600, COLOUR, 32, 1, 0.005, FEDAVG, against=IN_MEMORY),
        Case("mlp_100_clients_b10", "mlp", 100, 600, (28, 28, 1), 10, 1, 0.005, FEDAVG, against=IN_MEMORY),
        Case(
            "fedrep_cnn2_b10",
            *("cnn2", 20, 600, COLOUR, 10, 5, 0.005),
            methods={"fedrep": {"head_epochs": 5}},
            processes=2,
            rounds=1,
        ),
        # Clients and model of configs/fedecouple/table2_weak_pathological.toml, with batches of ten.
        Case("fedecouple_cnn3_b10", "cnn3", 20, 600, COLOUR, 10, 5, 0.05, {"fedecouple": {}}, processes=2, rounds=1),
        # For accelerators (`gpu.py`); minutes per round on a CPU.
        Case("cnn2_b10_500_clients", "cnn2", 500, 600, COLOUR, 10, 1, 0.005, FEDAVG, against=IN_MEMORY),
        # PGFedSplit mixes heads in every round, so that this is timed, too.
        Case(
            "all_methods",
            *("cnn2", 10, 200, COLOUR, 32, 1, 0.005),
            methods={name: {} for name in exchange.PEERED} | {"pgfedsplit": {"interval": 1, "adaptive": False}},
            models={"pfedcspc": "cnn_proj"},
            processes=2,
        ),
    )
}

USUAL = [name for name in CASES if name != "cnn2_b10_500_clients"]


def to_torch(params: dict) -> list[np.ndarray]:
    """Our parameters in the order and layout of PyTorch's: OIHW kernels, [out, in] matrices, CHW flattening."""
    layers = [*params["extractor"].values(), params["head"]]
    tensors, channels = [], None
    for layer in layers:
        kernel = np.asarray(layer["kernel"])
        if kernel.ndim == 4:
            channels = kernel.shape[-1]
            kernel = kernel.transpose(3, 2, 0, 1)
        else:
            if channels:  # the first dense layer reads a flattened map
                side = round((kernel.shape[0] // channels) ** 0.5)
                kernel = kernel.reshape(side, side, channels, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
                channels = None
            kernel = kernel.T
        tensors += [kernel, np.asarray(layer["bias"])]
    return tensors


def shortened(train: Clients, labels: jax.Array, samples: int) -> Clients:
    """Only the first training samples of each client, in the same shapes and places."""
    short = pack(list(np.asarray(train.index)[:, :samples]), np.asarray(labels), CLASSES)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), short._replace(index=train.index), train)


def describe(case: Case, method: str) -> exchange.Case:
    """The instructions for the other sides."""
    config, dataset = case.config(method), case.dataset()
    federation, _ = divide(config, dataset)
    rows = np.asarray(federation.train.index)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(METHODS[method]).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    settings = {
        "model": MODELS[config.model["name"]],
        "shape": case.shape,
        "classes": CLASSES,
        "method": method,
        "options": defaults | dict(case.methods[method]),
        "batch_size": case.batch_size,
        "epochs": case.epochs,
        "lr": case.lr,
        "warm_up": case.warm_up,
    }
    initial, orders = [], []
    if "without_loader" in case.against:
        engine = make_engine(config, shape_of(dataset))
        key_init, key = jax.random.split(jax.random.key(config.run.seed))
        initial = to_torch(jax.jit(engine.init)(key_init, federation).state.server)
        for t, samples in enumerate((case.warm_up, case.samples)):
            keys = round_keys(key, jnp.int32(t)).clients
            orders.append(np.stack([batch_order(keys, client, samples) for client in range(case.clients)]))
    return exchange.Case(settings, dataset.images, np.asarray(dataset.labels, np.int64), rows, initial, orders)


def batch_order(keys: jax.Array, client: int, samples: int) -> np.ndarray:
    """The order of a client's samples in its only epoch of a round."""
    epoch = jax.random.fold_in(phase_key(jax.random.fold_in(keys, client), "local"), 0)
    return np.asarray(permutation(jax.random.split(epoch)[0], jnp.int32(samples), samples))


def ours(case: Case, method: str, rounds: int, out: Path) -> None:
    """Times rounds of the engine; runs in a process of its own."""
    config = case.config(method)
    prepare(config.run)
    program = lay_out([config], case.dataset())
    program.compile()
    (row,), (_, labels) = program.rows, program.samples
    train, *others = row.clients
    short = row._replace(clients=(shortened(train, labels, case.warm_up), *others))
    states, t = program.init(), 0

    def round_(warm_up: bool) -> None:
        nonlocal states, t
        program.rows = [short if warm_up else row]
        states = jax.block_until_ready(program.rounds(states, t, t + 1, evaluate=False))
        t += 1

    def model() -> list[np.ndarray]:
        return to_torch(states[0].state.server) if "without_loader" in case.against else []

    result = exchange.measure(round_, rounds, model)
    exchange.save(out, result["seconds"], model=result["first"])


def compare(case: Case, method: str, processes: int, rounds: int, pythons: Mapping[str, str]) -> dict[str, Any]:
    """Runs all sides in turns.

    Returns:
      ``seconds``, each side's median; ``processes``, the median of each of its processes; ``flops`` of a round; and
      ``difference``, the largest between our model and PyTorch's, where both were given the same mini-batches.
    """
    times: dict[str, list[float]] = {}
    models: dict[str, list[np.ndarray]] = {}
    flops = 0.0
    with tempfile.TemporaryDirectory() as folder:
        told, out = Path(folder) / "case.npz", Path(folder) / "out.npz"
        exchange.write(told, describe(case, method))
        # The first process compiles for all.
        cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        common = [str(told), "--rounds", str(rounds), "--out", str(out)]
        loop = [sys.executable, str(PEERS / "pytorch_round.py"), *common]
        sides = {
            "ours": [sys.executable, __file__, "--ours", case.name, method, str(rounds), str(out)],
            "loop": loop,
            "without_loader": [*loop, "--without-loader"],
            **{name: [python, str(PEERS / PEER_SCRIPTS[name]), *common] for name, python in pythons.items()},
        }
        for number in range(processes):
            for side in ("ours", "loop", *(side for side in case.against if side in sides)):
                count = ["--count"] if side == "loop" and number == 0 else []
                subprocess.run([*sides[side], *count], check=True, env=os.environ | cache)
                with np.load(out) as saved:
                    times.setdefault(side, []).append(float(saved["seconds"]))
                    models[side] = [saved[name] for name in saved.files if name.startswith("model_")]
                    flops = max(flops, float(saved["flops"]))
    result = {"seconds": {side: statistics.median(taken) for side, taken in times.items()}, "processes": times}
    result["flops"] = flops
    if "without_loader" in times:
        pairs = zip(models["ours"], models["without_loader"], strict=True)
        difference = max(float(np.abs(a - b).max()) for a, b in pairs)
        # Other mini-batches would make a difference of some 1e-5; an accelerator rounds products by more than that.
        limit = 1e-5 if jax.default_backend() == "cpu" else 1e-3
        assert difference < limit, f"{case.name}: the two rounds disagree by {difference}"
        result["difference"] = difference
    return result


def matmul_rate() -> float:
    """FLOP/s of a large float32 matrix product, the better of JAX and PyTorch."""
    n = 2048
    a = torch.randn(n, n)
    matrix = jnp.asarray(a.numpy())
    product = jax.jit(lambda m: m @ m)
    calls = (lambda: jax.block_until_ready(product(matrix)), lambda: a @ a)
    return max(2 * n**3 / min(seconds(call) for _ in range(5)) for call in calls)


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


COLUMNS = ("case", "method", "ours", "PFLlib-style loop", "without loader", "fedjax", "pfl", "floor", "floor / ours")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def line(row: Mapping[str, Any]) -> str:
    """A row of the table: our seconds, the ratios of the other sides to ours, and the floor."""
    own = row["seconds"]["ours"]
    others = [row["seconds"].get(side) for side in ("loop", *IN_MEMORY)]
    cells = [row["case"], row["method"], f"{own:.2f} s"]
    cells += ["" if other is None else f"{other / own:.1f}x" for other in others]
    if row.get("flops"):
        floor = row["flops"] / row["matmul_rate"]
        cells += [f"{floor:.2f} s", f"{floor / own:.0%}"]
    else:
        cells += ["", ""]
    return f"| {' | '.join(cells)} |"


def peer(text: str) -> tuple[str, str]:
    """NAME=PYTHON.

    Raises:
      argparse.ArgumentTypeError: it is not of that form.
    """
    name, _, python = text.partition("=")
    if name not in PEER_SCRIPTS or not Path(python).exists():
        allowed = f"NAME=PYTHON, NAME one of {', '.join(PEER_SCRIPTS)}, PYTHON an interpreter that has it"
        raise argparse.ArgumentTypeError(f"{text}: {allowed}")
    return name, python


def main() -> None:
    """Times the chosen cases and methods, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="rows are written here, one by one; others in the file stay")
    parser.add_argument("--cases", type=names_of(CASES), default=USUAL)
    parser.add_argument("--methods", type=names_of(exchange.PEERED), default=exchange.PEERED)
    parser.add_argument("--peer-python", type=peer, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--processes", type=int, help="processes per side, instead of each case's own number")
    parser.add_argument("--rounds", type=int, help="timed rounds per process, likewise")
    parser.add_argument("--ours", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        name, method, rounds, out = options.ours
        ours(CASES[name], method, int(rounds), Path(out))
        return
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))
    rate = matmul_rate()
    print(f"jax {jax.__version__}, torch {torch.__version__}, {cores()} {platform.machine()} cores", end=", ")
    print(f"{rate / 1e9:.0f} GFLOP/s\n\n{HEADER}", flush=True)
    for name in options.cases:
        case = CASES[name]
        for method in (method for method in case.methods if method in options.methods):
            processes, timed = options.processes or case.processes, options.rounds or case.rounds
            measured = compare(case, method, processes, timed, dict(options.peer_python))
            row = {"case": name, "method": method, **measured, "matmul_rate": rate}
            print(line(row), flush=True)
            rows = [old for old in rows if (old["case"], old["method"]) != (name, method)] + [row]
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
