"""From a config to the parts of a run: devices, federation, model, engine and placement."""

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Key

from fedjax_pfl.data.dataset import Dataset
from fedjax_pfl.data.divide import count_new
from fedjax_pfl.data.divide import divide as divide_among_clients
from fedjax_pfl.data.federated import Federation
from fedjax_pfl.engine.memory import Memory, available, estimate
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS, Model, build
from fedjax_pfl.ops.training import Trainer


def prepare_devices(placement: str) -> None:
    """Makes every core of a CPU a device, for the placements that split clients over devices.

    That is possible only before JAX has started; later, and where the user has chosen a number, clients run on the
    devices that there are.
    """
    if placement in ("auto", "shard") and jax.config.values["jax_num_cpu_devices"] == -1:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cores())


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divide(config: Config, dataset: Dataset) -> tuple[Federation, dict[str, Any]]:
    """Shares the data set out among the clients, as the data section says; returns the manifest, too."""
    fields = config.data.model_dump(exclude={"source", "seed", "mean", "std"})
    return divide_among_clients(
        dataset, **fields, seed=config.run.seed if config.data.seed is None else config.data.seed
    )


def make_engine(config: Config, dataset: Dataset, swept: Mapping[str, Array] = MappingProxyType({})) -> Engine:
    """Model, trainer and method, joined; clients one by one on one device until :func:`place` decides.

    Args:
      config: what to run.
      dataset: what the model is fitted to.
      swept: traced values that take the place of numbers in the config, by dotted name (``training.lr``).

    Raises:
      ConfigError: model, method and data do not fit together.
    """
    training, options = config.training.model_dump(exclude={"rounds", "augment"}), _options(config.method, "name")
    for field, value in swept.items():
        section, _, key = field.partition(".")
        {"training": training, "method": options}[section][key] = value
    name, model = config.method["name"], _model(config, dataset)
    try:
        method = METHODS[name](model, Trainer(**training), **options)
    except ValueError as error:
        raise ConfigError("method.name", name, f"it does not work like this: {error}") from None
    if config.training.augment is not None:
        method = method._replace(augment=config.training.augment)
    if dataset.vocabulary is not None and method.augment != "none":
        allowed = f'"none": {dataset.name} is text, and {method.augment!r} augments images'
        if config.training.augment is None:
            allowed += f" (it is what {name} does unless told otherwise)"
        raise ConfigError("training.augment", config.training.augment, allowed)
    ratio = config.participation.ratio
    low, high = ratio if isinstance(ratio, tuple) else (ratio, ratio)
    who = Participation(low, high, config.participation.dropout)
    return Engine(method, config.data.clients, who, new=count_new(config.data.new_clients, config.data.clients))


def _options(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def _model(config: Config, dataset: Dataset) -> Model:
    """The model, fitted to the shape of the data set's samples and its number of classes."""
    name = config.model["name"]
    extractor = MODELS[name](**_options(config.model, "name"))
    readable = getattr(extractor, "vocabulary", None)
    if readable != dataset.vocabulary:
        kinds = [
            "images" if tokens is None else f"text of {tokens} symbols" for tokens in (readable, dataset.vocabulary)
        ]
        raise ConfigError("model.name", name, f"it reads {kinds[0]}, and {dataset.name} is {kinds[1]}")
    scale = {}
    channels = dataset.images.shape[-1]
    for field in ("mean", "std") if dataset.vocabulary is None else ():
        given = getattr(config.data, field)
        if isinstance(given, list) and len(given) != channels:
            raise ConfigError(f"data.{field}", given, f"one number, or one for each of the {channels} channels")
        scale[field] = jnp.broadcast_to(jnp.asarray(given, jnp.float32), (channels,))
    try:
        return build(extractor, dataset.images.shape[1:], dataset.classes, init=config.model["init"], **scale)
    except ValueError as error:
        shape = "x".join(map(str, dataset.images.shape[1:]))
        raise ConfigError("model.name", name, f"it does not fit {shape} images: {error}") from None


def place(engine: Engine, config: Config, key: Key[Array, ""], data: Federation) -> tuple[Engine, Memory]:
    """Chooses devices and chunk: by backend and by the memory estimate, unless the config says."""
    memory = estimate(engine, key, data)
    on_cpu = jax.default_backend() == "cpu"
    cohort = engine.cohort_size
    kind = config.run.placement
    together = jax.process_count() > 1
    if together and kind not in ("auto", "shard"):
        raise ConfigError("run.placement", kind, '"auto" or "shard" for a run of several processes')
    # Of several processes, each takes part with all of its devices.
    usable = jax.devices() if together else jax.local_devices()[:cohort]
    if kind == "auto":
        kind = "shard" if len(usable) > 1 else "map" if on_cpu else "vmap"
    devices = len(usable) if kind == "shard" else 1
    # On a CPU, clients side by side leave the cache and turn convolutions into batched products.
    one_by_one = kind == "map" or (kind == "shard" and on_cpu)
    limit = available()
    fitting = max(1, min(math.ceil(cohort / devices), (limit - memory.resident) // max(1, memory.per_client)))
    chunk = config.run.chunk or (1 if one_by_one else fitting)
    need = memory.resident + chunk * memory.per_client
    if need > limit:
        field, value = ("run.chunk", chunk) if config.run.chunk else ("data.clients", config.data.clients)
        raise ConfigError(field, value, f"the run needs about {need / 1e9:.2f} GB; a device has {limit / 1e9:.2f} GB")
    mesh = None
    if kind == "shard":
        mesh = jax.make_mesh((devices,), ("clients",), (AxisType.Auto,), devices=usable)
    return replace(engine, placement=Placement(mesh, chunk)), memory
