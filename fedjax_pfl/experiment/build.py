"""Builds the parts of a run from a config: devices, federation, model, engine and placement."""

import functools
import inspect
import os
import traceback
import types
import typing
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from fedjax_pfl.data import divide as division
from fedjax_pfl.data.dataset import Dataset, check_channels, fingerprint
from fedjax_pfl.data.dealing import counted
from fedjax_pfl.data.federated import Federation
from fedjax_pfl.data.intake import as_dataset
from fedjax_pfl.data.rows import Holdings
from fedjax_pfl.data.sources import load
from fedjax_pfl.engine.metrics import METRICS, Metric, check_metrics
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.errors import ConfigError, first_line
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.options import hyperparameters
from fedjax_pfl.experiment.registry import load_entry_points
from fedjax_pfl.method import Method, Static
from fedjax_pfl.methods import METHODS
from fedjax_pfl.methods.alone import alone
from fedjax_pfl.methods.attacked import attacked
from fedjax_pfl.methods.ccvr import calibrated
from fedjax_pfl.methods.compressed import compressed, int8, top_k
from fedjax_pfl.methods.feddecorr import decorrelated
from fedjax_pfl.methods.finetuned import finetuned
from fedjax_pfl.methods.private import private
from fedjax_pfl.models import MODELS, Model, Own, build
from fedjax_pfl.ops.robust import RULES, whole_part
from fedjax_pfl.ops.training import Trainer

_OF_JAX = os.path.dirname(jax.__file__)
_TRAINING_NUMBERS = ("lr", "lr_decay", "momentum", "weight_decay", "clip_norm")


class DataShape(NamedTuple):
    """What a model needs to know about a data set.

    Attributes:
      name: name of the data set, for messages.
      sample: shape of a sample: (h, w, c) for images, (length,) for text, any shape for real numbers.
      classes: number of classes.
      vocabulary: number of symbols of a text; None for other data.
      real: whether samples are real numbers, not pixels from 0 to 255.
    """

    name: str
    sample: tuple[int, ...]
    classes: int
    vocabulary: int | None
    real: bool = False


def of_data(config: Config, data: Any) -> Config:
    """The config with ``data.source = "arrays"``, if data are given instead of a source."""
    elsewhere = data is None or isinstance(data, Dataset) or config.data.source == "arrays"
    return config if elsewhere else config.replace({"data.source": "arrays"})


def dataset_of(config: Config, data: Any) -> Dataset:
    """The data set of a run: the given data, as `simulate` takes them, or else the config's ``data.source``."""
    return load(config.data.source) if data is None else as_dataset(data)


def shape_of(dataset: Dataset) -> DataShape:
    """What a model needs to know about this data set."""
    real = dataset.images.dtype.kind == "f"
    return DataShape(dataset.name, dataset.images.shape[1:], dataset.classes, dataset.vocabulary, real)


def divide(config: Config, dataset: Dataset) -> tuple[Federation, dict[str, Any]]:
    """Divides the data set among the clients, as the data section says; returns federation and manifest."""
    holdings, manifest = deal(config, dataset)
    return federate(config, dataset, holdings), manifest


def deal(config: Config, dataset: Dataset) -> tuple[Holdings, dict[str, Any]]:
    """Decides which client holds which rows, as the data section says; returns holdings and manifest.

    The manifest has the entries of `manifest`; ``data``, the `fingerprint` of the samples; and ``attackers``, the
    malicious clients, if there are any.

    Raises:
      ConfigError: the data section does not fit the data, or `attackers` refuses the attack.
    """
    fields = config.data.model_dump(exclude={"source", "seed", "mean", "std", "evaluate_on"})
    holdings, manifest = division.deal(dataset, **fields, seed=config.partition_seed)
    malicious = attackers(config)
    of_attack = {} if malicious is None else {"attackers": np.flatnonzero(malicious).tolist()}
    return holdings, manifest | {"data": fingerprint(dataset)} | of_attack


def federate(config: Config, dataset: Dataset, holdings: Holdings) -> Federation:
    """Puts data set and holdings on the device, with the evaluation samples that the data section chooses."""
    fields = config.data.model_dump(include={"validation_share", "evaluate_on"})
    return division.federate(dataset, holdings, **fields)


