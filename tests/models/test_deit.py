"""DeiT-S by its published size, a small one against NumPy, its initial values, and the methods that look inside."""

import functools
from math import erf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import Config, ConfigError, simulate
from fedjax_pfl.data.federated import Batch
from fedjax_pfl.experiment import programs
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS, build
from fedjax_pfl.models.deit import Block, DeiT
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer
from tests.reference import linear, to_numpy

KEY = jax.random.key(0)
SHAPE = (8, 12, 3)  # two rows of three patches
SMALL = DeiT(4, 2, 8, 2, "torch")


def join(extractor, shape, classes=3):
    channels = shape[-1]
    return build(extractor, shape, classes, init="torch", mean=jnp.full(channels, 0.5), std=jnp.full(channels, 0.25))


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_its_size_is_the_published_one():
    """With 1,000 classes, 224x224 pixels and patches of 16x16: 22 million in the paper, 22,050,664 in its code."""
    embedding = (16 * 16 * 3 + 1) * 384 + 384 + (1 + 14 * 14) * 384
    block = 2 * (2 * 384) + (384 + 1) * 3 * 384 + (384 + 1) * 384 + (384 + 1) * 1536 + (1536 + 1) * 384
    extractor = size(jax.eval_shape(MODELS["deit_s"](patch=16).init, KEY, jnp.zeros((1, 224, 224, 3))))
    assert extractor == embedding + 12 * block + 2 * 384
    assert extractor + (384 + 1) * 1000 == 22_050_664


def test_the_options_are_those_of_the_paper_with_patches_for_small_images():
    assert MODELS["deit_s"]() == DeiT(4, 12, 384, 6, "torch")
    assert MODELS["deit_s"](patch=2, depth=3, width=10, heads=5, init="flax") == DeiT(2, 3, 10, 5, "flax")


@pytest.mark.parametrize(
    ("shape", "depth", "maps"),
    [((32, 32, 3), 3, ((8, 8, 8),) * 2), ((28, 28, 1), 2, ((7, 7, 8),)), ((4, 8, 1), 1, ())],
)
def test_a_map_is_what_stands_between_two_blocks(shape, depth, maps):
    model = join(MODELS["deit_s"](depth=depth, width=8, heads=2), shape)
    assert (model.maps, model.dim, model.projection) == (maps, 8, None)


# --- A small one in NumPy --------------------------------------------------------------------------------------------


def normalised(layer, x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-6) * layer["scale"] + layer["bias"]


def attention(layers, x):
    """Head after head and query after query, of one image's tokens [tokens, width]."""
    queries, keys, values = np.split(linear(layers["qkv"], x), 3, axis=1)
    out = np.zeros_like(x)
    for head in (slice(0, 4), slice(4, 8)):
        for token, query in enumerate(queries):
            weights = np.exp(keys[:, head] @ query[head] / np.sqrt(4))
            out[token, head] = weights / weights.sum() @ values[:, head]
    return linear(layers["attention"], out)


def block(layers, x):
    x = x + attention(layers, normalised(layers["norm1"], x))
    hidden = linear(layers["hidden"], normalised(layers["norm2"], x))
    return x + linear(layers["out"], hidden * (1 + np.vectorize(erf)(hidden / 2**0.5)) / 2)


def embedded(theta, pixels):
    x, layers = (pixels / 255 - 0.5) / 0.25, theta["embedding"]
    patches = [x[row : row + 4, column : column + 4].ravel() for row in (0, 4) for column in (0, 4, 8)]
    return np.vstack([layers["class_token"], linear(layers["patches"], np.array(patches))]) + layers["positions"]


def reference(theta, pixels):
    """Features and the one map of the small network."""
    first = [block(theta["block1"], embedded(theta, image)) for image in pixels]
    last = [normalised(theta["norm"], block(theta["block2"], x)[0]) for x in first]
    return np.array(last), np.array([x[1:].reshape(2, 3, 8) for x in first])


@functools.cache
def drawn():
    """The small network and parameters that differ from 0 and 1 everywhere."""
    model, rng = join(SMALL, SHAPE), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, KEY)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.1, 0.5, leaf.shape), jnp.float32), shapes)
    return model, params


def images(n=3):
    return np.random.default_rng(1).integers(0, 256, (n, *SHAPE)).astype(np.uint8)


@functools.cache
def looked():
    """What the small network makes of images: features and maps, and the gradient of a loss that takes two of three."""
    model, _ = drawn()
    labels, mask = jnp.array([2, 0, 1], jnp.int32), jnp.array([1.0, 1.0, 0.0])

    def look(params, x):
        gradient = jax.grad(lambda params: supervised(model, params, Batch(x, labels, mask)))(params)
        return model.features_and_maps(params["extractor"], x), gradient

    return jax.jit(look)


