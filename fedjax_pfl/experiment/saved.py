"""What run directories hold, read back."""

import json
import shlex
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.folders import LOCK
from fedjax_pfl.experiment.options import SELECTORS, recorded
from fedjax_pfl.experiment.reading import load_config, read_toml
from fedjax_pfl.experiment.record import CHECKPOINTS, RunDirectory, is_run, read_part, read_table
from fedjax_pfl.experiment.sections import Run as RunSection
from fedjax_pfl.experiment.summary import POINTS, Line, flat, history_of

# How a run is carried out: these may differ between a run that was begun and its continuation.
FREE = (
    "training.rounds",
    "run.checkpoint_every",
    "run.placement",
    "run.chunk",
    "run.client_state",
    "run.out",
    "run.tensorboard",
    "run.compilation_cache",
    "run.export",
    "run.export_clients",
    "run.keep",
    "run.client_history",
)
# What every version writes and readers go by.
_SUMMARY = ("headline", "rounds", "personal", "global", "timing", "traffic", "environment")
_PARTITION = ("hash", "class_counts", "n_train", "n_test", "notes")


def complete_run(config: Config) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]] | None:
    """Summary, history and client table of the complete run in a config's directory, if it holds one.

    None also for a run of fewer rounds that has a checkpoint, from which it can go on.

    Raises:
      ConfigError: the run that was begun there is another one, has another number of rounds, or did not keep what is
        asked for now; a file is damaged, or none of this version.
    """
    if config.run.out is None:
        return None
    path = Path(config.run.out)
    if not (path / "config.toml").exists():
        return None
    old = config_in(path)
    check_alike(old, config, config.run.out)
    if not (path / "summary.json").exists():
        return None
    summary = read_part("summary", path / "summary.json", _object(*_SUMMARY))
    history = read_part("metrics", path / "metrics.jsonl", _history)
    clients = read_part("clients", path / "clients.csv", read_table)
    other_folder = f"as in the complete run in {config.run.out}, or another folder (out=, --out)"
    rounds = summary["rounds"]
    if rounds < config.training.rounds and any((path / CHECKPOINTS).glob("*")):
        return None  # it goes on from there
    if rounds != config.training.rounds:
        raise ConfigError("training.rounds", config.training.rounds, f"{rounds}, {other_folder}")
    for field in _not_kept(old.run, config.run):
        had = getattr(old.run, field)
        raise ConfigError(f"run.{field}", getattr(config.run, field), f"{json.dumps(had)}, {other_folder}")
    return summary, history, clients


def _not_kept(had: RunSection, asked: RunSection) -> Iterator[str]:
    """What is asked for, but not in the directory of a run that has ended without it."""
    if asked.keep not in ("none", had.keep):
        yield "keep"
    if asked.client_history and not had.client_history:
        yield "client_history"
    if not set(asked.export) <= set(had.export):
        yield "export"
    elif asked.export and not _covers(had.export_clients, asked.export_clients):
        yield "export_clients"


def _covers(had: list[int] | None, asked: list[int] | None) -> bool:
    """Whether the first clients include the second; None are all."""
    return had is None or (asked is not None and set(asked) <= set(had))


def check_same_data(path: Path, data: str, field: str) -> None:
    """Checks that a run directory's run had the samples with this `fingerprint`; version 0.1 has kept none.

    Raises:
      ConfigError: of this field: it had others.
    """
    held = _partition_in(path).get("data", data)
    if held != data:
        raise ConfigError(field, str(path), "a directory for other samples: the run in this one had others than these")


def check_same_rows(path: Path, hash: str, file: str) -> None:
    """Checks that a run directory's run had the rows that the file of its partition now lists, by their hash.

    Raises:
      ConfigError: it had others, or ``partition.json`` is damaged.
    """
    if _partition_in(path).get("hash", hash) != hash:
        allowed = f"the rows of the run in {path}: the file has changed since. Give the old one, or another folder"
        raise ConfigError("data.partition.file", file, allowed)


