"""How a convolution is lowered: the one place that decides.

On a CPU, XLA does not change the memory layout of operands inside a loop body. The gradient convolutions that autodiff
emits (batch and feature axes exchanged) therefore miss its fast path: a training step inside ``lax.scan`` is about
twenty times slower than the same step outside (jax-ml/jax issue 12868). So :func:`conv2d` has its own derivative, in
which every contraction is a channel-last convolution or a matrix product:

- output: ``lax.conv`` on NHWC/HWIO operands. With few input channels (an image), the rows under the kernel are first
  turned into channels, because the inner loop of the direct convolution would be too short;
- gradient of the input: the cotangent times the transposed kernel, one matrix product, whose columns are added back to
  the pixels they came from (for a 5x5 VALID kernel half the arithmetic of convolving the padded cotangent);
- gradient of the kernel: a convolution of the input (channels as batch) with the cotangent as the kernel. With strides
  this convolution would be dilated; then patches of the input times the cotangent, in half the time for ResNet-18. On a
  CPU, with few input channels and many images times outputs: blocks of output columns times the input columns under
  them, image by image;
- a 1x1 kernel is a matrix product in every direction;
- for large kernels with many channels (5x5 in the second layer of the papers' networks), a CPU computes all three
  directions by :class:`FourierConv`, with a quarter to a seventh of the multiplications.

Under ``vmap`` with one kernel per client, the convolutions would become grouped convolutions, which are slow on a CPU.
There and on a GPU, patches and one batched matrix product are used instead. On a GPU whose products are faster than its
memory, one patch serves several output columns, with the kernels of all of them side by side: 2.5 times fewer bytes for
four columns under a 5x5 kernel. On a TPU, patches would be padded from a few channels to 128 lanes; there grouped
convolutions are faster, by 4 to 48 times, in all three directions. A kernel shared by all clients stays one large
convolution. `benchmarks/conv.py` measures all of this against autodiff of ``lax.conv``; `benchmarks/lowerings.py` has
the compilers' estimates.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from fedjax_pfl.models import patches
from fedjax_pfl.models.fourier_conv import FourierConv, is_faster_than_direct
from fedjax_pfl.models.patches import Images, Kernel, Maps, Pads, pad

Padding = Literal["SAME", "VALID"] | Sequence[tuple[int, int]]
Pooled = Float[Array, "batch height2 width2 inputs"]
Bias = Float[Array, " outputs"]

_LAYOUT = ("NHWC", "HWIO", "NHWC")
# Up to this number of input channels, a CPU's direct convolution is faster with rows turned into channels (measured).
_FEW_CHANNELS = 8
# The channels made in this way are padded with zeros to a multiple of this number.
_CHANNEL_MULTIPLE = 8
# The smallest number of columns (outputs) in the product of the kernel's gradient; with fewer, lanes would idle.
_LANES = 16
# The number of output columns per block in the kernel's gradient of a layer with few channels, on a CPU.
_BLOCK = 4
# From this number of images times outputs on, these blocks are faster than the convolution (measured).
_FASTER_BY_BLOCKS = 300


def conv2d(x: Images, kernel: Kernel, *, strides: tuple[int, int] = (1, 1), padding: Padding = "VALID") -> Maps:
    """Convolves channel-last images with a kernel, fast in both directions inside a loop.

    Args:
      x: images, [batch, height, width, inputs].
      kernel: [kh, kw, inputs, outputs].
      strides: vertical and horizontal step.
      padding: ``"SAME"``, ``"VALID"`` or ((top, bottom), (left, right)) in pixels.

    Returns:
      [batch, height', width', outputs], equal to ``lax.conv_general_dilated`` with NHWC, HWIO, NHWC operands.
    """
    if isinstance(padding, str):
        pads = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    else:
        pads = list(padding)
    (top, bottom), (left, right) = pads
    return _conv(x, kernel, tuple(strides), ((top, bottom), (left, right)))


def conv_pool2x2(x: Images, kernel: Kernel, bias: Bias, *, padding: int) -> Maps:
    """``max_pool2x2(conv2d(x, kernel)) + bias``, with ``padding`` pixels on each side.

    If a GPU uses one patch for several output columns, the gradient of the bias comes from the same product as that of
    the kernel. Adding a constant commutes with a maximum, so this gradient is also the sum of the cotangent before
    pooling.
    """
    by_itself, with_kernel = _bias_gradients(((padding, padding), (padding, padding)))
    if patches.takes_one_column():
        return by_itself(x, kernel, bias)
    return lax.platform_dependent(x, kernel, bias, cpu=by_itself, tpu=by_itself, default=with_kernel)


def max_pool3x3(x: Images) -> Pooled:
    """3x3 max-pooling with stride 2 and a border of 1; except on a TPU, first over rows and then over columns."""
    return lax.platform_dependent(x, tpu=_windows_of_3x3, default=_rows_and_columns_of_3x3)


def max_pool2x2(x: Images) -> Pooled:
    """2x2 max-pooling with stride 2; an odd last row or column is left out.

    The maximum of four strided slices, whose gradient costs a third of that of ``lax.reduce_window`` on a CPU.
    """
    return lax.platform_dependent(x, tpu=_windows_of_2x2, default=_corners_of_2x2)


# Not within the functions above, since JAX keeps the trace of a branch for as long as it is the same function. For the
# same reason the functions below that return functions are cached.
def _rows_and_columns_of_3x3(x: Images) -> Pooled:
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    for axis in (1, 2):
        last = x.shape[axis] - 2
        x = functools.reduce(jnp.maximum, (lax.slice_in_dim(x, i, last + i, 2, axis) for i in range(3)))
    return x


def _corners_of_2x2(x: Images) -> Pooled:
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2

    def corner(i: int, j: int) -> Array:
        return x[:, i:height:2, j:width:2]

    return jnp.maximum(jnp.maximum(corner(0, 0), corner(0, 1)), jnp.maximum(corner(1, 0), corner(1, 1)))


def _windows_of_3x3(x: Images) -> Pooled:
    return _pool_windows(x, 3, 1)


def _windows_of_2x2(x: Images) -> Pooled:
    return _pool_windows(x, 2, 0)


def _pool_windows(x: Images, size: int, border: int) -> Pooled:
    """Pooling on a TPU, where strided slices cost more than convolutions; of equal pixels the first gets all."""
    pads = ((0, 0), (border, border), (border, border), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, 2, 2, 1), pads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv(x: Images, kernel: Kernel, strides: tuple[int, int], pads: Pads) -> Maps:
    return _output_op(strides, pads)(x, kernel)


def _conv_forward(x: Images, kernel: Kernel, strides: tuple[int, int], pads: Pads) -> tuple[Maps, tuple]:
    return _conv(x, kernel, strides, pads), (x, kernel)


def _conv_backward(strides: tuple[int, int], pads: Pads, residuals: tuple, dy: Maps) -> tuple[Images, Kernel]:
    x, kernel = residuals
    d_kernel = _kernel_gradient(x, dy, strides, pads, kernel.shape[:2])
    return _input_gradient(dy, kernel, strides, pads, x.shape[1:3]), d_kernel


_conv.defvjp(_conv_forward, _conv_backward)


# Convolution and its two gradients are linear in each operand, and each has the other two as its derivatives: so a
# gradient of a gradient, as in `analysis`, is computed by the same three functions.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _kernel_gradient(x: Images, dy: Maps, strides: tuple[int, int], pads: Pads, size: tuple[int, int]) -> Kernel:
    return _kernel_gradient_op(strides, pads, size)(x, dy)


def _kernel_gradient_forward(
    x: Images, dy: Maps, strides: tuple[int, int], pads: Pads, size: tuple[int, int]
) -> tuple[Kernel, tuple]:
    return _kernel_gradient(x, dy, strides, pads, size), (x, dy)


def _kernel_gradient_backward(
    strides: tuple[int, int], pads: Pads, size: tuple[int, int], residuals: tuple, change: Kernel
) -> tuple[Images, Maps]:
    x, dy = residuals
    return _input_gradient(dy, change, strides, pads, x.shape[1:3]), _conv(x, change, strides, pads)


_kernel_gradient.defvjp(_kernel_gradient_forward, _kernel_gradient_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _input_gradient(dy: Maps, kernel: Kernel, strides: tuple[int, int], pads: Pads, pixels: tuple[int, int]) -> Images:
    return _input_gradient_op(strides, pads, pixels)(dy, kernel)


def _input_gradient_forward(
    dy: Maps, kernel: Kernel, strides: tuple[int, int], pads: Pads, pixels: tuple[int, int]
) -> tuple[Images, tuple]:
    return _input_gradient(dy, kernel, strides, pads, pixels), (dy, kernel)


def _input_gradient_backward(
    strides: tuple[int, int], pads: Pads, pixels: tuple[int, int], residuals: tuple, change: Images
) -> tuple[Maps, Kernel]:
    dy, kernel = residuals
    return _conv(change, kernel, strides, pads), _kernel_gradient(change, dy, strides, pads, kernel.shape[:2])


_input_gradient.defvjp(_input_gradient_forward, _input_gradient_backward)


@functools.cache
def _bias_gradients(pads: Pads) -> tuple[Callable[..., Maps], Callable[..., Maps]]:
    """The function of `conv_pool2x2` with the bias's gradient by itself, and with that of the kernel."""

    def by_itself(x: Images, kernel: Kernel, bias: Bias) -> Maps:
        return max_pool2x2(_conv(x, kernel, (1, 1), pads)) + bias

    def with_kernel(x: Images, kernel: Kernel, bias: Bias) -> Maps:
        return max_pool2x2(_conv_before_bias(x, kernel, bias, pads)) + lax.stop_gradient(bias)

    return by_itself, with_kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _conv_before_bias(x: Images, kernel: Kernel, bias: Bias, pads: Pads) -> Maps:
    """The convolution alone, but with the gradient of the bias that is added to it later."""
    return _conv(x, kernel, (1, 1), pads)


