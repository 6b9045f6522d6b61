"""ResNet-18 and -50 by their shapes, small ones against NumPy, and batch normalisation through a round of FedAvg."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.models import MODELS, build
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.models.resnet import Bottleneck, ConvNorm, ResNet
from fedjax_pfl.ops.training import Trainer
from tests.models.test_models import convolution
from tests.reference import held, linear, softmax_loss, to_numpy

KEY, T0 = jax.random.key(0), jnp.array(0, jnp.int32)
TRAIN = Trainer(batch_size=32, lr=0.1, momentum=0.9, weight_decay=0.3, clip_norm=0.5)


def join(extractor, shape, classes=3):
    channels = shape[-1]
    return build(extractor, shape, classes, init="torch", mean=jnp.full(channels, 0.5), std=jnp.full(channels, 0.25))


def small(norm, stem="cifar"):
    """Two stages of one block. Of four groups there are four for four channels, and two for six."""
    return ResNet((4, 6), (1, 1), stem, norm, 4, "torch")


# --- By their shapes -------------------------------------------------------------------------------------------------


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@functools.cache
def shapes_of(shape, **options):
    return jax.eval_shape(join(MODELS["resnet18"](**options), shape).init, KEY)["extractor"]


def test_imagenets_parameter_count_is_torchvisions():
    extractor = shapes_of((64, 64, 3), stem="imagenet")
    assert sum(leaf.size for leaf in jax.tree.leaves(extractor)) == 11689512 - 513000


def test_batch_normalisation_adds_two_statistics_per_channel_and_is_not_the_default():
    group, batch = shapes_of((32, 32, 3)), shapes_of((32, 32, 3), norm="batch")
    extra = jax.tree.leaves_with_path(batch)
    extra = [(path, leaf) for path, leaf in extra if jax.tree_util.keystr(path) not in leaves(group)]
    assert all(is_statistic(path) for path, _ in extra)
    # One layer after each of the 20 convolutions: 5 x 64, 5 x 128, 5 x 256, 5 x 512 channels.
    assert [len(extra), sum(leaf.size for _, leaf in extra)] == [40, 2 * 4800]


@pytest.mark.parametrize(
    ("stem", "shape", "sides"),
    [
        ("cifar", (32, 32, 3), (32, 16, 8, 4)),
        ("cifar", (28, 28, 1), (28, 14, 7, 4)),
        ("cifar", (8, 8, 1), (8, 4, 2, 1)),
        ("imagenet", (64, 64, 3), (16, 8, 4, 2)),
        ("imagenet", (28, 28, 1), (7, 4, 2, 1)),
    ],
)
def test_the_maps_are_the_outputs_of_the_four_stages(stem, shape, sides):
    model = join(MODELS["resnet18"](stem=stem), shape)
    assert model.maps == tuple((side, side, c) for side, c in zip(sides, (64, 128, 256, 512), strict=True))
    assert model.dim == 512


def test_resnet50_has_torchvisions_parameter_count():
    """25,557,032 with 1,000 classes and ImageNet's stem; by hand, and in the extractor alone."""
    kernels, normalised, inputs = 7 * 7 * 3 * 64, 64, 64
    for channels, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outputs = 4 * channels
        kernels, normalised = kernels + inputs * outputs, normalised + outputs  # the shortcut of the first block
        for block in range(blocks):
            kernels += (outputs if block else inputs) * channels + 3 * 3 * channels**2 + channels * outputs
            normalised += channels + channels + outputs
        inputs = outputs
    extractor = MODELS["resnet50"](stem="imagenet", norm="batch")
    found = jax.eval_shape(extractor.init, KEY, jnp.zeros((1, 64, 64, 3)))["params"]
    statistics = sum(leaf.size for path, leaf in jax.tree.leaves_with_path(found) if is_statistic(path))
    trained = sum(leaf.size for leaf in jax.tree.leaves(found)) - statistics
    assert (trained, statistics) == (kernels + 2 * normalised, 2 * normalised)
    assert trained + (2048 + 1) * 1000 == 25_557_032


def test_resnet50_takes_resnet18s_options():
    options = {"stem": "imagenet", "norm": "batch", "groups": 8, "init": "flax"}
    assert MODELS["resnet50"](**options) == MODELS["resnet18"](**options).clone(blocks=(3, 4, 6, 3), block=Bottleneck)
    assert MODELS["resnet50"]() == MODELS["resnet18"]().clone(blocks=(3, 4, 6, 3), block=Bottleneck)


