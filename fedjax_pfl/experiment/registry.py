"""Registers a user's own parts: methods, models, data sources, partitions and metrics.

A decorator adds a part to the table of names that configs use. Other installed packages offer parts as entry points,
which are loaded when a config uses a name that is not in the table:

    [project.entry-points."fedjax_pfl.methods"]
    mine = "their_package.methods:mine"

The groups are ``fedjax_pfl.methods``, ``.models``, ``.datasets``, ``.partitions`` and ``.metrics``.
"""

import contextlib
import functools
import importlib.metadata
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pydantic

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.dealing import Partition
from fedjax_pfl.data.intake import as_dataset
from fedjax_pfl.data.listed import check_rows
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.engine.metrics import METRICS
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.summary import MEASURES
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS
from fedjax_pfl.models.own import is_plain, own_model

Part = TypeVar("Part", bound=Callable[..., Any])
OwnParts = Mapping[str, Mapping[str, Any]]
"""Kind -> name -> part."""


class _Kind(NamedTuple):
    """A kind of parts.

    Attributes:
      table: name -> part.
      built_in: the names of the package's own parts, which cannot be replaced.
      example: an example of a part's signature, for messages.
      given: the allowed numbers of positional arguments.
      key: the key that names the part in its table of a config, if it has a table.
    """

    table: MutableMapping[str, Any]
    built_in: frozenset[str]
    example: str
    given: tuple[int, ...]
    key: str | None = None


_KINDS = {
    "method": _Kind(
        METHODS,
        frozenset(METHODS),
        "def mine(model, train, combine=weighted_mean, *, mu: float = 0.1) -> Method",
        (2,),
        "name",
    ),
    "model": _Kind(
        MODELS, frozenset(MODELS), "def mine(*, hidden: int = 64, init: str) -> flax.linen.Module", (0,), "name"
    ),
    # In a config, "arrays" stands for data from Python.
    "dataset": _Kind(
        SOURCES, frozenset({*SOURCES, "arrays"}), "def mine(argument) -> data, as simulate takes it", (1,)
    ),
    "partition": _Kind(
        PARTITIONS,
        frozenset(PARTITIONS),
        "def mine(labels, clients, seed, size, *, share: float = 0.5) -> rows",
        (4,),
        "kind",
    ),
    "metric": _Kind(METRICS, frozenset(MEASURES), "def mine(logits, labels) -> a value for each sample", (2, 3)),
}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def register_method(name: str) -> Callable[[Part], Part]:
    """Registers a method under a name for configs and the command line.

    ``@register_method("mine")`` decorates a factory ``(model, train, *, hyperparameters) -> Method``, with a third
    argument ``combine=weighted_mean`` if the method averages parameters: see :class:`fedjax_pfl.method.Method`. The
    names, types and defaults of its keyword-only arguments are its options in a config. Registering a name again
    replaces the earlier method.

    Args:
      name: letters, digits and underscores; not the name of one of the package's methods.

    Raises:
      ConfigError: the name is not allowed, or the function does not have such a signature.
    """
    _check_name("method", name)
    return functools.partial(_register, "method", name)


def register_model(name: str, *, features: str | None = None) -> Callable[[Part], Part]:
    """Registers a model under a name for configs and the command line.

    Args:
      name: as in `register_method`.
      features: the layer of a classifier after which it is cut into extractor and head; see
        :func:`fedjax_pfl.models.own.own_model`, which also lists what can be decorated.

    Raises:
      ConfigError: the name is not allowed, or the decorated object cannot be a model.
    """
    _check_name("model", name)

    def register(given: Part) -> Part:
        _register("model", name, own_model(given, features=features))
        return given

    return register


def register_dataset(name: str) -> Callable[[Part], Part]:
    """Registers a data source under a name: ``data.source = "mine"`` or ``"mine:ARGUMENT"``.

    ``@register_dataset("mine")`` decorates a function of the argument (a string, which may be empty) that returns data
    in a form that :func:`fedjax_pfl.simulate` accepts. ``fedjax-pfl datasets`` prints the first line of its docstring.

    Args:
      name: as in `register_method`.

    Raises:
      ConfigError: the name is not allowed, or the function does not have such a signature.
    """
    _check_name("dataset", name)

    def register(given: Part) -> Part:
        function = _spelled_out(given)
        _check("dataset", name, function)

        def load(argument: str) -> Dataset:
            return as_dataset(function(argument), name=name)

        SOURCES[name] = load, (inspect.getdoc(function) or "your own").splitlines()[0]
        return given

    return register


