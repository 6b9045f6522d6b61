"""Parts of one's own, from Python, under a name or from another package, beside those of the package."""

import enum
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import Field

from fedjax_pfl import (
    Config,
    ConfigError,
    Result,
    compare,
    load_config,
    register_dataset,
    register_method,
    register_metric,
    register_model,
    register_partition,
    simulate,
)
from fedjax_pfl.cli.describing import described
from fedjax_pfl.data.dealing import Partition
from fedjax_pfl.data.sources import SOURCES, load
from fedjax_pfl.engine.metrics import METRICS, check_metrics
from fedjax_pfl.experiment import programs, registry
from fedjax_pfl.experiment.build import divide, make_engine, shape_of
from fedjax_pfl.experiment.parts import with_parts
from fedjax_pfl.experiment.schema import config_schema
from fedjax_pfl.method import Method, PerClass, SentIf, Update
from fedjax_pfl.methods import METHODS
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedprox import fedprox
from fedjax_pfl.models import MODELS
from fedjax_pfl.models.mlp import MLP
from fedjax_pfl.models.own import own_model
from fedjax_pfl.ops.losses import cross_entropies, masked_mean

pytestmark = pytest.mark.usefixtures("tables_as_before")


def config(changes=None):
    base = Config(
        data={"source": "digits", "clients": 5},
        model={"name": "mlp", "hidden": 8},
        method={"name": "fedavg"},
        training={"rounds": 2, "lr": 0.1},
    )
    return base.replace(changes) if changes else base


def mine(model, train, *, mu: float = 0.5) -> Method:
    """FedProx under another name."""
    return fedprox(model, train, mu=mu)


def brier(logits, labels):
    wanted = jax.nn.one_hot(labels, logits.shape[-1])
    return jnp.sum((jax.nn.softmax(logits) - wanted) ** 2, axis=-1)


def accuracy_of_all(logits, labels, mask):
    return jnp.sum(jnp.where(jnp.argmax(logits, axis=-1) == labels, mask, 0.0)) / jnp.sum(mask)


METRICS_OF_MINE = {"Brier": brier, "Accuracy": accuracy_of_all}


def same(result, other):
    assert all(map(np.array_equal, jax.tree.leaves(result.state), jax.tree.leaves(other.state)))
    assert result.history["pre.accuracy"].tolist() == other.history["pre.accuracy"].tolist()


@pytest.fixture(scope="module")
def plain():
    """A run of the package's own parts."""
    return simulate(config({"method.name": "fedprox", "method.mu": 0.5}))


def test_parts_from_python_run_as_those_of_the_package(plain, monkeypatch):
    """A method as it is, a model and a data set under names, and metrics: all in one run."""
    from scipy.special import softmax

    @register_model("mine_net")
    def net(*, hidden: int = 8, init: str = "torch"):
        return MLP(hidden, init)

    register_dataset("mine_digits")(digits)
    given = config({"model.name": "mine_net", "data.source": "mine_digits", "run.export": ["predictions"]})
    result = simulate(given, method=mine, metrics=METRICS_OF_MINE)
    same(result, plain)
    assert result.config.method == {"name": "mine", "mu": 0.5}
    assert result.summary["dataset"] == "mine_digits"

    exported, brier_of = result.exported, []
    for client in range(5):  # more samples than a batch of the evaluation, and padding
        rows = exported["client"] == client
        probabilities = softmax(exported["logits"][rows].astype(np.float64), axis=1)
        brier_of.append(np.mean(np.sum((probabilities - np.eye(10)[exported["label"][rows]]) ** 2, axis=1)))
    np.testing.assert_allclose(result.clients["pre_Brier"], brier_of, rtol=1e-5)
    assert result.history["pre.Brier"][-1] == pytest.approx(np.mean(brier_of), rel=1e-5)
    for point in ("pre", "post"):
        np.testing.assert_allclose(result.clients[f"{point}_Accuracy"], result.clients[f"{point}_accuracy"], rtol=1e-6)
    np.testing.assert_allclose(result.history["global_Accuracy"], result.history["global"], rtol=1e-6)
    # FedProx's clients answer as the global model does; the pooled samples are theirs.
    samples = result.clients["n_test"]
    expected = np.average(result.clients["pre_Brier"], weights=samples)
    assert result.history["global_Brier"][-1] == pytest.approx(expected, rel=1e-5)
    assert result.summary["metrics"]["pre.Brier"] == {"last": result.history["pre.Brier"][-1]}
    assert not [name for name in plain.history if "Brier" in name]

    class CompiledError(Exception):
        pass

    def compiled(**_):
        raise CompiledError

    monkeypatch.setattr(programs, "ThreadPoolExecutor", compiled)
    with pytest.raises(CompiledError):  # another function under the same name is another program
        simulate(given, method=mine, metrics={**METRICS_OF_MINE, "Brier": lambda logits, labels: brier(logits, labels)})


def test_metrics_from_python_come_beside_those_of_the_config():
    register_metric("first")(brier)
    given = config({"run.metrics": ["first"]})
    with with_parts(given, method=mine, metrics={"second": brier, "first": brier}) as found:
        assert found.method == {"name": "mine", "mu": 0.5}
        assert found.run.metrics == ["first", "second"]


