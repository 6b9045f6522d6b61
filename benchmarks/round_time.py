"""One FedAvg round of fedjax_pfl against a plain PyTorch loop over the same clients, model, batches and data.

    pip install -e ".[bench]"
    python benchmarks/round_time.py --json benchmarks/results/round_time.json

The reference is PyTorch at its best, not a peer's code: images are normalised and in memory beforehand, there is no
data loader, and clients are trained one after the other with ``torch.optim.SGD`` on all cores. It starts from the same
weights and takes the same mini-batches in the same order, and the two averaged models are compared.

Each side runs in a process of its own, since memory allocators and thread pools of two frameworks in one process
disturb each other, and in several processes by turns, since two runs of one program differ by more than two rounds of
one run. A process counts with the median of its rounds, a side with the median of its processes. The floor is the
arithmetic of the round (multiply-adds of forward and backward pass) at the rate of a large float32 matrix product.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from fedjax_pfl.build import cores, divide, make_engine, place, prepare_devices
from fedjax_pfl.config import Config
from fedjax_pfl.data.federated import Federation
from fedjax_pfl.data.sources import from_arrays
from fedjax_pfl.engine import Engine, Run, round_keys
from fedjax_pfl.ops.local import permutation, phase_key


@dataclass(frozen=True)
class Case:
    """What is timed: clients x 600 training images each."""

    name: str
    model: str
    clients: int
    shape: tuple[int, int, int]
    batch_size: int
    # Multiply-adds per sample of each weight layer, first to last.
    layers: tuple[int, ...]

    @property
    def flops(self) -> float:
        """Floating-point operations of a round: forward, both gradients; the first layer needs none of its input."""
        per_sample = 2 * (3 * sum(self.layers) - self.layers[0])
        return per_sample * 600.0 * self.clients


CASES = (
    Case("cnn2_b10", "cnn2", 20, (32, 32, 3), 10, (28 * 28 * 75 * 32, 10 * 10 * 800 * 64, 1600 * 512, 512 * 10)),
    Case(
        "cnn3_b32",
        "cnn3",
        20,
        (32, 32, 3),
        32,
        (28 * 28 * 75 * 16, 12 * 12 * 400 * 32, 6 * 6 * 288 * 64, 576 * 128, 128 * 10),
    ),
    Case("mlp_100_clients_b10", "mlp", 100, (28, 28, 1), 10, (784 * 100, 100 * 10)),
)
LR = 0.005
SEED = 0


def torch_model(case: Case) -> nn.Sequential:
    """The same network in PyTorch's own idiom."""
    if case.model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    if case.model == "cnn2":
        blocks, activation, dense = [(3, 32, 5, 0), (32, 64, 5, 0)], nn.ReLU, [(1600, 512)]
    else:
        blocks, activation, dense = [(3, 16, 5, 0), (16, 32, 5, 1), (32, 64, 3, 1)], nn.LeakyReLU, [(576, 128)]
    layers: list[nn.Module] = []
    for inputs, outputs, size, padding in blocks:
        layers += [nn.Conv2d(inputs, outputs, size, padding=padding), activation(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for inputs, outputs in dense:
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers, nn.Linear(dense[-1][1], 10))


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


def torch_round(model: nn.Module, start: list[torch.Tensor], clients: list[tuple], batch_size: int) -> list:
    """A FedAvg round: every client in turn, one epoch over its samples in the given order."""
    criterion = nn.CrossEntropyLoss()
    parameters = list(model.parameters())
    average = [torch.zeros_like(tensor) for tensor in start]
    total = sum(len(y) for _, y, _ in clients)
    for x, y, order in clients:
        with torch.no_grad():
            for parameter, tensor in zip(parameters, start, strict=True):
                parameter.copy_(tensor)
        optimizer = torch.optim.SGD(parameters, lr=LR)
        for first in range(0, len(y), batch_size):
            rows = order[first : first + batch_size]
            optimizer.zero_grad()
            criterion(model(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average, parameters, strict=True):
                mean += parameter * (len(y) / total)
    return average


def set_up(case: Case) -> tuple[Engine, Run, Federation, np.ndarray, np.ndarray]:
    """The engine, the state before the first round, and the data, which both sides start from."""
    rng = np.random.default_rng(0)
    samples = case.clients * 800
    images = rng.integers(0, 256, (samples, *case.shape), dtype=np.uint8)
    labels = np.arange(samples) % 10
    config = Config(
        data={"source": "arrays", "clients": case.clients, "partition": {"kind": "iid"}},
        model={"name": case.model},
        method={"name": "fedavg"},
        training={"batch_size": case.batch_size, "lr": LR},
    )
    dataset = from_arrays(images, labels)
    federation, _ = divide(config, dataset)
    engine, _ = place(make_engine(config, dataset), config, jax.random.key(SEED), federation)
    shared, _ = engine.placement.shardings(case.clients)
    if shared is not None:
        federation = jax.device_put(federation, shared)
    return engine, jax.jit(engine.init)(jax.random.key(SEED), federation), federation, images, labels


def ours(case: Case) -> Callable[[], list[np.ndarray]]:
    """A round of the engine; returns the averaged model."""
    engine, initial, federation, _, _ = set_up(case)
    program = jax.jit(engine.rounds)

    def round_() -> list[np.ndarray]:
        run = program(jax.random.key(SEED), initial, np.int32(0), np.int32(1), np.bool_(False), federation)
        return to_torch(jax.block_until_ready(run.state.server))

    return round_


def reference(case: Case) -> Callable[[], list[np.ndarray]]:
    """The same round in PyTorch."""
    _, initial, federation, images, labels = set_up(case)
    keys = round_keys(jax.random.key(SEED), jnp.int32(0)).clients
    clients = []
    for client in range(case.clients):
        rows = np.asarray(federation.train.index[client])
        epoch = jax.random.fold_in(phase_key(jax.random.fold_in(keys, client), "local"), 0)
        order = permutation(jax.random.split(epoch)[0], jnp.int32(len(rows)), len(rows))
        x = torch.tensor((images[rows].transpose(0, 3, 1, 2) / 255.0 - 0.5) / 0.5, dtype=torch.float32)
        clients.append((x, torch.tensor(labels[rows]), torch.tensor(np.asarray(order))))
    model = torch_model(case)
    start = [torch.tensor(tensor) for tensor in to_torch(initial.state.server)]
    return lambda: [tensor.numpy() for tensor in torch_round(model, start, clients, case.batch_size)]


def measure(case: Case, side: str, rounds: int, out: Path) -> None:
    """Runs in a process of its own: the median time of some rounds, after one that does not count."""
    prepare_devices("auto")
    round_ = (ours if side == "ours" else reference)(case)
    model = round_()
    times = [seconds(round_) for _ in range(rounds)]
    np.savez(out, *model, seconds=statistics.median(times))


def compare(case: Case, processes: int, rounds: int) -> tuple[float, float, float]:
    """Median seconds of both sides, and the largest difference between the models they arrive at."""
    times: dict[str, list[float]] = {"ours": [], "reference": []}
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(processes):
            for side, taken in times.items():
                out = Path(folder) / f"{side}.npz"
                arguments = ["--case", case.name, "--side", side, "--rounds", str(rounds), "--out", str(out)]
                subprocess.run([sys.executable, __file__, *arguments], check=True)
                with np.load(out) as saved:
                    taken.append(float(saved["seconds"]))
                    models[side] = [saved[name] for name in saved.files if name != "seconds"]
    pairs = zip(models["ours"], models["reference"], strict=True)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    return statistics.median(times["ours"]), statistics.median(times["reference"]), difference


def gemm_rate() -> float:
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


def main() -> None:
    """Times all cases and prints a table."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write a list of {case, seconds_ours, seconds_reference, ratio}")
    parser.add_argument("--cases", nargs="*", choices=names, default=names)
    parser.add_argument("--processes", type=int, default=3, help="processes per side and case")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds per process")
    parser.add_argument("--case", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=["ours", "reference"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = {case.name: case for case in CASES}
    if arguments.side:
        measure(cases[arguments.case], arguments.side, arguments.rounds, arguments.out)
        return
    rate = gemm_rate()
    versions = f"jax {jax.__version__}, torch {torch.__version__}"
    print(f"{versions}, {cores()} {platform.machine()} cores, {rate / 1e9:.0f} GFLOP/s")
    print(f"{'case':22}{'ours':>9}{'PyTorch':>9}{'ratio':>8}{'floor':>9}{'difference':>12}")
    rows = []
    for name in arguments.cases:
        mine, theirs, difference = compare(cases[name], arguments.processes, arguments.rounds)
        assert difference < 1e-3, f"{name}: the two rounds disagree by {difference}"
        rows.append({"case": name, "seconds_ours": mine, "seconds_reference": theirs, "ratio": theirs / mine})
        numbers = f"{mine:8.2f}s{theirs:8.2f}s{theirs / mine:7.2f}x{cases[name].flops / rate:8.2f}s{difference:12.1e}"
        print(f"{name:22}{numbers}", flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
