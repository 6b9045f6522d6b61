"""conv2d against autodiff of lax.conv_general_dilated, alone and under vmap; pooling against reduce_window."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pfl.models import conv, patches
from fedjax_pfl.models.conv import conv2d, conv_pool2x2, max_pool2x2, max_pool3x3


def reference(x, kernel, strides=(1, 1), padding="VALID"):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def value_and_gradients(way, x, kernel, weight):
    """The output, and both gradients of its product with a random weight."""
    y, pullback = jax.vjp(way, x, kernel)
    return y, *pullback(weight)


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


# image (height, width, inputs), kernel (height, width), strides, padding
CASES = [
    ((9, 8, 1), (5, 5), (1, 1), "VALID"),
    ((9, 8, 6), (5, 5), (1, 1), "VALID"),
    ((8, 8, 3), (3, 3), (1, 1), "SAME"),
    ((7, 7, 5), (3, 3), (1, 1), "SAME"),
    ((7, 7, 6), (2, 2), (1, 1), "SAME"),
    ((7, 9, 6), (4, 2), (1, 1), "VALID"),
    ((6, 5, 8), (1, 1), (1, 1), "VALID"),
    ((6, 5, 2), (1, 1), (2, 2), "SAME"),
    ((9, 9, 6), (3, 3), (2, 2), "SAME"),
    ((8, 11, 6), (3, 3), (2, 2), "VALID"),
    ((8, 8, 3), (3, 3), (2, 2), "SAME"),
    ((9, 7, 5), (3, 2), (1, 2), "SAME"),
    ((8, 9, 2), (2, 3), (1, 2), "VALID"),
    ((7, 8, 6), (3, 3), (1, 1), ((1, 1), (1, 1))),
    ((7, 8, 6), (3, 3), (1, 2), ((0, 2), (1, 0))),
    ((6, 7, 1), (4, 5), (2, 1), ((2, 1), (0, 3))),
    ((8, 9, 6), (3, 3), (2, 2), ((1, 1), (1, 1))),
    ((9, 10, 3), (7, 7), (2, 2), ((3, 3), (3, 3))),
    ((7, 8, 6), (1, 1), (2, 2), "VALID"),
    ((6, 7, 3), (5, 3), (1, 1), "VALID"),
    ((6, 11, 3), (5, 3), (1, 1), "VALID"),
    # more channels than are few
    ((9, 8, 9), (5, 5), (1, 1), "VALID"),
    ((7, 7, 9), (3, 3), (1, 1), "SAME"),
    ((8, 9, 9), (3, 3), (2, 2), "SAME"),
]


def near(found, expected):
    """Up to the rounding of a direct sum, relative to the largest entry: small ones are differences of large terms."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


def check(image, size, strides, padding, agree=assert_close):
    x, kernel = draw(2, *image), draw(*size, image[-1], 7, seed=1)
    settings = {"strides": strides, "padding": padding}
    weight = draw(*jax.eval_shape(functools.partial(reference, **settings), x, kernel).shape, seed=2)

    @jax.jit
    def both(x, kernel, weight):
        ways = functools.partial(conv2d, **settings), functools.partial(reference, **settings)
        return [value_and_gradients(way, x, kernel, weight) for way in ways]

    agree(*both(x, kernel, weight))


@pytest.mark.parametrize(("image", "size", "strides", "padding"), CASES)
def test_value_and_gradients_are_those_of_lax_conv(image, size, strides, padding):
    check(image, size, strides, padding)


@pytest.mark.parametrize(
    ("image", "size", "strides", "padding"), [case for case in CASES if case[0][-1] <= 8 and case[2] == (1, 1)]
)
def test_the_kernels_gradient_in_blocks(image, size, strides, padding, monkeypatch):
    monkeypatch.setattr(conv, "_FASTER_BY_BLOCKS", 0)
    check(image, size, strides, padding, agree=near)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="blocks are for CPUs")
def test_blocks_are_for_many_images_and_outputs():
    gradient = jax.jit(conv._kernel_gradient_op((1, 1), ((0, 0), (0, 0)), (5, 5)))

    def loops(outputs):
        return "while(" in gradient.lower(draw(10, 8, 8, 3), draw(10, 4, 4, outputs)).as_text("hlo")

    assert loops(32)
    assert not loops(16)