def read_run(folder: Path) -> tuple[Config, dict[str, Any]]:
    """Config of a complete run, and what else its directory holds but for the state, by the fields of a `Result`.

    Raises:
      ConfigError: there is no complete run, a part that it names is not registered here, or a file is damaged.
    """
    if not (folder / "config.toml").exists():
        raise ConfigError("directory", str(folder), "a run directory: there is no config.toml in this one")
    config = config_in(folder)
    if not (folder / "summary.json").exists():
        begun = RunDirectory(folder, resume=True).begun
        how = f"this one goes on with simulate(config, resume={str(folder)!r})" if begun else "this one has not begun"
        raise ConfigError("directory", str(folder), f"a run that has ended; {how}")
    history = read_part("metrics", folder / "metrics.jsonl", _history)
    found = {
        "summary": read_part("summary", folder / "summary.json", _object(*_SUMMARY)),
        "history": history,
        "clients": read_part("clients", folder / "clients.csv", read_table),
        "labels": read_part("labels", folder / "labels.csv", read_table),
        "partition": _partition_in(folder),
        "exported": _exported_in(folder),
        "client_history": RunDirectory(folder, resume=True).client_history(int(history["round"][-1])),
    }
    return config, found


class Begun(NamedTuple):
    """A run that has begun, and may have ended.

    Attributes:
      path: its directory.
      config: its config.
      partition: the content of ``partition.json``.
      history: metric -> array over evaluated rounds; empty before the first.
      clients: column -> array, as in ``clients.csv``; while the run goes on, the newest rows of
        ``client_history.csv``, and nothing where none is kept.
      summary: the content of ``summary.json``; None while the run goes on.
    """

    path: Path
    config: Config
    partition: dict[str, Any]
    history: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    summary: dict[str, Any] | None


def read_begun(folder: Path) -> Begun:
    """What a run has left so far in its directory, which holds ``config.toml`` and ``partition.json``.

    The parts that its config names need not be registered here.

    Raises:
      ConfigError: a file is damaged.
    """
    with recorded():
        config = config_in(folder)
    metrics = folder / "metrics.jsonl"
    partition = _partition_in(folder)
    if (folder / "summary.json").exists():
        summary = read_part("summary", folder / "summary.json", _object(*_SUMMARY))
        clients = read_part("clients", folder / "clients.csv", read_table)
        return Begun(folder, config, partition, read_part("metrics", metrics, _history), clients, summary)
    history = read_part("metrics", metrics, _history_so_far) if metrics.exists() else {}
    newest = int(history["round"][-1]) if history else 0
    rows = RunDirectory(folder, resume=True).client_history(newest)
    last = {name: column[rows["round"] == newest] for name, column in rows.items() if name != "round"}
    return Begun(folder, config, partition, history, last, None)


def _exported_in(folder: Path) -> dict[str, np.ndarray]:
    """The columns of ``export.npz``; none where a run exported nothing.

    Raises:
      ConfigError: the file is damaged.
    """
    path = folder / "export.npz"
    if not path.exists():
        return {}
    try:
        with path.open("rb") as file, np.load(file) as columns:  # of a damaged file, NumPy leaves its own open
            return dict(columns)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        allowed = f"a table that a run has exported ({error}); without this file, the rest of the run can be read"
        raise ConfigError("export", str(path), allowed) from None


def config_in(folder: Path) -> Config:
    """The config of a run, in which ``config.toml`` exists.

    Raises:
      ConfigError: the file is damaged, none of this version, or names a part that is not registered here.
    """
    path = folder / "config.toml"
    try:
        return load_config(path)
    except ConfigError as error:
        if error.value == str(path):  # which says where
            raise
        allowed = f"{error.allowed}; so says {path}, which another version may have written"
        if error.field in SELECTORS:
            allowed = (
                f"registered in this process; register yours (register_method, ...) before you load {folder}. The "
                "command line knows the parts of installed packages (entry points); for those of a script, use Python. "
                "Tables, plots and reports (Sweep.load, fedjax-pfl plot and report) need no part"
            )
        raise ConfigError(error.field, error.value, allowed) from None


