"""``compare(config, methods, seeds)``: the table that papers print, methods side by side under one protocol."""

import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.checkpoint import complete_run
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.driver import Progress, simulate
from fedjax_pfl.experiment.record import RunDirectory, check_tensorboard, write_atomically
from fedjax_pfl.experiment.tables import NONE, figures_of, grid, mean_and_spread, paired_p
from fedjax_pfl.methods import METHODS

_LEGEND = (
    "Accuracy in % after {rounds} rounds, unweighted mean over {clients} clients; mean over seeds {seeds} ± sample "
    "standard deviation. PRE: after aggregation; POST: after local training; *: what the method is judged by, and what "
    "best (over the evaluated rounds, selected on {evaluated_on} data), std of clients and worst 10 % are of. "
    "Global: the shared model on the pooled {evaluated_on} set. MB: all clients, up and down. "
    "p: two-sided paired t-test over seeds against {baseline}."
)


class Cell(NamedTuple):
    """One run of a comparison.

    Attributes:
      method: its name.
      seed: its seed.
      summary: what ``summary.json`` says; None where the run failed.
      error: why it failed.
    """

    method: str
    seed: int
    summary: dict[str, Any] | None
    error: str | None = None


class Comparison(NamedTuple):
    """All runs of a comparison, in the order in which the methods were given.

    Attributes:
      config: what all runs share.
      cells: one per method and seed.
      baseline: the method that the t-test compares with.
    """

    config: Config
    cells: list[Cell]
    baseline: str

    @property
    def failed(self) -> list[Cell]:
        """The runs that failed."""
        return [cell for cell in self.cells if cell.summary is None]

    def by_seed(self, method: str, figure: str = "headline") -> dict[int, float]:
        """A figure of a method's runs; see `report.figures_of` for the names."""
        summaries = {cell.seed: cell.summary for cell in self.cells if cell.method == method}
        return {seed: figures_of(summary)[figure] for seed, summary in summaries.items() if summary is not None}

    def markdown(self) -> str:
        """The table: a row per method, the best headline accuracy in bold."""
        methods = list(dict.fromkeys(cell.method for cell in self.cells))
        judged = {method: self.by_seed(method) for method in methods}
        means = {method: np.mean(list(values.values())) for method, values in judged.items() if values}
        best = max(means, key=lambda method: means[method], default=None)
        rows = [self._row(method, judged, bold=method == best) for method in methods]
        data, seeds = self.config.data, dict.fromkeys(cell.seed for cell in self.cells)
        legend = _LEGEND.format(
            rounds=self.config.training.rounds,
            clients=data.clients,
            seeds=", ".join(map(str, seeds)),
            evaluated_on=data.evaluate_on,
            baseline=self.baseline,
        )
        title = f"# {data.source}, {data.partition['kind']}, {self.config.model['name']}"
        errors = [f"**Failed**: {cell.method}, seed {cell.seed}: {cell.error}" for cell in self.failed]
        return "\n\n".join([title, legend, grid(list(rows[0]), [list(row.values()) for row in rows]), *errors]) + "\n"

    def csv(self) -> str:
        """A line per run."""
        text = io.StringIO()
        names = ["method", "seed", "headline", "pre", "post", "best", "std_clients", "worst_10_percent", "global"]
        writer = csv.DictWriter(text, [*names, "megabytes", "seconds_per_round"], lineterminator="\n")
        writer.writeheader()
        for cell in self.cells:
            figures = figures_of(cell.summary) if cell.summary else {}
            shown = {name: "" if np.isnan(value) else value for name, value in figures.items()}
            writer.writerow({"method": cell.method, "seed": cell.seed, **shown})
        return text.getvalue()

    def _row(self, method: str, judged: dict[str, dict[int, float]], *, bold: bool) -> dict[str, str]:
        def percent(figure: str) -> str:
            values = [100 * value for value in self.by_seed(method, figure).values() if not np.isnan(value)]
            return mean_and_spread(values)

        def mean(figure: str, digits: int) -> str:
            values = list(self.by_seed(method, figure).values())
            return f"{np.mean(values):.{digits}f}" if values else NONE

        summaries = [cell.summary for cell in self.cells if cell.method == method and cell.summary is not None]
        headline = summaries[0]["headline"] if summaries else None

        def point(name: str) -> str:
            if name != headline:
                return percent(name)
            return f"**{percent(name)}** *" if bold else f"{percent(name)} *"

        p = None if method == self.baseline else paired_p(judged[method], judged.get(self.baseline, {}))
        return {
            "method": method,
            "PRE": point("pre"),
            "POST": point("post"),
            "best": percent("best"),
            "std of clients": percent("std_clients"),
            "worst 10 %": percent("worst_10_percent"),
            "global": percent("global"),
            "MB": mean("megabytes", 1),
            "s per round": mean("seconds_per_round", 3),
            "p": NONE if p is None else f"{p:.3g}",
        }


