"""What every method owes the engine, checked on every entry of METHODS with its defaults. Adding an entry is enough.

Compiling is what these checks cost, so that all of a method share two programs: one that runs chunks of clients on two
devices, and one that runs three seeds and hyperparameters side by side and their clients one by one. The ``witness`` of
``toys.py`` takes part as one more method, for the features of the contract that few methods use.
"""

import inspect
import re
import types
import typing
from dataclasses import replace
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.experiment.checkpoint import Checkpoints, Saved
from fedjax_pfl.method import Cohort, Static
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import build
from fedjax_pfl.models.projection import Projected
from fedjax_pfl.models.resnet import ResNet
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.tree import take_rows
from tests import generator
from tests.conftest import CLASSES, TRAIN_SIZES, release_programs
from tests.play import drawn
from tests.reference import at, client, held, now
from tests.toys import witness

ENTRIES = {**METHODS, "witness": witness}
N = len(TRAIN_SIZES)

KEY, OTHER_KEY = generator.key(1), generator.key(2)
EVERYONE = Participation()
SOME = Participation(0.2, 0.7, 0.4)

# Method by method: what is compiled for one is released before the next (see conftest.py).
every_method = pytest.mark.parametrize("name", METHODS, indirect=True, scope="module")
every_entry = pytest.mark.parametrize("name", ENTRIES, indirect=True, scope="module")
bitwise = chex.assert_trees_all_equal


def nearly(tree, expected, tolerance=1e-5):
    chex.assert_trees_all_close(tree, expected, rtol=tolerance, atol=tolerance)


def is_numeric(hint):
    """Whether a keyword takes a float that may be traced, possibly annotated or optional."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(map(is_numeric, typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Annotated:
        return is_numeric(hint.__origin__) and Static not in hint.__metadata__
    return hint is float


def numeric_hyperparameters(name, trainer):
    """Every float keyword of a factory, its default and another value; a learning rate of None is the local one."""
    hints = typing.get_type_hints(ENTRIES[name], include_extras=True)
    keywords = {
        k: p.default for k, p in inspect.signature(ENTRIES[name]).parameters.items() if p.kind == p.KEYWORD_ONLY
    }
    values = {k: trainer.lr if v is None and k.endswith("lr") else v for k, v in keywords.items()}
    first = {k: v for k, v in values.items() if is_numeric(hints[k]) and v is not None}
    return first, {k: 0.5 * v for k, v in first.items()}


class Program:
    """A method on the tiny federation, compiled; keeps the programs of its rounds, and counts how often it traced them.

    Attributes:
      make: numbers -> engine.
      numbers: the learning rate and the numeric hyperparameters, inputs of the program; () where they are constants.
      compiled: shapes of the arguments -> program.
    """

    def __init__(self, make, numbers, federation, everywhere):
        self.make, self.numbers, self.federation = make, numbers, federation
        self.engine = make()
        self.traces = 0
        self.compiled = {}
        jit = partial(jax.jit, in_shardings=everywhere, out_shardings=everywhere)

        def rounds(numbers, *args):
            self.traces += 1
            return make(*numbers).rounds(*args)

        self._rounds = jit(rounds)
        self._pre = jit(lambda numbers, *args: make(*numbers).pre(*args))
        self._init = jit(self.engine.init)

    def init(self, key=KEY):
        return self._init(key, self.federation)

    def compiled_init(self):
        return self._init.lower(KEY, self.federation).compile()

    def rounds(self, run, start, stop, *, evaluate=True, key=KEY, federation=None, numbers=None):
        numbers = jax.tree.map(np.float32, numbers or self.numbers)
        arguments = numbers, key, run, at(start), at(stop), np.bool_(evaluate), federation or self.federation
        shapes = str(jax.tree.map(jnp.shape, arguments))
        if shapes not in self.compiled:
            self.compiled[shapes] = self._rounds.lower(*arguments).compile()
        return self.compiled[shapes](*arguments)

    def pre(self, t, run, *, key=KEY, federation=None, numbers=None):
        numbers = jax.tree.map(np.float32, numbers or self.numbers)
        return self._pre(numbers, key, at(t), run.state, federation or self.federation)


@pytest.fixture(scope="module")
def federation(federation):
    """With validation samples, for methods that select on them."""
    return federation._replace(validation=federation.test)


@pytest.fixture(scope="module")
def name(request, program, start, four_rounds, sweep):
    """The entry that is checked; its programs are released after it (see conftest.py for why)."""
    yield request.param
    for kept in (program, start, four_rounds, sweep):
        kept.cache_clear()
    release_programs()


@pytest.fixture(scope="module")
def model_for(model, model_with_plain_maps, model_with_norm, model_with_projection):
    """name -> the model that a method is checked on: the plainest one that it can run on."""
    special = {"fedcpd": model_with_plain_maps, "pfedcspc": model_with_projection, "fedbn": model_with_norm}
    return lambda name: special.get(name, model)


@pytest.fixture(scope="module")
def program(model_for, trainer, federation, mesh):
    """(name, who, where) -> the compiled program, one for each combination.

    Those of the usual place take numbers as inputs, as a sweep does; in the others they are constants.
    """
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    places = {
        "map": Placement(),
        "vmap": Placement(chunk=N),
        "chunks": Placement(chunk=3),
        "sharded": Placement(mesh),
        "sharded chunks": Placement(mesh, 2),
    }

    @cache
    def cached(name, who=SOME, where="sharded chunks"):
        def make(lr=trainer.lr, hyper=types.MappingProxyType({})):
            return Engine(ENTRIES[name](model_for(name), replace(trainer, lr=lr), **hyper), N, who, places[where])

        inputs = trainer.lr, numeric_hyperparameters(name, trainer)[0]
        usual = where == "sharded chunks"
        return Program(make, inputs if usual else (), federation, everywhere if places[where].mesh else None)

    return cached


@pytest.fixture(scope="module")
def start(program):
    """name -> the state before round 0, with the scores of the initial models; no placement changes it."""
    return cache(lambda name, key=0: program(name).init((KEY, OTHER_KEY)[key]))


@pytest.fixture(scope="module")
def four_rounds(program, start):
    """name -> the state after rounds 0 ... 3."""
    return cache(lambda name: program(name).rounds(start(name), 0, 4))


@pytest.fixture(scope="module")
def cohorts(program):
    """Who is present in each of the first rounds under SOME, [rounds, N] bool; the engine's own draw."""
    ids, _ = drawn(program("fedavg").engine, KEY, jnp.array(TRAIN_SIZES, jnp.int32), 64)
    return (ids[:, None, :] == np.arange(N)[:, None]).any(axis=2)


