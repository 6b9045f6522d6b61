"""Image files in a folder, as CINIC-10, Tiny-ImageNet and VireoFood172 come and as many other data sets do.

What is there decides how a folder is read, in this order:

- Lists: ``train.txt``, ``val.txt`` (or ``valid.txt``, ``validation.txt``) and ``test.txt``, or VireoFood172's
  ``TR.txt``, ``VAL.txt`` and ``TE.txt``, with a line ``path/below/the/folder label`` per image. Where a line has no
  label, the folder that holds the image is its class. No path has a ``..``: images elsewhere would change unnoticed.
- Parts: folders with these names, each with a folder per class that holds the images, or a folder ``images`` of them.
  Tiny-ImageNet's ``val/images`` get their classes from ``val/val_annotations.txt``; its test part, which has no labels,
  is left out.
- A folder per class, and no parts.

``train`` is the training part. With a ``test``, that is the official test part and ``val`` belongs to the training part
(CINIC-10); without one, ``val`` is the official test part (Tiny-ImageNet). The classes are those of ``train``, in the
order of their names, numbers by value.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

import numpy as np
from jaxtyping import UInt8

from fedjax_pfl.data.cache import cached
from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

# Part -> the names of its folder, and of its list without the suffix; upper and lower case are the same.
_PARTS = {"train": ("train", "tr"), "val": ("val", "valid", "validation"), "test": ("test", "te")}
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif", ".jp2")
_SUFFIXES = (".png", *_JPEG, ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
GRAY = ("1", "L", "LA", "La")  # Pillow's modes with one channel of at most 8 bits, the others have colours
_MAX_SIZE = 1024
_LAYOUTS = (
    "a folder per class (PATH/<class>/*.png), such folders in PATH/train and PATH/test, or lists PATH/train.txt ..."
)


class _Sample(NamedTuple):
    """An image file, its class, and the folder or the line of a list that gives the class, for messages."""

    file: Path
    label: str
    where: str


def options(argument: str) -> tuple[str, int | None]:
    """Divides ``PATH?size=64`` into the path and the size, which is None where none is given.

    Raises:
      ConfigError: field ``data.source``: another option than ``?size=N``, or N is not 1 to 1024.
    """
    path, mark, option = argument.rpartition("?")
    if not mark:
        return argument, None
    size = re.fullmatch(r"size=([1-9][0-9]{0,3})", option, re.ASCII)
    if size is None or int(size[1]) > _MAX_SIZE:
        _refuse(
            f"folder:{argument}", f"the only option is ?size=N, to resize images to NxN pixels, N up to {_MAX_SIZE}"
        )
    return path, int(size[1])


def load(folder: Path, size: int | None, source: str) -> Dataset:
    """Loads the images of a folder, from the cache where nothing in the folder has changed.

    Args:
      folder: see the module's text for what it may hold.
      size: resizes all images to so many pixels in both directions (bilinear); None where they have one size.
      source: the source string, for errors.

    Returns:
      The `Dataset`, ordered by part, class and name of the file; lists keep their order. Images have one channel if all
      are grayscale, else three.

    Raises:
      ConfigError: field ``data.source``, with the file that cannot be used.
    """
    folder = folder.resolve()
    # A folder "a?size=2" is not the folder "a" with the option; no option is a "?" alone.
    option = f"?size={size}" if size is not None else "?" if "?" in folder.name else ""
    return cached(f"folder:{folder}{option}", folder, lambda: _decode(folder, size, source))


def _decode(folder: Path, size: int | None, source: str) -> Dataset:
    parts = _find_samples(folder, source)
    classes = sorted({sample.label for sample in parts["train"]}, key=_by_value)
    if len(classes) < 2:
        _refuse(source, f"{folder} has images of one class alone, {classes[0]!r}; expected is {_LAYOUTS}")
    index = {label: number for number, label in enumerate(classes)}
    named: dict[Path, str] = {}
    for sample in (sample for samples in parts.values() for sample in samples):
        if sample.label not in index:
            _refuse(source, f"{sample.where}: class {sample.label!r} has no images in the training part")
        if sample.file in named:
            _refuse(source, f"{sample.where}: {sample.file} is already named in {named[sample.file]}")
        named[sample.file] = sample.where
    test = parts.pop("test", None) or parts.pop("val", [])
    samples = [sample for samples in (*parts.values(), test) for sample in samples]
    return Dataset(
        name=folder.name,
        images=_images([sample.file for sample in samples], size, source),
        labels=np.array([index[sample.label] for sample in samples], np.int32),
        classes=len(classes),
        train_rows=len(samples) - len(test) if test else None,
    )


def _by_value(label: str) -> tuple[bool, int, str]:
    """Sorts numbers by their value, before all other names."""
    return (False, int(label), label) if label.isdecimal() else (True, 0, label)


def _find_samples(folder: Path, source: str) -> dict[str, list[_Sample]]:
    """The samples of each part that there is; never empty, and always with ``train``, which comes first."""
    lists = _named_as_parts(_entries(folder), ".txt", source)
    if lists:
        if "train" not in lists:
            _refuse(
                source, f"next to {next(iter(lists.values()))} there is no train.txt (or TR.txt) for the training part"
            )
        return {part: _listed(file, folder, source) for part, file in lists.items()}
    folders = _named_as_parts(_subfolders(folder), "", source)
    train, val = folders.get("train"), folders.get("val")
    others = [other for other in _subfolders(folder) if other.name.lower().startswith(("val", "test"))]
    if train is not None and others and _image_files(train):
        _refuse(source, f"{train} holds images, beside {others[0]}; expected is {_LAYOUTS}")
    if train is None or not _subfolders(train):  # a folder "train" that holds images itself is a class
        return {"train": _by_class(folder, source)}
    if val is not None and (val / "images").is_dir() and not (train / "images").is_dir():
        return {"train": _by_class(train, source), "val": _annotated(val, source)}
    return {part: _by_class(inside, source) for part, inside in folders.items()}


def _named_as_parts(entries: Sequence[Path], suffix: str, source: str) -> dict[str, Path]:
    """Which of the files or folders are named as parts: part -> entry."""
    found: dict[str, Path] = {}
    for part, names in _PARTS.items():
        matching = [entry for entry in entries if entry.name.lower() in {name + suffix for name in names}]
        if len(matching) > 1:
            _refuse(source, f"{matching[0]} and {matching[1]} are both named as the part {part!r}")
        if matching:
            found[part] = matching[0]
    return found


def _by_class(folder: Path, source: str) -> list[_Sample]:
    """The images of a folder that has a folder per class."""
    samples = []
    for inside in _subfolders(folder):
        files = _image_files(inside) + _image_files(inside / "images")
        if not files:
            _refuse(source, f"{inside} holds no images ({', '.join(_SUFFIXES)}); expected is {_LAYOUTS}")
        for below in _folders_below(inside):
            if below != inside / "images" and _image_files(below):
                _refuse(source, f"{below} holds images, in a folder of a class; expected is {_LAYOUTS}")
        samples += [_Sample(file, inside.name, str(inside)) for file in files]
    if not samples:
        _refuse(source, f"{folder} holds no folders of images; expected is {_LAYOUTS}")
    return samples


def _annotated(folder: Path, source: str) -> list[_Sample]:
    """The images of Tiny-ImageNet's validation part."""
    annotations = folder / "val_annotations.txt"
    if not annotations.is_file():
        _refuse(source, f"{annotations} is missing, which gives the images in {folder / 'images'} their classes")
    labels: dict[str, tuple[str, str]] = {}
    for where, line in _lines(annotations, source):
        name, *rest = line.split("\t")
        if not rest:
            _refuse(source, f"{where}: a name and a class are needed, with a tab between, got {line!r}")
        labels[name] = rest[0], where
    files = _image_files(folder / "images")
    for name in sorted(labels.keys() - {file.name for file in files}):
        _refuse(source, f"{labels[name][1]}: there is no image {folder / 'images' / name}")
    for file in files:
        if file.name not in labels:
            _refuse(source, f"{annotations} has no line for {file}")
    if not files:
        _refuse(source, f"{folder / 'images'} holds no images")
    return [_Sample(file, *labels[file.name]) for file in files]


