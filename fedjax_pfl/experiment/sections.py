"""The tables of the config that have a class of their own, one for each part of a run."""

import os
import typing
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from fedjax_pfl.data.augment import Augment, Copies
from fedjax_pfl.data.partition import PARTITIONS, overlaps
from fedjax_pfl.data.sources import SOURCES
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.experiment.options import USUAL, Section, choose, hyperparameters
from fedjax_pfl.experiment.registry import load_entry_points
from fedjax_pfl.ops.finetune import Scope
from fedjax_pfl.ops.robust import RULES

Share = Annotated[float, Field(gt=0, lt=1)]
_Portion = Annotated[float, Field(gt=0, le=1)]


class Data(Section):
    """The data, and how they are divided among the clients.

    Attributes:
      source: such as ``digits`` or ``npz:PATH`` (``fedjax-pfl datasets`` lists all); ``arrays`` for data from Python.
      clients: N, how many there are.
      partition: {kind, ...}: how the samples are divided among the clients.
      split: ``merge`` (training and test part are merged, then split per client) or ``official`` (the training part is
        divided among the clients; each draws test samples from the test part in its own label proportions or, with the
        partition ``natural``, has the test samples of its own user).
      test_part_share: share of each class that is set aside at random as the test part, before the partition; for
        ``official`` with a source that has no test part.
      test_share: share of a client's samples that is held out for testing; without effect for ``official`` with
        ``natural``, where a client is tested on all test samples of its user.
      test_classes: classes that a client is tested on: ``all`` that it holds, or the ``dominant`` ones, which make up
        more than an even share of its training samples; for ``official``, and a partition by labels.
      validation_share: share of a client's training samples that is held out for validation; methods may select on it.
      stratified: split each class of a client in these shares, so that a client with two or more samples of a class
        trains on at least one; for ``merge``, which otherwise splits a client's samples at random, as PFLlib does.
      evaluate_on: ``test``, or ``validation``: models are scored on the validation samples instead of the test samples,
        so that hyperparameters can be chosen without using test samples.
      new_clients: share of the clients, drawn at random and numbered last, that never train (with the file of a run as
        the partition, its last clients); they are evaluated after the method's personalisation (PRE), and after one
        round of local training that is not uploaded (POST).
      samples_per_client: training samples (validation included) of each client; if not given, all samples are used.
      seed: seed of test part, partition and split; ``run.seed`` unless given.
      mean: mean by which pixels, scaled to [0, 1], are normalised; one number or one per channel.
      std: standard deviation, likewise. For text and real numbers, leave both out.
    """

    source: str
    clients: int = Field(20, ge=1)
    partition: Annotated[dict[str, Any], choose("data.partition", "kind", PARTITIONS)] = Field(
        {"kind": USUAL["data.partition.kind"]}, validate_default=True
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
        # With overlap, a client's test or validation samples may be training samples of another one.
        if overlaps(self.partition) and self.split != "official":
            allowed = 'false with data.split = "merge", where others would train on what a client is tested on'
            raise ConfigError("data.partition.overlap", True, allowed)
        if overlaps(self.partition) and self.validation_share:
            allowed = "0 with data.partition.overlap: others would train on what a client validates on"
            raise ConfigError("data.validation_share", self.validation_share, allowed)
        if self.evaluate_on == "validation" and self.validation_share == 0:
            raise ConfigError("data.evaluate_on", "validation", '"test", or give data.validation_share a value above 0')
        return self


class Training(Section):
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
        labels, for any method, except in fine-tuning (FedETF's begins with a local training, which has it); 0 for none;
        the official value is 0.1.
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


class Finetune(Section):
    """Fine-tuning of a client's model before each PRE evaluation; the result is used for scoring only.

    For any method whose model is an extractor with a head.

    Attributes:
      epochs: E_ft, passes over the client's training samples; 0 for none.
      lr: eta_ft, learning rate; the local learning rate unless given. It decays as that does (``training.lr_decay``).
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


class Calibration(Section):
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


def _ratio(given: Any) -> Any:
    """Checks one share, or the two ends of a range from which each round draws its share."""
    ends = given if isinstance(given, list | tuple) else [given, given]
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    if not (numbers and len(ends) == 2 and 0 < ends[0] <= ends[1] <= 1):
        raise ConfigError("participation.ratio", given, "a share in (0, 1], or a range [low, high] of shares")
    return tuple(float(end) for end in ends) if ends is given else float(given)


class Participation(Section):
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


class Aggregation(Section):
    """How the server combines the parameters of the participants, for every method that averages parameters.

    Attributes:
      rule: ``mean``, weighted by training samples; or one of the rules in which all participants count alike:
        ``median`` and ``trimmed_mean``, coordinate by coordinate; ``krum``, the upload with the smallest distances to
        its nearest neighbours; ``multi_krum``, the mean of the share 1 - byzantine of the uploads with the smallest.
      trim: for ``trimmed_mean``: the share of the participants of a round that is cut on each side, rounded down to
        whole participants; 0.2 unless given.
      byzantine: for ``krum`` and ``multi_krum``: the share of the participants of a round that is assumed to be
        malicious, rounded down to f whole participants; 0.2 unless given. Krum's guarantee needs more than 2 f + 2
        participants.
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


class Attack(Section):
    """Malicious clients, the same ones in the whole run; the reported scores leave them out.

    Attributes:
      kind: ``none``; ``label_flip``, training on labels C - 1 - y; or how each array of the update is falsified (an
        update is the array sent minus the array received of the same name and shape, or the whole array if none was
        received): ``sign_flip``, its negative; ``scaled``, a multiple; ``gaussian``, the array plus noise.
      share: the share of the training clients that attack, drawn by the seed of the partition; 0.2 unless given.
      scale: for ``scaled`` the factor, 10 unless given; for ``gaussian`` the standard deviation of the noise, as a
        multiple of the root mean square of the update in that array, 1 unless given.
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


class Compression(Section):
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


class Privacy(Section):
    """Differential privacy of clients (DP-FedAvg), for methods that average what clients send back.

    Attributes:
      clip: the largest 2-norm of a client's update; longer updates are scaled down to it. No privacy unless given.
      noise: standard deviation of the Gaussian noise on the sum of updates, as a multiple of ``clip``, with which it
        must be given; 0 for none, and then no epsilon. The sum is divided by the expected number of participants. The
        noise follows from ``run.seed``: runs with the same seed have the same.
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


class Run(Section):
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
        mostly from one mini-batch per client and round; and the mean cosine of two clients' updates of what they share
        (``diagnostics.update_cosine``; SCAFFOLD's of the parameters alone) for methods that send back what they got,
        uncompressed. Costs compilation time, and may change the last bits of the numbers.
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
      compilation_cache: folder of compiled programs, or ``off``; unless given, that of ``jax_compilation_cache_dir`` if
        JAX has one, else ``fedjax_pfl`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
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
