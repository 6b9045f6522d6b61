"""How much memory a run needs, before anything is compiled, and how many clients fit side by side."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jaxtyping import Array, Key

from fedjax_pfl.data.federated import Federation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.traffic import Exchange, size


class Memory(NamedTuple):
    """An estimate in bytes. XLA fuses operations, so that the true need is usually lower.

    Attributes:
      resident: samples, index tables, the state of all clients, and a cohort's copies of it.
      per_client: what one running client needs on top: gradients, activations of a batch, optimiser state.
    """

    resident: int
    per_client: int


def survey(engine: Engine, key: Key[Array, ""], data: Federation) -> tuple[Memory, Exchange]:
    """What a run will hold and exchange, from one trace of a client's part in a round (no compilation)."""
    server, client = jax.eval_shape(lambda key: engine.method.init(key, engine.clients), key)
    view = jax.eval_shape(engine.method.broadcast, server)
    held = data.train, data.validation
    train, validation = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), held)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    shared, row = (key, scalar, view, data.x, data.y), (scalar, client, train, validation)
    traced, update = jax.make_jaxpr(engine.local, return_shape=True)(shared, row)
    # Old and new rows of the cohort, and their uploads before and after absent ones are zeroed.
    rows = engine.cohort_size * 2 * (size(client) + size(update.upload))
    resident = size(data) + size(server) + engine.clients * size(client) + rows
    per_client = max(0, peak_bytes(traced.jaxpr) - size((shared, row)))
    return Memory(resident, per_client), Exchange(view, client, update.upload)


def available() -> int:
    """Bytes that a device offers: an accelerator's own memory, or an equal share of what the host has available."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return _host_bytes() // jax.local_device_count()


def _host_bytes() -> int:
    """What Linux calls MemAvailable, which counts file caches as free; elsewhere all of the host's memory."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(jaxpr: Jaxpr) -> int:
    """The most bytes alive at once when the operations run in order, each result until its last use."""
    last_use = {var: len(jaxpr.eqns) for var in jaxpr.outvars if isinstance(var, Var)}
    for step in reversed(range(len(jaxpr.eqns))):
        for var in jaxpr.eqns[step].invars:
            if not isinstance(var, Literal):
                last_use.setdefault(var, step)
    alive = {var: _bytes(var) for var in (*jaxpr.constvars, *jaxpr.invars)}
    total = peak = sum(alive.values())
    for step, eqn in enumerate(jaxpr.eqns):
        inner = max((peak_bytes(sub) - sum(map(_bytes, sub.invars)) for sub in _subprograms(eqn.params)), default=0)
        new = {var: _bytes(var) for var in eqn.outvars}
        total += sum(new.values())
        alive.update(new)
        peak = max(peak, total + max(0, inner))
        done = {var for var in (*eqn.invars, *eqn.outvars) if isinstance(var, Var) and last_use.get(var, -1) <= step}
        total -= sum(alive.pop(var, 0) for var in done)
    return peak


def _subprograms(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def _bytes(var: Var) -> int:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    scalars = 1
    for extent in shape:
        scalars *= extent
    return scalars * getattr(dtype, "itemsize", 8)
