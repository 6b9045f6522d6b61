"""The config tree: typed, frozen, read from TOML, with dotted ``key=value`` overrides and one clear error per mistake.

The tables ``[method]``, ``[model]`` and ``data.partition`` name a function. Their other keys are the keyword-only
arguments of this function: its signature is the schema.
"""

import inspect
import os
import re
import tomllib
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Required, Self, TypedDict, Unpack, overload

import numpy as np
import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from fedjax_pfl.data.augment import Augment, Copies
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.errors import ConfigError, one_of
from fedjax_pfl.experiment.html import config_html
from fedjax_pfl.experiment.protocols import tables_of, with_defaults_of
from fedjax_pfl.experiment.registry import load_entry_points
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS
from fedjax_pfl.ops.finetune import Scope
from fedjax_pfl.ops.robust import RULES

Share = Annotated[float, Field(gt=0, lt=1)]
_Portion = Annotated[float, Field(gt=0, le=1)]
# Programs count in int32.
_TOO_MANY = 2**31

SELECTORS = ("method.name", "model.name", "data.partition.kind")
"""The fields that name a part. The other options of the same table belong to that part; another name has others."""
# The parts of tables that name none.
_USUAL = {"model.name": "mlp", "data.partition.kind": "dirichlet"}
HONEST: Mapping[str, Any] = {"attack.kind": "none", "attack.share": None, "attack.scale": None}
"""Changes to a config after which it has no malicious clients."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _countable(cls, value: Any, info: ValidationInfo) -> Any:
        if type(value) is int and abs(value) >= _TOO_MANY and info.field_name != "seed":  # which has a bound of its own
            raise PydanticCustomError("too_large", f"input should be less than {_TOO_MANY}")
        return value


def hyperparameters(factory: Callable) -> dict[str, inspect.Parameter]:
    """The keyword-only arguments of a factory, by name: the options that its config table may have."""
    parameters = inspect.signature(factory).parameters
    return {name: given for name, given in parameters.items() if given.kind is inspect.Parameter.KEYWORD_ONLY}


def options_model(name: str, factory: Callable) -> type[BaseModel]:
    """A factory's hyperparameters as a pydantic model of the given name."""
    hints = typing.get_type_hints(factory, include_extras=True)
    usual = {field: ... if arg.default is arg.empty else arg.default for field, arg in hyperparameters(factory).items()}
    fields: dict[str, Any] = {
        field: (hints[field], Field(default, validate_default=True)) for field, default in usual.items()
    }
    return create_model(name, __base__=_Table, **fields)


