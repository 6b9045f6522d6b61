"""A user's own models: how a Flax module becomes an extractor and a head."""

import dataclasses
import dis
import functools
import hashlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Shaped

from fedjax_pfl.errors import ConfigError, first_line
from fedjax_pfl.models.apart import check_apart
from fedjax_pfl.models.base import Maps, Mask, Model, Params, normalised
from fedjax_pfl.models.cut import Halves, Network, check_logits, check_rows, cut, has_statistics, pair, reads, same_work
from fedjax_pfl.models.linen import LinenNetwork
from fedjax_pfl.models.passes import differs, model_pass
from fedjax_pfl.models.randomness import step_key

_KINDS = (
    "a Flax module (of Linen; of NNX as an instance, or a class or function of rngs), a pair (extractor, head) of "
    "modules, or a function of keyword-only options that returns one"
)


class Own(NamedTuple):
    """A user's own model, before it is built for the shape of the data.

    Attributes:
      parts: a classifier, or an extractor and a head.
      features: the layer after which the classifier is cut; see `own_model`.
    """

    parts: tuple[Network, ...]
    features: str | None = None

    @property
    def name(self) -> str:
        """The name of the model in messages."""
        names = [part.name for part in self.parts]
        return names[0] if len(names) == 1 else f"({', '.join(names)})"

    def fit(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        text: bool = False,
        mean: Float[Array, " c"] | None = None,
        std: Float[Array, " c"] | None = None,
    ) -> Model:
        """The model for samples of this shape, after all checks.

        Args:
          shape: shape of one sample.
          classes: number of classes.
          text: whether samples are tokens, which stay whole numbers.
          mean: mean per channel of pixels scaled to [0, 1]; None for other samples, as ``std``.
          std: standard deviation per channel of the same.

        Raises:
          ConfigError: the model does not run on such samples, cannot be cut, or keeps state or draws random numbers
            where this is not allowed.
        """
        halves, dim, draws = _halves(self, shape, "uint8" if text else "float32", classes)

        def features(theta: Params, x: Shaped[Array, "batch ..."], mask: Mask = None) -> Float[Array, "batch dim"]:
            # A training pass has a key also where nothing is drawn: Linen modules ask for one to know that they train.
            key = None if mask is None else step_key() if draws else jax.random.key(0)
            with model_pass(training=mask is not None):
                if draws:
                    differs()
                z: Array = halves.features(theta, normalised(x, mean=mean, std=std), mask, key)
            return z

        def features_and_maps(
            theta: Params, x: Shaped[Array, "batch ..."], mask: Mask = None
        ) -> tuple[Float[Array, "batch dim"], Maps]:
            return features(theta, x, mask), ()

        def classify(phi: Params, z: Float[Array, "batch dim"]) -> Float[Array, "batch classes"]:
            logits: Array = halves.classify(phi, z)
            return logits

        def apply(params: Any, x: Shaped[Array, "batch ..."], mask: Mask = None) -> Float[Array, "batch classes"]:
            return classify(params["head"], features(params["extractor"], x, mask))

        return Model(halves.init, features, features_and_maps, classify, apply, dim, classes, (), halves.layers)


def own_model(given: Any, *, features: str | None = None) -> Callable[..., Any]:
    """A factory of a user's own model, in the form of the entries of `MODELS`.

    A classifier is cut into extractor and head. In training passes (with a mask) its flags ``train``, ``training``,
    ``is_train``, ``is_training`` are true and ``deterministic``, ``eval``, ``inference``, ``use_running_average``
    false, and dropout draws from the key of the step. In all other passes the flags have the opposite values, and
    nothing is drawn. A Linen module without a flag may ask ``has_rng("dropout")`` and
    ``is_mutable_collection("batch_stats")`` instead; an argument ``rngs`` of an NNX module gets the randomness of the
    step. The statistics of ``nn.BatchNorm`` are part of the extractor's parameters (``norm.py``). The head does not
    know which pass it is in.

    Args:
      given: one of the following. A Linen module x -> logits [batch, classes]. A pair of modules, x -> z [batch, dim]
        and z -> logits. A Linen module x, mask=None -> (z, maps), which gets a linear head (``base.py``). An NNX
        module, whose weights are the initial ones whatever the seed; or a class or function of ``rngs``, which draws
        the weights. A function, whose keyword-only arguments are options, that returns one of these; or a class of
        modules, whose fields of plain types are options; or a ``functools.partial`` of either.
      features: the layer (child module or attribute) after which a classifier is cut; following layers without
        parameters still belong to the extractor. Unless given, the cut is before the last layer with parameters.

    Raises:
      ConfigError: ``given`` is none of these, an argument of it has no default, or ``features`` is given for a pair or
        for a module x, mask -> (z, maps).
    """
    # The same model must give the same factory, so that a program is not compiled again. This does not hold for an NNX
    # module (or a pair with one), whose content may change in between.
    try:
        hash(given)
    except TypeError:
        return _factory(given, features)
    return (_factory if isinstance(given, (*_nnx(), tuple)) else _factory_of)(given, features)


