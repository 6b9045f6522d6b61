"""The config tree: typed, frozen, and with one clear error per mistake. Its tables are in ``sections.py``."""

import os
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Required, TypedDict, Unpack, overload

import numpy as np
import tomli_w
from pydantic import Field, ValidationError, model_validator

from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.html import config_html
from fedjax_pfl.experiment.options import (
    SELECTORS,
    USUAL,
    Section,
    choose,
    config_error,
    descriptions,
    hyperparameters,
    summary_line,
)
from fedjax_pfl.experiment.protocols import tables_of, with_defaults_of
from fedjax_pfl.experiment.sections import (
    Aggregation,
    Attack,
    Calibration,
    Compression,
    Data,
    Finetune,
    Participation,
    Privacy,
    Run,
    Training,
)
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS

ELSEWHERE = "not registered here, so that its defaults are not known"
"""What is said of a part that the config of a run names, instead of its description."""
HONEST: Mapping[str, Any] = {"attack.kind": "none", "attack.share": None, "attack.scale": None}
"""Changes to a config after which it has no malicious clients."""


class Tables(TypedDict, total=False):
    """The tables of a config: what `Config` takes."""

    data: Required[Mapping[str, Any] | Data]
    model: Mapping[str, Any]
    method: Required[Mapping[str, Any]]
    training: Mapping[str, Any] | Training
    finetune: Mapping[str, Any] | Finetune
    calibration: Mapping[str, Any] | Calibration
    participation: Mapping[str, Any] | Participation
    aggregation: Mapping[str, Any] | Aggregation
    attack: Mapping[str, Any] | Attack
    compression: Mapping[str, Any] | Compression
    privacy: Mapping[str, Any] | Privacy
    run: Mapping[str, Any] | Run