def descriptions(documented: Any, heading: str = "Attributes") -> dict[str, str]:
    """The description of each name under a heading of a docstring (``Attributes`` or ``Args``), as one line."""
    _, _, below = (inspect.getdoc(documented) or "").partition(f"\n{heading}:\n")
    section = re.split(r"^\S", below, maxsplit=1, flags=re.MULTILINE)[0]
    entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def summary_line(documented: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _by_replace(field: str = "training.lr", value: str = "0.1") -> TypeError:
    return TypeError(f'a config is copied by Config.replace, which checks: config.replace("{field}", {value})')


class _Part(dict[str, Any]):
    """A table {key: name, **options} of a config, which refuses changes: nothing would check them."""

    def __init__(self, section: str, table: Mapping[str, Any]):
        super().__init__(table)
        self._section = section

    def __reduce__(self) -> tuple[Any, ...]:  # a dict's own would set one item after the other
        return type(self), (self._section, dict(self))

    def __setitem__(self, key: str, value: Any) -> NoReturn:
        raise _by_replace(f"{self._section}.{key}", repr(value))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _by_replace(f"{self._section}.KEY", "...")

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def _choose(section: str, key: str, table: Mapping[str, Callable]) -> WrapValidator:
    """Checks a table {key: name, **options} against the signature of table[name], and fills in the defaults."""
    field = f"{section}.{key}"

    def check(given: Any, _: Any) -> _Part:
        if not isinstance(given, Mapping):
            raise ConfigError(section, given, f'expected a table such as {{{key} = "{next(iter(table))}"}}')
        options = {key: _USUAL.get(field, "(missing)"), **given}
        name = options.pop(key)
        if isinstance(name, str) and name not in table:
            load_entry_points()
        if not isinstance(name, str) or name not in table:
            raise ConfigError(field, name, one_of(name, table))
        schema = options_model(name, table[name])
        options = _sequences_as(tuple, list, _unset(options, schema), schema)
        try:
            return _Part(section, {key: name, **schema(**options).model_dump()})
        except ValidationError as error:
            raise _config_error(error, section, list(schema.model_fields), f" of {name}") from None

    return WrapValidator(check)


def _unset(given: Mapping[str, Any], table: type[BaseModel]) -> dict[str, Any]:
    """The given values, with ``"none"`` replaced by None if the field may be None, which TOML cannot write."""

    def may_be_none(field: str) -> bool:
        hint = table.model_fields[field].annotation if field in table.model_fields else None
        return type(None) in typing.get_args(hint) and "none" not in _literals(hint)

    def is_none(field: str, value: Any) -> bool:
        return isinstance(value, str) and value == "none" and may_be_none(field)

    return {field: None if is_none(field, value) else value for field, value in given.items()}


def _sequences_as(kind: type, others: Any, given: Mapping[str, Any], table: type[BaseModel]) -> dict[str, Any]:
    """The given values, with what is one of the others replaced by ``kind``, list or tuple, if the field is one."""

    def is_kind(field: str) -> bool:
        hint = table.model_fields[field].annotation if field in table.model_fields else None
        return any(typing.get_origin(of) is kind for of in (hint, *typing.get_args(hint)))

    return {
        field: kind(value) if isinstance(value, others) and is_kind(field) else value for field, value in given.items()
    }


def _literals(hint: Any) -> list[Any]:
    """The values of all Literals in a type."""
    found = list(typing.get_args(hint)) if typing.get_origin(hint) is Literal else []
    return found + [value for part in typing.get_args(hint) for value in _literals(part)]


def _ratio(given: Any) -> Any:
    """Checks one share, or the two ends of a range from which each round draws its share."""
    ends = given if isinstance(given, list | tuple) else [given, given]
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    if not (numbers and len(ends) == 2 and 0 < ends[0] <= ends[1] <= 1):
        raise ConfigError("participation.ratio", given, "a share in (0, 1], or a range [low, high] of shares")
    return tuple(float(end) for end in ends) if ends is given else float(given)


class _Section(_Table):
    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _in_the_types_of_the_fields(cls, given: Any) -> Any:
        return _sequences_as(list, tuple | range, _unset(given, cls), cls) if isinstance(given, Mapping) else given

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise _by_replace()

    def __delattr__(self, name: str) -> NoReturn:
        raise _by_replace()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Refused, because pydantic's copy accepts any name and value without a check.

        Raises:
          TypeError: always; use `Config.replace`.
        """
        del update, deep
        raise _by_replace()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema, with the descriptions of the fields from the docstring."""
        found = handler(core)
        schema = handler.resolve_ref_schema(found)
        schema["description"] = summary_line(cls)
        texts = descriptions(cls)
        for name, field in cls.model_fields.items():
            schema["properties"][name]["description"] = texts.get(name) or summary_line(field.annotation)
        return found


class Data(_Section):
    """The data, and how they are divided among the clients.

    Attributes:
      source: such as ``digits`` or ``npz:PATH`` (``fedjax-pfl datasets`` lists all); ``arrays`` for data from Python.
      clients: N.
      partition: {kind, ...}: how the samples are divided among the clients.
      split: ``merge`` (training and test part are merged, then split per client) or ``official`` (the training part is
        divided among the clients; each draws test samples from the test part in its own label proportions or, with the
        partition ``natural``, has the test samples of its own user).
      test_part_share: share of each class that is set aside at random as the test part, before the partition; for
        ``official`` with a source that has no test part.
      test_share: share of a client's samples that is held out for testing.
      test_classes: classes that a client is tested on: ``all`` that it holds, or the ``dominant`` ones, which make up
        more than an even share of its training samples; for ``official``, and a partition by labels.
      validation_share: share of a client's training samples that is held out for validation; methods may select on it.
      stratified: split each class of a client in these shares, so that a client with two or more samples of a class
        trains on at least one; for ``merge``, which otherwise splits a client's samples at random, as PFLlib does.
      evaluate_on: ``test``, or ``validation``: models are scored on the validation samples instead of the test samples,
        so that hyperparameters can be chosen without using test samples.
      new_clients: share of the clients, drawn at random and numbered last, that never train; they are evaluated after
        the method's personalisation (PRE), and after one round of local training that is not uploaded (POST).
      samples_per_client: training samples (validation included) of each client; if not given, all samples are used.
      seed: seed of test part, partition and split; ``run.seed`` unless given.
      mean: mean by which pixels, scaled to [0, 1], are normalised; one number or one per channel.
      std: standard deviation, likewise. Text needs neither.
    """

    source: str
    clients: int = Field(20, ge=1)
    partition: Annotated[dict[str, Any], _choose("data.partition", "kind", PARTITIONS)] = Field(
        {"kind": _USUAL["data.partition.kind"]}, validate_default=True
    )
    split: Literal["merge", "official"] = "merge"
    test_part_share: Share | None = None
    test_share: Share = 0.25
    test_classes: Literal["all", "dominant"] = "all"
    validation_share: float = Field(0.0, ge=0, lt=1)
    stratified: bool = False
    evaluate_on: Literal["test", "validation"] = "test"
    new_clients: float = Field(0.0, ge=0, lt=1)
    samples_per_client: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**32)
    mean: float | list[float] = 0.5
    std: Annotated[float, Field(gt=0)] | list[Annotated[float, Field(gt=0)]] = 0.5

    @field_validator("source")
    @classmethod
    def _packages_offer_sources(cls, source: str) -> str:
        if source.partition(":")[0] not in {*SOURCES, "arrays"}:
            load_entry_points()
        return source

    @model_validator(mode="after")
    def _fields_go_together(self) -> "Data":
        if self.test_part_share is not None and self.split != "official":
            allowed = f'leave it out with data.split = "{self.split}": it is for "official"'
            raise ConfigError("data.test_part_share", self.test_part_share, allowed)
        if self.stratified and self.split != "merge":
            allowed = 'false with data.split = "official", which gives each client test samples in its own proportions'
            raise ConfigError("data.stratified", True, allowed)
        if self.test_classes != "all" and (self.split != "official" or self.partition["kind"] == "natural"):
            allowed = '"all", or data.split = "official" and a partition that is not natural'
            raise ConfigError("data.test_classes", self.test_classes, allowed)
        # Clients that overlap are held against nothing that others train on.
        if self.partition.get("overlap") and self.split != "official":
            allowed = 'false with data.split = "merge", where others would train on what a client is tested on'
            raise ConfigError("data.partition.overlap", True, allowed)
        if self.partition.get("overlap") and self.validation_share:
            allowed = "0 with data.partition.overlap: others would train on what a client validates on"
            raise ConfigError("data.validation_share", self.validation_share, allowed)
        if self.evaluate_on == "validation" and self.validation_share == 0:
            raise ConfigError("data.evaluate_on", "validation", '"test", or give data.validation_share a value above 0')
        return self


