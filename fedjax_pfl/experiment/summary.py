"""The names and contents of a run's numbers, in ``metrics.jsonl``, ``history``, ``summary.json`` and tables.

A line of ``metrics.jsonl`` holds the scores of an evaluated round; a name such as ``pre.accuracy`` means the same in
all of these. A summary gives each metric for the last round, and those that score a model for their best round and for
the round that is best on validation samples, too. `figures_of` selects the figures that tables show.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from fedjax_pfl.engine.scoring import Evaluation, Scored, Scores

Line = dict[str, Any]
"""A line of ``metrics.jsonl``: metric -> number, or a table of metrics; None if the run does not have it."""

POINTS = ("pre", "post")
MEASURES = (
    "accuracy",
    "weighted",
    "std_clients",
    "worst_10_percent",
    "macro_f1",
    "macro_f1_union",
    "loss",
    "i_local",
    "hm",
    "correct",
)
"""The built-in metrics, and ``correct`` of ``labels.csv``: names that a user's own metric cannot have."""
FALLING = ("loss", "std_clients", "train_loss")
"""The metrics, without their evaluation point, that are better when small."""
# For these metrics the largest value is the best. Those that are neither here nor above do not score a model.
_GLOBAL = ("global", "global_macro_f1", "global_macro_f1_union")
_RISING = tuple(name for name in MEASURES if name not in FALLING)
_SUMMARIZED = tuple(name for name in MEASURES if name not in ("hm", "correct"))  # computed by `summarize`, over clients
_DIAGNOSTICS = "diagnostics"
_LAST_ROUNDS = 10
_DIGITS = 12
PACKAGES = ("fedjax_pfl", "jax", "jaxlib", "numpy")
"""The packages that a run's numbers depend on, whose versions its summary records."""