# Which of x and kernel carry the client axis, from the outermost vmap inwards.
BATCHED = {
    "kernels and images": [(0, 0)],
    "a shared kernel": [(0, None)],
    "shared images": [(None, 0)],
    "nested": [(0, 0), (0, 0)],
    "nested, a kernel shared by the inner axis": [(0, 0), (0, None)],
    "nested, a kernel shared by the outer axis": [(0, None), (0, 0)],
    "nested, a shared kernel": [(0, None), (0, None)],
    "nested, images shared by the inner axis": [(0, 0), (None, 0)],
}


def nest(fn, axes):
    for in_axes in reversed(axes):
        fn = jax.vmap(fn, (*in_axes, 0))
    return fn


@pytest.mark.parametrize("inputs", [2, 6])
@pytest.mark.parametrize("name", BATCHED)
def test_the_same_under_vmap(name, inputs):
    axes = BATCHED[name]

    def lead(position):
        return [3 - level for level, in_axes in enumerate(axes) if in_axes[position] == 0]

    x = draw(*lead(0), 2, 6, 7, inputs)
    kernel = draw(*lead(1), 3, 3, inputs, 4, seed=1)
    outer = [3 - level for level in range(len(axes))]
    settings = {"strides": (1, 2), "padding": "SAME"}
    weight = draw(*outer, 2, 6, 4, 4, seed=2)

    @jax.jit
    def both(x, kernel, weight):
        ways = functools.partial(conv2d, **settings), functools.partial(reference, **settings)
        return [nest(functools.partial(value_and_gradients, way), axes)(x, kernel, weight) for way in ways]

    assert_close(*both(x, kernel, weight))


@pytest.mark.parametrize("shared", ["kernel", "images"])
def test_gradients_through_a_vmap_with_one_side_shared(shared):
    """Here the gradient is taken outside, so that the shared side collects it from all clients."""
    in_axes = (0, None) if shared == "kernel" else (None, 0)
    x = draw(*([3] if shared == "kernel" else []), 2, 6, 6, 5)
    kernel = draw(*([3] if shared == "images" else []), 3, 3, 5, 4, seed=1)
    weight = draw(3, 2, 4, 4, 4, seed=2)

    @jax.jit
    def both(x, kernel):
        return [
            jax.grad(lambda x, k, c=c: jnp.sum(jax.vmap(c, in_axes)(x, k) * weight), (0, 1))(x, kernel) for c in ways
        ]

    ways = conv2d, reference
    assert_close(*both(x, kernel))


def test_the_same_inside_a_loop_side_by_side():
    x, start = draw(3, 2, 6, 6, 5), draw(3, 3, 3, 5, 5, seed=1) * 0.2

    def descend(way, x, kernel):
        def step(_, kernel):
            return kernel - 0.01 * jax.grad(lambda k: jnp.mean(jnp.tanh(way(x, k)) ** 2))(kernel)

        return lax.fori_loop(0, 3, step, kernel)

    both = jax.jit(
        lambda x, kernel: [jax.vmap(functools.partial(descend, way))(x, kernel) for way in (conv2d, reference)]
    )
    assert_close(*([result] for result in both(x, start)))
    assert not np.allclose(both(x, start)[0], start, rtol=1e-3)


# --- What a GPU takes in the place of a patch for each output column -------------------------------------------------


@pytest.fixture
def columns_on_a_gpu(monkeypatch):
    """Makes this CPU run what is chosen for a GPU, small as it is, and lists how many columns a patch is for."""
    chosen, choose = [], patches.columns_on_a_gpu
    monkeypatch.setattr(patches, "_LAUNCH", 0)
    monkeypatch.setattr(patches, "columns_on_a_gpu", lambda *shapes: chosen.append(choose(*shapes)) or chosen[-1])
    monkeypatch.setattr(lax, "platform_dependent", lambda *operands, default, **_: default(*operands))
    return chosen


