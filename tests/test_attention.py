"""Grad-CAM: what is drawn is what NumPy computes from the weights behind the maps."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import Config, ConfigError, Result, plot_attention
from fedjax_pfl.experiment.build import DataShape, make_engine, model_of
from fedjax_pfl.experiment.kept import Kept
from fedjax_pfl.experiment.plots.attention import class_activation
from fedjax_pfl.experiment.trained import state_like
from fedjax_pfl.models import build

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

DIGITS = DataShape("digits", (8, 8, 1), 10, None, False)
CONFIG = Config(
    data={"source": "digits", "clients": 4},
    model={"name": "cnn_digits"},
    method={"name": "ditto"},
    training={"rounds": 1},
)
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), np.uint8)


@pytest.fixture(autouse=True)
def no_figure_stays():
    yield
    pyplot.close("all")


def result(model="cnn_digits", method="ditto"):
    """A run that nobody has made: models of random numbers, each client's another one."""
    rng, config = np.random.default_rng(0), CONFIG.replace({"model.name": model, "method.name": method})
    like = state_like(make_engine(config, DIGITS))
    state = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), like)
    nothing = {field.name: {} for field in dataclasses.fields(Result)}
    partition = {"train_class_counts": [[1] * 10] * 4, "n_train": [10] * 4}
    return Result(**{**nothing, "partition": partition, "kept": Kept(1, DIGITS, state), "config": config})


@pytest.fixture(scope="module")
def run():
    return result()


def bilinear(maps, size):
    """Maps [n, h, w] spread over [n, size, size], pixels being squares whose values are those of their middles."""
    at = [(np.arange(size) + 0.5) * old / size - 0.5 for old in maps.shape[1:]]
    down = np.apply_along_axis(lambda line: np.interp(at[0], np.arange(len(line)), line), 1, maps)
    return np.apply_along_axis(lambda line: np.interp(at[1], np.arange(len(line)), line), 2, down)


class Squares(nn.Module):
    """Maps: the mean and the first pixel of each quarter of the image. Features: weighted sums of their squares."""

    compiled: bool = False

    @nn.compact
    def __call__(self, x, mask=None):
        kernel = self.param("kernel", nn.initializers.normal(1.0), (2 * 2 * 2, 3))

        def forward(x):
            quarters = x[..., 0].reshape(-1, 2, 4, 2, 4)
            maps = jnp.stack([quarters.mean(axis=(2, 4)), quarters[:, :, 0, :, 0]], axis=-1)
            return jnp.square(maps).reshape(len(x), -1) @ kernel, (maps,)

        return (jax.jit(forward) if self.compiled else forward)(x)


def squares(rng, compiled=False):
    """The model of these maps with random parameters."""
    kernel, head, bias = rng.normal(size=(8, 3)), rng.normal(size=(3, 4)), rng.normal(size=4)
    params = {"extractor": {"kernel": kernel}, "head": {"kernel": head, "bias": bias}}
    return build(Squares(compiled), (8, 8, 1), 4, init="torch"), jax.tree.map(np.float32, params)


def test_maps_are_added_up_by_the_mean_slope_of_the_logit():
    rng = np.random.default_rng(0)
    model, params = squares(rng)
    x, y = rng.normal(size=(5, 8, 8, 1)), np.array([0, 3, 1, 1, 2])
    quarters = x.reshape(5, 2, 4, 2, 4)
    maps = np.stack([quarters.mean(axis=(2, 4)), quarters[:, :, 0, :, 0]], axis=-1)
    slope = 2 * maps * (params["extractor"]["kernel"] @ params["head"]["kernel"][:, y]).T.reshape(5, 2, 2, 2)
    expected = np.maximum(np.sum(maps * slope.mean(axis=(1, 2), keepdims=True), axis=-1), 0)
    assert 5 < (expected > 0).sum() < 15  # of twenty
    found = class_activation(model, params, x.astype(np.float32), y)
    np.testing.assert_allclose(found, bilinear(expected, 8), rtol=1e-4, atol=1e-5)


