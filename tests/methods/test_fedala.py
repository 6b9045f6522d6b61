"""FedALA against rounds in NumPy, and its limits."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import Augmentation, client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.method import State
from fedjax_pfl.methods.fedala import Client, _sample, fedala
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.local import local
from fedjax_pfl.models.norm import is_statistic
from fedjax_pfl.ops.training import phase_key
from fedjax_pfl.ops.tree import count
from tests import generator
from tests.play import cohorts
from tests.reference import MLP, at, batches, client, client_key, held, now, to_numpy, weighted_mean

N, ROUNDS = 7, 5
KEY = generator.key(7)
SOME = Participation(0.3, 0.7, 0.2)
HYPER = {"share": 0.7, "mix_lr": 3.0, "threshold": 0.002, "most_epochs": 16}

near = partial(np.testing.assert_allclose, rtol=5e-4, atol=2e-5)


class Program:
    """The rounds of a method, compiled once for all values of its numbers."""

    def __init__(self, factory, federation):
        """``factory``: keyword arguments, all of them numbers -> method."""

        def engine(hyper):
            return Engine(factory(**hyper), N, SOME)

        def rounds(hyper, run, data):
            return engine(hyper).rounds(KEY, run, at(0), at(ROUNDS), jnp.array(True), data)

        self.federation = federation
        self._init = jax.jit(lambda hyper, data: engine(hyper).init(KEY, data))
        self._rounds = jax.jit(rounds)
        self._pre = jax.jit(lambda hyper, state, data: engine(hyper).pre(KEY, at(ROUNDS), state, data).test)

    def start(self, **hyper):
        return jax.tree.map(np.asarray, self._init(hyper, self.federation))

    def play(self, start, **hyper):
        """The run after the rounds, and the PRE scores."""
        end = self._rounds(hyper, start, self.federation)
        return jax.tree.map(np.asarray, (end, self._pre(hyper, end.state, self.federation)))


@pytest.fixture(scope="module")
def trainer(trainer):
    return replace(trainer, lr_decay=0.9)


@pytest.fixture(scope="module")
def program(model, trainer, federation):
    """The number of mixed layers -> FedALA."""
    return cache(lambda layers: Program(partial(fedala, model, trainer, mixed_layers=layers), federation))


def adapted(mlp, key, received, own, mix, visits, rows, trainer, hyper, layers):
    """The model that a client starts from, its A_i, and the epochs that these took (Algorithm 1, lines 5 to 12)."""

    def upper(w):
        return {"head": w["head"]} if layers == 1 else w

    def mixed():
        weigh = jax.tree.map(lambda a, w, own: own + (w - own) * a, mix, upper(received), own)
        return {**received, **weigh}

    draws = np.asarray(jax.random.uniform(phase_key(key, "sample"), (64,)))[: len(rows)]
    sample = rows[np.argsort(draws)][: max(1, round(hyper.share * len(rows)))]
    losses = []
    for epoch in range({0: 0, 1: hyper.most_epochs}.get(visits, 1)):
        if len(losses) > 10:
            assert abs(np.std(losses[-10:]) / hyper.threshold - 1) > 0.02, "too close to tell: take another threshold"
            if np.std(losses[-10:]) < hyper.threshold:
                break
        of_samples = []
        order = jax.random.fold_in(phase_key(key, "mix"), epoch)
        for positions in batches(order, len(sample), epochs=1, batch_size=trainer.batch_size, phase="mix"):
            batch, w = sample[positions], mixed()
            of_samples += [mlp.loss(w, batch)] * len(batch)
            mix = jax.tree.map(
                lambda a, g, w, own: np.clip(a - hyper.mix_lr * g * (w - own), 0, 1),
                mix,
                upper(mlp.gradient(w, batch)),
                upper(received),
                own,
            )
        losses.append(np.mean(of_samples))
    return mixed(), mix, len(losses)


@pytest.mark.parametrize("layers", [1, 2])
def test_rounds_and_scores_before_training_are_numpys(layers, program, model, trainer, federation):
    hyper, start = SimpleNamespace(**HYPER), program(layers).start(**HYPER)
    end, pre = program(layers).play(start, **HYPER)
    mlp, rows = MLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    server = to_numpy(start.state.server)

    def upper(w):
        return {"head": w["head"]} if layers == 1 else w

    own, mix = [upper(server)] * N, [jax.tree.map(np.ones_like, upper(server))] * N
    visits, post, epochs = np.zeros(N, int), {}, []
    for t, (cohort, _) in enumerate(cohorts(Engine(fedavg(model, trainer), N, SOME), KEY, federation, ROUNDS)):
        uploads = []
        for i in cohort:
            key = client_key(KEY, t, i)
            w, mix[i], took = adapted(mlp, key, server, own[i], mix[i], visits[i], rows[i], trainer, hyper, layers)
            epochs.append((visits[i], took))
            post[i], _ = mlp.train(w, key, t, rows[i], trainer)
            own[i], visits[i] = upper(post[i]), visits[i] + 1
            uploads.append(post[i])
        server = weighted_mean(uploads, [len(rows[i]) for i in cohort]) if cohort else server
    jax.tree.map(near, end.state.server, server)
    np.testing.assert_array_equal(end.state.clients.visits, visits)
    for i in range(N):
        found = client(end.state.clients, i)
        parts = (found.upper, own[i]), (found.mix, mix[i])
        for tree, expected in parts:
            tree = tree if layers == 2 else {"head": tree["head"]}
            jax.tree.map(near, tree, expected)
        assert all(((leaf >= 0) & (leaf <= 1)).all() for leaf in jax.tree.leaves(found.mix))
        key = client_key(KEY, ROUNDS, i)
        w, *_ = adapted(mlp, key, server, own[i], mix[i], visits[i], rows[i], trainer, hyper, layers)
        near([float(leaf[i]) for leaf in pre], mlp.scores(w, held(federation.test, i)))
        if i in post:
            near([float(leaf[i]) for leaf in end.post.test], mlp.scores(post[i], held(federation.test, i)))
    first = {took for visits, took in epochs if visits == 1}
    assert first > {11}, "some adaptations converge at once, others later or never"
    assert {took for visits, took in epochs if visits != 1} == {0, 1}
    assert min(np.min(a["head"]["kernel"]) for a in mix) < 0.5


STILL = HYPER | {"mix_lr": 0.0}


def test_weights_that_stay_at_one_are_fedavg(program, model, trainer, federation):
    start, other = program(1).start(**STILL), Program(partial(fedavg, model, trainer), federation)
    end, pre = program(1).play(start, **STILL)
    expected, expected_pre = other.play(start._replace(state=State(start.state.server, ())))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (end.state.server, end.post, pre), (expected.state.server, expected.post, expected_pre))
    jax.tree.map(np.testing.assert_array_equal, end.state.clients.mix, start.state.clients.mix)


def test_weights_that_stay_at_zero_are_local_if_all_layers_are_mixed(program, model, trainer, federation):
    start, other = program(2).start(**STILL), Program(partial(local, model, trainer), federation)
    clients = start.state.clients
    clients = clients._replace(mix=jax.tree.map(np.zeros_like, clients.mix))
    end, pre = program(2).play(start._replace(state=State(start.state.server, clients)), **STILL)
    expected, expected_pre = other.play(start._replace(state=State((), clients.upper)))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (end.state.clients.upper, pre), (expected.state.clients, expected_pre))


def test_running_statistics_are_received_as_they_are(model_with_norm, trainer, federation):
    method, view = fedala(model_with_norm, trainer, mixed_layers=3, mix_lr=3.0), model_with_norm.init(KEY)
    own = jax.tree.map(lambda leaf: leaf + 0.5, view)
    client_before = Client(own, jax.tree.map(jnp.ones_like, own), jnp.ones((), jnp.int32))
    data = client_data(federation.x, federation.y, client(federation.train, 4))
    mix = jax.jit(method.local)(now(KEY, 1), view, client_before, data).client.mix
    moved = jax.tree_util.tree_map_with_path(lambda path, a: is_statistic(path) == bool((a == 1).all()), mix)
    assert all(jax.tree.leaves(moved)), mix


def test_at_least_one_sample_is_drawn_where_there_is_one(federation):
    one = client_data(federation.x, federation.y, client(federation.train, 1))
    assert int(one.count) == 1
    drawn = jax.jit(lambda count: _sample(KEY, one._replace(count=count), 0.3).count)
    assert [int(drawn(np.int32(count))) for count in (0, 1, 5)] == [0, 1, 2]


def test_the_mixing_sees_the_images_that_are_drawn_for_the_round(federation):
    data = client_data(federation.x, federation.y, client(federation.train, 2))

    def moved(keys, x):
        return x ^ jax.vmap(lambda key: jax.random.bits(key, x.shape[1:], jnp.uint8))(keys)

    @jax.jit
    def seen(data, share):
        data = data._replace(augmentation=Augmentation(moved, KEY, anew=False))
        part, slots = _sample(KEY, data, share), jnp.arange(data.capacity)
        return part, data.take(slots, slots < data.count).x, part.take(slots, slots < part.count).x

    part, whole, images = seen(data, 0.5)
    kept = int(part.count)
    assert 1 < kept < int(data.count)
    places = [int(np.flatnonzero(data.index[: data.count] == row)[0]) for row in part.index[:kept]]
    assert places != list(range(kept))
    np.testing.assert_array_equal(images[:kept], whole[np.array(places)])


def test_the_model_goes_down_and_comes_back_and_the_mixed_layers_stay(model, trainer, federation):
    params = jax.eval_shape(model.init, KEY)
    for layers, kept in ((1, params["head"]), (2, params)):
        _, shapes = survey(Engine(fedala(model, trainer, mixed_layers=layers), N), federation)
        assert count(shapes.down) == count(shapes.up) == count(params)
        assert count(shapes.client) == 2 * count(kept) + 1
    with pytest.raises(ValueError, match="3 layers are more than the 2 of the model"):
        fedala(model, trainer, mixed_layers=3)


def test_the_loss_of_an_epoch_is_the_mean_over_samples_however_they_are_dealt(model, trainer, federation):
    """A_i hardly moves, and neither does this mean: it has converged when there are ten epochs to look back on.

    A mean over batches would go up and down with the one of the five samples that is alone in the last batch.
    """
    data = client_data(federation.x, federation.y, client(federation.train, 0))
    view = model.init(KEY)
    own = jax.tree.map(lambda leaf: -leaf, view["head"])
    before = Client({"extractor": {}, "head": own}, {"extractor": {}, "head": jax.tree.map(jnp.ones_like, own)}, at(1))
    options = {"share": 1.0, "mix_lr": 1e-4, "threshold": 1e-3}

    def mix(most):
        method = fedala(model, trainer, most_epochs=most, **options)
        return jax.jit(method.local)(now(KEY, 1), view, before, data).client.mix["head"]

    enough, more, fewer = mix(11), mix(40), mix(5)
    jax.tree.map(np.testing.assert_array_equal, more, enough)
    assert np.any(fewer["kernel"] != enough["kernel"])
