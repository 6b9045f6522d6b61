"""Tables as tidy pandas frames: one row per observation, and one column per field or metric."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.tables import (
    DIFFERENCES,
    SEED,
    Cell,
    check_figure,
    differences,
    fields_of,
    figure_columns,
    rows_of,
)

if TYPE_CHECKING:
    import pandas

_AGGREGATES = ("mean", "std", "count")


def frame(columns: Mapping[str, Any]) -> "pandas.DataFrame":
    """A frame from columns of equal length.

    Raises:
      ConfigError: pandas is not installed.
    """
    return _pandas().DataFrame(dict(columns))


def run_frame(cells: Sequence[Cell]) -> "pandas.DataFrame":
    """One row per run: its values, the figures of `tables.figure_columns`, and the error of a failed run.

    Raises:
      ConfigError: pandas is not installed.
    """
    columns = [*fields_of(cells), *figure_columns(cells), "diverged_round", "error"]  # also of a frame without rows
    found = _pandas().DataFrame(rows_of(cells), columns=columns)
    return found.astype({"diverged_round": "Int64"})  # whole numbers, or nothing


def history_frame(cells: Sequence[Cell]) -> "pandas.DataFrame":
    """One row per run and evaluated round: the run's values, the round, the metrics under their names in ``history``.

    A failed run has no rows; metrics that a run does not have are NaN.

    Raises:
      ConfigError: pandas is not installed.
    """
    return _stacked(cells, [cell.history for cell in cells])


def client_frame(cells: Sequence[Cell]) -> "pandas.DataFrame":
    """One row per run and client: the run's values, the client, the columns of ``Result.clients``.

    A failed run has no rows; columns that a run does not have are NaN.

    Raises:
      ConfigError: pandas is not installed.
    """
    return _stacked(cells, [cell.clients for cell in cells])


def _stacked(cells: Sequence[Cell], tables: Sequence[Mapping[str, np.ndarray] | None]) -> "pandas.DataFrame":
    """The tables of the runs, concatenated, with the runs' values as further columns."""
    runs = [(cell.values, of, len(next(iter(of.values())))) for cell, of in zip(cells, tables, strict=True) if of]
    columns: dict[str, Any] = {
        field: [values.get(field) for values, _, rows in runs for _ in range(rows)] for field in fields_of(cells)
    }
    for name in dict.fromkeys(name for _, of, _ in runs for name in of):
        columns[name] = np.concatenate([of.get(name, np.full(rows, np.nan)) for _, of, rows in runs])
    return frame(columns)


def difference_frame(cells: Sequence[Cell], baseline: Mapping[str, Any], point: str) -> "pandas.DataFrame":
    """The differences between rows and the baseline; see `Comparison.differences`.

    Raises:
      ConfigError: pandas is not installed.
    """
    # A frame without rows has the same columns.
    columns = [*(field for field in fields_of(cells) if field != SEED), *DIFFERENCES]
    rows = differences(cells, baseline, point)
    return _pandas().DataFrame(rows, columns=None if rows else columns)


def pivot(
    cells: Sequence[Cell],
    seed: str,
    index: str | Sequence[str] | None,
    columns: str | Sequence[str] | None,
    values: str,
    aggregate: str,
) -> "pandas.DataFrame":
    """A figure of the runs, aggregated over seeds; see `Sweep.pivot`.

    Args:
      cells: the runs.
      seed: the name of the seed in their values.
      index: as in `Sweep.pivot`.
      columns: likewise.
      values: likewise.
      aggregate: likewise.

    Raises:
      ConfigError: there is no such field, figure or aggregate; a field that varies is in neither index nor columns;
        pandas is not installed.
    """
    down, across = _axes(cells, seed, index, columns)
    check_figure(cells, "values", values)
    if aggregate not in _AGGREGATES:
        raise ConfigError("aggregate", aggregate, f"one of {', '.join(_AGGREGATES)}")
    table = run_frame(cells)
    table[values] = [cell.figures.get(values, np.nan) for cell in cells]  # which may be none of its columns
    for field in (*down, *across):  # a list or a table cannot be a label
        table[field] = [str(value) if isinstance(value, list | tuple | Mapping) else value for value in table[field]]
    if not down:
        return table.groupby(lambda row: "all")[values].agg(aggregate).to_frame()
    found = table.groupby([*down, *across], sort=False, dropna=False)[values].agg(aggregate)
    if not across:
        return found.to_frame()
    rows, columns = (found.index.droplevel(other).unique() for other in (across, down))
    # In order of appearance; pandas before 3.0 mixes up the values if `unstack` is asked for that.
    return found.unstack(across).reindex(index=rows, columns=columns)


def _axes(
    cells: Sequence[Cell], seed: str, index: str | Sequence[str] | None, columns: str | Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """The fields of the rows and of the columns; together they are all varying fields except the seed.

    There are none at all if the runs have no field but the seed.
    """
    fields = fields_of(cells)
    varying = [field for field in fields if field != seed and len({repr(cell.values.get(field)) for cell in cells}) > 1]
    shown = list(dict.fromkeys([field for field in fields if field in ("method", "method.name")] + varying))
    down, across = _listed("index", index, fields), _listed("columns", columns, fields)
    if across is None:
        across = [field for field in shown if field.startswith("data.") and field not in (down or ())]
        if down is None and across and across == shown:  # data settings alone
            down, across = across, []
    if down is None:
        down = [field for field in shown if field not in across]
        if not (down or across):  # nothing varies but the seed
            down = [field for field in fields if field != seed]
    if (not down and (across or index is not None)) or set(down) & set(across):
        raise ConfigError("index", index, f"one field or more that is not in columns, of {', '.join(fields)}")
    missing = [field for field in varying if field not in (*down, *across)]
    if missing:
        allowed = f"with columns, all that varies but the seed: {', '.join(missing)} is missing"
        raise ConfigError("index", index, allowed)
    return down, across


def _listed(argument: str, given: str | Sequence[str] | None, fields: Sequence[str]) -> list[str] | None:
    """The given names as a checked list; None if none are given."""
    if given is None:
        return None
    names = [given] if isinstance(given, str) else list(given)
    if not set(names) <= set(fields) or len(set(names)) < len(names):
        raise ConfigError(argument, given, f"one or more, each of them once, of {', '.join(fields)}")
    return names


def _pandas() -> ModuleType:
    try:
        import pandas
    except ImportError:
        raise ConfigError("pandas", None, 'frames need it: pip install "fedjax_pfl[pandas]"') from None
    module: ModuleType = pandas
    return module
