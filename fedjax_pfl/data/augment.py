"""Augmentation of one client's images, drawn on the device: the protocol's, and a method's own copies.

Crops and flips move whole pixels. All other operations are an affine map of the coordinates and an affine map of the
pixel values. So one gather and one multiplication serve a batch in which every sample has a different operation; under
``vmap``, a branch per sample would run all operations for each sample.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.ndimage import map_coordinates
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from fedjax_pfl.data.federated import Augmentation, ClientData, Pool

Augment = Literal["none", "crop_flip", "crop_flip_reflect", "crop_flip_rotate"]
Copies = Literal["none", "concat", "replace"]

MAX_SHIFT = 4  # pixels per axis
MAX_ROTATION = jnp.pi / 6  # 30 degrees
MAX_TILT = jnp.pi / 12  # 15 degrees
BRIGHTNESS = (0.5, 1.5)


class Transform(NamedTuple):
    """One operation for each sample: the output's pixel at p is ``gain * x[turn p - shift] + offset``, clipped.

    Positions (row, column) are relative to the centre of the image.

    Attributes:
      turn: maps a position in the output to a position in the input, [batch, 2, 2].
      shift: how far the image moves, in pixels (rows, columns), [batch, 2].
      gain: factor on the pixel values, [batch].
      offset: added to the pixel values, [batch].
    """

    turn: Float[Array, "batch 2 2"]
    shift: Float[Array, "batch 2"]
    gain: Float[Array, " batch"]
    offset: Float[Array, " batch"]


def _draw_shift(key: Key[Array, ""]) -> Int[Array, "2"]:
    return jax.random.randint(key, (2,), -MAX_SHIFT, MAX_SHIFT + 1)


def draw_crop(key: Key[Array, ""]) -> tuple[Int[Array, "2"], Bool[Array, ""]]:
    """The position of a random crop, as a shift of the image [2], and whether it is flipped, []."""
    key_shift, key_flip = jax.random.split(key)
    return _draw_shift(key_shift), jax.random.bernoulli(key_flip)


def five_operations(keys: Key[Array, " batch"]) -> Transform:
    """FedeCouple's augmentation (section IV-D): a random one of five operations per sample, with random magnitude.

    Shift by -4 ... 4 pixels per axis, horizontal flip, rotation by -30 ... 30 degrees, brightness times 0.5 ... 1.5,
    inversion (255 - x). The paper names the operations; the magnitudes are ours.
    """

    def draw(key: Key[Array, ""]) -> Transform:
        key_operation, key_shift, key_angle, key_gain = jax.random.split(key, 4)
        shifted, flipped, rotated, scaled, inverted = jax.random.randint(key_operation, (), 0, 5) == jnp.arange(5)
        angle = jnp.where(rotated, jax.random.uniform(key_angle, minval=-MAX_ROTATION, maxval=MAX_ROTATION), 0.0)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        mirror = jnp.where(flipped, -1.0, 1.0)
        gain = jax.random.uniform(key_gain, minval=BRIGHTNESS[0], maxval=BRIGHTNESS[1])
        return Transform(
            turn=jnp.array([[cos, -sin * mirror], [sin, cos * mirror]]),
            shift=jnp.where(shifted, _draw_shift(key_shift).astype(jnp.float32), 0.0),
            gain=jnp.where(inverted, -1.0, jnp.where(scaled, gain, 1.0)),
            offset=jnp.where(inverted, 255.0, 0.0),
        )

    return jax.vmap(draw)(keys)


def crop_flip(
    keys: Key[Array, " batch"], x: UInt8[Array, "batch h w c"], *, reflect: bool = False
) -> UInt8[Array, "batch h w c"]:
    """The usual CIFAR augmentation: a crop after padding by 4 pixels, and a horizontal flip with probability 1/2.

    Args:
      keys: one for each sample.
      x: images.
      reflect: whether to pad by reflection at the outermost pixels; else with black.
    """
    edge, size = MAX_SHIFT, x.shape[1:]
    padded = jnp.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)), mode="reflect" if reflect else "constant")

    def one(key: Key[Array, ""], padded: UInt8[Array, "H W c"]) -> UInt8[Array, "h w c"]:
        shift, flipped = draw_crop(key)
        cropped = lax.dynamic_slice(padded, (edge - shift[0], edge - shift[1], 0), size)
        return jnp.where(flipped, cropped[:, ::-1], cropped)

    return jax.vmap(one)(keys, padded)


def crop_flip_rotate(keys: Key[Array, " batch"]) -> Transform:
    """Crop and flip as in :func:`crop_flip`, then a rotation by -15 ... 15 degrees.

    Crop, flip and rotation are one map: pixels that the crop has cut off may reappear at the corners. The map
    interpolates bilinearly; torchvision's rotation takes the nearest pixel unless told otherwise.
    """

    def draw(key: Key[Array, ""]) -> Transform:
        key_crop, key_angle = jax.random.split(key)
        shift, flipped = draw_crop(key_crop)
        angle = jax.random.uniform(key_angle, minval=-MAX_TILT, maxval=MAX_TILT)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        mirror, one = jnp.where(flipped, -1.0, 1.0), jnp.ones(())
        turn = jnp.array([[cos, -sin], [mirror * sin, mirror * cos]])
        return Transform(turn, shift.astype(jnp.float32), one, 0 * one)

    return jax.vmap(draw)(keys)


def apply_transform(transform: Transform, x: UInt8[Array, "batch h w c"]) -> UInt8[Array, "batch h w c"]:
    """Moves the pixels (bilinear interpolation, black outside) and maps their values, rounded and clipped."""
    height, width = x.shape[1:3]
    centre = jnp.array([(height - 1) / 2, (width - 1) / 2], jnp.float32)
    corner = jnp.stack(jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij"), axis=-1)
    grid = corner.astype(jnp.float32) - centre

    def one(transform: Transform, x: UInt8[Array, "h w c"]) -> UInt8[Array, "h w c"]:
        # Written out: a matrix product may round its operands on an accelerator, and whole pixels must stay whole.
        (a, b), (c, d) = transform.turn
        rows = a * grid[..., 0] + b * grid[..., 1] + centre[0] - transform.shift[0]
        columns = c * grid[..., 0] + d * grid[..., 1] + centre[1] - transform.shift[1]
        bilinear = partial(map_coordinates, coordinates=[rows, columns], order=1)  # 0 from outside
        moved = jax.vmap(bilinear, in_axes=-1, out_axes=-1)(x.astype(jnp.float32))
        return jnp.clip(jnp.round(transform.gain * moved + transform.offset), 0, 255).astype(jnp.uint8)

    return jax.vmap(one)(transform, x)


_DRAWS: dict[str, Callable[[Key[Array, " batch"], UInt8[Array, "batch h w c"]], UInt8[Array, "batch h w c"]]] = {
    "crop_flip": crop_flip,
    "crop_flip_reflect": partial(crop_flip, reflect=True),
    "crop_flip_rotate": lambda keys, x: apply_transform(crop_flip_rotate(keys), x),
}


def augment(key: Key[Array, ""], data: ClientData, kind: Augment, *, every: Literal["epoch", "round"]) -> ClientData:
    """A client whose images are replaced by augmented ones whenever they are read.

    Args:
      key: the key of the round's draw.
      data: the client's images, uint8.
      kind: ``"none"``; ``"crop_flip"``, a random crop (black outside) and flip; ``"crop_flip_reflect"``, the same with
        reflection outside; ``"crop_flip_rotate"``, crop, flip and a rotation by up to 15 degrees.
      every: ``"epoch"``: each training epoch draws anew; ``"round"``: it uses the round's draw, as all other passes
        always do (features on which a head is trained, class means).
    """
    if kind == "none":
        return data
    drawn = Augmentation(_DRAWS[kind], key, anew=every == "epoch")
    return data._replace(augmentation=drawn, original=data if data.original is None else data.original)


def add_copies(key: Key[Array, ""], data: ClientData, kind: Copies) -> ClientData:
    """A client's images with a copy of each by one of FedeCouple's five operations; the copies stay for a round.

    Args:
      key: the randomness of this draw.
      data: the client's images, uint8.
      kind: ``"none"``; ``"concat"`` adds the copies (the client doubles in size, originals first); ``"replace"`` uses
        the copies instead of the originals.

    Returns:
      The client with its own pool of samples; ``original`` is the client that was given.
    """
    if kind == "none":
        return data

    def transformed(x: Array, positions: Int[Array, " batch"]) -> Array:
        # A sample's draw depends on its position alone, not on the capacity: more padding changes nothing.
        copies = apply_transform(five_operations(jax.vmap(partial(jax.random.fold_in, key))(positions)), x)
        return copies.reshape(len(copies), -1)

    def pool(rows: UInt8[Array, "samples pixels"]) -> Any:
        return Pool(rows, data.x.shape[1:])

    copies = data.map(transformed)
    if kind == "replace":
        positions = jnp.arange(data.capacity, dtype=jnp.int32)
        return data._replace(x=pool(copies), y=data.labels, index=positions, original=data)
    both = jnp.arange(2 * data.capacity, dtype=jnp.int32)
    return data._replace(
        x=pool(jnp.concatenate([data.x[data.index].reshape(copies.shape), copies])),
        y=jnp.tile(data.labels, 2),
        index=jnp.where(both < data.count, both, both - data.count + data.capacity) % (2 * data.capacity),
        count=2 * data.count,
        class_counts=2 * data.class_counts,
        original=data,
        most=None if data.most is None else 2 * data.most,
    )
