"""What metrics are called, and which round of a run counts."""

import warnings

import numpy as np
import pytest

from fedjax_pfl.engine.scoring import Evaluation, Scored, Scores
from fedjax_pfl.experiment.statistics import paired_difference
from fedjax_pfl.experiment.summary import (
    figures_of,
    history_of,
    label_accuracy,
    label_table,
    line_of,
    majority_class,
    mean_line,
    summarize,
    summary_of,
)

COSTS = {"traffic": {"megabytes_total": 1.0}, "timing": {"seconds_per_round": 0.1}}


def scores(accuracy, n):
    correct, accuracy = np.multiply(accuracy, n), np.asarray(accuracy, np.float32)
    return Scores(correct, accuracy, accuracy / 2, accuracy / 3, np.full(len(n), 0.5, np.float32))


def lines(accuracies, validation=None, *, every=1):
    """The lines of a run of two clients, the second with three times the samples."""
    n = np.array([10, 30])
    manifest = {"n_train": [5, 5], "n_test": n.tolist(), "n_validation": [2, 2]}
    found = []
    for at, accuracy in enumerate(accuracies):
        held = None if validation is None else scores(np.full(2, validation[at]), np.array([2, 2]))
        point = Scored(scores(accuracy, n), held, np.zeros((2, 3)), {})
        shared = Scores(*(np.float32(0.25) for _ in Scores._fields))
        line = line_of(Evaluation(point, point, shared, {}, {}), manifest, "test", 0)
        found.append({"round": every * (at + 1), "train_loss": 1.0, **line, "megabytes": 1.0, "seconds": 1.0})
    return found


def summed_up(found):
    return summary_of(found, {"headline": "pre"}, COSTS, new=0)


def summary(*args, **options):
    return summed_up(lines(*args, **options))


CURVE = [(0.2, 0.9), (0.9, 0.5), (0.4, 0.4)]


def test_weighted_and_unweighted_have_a_best_round_each():
    found = summary(CURVE)["personal"]["pre"]
    assert (found["best"], found["best_round"]) == (pytest.approx(0.7), 2)
    assert (found["weighted_best"], found["weighted_best_round"]) == (pytest.approx((2 + 27) / 40), 1)
    assert found["weighted_last"] == pytest.approx(0.4)
    assert found["by_validation"] is found["by_validation_round"] is None
    figures = figures_of(summary(CURVE))
    assert figures["weighted_best"] == found["weighted_best"]
    assert np.isnan(figures["by_validation"])
    assert figures_of(summary(CURVE[:2]))["weighted"] == pytest.approx((9 + 15) / 40)


def test_scores_of_the_last_round_are_figures_if_they_are_finite():
    found = lines(CURVE)
    for at, line in enumerate(found):
        line["pre"]["mine"], line["post"]["loss"] = at + 0.5, np.inf
    found = figures_of(summed_up(found))
    assert (found["pre.mine"], found["pre.accuracy"], found["global_macro_f1"]) == (2.5, pytest.approx(0.4), 0.25)
    assert np.isnan(found["post.loss"])
    assert not {"round", "train_loss", "seconds", "pre.nothing"} & found.keys()


def test_the_round_can_be_chosen_on_validation_samples():
    found = summary(CURVE, [0.3, 0.5, 0.6])
    judged = found["personal"]["pre"]
    assert (judged["by_validation"], judged["by_validation_round"]) == (pytest.approx(0.4), 3)
    assert found["metrics"]["pre.weighted"]["by_validation"] == pytest.approx(0.4)
    assert figures_of(found)["by_validation"] == judged["by_validation"]
    assert figures_of(found)["validation"] == pytest.approx(0.6)
    of_these_alone = {**summary(CURVE), "evaluated_on": "validation"}
    assert figures_of(of_these_alone)["validation"] == figures_of(of_these_alone)["best"] == pytest.approx(0.7)


