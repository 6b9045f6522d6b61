"""Where a run is recorded, and what it goes on from."""

import functools
import importlib.metadata
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_pfl.data.rows import Holdings
from fedjax_pfl.engine.run import Run
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.callbacks import Callback
from fedjax_pfl.experiment.checkpoint import Best, Checkpoints, Saved
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.distributed import is_first
from fedjax_pfl.experiment.loggers import TensorBoard, check_tensorboard
from fedjax_pfl.experiment.record import RunDirectory
from fedjax_pfl.experiment.saved import check_alike, check_same_data
from fedjax_pfl.experiment.summary import PACKAGES, Line

if TYPE_CHECKING:
    from fedjax_pfl.experiment.result import Result


class RunPlace:
    """Where a run is recorded and goes on from: its run directory and checkpoints, if it has a directory at all.

    Attributes:
      checkpoints: of the run; None without a directory.
      client_history: column -> array, what is kept of its clients' scores up to the checkpoint that was read.
      best: the best round up to there and its state, with ``run.keep = "best"``.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: str | os.PathLike[str] | None = None,
        go_on: bool = False,
        overwrite: bool = False,
    ):
        """Checks the directory; nothing is written yet.

        Args:
          config: the run.
          resume: the directory of an interrupted run, which must be able to go on; None for another run.
          go_on: whether to go on with what is found in ``run.out``, if it can, or to begin anew.
          overwrite: replace the run that is found there.

        Raises:
          ConfigError: the directory is not empty, or cannot be used; or, with `overwrite`, it holds no run, but files
            that a run would replace.
        """
        self._config, self._resume, self._go_on = config, resume, go_on
        self._record: RunDirectory | None = None
        self.checkpoints: Checkpoints | None = None
        self.client_history: dict[str, np.ndarray] = {}
        self.best: Best | None = None
        folder = resume if resume is not None else config.run.out
        if config.run.tensorboard:
            check_tensorboard(folder)
        if not folder:
            if config.run.checkpoint_every:
                allowed = "0 without a run directory: give run.out"
                raise ConfigError("run.checkpoint_every", config.run.checkpoint_every, allowed)
            return
        if resume is not None and not Path(folder).is_dir():
            raise ConfigError("resume", str(Path(folder).absolute()), "a run directory that holds a checkpoint")
        begun = go_on and (Path(folder) / "config.toml").exists()
        # The first process of several has looked, and may have begun.
        goes_on = resume is not None or begun or not is_first()
        self._record = RunDirectory(folder, overwrite=overwrite, resume=goes_on)
        self.checkpoints = Checkpoints(self._record.checkpoints)

    def found(self) -> list[int]:
        """The rounds to go on from; none for a new run.

        Raises:
          ConfigError: field ``resume``: the directory holds no checkpoint.
        """
        if self.checkpoints is None or (self._resume is None and not self._go_on):
            return []
        found = self.checkpoints.rounds()
        if not found and self._resume is not None:
            why = "there is none in it (run.checkpoint_every)"
            if self._record and self._record.complete:
                why = "its run is complete and wrote none, so that it cannot be extended; run it again from the start"
                why += " (overwrite=True, --overwrite), with run.checkpoint_every"
            allowed = f"a run directory that holds a checkpoint: {why}"
            raise ConfigError("resume", str(Path(self._resume).absolute()), allowed)
        return found

    def beginnings(self) -> set[int]:
        """Rounds after which the run can go on; -1 for the beginning of a run that has no checkpoint.

        Runs that share one can go on together. 0 is among them if the program may have been killed while it wrote its
        first checkpoints: then all its runs can begin again together, and end with the same bits. A complete run goes
        on from its checkpoints alone.
        """
        found = set(self.found())
        if not found:
            return {-1, 0} if self._record is not None and self._record.started else {-1}
        assert self._record is not None
        at_first = found == {self._config.run.checkpoint_every} and not self._record.complete
        return found | {0} if at_first else found

    def read(self, round: int, manifest: dict[str, Any], like: Run) -> tuple[Saved, Run]:
        """The checkpoint of a round, which must be one of this run, and its arrays.

        Raises:
          ConfigError: it is damaged or of another run, or the run is complete or has done more rounds than are asked.
        """
        assert self._record is not None
        assert self.checkpoints is not None
        saved, directory = self.checkpoints.read(round), str(self._record.path)
        _check_resumable(saved, self._config, manifest["hash"], directory)
        check_same_data(self._record.path, manifest["data"], "resume")
        # Its newest checkpoint may be an older one: that of a signal, without run.checkpoint_every.
        if (done := self._record.rounds) >= self._config.training.rounds:
            allowed = f"the run is complete after {done} rounds; to go on, give a larger training.rounds"
            raise ConfigError("resume", directory, allowed)
        if saved.versions != versions():
            message = f"{directory} was run with {saved.versions}, here are {versions()}: the last bits may differ"
            warnings.warn(message, stacklevel=5)
        if self._config.run.client_history:
            self.client_history = self._record.client_history(round)
        if self._config.run.keep == "best" and saved.lines:
            self.best = self.checkpoints.best(round, like.state)
        return saved, self.checkpoints.run(round, like)

    def take(self) -> None:
        """Keeps other runs, of this process or another, out of the directory.

        Raises:
          ConfigError: another run goes on there.
        """
        if self._record is not None and is_first():
            self._record.take()

    def leave(self) -> None:
        """Lets them in again."""
        if self._record is not None:
            self._record.leave()

    def begin(self, manifest: dict[str, Any], holdings: Holdings) -> None:
        """Writes what is known before the first round."""
        if self._record is not None and is_first():
            self._record.begin(self._config.to_toml(), manifest, holdings)
            self.checkpoints = Checkpoints(self._record.checkpoints)  # those that had been found are gone

    def go_back(self, saved: Saved) -> None:
        """Takes the directory back to a checkpoint."""
        if self._record is not None and self.checkpoints is not None and is_first():
            self._record.resume(self._config.to_toml(), saved.lines, client_history=self._config.run.client_history)
            self.checkpoints.forget_after(saved.round)

    def callbacks(self) -> list[Callback]:
        """What the config asks to be called during the run."""
        if self._record is None or not self._config.run.tensorboard or not is_first():
            return []
        return [TensorBoard(self._record.events)]

    def append(self, line: Line, clients: dict[str, np.ndarray]) -> None:
        """Records an evaluated round: its line of metrics, and the rows of its clients, if they are kept."""
        if self._record is not None and is_first():
            self._record.append(line, clients)

    def save(self, run: Run, saved: Saved, best: Best | None) -> None:
        """Writes a checkpoint."""
        if self.checkpoints is not None and is_first():
            self.checkpoints.save(run, saved, best)

    def finish(self, result: "Result") -> None:
        """Records the end."""
        if self._record is not None and is_first():
            kept = None if self._config.run.keep == "none" else result.kept
            self._record.finish(result.clients, result.labels, result.exported, result.summary, kept)


def _check_resumable(saved: Saved, config: Config, partition: str, directory: str) -> None:
    """Checks that going on from a checkpoint under this config gives what an uninterrupted run would have given.

    Raises:
      ConfigError: the config (all fields that differ are named) or the data differ; fewer rounds are asked for than are
        done, or as many if the last was not evaluated; or this version cannot read the checkpoint's config.
    """
    try:
        old = Config(**saved.config)
    except ConfigError as error:
        raise ConfigError("resume", directory, f"a checkpoint of this version; its config has {error}") from None
    check_alike(old, config, directory)
    if partition != saved.partition:
        allowed = f"the data that the checkpoint in {directory} was run with: another partition came out of these"
        raise ConfigError("data.source", config.data.source, allowed)
    evaluated = bool(saved.lines) and saved.lines[-1]["round"] == saved.round
    least = saved.round if evaluated else saved.round + 1
    if config.training.rounds < least:
        why = "so many are done" if evaluated else f"{saved.round} are done, the last of them without an evaluation"
        raise ConfigError("training.rounds", config.training.rounds, f"{least} or more: {why}")


@functools.cache
def versions() -> dict[str, str]:
    """The installed versions of the packages that a run's numbers depend on."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}
