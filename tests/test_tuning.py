"""Searches: trials as rows of one program are the runs of `simulate`, and none is judged by what it is tested on."""

import builtins
import itertools
import math
import re
from pathlib import Path

import jax
import numpy as np
import optuna
import pytest
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, BruteForceSampler, GridSampler, RandomSampler
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from typer.testing import CliRunner

from fedjax_pfl import (
    Callback,
    Choice,
    Config,
    ConfigError,
    IntUniform,
    LogUniform,
    Uniform,
    load_config,
    load_tune,
    simulate,
    tune,
)
from fedjax_pfl.cli.commands import app
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment import programs, tuning
from fedjax_pfl.experiment.callbacks import Running
from fedjax_pfl.experiment.layout import lay_out
from fedjax_pfl.experiment.space import distributions_of
from fedjax_pfl.experiment.tuning import _Watch

SPACE = {"training.lr": LogUniform(0.01, 0.5), "method.mu": Uniform(0, 1)}
TRIALS = 4

FILE = """
[data]
source = "digits"
clients = 4
samples_per_client = 40
validation_share = 0.25
[model]
name = "mlp"
hidden = 8
[method]
name = "fedprox"
mu = 0.1
[training]
rounds = 3
batch_size = 8
lr = 0.1
"""


def config(**changes):
    base = Config(
        data={"source": "digits", "clients": 4, "samples_per_client": 40, "validation_share": 0.25},
        model={"name": "mlp", "hidden": 8},
        method={"name": "fedprox", "mu": 0.1},
        training={"rounds": 3, "batch_size": 8, "lr": 0.1},
    )
    return base.replace(changes)


def search(n_trials=TRIALS, space=SPACE, **options):
    given = {"seed": 3, "batch": TRIALS, "pruner": NopPruner(), **options}
    return tune(given.pop("config", config()), space, n_trials=n_trials, **given)


def values(study):
    """Number -> fields, values by round and state of each trial that has not failed."""
    kept = [trial for trial in study.trials if trial.state != TrialState.FAIL]
    return [(trial.params, trial.intermediate_values, trial.state) for trial in kept]


@pytest.fixture(scope="module")
def study():
    return search()


def test_trials_are_the_runs_of_simulate_judged_on_validation_samples(study):
    lrs = [trial.params["training.lr"] for trial in study.trials]
    assert len(set(lrs)) == TRIALS
    assert min(lrs) >= 0.01
    assert max(lrs) <= 0.5
    untold = 0
    for trial in study.trials:
        alone = simulate(config().replace(trial.params), progress=None).history
        found = [trial.intermediate_values[int(t)] for t in alone["round"]]
        np.testing.assert_allclose(found, alone["validation_pre.accuracy"], atol=1e-6)
        assert trial.state == TrialState.COMPLETE
        assert trial.value == found[-1]
        untold += abs(trial.value - alone["pre.accuracy"][-1]) > 1e-3
    assert untold  # on test samples they fare otherwise


def test_the_best_params_are_changes_of_a_config(study):
    best = max(study.trials, key=lambda trial: trial.value)
    assert study.best_params == best.params
    changed = config().replace(study.best_params)
    assert changed.training.lr == best.params["training.lr"]
    assert changed.method == {"name": "fedprox", "mu": best.params["method.mu"]}


def test_choices_that_fit_in_the_trials_are_all_tried_once(tmp_path):
    space, storage = (
        {"training.lr": Choice([0.05, 0.1]), "method.mu": Choice([0.0, 0.5])},
        f"sqlite:///{tmp_path / 'a'}",
    )
    points = [{"training.lr": lr, "method.mu": mu} for lr in (0.05, 0.1) for mu in (0.0, 0.5)]
    assert [trial.params for trial in search(4, space, batch=3, storage=storage).trials] == points
    more = search(5, space, batch=3, storage=storage).trials
    assert [trial.params for trial in more[:4]] == points
    assert len(more) == 5
    assert more[4].params in points
    drawn = search(3, space)  # more points than trials: the sampler chooses
    assert len(drawn.trials) == 3


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.parametrize("sampler", [lambda: GridSampler({"training.lr": [0.05, 0.1]}), BruteForceSampler])
def test_a_sampler_that_has_tried_everything_ends_the_search(sampler):
    found = search(5, {"training.lr": Choice([0.05, 0.1])}, batch=2, sampler=sampler())
    assert [trial.state for trial in found.trials] == [TrialState.COMPLETE] * 2
    assert sorted(trial.params["training.lr"] for trial in found.trials) == [0.05, 0.1]
    with pytest.raises(RuntimeError, match="inside an objective function"):
        found.stop()  # Optuna's own again


