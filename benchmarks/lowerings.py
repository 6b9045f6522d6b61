"""Ways to lower a convolution of clients side by side, for each direction, compiled for devices that are not there.

    python benchmarks/lowerings.py --target v5e,h200 --json benchmarks/results/lowerings.json

It needs the environment of `accelerators.py`, whose estimates it uses. `models/conv.py` chooses by these figures:

- slices: patches made of slices, and a batched matrix product;
- patches: patches by ``lax.conv_general_dilated_patches``, and a batched matrix product;
- grouped: grouped convolutions, which ``lax.conv_general_dilated`` and its derivatives become under ``vmap``.

The gradient of the input is the same product with all patches, added back to the pixels from which they come.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerators import TARGETS, devices_of, rates_of  # first: it sets the environment before JAX starts

# isort: split
import jax
import jax.numpy as jnp
from conv import LAYERS, Layer, direct
from hlo import estimate, parse
from jax import lax
from jax.sharding import SingleDeviceSharding
from listed import names_of

from fedjax_pfl.models import patches

CLIENTS = 20
Ways = dict[str, dict[str, Callable]]


def ways(layer: Layer) -> Ways:
    """direction -> way -> a function of one client's (images, kernel, cotangent)."""
    pads = ((layer.padding, layer.padding),) * 2
    pixels, size = (layer.side, layer.side), (layer.size, layer.size)

    def pull(which: int) -> Callable:
        def pulled(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> jax.Array:
            return jax.vjp(lambda x, kernel: direct(x, kernel, padding=pads), x, kernel)[1](dy)[which]

        return pulled

    def back(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> jax.Array:
        del x
        return patches.input_gradient(dy, kernel, pixels, (1, 1), pads)

    def dilated(x: jax.Array) -> jax.Array:
        highest = lax.Precision.HIGHEST  # a sum of one pixel and zeros
        return lax.conv_general_dilated_patches(
            x, size, (1, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=highest
        )

    def output_by_dilated(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> jax.Array:
        del dy
        return dilated(x) @ kernel.transpose(2, 0, 1, 3).reshape(-1, layer.outputs)

    def kernel_by_dilated(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> jax.Array:
        found = jnp.einsum("bhwt,bhwo->to", dilated(x), dy).reshape(layer.inputs, *size, layer.outputs)
        del kernel
        return found.transpose(1, 2, 0, 3)

    return {
        "output": {
            "slices": lambda x, kernel, dy: patches.output(x, kernel, (1, 1), pads),
            "patches": output_by_dilated,
            "grouped": lambda x, kernel, dy: direct(x, kernel, padding=pads),
        },
        "kernel gradient": {
            "slices": lambda x, kernel, dy: patches.kernel_gradient(x, dy, (1, 1), pads, size),
            "patches": kernel_by_dilated,
            "grouped": pull(1),
        },
        "input gradient": {} if layer.first else {"slices": back, "grouped": pull(0)},
    }


def measure(layer: Layer, fn: Callable, target: str) -> dict[str, Any]:
    """Estimated seconds and temporaries of all clients together."""
    on = SingleDeviceSharding(devices_of(target)[0])
    left = layer.side + 2 * layer.padding - layer.size + 1

    def shape(*extents: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((CLIENTS, *extents), jnp.float32, sharding=on)

    x = shape(layer.batch, layer.side, layer.side, layer.inputs)
    kernel = shape(layer.size, layer.size, layer.inputs, layer.outputs)
    compiled = jax.jit(jax.vmap(fn)).lower(x, kernel, shape(layer.batch, left, left, layer.outputs)).compile()
    rates = rates_of(target, "float32")
    total = estimate(parse(compiled.as_text()), rates, {}).total
    seconds = total.seconds if rates else total.cycles / TARGETS[target].clock
    return {"ms": 1e3 * seconds, "temporary_mb": compiled.memory_analysis().temp_size_in_bytes / 1e6}


def main() -> None:
    """Compiles every way, for every direction of every layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layers = [layer.name for layer in LAYERS]
    parser.add_argument("--target", type=names_of(TARGETS), default=["v5e", "h200"], help="of: " + ", ".join(TARGETS))
    parser.add_argument("--layers", nargs="*", choices=layers, default=layers)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for target in options.target:
        for layer in LAYERS:
            if layer.name not in options.layers:
                continue
            for direction, found in ways(layer).items():
                for way, fn in found.items():
                    row = {"target": target, "layer": layer.name, "direction": direction, "way": way}
                    row |= measure(layer, fn, target)
                    rows.append(row)
                    print(
                        f"{target:5} {layer.name:22} {direction:16} {way:8} {row['ms']:8.3f} ms "
                        f"{row['temporary_mb']:8.1f} MB",
                        flush=True,
                    )
    if options.json:
        options.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