@every_entry
def test_rounds_leave_structure_shapes_and_dtypes_as_they_were(name, start, four_rounds):
    chex.assert_trees_all_equal_shapes_and_dtypes(four_rounds(name), start(name))
    assert all(leaf.shape[0] == N for leaf in jax.tree.leaves(start(name).state.clients))


@every_entry
def test_everything_stays_finite_with_drop_outs(name, four_rounds):
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(four_rounds(name)))


@every_entry
def test_absent_clients_keep_their_state_and_scores_bit_for_bit(name, program, start, cohorts):
    run = start(name)
    for t in range(4):
        new = program(name).rounds(run, t, t + 1)
        absent = ~cohorts[t]
        assert absent.any()

        def rows(run, absent=absent):
            return jax.tree.map(lambda leaf: np.asarray(leaf)[absent], (run.state.clients, run.post))

        bitwise(rows(new), rows(run))
        run = new
    assert not np.array_equal(run.post.test.loss, start(name).post.test.loss)


@every_entry
def test_a_round_that_everybody_drops_out_of_did_not_happen(name, program, four_rounds, cohorts):
    before = four_rounds(name)
    t = int(np.flatnonzero(~cohorts.any(axis=1))[0])
    after = program(name).rounds(before, t, t + 1)
    bitwise((after.state, after.post), (before.state, before.post))
    assert float(after.loss) == float(before.loss) != 0
    assert int(after.traffic.up) == int(before.traffic.up)
    assert int(after.traffic.down) > int(before.traffic.down)


@pytest.mark.parametrize(
    ("name", "where"),
    [("fedavg", where) for where in ("map", "vmap", "chunks", "sharded")],
    indirect=["name"],
    scope="module",
)
def test_neither_the_placement_nor_constants_for_numbers_change_anything(name, where, program, start, four_rounds):
    """Of all other methods, the seeds side by side say as much: their clients run one by one."""
    nearly(program(name, where=where).rounds(start(name), 0, 4), four_rounds(name))


