"""What a source gives: labelled images or texts in one piece, and how arrays become one."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from fedjax_pfl.errors import ConfigError


class Dataset(NamedTuple):
    """Labelled samples, still in one piece.

    Attributes:
      name: short name for reports, e.g. ``"digits"``.
      images: uint8 ``[samples, h, w, c]``, not normalised; tokens ``[samples, length]`` where the samples are text.
      labels: int32 ``[samples]``, each in ``0 .. classes - 1``.
      classes: number of classes, the largest label + 1 (a class in between may have no sample).
      train_rows: the first so many rows are the official training part and the others the official test part; None
        where the source has no official division.
      users: the natural user of each sample, int32 ``[samples]``, each in ``0 .. U - 1``; None where there are none.
      vocabulary: where the samples are text, the number of different tokens, which are ``0 .. vocabulary - 1``; None
        for images.
    """

    name: str
    images: UInt8[np.ndarray, "samples ..."]
    labels: Int[np.ndarray, "samples"]
    classes: int
    train_rows: int | None
    users: Int[np.ndarray, "samples"] | None = None
    vocabulary: int | None = None


def from_arrays(
    images: np.ndarray,
    labels: np.ndarray,
    test_images: np.ndarray | None = None,
    test_labels: np.ndarray | None = None,
    *,
    users: np.ndarray | None = None,
    test_users: np.ndarray | None = None,
    name: str = "arrays",
) -> Dataset:
    """Makes a `Dataset` of arrays.

    Args:
      images: uint8 ``[train, h, w, c]``, or ``[train, h, w]`` for one channel, or ``[train, w * w]`` for one channel of
        a square image.
      labels: integers ``[train]``, none negative.
      test_images: the official test part, likewise, where there is one.
      test_labels: ``[test]``, given together with `test_images`.
      users: who each sample is from, integers or strings ``[train]``; they are numbered in ascending order.
      test_users: the same of the test part, ``[test]``: needed where there are `users` and a test part.
      name: the name of the data in reports and errors.

    Returns:
      The `Dataset`. A test part follows the training rows, and `train_rows` says where it starts. Images without a test
      part are not copied.

    Raises:
      ConfigError: field ``data``, where dtypes, shapes, lengths or labels do not fit.
    """
    parts = [_checked_part(images, labels, "", name)]
    if (test_images is None) != (test_labels is None):
        raise ConfigError("data", name, "a test part needs both its images and its labels")
    if test_images is not None and test_labels is not None:
        parts.append(_checked_part(test_images, test_labels, "test ", name))
    shapes = [part_images.shape[1:] for part_images, _ in parts]
    if shapes[0] != shapes[-1]:
        raise ConfigError("data", name, f"training images {shapes[0]} and test images {shapes[-1]} must agree in shape")
    all_labels = _joined([part_labels for _, part_labels in parts])
    users_of_parts = [given for given in (users, test_users) if given is not None]
    if users_of_parts and (users is None or len(users_of_parts) != len(parts)):
        raise ConfigError("data", name, "give the users of every part that there is, or none")
    for (_, part_labels), given in zip(parts, users_of_parts, strict=False):
        if given.shape != part_labels.shape or given.dtype.kind not in "iuU":
            allowed = f"users must be integers or strings [{len(part_labels)}], got {given.dtype} {given.shape}"
            raise ConfigError("data", name, allowed)
    return Dataset(
        name=name,
        images=_joined([part_images for part_images, _ in parts]),
        labels=all_labels,
        classes=int(all_labels.max()) + 1,
        train_rows=len(parts[0][0]) if len(parts) > 1 else None,
        users=numbered(_joined(users_of_parts)) if users_of_parts else None,
    )


def _joined(parts: list[np.ndarray]) -> Shaped[np.ndarray, "samples ..."]:
    """All rows in one array, which is the part itself where there is one: images may be most of what memory holds."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def numbered(users: Shaped[np.ndarray, "samples"]) -> Int[np.ndarray, "samples"]:
    """Users as the numbers 0 .. U - 1, in ascending order of what they are called."""
    return np.unique(users, return_inverse=True)[1].astype(np.int32)


def _checked_part(
    images: np.ndarray, labels: np.ndarray, part: str, name: str
) -> tuple[UInt8[np.ndarray, "samples h w c"], Int[np.ndarray, "samples"]]:
    """Images and labels that fit together, or a ConfigError that calls them by the prefix `part`."""
    images = _checked_images(images, f"{part}images", name)
    labels = _checked_labels(labels, f"{part}labels", name)
    if len(images) != len(labels):
        lengths = f"{len(images)} {part}images and {len(labels)} {part}labels"
        raise ConfigError("data", name, f"one label per image is needed, got {lengths}")
    return images, labels


def _checked_images(images: np.ndarray, what: str, name: str) -> UInt8[np.ndarray, "samples h w c"]:
    """Images with their channel axis, or a ConfigError that says what to change."""
    if images.dtype != np.uint8:
        hint = "; scale values of 0..1 by 255, round and cast" if np.issubdtype(images.dtype, np.floating) else ""
        raise ConfigError("data", name, f"the {what} must be uint8 with values 0..255, got {images.dtype}{hint}")
    if images.ndim == 2 and math.isqrt(images.shape[1]) ** 2 == images.shape[1]:
        images = images.reshape(len(images), math.isqrt(images.shape[1]), math.isqrt(images.shape[1]))
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4:
        hint = "; reshape flat images to [n, h, w, c]" if images.ndim == 2 else ""
        raise ConfigError("data", name, f"the {what} must be [n, h, w, c] or [n, h, w], got {images.shape}{hint}")
    if images.shape[1] <= 4 < images.shape[3]:
        hint = "the channels seem to come first; numpy.moveaxis(images, 1, -1) puts them last"
        raise ConfigError("data", name, f"the {what} must be [n, h, w, c], got {images.shape}: {hint}")
    if images.size == 0:
        raise ConfigError("data", name, f"the {what} hold nothing, their shape is {images.shape}")
    return images


def _checked_labels(labels: np.ndarray, what: str, name: str) -> Int[np.ndarray, "samples"]:
    """Labels as int32, or a ConfigError that says what to change."""
    if not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError("data", name, f"the {what} must be integers, got {labels.dtype}")
    if labels.ndim != 1:
        raise ConfigError("data", name, f"the {what} must be [n], got {labels.shape}")
    if labels.size and labels.min() < 0:
        raise ConfigError("data", name, f"the {what} must be 0 or more, the smallest is {labels.min()}")
    if labels.size and labels.max() >= np.iinfo(np.int32).max:
        raise ConfigError("data", name, f"the {what} must fit into int32, the largest is {labels.max()}")
    return labels.astype(np.int32)
