"""The clients' models on every class, also on those that they hardly have: PGFedSplit, Fig. 4, for all clients.

    FEDJAX_PFL_DATA=FOLDER python benchmarks/balanced.py NAME=RUN NAME=RUN ... [--json FILE]

A RUN is the directory of a complete run that has kept its state, with one partition for all. The models that PRE scores
are tested on the test images of all clients together, equally many of each class; no client trains on any of them. The
table has a row per run, and a column for the classes of which a client has so many training images: the mean over its
classes of that column, then the mean over the clients that have any. Below it stand the differences between the first
run and each other one, with 95 % bootstrap intervals over these clients.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from fedjax_pfl import Result
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.build import deal
from fedjax_pfl.experiment.statistics import bootstrap_over_clients

# Training images of a class, from and to.
COLUMNS = {"none": (0, 0), "1 to 20": (1, 20), "21 to 100": (21, 100), "101 to 500": (101, 500), "more": (501, 10**9)}


def balanced(data: Dataset, rows: Int[np.ndarray, " n"]) -> Int[np.ndarray, "classes each"]:
    """The first rows of each class, as many as there are of the rarest one."""
    of_class = [rows[data.labels[rows] == label] for label in range(data.classes)]
    each = min(map(len, of_class))
    return np.stack([found[:each] for found in of_class])


def columns_of(counts: Int[np.ndarray, "clients classes"]) -> dict[str, Bool[np.ndarray, "clients classes"]]:
    """Which classes of a client belong to a column; the last two have its most frequent class, and all of them."""
    most = counts == counts.max(axis=1, keepdims=True)
    found = {name: (low <= counts) & (counts <= high) for name, (low, high) in COLUMNS.items()}
    return {**found, "the most frequent": most, "all": np.full_like(most, True)}


def per_client(
    accuracy: Float[np.ndarray, "clients classes"], chosen: Bool[np.ndarray, "clients classes"]
) -> Float[np.ndarray, " clients"]:
    """The mean over a client's chosen classes; NaN where it has none."""
    number = chosen.sum(axis=1)
    return np.where(number > 0, np.where(chosen, accuracy, 0).sum(axis=1) / np.maximum(number, 1), np.nan)


def difference(gap: Float[np.ndarray, " clients"]) -> str:
    """A mean difference with its interval."""
    found = bootstrap_over_clients([gap])
    interval = "" if found is None else f" [{found[0]:+.1f}, {found[1]:+.1f}]"
    return f"{np.nanmean(gap):+.1f}{interval}"


def main() -> None:
    """Tests the models, prints the tables, and writes the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for given in options.runs:
        name, equals, run = given.partition("=")
        if not equals:
            parser.error(f"{given} is not NAME=RUN")
        results[name] = Result.load(run)
    partitions = {result.partition["hash"] for result in results.values()}
    if len(partitions) > 1:
        parser.error("the runs have different partitions")
    first = next(iter(results.values()))
    data = load(first.config.data.source)
    tested = balanced(data, deal(first.config, data)[0].pooled)
    images, (classes, each) = data.images[tested.ravel()], tested.shape
    counts = np.array(first.partition["train_class_counts"])
    columns = columns_of(counts)
    accuracies = {}
    for name, result in results.items():
        right = [result.predict(images, client) == np.repeat(np.arange(classes), each) for client in range(len(counts))]
        accuracies[name] = 100 * np.array(right).reshape(len(counts), classes, each).mean(axis=2)
        print(f"{name}: round {result.history['round'][-1]}, {each} images of each class", flush=True)
    print(f"\n| training images of the class | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    print(f"| clients that have such classes | {' | '.join(str(of.any(axis=1).sum()) for of in columns.values())} |")
    for name, accuracy in accuracies.items():
        means = [np.nanmean(per_client(accuracy, chosen)) for chosen in columns.values()]
        print(f"| {name} | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    (reference, own), *others = accuracies.items()
    for name, accuracy in others:
        gaps = [difference(per_client(own, chosen) - per_client(accuracy, chosen)) for chosen in columns.values()]
        print(f"| {reference} minus {name} | {' | '.join(gaps)} |")
    if options.json:
        rounds = {name: int(result.history["round"][-1]) for name, result in results.items()}
        found = {"partition": partitions.pop(), "images_per_class": each, "rounds": rounds}
        found["training_images"] = counts.tolist()
        found["accuracy"] = {name: accuracy.round(2).tolist() for name, accuracy in accuracies.items()}
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