class Config(Section):
    """The config of a whole run. Only ``data.source`` and ``method.name`` have no default.

    ``Config(protocol="fedpac", ...)``, or ``protocol = "fedpac"`` above the tables of a file, takes the values that are
    not given from that protocol instead of from the defaults (``experiment/protocols.py``). A config holds the values,
    not the name of the protocol: it equals a config that gives the same values itself.

    Attributes:
      model: {name, ...}: the model that clients train; ``fedjax-pfl models`` lists all.
      method: {name, ...}: the federated method; ``fedjax-pfl methods`` lists all.

    Raises:
      ConfigError: an unknown key, a wrong type, a value out of range.
    """

    data: Data
    model: Annotated[dict[str, Any], choose("model", "name", MODELS)] = Field(
        {"name": USUAL["model.name"]}, validate_default=True
    )
    method: Annotated[dict[str, Any], choose("method", "name", METHODS)]
    training: Training = Training()
    finetune: Finetune = Finetune()
    calibration: Calibration = Calibration()
    participation: Participation = Participation()
    aggregation: Aggregation = Aggregation()
    attack: Attack = Attack()
    compression: Compression = Compression()
    privacy: Privacy = Privacy()
    run: Run = Run()

    @model_validator(mode="after")
    def _alone_nobody_sends_anything(self) -> "Config":
        if self.participation.collaborate:
            return self
        for section, kind in (("attack", self.attack.kind), ("compression", self.compression.kind)):
            if kind != "none":
                allowed = '"none" with participation.collaborate = false, where clients send nothing'
                raise ConfigError(f"{section}.kind", kind, allowed)
        if (rule := self.aggregation.rule) != "mean":
            allowed = '"mean" with participation.collaborate = false, where a server has a single client'
            raise ConfigError("aggregation.rule", rule, allowed)
        return self

    @model_validator(mode="after")
    def _privacy_is_that_of_a_poisson_sample(self) -> "Config":
        who, why = self.participation, "with privacy.clip"
        if self.privacy.clip is None:
            return self
        if not who.collaborate:
            raise ConfigError("participation.collaborate", False, f"true {why}: alone, clients send nothing")
        if isinstance(who.ratio, tuple):
            raise ConfigError("participation.ratio", who.ratio, f"one share {why}, for epsilon to be known")
        if who.sampling == "fixed" and who.ratio < 1:
            allowed = f'"poisson" {why} and participation.ratio below 1: what epsilon is computed for'
            raise ConfigError("participation.sampling", "fixed", allowed)
        if self.aggregation.rule != "mean":
            raise ConfigError("aggregation.rule", self.aggregation.rule, f'"mean" {why}')
        if (drawn := self.calibration.samples_per_class) > 0:
            allowed = f"0 {why}: clients would send statistics of their features, which nothing hides"
            raise ConfigError("calibration.samples_per_class", drawn, allowed)
        return self

    @model_validator(mode="after")
    def _the_best_is_best_on_validation_samples(self) -> "Config":
        if self.run.keep == "best" and self.data.validation_share == 0:
            allowed = '"final" or "none", or give data.validation_share a value above 0: it is chosen on those samples'
            raise ConfigError("run.keep", "best", allowed)
        return self

    @model_validator(mode="after")
    def _exports_are_of_clients(self) -> "Config":
        who, clients = self.run.export_clients, self.data.clients
        if who is not None:
            if not self.run.export:
                raise ConfigError("run.export_clients", who, "nothing unless run.export says what is kept of them")
            if not all(0 <= client < clients for client in who) or sorted(set(who)) != who:
                allowed = f"clients from 0 to {clients - 1}, each once and in ascending order"
                raise ConfigError("run.export_clients", who, allowed)
        return self

    def __init__(self, *, protocol: str | None = None, **tables: Unpack[Tables]):
        given: dict[str, Any] = plain(tables)
        if protocol is not None:
            given = with_defaults_of({key: _given(table) for key, table in given.items()}, tables_of(protocol))
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise config_error(error, type(self), others=["protocol"]) from None

    @property
    def partition_seed(self) -> int:
        """The seed of test part, partition and split."""
        return self.run.seed if self.data.seed is None else self.data.seed

    @overload
    def replace(self, changes: Mapping[str, Any]) -> "Config": ...

    @overload
    def replace(self, changes: str, value: Any) -> "Config": ...

    def replace(self, changes: Mapping[str, Any] | str, value: Any = ...) -> "Config":
        """A copy with other values: ``config.replace("training.lr", 0.1)``.

        Another ``method.name``, ``model.name`` or ``data.partition.kind`` resets the other options of its table to
        their defaults. A ``protocol`` sets all of its values; the other changes are applied after it.

        Args:
          changes: a dotted field; or several with their values, ``{"training.lr": 0.1, "method.name": "ditto"}``.
          value: the value, if one field is given.

        Raises:
          ConfigError: a field or value that no config can have.
        """
        tables = self.model_dump()
        changes = _changes(changes, value)
        if (protocol := changes.pop("protocol", None)) is not None:
            for section, values in tables_of(protocol).items():
                tables[section] = values if section == "model" else tables[section] | values
        for field in sorted(changes, key=lambda field: field not in SELECTORS):  # these first: they bring defaults
            *sections, key = field.split(".")
            if not sections:
                raise ConfigError(field, changes[field], "a dotted field such as training.lr, or protocol")
            table: dict[str, Any] = tables
            for section in sections:
                if not isinstance(table.get(section), dict):
                    allowed = f"a field of the config; {section} is none of its tables"
                    raise ConfigError(field, changes[field], allowed)
                table = table[section]
            if field in SELECTORS and table[key] != changes[field]:
                table.clear()
            table[key] = changes[field]
        return Config(**tables)

    def non_defaults(self) -> dict[str, dict[str, Any]]:
        """The values that differ from the defaults, by table; ``Config(**config.non_defaults())`` equals the config.

        All options of a part that is not registered here are among them: its defaults are not known.
        """
        tables = self.model_dump()
        tables["model"] = _less_defaults(self.model, "name", MODELS)
        tables["method"] = _less_defaults(self.method, "name", METHODS)
        tables["data"]["partition"] = _less_defaults(self.data.partition, "kind", PARTITIONS)
        found: dict[str, dict[str, Any]] = {}
        for section, field in type(self).model_fields.items():
            table = getattr(self, section)
            if isinstance(table, Section):
                fields = type(table).model_fields.items()
                usual = {name: option.get_default(call_default_factory=True) for name, option in fields}
                found[section] = {name: value for name, value in tables[section].items() if value != usual[name]}
            elif tables[section] != field.default:
                found[section] = tables[section]
        return {section: table for section, table in found.items() if table}

    def __repr__(self) -> str:
        tables = ", ".join(f"{section}={table!r}" for section, table in self.non_defaults().items())
        return f"{type(self).__name__}({tables})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, without: Collection[str] = ()) -> str:
        """All values with their descriptions, as HTML; values that differ from the defaults are bold.

        Args:
          without: dotted fields to leave out; a table without fields is not shown.
        """
        texts = {}
        for section, table in self:
            if isinstance(table, Section):
                texts[section] = summary_line(type(table)), descriptions(type(table))
            else:
                parts: Mapping[str, Callable] = MODELS if section == "model" else METHODS
                part = parts.get(table["name"])
                texts[section] = (summary_line(part), descriptions(part, "Args")) if part else (ELSEWHERE, {})
        shown = {section: table for section, table in without_fields(self.model_dump(), without).items() if table}
        return config_html(shown, self.non_defaults(), texts)

    def to_toml(self) -> str:
        """The resolved config as TOML; unset fields are left out, or are "none" if their default is not unset."""
        tables = self.model_dump()
        for table, key, parts in (
            (tables["model"], "name", MODELS),
            (tables["method"], "name", METHODS),
            (tables["data"]["partition"], "kind", PARTITIONS),
        ):
            for field in _less_defaults(table, key, parts):
                if table[key] in parts and table[field] is None:
                    table[field] = "none"
        return tomli_w.dumps(_without_none(tables))