def flat(tables: Mapping[str, Any], prefix: str = "", values: Collection[str] = ()) -> dict[str, Any]:
    """Nested tables as one table with dotted names; those with one of the names ``values`` are left as they are."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        nested = isinstance(value, Mapping) and prefix + key not in values
        found |= flat(value, f"{prefix}{key}.", values) if nested else {prefix + key: value}
    return found


def harmonic_mean(a: np.ndarray | float, b: np.ndarray | float) -> np.ndarray:
    """2 a b / (a + b), element by element; 0 where both are 0, NaN where one of them is NaN."""
    total = np.add(a, b)
    return np.asarray(2 * np.multiply(a, b) / np.where(total == 0, 1, total))


def summarize(scores: Scores, samples: Int[np.ndarray, " N"]) -> dict[str, float]:
    """Aggregates the scores of the clients that have samples to be scored on.

    Args:
      scores: scores of the clients, one row per client, [N].
      samples: number of samples on which each client is scored.

    Returns:
      ``accuracy`` (unweighted mean over clients), ``weighted`` (weighted by samples: PFLlib's number), ``std_clients``
      (population standard deviation), ``worst_10_percent`` (mean over the worst tenth of the clients, rounded down, at
      least one), ``macro_f1`` (over the classes that a client holds), ``macro_f1_union`` (and the predicted classes)
      and ``loss`` (unweighted means), ``i_local`` (unweighted mean of the harmonic mean of accuracy and macro-F1,
      pFedCSPC's measure of a personal model). Accuracies lie in [0, 1]. All are NaN if no client has samples.
    """
    scored = samples > 0
    if not scored.any():
        return dict.fromkeys(_SUMMARIZED, math.nan)
    of = {name: np.asarray(values, np.float64)[scored] for name, values in scores._asdict().items()}
    accuracy = of["correct"] / samples[scored]
    worst = np.sort(accuracy)[: max(1, len(accuracy) // 10)]
    found = {
        "accuracy": accuracy.mean(),
        "weighted": of["correct"].sum() / samples[scored].sum(),
        "std_clients": accuracy.std(),
        "worst_10_percent": worst.mean(),
        **{name: of[name].mean() for name in ("macro_f1", "macro_f1_union", "loss")},
        "i_local": harmonic_mean(accuracy, of["macro_f1"]).mean(),
    }
    # Means of the same counts in another order differ by rounding, which would make the later of two equal rounds best.
    return {name: round(float(value), _DIGITS) for name, value in found.items()}


def judged(manifest: Mapping[str, Any], new: int) -> Int[np.ndarray, " clients"]:
    """The clients that the reported numbers cover: those that train and are not malicious.

    Args:
      manifest: the content of ``partition.json``.
      new: number of clients, the last ones, that never train.
    """
    return np.setdiff1d(np.arange(len(manifest["n_train"]) - new), manifest.get("attackers", ()))


def line_of(scores: Evaluation, manifest: Mapping[str, Any], evaluated_on: str, new: int) -> Line:
    """The part of a line of ``metrics.jsonl`` that describes the models after a round.

    Args:
      scores: scores of the clients and of the global model.
      manifest: the content of ``partition.json``.
      evaluated_on: ``test`` or ``validation``.
      new: number of clients, the last ones, that never train; they are reported in ``new_pre`` and ``new_post``.

    Returns:
      ``pre`` and ``post`` from `summarize`, with ``hm``, the harmonic mean of the global accuracy and ``i_local``;
      ``validation_pre`` and ``validation_post``, without ``hm``, if validation samples are scored in addition;
      ``global``, ``global_macro_f1`` and ``global_macro_f1_union``, None without a global model; ``diagnostics``, if
      the method has any. The config's own metrics are there for each point, as unweighted mean over clients, and for
      the global model.
    """
    shared = None if scores.shared is None else {name: float(x) for name, x in scores.shared._asdict().items()}
    accuracy = None if shared is None else shared["accuracy"]
    clients, benign = len(manifest["n_train"]), judged(manifest, new)

    def means(of: Scores, samples: Sequence[int], who: Int[np.ndarray, " clients"]) -> dict[str, float]:
        return summarize(Scores(*(values[who] for values in of)), np.asarray(samples)[who])

    def personal(of: Scores, samples: Sequence[int], who: Int[np.ndarray, " clients"]) -> dict[str, float | None]:
        found = means(of, samples, who)
        return {**found, "hm": None if accuracy is None else float(harmonic_mean(accuracy, found["i_local"]))}

    def own(of: Scored, samples: Sequence[int], who: Int[np.ndarray, " clients"]) -> dict[str, float]:
        held = who[np.asarray(samples)[who] > 0]
        found = {name: np.asarray(values, np.float64)[held] for name, values in of.own.items()}
        return {name: float(values.mean()) if len(held) else math.nan for name, values in found.items()}

    line: Line = {}
    for point, of in zip(POINTS, (scores.pre, scores.post), strict=True):
        samples = manifest[f"n_{evaluated_on}"]
        line[point] = personal(of.test, samples, benign) | own(of, samples, benign)
        if new:
            those = np.arange(clients - new, clients)
            line[f"new_{point}"] = personal(of.test, samples, those) | own(of, samples, those)
        if of.validation is not None:  # without hm: the global accuracy is of test samples
            line[f"validation_{point}"] = means(of.validation, manifest["n_validation"], benign)
    known = shared or dict.fromkeys(Scores._fields)
    of_all = {"global": known["accuracy"]} | {f"global_{name}": known[name] for name in ("macro_f1", "macro_f1_union")}
    of_all |= {f"global_{name}": float(value) for name, value in scores.shared_own.items()}
    said = {name: float(value) for name, value in scores.diagnostics.items()}
    return {**line, **of_all, **({_DIAGNOSTICS: said} if said else {})}


def metrics_of(
    own: Sequence[str], diagnostics: Sequence[str], *, shared: bool, new: bool, validated: bool
) -> list[str]:
    """The dotted names of the metrics that a run has in every line.

    Args:
      own: the config's own metrics.
      diagnostics: the names of the diagnostics of clients and server.
      shared: whether there is a global model.
      new: whether there are clients that never train.
      validated: whether validation samples are scored in addition.
    """
    measures = [*_SUMMARIZED, "hm"] if shared else list(_SUMMARIZED)
    tables = [f"{kind}{point}" for kind in (("", "new_") if new else ("",)) for point in POINTS]
    names = [f"{table}.{name}" for table in tables for name in (*measures, *own)]
    names += [f"validation_{point}.{name}" for point in POINTS for name in _SUMMARIZED] if validated else []
    names += [*_GLOBAL, *(f"global_{name}" for name in own)] if shared else []
    names += [f"{_DIAGNOSTICS}.{name}" for name in diagnostics]
    return ["round", "train_loss", *names, "megabytes", "seconds"]


def history_of(lines: Sequence[Line]) -> dict[str, Float[np.ndarray, " rounds"]]:
    """Dotted name -> array over the evaluated rounds; NaN where a line does not have the metric."""
    tables = [flat(line) for line in lines]
    columns = {name: [table.get(name) for table in tables] for name in dict.fromkeys(itertools.chain(*tables))}
    return {name: np.array([np.nan if value is None else value for value in of]) for name, of in columns.items()}


def mean_line(lines: Sequence[Line]) -> Line:
    """The mean of several runs' lines of the same round; None where one run has no value."""
    first = lines[0]
    mean: Line = {}
    for name, value in first.items():
        found = [line[name] for line in lines]
        if isinstance(value, dict):
            mean[name] = mean_line(found)
        else:
            mean[name] = None if None in found else type(value)(np.mean(found))
    return mean


def first_reached(values: Sequence[float | None] | np.ndarray, target: float, *, falling: bool = False) -> int | None:
    """The first index at which a metric is as large as the target, or as small if it is `falling`; None if it never is.

    Values are rounded to six digits, because 4200 of 10,000 is a little less than 0.42 in float32, but is 42 %.
    """
    sign = -1 if falling else 1
    reached = np.flatnonzero(sign * np.asarray(values, np.float64).round(6) >= sign * round(target, 6))
    return int(reached[0]) if len(reached) else None


def summary_of(
    lines: Sequence[Line], identity: Mapping[str, Any], costs: Mapping[str, Any], *, new: int
) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
      lines: the lines of the evaluated rounds.
      identity: description of the run: method, headline, data set ...; first in the file.
      costs: timing, traffic, memory, environment; last in the file.
      new: number of clients that never train.
    """
    history = history_of(lines)
    rounds = history["round"].astype(int)
    by_point = {point: _round_chosen(history, point) for point in POINTS}
    chosen = {f"{kind}{point}": at for kind in ("", "new_", "validation_") for point, at in by_point.items()}
    chosen[""] = by_point[identity["headline"]]  # for the global model, which has no points
    metrics = {}
    for name, values in history.items():
        point, _, metric = name.rpartition(".")
        if not (name in _GLOBAL or (point and point in chosen and metric in _RISING)):
            metrics[name] = {"last": _known(values[-1])}
            continue
        best = int(np.argmax(np.where(np.isnan(values), -np.inf, values)))
        at = chosen[point]
        metrics[name] = {
            "last": _known(values[-1]),
            "best": _known(values[best]),
            "best_round": None if np.isnan(values[best]) else int(rounds[best]),
            "by_validation": None if at is None else _known(values[at]),
        }
    return {
        **identity,
        "diverged_round": _diverged(history),
        "personal": {point: _headline(history, metrics, chosen, point) for point in reversed(POINTS)},
        "new_clients": {point: _headline(history, metrics, chosen, f"new_{point}") for point in reversed(POINTS)}
        if new
        else None,
        "global": metrics["global"]["last"],
        "global_macro_f1": metrics["global_macro_f1"]["last"],
        "global_best": metrics["global"]["best"],
        "global_best_round": metrics["global"]["best_round"],
        "metrics": metrics,
        **costs,
    }


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _round_chosen(history: Mapping[str, np.ndarray], point: str) -> int | None:
    """The index of the round with the highest accuracy on validation samples; None if these are not scored."""
    accuracy = history.get(f"validation_{point}.accuracy")
    return None if accuracy is None or np.isnan(accuracy).all() else int(np.nanargmax(accuracy))


def _diverged(history: Mapping[str, np.ndarray]) -> int | None:
    """The first evaluated round at which the loss of a client's model is not finite, or None."""
    scored = ~np.isnan(history["pre.accuracy"])
    bad = scored & (~np.isfinite(history["pre.loss"]) | ~np.isfinite(history["post.loss"]))
    return int(history["round"][np.flatnonzero(bad)[0]]) if bad.any() else None


def _headline(
    history: Mapping[str, np.ndarray],
    metrics: Mapping[str, Mapping[str, Any]],
    chosen: Mapping[str, int | None],
    point: str,
) -> dict[str, float | None]:
    """The main numbers of an evaluation point, as ``summary.json`` names them.

    ``best`` is the round of the highest accuracy on the scored samples, ``by_validation`` that on validation samples.
    """
    accuracy, rounds = history[f"{point}.accuracy"], history["round"]
    at = chosen[point]

    def of(metric: str, which: str = "last") -> Any:
        return metrics[f"{point}.{metric}"][which]

    return {
        "last": of("accuracy"),
        "best": of("accuracy", "best"),
        "best_round": of("accuracy", "best_round"),
        "by_validation": of("accuracy", "by_validation"),
        "by_validation_round": None if at is None else int(rounds[at]),
        "mean_last_10": _known(accuracy[rounds > rounds[-1] - _LAST_ROUNDS].mean()),
        "std_clients": of("std_clients"),
        "worst_10_percent": of("worst_10_percent"),
        "weighted_last": of("weighted"),
        "weighted_best": of("weighted", "best"),
        "weighted_best_round": of("weighted", "best_round"),
        "macro_f1_last": of("macro_f1"),
        "macro_f1_union_last": of("macro_f1_union"),
        "i_local_last": of("i_local"),
        "hm_last": of("hm"),
    }


def client_table(
    manifest: Mapping[str, Any],
    evaluated_on: str,
    scores: Evaluation,
    new: int,
    rounds_participated: Int[np.ndarray, " N"],
) -> dict[str, Float[np.ndarray, " N"] | Int[np.ndarray, " N"]]:
    """One row per client, as in ``clients.csv``; scores are NaN for a client without samples to be scored on."""
    samples = np.asarray(manifest[f"n_{evaluated_on}"])
    client = np.arange(len(samples))
    table = {"client": client, "n_train": np.asarray(manifest["n_train"]), "n_test": samples}
    table["rounds_participated"] = rounds_participated
    if new:
        table["new"] = (client >= len(samples) - new).astype(int)
    if "attackers" in manifest:
        table["attacker"] = np.isin(client, manifest["attackers"]).astype(int)
    return table | _client_scores(samples, scores)


def client_rows(
    round: int, manifest: Mapping[str, Any], evaluated_on: str, scores: Evaluation
) -> dict[str, Float[np.ndarray, " N"] | Int[np.ndarray, " N"]]:
    """The rows of ``client_history.csv`` for an evaluated round: round, client, and the scores of `client_table`."""
    samples = np.asarray(manifest[f"n_{evaluated_on}"])
    known = {name: values.astype(np.float64) for name, values in _client_scores(samples, scores).items()}
    return {"round": np.full(len(samples), round), "client": np.arange(len(samples)), **known}


def stacked(tables: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Shaped[np.ndarray, " rows"]]:
    """Tables with the same columns, concatenated; empty tables are skipped."""
    held = [table for table in tables if table]
    return {name: np.concatenate([table[name] for table in held]) for name in held[0]} if held else {}


def _client_scores(samples: Int[np.ndarray, " N"], scores: Evaluation) -> dict[str, Float[np.ndarray, " N"]]:
    """Point and metric -> score of each client; NaN for a client without samples to be scored on."""
    table = {}
    for point, of in zip(POINTS, (scores.pre, scores.post), strict=True):
        # Counts are exact, accuracies in float32 are not: equal differences of them would seem to vary.
        accuracy = np.asarray(of.test.correct, np.float64) / np.maximum(samples, 1)
        found = {"accuracy": accuracy, "macro_f1": of.test.macro_f1, **of.own}
        for metric, values in found.items():
            table[f"{point}_{metric}"] = np.where(samples > 0, np.asarray(values), np.nan)
    return table


def label_table(
    manifest: Mapping[str, Any], evaluated_on: str, scores: Evaluation
) -> dict[str, Int[np.ndarray, " rows"]]:
    """One row per client and label on which it is scored, as in ``labels.csv``.

    Returns:
      ``client``, ``label``, the numbers of samples ``n_train`` and ``n_test``, and how many of the latter are predicted
      correctly at each point, ``pre_correct`` and ``post_correct``.
    """
    n_test = np.asarray(manifest[f"{evaluated_on}_class_counts"], np.int64)
    client, label = np.nonzero(n_test)
    n_train = np.asarray(manifest["train_class_counts"], np.int64)
    table = {"client": client, "label": label, "n_train": n_train[client, label], "n_test": n_test[client, label]}
    for point, of in zip(POINTS, (scores.pre, scores.post), strict=True):
        table[f"{point}_correct"] = np.rint(np.asarray(of.hits)[client, label]).astype(np.int64)
    return table


def label_accuracy(labels: Mapping[str, np.ndarray], classes: int, who: Int[np.ndarray, " clients"]) -> dict[str, Any]:
    """Point -> the accuracy on each label, over all samples of these clients; None for a label without samples.

    Args:
      labels: the table from `label_table`.
      classes: number of labels.
      who: the clients that count.
    """
    chosen = np.isin(labels["client"], who)

    def total(column: str) -> Int[np.ndarray, " labels"]:
        return np.bincount(labels["label"][chosen], weights=labels[column][chosen], minlength=classes)

    held = total("n_test")
    return {
        point: [float(hits / n) if n else None for hits, n in zip(total(f"{point}_correct"), held, strict=True)]
        for point in POINTS
    }


def majority_class(manifest: Mapping[str, Any], evaluated_on: str, new: int) -> dict[str, float] | None:
    """The scores of always answering the class of which a client has most training samples (the first of equals).

    Returns:
      ``accuracy``, the unweighted mean over the clients that train and are scored, and ``weighted`` by samples; None
      if there is no such client.
    """
    train, scored = (
        np.asarray(manifest[f"{part}_class_counts"], np.float64)[judged(manifest, new)]
        for part in ("train", evaluated_on)
    )
    correct = scored[np.arange(len(scored)), train.argmax(axis=1)]
    samples = scored.sum(axis=1)
    of = samples > 0
    if not of.any():
        return None
    return {"accuracy": float(np.mean(correct[of] / samples[of])), "weighted": float(correct.sum() / samples.sum())}


FIGURES = (
    "headline",
    "pre",
    "post",
    "best",
    "weighted",
    "weighted_best",
    "validation",
    "by_validation",
    "std_clients",
    "worst_10_percent",
    "global",
    "megabytes",
    "seconds_per_round",
)
"""The figures of a run that tables show, in this order."""
SCORES = ("pre.", "post.", "global_")
"""How the names in ``history`` begin that are figures, too: scores of the models, built-in ones and the user's own."""


def figures_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one run, from its summary; NaN if the run does not have a figure, or if it is not finite.

    Returns:
      Accuracies, in [0, 1], after the last round: ``headline``, at the point at which the method is judged; ``pre`` and
      ``post``; ``global``, of the global model. At the headline point: ``best`` over the evaluated rounds; ``weighted``
      by samples after the last round, and ``weighted_best`` (PFLlib's headline number); ``validation``, the highest
      accuracy on validation samples, by which hyperparameters are to be chosen (it equals ``best`` if the run is scored
      on validation samples); ``by_validation``, the accuracy on test samples in that round; ``std_clients`` and
      ``worst_10_percent``. Costs: ``megabytes`` in total, and ``seconds_per_round``. Then the scores in ``history``
      after the last round, under their names there: ``pre.NAME`` and ``post.NAME`` for each metric, built-in ones
      (``pre.macro_f1``, ``post.loss``) and the user's own, and of the global model ``global_NAME``.
    """
    judged = summary["personal"][summary["headline"]]
    metrics = summary.get("metrics", {})  # summaries of version 0.1 have none
    validated = metrics.get(f"validation_{summary['headline']}.accuracy", {})
    found = {
        "headline": judged["last"],
        **{point: summary["personal"][point]["last"] for point in POINTS},
        "best": judged["best"],
        "weighted": judged["weighted_last"],
        "weighted_best": judged.get("weighted_best"),
        "validation": judged["best"] if summary.get("evaluated_on") == "validation" else validated.get("best"),
        "by_validation": judged.get("by_validation"),
        "std_clients": judged["std_clients"],
        "worst_10_percent": judged["worst_10_percent"],
        "global": summary["global"],
        "megabytes": summary["traffic"]["megabytes_total"],
        "seconds_per_round": summary["timing"]["seconds_per_round"],
        **{name: of["last"] for name, of in metrics.items() if name.startswith(SCORES)},
    }
    # In a file, an infinite loss is null.
    return {name: math.nan if x is None or not math.isfinite(x) else float(x) for name, x in found.items()}


def without_nan(node: Any) -> Any:
    """Replaces NaN and infinite numbers by None, because JSON has only null (for example for a diverged loss)."""
    if isinstance(node, Mapping):
        return {key: without_nan(value) for key, value in node.items()}
    if isinstance(node, Iterable) and not isinstance(node, str):
        return [without_nan(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node
