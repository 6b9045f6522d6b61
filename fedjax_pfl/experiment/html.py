"""HTML for notebooks and reports: self-contained, without scripts, in the colours of its surroundings."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from fedjax_pfl.experiment.markdown_table import entries_of
from fedjax_pfl.experiment.plots.given import counts_in

SIZES = {"size": "sizes", "train": "n_train", "test": "n_test"}
"""The columns of a partition's table before those of the classes, and where its manifest has them."""
# The largest number of clients or classes shown of a partition, because a notebook file keeps all that it shows.
_SHOWN = 40
# Both colours are visible on white and on black; POST is also dashed.
_LINES = {"pre": ("#3b82f6", "none"), "post": ("#f59e0b", "5 3")}
_WIDTH, _HEIGHT, _MARGIN = 420, 160, 36


def result_html(
    title: str,
    table: Sequence[Sequence[str]],
    history: Mapping[str, np.ndarray],
    remarks: Sequence[str],
    partition: Mapping[str, Any],
    config: str,
) -> str:
    """A run: its main results, the curves of PRE and POST, remarks, the partition, and the config.

    Args:
      title: one line that describes the run.
      table: a row of headings, then rows of text.
      history: metric -> array over the evaluated rounds.
      remarks: lines of text.
      partition: the content of ``partition.json``.
      config: as HTML.
    """
    headings, *rows = table
    return _block(
        f"<strong>{escape(title)}</strong>",
        table_html(headings, [cells_html(map(escape, row)) for row in rows]),
        _curve(history),
        notes_html(remarks),
        details_html("partition", partition_html(partition)),
        details_html("config", config),
    )


def runs_html(text: str) -> str:
    """The table of many runs, the best in bold, with its remarks below.

    Args:
      text: the same in Markdown: headings, tables and paragraphs.
    """
    shown, notes = [], []
    for block in text.strip().split("\n\n"):
        if block.startswith("#"):
            shown.append(f"<div><strong>{_inline(block.lstrip('# '))}</strong></div>")
        elif block.startswith("|"):
            headings, _, *rows = map(entries_of, block.split("\n"))
            shown.append(table_html(headings, [cells_html(map(_inline, row)) for row in rows]))
        else:
            notes.append(block)
    return _block(*shown, notes_html(notes))


def config_html(
    tables: Mapping[str, Mapping[str, Any]],
    changed: Mapping[str, Mapping[str, Any]],
    texts: Mapping[str, tuple[str, Mapping[str, str]]],
) -> str:
    """The tables of a config as foldable blocks; values that differ from the defaults are bold, their blocks open.

    Args:
      tables: section -> field -> value.
      changed: section -> field -> value, for the values that differ from the defaults.
      texts: section -> (its description, field -> description).
    """
    shown = []
    for section, values in tables.items():
        about, fields = texts[section]
        rows = []
        for name, value in values.items():
            given = escape(f"{name} = {'—' if value is None else json.dumps(value)}")
            bold = f"<strong>{given}</strong>" if name in changed.get(section, {}) else given
            rows.append(cells_html([bold, _inline(fields.get(name, ""))], numbers=False))
        shown.append(details_html(f"[{section}] {_inline(about)}", table_html((), rows), opened=section in changed))
    return _block(*shown)


def partition_html(partition: Mapping[str, Any]) -> str:
    """Samples per client and class, as an HTML table: one row per client, one column per class, darker for more.

    Args:
      partition: ``Result.partition``, or the content of a run's ``partition.json``.

    Raises:
      ConfigError: this is something else.
    """
    counts = counts_in(partition)
    clients, classes = (min(_SHOWN, there) for there in counts.shape)
    rows = []
    for client in range(clients):
        known = [client, *(partition[name][client] for name in SIZES.values())]
        shades = [_cell(str(n) if n else "·", shade=n / counts.max()) for n in counts[client, :classes]]
        rows.append([*cells_html(map(str, known)), *shades])
    whole = dict(zip(("clients", "classes"), counts.shape, strict=True))
    cut = [f"the first {_SHOWN} of {there} {what}" for what, there in whole.items() if there > _SHOWN]
    shown = [f"shown: {' and '.join(cut)}"] if cut else []
    return _block(
        "samples per client and class",
        table_html(["client", *SIZES, *map(str, range(classes))], rows),
        notes_html([*shown, *partition["notes"], f"hash {partition['hash']}"]),
    )


