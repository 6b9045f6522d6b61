"""fedjax_pfl: a simulator for personalized federated learning in JAX.

Start with :func:`simulate`; ``fedjax_pfl/method.py`` holds the contract of a method.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_pfl.analysis.leakage import Leakage, leakage, plot_leakage
    from fedjax_pfl.data.intake import FederatedData
    from fedjax_pfl.errors import ConfigError
    from fedjax_pfl.experiment.callbacks import (
        BestModel,
        Callback,
        EarlyStopping,
        MLflowLogger,
        Running,
        TensorBoard,
        WandbLogger,
    )
    from fedjax_pfl.experiment.comparison import Comparison, compare
    from fedjax_pfl.experiment.config import Config, load_config
    from fedjax_pfl.experiment.driver import simulate
    from fedjax_pfl.experiment.html import partition_html
    from fedjax_pfl.experiment.plots.answers import plot_confusion, plot_features
    from fedjax_pfl.experiment.plots.attention import plot_attention
    from fedjax_pfl.experiment.plots.clients import plot_clients
    from fedjax_pfl.experiment.plots.partition import plot_partition
    from fedjax_pfl.experiment.plots.sensitivity import plot_sensitivity
    from fedjax_pfl.experiment.progress import Progress
    from fedjax_pfl.experiment.registry import (
        register_dataset,
        register_method,
        register_metric,
        register_model,
        register_partition,
    )
    from fedjax_pfl.experiment.result import Result
    from fedjax_pfl.experiment.sweep import Sweep, load_sweep, sweep
    from fedjax_pfl.experiment.tuning import Choice, IntUniform, LogUniform, Uniform, load_tune, tune
    from fedjax_pfl.methods import METHODS

    __version__: str

# Imported at first use: JAX takes a second, which `fedjax-pfl --help` should not.
_HOME = {
    "BestModel": "experiment.callbacks",
    "Callback": "experiment.callbacks",
    "Choice": "experiment.tuning",
    "Comparison": "experiment.comparison",
    "Config": "experiment.config",
    "ConfigError": "errors",
    "EarlyStopping": "experiment.callbacks",
    "FederatedData": "data.intake",
    "IntUniform": "experiment.tuning",
    "Leakage": "analysis.leakage",
    "LogUniform": "experiment.tuning",
    "METHODS": "methods",
    "MLflowLogger": "experiment.callbacks",
    "Progress": "experiment.progress",
    "Result": "experiment.result",
    "Running": "experiment.callbacks",
    "Sweep": "experiment.sweep",
    "TensorBoard": "experiment.callbacks",
    "Uniform": "experiment.tuning",
    "WandbLogger": "experiment.callbacks",
    "compare": "experiment.comparison",
    "leakage": "analysis.leakage",
    "load_config": "experiment.config",
    "load_sweep": "experiment.sweep",
    "load_tune": "experiment.tuning",
    "partition_html": "experiment.html",
    "plot_attention": "experiment.plots.attention",
    "plot_clients": "experiment.plots.clients",
    "plot_confusion": "experiment.plots.answers",
    "plot_features": "experiment.plots.answers",
    "plot_leakage": "analysis.leakage",
    "plot_partition": "experiment.plots.partition",
    "plot_sensitivity": "experiment.plots.sensitivity",
    "register_dataset": "experiment.registry",
    "register_method": "experiment.registry",
    "register_metric": "experiment.registry",
    "register_model": "experiment.registry",
    "register_partition": "experiment.registry",
    "simulate": "experiment.driver",
    "sweep": "experiment.sweep",
    "tune": "experiment.tuning",
}

__all__ = [
    "METHODS",
    "BestModel",
    "Callback",
    "Choice",
    "Comparison",
    "Config",
    "ConfigError",
    "EarlyStopping",
    "FederatedData",
    "IntUniform",
    "Leakage",
    "LogUniform",
    "MLflowLogger",
    "Progress",
    "Result",
    "Running",
    "Sweep",
    "TensorBoard",
    "Uniform",
    "WandbLogger",
    "__version__",
    "compare",
    "leakage",
    "load_config",
    "load_sweep",
    "load_tune",
    "partition_html",
    "plot_attention",
    "plot_clients",
    "plot_confusion",
    "plot_features",
    "plot_leakage",
    "plot_partition",
    "plot_sensitivity",
    "register_dataset",
    "register_method",
    "register_metric",
    "register_model",
    "register_partition",
    "simulate",
    "sweep",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version(__name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
