"""Flax NNX modules as networks that can be cut."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Key, Shaped

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.models.base import Mask, Params
from fedjax_pfl.models.cut import FLAGS, Hook, flags, hooked
from fedjax_pfl.models.norm import FLAX_STATISTICS, batch_norm

# layer, the call of its class -> the call that takes its place
_Wrap = Callable[[Any, Callable[..., Any]], Callable[..., Any]]
Path = tuple[Any, ...]  # attributes and keys (str), and places in lists (int)
_GROUP = (nnx.List, nnx.Dict)


def orders(module: nnx.Module) -> dict[Path, list[str]]:
    """The order of the entries of each ``nnx.Dict`` of a module, which a copy or `nnx.merge` sorts by name."""
    return {path: list(group) for path, group in nnx.iter_modules(module) if isinstance(group, nnx.Dict)}


def put_in_order(module: nnx.Module, known: dict[Path, list[str]]) -> None:
    """Gives each ``nnx.Dict`` of a module the order that it had."""
    for path, group in nnx.iter_modules(module):
        for entry in known.get(path, ()):
            vars(group)[entry] = vars(group).pop(entry)


class NNXNetwork:
    """A `Network` from an NNX module; a layer in an ``nnx.List`` or ``nnx.Dict``, ``self.layers[0]``, is ``layers_0``.

    Its parameters are the ``nnx.Param`` and the statistics of ``nnx.BatchNorm``, under the names that ``norm.py`` uses.
    """

    def __init__(self, name: str, make: Callable[[nnx.Rngs], Any]):
        """Builds the module once, on shapes only.

        Args:
          name: the name for messages.
          make: rngs -> the module with its initial weights.

        Raises:
          ConfigError: the function does not return a module of x, or the module keeps other state than parameters,
            statistics of ``nnx.BatchNorm`` and randomness, or layers in other containers than those of NNX.
        """
        self.name, self._make = name, make

        def trace(key: Key[Array, ""]) -> list[Array]:
            module = make(nnx.Rngs(key))
            if not isinstance(module, nnx.Module):
                raise ConfigError(
                    "model", name, f"a function of rngs returns an nnx.Module, not {type(module).__name__}"
                )
            call = type(module).__call__
            self._flags = flags(name, call, besides=["rngs"])
            self._takes_rngs = "rngs" in inspect.signature(call).parameters
            modules = dict(nnx.iter_modules(module))
            self._orders = orders(module)
            self._groups = {path[0] for path, group in modules.items() if len(path) == 1 and isinstance(group, _GROUP)}
            self._graph, state = nnx.split(module)
            self._kept: list[tuple[Path, type, tuple[int, ...]]] = [
                (path, type(kept), jnp.shape(kept[...])) for path, kept in nnx.to_flat_state(state)
            ]
            for path, layer in modules.items():
                if isinstance(layer, nnx.BatchNorm) and type(layer).__call__ is not nnx.BatchNorm.__call__:
                    of = f"{'.'.join(map(str, path))} ({type(layer).__name__})"
                    allowed = f"nnx.BatchNorm as it is, called by a module of yours: {of} has its own __call__"
                    raise ConfigError("model", name, allowed)
            for path in modules:
                if path and path[:-1] not in modules:
                    where = ".".join(map(str, path[:-1]))
                    raise ConfigError("model", name, f"nnx.List or nnx.Dict for the layers that {where} holds")
            for path, kind, _ in self._kept:
                of_norm = issubclass(kind, nnx.BatchStat) and isinstance(modules.get(path[:-1]), nnx.BatchNorm)
                if not (of_norm or issubclass(kind, nnx.Param | nnx.RngState)):
                    where = ".".join(map(str, path))
                    what = f"({kind.__name__})" if issubclass(kind, nnx.Variable) else "(an array; make it in __call__)"
                    allowed = f"it keeps {where} {what}: only nnx.Param and nnx.BatchNorm's statistics can be kept"
                    raise ConfigError("model", name, allowed)
            known: dict[tuple[str, ...], Path] = {}
            for path, kind, _ in self._kept:
                if (other := known.setdefault(self._named(path, kind), path)) != path:
                    both = " and ".join(".".join(map(str, of)) for of in (other, path))
                    raise ConfigError("model", name, f"other attributes: {both} would have one name among the layers")
            leaves, self._tree = jax.tree.flatten(state)
            return leaves

        jax.eval_shape(trace, jax.random.key(0))

    def init(self, key: Key[Array, ""], x: Shaped[Array, "batch ..."]) -> Params:
        """The initial weights of the module."""
        leaves = jax.tree.leaves(nnx.state(self._make(nnx.Rngs(key))))
        kept = [(path, kind, leaf) for (path, kind, _), leaf in zip(self._kept, leaves, strict=True)]
        return unflatten_dict(
            {self._named(path, kind): leaf for path, kind, leaf in kept if not issubclass(kind, nnx.RngState)}
        )

    def run(
        self,
        params: Params,
        x: Shaped[Array, "batch ..."],
        mask: Mask = None,
        key: Key[Array, ""] | None = None,
        hook: Hook | None = None,
    ) -> Any:
        """The module's ``__call__``; batch normalisation is that of ``norm.py``."""
        flat = flatten_dict(params)
        key = jax.random.key(0) if key is None else key

        def leaf(number: int, path: Path, kind: type, shape: tuple[int, ...]) -> Array:
            if issubclass(kind, nnx.RngKey):
                own = jax.random.fold_in(key, number)
                return jax.random.split(own, shape) if shape else own  # layers that `nnx.vmap` has stacked
            return jnp.zeros(shape, jnp.uint32) if issubclass(kind, nnx.RngState) else flat[self._named(path, kind)]

        leaves = [leaf(number, *kept) for number, kept in enumerate(self._kept)]
        module = nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))
        put_in_order(module, self._orders)
        module.eval() if mask is None else module.train()
        for path, layer in list(nnx.iter_modules(module)):
            wraps: list[_Wrap] = []
            if isinstance(layer, nnx.BatchNorm):
                wraps.append(functools.partial(_batch_norm, samples=mask))
            if hook is not None and (name := self._layer(path, layer)) is not None:
                wraps.append(functools.partial(_hooked, hook=hook, name=name))
            if wraps:  # the module is gone after this one run
                vars(layer)["_wraps"] = tuple(wraps)
                layer.__class__ = _wrapped(type(layer))
        how: dict[str, Any] = {name: (mask is not None) == FLAGS[name] for name in self._flags}
        if self._takes_rngs:  # from a number that no leaf has
            how["rngs"] = nnx.Rngs(jax.random.fold_in(key, len(self._kept)))
        return module(x, **how)

    def linear(self, name: str, layer: Any) -> "NNXNetwork | None":
        """An ``nnx.Linear`` by itself."""

        def alone(rngs: nnx.Rngs) -> Any:
            found = nnx.iter_modules(self._make(rngs))
            return next(layer for path, layer in found if self._layer(path, layer) == name)

        return NNXNetwork(name, alone) if type(layer) is _wrapped(nnx.Linear) else None

    def _flat(self, path: Path) -> Path:
        """A path on which a layer in a list or dictionary of layers is one step."""
        joined = len(path) > 1 and path[0] in self._groups
        return (f"{path[0]}_{path[1]}", *path[2:]) if joined else path

    def _layer(self, path: Path, layer: nnx.Module) -> str | None:
        """The name of a layer that the module itself calls: one of its attributes, or of a list or dictionary there."""
        flat = self._flat(path)
        return flat[0] if len(flat) == 1 and not isinstance(layer, _GROUP) else None

    def _named(self, path: Path, kind: type) -> tuple[str, ...]:
        """Where a leaf of the state stands among the parameters."""
        *above, last = map(str, self._flat(path))
        return (*above, FLAX_STATISTICS[last] if issubclass(kind, nnx.BatchStat) else last)