def _block(*parts: str) -> str:
    return f'<div style="color:inherit;background:transparent">{"".join(parts)}</div>'


def notes_html(lines: Iterable[str]) -> str:
    """Paragraphs of text."""
    return "".join(f'<div style="max-width:60em">{_inline(line)}</div>' for line in lines)


def details_html(title: str, body: str, *, opened: bool = False) -> str:
    """A foldable block; title and body are HTML."""
    return f"<details{' open' if opened else ''}><summary>{title}</summary>{body}</details>"


def table_html(headings: Sequence[str], rows: Iterable[Iterable[str]], *, numbers: bool = True) -> str:
    """A table of HTML cells, below headings that are plain text; a table that is too wide scrolls in a box."""
    titles = "".join(cells_html(map(escape, headings), tag="th", numbers=numbers))
    head = f"<thead><tr>{titles}</tr></thead>" if headings else ""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    table = f'<table style="color:inherit">{head}<tbody>{body}</tbody></table>'
    return f'<div style="overflow-x:auto">{table}</div>'


def cells_html(contents: Iterable[str], *, tag: str = "td", numbers: bool = True) -> list[str]:
    """The cells of a row; all but the first are aligned as numbers, unless ``numbers`` is false."""
    return [_cell(content, tag=tag, right=numbers and at > 0) for at, content in enumerate(contents)]


def _cell(content: str, *, tag: str = "td", right: bool = True, shade: float = 0.0) -> str:
    """A cell with a half-transparent background, from none (``shade`` 0) to dark (1)."""
    style = f"text-align:{'right' if right else 'left'};padding:1px 6px"
    if shade:
        style += f";background:rgba(59,130,246,{0.6 * shade:.2f})"
    return f'<{tag} style="{style}">{content}</{tag}>'


def _inline(text: str) -> str:
    """Turns bold and code markup of Markdown and docstrings into HTML; everything else is escaped."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"``(.+?)``", r"<code>\1</code>", bold)


def _curve(history: Mapping[str, np.ndarray]) -> str:
    """PRE and POST accuracy over rounds as SVG, with the ends of both axes; empty if there are no values."""
    rounds = history["round"]
    values = {point: 100 * history[f"{point}.accuracy"] for point in _LINES}
    known = np.concatenate([of[~np.isnan(of)] for of in values.values()])
    if not len(known):
        return ""
    low = min(10 * np.floor(known.min() / 10), 90)  # an axis that is 10 % high ends at 100 %
    high = max(10 * np.ceil(known.max() / 10), low + 10)
    left, right, top, bottom = _MARGIN, _WIDTH - _MARGIN, _MARGIN / 2, _HEIGHT - _MARGIN / 2

    def across(round: float) -> float:
        return left + (right - left) * (round - rounds[0]) / max(rounds[-1] - rounds[0], 1)

    texts = [
        (left - 4, bottom, "end", "currentColor", f"{low:.0f} %"),
        (left - 4, top + 4, "end", "currentColor", f"{high:.0f} %"),
        (across(rounds[-1]), _HEIGHT - 4, "middle", "currentColor", f"round {rounds[-1]:.0f}"),
    ]
    drawn = [f'<path d="M{left},{top}V{bottom}H{right}" fill="none" stroke="currentColor" opacity="0.5"></path>']
    for number, (point, (colour, dashes)) in enumerate(_LINES.items()):
        places = [
            (across(x), bottom - (bottom - top) * (y - low) / (high - low))
            for x, y in zip(rounds, values[point], strict=True)
            if not np.isnan(y)
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        stroke = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        drawn.append(f'<polyline points="{line}" fill="none" {stroke}></polyline>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"></circle>' for x, y in places]
        texts.append((left + 4 + 40 * number, top - 4, "start", colour, point.upper()))
    drawn += [
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="10">{text}</text>'
        for x, y, anchor, colour, text in texts
    ]
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" style="display:block">{"".join(drawn)}</svg>'