def _conv_before_bias_forward(x: Images, kernel: Kernel, bias: Bias, pads: Pads) -> tuple[Maps, tuple]:
    return _conv_before_bias(x, kernel, bias, pads), (x, kernel)


def _conv_before_bias_backward(pads: Pads, residuals: tuple, dy: Maps) -> tuple[Images, Kernel, Bias]:
    x, kernel = residuals
    return _input_gradient(dy, kernel, (1, 1), pads, x.shape[1:3]), *_both_gradients(x, dy, pads, kernel.shape[:2])


_conv_before_bias.defvjp(_conv_before_bias_forward, _conv_before_bias_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _both_gradients(x: Images, dy: Maps, pads: Pads, size: tuple[int, int]) -> tuple[Kernel, Bias]:
    return _both_gradients_op(pads, size)(x, dy)


def _both_gradients_forward(
    x: Images, dy: Maps, pads: Pads, size: tuple[int, int]
) -> tuple[tuple[Kernel, Bias], tuple]:
    return _both_gradients(x, dy, pads, size), (x, dy)


def _both_gradients_backward(
    pads: Pads, size: tuple[int, int], residuals: tuple, changes: tuple[Kernel, Bias]
) -> tuple[Images, Maps]:
    x, dy = residuals
    kernel, bias = changes
    return _input_gradient(dy, kernel, (1, 1), pads, x.shape[1:3]), _conv(x, kernel, (1, 1), pads) + bias


_both_gradients.defvjp(_both_gradients_forward, _both_gradients_backward)


@functools.cache
def _fourier(
    x: tuple[int, ...], kernel: tuple[int, ...], dtype: jnp.dtype, strides: tuple[int, int], pads: Pads
) -> FourierConv | None:
    """The way with fewer multiplications, where it is faster for images and a kernel of these shapes; else None."""
    pixels = x[1] + sum(pads[0]), x[2] + sum(pads[1])
    many_channels = min(kernel[2:]) > _FEW_CHANNELS
    exact = jnp.finfo(dtype).bits >= 32
    if strides == (1, 1) and many_channels and exact and is_faster_than_direct(x[0], pixels, kernel):
        return FourierConv(pixels, kernel, pads)
    return None


def _direct(x: Images, kernel: Kernel, strides: tuple[int, int], pads: Pads) -> Maps:
    """The plain convolution; under ``vmap`` it and its derivatives become grouped convolutions."""
    return lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=_LAYOUT)