def register_partition(name: str) -> Callable[[Part], Part]:
    """Registers a partition under a name: ``data.partition = {kind = "mine", ...}``.

    ``@register_partition("mine")`` decorates a function ``(labels, clients, seed, size, *, options) -> rows``. It gets
    the integer labels [samples] and returns the row numbers of each client, one or more per client. ``size`` is the
    number of samples that the config wants for each client, or None; if it is given, other numbers are refused. The
    keyword-only arguments are options in a config.

    Args:
      name: as in `register_method`.

    Raises:
      ConfigError: the name is not allowed, or the function does not have such a signature.
    """
    _check_name("partition", name)

    def register(given: Part) -> Part:
        function = _spelled_out(given)

        @functools.wraps(function)
        def partition(labels: np.ndarray, clients: int, seed: int, size: int | None, **options: Any) -> Partition:
            made = _checked_rows(name, function(labels, clients, seed, size, **options), len(labels), clients)
            if size is not None and any(len(rows) != size for rows in made.parts):
                asked = f"{size} with those to test on"
                raise ConfigError("data.samples_per_client", asked, f"nothing: {name} gives clients other numbers")
            return made

        _check("partition", name, function)
        PARTITIONS[name] = partition
        return given

    return register


def register_metric(name: str) -> Callable[[Part], Part]:
    """Registers a metric under a name: ``run.metrics = ["mine"]``.

    ``@register_metric("mine")`` decorates a JAX function; see :mod:`fedjax_pfl.engine.metrics` for its two forms.

    Args:
      name: as in `register_method`; the metric is recorded as ``pre.mine``, ``post.mine`` and ``global_mine``.

    Raises:
      ConfigError: the name is not allowed, or the function does not have such a signature.
    """
    _check_name("metric", name)
    return functools.partial(_register, "metric", name)


@functools.cache
def load_entry_points() -> None:
    """Registers the parts that other packages offer, once per process; names registered by this process stay.

    Raises:
      ConfigError: a part cannot be imported, or is not a valid part.
    """
    decorators: dict[str, Callable[[str], Callable[[Any], Any]]] = {
        "methods": register_method,
        "models": register_model,
        "datasets": register_dataset,
        "partitions": register_partition,
        "metrics": register_metric,
    }
    for group, decorator in decorators.items():
        kind = _KINDS[group.removesuffix("s")]
        for point in importlib.metadata.entry_points(group=f"fedjax_pfl.{group}"):
            if point.name in kind.table and point.name not in kind.built_in:
                continue
            try:
                part = point.load()
            except Exception as error:  # whatever a module does when it is imported
                why = f"something that can be imported, or an absent package ({type(error).__name__}: {error})"
                raise ConfigError(f"entry point fedjax_pfl.{group}", point.value, why) from error
            decorator(point.name)(part)


def is_built_in(kind: str, name: str) -> bool:
    """Whether a part is one of the package's."""
    return name in _KINDS[kind].built_in


def own_parts(names: Mapping[str, Iterable[str]]) -> OwnParts:
    """The user's own parts among the parts with these names, without the package's.

    Args:
      names: kind -> names.
    """
    return {
        kind: {name: _KINDS[kind].table[name] for name in of_kind if name not in _KINDS[kind].built_in}
        for kind, of_kind in names.items()
    }


def add_parts(parts: OwnParts) -> None:
    """Registers parts that `own_parts` has returned in another process."""
    for kind, own in parts.items():
        _KINDS[kind].table.update(own)


@contextlib.contextmanager
def with_own_parts(parts: OwnParts) -> Iterator[None]:
    """Registers these parts temporarily, even if others have been registered under their names in the meantime."""
    now = {kind: {name: _KINDS[kind].table.get(name) for name in own} for kind, own in parts.items()}
    add_parts(parts)
    try:
        yield
    finally:
        for kind, own in now.items():
            for name, part in own.items():
                put(_KINDS[kind].table, name, part)