@functools.cache
def _wrapped(kind: type) -> type:
    """The class of a layer whose call goes through what it has in ``_wraps``; a subclass, for code that asks for it."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        go: Callable[..., Any] = functools.partial(kind.__call__, self)
        for wrap in self._wraps:
            go = wrap(self, go)
        return go(*args, **kwargs)

    return type(kind)(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _hooked(layer: nnx.Module, call: Callable[..., Any], *, hook: Hook, name: str) -> Callable[..., Any]:
    return hooked(hook, name, layer, call, type(layer).__call__)


def _batch_norm(layer: nnx.BatchNorm, of_flax: Callable[..., Any], *, samples: Mask) -> Callable[..., Any]:
    """What stands in for the call of a batch normalisation."""

    def call(x: Array, use_running_average: bool | None = None, *, mask: Array | None = None) -> Array:
        if not {*np.ravel(layer.axis)} <= {-1, x.ndim - 1} or layer.axis_name is not None or mask is not None:
            raise ConfigError("model", "BatchNorm", "nnx.BatchNorm over the last axis, without axis_name and mask")
        y = batch_norm(
            x,
            None if use_running_average else samples,
            (layer.mean[...], layer.var[...]),
            1.0 if layer.scale is None else layer.scale[...],
            0.0 if layer.bias is None else layer.bias[...],
            momentum=1.0 - layer.momentum,
            epsilon=layer.epsilon,
        )
        return y if layer.dtype is None else y.astype(layer.dtype)

    return call