def test_a_model_from_python_is_called_as_in_the_source_and_cut_where_it_is_said():
    class Net(nn.Module):
        width: int = 4

        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1))))

    pair = nn.Dense(4), nn.Dense(10)
    for model, name in {
        Net: "Net",
        Net(): "Net",
        partial(Net, width=5): "Net",
        (lambda: Net()): "own",
        pair: "own",
    }.items():
        with with_parts(config(), model=model) as found:
            assert found.model["name"] == name
    with with_parts(config(), model=Net(), features="Dense_0"):
        assert MODELS["Net"] is own_model(Net(), features="Dense_0")


def test_a_part_from_python_comes_before_what_the_config_says_of_it():
    @register_model("Net")
    class Net(nn.Module):
        width: int = 4
        depth: int = 1

        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1))))

    def slow(model, train, *, step: float = 0.5, every: int = 1) -> Method:
        return fedavg(model, train)

    register_method("slow")(slow)
    said = config({"model.name": "Net", "model.depth": 2, "method.name": "slow", "method.every": 3})
    with with_parts(said, method=partial(slow, step=0.9)) as found:
        assert found.method == {"name": "slow", "step": 0.9, "every": 3}
    with with_parts(config(), method=partial(slow, step=0.9)) as found:
        assert found.method == {"name": "slow", "step": 0.9, "every": 1}
    for model, options in {
        Net: {"width": 4, "depth": 2},
        partial(Net, width=6): {"width": 6, "depth": 2},
        partial(Net, 6): {"depth": 2},
        Net(width=6): {},
    }.items():
        with with_parts(said, model=model) as found:
            assert found.model == {"name": "Net", **options}
    with pytest.raises(ConfigError, match=r"model\.width = 4 is not usable: no such key of Net; allowed: none"):
        simulate(said)  # the name is that of an instance now


def test_a_registered_method_is_known_to_configs_and_compiled_anew_when_registered_again(tmp_path, plain):
    assert register_method("mine2")(mine) is mine
    (tmp_path / "c.toml").write_text('[data]\nsource = "digits"\n[method]\nname = "mine2"\nmu = 0.1\n')
    assert load_config(tmp_path / "c.toml").method == {"name": "mine2", "mu": 0.1}
    with pytest.raises(ConfigError, match=r"method\.mu = 'a' is not usable"):
        config({"method.name": "mine2", "method.mu": "a"})
    with pytest.raises(ConfigError, match=r"method\.nu = 1 is not usable: no such key of mine2; allowed: mu"):
        config({"method.name": "mine2", "method.nu": 1})
    found = compare(config(), {"mine2": {"mu": 0.5}, "fedprox": {"method.mu": 0.5}})  # the latter is what tune finds
    assert not found.failed
    assert found.by_seed("mine2") == found.by_seed("fedprox")

    def stronger(model, train, *, mu: float = 5.0) -> Method:
        return fedprox(model, train, mu=mu)

    register_method("mine2")(stronger)
    second = simulate(config({"method.name": "mine2"}))
    same(second, simulate(config({"method.name": "fedprox", "method.mu": 5.0})))
    assert plain.history["train_loss"].tolist() != second.history["train_loss"].tolist()


def test_a_part_is_compiled_anew_when_a_number_that_it_reads_has_changed():
    """As where a cell of a notebook that sets a number is run again, and that of the function is not."""
    width, step = 4, 1.0

    def net():
        return nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(width), nn.relu, nn.Dense(10)])

    def slowly(model, train):
        base = fedavg(model, train)

        def aggregate(now, server, clients, uploads, cohort):
            mean, clients = base.aggregate(now, server, clients, uploads, cohort)
            return jax.tree.map(lambda old, new: old + step * (new - old), server, mean), clients

        return base._replace(aggregate=aggregate)

    def server(rounds):
        result = simulate(config({"training.rounds": rounds}), model=net, method=slowly)
        return jax.tree.leaves(result.state.server)

    moved = server(2)
    step = 0.0
    still, as_still = server(1), server(2)
    assert all(map(np.array_equal, still, as_still))
    assert not any(map(np.array_equal, moved, still))
    width = 5
    assert {4, 5} <= {n for leaves in (still, server(1)) for leaf in leaves for n in leaf.shape}


def test_a_result_answers_by_the_parts_that_it_was_trained_with_whatever_is_called_so_later():
    """As where a cell of a notebook is run again, or variants of one class are run in a loop."""

    class Net(nn.Module):
        activation: Callable
        width: int = 8

        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(self.activation(nn.Dense(self.width)(x.reshape(len(x), -1))))

    (x, y), wanted = digits(""), config({"method.name": "fedprox", "training.rounds": 1})
    tanh, wider, relu = (simulate(wanted, model=Net(*fields)) for fields in ((nn.tanh,), (nn.relu, 12), (nn.relu,)))
    last = register_model("Net")(Net(nn.sigmoid, 5))
    inputs = (x[:20].reshape(20, -1) / 255 - 0.5) / 0.5
    for result, activation in ((tanh, nn.tanh), (wider, nn.relu), (relu, nn.relu)):
        params = result.params()
        (dense,), head = params["extractor"].values(), params["head"]
        logits = activation(inputs @ dense["kernel"] + dense["bias"]) @ head["kernel"] + head["bias"]
        np.testing.assert_allclose(result.predict_proba(x[:20]), jax.nn.softmax(logits), atol=1e-5)
        assert result.adapt(x[:5], y[:5]).params["extractor"].keys() == params["extractor"].keys()
    assert MODELS["Net"] is own_model(last), "afterwards, the name stands for what was registered last"
    assert pickle.loads(pickle.dumps(tanh)).parts == {}


