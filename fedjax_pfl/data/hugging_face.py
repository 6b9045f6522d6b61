"""Data sets of Hugging Face's ``datasets`` library: from its hub, from a folder, or as Python objects."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedjax_pfl.data.dataset import Dataset, from_arrays
from fedjax_pfl.data.folders import GRAY
from fedjax_pfl.errors import ConfigError, first_line

_OPTIONS = ("image", "label", "config")
# If no column has the expected type, or more than one has it, the column is chosen by name; the first that exists.
_IMAGE_NAMES = ("image", "img", "x", "features", "pixels")
_LABEL_NAMES = ("label", "labels", "fine_label", "y", "target")
_PARTS = ("train", "test")
_CHUNK = 1000  # samples decoded at once


def options(argument: str) -> tuple[str, dict[str, str]]:
    """Divides ``NAME?image=img&label=fine_label&config=plain_text`` into the name and the options.

    Raises:
      ConfigError: field ``data.source``: the name is missing, or an option is unknown, empty or given twice.
    """
    name, mark, text = argument.partition("?")
    pairs = [pair.partition("=")[::2] for pair in text.split("&")] if mark else []
    given = dict(pairs)
    if not name or len(given) < len(pairs) or not all(given.values()) or not set(given) <= set(_OPTIONS):
        allowed = "hf:NAME or hf:FOLDER; options are ?image=COLUMN&label=COLUMN&config=NAME, each of them once or not"
        _refuse(argument, allowed)
    return name, given


def load(argument: str, folder: Path | None) -> Dataset:
    """Loads the parts ``train`` and ``test`` of a data set.

    Args:
      argument: a name for ``datasets.load_dataset``, with `options`: the columns of samples and labels, and the
        configuration of the data set.
      folder: a folder written by ``save_to_disk``, which is read instead of loading the data set by name; or None.

    Returns:
      The `Dataset`; ``test`` is the official test part, if there is one. Other parts are left out.

    Raises:
      ConfigError: field ``data.source``: the library is not installed, there is no such data set, or no such columns.
    """
    name, given = options(argument)
    try:
        import datasets
    except ImportError:
        _refuse(argument, 'it needs the package datasets: pip install "fedjax_pfl[hf]"')
    try:
        found = datasets.load_dataset(name, given.get("config")) if folder is None else datasets.load_from_disk(folder)
    except Exception as error:  # the library and those below it raise what they like, down to OSError
        looked = "no such folder, and as a data set of the hub it " if folder is None else ""
        _refuse(argument, f"{looked}cannot be loaded ({type(error).__name__}: {first_line(error)})")
    parts = found if is_dict(found) else {"train": found}
    try:
        called = os.path.basename(name) if folder is None else folder.resolve().name
        return of_parts(parts, called, given.get("image"), given.get("label"))
    except ConfigError as error:
        _refuse(argument, error.allowed)


def is_dict(data: Any) -> bool:
    """Whether it is a ``DatasetDict``; nothing is imported to find out."""
    return _is(data, "datasets.dataset_dict", "DatasetDict")


def is_data_set(data: Any) -> bool:
    """Whether it is a ``Dataset`` of this library."""
    return _is(data, "datasets.arrow_dataset", "Dataset")


def is_column(data: Any) -> bool:
    """Whether it is a column of a ``Dataset``, which NumPy makes an array of."""
    return _is(data, "datasets.arrow_dataset", "Column")


def of_parts(parts: Mapping[str, Any], name: str, image: str | None = None, label: str | None = None) -> Dataset:
    """The `Dataset` of the training part, and of the test part if there is one.

    Args:
      parts: a ``DatasetDict``, or a similar mapping.
      name: what reports and errors call the data.
      image: the column of the samples; found by its type or name unless given.
      label: the column of the labels, likewise.

    Raises:
      ConfigError: field ``data``: there is no training part, or its columns or arrays do not fit.
    """
    if "train" not in parts:
        raise ConfigError("data", "DatasetDict", f"it needs a part 'train'; present: {', '.join(parts) or 'none'}")
    present = {part: parts[part] for part in _PARTS if part in parts}
    arrays = [array for part, data in present.items() for array in columns(data, part, image, label)]
    _check_names({part: _label_of(data, label) for part, data in present.items()})
    made = from_arrays(*arrays, name=name)
    return made._replace(left_out=tuple(part for part in parts if part not in _PARTS))


def columns(data: Any, part: str, image: str | None = None, label: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels of a ``Dataset``, as its columns are stored; its format or transform is ignored.

    Args:
      data: the ``Dataset``.
      part: the name of the part, for errors.
      image: as in `of_parts`.
      label: likewise.

    Raises:
      ConfigError: field ``data``: there is no such column; or samples or labels are missing, cannot be decoded or
        differ in shape.
    """
    if not len(data):
        raise ConfigError("data", part, f"the {part} part holds nothing")
    features, types = data.features, _types(data)
    image = _column(types, "Image", _IMAGE_NAMES, "image", image)
    label = _column(types, "ClassLabel", _LABEL_NAMES, "label", label)
    labels = _labels(data.with_format(None).select_columns(label)[:][label], label, part)
    if types[image] == "Image":
        pictures = data.with_format(None).select_columns(image)
        if not features[image].decode:  # it would hand out files, not images
            pictures = pictures.cast_column(image, type(features[image])())
        return _decoded(pictures, image, part), labels
    return _numbers(data.with_format("numpy").select_columns(image), features[image], image, part), labels


