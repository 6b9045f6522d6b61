"""``compare(config, methods, seeds)``: runs several methods under one protocol and makes the table that papers show.

It is a sweep over ``method.name`` and ``run.seed``; the seeds of a method are rows of one program.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_pfl.data.dealing import counted
from fedjax_pfl.data.sources import load
from fedjax_pfl.errors import ConfigError, one_part_of
from fedjax_pfl.experiment.build import make_engine, of_data, shape_of
from fedjax_pfl.experiment.cells import check_lines, check_point, folder_of, run_cells
from fedjax_pfl.experiment.config import Config, plain
from fedjax_pfl.experiment.distributed import is_first
from fedjax_pfl.experiment.executors import Executor
from fedjax_pfl.experiment.folders import alone_in, writable, write_atomically
from fedjax_pfl.experiment.frames import client_frame, difference_frame, history_frame, pivot, run_frame
from fedjax_pfl.experiment.gathered import record_of
from fedjax_pfl.experiment.grid import file_name
from fedjax_pfl.experiment.headline import runs_in_short
from fedjax_pfl.experiment.html import runs_html
from fedjax_pfl.experiment.latex_table import latex
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.plots.curves import plot_curves
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.registry import load_entry_points
from fedjax_pfl.experiment.summary import POINTS, flat
from fedjax_pfl.experiment.tables import SEED, Cell, check_figure, csv_of, markdown, rows_of
from fedjax_pfl.methods import METHODS

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas

Methods = Sequence[str] | Mapping[str, Mapping[str, Any]]
"""Names, or names with hyperparameters: ``{"fedprox": {"mu": 0.1, "training.lr": 0.02}, "ditto": {}}``.

