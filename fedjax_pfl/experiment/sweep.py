"""``sweep(config, grid)``: a run for every combination of some fields, in as few programs as their shapes allow.

Runs that differ in nothing but their seed and in numbers that no shape depends on become rows of one program, compiled
once: on a CPU every core takes its share of them, on an accelerator they run side by side.
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
from fedjax_pfl.experiment.build import dataset_of, deal, make_engine, of_data, prepare, shape_of
from fedjax_pfl.experiment.callbacks import check_tensorboard
from fedjax_pfl.experiment.config import Config, check_config, load_config, plain, read_toml
from fedjax_pfl.experiment.distributed import is_first
from fedjax_pfl.experiment.executors import Executor, check_executor, name_and_options, run_programs
from fedjax_pfl.experiment.frames import client_frame, difference_frame, history_frame, pivot, run_frame
from fedjax_pfl.experiment.gathered import cells_of, compared, folders_of, gather, record_of, table_in
from fedjax_pfl.experiment.headline import runs_in_short
from fedjax_pfl.experiment.html import runs_html
from fedjax_pfl.experiment.plots.curves import plot_curves
from fedjax_pfl.experiment.programs import alike
from fedjax_pfl.experiment.record import (
    RunDirectory,
    alone_in,
    check_same_data,
    complete_run,
    writable,
    write_atomically,
)
from fedjax_pfl.experiment.resume import RunPlace
from fedjax_pfl.experiment.summary import POINTS, flat
from fedjax_pfl.experiment.tables import SEED, Cell, csv_of, latex, markdown, rows_of, show, without_seed
from fedjax_pfl.experiment.worker import Outcome
from fedjax_pfl.methods import METHODS

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas


# Most letters of a run directory's name. Most bytes, which may be several to a letter: file systems allow no more.
_LONGEST_NAME, _MOST_BYTES = 200, 255


class Sweep(NamedTuple):
    """All runs of a sweep, in the order of the grid.

    A folder that `sweep` has written becomes one again, without anything being run, by the same call with the same
    ``out``, or by `Sweep.load`.

    Attributes:
      cells: one per combination.
      baseline: the values, without the seed, of the runs that the others are compared with.
      point: ``pre`` or ``post``, where they are compared.
    """

    cells: list[Cell]
    baseline: dict[str, Any]
    point: str = "pre"

    @classmethod
    def load(
        cls, *paths: str | os.PathLike[str], baseline: Mapping[str, Any] | None = None, point: str | None = None
    ) -> "Sweep":
        """Runs that have ended, from their directories alone: their config files and data are not needed.

        The folder of one sweep or comparison gives what that call gave: its names, order, baseline and point. Of other
        runs, such as those of several sweeps and comparisons, some runs of one, or one of which a run has gone on
        since, the fields in which they differ take the place of a grid's. Runs that have not ended are left out.

        Args:
          paths: run directories, and folders that hold some, as `sweep`, `compare` and `simulate` leave them.
          baseline: as in `sweep`; unless given, that of the sweep or comparison, or else the first combination.
          point: likewise; ``pre`` where there is none.

        Raises:
          ConfigError: no run has ended there, there is no such baseline or point, a file is damaged, or a part that a
            config names is not registered here.
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
        """The tidy table: a row per run with the fields of the grid, the figures of `summary.figures_of`, any error."""
        return rows_of(self.cells)

    def csv(self) -> str:
        """The tidy table; what a run does not have stays empty."""
        return csv_of(self.rows())

    def markdown(self) -> str:
        """Mean and sample standard deviation over seeds of each combination, and differences from the baseline."""
        return markdown(self.cells, self.baseline, self.point)

    def to_frame(self, *, history: bool = False) -> "pandas.DataFrame":
        """The tidy table as a pandas frame; or, for curves, a row per run and evaluated round.

        Args:
          history: the latter: the fields of the grid, ``round``, and the metrics of ``Result.history``; NaN where a run
            does not have a field or metric, no row where it failed.

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
        """A figure summed up over seeds, as a pandas frame: NaN where no run has it.

        Args:
          index: one field of the grid or more, for the rows; unless given, the method and what else varies.
          columns: likewise, for the columns; unless given, the fields of the data that vary, if any do.
          values: one of the figures of `summary.figures_of`; unless given, the accuracy where the sweep compares,
            ``pre`` or ``post``. Accuracies lie in [0, 1].
          aggregate: ``mean``, ``std`` (of the sample; NaN for one seed) or ``count`` of the runs that have the figure.

        Raises:
          ConfigError: there is no such field, figure or aggregate; a field that varies is in neither index nor columns;
            pandas is not installed.
        """
        return pivot(self.cells, SEED, index, columns, values or self.point, aggregate)

    def differences(self, point: str | None = None) -> "pandas.DataFrame":
        """How far each combination is ahead of the baseline of its data setting, as the table says it, in shares.

        Columns: the fields of the grid; ``difference``, the mean over the seeds that both have; ``low`` and ``high``,
        its 95 % interval over seeds; ``clients_low`` and ``clients_high``, its 95 % bootstrap interval over clients,
        each drawn with its scores of all seeds; ``p``, of the paired t-test over seeds; ``p_holm``, after Holm's
        correction; ``seeds``, how many both have.

        Args:
          point: ``pre`` or ``post``; by default where the table compares.

        Raises:
          ConfigError: there is no such point, or pandas is not installed.
        """
        return difference_frame(self.cells, self.baseline, check_point(self.point if point is None else point))

    def to_latex(self, figures: Sequence[str] = POINTS, *, bold: bool = True) -> str:
        """A table in LaTeX, for the package booktabs: mean ± sample standard deviation over seeds, in %.

        A row per combination of what is not of the data; for each data setting, a column per figure.

        Args:
          figures: those of `summary.figures_of` that are shares.
          bold: print the highest mean of each column, and so of each data setting, in bold; ``std_clients`` has none.

        Returns:
          A ``tabular``, after comments that say what a caption may need and which runs failed.

        Raises:
          ConfigError: there is no such figure.
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
        """Draws a metric over the evaluated rounds: for each combination a line, the mean over seeds, and a band.

        Lines end with the last evaluated round that all seeds have, and combinations without the metric have none.

        Args:
          metric: a name in ``Result.history``.
          x: what lies across: ``round``, ``seconds`` since the run began, or ``megabytes`` sent up and down so far;
            the last two are means over seeds, too.
          errorbar: the band: ``sd``, a sample standard deviation up and down; ``ci``, Student's 95 % interval of the
            mean; None for none.
          ax: what to draw on, beside the lines that are there; a figure of its own unless given.

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

    Runs that differ in the seed, in numbers of ``training`` (``lr``, ``lr_decay``, ``momentum``, ``weight_decay``,
    ``clip_norm``) and in the method's real-valued hyperparameters share a program; each gives what `simulate` would
    give on its own, up to float rounding. Other fields make programs of their own.

    Args:
      config: what all runs share, but for ``run.out``: ``out`` says where they are recorded.
      grid: dotted field -> values, e.g. ``{"training.lr": [0.01, 0.1], "run.seed": [0, 1, 2]}``. A hyperparameter of
        one of several methods goes by the method's name, and is combined with that method's runs only:
        ``{"method.name": ["fedavg", "fedprox"], "fedprox.mu": [0.01, 0.1]}`` are three runs.
      baseline: the values, without the seed, of the runs that the others are compared with, each within its data
        setting; the first combination unless given.
      point: where all runs are compared: ``pre`` or ``post``.
      out: a folder for run directories, ``sweep.csv`` (and ``sweep.parquet`` where pyarrow is installed) and
        ``sweep.md``, with ``sweep.json``, by which `Sweep.load` knows the runs. Complete runs that are found there are
        not run again, interrupted ones go on from the newest checkpoint (``run.checkpoint_every``, or that of a
        signal). One process at a time runs in it. Nothing is written unless given.
      data: as in `simulate`.
      progress: called with a line of text when a program starts, every few seconds, and when it ends.
      executor: where programs run: ``local``, here, one after the other; ``ray``, as tasks of the Ray cluster that
        this process is connected to, or that the environment variable ``RAY_ADDRESS`` names, or else of one that is
        started on this machine for the sweep. A task asks for a CPU per run of its program, at most for all of the
        largest node, or, in a cluster with GPUs, for one CPU and one GPU; all that fit run at once, each in a process
        of its own, which takes over the settings of JAX (``jax.config``). On several machines, all need this package,
        ``out`` must be on a file system that they share, and data must be found on each: under an absolute path or the
        machine's own ``$FEDJAX_PFL_DATA``. All this holds, too, for ``submitit``, a job of a SLURM cluster for each
        program, with options as in ``{"name": "submitit", "slurm_partition": "gpu", "gpus_per_node": 1,
        "timeout_min": 240}``; `jobs.check_jobs` has more of them. A job that SLURM ends for others or for its time
        leaves checkpoints and is queued again; one that is still in the queue when this process has ended is found by
        the same call.

    Returns:
      The runs; one that failed is reported among them and does not stop the others.

    Raises:
      ConfigError: a field or value that no config can have, a run directory holds another run, another process is at
        work in ``out``, or the executor is unknown, not installed, has no such option or cannot be reached; raised
        before anything is run.
      KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM, after checkpoints are written.
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

    with alone_in(out if is_first() else None):
        found = Sweep(run_cells(cells, data, write, progress, executor), chosen, point)
        if out is not None and is_first():
            _write_parquet(out / "sweep.parquet", found.rows())
    return found


def run_cells(
    cells: Sequence[Cell],
    data: Any,
    write: Callable[[list[Cell]], None],
    progress: Callable[[str], None] | None,
    executor: Executor,
) -> list[Cell]:
    """Runs what is not complete yet.

    Args:
      cells: the runs, none of them run.
      data: as in `simulate`.
      write: called with all runs that are done, in the order of the cells, after each program.
      progress: called with a line of text now and then.
      executor: where, as in `sweep`.

    Raises:
      ConfigError: the directory of a cell holds another run, or no run can be, all for the same reason.
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
        for at, place in enumerate(places):
            cell = cells[missing[place]]
            if isinstance(outcome, str):
                done[missing[place]] = cell._replace(error=outcome)
            else:
                done[missing[place]] = cell._replace(**outcome[at]._asdict())
        write(in_order())
    return in_order()