def digits(argument):
    """Digits below a number."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    chosen = bunch.target < int(argument or 10)
    return np.rint(bunch.images * (255 / 16)).astype(np.uint8)[chosen], bunch.target[chosen]


def test_a_data_set_under_a_name_takes_what_follows_the_colon():
    register_dataset("mine_digits")(digits)
    found, known = load("mine_digits:3"), load("digits")
    assert (found.name, found.classes) == ("mine_digits", 3)
    np.testing.assert_array_equal(found.images, known.images[known.labels < 3])
    np.testing.assert_array_equal(found.labels, known.labels[known.labels < 3])
    assert SOURCES["mine_digits"][1] == "Digits below a number."


def test_an_option_called_as_one_of_the_package_may_be_unset():
    @register_method("mine")
    def of_mine(model, train, *, finetune_epochs: int | None = None):
        return fedavg(model, train)

    changes = {"method.name": "mine", "finetune.epochs": 1}
    assert make_engine(config(changes), shape_of(load("digits"))).method.selects is False
    with pytest.raises(ConfigError, match=r"finetune\.epochs = 1 is not usable: 0 for mine, which fine-tunes by"):
        make_engine(config({**changes, "method.finetune_epochs": 2}), shape_of(load("digits")))


def test_a_partition_under_a_name():
    """Nobody shares a row, whatever an option is called that `pathological` has as well."""

    @register_partition("mine_blocks")
    def blocks(labels, clients, seed, size, *, overlap: int = 0):
        return [np.arange(client * 30 + overlap, client * 30 + 20) for client in range(clients)]

    dataset = load("digits")
    _, manifest = divide(config({"data.partition.kind": "mine_blocks", "data.partition.overlap": 4}), dataset)
    assert manifest["sizes"] == [16] * 5
    assert manifest["notes"] == []
    expected = [
        np.bincount(dataset.labels[np.arange(at * 30 + 4, at * 30 + 20)], minlength=10).tolist() for at in range(5)
    ]
    assert manifest["class_counts"] == expected


def test_a_partial_is_what_it_is_of_with_other_defaults():
    given = partial(mine, mu=0.3)
    register_method("mine_partial")(given)
    assert config({"method.name": "mine_partial"}).method == {"name": "mine_partial", "mu": 0.3}
    assert config({"method.name": "mine_partial", "method.mu": 0.1}).method["mu"] == 0.1
    factory = METHODS["mine_partial"]
    assert factory.__doc__ == mine.__doc__
    register_method("mine_partial")(given)
    assert METHODS["mine_partial"] is factory, "its programs need not be compiled again"

    def shifted(logits, labels, by: float):
        return logits[jnp.arange(len(labels)), labels] + by

    register_metric("mine_partial")(partial(shifted, by=2.0))
    np.testing.assert_allclose(METRICS["mine_partial"](jnp.eye(3), jnp.arange(3)), 3.0)

    register_dataset("mine_partial")(partial(digits))
    assert SOURCES["mine_partial"][1] == "Digits below a number."
    assert load("mine_partial:2").classes == 2

    def blocks(labels, clients, seed, size, *, length: int):
        return [np.arange(client * length, (client + 1) * length) for client in range(clients)]

    register_partition("mine_partial")(partial(blocks, length=20))
    _, manifest = divide(config({"data.partition.kind": "mine_partial"}), load("digits"))
    assert manifest["sizes"] == [20] * 5


def test_a_partition_of_other_sizes_than_are_asked_for_is_refused():
    """The test samples come on top: five to train on are seven, of which a quarter is to test on."""

    @register_partition("mine_sizes")
    def sizes(labels, clients, seed, size, *, known: bool):
        number = size if known and size is not None else 40
        return [np.arange(client * 40, client * 40 + number) for client in range(clients)]

    asked = {"data.partition.kind": "mine_sizes", "data.samples_per_client": 5}
    _, manifest = divide(config({**asked, "data.partition.known": True}), load("digits"))
    assert manifest["n_train"] == [5] * 5
    with pytest.raises(ConfigError, match="mine_sizes gives clients other numbers") as caught:
        divide(config({**asked, "data.partition.known": False}), load("digits"))
    assert caught.value.field == "data.samples_per_client"


BAD_ROWS = {
    "too few": (lambda clients: [[0, 1]], "a list of rows for each of the 5 clients, not 1 lists"),
    "no list": (lambda clients: 3, "a list of rows for each of the 5 clients, not int"),
    "a dict": (lambda clients: {client: [0, 1] for client in range(5)}, "for each of the 5 clients, not dict"),
    "a mask": (lambda clients: [np.ones(1797, bool)] * 5, r"not bool \(1797,\): numpy\.flatnonzero\(mask\)"),
    "floats": (lambda clients: [np.zeros(3)] * 5, r"client 0 needs row numbers \[n\], not float64 \(3,\)"),
    "none": (lambda clients: [[0], *[[]] * 4], "each client needs a row or more; leave out .*, clients 1, 2, 3, 4"),
    "twice": (lambda clients: [[0, 0, 1]] * 5, "client 0 has row 0 twice"),
    "outside": (lambda clients: [[0, 10**6]] * 5, "rows are numbered 0 to 1796, and client 0 has row 1000000"),
    "shared": (lambda clients: [[0, 1]] * 5, "two clients have row 0"),
    "shared, as a Partition": (lambda clients: Partition([np.arange(2)] * 5, ()), "two clients have row 0"),
}


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_partition_that_gives_no_rows_is_named(rows, message, monkeypatch):
    monkeypatch.setattr(programs, "_compile", lambda *_: pytest.fail("compiled"))
    register_partition("mine_rows")(lambda labels, clients, seed, size: rows(clients))
    with pytest.raises(ConfigError, match=rf"data\.partition\.kind = 'mine_rows' is not usable: .*{message}"):
        simulate(config({"data.partition.kind": "mine_rows"}))


def offered(part, group, monkeypatch):
    """Another package offers this part, as mine_theirs."""
    module = type(sys)("their_package")
    module.theirs = part
    monkeypatch.setitem(sys.modules, "their_package", module)
    point = EntryPoint("mine_theirs", "their_package:theirs", group)
    monkeypatch.setattr(
        registry.importlib.metadata, "entry_points", lambda group: [point] if group == point.group else []
    )
    registry.load_entry_points.cache_clear()


def test_another_package_offers_a_data_set(monkeypatch):
    offered(digits, "fedjax_pfl.datasets", monkeypatch)
    given = config({"data.source": "mine_theirs:3"})  # the first to name it
    assert load(given.data.source).classes == 3
    registry.load_entry_points.cache_clear()


def test_another_package_offers_a_method(monkeypatch):
    offered(mine, "fedjax_pfl.methods", monkeypatch)
    with pytest.raises(ConfigError, match="baseline = 'none' is not usable: one of the methods compared: mine_theirs"):
        compare(config(), ["mine_theirs"], baseline="none")  # the first to name it
    assert config({"method.name": "mine_theirs"}).method == {"name": "mine_theirs", "mu": 0.5}

    register_method("mine_theirs")(other_server)  # what a notebook has registered since stays
    registry.load_entry_points.cache_clear()
    registry.load_entry_points()
    assert METHODS["mine_theirs"] is other_server
    absent = EntryPoint("mine_absent", "no_such_package:mine", "fedjax_pfl.methods")
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [absent])
    registry.load_entry_points.cache_clear()
    with pytest.raises(ConfigError, match="baseline = 'none'"):
        compare(config(), ["fedavg"], baseline="none")  # for which no package is looked for
    with pytest.raises(ConfigError, match=r"entry point fedjax_pfl\.methods = 'no_such_package:mine' .*No module"):
        config({"method.name": "mine_absent"})
    registry.load_entry_points.cache_clear()


def test_what_another_package_offers_is_described_and_in_the_schema(monkeypatch):
    offered(mine, "fedjax_pfl.methods", monkeypatch)
    said = described("mine_theirs.mu")  # the first to name it, and its docstring says nothing of the option
    assert said == "mine_theirs.mu = 0.5\n  see fedjax-pfl describe mine_theirs"
    del METHODS["mine_theirs"]
    registry.load_entry_points.cache_clear()
    table = config_schema()["properties"]["method"]["properties"]
    assert "mine_theirs" in table["name"]["enum"]
    assert "mine_theirs" in table["mu"]["description"].splitlines()
    registry.load_entry_points.cache_clear()


class Color(enum.Enum):
    RED = 1


def bad_factory(model, train, something):
    return fedprox(model, train)


def other_server(model, train):
    host = fedprox(model, train)

    def aggregate(now, server, clients, uploads, cohort):
        return jax.tree.map(lambda leaf: leaf[0], uploads) | {"head": jnp.zeros(3)}, clients

    return host._replace(aggregate=aggregate)


def other_clients(model, train):
    host = fedprox(model, train)

    def aggregate(now, server, clients, uploads, cohort):
        return server, cohort.weight

    return host._replace(aggregate=aggregate)


def no_method(model, train):
    fedprox(model, train)


def untyped(model, train, *, mu=0.1):
    return fedprox(model, train, mu=mu)


def called_name(model, train, *, name: str = "fedavg"):
    return fedprox(model, train)


def called_kind(labels, clients, seed, size, *, kind: str = "iid"):
    return np.array_split(np.arange(len(labels)), clients)


def required_rule(model, train, combine, *, mu: float = 0.1):
    return fedprox(model, train, combine, mu=mu)


class Server:
    def __init__(self, model, train, *, mu: float = 0.1):
        self.method = fedprox(model, train, mu=mu)


def positional_option(model, train, beta: float = 0.5):
    return fedprox(model, train, mu=beta)


def hidden_option(model, train, *, _mu: float = 0.1):
    return fedprox(model, train, mu=_mu)


def called_model_config(*, model_config: int = 8):
    return MLP(model_config)


def of_paths(model, train, *, folder: Path = Path()):
    return fedprox(model, train)


def of_none_in_a_list(model, train, *, decay: list[float | None] = (None, 0.5)):
    return fedprox(model, train)


def of_nested_lists(model, train, *, sizes: tuple[tuple[int, Color], ...] = ()):
    return fedprox(model, train)


MISTAKES = {
    "option called as the part is": (
        lambda: register_method("mine4")(called_name),
        r"register_method = 'mine4' .*: another name for its option name, which has a meaning in a config$",
    ),
    "option called as the partition is": (
        lambda: register_partition("mine4")(called_kind),
        r"register_partition = 'mine4' .*: another name for its option kind",
    ),
    "option without a star": (
        lambda: register_method("mine4")(positional_option),
        r"register_method = 'mine4' .*: put a \* before beta: options are keyword-only$",
    ),
    "option of a partition without a star": (
        lambda: register_partition("mine4")(lambda labels, clients, seed, size, share=0.5: []),
        r"register_partition = 'mine4' .*: put a \* before share",
    ),
    "option with an underscore": (lambda: register_method("mine4")(hidden_option), r"another name for its option _mu"),
    "option of pydantic's": (
        lambda: register_model("mine4")(called_model_config),
        r"register_model = 'mine4' .*: another name for its option model_config",
    ),
    "type that TOML does not have": (
        lambda: register_method("mine4")(of_paths),
        r"register_method = 'mine4' .*: a type that a config can hold for its option folder: bool, int, ",
    ),
    "None in a list": (
        lambda: register_method("mine4")(of_none_in_a_list),
        r"decay: .* tuples of them without None",
    ),
    "type within a type": (lambda: register_method("mine4")(of_nested_lists), r"can hold for its option sizes"),
    "name of the package": (lambda: register_method("fedavg")(mine), r"register_method = 'fedavg' .* another name"),
    "model's name": (lambda: register_model("mlp")(MLP), r"register_model = 'mlp' .* the package's own model"),
    "what data from Python are called": (
        lambda: register_dataset("arrays")(digits),
        r"register_dataset = 'arrays' .* another name",
    ),
    "no name": (lambda: register_method("my method")(mine), r"a name of letters, digits and underscores"),
    "method without a name": (lambda: register_method(mine), r'as in @register_method\("mine"\)$'),
    "model without a name": (lambda: register_model(mine), r'as in @register_model\("mine"\)$'),
    "dataset without a name": (lambda: register_dataset(mine), r'as in @register_dataset\("mine"\)$'),
    "partition without a name": (lambda: register_partition(mine), r'as in @register_partition\("mine"\)$'),
    "metric without a name": (lambda: register_metric(mine), r'as in @register_metric\("mine"\)$'),
    "no function": (lambda: register_method("mine4")(3), r"register_method = 3 is not usable: a function: def mine\("),
    "a class": (
        lambda: register_method("mine4")(Server),
        r"register_method = <class .*Server'> .*: a function: def mine",
    ),
    "arguments": (lambda: register_method("mine4")(bad_factory), r"other arguments than def mine\(model, train"),
    "rule without its default": (
        lambda: register_method("mine4")(required_rule),
        r"other arguments than def mine\(model, train, combine=weighted_mean, \*, mu: float = 0\.1\) -> Method$",
    ),
    "no type": (lambda: register_method("mine4")(untyped), r"the option mu needs a type, such as mu: float = 0.1"),
    "nothing returned": (
        lambda: simulate(config(), method=no_method),
        r"method\.name = 'no_method' is not usable: a factory that returns a Method; it returns NoneType",
    ),
    "method's name": (
        lambda: simulate(config(), method="fedprox"),
        r"^method = 'fedprox' is not usable: a factory; a name goes into the config: method\.name",
    ),
    "metrics in a list": (lambda: simulate(config(), metrics=[brier]), r"metrics = .* names with functions, as in"),
    "an interruption": (lambda: simulate(config(), interrupt="never"), r"interrupt = 'never' .* \"auto\", \"raise\""),
    "metric's name": (lambda: simulate(config(), metrics={"loss": brier}), r"register_metric = 'loss' .* another name"),
    "metric of one argument": (
        lambda: simulate(config(), metrics={"mine_m": lambda logits: logits}),
        r"register_metric = 'mine_m' is not usable: it has other arguments than def mine\(logits, labels\)",
    ),
    "two values": (
        lambda: simulate(config(), metrics={"mine_m": lambda logits, labels: (labels, labels)}),
        r"run\.metrics = 'mine_m' .* with 2 arguments it must return one number for each sample, \[n\], not tuple",
    ),
    "one value for all": (
        lambda: simulate(config(), metrics={"mine_m": lambda logits, labels: jnp.mean(logits)}),
        r"run\.metrics = 'mine_m' .* one number for each sample, \[n\], not \(\)",
    ),
    "a value for each": (
        lambda: simulate(config(), metrics={"mine_m": lambda logits, labels, mask: mask}),
        r"run\.metrics = 'mine_m' .* with 3 arguments it must return one number, not \(17,\)",
    ),
    "fails": (
        lambda: simulate(config(), metrics={"mine_m": lambda logits, labels: logits @ labels}),
        r"run\.metrics = 'mine_m' is not usable: it fails on logits \[n, 10\] and labels \[n\] \(",
    ),
    "unknown": (
        lambda: simulate(config({"run.metrics": ["ece"]})),
        r"run\.metrics = 'ece' is not usable: registered ones \(.*\); register_metric adds yours",
    ),
    "features": (lambda: simulate(config(), features="Dense_0"), r"features = 'Dense_0' .* nothing without model"),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_before_anything_compiles(mistake, message, monkeypatch):
    monkeypatch.setattr(programs, "_compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ConfigError, match=message) as caught:
        mistake()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("classes", [7, 10])
def test_a_metric_of_a_value_per_class_is_refused_whatever_their_number(classes):
    with pytest.raises(ConfigError, match=rf"one number for each sample, \[n\], not \({classes},\)"):
        check_metrics({"mine_m": lambda logits, labels: jnp.mean(logits, axis=0)}, classes)


def test_features_of_a_model_without_one_extractor_are_refused_before_anything_is_written(tmp_path):
    def two(model, train):
        def personal(view, client):
            return {"models": (view, view)}

        def predict(params, x):
            return sum(model.apply(part, x) for part in params["models"])

        return fedavg(model, train)._replace(personal=personal, predict=predict)

    given = config({"run.export": ["features"], "run.out": str(tmp_path / "run")})
    with pytest.raises(
        ConfigError, match=r'run\.export = \'features\' is not usable: "predictions": the method\'s model'
    ):
        simulate(given, method=two)
    assert not list(tmp_path.iterdir())


def test_a_tuple_is_a_list_in_files_and_the_run_goes_on(tmp_path):
    """TOML and JSON have no tuples."""

    @register_model("mine_net")
    class Net(nn.Module):
        widths: Sequence[int] = (8, 4)
        scale: tuple[float, float] | None = None

        @nn.compact
        def __call__(self, x):
            x = x.reshape(len(x), -1)
            for width in self.widths:
                x = nn.relu(nn.Dense(width)(x))
            return nn.Dense(10)(x)

    @register_method("mine_tuple")
    def factory(
        model,
        train,
        *,
        mus: Annotated[tuple[float, ...], Field(min_length=1)] = (0.5,),
        grid: list[float] | None = None,
    ):
        return fedprox(model, train, mu=mus[0])

    out = tmp_path / "run"
    own = {"method.name": "mine_tuple", "method.grid": (0.5, 1)}
    given = config({"model.name": "mine_net", "model.widths": [8], **own, "run.out": str(out)})
    assert given.model == {"name": "mine_net", "widths": (8,), "scale": None}
    assert given.method == {"name": "mine_tuple", "mus": (0.5,), "grid": [0.5, 1.0]}
    (tmp_path / "c.toml").write_text(given.to_toml())
    assert load_config(tmp_path / "c.toml") == given
    assert load_config(tmp_path / "c.toml", ["model.scale=[1, 2]"]).model["scale"] == (1.0, 2.0)
    whole = simulate(given.replace("run.checkpoint_every", 1))
    assert whole.params()["extractor"]["Dense_0"]["kernel"].shape == (64, 8)
    assert Result.load(out).config == whole.config
    longer = simulate(whole.config.replace("training.rounds", 3), resume=out)
    assert longer.history["round"].tolist() == [1, 2, 3]
    for value, message in (([1.5], "valid integer"), (3, "valid tuple")):
        with pytest.raises(ConfigError, match=rf"model\.widths = .*{message}"):
            given.replace("model.widths", value)


def test_a_default_of_another_type_is_refused():
    """It would be written, and could not be read again."""

    @register_method("mine_default")
    def factory(model, train, *, mu: float = "much"):
        return fedprox(model, train)

    with pytest.raises(ConfigError, match=r"method\.mu = 'much' is not usable: input should be a valid number"):
        config({"method.name": "mine_default"})


def branching(model, train, *, mu: float = 0.5):
    return fedprox(model, train, mu=mu) if mu > 0 else fedavg(model, train)


def with_field(**fields):
    def factory(model, train):
        return fedavg(model, train)._replace(**fields)

    return factory


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (with_field(headline="POST"), r"^the method's headline = 'POST' is not usable: 'pre' or 'post'$"),
        (with_field(copies=True), r"^the method's copies = True .*: 'none' or 'concat' or 'replace'$"),
        (with_field(copies=False), r"^the method's copies = False "),
        (
            branching,
            r"^method\.name = 'branching' .*: one whose code does not need the value of a traced number \("
            r"test_registry\.py, line \d+: return fedprox\(.* else fedavg\(model, train\)\); .* Annotated\[float",
        ),
    ],
)
def test_a_factory_that_cannot_be_used_writes_nothing(method, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        simulate(config({"run.out": str(tmp_path / "run")}), method=method)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def with_setup(setup):
    def factory(model, train):
        return fedavg(model, train)._replace(setup=setup)

    return factory


def with_other(**functions):
    """FedAvg, some of whose functions return something else: name -> a function of what FedAvg's returns."""

    def factory(model, train):
        method = fedavg(model, train)
        of = method._asdict()
        return method._replace(**{name: lambda *a, n=name: functions[n](of[n](*a)) for name in functions})

    return factory


