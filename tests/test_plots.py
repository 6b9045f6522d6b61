"""Pictures: what is drawn is what NumPy computes from results that are made by hand."""

import itertools
import json
import re
import sys

import numpy as np
import pytest

from fedjax_pfl import (
    Comparison,
    Config,
    ConfigError,
    Result,
    Sweep,
    plot_attention,
    plot_clients,
    plot_confusion,
    plot_features,
    plot_leakage,
    plot_partition,
    plot_sensitivity,
)
from fedjax_pfl.cli.commands import main
from fedjax_pfl.experiment.html import partition_html
from fedjax_pfl.experiment.plots.style import class_colours, legend_above, line_style, quantity
from fedjax_pfl.experiment.tables import Cell

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.cbook import is_math_text  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

CONFIG = Config(data={"source": "digits", "clients": 4}, method={"name": "fedavg"}, training={"rounds": 4})
SETTINGS = {"method.name": "fedavg"}
PARTITION = {"class_counts": [[0, 4, 1], [9, 0, 0], [1, 2, 3], [0, 0, 25]], "hash": "ab", "notes": []}


@pytest.fixture(autouse=True)
def no_figure_stays():
    yield
    pyplot.close("all")


def history(*accuracies, rounds=None, megabytes=1.0, **others):
    rounds = np.arange(1, len(accuracies) + 1) if rounds is None else np.array(rounds)
    found = {"round": rounds, "seconds": 5 + 0.5 * rounds, "megabytes": megabytes * rounds}
    return {**found, "pre.accuracy": np.array(accuracies), "global": np.full(len(rounds), np.nan), **others}


def summary(pre, **others):
    def judged(last):
        return {"last": last, "best": last, "std_clients": 0.1, "worst_10_percent": 0.1, "weighted_last": last}

    cost = {"traffic": {"megabytes_total": 1.0}, "timing": {"seconds_per_round": 0.1}}
    return {"headline": "pre", "personal": {"pre": judged(pre), "post": judged(0.5)}, "global": None, **cost, **others}


def cell(values, seed=0, pre=0.5, clients=None, curve=None):
    values = {**values, "run.seed": seed}
    config = CONFIG.replace({"run.seed": seed, "method.name": values.get("method.name", "fedavg")})
    return Cell(values, config, summary(pre), clients, curve)


def result(**fields):
    empty = {"labels": {}, "partition": PARTITION, "exported": {}, "kept": None, "client_history": {}}
    run = {"summary": summary(0.5), "history": history(0.2, 0.4), "clients": {}, "config": CONFIG}
    return Result(**{**empty, **run, **fields})


# Method -> the accuracies of seeds 0, 1 and 2, and the megabytes of a round; a run of ditto ended early.
CURVES = {"local": ([0.2, 0.4, 0.6], [0.3, 0.5, 0.5], [0.1, 0.9, 0.7]), "ditto": ([0.5, 0.6, 0.7], [0.7, 0.8])}


def compared():
    cells = [
        cell({"method.name": method}, seed, curve=history(*values, megabytes=1.0 + seed))
        for method, runs in CURVES.items()
        for seed, values in enumerate(runs)
    ]
    broken = Cell({"method.name": "fedrep", "run.seed": 0}, CONFIG, error="it failed")
    return Comparison(CONFIG, [*cells, broken], "local")


def band(collection):
    """Lower and upper edge of a band, by its corners."""
    corners = np.unique(collection.get_paths()[0].vertices, axis=0)
    places = np.unique(corners[:, 0])
    at = [corners[corners[:, 0] == place, 1] for place in places]
    return places, [of.min() for of in at], [of.max() for of in at]


@pytest.mark.parametrize("errorbar", ["sd", "ci", None])
def test_curves_are_means_over_seeds_with_a_band(errorbar):
    ax = compared().plot(errorbar=errorbar)
    local = 100 * np.array(CURVES["local"])
    ditto = 100 * np.array([run[:2] for run in CURVES["ditto"]])  # the rounds that both seeds have
    assert [line.get_label() for line in ax.get_lines()] == ["local", "ditto"]
    for line, values in zip(ax.get_lines(), (local, ditto), strict=True):
        np.testing.assert_allclose(line.get_xdata(), np.arange(1, values.shape[1] + 1))
        np.testing.assert_allclose(line.get_ydata(), values.mean(axis=0))
    assert len(ax.collections) == (0 if errorbar is None else 2)
    # Student's 97.5 % quantiles with 2 degrees of freedom and 1, over the root of the number of seeds.
    factors = {"sd": (1, 1), "ci": (4.302653 / 3**0.5, 12.706205 / 2**0.5)}.get(errorbar, ())
    for drawn, values, factor in zip(ax.collections, (local, ditto), factors, strict=False):
        mean, half = values.mean(axis=0), factor * values.std(axis=0, ddof=1)
        for found, expected in zip(band(drawn), (range(1, 1 + len(mean)), mean - half, mean + half), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("round", "PRE accuracy (%)")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["local", "ditto"]


def test_curves_over_megabytes_and_seconds():
    swept = Sweep(compared().cells, SETTINGS)
    ax = swept.plot(x="megabytes")
    np.testing.assert_allclose(ax.get_lines()[0].get_xdata(), 2.0 * np.arange(1, 4))  # mean of 1, 2 and 3 a round
    np.testing.assert_allclose(ax.get_lines()[1].get_xdata(), 1.5 * np.arange(1, 3))
    assert ax.get_xlabel() == "traffic (MB)"
    ax = swept.plot("seconds", "seconds")
    np.testing.assert_allclose(ax.get_lines()[0].get_xdata(), [5.5, 6.0, 6.5])
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), [5.5, 6.0, 6.5])  # no share: not in %
    assert ax.get_xlabel() == "time since the start (s)"


