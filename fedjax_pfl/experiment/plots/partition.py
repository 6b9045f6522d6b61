"""Plots of a partition: samples per client and class."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.plots.given import counts_in
from fedjax_pfl.experiment.plots.style import class_bar, class_colours, drawing, legend_above, whole_numbers

if TYPE_CHECKING:
    import matplotlib.axes

_KINDS = ("bubbles", "shades", "bars")
# Points across. Smaller circles look alike, whatever number of samples they stand for; larger ones have no room in the
# legend.
_SMALLEST, _LARGEST = 4.0, 16.0
# Clients across. A row of larger circles, one per client, would be one band.
_OVERLAP = 4.0
# More bars than this touch each other: gaps would be thinner than a printer's dots.
_APART = 40


def plot_partition(
    partition: Mapping[str, Any], kind: str | None = None, *, ax: "matplotlib.axes.Axes | None" = None
) -> "matplotlib.axes.Axes":
    """Draws the samples per client and class.

    Args:
      partition: ``Result.partition``, or the content of a run's ``partition.json``.
      kind: ``bubbles``, one circle per client and class, with an area proportional to the number of samples;
        ``shades``, one field per client and class, darker for more samples, with the clients ordered by their most
        frequent class; or ``bars``, one stacked bar per client, class 0 at the bottom. Unless given, bubbles, or shades
        if the circles would be too small, or cover each other: in a new figure, from about 170 clients with 10 classes,
        20 with 100, or 100 with 2.
      ax: matplotlib axes to draw on; a new figure unless given.

    Raises:
      ConfigError: this is not a partition, there is no such kind, or matplotlib is not installed.
    """
    if kind is not None and kind not in _KINDS:
        raise ConfigError("kind", kind, f"one of {', '.join(_KINDS)}")
    counts = counts_in(partition).astype(float)
    with drawing(ax) as ax:
        if kind is None:
            kind = "bubbles" if _legible(counts, ax) else "shades"
        {"bubbles": _bubbles, "shades": _shades, "bars": _bars}[kind](counts, ax)
        ax.set_xlabel("client, by main class" if kind == "shades" else "client")
        whole_numbers(ax.xaxis)
        ax.set_xlim(-0.7, len(counts) - 0.3)
    return ax


def _widest(counts: Float[np.ndarray, "N classes"], ax: "matplotlib.axes.Axes") -> float:
    """The diameter of the largest circle, in points.

    It is little more than the smaller side of the field of a client and class, so that few circles touch; in narrow
    fields it is up to the side of a square of the same area, because tiny circles look alike.
    """
    sides = 72 * ax.bbox.size / ax.figure.dpi / counts.shape
    return float(min(np.sqrt(sides.prod()), max(1.2 * sides.min(), 2 * _SMALLEST), _LARGEST))


def _legible(counts: Float[np.ndarray, "N classes"], ax: "matplotlib.axes.Axes") -> bool:
    """Whether circles are large enough, and neighbours can still be told from each other."""
    widest, client = _widest(counts, ax), 72 * ax.bbox.width / ax.figure.dpi / len(counts)
    return _SMALLEST <= widest <= _OVERLAP * client


def _bubbles(counts: Float[np.ndarray, "N classes"], ax: "matplotlib.axes.Axes") -> None:
    from matplotlib.lines import Line2D

    area_of_one = _widest(counts, ax) ** 2 / max(1.0, counts.max())
    client, label = np.nonzero(counts)
    areas = area_of_one * counts[client, label]
    ax.scatter(client, label, s=areas, color="#0072B2", alpha=0.8, linewidth=0, clip_on=False)
    _class_axis(counts, ax)
    most = int(counts.max())
    shown = [
        Line2D([], [], linestyle="", marker="o", markeredgewidth=0, color="#0072B2", alpha=0.8, label=str(samples))
        for samples in sorted({most, max(1, most // 4), max(1, most // 16)})
    ]
    for handle in shown:
        handle.set_markersize(float(np.sqrt(area_of_one * int(str(handle.get_label())))))
    legend_above(ax, shown, title="samples")


def _shades(counts: Float[np.ndarray, "N classes"], ax: "matplotlib.axes.Axes") -> None:
    """Draws fields. Clients with the same main class are neighbours, those with the most samples of it first.

    A client may be narrower than a pixel of the picture. Small numbers of samples are drawn darker than in proportion
    to the maximum.
    """
    from matplotlib.colors import PowerNorm

    main = counts.argmax(axis=1)
    order = np.lexsort((-counts.max(axis=1), main))
    clients, classes = counts.shape
    edges = np.arange(clients + 1) - 0.5, np.arange(classes + 1) - 0.5
    norm = PowerNorm(0.5, 0, max(1.0, counts.max()))
    fields = ax.pcolormesh(*edges, counts[order].T, cmap="Blues", norm=norm, rasterized=True)
    _class_axis(counts, ax)
    bar = ax.figure.colorbar(fields, ax=ax, label="samples", pad=0.02)
    whole_numbers(bar.ax.yaxis)
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def _class_axis(counts: Float[np.ndarray, "N classes"], ax: "matplotlib.axes.Axes") -> None:
    ax.set_ylim(-0.7, counts.shape[1] - 0.3)
    ax.set_ylabel("class")
    whole_numbers(ax.yaxis)


def _bars(counts: Float[np.ndarray, "N classes"], ax: "matplotlib.axes.Axes") -> None:
    clients, classes = counts.shape
    colours = class_colours(classes)
    below, width = np.zeros(clients), 0.9 if clients <= _APART else 1.0
    for label, held in enumerate(counts.T):
        ax.bar(range(clients), held, bottom=below, width=width, color=colours.to_rgba(label), linewidth=0)
        below += held
    ax.set_ylabel("samples")
    ax.grid(visible=True, axis="y")
    class_bar(ax, colours)