class Listed(NamedTuple):
    """A run directory in a few words.

    Attributes:
      path: the directory.
      config: what its config.toml says.
      round: of the newest evaluation; 0 before the first.
      ended: whether the run has ended.
      accuracy: point -> mean accuracy after that round; empty before the first.
      begun: whether the run is at work, or has left scores or a checkpoint.
      diverged: whether it has ended, and some of its logits were NaN or infinite.
    """

    path: Path
    config: dict[str, Any]
    round: int
    ended: bool
    accuracy: dict[str, float]
    begun: bool
    diverged: bool


def run_directories(folder: Path) -> list[Path]:
    """The folder itself, if a run has begun there, and all run directories in it, at any depth, by path."""
    found = sorted(config.parent for config in folder.rglob("config.toml"))
    return [path for path in found if is_run(path)]


def runs_in(folder: Path) -> list[Listed]:
    """The run directories in a folder, at any depth, by path; also of runs whose method is not registered here.

    Raises:
      ConfigError: there is no such folder, or a file of a run is damaged.
    """
    if not folder.is_dir():
        raise ConfigError("FOLDER", str(folder), "a folder that holds runs")
    found = []
    for path in run_directories(folder):
        lines = path / "metrics.jsonl"
        last: Line = read_part("metrics", lines, _newest) if lines.exists() else {"round": 0}
        accuracy = {point: last[point]["accuracy"] for point in POINTS if point in last}
        run, config = RunDirectory(path, resume=True), _tables_in(path)
        begun = run.begun or (path / LOCK).exists()
        summary = read_part("summary", path / "summary.json", _object()) if run.complete else {}
        diverged = summary.get("diverged_round") is not None
        found.append(Listed(path, config, last["round"], run.complete, accuracy, begun, diverged))
    return found


def _tables_in(folder: Path) -> dict[str, Any]:
    """What the config of a run says, whose parts need not be registered here.

    Raises:
      ConfigError: the file is damaged.
    """
    path = folder / "config.toml"
    tables = read_toml(path, "config file")
    if missing := {"data.source", "method.name", "training.rounds", "run.seed"} - flat(tables).keys():
        raise ConfigError("config file", str(path), f"the config of a run: it has no {', '.join(sorted(missing))}")
    return tables


def _object(*fields: str) -> Callable[[str], dict[str, Any]]:
    """What reads a JSON object that has these fields, for `read_part`."""

    def parse(text: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(text)
        if not isinstance(found, dict) or set(fields) - found.keys():
            raise ValueError
        return found

    return parse


def _newest(text: str) -> Line:
    """The last line of metrics that is written to its end."""
    whole = text[: text.rfind("\n") + 1].splitlines()
    newest: Line = json.loads(whole[-1]) if whole else {"round": 0}
    return newest


def _history(text: str) -> dict[str, np.ndarray]:
    """Metric -> array, from the lines of ``metrics.jsonl``, of which there is one or more."""
    found = history_of([json.loads(line) for line in text.splitlines()])
    return {"round": found.pop("round"), **found}


def _history_so_far(text: str) -> dict[str, np.ndarray]:
    """The same while a run goes on: there may be no line yet, or half of one."""
    whole = text[: text.rfind("\n") + 1]
    return _history(whole) if whole else {}


def _partition_in(folder: Path) -> dict[str, Any]:
    config = shlex.quote(str(folder / "config.toml"))
    anew = f"`fedjax-pfl partition {config} --out FOLDER` writes the same file again"
    partition: dict[str, Any] = read_part("partition", folder / "partition.json", _object(*_PARTITION), anew)
    return partition


def check_alike(old: Config, new: Config, directory: str) -> None:
    """Checks that two configs lead to the same numbers, up to their number of rounds.

    Args:
      old: what the run in the directory was started with.
      new: what is to be run now.
      directory: the run directory, for the message.

    Raises:
      ConfigError: they differ; it names all fields that do.
    """
    # As JSON has it, a tuple equals the list that TOML makes of it.
    here, there = (flat(config.model_dump(mode="json")) for config in (new, old))
    fields = [name for name in sorted(here.keys() | there.keys()) if name not in FREE]
    differing = [name for name in fields if here.get(name) != there.get(name)]
    if differing:
        given, wanted = (", ".join(f"{name}={tables.get(name)}" for name in differing) for tables in (here, there))
        raise ConfigError("config", given, f"what the run in {directory} was started with: {wanted}")
