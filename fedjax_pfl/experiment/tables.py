"""The table of runs: one row per combination of values, mean and spread over seeds, differences from a baseline."""

import csv
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from fedjax_pfl.data.dealing import counted
from fedjax_pfl.errors import ConfigError, one_of
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.markdown_table import markdown_table
from fedjax_pfl.experiment.statistics import (
    ENOUGH_SEEDS,
    Difference,
    bootstrap_over_clients,
    holm,
    paired_difference,
)
from fedjax_pfl.experiment.summary import FIGURES, PACKAGES, POINTS, SCORES, figures_of

NONE = "—"
SEED = "run.seed"
DIFFERENCES = ("difference", "low", "high", "clients_low", "clients_high", "p", "p_holm", "seeds")
"""The columns that `differences` adds to a row."""


class Cell(NamedTuple):
    """One run of a comparison or sweep.

    Attributes:
      values: field -> value, for the fields of the grid.
      config: the config of the run.
      summary: the content of ``summary.json``; None if the run failed.
      clients: column -> array [N], as in ``clients.csv``; None if the run failed.
      history: metric -> array over the evaluated rounds; None if the run failed.
      error: the reason of a failure, else None.
    """

    values: dict[str, Any]
    config: Config
    summary: dict[str, Any] | None = None
    clients: dict[str, np.ndarray] | None = None
    history: dict[str, np.ndarray] | None = None
    error: str | None = None

    @property
    def method(self) -> str:
        """The name of the run's method."""
        return str(self.config.method["name"])

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.config.run.seed

    @property
    def figures(self) -> dict[str, float]:
        """The figures of `summary.figures_of`; empty if the run failed."""
        return figures_of(self.summary) if self.summary else {}


class Group(NamedTuple):
    """The runs of one row of the table: one combination with several seeds.

    Attributes:
      values: the combination, without the seed.
      setting: the data setting, that is, the values of data fields; rows are compared within one setting only.
      cells: seed -> run, without the failed ones.
    """

    values: dict[str, Any]
    setting: tuple[tuple[str, Any], ...]
    cells: dict[int, Cell]

    def by_seed(self, figure: str) -> dict[int, float]:
        """Seed -> a figure of `summary.figures_of`, for the runs that have it."""
        found = {seed: cell.figures.get(figure, math.nan) for seed, cell in self.cells.items()}
        return {seed: value for seed, value in found.items() if not math.isnan(value)}

    def mean(self, figure: str) -> float:
        """The mean of a figure over seeds; NaN if no run has it."""
        found = list(self.by_seed(figure).values())
        return float(np.mean(found)) if found else math.nan

    @property
    def diverged(self) -> bool:
        """Whether one of the runs diverged: some of its logits were not finite."""
        return any(cell.summary and cell.summary.get("diverged_round") is not None for cell in self.cells.values())


PERCENT = {
    "pre": "PRE",
    "post": "POST",
    "best": "best",
    "weighted_best": "best weighted",
    "validation": "validation",
    "by_validation": "by validation",
    "std_clients": "std of clients",
    "worst_10_percent": "worst 10 %",
    "global": "global",
}
_LEGEND = (
    "Accuracy in % on {samples} samples, mean over seeds ± sample standard deviation. PRE: after aggregation, POST: "
    "after local training; both after the last round, unweighted mean over clients; *: the point at which the method "
    "is judged. {compared}For the point with *: best (of the evaluated rounds, selected on the samples that are "
    "scored), best weighted (the same, weighted by the clients' samples: PFLlib's number), {validation}std of clients, "
    "worst 10 %. Global: the global model on the pooled samples. MB: all clients, up and down. s per round: without "
    "evaluation and compilation. **Bold**: the highest mean {point}{within}."
)
# The part of the legend for each column that is not in every table.
_COMPARED = {
    "difference": "Difference: {point} minus that of {baseline}{same}, mean of the paired differences{honest} with a "
    "95 % interval over seeds. ",
    "over clients": "Over clients: its 95 % bootstrap interval over clients, each drawn with its scores of all seeds. ",
    "p": "p: paired t-test over seeds, after Holm's correction for the number of rows{within}; intervals are not "
    "corrected. ",
}