def program_inputs(config: Config) -> dict[str, float]:
    """Dotted field -> number, for the numbers that are inputs of a program, so that new values need no compilation."""
    numbers: dict[str, Any] = {f"training.{name}": getattr(config.training, name) for name in _TRAINING_NUMBERS}
    hints = typing.get_type_hints(METHODS[config.method["name"]], include_extras=True)
    numbers |= {f"method.{name}": value for name, value in config.method.items() if _is_number(hints.get(name))}
    numbers["attack.scale"] = config.attack.strength
    numbers |= {f"privacy.{name}": getattr(config.privacy, name) for name in ("clip", "noise")}
    return {field: value for field, value in numbers.items() if value is not None}


def attackers(config: Config) -> Bool[np.ndarray, " N"] | None:
    """Whether each client is malicious, [N]; None if no client is.

    Raises:
      ConfigError: field ``attack.share``: it is not 0, but amounts to none or all of the clients that train.
    """
    share, clients = config.attack.malicious_share, config.data.clients
    if share == 0:
        return None
    trainers = _trainers(config)
    number = round(share * trainers)
    if not 0 < number < trainers:
        allowed = f"0, or a share that is some of the {trainers} clients that train, not all"
        raise ConfigError("attack.share", share, allowed)
    rng = np.random.default_rng([config.partition_seed, zlib.crc32(b"attackers")])
    found = np.zeros(clients, bool)
    found[rng.permutation(trainers)[:number]] = True  # with a larger share, others join these
    return found


def _trainers(config: Config) -> int:
    """The number of clients that train, which are those that are not new."""
    return config.data.clients - division.count_new(config.data.new_clients, config.data.clients)


def _is_number(hint: Any) -> bool:
    """Whether a hyperparameter of this type is a real number on which no shape depends."""
    if typing.get_origin(hint) is Annotated:
        return Static not in hint.__metadata__ and _is_number(hint.__origin__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        return all(map(_is_number, kinds))
    return hint is float


def make_engine(
    config: Config,
    data: DataShape,
    inputs: Mapping[str, Array] = MappingProxyType({}),
    placement: Placement | None = None,
    malicious: Bool[Array, " N"] | None = None,
) -> Engine:
    """The engine of a run: model, trainer and method put together.

    Args:
      config: the config of the run.
      data: the shape of the data for which the model is built.
      inputs: traced values that replace numbers of the config, by dotted name (``training.lr``).
      placement: where clients run; one by one on one device unless given.
      malicious: a traced value that replaces the config's `attackers`, [N].

    Raises:
      ConfigError: model, method and data do not fit together.
    """
    training = config.training.model_dump(exclude={"rounds", "augment", "augment_every", "copies", "decorrelate"})
    training, options = {**training, "diagnose": config.run.diagnostics}, _options(config.method)
    attack = {"kind": config.attack.kind, "scale": config.attack.strength or 1.0}
    privacy = config.privacy.model_dump(exclude={"delta"})
    for field, value in inputs.items():
        section, _, key = field.partition(".")
        {"training": training, "method": options, "attack": attack, "privacy": privacy}[section][key] = value
    if config.method["name"] == "feddecorr" and config.training.decorrelate:
        raise ConfigError("training.decorrelate", config.training.decorrelate, "0: feddecorr has the term, as beta")
    model = decorrelated(model_of(config, data), config.training.decorrelate)
    method = _method(config, model, Trainer(**training), options)
    method = _with_surroundings(method, config, attack, privacy, malicious)
    if data.vocabulary is not None or data.real:
        _check_nothing_is_augmented(config, data, method)
    ratio = config.participation.ratio
    low, high = ratio if isinstance(ratio, tuple) else (ratio, ratio)
    spec = config.data
    return Engine(
        method,
        spec.clients,
        Participation(low, high, config.participation.dropout, config.participation.sampling),
        placement or Placement(),
        new=division.count_new(spec.new_clients, spec.clients),
        validate=spec.validation_share > 0 and spec.evaluate_on == "test",
        augment=config.training.augment,
        augment_every=config.training.augment_every,
        features=model.features if "features" in config.run.export else None,
        metrics=_metrics(config, data),
    )


NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,  # if, float(), item()
    jax.errors.TracerIntegerConversionError,  # an entry of a list, range()
    jax.errors.TracerArrayConversionError,  # an entry of a NumPy array, a function of NumPy
    jax.errors.NonConcreteBooleanIndexError,  # x[mask]
)
"""JAX's errors for Python code that needs the value of a traced number."""


