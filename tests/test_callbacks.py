"""Callbacks see the run that goes on, and can end it."""

import json
import math
import os
import signal
import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import (
    BestModel,
    Callback,
    Config,
    ConfigError,
    EarlyStopping,
    MLflowLogger,
    Result,
    WandbLogger,
    simulate,
)
from fedjax_pfl.experiment.callbacks import Running, check_callbacks, check_run
from fedjax_pfl.experiment.programs import Program
from fedjax_pfl.experiment.progress import lines

ROUNDS = 6


def config(**run):
    return Config(
        data={"source": "digits", "clients": 5, "samples_per_client": 30, "validation_share": 0.2},
        model={"name": "mlp", "hidden": 8},
        method={"name": "fedavg"},
        training={"rounds": ROUNDS, "lr": 0.1},
        run={"eval_every": 2, **run},
    )


class Recorder(Callback):
    def __init__(self):
        self.seen, self.states = [], {}

    def on_start(self, run):
        self.seen.append(("start", run.round, len(run.lines)))

    def on_evaluate(self, run, line):
        self.seen.append(("evaluate", run.round, line["round"]))
        self.states[run.round] = run.state

    def on_end(self, run, result):
        self.seen.append(("end", run.round, result.summary["rounds"]))


class EveryRound(Callback):
    def __init__(self, stop_after=None):
        self.rounds, self.losses, self.stop_after = [], [], stop_after

    def on_round(self, run):
        self.rounds.append(run.round)
        self.losses.append(run.loss)
        if run.round == self.stop_after:
            run.stop("enough")


@pytest.fixture(scope="module")
def recorder():
    return Recorder()


@pytest.fixture(scope="module")
def plain(recorder):
    return simulate(config(), callbacks=[recorder])


def assert_same(state, other):
    assert jax.tree.structure(state) == jax.tree.structure(other)
    assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(other)))


def test_calls_come_in_order_with_the_state_of_their_round(recorder, plain):
    evaluations = [("evaluate", t, t) for t in (2, 4, 6)]
    assert recorder.seen == [("start", 0, 0), *evaluations, ("end", 6, 6)]
    assert_same(recorder.states[6], plain.state)
    shorter = simulate(config().replace({"training.rounds": 4}))
    assert_same(recorder.states[4], shorter.state)


def test_on_round_is_called_after_every_round_and_changes_nothing(plain):
    every = EveryRound()
    result = simulate(config(), callbacks=[every])
    assert every.rounds == [1, 2, 3, 4, 5, 6]
    assert_same(result.state, plain.state)
    assert [every.losses[t - 1] for t in (2, 4, 6)] == plain.history["train_loss"].tolist()


def test_what_a_callback_does_to_lines_changes_nothing_that_is_recorded(plain, tmp_path):
    class Careless(Callback):
        def on_evaluate(self, run, line):
            line["mine"] = 1.0
            line["pre"].clear()
            run.lines[-1]["pre"].clear()
            run.lines.append({})

    result = simulate(config(out=str(tmp_path / "run")), callbacks=[Careless()])
    for had in (result, Result.load(tmp_path / "run")):
        assert had.history.keys() == plain.history.keys()
        assert had.history["pre.accuracy"].tolist() == plain.history["pre.accuracy"].tolist()
        assert had.summary["personal"] == plain.summary["personal"]


@pytest.mark.parametrize(("asked", "last"), [(4, 4), (3, 4)])
def test_a_stopped_run_ends_like_a_shorter_one(plain, tmp_path, asked, last):
    out = tmp_path / "run"
    result = simulate(config(out=str(out)), callbacks=[EveryRound(stop_after=asked)])
    shorter = simulate(config().replace({"training.rounds": last}))
    assert_same(result.state, shorter.state)
    assert result.history["round"].tolist() == [2, 4]
    assert (result.summary["rounds"], result.summary["stopped"]) == (last, "enough")
    assert result.summary["personal"] == shorter.summary["personal"]
    assert json.loads((out / "summary.json").read_text())["stopped"] == "enough"
    assert "stopped" not in plain.summary


@pytest.mark.parametrize(("reason", "said"), [("interrupted", "interrupted"), ("", "no reason given")])
def test_a_stopped_run_is_complete_whatever_the_reason_is(reason, said, tmp_path):
    class Stops(Callback):
        def on_evaluate(self, run, line):
            run.stop(reason)

    result = simulate(config(out=str(tmp_path / "run")), callbacks=[Stops()])
    assert (result.summary["rounds"], result.summary["stopped"]) == (2, said)
    assert (tmp_path / "run" / "summary.json").exists()
    assert_same(Result.load(tmp_path / "run").state, result.state)


