"""The page of a table: its cells so far beside the paper's figures, with tests, intervals and what was run."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_pfl import load_config
from fedjax_pfl.experiment.markdown_table import markdown_table
from fedjax_pfl.experiment.statistics import bootstrap_over_clients, paired_difference
from fedjax_pfl.experiment.summary import POINTS, first_reached
from fedjax_pfl.experiment.tables import NONE, mean_and_spread

from .lines import Line, clients_at, curve_of, lines_of, mean_in, paired_p, paper_figures, rank_correlation
from .paper import COLUMNS, HEADLINES, ROOT, Setting, Table
from .store import Cell, Key

# Sections of a config whose fields the paper's figures are of.
EXPERIMENT = ("data", "model", "training", "participation")
TIMES = {"pre": "PRE, after aggregation", "post": "POST, after local training"}
LEGEND = (
    "Columns PRE and POST: {clients}the last round. Passes: a participant's work in a round, in passes over its "
    "samples, forward and backward. MB: all clients, up and down. Behind {reference}: its figure minus "
    "the row's, mean of the paired differences in points with a 95 % interval over seeds{drawn}. p: two-sided paired "
    "t-test over seeds, not corrected for the number of rows."
)
DRAWN = (
    "; over clients: 95 % interval, after the last round, when clients are drawn anew, each with its figures of all "
    "seeds; where the best round counts, beside the last round's difference"
)


def markdown(table: Table, cells: Mapping[Key, Cell], missing: Mapping[Key, str], reference: str) -> str:
    """The table so far, with the paper's figures, and why cells are missing."""
    columns = COLUMNS[table.columns]
    points = {row.point for row in table.rows.values()}
    paper = "" if len(points) == 1 else "the point that the paper reports: "
    point = f"at {paper}{', or '.join(time for name, time in TIMES.items() if name in points)}"
    legend = columns.legend.format(round=HEADLINES[table.headline].format(title=columns.title), point=point)
    clients, of = ("", "") if table.columns == "accuracy" else ("mean accuracy over clients, ", f" {columns.title}")
    drawn = DRAWN if table.columns == "accuracy" else ""
    common = LEGEND.format(clients=clients, reference=table.rows[reference].label, drawn=drawn)
    parts = [f"# {table.paper}, {table.title}", f"{legend} {common}"]
    known = [cell for key, cell in cells.items() if key[0] in table.settings and key[1] in table.rows]
    parts += [f"Machine: {machine}" for machine in dict.fromkeys(cell["machine"] for cell in known)]
    if known:
        parts.append("\n".join(["```bash", *dict.fromkeys(cell["command"] for cell in known), "```"]))
    for key, setting in table.settings.items():
        lines = lines_of(table, key, cells, missing)
        if lines:
            setting = as_run(table, setting, lines)
            parts += [f"## {setting.label}", *comparison(table, setting, lines, reference)]
            reasons = [(why, f"{table.rows[at[1]].label} ({at[2]})") for at, why in missing.items() if at[0] == key]
            parts += [f"Missing: {', '.join(found)}: {why}." for why, found in together(reasons).items()]
            if setting.target is not None:
                parts += [f"To {setting.target:g} %{of}:", to_target(table, setting, setting.target, lines)]
    return "\n\n".join(parts) + "\n"


def as_run(table: Table, setting: Setting, lines: Sequence[Line]) -> Setting:
    """The setting; without the paper's figures if it was run on another data set (a part of the same is no other)."""

    def name(source: str) -> str:
        return re.sub(r"(_\d+k)?(\.npz)?$", "", re.split("[:/]", source)[-1])

    meant = name(load_config(ROOT / table.config, setting.overrides).data.source)
    found = {name(cell["config"]["data"]["source"]) for line in lines for cell in line.cells.values()} - {meant}
    if not found:
        return setting
    label = f"{', '.join(sorted(found))} instead of the data of {setting.label}"
    return replace(setting, label=label, paper={}, paper_std={}, paper_to_target={})