def test_every_point_of_a_space_that_is_tried_as_a_whole_is_checked_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(programs, "_compile", lambda *_: pytest.fail("compiled"))
    space = {"training.batch_size": Choice([8, 500]), "training.drop_last": Choice([False, True])}
    with pytest.raises(ConfigError, match=r"^training\.batch_size = 500 is not usable: at most \d+ with .*drop_last"):
        search(4, space)


def test_a_search_has_a_seed_and_a_second_batch_compiles_nothing(study):
    before = set(programs._store)
    again = search(TRIALS + 3)  # the second batch has fewer trials
    assert values(again)[:TRIALS] == values(study)
    assert len(values(again)) == TRIALS + 3
    assert set(programs._store) == before
    other = search(seed=4)
    assert [trial.params for trial in other.trials] != [trial.params for trial in study.trials]


def test_a_study_whose_process_died_goes_on_as_though_it_had_not(tmp_path):
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    search(storage=storage)
    dead = optuna.load_study(study_name="tune", storage=storage)
    dead.ask({})
    found = search(3 * TRIALS, storage=storage)
    states = [trial.state for trial in found.trials]
    assert states[TRIALS] == TrialState.FAIL
    assert states.count(TrialState.COMPLETE) == 3 * TRIALS == len(states) - 1
    whole = search(3 * TRIALS)  # after ten trials the sampler learns from them
    assert values(found) == values(whole)
    assert len({trial.params["training.lr"] for trial in whole.trials}) == 3 * TRIALS  # none is drawn again
    assert len(search(TRIALS, storage=storage).trials) == len(states)  # there are enough
    with pytest.raises(ConfigError, match=r"study tune = 'config.training.rounds=4' .* begun with: .*rounds=3; or"):
        search(storage=storage, config=config(**{"training.rounds": 4}))
    with pytest.raises(ConfigError, match=r"space\.method\.mu=None.*space\.method\.mu=\{\"name\": \"FloatDistribution"):
        search(storage=storage, space={"training.lr": SPACE["training.lr"]})
    with pytest.raises(ConfigError, match=r'metric, point=\["loss", null\].*metric, point=\["accuracy", null\]'):
        search(storage=storage, metric="loss")
    other = load("digits")
    with pytest.raises(ConfigError, match=r"study tune = 'samples=\w+' is not usable: .* begun with: samples=\w+; or"):
        search(storage=storage, data=other._replace(images=other.images[::-1]))
    resumed = search(storage=storage, config=config(**{"run.placement": "map"}))  # how it is run is free
    assert values(resumed) == values(found)


def test_a_study_is_of_one_seed_of_the_run():
    storage = InMemoryStorage()
    search(storage=storage)
    with pytest.raises(ConfigError, match=r"study tune = 'config\.run\.seed=1' .* begun with: config\.run\.seed=0; or"):
        search(storage=storage, config=config(**{"run.seed": 1}))


def test_trials_write_nothing_whatever_a_run_of_the_config_would(tmp_path):
    out = tmp_path / "run"
    found = search(config=config(**{"run.out": str(out), "run.checkpoint_every": 1, "run.client_history": True}))
    assert [trial.state for trial in found.trials] == [TrialState.COMPLETE] * TRIALS
    assert not out.exists()


