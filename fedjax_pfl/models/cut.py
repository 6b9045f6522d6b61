"""A classifier cut into extractor and head, whichever library of layers it is written in.

The cut is at the input of a layer. What comes before it is the extractor, which gives the features z; this layer and
all that follow are the head. Which parameters a side has is read off its trace, so nothing is guessed from names.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jaxtyping import Array, Key, PyTree, Shaped

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.models.base import Mask, Params
from fedjax_pfl.models.norm import is_statistic

# Arguments of __call__ that say which kind of pass it is, and what they are in a training pass.
FLAGS = {
    **dict.fromkeys(("train", "training", "is_train", "is_training"), True),
    **dict.fromkeys(("deterministic", "eval", "inference", "use_running_average"), False),
}
_WAY_ON = "pass a pair (extractor, head), or, where a Sequential is the only layer, that one itself"
# name, layer, input, go -> output: replaces each call of a layer by the network itself; go(input) is the original call.
Hook = Callable[[str, Any, Any, Callable[[Any], Any]], Any]


@runtime_checkable
class Network(Protocol):
    """A module as pure functions.

    Attributes:
      name: for messages.
    """

    name: str

    def init(self, key: Key[Array, ""], x: Shaped[Array, "batch ..."]) -> Params:
        """Parameters by layer, running statistics among them (``norm.py``); x has the shape of a batch."""

    def run(
        self,
        params: Params,
        x: Shaped[Array, "batch ..."],
        mask: Mask = None,
        key: Key[Array, ""] | None = None,
        hook: Hook | None = None,
    ) -> Any:
        """The output: of a training pass if a mask is given, with random numbers from ``key``; else of evaluation."""

    def linear(self, name: str, layer: Any) -> "Network | None":
        """The layer as a network, if it is a linear one with its parameters ``kernel`` and ``bias``; else None."""


class Halves(NamedTuple):
    """An extractor and a head, as `Model` wants them, for samples that are normalised already.

    Attributes:
      init: key -> ``{"extractor": theta, "head": phi}``.
      features: theta, x, mask, key -> z; the key is that of a training pass.
      classify: phi, z, mask, key -> logits; runs never pass a mask.
      layers: names in theta, from the input to the features.
    """

    init: Callable[[Key[Array, ""]], Params]
    features: Callable[..., Any]
    classify: Callable[..., Any]
    layers: tuple[str, ...]


class _Reached(Exception):  # noqa: N818  # no error
    """Ends a run where the features are; never leaves this module."""

    def __init__(self, z: Any):
        super().__init__("the cut")
        self.z = z


class _Call(NamedTuple):
    name: str
    layer: Any
    out: Any
    begun: int  # when it began and ended, counted over all calls: a layer may call another one
    ended: int


def pair(extractor: Network, head: Network, x: jax.ShapeDtypeStruct) -> Halves:
    """Two networks, x -> z and z -> logits."""
    shapes = jax.eval_shape(extractor.init, jax.random.key(0), x)
    *calls, answer = _calls(extractor, x)
    check_features(extractor.name, answer.out)
    z = jax.ShapeDtypeStruct(answer.out.shape, answer.out.dtype)

    def init(key: Key[Array, ""]) -> Params:
        key_extractor, key_head = jax.random.split(key)
        return {
            "extractor": extractor.init(key_extractor, jnp.zeros(x.shape, x.dtype)),
            "head": head.init(key_head, jnp.zeros(z.shape, z.dtype)),
        }

    layers = dict.fromkeys(call.name for call in calls if call.name in shapes)
    return Halves(init, extractor.run, head.run, tuple(layers))


def cut(network: Network, x: jax.ShapeDtypeStruct, features: str | None) -> Halves:
    """One network x -> logits, in two.

    Args:
      network: the classifier.
      x: a batch.
      features: the last layer of the extractor; what follows it without parameters belongs to the extractor, too. None
        for the one before the last layer with parameters.

    Raises:
      ConfigError: it cannot be cut there.
    """
    shapes = jax.eval_shape(network.init, jax.random.key(0), x)
    calls = _calls(network, x)
    at = _position(network, calls, shapes, features)
    check_logits(network.name, calls[-1].out)
    layer = calls[at].name
    occurrence = sum(call.name == layer for call in calls[:at])
    *_, trained = training = _calls(network, x, training=True)
    there = [call for call in training if call.name == layer]
    if len(there) != (often := sum(call.name == layer for call in calls)):
        # Which of them is at the cut could only be guessed.
        allowed = f"{layer}, before which it is cut, must be called as often in training ({len(there)} times) as in"
        raise ConfigError("model", network.name, f"{allowed} evaluation ({often}): or cut it elsewhere (features=)")

    def at_the_cut(instead: Callable[[Any, Callable[[Any], Any]], Any]) -> Hook:
        seen = -1

        def hook(name: str, of: Any, value: Any, go: Callable[[Any], Any]) -> Any:
            nonlocal seen
            del of
            seen += name == layer
            return instead(value, go) if name == layer and seen == occurrence else go(value)

        return hook

    def stop(value: Any, go: Callable[[Any], Any]) -> Any:
        raise _Reached(value)

    def before(params: Params, x: Array, mask: Mask = None, key: Key[Array, ""] | None = None) -> Any:
        try:
            network.run(params, x, mask, key, at_the_cut(stop))
        except _Reached as reached:
            return reached.z
        raise AssertionError("the layer at the cut is called in some runs only")

    def behind(params: Params, x: Array, z: Array, mask: Mask = None, key: Key[Array, ""] | None = None) -> Any:
        return network.run(params, x, mask, key, at_the_cut(lambda value, go: go(z)))

    key, elsewhere = jax.random.key(0), "cut it elsewhere (features=), or pass a pair (extractor, head)"
    z, (left, from_x, *_) = reads(before, shapes, x, None, key)
    if not any(jax.tree.leaves(left)):
        why = f"nothing with parameters comes before {layer}, so that there would be no extractor"
        if any(call.name in shapes and call.name != layer for call in calls[:at]):
            within = "is called within a transformation (nn.jit, nn.remat, nn.scan), where it cannot be cut"
            why = f"{layer} {'reads the samples themselves, past the layers before it' if from_x else within}"
        raise ConfigError("model", network.name, f"{why}; its layers: {_listed(calls)}; {_WAY_ON}")
    check_features(f"{network.name} before {layer}", z)
    _, (right, reads_x, *_) = reads(behind, shapes, x, z, None, key)
    both = [name for name in shapes if any(jax.tree.leaves(left[name])) and any(jax.tree.leaves(right[name]))]
    if both:
        allowed = f"{both[0]} is read on both sides of a cut before {layer}: {elsewhere}"
        raise ConfigError("model", network.name, allowed)
    if reads_x:
        raise ConfigError("model", network.name, f"the head from {layer} on reads the samples, too: {elsewhere}")
    of_head = [name for name in shapes if any(jax.tree.leaves(right[name]))]
    last = calls[at].out is calls[-1].out and there[occurrence].out is trained.out
    alone = last and of_head == [layer]
    linear = network.linear(layer, calls[at].layer) if alone else None

    def whole(part: Params) -> Params:
        # Nothing reads the zeros, nor what is computed from them: XLA leaves it out.
        rest = {name: shapes[name] for name in shapes if name not in part}
        return {**jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest), **part}

    def init(key: Key[Array, ""]) -> Params:
        params = network.init(key, jnp.zeros(x.shape, x.dtype))
        phi = {name: params.pop(name) for name in of_head}
        return {"extractor": params, "head": phi if linear is None else phi[layer]}

    def features_of(theta: Params, x: Array, mask: Mask = None, key: Key[Array, ""] | None = None) -> Any:
        return before(whole(theta), x, mask, key)

    def classify(phi: Params, z: Array, mask: Mask = None, key: Key[Array, ""] | None = None) -> Any:
        return behind(whole(phi), jnp.zeros((len(z), *x.shape[1:]), x.dtype), z, mask, key)

    layers = dict.fromkeys(call.name for call in calls if call.name in shapes and call.name not in of_head)
    return Halves(init, features_of, classify if linear is None else linear.run, tuple(layers))


def _position(network: Network, calls: Sequence[_Call], shapes: dict[str, Any], features: str | None) -> int:
    """Which of the calls is the first of the head."""
    ended = -1
    if features is not None:
        ended = max((call.ended for call in calls if call.name == features), default=-1)
        if ended < 0:
            raise ConfigError("features", features, f"one of the layers of {network.name}: {_listed(calls)}")
    found = [at for at, call in enumerate(calls) if call.begun > ended and call.name in shapes]
    if not found:
        why = (
            "it calls no layer with parameters" if features is None else f"no layer with parameters follows {features}"
        )
        why = f"{why}, so that there would be no head; layers: {_listed(calls)}; {_WAY_ON}"
        raise ConfigError("model", network.name, why)
    return found[-1] if features is None else min(found, key=lambda at: calls[at].begun)


def _listed(calls: Sequence[_Call]) -> str:
    return ", ".join(dict.fromkeys(call.name for call in calls if call.name)) or "none"


def hooked(hook: Hook, name: str, layer: Any, call: Callable[..., Any], method: Any) -> Callable[..., Any]:
    """A layer's call that goes through a hook, which sees the first argument, whether it is given by place or by name.

    Args:
      hook: the hook.
      name: of the layer.
      layer: the layer.
      call: what is called, without ``self``.
      method: the same as the class has it, with ``self``, for the name of its first argument.
    """

    def through(*args: Any, **kwargs: Any) -> Any:
        if args:
            return hook(name, layer, args[0], lambda value: call(value, *args[1:], **kwargs))
        first = next(itertools.islice(inspect.signature(method).parameters, 1, None), None)
        if first not in kwargs:
            return call(**kwargs)
        return hook(name, layer, kwargs[first], lambda value: call(**{**kwargs, first: value}))

    return through


def flags(name: str, call: Callable[..., Any], *, besides: Sequence[str] = ()) -> list[str]:
    """Which of `FLAGS` a ``__call__(self, x, ...)`` has.

    Args:
      name: of the module, for messages.
      call: the function.
      besides: names of further arguments that it may have.

    Raises:
      ConfigError: it wants other arguments besides x, or has another switch, which would be the same in all passes.
    """
    _, *given = (p for p in inspect.signature(call).parameters.values() if p.kind is not p.VAR_KEYWORD)
    others = [p for p in given[1:] if p.name not in (*FLAGS, *besides)]
    wanted = [p for p in others if p.default is p.empty or isinstance(p.default, bool)]
    if not given or given[0].kind is inspect.Parameter.KEYWORD_ONLY or wanted:
        found = ", ".join(p.name for p in given) or "none"
        allowed = f"a __call__ of x and flags among {', '.join(FLAGS)}; its arguments: {found}"
        raise ConfigError("model", name, f"{allowed} (what is the same in training and evaluation can be a field)")
    return [p.name for p in given[1:] if p.name in FLAGS]


def reads(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The shapes that a function returns, and whether these values depend on each leaf of its arguments."""
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return shapes, jax.tree.unflatten(jax.tree.structure(args), used)