def comparison(table: Table, setting: Setting, lines: Sequence[Line], reference: str) -> list[str]:
    """The main table of a setting, and below it what was run, the test against the best other row, and the ranking."""
    names, ranked = COLUMNS[table.columns].figures, table.ranked
    title = "{0}: {1}" if len(names) > 1 else "{0} (%)"
    run = sorted((line for line in lines if line.by_seed(ranked)), key=lambda line: -line.mean(ranked))
    base = next((line for line in lines if line.key == reference), None)
    paper = {line.key: paper_figures(table, setting, line.key) for line in lines}
    rows = []
    for line in lines:
        given, row = paper[line.key], {"method": line.row.label}
        for name in names:
            row[title.format("paper", name.replace("hm", "HM"))] = f"{given[name]:g}" if name in given else NONE
        for name in names:
            ours = mean_and_spread([100 * x for x in line.by_seed(name).values()])
            bold = "**" if name == ranked and line in run[:1] else ""
            row[title.format("ours", name.replace("hm", "HM"))] = f"{bold}{ours}{bold}"
        if setting.paper_std:
            std = setting.paper_std.get(line.key)
            row |= {"paper's client std": NONE if std is None else f"{std:g}", "client std": line.show("std_clients")}
        row |= {point.upper(): line.show(point) for point in POINTS}
        if table.columns == "accuracy":
            row["worst 10 %"] = line.show("worst_10_percent")
            row["by samples"] = line.show("weighted_best" if table.headline == "best" else "weighted")
        passes = {cell["gradient_passes"] for cell in line.cells.values() if "gradient_passes" in cell}
        row["passes"] = f"{max(passes):.1f}" if passes else NONE
        row |= {"MB": line.show("megabytes", 1, 1), "s per round": line.show("seconds_per_round", 1, 3)}
        behind = None if base is None or line is base else base
        row |= lead(table, behind, line)
        rows.append(row)
    shown = [
        name
        for name in rows[0]
        if name not in ("by samples", "passes", "behind", "over clients") or any(row[name] != NONE for row in rows)
    ]
    parts = [
        markdown_table(shown, [[row[name] for name in shown] for row in rows]),
        *runs([line for line in lines if line.cells]),
    ]
    parts += majority([cell for line in lines for cell in line.cells.values()])
    parts += other_models(lines)
    parts += diverged(lines)
    best = next((line for line in run if line is not base), None)
    if base and best and (p := paired_p(base.by_seed(ranked), best.by_seed(ranked))) is not None:
        parts.append(f"{base.row.label} against the best other row, {best.row.label}: p = {p:.3g}.")
    parts += ranking([(line, paper[line.key][ranked]) for line in run if ranked in paper[line.key]], ranked)
    for line in lines:
        printed, hm = paper[line.key].get("printed"), paper[line.key].get("hm")
        if printed is not None and hm is not None and abs(printed - hm) > 0.05:
            parts.append(f"The paper prints an HM of {printed:g} for {line.row.label}; that of its columns is {hm:g}.")
    return parts


def lead(table: Table, base: Line | None, line: Line) -> dict[str, str]:
    """How far a row is behind another one, with intervals over seeds and over clients."""
    gap = base and paired_difference(base.by_seed(table.ranked), line.by_seed(table.ranked))
    if not base or not gap:
        return {"behind": NONE, "over clients": NONE, "p": NONE}
    row = {"behind": f"{100 * gap.mean:+.2f}" + ("" if np.isnan(gap.low) else interval(gap.low, gap.high))}
    pairs = [(base.cells[seed], cell) for seed, cell in line.cells.items() if seed in base.cells]
    row |= {"over clients": NONE, "p": NONE if np.isnan(gap.p) else f"{gap.p:.3g}"}
    if table.columns == "accuracy" and all("clients" in cell for pair in pairs for cell in pair):
        gaps = [
            np.subtract(clients_at(first, base.row.point), clients_at(second, line.row.point))
            for first, second in pairs
        ]
        if ends := bootstrap_over_clients(gaps):
            row["over clients"] = interval(*ends).strip()
            if table.headline == "best":  # of that round, the clients are not kept
                last = np.mean([np.nanmean(of_run) for of_run in gaps])
                row["over clients"] = f"last: {100 * last:+.2f} {row['over clients']}"
    return row


def interval(low: float, high: float) -> str:
    """The two ends of an interval, in points."""
    return f" [{100 * low:+.2f}, {100 * high:+.2f}]"


def majority(cells: Sequence[Cell]) -> list[str]:
    """The accuracy of guessing on the data of the rows; nothing for cells that do not record it.

    For each seed it uses the partition that most rows have: a method with validation samples divides its samples
    differently.
    """
    told = [cell for cell in cells if "majority_class" in cell]
    if not told:
        return []
    of_seed = {
        seed: Counter(found).most_common(1)[0][0]
        for seed, found in together((cell["seed"], cell["partition_hash"]) for cell in told).items()
    }
    known = {
        cell["partition_hash"]: cell["majority_class"] for cell in told if cell["partition_hash"] in of_seed.values()
    }
    plain, weighted = (
        mean_and_spread([100 * found[name] for found in known.values()]) for name in ("accuracy", "weighted")
    )
    return [
        f"Always answering the class that a client has most training samples of: {plain} %, by samples {weighted} %."
    ]


def other_models(lines: Sequence[Line]) -> list[str]:
    """Rows whose model is not that of most rows; a difference between the two is not one between methods alone."""
    used = together((cell["config"]["model"]["name"], line.row.label) for line in lines for cell in line.cells.values())
    by_rows = sorted(used, key=lambda name: -len(used[name]))
    others = [(name, ", ".join(dict.fromkeys(used[name]))) for name in by_rows[1:]]
    return [f"**Another model**, {labels}: {name}, not {by_rows[0]}." for name, labels in others]


