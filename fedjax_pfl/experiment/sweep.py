"""``sweep(config, grid)``: one run for every combination of some fields, in as few programs as their shapes allow.

Runs that differ only in their seed and in numbers on which no shape depends become rows of one program, which is
compiled once. On a CPU every core takes a share of them; on an accelerator they run side by side.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import of_data
from fedjax_pfl.experiment.cells import check_lines, check_point, folder_of, run_cells
from fedjax_pfl.experiment.config import Config, plain
from fedjax_pfl.experiment.distributed import is_first
from fedjax_pfl.experiment.executors import Executor
from fedjax_pfl.experiment.folders import alone_in, replacing, writable, write_atomically
from fedjax_pfl.experiment.frames import client_frame, difference_frame, history_frame, pivot, run_frame
from fedjax_pfl.experiment.gathered import cells_of, compared, folders_of, gather, record_of, table_in
from fedjax_pfl.experiment.grid import combinations, configured
from fedjax_pfl.experiment.headline import runs_in_short
from fedjax_pfl.experiment.html import runs_html
from fedjax_pfl.experiment.latex_table import latex
from fedjax_pfl.experiment.plots.curves import plot_curves
from fedjax_pfl.experiment.summary import POINTS
from fedjax_pfl.experiment.tables import SEED, Cell, csv_of, markdown, rows_of, show, without_seed

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas


class Sweep(NamedTuple):
    """All runs of a sweep, in the order of the grid.

    The same call of `sweep` with the same ``out``, or `Sweep.load`, reads a folder that it has written, without running
    anything.

    Attributes:
      cells: the runs, one per combination.
      baseline: the values, without the seed, of the runs with which the others are compared.
      point: ``pre`` or ``post``, the evaluation point at which they are compared.
    """

    cells: list[Cell]
    baseline: dict[str, Any]
    point: str = "pre"

    @classmethod
    def load(
        cls, *paths: str | os.PathLike[str], baseline: Mapping[str, Any] | None = None, point: str | None = None
    ) -> "Sweep":
        """Reads complete runs from their directories; the original config files, data and own parts are not needed.

        For the folder of one sweep or comparison, the names, order, baseline and point are those of that call. In other
        cases (runs of several sweeps and comparisons, some runs of one, or a run has been continued since) the runs are
        named by the fields in which they differ. Runs that have not ended are left out.

        Args:
          paths: run directories, and folders of run directories, as `sweep`, `compare` and `simulate` write them.
          baseline: as in `sweep`; unless given, the baseline of the sweep or comparison, or else the first combination.
          point: the evaluation point; unless given, that of the sweep or comparison, or else ``pre``.

        Raises:
          ConfigError: no run has ended there, there is no such baseline or point, or a file is damaged.
        """
        folders = folders_of(paths)
        ended, table = [run for run in gather(folders) if run.summary is not None], table_in(folders)
        if not ended:
            raise ConfigError("paths", " ".join(map(str, paths)), "runs of which one has ended")
        cells = cells_of(ended, table)
        usual, where = compared(ended, table) or (without_seed(cells[0].values), POINTS[0])
        chosen = usual if baseline is None else _baseline(cells, baseline)
        return cls(cells, chosen, check_point(where if point is None else point))

    def __repr__(self) -> str:
        return runs_in_short("Sweep", self.cells, self.point)

    def _repr_html_(self) -> str:
        return runs_html(self.markdown())

    @property
    def failed(self) -> list[Cell]:
        """The runs that failed."""
        return [cell for cell in self.cells if cell.summary is None]

    def rows(self) -> list[dict[str, Any]]:
        """The tidy table: one row per run, with the grid's fields, figures, and the error of a failed run.

        The figures are those of `summary.figures_of`, but of the scores in ``history`` only your own metrics.
        """
        return rows_of(self.cells)

    def csv(self) -> str:
        """The tidy table as CSV; values that a run does not have are empty."""
        return csv_of(self.rows())

    def markdown(self) -> str:
        """The summary table in Markdown: one row per combination, mean ± sample standard deviation over seeds."""
        return markdown(self.cells, self.baseline, self.point)

    def to_frame(self, *, history: bool = False) -> "pandas.DataFrame":
        """The tidy table as a pandas frame; or, for curves, one row per run and evaluated round.

        Args:
          history: whether to return the evaluated rounds, with the fields of the grid, ``round``, and the metrics of
            ``Result.history`` as columns; NaN if a run does not have a field or metric; no rows for a failed run.

        Raises:
          ConfigError: pandas is not installed.
        """
        return history_frame(self.cells) if history else run_frame(self.cells)

    def clients_frame(self) -> "pandas.DataFrame":
        """The clients of all runs as a pandas frame: the fields of the grid, and the columns of ``Result.clients``.

        Raises:
          ConfigError: pandas is not installed.
        """
        return client_frame(self.cells)

    def pivot(
        self,
        index: str | Sequence[str] | None = None,
        columns: str | Sequence[str] | None = None,
        values: str | None = None,
        *,
        aggregate: str = "mean",
    ) -> "pandas.DataFrame":
        """A figure aggregated over seeds, as a pandas frame; NaN if no run has it.

        Args:
          index: one or more fields of the grid, for the rows; unless given, the method and the other varying fields. A
            grid of seeds alone gives one row, ``all``.
          columns: likewise, for the columns; unless given, the data fields that vary, if any.
          values: one of the figures of `summary.figures_of`, such as ``pre.macro_f1`` or ``pre.NAME`` of your own
            metric; unless given, the accuracy at the point at which the sweep compares, ``pre`` or ``post``. Accuracies
            lie in [0, 1].
          aggregate: ``mean``, ``std`` (of the sample; NaN for one seed) or ``count`` of the runs that have the figure.

        Raises:
          ConfigError: there is no such field, figure or aggregate; a field that varies is in neither index nor columns;
            pandas is not installed.
        """
        return pivot(self.cells, SEED, index, columns, values or self.point, aggregate)

    def differences(self, point: str | None = None) -> "pandas.DataFrame":
        """The differences of the table, row minus the baseline of its data setting, as accuracies in [0, 1].

        Columns: the fields of the grid; ``difference``, the mean over the seeds that both have; ``low`` and ``high``,
        its 95 % interval over seeds; ``clients_low`` and ``clients_high``, its 95 % bootstrap interval over clients,
        where each client is drawn with its scores of all seeds; ``p``, p-value of the paired t-test over seeds;
        ``p_holm``, the same after Holm's correction; ``seeds``, the number of seeds that both have.

        Args:
          point: ``pre`` or ``post``; the point at which the table compares unless given.

        Raises:
          ConfigError: there is no such point, or pandas is not installed.
        """
        return difference_frame(self.cells, self.baseline, check_point(self.point if point is None else point))

    def to_latex(self, figures: Sequence[str] = POINTS, *, bold: bool = True) -> str:
        """A table in LaTeX, for the package booktabs: mean ± sample standard deviation over seeds, in %.

        One row per combination of the fields that do not belong to the data; for each data setting, one column per
        figure. A loss, and a metric of your own, is printed as it is, with four digits.

        Args:
          figures: figures of `summary.figures_of`, except costs: ``["pre", "pre.macro_f1", "pre.NAME"]``.
          bold: whether to print the highest mean of each column (and so of each data setting) in bold; not for a
            spread over clients, a loss, or a metric of your own, of which nothing says whether large values are good.

        Returns:
          A ``tabular``, after comments with notes for the caption and the failed runs.

        Raises:
          ConfigError: there is no such figure, or it is a cost.
        """
        return latex(self.cells, figures, heading="run", bold=bold)

    def plot(
        self,
        metric: str = "pre.accuracy",
        x: str = "round",
        *,
        errorbar: str | None = "sd",
        ax: "matplotlib.axes.Axes | None" = None,
    ) -> "matplotlib.axes.Axes":
        """Draws a metric over the evaluated rounds: one line per combination, the mean over seeds, with a band.

        Lines end at the last evaluated round that all seeds have. Combinations without the metric have no line.

        Args:
          metric: a name in ``Result.history``.
          x: the horizontal axis: ``round``, ``seconds`` since the run began, or ``megabytes`` sent up and down so far;
            the last two are means over seeds.
          errorbar: the band: ``sd``, plus and minus one sample standard deviation; ``ci``, Student's 95 % interval of
            the mean; None for no band.
          ax: matplotlib axes to draw on, in addition to the lines there; a new figure unless given.

        Raises:
          ConfigError: no run has ended, there is no such metric, x or errorbar, no run has a value of the metric, or
            matplotlib is not installed.
        """
        return plot_curves(self.cells, metric, x, errorbar, ax)


def sweep(
    config: Config,
    grid: Mapping[str, Sequence[Any]],
    *,
    baseline: Mapping[str, Any] | None = None,
    point: str = "pre",
    out: str | os.PathLike[str] | None = None,
    data: Any = None,
    progress: Callable[[str], None] | None = None,
    executor: Executor = "local",
) -> Sweep:
    """Runs every combination of the values in a grid.

    Runs that differ only in the seed, in numbers of ``training`` (``lr``, ``lr_decay``, ``momentum``, ``weight_decay``,
    ``clip_norm``) and in the method's real-valued hyperparameters share a program. Each gives the same result as
    `simulate`, up to float rounding. Runs that differ in other fields, or of which only some have a 0 in one of these,
    have separate programs.

    Args:
      config: the config that all runs share, except ``run.out``: ``out`` says where they are recorded.
      grid: dotted field -> values, e.g. ``{"training.lr": [0.01, 0.1], "run.seed": [0, 1, 2]}``. A hyperparameter of
        one of several methods is written with the method's name, and is combined with the runs of that method only:
        ``{"method.name": ["fedavg", "fedprox"], "fedprox.mu": [0.01, 0.1]}`` are three runs.
      baseline: the values, without the seed, of the runs with which the others are compared, each within its data
        setting; the first combination unless given.
      point: ``pre`` or ``post``, the evaluation point at which all runs are compared.
      out: a folder for the run directories, ``sweep.csv`` (and ``sweep.parquet`` if pyarrow is installed), ``sweep.md``
        and ``sweep.json``, from which `Sweep.load` knows the runs. Complete runs in it are not run again; interrupted
        runs continue from their newest checkpoint, which ``run.checkpoint_every`` or a signal has written. Only one
        process at a time may run in it. Nothing is written unless given.
      data: as in `simulate`.
      progress: called with a line of text when a program starts, every few seconds, and when it ends.
      executor: where programs run.

        ``local``: in this process, one after the other.

        ``ray``: as tasks of a Ray cluster: the one to which this process is connected, or the one in the environment
        variable ``RAY_ADDRESS``, or else one that is started on this machine for the sweep. A task asks for one CPU per
        run of its program, at most for all CPUs of the largest node; in a cluster with GPUs it asks for one CPU and one
        GPU. As many tasks as fit run at once, each in a separate process with the settings of JAX (``jax.config``) of
        this one. Several machines all need this package, an ``out`` on a shared file system, and the data: under an
        absolute path or in the machine's own ``$FEDJAX_PFL_DATA``.

        ``submitit``: as jobs of a SLURM cluster, one per program, with the same requirements, and with options as in
        ``{"name": "submitit", "slurm_partition": "gpu", "gpus_per_node": 1, "timeout_min": 240}``; `jobs.check_jobs`
        lists more. A job that SLURM ends for its time limit or for another job writes checkpoints and is queued again.
        The same call finds jobs that are still in the queue from an earlier process.

    Returns:
      The runs; a failed run is reported among them and does not stop the others.

    Raises:
      ConfigError: a field or value is not allowed in a config, a run directory holds another run, ``out`` is that of a
        single run, another process is running in ``out``, or the executor is unknown, not installed, has no such option
        or cannot be reached; raised before anything is run.
      KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM; with ``local``, after checkpoints are written. Tasks of Ray
        and processes of submitit's ``cluster = "local"`` are killed, and go on from their newest checkpoints in the
        next call; jobs of SLURM stay in the queue.
    """
    check_lines(progress)
    out = folder_of(config, out, executor)
    config = of_data(config, data)
    cells = [Cell(values, configured(config, values, out)) for values in combinations(config, plain(grid))]
    if data is not None and "data.source" in grid:
        raise ConfigError("grid.data.source", grid["data.source"], "nothing: data are given in its place")
    chosen = _baseline(cells, baseline)
    check_point(point)
    record = "" if out is None else record_of(cells, chosen, point)

    def write(done: list[Cell]) -> None:
        if out is not None and is_first():
            found = Sweep(done, chosen, point)
            with writable(out, "out"):
                write_atomically(out / "sweep.csv", found.csv())
                write_atomically(out / "sweep.md", found.markdown())
                write_atomically(out / "sweep.json", record)
            _write_parquet(out / "sweep.parquet", found.rows())

    with alone_in(out if is_first() else None):
        return Sweep(run_cells(cells, data, write, progress, executor), chosen, point)


def _baseline(cells: Sequence[Cell], baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of the baseline, checked; those of the first run unless given."""
    named = without_seed(cells[0].values) if baseline is None else plain(baseline)
    if not isinstance(named, Mapping) or all(without_seed(cell.values) != named for cell in cells):
        given, one = show(named) if isinstance(named, Mapping) else named, without_seed(cells[0].values)
        raise ConfigError("baseline", given, f"one of the combinations, without the seed, such as {one}")
    return dict(named)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the tidy table as Parquet, if pyarrow is installed.

    A column whose values have no common type, such as a share and a range, is written as JSON. If the file cannot be
    written, this is only a warning, because the runs have already ended.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return

    def column(values: list[Any]) -> Any:
        try:
            return pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):
            return pyarrow.array([None if value is None else json.dumps(value) for value in values])

    try:
        table = pyarrow.table({name: column([row[name] for row in rows]) for name in next(iter(rows), {})})
        with replacing(path) as partial:
            pyarrow.parquet.write_table(table, partial)
    except (pyarrow.ArrowException, OSError) as error:
        warnings.warn(f"{path} is not written: {error}", stacklevel=3)
