"""Plots of the clients' accuracies, one row per method or combination."""

import textwrap
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.cells import check_point
from fedjax_pfl.experiment.comparison import Comparison
from fedjax_pfl.experiment.plots.given import check_given
from fedjax_pfl.experiment.plots.style import as_label, drawing, line_style
from fedjax_pfl.experiment.result import Result
from fedjax_pfl.experiment.sweep import Sweep
from fedjax_pfl.experiment.tables import Group, grouped, of_judged, show

if TYPE_CHECKING:
    import matplotlib.axes

_KINDS = ("violin", "strip")
# The area of all dots of a strip together, in square points: two fifths of it, so that a thousand dots stay apart.
_INK = 1200.0
# The letters of a line of a row's name: half of a column's width; and the height of such a line, in inches.
_LETTERS, _LINE = 30, 0.12


def plot_clients(
    runs: Result | Comparison | Sweep,
    kind: str = "violin",
    *,
    point: str = "pre",
    ax: "matplotlib.axes.Axes | None" = None,
) -> "matplotlib.axes.Axes":
    """Draws the accuracies of the clients after the last round: one row per method or combination, all seeds together.

    The circle is the mean, the vertical line the median. A long name takes several lines. Malicious clients, and
    clients that never train, are left out, as from all reported numbers.

    Args:
      runs: a result, comparison or sweep.
      kind: ``violin``, a density estimate between the lowest and the highest client; or ``strip``, one dot per client
        and seed, shifted vertically so that all are visible.
      point: ``pre`` or ``post``.
      ax: matplotlib axes to draw on; a new figure unless given.

    Returns:
      The axes; methods from top to bottom are at 0, 1, ... of the vertical axis.

    Raises:
      ConfigError: ``runs`` is none of these, there is no such kind or point, no run has a client that is scored, or
        matplotlib is not installed.
    """
    if kind not in _KINDS:
        raise ConfigError("kind", kind, f"one of {', '.join(_KINDS)}")
    check_point(point)
    check_given("runs", runs, (Result, Comparison, Sweep), "a result, comparison or sweep")
    cells = [runs.cell] if isinstance(runs, Result) else runs.cells
    found = {_name(group): _scored(group, point) for group in grouped(cells)}
    drawn = {name: values for name, values in found.items() if len(values)}
    if not drawn:
        raise ConfigError("runs", [], "one run or more that has ended, with clients that are scored")
    with drawing(ax, height=height_of(drawn)) as ax:
        for row, values in enumerate(drawn.values()):
            colour = line_style(row)["color"]
            if kind == "violin":
                parts = ax.violinplot([values], [row], orientation="horizontal", widths=0.8, showextrema=False)
                for body in parts["bodies"]:
                    body.set(facecolor=colour, edgecolor=colour, alpha=0.5)
            else:
                area = min(6.0, _INK / len(values))
                ax.scatter(values, row + _apart(len(values)), s=area, color=colour, alpha=0.6, linewidth=0)
            median = float(np.median(values))
            ax.plot([median, median], [row - 0.25, row + 0.25], color="black", linewidth=1)
            ax.plot([values.mean()], [row], "o", color="white", markeredgecolor="black", markeredgewidth=0.8)
        ax.set_yticks(range(len(drawn)), drawn)
        ax.set_ylim(len(drawn) - 0.5, -0.5)  # the first one on top
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=True, axis="x")
        ax.set_xlabel(f"{point.upper()} accuracy of a client (%)")
    return ax


def height_of(names: Collection[str]) -> float:
    """The height of a figure with a row per name, in inches; all rows are as high as the name of most lines needs."""
    lines = max(1 + name.count("\n") for name in names)
    return 0.7 + max(0.3, 0.05 + _LINE * lines) * len(names)


def _name(group: Group) -> str:
    """The name of a row, in lines that leave room for the axes beside them."""
    return as_label(textwrap.fill(show(group.values) or "all", _LETTERS))


def _scored(group: Group, point: str) -> Float[np.ndarray, " clients"]:
    """Accuracies in % of the clients that count, for all seeds."""
    found = [np.zeros(0)]
    for cell in group.cells.values():
        if cell.clients is not None:
            values = of_judged(cell.clients, f"{point}_accuracy")
            found.append(100 * values[~np.isnan(values)])
    return np.concatenate(found)


def _apart(number: int) -> Float[np.ndarray, " number"]:
    """Distances from the middle of a row, spread evenly by the golden ratio; always the same ones."""
    return 0.5 * (np.arange(number) * 0.618034 % 1 - 0.5)