class Training(_Section):
    """Local training, and the number of rounds. Epochs, batch size and learning rate default to PFLlib's.

    ``protocol = "pfllib"`` sets all of PFLlib's values.

    Attributes:
      rounds: T, communication rounds.
      epochs: E, local epochs.
      batch_size: B, samples per mini-batch.
      lr: eta, the learning rate in round 0.
      lr_decay: factor on the learning rate per round.
      momentum: heavy-ball coefficient.
      weight_decay: coefficient of the L2 term.
      clip_norm: largest global norm of a gradient; no clipping unless given.
      drop_last: leave out an epoch's last, short batch.
      augment: augmentation of the training images, for every method: ``none``; ``crop_flip``, a random crop after
        padding by 4 black pixels, and a random horizontal flip; ``crop_flip_reflect``, the same with padding by
        reflection; ``crop_flip_rotate``, ``crop_flip`` and a rotation by up to 15 degrees.
      augment_every: ``epoch``: each training epoch over the images draws anew, while cached features and class means
        use one draw per round; or ``round``: all use that one draw. It has no effect with ``augment = "none"``, nor on
        ``copies``.
      copies: a method's own augmentation: ``none``; or a copy of each image by one of FedeCouple's five operations,
        added to the originals (``concat``) or instead of them (``replace``). The method's default unless given
        (FedeCouple: ``concat``, all others: ``none``).
      decorrelate: beta, weight of FedDecorr's term (``norm = "code"``) in every loss that trains the extractor on
        labels, for any method; 0 for none; the official value is 0.1.
    """

    rounds: int = Field(100, ge=1)
    epochs: int = Field(1, ge=1)
    batch_size: int = Field(10, ge=1)
    lr: float = Field(0.005, gt=0)
    lr_decay: float = Field(1.0, gt=0, le=1)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float | None = Field(None, gt=0)
    drop_last: bool = False
    augment: Augment = "none"
    augment_every: Literal["epoch", "round"] = "epoch"
    copies: Copies | None = None
    decorrelate: float = Field(0.0, ge=0)

    @field_validator("augment", mode="before")
    @classmethod
    def _copies_are_apart(cls, given: Any) -> Any:
        if given in ("concat", "replace"):
            allowed = f'{", ".join(typing.get_args(Augment))}; a method\'s own copies are training.copies = "{given}"'
            raise ConfigError("training.augment", given, allowed)
        return given


class Finetune(_Section):
    """Fine-tuning of a client's model before each PRE evaluation; the result is used for scoring only.

    For any method whose model is an extractor with a head.

    Attributes:
      epochs: E_ft, passes over the client's training samples; 0 for none.
      lr: eta_ft, learning rate; the local learning rate unless given.
      scope: the part that is trained: ``full``, ``head`` (only the last layer) or ``extractor``.
    """

    epochs: int = Field(0, ge=0)
    lr: float | None = Field(None, gt=0)
    scope: Scope = "full"

    @model_validator(mode="after")
    def _options_come_with_epochs(self) -> "Finetune":
        for name in ("lr", "scope"):
            given = getattr(self, name)
            if self.epochs == 0 and given != type(self).model_fields[name].default:
                raise ConfigError(f"finetune.{name}", given, "leave it out with finetune.epochs = 0")
        return self


class Calibration(_Section):
    """CCVR: before each evaluation the server retrains the global head on features drawn from Gaussians.

    For any method whose global model is an extractor with a head; the result is used for scoring only.

    Attributes:
      samples_per_class: M_c, features drawn per class; 0 for no calibration.
      lr: learning rate of the head on the server.
      epochs: passes over the drawn features.
      batch_size: drawn features per step.
    """

    samples_per_class: int = Field(0, ge=0)
    lr: float = Field(0.01, gt=0)
    epochs: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)

    @model_validator(mode="after")
    def _options_come_with_samples(self) -> "Calibration":
        for name in ("lr", "epochs", "batch_size"):
            given = getattr(self, name)
            if self.samples_per_class == 0 and given != type(self).model_fields[name].default:
                raise ConfigError(f"calibration.{name}", given, "leave it out with calibration.samples_per_class = 0")
        return self


