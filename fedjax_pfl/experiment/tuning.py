"""``tune(config, space)``: a search for hyperparameters with Optuna; batches of trials run as rows of one program.

Trials that differ only in numbers on which no shape depends share a program, and all batches use the same program.
Trials are judged on validation samples only. A trial that falls behind is stopped between two blocks of rounds.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from fedjax_pfl.data.dataset import Dataset, fingerprint
from fedjax_pfl.errors import ConfigError, first_line
from fedjax_pfl.experiment.build import dataset_of, of_data
from fedjax_pfl.experiment.callbacks import Callback, Running
from fedjax_pfl.experiment.cells import check_lines, check_point
from fedjax_pfl.experiment.config import Config, check_config
from fedjax_pfl.experiment.driver import drive
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.process import prepare
from fedjax_pfl.experiment.programs import alike
from fedjax_pfl.experiment.progress import SECONDS_PER_LINE, Progress
from fedjax_pfl.experiment.resume import RunPlace
from fedjax_pfl.experiment.space import Space, distributions_of, points_of
from fedjax_pfl.experiment.summary import Line, flat

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

# The metrics by which trials can be judged, and whether large or small values are better.
_DIRECTIONS: dict[str, Literal["maximize", "minimize"]] = {
    **dict.fromkeys(("accuracy", "weighted", "worst_10_percent", "macro_f1", "macro_f1_union", "i_local"), "maximize"),
    "loss": "minimize",
}
# The smallest number of trials side by side; few enough for the sampler to learn from earlier results.
_BATCH = 8
# Changes to the config of a trial: it is recorded in the study only.
_NOT_RECORDED: dict[str, Any] = {
    "run.out": None,
    "run.keep": "none",
    "run.tensorboard": False,
    "run.checkpoint_every": 0,
    "run.export": [],
    "run.export_clients": None,
    "run.client_history": False,
}
# The user attributes of a study that describe its search, and that have the numbers of the trials of its last batch.
_SEARCH, _BATCH_OF = "search", "batch"


def tune(
    config: Config,
    space: Space,
    *,
    n_trials: int = 50,
    batch: int | None = None,
    seed: int = 0,
    metric: str = "accuracy",
    point: str | None = None,
    storage: Any = None,
    study_name: str = "tune",
    pruner: "optuna.pruners.BasePruner | None" = None,
    sampler: "optuna.samplers.BaseSampler | None" = None,
    data: Any = None,
    progress: Callable[[str], None] | None = None,
) -> "optuna.Study":
    """Searches for the hyperparameters that give the best results on validation samples.

    ``simulate(config.replace(study.best_params))`` runs the best trial again; ``study.best_value`` is its metric after
    the last round. Test samples are never used. All trials have the seed of the config, and so the same partition,
    initial model and order of batches.

    A trial whose loss is no longer finite is stopped and counts as pruned; its user attribute ``diverged_round`` has
    the round. Nothing is written, except to the storage.

    Args:
      config: the config that all trials share. ``data.validation_share`` must be above 0; the run of the best trial
        then has fewer training samples, too.
      space: dotted field -> distribution of its values, e.g. ``{"training.lr": LogUniform(1e-3, 0.3), "method.mu":
        Uniform(0, 1), "training.batch_size": Choice([10, 50])}``. Real-valued hyperparameters are inputs of a program;
        each value of another field needs a separate program.
      n_trials: the number of complete or pruned trials that the study is to have in the end; it has fewer if the
        sampler says that it has tried everything. Without a ``sampler`` of yours, and if the space consists of choices
        only and has no more points than that, every point is tried once before one is tried again.
      batch: number of trials that run together, as rows of a program. Unless given, the smallest multiple of the number
        of devices that is 8 or more; the larger the batch, the less the sampler knows when it chooses the trials.
      seed: seed of the sampler, 0 or more.
      metric: ``accuracy``, ``weighted``, ``worst_10_percent``, ``macro_f1``, ``macro_f1_union``, ``i_local`` (all
        maximised) or ``loss`` (minimised); not a metric of your own, which validation samples beside test samples do
        not have.
      point: ``pre`` or ``post``, the evaluation point at which trials are judged; the method's headline unless given.
      storage: where the study is kept, such as ``sqlite:///study.db``, or an Optuna storage; in memory unless given.
        A second call continues the study until it has ``n_trials``. Trials that were running when their process was
        killed or interrupted run again first, under the same numbers, so that the study becomes the same as without the
        interruption, unless a ``sampler`` or ``pruner`` of yours keeps a state of its own. So only one process may work
        on a study at a time.
      study_name: name of the study in the storage.
      pruner: decides after each evaluation (``run.eval_every``) which trials to stop; Optuna's ``MedianPruner`` unless
        given; ``NopPruner()`` stops none.
      sampler: chooses the trials; Optuna's ``TPESampler``, with a different seed for each batch, unless given.
      data: as in `simulate`.
      progress: called with a line of text when a batch starts, every few seconds, and when it ends.

    Returns:
      The Optuna study, with ``best_params``, ``best_value``, ``trials_dataframe()`` ...

    Raises:
      ConfigError: Optuna is not installed, config, space and data do not fit together, or the storage holds another
        study under this name; raised before anything is compiled. In a space that is not tried as a whole, values that
        are refused only together are met when they are drawn: the trials of that batch that have not ended have failed.
    """
    check_config(config)
    check_lines(progress)
    distributions = distributions_of(space)
    _check_parts(pruner, sampler, storage)
    if metric not in _DIRECTIONS:
        raise ConfigError("metric", metric, f"one of {', '.join(_DIRECTIONS)}")
    if point is not None:
        check_point(point)
    counts = (("n_trials", n_trials, 1), ("batch", 1 if batch is None else batch, 1), ("seed", seed, 0))
    for name, number, least in counts:
        if type(number) is not int or number < least:
            raise ConfigError(name, number, f"a whole number, {least} or more")
    if config.data.validation_share == 0:
        raise ConfigError("data.validation_share", 0.0, "above 0, such as 0.2: trials are judged on validation samples")
    config = of_data(config, data).replace(_NOT_RECORDED)
    prepare(config.run)
    if jax.process_count() > 1:
        raise ConfigError("tune", f"{jax.process_count()} processes", "one process with devices of its own")
    dataset = dataset_of(config, data)
    whole = list(points_of(distributions, n_trials)) if sampler is None else []
    _check(config, distributions, dataset, whole)
    study = _study(storage, study_name, pruner, sampler, _DIRECTIONS[metric])
    _go_on(study, config, distributions, [metric, point], fingerprint(dataset))
    tried = _tried(study)
    for params in whole:
        if params not in tried:
            study.enqueue_trial(params)
    devices = jax.local_device_count()
    left = n_trials - _finished(study)
    batch = min(batch or math.ceil(_BATCH / devices) * devices, n_trials)  # the same program, however many are left
    with _stoppable(study) as stopped:
        while left > 0 and not stopped:
            if sampler is None:
                study.sampler = _sampler(seed, n_trials - left)
            with _asked(study, distributions, min(batch, left)) as trials:
                said = _reporter(progress, f"{len(trials)} trials after {n_trials - left} of {n_trials}")
                for group in _groups(config, trials):
                    configs, alike_trials = zip(*group, strict=True)
                    watch = _Watch(alike_trials, metric, point)
                    # A trial that shares its program with no other spreads its clients over the devices instead.
                    room, places = batch if len(group) > 1 else None, [RunPlace(own) for own in configs]
                    began = time.perf_counter()
                    drive(configs, dataset, places, began=began, progress=said, callbacks=[watch], room=room)
                    watch.tell(study)
            left = n_trials - _finished(study)
            if progress:
                progress(f"{n_trials - left} of {n_trials} trials: {in_short(study)}")
    return study


def in_short(study: "optuna.Study") -> str:
    """The number of pruned trials, and the best value with its fields as overrides of a config, as text."""
    from optuna.trial import TrialState

    pruned = len(study.get_trials(deepcopy=False, states=(TrialState.PRUNED,)))
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        return f"{pruned} pruned, none complete"
    best = {field: "none" if value is None else json.dumps(value) for field, value in study.best_params.items()}
    fields = " ".join(f"{field}={value}" for field, value in best.items())
    return f"{pruned} pruned, best {study.best_value:.4f}: {fields}"


class _Watch(Callback):
    """Reports trials to their study while they run, and stops those that the pruner rejects."""

    def __init__(self, trials: Sequence["optuna.Trial"], metric: str, point: str | None):
        self._trials, self._metric, self._point = trials, metric, point
        self._of: dict[Running, optuna.Trial] = {}
        self._reported: dict[Running, int] = {}  # up to which round, by a process that was killed

    def on_start(self, run: Running) -> None:
        """Runs come in the order of their trials."""
        trial = self._of[run] = self._trials[len(self._of)]
        self._reported[run] = trial.study.get_trials(deepcopy=False)[trial.number].last_step or 0

    def on_evaluate(self, run: Running, line: Line) -> None:
        """Reports the value and asks the pruner; not again where a killed process has done both."""
        trial, scores = self._of[run], line[self._table(run)]
        if not math.isfinite(scores["loss"]):
            trial.set_user_attr("diverged_round", line["round"])
            run.stop("it diverged")
            return
        if line["round"] > self._reported[run]:
            trial.report(scores[self._metric], line["round"])
        if self._reported[run] <= line["round"] < run.config.training.rounds and trial.should_prune():
            run.stop("it was pruned")

    def tell(self, study: "optuna.Study") -> None:
        """Tells the study how the trials have ended."""
        from optuna.trial import TrialState

        for run, trial in self._of.items():
            if run.stopped:
                study.tell(trial, state=TrialState.PRUNED)
            else:
                study.tell(trial, run.lines[-1][self._table(run)][self._metric])

    def _table(self, run: Running) -> str:
        """The key under which a line has the scores on validation samples."""
        point = self._point or run.headline
        return point if run.config.data.evaluate_on == "validation" else f"validation_{point}"


@contextmanager
def _stoppable(study: "optuna.Study") -> Iterator[list[bool]]:
    """Collects the sampler's wish to stop, in a list that is empty until then.

    `Study.stop`, by which samplers of Optuna say that they have tried everything, raises outside Optuna's own loop.
    """
    stopped: list[bool] = []
    study.stop = lambda: stopped.append(True)  # type: ignore[method-assign]
    try:
        yield stopped
    finally:
        del study.stop


@contextmanager
def _asked(
    study: "optuna.Study", distributions: Mapping[str, "BaseDistribution"], number: int
) -> Iterator[list["optuna.Trial"]]:
    """The trials of a batch that a process has left, else new ones. If they end in an error, they have failed."""
    from optuna.trial import TrialState

    trials = _left(study)[:number]
    try:
        if not trials:
            for _ in range(number):
                trials.append(study.ask(dict(distributions)))
            study.set_user_attr(_BATCH_OF, [trial.number for trial in trials])
        yield trials
    except Exception:  # not an interruption, after which they run again
        states = {trial.number: trial.state for trial in study.get_trials(deepcopy=False)}
        for trial in trials:
            if states[trial.number] == TrialState.RUNNING:
                study.tell(trial, state=TrialState.FAIL)
        raise


def _left(study: "optuna.Study") -> list["optuna.Trial"]:
    """The trials of the last batch that have not ended, since their process was killed or interrupted."""
    import optuna
    from optuna.trial import TrialState

    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    of_batch = study.user_attrs.get(_BATCH_OF, [])
    return [optuna.Trial(study, trial._trial_id) for trial in running if trial.number in of_batch]


def _groups(config: Config, trials: Sequence["optuna.Trial"]) -> list[list[tuple[Config, "optuna.Trial"]]]:
    """The trials and their configs, grouped by the program that they share."""
    groups: dict[str, list[tuple[Config, optuna.Trial]]] = {}
    for trial in trials:
        own = config.replace(trial.params)
        groups.setdefault(alike(own), []).append((own, trial))
    return list(groups.values())


def _reporter(progress: Callable[[str], None] | None, trials: str) -> Callable[[Progress], None] | None:
    """The function that a program calls to report its progress."""
    if progress is None:
        return None
    say, last = progress, time.perf_counter()

    def report(now: Progress) -> None:
        nonlocal last
        if not now.compiled:
            say(f"{trials}: about {now.memory / 1e9:.2g} GB of memory")
        elif now.round > 0 and time.perf_counter() - last > SECONDS_PER_LINE:
            last = time.perf_counter()
            say(f"{trials}: round {now.round}/{now.rounds}, loss {now.loss:.4f}")

    return report


def _check(
    config: Config, distributions: Mapping[str, Any], dataset: Dataset, points: Sequence[Mapping[str, Any]]
) -> None:
    """Checks ``points``, and the ends of each range and all choices with the first value of the other fields.

    Raises:
      ConfigError: a config has no such field or value, or method, model and data do not fit together.
    """
    from optuna.distributions import CategoricalDistribution

    values: dict[str, Sequence[Any]] = {
        field: drawn.choices if isinstance(drawn, CategoricalDistribution) else (drawn.low, drawn.high)
        for field, drawn in distributions.items()
    }
    first = {field: found[0] for field, found in values.items()}
    ends = [{**first, field: value} for field, found in values.items() for value in found]
    tried = [config.replace(dict(point)) for point in (*ends, *points)]
    for own in {alike(own): own for own in tried}.values():
        lay_out([own], dataset)


def _check_parts(pruner: Any, sampler: Any, storage: Any) -> None:
    """Checks what Optuna itself would only miss when it is used."""
    import optuna

    for name, part, kind, such in (
        ("pruner", pruner, optuna.pruners.BasePruner, "optuna.pruners.NopPruner()"),
        ("sampler", sampler, optuna.samplers.BaseSampler, "optuna.samplers.RandomSampler()"),
    ):
        if part is not None and not isinstance(part, kind):
            raise ConfigError(name, part, f"None or one of Optuna's, such as {such}")
    if storage is not None and not isinstance(storage, str | optuna.storages.BaseStorage):
        raise ConfigError("storage", storage, "None, a URL such as sqlite:///study.db, or one of Optuna's storages")


def _study(
    storage: Any, name: str, pruner: Any, sampler: Any, direction: Literal["maximize", "minimize"]
) -> "optuna.Study":
    """The study of this name: a new one, or the one that the storage holds."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # no message that a study was created, as asked
    try:
        return optuna.create_study(
            storage=storage, study_name=name, pruner=pruner, sampler=sampler, direction=direction, load_if_exists=True
        )
    except (optuna.exceptions.OptunaError, SQLAlchemyError, ImportError, ValueError) as error:
        raise ConfigError("storage", storage, f"such as sqlite:///study.db ({first_line(error)})") from None
    finally:
        optuna.logging.set_verbosity(verbosity)


