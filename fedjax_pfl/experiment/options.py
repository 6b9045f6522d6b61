"""How a table of the config is checked: by the fields of its class, or by the signature of the function that it names.

The tables ``[method]``, ``[model]`` and ``data.partition`` name a function. Their other keys are the keyword-only
arguments of this function: its signature is the schema.
"""

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NoReturn, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from fedjax_pfl.errors import ConfigError, one_of, one_part_of
from fedjax_pfl.experiment.registry import load_entry_points

# Programs count in int32 and calculate in float32.
_TOO_MANY = 2**31
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127

SELECTORS = ("method.name", "model.name", "data.partition.kind")
"""The fields that name a part. The other options of the same table belong to that part; another name has others."""
USUAL = {"model.name": "mlp", "data.partition.kind": "dirichlet"}
"""The parts of tables that name none."""
_RECORDED: ContextVar[bool] = ContextVar("recorded", default=False)


@contextmanager
def recorded() -> Iterator[None]:
    """In it, a table may name a part that is not registered here; its options are taken as they stand.

    For the config of a run on disk, which was checked when the run began. Such a config can be read, not run.
    """
    before = _RECORDED.set(True)
    try:
        yield
    finally:
        _RECORDED.reset(before)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _representable(cls, value: Any, info: ValidationInfo) -> Any:
        for number in value if isinstance(value, list | tuple) else [value]:
            # A seed has a bound of its own.
            if type(number) is int and abs(number) >= _TOO_MANY and info.field_name != "seed":
                raise PydanticCustomError("too_large", f"input should be less than {_TOO_MANY}")
            if type(number) is float and number and not _SMALLEST <= abs(number) <= _LARGEST:
                allowed = f"input should be 0, or a float32, whose size is {_SMALLEST:.3g} to {_LARGEST:.3g}"
                raise PydanticCustomError("no_float32", allowed)
        return value


def hyperparameters(factory: Callable) -> dict[str, inspect.Parameter]:
    """The keyword-only arguments of a factory, by name: the options that its config table may have."""
    parameters = inspect.signature(factory).parameters
    return {name: given for name, given in parameters.items() if given.kind is inspect.Parameter.KEYWORD_ONLY}


def options_model(name: str, factory: Callable) -> type[BaseModel]:
    """A factory's hyperparameters as a pydantic model of the given name."""
    hints = typing.get_type_hints(factory, include_extras=True)
    usual = {field: ... if arg.default is arg.empty else arg.default for field, arg in hyperparameters(factory).items()}
    fields: dict[str, Any] = {
        field: (hints[field], Field(default, validate_default=True)) for field, default in usual.items()
    }
    return create_model(name, __base__=_Table, **fields)


def descriptions(documented: Any, heading: str = "Attributes") -> dict[str, str]:
    """The description of each name under a heading of a docstring (``Attributes`` or ``Args``), as one line."""
    _, _, below = (inspect.getdoc(documented) or "").partition(f"\n{heading}:\n")
    section = re.split(r"^\S", below, maxsplit=1, flags=re.MULTILINE)[0]
    entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def summary_line(documented: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]


