"""The interface of every model, extractor and head; and models made of a Linen extractor and a linear head."""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError
from jaxtyping import Array, Float, Key, PyTree, Shaped

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.models.apart import check_apart
from fedjax_pfl.models.passes import model_pass

Params: TypeAlias = PyTree[Float[Array, "..."]]
Mask = Float[Array, " batch"] | None
Maps = tuple[Float[Array, "batch _ _ _"], ...]
Init = Literal["torch", "flax"]


class Projection(NamedTuple):
    """An extractor in two parts, z = project(theta, encode(theta, x)), for methods that use both levels.

    Its parameters theta are ``{"encoder": ..., "projection": ...}``; each function reads only its own part.

    Attributes:
      encode: theta, x, mask=None -> f, the output of the encoder, [batch, width].
      project: theta, f -> z [batch, dim], the output of the projection head: the features of the model.
      width: that of f.
    """

    encode: Callable[..., Float[Array, "batch width"]]
    project: Callable[[Params, Float[Array, "batch width"]], Float[Array, "batch dim"]]
    width: int


class Model(NamedTuple):
    """An extractor and a head as pure functions; params are ``{"extractor": theta, "head": phi}``.

    Inputs x are raw samples, as stored: uint8 images [batch, h, w, c], uint8 tokens [batch, length] or float32 [batch,
    ...]. The model itself normalises images, so that pixels are stored as single bytes until the mini-batch is read.
    Other inputs are used as they are.

    If a mask is given (``Batch.mask``: 1 for a sample, 0 for padding), this is a training pass over that batch; without
    a mask the model is evaluated. Every training loss passes the mask to the extractor that it trains, and to no other.
    Batch normalisation uses it (``norm.py``), and dropout of a user's own model is only active with it (``own.py``).

    Attributes:
      init: key -> params.
      features: theta, x, mask=None -> z, the [batch, dim] input of the last layer (the prototype space).
      features_and_maps: theta, x, mask=None -> (z, the tuple of intermediate [batch, h, w, c] maps, first to last).
      classify: phi, z -> logits, [batch, classes].
      apply: params, x, mask=None -> logits; ``classify(phi, features(theta, x, mask))``.
      dim: K, the feature dimension.
      classes: C, the number of classes.
      maps: (h, w, c) of each feature map.
      layers: names of the extractor's layers in theta, from the input to the features.
      projection: the extractor's two parts, if it ends in a projection head; the maps are then the encoder's.
      regularizer: z, mask -> a term [] of every loss that trains the extractor on labels; None for no term.
    """

    init: Callable[[Key[Array, ""]], Params]
    features: Callable[..., Float[Array, "batch dim"]]
    features_and_maps: Callable[..., tuple[Float[Array, "batch dim"], Maps]]
    classify: Callable[[Params, Float[Array, "batch dim"]], Float[Array, "batch classes"]]
    apply: Callable[..., Float[Array, "batch classes"]]
    dim: int
    classes: int
    maps: tuple[tuple[int, int, int], ...]
    layers: tuple[str, ...] = ()
    projection: Projection | None = None
    regularizer: Callable[[Float[Array, "batch dim"], Float[Array, " batch"]], Float[Array, ""]] | None = None


class Initializers(NamedTuple):
    """The kernel and bias initialisers of a layer with a given fan-in."""

    kernel: Callable[..., Array]
    bias: Callable[..., Array]


