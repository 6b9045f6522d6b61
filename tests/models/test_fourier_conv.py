"""FourierConv against lax.conv and its autodiff gradients, and where conv2d takes its way."""

import functools

import jax
import numpy as np
import pytest
from jax import lax

from fedjax_pfl.models import fourier_conv
from fedjax_pfl.models.conv import conv2d
from fedjax_pfl.models.fourier_conv import FourierConv, _algorithm, _rank, _tiles, is_faster_than_direct
from tests.models.test_conv import draw, near, reference, value_and_gradients

# image (height, width), kernel, ((top, bottom), (left, right)); even and odd numbers of points
SIZES = [
    ((14, 14), (5, 5), ((0, 0), (0, 0))),
    ((12, 9), (5, 3), ((0, 0), (0, 0))),
    ((7, 8), (3, 2), ((1, 1), (2, 0))),
    ((5, 6), (5, 1), ((0, 3), (1, 2))),
    ((3, 4), (3, 4), ((0, 0), (0, 0))),
    ((17, 8), (5, 3), ((0, 0), (0, 0))),
    ((9, 14), (3, 3), ((1, 2), (2, 1))),
]


@pytest.mark.parametrize("n", range(1, 19))
def test_one_dimension_is_correlation_in_the_promised_number_of_products(n):
    rng = np.random.default_rng(n)
    for taps in range(1, n + 1):
        x, kernel = rng.normal(size=n), rng.normal(size=taps)
        points, on_taps, outputs = _algorithm(n - taps + 1, taps)
        assert len(points) == len(on_taps) == outputs.shape[1] == _rank(n)
        found = outputs @ ((on_taps @ kernel) * (points @ x))
        np.testing.assert_allclose(found, np.correlate(x, kernel, "valid"), atol=1e-13)


@pytest.mark.parametrize("cached", [2**19, 300], ids=["one tile", "tiles"])
@pytest.mark.parametrize(("image", "taps", "pads"), SIZES)
def test_all_three_products_are_those_of_lax_conv(image, taps, pads, cached, monkeypatch):
    monkeypatch.setattr(fourier_conv, "_CACHED", cached)
    x, kernel = draw(3, *image, 2), draw(*taps, 2, 4, seed=1)
    pixels = image[0] + sum(pads[0]), image[1] + sum(pads[1])
    conv = FourierConv(pixels, (*taps, 2, 4), pads)

    @jax.jit
    def both(x, kernel, seed):
        dy = jax.random.normal(seed, conv.output(x, kernel).shape)
        found = conv.output(x, kernel), conv.input_gradient(dy, kernel), conv.kernel_gradient(x, dy)
        return found, value_and_gradients(functools.partial(reference, padding=pads), x, kernel, dy)

    near(*both(x, kernel, jax.random.key(2)))


def test_tiles_cover_the_outputs_and_their_kernels_fit_the_cache():
    assert _tiles((10, 10), (5, 5, 16, 32)) == [(1, 10), (1, 10)]
    assert _tiles((10, 10), (5, 5, 32, 64)) == [(2, 5), (2, 5)]
    assert _tiles((13, 4), (5, 5, 32, 64)) == [(2, 7), (2, 2)]


def test_it_is_faster_for_large_kernels_on_enough_images():
    assert is_faster_than_direct(10, (14, 14), (5, 5, 32, 64))
    assert is_faster_than_direct(32, (14, 14), (5, 5, 16, 32))
    assert is_faster_than_direct(32, (16, 16), (5, 5, 16, 32))
    assert not is_faster_than_direct(10, (14, 14), (5, 5, 16, 32))
    assert not is_faster_than_direct(10, (16, 16), (5, 5, 16, 32))
    assert not is_faster_than_direct(1, (14, 14), (5, 5, 32, 64))
    assert is_faster_than_direct(32, (8, 8), (3, 3, 32, 64))
    assert not is_faster_than_direct(10, (8, 8), (3, 3, 32, 64))
    assert is_faster_than_direct(10, (16, 16), (3, 3, 32, 64))  # as FedCPD fuses the maps of cnn2
    assert is_faster_than_direct(10, (14, 14), (3, 3, 64, 32))
    assert not is_faster_than_direct(10, (34, 34), (3, 3, 64, 64))
    assert not is_faster_than_direct(32, (32, 32), (1, 1, 64, 64))


# Output and both gradients of a layer that goes this way with 10 images of 14x14 and 32 channels.
layer = functools.partial(value_and_gradients, conv2d)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="FourierConv is for CPUs")
def test_conv2d_takes_this_way_where_it_is_faster():
    x, kernel, dy = draw(10, 14, 14, 32), draw(5, 5, 32, 32, seed=1), draw(10, 10, 10, 32, seed=2)
    compiled = jax.jit(layer).lower(x, kernel, dy).compile()
    assert "convolution(" not in compiled.as_text()
    near(compiled(x, kernel, dy), value_and_gradients(reference, x, kernel, dy))
    few = jax.jit(layer).lower(x[..., :3], kernel[:, :, :3], dy).compile()
    assert "convolution(" in few.as_text()


def test_clients_side_by_side_get_what_they_get_one_by_one():
    x, kernel, dy = draw(2, 10, 14, 14, 32), draw(2, 5, 5, 32, 32, seed=1), draw(2, 10, 10, 10, 32, seed=2)
    together = jax.jit(jax.vmap(layer))(x, kernel, dy)
    alone = jax.jit(lambda *operands: lax.map(lambda operands: layer(*operands), operands))(x, kernel, dy)
    near(together, alone)