def test_the_round_is_the_same_for_new_clients_and_that_of_the_headline_for_the_global_model():
    found = lines(CURVE, [0.3, 0.6, 0.5])
    for at, line in enumerate(found):
        line["validation_post"] = {**line["validation_post"], "accuracy": [0.6, 0.5, 0.3][at]}
        line |= {"new_pre": line["pre"], "new_post": line["post"], "global": [0.1, 0.2, 0.3][at]}
    for headline, at in (("pre", 1), ("post", 0)):
        of = summary_of(found, {"headline": headline}, COSTS, new=1)
        assert of["metrics"]["global"]["by_validation"] == history_of(found)["global"][at]
        assert of["new_clients"]["pre"]["by_validation"] == pytest.approx(0.7)
        assert of["new_clients"]["post"]["by_validation_round"] == of["personal"]["post"]["by_validation_round"] == 1


def test_the_last_ten_rounds_are_rounds_not_evaluations():
    curve = [(x, x) for x in np.linspace(0.1, 0.8, 8)]
    assert summary(curve, every=1)["personal"]["pre"]["mean_last_10"] == pytest.approx(np.mean(curve))
    assert summary(curve, every=5)["personal"]["pre"]["mean_last_10"] == pytest.approx(0.75)
    assert summary(curve, every=10)["personal"]["pre"]["mean_last_10"] == pytest.approx(0.8)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
@pytest.mark.parametrize("point", ["pre", "post"])
def test_a_run_whose_answers_are_no_numbers_has_diverged(point, loss):
    found = lines(CURVE)
    assert summed_up(found)["diverged_round"] is None
    found[1][point]["loss"] = loss
    assert summed_up(found)["diverged_round"] == 2