def test_a_stop_before_the_first_round_is_agreed_on_before_it(monkeypatch):
    """By all processes; else the others would wait for this one in the second round."""
    seen = []

    class StopsAtOnce(EveryRound):
        def on_start(self, run):
            run.stop("enough")

        def on_round(self, run):
            seen.append("round")

    def agree(*proposed):
        seen.append("stop" if proposed[2] else "no stop")
        return proposed

    monkeypatch.setattr("fedjax_pfl.experiment.driver.agree", agree)
    assert simulate(config(), callbacks=[StopsAtOnce()]).summary["rounds"] == 1
    assert seen[:2] == ["stop", "round"]


def test_a_log_has_a_last_line_of_a_run_that_ends_early(capsys):
    given = config()
    simulate(given, progress=lines(given), callbacks=[EveryRound(stop_after=4)])
    assert capsys.readouterr().out.splitlines()[-1].startswith("round 4/4 ")


def run_with(values, metric="train_loss"):
    lines = [{"round": t, metric: v} for t, v in enumerate(values, 1)]
    run = Running(config(), "pre", len(values), lines, dict, [metric])
    run.loss = values[-1]
    return run


@pytest.mark.parametrize(
    ("values", "options", "stops"),
    [
        ([1, 2, 3], {}, False),
        ([3, 2, 2], {}, True),
        ([3, 2, 4], {}, False),
        ([3, 2], {}, False),
        ([3, 3, 3], {}, True),  # as good is not better
        ([3, 2, 1], {"mode": "min"}, False),
        ([1, 2, 3], {"mode": "min"}, True),
        ([1, 1.4, 1.8], {"min_delta": 0.5}, False),  # 1.8 is better than the best that counted, 1
        ([1, 1.4, 1.5], {"min_delta": 0.5}, True),
        ([None, None, 3, 2.5], {"mode": "min"}, False),  # no loss before anyone has trained
    ],
)
def test_early_stopping_waits_for_its_patience(values, options, stops):
    stopping, run = EarlyStopping("train_loss", patience=2, **options), run_with(values)
    stopping.on_evaluate(run, run.lines[-1])
    assert (run.stopped is not None) == stops


def test_early_stopping_by_default_looks_at_validation_samples():
    stopping = EarlyStopping(patience=1)
    # A learning rate of almost nothing: after the first evaluation nothing gets better.
    still = config().replace({"training.lr": 1e-12})
    result = simulate(still, callbacks=[stopping])
    assert result.summary["rounds"] == 4
    assert result.summary["stopped"] == "no better accuracy on validation samples in 1 evaluation"


@pytest.mark.parametrize("headline", ["pre", "post"])
@pytest.mark.parametrize("evaluated_on", ["test", "validation"])
def test_the_usual_metric_is_of_validation_samples_at_the_headline_point(headline, evaluated_on):
    """They are scored in the place of the test samples, or beside them."""
    tables = ("pre", "post", "validation_pre", "validation_post")
    line = {"round": 1, **{table: {"accuracy": at / 10} for at, table in enumerate(tables)}}
    given = config().replace({"data.evaluate_on": evaluated_on})
    run = Running(given, headline, 1, [line], dict, [f"{table}.accuracy" for table in tables])
    assert run.values(None) == [
        line[headline if evaluated_on == "validation" else f"validation_{headline}"]["accuracy"]
    ]


def test_the_best_model_is_that_of_the_best_round(recorder, plain):
    best = BestModel("pre.accuracy")
    result = simulate(config(), callbacks=[best])
    at = int(np.argmax(plain.history["pre.accuracy"]))
    assert best.round == plain.history["round"][at]
    assert best.value == plain.history["pre.accuracy"][at]
    assert_same(best.result.state, recorder.states[best.round])
    worst = BestModel("pre.accuracy", mode="min")
    simulate(config(), callbacks=[worst])
    assert worst.round == plain.history["round"][int(np.argmin(plain.history["pre.accuracy"]))]
    assert_same(result.state, plain.state)


def test_a_best_model_begins_anew_with_each_run():
    best = BestModel("train_loss", mode="min")
    for losses, expected in [([1.0, 2.0], (1, 1.0)), ([4.0, 3.0], (2, 3.0))]:
        whole = run_with(losses)
        run = Running(whole.config, "pre", 0, [], dict, whole.metrics)
        best.on_start(run)
        for line in whole.lines:
            run.lines.append(line)
            best.on_evaluate(run, line)
        assert (best.round, best.value) == expected