def _listed(listing: Path, folder: Path, source: str) -> list[_Sample]:
    """The images that a list names."""
    samples = []
    for where, line in _lines(listing, source):
        if line.lower().endswith(_SUFFIXES):
            name, label = line, Path(line).parent.name
        else:
            name, _, label = line.replace("\t", " ").rpartition(" ")
        file = folder / name.strip().lstrip("/")
        if not name or not label:
            _refuse(source, f"{where}: a path and a label are needed, with a space between, got {line!r}")
        if ".." in file.parts:
            _refuse(source, f"{where}: a path below {folder} is needed, without '..', got {name!r}")
        if not os.path.isfile(file):
            _refuse(source, f"{where}: there is no image {file}")
        samples.append(_Sample(file, label, where))
    if not samples:
        _refuse(source, f"{listing} names no images")
    return samples


def _lines(file: Path, source: str) -> list[tuple[str, str]]:
    """The lines that are not blank, each with its place for messages."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        _refuse(source, f"{file} is no readable text file ({error})")
    return [(f"{file}, line {number}", line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, sorted by name, without hidden files (some systems add their own to every folder)."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _subfolders(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_dir()]


def _folders_below(folder: Path) -> Iterator[Path]:
    """All folders below; what a link leads to is not searched further, as it may lead up again."""
    for inside in _subfolders(folder):
        yield inside
        if not inside.is_symlink():
            yield from _folders_below(inside)


def _image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [entry for entry in _entries(folder) if entry.suffix.lower() in _SUFFIXES and entry.is_file()]


def _images(files: Sequence[Path], size: int | None, source: str) -> UInt8[np.ndarray, "samples h w c"]:
    """Decodes all files into one array, whose shape their headers tell."""
    from PIL.Image import Resampling  # not at the top, as most runs use other data

    gray, first = True, None
    for file in files:
        mode, pixels = _opened(file, source, lambda image: (image.mode, image.size))
        if mode[0] in "IF":
            _refuse(source, f"{file} has pixels of more than 8 bits (Pillow's mode {mode}); convert it to 8 bits first")
        gray = gray and mode in GRAY
        first = first or pixels
        if size is None and pixels != first:
            sizes = f"{file} has {pixels[0]}x{pixels[1]} pixels, {files[0]} has {first[0]}x{first[1]}"
            _refuse(source, f"{sizes}; images of one size are needed: ?size=64 after the path resizes all to 64x64")
    width, height = (size, size) if size is not None else first or (0, 0)
    images = np.empty((len(files), height, width, 1 if gray else 3), np.uint8)

    def pixels_of(image: "Image") -> np.ndarray:
        image = image.convert("L" if gray else "RGB")
        if size is not None:
            image = image.resize((size, size), Resampling.BILINEAR)
        return np.asarray(image)

    for file, place in zip(files, images, strict=True):
        place[:] = _opened(file, source, pixels_of).reshape(place.shape)
    return images


def _opened(file: Path, source: str, take: "Callable[[Image], T]") -> T:
    """What `take` takes from an image, or a ConfigError for a file that Pillow cannot decode."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return take(image)
    except Exception as error:  # Pillow's decoders raise whatever the damaged bytes lead them to
        _refuse(source, f"{file} cannot be decoded as an image ({type(error).__name__}: {error})")


def _refuse(source: str, reason: str) -> NoReturn:
    raise ConfigError("data.source", source, reason) from None