def compare(
    config: Config,
    methods: Sequence[str],
    *,
    seeds: Sequence[int] = (0,),
    baseline: str | None = None,
    out: str | os.PathLike[str] | None = None,
    data: Sequence[np.ndarray] | None = None,
    progress: Callable[[str, int, Progress], None] | None = None,
) -> Comparison:
    """Runs several methods with several seeds, all else equal, and sums them up.

    Runs with the same seed have the same partition, the same initial model and the same batches in the same order
    (common random numbers), so that differences between methods can be tested pair by pair.

    Args:
      config: what all runs share. The hyperparameters in its ``method`` table are those of the method it names; the
        other methods run with their defaults.
      methods: names in ``METHODS``.
      seeds: values of ``run.seed``.
      baseline: the method that the t-test compares with; the first one unless given.
      out: a folder for run directories, ``comparison.md`` and ``comparison.csv``. Complete runs that are found there
        are not run again, interrupted ones are resumed. Nothing is written unless given.
      data: as in `simulate`.
      progress: called as in `simulate`, with method and seed before it.

    Returns:
      The runs; one that failed is reported among them and does not stop the others.

    Raises:
      ConfigError: no such method, or a run directory holds another run; raised before anything is run.
    """
    if config.run.tensorboard:
        check_tensorboard(out)
    if out is not None:
        RunDirectory(out, overwrite=True)  # raises where it is a file
    cells = _cells(config, methods, seeds, out)
    baseline = methods[0] if baseline is None else baseline
    if baseline not in methods:
        raise ConfigError("baseline", baseline, f"one of the methods compared: {', '.join(methods)}")
    found = {key: complete_run(cell) for key, cell in cells.items()}
    done: list[Cell] = []
    for (method, seed), cell_config in cells.items():

        def report(now: Progress, method: str = method, seed: int = seed) -> None:
            if progress:
                progress(method, seed, now)

        try:
            done.append(Cell(method, seed, found[method, seed] or _run(cell_config, data, report)))
        except ConfigError as error:
            done.append(Cell(method, seed, None, str(error)))
        if out is not None:
            comparison = Comparison(config, done, baseline)
            write_atomically(Path(out) / "comparison.md", comparison.markdown())
            write_atomically(Path(out) / "comparison.csv", comparison.csv())
    return Comparison(config, done, baseline)


def _cells(
    config: Config, methods: Sequence[str], seeds: Sequence[int], out: str | os.PathLike[str] | None
) -> dict[tuple[str, int], Config]:
    """The config of each run."""
    for field, given in (("methods", methods), ("seeds", seeds)):
        if not given or len(set(given)) < len(given):
            raise ConfigError(field, list(given), "one or more, each of them once")
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ConfigError("methods", unknown[0], f"allowed: {', '.join(METHODS)}")
    cells = {}
    for method in methods:
        table = config.method if config.method["name"] == method else {"name": method}
        for seed in seeds:
            tables = config.model_dump()
            folder = None if out is None else str(Path(out) / f"{method}-seed{seed}")
            tables |= {"method": table, "run": {**tables["run"], "seed": seed, "out": folder}}
            cells[method, seed] = Config(**tables)
    return cells


def _run(config: Config, data: Sequence[np.ndarray] | None, progress: Callable[[Progress], None]) -> dict[str, Any]:
    """The summary of a run, which is resumed or begun."""
    if config.run.out is None:
        return simulate(config, data, progress=progress).summary
    begun = (Path(config.run.out) / "config.toml").exists()
    record = RunDirectory(config.run.out, overwrite=begun)
    resumable = record.checkpoints.is_dir() and any(path.name.isdigit() for path in record.checkpoints.iterdir())
    resume = record.path if resumable else None
    return simulate(config, data, overwrite=begun, resume=resume, progress=progress).summary
