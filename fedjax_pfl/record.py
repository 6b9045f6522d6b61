"""The run directory: what a run leaves on disk."""

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.errors import ConfigError

_FILES = ("config.toml", "partition.json", "metrics.jsonl", "clients.csv", "summary.json")


class RunDirectory:
    """Writes ``config.toml``, ``partition.json``, ``metrics.jsonl``, ``clients.csv`` and ``summary.json``."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False):
        """Checks the directory; nothing is written yet.

        Args:
          path: the directory; it may exist if it is empty.
          overwrite: replace an earlier run's files; other files stay.

        Raises:
          ConfigError: the path is a file, or a directory that holds something.
        """
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError("run.out", str(path), "it is a file; name a directory")
        if self.path.is_dir() and any(self.path.iterdir()) and not overwrite:
            raise ConfigError("run.out", str(path), "the directory is not empty; name another one, or pass --overwrite")

    def begin(self, config: str, partition: dict[str, Any]) -> None:
        """Creates the directory and writes config and partition; an earlier run's files go."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("run.out", str(self.path), f"cannot be created ({error.strerror})") from None
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        self._write("config.toml", config)
        self._write("partition.json", json.dumps(partition) + "\n")

    def append(self, metrics: dict[str, Any]) -> None:
        """Adds a line to ``metrics.jsonl``, at once."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(_without_nan(metrics)) + "\n")

    def finish(self, clients: dict[str, np.ndarray], summary: dict[str, Any]) -> None:
        """Writes the per-client table and, last of all, the summary: a directory with one is complete."""
        with (self.path / "clients.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(clients)
            writer.writerows(zip(*(column.tolist() for column in clients.values()), strict=True))
        self._write("summary.json", json.dumps(summary, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        # A reader never sees half a file.
        partial = self.path / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / name)


def _without_nan(node: Any) -> Any:
    """JSON has no NaN (a diverged run's loss): null stands for it."""
    if isinstance(node, dict):
        return {key: _without_nan(value) for key, value in node.items()}
    return None if isinstance(node, float) and not math.isfinite(node) else node