def put(table: MutableMapping[str, Any], name: str, part: Any) -> None:
    """Puts a part into its table; None leaves none of this name there."""
    if part is None:
        table.pop(name, None)
    else:
        table[name] = part


def _register(kind: str, name: str, part: Part) -> Part:
    _check(kind, name, function := _spelled_out(part))
    _KINDS[kind].table[name] = function
    return part


@functools.lru_cache(maxsize=256)
def _of_partial(part: functools.partial) -> Callable[..., Any]:
    @functools.wraps(part.func)
    def function(*args: Any, **options: Any) -> Any:
        return part(*args, **options)

    about: Any = function
    about.__signature__ = inspect.signature(part)
    return function


def _spelled_out(part: Any) -> Any:
    """A ``functools.partial`` as a function with its signature, types and docstring; any other part itself.

    The same partial is the same function, so that its programs are not compiled again.
    """
    return _of_partial(part) if isinstance(part, functools.partial) else part


def _check(kind: str, name: str, part: Any) -> None:
    """Checks the signature of a part."""
    field, example, given = f"register_{kind}", _KINDS[kind].example, _KINDS[kind].given
    may_be_class = kind in ("model", "dataset")  # whose instance is what is wanted
    if not callable(part) or (isinstance(part, type) and not may_be_class):
        raise ConfigError(field, part, f"a function: {example}")
    try:
        parameters = inspect.signature(part).parameters.values()
        hints = typing.get_type_hints(part)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(field, name, f"a function whose signature can be read: {error}") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    fits = any(len(required) <= number <= len(positional) for number in given)
    if not fits or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ConfigError(field, name, f"it has other arguments than {example}")
    key = _KINDS[kind].key
    beyond = [p.name for p in positional[max(given) :] if (kind, p.name) != ("method", "combine")]
    if key and beyond:
        raise ConfigError(field, name, f"put a * before {beyond[0]}: options are keyword-only")
    for option in (p.name for p in parameters if p.kind is p.KEYWORD_ONLY):
        if option not in hints:
            raise ConfigError(field, name, f"the option {option} needs a type, such as {option}: float = 0.1")
        if key and (option == key or option.startswith("_") or hasattr(pydantic.BaseModel, option)):
            raise ConfigError(field, name, f"another name for its option {option}, which has a meaning in a config")
        if key and not is_plain(hints[option]):
            allowed = "bool, int, float, str, None, a Literal, or lists or tuples of them without None"
            raise ConfigError(field, name, f"a type that a config can hold for its option {option}: {allowed}")


def _check_name(kind: str, name: Any) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        allowed = f'a name of letters, digits and underscores, as in @register_{kind}("mine")'
        raise ConfigError(f"register_{kind}", name, allowed)
    if name in _KINDS[kind].built_in:
        raise ConfigError(f"register_{kind}", name, f"another name: the package's own {kind} is called so")


def _checked_rows(name: str, given: Any, samples: int, clients: int) -> Partition:
    """The result of a user's own partition, checked, with rows in ascending order."""
    if isinstance(given, Partition):
        return given._replace(parts=_checked_rows(name, given.parts, samples, clients).parts)
    field = "data.partition.kind"
    if not isinstance(given, Sequence | np.ndarray) or len(given) != clients:
        found = f"{len(given)} lists" if isinstance(given, Sequence | np.ndarray) else type(given).__name__
        raise ConfigError(field, name, f"it must return a list of rows for each of the {clients} clients, not {found}")
    parts = [np.asarray(rows) for rows in given]
    for client, rows in enumerate(parts):
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            hint = ": numpy.flatnonzero(mask)" if rows.dtype == bool else ""
            needed = f"client {client} needs row numbers [n], not {rows.dtype} {rows.shape}{hint}"
            raise ConfigError(field, name, needed)
    check_rows(parts, samples, clients, field, name)
    return Partition([np.sort(rows).astype(np.int64) for rows in parts], ())
