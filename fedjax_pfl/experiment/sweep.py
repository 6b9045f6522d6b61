"""``sweep(config, grid)``: one run for every combination of some fields, in as few programs as their shapes allow.

Runs that differ only in their seed and in numbers on which no shape depends become rows of one program, which is
compiled once. On a CPU every core takes a share of them; on an accelerator they run side by side.
"""

import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_pfl.data.dataset import fingerprint
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import dataset_of, of_data, prepare
from fedjax_pfl.experiment.callbacks import check_tensorboard
from fedjax_pfl.experiment.config import Config, check_config, plain
from fedjax_pfl.experiment.distributed import is_first
from fedjax_pfl.experiment.executors import Executor, check_executor, name_and_options, run_programs
from fedjax_pfl.experiment.folders import alone_in, writable, write_atomically
from fedjax_pfl.experiment.frames import client_frame, difference_frame, history_frame, pivot, run_frame
from fedjax_pfl.experiment.gathered import cells_of, compared, folders_of, gather, record_of, table_in
from fedjax_pfl.experiment.headline import runs_in_short
from fedjax_pfl.experiment.html import runs_html
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.plots.curves import plot_curves
from fedjax_pfl.experiment.programs import alike
from fedjax_pfl.experiment.reading import load_config, read_toml
from fedjax_pfl.experiment.record import RunDirectory
from fedjax_pfl.experiment.resume import RunPlace
from fedjax_pfl.experiment.saved import check_same_data, complete_run
from fedjax_pfl.experiment.summary import POINTS, flat
from fedjax_pfl.experiment.tables import SEED, Cell, csv_of, latex, markdown, rows_of, show, without_seed
from fedjax_pfl.experiment.worker import Outcome
from fedjax_pfl.methods import METHODS

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas


# The largest number of letters, and of bytes, in the name of a run directory; file systems allow no more bytes.
_LONGEST_NAME, _MOST_BYTES = 200, 255


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
    out = folder_of(config, out, executor)
    config = of_data(config, data)
    cells = [Cell(values, _configure(config, values, out)) for values in _combinations(config, plain(grid))]
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


def run_cells(
    cells: Sequence[Cell],
    data: Any,
    write: Callable[[list[Cell]], None],
    progress: Callable[[str], None] | None,
    executor: Executor,
) -> list[Cell]:
    """Runs the cells that are not complete yet; returns all cells with their results.

    Args:
      cells: the runs, before any of them is run.
      data: as in `simulate`.
      write: called after each program with all runs that are done, in the order of the cells.
      progress: called with a line of text from time to time.
      executor: where programs run, as in `sweep`.

    Raises:
      ConfigError: the directory of a cell holds another run, or no run is possible, all for the same reason.
    """
    done: dict[int, Cell] = {}
    for number, cell in enumerate(cells):
        complete = complete_run(cell.config)
        if complete is not None:
            summary, history, clients = complete
            done[number] = cell._replace(summary=summary, history=history, clients=clients)

    def in_order() -> list[Cell]:
        return [done[number] for number in sorted(done)]

    if done and progress:
        progress(f"{len(done)} of {len(cells)} runs are complete: they are read, not run again")
    missing = [number for number in range(len(cells)) if number not in done]
    if data is not None or missing:  # else nothing is loaded
        _check_done_have_this_data([cell.config for cell in done.values()], data)
    if not missing:
        write(in_order())
    elif not done and name_and_options(executor)[0] == "local":
        _check_not_all_are_refused([cell.config for cell in cells], data)
    for places, outcome in run_configs([cells[number].config for number in missing], data, progress, executor):
        for place, ended in zip(places, outcome, strict=True):
            found = {"error": ended} if isinstance(ended, str) else ended._asdict()
            done[missing[place]] = cells[missing[place]]._replace(**found)
        write(in_order())
    return in_order()


def _check_done_have_this_data(configs: Sequence[Config], data: Any) -> None:
    """Checks that the complete runs had the same samples as the other runs would have."""
    known: dict[str, str] = {}
    for config in configs:
        if (source := config.data.source) not in known:
            known[source] = fingerprint(dataset_of(config, data))
        check_same_data(Path(str(config.run.out)), known[source], "out")


def _check_not_all_are_refused(configs: Sequence[Config], data: Any) -> None:
    """Raises an error that concerns all of these configs, such as missing data, before any is run."""
    refused: dict[str, ConfigError] = {}
    for config in configs:
        try:
            prepare(config.run)
            dataset = dataset_of(config, data)
            RunPlace(config, go_on=True)
            lay_out([config], dataset)
        except ConfigError as error:
            refused[str(error)] = error
        except Warning:  # which the caller's filters make an error
            raise
        except Exception:  # whatever a user's part does is reported with its run
            return
        else:
            return
        if len(refused) > 1:
            return
    raise next(iter(refused.values()))