def test_where_nobody_is_scored_there_are_no_numbers_and_nothing_has_diverged():
    manifest = {"n_train": [5, 5], "n_test": [0, 10], "n_validation": [0, 2]}
    of = scores([0.0, 0.5], np.array([1, 10]))
    point = Scored(of, None, np.zeros((2, 3)), {"mine": np.ones(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        line = line_of(Evaluation(point, point, None, {}, {}), manifest, "test", 1)  # the second client is new
        found = summed_up([{"round": 1, "train_loss": 1.0, **line, "megabytes": 1.0, "seconds": 1.0}])
    assert line["new_pre"]["accuracy"] == pytest.approx(0.5)
    assert np.isnan(line["pre"]["accuracy"])
    assert np.isnan(line["pre"]["mine"])
    assert found["personal"]["pre"]["last"] is found["diverged_round"] is None
    assert found["personal"]["pre"]["mean_last_10"] is None
    counts = {"train_class_counts": [[2, 3], [1, 4]], "test_class_counts": [[0, 0], [5, 5]]}
    assert majority_class(manifest | counts, "test", 1) is None


def test_a_diagnostic_may_have_a_dot_and_the_name_of_a_metric():
    found = lines(CURVE)
    for number, line in enumerate(found):
        line["diagnostics"] = {"head.accuracy": 0.5 - 0.1 * number}
    assert summed_up(found)["metrics"]["diagnostics.head.accuracy"] == {"last": pytest.approx(0.3)}


def test_old_and_new_names_agree():
    found = summary(CURVE)
    for point in ("pre", "post"):
        table = found["personal"][point]
        names = {"last": "accuracy", "weighted_last": "weighted", "macro_f1_last": "macro_f1", "hm_last": "hm"}
        for old, metric in names.items():
            assert table[old] == found["metrics"][f"{point}.{metric}"]["last"]
    assert found["global"] == found["metrics"]["global"]["last"] == 0.25


def test_each_main_number_is_that_of_its_metric_after_the_last_round():
    """All metrics fall, so that their best values are others."""
    found, metrics = lines(CURVE), list(lines(CURVE[:1])[0]["pre"])
    for at, line in enumerate(found):
        for number, point in enumerate(("pre", "post")):
            line[point] = {metric: 0.9 - 0.3 * at + 0.02 * m + 0.01 * number for m, metric in enumerate(metrics)}
        line |= {"global": 0.8 - 0.3 * at, "global_macro_f1": 0.7 - 0.3 * at}
    summary = summed_up(found)
    for number, point in enumerate(("pre", "post")):
        table = summary["personal"][point]
        names = {"last": "accuracy", "std_clients": "std_clients", "worst_10_percent": "worst_10_percent"}
        names |= {f"{metric}_last": metric for metric in ("weighted", "macro_f1", "macro_f1_union", "i_local", "hm")}
        for name, metric in names.items():
            expected = 0.9 - 0.6 + 0.02 * metrics.index(metric) + 0.01 * number
            assert table[name] == pytest.approx(expected), name
    of_all = [summary[name] for name in ("global", "global_macro_f1", "global_best", "global_best_round")]
    assert of_all == pytest.approx([0.2, 0.1, 0.8, 1])


def test_the_mean_of_lines_is_taken_number_by_number():
    first, second = lines(CURVE[:1])[0], lines(CURVE[1:2])[0]
    mean = mean_line([first, {**second, "round": 1}])
    assert (mean["round"], type(mean["round"])) == (1, int)
    assert mean["pre"]["accuracy"] == pytest.approx((0.55 + 0.7) / 2)
    assert mean_line([{**first, "global": None}, first])["global"] is None
    assert mean_line([first]) == first


def test_lines_of_several_metrics_stay_in_their_rounds():
    found = history_of([{"round": 1, "pre": {"accuracy": 0.5}}, {"round": 2, "pre": {"accuracy": 1.0, "mine": 0.25}}])
    assert {name: values.tolist()[1:] for name, values in found.items()} == {
        "round": [2],
        "pre.accuracy": [1.0],
        "pre.mine": [0.25],
    }
    assert np.isnan(found["pre.mine"][0])
    assert found["round"].dtype.kind == "i"


def test_clients_without_samples_are_left_out():
    found = summarize(scores([0.5, 0.0, 1.0], np.array([4, 0, 2])), np.array([4, 0, 2]))
    assert found["accuracy"] == 0.75
    assert found["weighted"] == pytest.approx(4 / 6)
    assert found["macro_f1_union"] == pytest.approx(0.25)


def test_equal_gains_are_equal_numbers():
    """One more correct answer of the first client with each seed: float32's rounding would make a test of it."""
    n, rng = np.array([7, 8, 9, 11, 15]), np.random.default_rng(0)
    figures = []
    for more in (0, 1):
        correct = [np.array([3 + seed + more, *rng.permuted(n[1:] - 5)], np.float32) for seed in range(3)]
        rng = np.random.default_rng(0)  # the other clients' answers are the same
        of = [Scores(one, one / n.astype(np.float32), one, one, one) for one in correct]
        figures.append({seed: summarize(one, n)["accuracy"] for seed, one in enumerate(of)})
    found = paired_difference(figures[1], figures[0])
    assert found.mean == pytest.approx(1 / 7 / 5)
    assert np.isnan([found.low, found.high, found.p]).all()


def test_of_equal_rounds_the_first_is_the_best():
    """In binary, 0.1 + 0.2 is more than 0.3."""
    found = summary([(0.0, 0.3), (0.1, 0.2)], [0.5, 0.5])["personal"]["pre"]
    assert (found["best"], found["best_round"], found["by_validation_round"]) == (0.15, 1, 1)


@pytest.mark.parametrize(("clients", "worst"), [(9, 1), (19, 1), (20, 2)])
def test_the_worst_tenth_of_the_clients_is_rounded_down_to_one_at_least(clients, worst):
    accuracy = np.linspace(0.9, 0.1, clients)
    found = summarize(scores(accuracy, np.full(clients, 4)), np.full(clients, 4))
    assert found["worst_10_percent"] == pytest.approx(accuracy[-worst:].mean())


# --- Labels and controls ---------------------------------------------------------------------------------------------

# Three clients, the last of which is new and never trains; class 2 is nobody's to be tested on.
COUNTS = {
    "n_train": [6, 3, 4],
    "train_class_counts": [[4, 2, 0], [1, 1, 1], [0, 4, 0]],
    "test_class_counts": [[3, 1, 0], [0, 4, 0], [1, 1, 0]],
    "validation_class_counts": [[1, 0, 0], [0, 0, 2], [0, 0, 0]],
}


def test_a_row_for_each_label_that_a_client_is_scored_on():
    nothing = Scores(*(np.zeros(3, np.float32) for _ in Scores._fields))
    hits = np.float32([[2, 1, 0], [0, 3, 0], [1, 0, 0]])
    of = Evaluation(Scored(nothing, None, hits, {}), Scored(nothing, None, 0 * hits, {}), None, {}, {})
    table = label_table(COUNTS, "test", of)
    rows = list(zip(*(table[name].tolist() for name in ("client", "label", "n_train", "n_test")), strict=True))
    assert rows == [(0, 0, 4, 3), (0, 1, 2, 1), (1, 1, 1, 4), (2, 0, 0, 1), (2, 1, 4, 1)]
    assert table["pre_correct"].tolist() == [2, 1, 3, 1, 0]
    assert table["post_correct"].tolist() == [0] * 5
    # The two clients that train: class 0 two of three, class 1 four of five.
    assert label_accuracy(table, 3, np.arange(2)) == {
        "pre": [pytest.approx(2 / 3), 0.8, None],
        "post": [0.0, 0.0, None],
    }
    assert label_accuracy(table, 3, np.arange(3))["pre"] == [0.75, pytest.approx(4 / 6), None]


def test_the_majority_class_is_that_of_the_training_samples():
    # Client 0 answers class 0: three of four; client 1, undecided, class 0 as well: none of four; client 2 class 1.
    assert majority_class(COUNTS, "test", 1) == {"accuracy": 0.375, "weighted": 0.375}
    assert majority_class(COUNTS, "test", 0) == {"accuracy": pytest.approx(1.25 / 3), "weighted": 0.4}
    # A client that is not scored does not count.
    assert majority_class(COUNTS, "validation", 0) == {"accuracy": 0.5, "weighted": pytest.approx(1 / 3)}


def test_diagnostics_have_a_last_value_and_no_best():
    found = []
    for at, line in enumerate(lines(CURVE)):
        found.append({**line, "diagnostics": {"alpha": [np.nan, 0.5, 0.25][at]}})
    assert summed_up(found)["metrics"]["diagnostics.alpha"] == {"last": 0.25}


def test_own_metrics_of_new_clients_are_theirs_alone():
    """A config's own metric is the unweighted mean over the clients that a table is of, and that are scored."""
    n = np.array([10, 30, 20, 0])
    manifest = {"n_train": [5, 5, 5, 5], "n_test": n.tolist(), "n_validation": [2, 2, 2, 2]}
    of = Scored(scores(np.full(4, 0.5), n), None, np.zeros((4, 3)), {"mine": np.float32([0.125, 0.375, 0.75, 9.0])})
    line = line_of(Evaluation(of, of, None, {}, {}), manifest, "test", 2)
    for point in ("pre", "post"):
        assert line[point]["mine"] == 0.25
        assert line[f"new_{point}"]["mine"] == 0.75


@pytest.mark.parametrize("manifest", [{}, {"attackers": [1]}], ids=["new", "new and malicious"])
def test_validation_scores_are_of_those_that_are_judged(manifest):
    """By them a round, and hyperparameters, are chosen: neither new clients nor malicious ones have a say."""
    n, held = np.array([10, 30, 20]), np.array([2, 4, 8])
    manifest = {"n_train": [5, 5, 5], "n_test": n.tolist(), "n_validation": held.tolist(), **manifest}
    of = Scored(scores(np.full(3, 0.5), n), scores(np.array([0.5, 0.25, 1.0]), held), np.zeros((3, 3)), {})
    line = line_of(Evaluation(of, of, None, {}, {}), manifest, "test", 1)
    expected = 0.5 if "attackers" in manifest else 0.375
    assert line["validation_pre"]["accuracy"] == line["validation_post"]["accuracy"] == expected
