"""Chooses the devices of runs and of their clients, and how many clients run side by side, by backend and memory."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from fedjax_pfl.engine.hardware import Hardware
from fedjax_pfl.engine.memory import Memory
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config

# The share of a device's memory that a chunk may fill at most. Of programs of several gigabytes, a compiler has
# planned up to 1.19 times our estimate (pFedCSPC on an H200); of small ones, up to 1.39 times (FedeCouple in bfloat16
# on a v5e, 0.78 GB). These are the largest ratios in `benchmarks/results/accelerators.json`.
_FILLED = 0.85


def place(config: Config, runs: int, memory: Memory, hardware: Hardware, *, movable: bool = True) -> Placement:
    """Chooses devices and chunk for the clients of each run, by backend and memory, unless the config sets them.

    Args:
      config: the config of the first run.
      runs: number of runs. They go one by one, but the states of all are held.
      memory: the memory that one of them needs, and the number of participants of a round.
      hardware: the available devices and their memory.
      movable: whether the method's states of clients can be kept on the host, which the error message then proposes.

    Raises:
      ConfigError: the runs do not fit into memory, or a run of several processes needs another placement.
    """
    on_cpu, cohort = hardware.backend == "cpu", memory.participants
    kind = config.run.placement
    together = jax.process_count() > 1
    if together and kind not in ("auto", "shard"):
        raise ConfigError("run.placement", kind, '"auto" or "shard" for a run of several processes')
    # In a run of several processes, each process uses all of its devices.
    usable = jax.devices() if together else hardware.devices[:cohort]
    if kind == "auto":
        kind = "shard" if len(usable) > 1 else "map" if on_cpu else "vmap"
    devices = len(usable) if kind == "shard" else 1
    # On a CPU, clients side by side do not fit into the cache, and turn convolutions into batched products.
    one_by_one = kind == "map" or (kind == "shard" and on_cpu)
    others = (runs - 1) * (memory.resident - memory.samples)
    limit = _free(hardware) - others
    fitting, safely = (memory.fitting(devices, int(share * limit)) for share in (1, _FILLED))
    of_device = math.ceil(cohort / devices)
    chunk = min(config.run.chunk, of_device) if config.run.chunk else 1 if one_by_one else even_chunk(of_device, safely)
    need = memory.needed(devices, chunk)
    if need > limit and runs > 1:
        raise _fewer(runs, need + others, limit + others)
    if need > limit:
        has = "the machine has" if on_cpu else "a device has"
        why = f"the run needs about {need / 1e9:.2f} GB; {has} {limit / 1e9:.2f} GB"
        if config.run.chunk and fitting >= 1:
            raise ConfigError("run.chunk", config.run.chunk, f"at most {fitting}: {why}")
        if movable and not on_cpu and 2 * cohort < config.data.clients and need - memory.states <= limit:
            states = f"the states of all clients, {memory.states / 1e9:.2f} GB,"
            why += f'; with run.client_state = "host", {states} stay in the memory of its host'
        raise ConfigError("data.clients", config.data.clients, why)
    return Placement(_mesh(usable) if kind == "shard" else None, chunk)


def even_chunk(clients: int, fitting: int) -> int:
    """The chunk size that divides the clients into the fewest chunks of at most ``fitting``, as equal as possible."""
    chunks = math.ceil(clients / max(1, min(clients, fitting)))
    return math.ceil(clients / chunks)


def place_runs(config: Config, runs: int, memory: Memory, hardware: Hardware) -> tuple[Placement, Placement]:
    """Spreads several runs of one program over the devices.

    Args:
      config: the config of the first run.
      runs: number of runs.
      memory: the memory that one of them needs, and the number of participants of a round.
      hardware: the available devices and their memory.

    Returns:
      The placement of the runs (on a CPU one by one on each core, on an accelerator side by side), and the placement of
      the clients within a run: as in `place`, but fewer side by side than the config asks for if more do not fit.

    Raises:
      ConfigError: the runs do not fit into memory.
    """
    on_cpu, devices = hardware.backend == "cpu", min(len(hardware.devices), runs)
    # A CPU has one memory for all of its devices, and what compiles is in it; the samples are there already.
    on_each, limit = runs if on_cpu else math.ceil(runs / devices), _free(hardware)
    shared = memory.compiler if memory.process else memory.samples
    need = shared + on_each * memory.of_run(1)
    if need > limit:
        beside = 1 if on_cpu else devices
        raise _fewer(runs, need * beside, limit * beside)
    mesh = _mesh(hardware.devices[:devices]) if devices > 1 else None
    of_each = (round(_FILLED * limit) - shared) // on_each + shared
    fitting = even_chunk(memory.participants, memory.fitting(1, of_each))
    one_by_one = config.run.placement == "map" or (config.run.placement == "auto" and on_cpu)
    chunk = min(config.run.chunk, fitting) if config.run.chunk else 1 if one_by_one else fitting
    return Placement(mesh, 1 if on_cpu else on_each), Placement(chunk=chunk)


def _free(hardware: Hardware) -> int:
    """The bytes that are free: on the whole host for a CPU, else on each device."""
    return hardware.bytes * (len(hardware.devices) if hardware.backend == "cpu" else 1)


def _fewer(runs: int, need: int, free: int) -> ConfigError:
    """The error for more runs than fit. A sweep then halves the program; whoever reads this has called `tune`."""
    return ConfigError(
        "batch", runs, f"fewer at once: they need about {need / 1e9:.2f} GB, there are {free / 1e9:.2f} GB"
    )


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    return jax.make_mesh((len(devices),), ("clients",), (AxisType.Auto,), devices=devices)
