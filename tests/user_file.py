"""A person's own file, which uses most public names: `mypy --strict` has nothing against it (tests/test_api.py).

It is not run; tests/test_registry.py and others run what is like it.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

import fedjax_pfl
from fedjax_pfl import (
    METHODS,
    BestModel,
    Callback,
    Choice,
    Comparison,
    Config,
    ConfigError,
    EarlyStopping,
    FederatedData,
    IntUniform,
    LogUniform,
    Progress,
    Result,
    Running,
    Sweep,
    Uniform,
    compare,
    load_config,
    load_sweep,
    load_tune,
    partition_html,
    plot_clients,
    plot_confusion,
    plot_features,
    plot_partition,
    plot_sensitivity,
    register_dataset,
    register_method,
    register_metric,
    register_model,
    register_partition,
    simulate,
    sweep,
    tune,
)
from fedjax_pfl.method import Method
from fedjax_pfl.methods.fedprox import fedprox
from fedjax_pfl.models import MODELS, Model
from fedjax_pfl.ops.aggregate import Combine, weighted_mean
from fedjax_pfl.ops.training import Trainer


@register_method("my_prox")
def my_prox(model: Model, train: Trainer, combine: Combine = weighted_mean, *, strength: float = 0.1) -> Method:
    return fedprox(model, train, combine, mu=strength)._replace(headline="post")


@register_model("my_mlp")
def my_mlp(*, width: int = 64) -> Any:
    return MODELS["mlp"](hidden=width)


@register_dataset("noise")
def noise(argument: str) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(int(argument))
    return rng.integers(0, 256, (200, 8, 8, 1)).astype(np.uint8), rng.integers(0, 3, 200)


@register_partition("stripes")
def stripes(labels: NDArray[Any], clients: int, seed: int, size: int | None, *, gap: int = 0) -> list[NDArray[Any]]:
    return [np.arange(client, len(labels) - gap, clients) for client in range(clients)]


@register_metric("sure")
def sure(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.nn.softmax(logits).max(axis=-1)


class Patience(Callback):
    """Stops at a loss."""

    def __init__(self, loss: float):
        self.loss = loss

    def on_round(self, run: Running) -> None:
        if run.loss < self.loss:
            run.stop("low enough")

    def on_evaluate(self, run: Running, line: dict[str, Any]) -> None:
        print(run.round, line["pre"]["accuracy"], run.config.training.lr)

    def on_end(self, run: Running, result: Result) -> None:
        print(result.rounds_to(0.9, "pre.accuracy"))


def say(now: Progress) -> None:
    print(f"{now.round}/{now.rounds}: {now.loss:.3f}")


def configs(path: Path) -> list[Config]:
    config = Config(
        data={"source": "noise:0", "clients": 4, "partition": {"kind": "stripes", "gap": 3}},
        model={"name": "my_mlp"},
        method={"name": "my_prox"},
        training={"rounds": 2},
    )
    by_hand = config.replace("training.lr", 0.1).replace({"run.seed": 1, "run.metrics": ["sure"]})
    assert by_hand.training.lr == 0.1
    assert by_hand.data.clients == 4
    try:
        return [config, by_hand, load_config(path, ["training.lr=0.1"])]
    except ConfigError as error:
        print(error.field, error.allowed)
        return [Config(protocol="pfllib", data={"source": "digits"}, method={"name": "fedavg"})]


def run(config: Config, out: Path) -> float:
    best = BestModel("pre.accuracy")
    x, y = noise("1")
    data = FederatedData(x, y, users=np.arange(len(y)) % 4)
    result = simulate(config, data, callbacks=[best, EarlyStopping(patience=3), Patience(0.1)], progress=say)
    result = simulate(config, method=my_prox, metrics={"sure": sure}, progress="auto", resume=out)
    labels = result.predict(x, client=2)
    newcomer = result.adapt(x, y, epochs=2)
    print(labels.mean(), newcomer.predict(x).mean(), result.to_frame(), result.params(client=1), fedjax_pfl.__version__)
    result.save(out)
    loaded = Result.load(out)
    print(repr(loaded), partition_html(loaded.partition), loaded.config.to_toml())
    return float(result.history["pre.accuracy"][-1])


def runs(config: Config, path: Path) -> str:
    found: Comparison = compare(config, {"fedavg": {}, "ditto": {"lam": 0.1}}, seeds=range(3), progress=print)
    other: Sweep = sweep(config, {"training.lr": [0.01, 0.1], "run.seed": [0, 1]}, executor="local")
    again = sweep(*load_sweep(path)[:2])
    study = tune(config, {"training.lr": LogUniform(1e-3, 0.3), "method.strength": Uniform(0.0, 1.0)})
    tune(config, {"training.epochs": IntUniform(1, 3), "training.momentum": Choice([0.0, 0.9])}, progress=print)
    tune(*load_tune(path), n_trials=3)
    print(found.rows(), other.csv(), again.failed, study.best_value, sorted(METHODS))
    return found.markdown() + other.to_latex(bold=True)


def pictures(result: Result, found: Comparison, other: Sweep) -> None:
    ax = result.plot("post.accuracy", x="seconds")
    other.plot(errorbar="ci", ax=ax)
    found.plot(x="megabytes", errorbar=None).set_title("digits")
    for draw in (result, found, other):
        plot_clients(draw, "strip", point="post")
    plot_partition(result.partition, "bars", ax=ax)
    plot_sensitivity(other, "training.lr", "pre")
    plot_confusion(result, client=1)
    plot_features(result, [0, 1], method="pca")
