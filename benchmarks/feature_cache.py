"""A round with the features of a head phase computed once, against the same round with the extractor run per batch.

    FEDJAX_PFL_DATA=FOLDER python benchmarks/feature_cache.py --json benchmarks/results/feature_cache.json

FOLDER holds cifar10_20k.npz. Both rounds start from the same state and draw the same batches. They run in turns, and
their medians are compared; the largest difference between the two new states is printed beside the times.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from listed import names_of

from fedjax_pfl import load_config
from fedjax_pfl.data.federated import Batch, ClientData, Federation
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.process import cores, prepare
from fedjax_pfl.methods import METHODS
from fedjax_pfl.ops.training import cache_features

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "fedecouple" / "table2_weak_pathological.toml"
CASES = {
    "fedecouple": ["method.name=fedecouple"],
    "fedrep": ["method.name=fedrep", "method.head_epochs=5"],
    "fedpac": ["method.name=fedpac"],
}


class Uncached:
    """Replaces cached samples: features are computed whenever a batch is read, again in every epoch."""

    def __init__(self, features: Callable[[Array], Array], data: ClientData):
        self._features, self._data = features, data
        self.count, self.capacity, self.longest, self.most = data.count, data.capacity, data.longest, data.most

    def in_epoch(self, key: Array) -> "Uncached":
        """Returns itself: the features of a head phase are those of the round's draw of images."""
        del key
        return self

    def batches(self, order: Array, batch_size: int) -> Callable[[Array], Batch]:
        """Number of a batch -> the batch, through the extractor."""
        batch_at = self._data.batches(order, batch_size)

        def batch(number: Array) -> Batch:
            x, y, mask = batch_at(number)
            return Batch(self._features(x), y, mask)

        return batch

    def __getattr__(self, name: str) -> Any:
        # Class means need all features, in either round: of the two, only the head phase is compared.
        return getattr(cache_features(self._features, self._data), name)


def compiled_round(method: str, cached: bool, options: list[str]) -> Callable[[], Any]:
    """A function that runs round 0 of a method from its initial state, and returns the state after it."""
    config = load_config(CONFIG, [*CASES[method], *options])
    prepare(config.run)
    # As CASES has it: the module in which the method is written.
    module: Any = importlib.import_module(METHODS[method].__module__)
    module.cache_features = cache_features if cached else Uncached
    laid_out = lay_out([config], load(config.data.source))  # its programs are kept by config: these two have the same
    key, engine = jax.random.key(config.run.seed), laid_out.engine
    federation = Federation(*laid_out.samples, *laid_out.rows[0].clients)
    shared, per_client = engine.placement.shardings(engine.clients)
    run = jax.jit(engine.init)(key, federation)
    clients = jax.device_put(run.state.clients, per_client)
    run = jax.device_put(run, shared)._replace(state=run.state._replace(clients=clients))
    arguments = key, jnp.zeros((), jnp.int32), run, jnp.array(False), federation
    program = jax.jit(engine.round).lower(*arguments).compile()
    module.cache_features = cache_features
    return lambda: jax.block_until_ready(program(*arguments).state)


def compare(method: str, options: list[str], repeats: int) -> dict[str, float]:
    """Seconds per round with and without the cache, and the largest difference between the resulting states."""
    rounds = {name: compiled_round(method, name == "cached", options) for name in ("cached", "uncached")}
    states = {name: run() for name, run in rounds.items()}
    differences = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), states["cached"], states["uncached"])
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(repeats):
        for name, run in rounds.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    difference = max(jax.tree.leaves(differences))
    return {**medians, "ratio": medians["uncached"] / medians["cached"], "largest_difference": difference}


def main() -> None:
    """Prints the table, and writes it to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["fedecouple", "fedrep", "fedpac"]
    parser.add_argument("--methods", type=names_of(CASES), default=usual, help="of: " + ", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="config overrides")
    options = parser.parse_args()
    cases = {}
    for method in options.methods:
        cases[method] = compare(method, options.set, options.repeats)
        shown = cases[method]
        print(
            f"{method}: {shown['cached']:.2f} s cached, {shown['uncached']:.2f} s uncached, "
            f"ratio {shown['ratio']:.2f}, largest difference of the states {shown['largest_difference']:.1e}",
            flush=True,
        )
    if options.json:
        machine = {"cores": cores(), "backend": jax.default_backend(), "jax": jax.__version__}
        options.json.write_text(json.dumps({"machine": machine, "set": options.set, "cases": cases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
