"""The time of runs: how long they have taken, how many rounds go at once, and how long they will still take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fedjax_pfl.experiment.checkpoint import Saved

# A block of rounds should return to the host after about this time, to report progress.
_SECONDS_PER_BLOCK = 2.0


class Clock:
    """The time of runs that are rows of one program; each run is charged with an equal part of it.

    Attributes:
      round_seconds: time that the rounds of a run have taken so far, in seconds, without evaluation and compilation.
    """

    def __init__(self, began: float, runs: int, saved: Saved):
        """Goes on from a checkpoint, or begins.

        Args:
          began: when the work on the runs began, by ``time.perf_counter``.
          runs: the number of runs.
          saved: the checkpoint from which they continue, or the beginning.
        """
        self._began, self._runs, self._saved = began - runs * saved.seconds, runs, saved
        self._running_since = time.perf_counter()
        self.round_seconds = saved.round_seconds

    @property
    def seconds(self) -> float:
        """Time since a run began, in seconds, with that of the processes before this one."""
        return (time.perf_counter() - self._began) / self._runs

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """What happens within counts as time of rounds."""
        began = time.perf_counter()
        yield
        self.round_seconds += (time.perf_counter() - began) / self._runs

    def block(self, t: int) -> int:
        """The number of rounds to run at once, by the time of those so far; ``t`` are done."""
        taken = self._runs * (self.round_seconds - self._saved.round_seconds)
        return max(1, int(_SECONDS_PER_BLOCK * (t - self._saved.round) / taken))

    def left(self, t: int, end: int) -> float:
        """The time that all runs will take until round ``end``, in seconds, evaluation included; ``t`` are done."""
        return (time.perf_counter() - self._running_since) / (t - self._saved.round) * (end - t)
