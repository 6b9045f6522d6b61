"""Data sets that tensorflow-datasets (TFDS) has prepared as array_record files; they are read without TensorFlow."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedjax_pfl.data.cache import cached
from fedjax_pfl.data.dataset import Dataset, from_arrays
from fedjax_pfl.errors import ConfigError, first_line

# A data set, its config and its version. TFDS accepts more forms of NAME, but needs a network for some of them.
_NAME = re.compile(r"([a-z]\w*)(/[\w.\-]+)?(:[\d.*]+)?", re.ASCII)
_CHUNK = 1000  # samples decoded at once


def load(name: str) -> Dataset:
    """Loads the parts ``train`` and ``test`` of a data set, from the cache if its files have not changed.

    TFDS's folder is ``$TFDS_DATA_DIR``, else ``$FEDJAX_PFL_DATA/tensorflow_datasets``, else ``~/tensorflow_datasets``.

    Args:
      name: the text after ``tfds:``, such as ``"cifar10"`` or ``"emnist/byclass"``.

    Returns:
      The `Dataset`; ``test`` is the official test part, if there is one. Other parts are left out.

    Raises:
      ConfigError: field ``data.source``: the name is unknown, the data set is not prepared (the message has the command
        for it; nothing is ever downloaded here), it has no images with labels, or files are damaged.
    """
    matched = _NAME.fullmatch(name)
    if matched is None:
        _refuse(
            name, "a data set of tensorflow-datasets is needed: tfds:cifar10, tfds:emnist/byclass, tfds:mnist:3.0.1"
        )
    folder = _data_dir()
    return cached(f"tfds:{name} in {folder}", folder / matched[1], lambda: _decode(name, folder))


def _data_dir() -> Path:
    """The folder in which TFDS keeps data sets."""
    own = os.environ.get("TFDS_DATA_DIR")
    if own:
        return Path(os.path.expanduser(own)).resolve()
    data = os.environ.get("FEDJAX_PFL_DATA")
    return Path(os.path.expanduser(data or "~")).resolve() / "tensorflow_datasets"


def _decode(name: str, folder: Path) -> Dataset:
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=folder)
    except Exception as error:  # TFDS has an exception for each reason, down to AssertionError
        _refuse(name, f"tensorflow-datasets refuses it ({first_line(error)})")
    if not (builder.data_path / "dataset_info.json").exists():  # is_prepared() would also log a warning
        _refuse(name, f"it is not prepared in {folder}; {_how_to_prepare(name, folder)}")
    if builder.info.file_format.value != "array_record":  # the others need TensorFlow, or lose rows
        written = f"{builder.data_path} is written as {builder.info.file_format.value}, and array_record is needed"
        _refuse(name, f"{written}; move it away; {_how_to_prepare(name, folder)}")
    features = builder.info.features
    for feature, kind in ("image", tfds.features.Image), ("label", tfds.features.ClassLabel):
        if feature not in features or not isinstance(features[feature], kind):
            present = ", ".join(sorted(features))  # TFDS reads them from files in an order of its own
            _refuse(name, f"it has no feature {feature!r} of type {kind.__name__}; present: {present}")
    if "train" not in builder.info.splits:
        _refuse(name, f"it has no part 'train'; present: {', '.join(builder.info.splits)}")
    parts: list[np.ndarray] = []
    for part in ("train", "test"):
        if part in builder.info.splits:
            try:
                parts += _read(builder.as_data_source(split=part))
            except Exception as error:  # array_record and Pillow raise whatever damaged files lead them to
                reason = f"{type(error).__name__}: {error}"
                _refuse(name, f"its part {part!r} in {builder.data_path} cannot be read ({reason})")
    try:
        return from_arrays(*parts, name=name)
    except ConfigError as error:
        _refuse(name, error.allowed)


def _read(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """The images and labels of a part."""
    first = rows[0]["image"]
    images, labels = np.empty((len(rows), *first.shape), first.dtype), np.empty(len(rows), np.int32)
    for start in range(0, len(rows), _CHUNK):
        chunk = range(start, min(start + _CHUNK, len(rows)))
        for row, sample in zip(chunk, rows.__getitems__(list(chunk)), strict=True):
            if sample["image"].shape != first.shape:
                raise ValueError(f"images of shape {first.shape} and of shape {sample['image'].shape}")
            images[row], labels[row] = sample["image"], sample["label"]
    return images, labels


def _how_to_prepare(name: str, folder: Path) -> str:
    """The command that prepares a data set."""
    builder = f'tfds.builder("{name}", data_dir={json.dumps(str(folder))}, file_format="array_record")'
    code = f"import tensorflow_datasets as tfds; {builder}.download_and_prepare()"
    needed = 'a network and TensorFlow (pip install -e ".[tfds-prepare]")'
    return f"with {needed}, this prepares it: python -c {shlex.quote(code)}"


def _refuse(name: str, reason: str) -> NoReturn:
    raise ConfigError("data.source", f"tfds:{name}", reason) from None