@pytest.mark.parametrize(("image", "size", "strides", "padding"), CASES)
def test_a_gpus_wide_patches_are_the_same(image, size, strides, padding, columns_on_a_gpu):
    settings = {"strides": strides, "padding": padding}
    x, kernel = draw(3, 2, *image), draw(3, *size, image[-1], 7, seed=1)
    ways = [jax.vmap(functools.partial(way, **settings)) for way in (conv2d, reference)]
    weight = draw(*jax.eval_shape(ways[1], x, kernel).shape, seed=2)
    near(*jax.jit(lambda *operands: [value_and_gradients(way, *operands) for way in ways])(x, kernel, weight))
    assert len(set(columns_on_a_gpu)) == 1, "forward and backward share their patches"
    assert (columns_on_a_gpu[0] > 1) == (strides[1] == 1 and size[1] > 1)
    assert weight.shape[3] % columns_on_a_gpu[0] == 0


@pytest.mark.parametrize(("precision", "platform", "patch"), [
    ("tensorfloat32", "cuda", 5 * (7 + 4) * 3 + 3),  # of the three, the first is the bias's
    ("bfloat16", "cuda", 5 * (7 + 4) * 3 + 3),
    ("float32", "cuda", 5 * 5 * 3),
    ("tensorfloat32", "cpu", 5 * 5 * 3),
])  # fmt: skip
def test_patches_are_wide_where_a_gpus_products_are_fast(precision, platform, patch):
    """The first layer of `cnn2`, 20 clients with batches of 10."""
    x, kernel = jnp.zeros((20, 10, 32, 32, 3)), jnp.zeros((20, 5, 5, 3, 32))
    with jax.default_matmul_precision(precision):
        lowered = jax.jit(jax.vmap(conv2d)).trace(x, kernel).lower(lowering_platforms=(platform,))
    assert f"x{patch}xf32" in lowered.as_text()


def test_patches_are_narrow_where_a_launch_takes_longer_than_they_do():
    shape = 28, (5, 5, 3, 16), (1, 1)
    assert patches.columns_on_a_gpu(20 * 10 * 28, *shape) > 1
    assert patches.columns_on_a_gpu(28, *shape) == 1


@pytest.mark.parametrize("launch", [0, 4_000_000])
def test_a_bias_whose_gradient_comes_with_the_kernels_is_the_same(launch, columns_on_a_gpu, monkeypatch):
    monkeypatch.setattr(patches, "_LAUNCH", launch)
    images, kernels, biases = draw(3, 2, 9, 10, 4), draw(3, 3, 3, 4, 7, seed=1) / 6, draw(3, 7, seed=2)
    sought = draw(3, 2, 4, 5, 7, seed=3)

    def usual(x, kernel, bias):
        return max_pool2x2(reference(x, kernel, padding="SAME")) + bias

    def value_and_two_gradients(way):
        def loss(operands, sought):
            return jnp.sum(jnp.tanh(way(*operands)) * sought)

        def slope(operands, sought):  # a gradient of a gradient, as where images are sought that have given gradients
            return sum(jnp.sum(leaf**2) for leaf in jax.grad(loss)(operands, sought))

        return jax.vmap(lambda *operands: (loss(*operands), jax.grad(loss)(*operands), jax.grad(slope)(*operands)))

    ways = functools.partial(conv_pool2x2, padding=1), usual
    both = jax.jit(lambda *operands: [value_and_two_gradients(way)(*operands) for way in ways])
    found, expected = both((images, kernels, biases), sought)
    near(jax.tree.leaves(found), jax.tree.leaves(expected))
    assert {columns > 1 for columns in columns_on_a_gpu} == {launch == 0}


@pytest.mark.parametrize(("precision", "platform", "sums"), [
    ("tensorfloat32", "cuda", 0),
    ("float32", "cuda", 1),
    ("tensorfloat32", "cpu", 1),
])  # fmt: skip
def test_a_gpu_sums_no_map_for_the_bias(precision, platform, sums):
    """The first layer of `cnn2`, 20 clients with batches of 10: to sum a cotangent's pixels takes a launch."""
    shapes = (20, 10, 32, 32, 3), (20, 5, 5, 3, 32), (20, 32), (20, 10, 14, 14, 32)
    x, kernel, bias, dy = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def gradients(x, kernel, bias, dy):
        return jax.vjp(lambda *operands: conv_pool2x2(*operands, padding=0), x, kernel, bias)[1](dy)[1:]

    with jax.default_matmul_precision(precision):
        traced = jax.jit(jax.vmap(gradients)).trace(x, kernel, bias, dy)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert len(re.findall(r"stablehlo.reduce\(.*tensor<20x10x\d+x\d+x32xf32>", text)) == sums


