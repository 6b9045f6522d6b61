"""``sweep(config, grid)``: a run for every combination of some fields, in as few programs as their shapes allow.

Runs that differ in nothing but their seed and in numbers that no shape depends on become rows of one program, compiled
once: on a CPU every core takes its share of them, on an accelerator they run side by side.
"""

import csv
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.checkpoint import complete_run
from fedjax_pfl.experiment.config import Config, load_config, read_toml
from fedjax_pfl.experiment.executors import EXECUTORS, Outcome, check_executor
from fedjax_pfl.experiment.programs import program_inputs
from fedjax_pfl.experiment.record import RunDirectory, check_tensorboard, write_atomically
from fedjax_pfl.experiment.tables import NONE, figures_of, mean_and_spread, paired_p
from fedjax_pfl.experiment.tables import grid as markdown_table

SEED = "run.seed"
# A value of one of these brings a table of options of its own.
_SELECTORS = ("method.name", "model.name", "data.partition.kind")
_COLUMNS = {
    "headline": "judged by",
    "pre": "PRE",
    "post": "POST",
    "best": "best",
    "worst_10_percent": "worst 10 %",
    "global": "global",
}


class Cell(NamedTuple):
    """One run of a sweep.

    Attributes:
      values: field -> value, of the fields in the grid.
      config: its config.
      summary: what ``summary.json`` says; None where the run failed.
      error: why it failed.
    """

    values: dict[str, Any]
    config: Config
    summary: dict[str, Any] | None = None
    error: str | None = None


class Sweep(NamedTuple):
    """All runs of a sweep, in the order of the grid.

    Attributes:
      cells: one per combination.
      baseline: the values, without the seed, of the runs that the t-test compares with.
    """

    cells: list[Cell]
    baseline: dict[str, Any]

    @property
    def failed(self) -> list[Cell]:
        """The runs that failed."""
        return [cell for cell in self.cells if cell.summary is None]

    def rows(self) -> list[dict[str, Any]]:
        """The tidy table: a row per run with the fields of the grid, the figures of `report.figures_of`, any error."""
        return [
            {**cell.values, **(figures_of(cell.summary) if cell.summary else {}), "error": cell.error}
            for cell in self.cells
        ]

    def csv(self) -> str:
        """The tidy table; what a run does not have stays empty."""
        rows = [{name: "" if _is_nan(value) else value for name, value in row.items()} for row in self.rows()]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(itertools.chain(*rows))), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def markdown(self) -> str:
        """Mean and sample standard deviation over seeds of each combination, the best headline in bold."""
        combinations: dict[str, dict[int, Cell]] = {}
        for cell in self.cells:
            seeds = combinations.setdefault(_show(_without_seed(cell.values)), {})
            if cell.summary:
                seeds[cell.config.run.seed] = cell
        judged = {name: _by_seed(cells, "headline") for name, cells in combinations.items()}
        means = {name: np.mean(list(values.values())) for name, values in judged.items() if values}
        best = max(means, key=lambda name: means[name], default=None)
        base = _show(self.baseline)
        rows = []
        for name, cells in combinations.items():
            p = None if name == base else paired_p(judged[name], judged.get(base, {}))
            percents = {
                figure: mean_and_spread([100 * value for value in _by_seed(cells, figure).values() if value == value])
                for figure in _COLUMNS
            }
            if name == best:
                percents["headline"] = f"**{percents['headline']}**"
            rows.append([name or "all", str(len(cells)), *percents.values(), NONE if p is None else f"{p:.3g}"])
        legend = (
            "Accuracy in %, unweighted mean over clients, after the last round; mean over seeds ± sample standard "
            "deviation. Judged by: PRE, after aggregation, or POST, after local training, as the method has it; best "
            "(of the evaluated rounds) and worst 10 % likewise. p: two-sided paired t-test over seeds against "
            f"{base or 'all'}."
        )
        failed = [f"**Failed**: {_show(cell.values)}: {cell.error}" for cell in self.failed]
        return "\n\n".join([legend, markdown_table(["run", "seeds", *_COLUMNS.values(), "p"], rows), *failed]) + "\n"