def _check_done_have_this_data(configs: Sequence[Config], data: Any) -> None:
    """Checks that the runs that are done had the samples that the others would have."""
    known: dict[str, str] = {}
    for config in configs:
        if (source := config.data.source) not in known:
            known[source] = fingerprint(dataset_of(config, data))
        check_same_data(Path(str(config.run.out)), known[source], "out")


def _check_not_all_are_refused(configs: Sequence[Config], data: Any) -> None:
    """Raises what is wrong with every one of these configs, such as their data, before any is run."""
    refused: dict[str, ConfigError] = {}
    for config in {alike(config): config for config in configs}.values():
        try:
            prepare(config.run)
            dataset = dataset_of(config, data)
            RunPlace(config, go_on=True)
            deal(config, dataset)
            make_engine(config, shape_of(dataset))
        except ConfigError as error:
            refused[str(error)] = error
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
    """Runs configs in as few programs as shapes allow; gives the places of a program's configs and what came out."""
    programs: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        programs.setdefault(alike(config), []).append(place)
    places = list(programs.values())

    def report(program: int, line: str) -> None:
        if progress:
            of = [configs[place] for place in places[program]]
            runs = f"{len(of)} runs" if len(of) > 1 else "1 run"
            progress(f"program {program + 1} of {len(places)} ({of[0].method['name']}, {runs}): {line}")

    if places:
        to_run = [[configs[at] for at in of] for of in places]
        for program, outcome in run_programs(executor, to_run, data, report):
            yield places[program], outcome