def figure_columns(cells: Sequence[Cell]) -> list[str]:
    """The figures in the tidy table: `FIGURES`, and the runs' own metrics; other scores are asked for by their name."""
    own = dict.fromkeys(name for cell in cells for name in cell.config.run.metrics)
    return [*FIGURES, *(f"{of}{name}" for name in own for of in SCORES)]


def figure_names(cells: Sequence[Cell]) -> list[str]:
    """The names of all figures of these runs."""
    return list(dict.fromkeys(itertools.chain(figure_columns(cells), *(cell.figures for cell in cells))))


def check_figure(cells: Sequence[Cell], argument: str, figure: str) -> str:
    """The name of a figure of these runs, checked.

    Raises:
      ConfigError: there is no such figure; the error names the argument and all figures of these runs.
    """
    if figure not in (known := figure_names(cells)):
        raise ConfigError(argument, figure, one_of(figure, known))
    return figure


def grouped(cells: Iterable[Cell]) -> list[Group]:
    """The runs by combination, in order."""
    groups: dict[str, Group] = {}
    for cell in cells:
        values = without_seed(cell.values)
        setting = tuple((field, repr(value)) for field, value in values.items() if is_of_data(field))
        group = groups.setdefault(show(values), Group(values, setting, {}))
        if cell.summary is not None:
            group.cells[cell.seed] = cell
    return list(groups.values())


def markdown(cells: Sequence[Cell], baseline: Mapping[str, Any], point: str, *, heading: str = "run") -> str:
    """The table in Markdown, with its legend, what failed and what to be careful about.

    Args:
      cells: the runs.
      baseline: the values, without the seed, of the row with which the others are compared, each within its own data
        setting.
      point: ``pre`` or ``post``, the evaluation point at which all rows are compared, whatever their headline is.
      heading: heading of the first column.
    """
    groups = grouped(cells)
    if not groups:
        return "No runs.\n"
    gaps = _gaps(groups, baseline, point)
    best: dict[Any, float] = {}
    for group in groups:
        best[group.setting] = max(_printed(group, point), best.get(group.setting, 0.0))
    shown = [_row(gap, point, heading, bold=_printed(gap.group, point) == best[gap.group.setting] > 0) for gap in gaps]
    names = [name for name in shown[0] if name == heading or any(row[name] != NONE for row in shown)]
    table = markdown_table(names, [[row[name] for name in names] for row in shown])
    return "\n\n".join([_legend(cells, baseline, point, names), table, *_notes(cells, gaps, point)]) + "\n"


def _legend(cells: Sequence[Cell], baseline: Mapping[str, Any], point: str, names: Sequence[str]) -> str:
    """What the columns of these names mean."""
    several = len({group.setting for group in grouped(cells)}) > 1
    attacked = _attacked(cells)
    words = {
        "point": point.upper(),
        "baseline": show({field: value for field, value in baseline.items() if not is_of_data(field)}) or "all",
        "same": " in the same data setting" if several else "",
        "honest": " between clients that are honest in both" if attacked else "",
        "within": " of a data setting" if several else "",
    }
    return _LEGEND.format(
        samples=evaluated_on(cells),
        compared="".join(text.format(**words) for name, text in _COMPARED.items() if name in names),
        validation="".join(
            f"{name} ({text}), "
            for name, text in {
                "validation": "the highest on validation samples",
                "by validation": "on the scored samples in that round",
            }.items()
            if name in names
        ),
        **words,
    )


def _attacked(cells: Iterable[Cell]) -> bool:
    return any(cell.config.attack.kind != "none" for cell in cells)


def evaluated_on(cells: Sequence[Cell]) -> str:
    """The samples on which runs are scored, in words."""
    return " or ".join(dict.fromkeys(cell.config.data.evaluate_on for cell in cells))