def needs_value(name: str, error: Exception) -> ConfigError:
    """The error for a method of this name whose Python code needs the value of a traced number, as JAX's says."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _OF_JAX not in frame.filename]
    at = f"{Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line}"
    allowed = f"one whose code does not need the value of a traced number ({at}); float options, now.t, data.id, counts"
    instead = "and samples are traced: use jnp.where or lax.cond, jnp instead of np, jnp.asarray(values)[data.id] for a"
    options = "list or NumPy array, is_off(option) for an option that may be 0, or mark an option that it must know"
    return ConfigError("method.name", name, f"{allowed} {instead} {options} Annotated[float, Static]")


def _method(config: Config, model: Model, train: Trainer, options: dict[str, Any]) -> Method:
    """The method that a config names, with these options, aggregation rule, fine-tuning, calibration and copies."""
    name, rule = config.method["name"], config.aggregation.rule
    factory = METHODS[name]
    if rule != "mean":
        if "combine" not in inspect.signature(factory).parameters:
            raise ConfigError("aggregation.rule", rule, f'"mean": {name} averages no parameters')
        _check_someone_is_left_out(config)
        factory = functools.partial(factory, combine=functools.partial(RULES[rule], **config.aggregation.options))
    try:
        method = factory(model, train, **options)
    except ValueError as error:
        raise ConfigError("method.name", name, f"it does not work like this: {error}") from None
    except NEEDS_VALUE as error:
        raise needs_value(name, error) from error
    if not isinstance(method, Method):
        raise ConfigError("method.name", name, f"a factory that returns a Method; it returns {type(method).__name__}")
    for field in ("headline", "copies"):
        known = typing.get_args(typing.get_type_hints(Method)[field])
        if (value := getattr(method, field)) not in known:
            raise ConfigError(f"the method's {field}", value, " or ".join(map(repr, known)))
    if (tuning := config.finetune).epochs > 0:
        try:
            method = finetuned(method, model, train, **tuning.model_dump())
        except ValueError as error:
            raise ConfigError("finetune.epochs", tuning.epochs, f"0 for {name}: {error}") from None
        if own := config.method.get("finetune_epochs"):
            allowed = f"0 for {name}, which fine-tunes by method.finetune_epochs = {own} already: set one of them to 0"
            raise ConfigError("finetune.epochs", tuning.epochs, allowed)
    if (drawn := config.calibration.samples_per_class) > 0:
        train_server = Trainer(**config.calibration.model_dump(exclude={"samples_per_class"}))
        try:
            method = calibrated(method, model, train_server, samples_per_class=drawn)
        except ValueError as error:
            raise ConfigError("calibration.samples_per_class", drawn, f"0 for {name}: {error}") from None
    if method.selects and config.data.validation_share == 0:
        allowed = f"above 0, such as 0.2: {name} selects on validation samples"
        raise ConfigError("data.validation_share", config.data.validation_share, allowed)
    if method.selects and config.data.evaluate_on == "validation":
        raise ConfigError("data.evaluate_on", "validation", f'"test": {name} selects on the validation samples')
    return method if config.training.copies is None else method._replace(copies=config.training.copies)


def _check_someone_is_left_out(config: Config) -> None:
    """Raises a ConfigError if a rule that averages all but a share of the participants would average all of them."""
    rule, ratio = config.aggregation.rule, config.participation.ratio
    if rule not in ("trimmed_mean", "multi_krum"):
        return
    [(field, usual)] = hyperparameters(RULES[rule]).items()
    share = config.aggregation.options.get(field, usual.default)
    participants = max(1, round(_trainers(config) * (max(ratio) if isinstance(ratio, tuple) else ratio)))
    if share > 0 and whole_part(share, participants) == 0:
        enough = f"at least 1/{participants}" if participants > 2 else 'aggregation.rule = "median"'
        rounded = f"the part of {counted(participants, 'participant')} per round that {rule} leaves out is rounded down"
        allowed = f"0, or {enough}: {rounded}, here to 0"
        raise ConfigError(f"aggregation.{field}", share, allowed)


def _metrics(config: Config, data: DataShape) -> dict[str, Metric]:
    """The metrics that a config names."""
    unknown = [name for name in config.run.metrics if name not in METRICS]
    if unknown:
        load_entry_points()
        if unknown[0] not in METRICS:
            allowed = f"registered ones ({', '.join(METRICS) or 'none yet'}); register_metric adds yours"
            raise ConfigError("run.metrics", unknown[0], allowed)
    metrics = {name: METRICS[name] for name in config.run.metrics}
    check_metrics(metrics, data.classes)
    return metrics


def _with_surroundings(
    method: Method,
    config: Config,
    attack: dict[str, Any],
    privacy: dict[str, Any],
    malicious: Bool[Array, " N"] | None,
) -> Method:
    """The method with attacks, compression and privacy: first attack, then compression, then the server clips."""
    drawn, compression = attackers(config), config.compression
    if drawn is not None:
        method = attacked(method, attackers=jnp.asarray(drawn) if malicious is None else malicious, **attack)
    if config.privacy.clip is not None:
        assert isinstance(config.participation.ratio, float)
        staying = config.participation.ratio * (1 - config.participation.dropout)
        method = private(method, **privacy, expected=staying * _trainers(config))
    if compression.kind != "none":
        method = compressed(method, int8() if compression.kind == "int8" else top_k(compression.kept_share))
    return method if config.participation.collaborate else alone(method)


def _check_nothing_is_augmented(config: Config, data: DataShape, method: Method) -> None:
    """Raises a ConfigError for augmentation of other data than pixels from 0 to 255, for which it is made."""
    held = "real numbers, not pixels" if data.real else "text"
    for field, kind in (("augment", config.training.augment), ("copies", method.copies)):
        if kind != "none":
            allowed = f'"none": {data.name} is {held}, and {kind!r} augments images'
            if getattr(config.training, field) is None:
                allowed += f" (it is what {config.method['name']} does unless told otherwise)"
            raise ConfigError(f"training.{field}", getattr(config.training, field), allowed)


def _options(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != "name"}


def model_of(config: Config, data: DataShape) -> Model:
    """The model, built for the shape of the data set's samples and its number of classes.

    Raises:
      ConfigError: the model does not fit the data, or ``data.mean`` or ``data.std`` does not.
    """
    name = config.model["name"]
    extractor = MODELS[name](**_options(config.model))
    # A user's own model is tried on the data by `fit`.
    readable = data.vocabulary if isinstance(extractor, Own) else getattr(extractor, "vocabulary", None)
    if readable != data.vocabulary:
        other = "real numbers" if data.real else "images"
        kinds = [other if tokens is None else f"text of {tokens} symbols" for tokens in (readable, data.vocabulary)]
        given = readable is not None and data.vocabulary is None and config.data.source == "arrays"
        hint = f"; of tokens, give FederatedData(x, y, vocabulary={readable})" if given else ""
        raise ConfigError("model.name", name, f"it reads {kinds[0]}, and {data.name} is {kinds[1]}{hint}")
    scale = {}
    channels = data.sample[-1]
    for field in ("mean", "std"):
        given = getattr(config.data, field)
        if data.real or data.vocabulary is not None:
            usual = type(config.data).model_fields[field].default
            if given != usual:
                held = "real numbers, which models read as they are" if data.real else "text, which has no pixels"
                raise ConfigError(f"data.{field}", given, f"{usual}, or left out: {data.name} is {held}")
            continue
        check_channels(f"data.{field}", given, channels)
        scale[field] = jnp.broadcast_to(jnp.asarray(given, jnp.float32), (channels,))
    if isinstance(extractor, Own):
        return extractor.fit(data.sample, data.classes, text=data.vocabulary is not None, **scale)
    try:
        return build(extractor, data.sample, data.classes, init=config.model.get("init", "torch"), **scale)
    except ConfigError:
        raise
    except Exception as error:  # whatever a module does
        shape, why = "x".join(map(str, data.sample)), first_line(error)
        if len(data.sample) != 3 and data.vocabulary is None:
            flat = f"a model for samples of shape [{shape}], such as mlp; this one seems to be for images [h, w, c]"
            raise ConfigError("model.name", name, f"{flat}: {why}") from error
        raise ConfigError("model.name", name, f"it does not fit {shape} images: {why}") from error
