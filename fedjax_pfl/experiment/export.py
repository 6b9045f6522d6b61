"""Features and predictions of personal models, for ``run.export``."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fedjax_pfl.data.federated import Clients
from fedjax_pfl.engine.scoring import Outputs


def export_of(
    outputs: Outputs, scored: Clients, labels: Int[np.ndarray, " samples"], who: Sequence[int], what: Sequence[str]
) -> dict[str, np.ndarray]:
    """One row per sample that one of these clients is scored on, as in ``export.npz``.

    Args:
      outputs: logits and features of the clients' models, on the host.
      scored: index table of the samples on which each of all clients is scored.
      labels: labels of all samples of the data set.
      who: numbers of the clients in the rows of ``outputs``.
      what: ``predictions``, ``features`` or both.

    Returns:
      ``client``; ``sample``, its row in the data set; ``label``; with ``predictions``: ``prediction`` (-1 if the model
      has diverged) and ``logits`` [rows, classes]; with ``features``: ``features`` [rows, dim].
    """
    chosen = np.asarray(who, np.int64)
    count = np.asarray(scored.count)[chosen]
    held = np.arange(scored.index.shape[1]) < count[:, None]
    sample = np.asarray(scored.index)[chosen][held].astype(np.int64)
    table = {"client": np.repeat(chosen, count), "sample": sample, "label": np.asarray(labels)[sample]}
    if "predictions" in what:
        logits = np.asarray(outputs.logits)[held]
        answered = np.isfinite(logits.max(axis=1))
        table["prediction"] = np.where(answered, logits.argmax(axis=1), -1)
        table["logits"] = logits
    if outputs.features is not None:
        table["features"] = np.asarray(outputs.features)[held]
    return table
