"""LEAF's JSON format (Caldas et al. 2018, arXiv:1812.01097): images as in FEMNIST, text as in Shakespeare.

Only ``user_data`` of a shard is used: ``num_samples`` is wrong in some files, and ``users`` adds no information.

LEAF splits a data set by samples (each user is in both parts) or by users (the parts have no user in common). A data
set split by users works with ``data.split = "merge"``, and with ``"official"`` and any partition but ``"natural"``,
because its users have no test samples of their own (`fedjax_pfl.data.divide` raises an error for this case).

Consecutive windows of Shakespeare share all but one character. A random split (``data.split = "merge"``) would put the
answers to the test samples into the training samples: use ``"official"``.
"""

import json
import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from fedjax_pfl.errors import ConfigError

# The 80 symbols of LEAF's Shakespeare in LEAF's order, that of ASCII; a symbol's position is its token and its class.
ALPHABET = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
UNKNOWN = " "  # any other character counts as a space

# FEMNIST's classes, for labels that are given as characters.
_FEMNIST = string.digits + string.ascii_uppercase + string.ascii_lowercase

# Code point -> token. The last entry serves all code points from there on.
_TOKENS = np.full(129, ALPHABET.index(UNKNOWN), np.uint8)
_TOKENS[[ord(symbol) for symbol in ALPHABET]] = np.arange(len(ALPHABET))


class Part(NamedTuple):
    """The training or the test part, ordered by user; the samples of each user keep their order.

    Attributes:
      x: uint8, images ``[samples, h, w, 1]`` (255 is white paper) or tokens ``[samples, length]``.
      y: labels ``[samples]``.
      users: the name of each sample's user, ``[samples]``.
    """

    x: UInt8[np.ndarray, "samples ..."]
    y: Int[np.ndarray, " samples"]
    users: Shaped[np.ndarray, " samples"]


def read(folder: Path, source: str) -> list[Part]:
    """Reads the shards of a LEAF data set.

    Args:
      folder: contains the folders ``train`` and ``test``, or one of them, or the shards themselves.
      source: the source string, for errors.

    Returns:
      The training part, and the test part if there is one. The order of the shards, and of the keys in them, does not
      matter. A user may be spread over several shards.

    Raises:
      ConfigError: field ``data.source``: there are no shards, a shard is not LEAF JSON, or samples do not fit together.
    """
    inside = [folder / name for name in ("train", "test") if (folder / name).is_dir()]
    parts = [_read_part(part, source) for part in inside or [folder]]
    shapes = [part.x.shape[1:] for part in parts]
    if shapes[0] != shapes[-1]:
        allowed = f"samples of {inside[0]} are {_describe(shapes[0])}, those of {inside[1]} {_describe(shapes[1])}"
        raise ConfigError("data.source", source, allowed)
    return parts


def _read_part(folder: Path, source: str) -> Part:
    """All shards of a folder in one."""
    by_user: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    first: tuple[Path, tuple[int, ...]] | None = None
    for shard in sorted(folder.glob("*.json")):
        for user, entry in _user_data(shard, source).items():
            try:
                x, y = _samples(entry)
                if not len(y):
                    continue
                first = first or (shard, x.shape[1:])
                if x.shape[1:] != first[1]:
                    raise ValueError(f"it has {_describe(x.shape[1:])}, {first[0].name} has {_describe(first[1])}")
            except ValueError as error:
                raise ConfigError("data.source", source, f"user {user!r} in {shard}: {error}") from None
            by_user.setdefault(user, []).append((x, y))
    if not by_user:
        allowed = f"{folder} holds no JSON shard with samples; LEAF's are in the folders train and test of a data set"
        raise ConfigError("data.source", source, allowed)
    rows = [(user, x, y) for user in sorted(by_user) for x, y in by_user[user]]
    users = np.repeat([user for user, _, _ in rows], [len(y) for _, _, y in rows])
    return Part(np.concatenate([x for _, x, _ in rows]), np.concatenate([y for _, _, y in rows]), users)