@cache  # JAX keeps the trace of a function that it knows
def initializers(init: Init, fan_in: int) -> Initializers:
    """``"torch"``: kernel and bias uniform in +-1/sqrt(fan_in), as PyTorch and PFLlib; ``"flax"``: Flax's defaults."""
    if init == "flax":
        return Initializers(nn.initializers.lecun_normal(), nn.initializers.zeros_init())
    bound = fan_in**-0.5

    def uniform(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return Initializers(uniform, uniform)


def dense(features: int, init: Init, fan_in: int, name: str) -> nn.Dense:
    """A linear layer with the chosen initialisation."""
    inits = initializers(init, fan_in)
    return nn.Dense(features, kernel_init=inits.kernel, bias_init=inits.bias, name=name)


def normalised(
    x: Shaped[Array, "batch ..."], *, mean: Float[Array, " c"] | None, std: Float[Array, " c"] | None
) -> Shaped[Array, "batch ..."]:
    """The input of a network from raw samples: pixels (uint8) scaled to [0, 1] and normalised; others unchanged.

    Args:
      x: raw samples.
      mean: mean per channel; None for tokens (they are uint8, but no pixels).
      std: standard deviation per channel; None for tokens.
    """
    if mean is None or std is None or x.dtype != jnp.uint8:
        return x
    return (x.astype(jnp.float32) / 255.0 - mean) / std


def build(
    extractor: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    *,
    init: Init,
    mean: Float[Array, " c"] | None = None,
    std: Float[Array, " c"] | None = None,
) -> Model:
    """Combines a Linen extractor, ``x, mask -> (z, maps)``, with a linear head to a `Model`.

    Args:
      extractor: maps normalised float32 images, or uint8 tokens, to features z [batch, dim] and a tuple of feature
        maps. An extractor with a projection head has the methods ``encode``, x, mask -> f, and ``project``, f -> z, and
        parameters ``encoder`` and ``projection``; an extractor for tokens has a ``vocabulary``.
      shape: shape of one sample: (h, w, c), or (length,) for tokens.
      classes: number of classes.
      init: initialisation of the head.
      mean: mean per channel of the pixels scaled to [0, 1]; None for tokens.
      std: their standard deviation per channel; None for tokens.

    Raises:
      ConfigError: the extractor returns something else, or keeps state or draws random numbers.
    """
    example = jax.ShapeDtypeStruct((1, *shape), jnp.uint8 if hasattr(extractor, "vocabulary") else jnp.float32)
    # A user's class may read numbers that have changed since it was traced.
    of_package = type(extractor).__module__.startswith("fedjax_pfl.")
    z, maps, layers = (_traced_once if of_package else _traced)(extractor, example)
    dim = z.shape[-1]
    head = dense(classes, init, dim, "head")

    normalise = partial(normalised, mean=mean, std=std)

    def init_params(key: Key[Array, ""]) -> Params:
        key_extractor, key_head = jax.random.split(key)
        theta = extractor.init(key_extractor, jnp.zeros(example.shape, example.dtype))
        phi = head.init(key_head, jnp.zeros((1, dim), jnp.float32))
        return {"extractor": theta["params"], "head": phi["params"]}

    def features_and_maps(
        theta: Params, x: Shaped[Array, "batch ..."], mask: Mask = None
    ) -> tuple[Float[Array, "batch dim"], Maps]:
        with model_pass(training=mask is not None):
            out: Any = extractor.apply({"params": theta}, normalise(x), mask)
        return out

    def features(theta: Params, x: Shaped[Array, "batch ..."], mask: Mask = None) -> Float[Array, "batch dim"]:
        return features_and_maps(theta, x, mask)[0]

    def classify(phi: Params, z: Float[Array, "batch dim"]) -> Float[Array, "batch classes"]:
        logits: Any = head.apply({"params": phi}, z)
        return logits

    def apply(params: Any, x: Shaped[Array, "batch ..."], mask: Mask = None) -> Float[Array, "batch classes"]:
        return classify(params["head"], features(params["extractor"], x, mask))

    if not of_package:
        two = jax.ShapeDtypeStruct((2, *shape), example.dtype)
        check_apart(type(extractor).__name__, jax.eval_shape(init_params, jax.random.key(0)), apply, two)
    projection = _projection(extractor, example, normalise) if hasattr(extractor, "project") else None
    shapes = tuple(leaf.shape[1:] for leaf in maps)
    return Model(init_params, features, features_and_maps, classify, apply, dim, classes, shapes, layers, projection)


def _traced(extractor: nn.Module, example: jax.ShapeDtypeStruct) -> tuple[Any, Any, tuple[str, ...]]:
    """The shapes of z and of the maps in a training pass, and the names of the layers; with all checks."""
    layers: list[str] = []

    def refused(why: str) -> ConfigError:
        form = "with an argument mask, it is x, mask -> (z [batch, dim], a tuple of maps [batch, h, w, c])"
        return ConfigError("model", type(extractor).__name__, f"{form}, and it {why}")

    def trace(key: Key[Array, ""], x: Array, mask: Array) -> Any:
        variables = extractor.init(key, x)
        if others := variables.keys() - {"params"}:
            raise refused(f"keeps {min(others)}: models/norm.py has a BatchNorm for it, which takes the mask")
        layers.extend(variables["params"])  # in the order of their first call, which a tree would sort by name
        try:
            return extractor.apply(variables, x, mask)
        except InvalidRngError as error:
            raise refused("draws random numbers, which only classifiers and pairs can do") from error

    mask = jax.ShapeDtypeStruct(example.shape[:1], jnp.float32)
    out = jax.eval_shape(lambda x, mask: trace(jax.random.key(0), x, mask), example, mask)
    match out:
        case (z, tuple() | list() as maps) if [leaf.ndim for leaf in (z, *maps)] == [2] + [4] * len(maps):
            if all(leaf.shape[0] == example.shape[0] for leaf in (z, *maps)):
                return z, maps, tuple(layers)
    raise refused(f"returns the shapes {jax.tree.map(lambda leaf: leaf.shape, out)}")


# A program builds its model several times.
_traced_once = lru_cache(maxsize=64)(_traced)


def _projection(extractor: nn.Module, example: jax.ShapeDtypeStruct, normalise: Callable[[Array], Array]) -> Projection:
    """The two parts of an extractor with a projection head."""

    def encode(theta: Params, x: Shaped[Array, "batch ..."], mask: Mask = None) -> Float[Array, "batch width"]:
        with model_pass(training=mask is not None):
            f: Any = extractor.apply({"params": theta}, normalise(x), mask, method="encode")
        return f

    def project(theta: Params, f: Float[Array, "batch width"]) -> Float[Array, "batch dim"]:
        z: Any = extractor.apply({"params": theta}, f, method="project")
        return z

    key = jax.random.key(0)
    f, _ = jax.eval_shape(lambda x: extractor.init_with_output(key, x, method="encode"), example)
    return Projection(encode, project, f.shape[-1])