def _factory(given: Any, features: str | None) -> Callable[..., Any]:
    """The factory of `own_model`."""
    if isinstance(given, (nn.Module, *_nnx(), tuple, list)):
        module = _own(given, features)
        return _described(lambda: module, given, [])
    if not callable(given) or _is_torch(given):
        raise _unknown(given)
    options, takes_rngs = _options(given)
    made: dict[str, Own | nn.Module] = {}  # by all that it is made from, so that each model is checked only once

    def factory(**chosen: Any) -> Own | nn.Module:
        key = repr((sorted(chosen.items()), values_read_by(given)))
        if key not in made:
            with _in_one_line(_name(given), "when it is made"):
                made[key] = _of_rngs(given, chosen, features) if takes_rngs else _own(given(**chosen), features)
        return made[key]

    return _described(factory, given, options)


_factory_of = functools.lru_cache(maxsize=256)(_factory)


def values_read_by(part: Any) -> list[tuple[str, Any]]:
    """The plain values that a function of the user reads from its module or from functions around it, by name.

    Plain are numbers, strings, flags, arrays (of which this gives a hash) and collections of these. A program is
    compiled with their values. In a notebook they may be set anew in another cell than the function's, and then the
    program has to be compiled again. Functions defined in it count, those it calls do not.
    """
    function = inspect.unwrap(behind(part))
    if not isinstance(function, types.FunctionType):
        return []
    around = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            around[name] = cell.cell_contents
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        names.update(code.co_freevars)
        codes += [within for within in code.co_consts if isinstance(within, types.CodeType)]
    read = sorted(names & around.keys())
    return [(name, _shown(around[name])) for name in read if _is_plain(around[name])]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, jax.Array):
        return value.is_fully_addressable and not value.is_deleted()
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | np.ndarray)


