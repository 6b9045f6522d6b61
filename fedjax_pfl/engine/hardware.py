"""The devices of this process and their memory, and the memory that the process holds."""

import contextlib
import ctypes
import os
from pathlib import Path
from typing import NamedTuple

import jax


class Hardware(NamedTuple):
    """The hardware for which the programs of a run are compiled.

    Attributes:
      backend: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      devices: those of this process, or the first of them.
      bytes: the memory of each device, in bytes.
    """

    backend: str
    devices: tuple[jax.Device, ...]
    bytes: int


def this_hardware() -> Hardware:
    """The devices of this process."""
    return Hardware(jax.default_backend(), tuple(jax.local_devices()), available())


def resident_set() -> int:
    """Bytes that this process holds, where the system says so (Linux), else 0."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def release_freed() -> None:
    """Returns to the system what the process has freed and the C library keeps, where that is glibc.

    Compilers leave hundreds of megabytes behind that nothing else will use.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system, or another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def available() -> int:
    """Bytes that a device offers: an accelerator's own memory, or an equal share of what the host has available."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return _host_bytes() // jax.local_device_count()


# Folder of Linux's control groups (version 2, version 1) -> names of limit, use and caches.
_GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _host_bytes() -> int:
    """What Linux calls MemAvailable, which counts file caches as free; elsewhere all of the host's memory."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_left_in_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _left_in_groups(own: Path, root: Path) -> list[int]:
    """What the control groups of this process may still take, such as those of a container or a job of a cluster.

    File caches count as taken there; those that the kernel would give up are left out.

    Args:
      own: the file that names the groups.
      root: where they are mounted, under version 2 or 1.
    """
    left = []
    with contextlib.suppress(OSError):
        for line in own.read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in _GROUPS:
                continue
            limit, used, caches = _GROUPS[controllers]
            group = root / controllers / path.strip("/")
            for folder in (group, *group.parents):  # a group is also under the limits of its parents
                with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or no limit
                    most, taken = (int((folder / name).read_text(encoding="ascii")) for name in (limit, used))
                    stat = (folder / "memory.stat").read_text(encoding="ascii")
                    left.append(most - taken + int(dict(entry.split() for entry in stat.splitlines())[caches]))
    return left
