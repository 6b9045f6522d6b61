"""Plots of predictions and features, for runs that export them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.plots.given import check_given
from fedjax_pfl.experiment.plots.style import MARKERS, class_bar, class_colours, drawing, legend_above
from fedjax_pfl.experiment.result import Result

if TYPE_CHECKING:
    import matplotlib.axes

_PROJECTIONS = ("tsne", "pca")
# Larger tables have no numbers: they could not be read at a column's width.
_NUMBERED = 10


def plot_confusion(
    result: Result, client: int | None = None, *, ax: "matplotlib.axes.Axes | None" = None
) -> "matplotlib.axes.Axes":
    """Draws the confusion matrix of a run's personal models: predicted class against true class.

    Args:
      result: the result of a run with ``run.export = ["predictions"]``.
      client: the client whose samples are used; None for all exported clients.
      ax: matplotlib axes to draw on; a new figure unless given.

    Returns:
      The axes, with an image [classes, classes]: each row is a true class, with the share of its samples in % that is
      predicted as each class. A row adds up to less than 100 if a model has diverged and gives no prediction; a row
      without samples is empty.

    Raises:
      ConfigError: this is no result; the run has exported no predictions, or none for that client; or matplotlib is not
        installed.
    """
    if client is not None and not isinstance(client, int | np.integer):
        raise ConfigError("client", client, "the number of one client, or None for all that are exported")
    chosen = _exported(result, "predictions", "client", None if client is None else [client])
    label, answer = result.exported["label"][chosen], result.exported["prediction"][chosen]
    classes = len(result.partition["class_counts"][0])
    given = answer >= 0
    counts = np.zeros((classes, classes))
    np.add.at(counts, (label[given], answer[given]), 1)
    held = np.bincount(label, minlength=classes)[:, None]
    shares = np.divide(100 * counts, held, out=np.full(counts.shape, np.nan), where=held > 0)
    with drawing(ax, height=2.75) as ax:
        image = ax.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        if classes <= _NUMBERED:
            for row, column in np.argwhere(shares >= 0.5):
                share = shares[row, column]
                shade = "white" if share > 60 else "black"
                ax.text(column, row, f"{share:.0f}", color=shade, fontsize=6, ha="center", va="center")
        step = max(1, classes // 10)
        ax.set(
            xlabel="predicted class",
            ylabel="true class",
            xticks=range(0, classes, step),
            yticks=range(0, classes, step),
        )
        bar = ax.figure.colorbar(image, ax=ax, label="samples of the class (%)", pad=0.02)
        bar.outline.set_visible(False)
    return ax


def plot_features(
    result: Result,
    clients: Sequence[int] | None = None,
    method: str = "tsne",
    *,
    ax: "matplotlib.axes.Axes | None" = None,
) -> "matplotlib.axes.Axes":
    """Draws the features of samples in two dimensions: one colour per class, one marker per client.

    Args:
      result: the result of a run with ``run.export = ["features"]``.
      clients: the clients whose samples are drawn; None for all exported clients. With more than eight, all have the
        same marker.
      method: ``tsne`` (scikit-learn's, perplexity 30 or a third of the samples, seed 0), in which the distances between
        distant groups mean nothing; or ``pca``, the two directions of largest variance, with their shares of it.
      ax: matplotlib axes to draw on; a new figure unless given.

    Raises:
      ConfigError: this is no result; the run has exported no features, none for such a client, or too few; ``clients``
        is no list; there is no such method; the model has a single feature, or has diverged; or matplotlib is not
        installed.
    """
    if method not in _PROJECTIONS:
        raise ConfigError("method", method, f"one of {', '.join(_PROJECTIONS)}")
    if clients is not None and np.ndim(clients) != 1:
        raise ConfigError("clients", clients, "a list of clients, such as [0, 1]; None for all")
    chosen = _exported(result, "features", "clients", clients)
    features = np.asarray(result.exported["features"][chosen], np.float64)
    if len(features) < 4:
        raise ConfigError("clients", clients, f"those of four samples or more; there are {len(features)}")
    if features.shape[1] < 2:
        raise ConfigError("result", "one feature", "of a model with two features or more, for two dimensions")
    if not np.isfinite(features).all():
        raise ConfigError("clients", clients, "those of models that have not diverged: features are NaN or infinite")
    label, client = result.exported["label"][chosen], result.exported["client"][chosen]
    classes = len(result.partition["class_counts"][0])
    with drawing(ax, height=2.9) as ax:
        if method == "pca":
            from sklearn.decomposition import PCA

            fitted = PCA(2, svd_solver="full").fit(features)
            at = fitted.transform(features)
            first, second = (f"component {n + 1} ({100 * fitted.explained_variance_ratio_[n]:.0f} %)" for n in (0, 1))
            ax.set(xlabel=first, ylabel=second)
        else:
            from sklearn.manifold import TSNE
            from threadpoolctl import threadpool_limits

            perplexity = min(30.0, (len(features) - 1) / 3)
            with threadpool_limits(1):  # several threads add up in any order
                at = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
            ax.set(xticks=[], yticks=[], xlabel="t-SNE 1", ylabel="t-SNE 2")
        colours = class_colours(classes)
        who = np.unique(client)
        alike = len(who) > len(MARKERS)
        for number, one in enumerate(who):
            of = client == one
            ax.scatter(
                *at[of].T,
                c=label[of],
                cmap=colours.cmap,
                norm=colours.norm,
                marker=MARKERS[0 if alike else number],
                s=9,
                linewidth=0,
                label=f"client {one}",
            )
        class_bar(ax, colours)
        if len(who) > 1 and not alike:
            from matplotlib.lines import Line2D

            legend_above(
                ax,
                [
                    Line2D([], [], linestyle="", marker=MARKERS[number], color="0.3", label=f"client {one}")
                    for number, one in enumerate(who)
                ],
            )
    return ax


def _exported(result: Result, what: str, argument: str, clients: Sequence[int] | None) -> Int[np.ndarray, " samples"]:
    """The rows of the exported arrays that belong to these clients, None for all; ``argument`` names them in errors.

    Raises:
      ConfigError: this is no result, or the run has not exported what is asked for, or not for these clients.
    """
    check_given("result", result, Result, "what simulate(...) gives")
    column = {"predictions": "prediction", "features": "features"}[what]
    if column not in result.exported:
        raise ConfigError("result", f"no {what}", f'of a run with run.export = ["{what}"]')
    there = np.unique(result.exported["client"])
    if clients is None:
        return np.arange(len(result.exported["client"]))
    if len(clients) == 0 or not np.isin(clients, there).all():
        shown = ", ".join(map(str, there))
        raise ConfigError(argument, list(clients), f"of those that are exported: {shown}")
    return np.flatnonzero(np.isin(result.exported["client"], clients))
