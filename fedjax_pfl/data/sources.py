"""Data sources: where labelled images, texts and tables come from, before they are divided among clients.

A source is a string: ``"digits"``, or a prefix with an argument such as ``"npz:PATH"``. `SOURCES` lists them all.
"""

import functools
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from fedjax_pfl.data import folders, hugging_face, leaf, tfds
from fedjax_pfl.data.dataset import Dataset, from_arrays, numbered
from fedjax_pfl.errors import ConfigError

# The arrays of an npz file in the order of the arguments of `from_arrays`; the first name found counts.
_NPZ_NAMES = (("image", "x"), ("label", "y"), ("image_test", "x_test"), ("label_test", "y_test"))
_NPZ_USERS = (("user", "writer"), ("user_test", "writer_test"))


def load(source: str) -> Dataset:
    """Loads the data that a source string names.

    Args:
      source: a key of `SOURCES`, some with an argument after a colon: ``"digits"``, ``"npz:my/data.npz"``.

    Returns:
      The `Dataset`; its rows are in the order of the source.

    Raises:
      ConfigError: field ``data.source``, for an unknown source and for data that cannot be used.
    """
    prefix, _, argument = source.partition(":")
    if prefix == "arrays":
        allowed = "with data from Python beside it: simulate(config, data), compare(config, methods, data=data)"
        raise ConfigError("data.source", source, allowed)
    if prefix not in SOURCES:
        allowed = "; ".join(f"{name}: {description}" for name, (_, description) in SOURCES.items())
        raise ConfigError("data.source", source, f"known sources are {allowed}")
    loader, _ = SOURCES[prefix]
    return loader(argument)


def _load_digits(argument: str) -> Dataset:
    """scikit-learn's copy of the UCI optical digits: uint8 ``[1797, 8, 8, 1]``, 10 classes, nothing to download."""
    if argument:
        raise ConfigError("data.source", f"digits:{argument}", "'digits' takes no argument")
    images, labels = _digits()
    return from_arrays(images.copy(), labels.copy(), name="digits")


@functools.cache
def _digits() -> tuple[UInt8[np.ndarray, "1797 8 8"], Int[np.ndarray, " 1797"]]:
    """The images and labels, read once, because the source is a text file."""
    from sklearn.datasets import load_digits  # takes a second to import, and most runs use other data

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # the source counts 0..16 dark pixels per cell
    return images, bunch.target


