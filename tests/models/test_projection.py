"""Models with a projection head: sizes by hand, the small ones in NumPy, the mask on its way to batch normalisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.models import MODELS, build
from fedjax_pfl.models.projection import Projected
from fedjax_pfl.models.resnet import ResNet, resnet18
from tests.models.test_models import convolution, pooling
from tests.reference import linear, to_numpy

KEY = jax.random.key(0)
SHAPE = (17, 16, 3)


def join(extractor, shape, classes=10):
    channels = shape[-1]
    return build(extractor, shape, classes, init="torch", mean=jnp.full(channels, 0.5), std=jnp.full(channels, 0.25))


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def images(n=3, shape=SHAPE):
    return np.random.default_rng(1).integers(0, 256, (n, *shape)).astype(np.uint8)


# 32x32 pixels become 28x28, 14x14, 10x10, 5x5.
CNN_ENCODER = (75 * 6 + 6) + (150 * 16 + 16) + (400 * 120 + 120) + (120 * 84 + 84)
RESNET_HIDDEN = 512 * 512 + 512
# ... and 8x8 pixels 4x4 and 2x2.
DIGITS_ENCODER = (9 * 16 + 16) + (144 * 32 + 32) + (128 * 64 + 64)
MLP_ENCODER = 64 * 100 + 100


@pytest.mark.parametrize(
    ("name", "options", "shape", "encoder", "head", "dims"),
    [
        ("cnn_proj", {}, (32, 32, 3), CNN_ENCODER, (84 * 84 + 84) + (84 * 256 + 256), (84, 256)),
        ("resnet18_proj", {}, (32, 32, 3), 11168832, RESNET_HIDDEN + 512 * 256 + 256, (512, 256)),
        ("resnet18_proj", {"projection": 512}, (32, 32, 3), 11168832, RESNET_HIDDEN + 512 * 512 + 512, (512, 512)),
        ("cnn_digits_proj", {}, (8, 8, 1), DIGITS_ENCODER, 2 * (64 * 64 + 64), (64, 64)),
        ("cnn_digits_proj", {"projection": 5}, (8, 8, 1), DIGITS_ENCODER, (64 * 64 + 64) + (64 * 5 + 5), (64, 5)),
        ("mlp_proj", {}, (8, 8, 1), MLP_ENCODER, (100 * 100 + 100) + (100 * 64 + 64), (100, 64)),
        ("mlp_proj", {"hidden": 7, "projection": 5}, (8, 8, 1), 64 * 7 + 7, (7 * 7 + 7) + (7 * 5 + 5), (7, 5)),
    ],
)
def test_parameter_counts_by_hand(name, options, shape, encoder, head, dims):
    model = join(MODELS[name](**options), shape)
    params = jax.eval_shape(model.init, KEY)
    theta = params["extractor"]
    assert set(theta) == {"encoder", "projection"}
    assert (size(theta["encoder"]), size(theta["projection"])) == (encoder, head)
    assert size(params["head"]) == dims[1] * 10 + 10
    assert (model.projection.width, model.dim) == dims


def test_resnet18_proj_hands_its_options_on():
    options = {"stem": "imagenet", "norm": "batch", "groups": 8, "init": "flax"}
    found = MODELS["resnet18_proj"](projection=7, **options)
    assert found == Projected(resnet18(**options), 7, "flax")


def test_resnet18_proj_has_resnet18s_defaults():
    assert MODELS["resnet18_proj"]().encoder == resnet18()


def test_other_models_have_no_projection():
    for name in MODELS.keys() - {"char_lstm"}:  # which reads no images; it has none either
        model = join(MODELS[name](), (32, 32, 3))
        assert (model.projection is None) == (not name.endswith("_proj"))


@functools.cache
def drawn(name):
    model = join(MODELS[name](), SHAPE)
    return model, jax.jit(model.init)(KEY)["extractor"]


# name -> (dense layers of the encoder, padding of its convolutions)
ENCODERS = {
    "cnn_proj": (("hidden1", "dense"), (0, 0)),
    "cnn_digits_proj": (("dense",), (1, 1)),
    "mlp_proj": (("hidden_layer",), None),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_extractor_in_numpy_and_its_two_parts(name):
    model, theta = drawn(name)
    layers, padding = ENCODERS[name]

    @jax.jit
    def parts(theta, x):
        f = model.projection.encode(theta, x)
        return f, model.projection.project(theta, f), *model.features_and_maps(theta, x)

    f, z, features, found_maps = parts(theta, jnp.asarray(images()))
    w = to_numpy(theta)
    x, maps = (images() / 255 - 0.5) / 0.25, []
    for conv in ("conv1", "conv2") if padding else ():
        layer = w["encoder"][conv]
        x = np.maximum(pooling(convolution(x, layer["kernel"], padding) + layer["bias"]), 0)
        maps.append(x)
    x = x.reshape(len(x), -1)
    for layer in layers:
        x = np.maximum(linear(w["encoder"][layer], x), 0)
    np.testing.assert_allclose(f, x, rtol=1e-3, atol=1e-5)
    expected = linear(w["projection"]["out"], np.maximum(linear(w["projection"]["hidden"], x), 0))
    np.testing.assert_allclose(z, expected, rtol=1e-3, atol=1e-5)
    assert (expected < 0).any()
    np.testing.assert_allclose(features, z, rtol=1e-5, atol=1e-6)
    for found, own in zip(found_maps, maps, strict=True):
        np.testing.assert_allclose(found, own, rtol=1e-3, atol=1e-5)
    assert model.maps == tuple(own.shape[1:] for own in maps)


def test_each_part_reads_its_own_parameters_alone():
    model, theta = drawn("cnn_proj")
    only = {name: {name: part} for name, part in theta.items()}
    f = jax.eval_shape(model.projection.encode, only["encoder"], images())
    z = jax.eval_shape(model.projection.project, only["projection"], f)
    assert (f.shape, z.shape) == ((3, 84), (3, 256))


def test_the_mask_reaches_batch_normalisation():
    """A training pass sees the samples without the padding and hands over the statistics' update, at both levels."""
    model = join(Projected(ResNet((4,), (1,), "cifar", "batch", 1, "torch"), 5, "torch"), (4, 4, 1))
    theta = jax.jit(model.init)(KEY)["extractor"]
    x, padded = images(4, (4, 4, 1)), images(4, (4, 4, 1))
    padded[3] = 255 - padded[3]
    mask = jnp.array([1.0, 1.0, 1.0, 0.0])

    @jax.jit
    def run(theta, x, mask):
        def level(features):
            out, pull_back = jax.vjp(lambda theta: features(theta, x, mask), theta)
            return out, pull_back(jnp.ones_like(out))[0]["encoder"]["stem"]["norm"]["running_mean"]

        return level(model.features), level(model.projection.encode)

    trained, other_padding, evaluated = run(theta, x, mask), run(theta, padded, mask), run(theta, x, None)
    for (out, update), (other, same), (plain, none) in zip(trained, other_padding, evaluated, strict=True):
        np.testing.assert_allclose(out[:3], other[:3], rtol=1e-5, atol=1e-6)
        assert not np.allclose(out[3], other[3], atol=1e-3)
        assert not np.allclose(out[:3], plain[:3], atol=1e-3)
        np.testing.assert_allclose(update, same, rtol=1e-5, atol=1e-6)
        assert np.abs(update).max() > 1e-3
        assert not none.any()