def run_configs(
    configs: Sequence[Config],
    data: Any = None,
    progress: Callable[[str], None] | None = None,
    executor: Executor = "local",
) -> Iterator[tuple[list[int], Outcome]]:
    """Runs configs in as few programs as shapes allow; yields the indices of a program's configs, and its outcome."""
    places = _programs(configs)

    def report(program: int, line: str) -> None:
        if progress:
            of = [configs[place] for place in places[program]]
            runs = f"{len(of)} runs" if len(of) > 1 else "1 run"
            progress(f"program {program + 1} of {len(places)} ({of[0].method['name']}, {runs}): {line}")

    if places:
        to_run = [[configs[at] for at in of] for of in places]
        for program, outcome in run_programs(executor, to_run, data, report):
            yield places[program], outcome


def _programs(configs: Sequence[Config]) -> list[list[int]]:
    """The indices of the configs of each program.

    The runs of a program begin in the same round, so a run without a checkpoint of that round is in another one.
    """
    programs: dict[str, list[tuple[set[int], list[int]]]] = {}
    for place, config in enumerate(configs):
        beginnings = RunPlace(config, go_on=True).beginnings()
        of_shape = programs.setdefault(alike(config), [])
        for number, (shared, places) in enumerate(of_shape):
            if shared & beginnings:
                of_shape[number] = shared & beginnings, [*places, place]
                break
        else:
            of_shape.append((beginnings, [place]))
    return [places for of_shape in programs.values() for _, places in of_shape]


def check_point(point: str) -> str:
    """The name of an evaluation point, checked.

    Raises:
      ConfigError: there is no such point.
    """
    if point not in POINTS:
        raise ConfigError("point", point, "pre (after aggregation) or post (after local training)")
    return point


def check_listed(field: str, values: Any) -> None:
    """Checks the values that a field is to take.

    Raises:
      ConfigError: they are no list, or one of them is there twice.
    """
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    if not listed or not values or any(value in values[:at] for at, value in enumerate(values)):
        raise ConfigError(field, values, "a list of one value or more, each of them once")


def folder_of(config: Config, out: str | os.PathLike[str] | None, executor: Executor) -> Path | None:
    """The folder of a sweep's or comparison's runs, with the checks that are possible before any run.

    Raises:
      ConfigError: this is no config, the executor cannot be used, ``out`` is a file or the directory of a single run,
        or the config asks for files without ``out``.
    """
    check_config(config)
    out = None if out is None else os.path.expanduser(out)
    check_executor(executor, out)
    if out is None and config.run.out is not None:
        raise ConfigError("run.out", config.run.out, 'leave it out, and give out="...", a folder for all runs')
    if config.run.tensorboard:
        check_tensorboard(out, "out")
    if out is None:
        for field in ("checkpoint_every", "export", "client_history"):
            if asked := getattr(config.run, field):
                raise ConfigError(f"run.{field}", asked, "nothing without out, a folder for what each run leaves")
        return None
    of_one = RunDirectory(out, resume=True)  # raises where it is a file
    if of_one.started and of_one.begun:
        raise ConfigError("out", str(out), "a folder for many runs: this is the run directory of a single one")
    # Elsewhere, the working directory may be another one.
    return Path(out) if name_and_options(executor)[0] == "local" else Path(out).absolute()


