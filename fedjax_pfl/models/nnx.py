"""Flax NNX modules as networks that can be cut."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Key, Shaped

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.models.base import Mask, Params
from fedjax_pfl.models.cut import FLAGS, Hook, flags
from fedjax_pfl.models.norm import FLAX_STATISTICS, batch_norm

Path = tuple[Any, ...]  # attributes and keys (str), and places in lists (int)
_GROUP = (nnx.List, nnx.Dict)


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
            self._flags = flags(name, type(module).__call__)
            modules = dict(nnx.iter_modules(module))
            self._groups = {path[0] for path, group in modules.items() if len(path) == 1 and isinstance(group, _GROUP)}
            self._graph, state = nnx.split(module)
            self._paths: list[tuple[Path, type]] = [(path, type(kept)) for path, kept in nnx.to_flat_state(state)]
            for path in modules:
                if path and path[:-1] not in modules:
                    where = ".".join(map(str, path[:-1]))
                    raise ConfigError("model", name, f"nnx.List or nnx.Dict for the layers that {where} holds")
            for path, kind in self._paths:
                of_norm = issubclass(kind, nnx.BatchStat) and isinstance(modules.get(path[:-1]), nnx.BatchNorm)
                if not (of_norm or issubclass(kind, nnx.Param | nnx.RngState)):
                    where = ".".join(map(str, path))
                    allowed = (
                        f"it keeps {where} ({kind.__name__}): only nnx.Param and nnx.BatchNorm's statistics can be kept"
                    )
                    raise ConfigError("model", name, allowed)
            leaves, self._tree = jax.tree.flatten(state)
            return leaves

        jax.eval_shape(trace, jax.random.key(0))

    def init(self, key: Key[Array, ""], x: Shaped[Array, "batch ..."]) -> Params:
        """The initial weights of the module."""
        del x
        leaves = jax.tree.leaves(nnx.state(self._make(nnx.Rngs(key))))
        kept = [(*path_kind, leaf) for path_kind, leaf in zip(self._paths, leaves, strict=True)]
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

        def leaf(number: int, path: Path, kind: type) -> Array:
            if issubclass(kind, nnx.RngKey):
                return jax.random.fold_in(key, number)
            return jnp.zeros((), jnp.uint32) if issubclass(kind, nnx.RngState) else flat[self._named(path, kind)]

        leaves = [leaf(number, *kept) for number, kept in enumerate(self._paths)]
        module = nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))
        module.eval() if mask is None else module.train()
        modules = list(nnx.iter_modules(module))
        called = {}
        for path, layer in modules:
            call = _batch_norm(layer, mask) if isinstance(layer, nnx.BatchNorm) else layer
            if hook is not None and (name := self._layer(path, layer)) is not None:
                call = _hooked(hook, name, layer, call)
            if call is not layer:
                called[id(layer)] = _Called(layer, call)
        # The module is taken apart after this one run: its attributes are set past NNX. A layer may be several of them.
        for _, within in modules:
            vars(within).update({name: called.get(id(kept), kept) for name, kept in vars(within).items()})
        how = {name: (mask is not None) == FLAGS[name] for name in self._flags}
        return called.get(id(module), module)(x, **how)

    def linear(self, name: str, layer: Any) -> "NNXNetwork | None":
        """An ``nnx.Linear`` by itself."""

        def alone(rngs: nnx.Rngs) -> Any:
            found = nnx.iter_modules(self._make(rngs))
            return next(layer for path, layer in found if self._layer(path, layer) == name)

        return NNXNetwork(name, alone) if type(layer) is nnx.Linear else None

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


@jax.tree_util.register_static
class _Called:
    """A layer whose call is another function; to a transformation, such as ``nnx.remat``, its arrays are constants."""

    def __init__(self, layer: nnx.Module, call: Callable[..., Any]):
        self._layer, self._call = layer, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _hooked(hook: Hook, name: str, layer: nnx.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(x: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(name, layer, x, lambda value: call(value, *args, **kwargs))

    return hooked


def _batch_norm(layer: nnx.BatchNorm, mask: Mask) -> Callable[..., Any]:
    """What stands in for the call of a batch normalisation."""

    def call(x: Array, use_running_average: bool | None = None) -> Array:
        if layer.axis not in (-1, x.ndim - 1) or layer.axis_name is not None:
            raise ConfigError("model", "BatchNorm", "nnx.BatchNorm over the last axis, without axis_name")
        y = batch_norm(
            x,
            None if use_running_average else mask,
            (layer.mean[...], layer.var[...]),
            1.0 if layer.scale is None else layer.scale[...],
            0.0 if layer.bias is None else layer.bias[...],
            momentum=1.0 - layer.momentum,
            epsilon=layer.epsilon,
        )
        return y if layer.dtype is None else y.astype(layer.dtype)

    return call