# --- Small ones in NumPy ---------------------------------------------------------------------------------------------


def group_norm(layer, x):
    groups = {4: 4, 6: 2, 16: 4}[x.shape[-1]]
    grouped = x.reshape(*x.shape[:3], groups, -1)
    mean, var = (fn(grouped, axis=(1, 2, 4), keepdims=True) for fn in (np.mean, np.var))
    x = ((grouped - mean) / np.sqrt(var + 1e-5)).reshape(x.shape)
    return x * layer["scale"] + layer["bias"]


def running_norm(layer, x):
    return (x - layer["running_mean"]) / np.sqrt(layer["running_var"] + 1e-5) * layer["scale"] + layer["bias"]


def batch_norm(layer, x):
    """In training, all rows being samples; moves the running statistics."""
    if len(x) < 2:
        return running_norm(layer, x)
    y = running_norm({**layer, "running_mean": x.mean((0, 1, 2)), "running_var": x.var((0, 1, 2))}, x)
    layer["running_mean"] += 0.1 * (x.mean((0, 1, 2)) - layer["running_mean"])
    layer["running_var"] += 0.1 * (x.var((0, 1, 2), ddof=1) - layer["running_var"])
    return y


def pool(x):
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2].max(axis=(4, 5))


def convolved(layer, x, norm, stride=1):
    half = layer["kernel"].shape[0] // 2
    return norm(layer["norm"], convolution(x, layer["kernel"], (half, half))[:, ::stride, ::stride])


def reference(theta, pixels, norm, stem="cifar"):
    """Features and maps of the small network."""
    conv = functools.partial(convolved, norm=norm)

    def block(layer, x, stride):
        y = np.maximum(conv(layer["conv1"], x, stride=stride), 0)
        shortcut = conv(layer["shortcut"], x, stride=stride) if "shortcut" in layer else x
        return np.maximum(conv(layer["conv2"], y) + shortcut, 0)

    x = (pixels / 255 - 0.5) / 0.25
    x = np.maximum(conv(theta["stem"], x, stride=1 if stem == "cifar" else 2), 0)
    x = x if stem == "cifar" else pool(x)
    first = block(theta["stage1_block1"], x, 1)
    second = block(theta["stage2_block1"], first, 2)
    return second.mean((1, 2)), (first, second)


@functools.cache
def drawn(norm, stem="cifar", shape=(10, 13, 3)):
    """The small network and parameters that differ from 0 and 1 everywhere."""
    model = join(small(norm, stem), shape)
    return model, numbers(jax.eval_shape(model.init, KEY))


def numbers(shapes):
    rng = np.random.default_rng(0)
    draw = {"kernel": lambda s: rng.normal(0, 0.3, s), "bias": lambda s: rng.normal(0, 0.3, s)}
    draw["running_mean"] = draw["bias"]

    def leaf(path, leaf):
        return jnp.asarray(draw.get(path[-1].key, lambda s: rng.uniform(0.5, 1.5, s))(leaf.shape), jnp.float32)

    return jax.tree.map_with_path(leaf, shapes)


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


def images(n=5, shape=(10, 13, 3)):
    return np.random.default_rng(1).integers(0, 256, (n, *shape)).astype(np.uint8)


@pytest.mark.parametrize(("norm", "stem"), [("group", "cifar"), ("group", "imagenet"), ("batch", "cifar")])
def test_a_small_one_is_the_same_in_numpy(norm, stem):
    model, params = drawn(norm, stem)
    found = jax.jit(model.features_and_maps)(params["extractor"], jnp.asarray(images()))
    normalise = group_norm if norm == "group" else running_norm
    assert_close(found, reference(to_numpy(params["extractor"]), images(), normalise, stem))
    assert tuple(leaf.shape[1:] for leaf in found[1]) == model.maps


