"""Prepares the process of a run: its random numbers, its devices, and where compiled programs are cached."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.sections import Run as RunSection

# The flag by which XLA is told how many devices a CPU is to be.
_DEVICES_FLAG = "xla_force_host_platform_device_count"
# The required settings of `jax.random`. Other settings give other numbers; without the second, clients that run side by
# side draw other numbers than clients that run one by one.
_RANDOM_NUMBERS = {"jax_default_prng_impl": "threefry2x32", "jax_threefry_partitionable": True}


def prepare(run: RunSection) -> None:
    """Prepares this process: every core of a CPU becomes a device, and compiled programs are cached on disk.

    A CPU's cores can become devices only before JAX has started. Otherwise, or if the user has set the number of
    devices, clients run on the existing devices.

    Raises:
      ConfigError: ``run.compilation_cache`` is a file, or JAX is configured for 64 bits or for other random numbers.
    """
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # which JAX adds when it starts
        raise ConfigError("jax_enable_x64", True, "False: programs are for 32 bits")
    for setting, needed in _RANDOM_NUMBERS.items():
        if (value := jax.config.values.get(setting, needed)) != needed:
            raise ConfigError(setting, value, f"{needed!r}: the same seed is to give the same numbers everywhere")
    chosen = jax.config.values["jax_num_cpu_devices"] != -1 or _DEVICES_FLAG in os.environ.get("XLA_FLAGS", "")
    if run.placement in ("auto", "shard") and not chosen:
        try:
            jax.config.update("jax_num_cpu_devices", cores())
        except RuntimeError:  # JAX has started
            if jax.default_backend() == "cpu" and cores() > jax.local_device_count() == 1:
                warnings.warn(
                    f"JAX had started before with one CPU device, so that one of {cores()} cores will work; call "
                    'this before anything else that uses JAX, or begin with jax.config.update("jax_num_cpu_devices", '
                    f"{cores()})",
                    stacklevel=3,
                )
    _keep_programs(run.compilation_cache)


def _keep_programs(cache: str | None) -> None:
    """Caches compiled programs on disk, so that the next run with the same shapes starts at once."""
    now = jax.config.values["jax_compilation_cache_dir"]
    if now != _cache.of_a_run:
        _cache.of_the_user = now
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache or _cache.of_the_user or str(caches / "fedjax_pfl")
    if folder != "off" and os.path.isfile(folder):  # Path.is_file raises where a folder above it may not be entered
        raise ConfigError("run.compilation_cache", folder, 'a folder, or "off"; it is a file')
    _cache.of_a_run = None if folder == "off" else folder
    if _cache.of_a_run != now:
        jax.config.update("jax_compilation_cache_dir", _cache.of_a_run)
        compilation_cache.reset_cache()  # JAX opens the folder once
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@dataclass
class _CacheFolders:
    """The folder in which JAX caches compiled programs: as set by a run, and as set before by the user."""

    of_a_run: str | None = None
    of_the_user: str | None = None


_cache = _CacheFolders()


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