class Participation(_Section):
    """Which clients take part in a round: a share of them, without those that drop out.

    Attributes:
      ratio: the share of the clients that is selected, or the two ends of a range from which each round draws it.
      dropout: probability that a selected client drops out.
      sampling: ``fixed``, a share of this size in every round; or ``poisson``, each client independently with this
        probability, so that the number of participants varies and may be 0.
      collaborate: false for the control without collaboration, in which each client runs the method with its own
        server.
    """

    ratio: Annotated[_Portion | tuple[_Portion, _Portion], BeforeValidator(_ratio)] = 1.0
    dropout: float = Field(0.0, ge=0, lt=1)
    sampling: Literal["fixed", "poisson"] = "fixed"
    collaborate: bool = True


class Aggregation(_Section):
    """How the server combines the parameters of the participants, for every method that averages parameters.

    Attributes:
      rule: ``mean``, weighted by training samples; or one of the rules in which all participants count alike:
        ``median`` and ``trimmed_mean``, coordinate by coordinate; ``krum``, the upload with the smallest distances to
        its nearest neighbours; ``multi_krum``, the mean of the share 1 - byzantine of the uploads with the smallest.
      trim: for ``trimmed_mean``: the share of the participants that is cut on each side; 0.2 unless given.
      byzantine: for ``krum`` and ``multi_krum``: the share of the participants that is assumed to be malicious; 0.2
        unless given.
    """

    rule: Literal["mean", "median", "trimmed_mean", "krum", "multi_krum"] = "mean"
    trim: float | None = Field(None, ge=0, lt=0.5)
    byzantine: float | None = Field(None, ge=0, lt=0.5)

    @property
    def options(self) -> dict[str, float]:
        """The options given for the rule, without those left at their defaults."""
        return self.model_dump(exclude={"rule"}, exclude_none=True)

    @model_validator(mode="after")
    def _options_are_of_the_rule(self) -> "Aggregation":
        for name, value in self.options.items():
            if name not in hyperparameters(RULES[self.rule]):
                rules = " or ".join(f'"{rule}"' for rule in RULES if name in hyperparameters(RULES[rule]))
                allowed = f'leave it out with aggregation.rule = "{self.rule}"; it belongs to {rules}'
                raise ConfigError(f"aggregation.{name}", value, allowed)
        return self


class Attack(_Section):
    """Malicious clients, the same ones in the whole run; the reported scores leave them out.

    Attributes:
      kind: ``none``; ``label_flip``, training on labels C - 1 - y; or how each array of the update is falsified (an
        update is the array sent minus the array received of the same name and shape, or the whole array if none was
        received): ``sign_flip``, its negative; ``scaled``, a multiple; ``gaussian``, the array plus noise.
      share: of the clients that train, drawn by the seed of the partition; 0.2 unless given.
      scale: the factor of ``scaled``, 10 unless given; the standard deviation of the noise of ``gaussian``, as a
        multiple of the array's root mean square, 1 unless given.
    """

    kind: Literal["none", "label_flip", "sign_flip", "scaled", "gaussian"] = "none"
    share: float | None = Field(None, ge=0, lt=1)
    scale: float | None = Field(None, gt=0)

    @property
    def malicious_share(self) -> float:
        """``share`` or its default; 0 if no client is malicious."""
        usual = 0.0 if self.kind == "none" else 0.2
        return usual if self.share is None else self.share

    @property
    def strength(self) -> float | None:
        """``scale`` or the default of the kind; None for a kind without a scale."""
        usual = {"scaled": 10.0, "gaussian": 1.0}.get(self.kind)
        return usual if self.scale is None else self.scale

    @model_validator(mode="after")
    def _options_are_of_the_kind(self) -> "Attack":
        if self.kind == "none" and self.share is not None:
            raise ConfigError("attack.share", self.share, 'leave it out with attack.kind = "none"')
        if self.kind not in ("scaled", "gaussian") and self.scale is not None:
            allowed = f'leave it out with attack.kind = "{self.kind}"; it belongs to "scaled" or "gaussian"'
            raise ConfigError("attack.scale", self.scale, allowed)
        return self


class Compression(_Section):
    """How uploads are compressed, array by array, without error feedback; the traffic counts the compressed size.

    Attributes:
      kind: ``none``; ``top_k``, the entries of largest magnitude of each array's update, each with its index; or
        ``int8``, one byte per entry, rounded at random. Arrays too small to benefit are sent whole.
      share: for ``top_k``: the share of the entries that is kept; 0.1 unless given.
    """

    kind: Literal["none", "top_k", "int8"] = "none"
    share: float | None = Field(None, gt=0, lt=0.5)

    @property
    def kept_share(self) -> float:
        """``share`` or its default."""
        return 0.1 if self.share is None else self.share

    @model_validator(mode="after")
    def _a_share_is_kept_of_the_largest(self) -> "Compression":
        if self.kind != "top_k" and self.share is not None:
            allowed = f'leave it out with compression.kind = "{self.kind}"; it belongs to "top_k"'
            raise ConfigError("compression.share", self.share, allowed)
        return self