def computations_with_collectives(text):
    """Names of the computations of an HLO module that exchange anything between devices, but for the entry.

    They are divided into the bodies of the entry's own loops, and the others.
    """
    blocks = re.findall(r"^(ENTRY )?%([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    assert sum(bool(entry) for entry, _, _ in blocks) == 1
    bodies = {body for entry, _, block in blocks if entry for body in re.findall(r" while\(.*body=%([\w.-]+)", block)}
    exchange = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(-start)?\("
    found = {name: bool(re.search(exchange, block)) for _, name, block in blocks}
    inside = [name for entry, name, _ in blocks if found[name] and not entry]
    return [name for name in inside if name in bodies], [name for name in inside if name not in bodies]


# On a CPU, XLA runs a loop or a condition beside what follows it. Two devices may then meet a collective in there and
# one out here in different order, and wait for each other for ever; inside a loop it costs a lot of time, too.
@pytest.mark.parametrize(
    ("name", "who"), [*((name, SOME) for name in ENTRIES), ("fedavg", EVERYONE)], indirect=["name"], scope="module"
)
def test_devices_exchange_nothing_inside_loops_and_conditions(name, who, program, start):
    made = program(name) if who is SOME else program(name, who)  # a cache tells a default from the same value given
    made.rounds(start(name), 0, 1)
    for compiled in made.compiled.values():
        in_rounds, elsewhere = computations_with_collectives(compiled.as_text())
        assert in_rounds
        assert elsewhere == []  # what the body of the loop over rounds holds runs in the order in which it is written
    if made.engine.method.setup is not None:
        assert computations_with_collectives(made.compiled_init().as_text()) == ([], [])


@pytest.fixture(scope="module")
def wide(federation):
    """The same clients in longer index tables, filled up with rows of other clients."""
    rng = np.random.default_rng(0)

    def widen(clients):
        extra = jnp.asarray(
            rng.integers(0, len(federation.y), (len(clients.count), clients.index.shape[1] + 3)), jnp.int32
        )
        index = jnp.concatenate([clients.index, extra], axis=1)
        beyond = jnp.arange(index.shape[1]) >= clients.count[:, None]
        filler = jnp.asarray(rng.integers(0, len(federation.y), index.shape), jnp.int32)
        return clients._replace(index=jnp.where(beyond, filler, index))

    return federation._replace(train=widen(federation.train), test=widen(federation.test))


# To the bit where no sum goes over a row's padding. Of all other methods the vmapped seeds below say as much, up to
# rounding: they run on the longer tables, and the loop over seeds that they are held against does not. FedRep's cached
# features come from products of as many rows as the table is wide, which not all CPUs and versions of XLA round alike.
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedrep", "fedala", "witness"], indirect=True, scope="module")
def test_padding_of_the_index_tables_is_invisible(name, program, start, wide, four_rounds):
    run = program(name).rounds(start(name), 0, 4, federation=wide)
    if name != "fedrep":
        bitwise(run.state, four_rounds(name).state)
    nearly(run, four_rounds(name), 1e-6)
    nearly(program(name).pre(4, run, federation=wide), program(name).pre(4, run), 1e-6)


@every_entry
def test_the_same_seed_gives_the_same_run_bit_for_bit(name, program, start, four_rounds):
    bitwise(program(name).rounds(start(name), 0, 4), four_rounds(name))


@every_entry
def test_saving_and_resuming_gives_the_uninterrupted_run_bit_for_bit(name, program, start, four_rounds, tmp_path):
    half = program(name).rounds(start(name), 0, 2)
    Checkpoints(tmp_path / "checkpoints").save(half, Saved(2, [], 0.0, 0.0, {}, "", {}))
    like = jax.eval_shape(lambda run: run, half)
    del half
    loaded = Checkpoints(tmp_path / "checkpoints").run(2, like)
    bitwise(program(name).rounds(loaded, 2, 4), four_rounds(name))


@every_entry
def test_rounds_are_traced_once_whatever_their_number(name, program, start):
    run = program(name).rounds(start(name), 0, 1)
    traces = program(name).traces
    program(name).rounds(program(name).rounds(run, 1, 5, evaluate=False), 5, 7, key=OTHER_KEY)
    assert program(name).traces == traces == len(program(name).compiled)


@every_entry
def test_evaluation_never_changes_the_trajectory(name, program, start, four_rounds):
    run = start(name)
    for t in range(4):
        scores = program(name).pre(t, run)
        bitwise(program(name).pre(t, run), scores)
        run = program(name).rounds(run, t, t + 1)
    bitwise(run, four_rounds(name))
    blind = program(name).rounds(start(name), 0, 4, evaluate=False)
    bitwise((blind.state, blind.loss, blind.traffic), (run.state, run.loss, run.traffic))


@pytest.mark.parametrize("name", ["fedavg", "ditto"], indirect=True, scope="module")
def test_rounds_without_evaluation_score_nobody_where_everybody_takes_part(name, program, start):
    whole = program(name, EVERYONE)
    scored, blind = (whole.rounds(start(name), 0, 4, evaluate=evaluate) for evaluate in (True, False))
    bitwise((blind.state, blind.loss, blind.traffic), (scored.state, scored.loss, scored.traffic))
    bitwise(blind.post, start(name).post)
    assert not np.array_equal(scored.post.test.loss, start(name).post.test.loss)


@every_method
def test_the_personal_model_has_features_of_every_sample_it_is_scored_on(name, model_for, program, start, federation):
    model = model_for(name)
    engine, chosen = replace(program(name).engine, features=model.features), jnp.array([1, 4])
    found = jax.eval_shape(
        lambda run: engine.outputs(
            KEY, at(0), run.state.server, chosen, take_rows(run.state.clients, chosen), federation
        ),
        start(name),
    )
    capacity = federation.test.index.shape[1]
    assert found.logits.shape == (2, capacity, model.classes)
    assert found.features.shape == (2, capacity, model.dim)


@every_method
def test_it_trains_convolutions_normalises_over_samples_alone_and_adds_the_regulariser(name, trainer, federation):
    """Nothing is compiled to see that a method gets by with hand-written derivatives, and hands on a batch's mask.

    Nor to see that its server averages by the rule that it is given.
    """
    masks, regularised, averaged = [], [], []

    def recorded(fn):
        def call(theta, x, mask=None):
            masks.append(mask)
            return fn(theta, x, mask)

        return call

    def rule(stacked, weight):
        averaged.append(stacked)
        return weighted_mean(stacked, weight)

    def regularizer(z, mask):
        regularised.append(z)
        return jnp.sum(mask[:, None] * z**2)

    extractor = Projected(ResNet((4,), (0,), "cifar", "batch", 4, "torch"), 6, "torch")
    mean, std = jax.device_put((np.zeros(1, np.float32), np.ones(1, np.float32)))
    model = build(extractor, (4, 4, 1), CLASSES, init="torch", mean=mean, std=std)
    passes = {part: recorded(getattr(model, part)) for part in ("features", "features_and_maps", "apply")}
    projection = model.projection._replace(encode=recorded(model.projection.encode))
    model = model._replace(**passes, projection=projection, regularizer=regularizer)
    takes_a_rule = "combine" in inspect.signature(METHODS[name]).parameters
    method = METHODS[name](model, replace(trainer, epochs=1), **({"combine": rule} if takes_a_rule else {}))
    server, own = jax.eval_shape(lambda key: method.init(key, N), KEY)
    view = jax.eval_shape(method.broadcast, server)
    tables = federation.train, federation.validation

    def samples():
        train, validation = client(tables, 2)
        return client_data(federation.x, federation.y, train, at(2), validation)

    after = jax.eval_shape(lambda *args: method.local(now(KEY, 1), *args), view, own, jax.eval_shape(samples))
    chex.assert_trees_all_equal_shapes_and_dtypes(after.client, own)
    assert any(mask is not None for mask in masks)
    assert regularised or name == "feddecorr", "which puts its own in the place of the model's"

    def aggregate(server, client, upload):
        rows, uploads = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (client, upload))
        cohort = Cohort(jnp.arange(2), jnp.array([3.0, 5.0]), N, N)
        return method.aggregate(now(KEY, 1), server, rows, uploads, cohort)

    if takes_a_rule:
        jax.eval_shape(aggregate, server, after.client, after.upload)
    assert bool(averaged) == takes_a_rule


@every_method
def test_accuracy_rises_clearly(name, program, start, federation):
    point = program(name).engine.method.headline
    assert f"Headline: {point.upper()}" in METHODS[name].__doc__
    n_test = np.asarray(federation.test.count)

    def mean(scores):
        return np.asarray(scores.correct).sum() / n_test.sum()

    run = program(name).rounds(start(name), 0, 15)
    headline = (run.post if point == "post" else program(name).pre(15, run)).test
    initial = start(name).post.test
    assert mean(headline) > max(0.7, mean(initial) + 0.2)
    assert np.asarray(headline.loss).sum() < np.asarray(initial.loss).sum()


# --- Seeds and hyperparameters are one more vmap ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(program, trainer, wide, start):
    """name -> runs of three (seed, hyperparameters) pairs after two rounds, as one vmapped program.

    Clients run one by one, on one device and on longer index tables: all that must not matter either.
    """

    def play(name, key, run, hyper, lr):
        return program(name, where="map").make(lr, hyper).rounds(key, run, at(0), at(2), jax.device_put(np.True_), wide)

    keys = jnp.stack([KEY, OTHER_KEY, KEY])

    @cache
    def cached(name):
        first, second = numeric_hyperparameters(name, trainer)
        hyper = jax.tree.map(lambda a, b: np.array([a, a, b], np.float32), first, second)
        lr = np.array([trainer.lr, trainer.lr, 0.5 * trainer.lr], np.float32)
        runs = jax.tree.map(lambda *leaves: np.stack(leaves), *(start(name, key) for key in (0, 1, 0)))
        return jax.jit(jax.vmap(partial(play, name)))(keys, runs, hyper, lr)

    return cached


def one(tree, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[i], tree)


@every_method
def test_vmapped_seeds_equal_a_loop_over_seeds(name, program, start, sweep):
    for i, key in enumerate((KEY, OTHER_KEY)):
        nearly(one(sweep(name), i), program(name).rounds(start(name, i), 0, 2, key=key))


@every_method
def test_vmapped_hyperparameters_equal_a_loop_over_them(name, program, trainer, start, sweep):
    numbers = 0.5 * trainer.lr, numeric_hyperparameters(name, trainer)[1]
    nearly(one(sweep(name), 2), program(name).rounds(start(name), 0, 2, numbers=numbers))
    losses = [one(sweep(name), i).post.test.loss for i in (0, 2)]
    assert not np.allclose(*losses, rtol=1e-3)


# --- Features that few methods use, on the witness -------------------------------------------------------------------


def pixel_means(federation):
    x = np.asarray(federation.x, np.float64)
    return np.array([x[held(federation.train, i)].mean() for i in range(N)])


def test_setup_hears_from_all_clients_before_round_zero(program, start, federation):
    server, clients = start("witness").state
    assert float(server["pixel"]) == pytest.approx(np.average(pixel_means(federation), weights=TRAIN_SIZES), rel=1e-5)
    assert int(server["t"]) == -1
    assert len(np.unique(clients.draw)) == N
    np.testing.assert_array_equal(clients.view, -3)
    np.testing.assert_array_equal(clients.inbox["id"], np.arange(N))
    np.testing.assert_array_equal(clients.inbox["weight"], TRAIN_SIZES)
    nearly(program("witness", where="map").init(), start("witness"), 1e-6)


def test_every_client_gets_its_own_mail_and_the_absent_none(program, start, cohorts):
    run = start("witness")
    inbox = {k: np.full(N, -7, v.dtype) for k, v in run.state.clients.inbox.items()}
    clients = run.state.clients._replace(inbox=jax.tree.map(jnp.asarray, inbox))
    run = run._replace(state=run.state._replace(clients=clients))
    t = int(np.flatnonzero(cohorts.sum(axis=1) == 3)[0])
    for where in ("sharded chunks", "map"):
        after = program("witness", where=where).rounds(run, t, t + 1).state.clients.inbox
        np.testing.assert_array_equal(after["id"], np.where(cohorts[t], np.arange(N), -7))
        np.testing.assert_array_equal(after["weight"], np.where(cohorts[t], TRAIN_SIZES, -7))


def test_the_server_weighs_participants_by_their_samples(program, start, cohorts, federation):
    run, means = start("witness"), pixel_means(federation)
    for t in range(6):
        old, run = run, program("witness").rounds(run, t, t + 1)
        present = cohorts[t]
        expected = (
            np.average(means, weights=TRAIN_SIZES * present) if present.any() else float(old.state.server["pixel"])
        )
        assert float(run.state.server["pixel"]) == pytest.approx(expected, rel=1e-5)
        views = np.where(present, old.state.server["pixel"], old.state.clients.view)
        np.testing.assert_array_equal(run.state.clients.view, views)
    bitwise(run.state.server["secret"], start("witness").state.server["secret"])
