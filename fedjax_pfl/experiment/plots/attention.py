"""Which parts of an image support a class, by Grad-CAM (Selvaraju et al., ICCV 2017)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int, Shaped

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.build import model_of
from fedjax_pfl.experiment.plots.given import check_given
from fedjax_pfl.experiment.plots.style import COLUMN, drawing
from fedjax_pfl.experiment.registry import with_own_parts
from fedjax_pfl.experiment.result import Result
from fedjax_pfl.experiment.trained import checked_labels, checked_samples
from fedjax_pfl.models import Model
from fedjax_pfl.models.base import Params

if TYPE_CHECKING:
    import matplotlib.axes

# Between images, as a share of their width.
_GAP = 0.06


def plot_attention(
    result: Result,
    x: Shaped[np.ndarray, "n ..."],
    client: int | None = None,
    y: Int[np.ndarray, " n"] | None = None,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
) -> "matplotlib.axes.Axes":
    """Draws which parts of each image support a class: Grad-CAM (`class_activation`), over the image in grey.

    The brighter a part, the more it supports the class, compared with the other parts of the same image.

    Args:
      result: the result of a run that has kept its state (``run.keep``), with a model that has feature maps, such as
        ``cnn2``.
      x: a few images, [n, h, w, c], of the shape and dtype of the run's data; they are drawn side by side.
      client: the client whose model is used, as PRE scores it; None for the global model.
      y: the class to explain for each image, whole numbers [n]; the model's own predictions unless given.
      ax: matplotlib axes to draw on; a new figure unless given.

    Returns:
      The axes. For each image they hold two matplotlib images: the mean over its channels and, half transparent, its
      map from 0 to 1 (all 0 if nothing supports the class). The class is written below.

    Raises:
      ConfigError: this is no result; the state was not kept; the model has no feature maps; its predictions use more
        than an extractor with a head; there is no such client or global model; x or y do not fit; the model has
        diverged; or matplotlib is not installed.
    """
    check_given("result", result, Result, "what simulate(...) gives")
    if result.kept is None:
        raise ConfigError("result", "no state", 'of a run with run.keep = "final" or "best"')
    data, config = result.kept.data, result.config
    with with_own_parts(result.parts):
        model = model_of(config, data)
    if not model.maps:
        allowed = "a model with feature maps: cnn2, resnet18, ..., or one of your own, x, mask -> (z, maps)"
        raise ConfigError("model.name", config.model["name"], allowed)
    images = checked_samples(x, data)
    if not len(images):
        raise ConfigError("x", "no images", "one or more")
    asked = result.predict(images, client) if y is None else checked_labels(y, len(images), data.classes)
    params, answers = result.params(client), result.predict_proba(images, client)
    if not np.isfinite(answers).all():
        raise ConfigError("client", client, "a model that has not diverged: its logits are NaN or infinite")
    by_head = jax.nn.softmax(model.apply(jax.device_put(params), jnp.asarray(images)))
    if not np.allclose(by_head, answers, rtol=1e-3, atol=1e-6):
        allowed = f"a method whose models are an extractor with a head; what {config.method['name']} answers is more"
        raise ConfigError("method.name", config.method["name"], allowed)
    maps = class_activation(model, params, images, asked)
    highest = maps.max(axis=(1, 2), keepdims=True)
    shares = np.divide(maps, highest, out=np.zeros_like(maps), where=highest > 0)
    height, width = data.sample[:2]
    step = 1 + _GAP
    ratio = height / width
    with drawing(ax, height=0.35 + COLUMN * ratio / (len(images) * step)) as ax:
        for number, (image, share) in enumerate(zip(images, shares, strict=True)):
            place = (number * step, number * step + 1, ratio, 0)
            ax.imshow(image.mean(axis=-1), cmap="gray", extent=place)
            ax.imshow(share, cmap="inferno", vmin=0, vmax=1, alpha=0.55, extent=place)
        middles = np.arange(len(images)) * step + 0.5
        ax.set(xlim=(0, len(images) * step - _GAP), ylim=(ratio, 0), yticks=[], xlabel="class", aspect="equal")
        ax.set_xticks(middles, [str(label) for label in asked])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return ax


def class_activation(
    model: Model, params: Params, x: Shaped[np.ndarray, "n h w c"], y: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "n h w"]:
    """Grad-CAM: where the model's last feature maps support a class, resized bilinearly to the image.

    The maps are added up, each weighted by the mean over its pixels of the logit's derivative. Negative values, which
    are evidence against the class, become 0.

    Args:
      model: a model with feature maps.
      params: ``{"extractor": theta, "head": phi}``.
      x: images, as stored.
      y: the class to explain for each image.

    Returns:
      One map per image, in units of the logit, 0 or more.

    Raises:
      ConfigError: the features are not computed from the last maps.
    """

    def last_maps(theta: Params, x: Array) -> tuple[Float[Array, "n dim"], Float[Array, "n h2 w2 channels"]]:
        z, maps = model.features_and_maps(theta, x)
        return z, maps[-1]

    @jax.jit
    def activation(params: Params, x: Array, y: Int[Array, " n"]) -> Float[Array, "n h w"]:
        theta, phi = params["extractor"], params["head"]
        _, maps = last_maps(theta, x)
        leaves = jax.tree.leaves((theta, x))
        behind = _behind(jax.make_jaxpr(last_maps)(theta, x))

        def logits_of_classes(maps: Float[Array, "n h2 w2 channels"]) -> Float[Array, ""]:
            (z,) = behind(maps, *leaves)
            return jnp.take_along_axis(model.classify(phi, z), y[:, None], axis=1).sum()

        weights = jax.grad(logits_of_classes)(maps).mean(axis=(1, 2))
        found = jax.nn.relu(jnp.einsum("nhwc,nc->nhw", maps, weights))
        return jax.image.resize(found, x.shape[:3], "linear")

    return np.asarray(activation(params, x, y))


def _behind(traced: ClosedJaxpr) -> Callable[..., Any]:
    """The part of a network after its last maps, as a function: maps, theta's leaves, x -> [z].

    A model offers no such function, and nothing is known about a user's own model. But the operations of a traced
    network do not need the operation that computes the maps, if the maps are given.

    Args:
      traced: theta, x -> z and the last maps.

    Raises:
      ConfigError: the features are not computed from the last maps.
    """
    z, maps = traced.jaxpr.outvars
    rest = [equation for equation in traced.jaxpr.eqns if maps not in equation.outvars]
    if not any(read is maps for equation in rest for read in equation.invars):
        allowed = "one that computes its features from its last maps, outside of jax.jit and jax.checkpoint"
        raise ConfigError("model", "this one", allowed)
    cut = traced.jaxpr.replace(invars=[maps, *traced.jaxpr.invars], outvars=[z], eqns=rest)
    return jaxpr_as_fun(ClosedJaxpr(cut, traced.consts))