def _types(data: Any) -> dict[str, str]:
    """The types of a data set's columns, by name."""
    return {name: type(feature).__name__ for name, feature in data.features.items()}


def _label_of(data: Any, label: str | None) -> tuple[str, list[str] | None]:
    """The column of the labels, and the names of the classes, if it has them."""
    label = _column(_types(data), "ClassLabel", _LABEL_NAMES, "label", label)
    return label, getattr(data.features[label], "names", None)


def _check_names(labels: Mapping[str, tuple[str, list[str] | None]]) -> None:
    """Checks that all parts number their classes alike: ``class_encode_column`` numbers each part by itself."""
    (first, (_, known)), *others = labels.items()
    for part, (column, names) in others:
        if known is not None and names is not None and names != known:
            which = (
                f"column {column!r} numbers the classes of {first} as {_some(known)} and of {part} as {_some(names)}"
            )
            way = f"{part}.align_labels_with_mapping({{name: number of {first}}}, {column!r}) numbers them alike"
            raise ConfigError("data", part, f"{which}; {way}")


def _some(names: list[str]) -> str:
    return ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])


def _column(types: Mapping[str, str], wanted: str, names: tuple[str, ...], option: str, given: str | None) -> str:
    """The given column, or else the only one of the type, or else the first one with one of the usual names.

    If the only one of the type has no usual name, and another column is called ``label`` or ``image``, either may be
    meant.
    """
    present = ", ".join(f"{name} ({kind})" for name, kind in types.items())
    if given is not None:
        if given not in types:
            raise ConfigError("data", "Dataset", f"there is no column {given!r}; present: {present}")
        return given
    typed = [name for name, kind in types.items() if kind == wanted]
    if len(typed) == 1 and (typed[0] in names or option not in types):
        return typed[0]
    named = [name for name in names if name in (typed or types)]
    if not named:
        said = f"hf:NAME?{option}=COLUMN, or rename_column(COLUMN, {option!r})"
        allowed = f"which column is the {option} must be said: {said}; present: {present}"
        raise ConfigError("data", "Dataset", allowed)
    return named[0]


def _labels(given: list[Any], column: str, part: str) -> np.ndarray:
    """Labels as an array, whatever their type."""
    if None in given:
        raise ConfigError("data", part, f"sample {given.index(None)} of the {part} part has no label in {column!r}")
    try:
        return np.asarray(given)
    except ValueError:
        raise ConfigError("data", part, f"the labels in column {column!r} of the {part} part differ in shape") from None


def _decoded(data: Any, column: str, part: str) -> np.ndarray:
    """Decoded images as one array, with one channel if all are gray, else with three."""
    found: list[np.ndarray] = []
    for start in range(0, len(data), _CHUNK):
        try:
            images = data[start : start + _CHUNK][column]
        except Exception as error:  # Pillow's decoders raise whatever the damaged bytes lead them to
            which = f"an image in column {column!r} of the {part} part, one of samples {start} to"
            reason = f"cannot be decoded ({type(error).__name__}: {first_line(error)})"
            raise ConfigError("data", part, f"{which} {min(start + _CHUNK, len(data)) - 1}, {reason}") from None
        for image in images:
            if image is None or image.mode[0] in "IF":
                what = "no image" if image is None else f"more than 8 bits (Pillow's mode {image.mode})"
                where = f"in column {column!r} of the {part} part"
                raise ConfigError("data", part, f"sample {len(found)} has {what} {where}")
            found.append(np.asarray(image.convert("L" if image.mode in GRAY else "RGB")))
            if found[-1].shape[:2] != found[0].shape[:2]:
                sizes = f"sample 0 has {found[0].shape[:2]}, sample {len(found) - 1} {found[-1].shape[:2]}"
                where = f"in column {column!r} of the {part} part"
                raise ConfigError("data", part, f"images of one size (height, width) are needed {where}; {sizes}")
    if all(image.ndim == 2 for image in found):
        return np.stack(found)[..., np.newaxis]
    return np.stack([image if image.ndim == 3 else np.repeat(image[..., np.newaxis], 3, -1) for image in found])


def _numbers(data: Any, feature: Any, column: str, part: str) -> np.ndarray:
    """Numbers as one array; pixels, uint8, are those declared so, and whole numbers from 0 to 255 with three axes."""
    try:
        x = data[:][column]
    except AttributeError:  # the library asks a sample for its shape, though it be null
        x = None
    if not isinstance(x, np.ndarray) or x.dtype == object or not x.size:
        needed = "must be numbers, in one shape, none of them missing"
        raise ConfigError("data", part, f"the samples in column {column!r} of the {part} part {needed}")
    while hasattr(feature, "feature"):  # a list of lists
        feature = feature.feature
    kept = getattr(feature, "dtype", "") == "uint8"
    # Floats stay so, with the NaN that the library has for a missing sample.
    pixels = x.dtype.kind in "iu" and (kept or (x.ndim > 2 and x.min() >= 0 and x.max() <= 255))
    return x.astype(np.uint8) if pixels else x


def _is(data: Any, module: str, name: str) -> bool:
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(data).__mro__)


def _refuse(argument: str, reason: str) -> NoReturn:
    raise ConfigError("data.source", f"hf:{argument}", reason) from None
