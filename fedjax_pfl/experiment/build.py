"""From a config to the parts of a run: devices, federation, model, engine and placement."""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Int, Key

from fedjax_pfl.data.federated import Clients, Federation, pack
from fedjax_pfl.data.partition import PARTITIONS, Rows
from fedjax_pfl.data.sources import Dataset
from fedjax_pfl.data.split import draw_test, manifest, own_test, set_aside, split_rows
from fedjax_pfl.engine.memory import Memory, available, estimate
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS, Model, build
from fedjax_pfl.ops.training import Trainer

# Samples of the pooled test set per block; a block is evaluated like a client.
_POOLED_BLOCK = 512


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
    """Shares the data set out among the clients.

    Returns:
      The federation, and the manifest that ``partition.json`` holds.

    Raises:
      ConfigError: the partition does not fit the data set.
    """
    spec, clients, new = config.data, config.data.clients, new_clients(config)
    seed = config.run.seed if spec.seed is None else spec.seed
    kind = PARTITIONS[spec.partition["kind"]]
    options = _options(spec.partition, "kind")
    wanted = spec.samples_per_client
    held_out = {"test_share": spec.test_share, "validation_share": spec.validation_share}
    natural = spec.partition["kind"] == "natural"
    groups = dataset.users if natural else dataset.labels
    if groups is None:
        others = ", ".join(name for name in PARTITIONS if name != "natural")
        raise ConfigError("data.partition.kind", "natural", f"{dataset.name} has no users; use one of {others}")
    if spec.split == "official":
        train, pooled = _official_parts(dataset, spec.test_part_share, seed)
        if natural:
            train = _of_users_in_both(groups, train, pooled, dataset.name)
        partition = kind(groups[train], clients, seed, wanted, **options)
        partition = partition._replace(parts=_new_last([train[part] for part in partition.parts], new, seed))
        if natural:
            splits = own_test(groups, partition.parts, pooled, seed, validation_share=spec.validation_share)
            pooled = np.sort(np.concatenate([split.test for split in splits]))
        else:
            splits = draw_test(dataset.labels, partition.parts, pooled, seed, **held_out)
    else:
        # samples_per_client counts training samples; the test share comes on top.
        total = None if wanted is None else math.ceil(wanted / (1 - spec.test_share) - 1e-9)
        if total is not None and total * clients > len(dataset.labels):
            most = math.floor(len(dataset.labels) // clients * (1 - spec.test_share))
            allowed = f"up to {most}: {len(dataset.labels)} samples, {clients} clients, test_share = {spec.test_share}"
            raise ConfigError("data.samples_per_client", wanted, allowed)
        partition = kind(groups, clients, seed, total, **options)
        partition = partition._replace(parts=_new_last(partition.parts, new, seed))
        splits = split_rows(dataset.labels, partition.parts, seed, **held_out)
        pooled = np.sort(np.concatenate([split.test for split in splits]))
    if spec.evaluate_on == "validation":
        pooled = np.sort(np.concatenate([split.validation for split in splits]))
        if len(pooled) == 0:
            largest = max(len(split.train) for split in splits)
            allowed = f"a larger share: of {largest} training samples or fewer per client it leaves none to validate on"
            raise ConfigError("data.validation_share", spec.validation_share, allowed)
    blocks = np.array_split(pooled, math.ceil(len(pooled) / _POOLED_BLOCK))

    def rows(part: str) -> Clients:
        return pack([getattr(split, part) for split in splits], dataset.labels, dataset.classes)

    if new:
        note = f"clients {clients - new} to {clients - 1} are new: they never train"
        partition = partition._replace(notes=(*partition.notes, note))
    federation = Federation(
        x=jnp.asarray(dataset.images),
        y=jnp.asarray(dataset.labels, jnp.int32),
        train=rows("train"),
        validation=rows("validation") if spec.validation_share else None,
        test=rows(spec.evaluate_on),
        pooled=pack(blocks, dataset.labels, dataset.classes),
    )
    return federation, manifest(dataset.labels, dataset.classes, partition, splits)


def new_clients(config: Config) -> int:
    """The number of clients that never train.

    Raises:
      ConfigError: the share means none or all of the clients.
    """
    share, clients = config.data.new_clients, config.data.clients
    new = round(share * clients)
    if share and not 0 < new < clients:
        raise ConfigError("data.new_clients", share, f"0, or a share that is some of the {clients} clients, not all")
    return new


def _new_last(parts: Sequence[Rows], new: int, seed: int) -> list[Rows]:
    """The clients' rows, those of so many clients drawn at random at the end."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, 0, 0)))
    drawn = np.sort(rng.choice(len(parts), new, replace=False))
    return [parts[client] for client in (*np.setdiff1d(np.arange(len(parts)), drawn), *drawn)]


def _official_parts(dataset: Dataset, share: float | None, seed: int) -> tuple[Rows, Rows]:
    """The rows of the training part and of the test part, which is the source's own or the given share."""
    if dataset.train_rows is None:
        if share is None:
            allowed = f'{dataset.name} has no test part of its own; use "merge", or give data.test_part_share'
            raise ConfigError("data.split", "official", allowed)
        return set_aside(dataset.labels, share, seed)
    if share is not None:
        raise ConfigError("data.test_part_share", share, f"{dataset.name} has a test part of its own; leave it out")
    return np.arange(dataset.train_rows), np.arange(dataset.train_rows, len(dataset.labels))


def _of_users_in_both(users: Int[np.ndarray, " samples"], train: Rows, test: Rows, name: str) -> Rows:
    """The training rows of the users who are in the test part, too: the others could not be tested on their own."""
    rows: Rows = train[np.isin(users[train], users[test])]
    if not len(rows):
        allowed = f'{name} has no user with samples in both parts (it was split by users); use "merge"'
        raise ConfigError("data.split", "official", allowed)
    return rows


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
    return Engine(method, config.data.clients, who, new=new_clients(config))


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
