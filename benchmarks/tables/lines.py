"""The rows of a table in numbers: each cell's figures, and those of the paper; means, tests and ranks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedjax_pfl.experiment.statistics import paired_difference
from fedjax_pfl.experiment.summary import figures_of, harmonic_mean
from fedjax_pfl.experiment.tables import NONE

from .paper import COLUMNS, Row, Setting, Table
from .store import Cell, Key


class Line(NamedTuple):
    """A row in a setting, with cells and `figures` by seed, which are empty if nothing could be run."""

    key: str
    row: Row
    cells: dict[int, Cell]
    figures: dict[int, dict[str, float]]

    def by_seed(self, name: str) -> dict[int, float]:
        """A figure of the runs that have it."""
        return {seed: found[name] for seed, found in self.figures.items() if not np.isnan(found[name])}

    def mean(self, name: str) -> float:
        """A figure's mean over seeds."""
        return float(np.mean(list(self.by_seed(name).values())))

    def show(self, name: str, scale: float = 100.0, digits: int = 2) -> str:
        """The mean for a table."""
        return f"{scale * self.mean(name):.{digits}f}" if self.by_seed(name) else NONE


def lines_of(table: Table, setting: str, cells: Mapping[Key, Cell], missing: Mapping[Key, str]) -> list[Line]:
    """The rows of a setting that have been run or tried, in the paper's order."""
    lines = []
    for name, row in table.rows.items():
        found = {key[2]: cells[key] for key in sorted(cells) if key[:2] == (setting, name)}
        if found or any(key[:2] == (setting, name) for key in missing):
            known = {seed: figures(cell, row.point, table) for seed, cell in found.items()}
            lines.append(Line(name, row, found, known))
    return lines


def figures(cell: Cell, point: str, table: Table) -> dict[str, float]:
    """The figures of a run: of its summary, and the table's, in the headline's round; NaN for what it does not have."""
    found = figures_of({**cell, "headline": point, "traffic": {"megabytes_total": cell["megabytes_total"]}})
    if table.columns == "accuracy":
        return found | {"accuracy": found["headline"]} | (cell["best"][point] if table.headline == "best" else {})
    if table.columns == "weighted":
        return found | {"weighted": found["weighted_best"] if table.headline == "best" else found["weighted"]}
    curves = {name: curve_of(cell, name, point) for name in COLUMNS[table.columns].figures}
    known = [curve for curve in curves.values() if not np.isnan(curve).any()]
    at = int(np.argmax(known[-1])) if known and table.headline == "best" else -1
    return found | {name: float(curve[at]) for name, curve in curves.items()}


def curve_of(cell: Cell, name: str, point: str) -> np.ndarray:
    """A figure of `COLUMNS` in the evaluated rounds; NaN if it needs a global model and the run has none."""
    if name == "hm":
        return harmonic_mean(curve_of(cell, "global", point), curve_of(cell, "local", point))
    curve = cell["curve"]
    values = curve[point] if name == "accuracy" else curve["i_local"][point] if name == "local" else curve["global"]
    return np.array(values, np.float64)


def paper_figures(table: Table, setting: Setting, row: str) -> dict[str, float]:
    """The paper's figures of a row; HM is computed from the two others, if it has both, and its own is ``printed``."""
    given = setting.paper.get(row, {})
    found = given if isinstance(given, dict) else {table.ranked: given}
    if {"global", "local"} <= found.keys():
        hm = round(float(harmonic_mean(float(found["global"]), float(found["local"]))), 2)
        return found | {"hm": hm} | ({"printed": found["hm"]} if "hm" in found else {})
    return found


def clients_at(cell: Cell, point: str) -> np.ndarray:
    """The clients' accuracies after the last round; NaN for a client that cannot be scored."""
    return np.array([np.nan if value is None else value for value in cell["clients"][point]])


def paired_p(first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """p-value of the paired t-test; None if the pairs allow no test."""
    found = paired_difference(first, second)
    return None if found is None or np.isnan(found.p) else found.p


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation; None with fewer than three pairs, or if all figures of a side are the same."""
    level = np.round(pairs, 6)  # figures that only the rounding of float32 parts have the same rank
    if len(pairs) < 3 or (np.ptp(level, axis=0) == 0).any():
        return None
    return float(stats.spearmanr(level).statistic)


def mean_in(round: int, line: Line, name: str) -> float:
    """A figure of a row in a round, as the mean over seeds."""
    curves = [(cell["curve"]["round"], curve_of(cell, name, line.row.point)) for cell in line.cells.values()]
    return float(np.mean([curve[rounds.index(round)] for rounds, curve in curves]))
