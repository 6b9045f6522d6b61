"""Writes a divided data set in the folder layout of PFLlib (Zhang et al. 2023, arXiv:2312.04992).

``train/0.npz``, ``test/0.npz`` and so on each hold one object, a dict of x and y, which PFLlib reads by
``np.load(file, allow_pickle=True)["data"].tolist()``; ``config.json`` describes the partition.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from fedjax_pfl.data.dataset import Dataset, check_channels
from fedjax_pfl.data.dealing import named
from fedjax_pfl.data.rows import Holdings, union
from fedjax_pfl.errors import ConfigError

_FIELD = "--pfllib"
_KINDS = {"dirichlet": "dir", "pathological": "pat"}  # what PFLlib calls them


def export(
    folder: str,
    dataset: Dataset,
    holdings: Holdings,
    *,
    partition: Mapping[str, Any],
    batch_size: int,
    mean: float | Sequence[float],
    std: float | Sequence[float],
) -> None:
    """Writes the samples of every client, as PFLlib reads them.

    Args:
      folder: the target folder, new or empty.
      dataset: the samples.
      holdings: the training and test rows of each client.
      partition: kind and options, for ``config.json``.
      batch_size: the batch size, for ``config.json``.
      mean: mean by which pixels, scaled to [0, 1], are normalised: one number or one per channel; 0.5 in PFLlib.
      std: standard deviation, likewise.

    Raises:
      ConfigError: the folder is not empty or cannot be written; the samples are text; there are validation samples,
        which PFLlib does not have, or clients without test samples, which it cannot score; or `mean` or `std` has more
        or fewer numbers than the images have channels.
    """
    if dataset.vocabulary is not None:
        raise ConfigError(_FIELD, folder, f"images or numbers: {dataset.name} is text")
    if any(len(rows.validation) for rows in holdings.splits):
        raise ConfigError(_FIELD, folder, "data.validation_share = 0: PFLlib has no validation samples")
    untested = [client for client, rows in enumerate(holdings.splits) if not len(rows.test)]
    if untested:
        raise ConfigError(_FIELD, folder, f"test samples for {named(untested)}: PFLlib scores every client")
    if dataset.images.dtype == np.uint8:
        for field, given in (("data.mean", mean), ("data.std", std)):
            check_channels(field, given, dataset.images.shape[-1])
    target = Path(os.path.expanduser(folder))
    if os.path.isfile(target) or (os.path.isdir(target) and any(target.iterdir())):
        raise ConfigError(_FIELD, folder, "a folder that is new or empty")
    try:
        for part in ("train", "test"):
            (target / part).mkdir(parents=True)
            for client, split in enumerate(holdings.splits):
                rows = getattr(split, part)
                x = _as_read(dataset.images[rows], mean, std)
                held = np.array({"x": x, "y": dataset.labels[rows].astype(np.int64)})
                np.savez_compressed(target / part / f"{client}.npz", data=held)
        (target / "config.json").write_text(json.dumps(_config(dataset, holdings, partition, batch_size)))
    except OSError as error:
        raise ConfigError(_FIELD, folder, f"a folder that can be written ({error.strerror})") from None


def _as_read(
    x: Shaped[np.ndarray, "samples ..."], mean: float | Sequence[float], std: float | Sequence[float]
) -> Float[np.ndarray, "samples ..."]:
    """Samples as float32, pixels normalised, the channels of images first."""
    if x.dtype == np.uint8:
        x = (x.astype(np.float32) / 255 - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.moveaxis(x, -1, 1) if x.ndim == 4 else x


def _config(dataset: Dataset, holdings: Holdings, partition: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    labels = [dataset.labels[union([rows.train, rows.test])] for rows in holdings.splits]
    sizes = [len(held) for held in labels]
    return {
        "num_clients": len(labels),
        "num_classes": dataset.classes,
        "non_iid": partition["kind"] != "iid",
        "balance": max(sizes) - min(sizes) <= 1,
        "partition": _KINDS.get(partition["kind"], partition["kind"]),
        "Size of samples for labels in clients": [
            [[int(label), int(count)] for label, count in zip(*np.unique(held, return_counts=True), strict=True)]
            for held in labels
        ],
        "alpha": partition.get("beta"),
        "batch_size": batch_size,
    }