def _shown(value: Any) -> Any:
    """A plain value in a form whose ``repr`` is another one for another value."""
    if isinstance(value, tuple | list):
        return [_shown(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, dict):
        return [(_shown(key), _shown(part)) for key, part in value.items()]
    if isinstance(value, np.ndarray | jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if is_key else value)
        content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        return str(value.dtype), array.shape, hashlib.sha256(content).hexdigest()
    return value


def _own(made: Any, features: str | None) -> Own | nn.Module:
    """The package's form of a module or of a pair of modules."""
    if isinstance(made, tuple | list):
        if len(made) != 2 or not all(isinstance(part, (nn.Module, *_nnx())) for part in made):
            raise ConfigError("model", f"({', '.join(map(_name, made))})", "a pair of Flax modules (extractor, head)")
        if features is not None:
            raise ConfigError("features", features, "nothing for a pair: it is cut already")
        return Own(tuple(_network(part) for part in made))
    if not isinstance(made, (nn.Module, *_nnx())):
        raise _unknown(made)
    if isinstance(made, nn.Module) and "mask" in inspect.signature(type(made).__call__).parameters:
        if features is not None:
            raise ConfigError(
                "features", features, "nothing for a module x, mask -> (z, maps): it ends in the features"
            )
        if inspect.signature(type(made).__call__).parameters["mask"].default is inspect.Parameter.empty:
            allowed = "a default, mask=None, in its __call__(self, x, mask=None): without a mask, a pass is evaluation"
            raise ConfigError("model", _name(made), allowed)
        return made
    return Own((_network(made),), features)


def _network(module: Any) -> Network:
    if isinstance(module, nn.Module):
        return LinenNetwork(module)
    from flax import nnx

    from fedjax_pfl.models.nnx import NNXNetwork, orders, put_in_order

    as_it_is = nnx.clone(module)
    put_in_order(as_it_is, orders(module))
    return NNXNetwork(_name(module), lambda rngs: as_it_is)


def _of_rngs(given: Callable[..., Any], options: dict[str, Any], features: str | None) -> Own:
    from fedjax_pfl.models.nnx import NNXNetwork

    return Own((NNXNetwork(_name(given), lambda rngs: given(rngs=rngs, **options)),), features)


def _nnx() -> tuple[type, ...]:
    """The class of NNX modules, if NNX has been imported; importing it takes half a second."""
    library = sys.modules.get("flax.nnx")
    return () if library is None else (library.Module,)


def _options(given: Callable[..., Any]) -> tuple[list[inspect.Parameter], bool]:
    """The options of a function or class, and whether it also takes ``rngs``.

    For a function these are its keyword-only arguments; for a class, the fields or arguments of ``__init__`` that a
    config can hold: numbers, strings, flags, and lists or tuples of them.
    """
    of = behind(given)
    by_place, by_name = (given.args, given.keywords) if isinstance(given, functools.partial) else ((), {})
    name, mro = _name(given), inspect.getmro(of) if inspect.isclass(of) else ()
    of_class = bool(mro)
    of_nnx = any(kind in mro for kind in _nnx())
    if of_class and not of_nnx and nn.Module not in mro:
        raise _unknown(given)
    # NNX hides the arguments behind those of a metaclass; a Linen class has its hints as a dataclass.
    source = getattr(of, "__init__") if of_nnx else of  # noqa: B009  # of a class, which mypy does not know
    made: dict[str, Any] = {}
    if of_class and not of_nnx:  # a dataclass, whose signature has no value for a default that is made anew each time
        for field in dataclasses.fields(of):
            if callable(field.default_factory):
                made[field.name] = field.default_factory()
    try:
        parameters = {
            argument: p.replace(default=by_name.get(argument, made.get(argument, p.default)))
            for argument, p in inspect.signature(source).parameters.items()
        }
        hints = typing.get_type_hints(source, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError("model", name, f"something whose signature can be read: {error}") from None
    if of_nnx:
        parameters.pop(next(iter(parameters)), None)  # self, whatever it is called
    for argument in list(parameters)[: len(by_place)]:
        del parameters[argument]
    takes_rngs = parameters.pop("rngs", None) is not None
    for flax in ("self", "parent", "name") if of_class else ():
        parameters.pop(flax, None)
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in named:
        if p.default is p.empty:
            allowed = f"a default for its argument {p.name} (an NNX module's randomness is called rngs)"
            raise ConfigError("model", name, f"{allowed}, or an instance: {name}(...)" if of_class else allowed)
    if of_class:
        hints = {argument: _fixed(hint) for argument, hint in hints.items()}
        named = [p for p in named if is_plain(hints.get(p.name))]
    else:
        named = [p for p in named if p.kind is p.KEYWORD_ONLY]
    options = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints.get(p.name, p.empty)) for p in named]
    return options, takes_rngs


def _fixed(hint: Any) -> Any:
    """``Sequence[int]``, as Flax's users write it for the widths of layers, as ``tuple[int, ...]``; else the type."""
    return types.GenericAlias(tuple, (*typing.get_args(hint), ...)) if typing.get_origin(hint) is Sequence else hint


def is_plain(hint: Any) -> bool:
    """Whether a config can hold values of this type: numbers, strings, flags, None, and lists or tuples of them.

    TOML has no null: None is written ``"none"``, which cannot be told from a string within a list.
    """
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return is_plain(of[0])
    if origin in (list, tuple):
        return all(is_plain(part) and not _may_be_none(part) for part in of if part is not ...)
    if origin in (typing.Union, types.UnionType):
        return all(map(is_plain, of))
    return origin is typing.Literal or hint in (bool, int, float, str, types.NoneType)


def _may_be_none(hint: Any) -> bool:
    return hint in (None, types.NoneType) or any(map(_may_be_none, typing.get_args(hint)))


def _described(factory: Callable[..., Any], given: Any, options: list[inspect.Parameter]) -> Callable[..., Any]:
    """The factory with these options as its signature."""
    about: Any = factory
    about.__name__ = _name(given)
    if isinstance(of := behind(given), types.FunctionType):
        about.__wrapped__ = of  # for values_read_by
    written = None if isinstance(of, tuple | list) else of.__doc__
    # A dataclass without a docstring has its signature there.
    about.__doc__ = written if written and not written.startswith(f"{_name(given)}(") else f"{_name(given)}: your own."
    about.__signature__ = inspect.Signature(options)
    about.__annotations__ = {p.name: p.annotation for p in options if p.annotation is not p.empty}
    return factory


