"""The data set that a source gives (labelled images, texts or rows of numbers), and how it is made from arrays."""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from fedjax_pfl.errors import ConfigError

# A label that is at least this number, and at least the number of samples, is an ID and not a class number.
_MOST_CLASSES = 1000
# How to number classes. Both parts are numbered at once: on its own, each would have numbers with other meanings.
_NUMBERS = "numpy.unique(y, return_inverse=True)[1] numbers the classes"
_NUMBERS_OF_BOTH = (
    "numpy.split(numpy.unique(numpy.concatenate([y, y_test]), return_inverse=True)[1], [len(y)]) numbers the classes "
    "of both parts"
)
_TEXT = "text is FederatedData(x, y, vocabulary=80), of tokens"
# Tokens are stored in a byte each.
_MOST_TOKENS = 256
# The number of samples that a fingerprint hashes at a time.
_HASHED_AT_ONCE = 4096


class Dataset(NamedTuple):
    """Labelled samples, before they are divided among clients.

    Attributes:
      name: short name for reports, e.g. ``"digits"``.
      images: the samples: uint8 ``[samples, h, w, c]``, not normalised; float32 ``[samples, ...]``, which models read
        as they are; or uint8 tokens ``[samples, length]`` where the samples are text.
      labels: int32 ``[samples]``, each in ``0 .. classes - 1``.
      classes: number of classes, the largest label + 1 or more (LEAF's text always has 80); a class may have no sample.
      train_rows: the number of rows of the official training part, which come first; the others are the official test
        part. None if the source has no official split.
      users: the natural user of each sample, int32 ``[samples]``, each in ``0 .. U - 1``; None if there are no users.
      vocabulary: for text, the number of different tokens, which are ``0 .. vocabulary - 1``; None for other samples.
      divided: whether the data came already divided among clients. The clients are then the users; samples of user -1
        belong to no client.
      user_names: the name of each user; None if there are no users, or they have only numbers.
      own: whether these are data from Python: labels may not be numbers of classes, and their test part may be expected
        to be used for testing.
      left_out: names of what else the source has, which nothing reads; an error about missing data lists them.
    """

    name: str
    images: UInt8[np.ndarray, "samples ..."] | Float[np.ndarray, "samples ..."]
    labels: Int[np.ndarray, " samples"]
    classes: int
    train_rows: int | None
    users: Int[np.ndarray, " samples"] | None = None
    vocabulary: int | None = None
    divided: bool = False
    user_names: tuple[str, ...] | None = None
    own: bool = False
    left_out: tuple[str, ...] = ()


def from_arrays(
    images: np.ndarray,
    labels: np.ndarray,
    test_images: np.ndarray | None = None,
    test_labels: np.ndarray | None = None,
    *,
    users: np.ndarray | None = None,
    test_users: np.ndarray | None = None,
    vocabulary: int | None = None,
    name: str = "arrays",
) -> Dataset:
    """Makes a `Dataset` from arrays.

    Args:
      images: uint8 ``[train, h, w, c]``, or ``[train, h, w]`` for one channel, or ``[train, w * w]`` for one channel of
        a square image; or floats ``[train, ...]`` of any shape, all of them finite; of four axes, the channels come
        last.
      labels: integers ``[train]``, none negative.
      test_images: the samples of the official test part, likewise, if there is one.
      test_labels: their labels ``[test]``, given together with `test_images`.
      users: the user of each sample, integers or strings ``[train]``; they are numbered in ascending order.
      test_users: the users of the test part, ``[test]``; needed if there are `users` and a test part.
      vocabulary: for text, the number of different tokens, 1 to 256. `images` are then tokens ``[train, length]``,
        whole numbers of any type from 0 to ``vocabulary - 1``.
      name: the name of the data in reports and errors.

    Returns:
      The `Dataset`. A test part follows the training rows, and `train_rows` says where it starts. Pixels without a
      test part are not copied.

    Raises:
      ConfigError: field ``data``: dtypes, shapes, lengths, labels or tokens do not fit.
    """
    whole = isinstance(vocabulary, int | np.integer) and not isinstance(vocabulary, bool)
    if vocabulary is not None and not (whole and 1 <= vocabulary <= _MOST_TOKENS):
        allowed = f"vocabulary must be a whole number, 1 to {_MOST_TOKENS}, the number of tokens; it is {vocabulary!r}"
        raise ConfigError("data", name, allowed)
    numbers_them = _NUMBERS if test_labels is None else _NUMBERS_OF_BOTH
    parts = [_checked_part(images, labels, "", name, numbers_them, vocabulary)]
    if (test_images is None) != (test_labels is None):
        raise ConfigError("data", name, "a test part needs both its images and its labels")
    if test_images is not None and test_labels is not None:
        parts.append(_checked_part(test_images, test_labels, "test ", name, numbers_them, vocabulary))
    kinds = [f"{part_images.dtype} {part_images.shape[1:]}" for part_images, _ in parts]
    if kinds[0] != kinds[-1]:
        allowed = f"training samples {kinds[0]} and test samples {kinds[-1]} must agree in type and shape"
        raise ConfigError("data", name, allowed)
    all_labels = _class_numbers([part_labels for _, part_labels in parts], name, numbers_them)
    numbers, names = None, None
    users_of_parts = [given for given in (users, test_users) if given is not None]
    if users_of_parts and (users is None or len(users_of_parts) != len(parts)):
        raise ConfigError("data", name, "give the users of every part that there is, or none")
    for (_, part_labels), given in zip(parts, users_of_parts, strict=False):
        if given.shape != part_labels.shape or given.dtype.kind not in "iuU":
            allowed = f"users must be integers or strings [{len(part_labels)}], got {given.dtype} {given.shape}"
            raise ConfigError("data", name, allowed)
    if users_of_parts:
        if np.result_type(*users_of_parts).kind == "f":  # of uint64 beside int64, which would make large ones the same
            users_of_parts = [given.astype(object) for given in users_of_parts]
        numbers, names = numbered(_joined(users_of_parts))
    return Dataset(
        name=name,
        images=_joined([part_images for part_images, _ in parts]),
        labels=all_labels,
        classes=int(all_labels.max()) + 1,
        train_rows=len(parts[0][0]) if len(parts) > 1 else None,
        users=numbers,
        vocabulary=None if vocabulary is None else int(vocabulary),
        user_names=names,
    )


