"""Finds losses that train on padding: those that do not depend on the mask of their batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.extend.core import Literal
from jaxtyping import Array, Float

from fedjax_pfl.data.federated import Batch

_phases: ContextVar[list[str] | None] = ContextVar("phases", default=None)


@contextmanager
def losses_without_mask() -> Iterator[list[str]]:
    """Collects the phases of the trainings traced inside whose loss does not depend on ``batch.mask``."""
    phases: list[str] = []
    token = _phases.set(phases)
    try:
        yield phases
    finally:
        _phases.reset(token)


def look_for_mask(phase: str, loss: Callable[[Batch], Float[Array, ""]], batch: Batch) -> None:
    """Reports a loss that does not depend on the mask; nothing is traced outside of `losses_without_mask`."""
    phases = _phases.get()
    if phases is not None and not _depends(lambda mask: loss(batch._replace(mask=mask)), batch.mask):
        phases.append(phase)


def _depends(function: Callable[[Float[Array, " batch"]], Float[Array, ""]], mask: Float[Array, " batch"]) -> bool:
    """Whether the result follows from the mask; an operation on something that does counts as using all of it."""
    program = jax.make_jaxpr(function)(mask).jaxpr
    follows = set(program.invars)
    for eqn in program.eqns:
        if any(not isinstance(at, Literal) and at in follows for at in eqn.invars):
            follows.update(eqn.outvars)
    return any(not isinstance(at, Literal) and at in follows for at in program.outvars)