class Section(_Table):
    """A table whose fields are those of a class, or all tables together."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _in_the_types_of_the_fields(cls, given: Any) -> Any:
        return _sequences_as(list, tuple | range, _unset(given, cls), cls) if isinstance(given, Mapping) else given

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise _by_replace()

    def __delattr__(self, name: str) -> NoReturn:
        raise _by_replace()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Refused, because pydantic's copy accepts any name and value without a check.

        Raises:
          TypeError: always; use `Config.replace`.
        """
        del update, deep
        raise _by_replace()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema, with the descriptions of the fields from the docstring."""
        found = handler(core)
        schema = handler.resolve_ref_schema(found)
        schema["description"] = summary_line(cls)
        texts = descriptions(cls)
        for name, field in cls.model_fields.items():
            schema["properties"][name]["description"] = texts.get(name) or summary_line(field.annotation)
        return found


def _by_replace(field: str = "training.lr", value: str = "0.1") -> TypeError:
    return TypeError(f'a config is copied by Config.replace, which checks: config.replace("{field}", {value})')


class _Part(dict[str, Any]):
    """A table {key: name, **options} of a config, which refuses changes: nothing would check them."""

    def __init__(self, section: str, table: Mapping[str, Any]):
        super().__init__(table)
        self._section = section

    def __reduce__(self) -> tuple[Any, ...]:  # a dict's own would set one item after the other
        return type(self), (self._section, dict(self))

    def __setitem__(self, key: str, value: Any) -> NoReturn:
        raise _by_replace(f"{self._section}.{key}", repr(value))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _by_replace(f"{self._section}.KEY", "...")

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def choose(section: str, key: str, table: Mapping[str, Callable]) -> WrapValidator:
    """Checks a table {key: name, **options} against the signature of table[name], and fills in the defaults."""
    field = f"{section}.{key}"

    def check(given: Any, _: Any) -> _Part:
        if not isinstance(given, Mapping):
            raise ConfigError(section, given, f'expected a table such as {{{key} = "{next(iter(table))}"}}')
        options = {key: USUAL.get(field, "(missing)"), **given}
        name = options.pop(key)
        if isinstance(name, str) and name not in table:
            load_entry_points()
            if name not in table and _RECORDED.get():
                return _Part(section, {key: name, **options})
        if not isinstance(name, str) or name not in table:
            raise ConfigError(field, name, one_part_of(name, table))
        schema = options_model(name, table[name])
        options = _sequences_as(list, tuple | range, _unset(options, schema), schema)
        options = _sequences_as(tuple, list, options, schema)
        try:
            return _Part(section, {key: name, **schema.model_validate(options).model_dump()})
        except ValidationError as error:
            raise config_error(error, schema, section) from None

    return WrapValidator(check)


def _unset(given: Mapping[str, Any], table: type[BaseModel]) -> dict[str, Any]:
    """The given values, with ``"none"`` replaced by None if the field may be None, which TOML cannot write."""

    def may_be_none(field: str) -> bool:
        hint = table.model_fields[field].annotation if field in table.model_fields else None
        return type(None) in typing.get_args(hint) and "none" not in _literals(hint)

    def is_none(field: str, value: Any) -> bool:
        return isinstance(value, str) and value == "none" and may_be_none(field)

    return {field: None if is_none(field, value) else value for field, value in given.items()}


def _sequences_as(kind: type, others: Any, given: Mapping[str, Any], table: type[BaseModel]) -> dict[str, Any]:
    """The given values; for a field that is a ``kind`` (list or tuple), a value of the types ``others`` becomes one."""

    def is_kind(field: str) -> bool:
        hint = table.model_fields[field].annotation if field in table.model_fields else None
        return any(typing.get_origin(of) is kind for of in (hint, *typing.get_args(hint)))

    return {
        field: kind(value) if isinstance(value, others) and is_kind(field) else value for field, value in given.items()
    }


def _literals(hint: Any) -> list[Any]:
    """The values of all Literals in a type."""
    found = list(typing.get_args(hint)) if typing.get_origin(hint) is Literal else []
    return found + [value for part in typing.get_args(hint) for value in _literals(part)]


# Names of other libraries and papers for our fields, which an error then suggests.
_OTHER_NAMES = {
    "alpha": "beta",
    "dataset": "source",
    "fraction_fit": "ratio",
    "global_rounds": "rounds",
    "join_ratio": "ratio",
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "local_learning_rate": "lr",
    "num_clients": "clients",
    "num_rounds": "rounds",
}


def table_class(config: type[BaseModel], field: str) -> type[Section] | None:
    """The class of a table of the config; tables that name a part have none."""
    table = config.model_fields[field].annotation if field in config.model_fields else None
    return table if inspect.isclass(table) and issubclass(table, Section) else None


def config_error(
    error: ValidationError, schema: type[BaseModel], section: str = "", others: Sequence[str] = ()
) -> ConfigError:
    """The first mistake, as one sentence with the dotted field, the value and what is allowed.

    Args:
      error: what pydantic found.
      schema: what was checked: the class of the config, or the options of a part.
      section: the table that names the part.
      others: keys that are allowed besides the fields of the schema.
    """
    # A misspelt name is an unknown key and, where it has no default, a missing one: the unknown one says more.
    errors = sorted(error.errors(), key=lambda e: e["type"] == "missing")
    # Where a field may have several types, the one that fits the value best fails deepest inside it.
    same_field = [e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]]
    first = max(same_field, key=lambda e: len(e["loc"]))
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):
        return raised
    # Deeper locations name the branches of a union of types, not fields.
    path = [section, str(first["loc"][0])] if section else [str(part) for part in first["loc"][:2]]
    field, table = ".".join(path), None if section or len(path) == 1 else table_class(schema, path[0])
    if first["type"] == "extra_forbidden":
        known = list(table.model_fields) if table else [*others, *schema.model_fields]
        owner = f" of {schema.__name__}" if section else ""
        here = _OTHER_NAMES.get(path[-1], path[-1])
        return ConfigError(field, first["input"], f"no such key{owner}; {one_of(here, known)}")
    told = descriptions(table).get(path[-1], "").replace("``", "").rstrip(".") if table else ""
    if first["type"] == "missing":
        return ConfigError(field, "(missing)", f"it has no default and must be given{told and f': {told}'}")
    if first["type"] == "model_type":
        return ConfigError(field, first["input"], f"expected a table [{field}]")
    share = ": it is a share" if first["type"] == "less_than" and told.startswith("share of ") else ""
    return ConfigError(field, first["input"], first["msg"][0].lower() + first["msg"][1:] + share)
