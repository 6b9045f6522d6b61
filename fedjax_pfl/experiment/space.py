"""The space of a search: what each field is drawn from, in Python and in the file of a search."""

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config, plain
from fedjax_pfl.experiment.grid import check_listed
from fedjax_pfl.experiment.reading import load_config, read_toml

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True)
class Uniform:
    """A real number, drawn uniformly from low to high."""

    low: float
    high: float


@dataclass(frozen=True)
class LogUniform:
    """A real number from low to high, both above 0, with a uniform logarithm; for example for learning rates."""

    low: float
    high: float


@dataclass(frozen=True)
class IntUniform:
    """A whole number from low to high, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class Choice:
    """One of several values: numbers, strings, true or false, or None."""

    values: Sequence[Any]


Space = Mapping[str, Uniform | LogUniform | IntUniform | Choice]
"""Dotted field -> the distribution of its values."""


def load_tune(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> tuple[Config, dict[str, Any]]:
    """Reads the file of a search: ``config``, a path beside it; ``overrides``; and the table ``space``.

    A field of ``space`` has a list of values, or ``{low = 1e-3, high = 0.3}``, optionally with ``log = true`` or
    ``int = true``.

    Args:
      path: the file.
      overrides: ``SECTION.KEY=VALUE``, applied after those of the file; for fields that are not searched.

    Returns:
      Config and space, as `tune` takes them.

    Raises:
      ConfigError: the file is missing or not TOML, one of its values cannot be used, or an override is of a field that
        is searched.
    """
    tables = read_toml(path, "tune file")
    unknown = sorted(tables.keys() - {"config", "overrides", "space"})
    if unknown or [type(tables.get(key)) for key in ("config", "space")] != [str, dict]:
        allowed = f"config (a path), [space]; optional: overrides; it has {', '.join(unknown or tables) or 'nothing'}"
        raise ConfigError("tune file", str(path), allowed)
    shared = Path(path).parent / os.path.expanduser(tables["config"])
    config = load_config(shared, tables.get("overrides", []), overrides)
    space = dict(_fields(tables["space"]))
    for override in overrides:
        if (field := override.partition("=")[0].strip()) in space:
            raise ConfigError("override", override, f"a field that is not searched: [space] of {path} has {field}")
    return config, space


def distributions_of(space: Space) -> dict[str, "BaseDistribution"]:
    """The space as distributions of Optuna."""
    try:
        from optuna import distributions
    except ImportError:
        raise ConfigError("tune", "optuna", 'an installed package: pip install "fedjax_pfl[tune]"') from None
    if not isinstance(space, Mapping) or not space:
        allowed = 'one field or more, each with what it is drawn from, e.g. {"training.lr": LogUniform(1e-3, 0.3)}'
        raise ConfigError("space", space, allowed)
    found: dict[str, BaseDistribution] = {}
    for field, given in space.items():
        name = f"space.{field}"
        if not isinstance(field, str) or "." not in field:
            raise ConfigError(name, given, "a dotted field such as training.lr")
        if field.startswith(("run.", "data.")):
            raise ConfigError(name, given, "another field: run and data, and so the partition, are those of all trials")
        if isinstance(given, Choice):
            values = plain(given.values)
            _check_values(name, values)
            found[field] = distributions.CategoricalDistribution(list(values))
            continue
        if not isinstance(given, Uniform | LogUniform | IntUniform):
            raise ConfigError(name, given, "Uniform, LogUniform or IntUniform, with low and high, or Choice of a list")
        whole, log = isinstance(given, IntUniform), isinstance(given, LogUniform)
        kinds = int if whole else (int, float)
        low, high = plain((given.low, given.high))
        numbers = all(isinstance(end, kinds) and not isinstance(end, bool) for end in (low, high))
        if not numbers or not -math.inf < low < high < math.inf or (log and low <= 0):
            allowed = f"{'whole' if whole else 'finite'} numbers, low below high{', both above 0' if log else ''}"
            raise ConfigError(name, given, allowed)
        found[field] = (
            distributions.IntDistribution(int(low), int(high))
            if whole
            else distributions.FloatDistribution(float(low), float(high), log=log)
        )
    return found


def _check_values(name: str, values: Any) -> None:
    """Checks the values of a `Choice`."""
    check_listed(name, values)
    if not all(value is None or isinstance(value, bool | int | float | str) for value in values):
        raise ConfigError(name, values, "numbers, strings, true or false, or None: what a study can store")


def points_of(distributions: Mapping[str, "BaseDistribution"], most: int) -> Iterator[dict[str, Any]]:
    """All points of a space of choices, if there are so many at most; else none: a sampler would draw some twice."""
    from optuna.distributions import CategoricalDistribution

    choices = [found.choices for found in distributions.values() if isinstance(found, CategoricalDistribution)]
    if len(choices) == len(distributions) and math.prod(map(len, choices)) <= most:
        for values in itertools.product(*choices):
            yield dict(zip(distributions, values, strict=True))


def _fields(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a space in a file, with dotted names."""
    for key, given in tables.items():
        field = prefix + key
        if isinstance(given, list):
            yield field, Choice(given)
        elif not isinstance(given, Mapping) or ("." in field and not {"low", "high"} & given.keys()):
            raise ConfigError(f"space.{field}", given, "a list of values, or {low = ..., high = ...}")
        elif "low" not in given and "high" not in given:
            yield from _fields(given, f"{field}.")
        else:
            log, whole = given.get("log", False), given.get("int", False)
            known = given.keys() <= {"low", "high", "log", "int"} and given.keys() >= {"low", "high"}
            if not known or not isinstance(log, bool) or not isinstance(whole, bool) or (log and whole):
                allowed = "low and high, and, where it is wanted, one of log = true and int = true"
                raise ConfigError(f"space.{field}", given, allowed)
            drawn = LogUniform if log else IntUniform if whole else Uniform
            yield field, drawn(given["low"], given["high"])