class Privacy(_Section):
    """Differential privacy of clients (DP-FedAvg), for methods that average what clients send back.

    Attributes:
      clip: the largest 2-norm of a client's update; longer updates are scaled down to it. No privacy unless given.
      noise: standard deviation of the Gaussian noise on the sum of updates, as a multiple of ``clip``; 0 for none, and
        then no epsilon. The sum is divided by the expected number of participants.
      delta: the delta at which the summary gives epsilon; 1e-5 unless given.
    """

    clip: float | None = Field(None, gt=0)
    noise: float | None = Field(None, ge=0)
    delta: float | None = Field(None, gt=0, lt=1)

    @property
    def target_delta(self) -> float:
        """``delta`` or its default."""
        return 1e-5 if self.delta is None else self.delta

    @model_validator(mode="after")
    def _updates_are_clipped_before_noise_hides_them(self) -> "Privacy":
        if self.clip is None:
            for field, value in (("noise", self.noise), ("delta", self.delta)):
                if value is not None:
                    raise ConfigError(f"privacy.{field}", value, "leave it out without privacy.clip")
        elif self.noise is None:
            raise ConfigError("privacy.noise", "(missing)", "it must be given with privacy.clip; 0 for none")
        return self


class Run(_Section):
    """How a run is carried out.

    Only ``seed`` changes the experiment; precision and placement change results by rounding.

    Attributes:
      seed: seed of initial model, cohorts and batches, and of the partition unless ``data.seed`` is given.
      eval_every: rounds between evaluations; the last round is always evaluated.
      checkpoint_every: rounds between checkpoints in ``run.out``; 0 for checkpoints only on SIGINT and SIGTERM.
      placement: how clients are mapped: ``map`` (one by one), ``vmap`` (side by side), ``shard`` (spread over devices),
        or ``auto`` (by backend).
      chunk: number of clients that run side by side on a device; chosen by the memory estimate unless given.
      client_state: where the states of the clients are kept: on the ``device``, or in the memory of the ``host``, which
        then sends a device only the states of a round's participants, and scores clients in groups of that size. Use
        it for partial participation if a device cannot hold all states; it costs the transfers.
      precision: precision of matrix products and convolutions on accelerators: ``float32`` rounds as a CPU does; the
        others are faster where the hardware has them; ``auto`` is tensorfloat32 on a GPU and bfloat16 on a TPU. On a
        CPU it changes nothing.
      out: the run directory; nothing is written unless it is given.
      diagnostics: record how strong the loss terms of FedProx, MOON, FedNTD, FedeCouple, FedFCD, PGFedSplit, FedCPD and
        pFedCSPC are compared with the cross-entropy, as ratios of gradient norms (``diagnostics.gradient_ratio_...``),
        mostly from one mini-batch per client and round; and the mean cosine of two clients' updates
        (``diagnostics.update_cosine``) for methods that send back what they got. Costs compilation time, and may change
        the last bits of the numbers.
      export: what to save to ``export.npz`` and ``Result.exported``: ``features``, the input of the last layer, and
        ``predictions``, with the logits; of the models that PRE scores after the last round, for every sample that
        they are scored on.
      export_clients: the clients whose models are exported; all unless given.
      keep: the state that the run directory keeps, for later use of its models: ``final``, after the last round;
        ``best``, of the evaluated round whose models are best on validation samples; or ``none``.
      client_history: keep every client's scores of every evaluated round, not only of the last one, in
        ``client_history.csv`` and ``Result.client_history``; a run that was begun without has those of the rounds
        after it was resumed.
      metrics: names of your own metrics (``register_metric``), which are measured in addition.
      tensorboard: also write the metrics to TensorBoard event files in the run directory (needs the package).
      compilation_cache: folder of compiled programs, or ``off``; ``~/.cache/fedjax_pfl`` unless given.
    """

    seed: int = Field(0, ge=0, lt=2**32)
    eval_every: int = Field(1, ge=1)
    checkpoint_every: int = Field(0, ge=0)
    placement: Literal["auto", "map", "vmap", "shard"] = "auto"
    chunk: int | None = Field(None, ge=1)
    client_state: Literal["device", "host"] = "device"
    precision: Literal["auto", "float32", "tensorfloat32", "bfloat16"] = "auto"
    out: str | None = Field(None, min_length=1)
    diagnostics: bool = False
    export: list[Literal["features", "predictions"]] = Field(default_factory=list)
    export_clients: list[int] | None = Field(None, min_length=1)
    keep: Literal["final", "best", "none"] = "final"
    client_history: bool = False
    metrics: list[str] = Field(default_factory=list)
    tensorboard: bool = False
    compilation_cache: str | None = None

    @field_validator("out", "compilation_cache")
    @classmethod
    def _of_the_home_folder(cls, path: str | None) -> str | None:
        return None if path is None else os.path.expanduser(path)

    @model_validator(mode="after")
    def _map_is_one_by_one(self) -> "Run":
        if self.placement == "map" and self.chunk not in (None, 1):
            raise ConfigError("run.chunk", self.chunk, 'placement = "map" runs clients one by one; leave it out')
        return self


class Tables(TypedDict, total=False):
    """The tables of a config: what `Config` takes."""

    data: Required[Mapping[str, Any] | Data]
    model: Mapping[str, Any]
    method: Required[Mapping[str, Any]]
    training: Mapping[str, Any] | Training
    finetune: Mapping[str, Any] | Finetune
    calibration: Mapping[str, Any] | Calibration
    participation: Mapping[str, Any] | Participation
    aggregation: Mapping[str, Any] | Aggregation
    attack: Mapping[str, Any] | Attack
    compression: Mapping[str, Any] | Compression
    privacy: Mapping[str, Any] | Privacy
    run: Mapping[str, Any] | Run