def diverged(lines: Sequence[Line]) -> list[str]:
    """Rows with runs whose logits are NaN or infinite at the end; these predictions count as wrong."""
    found = [
        (cell.get("diverged_round"), f"{line.row.label} (seed {seed})")
        for line in lines
        for seed, cell in line.cells.items()
    ]
    return [
        f"**Diverged** in round {at}, from when on answers count as wrong: {', '.join(rows)}."
        for at, rows in together(pair for pair in found if pair[0] is not None).items()
    ]


def ranking(paper: Sequence[tuple[Line, float]], ranked: str) -> list[str]:
    """How well the order of the rows agrees with the paper's figures, in the last round that all rows have scores of.

    Of two rows that read the same line of the paper in two ways, one counts.
    This is the headline's round if all rows have been run for the same number of rounds. Empty if they share no round.
    """
    there = {line.key for line, _ in paper}
    paper = [(line, figure) for line, figure in paper if line.row.reading_of not in there]
    cells = [cell for line, _ in paper for cell in line.cells.values()]
    pairs, after = [(figure, line.mean(ranked)) for line, figure in paper], ""
    if len({cell["config"]["training"]["rounds"] for cell in cells}) > 1:
        shared = set.intersection(*(set(cell["curve"]["round"]) for cell in cells))
        if not shared or ranked == "weighted":  # of which no curve is kept
            return []
        at = max(shared)
        pairs, after = [(figure, mean_in(at, line, ranked)) for line, figure in paper], f" after {at} rounds"
    rho = rank_correlation(pairs)
    if rho is None:
        return []
    return [f"Rank correlation (Spearman) with the paper's figures over {len(pairs)} rows{after}: {rho:.2f}."]


def runs(lines: Sequence[Line]) -> list[str]:
    """Rounds, seeds and ``--set`` of the cells; a line for each group of rows if they differ between calls."""
    labelled = []
    for line in lines:
        cells = [((cell["config"]["training"]["rounds"], *cell["set"]), str(seed)) for seed, cell in line.cells.items()]
        for (rounds, *changes), seeds in together(cells).items():
            labelled.append(("; ".join([f"{rounds} rounds", f"seed {', '.join(seeds)}", *changes]), line.row.label))
    groups = together(labelled)
    moved = moved_by(change for line in lines for cell in line.cells.values() for change in cell["set"])
    noted = [f"**Not the paper's setting**: `--set` moves {moved}."] if moved else []
    if len(groups) == 1:
        return [*(f"All rows: {what}." for what in groups), *noted]
    return [*(f"**Not alike**, {', '.join(labels)}: {what}." for what, labels in groups.items()), *noted]


def moved_by(changes: Iterable[str]) -> str:
    """What ``--set`` changes of the experiment, except the source, which is reported elsewhere if it is other data."""
    names = dict.fromkeys(change.partition("=")[0] for change in changes)
    return ", ".join(name for name in names if name.partition(".")[0] in EXPERIMENT and name != "data.source")


def together(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """Groups the second entries by their first entry."""
    groups: dict[Any, list[str]] = {}
    for what, beside in pairs:
        groups.setdefault(what, []).append(beside)
    return groups


def to_target(table: Table, setting: Setting, target: float, lines: Sequence[Line]) -> str:
    """The table of costs until the target, in %, is reached: means over the seeds that reach it."""
    ours = ["rounds", "seconds", "of which compilation", "MB", "MB per client"]
    rows = []
    for line in lines:
        cells = line.cells.values()
        at = [first_reached(curve_of(cell, table.ranked, line.row.point), target / 100) for cell in cells]
        costs = [costs_at(cell, place) for cell, place in zip(cells, at, strict=True) if place is not None]
        shown = [NONE] * len(ours)
        if costs:
            rounds, *others = np.mean(costs, axis=0)
            some = f" ({len(costs)} of {len(cells)} seeds)" if len(costs) < len(cells) else ""
            shown = [f"{rounds:.1f}".removesuffix(".0") + some, *(f"{cost:.1f}" for cost in others)]
        elif cells:
            shown[0] += f" (not in {max(cell['curve']['round'][-1] for cell in cells)} rounds)"
        paper = setting.paper_to_target.get(line.key, {})
        printed = [f"{paper[key]:g}" if key in paper else NONE for key in ("rounds", "minutes", "megabytes")]
        rows.append([line.row.label, *shown, " / ".join(printed) if paper else NONE])
    return markdown_table(["method", *ours, "paper: rounds / minutes / MB"], rows)


def costs_at(cell: Cell, at: int) -> tuple[float, ...]:
    """Up to an evaluated round: rounds; seconds, in all and of compilation; MB of all clients, and per client."""
    curve, clients = cell["curve"], cell["config"]["data"]["clients"]
    sent = curve["megabytes"][at]
    return curve["round"][at], curve["seconds"][at], cell["timing"]["compile_seconds"], sent, sent / clients