def test_a_killed_batch_is_run_to_its_end(tmp_path, monkeypatch):
    """The sampler learns from ten trials on, the pruner from two; a batch has one program per batch size."""
    space = {"training.lr": SPACE["training.lr"], "training.batch_size": Choice([8, 20])}
    options = {"space": space, "pruner": MedianPruner(n_startup_trials=2, n_warmup_steps=0)}
    drive, calls = tuning.drive, itertools.count()

    class Killed(Callback):
        def on_evaluate(self, run, line):
            if line["round"] == 2:
                raise KeyboardInterrupt

    def killed(*arguments, callbacks, **options):
        call = next(calls)
        if call % 3 == 1:  # between two programs
            raise KeyboardInterrupt
        if call % 3 == 2:  # between two rounds, after the first of the runs has been reported
            callbacks = [*callbacks, Killed()]
        return drive(*arguments, callbacks=callbacks, **options)

    def trials(study):
        return [(trial.params, trial.intermediate_values, trial.state, trial.value) for trial in study.trials]

    whole = trials(search(3 * TRIALS, **options))
    assert {state for _, _, state, _ in whole} == {TrialState.COMPLETE, TrialState.PRUNED}
    monkeypatch.setattr(tuning, "drive", killed)
    interruptions = 0
    while True:
        try:
            found = search(3 * TRIALS, **options, storage=f"sqlite:///{tmp_path / 'study.db'}")
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 6
    assert trials(found) == whole