def _go_on(
    study: "optuna.Study",
    config: Config,
    distributions: Mapping[str, "BaseDistribution"],
    judged_by: list[str | None],
    samples: str,
) -> None:
    """Checks that a study belongs to this search; a new study records the search.

    Running trials that belong to no batch fail: their process was killed while it was drawing one.

    Raises:
      ConfigError: the study belongs to another search; all differences are named.
    """
    from optuna.distributions import distribution_to_json
    from optuna.trial import TrialState

    shared = flat(config.model_dump(mode="json"))
    shared = {field: value for field, value in shared.items() if field == "run.seed" or not field.startswith("run.")}
    of = {
        **{f"config.{field}": json.dumps(value) for field, value in shared.items()},
        **{f"space.{field}": distribution_to_json(found) for field, found in distributions.items()},
        "metric, point": json.dumps(judged_by),
        "samples": samples,
    }
    known = study.user_attrs.get(_SEARCH)
    if known is None:
        if any(trial.state != TrialState.WAITING for trial in study.trials):
            allowed = "another name: the study of this name in the storage is none of tune's"
            raise ConfigError("study_name", study.study_name, allowed)
        study.set_user_attr(_SEARCH, of)
        return
    if differing := [name for name in sorted(known.keys() | of.keys()) if known.get(name) != of.get(name)]:
        given, wanted = (", ".join(f"{name}={found.get(name)}" for name in differing) for found in (of, known))
        allowed = f"what the study in the storage was begun with: {wanted}; or another study_name"
        raise ConfigError(f"study {study.study_name}", given, allowed)
    of_batch = study.user_attrs.get(_BATCH_OF, [])
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.number not in of_batch:
            study.tell(trial.number, state=TrialState.FAIL)


def _finished(study: "optuna.Study") -> int:
    """How many of its trials are complete or pruned."""
    from optuna.trial import TrialState

    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))


def _tried(study: "optuna.Study") -> list[dict[str, Any]]:
    """The points of its trials that have ended well, or are still to come; those that failed are to be tried again."""
    from optuna.trial import TrialState

    states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.WAITING)
    trials = study.get_trials(deepcopy=False, states=states)
    return [trial.system_attrs.get("fixed_params", trial.params) for trial in trials]


def _sampler(seed: int, done: int) -> "optuna.samplers.TPESampler":
    """The sampler of the batch that comes after so many finished trials.

    With a seed of its own, so that a study that goes on does not draw again what it has drawn at its beginning.
    """
    from optuna.samplers import TPESampler

    return TPESampler(seed=int(np.random.SeedSequence([seed, done]).generate_state(1)[0]))
