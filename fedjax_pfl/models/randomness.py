"""Random numbers of training passes (dropout): each pass draws from the key of its training step.

Losses are functions of parameters and a batch, and pass no key to the model. The trainer announces the step that is
being traced, and the model asks for the key of this step; if no model asks, no key is traced. All training passes of a
step share the key, because the loss of a step is one function of the parameters: passes of the same layer with other
parameters (a meta step, a difference of gradients) must drop the same units.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jaxtyping import Array, Key

_step: ContextVar[Callable[[], Key[Array, ""]] | None] = ContextVar("step", default=None)


@contextmanager
def within_step(key: Callable[[], Key[Array, ""]]) -> Iterator[None]:
    """Everything traced inside belongs to one step, whose passes draw from the key that ``key()`` returns."""
    token = _step.set(key)
    try:
        yield
    finally:
        _step.reset(token)


def step_key() -> Key[Array, ""]:
    """The key of the step that is being traced.

    Raises:
      ValueError: the training pass is not inside a step.
    """
    key = _step.get()
    if key is None:
        raise ValueError("a training pass of a model with dropout needs a step: train(...) or train.over_batches(...)")
    return key()
