"""A round of ResNet-18 under FedAvg and FedeCouple: its time and memory, and its distance from the floor.

    python benchmarks/resnet.py --clients 4 --samples 100 --json benchmarks/results/resnet.json

Images are random, 32x32x3, in ten classes. There is one local epoch, and everything else is the method's default
(FedeCouple: augmented copies, an epoch under the frozen head and one under the personal head, five head epochs on
cached features). Each case runs in a process of its own, so that its peak memory is measured separately. The floor is
FedAvg's arithmetic, three forward passes per sample, at the rate of a large float32 matrix product.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import Config
from fedjax_pfl.data.dataset import from_arrays
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.process import cores, prepare
from fedjax_pfl.models import MODELS, build

SHAPE = (32, 32, 3)
CLASSES = 10
CASES = [(method, norm) for norm in ("group", "batch") for method in ("fedavg", "fedecouple")]


def forward_flops() -> float:
    """Floating-point operations of one image's forward pass, as XLA counts them."""
    model = build(MODELS["resnet18"](), SHAPE, CLASSES, init="torch", mean=jnp.zeros(3), std=jnp.ones(3))
    image = jax.ShapeDtypeStruct((1, *SHAPE), jnp.uint8)
    cost = jax.jit(model.apply).lower(jax.eval_shape(model.init, jax.random.key(0)), image).cost_analysis()
    return float(cost["flops"])


def matmul_rate() -> float:
    """Floating-point operations per second of a large float32 matrix product on all cores."""
    a = jnp.ones((4096, 4096))
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * 4096**3 / statistics.median(times)


def measure(method: str, norm: str, clients: int, samples: int, batch_size: int, rounds: int) -> dict:
    """Times rounds of one case, after one round that does not count, and reads the peak memory of this process."""
    rng = np.random.default_rng(0)
    total = clients * samples * 4 // 3
    dataset = from_arrays(rng.integers(0, 256, (total, *SHAPE), dtype=np.uint8), np.arange(total) % CLASSES)
    config = Config(
        data={"source": "arrays", "clients": clients, "partition": {"kind": "iid"}},
        model={"name": "resnet18", "norm": norm},
        method={"name": method},
        training={"batch_size": batch_size, "lr": 0.01},
    )
    prepare(config.run)
    program, times = lay_out([config], dataset), []
    program.compile()
    states = program.init()
    for t in range(rounds + 1):
        start = time.perf_counter()
        states = jax.block_until_ready(program.rounds(states, t, t + 1, evaluate=False))
        times.append(time.perf_counter() - start)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[0].state.server)):
        raise FloatingPointError(f"{method} with {norm} norm: the server's model is not finite")
    memory, chunk = program.memory, program.engine.placement.chunk
    stats = jax.local_devices()[0].memory_stats() or {}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "method": method,
        "norm": norm,
        "compile_and_first_round_seconds": program.compile_seconds + times[0],
        "seconds_per_round": statistics.median(times[1:]),
        "peak_gigabytes": stats.get("peak_bytes_in_use", host) / 1e9,
        "estimated_gigabytes": (memory.resident + memory.exchanged + program.devices * chunk * memory.per_client) / 1e9,
    }


def main() -> None:
    """Runs every case, prints a table and, if asked to, writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--samples", type=int, default=100, help="training images per client")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=2, metavar=("METHOD", "NORM"), help="one case, as JSON on standard output")
    options = parser.parse_args()
    sizes = {"clients": options.clients, "samples": options.samples, "batch_size": options.batch_size}
    if options.case:
        print(json.dumps(measure(*options.case, **sizes, rounds=options.rounds)))
        return
    results = []
    for method, norm in CASES:
        command = [sys.executable, __file__, *sys.argv[1:], "--case", method, norm]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    floor = 3 * forward_flops() * options.clients * options.samples / matmul_rate()
    print(f"floor of FedAvg: {floor:.2f} s\n")
    print("| method | norm | s per round | peak GB | estimate GB |\n|---|---|---|---|---|")
    for case in results:
        figures = [case[name] for name in ("seconds_per_round", "peak_gigabytes", "estimated_gigabytes")]
        print(f"| {case['method']} | {case['norm']} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")
    if options.json:
        machine = f"{cores()} {platform.machine()} cores, JAX {jax.__version__} on {jax.default_backend()}"
        report = {"machine": machine, **sizes, "rounds": options.rounds, "floor_seconds": floor, "cases": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