def _load_npz(argument: str) -> Dataset:
    """A user's own arrays from an npz file; `SOURCES` lists the names of the arrays."""
    source = f"npz:{argument}"
    path = _find(argument, source)
    if not zipfile.is_zipfile(path):
        raise ConfigError("data.source", source, f"{path} is no npz file; write one with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as archive:
            present = archive.files
            # asarray: NumPy hands out members that are no arrays as bytes, which then fail the dtype check.
            images, labels, test_images, test_labels, users, test_users = (
                next((np.asarray(archive[name]) for name in names if name in archive), None)
                for names in (*_NPZ_NAMES, *_NPZ_USERS)
            )
    except (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError("data.source", source, f"{path} cannot be read as plain arrays ({error})") from error
    if images is None or labels is None:
        needed = "arrays image (or x) and label (or y)"
        allowed = f"{path} must hold {needed}; present: {', '.join(present) or 'none'}"
        raise ConfigError("data.source", source, allowed)
    try:
        made = from_arrays(images, labels, test_images, test_labels, users=users, test_users=test_users, name=path.stem)
    except ConfigError as error:
        raise ConfigError("data.source", source, error.allowed) from error
    known = {name for names in (*_NPZ_NAMES, *_NPZ_USERS) for name in names}
    return made._replace(left_out=tuple(name for name in present if name not in known))


def _load_leaf(argument: str) -> Dataset:
    """A LEAF data set, images or text; see `fedjax_pfl.data.leaf`."""
    source = f"leaf:{argument}"
    folder = _find(argument, source, folder=True)
    parts = leaf.read(folder, source)
    x, y, users = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    text, (numbers, names) = x.ndim == 2, numbered(users)
    return Dataset(
        name=folder.resolve().name,
        images=x,
        labels=y,
        classes=len(leaf.ALPHABET) if text else int(y.max()) + 1,
        train_rows=len(parts[0].y) if len(parts) > 1 else None,
        users=numbers,
        vocabulary=len(leaf.ALPHABET) if text else None,
        user_names=names,
    )


def _load_folder(argument: str) -> Dataset:
    """Images in a folder; see `folders` for the possible layouts."""
    source = f"folder:{argument}"
    literal = any(os.path.isdir(path) for path in _candidates(argument))  # its own name may have a "?"
    path, size = (argument, None) if literal else folders.options(argument)
    return folders.load(_find(path, source, folder=True), size, source)


def _load_hugging_face(argument: str) -> Dataset:
    """A data set of Hugging Face's library: a folder that it has saved, or else a name; see `hugging_face`."""
    name, _ = hugging_face.options(argument)
    saved = ("dataset_dict.json", "dataset_info.json")
    written = (path for path in _candidates(name) if any(os.path.isfile(path / file) for file in saved))
    return hugging_face.load(argument, next(written, None))


def _candidates(argument: str) -> list[Path]:
    """The files that a PATH may mean: the path itself, or the path below the folder in FEDJAX_PFL_DATA."""
    given = Path(os.path.expanduser(argument))
    candidates = [Path.cwd() / given]
    shelf = os.environ.get("FEDJAX_PFL_DATA")
    if shelf and not given.is_absolute():
        candidates.append(Path(os.path.expanduser(shelf)) / given)
    return candidates


def _find(argument: str, source: str, *, folder: bool = False) -> Path:
    """The file (or folder) that a PATH means."""
    if not argument:
        prefix = source.partition(":")[0]
        raise ConfigError("data.source", source, f"a path is needed after the colon: {prefix}:PATH")
    candidates = _candidates(argument)
    for candidate in candidates:
        if os.path.isdir(candidate) if folder else os.path.isfile(candidate):
            return candidate
    what = "folder" if folder else "file"
    looked = " and ".join(str(candidate) for candidate in candidates)
    hint = (
        ""
        if os.environ.get("FEDJAX_PFL_DATA")
        else " (the environment variable FEDJAX_PFL_DATA may name a folder of data files)"
    )
    raise ConfigError("data.source", source, f"there is no such {what}; looked for {looked}{hint}")


# Prefix -> (loader of the argument after the colon, one line for `fedjax-pfl datasets`).
SOURCES: dict[str, tuple[Callable[[str], Dataset], str]] = {
    "digits": (_load_digits, "1,797 handwritten 8x8 digits in 10 classes, part of scikit-learn (no download)"),
    "npz": (
        _load_npz,
        "npz:PATH, your own arrays image (or x), uint8 [n,h,w,c] or floats [n,...], and label (or y) [n]; "
        "optional test part image_test, label_test; optional user (or writer) [n] and user_test",
    ),
    "folder": (
        _load_folder,
        "folder:PATH, image files in a folder per class, or with lists (CINIC-10, Tiny-ImageNet, VireoFood172); "
        "folder:PATH?size=64 resizes them",
    ),
    "tfds": (
        tfds.load,
        "tfds:NAME, what tensorflow-datasets has prepared as array_record: tfds:cifar10, tfds:emnist/byclass, ...",
    ),
    "hf": (
        _load_hugging_face,
        "hf:NAME, what Hugging Face's datasets library loads, or a folder that its save_to_disk wrote: hf:cifar10, "
        "hf:uoft-cs/cifar100?image=img&label=fine_label&config=cifar100",
    ),
    "leaf": (
        _load_leaf,
        "leaf:PATH, a folder of LEAF JSON shards in train and test: images (FEMNIST) or text (Shakespeare), with users",
    ),
}
