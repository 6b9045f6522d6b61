"""Every entry of MODELS, published parameter counts, names of layers, and the CNNs in NumPy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.models import MODELS, build
from fedjax_pfl.models.cnn import CNN
from fedjax_pfl.models.projection import Projected
from tests.reference import to_numpy

KEY = jax.random.key(0)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
SHAPE = (16, 17, 3)
# These take long to compile; test_resnet.py and test_deit.py have small ones. char_lstm reads no images.
every_model = pytest.mark.parametrize("name", [n for n in MODELS if not n.startswith(("resnet", "deit", "char_lstm"))])


@functools.cache
def built(name, shape=SHAPE, classes=5, init="torch"):
    mean, std = (jnp.array(values[: shape[-1]]) for values in (MEAN, STD))
    return build(MODELS[name](init=init), shape, classes, init=init, mean=mean, std=std)


@functools.cache
def params_of(name, init="torch"):
    return jax.jit(built(name, init=init).init)(KEY)


def images(n=3, shape=SHAPE):
    return np.random.default_rng(1).integers(0, 256, (n, *shape)).astype(np.uint8)


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


COUNTS = [
    ("mlp", (28, 28, 1), 10, 784 * 100 + 100, 1010),
    ("cnn2", (28, 28, 1), 10, 582026 - 5130, 5130),
    ("cnn2", (32, 32, 3), 10, 878538 - 5130, 5130),
    ("cnn2", (32, 32, 3), 100, 924708 - 51300, 51300),
    ("cnn3", (32, 32, 3), 10, 106400, 1290),
    ("cnn2s", (28, 28, 1), 10, 115776, 1290),
    ("cnn_digits", (8, 8, 1), 10, (9 * 16 + 16) + (144 * 32 + 32) + (128 * 64 + 64), 650),
    ("resnet18", (32, 32, 3), 10, 11173962 - 5130, 5130),
]


@pytest.mark.parametrize(("name", "shape", "classes", "extractor", "head"), COUNTS)
def test_parameter_counts_are_the_published_ones_or_by_hand(name, shape, classes, extractor, head):
    params = jax.eval_shape(built(name, shape, classes).init, KEY)
    assert (size(params["extractor"]), size(params["head"])) == (extractor, head)


@every_model
def test_a_model_is_its_extractor_and_its_head(name):
    model, params = built(name), params_of(name)

    @jax.jit
    def parts(params, x):
        z, maps = model.features_and_maps(params["extractor"], x)
        alone = model.features(params["extractor"], x)
        return model.apply(params, x), model.classify(params["head"], z), z, alone, maps

    logits, joined, z, alone, maps = parts(params, jnp.asarray(images()))
    assert set(params) == {"extractor", "head"}
    np.testing.assert_allclose(z, alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logits, joined, rtol=1e-5, atol=1e-6)
    assert logits.shape == (3, 5) == (3, model.classes)
    assert z.shape == (3, model.dim)
    assert isinstance(maps, tuple)
    assert all(len(leaf) == 3 for leaf in maps)
    assert tuple(leaf.shape[1:] for leaf in maps) == model.maps
    assert all(leaf.dtype == jnp.float32 and np.isfinite(leaf).all() for leaf in (logits, z, *maps))
    # The last layer is linear in the features: NumPy's matrix product gives the logits.
    head = to_numpy(params["head"])
    np.testing.assert_allclose(logits, z @ head["kernel"] + head["bias"], rtol=1e-4, atol=1e-5)


def test_pixels_are_scaled_to_one_and_standardised_per_channel():
    """On the MLP; the CNNs are given raw pixels below."""
    params, x = params_of("mlp"), images()
    standard = ((x / 255 - np.array(MEAN)) / np.array(STD)).reshape(len(x), -1)
    layer = to_numpy(params["extractor"]["hidden_layer"])
    found = built("mlp").features(params["extractor"], jnp.asarray(x))
    expected = np.maximum(standard @ layer["kernel"] + layer["bias"], 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_names_of_layers_stay_because_initial_values_are_drawn_by_them():
    for name in ("mlp", "cnn2", "cnn2s", "cnn3", "cnn_digits"):
        assert sorted(params_of(name)["extractor"]) == sorted(LAYERS[name])


def resnet_layers(*blocks):
    return "stem", *(f"stage{stage}_block{block + 1}" for stage, n in enumerate(blocks, 1) for block in range(n))


# From the input to the features.
CNN_LAYERS = ("conv1", "conv2", "dense")
LAYERS = {
    "mlp": ("hidden_layer",),
    "cnn2": CNN_LAYERS,
    "cnn3": ("conv1", "conv2", "conv3", "dense"),
    "cnn2s": CNN_LAYERS,
    "cnn_digits": CNN_LAYERS,
    "resnet18": resnet_layers(2, 2, 2, 2),
    "resnet50": resnet_layers(3, 4, 6, 3),
    "deit_s": ("embedding", *(f"block{block}" for block in range(1, 13)), "norm"),
    "cnn_proj": ("encoder", "projection"),
    "resnet18_proj": ("encoder", "projection"),
    "cnn_digits_proj": ("encoder", "projection"),
    "mlp_proj": ("encoder", "projection"),
    "char_lstm": ("embedding_layer", "lstm1", "lstm2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_named_from_the_input_to_the_features(name):
    """A tree sorts its names: the stem of a ResNet would come last, a layer named "a" first."""
    model = build(MODELS[name](), (12,), 5, init="torch") if name == "char_lstm" else built(name, (32, 32, 3))
    assert model.layers == LAYERS[name]
    assert set(model.layers) == set(jax.eval_shape(model.init, KEY)["extractor"])


def test_layers_are_in_the_order_of_their_first_call_not_of_their_names():
    class Backwards(nn.Module):
        @nn.compact
        def __call__(self, x, mask=None):
            shared = nn.Dense(4, name="b")
            x = nn.Dense(4, name="c")(x.reshape(len(x), -1))
            return nn.Dense(4, name="a")(shared(shared(x))), ()

    model = build(Backwards(), (2, 2, 1), 3, init="torch", mean=jnp.zeros(1), std=jnp.ones(1))
    assert model.layers == ("c", "b", "a")


@every_model
def test_torch_weights_and_biases_are_uniform_within_one_over_the_root_of_the_fan_in(name):
    layers = jax.tree.leaves(params_of(name), is_leaf=lambda node: "kernel" in node)
    assert len(layers) >= 2
    for layer in layers:
        kernel = np.asarray(layer["kernel"])
        bound = np.prod(kernel.shape[:-1]) ** -0.5
        assert 0.93 * bound < np.abs(kernel).max() <= bound
        assert abs(kernel.mean()) < 0.2 * bound
        assert kernel.std() == pytest.approx(bound / 3**0.5, rel=0.1)
        assert 0 < np.abs(layer["bias"]).max() <= bound


def test_flax_weights_are_lecun_normal_and_biases_zero():
    for layer in (params := params_of("mlp", "flax"))["extractor"].values():
        fan_in = np.prod(layer["kernel"].shape[:-1])
        assert np.asarray(layer["kernel"]).std() == pytest.approx(fan_in**-0.5, rel=0.1)
        assert not np.asarray(layer["bias"]).any()
    assert not np.asarray(params["head"]["bias"]).any()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_what_it_is_made_of_begin_as_asked_for_and_as_in_torch_unless_told(name):
    for init in ("torch", "flax"):
        module = MODELS[name](init=init)
        assert {module.init_style, getattr(module, "encoder", module).init_style} == {init}
    assert MODELS[name]() == MODELS[name](init="torch")


def test_every_layer_of_a_network_with_a_projection_head_begins_as_in_flax():
    network = Projected(CNN(((24, 3, 0),), 40, nn.relu, "flax", hidden=(30,)), 50, "flax")
    # This generator of random numbers takes a fraction of the others' time to compile.
    params = jax.jit(network.init)(jax.random.key(0, impl="rbg"), jnp.zeros((1, 8, 8, 3)))["params"]
    layers = {**params["encoder"], **params["projection"]}
    assert set(layers) == {"conv1", "hidden1", "dense", "hidden", "out"}
    for layer in layers.values():
        kernel = np.asarray(layer["kernel"])
        assert kernel.std() == pytest.approx(np.prod(kernel.shape[:-1]) ** -0.5, rel=0.1)
        assert not np.asarray(layer["bias"]).any()


def test_the_initial_model_depends_on_the_key():
    init = jax.jit(built("mlp").init)
    first, again, other = init(KEY), init(KEY), init(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, first, other)))


# --- The CNNs in NumPy: convolution, bias, activation, pooling, in this order ----------------------------------------

BLOCKS = {
    "cnn2": [(0, 0), (0, 0)],
    "cnn3": [(0, 0), (1, 1), (1, 1)],
    "cnn2s": [(0, 0), (1, 1)],
    "cnn_digits": [(1, 1), (1, 1)],
}


def convolution(x, kernel, pad):
    x = np.pad(x, ((0, 0), pad, pad, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], axis=(1, 2))
    return np.einsum("bhwcij,ijco->bhwo", windows, kernel)


def pooling(x):
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    x = x[:, :height, :width]
    return x.reshape(len(x), height // 2, 2, width // 2, 2, -1).max(axis=(2, 4))


@pytest.mark.parametrize("name", BLOCKS)
def test_bias_activation_and_pooling_in_the_usual_order_give_the_same(name):
    slope = 0.0 if name in ("cnn2", "cnn_digits") else 0.01

    def activation(x):
        return np.where(x > 0, x, slope * x)

    params = params_of(name)
    w = to_numpy(params)
    x = (images() / 255 - np.array(MEAN)) / np.array(STD)
    maps = []
    for i, pad in enumerate(BLOCKS[name]):
        layer = w["extractor"][f"conv{i + 1}"]
        x = pooling(activation(convolution(x, layer["kernel"], pad) + layer["bias"]))
        maps.append(x)
    dense = w["extractor"]["dense"]
    z = activation(x.reshape(len(x), -1) @ dense["kernel"] + dense["bias"])
    model, pixels = built(name), jnp.asarray(images())
    found_z, found_maps = jax.jit(model.features_and_maps)(params["extractor"], pixels)
    np.testing.assert_allclose(found_z, z, rtol=1e-3, atol=1e-5)
    for found, expected in zip(found_maps, maps, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