def _printed(group: Group, figure: str) -> float:
    """The mean of a row in %, as it is printed; 0 without runs."""
    accuracies = [100 * value for value in group.by_seed(figure).values()]
    return float(mean_and_spread(accuracies).split()[0]) if accuracies else 0.0


def _guesses(groups: Sequence[Group]) -> list[str]:
    """The accuracy of always answering a client's most frequent class, within each data setting, as text."""
    said = []
    for setting in dict.fromkeys(group.setting for group in groups):
        members = [(group, _guess_by_seed(group)) for group in groups if group.setting == setting]
        merged: dict[int, float] = {}
        alike = all(merged.setdefault(seed, value) == value for _, of in members for seed, value in of.items())
        # The clients that are scored may differ from row to row, for instance with different shares of malicious ones.
        of_rows = [(show(group.values), of) for group, of in members]
        of_all = [(show({field: value for field, value in members[0][0].values.items() if is_of_data(field)}), merged)]
        for name, of in of_all if alike else of_rows:
            said += [f"{mean_and_spread(list(of.values()))} %{name and f' ({name})'}"] if of else []
    return (
        [f"Always answering the class that a client has most training samples of: {'; '.join(said)}."] if said else []
    )


def _guess_by_seed(group: Group) -> dict[int, float]:
    """Seed -> this accuracy in %, for the runs whose summaries have it (those of version 0.1 do not)."""
    guesses = {seed: (cell.summary or {}).get("majority_class") for seed, cell in group.cells.items()}
    return {seed: 100 * guess["accuracy"] for seed, guess in guesses.items() if guess}


def _of_data(cells: Sequence[Cell]) -> list[str]:
    """The notes on the runs' data, each once; with the data settings and seeds that have it, if others do not."""
    settings: set[str] = set()
    noted: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.summary:
            setting = show({field: value for field, value in cell.values.items() if is_of_data(field) or field == SEED})
            settings.add(setting)
            for note in cell.summary.get("notes", ()):  # version 0.1 has none
                noted.setdefault(note, {})[setting] = None
    return [
        f"**Data**: {note}" + (f" ({'; '.join(of)})" if len(of) < len(settings) else "") for note, of in noted.items()
    ]


def _mixed_versions(cells: Sequence[Cell]) -> list[str]:
    """A note on the versions with which the runs were made, if these differ."""
    environments = [cell.summary.get("environment", {}) for cell in cells if cell.summary]
    of_runs = (tuple(f"{name} {of[name]}" for name in PACKAGES if name in of) for of in environments)
    found = dict.fromkeys(of for of in of_runs if of)
    if len(found) < 2:
        return []
    shared = set.intersection(*map(set, found))
    told = "; ".join(", ".join(package for package in of if package not in shared) for of in found)
    return [f"**Several versions**: runs were made with {told}: their numbers may differ for that alone."]


def is_of_data(field: str) -> bool:
    """Whether a field belongs to the data setting, within which methods are compared."""
    return field.startswith("data.")


def _is_row(group: Group, baseline: Mapping[str, Any]) -> bool:
    """Whether this is the baseline's row in its data setting."""
    wanted = {field: value for field, value in baseline.items() if not is_of_data(field)}
    return all(group.values.get(field) == value for field, value in wanted.items())


class _Gap(NamedTuple):
    """How far a row is ahead of the baseline.

    Attributes:
      group: the row.
      found: paired over seeds; None for the baseline itself, and where there is nothing to pair.
      over_clients: the two ends of the interval over clients; None likewise, and if clients differ or are too few.
      p: corrected for the number of rows; NaN where there is none.
      is_baseline: whether the row is the baseline of its data setting.
    """

    group: Group
    found: Difference | None
    over_clients: tuple[float, float] | None
    p: float
    is_baseline: bool


