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
    from fedjax_pfl.experiment.callbacks import BestModel, Callback, EarlyStopping, Running
    from fedjax_pfl.experiment.comparison import Comparison, compare
    from fedjax_pfl.experiment.config import Config
    from fedjax_pfl.experiment.driver import simulate
    from fedjax_pfl.experiment.grid import load_sweep
    from fedjax_pfl.experiment.html import partition_html
    from fedjax_pfl.experiment.loggers import MLflowLogger, TensorBoard, WandbLogger
    from fedjax_pfl.experiment.plots.answers import plot_confusion, plot_features
    from fedjax_pfl.experiment.plots.attention import plot_attention
    from fedjax_pfl.experiment.plots.clients import plot_clients
    from fedjax_pfl.experiment.plots.partition import plot_partition
    from fedjax_pfl.experiment.plots.sensitivity import plot_sensitivity
    from fedjax_pfl.experiment.progress import Progress
    from fedjax_pfl.experiment.reading import load_config
    from fedjax_pfl.experiment.registry import (
        register_dataset,
        register_method,
        register_metric,
        register_model,
        register_partition,
    )
    from fedjax_pfl.experiment.result import Result
    from fedjax_pfl.experiment.space import Choice, IntUniform, LogUniform, Uniform, load_tune
    from fedjax_pfl.experiment.sweep import Sweep, sweep
    from fedjax_pfl.experiment.tuning import tune
    from fedjax_pfl.methods import METHODS

    __version__: str

# Imported at first use: JAX takes a second, which `fedjax-pfl --help` should not.
_NAMES = {
    "analysis.leakage": "Leakage leakage plot_leakage",
    "data.intake": "FederatedData",
    "errors": "ConfigError",
    "experiment.callbacks": "BestModel Callback EarlyStopping Running",
    "experiment.comparison": "Comparison compare",
    "experiment.config": "Config",
    "experiment.driver": "simulate",
    "experiment.grid": "load_sweep",
    "experiment.html": "partition_html",
    "experiment.loggers": "MLflowLogger TensorBoard WandbLogger",
    "experiment.plots.answers": "plot_confusion plot_features",
    "experiment.plots.attention": "plot_attention",
    "experiment.plots.clients": "plot_clients",
    "experiment.plots.partition": "plot_partition",
    "experiment.plots.sensitivity": "plot_sensitivity",
    "experiment.progress": "Progress",
    "experiment.reading": "load_config",
    "experiment.registry": "register_dataset register_method register_metric register_model register_partition",
    "experiment.result": "Result",
    "experiment.space": "Choice IntUniform LogUniform Uniform load_tune",
    "experiment.sweep": "Sweep sweep",
    "experiment.tuning": "tune",
    "methods": "METHODS",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

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
