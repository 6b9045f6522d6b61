"""Where clients run: one after the other, side by side, or split over devices.

- ``map``: one after the other on one device. Each client runs only its own steps, and its operands stay in the cache.
  This suits CPUs.
- ``vmap``: in chunks on one device. A chunk runs as long as its largest client, so a cohort is ordered by size.
- ``shard``: split over a mesh axis ``clients`` of the local devices; within each device as above.

All three compute the same; only the order of floating-point sums differs (the tests allow a difference of 1e-5).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, PyTree

# The axis of the clients that run side by side on a device.
SIDE_BY_SIDE = "side_by_side"
# A leaf with at most this number of bytes, over all rows, is copied to every device; splitting its work costs more.
_SMALL = 2**26


@dataclass(frozen=True)
class Placement:
    """Where clients run.

    Attributes:
      mesh: a mesh with one axis, ``clients``, over the devices; None for one device.
      chunk: number of clients that run side by side on a device; 1 for one after the other.
    """

    mesh: Mesh | None = None
    chunk: int = 1

    @property
    def devices(self) -> int:
        """Number of devices over which the clients are split."""
        return 1 if self.mesh is None else self.mesh.size

    def padded(self, clients: int) -> int:
        """The number of rows for this number of clients, rounded up to full chunks on every device."""
        step = self.devices * self.chunk
        return -(-clients // step) * step

    def balanced_order(self, rows: int) -> Int[np.ndarray, " rows"]:
        """The order that deals rows, largest first, evenly to the devices: snake order (0, 1, ... 1, 0, 0, 1, ...)."""
        turns = np.arange(rows).reshape(-1, self.devices)
        turns[1::2] = turns[1::2, ::-1]
        return turns.T.reshape(-1)

    def gather_small(self, rows: PyTree) -> PyTree:
        """Copies all rows of small leaves to every device, and leaves large leaves split.

        If a server computes step by step from statistics (a quadratic program, training on prototypes), the devices
        would otherwise exchange a few numbers in every step. A mean over large leaves is fastest if they stay split.
        """
        if self.mesh is None:
            return rows
        everywhere = NamedSharding(self.mesh, P())
        return jax.tree.map(
            lambda leaf: lax.with_sharding_constraint(leaf, everywhere) if leaf.nbytes <= _SMALL else leaf, rows
        )

    def shardings(self, clients: int) -> tuple[NamedSharding | None, NamedSharding | None]:
        """The shardings of shared values, and of rows per client (split if the devices divide their number)."""
        if self.mesh is None:
            return None, None
        shared = NamedSharding(self.mesh, P())
        return shared, NamedSharding(self.mesh, P("clients")) if clients % self.devices == 0 else shared


def map_clients(fn: Callable, shared: PyTree, rows: PyTree, placement: Placement) -> PyTree:
    """Applies ``fn(shared, row)`` to every row; the one place that decides how clients are mapped.

    Args:
      fn: (shared, row) -> result, for one client.
      shared: values that are the same for all clients, without a client axis.
      rows: every leaf [K, ...], with K a multiple of devices x chunk.
      placement: where clients run.

    Returns:
      The results, every leaf [K, ...].
    """

    def on_device(shared: PyTree, rows: PyTree) -> PyTree:
        if placement.chunk == 1:
            return lax.map(lambda row: fn(shared, row), rows)
        side_by_side = jax.vmap(fn, in_axes=(None, 0), axis_name=SIDE_BY_SIDE)
        chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, placement.chunk, *leaf.shape[1:]), rows)
        out = lax.map(lambda chunk: side_by_side(shared, chunk), chunks)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)

    if placement.mesh is None:
        return on_device(shared, rows)
    over_devices = jax.shard_map(
        on_device, mesh=placement.mesh, in_specs=(P(), P("clients")), out_specs=P("clients"), check_vma=False
    )
    return over_devices(shared, rows)
