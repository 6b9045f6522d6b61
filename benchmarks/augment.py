"""How much time base augmentation adds to a round: FedAvg with each kind, in turns, as ratios to none.

    python benchmarks/augment.py [--repeats 7]

Random 32x32x3 images, 2 clients x 200, five epochs in batches of 50, one client after the other on one device.
"""

import argparse
import time
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.augment import Augment
from fedjax_pfl.data.federated import Federation, pack
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models import MODELS, build
from fedjax_pfl.ops.training import Trainer

CLIENTS, SAMPLES, ROUNDS = 2, 200, 2


def federation() -> Federation:
    """Noise with labels: the time of a step does not depend on the content of an image."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (CLIENTS * SAMPLES, 32, 32, 3), dtype=np.uint8)
    y = rng.integers(0, 10, len(x)).astype(np.int32)
    held = pack(np.split(np.arange(len(x)), CLIENTS), y, 10)
    return Federation(jnp.asarray(x), jnp.asarray(y), held, None, held, held)


def main() -> None:
    """Prints seconds per round and the median ratio to a round without augmentation, for each model and kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="alternations; 7 unless given")
    repeats = parser.parse_args().repeats
    data, key = federation(), jax.random.key(0)
    print("| model | augmentation | seconds per round | ratio |\n| --- | --- | ---: | ---: |")
    for name in ("cnn3", "cnn2"):
        model = build(MODELS[name](), (32, 32, 3), 10, init="torch", mean=jnp.full(3, 0.5), std=jnp.full(3, 0.5))
        played = {}
        for kind in get_args(Augment):
            engine = Engine(fedavg(model, Trainer(epochs=5, batch_size=50, lr=0.02)), CLIENTS, augment=kind)
            start, stop = jnp.array(0, jnp.int32), jnp.array(ROUNDS, jnp.int32)
            run = jax.jit(engine.init)(key, data)
            rounds = jax.jit(engine.rounds).lower(key, run, start, stop, jnp.array(False), data).compile()
            played[kind] = rounds, (key, run, start, stop, jnp.array(False), data)
        seconds: dict[str, list[float]] = {kind: [] for kind in played}
        for _ in range(repeats):
            for kind, (rounds, arguments) in played.items():
                began = time.perf_counter()
                jax.block_until_ready(rounds(*arguments))
                seconds[kind].append((time.perf_counter() - began) / ROUNDS)
        for kind, found in seconds.items():
            ratio = np.median(np.divide(found, seconds["none"]))
            print(f"| {name} | {kind} | {np.median(found):.3f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
