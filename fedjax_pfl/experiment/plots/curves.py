"""Metrics over rounds, time or traffic: one line per combination, and a band over its seeds."""

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.plots.style import as_label, drawing, legend_above, line_style, quantity, whole_numbers
from fedjax_pfl.experiment.tables import Cell, Group, grouped, show

if TYPE_CHECKING:
    import matplotlib.axes

_ACROSS = {"round": "round", "seconds": "time since the start (s)", "megabytes": "traffic (MB)"}
_ERRORBARS = ("sd", "ci", None)
# So many markers on a line at most: they are there to tell lines apart.
_MARKS = 8


class _Curve(NamedTuple):
    """What is drawn for a combination: the horizontal values, the mean, and half the width of the band, [rounds]."""

    label: str
    x: Float[np.ndarray, " rounds"]
    mean: Float[np.ndarray, " rounds"]
    half: Float[np.ndarray, " rounds"] | None


def plot_curves(
    cells: Sequence[Cell], metric: str, x: str, errorbar: str | None, ax: "matplotlib.axes.Axes | None"
) -> "matplotlib.axes.Axes":
    """Draws a metric of runs over rounds, time or traffic; see `Sweep.plot`.

    Args:
      cells: the runs; runs of a combination that differ only in their seeds make one line.
      metric: as in `Sweep.plot`.
      x: as in `Sweep.plot`.
      errorbar: as in `Sweep.plot`.
      ax: as in `Sweep.plot`.

    Raises:
      ConfigError: as in `Sweep.plot`.
    """
    if errorbar not in _ERRORBARS:
        raise ConfigError("errorbar", errorbar, "sd (standard deviation), ci (95 % interval of the mean) or None")
    histories = [cell.history for cell in cells if cell.history]
    if not histories:
        raise ConfigError("runs", [], "one run or more that has ended")
    across = [name for name in _ACROSS if all(name in history for history in histories)]
    if x not in across:
        raise ConfigError("x", x, f"one of {', '.join(across)}")
    known = dict.fromkeys(name for history in histories for name in history if name != "round")
    if metric not in known:
        raise ConfigError("metric", metric, f"one of {', '.join(known)}")
    scale, label = quantity(metric)
    found = [curve for group in grouped(cells) if (curve := _curve(group, metric, x, errorbar, scale))]
    if not found:
        raise ConfigError("metric", metric, "one that a run has; none of these has a value of it")
    with drawing(ax) as ax:
        first, there = len(ax.get_lines()), ax.get_legend_handles_labels()[1]
        for number, curve in enumerate(found, start=first):
            style = line_style(number)
            every = -(-len(curve.x) // _MARKS)
            name = f"{curve.label}, {metric}" if curve.label in there else curve.label
            ax.plot(curve.x, curve.mean, label=name, markevery=every, **style)
            if curve.half is not None:
                low, high = curve.mean - curve.half, curve.mean + curve.half
                ax.fill_between(curve.x, low, high, color=style["color"], alpha=0.2, linewidth=0)
        if x == "round":
            whole_numbers(ax.xaxis)
        ax.grid(visible=True)
        ax.set(xlabel=_ACROSS[x], ylabel=label if ax.get_ylabel() in ("", label) else f"{ax.get_ylabel()}, {label}")
        named, _ = ax.get_legend_handles_labels()
        if len(named) > 1:
            legend_above(ax, named)
    return ax


def half_width(values: Float[np.ndarray, "seeds rounds"], errorbar: str | None) -> Float[np.ndarray, " rounds"] | None:
    """Half the width of a band around the mean over seeds; None if there is no spread to show."""
    seeds = len(values)
    if errorbar is None or seeds < 2:
        return None
    spread: np.ndarray = values.std(axis=0, ddof=1)
    if errorbar == "sd":
        return spread
    from scipy import stats  # half a second

    return np.asarray(stats.t.ppf(0.975, seeds - 1) * spread / np.sqrt(seeds))


def _curve(group: Group, metric: str, x: str, errorbar: str | None, scale: float) -> _Curve | None:
    """The line of a combination; None if none of its runs has a value, or if they share no evaluated round."""
    histories = [cell.history for cell in group.cells.values() if cell.history and metric in cell.history]
    held = [history for history in histories if not np.isnan(history[metric]).all()]
    if not held:
        return None
    rounds = reduce(np.intersect1d, [history["round"] for history in held])
    if not len(rounds):
        return None

    def at_these(name: str) -> Float[np.ndarray, "seeds rounds"]:
        return np.stack([history[name][np.isin(history["round"], rounds)] for history in held])

    values, label = scale * at_these(metric), as_label(show(group.values) or "all")
    return _Curve(label, at_these(x).mean(axis=0), values.mean(axis=0), half_width(values, errorbar))
