"""Random numbers of training passes (dropout): each pass draws from the key of the training step that it is in.

Losses are functions of parameters and a batch, and hand no key to the model. The trainer says which step is being
traced, and the model asks for that step's key; where no model asks, nothing is traced. All training passes in a step
share the key: the loss of a step is one function of the parameters, so that passes of the same layer under other
parameters (a meta step, a difference of gradients) drop the same units.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jaxtyping import Array, Key

_step: ContextVar[Callable[[], Key[Array, ""]] | None] = ContextVar("step", default=None)


@contextmanager
def within_step(key: Callable[[], Key[Array, ""]]) -> Iterator[None]:
    """What is traced inside belongs to a step, whose passes draw from the key that this makes."""
    token = _step.set(key)
    try:
        yield
    finally:
        _step.reset(token)


def step_key() -> Key[Array, ""]:
    """The key of the step that is being traced.

    Raises:
      ValueError: a training pass outside of any step.
    """
    key = _step.get()
    if key is None:
        raise ValueError("a training pass of a model with dropout needs a step: train(...) or train.over_batches(...)")
    return key()