def test_a_best_model_needs_the_state_of_the_best_round():
    """A run goes on from a checkpoint that may be of a later round than its last evaluation."""
    best, whole = BestModel("train_loss", mode="min"), run_with([3.0, 2.0])
    there, later = (Running(whole.config, "pre", at, whole.lines, dict, whole.metrics) for at in (2, 3))
    check_run([best], there)
    best.on_start(there)
    assert best.round == 2
    with pytest.raises(ConfigError, match=r'BestModel = 2 is not usable: run\.keep = "best" instead'):
        check_run([best], later)


def test_an_evaluation_without_a_value_is_never_the_best():
    best, run = BestModel("train_loss", mode="min"), run_with([math.nan, 3.0, 2.0, 2.5])
    for at in range(1, 5):
        so_far = Running(run.config, "pre", at, run.lines[:at], lambda: {}, run.metrics)
        best.on_evaluate(so_far, so_far.lines[-1])
    assert (best.round, best.value) == (3, 2.0)


def test_evaluations_before_the_first_value_are_nothing_that_fails_to_improve():
    """Such as losses while nobody has taken part; a loss that is lost later, on divergence, counts."""
    stop = EarlyStopping("train_loss", patience=2, mode="min")

    def ends(losses):
        run = run_with(losses)
        stop.on_evaluate(run, run.lines[-1])
        return run.stopped is not None

    assert not ends([math.nan, math.nan, math.nan])
    assert not ends([math.nan, math.nan, 2.0, 3.0])
    assert ends([math.nan, math.nan, 2.0, 3.0, math.nan])


def test_the_best_of_rounds_without_a_value_is_the_newest():
    """That is what an uninterrupted run holds, so that a resumed one has lost nothing."""
    run = run_with([math.nan, math.nan])
    check_run([BestModel("train_loss", mode="min")], run)


class Interrupt(Callback):
    """Sends this process the signal of Ctrl-C in the middle of the run."""

    def on_round(self, run):
        if run.round == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_returns_what_it_has_and_can_be_resumed(plain, tmp_path):
    out = tmp_path / "run"
    result = simulate(config(out=str(out)), callbacks=[Interrupt()], interrupt="return")
    assert (result.summary["rounds"], result.summary["stopped"]) == (4, "interrupted")
    assert result.history["round"].tolist() == [2, 4]
    assert not (out / "summary.json").exists()
    whole = simulate(config(out=str(out)), resume=out)
    assert_same(whole.state, plain.state)
    assert whole.history["pre.accuracy"].tolist() == plain.history["pre.accuracy"].tolist()


@pytest.mark.parametrize("every", [0, 1])
def test_a_round_that_only_an_interruption_evaluates_is_not_in_the_resumed_run(every, tmp_path):
    class Later(Callback):
        def on_round(self, run):
            if run.round == 4:
                os.kill(os.getpid(), signal.SIGINT)

    odd = {"training.rounds": 6, "run.eval_every": 3, "run.checkpoint_every": every, "run.keep": "best"}
    alone = simulate(config(out=str(tmp_path / "whole")).replace(odd))
    out = tmp_path / "run"
    cut = simulate(config(out=str(out)).replace(odd), callbacks=[Later()], interrupt="return")
    assert cut.history["round"].tolist() == [3, 5]
    whole = simulate(config(out=str(out)).replace(odd), resume=out)
    assert whole.history["round"].tolist() == alone.history["round"].tolist() == [3, 6]
    assert_same(whole.state, alone.state)
    assert whole.summary["personal"] == alone.summary["personal"]


@pytest.mark.parametrize("after", [ROUNDS - 1, ROUNDS])
def test_a_run_interrupted_when_its_last_round_cannot_be_left_out_is_complete(after, plain, tmp_path):
    """The next round at the latest is evaluated: the last one."""

    class Late(Callback):
        def on_round(self, run):
            if run.round == after:
                os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "run"
    result = simulate(config(out=str(out)), callbacks=[Late()], interrupt="return")
    assert "stopped" not in result.summary
    assert json.loads((out / "summary.json").read_text())["rounds"] == ROUNDS
    assert_same(result.state, plain.state)
    assert_same(Result.load(out).state, plain.state)


def test_an_interrupted_run_raises_where_that_is_wanted():
    with pytest.raises(KeyboardInterrupt):
        simulate(config(), callbacks=[Interrupt()], interrupt="raise")