class Config(_Section):
    """The config of a whole run. Only ``data.source`` and ``method.name`` have no default.

    ``Config(protocol="fedpac", ...)``, or ``protocol = "fedpac"`` above the tables of a file, takes the values that are
    not given from that protocol instead of from the defaults (``experiment/protocols.py``). A config holds the values,
    not the name of the protocol: it equals a config that gives the same values itself.

    Attributes:
      model: {name, ...}: the model that clients train; ``fedjax-pfl models`` lists all.
      method: {name, ...}: the federated method; ``fedjax-pfl methods`` lists all.

    Raises:
      ConfigError: an unknown key, a wrong type, a value out of range.
    """

    data: Data
    model: Annotated[dict[str, Any], _choose("model", "name", MODELS)] = Field(
        {"name": _USUAL["model.name"]}, validate_default=True
    )
    method: Annotated[dict[str, Any], _choose("method", "name", METHODS)]
    training: Training = Training()
    finetune: Finetune = Finetune()
    calibration: Calibration = Calibration()
    participation: Participation = Participation()
    aggregation: Aggregation = Aggregation()
    attack: Attack = Attack()
    compression: Compression = Compression()
    privacy: Privacy = Privacy()
    run: Run = Run()

    @model_validator(mode="after")
    def _alone_nobody_sends_anything(self) -> "Config":
        for section, kind in (("attack", self.attack.kind), ("compression", self.compression.kind)):
            if kind != "none" and not self.participation.collaborate:
                allowed = '"none" with participation.collaborate = false, where clients send nothing'
                raise ConfigError(f"{section}.kind", kind, allowed)
        return self

    @model_validator(mode="after")
    def _privacy_is_that_of_a_poisson_sample(self) -> "Config":
        who, why = self.participation, "with privacy.clip"
        if self.privacy.clip is None:
            return self
        if not who.collaborate:
            raise ConfigError("participation.collaborate", False, f"true {why}: alone, clients send nothing")
        if isinstance(who.ratio, tuple):
            raise ConfigError("participation.ratio", who.ratio, f"one share {why}, for epsilon to be known")
        if who.sampling == "fixed" and who.ratio < 1:
            allowed = f'"poisson" {why} and participation.ratio below 1: what epsilon is computed for'
            raise ConfigError("participation.sampling", "fixed", allowed)
        if self.aggregation.rule != "mean":
            raise ConfigError("aggregation.rule", self.aggregation.rule, f'"mean" {why}')
        if (drawn := self.calibration.samples_per_class) > 0:
            allowed = f"0 {why}: clients would send statistics of their features, which nothing hides"
            raise ConfigError("calibration.samples_per_class", drawn, allowed)
        return self

    @model_validator(mode="after")
    def _the_best_is_best_on_validation_samples(self) -> "Config":
        if self.run.keep == "best" and self.data.validation_share == 0:
            allowed = '"final" or "none", or give data.validation_share a value above 0: it is chosen on those samples'
            raise ConfigError("run.keep", "best", allowed)
        return self

    @model_validator(mode="after")
    def _exports_are_of_clients(self) -> "Config":
        who, clients = self.run.export_clients, self.data.clients
        if who is not None:
            if not self.run.export:
                raise ConfigError("run.export_clients", who, "nothing unless run.export says what is kept of them")
            if not all(0 <= client < clients for client in who) or sorted(set(who)) != who:
                allowed = f"clients from 0 to {clients - 1}, each once and in ascending order"
                raise ConfigError("run.export_clients", who, allowed)
        return self

    def __init__(self, *, protocol: str | None = None, **tables: Unpack[Tables]):
        given: dict[str, Any] = plain(tables)
        if protocol is not None:
            given = with_defaults_of({key: _given(table) for key, table in given.items()}, tables_of(protocol))
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _config_error(error, "", ["protocol", *type(self).model_fields]) from None

    @property
    def partition_seed(self) -> int:
        """The seed of test part, partition and split."""
        return self.run.seed if self.data.seed is None else self.data.seed

    @overload
    def replace(self, changes: Mapping[str, Any]) -> "Config": ...

    @overload
    def replace(self, changes: str, value: Any) -> "Config": ...

    def replace(self, changes: Mapping[str, Any] | str, value: Any = ...) -> "Config":
        """A copy with other values: ``config.replace("training.lr", 0.1)``.

        Another ``method.name``, ``model.name`` or ``data.partition.kind`` resets the other options of its table to
        their defaults. A ``protocol`` sets all of its values; the other changes are applied after it.

        Args:
          changes: a dotted field; or several with their values, ``{"training.lr": 0.1, "method.name": "ditto"}``.
          value: the value, if one field is given.

        Raises:
          ConfigError: a field or value that no config can have.
        """
        tables = self.model_dump()
        changes = _changes(changes, value)
        if (protocol := changes.pop("protocol", None)) is not None:
            for section, values in tables_of(protocol).items():
                tables[section] = values if section == "model" else tables[section] | values
        for field in sorted(changes, key=lambda field: field not in SELECTORS):  # these first: they bring defaults
            *sections, key = field.split(".")
            if not sections:
                raise ConfigError(field, changes[field], "a dotted field such as training.lr, or protocol")
            table: dict[str, Any] = tables
            for section in sections:
                if not isinstance(table.get(section), dict):
                    allowed = f"a field of the config; {section} is none of its tables"
                    raise ConfigError(field, changes[field], allowed)
                table = table[section]
            if field in SELECTORS and table[key] != changes[field]:
                table.clear()
            table[key] = changes[field]
        return Config(**tables)

    def non_defaults(self) -> dict[str, dict[str, Any]]:
        """The values that differ from the defaults, by table; ``Config(**config.non_defaults())`` equals the config."""
        tables = self.model_dump()
        tables["model"] = _less_defaults(self.model, "name", MODELS)
        tables["method"] = _less_defaults(self.method, "name", METHODS)
        tables["data"]["partition"] = _less_defaults(self.data.partition, "kind", PARTITIONS)
        found: dict[str, dict[str, Any]] = {}
        for section, field in type(self).model_fields.items():
            table = getattr(self, section)
            if isinstance(table, _Section):
                fields = type(table).model_fields.items()
                usual = {name: option.get_default(call_default_factory=True) for name, option in fields}
                found[section] = {name: value for name, value in tables[section].items() if value != usual[name]}
            elif tables[section] != field.default:
                found[section] = tables[section]
        return {section: table for section, table in found.items() if table}

    def __repr__(self) -> str:
        tables = ", ".join(f"{section}={table!r}" for section, table in self.non_defaults().items())
        return f"{type(self).__name__}({tables})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, without: Collection[str] = ()) -> str:
        """All values with their descriptions, as HTML; values that differ from the defaults are bold.

        Args:
          without: dotted fields to leave out; a table without fields is not shown.
        """
        texts = {}
        for section, table in self:
            if isinstance(table, _Section):
                texts[section] = summary_line(type(table)), descriptions(type(table))
            else:
                parts: Mapping[str, Callable] = MODELS if section == "model" else METHODS
                part = parts.get(table["name"])
                texts[section] = summary_line(part), descriptions(part, "Args")
        shown = {section: table for section, table in without_fields(self.model_dump(), without).items() if table}
        return config_html(shown, self.non_defaults(), texts)

    def to_toml(self) -> str:
        """The resolved config as TOML; unset fields are left out, or are "none" if their default is not unset."""
        tables = self.model_dump()
        for table, key, parts in (
            (tables["model"], "name", MODELS),
            (tables["method"], "name", METHODS),
            (tables["data"]["partition"], "kind", PARTITIONS),
        ):
            for field in _less_defaults(table, key, parts):
                if table[key] in parts and table[field] is None:
                    table[field] = "none"
        return tomli_w.dumps(_without_none(tables))


