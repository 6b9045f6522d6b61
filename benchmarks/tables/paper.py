"""What the file of a paper says: its tables, with the rows and settings of each, and the figures that it prints."""

import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fedjax_pfl import ConfigError

ROOT = Path(__file__).resolve().parents[2]
HEADLINES = {
    "last": "of the last round",
    "best": "of the round with the highest {title}, which is chosen on the samples that are scored",
}
SEEDS = "mean over seeds ± sample standard deviation"


class Columns(NamedTuple):
    """Figures that are compared with the paper's; rows are ranked and tested by the last one, ``title`` in the text."""

    figures: tuple[str, ...]
    title: str
    legend: str


COLUMNS = {
    "accuracy": Columns(
        ("accuracy",),
        "mean",
        f"Accuracy in %, unweighted mean over clients, {SEEDS}. Ours, the worst 10 % of clients and, where shown, the "
        f"standard deviation over clients are {{round}}, {{point}}. By samples: the mean "
        "that counts every test sample alike, PFLlib's.",
    ),
    "weighted": Columns(
        ("weighted",),
        "sample-weighted mean",
        f"Accuracy in %, every test sample counted alike (PFLlib's number), {SEEDS}. Ours is {{round}}, {{point}}.",
    ),
    "global": Columns(
        ("global",),
        "global accuracy",
        f"Accuracy in % of the global model on the pooled test set, {SEEDS}. Ours is {{round}}.",
    ),
    "i_local": Columns(
        ("local",),
        "local figure",
        f"Harmonic mean in % of a client's accuracy and macro-F1, unweighted mean over clients, {SEEDS}. Ours is "
        "{round}, {point}.",
    ),
    "global_local_hm": Columns(
        ("global", "local", "hm"),
        "HM",
        f"Figures in %, {SEEDS}. Ours are {{round}}. Global: accuracy of the global model on the pooled test set. "
        f"Local: harmonic mean of a client's accuracy and macro-F1, unweighted mean over clients, {{point}}. HM: "
        "harmonic mean of the two; rows are ranked and tested by it. The paper's HM is that of its two columns.",
    ),
}


@dataclass(frozen=True)
class Row:
    """A row of a table; ``point``, ``pre`` or ``post``, is the accuracy that the paper reports.

    ``reading_of`` is another row, if this one reads in another way what the paper says of that row; beside it, it has
    no part in the rank correlation.
    """

    label: str
    point: str
    overrides: list[str]
    reading_of: str | None = None


@dataclass(frozen=True)
class Setting:
    """What the rows are compared on, with the paper's figures by row and name, in %, and the cost of the target.

    If a row has only one number, it is the last of the figures. ``paper_std`` holds standard deviations over the
    clients, in points; ``row_overrides`` are changes of a row in this setting only, after its own overrides.
    """

    label: str
    overrides: list[str]
    row_overrides: dict[str, list[str]] = field(default_factory=dict)
    paper: dict[str, float | dict[str, float]] = field(default_factory=dict)
    paper_std: dict[str, float] = field(default_factory=dict)
    target: float | None = None
    paper_to_target: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of a paper; it has ``columns``, a key of `COLUMNS`, of the round ``headline``, ``last`` or ``best``.

    Rows are compared with ``reference``, another row.
    """

    paper: str
    name: str
    title: str
    config: str
    headline: str
    columns: str
    reference: str
    rows: dict[str, Row]
    settings: dict[str, Setting]

    @property
    def ranked(self) -> str:
        """The figure by which rows are ranked and tested."""
        return COLUMNS[self.columns].figures[-1]


def read_table(path: Path, name: str) -> Table:
    """A table of a paper's file; ConfigError if it has no such table, or a figure belongs to no row or column."""
    paper = tomllib.loads(path.read_text(encoding="utf-8"))
    allow("TABLE", [name], paper["tables"])
    fields = dict(paper["tables"][name])
    headline = fields.pop("headline", paper.get("headline", "last"))
    allow(f"{name}.headline", [headline], HEADLINES)
    columns = fields.pop("columns", "accuracy")
    allow(f"{name}.columns", [columns], COLUMNS)
    names = COLUMNS[columns].figures
    own, controls = fields.pop("rows", paper.get("methods", {})), paper.get("controls", {})
    wanted = fields.pop("controls", list(controls))
    allow(f"{name}.controls", wanted, controls)
    rows = {key: Row(**row) for key, row in ({key: controls[key] for key in wanted if key not in own} | own).items()}
    reference = fields.pop("reference", paper.get("reference", list(rows)[-1]))
    allow(f"{name}.reference", [reference], rows)
    allow(f"{name}.reading_of", [row.reading_of for row in rows.values() if row.reading_of], rows)
    settings = {key: Setting(**setting) for key, setting in fields.pop("settings").items()}
    for key, setting in settings.items():
        for what in ("row_overrides", "paper", "paper_to_target"):
            allow(f"{name}.{key}.{what}", getattr(setting, what), rows)
        allow(f"{name}.{key}.paper_std", setting.paper_std, rows if columns == "accuracy" else ())
        for row, given in setting.paper.items():
            allow(f"{name}.{key}.paper.{row}", given if isinstance(given, dict) else (), names)
    known = {"headline": headline, "columns": columns, "reference": reference, "rows": rows, "settings": settings}
    return Table(paper["paper"], name, **known, **fields)


def allow(option: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raises ConfigError if a name is not among those allowed."""
    for name in given:
        if name not in allowed:
            raise ConfigError(option, name, f"allowed: {', '.join(allowed)}")