def test_a_resumed_run_stops_where_an_uninterrupted_one_does(tmp_path):
    still = config(out=str(tmp_path / "run"), checkpoint_every=1).replace({"training.lr": 1e-12})
    simulate(still, callbacks=[EarlyStopping(patience=2), Interrupt()], interrupt="return")
    seen = Recorder()
    result = simulate(still, resume=tmp_path / "run", callbacks=[EarlyStopping(patience=2), seen])
    assert seen.seen[0] == ("start", 3, 1)
    assert (result.summary["rounds"], result.history["round"].tolist()) == (6, [2, 4, 6])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data.new_clients": 0.4},
        {"data.evaluate_on": "validation"},
        {"data.validation_share": 0.0},
        {"method.name": "fedamp"},
        {"method.name": "fedprox", "run.diagnostics": True},
    ],
    ids=str,
)
def test_the_metrics_of_a_run_are_known_before_it_begins(changes):
    class Named(Callback):
        def on_start(self, run):
            self.metrics = run.metrics

    named = Named()
    own = {"half": lambda logits, labels: jnp.full(labels.shape, 0.5)}
    result = simulate(config().replace({"training.rounds": 1, **changes}), metrics=own, callbacks=[named])
    has = {name for name, values in result.history.items() if not np.isnan(values).all()}
    assert has <= set(named.metrics) <= set(result.history)
    assert {"hm" in name or name.startswith("global") for name in set(result.history) - set(named.metrics)} <= {True}


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (EarlyStopping("global"), r"metric = 'global' is not usable: allowed: round, train_loss, "),
        (EarlyStopping("diagnostics.typo"), r"metric = 'diagnostics\.typo' is not usable: "),
        (BestModel("pre.acuracy"), r"metric = 'pre\.acuracy' is not usable: did you mean pre\.accuracy\?"),
        (BestModel("new_pre.accuracy"), r"metric = 'new_pre\.accuracy' is not usable: "),
    ],
    ids=["no global model", "no such diagnostic", "misspelt", "no new clients"],
)
def test_a_metric_that_the_run_does_not_have_replaces_nothing(callback, message, tmp_path, monkeypatch):
    for name in ("config.toml", "partition.json", "summary.json"):
        (tmp_path / name).write_text("an earlier run's")
    monkeypatch.setattr(Program, "compile", lambda _: pytest.fail("compiled"))
    given = config(out=str(tmp_path)).replace({"method.name": "local"})
    with pytest.raises(ConfigError, match=message):
        simulate(given, callbacks=[callback], overwrite=True)
    assert (tmp_path / "summary.json").read_text() == "an earlier run's"


class WithoutRun(Callback):
    def on_evaluate(self, line):
        pass


