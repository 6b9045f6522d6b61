"""Writes plots of runs on disk as files."""

from collections.abc import Sequence
from pathlib import Path

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.folders import replacing
from fedjax_pfl.experiment.gathered import cells_of, gather, table_in
from fedjax_pfl.experiment.plots.clients import height_of, plot_clients
from fedjax_pfl.experiment.plots.curves import plot_curves
from fedjax_pfl.experiment.plots.partition import plot_partition
from fedjax_pfl.experiment.plots.style import COLUMN, look, make_room
from fedjax_pfl.experiment.summary import POINTS
from fedjax_pfl.experiment.sweep import Sweep

_KINDS = ("curves", "clients", "partition")
# Without the date, the same picture is the same file.
_UNDATED = {".pdf": {"CreationDate": None}, ".png": {}, ".svg": {"Date": None}}


def write_plot(
    paths: Sequence[Path],
    out: Path,
    *,
    kind: str = "curves",
    metric: str = "pre.accuracy",
    x: str = "round",
    overwrite: bool = False,
) -> list[Path]:
    """Draws runs from their directories into a file.

    Args:
      paths: run directories, or folders of comparisons and sweeps. Runs that differ only in their seeds are one method
        or combination; the order is that of the comparison's or sweep's table.
      out: the file, whose folder is created, with the suffix ``.pdf``, ``.png`` or ``.svg``.
      kind: ``curves``, as `Sweep.plot`; ``clients``, as `plot_clients`, at the point of the metric; ``partition``, as
        `plot_partition`.
      metric: as in `Sweep.plot`; for ``clients`` ``pre.accuracy`` or ``post.accuracy``.
      x: as in `Sweep.plot`.
      overwrite: whether to replace an existing file.

    Returns:
      The directories of runs that have not ended, which are left out.

    Raises:
      ConfigError: nothing can be drawn from these runs; the file exists or cannot be written; there is no such kind or
        suffix; or ``clients`` are drawn, and the metric is another one.
    """
    if kind not in _KINDS:
        raise ConfigError("--kind", kind, f"one of {', '.join(_KINDS)}")
    of_clients = {f"{point}.accuracy": point for point in POINTS}
    if kind == "clients" and metric not in of_clients:
        raise ConfigError("--metric", metric, f"{' or '.join(of_clients)}, for --kind clients")
    if out.suffix not in _UNDATED:
        raise ConfigError("--out", str(out), f"a file that ends with {', '.join(_UNDATED)}")
    if out.exists() and not overwrite:
        raise ConfigError("--out", str(out), "it exists; name another file, or replace it: --overwrite")
    begun = gather(paths)
    if kind != "partition" and all(run.summary is None for run in begun):
        named = " ".join(map(str, paths))
        raise ConfigError("RUN", named, "runs of which one has ended; fedjax-pfl report shows what goes on")
    with look():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(COLUMN, 2.5), layout="constrained")
        ax = figure.subplots()
        if kind == "partition":
            if len({run.partition["hash"] for run in begun}) > 1:
                allowed = "runs that share one partition; those of other seeds or settings have others: name one run"
                raise ConfigError("RUN", " ".join(map(str, paths)), allowed)
            plot_partition(begun[0].partition, ax=ax)
        else:
            cells = cells_of(begun, table_in(paths))
            if kind == "clients":
                plot_clients(Sweep(cells, {}), point=of_clients[metric], ax=ax)
                figure.set_figheight(height_of([label.get_text() for label in ax.get_yticklabels()]))
            else:
                plot_curves(cells, metric, x, "sd", ax)
        make_room(ax)
        try:
            with replacing(out) as partial:
                figure.savefig(partial, format=out.suffix[1:], metadata=_UNDATED[out.suffix])
        except OSError as error:
            raise ConfigError("--out", str(out), f"a file that can be written ({error.strerror})") from None
    return [] if kind == "partition" else [run.path for run in begun if run.summary is None]