def test_features_that_are_not_seen_to_come_from_the_maps():
    model, params = squares(np.random.default_rng(0), compiled=True)
    message = "^model = 'this one' is not usable: one that computes its features from its last maps, outside of jax"
    with pytest.raises(ConfigError, match=message):
        class_activation(model, params, np.zeros((1, 8, 8, 1), np.float32), np.array([0]))


def drawn(ax):
    """The grey images, and the maps on them."""
    pictures = [np.asarray(picture.get_array()) for picture in ax.images]
    return np.stack(pictures[::2]), np.stack(pictures[1::2])


def by_numpy(params, x, y):
    """Grad-CAM of ``cnn_digits``: behind the maps are a dense layer, ReLU and the head."""
    _, maps = model_of(CONFIG, DIGITS).features_and_maps(jax.device_put(params["extractor"]), jnp.asarray(x))
    last, dense = np.asarray(maps[-1]), params["extractor"]["dense"]
    active = last.reshape(len(x), -1) @ dense["kernel"] + dense["bias"] > 0
    slope = (active * params["head"]["kernel"][:, y].T) @ dense["kernel"].T
    weights = slope.reshape(last.shape).mean(axis=(1, 2), keepdims=True)
    found = bilinear(np.maximum((last * weights).sum(axis=-1), 0), 8)
    return found / np.maximum(found.max(axis=(1, 2), keepdims=True), 1e-30)


def test_attention_of_the_global_and_of_a_personal_model(run):
    asked = np.array([5, 1, 2])
    ax = pyplot.subplots()[1]
    of_all, of_one = plot_attention(run, IMAGES, y=asked), plot_attention(run, IMAGES[..., 0], 2, ax=ax)
    assert of_one is ax
    answers = run.predict(IMAGES, 2)  # what a model is asked about unless told otherwise
    for ax, client, y in ((of_all, None, asked), (of_one, 2, answers)):
        grey, maps = drawn(ax)
        np.testing.assert_array_equal(grey, IMAGES[..., 0])
        np.testing.assert_allclose(maps, by_numpy(run.params(client), IMAGES, y), rtol=1e-3, atol=1e-4)
        assert [text.get_text() for text in ax.get_xticklabels()] == [str(label) for label in y]
    places = [picture.get_extent() for picture in of_all.images]
    assert places[::2] == places[1::2]  # the map lies on its image
    assert all(left[1] < right[0] for left, right in zip(places[::2], places[2::2], strict=False))
    assert of_all.get_xlim() == (0, places[-1][1])


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda run: plot_attention(result("mlp"), IMAGES),
            "model.name = 'mlp' is not usable: a model with feature maps: c",
        ),
        (
            lambda run: plot_attention(result(method="fedrod"), IMAGES, 0),
            "method.name = 'fedrod' is not usable: a method whose models are an extractor with a head; what fedrod",
        ),
        (
            lambda run: plot_attention(dataclasses.replace(run, kept=None), IMAGES),
            'result = \'no state\' is not usable: of a run with run.keep = "final" or "best"',
        ),
        (
            lambda run: plot_attention(run, IMAGES[:, :7]),
            "x = 'uint8[3, 7, 8, 1]' is not usable: samples like those of",
        ),
        (lambda run: plot_attention(run, IMAGES[:0]), "x = 'no images' is not usable: one or more"),
        (lambda run: plot_attention(run, IMAGES, 4), "client = 4 is not usable: a client from 0 to 3"),
        (
            lambda run: plot_attention(run, IMAGES, y=np.array([1, 2, 10])),
            "y = 'int64[3]' is not usable: a label for each of",
        ),
        (
            lambda run: plot_attention(diverged(run), IMAGES, 1),
            "client = 1 is not usable: a model that has not diverged: its logits are NaN or infinite",
        ),
    ],
)
def test_attention_that_cannot_be_drawn(run, draw, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        draw(run)
    assert pyplot.get_fignums() == []


def diverged(run):
    return run.at(1, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), run.state))