def check_point(point: str) -> str:
    """The name of an evaluation point, checked.

    Raises:
      ConfigError: it is none.
    """
    if point not in POINTS:
        raise ConfigError("point", point, "pre (after aggregation) or post (after local training)")
    return point


def folder_of(config: Config, out: str | os.PathLike[str] | None, executor: Executor) -> Path | None:
    """The folder of many runs, checked as far as it can be before any of them."""
    check_config(config)
    check_executor(executor, out)
    if config.run.tensorboard:
        check_tensorboard(out)
    if out is None:
        for field, asked in (("export", config.run.export), ("client_history", config.run.client_history)):
            if asked:
                raise ConfigError(f"run.{field}", asked, "nothing without out, a folder for what each run leaves")
        return None
    RunDirectory(out, overwrite=True)  # raises where it is a file
    # Elsewhere, the working directory may be another one.
    return Path(out) if name_and_options(executor)[0] == "local" else Path(out).absolute()


def load_sweep(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> tuple[Config, dict[str, list[Any]], dict[str, Any] | None]:
    """Reads a sweep file: ``config``, a path beside it; ``overrides``; tables ``grid`` and, if wanted, ``baseline``.

    Args:
      path: the file.
      overrides: ``section.key=value`` strings, which go over the file's.

    Returns:
      Config, grid and baseline, as `sweep` takes them.

    Raises:
      ConfigError: the file is missing or no TOML, what it says cannot be used, or an override is of a field that the
        grid gives its values.
    """
    tables = read_toml(path, "sweep file")
    unknown = sorted(tables.keys() - {"config", "overrides", "grid", "baseline"})
    if unknown or [type(tables.get(key, {})) for key in ("config", "grid", "baseline")] != [str, dict, dict]:
        allowed = f"config (a path), [grid]; optional: overrides, [baseline]; it has {', '.join(unknown or tables)}"
        raise ConfigError("sweep file", str(path), allowed)
    config = load_config(Path(path).parent / tables["config"], tables.get("overrides", []), overrides)
    grid, chosen = flat(tables.get("grid", {})), tables.get("baseline")
    name = config.method["name"]  # what a grid says of this method alone decides for it, too
    decided = [*grid, *(f"method.{field.partition('.')[2]}" for field in grid if _owner(field, [name]) == name)]
    for override in overrides:
        given = override.partition("=")[0].strip()
        if any(given == field or given.startswith(f"{field}.") for field in decided):
            allowed = f"a field that [grid] does not give its values: change {given} there, in {path}"
            raise ConfigError("override", override, allowed)
    return config, grid, None if chosen is None else flat(chosen)


def _baseline(cells: Sequence[Cell], baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values that a baseline is known by, checked; those of the first run unless given."""
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
        listed = isinstance(values, Sequence) and not isinstance(values, str)
        if not listed or not values or any(value in values[:at] for at, value in enumerate(values)):
            raise ConfigError(f"grid.{field}", values, "a list of one value or more, each of them once")
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
    return config.replace(changes)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the tidy table for other programs, where pyarrow is installed.

    A column whose values have no type in common, such as a share and a range, is of their JSON. What cannot be written
    all the same is a warning: by now all runs have ended.
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
    """A run directory's name, another for each combination."""
    return file_name(",".join(f"{field}={value}" for field, value in values.items()))


def file_name(name: str) -> str:
    """A name as readable as file systems allow, another for each name."""
    allowed = "".join(letter if letter.isalnum() or letter in "=,._-+" else "_" for letter in name)
    short = allowed[:_LONGEST_NAME]
    if short == name and len(name.encode()) <= _MOST_BYTES:
        return name
    other = f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return short.encode()[: _MOST_BYTES - len(other)].decode(errors="ignore") + other
