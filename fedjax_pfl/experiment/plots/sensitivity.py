"""Plots of the sensitivity to a hyperparameter: a result against its values."""

from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.plots.given import check_given
from fedjax_pfl.experiment.plots.style import as_label, drawing, legend_above, line_style, quantity
from fedjax_pfl.experiment.sweep import Sweep
from fedjax_pfl.experiment.tables import SEED, check_figure, fields_of, grouped, show

if TYPE_CHECKING:
    import matplotlib.axes

# A scale is logarithmic where the largest value is so many times the smallest one.
_WIDE = 100


def plot_sensitivity(
    sweep: Sweep, field: str, metric: str | None = None, *, ax: "matplotlib.axes.Axes | None" = None
) -> "matplotlib.axes.Axes":
    """Draws a result of a sweep against the values of a field: mean and sample standard deviation over seeds.

    There is one line for each combination of the other varying fields. Runs that do not have the field, such as those
    of another method, are drawn as a horizontal line. The scale is logarithmic if no value is below 0 and those above 0
    span two decades or more; if 0 is one of the values, it is linear up to the smallest other one.

    Args:
      sweep: the sweep.
      field: a field of the grid with numbers as values, e.g. ``training.lr`` or ``fedprox.mu``.
      metric: one of the figures of `summary.figures_of`: ``headline``, ``pre.macro_f1``, ...; unless given, the
        accuracy at the point at which the sweep compares, ``pre`` or ``post``.
      ax: matplotlib axes to draw on; a new figure unless given.

    Raises:
      ConfigError: this is no sweep, there is no such field or figure, the field does not have two or more numbers as
        values, no run has the figure, or matplotlib is not installed.
    """
    check_given("sweep", sweep, Sweep, "what sweep(...) gives")
    fields = [name for name in fields_of(sweep.cells) if name != SEED]
    if field not in fields:
        raise ConfigError("field", field, f"one of the grid: {', '.join(fields)}")
    metric = check_figure(sweep.cells, "metric", sweep.point if metric is None else metric)
    values = list(dict.fromkeys(repr(cell.values[field]) for cell in sweep.cells if field in cell.values))
    numbers = {
        float(value)
        for cell in sweep.cells
        if isinstance(value := cell.values.get(field), Real) and not isinstance(value, bool)
    }
    if len(numbers) < 2 or len(numbers) < len(values):
        raise ConfigError("field", field, f"one with two numbers or more; its values are {', '.join(values)}")
    scale, label = quantity(metric)
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for group in grouped(sweep.cells):
        found = scale * np.array(list(group.by_seed(metric).values()))
        if len(found):
            rest = {name: value for name, value in group.values.items() if name != field}
            spread = float(found.std(ddof=1)) if len(found) > 1 else 0.0
            at = float(group.values.get(field, np.nan))
            lines.setdefault(as_label(show(rest) or "all"), []).append((at, float(found.mean()), spread))
    if not lines:
        raise ConfigError("metric", metric, "one that a run has; none of these has a value of it")
    with drawing(ax) as ax:
        for number, (name, points) in enumerate(lines.items()):
            x, mean, spread = np.array(sorted(points)).T
            style = line_style(number)
            if np.isnan(x).all():
                ax.axhline(mean[0], label=name, color=style["color"], linestyle=style["linestyle"])
                ax.axhspan(mean[0] - spread[0], mean[0] + spread[0], color=style["color"], alpha=0.2, linewidth=0)
            else:
                ax.errorbar(x, mean, yerr=spread, label=name, capsize=2, elinewidth=0.8, **style)
        positive = [value for value in numbers if value > 0]
        if positive and min(numbers) >= 0 and round(max(numbers) / min(positive), 6) >= _WIDE:
            if 0 in numbers:
                ax.set_xscale("symlog", linthresh=min(positive))
            else:
                ax.set_xscale("log")
            ax.autoscale_view()  # a horizontal line has fixed the limits of the linear axis
        ax.grid(visible=True)
        ax.set(xlabel=field, ylabel=label)
        if len(lines) > 1:
            handles, names = ax.get_legend_handles_labels()
            legend_above(ax, [handles[names.index(name)] for name in lines])
    return ax