class Misspelt(Callback):
    def on_evaluation(self, run, line):
        pass


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (WithoutRun(), r"one whose on_evaluate takes the arguments run, line$"),
        (Misspelt(), r"one without on_evaluation, which nothing calls; did you mean on_evaluate\?"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_before_compilation(callback, message, monkeypatch):
    monkeypatch.setattr(Program, "compile", lambda _: pytest.fail("compiled"))
    with pytest.raises(ConfigError, match=message):
        simulate(config(), callbacks=[callback])


def test_functions_may_name_their_arguments_otherwise_and_take_more():
    class Own(Callback):
        on_disk = True

        def on_evaluate(self, now, *scores, quiet=True):
            pass

    check_callbacks([Own(), Recorder(), EarlyStopping(), BestModel()])


def test_a_refused_resumption_leaves_a_complete_run_as_it_is(tmp_path):
    given = config(out=str(tmp_path / "run"), checkpoint_every=1)
    simulate(given)

    def files():
        return {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}

    before = files()
    with pytest.raises(ConfigError, match="BestModel = 2 is not usable"):
        simulate(
            given.replace("training.rounds", ROUNDS + 1),
            resume=tmp_path / "run",
            callbacks=[BestModel("train_loss", mode="max")],
        )
    assert files() == before


MISTAKES = {
    "no list": (lambda: simulate(config(), callbacks=EarlyStopping()), r"callbacks = .* a list of callbacks"),
    "a function": (lambda: simulate(config(), callbacks=[print]), r"callbacks = .* inherits from fedjax_pfl.Callback$"),
    "a class": (lambda: simulate(config(), callbacks=[BestModel]), r"callbacks = .*, not the class itself"),
    "patience": (
        lambda: EarlyStopping(patience=0),
        r"patience = 0 is not usable: a whole number of eval",
    ),
    "half a patience": (lambda: EarlyStopping(patience=1.5), r"patience = 1.5 is not usable: a whole number"),
    "no delta": (lambda: EarlyStopping(min_delta=float("nan")), r"min_delta = nan is not usable: a number, 0 or more"),
    "no validation for a callback": (
        lambda: simulate(config().replace({"data.validation_share": 0.0}), callbacks=[EarlyStopping()]),
        r"metric = None is not usable: a metric such as train_loss, or give data.validation_share",
    ),
    "min_delta": (lambda: EarlyStopping(min_delta=-1.0), r"min_delta = -1.0 .* 0 or more"),
    "no name": (lambda: EarlyStopping(3), r"metric = 3 is not usable: a name in history, such as train_loss, or None$"),
    "no name of the best": (lambda: BestModel(["train_loss"]), r"metric = \['train_loss'\] .*: a name in history"),
    "mode": (lambda: BestModel(mode="up"), r"mode = 'up' is not usable: \"max\" or \"min\""),
    "metric": (
        lambda: run_with([1.0]).values("loss"),
        r"metric = 'loss' is not usable: allowed: train_loss$",
    ),
    "no validation": (
        lambda: Running(config().replace({"data.validation_share": 0.0}), "pre", 0, [], dict).values(None),
        r"metric = None is not usable: a metric such as train_loss, or give data.validation_share",
    ),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(mistake, message):
    with pytest.raises(ConfigError, match=message) as caught:
        mistake()
    assert "\n" not in str(caught.value)


def test_weights_and_biases_gets_config_lines_and_summary(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []
    monkeypatch.setattr(wandb.Run, "log", lambda self, values, step: logged.append((step, values)))
    summaries = []
    monkeypatch.setattr(wandb.Run, "finish", lambda self: summaries.append(dict(self.summary)))
    logger = WandbLogger(project="tests", mode="offline", dir=str(tmp_path))
    result = simulate(config(), callbacks=[logger])
    assert [step for step, _ in logged] == [2, 4, 6]
    assert [values["pre/accuracy"] for _, values in logged] == result.history["pre.accuracy"].tolist()
    assert summaries[0]["pre.last"] == result.summary["personal"]["pre"]["last"]


def test_mlflow_gets_config_and_lines(tmp_path, monkeypatch):
    client = pytest.importorskip("mlflow.client", reason="the package mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = (tmp_path / "mlruns").as_uri()
    result = simulate(config(), callbacks=[MLflowLogger(experiment="tests", tracking_uri=where, run_name="one")])
    found = client.MlflowClient(where)
    run = found.search_runs([found.get_experiment_by_name("tests").experiment_id])[0]
    assert (run.info.status, run.data.params["training.lr"]) == ("FINISHED", "0.1")
    history = sorted(found.get_metric_history(run.info.run_id, "pre.accuracy"), key=lambda of: of.step)
    assert [(of.step, of.value) for of in history] == list(
        zip([2, 4, 6], result.history["pre.accuracy"].tolist(), strict=True)
    )


def test_loggers_are_told_of_the_rounds_before_a_resumption(monkeypatch):
    """Packages that are not installed for this are played by objects that note what they are told."""
    told = []
    wandb, client = ModuleType("wandb"), ModuleType("mlflow.client")
    wandb.init = lambda **_: SimpleNamespace(log=lambda values, step: told.append((step, values["train_loss"])))
    client.MlflowClient = lambda uri: SimpleNamespace(
        get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="1"),
        create_run=lambda experiment: SimpleNamespace(info=SimpleNamespace(run_id="1")),
        log_param=lambda *_: None,
        log_metric=lambda run, name, value, step: told.append((step, value)),
    )
    for name, module in {"wandb": wandb, "mlflow": ModuleType("mlflow"), "mlflow.client": client}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for logger in (WandbLogger(), MLflowLogger()):
        told.clear()
        logger.on_start(run_with([3.0, 2.0]))
        assert told == [(1, 3.0), (2, 2.0)]


@pytest.mark.parametrize(("logger", "package"), [(WandbLogger, "wandb"), (MLflowLogger, "mlflow")])
def test_a_logger_without_its_package_says_so(logger, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as though it were not installed
    with pytest.raises(ConfigError, match=rf'an installed package: pip install "fedjax_pfl\[{package}\]"'):
        logger()


def test_of_a_stopped_run_the_client_table_counts_the_rounds_that_there_were():
    """With everybody in every round, and with some."""
    for ratio in (1.0, 0.4):
        stopped = simulate(config().replace({"participation.ratio": ratio}), callbacks=[EveryRound(stop_after=4)])
        assert stopped.clients["rounds_participated"].sum() == 4 * round(5 * ratio)
