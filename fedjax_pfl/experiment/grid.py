"""The combinations of a grid: their values, configs and run directories, and the file that a grid is read from."""

import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.reading import load_config, read_toml
from fedjax_pfl.experiment.summary import flat
from fedjax_pfl.experiment.tables import SEED
from fedjax_pfl.methods import METHODS

# The largest number of letters, and of bytes, in the name of a run directory; file systems allow no more bytes.
_LONGEST_NAME, _MOST_BYTES = 200, 255


def load_sweep(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> tuple[Config, dict[str, list[Any]], dict[str, Any] | None]:
    """Reads a sweep file: ``config``, a path beside it; ``overrides``; tables ``grid`` and, optionally, ``baseline``.

    Args:
      path: the file.
      overrides: ``section.key=value`` strings, applied after those of the file.

    Returns:
      Config, grid and baseline, as `sweep` takes them.

    Raises:
      ConfigError: the file is missing or not TOML, one of its values cannot be used, or an override is of a field that
        the grid varies.
    """
    tables = read_toml(path, "sweep file")
    unknown = sorted(tables.keys() - {"config", "overrides", "grid", "baseline"})
    if unknown or [type(tables.get(key, {})) for key in ("config", "grid", "baseline")] != [str, dict, dict]:
        has = ", ".join(unknown or tables) or "nothing"
        allowed = f"config (a path), [grid]; optional: overrides, [baseline]; it has {has}"
        raise ConfigError("sweep file", str(path), allowed)
    grid, chosen = flat(tables.get("grid", {})), tables.get("baseline")
    _check_not_varied(overrides, grid, path)
    shared = Path(path).parent / os.path.expanduser(tables["config"])
    config = load_config(shared, tables.get("overrides", []), overrides)
    name = config.method["name"]  # what a grid says of this method alone decides for it, too
    of_method = [f"method.{field.partition('.')[2]}" for field in grid if owner_of(field, [name]) == name]
    _check_not_varied(overrides, of_method, path)
    return config, grid, None if chosen is None else flat(chosen, values=grid)


def _check_not_varied(overrides: Sequence[str], fields: Iterable[str], path: str | os.PathLike[str]) -> None:
    for override in overrides:
        given = override.partition("=")[0].strip()
        if any(given == field or given.startswith(f"{field}.") for field in fields):
            allowed = f"a field that [grid] does not give its values: change {given} there, in {path}"
            raise ConfigError("override", override, allowed)


def combinations(config: Config, grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The values of each combination of a grid, by field; a field of one method is only in the combinations with it.

    Raises:
      ConfigError: a field or its values cannot be varied.
    """
    if not isinstance(grid, Mapping) or not grid:
        raise ConfigError("grid", grid, "one field or more, each with a list of values")
    for field, values in grid.items():
        if not isinstance(field, str):
            raise ConfigError("grid", field, "dotted fields such as training.lr")
        check_listed(f"grid.{field}", values)
        if field.startswith("run.") and field != SEED:
            raise ConfigError(f"grid.{field}", values, f"another field: of [run], a grid may vary only {SEED}")
    methods = grid.get("method.name", [config.method["name"]])
    owner = {field: method for field in grid if (method := owner_of(field, methods))}
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


def check_listed(field: str, values: Any) -> None:
    """Checks the values that a field is to take.

    Raises:
      ConfigError: they are no list, or one of them is there twice.
    """
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    if not listed or not values or any(value in values[:at] for at, value in enumerate(values)):
        raise ConfigError(field, values, "a list of one value or more, each of them once")


def owner_of(field: str, methods: Sequence[Any]) -> str | None:
    """The method whose hyperparameter a field is, such as ``fedprox.mu``; None for a field of the config."""
    table = field.partition(".")[0]
    return table if (table in METHODS or table in methods) and table not in Config.model_fields else None


def configured(config: Config, values: Mapping[str, Any], out: Path | None) -> Config:
    """The config of a combination."""
    changes: dict[str, Any] = {"run.out": None if out is None else str(out / _folder(values))}
    method = values.get("method.name", config.method["name"])
    for field, value in values.items():
        _, dot, key = field.partition(".")
        if not dot:
            raise ConfigError(f"grid.{field}", value, "a dotted field such as training.lr")
        changes[f"method.{key}" if owner_of(field, [method]) else field] = value
    try:
        return config.replace(changes)
    except ConfigError as error:
        section, _, key = error.field.partition(".")
        if section == "method" and key != "name" and error.field in values and "method.name" in values:
            allowed = f"{error.allowed}; as METHOD.{key}, the grid gives it to that method alone"
            raise ConfigError(error.field, error.value, allowed) from None
        raise


def _folder(values: Mapping[str, Any]) -> str:
    """The name of a run directory; different combinations have different names."""
    return file_name(",".join(f"{field}={value}" for field, value in values.items()))


def file_name(name: str) -> str:
    """A file name that is as readable as file systems allow; different names have different file names."""
    allowed = "".join(letter if letter.isalnum() or letter in "=,._-+" else "_" for letter in name)
    short = allowed[:_LONGEST_NAME]
    if short == name and len(name.encode()) <= _MOST_BYTES:
        return name
    other = f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return short.encode()[: _MOST_BYTES - len(other)].decode(errors="ignore") + other