def _joined(parts: list[np.ndarray]) -> Shaped[np.ndarray, "samples ..."]:
    """All rows in one array; a single part is not copied, because images may take most of the memory."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def fingerprint(dataset: Dataset) -> str:
    """12 hexadecimal digits that identify the data: a hash of samples, labels, test part and users."""
    images, labels = dataset.images, dataset.labels
    digest = hashlib.sha256(f"{images.shape} {images.dtype}".encode())
    for at in range(0, len(images), _HASHED_AT_ONCE):  # samples may be most of what memory holds: no copy of them all
        digest.update(np.ascontiguousarray(images[at : at + _HASHED_AT_ONCE]).tobytes())
    digest.update(labels.astype("<i8").tobytes())
    if dataset.train_rows is not None:
        digest.update(f"{dataset.train_rows} to train on".encode())
    if dataset.users is not None:
        digest.update((b"divided" if dataset.divided else b"users") + dataset.users.astype("<i8").tobytes())
    return digest.hexdigest()[:12]


def numbered(users: Shaped[np.ndarray, " samples"]) -> tuple[Int[np.ndarray, " samples"], tuple[str, ...]]:
    """Users as the numbers 0 .. U - 1, in ascending order of their names; and the names in this order."""
    names, numbers = np.unique(users, return_inverse=True)
    return numbers.astype(np.int32), tuple(map(str, names))


def check_channels(field: str, given: float | Sequence[float], channels: int) -> None:
    """Checks a mean or standard deviation of pixels.

    Args:
      field: the config field, for the error.
      given: one number, or one for each channel.
      channels: the number of channels that the images have.

    Raises:
      ConfigError: there are more or fewer numbers than channels.
    """
    if np.shape(given) not in ((), (channels,)):
        raise ConfigError(field, given, f"one number, or one for each of the {channels} channels")


def _checked_part(
    images: np.ndarray, labels: np.ndarray, part: str, name: str, numbers_them: str, vocabulary: int | None
) -> tuple[Shaped[np.ndarray, "samples ..."], Int[np.ndarray, " samples"]]:
    """Samples and labels that fit together; otherwise a ConfigError, which names them with the prefix `part`.

    Labels keep their type: see `_class_numbers`. `numbers_them` says how to number classes that have names.
    """
    what = f"{part}samples"
    images = _checked_samples(images, what, name) if vocabulary is None else _tokens(images, vocabulary, what, name)
    labels = _checked_labels(labels, f"{part}labels", name, numbers_them)
    if len(images) != len(labels):
        lengths = f"{len(images)} {part}samples and {len(labels)} {part}labels"
        raise ConfigError("data", name, f"one label per sample is needed, got {lengths}")
    return images, labels


def _checked_samples(x: np.ndarray, what: str, name: str) -> Shaped[np.ndarray, "samples ..."]:
    """Pixels with their channel axis, or float32 as they are, or a ConfigError that says what to change."""
    pixels = x.dtype == np.uint8
    if not pixels and x.dtype.kind != "f":
        hint = "numpy.asarray(x, numpy.float32), or numpy.uint8 of pixels from 0 to 255"
        if x.ndim == 2 and x.dtype.kind in "iu":
            hint += f"; {_TEXT}"
        raise ConfigError("data", name, f"the {what} must be uint8 (pixels) or floats, got {x.dtype}: {hint}")
    if pixels:
        if x.ndim == 2 and math.isqrt(x.shape[1]) ** 2 == x.shape[1]:
            x = x.reshape(len(x), math.isqrt(x.shape[1]), math.isqrt(x.shape[1]))
        if x.ndim == 3:
            x = x[..., np.newaxis]
        if x.ndim != 4:
            hint = f"; reshape flat images, convert numbers to numpy.float32; {_TEXT}" if x.ndim == 2 else ""
            raise ConfigError("data", name, f"the {what} must be [n, h, w, c] or [n, h, w], got {x.shape}{hint}")
    elif x.ndim < 2:
        raise ConfigError(
            "data", name, f"the {what} must be [n, ...], got {x.shape}; x.reshape(-1, 1) has one number each"
        )
    if x.ndim == 4 and x.shape[1] <= 4 < min(x.shape[2:]):
        hint = "the channels seem to come first; numpy.moveaxis(x, 1, -1) puts them last"
        if not pixels:
            hint += "; if they do come last, give numpy.swapaxes(x, 1, 2)"
        raise ConfigError("data", name, f"the {what} must be [n, h, w, c], got {x.shape}: {hint}")
    if x.size == 0:
        raise ConfigError("data", name, f"the {what} hold nothing, their shape is {x.shape}")
    return x if pixels else _checked_numbers(x, what, name)


def _tokens(x: np.ndarray, vocabulary: int, what: str, name: str) -> UInt8[np.ndarray, "samples length"]:
    """Tokens, or a ConfigError that says what to change."""
    if x.ndim != 2 or x.dtype.kind not in "iu":
        allowed = f"with a vocabulary, the {what} must be tokens, whole numbers [n, length], got {x.dtype} {x.shape}"
        raise ConfigError("data", name, allowed)
    if x.size == 0:
        raise ConfigError("data", name, f"the {what} hold nothing, their shape is {x.shape}")
    if x.min() < 0 or x.max() >= vocabulary:
        found = f"those of the {what} are from {x.min()} to {x.max()}"
        raise ConfigError("data", name, f"tokens must be within 0 to {vocabulary - 1}, the vocabulary; {found}")
    return x.astype(np.uint8, copy=False)


def _checked_numbers(x: np.ndarray, what: str, name: str) -> Float[np.ndarray, "samples ..."]:
    """Finite numbers as float32."""
    with np.errstate(over="ignore"):
        numbers: Float[np.ndarray, "samples ..."] = x.astype(np.float32)
    unknown = numbers.size - np.count_nonzero(np.isfinite(numbers))
    if unknown:
        rows = np.count_nonzero(~np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1))
        found = f"{unknown} of {numbers.size} numbers, in {rows} rows, are NaN or infinite as float32"
        allowed = f"the {what} must be finite; {found}"
        raise ConfigError("data", name, allowed)
    return numbers


def _checked_labels(y: np.ndarray, what: str, name: str, numbers_them: str) -> Int[np.ndarray, " samples"]:
    """Labels that are integers from 0 on, or a ConfigError that says what to change."""
    if y.ndim != 1:
        column = y.ndim == 2 and y.shape[1] == 1
        hint = ": y.ravel() makes them so" if column else ": y.argmax(1) gives these" if _is_one_hot(y) else ""
        raise ConfigError("data", name, f"the {what} must be class numbers [n], got {y.shape}{hint}")
    if y.dtype.kind not in "iu":
        broken = y[(y != np.floor(y)) | np.isinf(y)] if y.dtype.kind == "f" else y[:0]
        if len(broken):
            raise ConfigError(
                "data", name, f"the {what} must be integers, the numbers of classes, and {broken[0]} is none"
            )
        names = y.dtype.kind not in "bf"
        hint = numbers_them if names else "y.astype(int)"
        raise ConfigError("data", name, f"the {what} must be integers, got {y.dtype}: {hint}")
    if y.size and y.min() < 0:
        raise ConfigError("data", name, f"the {what} must be 0 or more, the smallest is {y.min()}")
    return y


def _class_numbers(parts: list[np.ndarray], name: str, numbers_them: str) -> Int[np.ndarray, " samples"]:
    """The labels of all parts as int32, or a ConfigError for IDs, which are too large for the numbers of classes."""
    largest = max(int(y.max()) for y in parts)
    if largest >= max(_MOST_CLASSES, sum(map(len, parts))):
        found = f"the largest of {len({label for y in parts for label in y.tolist()})} different ones is {largest}"
        allowed = f"the labels must be the numbers of classes, from 0 on; {found}: {numbers_them}"
        raise ConfigError("data", name, allowed)
    return _joined([y.astype(np.int32) for y in parts])


def _is_one_hot(y: np.ndarray) -> bool:
    """Whether each row has a single 1 and is 0 otherwise."""
    if y.ndim != 2 or y.size == 0 or y.dtype.kind not in "biuf":
        return False
    return bool(((y != 0).sum(axis=1) == 1).all() and (y.max(axis=1) == 1).all())
