"""The table of runs in LaTeX."""

from collections.abc import Mapping, Sequence

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.plots.style import quantity
from fedjax_pfl.experiment.summary import FALLING
from fedjax_pfl.experiment.tables import (
    PERCENT,
    Cell,
    Group,
    evaluated_on,
    figure_names,
    grouped,
    is_of_data,
    mean_and_spread,
    show,
)

_HEADINGS = {"headline": "accuracy", **PERCENT, "weighted": "weighted"}  # in LaTeX; other figures as in plots
_COSTS = ("megabytes", "seconds_per_round")
_IN_PERCENT = 100
_LATEX = str.maketrans(
    {letter: rf"\{letter}" for letter in "&%$#_{}"}
    | {letter: rf"\text{name}{{}}" for letter, name in {"<": "less", ">": "greater", "|": "bar"}.items()}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


def latex(cells: Sequence[Cell], figures: Sequence[str], *, heading: str, bold: bool) -> str:
    """The table in LaTeX: one row per combination; for each data setting, one column per figure.

    Args:
      cells: the runs.
      figures: as in `Sweep.to_latex`.
      heading: of the first column.
      bold: print the highest mean of each column in bold.

    Raises:
      ConfigError: there is no such figure, or it is a cost.
    """
    allowed = [name for name in figure_names(cells) if name not in _COSTS]
    if isinstance(figures, str) or not figures or not set(figures) <= set(allowed):
        raise ConfigError("figures", figures, f"a list of one or more of {', '.join(allowed)}")
    columns: dict[str, dict[str, Group]] = {}
    rows: dict[str, None] = {}
    for group in grouped(cells):
        of_data = {field: value for field, value in group.values.items() if is_of_data(field)}
        row = show({field: value for field, value in group.values.items() if field not in of_data}) or "all"
        rows[row] = None
        columns.setdefault(show(of_data), {})[row] = group
    shown = {
        (setting, figure): _latex_column(of, figure, bold=bold) for setting, of in columns.items() for figure in figures
    }
    lines = [rf"\begin{{tabular}}{{l{'r' * len(shown)}}}", r"\toprule"]
    if len(columns) > 1:
        width, ends = len(figures), range(1, len(shown), len(figures))
        spans = [rf"\multicolumn{{{width}}}{{c}}{{{_escaped(setting)}}}" for setting in columns]
        rules = [rf"\cmidrule(lr){{{end + 1}-{end + width}}}" for end in ends]
        lines += [rf" & {' & '.join(spans)} \\", " ".join(rules)]
    headings = [heading, *(_latex_heading(figure) for _, figure in shown)]
    lines += [rf"{' & '.join(map(_escaped, headings))} \\", r"\midrule"]
    lines += [rf"{' & '.join([_escaped(row), *(of.get(row, '---') for of in shown.values())])} \\" for row in rows]
    return "\n".join([*_latex_notes(cells, figures, bold), *lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_heading(figure: str) -> str:
    """The heading of a figure's column; the notes say what is in %."""
    return _HEADINGS.get(figure) or quantity(figure)[1].removesuffix(" (%)")


def _latex_column(groups: Mapping[str, Group], figure: str, *, bold: bool) -> dict[str, str]:
    """Row -> entry of the column; entries with the highest mean, as printed, are bold if that is known to be good."""
    scale, _ = quantity(figure)
    bold = bold and scale == _IN_PERCENT and figure.rpartition(".")[2] not in FALLING
    values = {row: [scale * value for value in group.by_seed(figure).values()] for row, group in groups.items()}
    entries = {row: mean_and_spread(of, 2 if scale == _IN_PERCENT else 4) for row, of in values.items() if of}
    printed = {row: float(entry.split()[0]) for row, entry in entries.items()}
    column = {}
    for row, plain in entries.items():
        entry = plain.replace("±", r"$\pm$")
        if bold and len(printed) > 1 and printed[row] == max(printed.values()):
            entry = rf"\textbf{{{entry}}}"
        column[row] = entry + (r"$^\dagger$" if groups[row].diverged else "")
    return column


def _latex_notes(cells: Sequence[Cell], figures: Sequence[str], bold: bool) -> list[str]:
    """Notes for the caption, as LaTeX comments."""
    groups = grouped(cells)
    others = ", ".join(_latex_heading(figure) for figure in figures if quantity(figure)[0] != _IN_PERCENT)
    unit = f"In %, except {others}," if others else "In %"
    seeds = sorted({len(group.cells) for group in groups} - {0}) or [0]
    of = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else "one seed" if seeds == [1] else f"{seeds[0]} seeds"
    best = f"; bold: the highest mean of a column{' in %' if others else ''}" if bold else ""
    samples = f"on {evaluated_on(cells)} samples"
    notes = [rf"Needs \usepackage{{booktabs}}. {unit} {samples}: mean and sample standard deviation over {of}{best}."]
    if any(group.diverged for group in groups):
        notes.append("Dagger: diverged: some logits were NaN or infinite, which count as wrong.")
    notes += [f"Failed: {show(cell.values)}: {cell.error}" for cell in cells if cell.summary is None]
    return [f"% {' '.join(note.split())}" for note in notes]


def _escaped(text: str) -> str:
    # After the end of a row, LaTeX takes a star or a bracket for an argument of the row's end.
    return ("{}" if text.startswith(("*", "[")) else "") + text.translate(_LATEX)