def with_update(**parts):
    """FedAvg, of whose Update some parts are others: name -> a function of the Update."""
    return with_other(local=lambda made: made._replace(**{name: parts[name](made) for name in parts}))


def with_loss(returned, masked=True):
    """FedAvg with a loss of its own, which is made of the values of each sample and the mask."""

    def factory(model, train):
        def local(now, view, client, data):
            def loss(params, batch, key):
                logits = model.apply(params, batch.x, batch.mask if masked else None)
                return returned(cross_entropies(logits, batch.y), batch.mask)

            params, info = train(now, loss, view, data)
            return Update(client, params, info)

        return fedavg(model, train)._replace(local=local)

    return factory


def branching_in_local(model, train, *, mu: float = 0.5):
    method = fedprox(model, train)

    def local(now, view, client, data):
        return method.local(now, view, client, data) if mu > 0 else None

    return method._replace(local=local)


def warming_up(function):
    """FedAvg with a function that branches on the round."""

    def factory(model, train):
        method = fedavg(model, train)

        def later(now, *arguments):
            if now.t < 1:
                return None
            return getattr(method, function)(now, *arguments)

        return method._replace(**{function: later})

    return factory


def with_lookup(values, of=lambda now, data: data.id):
    """FedAvg whose clients look up a number of their own."""

    def factory(model, train):
        method = fedavg(model, train)

        def local(now, view, client, data):
            update = method.local(now, view, client, data)
            return update._replace(diagnostics={"mine": jnp.sum(values[of(now, data)])})

        return method._replace(local=local)

    return factory