def _gaps(groups: Sequence[Group], baseline: Mapping[str, Any], point: str) -> list[_Gap]:
    """Each row against the baseline of its data setting, in the order of the rows."""
    found: dict[int, _Gap] = {}
    for setting in dict.fromkeys(group.setting for group in groups):
        members = [at for at, group in enumerate(groups) if group.setting == setting]
        base = next((groups[at] for at in members if _is_row(groups[at], baseline)), None)
        gaps = [_difference(groups[at], base, point) for at in members]
        corrected = holm([math.nan if gap is None else gap.p for gap, _ in gaps])
        for at, gap, p in zip(members, gaps, corrected, strict=True):
            found[at] = _Gap(groups[at], *gap, p, groups[at] is base)
    return [found[at] for at in sorted(found)]


def _notes(cells: Sequence[Cell], gaps: Sequence[_Gap], point: str) -> list[str]:
    """What to be careful about, and what failed."""
    groups = [gap.group for gap in gaps]
    paired = [gap.found.seeds for gap in gaps if gap.found is not None]
    fewest = min([*(len(group.cells) for group in groups if group.cells), *paired], default=0)
    notes = []
    if len(groups) > 1 and 0 < fewest < ENOUGH_SEEDS:
        seeds = "one seed" if fewest == 1 else f"{fewest} seeds"
        notes.append(
            f"**{seeds[0].upper()}{seeds[1:]}**: too few to tell small differences from chance; "
            f"use {ENOUGH_SEEDS} or more for a claim."
        )
    alone = [gap.group for gap in gaps if gap.found is None and not gap.is_baseline and gap.group.by_seed(point)]
    if alone:
        named = "; ".join(show(group.values) for group in alone)
        why = "the baseline has no run of the same seed in the same data setting"
        why += ", or no client is honest in both" if _attacked(cells) else ""
        notes.append(f"**Not compared**: {named}: {why}.")
    notes += _guesses(groups)
    notes += _of_data(cells)
    notes += _mixed_versions(cells)
    if any(group.diverged for group in groups):
        notes.append(
            "†: diverged: some logits were NaN or infinite, which count as wrong; try a smaller learning rate."
        )
    failed = [f"**Failed**: {show(cell.values)}: {cell.error}" for cell in cells if cell.summary is None]
    return notes + [" ".join(note.split()) for note in failed]  # an empty line would begin another block


def differences(cells: Sequence[Cell], baseline: Mapping[str, Any], point: str) -> list[dict[str, Any]]:
    """What the table says of differences, as numbers: a row per combination, but for the baseline; see `Comparison`."""
    rows = []
    for group, found, over_clients, p, _ in _gaps(grouped(cells), baseline, point):
        if found is not None:
            of_clients = over_clients or (math.nan, math.nan)
            numbers = (found.mean, found.low, found.high, *of_clients, found.p, p, found.seeds)
            rows.append({**group.values, **dict(zip(DIFFERENCES, numbers, strict=True))})
    return rows


def _difference(group: Group, base: Group | None, point: str) -> tuple[Difference | None, tuple[float, float] | None]:
    """Paired difference and interval over clients; None for the baseline itself, and where there is nothing to pair."""
    if base is None or group is base:
        return None, None
    found = paired_difference(group.by_seed(point), base.by_seed(point))
    if found is None:
        return None, None
    column = f"{point}_accuracy"
    pairs = {seed: (cell.clients, base.cells[seed].clients) for seed, cell in group.cells.items() if seed in base.cells}
    # Of other clients, as with another number of them, nothing can be paired.
    same = {seed: (a, b) for seed, (a, b) in pairs.items() if a and b and len(a[column]) == len(b[column])}
    if len(same) < len(pairs):
        return found, None
    gaps = {seed: of_judged(a, column) - of_judged(b, column) for seed, (a, b) in same.items()}
    if any("attacker" in clients for pair in same.values() for clients in pair):
        # Each mean is of its run's honest clients: between others, their difference would not be that of the runs.
        means = {seed: float(np.nanmean(gap)) for seed, gap in gaps.items() if not np.isnan(gap).all()}
        found = paired_difference(means, dict.fromkeys(means, 0.0))
    return found, bootstrap_over_clients(list(gaps.values()))