# --- What a TPU takes in the place of patches and slices -------------------------------------------------------------


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """Makes this CPU run what is chosen for a TPU, and counts how often it is."""
    chosen = []

    def for_a_tpu(*operands, default, tpu=None, cpu=None):
        chosen.append(tpu is not None)
        return (tpu or default)(*operands)

    monkeypatch.setattr(lax, "platform_dependent", for_a_tpu)
    return chosen


@pytest.mark.parametrize("name", BATCHED)
def test_a_tpus_grouped_convolutions_are_the_same_under_vmap(name, as_on_a_tpu):
    test_the_same_under_vmap(name, 3)
    assert sum(as_on_a_tpu) >= 2


def test_a_tpu_takes_the_clients_of_several_runs_for_so_many_clients():
    """And not for one more axis, by which arrays would be laid out and copied."""

    def lowered(way, *sizes):
        x, kernel, weight = draw(*sizes, 2, 6, 6, 3), draw(*sizes, 3, 3, 3, 4, seed=1), draw(*sizes, 2, 4, 4, 4, seed=2)
        for _ in sizes:
            way = jax.vmap(way)
        text = jax.jit(way).trace(x, kernel, weight).lower(lowering_platforms=("tpu",)).as_text()
        return [text.count(operation) for operation in ("transpose", "feature_group_count = 6 ", "convolution")]

    way = functools.partial(value_and_gradients, conv2d)
    assert lowered(way, 2, 3) == lowered(way, 6)
    assert lowered(way, 6)[1] >= 2, "forward and the input's gradient"


def test_a_tpus_pooling_is_the_maximum_of_the_slices(as_on_a_tpu, monkeypatch):
    x = draw(2, 6, 9, 3)
    found = [jax.vjp(pool, x) for pool in (max_pool2x2, max_pool3x3)]
    assert as_on_a_tpu == [True, True]
    monkeypatch.undo()
    for (y, pull), pool in zip(found, (max_pool2x2, max_pool3x3), strict=True):
        expected, pulled = jax.vjp(pool, x)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_allclose(pull(y)[0], pulled(y)[0], rtol=1e-5)


# --- Pooling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (2, 5, 7, 3), (1, 3, 2, 1), (1, 2, 3, 2)])
def test_pooling_takes_the_maximum_of_each_square(shape):
    x = draw(*shape)
    batch, height, width, channels = shape
    squares = np.asarray(x)[:, : height // 2 * 2, : width // 2 * 2]
    squares = squares.reshape(batch, height // 2, 2, width // 2, 2, channels)
    np.testing.assert_array_equal(max_pool2x2(x), squares.max(axis=(2, 4)))


@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (2, 5, 7, 3)])
def test_the_gradient_of_pooling_is_reduce_windows(shape):
    x = draw(*shape)

    def window(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    weight = draw(*window(x).shape, seed=1)
    found, expected = (jax.grad(lambda x, p=p: jnp.sum(p(x) * weight))(x) for p in (max_pool2x2, window))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (np.asarray(found) != 0).sum() == weight.size


@pytest.mark.parametrize("shape", [(2, 6, 9, 3), (2, 5, 8, 2), (1, 1, 2, 1)])
def test_overlapping_pooling_and_its_gradient_are_reduce_windows(shape):
    x = draw(*shape)

    def window(x):
        border = ((0, 0), (1, 1), (1, 1), (0, 0))
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), border)

    weight = draw(*window(x).shape, seed=1)

    def value_and_gradient(pool):
        def both(x, weight):
            y, back = jax.vjp(pool, x)
            return y, back(weight)[0]

        return jax.jit(both)(x, weight)

    found, expected = map(value_and_gradient, (max_pool3x3, window))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