def _on_cpu(special: Callable | None, general: Callable, *operands: Array) -> Array:
    """``special`` where the program runs on a CPU, if it is given; else ``general``."""
    if special is None:
        return general(*operands)
    return lax.platform_dependent(*operands, cpu=special, default=general)


def _side_by_side(
    by_patches: Callable[..., Array], direct: Callable[..., Array]
) -> Callable[[tuple[int | None, ...], int], dict[str, Callable[..., Array]]]:
    """What computes an operation for all clients, as ``lax.platform_dependent`` takes it.

    The function returned takes the axes, None for an operand that clients share, and how many output columns one patch
    serves on a GPU.
    """

    @functools.cache
    def of_clients(axes: tuple[int | None, ...], columns: int) -> dict[str, Callable[..., Array]]:
        tpu = jax.vmap(direct, axes)
        return {
            "cpu": jax.vmap(by_patches, axes),
            "tpu": tpu if None in axes else _runs_as_clients(tpu),
            "default": jax.vmap(functools.partial(by_patches, columns=columns), axes),
        }

    return of_clients


def _runs_as_clients(way: Callable[..., Array]) -> Callable[..., Array]:
    """The same function, but with the clients of several runs (rows of one program) as one longer axis of clients.

    With runs as one more axis a TPU's compiler lays out arrays by both, and copies them from one layout to the next: a
    fifth of the time of 24 runs. What runs share stays shared: then they are one more axis.
    """
    of_clients = custom_vmap(way)

    @of_clients.def_vmap
    def over_runs(runs: int, of_runs: list[bool], *operands: Array) -> tuple[Array, bool]:
        if not all(of_runs):
            return jax.vmap(way, tuple(0 if flag else None for flag in of_runs))(*operands), True
        y = of_clients(*(operand.reshape(-1, *operand.shape[2:]) for operand in operands))
        return y.reshape(runs, -1, *y.shape[1:]), True

    return of_clients


