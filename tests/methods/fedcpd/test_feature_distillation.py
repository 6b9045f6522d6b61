"""The distillation of feature maps: its start, and value and gradient against float64 NumPy with plain loops."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.methods.fedcpd.feature_distillation import feature_distillation, init_distiller

# (h, w, c) from the first level to the deepest. Channels grow, as the fusion asks for; sizes do not divide each other.
# From 32 channels on, the reduction by 16 leaves more than the one hidden unit that there is at least.
SHAPES = {"two": ((5, 4, 2), (2, 3, 33)), "three": ((7, 6, 2), (3, 5, 3), (1, 2, 5))}
BATCH, SAMPLES = 4, 3
MASK = (np.arange(BATCH) < SAMPLES).astype(np.float32)


# --- The definition in NumPy -----------------------------------------------------------------------------------------


def convolve(x, kernel):
    """SAME convolution with stride 1, one output pixel after the other."""
    size = len(kernel)
    x = np.pad(x, ((0, 0), (size // 2, size // 2), (size // 2, size // 2), (0, 0)))
    y = np.zeros((len(x), x.shape[1] - size + 1, x.shape[2] - size + 1, kernel.shape[3]))
    for i, j in np.ndindex(y.shape[1:3]):
        y[:, i, j] = np.tensordot(x[:, i : i + size, j : j + size], kernel, axes=3)
    return y


def upsample(x, height, width):
    """Bilinear, between the centres of the pixels; constant beyond the outermost centres."""

    def weights(old, new):
        centres = (np.arange(new) + 0.5) * old / new - 0.5
        return np.array([np.interp(centres, np.arange(old), corner) for corner in np.eye(old)])

    return np.einsum("bhwc,hi,wj->bijc", x, weights(x.shape[1], height), weights(x.shape[2], width))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def cbam(gates, x):
    def mlp(pooled):
        return np.maximum(pooled @ gates["reduce"], 0) @ gates["expand"]

    channel = sigmoid(mlp(x.mean(axis=(1, 2))) + mlp(x.max(axis=(1, 2))))
    x = x * channel[:, None, None]
    return x * sigmoid(convolve(np.stack([x.mean(axis=3), x.max(axis=3)], axis=3), gates["spatial"]))


def fuse(fusions, maps):
    """X* of every level; ``fusions`` and ``maps`` run from the first level to the deepest."""
    fused = []
    for level, (fusion, x) in enumerate(zip(fusions, maps, strict=True)):
        total = convolve(x, fusion["cv1"][None, None]) + convolve(x, fusion["cv3"])
        if level < len(maps) - 1:
            deeper = convolve(maps[level + 1], fusions[level + 1]["cv1"][None, None])
            total = total + upsample(deeper, *x.shape[1:3])
        fused.append(convolve(total, fusion["cv2"]))
    return fused


def refined(distiller, maps):
    return [cbam(level["gates"], x) for level, x in zip(distiller, maps, strict=True)]


def loss(distiller, student, plain_targets, attended_targets):
    """L_fd, given the teacher's F and A."""
    plain = fuse([level["plain"] for level in distiller], student)
    attended = fuse([level["attended"] for level in distiller], refined(distiller, student))
    pairs = zip([*plain, *attended], [*plain_targets, *attended_targets], strict=True)
    return sum(np.mean((fused - target) ** 2) for fused, target in pairs)


# --- Fixtures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def shapes(request):
    return request.param


@pytest.fixture(scope="module")
def start(shapes):
    return jax.jit(init_distiller, static_argnums=1)(jax.random.key(3), shapes)


@pytest.fixture(scope="module")
def case(shapes, start):
    """A distiller, a student and a teacher, all drawn at random."""
    rng = np.random.default_rng(0)

    def draw(leaf):  # of a length that keeps activations near 1, so that no gate saturates
        fan_in = leaf.size // leaf.shape[-1]
        return rng.normal(0, fan_in**-0.5, leaf.shape).astype(np.float32)

    distiller = jax.tree.map(draw, start)
    student, teacher = ([rng.normal(size=(BATCH, *shape)).astype(np.float32) for shape in shapes] for _ in range(2))
    return distiller, student, teacher


@pytest.fixture(scope="module")
def found():
    """distiller, student, teacher -> the loss and its gradients with respect to all three."""
    program = jax.jit(jax.value_and_grad(feature_distillation, (0, 1, 2)))
    return lambda *case: program(*jax.tree.map(jnp.asarray, case), jnp.asarray(MASK))


