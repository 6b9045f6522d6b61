"""The JSON schema of a config file, for editors that complete and check TOML while you type."""

from collections.abc import Callable, Mapping
from typing import Any

from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.options import descriptions, options_model
from fedjax_pfl.experiment.protocols import PROTOCOLS
from fedjax_pfl.experiment.registry import load_entry_points, own_parts
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS

Schema = dict[str, Any]


def config_schema() -> Schema:
    """The JSON schema (draft 2020-12) of a config file.

    Names, types, ranges, defaults and descriptions come from the code. The schema includes methods, models, partitions
    and sources that are registered, or offered by installed packages. Rules between fields are checked by `load_config`
    only.
    """
    load_entry_points()
    schema = Config.model_json_schema()
    tables = schema["properties"]
    data = schema["$defs"]["Data"]["properties"]
    for where, name, key, parts in (
        (tables, "method", "name", METHODS),
        (tables, "model", "name", MODELS),
        (data, "partition", "kind", PARTITIONS),
    ):
        where[name] = _kept(where[name], "description", "default") | _choice(key, parts)
    tables["method"]["required"] = ["name"]
    data["source"] = _kept(data["source"], "description") | _source()
    protocols = {"enum": list(PROTOCOLS), "description": "what is not given below is taken from it, not the defaults."}
    schema["properties"] = {"protocol": protocols, **tables}
    opening = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A config of fedjax_pfl"}
    return opening | _for_toml({name: value for name, value in schema.items() if name != "title"})


def _kept(schema: Schema, *names: str) -> Schema:
    return {name: schema[name] for name in names if name in schema}


def _choice(key: str, parts: Mapping[str, Callable]) -> Schema:
    """The schema of a table {key: name, **options}, whose options are those of the part of that name."""
    options = {name: _options(name, part) for name, part in parts.items()}
    texts: dict[str, list[str]] = {}
    rules: list[Schema] = []
    for name, part in options.items():
        for option, given in part["properties"].items():
            texts.setdefault(option, []).append(f"{name}: {given.get('description', '')}".removesuffix(": "))
        named = {"properties": {key: {"const": name}}, "required": [key]}
        rules.append({"if": named, "then": {**part, "properties": {key: True, **part["properties"]}}})
    nameless = {"if": {"not": {"required": [key]}}, "then": {"propertyNames": {"enum": list(texts)}}}
    return {
        "type": "object",
        # Some editors do not look into conditions, and would otherwise complete nothing.
        "properties": {
            key: {"enum": list(parts)},
            **{option: {"description": "\n\n".join(said)} for option, said in texts.items()},
        },
        "allOf": [*rules, nameless],
    }


def _options(name: str, part: Callable) -> Schema:
    schema, texts = options_model(name, part).model_json_schema(), descriptions(part, "Args")
    options = schema.get("properties", {})
    for option, given in options.items():
        if option in texts:
            given["description"] = texts[option]
    return {"properties": options, "required": schema.get("required", []), "additionalProperties": False}


def _source() -> Schema:
    """The names of the sources; some need an argument after a colon, and those of users may have one."""
    own = own_parts({"dataset": SOURCES})["dataset"]
    with_argument = [name for name, (_, text) in SOURCES.items() if text.startswith(f"{name}:") and name not in own]
    alone = [name for name in SOURCES if name not in with_argument]
    return {
        "type": "string",
        "anyOf": [{"enum": [*alone, "arrays"]}, {"pattern": f"^({'|'.join([*with_argument, *own])}):."}],
    }


def _for_toml(node: Any) -> Any:
    """Without null, which TOML does not have, and without titles of fields and reStructuredText markup.

    In the place of null stands ``"none"``, as in `load_config`; but not where that is another value of the field.
    """
    if isinstance(node, list):
        return [_for_toml(value) for value in node]
    if not isinstance(node, dict):
        return node
    if {"type": "null"} in node.get("anyOf", ()):
        kinds = [kind for kind in node["anyOf"] if kind != {"type": "null"}]
        if not any("none" in kind.get("enum", ()) for kind in kinds):
            kinds.append({"const": "none"})
        rest = {name: value for name, value in node.items() if name != "anyOf"}
        node = {**rest, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}
    if "properties" not in node:
        node = {name: value for name, value in node.items() if name != "title" or not isinstance(value, str)}
    found = {name: _for_toml(value) for name, value in node.items() if value is not None}
    if isinstance(found.get("description"), str):
        found["description"] = found["description"].replace("``", "`")
    return found
