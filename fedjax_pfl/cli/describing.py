"""What ``describe`` and ``init`` say of what a config can name, and of its fields: from signatures and docstrings."""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.errors import ConfigError, one_of
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.options import descriptions, hyperparameters, summary_line, table_class
from fedjax_pfl.experiment.protocols import PROTOCOLS, tables_of
from fedjax_pfl.experiment.registry import load_entry_points
from fedjax_pfl.experiment.summary import flat
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS

_TABLES: dict[str, Mapping[str, Callable]] = {
    "method": METHODS,
    "model": MODELS,
    "data.partition": PARTITIONS,
}
_WIDTH = 100


def described(name: str) -> str:
    """What there is to say of a method, model, partition, source, protocol, config section or field.

    An option is ``fedprox.mu``, that of one part, or ``method.mu``, that of all methods that have it.

    Raises:
      ConfigError: there is nothing of this name.
    """
    load_entry_points()
    found = [_part(table, name, parts[name]) for table, parts in _TABLES.items() if name in parts]
    if name in SOURCES:
        found.append(f'data.source = "{name}": {SOURCES[name][1]}')
    if name in PROTOCOLS:
        values = [f"{field} = {_shown(value)}" for field, value in flat(tables_of(name)).items()]
        found.append("\n".join([f'protocol = "{name}", in the place of the defaults:', "", *values]))
    if name == "protocol":
        found += ["protocol: values in the place of the defaults, by one of these names.", ", ".join(PROTOCOLS)]
    for table, parts in _TABLES.items():
        selector = f"{table}.{'kind' if table == 'data.partition' else 'name'}"
        if name in (table, selector):
            found += [f"{selector}: one of the following, each with options of its own.", ", ".join(parts)]
    found += [text for known, text in _options() if name in known]
    section, dot, field = name.partition(".")
    if schema := table_class(Config, section):
        if not dot:
            found.append(_of_section(section, schema))
        elif field in schema.model_fields:
            found.append("\n".join(_field(name, _default(schema.model_fields[field]), descriptions(schema)[field])))
    if not found:
        meant, _, _ = one_of(name, _names()).partition("allowed: ")  # there are hundreds
        allowed = "a method, model, partition, data source, protocol, section (training) or field (training.lr)"
        lists = "fedjax-pfl methods, models, partitions and datasets list them"
        raise ConfigError("NAME", name, f"{allowed}; {meant}{lists}")
    return "\n\n".join(found)


def _options() -> Iterator[tuple[tuple[str, str], str]]:
    """The options of all methods, models and partitions: each by its two names, with what there is to say of it."""
    for table, parts in _TABLES.items():
        for part, factory in parts.items():
            texts = descriptions(factory, "Args")
            for option, parameter in hyperparameters(factory).items():
                text = texts.get(option, f"see fedjax-pfl describe {part}")
                said = "\n".join(_field(f"{part}.{option}", parameter.default, text))
                yield (f"{part}.{option}", f"{table}.{option}"), said


def _names() -> Iterator[str]:
    """All names that `described` knows, but for those of the tables."""
    for names in (*_TABLES.values(), SOURCES, PROTOCOLS, ["protocol"], *(known for known, _ in _options())):
        yield from names
    for section in Config.model_fields:
        if schema := table_class(Config, section):
            yield from (section, *(f"{section}.{field}" for field in schema.model_fields))


def template() -> str:
    """A config with every field, its description and its default: what ``init`` writes.

    Defaults stand in comments, because a protocol sets only what is not given.
    """
    lines = [
        "# A config of fedjax_pfl: every field, below its description. Only data.source and method.name are",
        "# needed; all others are commented out, with their defaults. Remove the # to set another value.",
        "# fedjax-pfl describe NAME says more of methods, models, partitions and sources.",
        "",
        "#protocol = \"pfllib\"   # a benchmark's or paper's values for what is not given below",
    ]
    needed = {"data.source": 'source = "digits"', "method.name": 'name = "fedavg"'}
    for section in Config.model_fields:
        lines += ["", f"[{section}]"]
        schema = table_class(Config, section)
        if schema is None:
            lines += [f"# {line}" for line in _wrapped(f"name, and options of its own: {', '.join(_TABLES[section])}")]
            lines.append(needed.get(f"{section}.name", '#name = "mlp"'))
            continue
        texts = descriptions(schema)
        for field, info in schema.model_fields.items():
            lines += [f"# {line}" for line in _wrapped(texts[field])]
            value = None if info.is_required() else _default(info)
            usual = f"#{field} =" if value is None else f"#{field} = {_shown(value)}"
            lines.append(needed.get(f"{section}.{field}", usual))
    return "\n".join(lines) + "\n"


def _part(table: str, name: str, part: Callable) -> str:
    """Docstring and options of a method, model or partition."""
    given = hyperparameters(part)
    lines = [inspect.getdoc(part) or "", ""]
    lines.append(f"Options ([{table}] in the config):" if given else "No options of its own.")
    lines += [f"  {_with_default(option, parameter.default)}" for option, parameter in given.items()]
    return "\n".join(lines)


def _of_section(name: str, schema: type[BaseModel]) -> str:
    texts = descriptions(schema)
    fields = [
        line
        for field, info in schema.model_fields.items()
        for line in _field(f"{name}.{field}", _default(info), texts[field])
    ]
    return "\n".join([summary_line(schema), "", *fields])


def _field(name: str, default: Any, text: str) -> Iterator[str]:
    """A field with its default, and what it means."""
    yield _with_default(name, default)
    for line in _wrapped(text):
        yield f"  {line}"


def _with_default(name: str, default: Any) -> str:
    needed = default is PydanticUndefined or default is inspect.Parameter.empty
    return f"{name} (must be given)" if needed else f"{name} = {_shown(default)}"


def _default(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True)


def _shown(value: Any) -> str:
    """A value as TOML has it; nothing for one that is left out."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_shown(of)}' for key, of in value.items())} }}"
    return "(left out)" if value is None else tomli_w.dumps({"_": value}).strip().removeprefix("_ = ")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text.replace("``", "`"), _WIDTH, break_long_words=False, break_on_hyphens=False)
