"""Who holds what: samples per client and class."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.plots.style import class_bar, class_colours, drawing, legend_above, whole_numbers

if TYPE_CHECKING:
    import matplotlib.axes

_KINDS = ("bubbles", "bars")
# More bars than this touch each other: gaps would be thinner than a printer's dots.
_APART = 40


def plot_partition(
    partition: Mapping[str, Any], kind: str = "bubbles", *, ax: "matplotlib.axes.Axes | None" = None
) -> "matplotlib.axes.Axes":
    """Draws who holds what.

    Args:
      partition: ``Result.partition``, or the content of a run's ``partition.json``.
      kind: ``bubbles``, a circle per client and class, with an area proportional to the number of samples; or ``bars``,
        a bar per client of its samples, class 0 at the bottom.
      ax: what to draw on; a figure of its own unless given.

    Raises:
      ConfigError: this is no partition, there is no such kind, or matplotlib is not installed.
    """
    if kind not in _KINDS:
        raise ConfigError("kind", kind, f"one of {', '.join(_KINDS)}")
    if not isinstance(partition, Mapping) or "class_counts" not in partition:
        raise ConfigError("partition", type(partition).__name__, "Result.partition, or what partition.json holds")
    counts = np.asarray(partition["class_counts"], float)
    with drawing(ax) as ax:
        if kind == "bubbles":
            _bubbles(counts, ax)
        else:
            _bars(counts, ax)
        ax.set_xlabel("client")
        whole_numbers(ax.xaxis)
        ax.set_xlim(-0.7, len(counts) - 0.3)
    return ax


def _bubbles(counts: Float[np.ndarray, "N classes"], ax: "matplotlib.axes.Axes") -> None:
    """The largest circle is as large as the room of one, so that few touch; many clients are drawn over each other."""
    from matplotlib.lines import Line2D

    clients, classes = counts.shape
    inches = ax.bbox.size / ax.figure.dpi
    area_of_one = 72**2 * inches.prod() / (clients * classes) / max(1.0, counts.max())
    client, label = np.nonzero(counts)
    areas = area_of_one * counts[client, label]
    ax.scatter(client, label, s=areas, color="#0072B2", alpha=0.8, linewidth=0)
    ax.set_ylim(-0.7, classes - 0.3)
    ax.set_ylabel("class")
    whole_numbers(ax.yaxis)
    most = int(counts.max())
    shown = [
        Line2D([], [], linestyle="", marker="o", markeredgewidth=0, color="#0072B2", alpha=0.8, label=str(samples))
        for samples in sorted({most, max(1, most // 4), max(1, most // 16)})
    ]
    for handle in shown:
        handle.set_markersize(float(np.sqrt(area_of_one * int(str(handle.get_label())))))
    legend_above(ax, shown, title="samples")


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
