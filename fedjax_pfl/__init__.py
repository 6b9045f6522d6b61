"""fedjax_pfl: a simulator for personalized federated learning in JAX.

Start with :func:`simulate`; ``fedjax_pfl/method.py`` holds the contract of a method.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_pfl.errors import ConfigError
    from fedjax_pfl.experiment.comparison import Comparison, compare
    from fedjax_pfl.experiment.config import Config, load_config
    from fedjax_pfl.experiment.driver import Result, simulate
    from fedjax_pfl.experiment.sweep import Sweep, load_sweep, sweep
    from fedjax_pfl.methods import METHODS

    __version__: str

# Imported at first use: JAX takes a second, which `fedjax-pfl --help` should not.
_HOME = {
    "Comparison": "experiment.comparison",
    "Config": "experiment.config",
    "ConfigError": "errors",
    "METHODS": "methods",
    "Result": "experiment.driver",
    "Sweep": "experiment.sweep",
    "compare": "experiment.comparison",
    "load_config": "experiment.config",
    "load_sweep": "experiment.sweep",
    "simulate": "experiment.driver",
    "sweep": "experiment.sweep",
}

__all__ = [
    "METHODS",
    "Comparison",
    "Config",
    "ConfigError",
    "Result",
    "Sweep",
    "__version__",
    "compare",
    "load_config",
    "load_sweep",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version(__name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