def with_inbox(sent):
    """FedAvg whose server sends each client so many numbers, in the place of the three that it starts with."""

    def factory(model, train):
        method = fedavg(model, train)

        class Client(NamedTuple):
            inbox: jax.Array

        def init(key, clients):
            return method.init(key, clients)[0], Client(jnp.zeros(3))

        def dispatch(now, server, clients, cohort):
            return jnp.zeros((len(cohort.ids), sent))

        def local(now, view, client, data):
            return method.local(now, view, client, data)._replace(client=Client(client.inbox))

        return method._replace(init=init, dispatch=dispatch, local=local)

    return factory


def rows():
    return PerClass(jnp.ones(10), jnp.ones((10, 2)))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            with_update(upload=lambda update: SentIf(jnp.array(True), rows())),
            r"parts of what the method's local returns as upload = \['SentIf', 'PerClass'\] .*, none within another",
        ),
        (
            with_other(broadcast=lambda made: {"w": made, "parts": (rows(), rows())}),
            r"the parts of what the method's broadcast returns = \['PerClass', 'PerClass'\] .*: one PerClass and one",
        ),
        (
            with_other(init=lambda made: (made[0], {"inbox": jnp.zeros(3), "w": made[0]})),
            r"the method's init: state of a client = \['inbox', 'w'\] .*: a NamedTuple with the field inbox",
        ),
        (
            with_field(dispatch=lambda now, server, clients, cohort: cohort.weight),
            r"state of a client = 'tuple' .*: a NamedTuple with the field inbox",
        ),
        (with_inbox(4), r"dispatch returns = 'float32\[\d, 4\]' .*: float32\[\d, 3\], as in the state of the clients"),
        (with_inbox(3), r"the method's clients after a round = 'PyTreeDef.*: the same tuples.*outside the factory"),
        (
            with_setup(lambda now, view, client, data: (data.class_counts, view)),
            r"the method's state of a client after setup = 'float32\[10\]' .*: no array, as from init",
        ),
        (
            with_setup(lambda now, view, client, data: (client, view["head"])),
            r"the upload of the method's setup\['bias'\] = .*: no array, as in that of local",
        ),
        (
            with_update(upload=lambda update: {"w": update.upload, "loss": update.info.loss}),
            r"the parameters that predict gets = \"KeyError\('\w+'\)\" .*: what personal makes of Update.post, or of",
        ),
        (
            with_update(upload=lambda update: (update.upload, update.info.loss)),
            r"the parameters that predict gets = \"TypeError\('tuple .*: what personal makes of Update.post, or of",
        ),
        (
            with_other(
                local=lambda update: update._replace(diagnostics={"norm": 1.0}), diagnose=lambda _: {"norm": 2.0}
            ),
            r"diagnose returns = 'norm' .*: names that local's diagnostics do not have",
        ),
        (
            with_update(diagnostics=lambda update: {"update_cosine": 1.0}),
            r"a diagnostic of the method = 'update_cosine' .*: another name",
        ),
        (branching_in_local, r"^method\.name = 'branching_in_local' .*: one whose code .* if mu > 0 else None\); "),
        (warming_up("local"), r"one whose code .*\(test_registry\.py, line \d+: if now\.t < 1:\); .*now\.t.*lax\.cond"),
        (warming_up("aggregate"), r"one whose code .*\(test_registry\.py, line \d+: if now\.t < 1:\)"),
        (
            with_lookup([0.1] * 10),
            r"one whose code .*values\[of\(now, data\)\].*data\.id.*jnp\.asarray\(values\)\[data\.id\]",
        ),
        (with_lookup(np.ones(10)), r"one whose code .*values\[of\(now, data\)\].*jnp\.asarray\(values\)\[data\.id\]"),
        (
            with_lookup(jnp.ones(10), lambda now, data: data.class_counts > 0),
            r"one whose code .*\(values\[of\(now, data\)\]\).* jnp\.where",
        ),
        (
            with_other(personal=lambda made: made["head"]["bias"][made["head"]["bias"] > 0]),
            r"one whose code .*jnp\.where",
        ),
        (
            with_other(init=lambda made: ({"mine": jax.random.key(0), "w": made[0]}, made[1])),
            r"the method's init: \.server\['mine'\] = 'key<fry>\[\]' is not usable: numbers: jax\.random\.key_data",
        ),
        (
            with_other(init=lambda made: (made[0], jnp.zeros((0, 3)))),
            r"the method's init: \.clients = 'float32\[0, 3\]' is not usable: an array with entries, or None",
        ),
        (with_other(init=lambda made: made[0]), r"init returns = 'dict' .*: a pair \(server, state of a client\)"),
        (with_other(local=lambda update: (update.upload, update.info)), "local returns = 'tuple' .*: an Update"),
        (with_other(personal=lambda made: None), "personal returns = None .*: the parameters of a client's model"),
        (with_loss(lambda *_: None), r"what the loss returns = 'None' .*: one number, \[\]: masked_mean"),
        (with_loss(lambda values, _: values), r"what the loss returns = 'an array \[10\]' is not usable: one number"),
        (with_update(info=lambda update: tuple(update.info)), r"local returns as info = 'tuple' .*: a TrainInfo\(loss"),
        (with_update(info=lambda update: update.info.loss), r"returns as info = 'float32\[\]' .*: a TrainInfo"),
        (
            with_update(info=lambda update: update.info._replace(loss=jnp.zeros(3))),
            r"local returns as info\['loss'\] = 'float32\[3\]' is not usable: one number, of shape \[\]",
        ),
        (
            with_update(post=lambda update: update.upload),
            r"returns as post = 'dict' .*: a pair \(view, client\), or None",
        ),
        (
            with_update(diagnostics=lambda update: {"v": jnp.zeros(3)}),
            r"local returns as diagnostics\['v'\] = 'float32\[3\]' .*: one number",
        ),
        (
            with_update(diagnostics=lambda update: jnp.zeros(())),
            r"as diagnostics = 'float32\[\]' .*: a dict: name -> num",
        ),
        (
            with_other(diagnose=lambda _: {"v": jnp.zeros(3)}),
            r"diagnose returns\['v'\] = 'float32\[3\]' .*: one number",
        ),
        (with_other(diagnose=lambda _: 3), r"diagnose returns = 'int32\[\]' .*: a dict: name -> number"),
        (with_other(predict=lambda made: made[:, :2]), r"predict returns = 'float32\[\d+, 2\]' .*: floats \[\d+, 10\]"),
        (with_other(predict=lambda made: made[0]), r"predict returns = 'float32\[10\]' .*: logits: floats"),
        (with_other(global_predict=lambda made: made.argmax(1)), r"global_predict returns = 'int32\[\d+\]' .*: logits"),
        (with_other(aggregate=lambda made: made[0]), r"aggregate returns = 'dict' .*: a pair \(server, clients\)"),
        (with_other(aggregate=lambda made: (*made, 1)), r"aggregate returns = 'tuple of 3' .*: a pair"),
        (with_setup(lambda now, view, client, data: view), r"setup returns = 'dict' .*: a pair \(client, upload\)"),
        (other_server, r"the method's server\['head'\]\S* after a round = .* is not usable: .*, as from init"),
        (other_clients, r"the method's clients after a round = 'float32\[\d\]' is not usable: no array, as from init"),
    ],
)
def test_a_method_that_returns_something_else_is_told_what_it_should(method, message):
    with pytest.raises(ConfigError, match=message) as caught:
        simulate(config(), method=method)
    assert "\n" not in str(caught.value)


