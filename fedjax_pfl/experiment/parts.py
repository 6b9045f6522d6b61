"""The user's own parts of a run: those passed to `simulate`, and those that a config names."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.engine.metrics import METRICS, Metric
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.options import hyperparameters
from fedjax_pfl.experiment.registry import (
    NAME,
    OwnParts,
    own_parts,
    put,
    register_method,
    register_metric,
    register_model,
)
from fedjax_pfl.method import Method
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS
from fedjax_pfl.models.own import behind


@contextmanager
def with_parts(
    config: Config,
    *,
    model: Any = None,
    features: str | None = None,
    method: Callable[..., Method] | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Iterator[Config]:
    """The config with parts from Python instead of those that it names; they are registered under their own names.

    They stay registered, unless an error leaves the context. Options have the part's defaults, unless the config
    already names this part; what a ``functools.partial`` gives comes before what the config says.

    Args:
      config: the config.
      model: a model, as for `register_model`.
      features: the layer at which it is cut, as for `register_model`.
      method: a factory, as for `register_method`.
      metrics: name -> metric, as for `register_metric`, in addition to the config's.

    Raises:
      ConfigError: one of them cannot be used; or the config names a part that has other options since.
    """
    tables: dict[str, Any] = config.model_dump()
    with ExitStack() as undo:
        if features is not None and model is None:
            raise ConfigError("features", features, "nothing without model: it says where that classifier is cut")
        if model is not None:
            name = _own_name(model)
            undo.callback(put, MODELS, name, MODELS.get(name))
            register_model(name, features=features)(model)
            tables["model"] = _table(config.model, name, model, MODELS[name])
        if method is not None and not callable(method):
            raise ConfigError("method", method, "a factory; a name goes into the config: method.name")
        if method is not None:
            name = _own_name(method)
            undo.callback(put, METHODS, name, METHODS.get(name))
            register_method(name)(method)
            tables["method"] = _table(config.method, name, method, METHODS[name])
        if metrics is not None and not isinstance(metrics, Mapping):
            raise ConfigError("metrics", metrics, 'names with functions, as in {"ece": ece}')
        if metrics:
            for name, metric in metrics.items():
                undo.callback(put, METRICS, name, METRICS.get(name))
                register_metric(name)(metric)
            tables["run"]["metrics"] = list(dict.fromkeys([*config.run.metrics, *metrics]))
        yield Config(**tables)
        undo.pop_all()


def parts_of(configs: Sequence[Config]) -> OwnParts:
    """The user's own methods, models ... that configs name."""
    return own_parts(
        {
            "method": {config.method["name"] for config in configs},
            "model": {config.model["name"] for config in configs},
            "dataset": {config.data.source.partition(":")[0] for config in configs} & SOURCES.keys(),
            "partition": {config.data.partition["kind"] for config in configs},
            "metric": {metric for config in configs for metric in config.run.metrics} & METRICS.keys(),
        }
    )


def _table(of: Mapping[str, Any], name: str, part: Any, factory: Callable[..., Any]) -> dict[str, Any]:
    """The config's table of a part from Python: what it says of this part, as far as the part leaves that open.

    A class or a function leaves its options open, a partial those that it does not give, and a module has none.
    """
    said = {option: value for option, value in of.items() if option != "name"} if of["name"] == name else {}
    if not inspect.isclass(part) and not inspect.isroutine(part):
        given = part.keywords if isinstance(part, functools.partial) else {}
        said = {option: given.get(option, said[option]) for option in hyperparameters(factory) if option in said}
    return {"name": name, **said}


def _own_name(part: Any) -> str:
    """The name of a part from Python: its name in the source, or else ``own``."""
    name = getattr(behind(part), "__name__", None) or type(part).__name__
    return "own" if isinstance(part, tuple) or not NAME.fullmatch(name) else name