def test_a_small_one_is_the_same_in_numpy():
    _, params = drawn()
    (found_z, found_maps), _ = looked()(params, jnp.asarray(images()))
    z, maps = reference(to_numpy(params["extractor"]), images())
    np.testing.assert_allclose(found_z, z, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found_maps[0], maps, rtol=1e-3, atol=1e-4)
    assert len(found_maps) == 1


def test_its_layer_normalisations_have_the_epsilon_of_the_papers_code():
    """With an embedding this small, it is most of what the tokens of the first block are divided by."""
    _, params = drawn()
    theta = params["extractor"]
    theta = {**theta, "embedding": jax.tree.map(lambda leaf: 1e-4 * leaf, theta["embedding"])}
    (found, _), _ = looked()({**params, "extractor": theta}, jnp.asarray(images()))
    np.testing.assert_allclose(found, reference(to_numpy(theta), images())[0], rtol=1e-3, atol=1e-4)


def test_the_features_are_computed_from_the_map():
    """Or nothing could be differentiated with respect to it, as Grad-CAM does."""
    model, params = drawn()
    traced = jax.make_jaxpr(model.features_and_maps)(params["extractor"], jnp.asarray(images())).jaxpr
    assert any(read is traced.outvars[-1] for equation in traced.eqns for read in equation.invars)


def test_padding_adds_nothing_to_a_gradient():
    _, params = drawn()
    other = images()
    other[2] = 255 - other[2]
    (z, _), gradient = looked()(params, jnp.asarray(images()))
    (other_z, _), other_gradient = looked()(params, jnp.asarray(other))
    assert not np.allclose(z[2], other_z[2]), "otherwise nothing has changed"
    jax.tree.map(np.testing.assert_array_equal, gradient, other_gradient)
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(gradient)), "otherwise it could be zero"


# --- Initial values --------------------------------------------------------------------------------------------------


def initial(module, *shape):
    # This generator of random numbers takes a fraction of the others' time to compile.
    params = jax.jit(module.init)(jax.random.key(0, impl="rbg"), jnp.zeros(shape))["params"]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(params)}


def test_initial_values_are_those_of_the_papers_code():
    for name, leaf in initial(DeiT(4, 1, 48, 2, "torch"), 1, 16, 16, 3).items():
        if "patches" in name:  # a linear layer of PyTorch's, with 48 inputs
            assert 0.8 * 48**-0.5 < np.abs(leaf).max() <= 48**-0.5
            assert leaf.std() == pytest.approx((3 * 48) ** -0.5, rel=0.2)
        elif name.endswith(("['kernel']", "['class_token']", "['positions']")):
            assert leaf.std() == pytest.approx(0.02, rel=0.25)
        else:
            np.testing.assert_array_equal(leaf, 1.0 if name.endswith("['scale']") else 0.0)


def test_flax_draws_the_kernels_of_a_block_as_of_every_layer():
    for name, leaf in initial(Block(2, "flax"), 1, 5, 48).items():
        if name.endswith("['kernel']"):
            assert leaf.std() == pytest.approx(leaf.shape[0] ** -0.5, rel=0.1)


# --- In a federation -------------------------------------------------------------------------------------------------


def test_fedbn_keeps_the_layer_normalisations_with_the_clients():
    """Scale and shift of two in each block, and of the last."""
    method = METHODS["fedbn"](join(SMALL, SHAPE), Trainer(batch_size=4, lr=0.1))
    _, personal = jax.eval_shape(lambda key: method.init(key, 7), KEY)
    assert size(personal) == (2 * 2 + 1) * 2 * 8


MISTAKES = [
    ({"heads": 5}, "model.heads = 5 is not usable: a divisor of model.width, 384"),
    (
        {"patch": 3},
        "model.name = 'deit_s' is not usable: it does not fit 8x8x1 images: patches of 3x3 pixels do not tile 8x8 "
        "(model.patch)",
    ),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_anything_compiles(options, message, monkeypatch):
    monkeypatch.setattr(programs, "_compile", lambda *_: pytest.fail("compiled"))
    data = {"source": "digits", "clients": 4, "samples_per_client": 20}
    with pytest.raises(ConfigError) as caught:
        simulate(Config(data=data, model={"name": "deit_s", **options}, method={"name": "fedavg"}))
    assert str(caught.value) == message