def same_work(one: Callable[..., Any], other: Callable[..., Any], *args: Any) -> bool:
    """Whether two functions compute what they return by the same operations."""
    return _work(one, args) == _work(other, args)


def _work(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    traced = jax.make_jaxpr(fn)(*args).jaxpr
    needed, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    read = {id(value) for values in (*(step.invars for step in needed.eqns), needed.outvars) for value in values}
    return str(needed.replace(constvars=[value for value in needed.constvars if id(value) in read]))


def check_features(what: str, z: Any) -> None:
    """Checks that features are [batch, dim].

    Raises:
      ConfigError: they are not.
    """
    if getattr(z, "ndim", None) != 2 or not jnp.issubdtype(z.dtype, jnp.floating):
        raise ConfigError(
            "model", what, f"features must be [batch, dim] floats, not {shown(z)}; flatten or pool before"
        )


def check_logits(what: str, logits: Any) -> None:
    """Checks that logits are [batch, classes].

    Raises:
      ConfigError: they are not.
    """
    if getattr(logits, "ndim", None) != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ConfigError("model", what, f"it must return logits [batch, classes], not {shown(logits)}")


def check_rows(name: str, what: str, found: Any, x: jax.ShapeDtypeStruct) -> None:
    """Checks that a batch gives a row for each sample.

    Raises:
      ConfigError: it gives more or fewer.
    """
    if found.shape[0] != x.shape[0]:
        allowed = f"one row of {what} for each sample, got {found.shape[0]} for a batch of {x.shape[0]}"
        raise ConfigError("model", name, f"{allowed}; the first axis of x is the batch")


def shown(found: Any) -> str:
    """A value of a trace, in a few words."""
    return f"{found.dtype} {list(found.shape)}" if hasattr(found, "shape") else f"a {type(found).__name__}"


def has_statistics(params: PyTree) -> bool:
    """Whether there are running statistics among the parameters."""
    return any(is_statistic(path) for path, _ in jax.tree.leaves_with_path(params))


def _calls(network: Network, x: jax.ShapeDtypeStruct, *, training: bool = False) -> list[_Call]:
    """Which layers the network calls in a pass, by their ends; at last, without a name, what it returns."""
    calls: list[_Call] = []
    clock = itertools.count()

    def record(name: str, layer: Any, value: Any, go: Callable[[Any], Any]) -> Any:
        begun, out = next(clock), go(value)
        calls.append(_Call(name, layer, out, begun, next(clock)))
        return out

    def trace(key: Key[Array, ""], x: Array) -> None:
        mask = jnp.ones(len(x)) if training else None
        record("", None, x, lambda x: network.run(network.init(key, x), x, mask, key, record))

    jax.eval_shape(trace, jax.random.key(0), x)
    return calls