# The shortcut of each is a convolution if its shape changes: 16 outputs of 4 channels, at half the resolution or not.
@pytest.mark.parametrize(("norm", "inputs", "stride"), [("group", 16, 1), ("batch", 6, 1), ("group", 16, 2)])
def test_a_bottleneck_is_the_same_in_numpy(norm, inputs, stride):
    block = Bottleneck(4, stride, functools.partial(ConvNorm, norm=norm, groups=4, init_style="torch"))
    x = np.random.default_rng(2).normal(size=(3, 7, 6, inputs)).astype(np.float32)
    layers = numbers(jax.eval_shape(block.init, KEY, x, None)["params"])
    found = jax.jit(lambda layers, x: block.apply({"params": layers}, x, None))(layers, jnp.asarray(x))
    conv = functools.partial(convolved, norm=group_norm if norm == "group" else running_norm)
    w = to_numpy(layers)
    y = np.maximum(conv(w["conv1"], x), 0)
    y = conv(w["conv3"], np.maximum(conv(w["conv2"], y, stride=stride), 0))
    shortcut = conv(w["shortcut"], x, stride=stride) if (inputs, stride) != (16, 1) else x
    assert ("shortcut" in w) == (shortcut is not x)
    assert_close(found, np.maximum(y + shortcut, 0))


def test_group_normalisation_has_the_epsilon_of_pytorch():
    """Which is all that images of so little contrast are divided by."""
    layer = ConvNorm(4, 1, 1, "group", 4, "torch")
    x = np.random.default_rng(3).normal(0, 1e-4, (2, 3, 3, 4)).astype(np.float32)
    params = {"kernel": jnp.eye(4)[None, None], "norm": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}}
    found = jax.jit(lambda params, x: layer.apply({"params": params}, x, None))(params, jnp.asarray(x))
    np.testing.assert_allclose(found, group_norm(to_numpy(params["norm"]), x.astype(float)), rtol=1e-3, atol=1e-6)


def test_torchs_initialisation_is_that_of_its_resnet():
    params = jax.jit(join(ResNet((48,), (1,), "cifar", "batch", 1, "torch"), (8, 8, 3)).init)(KEY)
    for name, leaf in leaves(params["extractor"]).items():
        if "kernel" in name:
            assert leaf.std() == pytest.approx((2 / (leaf.shape[0] * leaf.shape[1] * leaf.shape[3])) ** 0.5, rel=0.1)
        else:
            np.testing.assert_array_equal(leaf, 1.0 if name.endswith(("['scale']", "['running_var']")) else 0.0)


def test_flax_draws_every_convolution_by_its_fan_in():
    init = ResNet((48,), (1,), "cifar", "group", 4, "flax").init
    # This generator of random numbers takes a fraction of the others' time to compile.
    params = jax.jit(init)(jax.random.key(0, impl="rbg"), jnp.zeros((1, 8, 8, 3)))["params"]
    kernels = [np.asarray(leaf) for name, leaf in leaves(params).items() if "kernel" in name]
    assert len(kernels) == 3
    for kernel in kernels:
        assert kernel.std() == pytest.approx(np.prod(kernel.shape[:-1]) ** -0.5, rel=0.1)


# --- Batch normalisation in a round ----------------------------------------------------------------------------------


def test_statistics_are_trained_on_samples_alone_and_averaged_as_the_extractor_is(federation):
    """One step per client, so that NumPy needs no gradient: loss, statistics, one lone sample, padding everywhere."""
    model, params = drawn("batch", shape=(4, 4, 1))
    engine = Engine(fedavg(model._replace(init=lambda key: params), TRAIN), 7)

    @jax.jit
    def one_round():
        return engine.round(KEY, T0, engine.init(KEY, federation), jnp.array(True), federation)

    run = one_round()
    weights, losses, statistics = np.asarray(federation.train.count), [], []
    for i in range(7):
        w, rows = to_numpy(params), held(federation.train, i)
        z, _ = reference(w["extractor"], np.asarray(federation.x)[rows], batch_norm)
        losses.append(softmax_loss(linear(w["head"], z), np.asarray(federation.y)[rows])[0])
        statistics.append(leaves(w["extractor"]))
    assert weights.min() == 1
    assert float(run.loss) == pytest.approx(np.mean(losses), rel=1e-4)
    before = leaves(params["extractor"])
    for name, found in leaves(run.state.server["extractor"]).items():
        assert np.isfinite(found).all()
        assert not np.allclose(found, before[name], rtol=1e-3)
        if "running" in name:
            expected = np.average([own[name] for own in statistics], axis=0, weights=weights)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(run.post.test.loss).all()


def test_fedavg_trains_all_eighteen_layers(federation):
    """Traced, not compiled; tests/test_conformance.py trains a small one by every method."""
    engine = Engine(fedavg(join(MODELS["resnet18"](), (4, 4, 1)), TRAIN), 7)
    run = jax.eval_shape(engine.init, KEY, federation)
    assert jax.eval_shape(engine.round, KEY, T0, run, jnp.array(True), federation) == run
