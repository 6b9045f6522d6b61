"""A config from a TOML file, with dotted ``key=value`` overrides."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.options import SELECTORS, USUAL, table_class
from fedjax_pfl.experiment.protocols import tables_of


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), over_these: Sequence[str] = ()) -> Config:
    """Reads a TOML file and applies overrides.

    Args:
      path: the config file.
      overrides: ``section.key=value`` strings, or ``protocol=name``. The value is read as TOML. What is not TOML, a
        date, or the value of a field that holds text (``run.out=2024``) is taken as text. A list needs the quotes of
        TOML, which a shell takes away unless the whole argument is in quotes: ``'run.export=["features"]'``.
      over_these: likewise, applied after ``overrides``; another method here drops the method's options given there.

    Raises:
      ConfigError: the file is missing or not TOML, one of its values cannot be used, or a list or table in an override
        is not TOML.
    """
    tables = read_toml(path, "config file")
    for table, command in (("grid", "sweep"), ("space", "tune")):
        if table in tables:
            allowed = f"with [{table}] it is a {command} file: fedjax-pfl {command} {path}"
            raise ConfigError("config file", str(path), allowed)
    for given in (overrides, over_these):
        if not isinstance(given, list | tuple) or not all(isinstance(override, str) for override in given):
            raise ConfigError("overrides", given, 'a list of strings, e.g. ["training.lr=0.01"]')
        # A protocol first, then these, as in Config.replace: they bring defaults.
        first = ("protocol", *SELECTORS)
        fields = {override: override.partition("=")[0].strip() for override in given}
        for override in sorted(given, key=lambda of: first.index(fields[of]) if fields[of] in first else len(first)):
            _override(tables, override)
    return Config(**tables)


def read_toml(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
      ConfigError: the file, called ``what`` in the message, is missing or not TOML, or this is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(what, path, "the path of a file")
    try:
        return tomllib.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(what, str(path), f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(what, str(path), f"not valid TOML: {error}") from None
    except ValueError as error:  # a path with a null character
        raise ConfigError(what, str(path), f"cannot be read ({error})") from None


def parse_value(text: str) -> Any:
    """The value of a text as TOML, or of a number like .1 and 1., which TOML has not; else the text itself."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return float(text) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", text.strip(), re.IGNORECASE) else text
    return text if isinstance(value, date | time) else value


def parse_field(field: str, text: str) -> Any:
    """The value of a field of the config, given as a text; where the field holds text, only quotes are TOML.

    Raises:
      ConfigError: it begins as a list or table does, and is not TOML.
    """
    value = parse_value(text)
    if _holds_text(field):
        return value if isinstance(value, str) else text
    if isinstance(value, str) and text.lstrip()[:1] in ("[", "{"):
        hint = "a shell takes quotes away, unless the whole argument is in quotes"
        raise ConfigError(field, text, f"it is not TOML; {hint}: '{field}={_quoted(text)}'")
    return value


def _quoted(text: str) -> str:
    """The text with its bare words in quotes, if this makes it TOML; otherwise a form to fill in."""
    quoted = re.sub(r"[A-Za-z_][\w.:/-]*", r'"\g<0>"', text)
    form = '["..."]' if text.lstrip()[0] == "[" else '{key = "..."}'
    return form if isinstance(parse_value(quoted), str) else quoted


def _holds_text(field: str) -> bool:
    """Whether a field holds any text, such as a path, which may look like a number."""
    section, _, key = field.partition(".")
    table = table_class(Config, section)
    hint = table.model_fields[key].annotation if table and key in table.model_fields else None
    return hint in (str, str | None) or field == "data.partition.file"


def _override(tables: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    field = dotted.strip()
    *sections, key = field.split(".")
    if not equals or not all([*sections, key]) or not (sections or key == "protocol"):
        raise ConfigError("override", override, "expected section.key=value, e.g. training.lr=0.01")
    table = tables
    under = tables_of(tables["protocol"]) if "protocol" in tables else {}
    for section in sections:
        table, under = table.setdefault(section, {}), under.get(section, {})
        if not isinstance(table, dict):
            raise ConfigError("override", override, f"{section} is a value, not a table")
        if not isinstance(under, Mapping):  # a value of the protocol
            under = {}
    value = parse_field(field, text.strip())
    if field in SELECTORS and table.get(key, under.get(key, USUAL.get(field, value))) != value:
        table.clear()
    table[key] = value