def check_config(config: Any) -> None:
    """Checks that this is a `Config`, and not a path or a dictionary.

    Raises:
      ConfigError: it is not.
    """
    if not isinstance(config, Config):
        raise ConfigError("config", config, "a Config: load_config(path) of a file, Config(**tables) of a dictionary")


def parts_elsewhere(config: Config) -> list[str]:
    """The fields that name a part that is not registered here, as the config of a run on disk may have them."""
    parts: dict[str, tuple[str, Mapping[str, Any]]] = {
        "method.name": (config.method["name"], METHODS),
        "model.name": (config.model["name"], MODELS),
        "data.partition.kind": (config.data.partition["kind"], PARTITIONS),
    }
    return [field for field, (name, registered) in parts.items() if name not in registered]


def _changes(changes: Mapping[str, Any] | str, value: Any) -> dict[str, Any]:
    """Field -> value, from either form of the arguments of `Config.replace`."""
    if isinstance(changes, str):
        if value is ...:
            raise ConfigError(changes, "(missing)", f'a value, as in config.replace("{changes}", value)')
        return {changes: plain(value)}
    if not isinstance(changes, Mapping) or value is not ...:
        raise ConfigError("changes", changes, 'a field with its value, or a mapping such as {"training.lr": 0.1}')
    if wrong := [field for field in changes if not isinstance(field, str)]:
        raise ConfigError("changes", wrong[0], "a dotted field such as training.lr")
    return {field: plain(value) for field, value in changes.items()}


def _less_defaults(table: Mapping[str, Any], key: str, parts: Mapping[str, Callable]) -> dict[str, Any]:
    """A table {key: name, **options} without the options that equal the defaults of the part of that name."""
    name = table[key]
    usual = hyperparameters(parts[name]) if name in parts else {}  # a config from elsewhere may name what is not here
    return {field: value for field, value in table.items() if field not in usual or value != usual[field].default}


def _given(table: Any) -> Any:
    """The values that were given explicitly in a table, which may be an instance of one of the classes above."""
    return table.model_dump(exclude_unset=True) if isinstance(table, Section) else table


def without_fields(tables: Mapping[str, Any], fields: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Nested tables without these dotted fields."""
    return {
        name: without_fields(value, fields, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in tables.items()
        if prefix + name not in fields
    }


def plain(node: Any) -> Any:
    """Tables in which NumPy numbers and arrays, and paths, are replaced by Python numbers, lists and strings."""
    if isinstance(node, Mapping):
        return {key: plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        values = [plain(value) for value in node]
        return tuple(values) if isinstance(node, tuple) else values
    if isinstance(node, np.generic | np.ndarray):
        return node.tolist()
    return os.fspath(node) if isinstance(node, os.PathLike) else node


def _without_none(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_none(value) for key, value in node.items() if value is not None}
    return node