class WithDropout(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(4)(x.reshape(len(x), -1))
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not train)(x))


class WithBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(4)(x.reshape(len(x), -1))
        return nn.Dense(10)(nn.BatchNorm(use_running_average=not train)(x))


@pytest.fixture
def laid_out(monkeypatch):
    """Does with a model and a method all that comes before a compilation."""

    class LaidOutError(Exception):
        pass

    def instead(*_):
        raise LaidOutError

    def lay_out(model, method, changes=None):
        with pytest.raises(LaidOutError):
            simulate(config(changes), model=model, method=method)

    monkeypatch.setattr(programs, "_compile", instead)
    return lay_out


@pytest.mark.parametrize("net", [WithDropout, WithBatchNorm])
def test_a_method_that_never_trains_dropout_or_batch_normalisation_is_warned_of(net, laid_out):
    without_a_mask = with_loss(masked_mean, masked=False)
    with pytest.warns(UserWarning, match=r"no loss of the method gives batch\.mask to the model"):
        laid_out(net(), without_a_mask)
    laid_out(net(), None)  # where a warning would be an error
    laid_out(None, without_a_mask)


@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_that_trains_on_padding_is_warned_of(masked, laid_out):
    """To give the mask to a model that has no use for it does not help."""
    padded = with_loss(lambda values, _: values.mean(), masked=masked)
    with pytest.warns(UserWarning, match=r'the loss of phase "local" does not depend on batch\.mask.* masked_mean'):
        laid_out(None, padded)
    laid_out(None, padded, {"training.drop_last": True})  # where a warning would be an error
    laid_out(None, with_loss(masked_mean, masked=masked))
