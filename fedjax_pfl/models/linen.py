"""Flax Linen modules as networks that can be cut."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Key, Shaped

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.models.base import Mask, Params
from fedjax_pfl.models.cut import FLAGS, Hook, flags
from fedjax_pfl.models.norm import FLAX_STATISTICS, batch_norm

# ``nn.jit`` keeps what it has traced. A run in another context is traced anew: with its own mask, and seen by its hook.
_run = jax.make_user_context()


class LinenNetwork:
    """A `Network` from a Linen module; its parameters also hold the statistics, beside scale and bias."""

    def __init__(self, module: nn.Module):
        """Raises a ConfigError if the module needs other arguments than x and flags such as ``train``."""
        self.name, self._module = type(module).__name__, module
        self._flags = flags(self.name, type(module).__call__)

    def init(self, key: Key[Array, ""], x: Shaped[Array, "batch ..."]) -> Params:
        """Flax's ``module.init``, evaluation."""
        variables: dict[str, Any] = nn.meta.unbox(self._module.init(key, x, **self._arguments(training=False)))
        statistics = flatten_dict(variables.pop("batch_stats", {}))
        params = flatten_dict(variables.pop("params", {}))
        others = [*variables, *(path[-1] for path in statistics if path[-1] not in FLAX_STATISTICS)]
        if others:
            allowed = f"it keeps {others[0]}, and only parameters and the statistics of nn.BatchNorm can be kept"
            raise ConfigError("model", self.name, allowed)
        params |= {(*path[:-1], FLAX_STATISTICS[path[-1]]): leaf for path, leaf in statistics.items()}
        return unflatten_dict(params)

    def run(
        self,
        params: Params,
        x: Shaped[Array, "batch ..."],
        mask: Mask = None,
        key: Key[Array, ""] | None = None,
        hook: Hook | None = None,
    ) -> Any:
        """Flax's ``module.apply``; batch normalisation is that of ``norm.py``."""
        inside = set()  # the layers whose call has begun: a method of theirs that it calls is part of it

        def intercept(
            call: Callable[..., Any], args: tuple, kwargs: dict, context: nn.module.InterceptorContext
        ) -> Any:
            module = context.module
            if isinstance(module, nn.BatchNorm) and context.method_name == "__call__":
                call = _batch_norm(module, mask)
            if hook is None or len(module.path) != 1 or context.method_name == "setup" or not args:
                return call(*args, **kwargs)
            if (name := module.path[0]) in inside:
                return call(*args, **kwargs)
            inside.add(name)
            try:
                return hook(name, module, args[0], lambda value: call(value, *args[1:], **kwargs))
            finally:
                inside.remove(name)

        # "params" is where Flax turns for randomness of any name.
        rngs = None if key is None else {"params": key}
        with nn.intercept_methods(intercept), _run(object()):
            return self._module.apply({"params": params}, x, rngs=rngs, **self._arguments(training=mask is not None))

    def linear(self, name: str, layer: Any) -> "LinenNetwork | None":
        """A network of a single ``nn.Dense``; None for another layer."""
        del name
        return LinenNetwork(layer.clone(parent=None, name=None)) if type(layer) is nn.Dense else None

    def _arguments(self, *, training: bool) -> dict[str, Any]:
        return {name: training == FLAGS[name] for name in self._flags}


def _batch_norm(module: nn.BatchNorm, mask: Mask) -> Callable[..., Any]:
    """The function that replaces the call of a batch normalisation."""

    def call(x: Array, use_running_average: bool | None = None) -> Array:
        frozen = module.use_running_average if use_running_average is None else use_running_average
        if module.axis not in (-1, x.ndim - 1) or module.axis_name is not None:
            raise ConfigError("model", module.name, "nn.BatchNorm over the last axis, without axis_name")
        own = module.variables["params"]
        y = batch_norm(
            x,
            None if frozen else mask,
            (own["running_mean"], own["running_var"]),
            own.get("scale", 1.0),
            own.get("bias", 0.0),
            momentum=1.0 - module.momentum,
            epsilon=module.epsilon,
        )
        return y if module.dtype is None else y.astype(module.dtype)

    return call