def load_sweep(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> tuple[Config, dict[str, list[Any]], dict[str, Any] | None]:
    """Reads a sweep file: ``config``, a path beside it; ``overrides``; tables ``grid`` and, optionally, ``baseline``.

    Args:
      path: the file.
      overrides: ``section.key=value`` strings, applied after those of the file.

    Returns:
      Config, grid and baseline, as `sweep` takes them.

    Raises:
      ConfigError: the file is missing or not TOML, one of its values cannot be used, or an override is of a field that
        the grid varies.
    """
    tables = read_toml(path, "sweep file")
    unknown = sorted(tables.keys() - {"config", "overrides", "grid", "baseline"})
    if unknown or [type(tables.get(key, {})) for key in ("config", "grid", "baseline")] != [str, dict, dict]:
        has = ", ".join(unknown or tables) or "nothing"
        allowed = f"config (a path), [grid]; optional: overrides, [baseline]; it has {has}"
        raise ConfigError("sweep file", str(path), allowed)
    shared = Path(path).parent / os.path.expanduser(tables["config"])
    config = load_config(shared, tables.get("overrides", []), overrides)
    grid, chosen = flat(tables.get("grid", {})), tables.get("baseline")
    name = config.method["name"]  # what a grid says of this method alone decides for it, too
    decided = [*grid, *(f"method.{field.partition('.')[2]}" for field in grid if _owner(field, [name]) == name)]
    for override in overrides:
        given = override.partition("=")[0].strip()
        if any(given == field or given.startswith(f"{field}.") for field in decided):
            allowed = f"a field that [grid] does not give its values: change {given} there, in {path}"
            raise ConfigError("override", override, allowed)
    return config, grid, None if chosen is None else flat(chosen, values=grid)


def _baseline(cells: Sequence[Cell], baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of the baseline, checked; those of the first run unless given."""
    named = without_seed(cells[0].values) if baseline is None else baseline
    if not isinstance(named, Mapping) or all(without_seed(cell.values) != named for cell in cells):
        given, one = show(named) if isinstance(named, Mapping) else named, without_seed(cells[0].values)
        raise ConfigError("baseline", given, f"one of the combinations, without the seed, such as {one}")
    return dict(named)


def _combinations(config: Config, grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    if not isinstance(grid, Mapping) or not grid:
        raise ConfigError("grid", grid, "one field or more, each with a list of values")
    for field, values in grid.items():
        if not isinstance(field, str):
            raise ConfigError("grid", field, "dotted fields such as training.lr")
        check_listed(f"grid.{field}", values)
        if field.startswith("run.") and field != SEED:
            raise ConfigError(f"grid.{field}", values, f"another field: of [run], a grid may vary only {SEED}")
    methods = grid.get("method.name", [config.method["name"]])
    owner = {field: method for field in grid if (method := _owner(field, methods))}
    for field, method in owner.items():
        of_all = f"method.{field.partition('.')[2]}"
        if method not in methods:
            allowed = f"a hyperparameter of a method that is run: {', '.join(map(str, methods))}"
            raise ConfigError(f"grid.{field}", grid[field], allowed)
        if of_all in grid:
            raise ConfigError(f"grid.{field}", grid[field], f"nothing beside {of_all}, which is for all methods")
    found: list[dict[str, Any]] = []
    for values in itertools.product(*grid.values()):
        given = dict(zip(grid, values, strict=True))
        name = given.get("method.name", config.method["name"])
        mine = {field: value for field, value in given.items() if owner.get(field, name) == name}
        if mine not in found:
            found.append(mine)
    return found


def _owner(field: str, methods: Sequence[Any]) -> str | None:
    """The method whose hyperparameter a field is, such as ``fedprox.mu``; None for a field of the config."""
    table = field.partition(".")[0]
    return table if (table in METHODS or table in methods) and table not in Config.model_fields else None


def _configure(config: Config, values: Mapping[str, Any], out: Path | None) -> Config:
    """The config of a combination."""
    changes: dict[str, Any] = {"run.out": None if out is None else str(out / _folder(values))}
    method = values.get("method.name", config.method["name"])
    for field, value in values.items():
        _, dot, key = field.partition(".")
        if not dot:
            raise ConfigError(f"grid.{field}", value, "a dotted field such as training.lr")
        changes[f"method.{key}" if _owner(field, [method]) else field] = value
    try:
        return config.replace(changes)
    except ConfigError as error:
        section, _, key = error.field.partition(".")
        if section == "method" and key != "name" and error.field in values and "method.name" in values:
            allowed = f"{error.allowed}; as METHOD.{key}, the grid gives it to that method alone"
            raise ConfigError(error.field, error.value, allowed) from None
        raise


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

    partial = path.with_name(f".{path.name}.partial")
    try:
        table = pyarrow.table({name: column([row[name] for row in rows]) for name in next(iter(rows), {})})
        pyarrow.parquet.write_table(table, partial)
        partial.replace(path)
    except (pyarrow.ArrowException, OSError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        warnings.warn(f"{path} is not written: {error}", stacklevel=3)


def _folder(values: Mapping[str, Any]) -> str:
    """The name of a run directory; different combinations have different names."""
    return file_name(",".join(f"{field}={value}" for field, value in values.items()))


def file_name(name: str) -> str:
    """A file name that is as readable as file systems allow; different names have different file names."""
    allowed = "".join(letter if letter.isalnum() or letter in "=,._-+" else "_" for letter in name)
    short = allowed[:_LONGEST_NAME]
    if short == name and len(name.encode()) <= _MOST_BYTES:
        return name
    other = f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return short.encode()[: _MOST_BYTES - len(other)].decode(errors="ignore") + other