@functools.lru_cache(maxsize=64)
def _halves(own: Own, shape: tuple[int, ...], dtype: str, classes: int) -> tuple[Halves, int, bool]:
    """The two halves, the width of the features, and whether a training pass draws random numbers; with all checks.

    Cached, because each call traces the model about ten times.
    """
    x = jax.ShapeDtypeStruct((2, *shape), dtype)
    with _in_one_line(own.name, f"on samples of shape {list(shape)}"):
        network, *head = own.parts
        halves = pair(network, head[0], x) if head else cut(network, x, own.features)
        return halves, *_checked(own.name, halves, x, classes)


def _checked(name: str, halves: Halves, x: jax.ShapeDtypeStruct, classes: int) -> tuple[int, bool]:
    """The width of the features, and whether a training pass draws random numbers."""
    key, mask = jax.random.key(0), jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    params = jax.eval_shape(halves.init, key)
    theta, phi = params["extractor"], params["head"]
    if not jax.tree.leaves(phi):
        raise ConfigError("model", name, "its head needs parameters")
    for leaf in jax.tree.leaves(params):
        if leaf.dtype != jnp.float32:
            allowed = f"its parameters must be float32, not {leaf.dtype}: use dtype=, not param_dtype="
            raise ConfigError("model", name, allowed)
    if has_statistics(phi):
        allowed = "nn.BatchNorm behind the cut: the head is not told which pass it is in; cut behind it (features=)"
        raise ConfigError("model", name, allowed)
    z, (*_, training_draws) = reads(halves.features, theta, x, mask, key)
    _, (*_, features_draw) = reads(halves.features, theta, x, None, key)
    check_rows(name, "features", z, x)
    logits, (*_, head_draws) = reads(halves.classify, phi, z, None, key)
    if features_draw or head_draws:
        allowed = "it draws random numbers in evaluation, too: switch dropout by a flag of __call__, such as train"
        raise ConfigError("model", name, allowed)
    if reads(halves.classify, phi, z, mask, key)[1][-1]:
        allowed = (
            "dropout behind the cut: the head is not told which pass it is in; cut behind it (features=), or omit it"
        )
        raise ConfigError("model", name, allowed)

    def in_evaluation(phi: Params, z: Array, mask: Array, key: Key[Array, ""]) -> Array:
        logits: Array = halves.classify(phi, z, None, key)
        return logits

    if not same_work(halves.classify, in_evaluation, phi, z, mask, key):
        allowed = "a head that does the same in training and evaluation: it is not told which pass it is in"
        raise ConfigError("model", name, f"{allowed}; cut behind what differs (features=)")
    check_logits(name, logits)
    check_rows(name, "logits", logits, x)
    if logits.shape[1] != classes:
        raise ConfigError("model", name, f"its logits are {logits.shape[1]} wide; the data has {classes} classes")

    def evaluate(params: Params, x: Shaped[Array, "batch ..."]) -> Float[Array, "batch classes"]:
        logits: Array = halves.classify(params["head"], halves.features(params["extractor"], x, None, key))
        return logits

    check_apart(name, params, evaluate, x)
    return z.shape[1], training_draws


@contextmanager
def _in_one_line(name: str, when: str) -> Iterator[None]:
    """Turns any error that a module raises while it is traced into a one-line ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever a module does
        allowed = f"it fails {when} ({type(error).__name__}: {first_line(error)[:200]})"
        raise ConfigError("model", name, allowed) from error


def _unknown(given: Any) -> ConfigError:
    return ConfigError("model", _name(given), f"{'not a PyTorch module, but ' if _is_torch(given) else ''}{_KINDS}")


def _is_torch(given: Any) -> bool:
    kind = behind(given) if inspect.isclass(behind(given)) else type(given)
    return any(base.__module__.partition(".")[0] == "torch" for base in kind.__mro__)


def _name(given: Any) -> str:
    return getattr(behind(given), "__name__", None) or type(given).__name__


def behind(part: Any) -> Any:
    """The function or class of which a part is a ``functools.partial``; any other part itself."""
    return part.func if isinstance(part, functools.partial) else part
