"""One FedAvg round of fedjax_pfl against a plain PyTorch loop over the same clients, model, batches and data.

    pip install -e ".[bench]"
    python benchmarks/round_time.py --json benchmarks/results/round_time.json

The reference is PyTorch at its best, not a peer's code: images are normalised and in memory beforehand, there is no
data loader, and clients are trained one after the other with ``torch.optim.SGD`` on all cores. It starts from the same
weights and takes the same mini-batches in the same order, and the two averaged models are compared before anything is
timed. Timings alternate between the two; the median counts. The floor is the arithmetic of the round (multiply-adds of
forward and backward pass) at the rate of a large float32 matrix product measured on the same machine.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from fedjax_pfl.build import divide, make_engine, place, prepare_devices
from fedjax_pfl.config import Config
from fedjax_pfl.data.sources import from_arrays
from fedjax_pfl.engine import round_keys
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


def prepare(case: Case) -> tuple[Callable[[], object], Callable[[], object], float]:
    """Both rounds, ready to be timed, and the largest difference between the models they arrive at."""
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
    key_init, key_rounds = jax.random.split(jax.random.key(0))
    engine, _ = place(make_engine(config, dataset), config, key_init, federation)
    shared, _ = engine.placement.shardings(case.clients)
    if shared is not None:
        federation, key_rounds = jax.device_put((federation, key_rounds), shared)
    initial = jax.jit(engine.init)(key_init, federation)
    program = jax.jit(engine.rounds)

    def ours() -> object:
        run = program(key_rounds, initial, np.int32(0), np.int32(1), np.bool_(False), federation)
        return jax.block_until_ready(run.state.server)

    keys = round_keys(jax.random.split(jax.random.key(0))[1], jnp.int32(0)).clients
    clients = []
    for client in range(case.clients):
        rows = np.asarray(federation.train.index[client])
        epoch = jax.random.fold_in(phase_key(jax.random.fold_in(keys, client), "local"), 0)
        order = permutation(jax.random.split(epoch)[0], jnp.int32(len(rows)), len(rows))
        x = torch.tensor((images[rows].transpose(0, 3, 1, 2) / 255.0 - 0.5) / 0.5, dtype=torch.float32)
        clients.append((x, torch.tensor(labels[rows]), torch.tensor(np.asarray(order))))
    model = torch_model(case)
    start = [torch.tensor(tensor) for tensor in to_torch(initial.state.server)]
    reference = lambda: torch_round(model, start, clients, case.batch_size)  # noqa: E731
    pairs = zip(to_torch(ours()), reference(), strict=True)
    return ours, reference, max(float(np.abs(a - b.numpy()).max()) for a, b in pairs)


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write a list of {case, seconds_ours, seconds_reference, ratio}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    arguments = parser.parse_args()
    prepare_devices("auto")
    rate = gemm_rate()
    print(
        f"jax {jax.__version__} ({jax.default_backend()}, {jax.local_device_count()} devices), "
        f"torch {torch.__version__} ({torch.get_num_threads()} threads), {platform.machine()}, {rate / 1e9:.0f} GFLOP/s"
    )
    print(f"{'case':22}{'ours':>9}{'PyTorch':>9}{'ratio':>8}{'floor':>9}{'difference':>12}")
    rows = []
    for case in CASES:
        if case.name not in arguments.cases:
            continue
        ours, reference, difference = prepare(case)
        assert difference < 1e-3, f"{case.name}: the two rounds disagree by {difference}"
        times = [(seconds(ours), seconds(reference)) for _ in range(arguments.repeats)]
        mine, theirs = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append({"case": case.name, "seconds_ours": mine, "seconds_reference": theirs, "ratio": theirs / mine})
        floor = case.flops / rate
        print(
            f"{case.name:22}{mine:8.2f}s{theirs:8.2f}s{theirs / mine:7.2f}x{floor:8.2f}s{difference:12.1e}", flush=True
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
