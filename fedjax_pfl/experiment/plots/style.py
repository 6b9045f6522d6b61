"""The look of pictures: one column of a paper wide, and readable without colours.

Lines have the colours of Okabe and Ito (2008), which people with colour blindness can distinguish, and also differ in
dashes and markers. Classes have the "muted" colours of Tol (2021) and black, from dark to light.
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.summary import POINTS

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.cm

COLUMN = 3.4
"""Inches."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F")
_DASHES = ("-", "--", "-.", ":")
_CLASSES = (
    *("#000000", "#332288", "#882255", "#117733", "#AA4499"),
    *("#CC6677", "#999933", "#44AA99", "#88CCEE", "#DDCC77"),
)
_LOOK = {
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "pdf.fonttype": 42,  # fonts that publishers take
    "svg.hashsalt": "fedjax_pfl",  # the same file for the same picture
}
_MEASURES = {
    "accuracy": "accuracy",
    "weighted": "weighted accuracy",
    "std_clients": "std of clients",
    "worst_10_percent": "accuracy of the worst 10 %",
    "macro_f1": "macro-F1",
    "macro_f1_union": "macro-F1 of the union",
    "i_local": "I_local",
    "hm": "harmonic mean",
}
_SHARES = {
    "headline": "accuracy",
    "pre": "PRE accuracy",
    "post": "POST accuracy",
    "best": "best accuracy",
    "weighted": "weighted accuracy",
    "weighted_best": "best weighted accuracy",
    "validation": "accuracy on validation samples",
    "by_validation": "accuracy, chosen by validation",
    "std_clients": "std of clients",
    "worst_10_percent": "accuracy of the worst 10 %",
    "global": "global accuracy",
    "global_macro_f1": "global macro-F1",
    "global_macro_f1_union": "global macro-F1 of the union",
}
_OTHERS = {
    "train_loss": "training loss",
    "megabytes": "traffic (MB)",
    "seconds": "time, all included (s)",
    "seconds_per_round": "time per round (s)",
}


@contextmanager
def drawing(ax: "matplotlib.axes.Axes | None", height: float = 2.5) -> "Iterator[matplotlib.axes.Axes]":
    """Axes to draw on, in the look of all pictures.

    Args:
      ax: axes to draw on; None for a new figure, a column wide.
      height: height of the new figure, in inches.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    with look():
        if ax is not None:
            yield ax
            return
        from matplotlib import pyplot

        # The constrained layout, which also leaves room for names beside axes whose aspect is fixed.
        _, ax = pyplot.subplots(figsize=(COLUMN, height), layout="compressed")
        yield ax
        make_room(ax)


@contextmanager
def look() -> Iterator[None]:
    """The look of all pictures, for everything that is drawn or written within.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("matplotlib", None, 'plots need it: pip install "fedjax_pfl[plots]"') from None
    with matplotlib.rc_context(_LOOK):
        yield
        interactive = matplotlib.is_interactive()
    # A notebook's backend turns this on when the first figure is made; without it no later one is shown.
    matplotlib.interactive(interactive)


def make_room(ax: "matplotlib.axes.Axes") -> None:
    """Makes the figure of these axes higher by the height of their legend, which would otherwise shrink the axes."""
    legend, figure = ax.get_legend(), ax.get_figure(root=True)
    if legend is not None and figure is not None:
        figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / figure.dpi)


def line_style(number: int) -> dict[str, Any]:
    """Colour, dashes and marker of a line; no two of the first 64 are the same."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "marker": MARKERS[(number + number // len(_COLOURS)) % len(MARKERS)],
    }


def as_label(name: str) -> str:
    """A name that matplotlib shows unchanged: otherwise dollars begin a formula, and a legend leaves out ``_name``."""
    shown = name.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def quantity(metric: str) -> tuple[float, str]:
    """How a metric or figure is drawn: its factor, and the label of its axis."""
    if metric in _SHARES:
        return 100.0, f"{_SHARES[metric]} (%)"
    point, _, measure = metric.rpartition(".")
    if measure in _MEASURES and point.removeprefix("new_").removeprefix("validation_") in POINTS:
        return 100.0, f"{_in_words(point)} {_MEASURES[measure]} (%)"
    return 1.0, _OTHERS.get(metric) or f"{_in_words(point)} {measure}".strip()


def class_colours(classes: int) -> "matplotlib.cm.ScalarMappable":
    """A colour for each class, from dark to light, in the form that a colour bar needs."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    many = matplotlib.colormaps["viridis"](np.linspace(0, 1, classes))
    colours = ListedColormap(_CLASSES[:classes] if classes <= len(_CLASSES) else many)
    return ScalarMappable(BoundaryNorm(np.arange(classes + 1) - 0.5, classes), colours)


def class_bar(ax: "matplotlib.axes.Axes", colours: "matplotlib.cm.ScalarMappable") -> None:
    """Adds a bar that shows the colour of each class."""
    classes = colours.cmap.N
    bar = ax.figure.colorbar(colours, ax=ax, label="class", pad=0.02, ticks=range(0, classes, max(1, classes // 10)))
    bar.ax.tick_params(length=0)
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def legend_above(ax: "matplotlib.axes.Axes", handles: Sequence[Any], title: str | None = None) -> None:
    """A legend above the axes, where it covers nothing, in as many columns as fit.

    A label that is longer than the width of the axes, such as a run's directory, takes several lines.
    """
    inches = ax.bbox.width / ax.figure.dpi
    room = max(20, int((inches - 0.5) / 0.065))
    labels = [textwrap.fill(str(handle.get_label()), room) for handle in handles]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = min(len(handles), max(1, int(inches / (0.4 + 0.05 * longest))))
    where = {
        "loc": "lower left",
        "bbox_to_anchor": (0.0, 1.01),
        "borderaxespad": 0.0,
        "frameon": False,
        "alignment": "left",
    }
    ax.legend(handles=handles, labels=labels, title=title, ncols=columns, handlelength=2.6, columnspacing=1.2, **where)


def whole_numbers(axis: Any) -> None:
    """Puts the ticks of an axis at whole numbers: 1, 2 or 5, or these times 10, 100 ..., apart."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def _in_words(point: str) -> str:
    return point.replace("_", " ").replace("pre", "PRE").replace("post", "POST")
