"""What a traced program needs: the most bytes that are alive at once, and its number of operations."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

# Element-wise and reordering operations: XLA may write their result over an operand that nobody reads later.
_IN_PLACE = {"add", "add_any", "div", "integer_pow", "max", "min", "mul", "neg", "select_n", "square", "sub"}
_IN_PLACE |= {"abs", "clamp", "exp", "log", "logistic", "pow", "rsqrt", "sign", "sqrt", "tanh"}
_IN_PLACE |= {"expand_dims", "reshape", "squeeze", "transpose"}


def peak_bytes(jaxpr: Jaxpr) -> int:
    """The most bytes alive at once when the operations run in order, each result until its last use.

    Inputs do not count: the caller keeps them, as a loop keeps the samples that each of its steps reads. As in compiled
    programs, an element-wise or reordering operation overwrites an operand of the same size that nobody reads later,
    and a step of a loop overwrites its carry. The result of a subprogram counts once, where it is called.
    """
    return _peak_bytes(jaxpr, frozenset())


def _peak_bytes(jaxpr: Jaxpr, elsewhere: frozenset[Var]) -> int:
    """`peak_bytes` of a subprogram; the results in ``elsewhere`` are counted by its caller."""
    last_use = dict.fromkeys(_results(jaxpr), len(jaxpr.eqns))
    for step in reversed(range(len(jaxpr.eqns))):
        for var in jaxpr.eqns[step].invars:
            if not isinstance(var, Literal):
                last_use.setdefault(var, step)
    alive: dict[Var, int] = {}
    total = peak = 0
    for step, eqn in enumerate(jaxpr.eqns):
        loop = eqn.primitive.name in ("while", "scan")
        inner = max((_peak_bytes(part, _results(part)) for part in _subprograms(eqn.params)), default=0)
        new = {var: 0 if var in elsewhere else _bytes(var) for var in eqn.outvars}
        done = {var for var in (*eqn.invars, *eqn.outvars) if isinstance(var, Var) and last_use.get(var, -1) <= step}
        given_free = [alive.get(var, 0) for var in done]
        in_place = 0
        if loop or eqn.primitive.name in _IN_PLACE:
            for needed in new.values():
                if needed in given_free:
                    given_free.remove(needed)
                    in_place += needed
        total += sum(new.values())
        alive.update(new)
        peak = max(peak, total - in_place + inner)
        total -= sum(alive.pop(var, 0) for var in done)
    return peak


def _results(jaxpr: Jaxpr) -> frozenset[Var]:
    return frozenset(var for var in jaxpr.outvars if isinstance(var, Var))


def _subprograms(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def operations(jaxpr: Jaxpr) -> int:
    """The number of operations of a traced program, each of a loop's or a branch's once."""
    return sum(1 + sum(map(operations, _subprograms(eqn.params))) for eqn in jaxpr.eqns)


def _bytes(var: Var) -> int:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 8)
