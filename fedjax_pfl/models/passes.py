"""Which passes of a model are traced: training passes, evaluations, or both.

A loss says by its mask that a pass is one of training. A loss without a mask trains a model whose dropout and batch
normalisation stay as in evaluation, and nothing fails. So the layers that differ in the two report each pass here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_kinds: ContextVar[set[bool] | None] = ContextVar("kinds", default=None)


@contextmanager
def kinds_of_passes() -> Iterator[set[bool]]:
    """Collects the passes that are traced inside: true for training, false for evaluation.

    It stays empty for a model without dropout and batch normalisation.
    """
    kinds: set[bool] = set()
    token = _kinds.set(kinds)
    try:
        yield kinds
    finally:
        _kinds.reset(token)


def passed(*, training: bool) -> None:
    """Reports a pass of a model, or of a layer, that differs in training."""
    if (kinds := _kinds.get()) is not None:
        kinds.add(training)