def samples(*trees):
    """Without the padding, in float64."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64)[:SAMPLES], trees)


def float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


# --- Value and gradient ----------------------------------------------------------------------------------------------


def test_the_loss_is_numpys(found, case):
    distiller, (student, teacher) = float64(case[0]), samples(*case[1:])
    expected = loss(distiller, student, teacher, refined(distiller, teacher))
    np.testing.assert_allclose(found(*case)[0], expected, rtol=1e-4)


def test_gradients_are_those_with_a_constant_teacher(found, case):
    """Of every array in psi and of every map of the student, along a random direction."""
    _, (by_distiller, by_student, by_teacher) = found(*case)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(by_teacher))
    distiller, (student, teacher) = float64(case[0]), samples(*case[1:])
    targets = teacher, refined(distiller, teacher)
    leaves, structure = jax.tree.flatten((distiller, student))
    gradients = jax.tree.leaves((by_distiller, samples(by_student)[0]))
    rng, step = np.random.default_rng(2), 1e-5
    for number, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        direction = rng.normal(size=leaf.shape)
        ends = [leaf + sign * step * direction for sign in (1, -1)]
        moved = [structure.unflatten([*leaves[:number], end, *leaves[number + 1 :]]) for end in ends]
        slope = (loss(*moved[0], *targets) - loss(*moved[1], *targets)) / (2 * step)
        largest = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert np.any(gradient)
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-3, atol=1e-5 * largest)


def test_padding_may_hold_anything_finite(found, case):
    distiller, student, teacher = case
    rng = np.random.default_rng(4)
    other = [[leaf.copy() for leaf in maps] for maps in (student, teacher)]
    for leaf in (*other[0], *other[1]):
        leaf[SAMPLES:] = 1e3 * rng.normal(size=leaf[SAMPLES:].shape)
    (value, (by_distiller, by_student, _)), expected = found(distiller, *other), found(*case)
    jax.tree.map(np.testing.assert_array_equal, (value, by_distiller), (expected[0], expected[1][0]))
    for gradient, before in zip(by_student, expected[1][1], strict=True):
        np.testing.assert_array_equal(gradient[:SAMPLES], before[:SAMPLES])
        assert not np.any(gradient[SAMPLES:])


# --- The start -------------------------------------------------------------------------------------------------------


def test_at_the_start_nothing_is_fused_so_that_a_student_like_its_teacher_costs_nothing(found, start, case):
    _, student, teacher = case
    value, gradients = found(start, student, student)
    assert float(value) == pytest.approx(0, abs=1e-12)
    jax.tree.map(lambda leaf: np.testing.assert_allclose(leaf, 0, atol=1e-6), gradients)
    distiller, (student, teacher) = float64(start), samples(student, teacher)
    pairs = [*zip(student, teacher, strict=True)]
    pairs += zip(refined(distiller, student), refined(distiller, teacher), strict=True)
    expected = sum(np.mean((s - t) ** 2) for s, t in pairs)
    np.testing.assert_allclose(found(start, *case[1:])[0], expected, rtol=1e-5)


def test_at_the_start_every_convolution_of_the_fusion_learns(found, start, case):
    by_distiller = found(start, *case[1:])[1][0]
    for level in by_distiller:
        assert all(np.any(leaf) for leaf in jax.tree.leaves((level["plain"], level["attended"])))


def test_the_weights_are_those_of_the_definition(start, shapes):
    deepest = shapes[-1][2]
    for level, (_, _, channels) in zip(start, shapes, strict=True):
        hidden = max(1, channels // 16)
        gates = {"reduce": (channels, hidden), "expand": (hidden, channels), "spatial": (7, 7, 2, 1)}
        assert {name: leaf.shape for name, leaf in level["gates"].items()} == gates
        assert all(len(np.unique(leaf)) == leaf.size for leaf in level["gates"].values())
        for fusion in (level["plain"], level["attended"]):
            identity = np.zeros((3, 3, channels, deepest))
            identity[1, 1] = np.eye(channels, deepest)
            assert sorted(fusion) == ["cv1", "cv2", "cv3"]
            np.testing.assert_array_equal(fusion["cv1"], np.zeros((channels, deepest)))
            np.testing.assert_array_equal(fusion["cv3"], identity)
            np.testing.assert_array_equal(fusion["cv2"], identity.transpose(0, 1, 3, 2))


def test_gates_are_drawn_for_each_level_anew_by_the_number_of_their_inputs():
    """Uniformly within 1 / sqrt(inputs), as PyTorch does: the channels, the hidden units, a window of two pictures."""
    levels = init_distiller(jax.random.key(4), ((9, 9, 64), (9, 9, 64)))
    inputs = {"reduce": 64, "expand": 64 // 16, "spatial": 2 * 7**2}
    for name, number in inputs.items():
        first, second = (np.ravel(level["gates"][name]) for level in levels)
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.5
        for leaf in (first, second):
            assert 0.9 < np.abs(leaf).max() * number**0.5 <= 1
