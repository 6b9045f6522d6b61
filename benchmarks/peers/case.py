"""What a peer is told to run, and how its rounds are timed; NumPy only, so that it runs in any peer's environment.

A peer is a script in this folder: ``PYTHON peers/NAME.py CASE.npz --rounds R --out OUT.npz``. It reads the case, builds
its own round and hands it to :func:`measure`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# The methods that `pytorch_methods.py` has.
PEERED = ("local", "fedavg", "fedavg_ft", "fedprox", "fedprox_ft", "ditto", "lg_fedavg", "fedper", "fedrep", "fedbabu")
PEERED += ("fedpac", "fedecouple", "fedfcd", "pgfedsplit", "fedcpd", "pfedcspc")


class Case(NamedTuple):
    """One case, as ``round_time.py`` writes it down.

    Attributes:
      settings: ``model`` (see :data:`~round_time.MODELS`), ``shape`` (h, w, c), ``classes``, ``method``, ``options``
        (its hyperparameters), ``batch_size``, ``epochs``, ``lr``, and ``warm_up``, the samples per client in the first
        round, which does not count.
      images: of all clients, uint8, [samples, h, w, c].
      labels: [samples].
      rows: the samples of each client, [clients, samples per client].
      initial: the initial model, where all sides are to start from the same one, else empty.
      orders: likewise the order of the samples in the first two rounds of one epoch, one [clients, samples] each.
    """

    settings: dict[str, Any]
    images: np.ndarray
    labels: np.ndarray
    rows: np.ndarray
    initial: list[np.ndarray]
    orders: list[np.ndarray]


def write(path: Path, case: Case) -> None:
    """Writes a case for :func:`read`."""
    arrays: dict[str, Any] = {f"initial_{number}": array for number, array in enumerate(case.initial)}
    arrays |= {f"orders_{number}": array for number, array in enumerate(case.orders)}
    settings = np.array(json.dumps(case.settings))
    np.savez(path, settings=settings, images=case.images, labels=case.labels, rows=case.rows, **arrays)


def read(path: Path) -> Case:
    """Reads what :func:`write` wrote."""
    with np.load(path) as saved:

        def series(name: str) -> list[np.ndarray]:
            number = sum(key.startswith(f"{name}_") for key in saved.files)
            return [saved[f"{name}_{at}"] for at in range(number)]

        settings = json.loads(str(saved["settings"]))
        initial, orders = series("initial"), series("orders")
        return Case(settings, saved["images"], saved["labels"], saved["rows"], initial, orders)


def normalised(images: np.ndarray) -> np.ndarray:
    """Pixels in [-1, 1], float32."""
    return (images.astype(np.float32) / 255.0 - 0.5) / 0.5


def parser() -> argparse.ArgumentParser:
    """The command line of every peer."""
    made = argparse.ArgumentParser()
    made.add_argument("case", type=Path)
    made.add_argument("--rounds", type=int, required=True, help="timed rounds")
    made.add_argument("--out", type=Path, required=True)
    return made


def measure(round_: Callable[[bool], None], rounds: int, after_first: Callable[[], Any] = lambda: None) -> dict:
    """Times some rounds, after one on few samples that does not count.

    Args:
      round_: runs a round and returns when it is done; told whether it is that first one.
      rounds: timed rounds.
      after_first: called after the first timed round.

    Returns:
      ``seconds``, their median, and ``first``, what ``after_first`` returned.
    """
    round_(True)
    seconds, first = [], None
    for number in range(rounds):
        began = time.perf_counter()
        round_(False)
        seconds.append(time.perf_counter() - began)
        if number == 0:
            first = after_first()
    return {"seconds": statistics.median(seconds), "first": first}


def save(out: Path, seconds: float, flops: float = 0.0, model: list[np.ndarray] | None = None) -> None:
    """Writes what ``round_time.py`` reads: seconds, FLOPs where they were counted, and a model where there is one."""
    arrays: dict[str, Any] = {f"model_{number}": array for number, array in enumerate(model or [])}
    np.savez(out, seconds=seconds, flops=flops, **arrays)