A variant of a method has a name of its own and names its method: ``{"fedprox": {}, "strong": {"method": "fedprox",
"mu": 1.0}}``.
"""


class Comparison(NamedTuple):
    """All runs of a comparison, in the order in which the methods were given.

    The same call of `compare` with the same ``out`` reads a folder that it has written, without running anything;
    `Sweep.load` makes a table of the folder without config and data.

    Attributes:
      config: the config that all runs share.
      cells: the runs, one per method and seed.
      baseline: the method with which the others are compared.
      point: ``pre`` or ``post``, the evaluation point at which they are compared.
    """

    config: Config
    cells: list[Cell]
    baseline: str
    point: str = "pre"

    def __repr__(self) -> str:
        return runs_in_short("Comparison", self.cells, self.point)

    def _repr_html_(self) -> str:
        return runs_html(self.markdown())

    @property
    def failed(self) -> list[Cell]:
        """The runs that failed."""
        return [cell for cell in self.cells if cell.summary is None]

    def by_seed(self, method: str, figure: str | None = None) -> dict[int, float]:
        """Seed -> a figure of a method's runs: one of `summary.figures_of`; the accuracy at ``point`` unless given.

        Raises:
          ConfigError: there is no such method or figure.
        """
        if method not in (known := dict.fromkeys(map(_name, self.cells))):
            raise ConfigError("method", method, f"one of those compared: {', '.join(known)}")
        figure = check_figure(self.cells, "figure", self.point if figure is None else figure)
        ended = [cell for cell in self.cells if _name(cell) == method and cell.summary]
        return {cell.seed: cell.figures.get(figure, math.nan) for cell in ended}

    def rows(self) -> list[dict[str, Any]]:
        """One row per run: method, seed, the figures that `Sweep.rows` has, and the error of a failed run."""
        return rows_of(self._named())

    def csv(self) -> str:
        """`rows` as CSV, one line per run."""
        return csv_of(self.rows())

    def markdown(self) -> str:
        """The table in Markdown: one row per method, the best in bold."""
        data = self.config.data
        seeds = ", ".join(str(seed) for seed in dict.fromkeys(cell.seed for cell in self.cells))
        title = f"# {data.source}, {data.partition['kind']}, {self.config.model['name']}"
        rounds, clients = counted(self.config.training.rounds, "round"), counted(data.clients, "client")
        what = f"{rounds}, {clients}, seeds {seeds}; {data.evaluate_on} samples."
        of_one = "; ".join(f"{name}: {changes}" for name, changes in self._changes().items())
        what += f" What one method has of its own: {of_one}." if of_one else ""
        table = markdown(self.cells, {"method.name": self.baseline}, self.point, heading="method")
        return f"{title}\n\n{what}\n\n{table}"

    def to_frame(self, *, history: bool = False) -> "pandas.DataFrame":
        """`rows` as a pandas frame; or, for curves, one row per run and evaluated round.

        Args:
          history: whether to return the evaluated rounds, with the columns ``method``, ``seed``, ``round`` and the
            metrics of ``Result.history``.

        Raises:
          ConfigError: pandas is not installed.
        """
        return history_frame(self._named()) if history else run_frame(self._named())

    def clients_frame(self) -> "pandas.DataFrame":
        """The clients of all runs as a pandas frame: ``method``, ``seed``, and the columns of ``Result.clients``.

        Raises:
          ConfigError: pandas is not installed.
        """
        return client_frame(self._named())

    def pivot(
        self,
        index: str | Sequence[str] | None = None,
        columns: str | Sequence[str] | None = None,
        values: str | None = None,
        *,
        aggregate: str = "mean",
    ) -> "pandas.DataFrame":
        """A figure aggregated over seeds, by method; as `Sweep.pivot`, with the fields ``method`` and ``seed``."""
        return pivot(self._named(), "seed", index, columns, values or self.point, aggregate)

    def differences(self, point: str | None = None) -> "pandas.DataFrame":
        """The differences of the table, method minus baseline, as numbers: accuracies in [0, 1], not in %.

        Columns: ``method``; ``difference``, the mean over the seeds that both have; ``low`` and ``high``, its 95 %
        interval over seeds; ``clients_low`` and ``clients_high``, its 95 % bootstrap interval over clients, where each
        client is drawn with its scores of all seeds; ``p``, p-value of the paired t-test over seeds; ``p_holm``, the
        same after Holm's correction; ``seeds``, the number of seeds that both have.

        Args:
          point: ``pre`` or ``post``; the point at which the table compares unless given.

        Raises:
          ConfigError: there is no such point, or pandas is not installed.
        """
        point = check_point(self.point if point is None else point)
        found = difference_frame(self.cells, {"method.name": self.baseline}, point)
        return found.rename(columns={"method.name": "method"})

    def to_latex(self, figures: Sequence[str] = POINTS, *, bold: bool = True) -> str:
        """The table in LaTeX, for the package booktabs: one row per method; as `Sweep.to_latex`."""
        return latex(self.cells, figures, heading="method", bold=bold)

    def plot(
        self,
        metric: str = "pre.accuracy",
        x: str = "round",
        *,
        errorbar: str | None = "sd",
        ax: "matplotlib.axes.Axes | None" = None,
    ) -> "matplotlib.axes.Axes":
        """Draws a metric over the evaluated rounds: one line per method, the mean over seeds; as `Sweep.plot`."""
        return plot_curves(self.cells, metric, x, errorbar, ax)

    def _changes(self) -> dict[str, str]:
        """Method -> its hyperparameters and fields of training that differ from what the config gives it."""
        found = {}
        for name, cell in {_name(cell): cell for cell in self.cells}.items():
            own, usual = (
                flat(of.model_dump()) for of in (cell.config, self.config.replace("method.name", cell.method))
            )
            changed = [field for field in own if own[field] != usual.get(field) and not field.startswith("run.")]
            said = [cell.method] if cell.method != name else []
            said += [f"{field.removeprefix('method.')}={own[field]!r}" for field in changed]
            if said:
                found[name] = ", ".join(said)
        return found

    def _named(self) -> list[Cell]:
        """The runs, with their values under the names that `rows` uses."""
        return [cell._replace(values={"method": _name(cell), "seed": cell.seed}) for cell in self.cells]


def _name(cell: Cell) -> str:
    """The name of a method, or of a variant of one."""
    return str(cell.values["method.name"])


def compare(
    config: Config,
    methods: Methods,
    *,
    seeds: Sequence[int] = (0,),
    baseline: str | None = None,
    point: str = "pre",
    out: str | os.PathLike[str] | None = None,
    data: Any = None,
    progress: Callable[[str], None] | None = None,
    executor: Executor = "local",
) -> Comparison:
    """Runs several methods with several seeds, all else equal, and compares them.

    Runs with the same seed have the same partition, the same initial model and the same batches in the same order
    (common random numbers), so that differences between methods can be tested as paired differences. The seeds of a
    method are rows of one program, which is compiled once.

    Args:
      config: the config that all runs share, except ``run.out``: ``out`` says where they are recorded. The
        hyperparameters in its ``method`` table belong to the method that it names.
      methods: names in ``METHODS``, or a mapping from names to hyperparameters. These override the config's;
        hyperparameters given in neither have the method's defaults. Fields of ``training`` are allowed, too, such as
        ``"training.lr"`` for a learning rate of one method only. ``"method.mu"`` means the same as ``"mu"``, so that
        the result of `tune` can be used. A variant of a method has its own name, with the method under ``"method"``.
      seeds: values of ``run.seed``.
      baseline: the method with which the others are compared; the first one unless given.
      point: ``pre`` or ``post``, the evaluation point at which all are compared, whatever their headline is.
      out: a folder for the run directories, ``comparison.md``, ``comparison.csv``, and ``comparison.json``, from which
        `Sweep.load` knows the runs. Complete runs in it are not run again, and interrupted runs are resumed. Only one
        process at a time may run in it. Nothing is written unless given.
      data: as in `simulate`.
      progress: called with a line of text when the runs of a method start, every few seconds, and when they end.
      executor: where programs run, as in `sweep`.

    Returns:
      The runs; a failed run is reported among them and does not stop the others.

    Raises:
      ConfigError: there is no such method or hyperparameter, a run directory holds another run, ``out`` is that of a
        single run, or another process is running in ``out``; raised before anything is run.
      KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM; with ``local``, after checkpoints are written. Tasks of Ray
        and processes of submitit's ``cluster = "local"`` are killed, and go on from their newest checkpoints in the
        next call; jobs of SLURM stay in the queue.
    """
    check_lines(progress)
    folder = folder_of(config, out, executor)
    check_point(point)
    config = of_data(config, data)
    cells = _cells(config, methods, seeds, folder)
    names = list(methods)
    baseline = names[0] if baseline is None else baseline
    if baseline not in names:
        raise ConfigError("baseline", baseline, f"one of the methods compared: {', '.join(names)}")
    record = "" if folder is None else record_of(cells, {"method.name": baseline}, point)

    def write(done: list[Cell]) -> None:
        if folder is not None and is_first():
            comparison = Comparison(config, done, baseline, point)
            with writable(folder, "out"):
                write_atomically(folder / "comparison.md", comparison.markdown())
                write_atomically(folder / "comparison.csv", comparison.csv())
                write_atomically(folder / "comparison.json", record)

    with alone_in(folder if is_first() else None):
        return Comparison(config, run_cells(cells, data, write, progress, executor), baseline, point)


def refusals(config: Config, methods: Sequence[str]) -> dict[str, str]:
    """Method -> why it cannot run under a config, for those of these methods that cannot; compiles nothing.

    A method may need another kind of model, or validation samples if the config sets none aside.

    Args:
      config: the config that all runs share.
      methods: names in ``METHODS``, to be run with their defaults.

    Raises:
      ConfigError: the data cannot be loaded, or none of the methods can run.
    """
    prepare(config.run)
    dataset, refused = load(config.data.source), {}
    for method in methods:
        try:
            changed = config.replace({"method.name": method})
            if config.privacy.clip is None:
                make_engine(changed, shape_of(dataset))
            else:  # whether a method can be private is known once its exchange is
                lay_out([changed], dataset)
        except ConfigError as error:
            refused[method] = error
    if refused and len(refused) == len(methods):
        raise refused[methods[0]]
    return {method: str(error) for method, error in refused.items()}


def _cells(config: Config, methods: Methods, seeds: Sequence[int], out: Path | None) -> list[Cell]:
    """The runs, before any of them is run."""
    if not isinstance(methods, Sequence | Mapping) or isinstance(methods, str):
        raise ConfigError("methods", methods, 'a list of names, or {"fedprox": {"mu": 0.1}, "ditto": {}}')
    if not isinstance(seeds, Iterable):
        raise ConfigError("seeds", seeds, "a list of seeds, such as range(3)")
    seeds = plain(list(seeds))
    for field, given in (("methods", list(methods)), ("seeds", seeds)):
        if not given or any(one in given[:at] for at, one in enumerate(given)):
            raise ConfigError(field, given, "one or more, each of them once")
    cells = []
    for name in methods:
        options = methods[name] if isinstance(methods, Mapping) else {}
        if not isinstance(options, Mapping):
            raise ConfigError(f"methods.{name}", options, "a mapping from its hyperparameters to values; {} for none")
        changes: dict[str, Any] = {"method.name": _method(name, options)}
        for key, value in options.items():
            section, dot, _ = str(key).partition(".")
            if (dot and section not in ("training", "method")) or key in ("name", "method.name"):
                raise ConfigError(f"methods.{name}", key, "one of its hyperparameters, or a field of training")
            field = key if dot else f"method.{key}"
            if field in changes:
                raise ConfigError(f"methods.{name}", key, "each field once: it is there under its other name, too")
            if key != "method":
                changes[field] = value
        for seed in seeds:
            folder = None if out is None else str(out / file_name(f"{name}-seed{seed}"))
            try:
                changed = config.replace({**changes, SEED: seed, "run.out": folder})
            except ConfigError as error:
                key = error.field.removeprefix("method.")
                field = f"methods.{name}.{key}" if key in options else error.field  # whose it is
                raise ConfigError(field, error.value, error.allowed) from None
            cells.append(Cell({"method.name": name, SEED: seed}, changed))
    return cells


def _method(name: Any, options: Mapping[str, Any]) -> Any:
    """The method that a name is, or is a variant of.

    Raises:
      ConfigError: there is none, or the name is that of another method.
    """
    method = options.get("method", name)
    if isinstance(method, str) and method not in METHODS:
        load_entry_points()
    if not isinstance(method, str) or method not in METHODS:
        hint = '; or, of a variant, {"method": "fedprox", "mu": 1.0}' if options and "method" not in options else ""
        if callable(method):
            hint = "; register_method gives a function a name"
        raise ConfigError(
            "methods" if method is name else f"methods.{name}", method, one_part_of(method, METHODS) + hint
        )
    if method != name and (name in METHODS or not isinstance(name, str) or not name.strip() or {*name} & {*"|\n"}):
        raise ConfigError("methods", name, f'a name of its own for a variant of {method}, without "|" and line breaks')
    return method