def of_judged(clients: Mapping[str, np.ndarray], column: str) -> Float[np.ndarray, " clients"]:
    """A column of a client table; NaN for clients that reported numbers leave out: malicious ones, and new ones."""
    apart = [clients[name] == 1 for name in ("attacker", "new") if name in clients]
    return np.where(np.any(apart, axis=0), np.nan, clients[column]) if apart else clients[column]


def _row(gap: _Gap, point: str, heading: str, *, bold: bool) -> dict[str, str]:
    group, found, over_clients, p, _ = gap
    summaries = [cell.summary for cell in group.cells.values() if cell.summary]
    headline = summaries[0]["headline"] if summaries else None
    row = {heading: (show(group.values) or "all") + (" †" if group.diverged else ""), "seeds": str(len(group.cells))}
    for figure, name in PERCENT.items():
        row[name] = mean_and_spread([100 * value for value in group.by_seed(figure).values()])
        if bold and figure == point:
            row[name] = f"**{row[name]}**"
        if figure == headline:
            row[name] += " *"
        if figure == POINTS[-1]:  # what is compared stands before what else there is to know
            row["difference"] = NONE if found is None else _interval(found.low, found.high, found.mean)
            if found is not None and found.seeds < len(group.cells):
                row["difference"] += f" ({counted(found.seeds, 'seed')})"
            row["over clients"] = NONE if over_clients is None else _interval(*over_clients)
            row["p"] = NONE if math.isnan(p) else f"{p:.3g}"
    traffic = group.mean("megabytes")
    row["MB"] = _fixed(traffic, decimals(traffic))
    row["s per round"] = _fixed(group.mean("seconds_per_round"), 3)
    return row


def decimals(megabytes: float) -> int:
    """The number of decimals with which traffic is shown: 1, or as many as give two digits of a value below 1."""
    return 1 - math.floor(math.log10(megabytes)) if 0 < megabytes < 1 else 1


def _fixed(value: float, digits: int) -> str:
    return NONE if math.isnan(value) else f"{value:.{digits}f}"


def _interval(low: float, high: float, mean: float | None = None) -> str:
    ends = "" if math.isnan(low) else f"[{100 * low:+.2f}, {100 * high:+.2f}]"
    return ends if mean is None else f"{100 * mean:+.2f} {ends}".rstrip()


def fields_of(cells: Sequence[Cell]) -> list[str]:
    """The names of the values that runs have: first those of a run with most of them."""
    return list(dict.fromkeys(itertools.chain(*sorted((cell.values for cell in cells), key=len, reverse=True))))


def rows_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The tidy table: a row per run with the fields of the grid, the figures of `figure_columns`, any error.

    All rows have the same columns: None for a value, NaN for a figure that a run does not have.
    """
    fields, figures = fields_of(cells), figure_columns(cells)
    return [
        {
            **{field: cell.values.get(field) for field in fields},
            **dict.fromkeys(figures, math.nan),
            **{figure: value for figure, value in cell.figures.items() if figure in figures},
            "diverged_round": cell.summary and cell.summary.get("diverged_round"),
            "error": cell.error,
        }
        for cell in cells
    ]


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; what a run does not have stays empty."""
    shown = [{name: "" if _is_nothing(value) else value for name, value in row.items()} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(itertools.chain(*shown))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(shown)
    return text.getvalue()


def without_seed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a combination but for the seed."""
    return {field: value for field, value in values.items() if field != SEED}


def show(values: Mapping[str, Any]) -> str:
    """A combination in one line; the method goes by its name alone."""
    forms = {"method.name": "{1}", SEED: "seed {1}"}
    return ", ".join(forms.get(field, "{0}={1}").format(field, value) for field, value in values.items())


def mean_and_spread(values: Sequence[float] | np.ndarray, digits: int = 2) -> str:
    """The mean, with the sample standard deviation if there are two values or more; a dash without any."""
    if not len(values):
        return NONE
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
