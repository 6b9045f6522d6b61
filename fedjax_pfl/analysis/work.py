"""How much a client computes in a round, counted from the traced program: products of matrices, and convolutions."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array, Key

from fedjax_pfl.data.federated import Federation
from fedjax_pfl.engine.round import Engine


class Work(NamedTuple):
    """What a client computes in a round.

    Attributes:
      flops: floating-point operations of products and convolutions, forward and backward.
      whole: whether everything was counted. False if a loop's number of steps is known only at run time (one step is
        counted), or if an operation other than a call holds a program.
    """

    flops: float
    whole: bool

    def __add__(self, other: Any) -> "Work":
        return Work(self.flops + other.flops, self.whole and other.whole)

    def times(self, steps: int) -> "Work":
        """So many of it."""
        return self._replace(flops=steps * self.flops)


NOTHING = Work(0.0, True)
# Scalars, shapes and the like, which decide how often a loop runs.
_SMALL = 16
Known = Sequence[np.ndarray | np.generic | None]


def client_work(engine: Engine, key: Key[Array, ""], data: Federation) -> Work:
    """The work of a client with the mean number of training samples in round 1, without evaluation.

    It is that of the program as it is traced for this process's kind of device, with this batch size: convolutions
    that run as other products, or as Fourier transforms, count as such.

    Args:
      engine: the method, and how it trains.
      key: any; nothing is run.
      data: the federation; its shapes and sizes count.
    """
    method = engine.method
    server, client = jax.eval_shape(lambda key: method.init(key, engine.clients), key)
    view = jax.eval_shape(method.broadcast, server)
    train, validation = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (data.train, data.validation)
    )
    t, client_id = (jax.ShapeDtypeStruct((), jnp.int32) for _ in range(2))
    args = (key, t, view, data.x, data.y), (client_id, client, train, validation)
    traced = jax.make_jaxpr(engine.local)(*args)
    mean = round(float(jnp.mean(data.train.count)))
    known = {id(t): np.int32(1), id(client_id): np.int32(0), id(train.count): np.int32(mean)}
    inputs = [known.get(id(leaf)) for leaf in jax.tree.leaves(args)]
    return _walk(traced.jaxpr, [None] * len(traced.jaxpr.constvars), inputs)[0]


def _walk(jaxpr: Jaxpr, consts: Known, args: Known) -> tuple[Work, Known]:
    """The work of a program some of whose small inputs are known, and those of its results that then are, too."""
    values: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(at: Any) -> Any:
        return np.asarray(at.val) if isinstance(at, Literal) else values.get(at)

    total = NOTHING
    for eqn in jaxpr.eqns:
        work, results = _equation(eqn, [read(at) for at in eqn.invars])
        total += work
        values.update(zip(eqn.outvars, results, strict=True))
    return total, [read(at) for at in jaxpr.outvars]


def _equation(eqn: JaxprEqn, known: Known) -> tuple[Work, Known]:
    name, params, unknown = eqn.primitive.name, eqn.params, [None] * len(eqn.outvars)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = _shape(eqn.invars[0])
        return Work(2.0 * _size(eqn.outvars[0]) * math.prod(left[d] for d in contracted), True), unknown
    if name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        summed = math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
        return Work(2.0 * _size(eqn.outvars[0]) * summed, True), unknown
    if name == "while":
        return _while(params, known), unknown
    if name == "scan":
        body, consts = params["jaxpr"], _constants_of_scan(eqn)
        inputs = [*known[:consts], *[None] * (len(known) - consts)]
        return _walk(body.jaxpr, [None] * len(body.consts), inputs)[0].times(params["length"]), unknown
    if name == "cond":
        branches = params["branches"]
        if known[0] is not None:
            branches = [branches[int(np.clip(known[0], 0, len(branches) - 1))]]
        found = [_walk(branch.jaxpr, [None] * len(branch.consts), known[1:])[0] for branch in branches]
        most = max(found, key=lambda work: work.flops)
        return most._replace(whole=all(work.whole for work in found)), unknown
    inner = [value for value in params.values() if isinstance(value, ClosedJaxpr)]
    if name in ("checkpoint", "remat2"):  # the latter in JAX 0.10
        inner = [ClosedJaxpr(params["jaxpr"], [])]
    if inner and len(inner[0].jaxpr.invars) == len(known):  # a call
        return _walk(inner[0].jaxpr, inner[0].consts, known)
    if inner:
        return Work(0.0, False), unknown
    if all(value is not None for value in known) and all(_size(out) <= _SMALL for out in eqn.outvars):
        results = eqn.primitive.bind(*known, **params)
        return NOTHING, [np.asarray(result) for result in (results if eqn.primitive.multiple_results else [results])]
    return NOTHING, unknown


def _while(params: dict[str, Any], known: Known) -> Work:
    """A loop; how often it runs is seen where it counts up to a number that is known."""
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    start = known[of_condition + of_body :]
    # What a step hands on as it got it stays known.
    handed_on = zip(body.jaxpr.invars[of_body:], body.jaxpr.outvars, start, strict=True)
    carried = [value if into is out else None for into, out, value in handed_on]

    def step(*counter: tuple[int, int]) -> Work:
        """A step; with the counter's place and value, where they are known."""
        values = [*carried]
        for place, value in counter:
            values[place] = np.int32(value)
        return _walk(body.jaxpr, [None] * len(body.consts), [*known[of_condition : of_condition + of_body], *values])[0]

    seen = dict(zip(condition.jaxpr.invars, [*known[:of_condition], *start], strict=True))
    test = condition.jaxpr.eqns
    if len(test) == 1 and test[0].primitive.name == "lt":
        bounds = [np.asarray(at.val) if isinstance(at, Literal) else seen.get(at) for at in test[0].invars]
        if bounds[0] is not None and bounds[1] is not None:
            first, last = int(bounds[0]), int(bounds[1])
            any_step = step()
            if any_step.whole or test[0].invars[0] not in seen:
                return any_step.times(max(0, last - first))
            # A last epoch that is cut short has fewer steps than the others.
            place = list(seen).index(test[0].invars[0]) - of_condition
            return sum((step((place, number)) for number in range(first, last)), NOTHING)
    return step()._replace(whole=False)


def _constants_of_scan(eqn: JaxprEqn) -> int:
    """How many of a scan's first inputs are the same in every step; versions of JAX name that parameter differently.

    What is scanned has an axis less in a step, and so have the results of single steps.
    """
    body = eqn.params["jaxpr"].jaxpr
    scanned = sum(len(_shape(at)) > len(_shape(inner)) for at, inner in zip(eqn.invars, body.invars, strict=True))
    carried = sum(len(_shape(at)) == len(_shape(inner)) for at, inner in zip(eqn.outvars, body.outvars, strict=True))
    return len(eqn.invars) - scanned - carried


def _shape(at: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = at.aval.shape
    return shape


def _size(at: Any) -> int:
    return math.prod(_shape(at))