def sweep(
    config: Config,
    grid: Mapping[str, Sequence[Any]],
    *,
    baseline: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    data: Sequence[np.ndarray] | None = None,
    progress: Callable[[str], None] | None = None,
    executor: str = "local",
) -> Sweep:
    """Runs every combination of the values in a grid.

    Runs that differ in the seed, in numbers of ``training`` (``lr``, ``lr_decay``, ``momentum``, ``weight_decay``,
    ``clip_norm``) and in the method's real-valued hyperparameters share a program; each gives what `simulate` would
    give on its own, up to float rounding. Other fields make programs of their own.

    Args:
      config: what all runs share.
      grid: dotted field -> values, e.g. ``{"training.lr": [0.01, 0.1], "run.seed": [0, 1, 2]}``.
      baseline: the values, without the seed, of the runs that the t-test compares with; the first combination unless
        given.
      out: a folder for run directories, ``sweep.csv`` (and ``sweep.parquet`` where pyarrow is installed) and
        ``sweep.md``. Complete runs that are found there are not run again. Nothing is written unless given.
      data: as in `simulate`.
      progress: called with a line of text when a program starts and has evaluated a round; with Ray, when it is handed
        over and ends.
      executor: where programs run: ``local``, here, one after the other; or ``ray``, as tasks of the Ray cluster that
        this process is connected to, or that the environment variable ``RAY_ADDRESS`` names, or else of one that is
        started on this machine for the sweep. A task asks for a CPU per run of its program, at most for all of the
        largest node, or, in a cluster with GPUs, for one CPU and one GPU; all that fit run at once, each in a process
        of its own, which takes over the settings of JAX (``jax.config``). On several machines, all need this package,
        ``out`` must be on a file system that they share, and data must be found on each: under an absolute path or the
        machine's own ``$FEDJAX_PFL_DATA``.

    Returns:
      The runs; one that failed is reported among them and does not stop the others.

    Raises:
      ConfigError: a field or value that no config can have, a run directory holds another run, or the executor is
        unknown, not installed or cannot be reached; raised before anything is run.
    """
    check_executor(executor)
    if config.run.tensorboard:
        check_tensorboard(out)
    if out is not None and executor == "ray":  # workers may have another working directory
        out = Path(out).absolute()
    if out is not None:
        RunDirectory(out, overwrite=True)  # raises where it is a file
    cells = [Cell(values, _configure(config, values, out)) for values in _combinations(grid)]
    chosen = dict(baseline) if baseline is not None else _without_seed(cells[0].values)
    if all(_without_seed(cell.values) != chosen for cell in cells):
        raise ConfigError("baseline", _show(chosen), "one of the combinations in the grid, without the seed")
    found = ((number, complete_run(cell.config)) for number, cell in enumerate(cells))
    done = {number: cells[number]._replace(summary=summary) for number, summary in found if summary is not None}

    def result() -> Sweep:
        return Sweep([done[number] for number in sorted(done)], chosen)

    def write() -> None:
        if out is not None:
            write_atomically(Path(out) / "sweep.csv", result().csv())
            write_atomically(Path(out) / "sweep.md", result().markdown())

    programs = _programs(cells, set(done))

    def take(program: int, outcome: Outcome) -> None:
        for at, number in enumerate(programs[program]):
            if isinstance(outcome, str):
                done[number] = cells[number]._replace(error=outcome)
            else:
                done[number] = cells[number]._replace(summary=outcome[at])
        write()

    if programs:
        configs = [[cells[number].config for number in numbers] for numbers in programs]
        EXECUTORS[executor](configs, data, progress or (lambda line: None), take)
    write()
    if out is not None:
        _write_parquet(Path(out) / "sweep.parquet", result().rows())
    return result()


def load_sweep(
    path: str | os.PathLike[str],
) -> tuple[Config, dict[str, list[Any]], dict[str, Any] | None]:
    """Reads a sweep file: ``config``, a path beside it; ``overrides``; tables ``grid`` and, if wanted, ``baseline``.

    Returns:
      Config, grid and baseline, as `sweep` takes them.

    Raises:
      ConfigError: the file is missing or no TOML, or what it says cannot be used.
    """
    tables = read_toml(path, "sweep file")
    unknown = sorted(tables.keys() - {"config", "overrides", "grid", "baseline"})
    if unknown or [type(tables.get(key, {})) for key in ("config", "grid", "baseline")] != [str, dict, dict]:
        allowed = f"config (a path), [grid]; optional: overrides, [baseline]; it has {', '.join(unknown or tables)}"
        raise ConfigError("sweep file", str(path), allowed)
    config = load_config(Path(path).parent / tables["config"], tables.get("overrides", []))
    chosen = tables.get("baseline")
    return config, _dotted(tables.get("grid", {})), None if chosen is None else _dotted(chosen)


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in tables.items():
        fields |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return fields


def _combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    if not grid:
        raise ConfigError("grid", {}, "one field or more, each with a list of values")
    for field, values in grid.items():
        listed = isinstance(values, Sequence) and not isinstance(values, str)
        if not listed or not values or any(value in values[:at] for at, value in enumerate(values)):
            raise ConfigError(f"grid.{field}", values, "a list of one value or more, each of them once")
        if field.startswith("run.") and field != SEED:
            raise ConfigError(f"grid.{field}", values, f"of the run table, {SEED} alone changes numbers")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _configure(config: Config, values: Mapping[str, Any], out: str | os.PathLike[str] | None) -> Config:
    """The config of a combination."""
    tables = config.model_dump()
    for field in sorted(values, key=lambda field: field not in _SELECTORS):  # these first: they bring their defaults
        *sections, key = field.split(".")
        if not sections:
            raise ConfigError(f"grid.{field}", values[field], "a dotted field such as training.lr")
        table: dict[str, Any] = tables
        for section in sections:
            if not isinstance(table.get(section), dict):
                allowed = f"a field of the config; {section} is none of its tables"
                raise ConfigError(f"grid.{field}", values[field], allowed)
            table = table[section]
        if field in _SELECTORS and table[key] != values[field]:
            table.clear()
        table[key] = values[field]
    tables["run"]["out"] = None if out is None else str(Path(out) / _folder(values))
    return Config(**tables)


def _programs(cells: Sequence[Cell], done: set[int]) -> list[list[int]]:
    """The numbers of the cells that are still to be run, by the program that they are rows of."""
    programs: dict[str, list[int]] = {}
    for number, cell in enumerate(cells):
        if number not in done:
            tables = cell.config.model_dump(mode="json")
            tables["run"] |= {"seed": None, "out": None}
            for field in program_inputs(cell.config):
                section, _, key = field.partition(".")
                tables[section][key] = None
            programs.setdefault(json.dumps(tables, sort_keys=True), []).append(number)
    return list(programs.values())


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def _by_seed(cells: Mapping[int, Cell], figure: str) -> dict[int, float]:
    return {seed: figures_of(cell.summary)[figure] for seed, cell in cells.items() if cell.summary}


def _without_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in values.items() if field != SEED}


def _show(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={value}" for field, value in values.items())


def _folder(values: Mapping[str, Any]) -> str:
    """A run directory's name, as readable as file systems allow."""
    name = ",".join(f"{field}={value}" for field, value in values.items())
    return "".join(letter if letter.isalnum() or letter in "=,._-+" else "_" for letter in name)


def _is_nan(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
