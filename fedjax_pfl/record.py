"""The run directory: what a run leaves on disk."""

import csv
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.errors import ConfigError

_FILES = ("config.toml", "partition.json", "metrics.jsonl", "clients.csv", "summary.json")
_CHECKPOINTS = "checkpoints"


class RunDirectory:
    """Writes ``config.toml``, ``partition.json``, ``metrics.jsonl``, ``clients.csv`` and ``summary.json``.

    Attributes:
      path: the directory.
      checkpoints: the folder in it that checkpoints go to.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False, resume: bool = False):
        """Checks the directory; nothing is written yet.

        Args:
          path: the directory; it may exist if it is empty.
          overwrite: replace an earlier run's files; other files stay.
          resume: the directory is that of a run that goes on.

        Raises:
          ConfigError: the path is a file, or a directory that holds something.
        """
        self.path = Path(path)
        self.checkpoints = self.path / _CHECKPOINTS
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError("run.out", str(path), "it is a file; name a directory")
        if self.path.is_dir() and any(self.path.iterdir()) and not (overwrite or resume):
            raise ConfigError("run.out", str(path), "the directory is not empty; name another one, or pass --overwrite")

    @property
    def complete(self) -> bool:
        """Whether a run has ended here."""
        return (self.path / "summary.json").exists()

    def begin(self, config: str, partition: dict[str, Any]) -> None:
        """Creates the directory and writes config and partition; an earlier run's files go."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("run.out", str(self.path), f"cannot be created ({error.strerror})") from None
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        write_atomically(self.path / "config.toml", config)
        write_atomically(self.path / "partition.json", json.dumps(partition) + "\n")

    def resume(self, config: str, lines: list[dict[str, Any]]) -> None:
        """Takes the directory back to a checkpoint: the metrics up to it, and no summary."""
        for name in ("summary.json", "clients.csv"):
            (self.path / name).unlink(missing_ok=True)
        write_atomically(self.path / "config.toml", config)
        write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(_without_nan(line)) + "\n" for line in lines))

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
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file at once: a reader, or a run that is stopped, never leaves or sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _without_nan(node: Any) -> Any:
    """JSON has no NaN (a diverged run's loss): null stands for it."""
    if isinstance(node, dict):
        return {key: _without_nan(value) for key, value in node.items()}
    return None if isinstance(node, float) and not math.isfinite(node) else node