def test_points_of_a_grid_that_have_failed_are_tried_again(tmp_path, monkeypatch):
    rates = [0.05, 0.1, 0.2, 0.3, 0.4]
    space, storage = {"training.lr": Choice(rates)}, f"sqlite:///{tmp_path / 'study.db'}"

    def out_of_memory(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(tuning, "drive", out_of_memory)
        with pytest.raises(MemoryError):
            search(5, space, storage=storage)
    found = search(5, space, storage=storage).trials
    ended = [trial.params["training.lr"] for trial in found if trial.state == TrialState.COMPLETE]
    assert sorted(ended) == rates
    assert len(found) == TRIALS + 5


class Odd(BasePruner):
    """Prunes every second trial after the first round, and wants to prune all after the last one."""

    def prune(self, study, trial):
        return trial.last_step == 3 or (trial.number % 2 == 1 and trial.last_step == 1)


def test_a_pruned_trial_stops_and_the_others_go_on(study):
    pruned = search(pruner=Odd())
    for number, (trial, whole) in enumerate(zip(pruned.trials, study.trials, strict=True)):
        assert trial.params == whole.params
        rounds = [1] if number % 2 else [1, 2, 3]
        assert trial.intermediate_values == {t: whole.intermediate_values[t] for t in rounds}
        assert trial.state == (TrialState.PRUNED if number % 2 else TrialState.COMPLETE)
        assert trial.value == whole.intermediate_values[rounds[-1]]


def test_a_program_ends_with_the_last_of_its_trials(monkeypatch):
    """All are pruned after the first round: no program is called for a second one."""
    blocks = []
    rounds = programs.Program.rounds

    def counted(self, states, start, stop, *, evaluate):
        blocks.append((start, stop))
        return rounds(self, states, start, stop, evaluate=evaluate)

    class All(BasePruner):
        def prune(self, study, trial):
            return True

    monkeypatch.setattr(programs.Program, "rounds", counted)
    study = search(pruner=All())
    assert blocks == [(0, 1)]
    assert [trial.state for trial in study.trials] == [TrialState.PRUNED] * TRIALS


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize(("lrs", "placement"), [([0.05, 0.1, 0.2], "auto"), ([0.1, 0.2], "shard")])
def test_a_run_that_has_ended_keeps_its_state(lrs, placement):
    """Of three runs in a program for four, the second; of runs one by one, with clients over the devices, the first."""
    configs = [config(**{"training.lr": lr, "run.placement": placement}) for lr in lrs]
    ended, whole = (lay_out(configs, load("digits"), room=TRIALS) for _ in range(2))
    assert ended.over == ("runs" if placement == "auto" else "clients")
    at = len(lrs) - 2
    states = []
    for program in (ended, whole):
        program.compile()
        states.append(program.rounds(program.init(), 0, 1, evaluate=True))
    before = ended.each(states[0])
    assert equal(before, whole.each(states[1]))
    ended.end(at, 1)
    after, expected = (
        program.each(program.rounds(state, 1, 3, evaluate=True))
        for program, state in zip((ended, whole), states, strict=True)
    )
    assert equal(after[at], before[at])
    assert not equal(after[at], expected[at])
    for run in set(range(len(lrs))) - {at}:
        assert equal(after[run], expected[run])
        assert not equal(after[run], before[run])


def test_rows_without_a_run_are_spread_over_the_devices_and_run_nothing():
    program = lay_out([config(), config(**{"training.lr": 0.2})], load("digits"), room=TRIALS)
    assert program.order.tolist() == [0, 0, 1, 1]  # two rows on each of two devices
    assert np.asarray(program.rows[0].limit).tolist() == [2**31 - 1, 0, 2**31 - 1, 0]


def test_a_trial_with_other_shapes_has_a_program_of_its_own():
    storage = InMemoryStorage()
    chosen = optuna.create_study(storage=storage, study_name="tune", direction="maximize")
    for size in (8, 20, 8):
        chosen.enqueue_trial({"training.batch_size": size})
    space = {"training.lr": SPACE["training.lr"], "training.batch_size": Choice([8, 20])}
    said = []
    found = search(3, space, storage=storage, progress=said.append)
    assert [trial.params["training.batch_size"] for trial in found.trials] == [8, 20, 8]
    assert sum("of memory" in line for line in said) == 2, "once for each program"
    alone = simulate(config().replace(found.trials[1].params), progress=None).history["validation_pre.accuracy"]
    np.testing.assert_allclose(list(found.trials[1].intermediate_values.values()), alone, atol=1e-6)


def test_a_trial_that_has_ended_is_in_no_mean_that_is_reported(monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS_PER_LINE", -1.0)
    said, given = [], config(**{"training.rounds": 6})
    search(2, {"training.lr": Choice([1e30, 0.1])}, config=given, batch=2, progress=said.append)
    losses = [line.partition("loss ")[2] for line in said if ", loss " in line]
    assert losses[0] == "nan" != losses[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"progress": "auto"}, "progress = 'auto' is not usable: None or a function of a line of text"),
        ({"pruner": NopPruner}, r"pruner = <class '.*NopPruner'> is not usable: None or one of Optuna's, such as"),
        ({"sampler": "random"}, "sampler = 'random' is not usable: None or one of Optuna's, such as"),
        (
            {"storage": Path("study.db")},
            r"storage = .*Path\('study.db'\) is not usable: None, a URL such as sqlite:///",
        ),
    ],
)
def test_what_cannot_prune_sample_or_report_is_refused_before_a_trial_is_stored(given, message):
    storage = InMemoryStorage()
    with pytest.raises(ConfigError, match=message):
        search(**{"storage": storage, **given})
    assert storage.get_all_studies() == []


def test_a_trial_that_diverges_is_pruned_and_never_the_best():
    storage = InMemoryStorage()
    chosen = optuna.create_study(storage=storage, study_name="tune", direction="maximize")
    for lr in (1e30, 0.1):
        chosen.enqueue_trial({"training.lr": lr})
    found = search(space={"training.lr": Choice([0.1, 1e30])}, storage=storage)
    diverged, fine, *_ = found.trials
    assert diverged.state == TrialState.PRUNED
    assert 1 <= diverged.user_attrs["diverged_round"] <= 3
    assert diverged.user_attrs["diverged_round"] not in diverged.intermediate_values
    assert fine.state == TrialState.COMPLETE
    assert "diverged_round" not in fine.user_attrs
    assert found.best_params == {"training.lr": 0.1}


LINE = {
    "round": 1,
    **{
        table: {"accuracy": number / 10, "loss": float(number)}
        for number, table in enumerate(("pre", "post", "validation_pre", "validation_post"), 1)
    },
}


