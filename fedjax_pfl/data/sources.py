"""Data sources: where labelled images and texts come from, before they are divided among clients.

A source is a string: ``"digits"``, or a prefix with an argument such as ``"npz:PATH"``. `SOURCES` lists them all.
"""

import math
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from fedjax_pfl.data import leaf
from fedjax_pfl.errors import ConfigError

# The arrays of an npz file in the order of the arguments of `from_arrays`; the first name found counts.
_NPZ_NAMES = (("image", "x"), ("label", "y"), ("image_test", "x_test"), ("label_test", "y_test"))
_NPZ_USERS = (("user", "writer"), ("user_test", "writer_test"))


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


def load(source: str) -> Dataset:
    """Loads the data that a source string names.

    Args:
      source: a key of `SOURCES`, for some with an argument after a colon: ``"digits"``, ``"npz:my/data.npz"``.

    Returns:
      The `Dataset`; its rows are in the order of the source.

    Raises:
      ConfigError: field ``data.source``, for an unknown source and for data that cannot be used.
    """
    prefix, _, argument = source.partition(":")
    if prefix not in SOURCES:
        allowed = "; ".join(f"{name}: {description}" for name, (_, description) in SOURCES.items())
        raise ConfigError("data.source", source, f"known sources are {allowed}")
    loader, _ = SOURCES[prefix]
    return loader(argument)


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
      The `Dataset`. A test part follows the training rows, and `train_rows` says where it starts.

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
    all_labels = np.concatenate([part_labels for _, part_labels in parts])
    users_of_parts = [given for given in (users, test_users) if given is not None]
    if users_of_parts and (users is None or len(users_of_parts) != len(parts)):
        raise ConfigError("data", name, "give the users of every part that there is, or none")
    for (_, part_labels), given in zip(parts, users_of_parts, strict=False):
        if given.shape != part_labels.shape or given.dtype.kind not in "iuU":
            allowed = f"users must be integers or strings [{len(part_labels)}], got {given.dtype} {given.shape}"
            raise ConfigError("data", name, allowed)
    return Dataset(
        name=name,
        images=np.concatenate([part_images for part_images, _ in parts]),
        labels=all_labels,
        classes=int(all_labels.max()) + 1,
        train_rows=len(parts[0][0]) if len(parts) > 1 else None,
        users=_numbered(np.concatenate(users_of_parts)) if users_of_parts else None,
    )


def _numbered(users: Shaped[np.ndarray, "samples"]) -> Int[np.ndarray, "samples"]:
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


def _load_digits(argument: str) -> Dataset:
    """scikit-learn's copy of the UCI optical digits: uint8 ``[1797, 8, 8, 1]``, 10 classes, nothing to download."""
    if argument:
        raise ConfigError("data.source", f"digits:{argument}", "'digits' takes no argument")
    from sklearn.datasets import load_digits  # takes a second to import, and most runs use other data

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # the source counts 0..16 dark pixels per cell
    return from_arrays(images, bunch.target, name="digits")


def _load_npz(argument: str) -> Dataset:
    """A user's own arrays from an npz file; see `SOURCES` for what it holds."""
    source = f"npz:{argument}"
    path = _find(argument, source)
    if not zipfile.is_zipfile(path):
        raise ConfigError("data.source", source, f"{path} is no npz file; write one with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            present = ", ".join(archive.files) or "none"
            # asarray: NumPy hands out members that are no arrays as bytes, which then fail the dtype check.
            images, labels, test_images, test_labels, users, test_users = (
                next((np.asarray(archive[name]) for name in names if name in archive), None)
                for names in (*_NPZ_NAMES, *_NPZ_USERS)
            )
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError("data.source", source, f"{path} cannot be read as plain arrays ({error})") from error
    if images is None or labels is None:
        needed = "arrays image (or x) and label (or y)"
        raise ConfigError("data.source", source, f"{path} must hold {needed}; present: {present}")
    try:
        return from_arrays(images, labels, test_images, test_labels, users=users, test_users=test_users, name=path.stem)
    except ConfigError as error:
        raise ConfigError("data.source", source, error.allowed) from error


def _load_leaf(argument: str) -> Dataset:
    """A LEAF data set, images or text; see `fedjax_pfl.data.leaf`."""
    source = f"leaf:{argument}"
    folder = _find(argument, source, folder=True)
    parts = leaf.read(folder, source)
    x, y, users = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    text = x.ndim == 2
    return Dataset(
        name=folder.resolve().name,
        images=x,
        labels=y,
        classes=len(leaf.ALPHABET) if text else int(y.max()) + 1,
        train_rows=len(parts[0].y) if len(parts) > 1 else None,
        users=_numbered(users),
        vocabulary=len(leaf.ALPHABET) if text else None,
    )


def _load_folder(argument: str) -> Dataset:
    """Images in a folder; see `folders` for how they may lie there."""
    from fedjax_pfl.data import folders  # not above: it needs the `Dataset`

    source = f"folder:{argument}"
    path, size = folders.options(argument)
    return folders.load(_find(path, source, folder=True), size, source)


def _load_tfds(argument: str) -> Dataset:
    """A data set that tensorflow-datasets has prepared."""
    from fedjax_pfl.data import tfds  # not above: it needs the `Dataset`

    return tfds.load(argument)


def _find(argument: str, source: str, *, folder: bool = False) -> Path:
    """The file (or folder) that a PATH means: as given, or else below the folder that FEDJAX_PFL_DATA names."""
    if not argument:
        prefix = source.partition(":")[0]
        raise ConfigError("data.source", source, f"a path is needed after the colon: {prefix}:PATH")
    given = Path(argument).expanduser()
    candidates = [Path.cwd() / given]
    shelf = os.environ.get("FEDJAX_PFL_DATA")
    if shelf and not given.is_absolute():
        candidates.append(Path(shelf).expanduser() / given)
    for candidate in candidates:
        if candidate.is_dir() if folder else candidate.is_file():
            return candidate
    what = "folder" if folder else "file"
    looked = " and ".join(str(candidate) for candidate in candidates)
    hint = "" if shelf else " (the environment variable FEDJAX_PFL_DATA may name a folder of data files)"
    raise ConfigError("data.source", source, f"there is no such {what}; looked for {looked}{hint}")


# Prefix -> (loader of the argument after the colon, one line for `fedjax-pfl datasets`).
SOURCES: dict[str, tuple[Callable[[str], Dataset], str]] = {
    "digits": (_load_digits, "1,797 handwritten 8x8 digits in 10 classes, part of scikit-learn (no download)"),
    "npz": (
        _load_npz,
        "npz:PATH, your own arrays image (or x) uint8 [n,h,w,c] and label (or y) [n]; "
        "optional test part image_test, label_test; optional user (or writer) [n] and user_test",
    ),
    "folder": (
        _load_folder,
        "folder:PATH, image files in a folder per class, or with lists (CINIC-10, Tiny-ImageNet, VireoFood172); "
        "folder:PATH?size=64 resizes them",
    ),
    "tfds": (
        _load_tfds,
        "tfds:NAME, what tensorflow-datasets has prepared as array_record: tfds:cifar10, tfds:emnist/byclass, ...",
    ),
    "leaf": (
        _load_leaf,
        "leaf:PATH, a folder of LEAF JSON shards in train and test: images (FEMNIST) or text (Shakespeare), with users",
    ),
}