def test_a_run_alone_and_a_second_curve_beside_it():
    run = result(history=history(0.2, 0.4, **{"post.accuracy": np.array([0.3, 0.6])}))
    ax = run.plot()
    ax.axhline(25)  # of somebody's own, without a name
    assert (len(ax.get_lines()), len(ax.collections), ax.get_legend()) == (2, 0, None)
    assert run.plot("post.accuracy", ax=ax) is ax
    drawn = ax.get_lines()[0], ax.get_lines()[2]
    np.testing.assert_allclose([line.get_ydata() for line in drawn], [[20, 40], [30, 60]])
    assert [line.get_label() for line in drawn] == ["fedavg", "fedavg, post.accuracy"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["fedavg", "fedavg, post.accuracy"]
    assert drawn[0].get_color() != drawn[1].get_color()
    assert ax.get_ylabel() == "PRE accuracy (%), POST accuracy (%)"
    assert len(pyplot.get_fignums()) == 1
    long = result(history=history(*np.linspace(0, 1, 100))).plot()
    assert long.get_lines()[0].get_markevery() == 13  # eight markers, to tell it from others


def test_a_method_without_the_metric_has_no_line():
    cells = compared().cells
    cells[0].history["global"] = np.array([0.1, np.nan, 0.3])
    ax = Sweep(cells, SETTINGS).plot("global", errorbar=None)
    assert [line.get_label() for line in ax.get_lines()] == ["local"]
    np.testing.assert_array_equal(ax.get_lines()[0].get_ydata(), [10, np.nan, 30])
    assert ax.get_ylabel() == "global accuracy (%)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"metric": "pre.acuracy"},
            "metric = 'pre.acuracy' is not usable: one of seconds, megabytes, pre.accuracy, glo",
        ),
        ({"metric": "round"}, "metric = 'round' is not usable: one of "),
        ({"metric": "global"}, "metric = 'global' is not usable: one that a run has; none of these has a value of it"),
        ({"x": "epochs"}, "x = 'epochs' is not usable: one of round, seconds, megabytes"),
        (
            {"errorbar": "se"},
            "errorbar = 'se' is not usable: sd (standard deviation), ci (95 % interval of the mean) or",
        ),
    ],
)
def test_a_curve_that_there_is_not_is_one_line_and_no_empty_figure(arguments, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        compared().plot(**arguments)
    assert pyplot.get_fignums() == []


def test_names_are_shown_as_they_are():
    """matplotlib takes dollars for a formula, and hides what begins with an underscore."""
    names = ["_fast", "a$b$c", "plain"]

    def named(name, **others):
        return Cell({"method.name": name, **others}, CONFIG, summary(0.5), OTHERS, history(0.2, 0.4))

    cells = [named(name) for name in names]
    swept = [named(name, **{"training.lr": lr}) for name in names for lr in (0.1, 0.2)]
    curves = Comparison(CONFIG, cells, "plain").plot()
    for ax in (curves, plot_sensitivity(Sweep(swept, SETTINGS), "training.lr")):
        texts = [text.get_text() for text in ax.get_legend().get_texts()]
        assert texts == [" _fast", r"a\$b\$c", "plain"]
        assert not any(map(is_math_text, texts))  # the text is then shown without the backslashes
    rows = [text.get_text() for text in plot_clients(Comparison(CONFIG, cells, "plain")).get_yticklabels()]
    assert rows == texts


def test_nothing_has_ended():
    failed = Comparison(CONFIG, compared().failed, "fedrep")
    for draw in (failed.plot, lambda: plot_clients(failed)):
        with pytest.raises(ConfigError, match=r"^runs = \[\] is not usable: one run or more that has ended"):
            draw()


def test_lines_differ_without_colours_and_legends_cover_nothing():
    styles = [line_style(number) for number in range(64)]
    assert len({tuple(style.values()) for style in styles}) == 64
    assert len({(style["linestyle"], style["marker"]) for style in styles[:8]}) == 8
    greys = [np.dot(matplotlib.colors.to_rgb(c), [0.3, 0.59, 0.11]) for c in class_colours(10).cmap.colors]
    assert (np.diff(greys) > 0).sum() >= 7  # from dark to light, on the whole
    cells = [cell({"method.name": "local", "training.lr": lr}, curve=history(lr, 1.0)) for lr in np.arange(12) / 12]
    ax = Sweep(cells, SETTINGS).plot()
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().ymin >= ax.get_window_extent().ymax
    assert ax.get_window_extent().height > 1.5 * ax.figure.dpi  # inches: the figure has grown by the legend


@pytest.mark.parametrize(
    ("metric", "factor", "label"),
    [
        ("pre.accuracy", 100, "PRE accuracy (%)"),
        ("validation_post.accuracy", 100, "validation POST accuracy (%)"),
        ("new_pre.macro_f1", 100, "new PRE macro-F1 (%)"),
        ("global_macro_f1", 100, "global macro-F1 (%)"),
        ("pre.loss", 1, "PRE loss"),
        ("train_loss", 1, "training loss"),
        ("diagnostics.attention", 1, "diagnostics attention"),
    ],
)
def test_shares_are_drawn_in_percent_and_all_else_as_it_is(metric, factor, label):
    assert quantity(metric) == (factor, label)


# Client 1 is malicious, client 4 new, client 2 has no samples to be scored on.
CLIENTS = {"pre_accuracy": [0.5, 0.0, np.nan, 0.9, 0.1], "post_accuracy": [0.6, 0.0, np.nan, 1.0, 0.1]}
CLIENTS = {name: np.array(values) for name, values in CLIENTS.items()} | {"attacker": np.array([0, 1, 0, 0, 0])}
CLIENTS |= {"new": np.array([0, 0, 0, 0, 1])}
OTHERS = {"pre_accuracy": np.array([0.2, 0.4, 0.9]), "post_accuracy": np.array([0.3, 0.5, 1.0])}


def with_clients():
    local = [cell({"method.name": "local"}, seed, clients=of) for seed, of in enumerate((CLIENTS, OTHERS))]
    ditto = [cell({"method.name": "ditto"}, 0, clients=OTHERS)]
    return Comparison(CONFIG, [*local, *ditto], "local")


@pytest.mark.parametrize("kind", ["violin", "strip"])
def test_clients_of_all_seeds_side_by_side(kind):
    ax = plot_clients(with_clients(), kind, point="pre")
    expected = [[50, 90, 20, 40, 90], [20, 40, 90]]
    assert len(ax.collections) == 2
    for row, (drawn, values) in enumerate(zip(ax.collections, expected, strict=True)):
        if kind == "strip":
            np.testing.assert_allclose(drawn.get_offsets()[:, 0], values)
            heights = drawn.get_offsets()[:, 1] - row
            assert (np.abs(heights) <= 0.25).all()
            assert len(set(heights)) == len(values)
        else:
            x, y = drawn.get_paths()[0].vertices.T
            np.testing.assert_allclose([x.min(), x.max()], [min(values), max(values)])
            np.testing.assert_allclose([y.min(), y.max()], [row - 0.4, row + 0.4])
        median, mean = ax.get_lines()[2 * row : 2 * row + 2]
        np.testing.assert_allclose(median.get_xdata(), [np.median(values)] * 2)
        np.testing.assert_allclose([mean.get_xdata()[0], mean.get_ydata()[0]], [np.mean(values), row])
    assert [text.get_text() for text in ax.get_yticklabels()] == ["local", "ditto"]
    assert ax.get_ylim() == (1.5, -0.5)
    assert ax.get_xlabel() == "PRE accuracy of a client (%)"


def test_a_thousand_clients_do_not_cover_the_strip():
    many = {f"{point}_accuracy": np.linspace(0, 1, 1000) for point in ("pre", "post")}
    ax = plot_clients(result(clients=many), "strip")
    width, height = 72 * ax.bbox.size / ax.figure.dpi
    strip = 0.5 * width * height  # of the one row, which is as high as the axes
    assert 1000 * ax.collections[0].get_sizes()[0] < 0.5 * strip


def test_clients_of_one_run():
    ax = plot_clients(result(clients=CLIENTS), "strip", point="post")
    np.testing.assert_allclose(ax.collections[0].get_offsets()[:, 0], [60, 100])
    assert ax.get_xlabel() == "POST accuracy of a client (%)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "box"}, "kind = 'box' is not usable: one of violin, strip"),
        ({"point": "global"}, "point = 'global' is not usable: pre (after aggregation) or post (after local training)"),
    ],
)
def test_clients_that_cannot_be_drawn_so(arguments, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        plot_clients(with_clients(), **arguments)


def test_bubbles_have_areas_as_the_numbers_of_samples():
    ax = plot_partition(PARTITION)
    counts = np.array(PARTITION["class_counts"])
    (drawn,) = ax.collections
    places = np.array([(client, label) for client in range(4) for label in range(3) if counts[client, label]])
    np.testing.assert_array_equal(drawn.get_offsets(), places)
    held = counts[counts > 0]
    np.testing.assert_allclose(drawn.get_sizes() / drawn.get_sizes().max(), held / 25)
    handles = ax.get_legend().legend_handles
    assert [handle.get_label() for handle in handles] == ["1", "6", "25"]
    areas = [handle.get_markersize() ** 2 for handle in handles]
    np.testing.assert_allclose(areas, drawn.get_sizes().max() * np.array([1, 6, 25]) / 25)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("client", "class")


def test_shades_order_clients_by_the_class_that_they_have_most_of():
    ax = plot_partition(PARTITION, "shades")
    (drawn,) = ax.collections
    counts = np.array(PARTITION["class_counts"])
    np.testing.assert_array_equal(drawn.get_array(), counts[[1, 0, 3, 2]].T)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("client, by main class", "class")
    assert ax.figure.axes[1].get_ylabel() == "samples"  # the colour bar
    assert ax.get_legend() is None


def test_a_quarter_of_the_most_samples_is_half_as_dark():
    (drawn,) = plot_partition(PARTITION, "shades").collections
    np.testing.assert_allclose(drawn.norm([0, 25 / 4, 25]), [0, 0.5, 1])


@pytest.mark.parametrize(("clients", "classes"), [(5, 10), (20, 10), (4, 3), (20, 2), (5, 40)])
def test_circles_of_few_clients_keep_to_their_rows(clients, classes):
    ax = plot_partition({"class_counts": np.ones((clients, classes), int).tolist()})
    sides = 72 * ax.bbox.size / ax.figure.dpi / (clients, classes)
    widest = np.sqrt(ax.collections[0].get_sizes().max())
    assert 4 <= widest <= max(1.2 * sides.min(), 8)
    assert widest <= 16  # the room of a mark in the legend
    assert not ax.collections[0].get_clip_on()


@pytest.mark.parametrize(
    ("clients", "classes", "label"),
    [
        (150, 10, "client"),
        (200, 10, "client, by main class"),
        (20, 100, "client, by main class"),
        (50, 2, "client"),
        (150, 2, "client, by main class"),
    ],
)
def test_circles_too_small_or_too_close_to_tell_apart_are_shades(clients, classes, label):
    counts = np.eye(classes, dtype=int)[np.arange(clients) % classes]
    assert plot_partition({"class_counts": counts.tolist()}).get_xlabel() == label


def test_a_single_round_client_or_class_has_ticks_at_whole_numbers():
    run = result(history={name: values[:1] for name, values in result().history.items()})
    for ax in (run.plot(), plot_partition({"class_counts": [[3]]}), plot_partition({"class_counts": [[3]]}, "shades")):
        for axis in [ax.xaxis] if ax.get_xlabel() == "round" else [ax.xaxis, ax.yaxis]:
            assert all(float(tick).is_integer() for tick in axis.get_ticklocs())


def test_rounds_have_round_numbers():
    """Every fifth round is evaluated, up to round 30."""
    rounds = np.arange(5.0, 31.0, 5.0)
    ax = result(history={"round": rounds, "pre.accuracy": rounds / 100}).plot()
    shown = [tick for tick in ax.get_xticks() if 5 <= tick <= 30]
    np.testing.assert_array_equal(shown, rounds)


def test_bars_stack_the_classes_of_a_client():
    ax = plot_partition(PARTITION, "bars")
    counts = np.array(PARTITION["class_counts"])
    for label, bars in enumerate(ax.containers):
        np.testing.assert_array_equal([bar.get_height() for bar in bars], counts[:, label])
        np.testing.assert_array_equal([bar.get_y() for bar in bars], counts[:, :label].sum(axis=1))
        np.testing.assert_allclose([bar.get_x() + bar.get_width() / 2 for bar in bars], range(4))
    colours = {to_hex(bars[0].get_facecolor()) for bars in ax.containers}
    assert colours == {"#000000", "#332288", "#882255"}
    assert len(ax.containers) == 3
    assert ax.figure.axes[1].get_ylabel() == "class"  # the colour bar


def test_a_label_longer_than_the_axes_are_wide_takes_several_lines():
    ax = pyplot.subplots(figsize=(3.3, 2.5))[1]
    name = "fedavg_ft, run.out=runs/quickstart-fedavg_ft-20261126-054619"
    legend_above(ax, [*ax.plot([1, 2], label=name), *ax.plot([2, 1], label="local")])
    first, second = (text.get_text() for text in ax.get_legend().get_texts())
    assert "".join(first.split()) == "".join(name.split())
    assert second == "local"
    ax.figure.draw_without_rendering()
    assert ax.get_legend().get_window_extent().x1 <= ax.figure.bbox.x1


def test_more_classes_than_colours_by_name():
    shades = {to_hex(class_colours(40).to_rgba(label)) for label in range(40)}
    assert len(shades) == 40
    assert plot_partition({"class_counts": np.ones((3, 40), int).tolist()}, "bars").containers[39][0].get_y() == 39


def test_what_is_no_partition():
    for given, name in ((result(), "Result"), ({"sizes": []}, "dict")):
        with pytest.raises(ConfigError, match=f"^partition = '{name}' is not usable: Result.partition, or what partit"):
            plot_partition(given)
        with pytest.raises(ConfigError, match=f"^partition = '{name}' is not usable: Result.partition, or what partit"):
            partition_html(given)
    with pytest.raises(ConfigError, match=r"^kind = 'pie' is not usable: one of bubbles, shades, bars"):
        plot_partition(PARTITION, "pie")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_clients("runs/a"), "runs = 'str' is not usable: a result, comparison or sweep"),
        (lambda: plot_clients([result()]), "runs = 'list' is not usable: a result, comparison or sweep"),
        (lambda: plot_confusion(compared()), "result = 'Comparison' is not usable: what simulate(...) gives"),
        (lambda: plot_features("runs/a"), "result = 'str' is not usable: what simulate(...) gives"),
        (lambda: plot_attention(compared(), []), "result = 'Comparison' is not usable: what simulate(...) gives"),
        (lambda: plot_sensitivity(result(), "training.lr"), "sweep = 'Result' is not usable: what sweep(...) gives"),
        (lambda: plot_leakage(result()), "found = 'Result' is not usable: what leakage(...) gives, or several"),
        (lambda: plot_leakage({"a": result()}), "found = 'Result' is not usable: what leakage(...) gives, or several"),
    ],
)
def test_what_cannot_be_drawn_at_all(draw, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        draw()


EXPORTED = {
    "client": np.array([0, 0, 0, 0, 3, 3]),
    "label": np.array([0, 0, 0, 0, 2, 2]),
    "prediction": np.array([0, 0, 1, -1, 2, 0]),
}


def test_a_confusion_matrix():
    run = result(exported=EXPORTED)
    nothing = [np.nan] * 3
    shares = np.ma.filled(plot_confusion(run).images[0].get_array(), np.nan)
    np.testing.assert_array_equal(shares, [[50, 25, 0], nothing, [50, 0, 50]])  # a quarter of class 0 has no answer
    ax = plot_confusion(run, 3)
    np.testing.assert_array_equal(np.ma.filled(ax.images[0].get_array(), np.nan), [nothing, nothing, [50, 0, 50]])
    assert {(text.get_position(), text.get_text()) for text in ax.texts} == {((0, 2), "50"), ((2, 2), "50")}
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("predicted class", "true class")


def featured(samples=60, clients=2):
    """Three classes far apart, each in a direction of its own of five."""
    rng = np.random.default_rng(0)
    label = np.arange(samples) % 3
    features = 10 * np.eye(5)[label] * [1, 1.5, 2, 1, 1] + rng.normal(0, 0.1, (samples, 5))
    client = np.arange(samples) % (3 * clients) // 3
    return {"client": client, "label": label, "features": features.astype(np.float32)}


def test_features_in_the_two_directions_of_most_variance():
    exported = featured()
    ax = plot_features(result(exported=exported), method="pca")
    points = np.zeros((60, 2))
    for client, drawn in enumerate(ax.collections[:2]):
        points[exported["client"] == client] = drawn.get_offsets()
        np.testing.assert_array_equal(drawn.get_array(), exported["label"][exported["client"] == client])
    x = exported["features"].astype(float)
    _, sizes, directions = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    expected = (x - x.mean(axis=0)) @ directions[:2].T
    np.testing.assert_allclose(np.abs(points), np.abs(expected), rtol=1e-6)  # signs are anybody's
    shares = 100 * sizes**2 / np.sum(sizes**2)
    assert ax.get_xlabel() == f"component 1 ({shares[0]:.0f} %)"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["client 0", "client 1"]
    shapes = [drawn.get_paths()[0].vertices for drawn in ax.collections[:2]]
    assert shapes[0].shape != shapes[1].shape  # a circle, a square


def test_features_by_t_sne():
    run = result(exported=featured(clients=10))
    ax = plot_features(run, [1, 2, 5])
    points = np.concatenate([drawn.get_offsets() for drawn in ax.collections[:3]])
    label = np.concatenate([drawn.get_array() for drawn in ax.collections[:3]])
    assert len(points) == 18
    apart = np.linalg.norm(points[:, None] - points, axis=-1) + np.diag(np.full(18, np.inf))
    np.testing.assert_array_equal(label[apart.argmin(axis=1)], label)  # neighbours are of one class
    again = plot_features(run, [1, 2, 5])
    np.testing.assert_array_equal(points, np.concatenate([drawn.get_offsets() for drawn in again.collections[:3]]))
    assert ax.get_legend() is not None
    assert plot_features(run, method="pca").get_legend() is None  # of ten clients, all have one marker


def test_as_many_clients_as_there_are_markers_have_one_each():
    ax = plot_features(result(exported=featured(clients=8)), method="pca")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [f"client {one}" for one in range(8)]
    assert len({drawn.get_paths()[0].vertices.tobytes() for drawn in ax.collections[:8]}) == 8


@pytest.mark.parametrize(("samples", "perplexity"), [(60, 59 / 3), (99, 30)])
def test_the_perplexity_is_30_or_a_third_of_the_samples(samples, perplexity, monkeypatch):
    asked = []

    class Tsne:
        def __init__(self, components, *, perplexity, **options):
            asked.append(perplexity)

        def fit_transform(self, features):
            return features[:, :2]

    monkeypatch.setattr("sklearn.manifold.TSNE", Tsne)
    plot_features(result(exported=featured(samples)))
    assert asked == pytest.approx([perplexity])


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: plot_confusion(result()),
            "result = 'no predictions' is not usable: of a run with run.export = [\"pre",
        ),
        (
            lambda: plot_features(result()),
            "result = 'no features' is not usable: of a run with run.export = [\"features\"",
        ),
        (
            lambda: plot_confusion(result(exported=EXPORTED), 1),
            "client = [1] is not usable: of those that are exported: 0, 3",
        ),
        (
            lambda: plot_confusion(result(exported=EXPORTED), [0, 3]),
            "client = [0, 3] is not usable: the number of one client, or None for all that are exported",
        ),
        (
            lambda: plot_features(result(exported=featured()), [0, 7]),
            "clients = [0, 7] is not usable: of those that are exported: 0, 1",
        ),
        (
            lambda: plot_features(result(exported=featured()), method="umap"),
            "method = 'umap' is not usable: one of tsne, pca",
        ),
        (
            lambda: plot_features(result(exported=featured(3))),
            "clients = None is not usable: those of four samples or more; there are 3",
        ),
        (
            lambda: plot_features(result(exported={**featured(), "features": np.full((60, 5), np.nan)})),
            "clients = None is not usable: those of models that have not diverged: features are NaN or infinite",
        ),
        (
            lambda: plot_features(result(exported=featured()), 1),
            "clients = 1 is not usable: a list of clients, such as [0, 1]; None for all",
        ),
        *(
            (
                lambda method=method: plot_features(
                    result(exported={**featured(), "features": np.ones((60, 1))}), method=method
                ),
                "result = 'one feature' is not usable: of a model with two features or more, for two dimensions",
            )
            for method in ("tsne", "pca")
        ),
    ],
)
def test_answers_that_are_not_there(draw, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        draw()


def tuned(values=(0.01, 0.1, 1.0)):
    """Two methods of which one has mu, two seeds each: 0.5, 0.6, ... and 0.7, 0.8, ... of a run of the other."""
    cells = [
        cell({"method.name": "fedprox", "fedprox.mu": mu}, seed, 0.1 * at + 0.5 + 0.2 * seed)
        for at, mu in enumerate(values)
        for seed in (0, 1)
    ]
    return Sweep([*cells, *(cell({"method.name": "fedavg"}, seed, 0.3 + 0.1 * seed) for seed in (0, 1))], SETTINGS)


def test_sensitivity_to_a_hyperparameter_of_one_method():
    ax = plot_sensitivity(tuned((1.0, 0.01, 0.1)), "fedprox.mu")
    line, (low, high) = ax.containers[0].lines[0], ax.containers[0].lines[1]
    np.testing.assert_allclose(line.get_xdata(), [0.01, 0.1, 1.0])
    np.testing.assert_allclose(line.get_ydata(), [70, 80, 60])
    spread = np.std([0.0, 20.0], ddof=1)
    np.testing.assert_allclose(low.get_ydata(), np.array([70, 80, 60]) - spread)
    np.testing.assert_allclose(high.get_ydata(), np.array([70, 80, 60]) + spread)
    across = next(line for line in ax.get_lines() if line.get_label() == "fedavg")
    np.testing.assert_allclose(across.get_ydata(), [35, 35])
    np.testing.assert_allclose([ax.patches[0].get_y(), ax.patches[0].get_height()], [35 - 50**0.5, 2 * 50**0.5])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["fedprox", "fedavg"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()) == ("fedprox.mu", "PRE accuracy (%)", "log")


@pytest.mark.parametrize(
    ("values", "scale"),
    [((0.1, 1.0), "linear"), ((0.07, 7.0), "log"), ((0.0, 0.1, 10.0), "symlog"), ((-1.0, 0.01, 10.0), "linear")],
)
def test_the_scale_of_a_hyperparameter(values, scale):
    assert plot_sensitivity(tuned(values), "fedprox.mu", "post").get_xscale() == scale


def test_a_sweep_that_compares_after_training_has_its_sensitivity_there():
    ax = plot_sensitivity(tuned()._replace(point="post"), "fedprox.mu")
    assert ax.get_ylabel() == "POST accuracy (%)"
    np.testing.assert_allclose(ax.containers[0].lines[0].get_ydata(), 50)


@pytest.mark.parametrize(("name", "factor", "label"), [("macro_f1", 100, "PRE macro-F1 (%)"), ("ece", 1, "PRE ece")])
def test_the_sensitivity_of_another_score(name, factor, label):
    """Half the accuracy; of an own metric, as it is."""

    def measured(run):
        metrics = {f"pre.{name}": {"last": run.summary["personal"]["pre"]["last"] / 2}}
        return run._replace(summary={**run.summary, "metrics": metrics})

    cells = [measured(run) for run in tuned().cells]
    ax = plot_sensitivity(tuned()._replace(cells=cells), "fedprox.mu", f"pre.{name}")
    assert ax.get_ylabel() == label
    np.testing.assert_allclose(ax.containers[0].lines[0].get_ydata(), factor * np.array([0.3, 0.35, 0.4]))


def test_a_method_without_the_hyperparameter_does_not_fix_the_scale():
    """Wherever it comes: its line is as wide as the axes."""
    sweep = tuned((0.0, 0.001, 1.0))
    orders = sweep.cells, sweep.cells[::-1]
    first, last = (plot_sensitivity(sweep._replace(cells=cells), "fedprox.mu").get_xlim() for cells in orders)
    np.testing.assert_allclose(first, last)
    assert first[0] > -0.001


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("training.lr",), "field = 'training.lr' is not usable: one of the grid: method.name, fedprox.mu"),
        (
            ("method.name",),
            "field = 'method.name' is not usable: one with two numbers or more; its values are 'fedprox",
        ),
        (("fedprox.mu", "score"), "metric = 'score' is not usable: allowed: headline, pre, post, best"),
        (("fedprox.mu", "global"), "metric = 'global' is not usable: one that a run has; none of these has a value"),
    ],
)
def test_a_sensitivity_that_there_is_not(arguments, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        plot_sensitivity(tuned(), *arguments)


def write_run(folder, method, seed, accuracies, *, ended=True, counts=PARTITION["class_counts"]):
    folder.mkdir(parents=True)
    changed = CONFIG.replace({"method.name": method, "run.seed": seed, "run.out": str(folder)})
    (folder / "config.toml").write_text(changed.to_toml())
    held = {"class_counts": counts, "n_train": [sum(row) for row in counts], "n_test": [0] * len(counts)}
    (folder / "partition.json").write_text(json.dumps({**PARTITION, **held, "hash": str(counts)}))
    lines = [{"round": 1 + at, "seconds": 1.0, "pre": {"accuracy": value}} for at, value in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if ended:
        ended_after = summary(accuracies[-1], rounds=len(accuracies), environment={})
        (folder / "summary.json").write_text(json.dumps(ended_after))
        (folder / "clients.csv").write_text("client,pre_accuracy,post_accuracy\n0,0.5,0.25\n1,0.75,1.0\n")


@pytest.fixture
def folder(tmp_path):
    for seed, values in enumerate(([0.2, 0.4], [0.4, 0.8])):
        write_run(tmp_path / "table" / f"local-{seed}", "local", seed, values)
    write_run(tmp_path / "table" / "fedavg-0", "fedavg", 0, [0.1, 0.3])
    write_run(tmp_path / "table" / "fedavg-1", "fedavg", 1, [0.9], ended=False)
    return tmp_path


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls the command line; gives what it says, or its one line of error, and the figures that it saves."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedjax-pfl", "plot", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert (left.value.code, err.count("\n")) in ((2, 1), (0, 0), (None, 0))
        return err or out

    return call, figures


def test_runs_that_go_on_have_no_curves_yet(folder, command):
    call, _ = command
    said = call(folder / "table" / "fedavg-1", "-o", folder / "none.pdf")
    assert said.startswith("error: RUN = ")
    assert "runs of which one has ended" in said


def test_the_command_draws_runs_on_disk(folder, command):
    call, figures = command
    table, out = folder / "table", folder / "fig.pdf"
    said = call(table, "-o", out)
    assert said == f"left out, because it has not ended: {table / 'fedavg-1'}\nwritten to {out}\n"
    (ax,) = figures[0].axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}
    assert drawn == {"fedavg": pytest.approx([10, 30]), "local": pytest.approx([30, 60])}
    assert len(ax.collections) == 1  # local has two seeds
    first = out.read_bytes()
    assert first.startswith(b"%PDF")
    assert b"CreationDate" not in first
    assert call(table, "-o", out) == (
        f"error: --out = '{out}' is not usable: it exists; name another file, or replace it: --overwrite\n"
    )
    call(table, "-o", out, "--overwrite")
    assert out.read_bytes() == first  # no date, no chance
    assert pyplot.get_fignums() == []


def test_a_picture_is_written_at_once_into_a_folder_that_is_made(folder, command, monkeypatch):
    call, _ = command
    out = folder / "pictures" / "fig.png"
    call(folder / "table", "-o", out)
    before = out.read_bytes()

    def half(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "no space")

    monkeypatch.setattr(Figure, "savefig", half)
    assert "a file that can be written (no space)" in call(folder / "table", "-o", out, "--overwrite")
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]


