"""Flax Linen modules as networks that can be cut."""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Key, Shaped

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.models.base import Mask, Params
from fedjax_pfl.models.cut import FLAGS, Hook, flags, hooked
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
            if isinstance(module, nn.BatchNorm) and _is_of_flax(context):
                call = _batch_norm(module, mask)
            if hook is None or len(module.path) != 1 or context.method_name == "setup" or not (args or kwargs):
                return call(*args, **kwargs)
            if (name := module.path[0]) in inside:
                return call(*args, **kwargs)
            inside.add(name)
            try:
                method = getattr(type(module), context.method_name, type(module).__call__)
                return hooked(hook, name, module, call, method)(*args, **kwargs)
            finally:
                inside.remove(name)

        # "params" is where Flax turns for randomness of any name. Modules without a flag ask for the other two to know
        # whether they are trained: ``self.has_rng("dropout")``, ``self.is_mutable_collection("batch_stats")``.
        training = mask is not None
        rngs = {} if key is None else dict.fromkeys(("params", "dropout") if training else ("params",), key)
        mutable, how = ["batch_stats"] if training else [], self._arguments(training=training)
        with nn.intercept_methods(intercept), _run(object()):
            out, _ = self._module.apply({"params": params}, x, rngs=rngs, mutable=mutable, **how)
        return out

    def linear(self, name: str, layer: Any) -> "LinenNetwork | None":
        """A network of a single ``nn.Dense``; None for another layer."""
        return LinenNetwork(layer.clone(parent=None, name=None)) if type(layer) is nn.Dense else None

    def _arguments(self, *, training: bool) -> dict[str, Any]:
        return {name: training == FLAGS[name] for name in self._flags}


def _is_of_flax(context: nn.module.InterceptorContext) -> bool:
    """Whether this is the call of ``nn.BatchNorm`` itself, which a subclass may make from within its own."""
    if context.method_name != "__call__":
        return False
    own, called = type(context.module).__call__, getattr(context.orig_method, "func", context.orig_method)
    return own is nn.BatchNorm.__call__ or inspect.unwrap(called) is inspect.unwrap(nn.BatchNorm.__call__)


def _batch_norm(module: nn.BatchNorm, samples: Mask) -> Callable[..., Any]:
    """The function that replaces the call of a batch normalisation; ``samples`` is the mask of a training pass."""

    def call(x: Array, use_running_average: bool | None = None, *, mask: Array | None = None) -> Array:
        frozen = module.use_running_average if use_running_average is None else use_running_average
        if not {*np.ravel(module.axis)} <= {-1, x.ndim - 1} or module.axis_name is not None or mask is not None:
            raise ConfigError("model", module.name, "nn.BatchNorm over the last axis, without axis_name and mask")
        own = module.variables["params"]
        y = batch_norm(
            x,
            None if frozen else samples,
            (own["running_mean"], own["running_var"]),
            own.get("scale", 1.0),
            own.get("bias", 0.0),
            momentum=1.0 - module.momentum,
            epsilon=module.epsilon,
        )
        return y if module.dtype is None else y.astype(module.dtype)

    return call