def _user_data(shard: Path, source: str) -> dict[str, Any]:
    """What a shard holds: user -> {"x": [...], "y": [...]}."""
    try:
        content = json.loads(shard.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("data.source", source, f"{shard} is no readable JSON file ({error})") from None
    held = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(held, dict):
        raise ConfigError("data.source", source, f'{shard} is no LEAF shard: it has no table "user_data"')
    return held


def _samples(entry: Any) -> tuple[UInt8[np.ndarray, "samples ..."], Int[np.ndarray, " samples"]]:
    """A user's samples in one shard, or a ValueError that says what is wrong with them."""
    x, y = (entry.get(name) if isinstance(entry, dict) else None for name in ("x", "y"))
    if not isinstance(x, list) or not isinstance(y, list):
        raise ValueError("it needs the lists x and y")
    if len(x) != len(y):
        raise ValueError(f"{len(x)} samples x and {len(y)} labels y")
    if x and all(isinstance(text, str) for text in x):
        if all(text.lower().endswith((".jpg", ".png")) for text in x):
            raise ValueError(f"x has the names of files, such as {x[0]!r}; of LEAF, images within the shards are read")
        return _tokens(x), _labels(y, ALPHABET, classes=len(ALPHABET), unknown=UNKNOWN)
    return _images(x), _labels(y, _FEMNIST, classes=np.iinfo(np.int32).max)


def _tokens(texts: Sequence[str]) -> UInt8[np.ndarray, "samples length"]:
    """Texts of one length, as tokens."""
    lengths = sorted({len(text) for text in texts})
    if lengths[0] != lengths[-1] or not lengths[0]:
        raise ValueError(f"texts of {lengths[0]} and of {lengths[-1]} characters; all need the same number")
    # Two halves of a surrogate pair may lie in different windows, which strict encoders refuse.
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), "<u4")
    tokens: np.ndarray = _TOKENS[np.minimum(points, len(_TOKENS) - 1)].reshape(len(texts), -1)
    return tokens


def _images(rows: Sequence[Any]) -> UInt8[np.ndarray, "samples h w 1"]:
    """Square images, which are given flat with values of 0 to 1."""
    try:
        values = np.array(rows, np.float64)
    except (ValueError, TypeError, OverflowError):
        raise ValueError("x is neither texts nor lists of numbers, all of one length") from None
    width = math.isqrt(values.shape[-1])
    if rows and (values.ndim != 2 or width * width != values.shape[-1] or not width):
        raise ValueError(f"x of shape {list(values.shape)} is no list of flat square images, such as 784 numbers each")
    if rows and not (values.min() >= 0 and values.max() <= 1):  # false for NaN as well
        raise ValueError(f"pixels from {values.min()} to {values.max()}; they must be within 0 and 1")
    return np.rint(values * 255).astype(np.uint8).reshape(len(rows), width, width, 1)


def _labels(given: Sequence[Any], symbols: str, *, classes: int, unknown: str | None = None) -> Int[np.ndarray, " n"]:
    """Labels from whole numbers of either type, or from characters by their position among the symbols."""
    labels = []
    for label in given:
        if isinstance(label, str) and len(label) == 1 and (label in symbols or unknown is not None):
            labels.append(symbols.index(label if label in symbols else str(unknown)))
        elif isinstance(label, int | float) and label == label // 1 and 0 <= label < classes:
            labels.append(int(label))
        else:
            limit = f"0 to {classes - 1}" if unknown is not None else "0 or more"
            raise ValueError(f"label {label!r} is neither a whole number, {limit}, nor a known character")
    return np.array(labels, np.int32)


def _describe(shape: tuple[int, ...]) -> str:
    """The samples of a shape, in words."""
    return f"texts of {shape[0]} characters" if len(shape) == 1 else f"images of {shape[0]}x{shape[1]} pixels"
