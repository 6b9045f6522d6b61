"""The convolution's lowering against ``lax.conv`` and its autodiff gradient, in a loop as in local training.

    pip install -e .
    python benchmarks/conv.py --json benchmarks/results/conv.json

Each case is a gradient step on one layer's kernel and input, inside ``lax.fori_loop``: for one client, and for several
clients side by side under ``vmap`` with a kernel each. Only one device is used, so that nothing else runs. The first
layer of a network needs no gradient of its input, and is timed without it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_pfl.models.conv import conv2d


@dataclass(frozen=True)
class Layer:
    """A convolution: [batch, side, side, inputs] with a size x size x inputs x outputs kernel."""

    name: str
    batch: int
    side: int
    inputs: int
    outputs: int
    size: int
    padding: int
    first: bool = False


LAYERS = (
    Layer("cnn2 conv1, batch 10", 10, 32, 3, 32, 5, 0, first=True),
    Layer("cnn2 conv2, batch 10", 10, 14, 32, 64, 5, 0),
    Layer("cnn3 conv1, batch 32", 32, 32, 3, 16, 5, 0, first=True),
    Layer("cnn3 conv2, batch 32", 32, 14, 16, 32, 5, 1),
    Layer("cnn3 conv3, batch 32", 32, 6, 32, 64, 3, 1),
)


def direct(x: jax.Array, kernel: jax.Array, *, padding: tuple) -> jax.Array:
    """The obvious way to write it."""
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def step_seconds(layer: Layer, convolve: Callable, clients: int, steps: int, repeats: int) -> float:
    """Median seconds of one gradient step of one client."""
    key_x, key_kernel = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key_x, (clients, layer.batch, layer.side, layer.side, layer.inputs))
    kernel = jax.random.normal(key_kernel, (clients, layer.size, layer.size, layer.inputs, layer.outputs)) * 0.01
    pad = ((layer.padding, layer.padding),) * 2
    arguments = (1,) if layer.first else (0, 1)
    gradient = jax.grad(lambda x, kernel: jnp.sum(convolve(x, kernel, padding=pad) ** 2), arguments)

    def step(_: int, carry: tuple) -> tuple:
        x, kernel = carry
        *dx, dk = gradient(x, kernel)
        return (x - 1e-6 * dx[0] if dx else x), kernel - 1e-6 * dk

    def loop(x: jax.Array, kernel: jax.Array) -> tuple:
        return lax.fori_loop(0, steps, step, (x, kernel))

    if clients == 1:
        program, x, kernel = jax.jit(loop), x[0], kernel[0]
    else:
        program = jax.jit(jax.vmap(loop))
    jax.block_until_ready(program(x, kernel))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(program(x, kernel))
        times.append(time.perf_counter() - began)
    return statistics.median(times) / steps / clients


def main() -> None:
    """Times all layers and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4, help="clients side by side in the vmap cases")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__} ({jax.default_backend()}); milliseconds per gradient step and client")
    print(f"{'layer':24}{'clients':>8}{'conv2d':>10}{'lax.conv':>11}{'ratio':>9}")
    rows = []
    for layer in LAYERS:
        for clients in (1, arguments.clients):
            time_of = partial(step_seconds, layer, clients=clients, repeats=arguments.repeats)
            ours, theirs = time_of(conv2d, steps=100), time_of(direct, steps=3)
            ratio = theirs / ours
            rows.append(
                {
                    "case": layer.name,
                    "clients": clients,
                    "seconds_ours": ours,
                    "seconds_reference": theirs,
                    "ratio": ratio,
                }
            )
            print(f"{layer.name:24}{clients:8}{1e3 * ours:9.2f} {1e3 * theirs:10.2f} {ratio:7.1f}x", flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
