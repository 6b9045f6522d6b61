"""Convolution with fewer multiplications, by Fourier transforms: for CPUs, where arithmetic limits a 5x5 kernel.

The product of two polynomials with ``outputs`` and ``taps`` coefficients has n = ``outputs`` + ``taps`` - 1
coefficients, and n points determine it: evaluate both factors at the points, multiply, interpolate. At roots of unity
this is the Fourier transform, whose rounding is no worse than that of the direct sum. A pair of conjugate roots takes
three real multiplications (Gauss) and a real root takes one, about 3 n / 2 in total, the ``rank``. Transposed, it is a
kernel that slides over the n values of a row (Winograd, Arithmetic Complexity of Computations, 1980),

    y = outputs @ ((taps @ kernel) * (points @ x)),     y [outputs], kernel [taps], x [n],

with three constant real matrices. Images use it along both axes, in tiles if there are many channels. The products of
one pair of points, summed over channels, are a matrix product, [tiles, inputs] times [inputs, outputs]. A 5x5 kernel on
14x14 pixels takes 400 products per pair of channels (576 in four tiles) instead of 2500. Both gradients have the same
form with transposed matrices.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# The size, in elements, of the largest transformed kernel that stays in the cache between its uses.
_CACHED = 2**19
# The ratio of multiplications (direct / transform) above which the transform is faster (measured); it is above 1,
# because the transform's multiplications are in smaller matrix products, the smallest where channels are few.
_WINNING_RATIO = 1.5
_WINNING_RATIO_OF_FEW = 1.75
_FEW_CHANNELS = 31

KernelShape = tuple[int, ...]  # height, width, inputs, outputs


class _Algorithm(NamedTuple):
    """The matrices of one dimension, float64 in NumPy."""

    points: Float[np.ndarray, "rank n"]
    taps: Float[np.ndarray, "rank taps"]
    outputs: Float[np.ndarray, "outputs rank"]


@functools.cache
def _algorithm(outputs: int, taps: int) -> _Algorithm:
    """Correlation as the transpose of the product of two polynomials (``outputs`` and ``taps`` coefficients)."""
    n = outputs + taps - 1
    # An odd number of points is an even number of roots and infinity, where a polynomial is its leading coefficient.
    infinity = n % 2 == 1 and n > 1
    roots = n - infinity
    angle = 2 * np.pi / roots * np.outer(np.arange(roots // 2 + 1), np.arange(n))
    cos, sin = np.cos(angle), np.sin(angle)
    alone = 2 * np.arange(roots // 2 + 1) % roots == 0  # real roots; each of the others stands for its conjugate too
    pairs = ~alone

    def evaluate(terms: int) -> np.ndarray:
        real, imaginary = cos[:, :terms], -sin[:, :terms]
        last = np.eye(terms)[[-1] * infinity]
        return np.concatenate([real[alone], real[pairs], imaginary[pairs], (real + imaginary)[pairs], last])

    # From p = Re A Re B, q = Im A Im B and s = (Re A + Im A)(Re B + Im B) follows AB = (p - q) + i (s - p - q). Back
    # from the roots, a coefficient is the sum of (cos Re AB - sin Im AB) / roots, twice that for the pairs.
    c, s = cos[:, :roots], sin[:, :roots]
    back = np.concatenate([c[alone], 2 * (c + s)[pairs], 2 * (s - c)[pairs], -2 * s[pairs]]) / roots
    interpolate = np.zeros((len(back) + infinity, n))
    interpolate[: len(back), :roots] = back
    if infinity:  # the leading coefficient wrapped around to the constant one
        interpolate[-1, -1], interpolate[-1, 0] = 1, -1
    return _Algorithm(interpolate, evaluate(taps), evaluate(outputs).T)


def _rank(n: int) -> int:
    """Products for n points, in closed form: n real coefficients take about 3 n / 2."""
    return max(1, 3 * (n // 2) - (n % 2 == 0))


def _tiles(outputs: Sequence[int], kernel: KernelShape) -> list[tuple[int, int]]:
    """(tiles, outputs of each) down and across: the fewest whose transformed kernels stay in the cache."""
    taps, channels = kernel[:2], kernel[2:]
    for most in range(1, max(outputs) + 1):
        sizes = [-(-m // most) for m in outputs]
        ranks = [_rank(size + k - 1) for size, k in zip(sizes, taps, strict=True)]
        if math.prod(ranks) * math.prod(channels) <= _CACHED:
            break
    return [(-(-m // size), size) for m, size in zip(outputs, sizes, strict=True)]


def is_faster_than_direct(batch: int, pixels: tuple[int, int], kernel: KernelShape) -> bool:
    """Whether the transform is faster than direct convolution, by all multiplications of one direction.

    Args:
      batch: images.
      pixels: height and width, padding included.
      kernel: its shape.
    """
    taps, inputs, outputs = kernel[:2], kernel[2], kernel[3]
    height, width = (n - k + 1 for n, k in zip(pixels, taps, strict=True))
    (down, stride), (across, step) = _tiles((height, width), kernel)
    n, n2 = stride + taps[0] - 1, step + taps[1] - 1
    rank, rank2 = _rank(n), _rank(n2)

    def transform(n: int, n2: int) -> int:
        """Between n x n2 numbers and rank x rank2 points, columns first."""
        return n * n2 * rank2 + n * rank2 * rank

    tile = rank * rank2 * inputs * outputs + transform(n, n2) * (inputs + outputs)
    ours = batch * down * across * tile + transform(*taps) * inputs * outputs
    winning = _WINNING_RATIO_OF_FEW if min(inputs, outputs) <= _FEW_CHANNELS else _WINNING_RATIO
    return batch * height * width * math.prod(kernel) >= winning * ours


class FourierConv:
    """The three products of a stride-1 convolution, for one size of image and kernel.

    Args:
      pixels: height and width, padding included.
      kernel: its shape.
      pads: ((top, bottom), (left, right)) zeros around the images given.
    """

    def __init__(self, pixels: tuple[int, int], kernel: KernelShape, pads: tuple[tuple[int, int], tuple[int, int]]):
        taps = kernel[0], kernel[1]
        height, width = (n - k + 1 for n, k in zip(pixels, taps, strict=True))
        (count, stride), (columns, step) = _tiles((height, width), kernel)
        down, across = _algorithm(stride, taps[0]), _algorithm(step, taps[1])
        (top, bottom), (left, right) = pads
        beyond = count * stride - height  # the last tile may be larger than what is left for it
        points = _blocks(across.points, columns, step)[:, left : pixels[1] - right]
        outputs = _blocks(across.outputs.T, columns, step)[:, :width]
        self._taps = down.taps, across.taps
        self._inputs = _Side(count, columns, stride, (top, bottom + beyond), down.points, points)
        self._outputs = _Side(count, columns, stride, (0, beyond), down.outputs.T, outputs)

    def output(self, x: Float[Array, "b h w c"], kernel: Float[Array, "kh kw c o"]) -> Float[Array, "b h2 w2 o"]:
        """The kernel on the images."""
        return self._outputs.contract(self._inputs.expand(x) @ _transform(self._taps, kernel), len(x))

    def input_gradient(
        self, dy: Float[Array, "b h2 w2 o"], kernel: Float[Array, "kh kw c o"]
    ) -> Float[Array, "b h w c"]:
        """The images' gradient from the outputs'."""
        kernel = _transform(self._taps, kernel.transpose(0, 1, 3, 2))
        return self._inputs.contract(self._outputs.expand(dy) @ kernel, len(dy))

    def kernel_gradient(self, x: Float[Array, "b h w c"], dy: Float[Array, "b h2 w2 o"]) -> Float[Array, "kh kw c o"]:
        """The kernel's gradient from the outputs'."""
        products = self._inputs.expand(x, channels_first=True) @ self._outputs.expand(dy)
        return _transform([matrix.T for matrix in self._taps], products)


def _blocks(matrix: Float[np.ndarray, "rank n"], tiles: int, step: int) -> Float[np.ndarray, "rank_tiles width"]:
    """The matrix on every tile of a row, tiles beginning ``step`` apart; the tile is the faster index of the result."""
    rank, n = matrix.shape
    blocks = np.zeros((rank, tiles, (tiles - 1) * step + n))
    for tile in range(tiles):
        blocks[:, tile, tile * step : tile * step + n] = matrix
    return blocks.reshape(rank * tiles, -1)


class _Side(NamedTuple):
    """How the images on one side of a convolution are cut into tiles and transformed.

    All contractions are plain matrix products of operands as they lie in memory: XLA would copy them for others, and
    compute what comes before in the order of the copy.

    Attributes:
      down: tiles in a column of tiles.
      across: tiles in a row of tiles.
      stride: rows from one tile to the next.
      pads: rows of zeros above and below.
      rows: transforms the rows of a tile.
      columns: transforms the columns of an image, all its tiles at once.
    """

    down: int
    across: int
    stride: int
    pads: tuple[int, int]
    rows: Float[np.ndarray, "rank n"]
    columns: Float[np.ndarray, "rank2_across width"]

    def expand(self, x: Float[Array, "b h w c"], *, channels_first: bool = False) -> Float[Array, "rank rank2 _ _"]:
        """The points of all tiles, [rank, rank2, down x across x b, c], or the last two exchanged."""
        batch, height, _, channels = x.shape
        y = jnp.broadcast_to(jnp.asarray(self.columns, x.dtype), (batch, height, *self.columns.shape)) @ x
        y = y.reshape(batch, height, -1, self.across, channels)
        y = y.transpose(1, 2, 4, 3, 0) if channels_first else y.transpose(1, 2, 3, 0, 4)
        y = jnp.pad(y, (self.pads, *[(0, 0)] * 4))
        rank, n = self.rows.shape
        tiles = [y[tile * self.stride : tile * self.stride + n] for tile in range(self.down)]
        y = jnp.stack(tiles, axis=3 if channels_first else 2)
        merged = (channels, -1) if channels_first else (-1, channels)
        return (jnp.asarray(self.rows, x.dtype) @ y.reshape(n, -1)).reshape(rank, y.shape[1], *merged)

    def contract(self, points: Float[Array, "rank rank2 _ c"], batch: int) -> Float[Array, "b h w c"]:
        """The transpose of ``expand``: what tiles share is added up."""
        rank, n = self.rows.shape
        y = jnp.asarray(self.rows.T, points.dtype) @ points.reshape(rank, -1)
        y = y.reshape(n, points.shape[1], self.down, self.across, batch, -1)
        height = (self.down - 1) * self.stride + n
        starts = [tile * self.stride for tile in range(self.down)]
        x = functools.reduce(
            jnp.add,
            [jnp.pad(y[:, :, t], ((start, height - n - start), *[(0, 0)] * 4)) for t, start in enumerate(starts)],
        )
        x = x[self.pads[0] : height - self.pads[1]].transpose(3, 0, 1, 2, 4)
        x = x.reshape(batch, x.shape[1], -1, x.shape[-1])
        columns = jnp.asarray(self.columns.T, x.dtype)
        return jnp.broadcast_to(columns, (*x.shape[:2], *columns.shape)) @ x


def _transform(matrices: Sequence[np.ndarray], x: Float[Array, "h w a b"]) -> Float[Array, "h2 w2 a b"]:
    """One matrix on the rows, one on the columns."""
    rows, columns = (jnp.asarray(matrix, x.dtype) for matrix in matrices)
    y = (rows @ x.reshape(x.shape[0], -1)).reshape(len(rows), x.shape[1], -1)
    y = jnp.broadcast_to(columns, (len(rows), *columns.shape)) @ y
    return y.reshape(*y.shape[:2], *x.shape[2:])