def test_the_best_fields_are_overrides_even_where_one_is_empty(file):
    path = file('config = "base.toml"\n[space]\ntraining.clip_norm = [1.0]\n')
    best = {"training.clip_norm": None, "training.lr": 1e-5, "model.init": "torch"}
    drawn = {field: optuna.distributions.CategoricalDistribution([value]) for field, value in best.items()}
    found = optuna.create_study()
    found.add_trial(optuna.create_trial(params=best, distributions=drawn, value=0.5))
    said = tuning.in_short(found)
    assert said.startswith("0 pruned, best 0.5000: ")
    usual = load_config(path.parent / "base.toml", ["training.clip_norm=1.0"])
    overrides = said.partition("0.5000: ")[2].split()
    assert load_config(path.parent / "base.toml", ["training.clip_norm=1.0"], overrides) == usual.replace(best)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (["--storage", "sqlite:///x.db"], "the same command goes on"),
        ([], "the study is lost: --storage keeps one"),
    ],
)
def test_an_interruption_says_what_becomes_of_the_study(options, how, file, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", interrupted)
    path = file('config = "base.toml"\n[space]\ntraining.lr = [0.1]\n')
    done = CliRunner().invoke(app, ["tune", str(path), *options])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", f"interrupted; {how}\n")


@pytest.mark.parametrize(
    ("evaluate_on", "point", "metric", "value"),
    [
        ("test", None, "accuracy", 0.4),  # the headline is POST
        ("test", "pre", "accuracy", 0.3),
        ("test", "post", "loss", 4.0),
        ("validation", None, "accuracy", 0.2),
        ("validation", "pre", "loss", 1.0),
    ],
)
def test_what_is_reported(evaluate_on, point, metric, value):
    trial = optuna.create_study().ask()
    watch = _Watch([trial], metric, point)
    run = Running(config(**{"data.evaluate_on": evaluate_on}), "post", 1, [LINE], dict)
    watch.on_start(run)
    watch.on_evaluate(run, LINE)
    assert trial.study.trials[0].intermediate_values == {1: value}
    assert run.stopped is None
    watch.tell(trial.study)
    assert trial.study.trials[0].value == value


def test_the_smallest_loss_is_the_best():
    found = search(metric="loss", point="post")
    assert found.direction == optuna.study.StudyDirection.MINIMIZE
    assert found.best_value == min(trial.value for trial in found.trials) < max(trial.value for trial in found.trials)


class Asked(BaseSampler):
    """Counts, and draws at random."""

    def __init__(self):
        self.random, self.asked = RandomSampler(seed=0), 0

    def infer_relative_search_space(self, study, trial):
        self.asked += 1
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        return self.random.sample_independent(study, trial, name, distribution)


def test_a_sampler_of_ones_own_is_asked_for_every_trial():
    sampler = Asked()
    assert search(TRIALS + 1, sampler=sampler).sampler is sampler
    assert sampler.asked == TRIALS + 1


@pytest.fixture
def file(tmp_path):
    (tmp_path / "base.toml").write_text(FILE, encoding="utf-8")

    def write(text):
        path = tmp_path / "search.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_command_prints_the_best_and_goes_on_with_a_storage(file, study, tmp_path):
    path = file(
        'config = "base.toml"\n[space]\n'
        "training.lr = { low = 0.01, high = 0.5, log = true }\nmethod.mu = { low = 0, high = 1 }\n"
    )
    arguments = ["tune", str(path), "--storage", f"sqlite:///{tmp_path / 'x.db'}", "--batch", "4", "--seed", "3"]
    done = CliRunner().invoke(app, [*arguments, "--trials", "4"])
    assert done.exit_code == 0, done.output
    best = " ".join(f"{field}={value}" for field, value in study.best_params.items())
    last = f"accuracy on validation samples: 0 pruned, best {study.best_value:.4f}: {best}"
    assert done.output.splitlines()[-1] == last
    other = CliRunner().invoke(app, [*arguments, "training.rounds=4", "--trials", "4"])
    assert str(other.exception).startswith("study search = 'config.training.rounds=4' is not usable")
    again = CliRunner().invoke(app, [*arguments, "--trials", "4", "--quiet"])
    assert again.output.splitlines() == [last]
    assert len(optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path / 'x.db'}").trials) == 4


def test_the_command_hands_on_what_it_is_given(file, monkeypatch):
    path, given = file('config = "base.toml"\n[space]\ntraining.lr = [0.1]\n'), []
    monkeypatch.setattr(tuning, "tune", lambda *_, **options: given.append(options) or 1 / 0)
    line = "--trials 7 --batch 3 --seed 5 --metric loss --point post --storage sqlite:///x.db --name mine --quiet"
    CliRunner().invoke(app, ["tune", str(path), *line.split()])
    judged_by = {"metric": "loss", "point": "post"}
    where = {"storage": "sqlite:///x.db", "study_name": "mine", "progress": None}
    assert given == [{"n_trials": 7, "batch": 3, "seed": 5, **judged_by, **where}]


def test_a_file_says_what_is_drawn_from_what(file):
    path = file(
        'config = "base.toml"\noverrides = ["training.rounds=2"]\n[space]\n"training.lr" = '
        "{low = 1e-3, high = 1, log = true}\n"
        "method.mu = {low = 0, high = 1}\ntraining.epochs = {low = 1, high = 3, int = true}\n"
        "training.batch_size = [10, 50]\n"
    )
    base, space = load_tune(path)
    assert base.training.rounds == 2
    assert load_tune(path, ["training.rounds=5"])[0].training.rounds == 5
    assert space == {
        "training.lr": LogUniform(1e-3, 1),
        "method.mu": Uniform(0, 1),
        "training.epochs": IntUniform(1, 3),
        "training.batch_size": Choice([10, 50]),
    }
    decides = re.escape(f"override = 'training.lr=0.7' is not usable: a field that is not searched: [space] of {path}")
    with pytest.raises(ConfigError, match=f"^{decides} has training.lr$"):
        load_tune(path, ["training.rounds=5", "training.lr=0.7"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[space]\ntraining.lr = [0.1]", "tune file = .* config (a path), [space]; optional: overrides; it has space"),
        ('config = "base.toml"\n[grid]\n', "tune file = .*; it has grid"),
        ("", "tune file = .*; it has nothing"),
        ('config = "base.toml"\n[space]\ntraining.lr = 0.1', "space.training.lr = 0.1 .* a list of values, or"),
        (
            'config = "base.toml"\n[space]\ntraining.lr = {log_uniform = [0.01, 0.5]}',
            "space.training.lr = {'log_uniform': [0.01, 0.5]} .* a list of values, or {low",
        ),
        (
            'config = "base.toml"\n[space]\ntraining.lr = {low = 0.1}',
            "space.training.lr = {'low': 0.1} .* low and high",
        ),
        ('config = "base.toml"\noverrides = 5\n[space]\ntraining.lr = [0.1]', "overrides = 5 .*"),
        (
            'config = "base.toml"\n[space]\ntraining.lr = {low = 1, high = 2, log = true, int = true}',
            "space.training.lr .* one of log = true and int = true",
        ),
    ],
)
def test_mistakes_in_a_file(file, text, message):
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ConfigError, match=pattern):
        load_tune(file(text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": {}}, "space = {} .* one field or more"),
        (
            {"space": {"training.lrr": Uniform(0.1, 1)}},
            "training.lrr = 0.1 .* no such key; did you mean lr? allowed: rounds,",
        ),
        ({"space": {"method.lam": Uniform(0.1, 1)}}, "method.lam = 0.1 .* no such key of fedprox; allowed: mu"),
        ({"space": {"lr": Uniform(0.1, 1)}}, "space.lr = .* a dotted field such as training.lr"),
        ({"space": {"training.lr": (0.1, 1)}}, "space.training.lr = (0.1, 1) .* Uniform, LogUniform or IntUniform"),
        ({"space": {"training.lr": Uniform(1, 0.1)}}, "space.training.lr = Uniform(low=1, high=0.1) .* low below high"),
        ({"space": {"training.lr": Uniform(0.1, math.inf)}}, "space.training.lr = .* finite numbers"),
        ({"space": {"training.lr": LogUniform(0, 1)}}, "space.training.lr = LogUniform(low=0, high=1) .* above 0"),
        ({"space": {"training.lr": Uniform(0, 1)}}, "training.lr = 0.0 .* greater than 0"),
        ({"space": {"training.epochs": IntUniform(1, 2.5)}}, "space.training.epochs = .* whole numbers"),
        ({"space": {"training.epochs": Uniform(1, 3)}}, "training.epochs = 1.0 .* valid integer"),
        ({"space": {"training.lr": Choice([])}}, "space.training.lr = [] .* a list of one value or more"),
        ({"space": {"training.lr": Choice([0.1, 0.1])}}, "space.training.lr = .* each of them once"),
        ({"space": {"participation.ratio": Choice([[0.1, 0.5]])}}, "space.participation.ratio = .* what a study can"),
        ({"space": {"training.batch_size": Choice([8, 0])}}, "training.batch_size = 0 .* greater than or equal to 1"),
        ({"space": {"run.seed": Choice([0, 1])}}, "space.run.seed = .* run and data, and so the partition"),
        ({"space": {"data.clients": IntUniform(2, 4)}}, "space.data.clients = .* run and data"),
        ({"space": {"model.name": Choice(["mlp", "char_lstm"])}}, "model.name = 'char_lstm' .* it reads"),
        (
            {"space": {"training.batch_size": Choice([8, 60])}, "config": config(**{"training.drop_last": True})},
            "training.batch_size = 60 .* ",
        ),
        ({"config": config(**{"data.validation_share": 0.0})}, "data.validation_share = 0.0 .* above 0, such as 0.2"),
        ({"config": "config.toml"}, "config = 'config.toml' .* a Config: load_config(path) of a file"),
        ({"n_trials": 0}, "n_trials = 0 .* a whole number, 1 or more"),
        ({"batch": 0}, "batch = 0 .* 1 or more"),
        ({"seed": -1}, "seed = -1 .* a whole number, 0 or more"),
        ({"metric": "hm"}, "metric = 'hm' .* one of accuracy, weighted"),
        ({"point": "best"}, "point = 'best' .* pre"),
        ({"storage": "sqlite//study.db"}, "storage = 'sqlite//study.db' .* such as sqlite:///study.db"),
        ({"storage": "sqlite:////nowhere/study.db"}, "storage = .* unable to open database file"),
    ],
)
def test_mistakes_are_named_before_anything_runs(options, message, monkeypatch):
    def never(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(tuning, "drive", never)
    pattern = ".*".join(map(re.escape, message.split(" .* ")))
    with pytest.raises(ConfigError, match=f"^{pattern}") as caught:
        search(**options)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_those_of_python():
    given = {
        "training.lr": LogUniform(np.float32(0.125), np.float64(0.5)),
        "training.epochs": IntUniform(np.int64(1), np.int32(3)),
        "training.batch_size": Choice(list(np.arange(8, 11))),
    }
    same = {
        "training.lr": LogUniform(0.125, 0.5),
        "training.epochs": IntUniform(1, 3),
        "training.batch_size": Choice([8, 9, 10]),
    }
    assert list(map(repr, distributions_of(given).values())) == list(map(repr, distributions_of(same).values()))


def test_a_study_of_something_else_is_left_alone():
    storage = InMemoryStorage()
    other = optuna.create_study(storage=storage, study_name="tune")
    other.tell(other.ask(), 1.0)
    with pytest.raises(ConfigError, match=r"study_name = 'tune' .* none of tune's"):
        search(storage=storage)


def test_without_optuna_it_says_what_to_install(monkeypatch):
    found = builtins.__import__

    def missing(name, *arguments, **options):
        if name.startswith("optuna"):
            raise ImportError(name)
        return found(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r'pip install "fedjax_pfl\[tune\]"'):
        search()