def _output_by_rows(x: Images, kernel: Kernel, strides: tuple[int, int], pads: Pads) -> Maps:
    """Convolves with a kernel of one row, whose input channels are the kh rows of the original."""
    kh, kw, inputs, outputs = kernel.shape
    x = pad(x, pads)
    height = x.shape[1] - kh + 1
    rows = jnp.concatenate([x[:, i : i + height : strides[0]] for i in range(kh)], axis=-1)
    kernel = kernel.transpose(1, 0, 2, 3).reshape(1, kw, kh * inputs, outputs)
    fill = -(kh * inputs) % _CHANNEL_MULTIPLE
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, fill)))
    kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, fill), (0, 0)))
    return lax.conv_general_dilated(rows, kernel, (1, strides[1]), "VALID", dimension_numbers=_LAYOUT)


def _kernel_gradient_by_blocks(x: Images, dy: Maps, pads: Pads, size: tuple[int, int]) -> Kernel:
    """Image by image, blocks of output columns times the input columns under them.

    A product holds, beside the gradient, pairs of columns that the kernel does not connect (8/5 of the arithmetic for a
    5x5 kernel), but it is larger than one of pixels, and neither operand is transposed in memory.
    """
    (kh, kw), inputs, outputs = size, x.shape[-1], dy.shape[-1]
    height, width = dy.shape[1:3]
    blocks = -(-width // _BLOCK)
    # The columns under a block begin with its own and reach into the next ones.
    reach = _BLOCK + kw - 1
    parts = -(-reach // _BLOCK)
    x = pad(x, pads)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, (blocks + parts - 1) * _BLOCK - x.shape[2]), (0, 0)))

    def add(pairs: Array, image: tuple[Array, Array]) -> tuple[Array, None]:
        x, dy = image
        dy = jnp.pad(dy, ((0, 0), (0, blocks * _BLOCK - width), (0, 0)))
        rows = jnp.concatenate([x[i : i + height] for i in range(kh)], axis=-1).reshape(height, blocks + parts - 1, -1)
        under = jnp.concatenate([rows[:, part : part + blocks] for part in range(parts)], axis=-1)
        under = under[..., : reach * kh * inputs].reshape(height * blocks, -1)
        return pairs + under.T @ dy.reshape(height * blocks, -1), None

    pairs = lax.scan(add, jnp.zeros((reach * kh * inputs, _BLOCK * outputs), dy.dtype), (x, dy))[0]
    pairs = pairs.reshape(reach, kh, inputs, _BLOCK, outputs)
    d_kernel = functools.reduce(jnp.add, [pairs[column : column + kw, :, :, column] for column in range(_BLOCK)])
    return d_kernel.transpose(1, 0, 2, 3)