def check_config(config: Any) -> None:
    """Checks that this is a `Config`, and not a path or a dictionary.

    Raises:
      ConfigError: it is not.
    """
    if not isinstance(config, Config):
        raise ConfigError("config", config, "a Config: load_config(path) of a file, Config(**tables) of a dictionary")


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), over_these: Sequence[str] = ()) -> Config:
    """Reads a TOML file and applies overrides.

    Args:
      path: the config file.
      overrides: ``section.key=value`` strings, or ``protocol=name``. The value is TOML, and otherwise a string; so are
        dates, and whatever a field gets that holds text (``run.out=2024``). A list needs the quotes of TOML, which a
        shell takes away unless the whole argument is in quotes: ``'run.export=["features"]'``.
      over_these: likewise, applied after ``overrides``; another method here drops the method's options given there.

    Raises:
      ConfigError: the file is missing or not TOML, one of its values cannot be used, or a list or table in an override
        is not TOML.
    """
    tables = read_toml(path, "config file")
    for table, command in (("grid", "sweep"), ("space", "tune")):
        if table in tables:
            allowed = f"with [{table}] it is a {command} file: fedjax-pfl {command} {path}"
            raise ConfigError("config file", str(path), allowed)
    for given in (overrides, over_these):
        if not isinstance(given, list | tuple) or not all(isinstance(override, str) for override in given):
            raise ConfigError("overrides", given, 'a list of strings, e.g. ["training.lr=0.01"]')
        # A protocol first, then these, as in Config.replace: they bring defaults.
        first = ("protocol", *SELECTORS)
        fields = {override: override.partition("=")[0].strip() for override in given}
        for override in sorted(given, key=lambda of: first.index(fields[of]) if fields[of] in first else len(first)):
            _override(tables, override)
    return Config(**tables)