def test_methods_are_drawn_in_the_order_of_their_table(folder, command):
    """By path, fedavg comes first; a report has this order, too, and so the same colours."""
    call, figures = command
    (folder / "table" / "comparison.md").write_text(
        "\n| method | PRE |\n| --- | --- |\n| local | 60 |\n| fedavg | 30 |\n"
    )
    for number, kind in enumerate(("curves", "clients")):
        call(folder / "table", "-o", folder / f"{kind}.png", "--kind", kind)
        ax = figures[number].axes[0]
        drawn = ax.get_lines() if kind == "curves" else ax.get_yticklabels()
        named = [line.get_label() if kind == "curves" else line.get_text() for line in drawn]
        assert named == ["local", "fedavg"]


def test_the_command_draws_clients_and_partitions(folder, command):
    call, figures = command
    call(folder / "table" / "local-1", folder / "table" / "local-0", "-o", folder / "c.svg", "--kind", "clients")
    assert "<dc:date>" not in (folder / "c.svg").read_text()
    (row,) = figures[0].axes[0].collections
    np.testing.assert_allclose([row.get_paths()[0].vertices[:, 0].min(), *figures[0].axes[0].get_yticks()], [50, 0])
    call(folder / "table", "-o", folder / "p.png", "--kind", "partition")
    assert len(figures[1].axes[0].collections[0].get_offsets()) == 7
    write_run(folder / "other", "local", 2, [0.1], counts=[[1, 2]])
    said = call(folder / "other", folder / "table", "-o", folder / "q.png", "--kind", "partition")
    assert "is not usable: runs that share one partition; those of other seeds or settings have others" in said