@functools.cache
def _output_op(strides: tuple[int, int], pads: Pads) -> Callable[[Images, Kernel], Maps]:
    def spatial(x: Images, kernel: Kernel) -> Maps:
        if kernel.shape[:2] == (1, 1):
            return patches.output(x, kernel, strides, pads)
        if kernel.shape[2] <= _FEW_CHANNELS:
            return _output_by_rows(x, kernel, strides, pads)
        return _direct(x, kernel, strides, pads)

    def direct(x: Images, kernel: Kernel) -> Maps:
        return _direct(x, kernel, strides, pads)

    def by_patches(x: Images, kernel: Kernel, columns: int = 1) -> Maps:
        return patches.output(x, kernel, strides, pads, columns=columns)

    side_by_side = _side_by_side(by_patches, direct)

    def one_client(x: Images, kernel: Kernel) -> Maps:
        fourier = _fourier(x.shape, kernel.shape, x.dtype, strides, pads)
        return _on_cpu(fourier.output if fourier else None, spatial, x, kernel)

    batched = custom_vmap(one_client)

    @batched.def_vmap
    def over_clients(clients: int, is_batched: list[bool], x: Array, kernel: Array) -> tuple[Array, bool]:
        if not is_batched[1]:  # one kernel for all: the clients' images are one large batch
            y = conv2d(x.reshape(-1, *x.shape[2:]), kernel, strides=strides, padding=pads)
            return y.reshape(clients, -1, *y.shape[1:]), True
        axes = (0 if is_batched[0] else None, 0)
        *rows, width, _ = jax.eval_shape(jax.vmap(direct, axes), x, kernel).shape
        columns = patches.columns_on_a_gpu(math.prod(rows), width, kernel.shape[1:], strides)
        return lax.platform_dependent(x, kernel, **side_by_side(axes, columns)), True

    return batched