def read_toml(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
      ConfigError: the file, called ``what`` in the message, is missing or not TOML, or this is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(what, path, "the path of a file")
    try:
        return tomllib.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(what, str(path), f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(what, str(path), f"not valid TOML: {error}") from None


def parse_value(text: str) -> Any:
    """The value of a text as TOML, or the text itself if it is not TOML, or a date."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, date | time) else value


def parse_field(field: str, text: str) -> Any:
    """The value of a field of the config, given as a text; where the field holds text, only quotes are TOML.

    Raises:
      ConfigError: it begins as a list or table does, and is not TOML.
    """
    value = parse_value(text)
    if _holds_text(field):
        return value if isinstance(value, str) else text
    if isinstance(value, str) and text.lstrip()[:1] in ("[", "{"):
        hint = "a shell takes quotes away, unless the whole argument is in quotes"
        raise ConfigError(field, text, f"it is not TOML; {hint}: 'run.export=[\"features\"]'")
    return value


def _holds_text(field: str) -> bool:
    """Whether a field holds any text, such as a path, which may look like a number."""
    section, _, key = field.partition(".")
    table = _section([section])
    hint = table.model_fields[key].annotation if table and key in table.model_fields else None
    return hint in (str, str | None) or field == "data.partition.file"


def _override(tables: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    field = dotted.strip()
    *sections, key = field.split(".")
    if not equals or not all([*sections, key]) or not (sections or key == "protocol"):
        raise ConfigError("override", override, "expected section.key=value, e.g. training.lr=0.01")
    table, under = tables, tables_of(tables["protocol"]) if "protocol" in tables else {}
    for section in sections:
        table, under = table.setdefault(section, {}), under.get(section, {})
        if not isinstance(table, dict):
            raise ConfigError("override", override, f"{section} is a value, not a table")
    value = parse_field(field, text)
    if field in SELECTORS and table.get(key, under.get(key, _USUAL.get(field, value))) != value:
        table.clear()
    table[key] = value


def _changes(changes: Mapping[str, Any] | str, value: Any) -> dict[str, Any]:
    """Field -> value, from either form of the arguments of `Config.replace`."""
    if isinstance(changes, str):
        if value is ...:
            raise ConfigError(changes, "(missing)", f'a value, as in config.replace("{changes}", value)')
        return {changes: value}
    if not isinstance(changes, Mapping) or value is not ...:
        raise ConfigError("changes", changes, 'a field with its value, or a mapping such as {"training.lr": 0.1}')
    if wrong := [field for field in changes if not isinstance(field, str)]:
        raise ConfigError("changes", wrong[0], "a dotted field such as training.lr")
    return dict(changes)


def _less_defaults(table: Mapping[str, Any], key: str, parts: Mapping[str, Callable]) -> dict[str, Any]:
    """A table {key: name, **options} without the options that equal the defaults of the part of that name."""
    name = table[key]
    usual = hyperparameters(parts[name]) if name in parts else {}  # a config from elsewhere may name what is not here
    return {field: value for field, value in table.items() if field not in usual or value != usual[field].default}


def _given(table: Any) -> Any:
    """The values that were given explicitly in a table, which may be an instance of one of the classes above."""
    return table.model_dump(exclude_unset=True) if isinstance(table, _Section) else table


# What other libraries and papers call a field that they mistake for one of ours.
_ELSEWHERE = {
    "alpha": "beta",
    "dataset": "source",
    "fraction_fit": "ratio",
    "global_rounds": "rounds",
    "join_ratio": "ratio",
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "local_learning_rate": "lr",
    "num_clients": "clients",
    "num_rounds": "rounds",
}


def _config_error(error: ValidationError, section: str, allowed: Sequence[str], owner: str = "") -> ConfigError:
    """The first mistake, as one sentence with the dotted field, the value and what is allowed."""
    # A misspelt name is an unknown key and, where it has no default, a missing one: the unknown one says more.
    errors = sorted(error.errors(), key=lambda e: e["type"] == "missing")
    # Where a field may have several types, the one that fits the value best fails deepest inside it.
    same_field = [e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]]
    first = max(same_field, key=lambda e: len(e["loc"]))
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):
        return raised
    # Deeper locations name the branches of a union of types, not fields.
    path = [section, str(first["loc"][0])] if section else [str(part) for part in first["loc"][:2]]
    field, table = ".".join(path), _section(path[:-1])
    if first["type"] == "extra_forbidden":
        known = list(table.model_fields) if table else allowed
        here = _ELSEWHERE.get(path[-1], path[-1])
        return ConfigError(field, first["input"], f"no such key{owner}; {one_of(here, known)}")
    told = descriptions(table).get(path[-1], "").replace("``", "").rstrip(".") if table else ""
    if first["type"] == "missing":
        return ConfigError(field, "(missing)", f"it has no default and must be given{told and f': {told}'}")
    if first["type"] == "model_type":
        return ConfigError(field, first["input"], f"expected a table [{field}]")
    share = ": it is a share" if first["type"] == "less_than" and told.startswith("share of ") else ""
    return ConfigError(field, first["input"], first["msg"][0].lower() + first["msg"][1:] + share)


def _section(path: Sequence[str]) -> type[_Section] | None:
    """The class of a table, if it has one."""
    field = Config.model_fields.get(".".join(path))
    table = field.annotation if field else None
    return table if inspect.isclass(table) and issubclass(table, _Section) else None


def without_fields(tables: Mapping[str, Any], fields: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Nested tables without these dotted fields."""
    return {
        name: without_fields(value, fields, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in tables.items()
        if prefix + name not in fields
    }


def plain(node: Any) -> Any:
    """Tables in which NumPy numbers and arrays, and paths, are replaced by Python numbers, lists and strings."""
    if isinstance(node, Mapping):
        return {key: plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        values = [plain(value) for value in node]
        return tuple(values) if isinstance(node, tuple) else values
    if isinstance(node, np.generic | np.ndarray):
        return node.tolist()
    return os.fspath(node) if isinstance(node, os.PathLike) else node


def _without_none(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_none(value) for key, value in node.items() if value is not None}
    return node
