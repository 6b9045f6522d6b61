"""Which passes of a model are traced: training passes, evaluations, or both.

A loss says by its mask that a pass is one of training. A loss without a mask trains a model whose dropout and batch
normalisation stay as in evaluation, and nothing fails. So the layers that differ in the two report it here. Layers of
other networks, such as a method's generator, are in no pass of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_kinds: ContextVar[set[bool] | None] = ContextVar("kinds", default=None)
_training: ContextVar[bool | None] = ContextVar("training", default=None)


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


@contextmanager
def model_pass(*, training: bool) -> Iterator[None]:
    """A pass of a model, whose layers are traced inside."""
    token = _training.set(training)
    try:
        yield
    finally:
        _training.reset(token)


def differs() -> None:
    """Reports that a layer of the model is not the same in training as in evaluation."""
    kinds, training = _kinds.get(), _training.get()
    if kinds is not None and training is not None:
        kinds.add(training)