@functools.cache
def _kernel_gradient_op(
    strides: tuple[int, int], pads: Pads, size: tuple[int, int]
) -> Callable[[Images, Maps], Kernel]:
    def spatial(x: Images, dy: Maps) -> Kernel:
        if strides != (1, 1) or size == (1, 1):
            return patches.kernel_gradient(x, dy, strides, pads, size)
        outputs = dy.shape[-1]
        dy = jnp.pad(dy, ((0, 0), (0, 0), (0, 0), (0, max(0, _LANES - outputs))))
        d_kernel = lax.conv_general_dilated(
            x.transpose(3, 1, 2, 0), dy.transpose(1, 2, 0, 3), (1, 1), pads, dimension_numbers=_LAYOUT
        )
        return d_kernel.transpose(1, 2, 0, 3)[..., :outputs]

    def direct(x: Images, dy: Maps) -> Kernel:
        kernel = jax.ShapeDtypeStruct((*size, x.shape[-1], dy.shape[-1]), x.dtype)
        return jax.linear_transpose(lambda kernel: _direct(x, kernel, strides, pads), kernel)(dy)[0]

    def by_patches(x: Images, dy: Maps, columns: int = 1) -> Kernel:
        return patches.kernel_gradient(x, dy, strides, pads, size, columns=columns)

    side_by_side = _side_by_side(by_patches, direct)

    by_blocks = functools.partial(_kernel_gradient_by_blocks, pads=pads, size=size)

    def one_client(x: Images, dy: Maps) -> Kernel:
        few_channels = x.shape[-1] <= _FEW_CHANNELS
        if strides == (1, 1) and size != (1, 1) and few_channels and len(x) * dy.shape[-1] >= _FASTER_BY_BLOCKS:
            return _on_cpu(by_blocks, spatial, x, dy)
        fourier = _fourier(x.shape, (*size, x.shape[-1], dy.shape[-1]), x.dtype, strides, pads)
        return _on_cpu(fourier.kernel_gradient if fourier else None, spatial, x, dy)

    batched = custom_vmap(one_client)

    @batched.def_vmap
    def over_clients(clients: int, is_batched: list[bool], x: Array, dy: Array) -> tuple[Array, bool]:
        axes = tuple(0 if flag else None for flag in is_batched)
        *rows, width, outputs = dy.shape[-4:]
        kernel = *size, x.shape[-1], outputs
        columns = patches.columns_on_a_gpu(clients * math.prod(rows), width, kernel, strides)
        return lax.platform_dependent(x, dy, **side_by_side(axes, columns)), True

    return batched


@functools.cache
def _both_gradients_op(pads: Pads, size: tuple[int, int]) -> Callable[[Images, Maps], tuple[Kernel, Bias]]:
    """The gradients of a kernel and of the bias that follows it, on a GPU."""

    def apart(x: Images, dy: Maps) -> tuple[Kernel, Bias]:
        return _kernel_gradient(x, dy, (1, 1), pads, size), jnp.sum(dy, axis=(0, 1, 2))

    batched = custom_vmap(apart)

    @batched.def_vmap
    def over_clients(clients: int, is_batched: list[bool], x: Array, dy: Array) -> tuple[tuple[Array, Array], tuple]:
        axes = tuple(0 if flag else None for flag in is_batched)
        *rows, width, outputs = dy.shape[-4:]
        kernel = *size, x.shape[-1], outputs
        columns = patches.columns_on_a_gpu(clients * math.prod(rows), width, kernel, (1, 1))
        together = functools.partial(patches.kernel_and_bias_gradient, pads=pads, size=size, columns=columns)
        return jax.vmap(apart if columns == 1 else together, axes)(x, dy), (True, True)

    return batched


@functools.cache
def _input_gradient_op(
    strides: tuple[int, int], pads: Pads, pixels: tuple[int, int]
) -> Callable[[Maps, Kernel], Images]:
    def by_patches(dy: Maps, kernel: Kernel, columns: int = 1) -> Images:
        return patches.input_gradient(dy, kernel, pixels, strides, pads, columns=columns)

    def direct(dy: Maps, kernel: Kernel) -> Images:
        x = jax.ShapeDtypeStruct((len(dy), *pixels, kernel.shape[2]), dy.dtype)
        return jax.linear_transpose(lambda x: _direct(x, kernel, strides, pads), x)(dy)[0]

    side_by_side = _side_by_side(by_patches, direct)

    def one_client(dy: Maps, kernel: Kernel) -> Images:
        fourier = _fourier((dy.shape[0], *pixels), kernel.shape, dy.dtype, strides, pads)
        return _on_cpu(fourier.input_gradient if fourier else None, by_patches, dy, kernel)

    batched = custom_vmap(one_client)

    @batched.def_vmap
    def over_clients(clients: int, is_batched: list[bool], dy: Array, kernel: Array) -> tuple[Array, bool]:
        axes = tuple(0 if flag else None for flag in is_batched)
        *rows, width, _ = dy.shape[-4:]
        columns = patches.columns_on_a_gpu(clients * math.prod(rows), width, kernel.shape[-4:], strides)
        return lax.platform_dependent(dy, kernel, **side_by_side(axes, columns)), True

    return batched
