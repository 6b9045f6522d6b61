"""Convolutions as matrix products of patches (the receptive fields of the output pixels), in all three directions.

A patch may serve several neighbouring output columns, each with its own channels. It is then written and read once for
all of them, at the price of products with the zeros of a wider kernel, which holds their kernels side by side.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Pads = tuple[tuple[int, int], tuple[int, int]]
Images = Float[Array, "batch height width inputs"]
Maps = Float[Array, "batch height2 width2 outputs"]
Kernel = Float[Array, "kh kw inputs outputs"]

# The work of a GPU during the time of reading one number, and of one launch, by the figures of an H200.
_PRODUCTS_PER_NUMBER = 120  # multiplications and additions in tensorfloat32
_LAUNCH = 4_000_000  # numbers read
_ALIGNED = 4  # numbers that a GPU reads at once


def takes_one_column() -> bool:
    """Whether each patch serves one output column, as in float32, where products take longer than reading."""
    # JAX adds the attribute when it starts.
    return jax.config.jax_default_matmul_precision in ("float32", "highest")  # type: ignore[attr-defined]


def columns_on_a_gpu(rows: int, width: int, kernel: tuple[int, ...], strides: tuple[int, int]) -> int:
    """The number of output columns that a GPU computes from one patch: the fastest by estimate.

    A patch for several columns is written and read once for all of them, at the price of products with the zeros of the
    wider kernel.

    Args:
      rows: number of output rows, of all images of all clients.
      width: number of output columns of each image.
      kernel: kh, kw, inputs, outputs.
      strides: vertical and horizontal step.
    """
    kh, kw, inputs, outputs = kernel
    if strides[1] > 1 or takes_one_column():
        return 1

    def cost(columns: int) -> float:
        """In numbers that are read meanwhile: the patches, their three products, and making the wider kernel."""
        patch = kh * (columns + kw - 1) * inputs
        patches = rows * width // columns * patch
        product = max(patches + rows * width * outputs, patches * columns * outputs / _PRODUCTS_PER_NUMBER)
        making = 2 * _LAUNCH if columns > 1 else 0
        return float(max(patches, _LAUNCH) + 3 * max(product, _LAUNCH) + making)

    return min((columns for columns in range(1, width + 1) if width % columns == 0), key=cost)


def output(x: Images, kernel: Kernel, strides: tuple[int, int], pads: Pads, *, columns: int = 1) -> Maps:
    """The convolution; each patch serves ``columns`` output columns, a divisor of their number. So in the gradients."""
    kh, kw = kernel.shape[:2]
    y = _patches(x, (kh, kw), strides, pads, columns) @ _flat(kernel, columns)
    return y.reshape(*y.shape[:2], y.shape[2] * columns, -1)


def kernel_gradient(
    x: Images, dy: Maps, strides: tuple[int, int], pads: Pads, size: tuple[int, int], *, columns: int = 1
) -> Kernel:
    """The gradient of a kernel of this size: patches times the cotangent."""
    return _kernel_and_bias_gradient(x, dy, strides, pads, size, columns)[0]


def kernel_and_bias_gradient(
    x: Images, dy: Maps, pads: Pads, size: tuple[int, int], *, columns: int
) -> tuple[Kernel, Float[Array, " outputs"]]:
    """The same, and the cotangent's sum over pixels, from one product; for several columns."""
    kernel, last = _kernel_and_bias_gradient(x, dy, (1, 1), pads, size, columns)
    return kernel, jnp.sum(last.reshape(columns, -1), axis=0)


def _kernel_and_bias_gradient(
    x: Images, dy: Maps, strides: tuple[int, int], pads: Pads, size: tuple[int, int], columns: int
) -> tuple[Kernel, Float[Array, " columns_outputs"]]:
    """The kernel's gradient; and, with several columns, the cotangent's sums, from the ones that end the patches."""
    (kh, kw), inputs, outputs = size, x.shape[-1], dy.shape[-1]
    reach = kw + columns - 1
    wide = jnp.einsum("bhwt,bhwo->to", _patches(x, size, strides, pads, columns), _together(dy, columns))
    taps = kh * reach * inputs
    kernels = wide[:taps].reshape(kh, reach, inputs, columns * outputs)
    parts = [kernels[:, i : i + kw, :, i * outputs : (i + 1) * outputs] for i in range(columns)]
    return functools.reduce(jnp.add, parts), wide[taps : taps + 1].reshape(-1)


