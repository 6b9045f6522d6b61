"""fedjax_pfl: a simulator for personalized federated learning in JAX.

Start with :func:`simulate`; ``fedjax_pfl/method.py`` holds the contract of a method.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_pfl.comparison import Comparison, compare
    from fedjax_pfl.config import Config, load_config
    from fedjax_pfl.errors import ConfigError
    from fedjax_pfl.methods import METHODS
    from fedjax_pfl.simulation import Result, simulate
    from fedjax_pfl.sweeps import Sweep, load_sweep, sweep

# Imported at first use: JAX takes a second, which `fedjax-pfl --help` should not.
_HOME = {
    "Comparison": "comparison",
    "Config": "config",
    "ConfigError": "errors",
    "METHODS": "methods",
    "Result": "simulation",
    "Sweep": "sweeps",
    "compare": "comparison",
    "load_config": "config",
    "load_sweep": "sweeps",
    "simulate": "simulation",
    "sweep": "sweeps",
}

__all__ = [
    "METHODS",
    "Comparison",
    "Config",
    "ConfigError",
    "Result",
    "Sweep",
    "compare",
    "load_config",
    "load_sweep",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