def test_the_command_draws_clients_at_the_point_of_the_metric(folder, command):
    call, figures = command
    call(folder / "table" / "local-0", "-o", folder / "c.svg", "--kind", "clients", "--metric", "post.accuracy")
    (ax,) = figures[0].axes
    assert ax.get_xlabel() == "POST accuracy of a client (%)"
    (row,) = ax.collections
    reach = row.get_paths()[0].vertices[:, 0]
    np.testing.assert_allclose([reach.min(), reach.max()], [25, 100])


LONG = "fedprox, fedprox.mu=0.0{}, training.lr=0.05, data.partition.beta=0.1, run.out=" + 40 * "x"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("rows", "name"), [(30, "method{}"), (4, LONG)])
def test_rows_of_clients_have_room_and_their_names_are_whole(rows, name, folder, command, monkeypatch):
    call, figures = command
    names = [name.format(row) for row in range(rows)]
    cells = [cell({}, clients=OTHERS)._replace(values={"method.name": name}) for name in names]
    monkeypatch.setattr("fedjax_pfl.experiment.plots.files.cells_of", lambda *_: cells)
    call(folder / "table", "-o", folder / "c.png", "--kind", "clients")
    own = plot_clients(Sweep(cells, SETTINGS)).figure
    for figure in (figures[0], own):
        figure.draw_without_rendering()
        ax = figure.axes[0]
        boxes = [label.get_window_extent() for label in ax.get_yticklabels()]
        shown = ["".join(label.get_text().split()) for label in ax.get_yticklabels()]
        assert shown == ["".join(name.split()) for name in names]
        assert min(box.x0 for box in boxes) >= 0
        assert all(above.y0 > below.y1 for above, below in itertools.pairwise(boxes))
        assert ax.bbox.width > 0.4 * figure.bbox.width
    assert figures[0].get_figheight() == own.get_figheight()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "fig.docx"), "--out = 'fig.docx' is not usable: a file that ends with .pdf, .png, .svg"),
        (("-o", "a.pdf", "--kind", "pie"), "--kind = 'pie' is not usable: one of curves, clients, partition"),
        (("-o", "a.pdf", "--metric", "loss"), "metric = 'loss' is not usable: one of seconds, pre.accuracy"),
        (("-o", "a.pdf", "--x", "megabytes"), "x = 'megabytes' is not usable: one of round, seconds"),
        (
            ("-o", "a.pdf", "--kind", "clients", "--metric", "global"),
            "--metric = 'global' is not usable: pre.accuracy or post.accuracy, for --kind clients",
        ),
        (("-o", "file/a.pdf"), "--out = 'file/a.pdf' is not usable: a file that can be written (File exists)"),
    ],
)
def test_mistakes_on_the_command_line(folder, command, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    (folder / "file").touch()
    assert command[0]("table", *arguments).startswith(f"error: {message}")


def test_plots_say_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as though it were not installed
    run = result(clients=CLIENTS, exported={**EXPORTED, **featured()})
    exported = result(exported=EXPORTED)
    calls = (
        run.plot,
        compared().plot,
        lambda: plot_clients(run),
        lambda: plot_partition(PARTITION),
        lambda: plot_confusion(exported),
        lambda: plot_features(run),
        lambda: plot_sensitivity(tuned(), "fedprox.mu"),
    )
    for call in calls:
        with pytest.raises(
            ConfigError, match=r'matplotlib = None .*: plots need it: pip install "fedjax_pfl\[plots\]"'
        ):
            call()