def input_gradient(
    dy: Maps, kernel: Kernel, pixels: tuple[int, int], strides: tuple[int, int], pads: Pads, *, columns: int = 1
) -> Images:
    """The gradient of images of so many pixels: each output pixel's is added back to those of its receptive field."""
    fields = _together(dy, columns) @ _flat(kernel, columns).T
    (kh, kw, inputs), strides = kernel.shape[:3], (strides[0], columns * strides[1])
    kw += columns - 1
    (top, bottom), (left, right) = pads
    height, width = pixels[0] + top + bottom, pixels[1] + left + right
    reach = [(n - 1) * stride + 1 for n, stride in zip(fields.shape[1:3], strides, strict=True)]
    zero = jnp.zeros((), dy.dtype)
    dx = jnp.zeros((dy.shape[0], height, width, inputs), dy.dtype)
    for i in range(kh):
        for j in range(kw):
            tap = fields[..., (i * kw + j) * inputs :][..., :inputs]
            vertical = (i, height - reach[0] - i, strides[0] - 1)
            horizontal = (j, width - reach[1] - j, strides[1] - 1)
            dx = dx + lax.pad(tap, zero, ((0, 0, 0), vertical, horizontal, (0, 0, 0)))
    return dx[:, top : height - bottom, left : width - right]


def pad(x: Images, pads: Pads) -> Float[Array, "batch padded_height padded_width inputs"]:
    """The images with a border of zeros."""
    return jnp.pad(x, ((0, 0), *pads, (0, 0))) if any(sum(pads, ())) else x


def _patches(
    x: Images, size: tuple[int, int], strides: tuple[int, int], pads: Pads, columns: int
) -> Float[Array, "batch h w taps"]:
    """The receptive field of every output pixel, or of several columns, its values in the kernel's order.

    Under several columns a one follows, whose row in the product with a cotangent is the sum that a bias wants, and
    zeros up to a multiple of `_ALIGNED`.
    """
    size, strides = (size[0], size[1] + columns - 1), (strides[0], columns * strides[1])
    x = pad(x, pads)
    height = x.shape[1] - size[0] + 1
    width = x.shape[2] - size[1] + 1
    taps = [
        x[:, i : i + height : strides[0], j : j + width : strides[1]] for i in range(size[0]) for j in range(size[1])
    ]
    if columns > 1:
        one = jnp.arange(_ALIGNED - size[0] * size[1] * x.shape[-1] % _ALIGNED) == 0
        taps.append(jnp.broadcast_to(one.astype(x.dtype), (*taps[0].shape[:-1], len(one))))
    patches = jnp.concatenate(taps, axis=-1)
    if size == (1, 1) and strides != (1, 1):
        # XLA's fusion of products aborts on a strided slice within a GPU's (openxla/xla issue 47381).
        patches = lax.platform_dependent(patches, cpu=lambda x: x, default=lax.optimization_barrier)
    return patches


def _flat(kernel: Kernel, columns: int) -> Float[Array, "taps columns_outputs"]:
    """The kernel as a matrix: one shifted copy per column, side by side, and zeros for what `_patches` appends."""
    zero, outputs = jnp.zeros((), kernel.dtype), kernel.shape[3]

    def placed(column: int) -> Array:
        right = columns - 1 - column
        return lax.pad(kernel, zero, ((0, 0, 0), (column, right, 0), (0, 0, 0), (column * outputs, right * outputs, 0)))

    # A sum, and not a concatenation, is one kernel.
    wide = functools.reduce(jnp.add, map(placed, range(columns))) if columns > 1 else kernel
    flat = wide.reshape(-1, columns * outputs)
    more = _ALIGNED - len(flat) % _ALIGNED if columns > 1 else 0
    return lax.pad(flat, zero, ((0, more, 0), (0, 0, 0)))


def _together(dy: Maps, columns: int) -> Float[Array, "batch height blocks columns_outputs"]:
    """Joins every ``columns`` neighbouring columns into one, which has the channels of all of them."""
    return dy.reshape(*dy.shape[:2], dy.shape[2] // columns, -1)
