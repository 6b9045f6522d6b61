"""Mini-batches and local training: order, masks, SGD, caching."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl.data.federated import client_data, pack
from fedjax_pfl.method import Round
from fedjax_pfl.ops.losses import cross_entropy, masked_mean
from fedjax_pfl.ops.training import LossTotals, Trainer, cache_features, permutation, phase_key, scan_batches
from tests import generator
from tests.reference import MLP, batches, held, linear, sgd, softmax_loss, to_numpy, train

KEY = generator.key(4)
T0 = jnp.zeros((), jnp.int32)
COUNTS = (0, 1, 3, 4, 9, 10)
EPOCHS, BATCH = 2, 4


def numbered(count, capacity):
    """A client whose samples are its own numbers, from 100 on; its padding points at a sample that is not its own."""
    x = 100 + jnp.arange(50, dtype=jnp.int32)
    index = jnp.where(jnp.arange(capacity) < count, jnp.arange(capacity) + 7, 0).astype(jnp.int32)
    clients = pack([np.arange(capacity)], np.zeros(50, np.int64), 1)
    clients = jax.tree.map(lambda leaf: leaf[0], clients)._replace(index=index, count=jnp.asarray(count, jnp.int32))
    return client_data(x, x, clients)


@functools.partial(jax.jit, static_argnames=("capacity", "drop_last"))
def visited(count, key=KEY, *, capacity=10, drop_last=False):
    """x, y and mask of every step, and the number of steps."""

    def step(carry, batch, key):
        log, draws, n = carry
        log = jax.tree.map(lambda log, new: log.at[n].set(new), log, tuple(batch))
        return log, draws.at[n].set(jax.random.uniform(key)), n + 1

    empty = jnp.zeros((12, BATCH), jnp.int32)
    carry = (empty, empty, jnp.zeros((12, BATCH))), jnp.zeros(12), T0
    data = numbered(count, capacity)
    return scan_batches(key, step, carry, data, epochs=EPOCHS, batch_size=BATCH, drop_last=drop_last)


@pytest.mark.parametrize("count", COUNTS)
def test_every_epoch_visits_every_sample_once(count):
    (x, y, mask), draws, steps = jax.tree.map(np.asarray, visited(count))
    per_epoch = -(-count // BATCH)
    assert steps == EPOCHS * per_epoch
    np.testing.assert_array_equal(x, y)
    orders = []
    for epoch in range(EPOCHS):
        rows = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        orders.append(x[rows][mask[rows] == 1])
        assert sorted(orders[-1]) == list(range(107, 107 + count))
        # Only the last batch is short, and its samples come first.
        assert (mask[rows].ravel() == (np.arange(per_epoch * BATCH) < count)).all()
    assert count < 4 or orders[0].tolist() != orders[1].tolist()
    assert len(np.unique(draws[:steps])) == steps


def test_the_order_is_the_one_that_the_key_rule_gives():
    (x, _, mask), _, steps = jax.tree.map(np.asarray, visited(9, phase_key(KEY, "local")))
    found = [(row[valid == 1] - 107).tolist() for row, valid in zip(x[:steps], mask, strict=False)]
    assert found == [order.tolist() for order in batches(KEY, 9, epochs=EPOCHS, batch_size=BATCH)]


@pytest.mark.parametrize("count", COUNTS)
def test_drop_last_leaves_the_short_batch_out(count):
    (x, _, mask), _, steps = jax.tree.map(np.asarray, visited(count, drop_last=True))
    assert steps == EPOCHS * (count // BATCH)
    assert (mask[:steps] == 1).all()
    (kept, _, _), _, all_steps = jax.tree.map(np.asarray, visited(count))
    per_epoch = all_steps // EPOCHS
    full = [epoch * per_epoch + batch for epoch in range(EPOCHS) for batch in range(count // BATCH)]
    np.testing.assert_array_equal(x[:steps], kept[full])


@pytest.mark.parametrize("count", COUNTS)
def test_more_capacity_changes_no_batch(count):
    (x, _, mask), draws, steps = visited(count)
    (wide_x, _, wide_mask), wide_draws, wide_steps = visited(count, capacity=33)
    np.testing.assert_array_equal(mask, wide_mask)
    np.testing.assert_array_equal(np.where(mask == 1, x, 0), np.where(mask == 1, wide_x, 0))
    np.testing.assert_array_equal(draws, wide_draws)
    assert steps == wide_steps


def test_clients_side_by_side_run_their_own_number_of_steps():
    together = jax.vmap(lambda count: visited(count))(jnp.array(COUNTS, jnp.int32))
    for i, count in enumerate(COUNTS):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda leaf, i=i: leaf[i], together), visited(count))


def test_a_client_smaller_than_a_batch_has_one_padded_batch_or_none():
    def step(carry, batch, key):
        return batch.x, batch.mask, carry[2] + 1

    start = jnp.zeros(3, jnp.int32), jnp.zeros(3), T0
    x, mask, steps = map(np.asarray, scan_batches(KEY, step, start, numbered(2, 3), epochs=1, batch_size=8))
    assert sorted(x[mask == 1]) == [107, 108]
    assert steps == 1
    # A full row is no full batch.
    full = numbered(3, 3)

    def count(n, batch, key):
        return n + 1

    assert scan_batches(KEY, count, T0, full, epochs=1, batch_size=8, drop_last=True) == 0
    assert scan_batches(KEY, count, T0, full, epochs=1, batch_size=3, drop_last=True) == 1


def test_permutations_are_uniform_with_the_padding_last():
    draw = jax.jit(jax.vmap(lambda key: permutation(key, jnp.array(4, jnp.int32), 6)))
    orders = np.asarray(draw(jax.random.split(KEY, 4000)))
    assert (np.sort(orders[:, :4]) == np.arange(4)).all()
    assert (orders[:, 4:] == [4, 5]).all()
    _, counts = np.unique(orders[:, :4], axis=0, return_counts=True)
    assert len(counts) == 24
    assert counts.min() > 4000 / 24 * 0.6


def test_phases_draw_different_batches():
    keys = [jax.random.key_data(phase_key(KEY, phase)).tolist() for phase in ("local", "finetune", "head")]
    assert len({tuple(key) for key in keys}) == 3


# --- Training against a NumPy loop on linear regression --------------------------------------------------------------

RNG = np.random.default_rng(0)
X, W, NOISE = RNG.normal(size=(30, 5)), RNG.normal(size=5), RNG.normal(size=30)
# Targets times 100 as integer labels: the pool's y is an integer.
Y = np.round(100 * (X @ W + NOISE)).astype(np.int32)
ROWS = [np.arange(3, 14), np.arange(20, 21), np.zeros(0, np.int64)]
CLIENTS = pack(ROWS, np.zeros(30, np.int64), 1)
START = {"w": np.full(5, 0.5), "b": np.array(0.25)}


def squared_error(params, batch, key):
    guess = batch.x @ params["w"] + params["b"]
    return masked_mean((guess - batch.y.astype(jnp.float32) / 100) ** 2, batch.mask)


def errors(w, rows):
    return X[rows] @ w["w"] + w["b"] - Y[rows] / 100


def gradient_at(rows):
    def gradient(w):
        d = 2 * errors(w, rows) / len(rows)
        return {"w": X[rows].T @ d, "b": d.sum()}

    return gradient


def data_of(i):
    return client_data(jnp.asarray(X, jnp.float32), jnp.asarray(Y), jax.tree.map(lambda leaf: leaf[i], CLIENTS))


def start():
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), START)


def expected_training(i, *, t=0, lr=0.05, lr_decay=1.0, epochs=3, **settings):
    orders = batches(KEY, len(ROWS[i]), epochs=epochs, batch_size=4)
    return sgd(START, [gradient_at(ROWS[i][order]) for order in orders], lr=lr * lr_decay**t, **settings)


SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.3},
    "decay over rounds": {"lr_decay": 0.5, "t": 3},
    "clipping": {"clip_norm": 0.4},
    "everything": {"momentum": 0.8, "weight_decay": 0.2, "lr_decay": 0.9, "t": 2, "clip_norm": 1.5, "lr": 0.1},
}


@jax.jit
def train_traced(i, t, numbers):
    trainer = Trainer(epochs=3, batch_size=4, **numbers)
    return trainer(Round(KEY, t), squared_error, start(), data_of(i))


def train_static(i, t, numbers):
    trainer = Trainer(epochs=3, batch_size=4, **numbers)
    return jax.jit(lambda t: trainer(Round(KEY, t), squared_error, start(), data_of(i)))(t)


@pytest.mark.parametrize("how", ["traced", "static"])
@pytest.mark.parametrize("name", SETTINGS)
def test_training_is_sgd_with_momentum_decay_and_clipping(name, how):
    settings = dict(SETTINGS[name])
    t = jnp.array(settings.get("t", 0), jnp.int32)
    numbers = {"lr": 0.05, **{k: v for k, v in settings.items() if k != "t"}}
    if how == "traced":
        off = {"lr_decay": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 1e9}
        params, info = train_traced(0, t, jax.tree.map(jnp.array, {**off, **numbers}))
    else:
        params, info = train_static(0, t, numbers)
    expected = expected_training(0, **settings)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), params, expected)
    assert int(info.steps) == 9
    if name != "plain":
        assert not np.allclose(params["w"], expected_training(0)["w"], rtol=1e-3)


def test_parts_that_one_call_trains_are_clipped_as_one():
    """As a model and what stands beside it: by the norm of both gradients together, not each by its own."""
    numbers = {"lr": 0.05, "momentum": 0.5, "clip_norm": 1.0}
    trainer = Trainer(epochs=3, batch_size=4, **numbers)
    parts = START, {"w": np.full(5, -0.25), "b": np.array(2.0)}

    def loss(parts, batch, key):
        return squared_error(parts[0], batch, key) + squared_error(parts[1], batch, key)

    begin = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), parts)
    found, _ = jax.jit(lambda parts: trainer(Round(KEY, T0), loss, parts, data_of(0)))(begin)
    gradients = [gradient_at(ROWS[0][order]) for order in batches(KEY, 11, epochs=3, batch_size=4)]
    as_one = sgd(parts, [lambda both, of=of: tuple(map(of, both)) for of in gradients], **numbers)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5), found, as_one)
    for part, together in zip(parts, as_one, strict=True):
        assert np.abs(together["w"] - sgd(part, gradients, **numbers)["w"]).max() > 0.01


def test_the_reported_loss_is_the_mean_over_samples_before_each_step():
    losses = []

    def recording(rows):
        def gradient(w):
            losses.extend(errors(w, rows) ** 2)
            return gradient_at(rows)(w)

        return gradient

    orders = batches(KEY, 11, epochs=3, batch_size=4)
    sgd(START, [recording(ROWS[0][order]) for order in orders], lr=0.05)
    _, info = train_static(0, T0, {"lr": 0.05})
    assert len(losses) == 33
    assert float(info.loss) == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_the_mean_is_over_the_samples_that_so_many_steps_have_seen(count, drop_last):
    trainer, data = Trainer(batch_size=BATCH, drop_last=drop_last), numbered(count, 10)

    def step(carry, batch, key):
        totals, total, samples = carry
        loss = jax.random.uniform(key)
        size = jnp.sum(batch.mask)
        return totals.after(loss, batch), total + size * loss, samples + size

    @jax.jit
    def both(steps):
        begin = LossTotals.none(), jnp.zeros(()), jnp.zeros(())
        totals, total, samples = trainer.over_batches(Round(KEY, T0), step, begin, data, steps=steps)
        return trainer.info(totals, data), total / jnp.maximum(samples, 1.0)

    for steps in (0, 1, 2, 3, 4, 7):
        info, expected = both(jnp.int32(steps))
        assert float(info.loss) == float(expected)
        in_epoch = count // BATCH if drop_last else -(-count // BATCH)
        assert int(info.steps) == (steps if in_epoch else 0)


def test_training_without_a_record_is_the_same_and_says_nothing_of_the_loss():
    trainer = Trainer(epochs=3, batch_size=4, lr=0.05)

    def trained(record):
        return jax.jit(lambda: trainer(Round(KEY, T0), squared_error, start(), data_of(0), record=record))()

    (params, info), (expected, recorded) = trained(False), trained(True)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), params, expected)
    assert int(info.steps) == int(recorded.steps) == 9
    assert np.isnan(info.loss)
    assert np.isfinite(recorded.loss)


def test_clients_of_one_and_of_no_samples():
    numbers = jax.tree.map(jnp.array, {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1})
    params, info = train_traced(1, T0, numbers)
    expected = expected_training(1, momentum=0.5, weight_decay=0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), params, expected)
    assert int(info.steps) == 3
    params, info = train_traced(2, T0, numbers)
    jax.tree.map(np.testing.assert_array_equal, params, start())
    assert (float(info.loss), int(info.steps)) == (0, 0)


def test_epochs_lr_and_phase_can_differ_from_the_configured_ones():
    trainer = Trainer(epochs=3, batch_size=4, lr=0.05, lr_decay=0.5)
    t = jnp.array(1, jnp.int32)

    def call():
        return trainer(Round(KEY, t), squared_error, start(), data_of(0), phase="head", epochs=1, lr=0.2)

    params, _ = jax.jit(call)()
    orders = batches(KEY, 11, epochs=1, batch_size=4, phase="head")
    expected = sgd(START, [gradient_at(ROWS[0][order]) for order in orders], lr=0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), params, expected)


@pytest.mark.parametrize("steps", [0, 2, 3, 5, 7])
@pytest.mark.parametrize("how", ["traced", "static"])
def test_a_number_of_steps_goes_through_as_many_epochs_as_it_takes(steps, how):
    """Three steps are an epoch of the first client, and one is an epoch of the second; the third has no samples."""
    trainer = Trainer(epochs=3, batch_size=4, lr=0.05, momentum=0.5)

    def call(i, steps):
        return trainer(Round(KEY, T0), squared_error, start(), data_of(i), steps=steps)

    for i in range(3):
        if how == "traced":
            params, info = jax.jit(call)(i, jnp.int32(steps))
        else:
            params, info = jax.jit(lambda i=i: call(i, steps))()
        orders = list(batches(KEY, len(ROWS[i]), epochs=7, batch_size=4))[:steps]
        expected = sgd(START, [gradient_at(ROWS[i][order]) for order in orders], lr=0.05, momentum=0.5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), params, expected)
        assert int(info.steps) == len(orders) == (steps if i < 2 else 0)


def test_steps_of_a_client_that_never_fills_a_batch_are_none():
    trainer = Trainer(batch_size=4, lr=0.05, drop_last=True)
    _, info = jax.jit(lambda: trainer(Round(KEY, T0), squared_error, start(), data_of(1), steps=3))()
    assert int(info.steps) == 0
    _, info = jax.jit(lambda: trainer(Round(KEY, T0), squared_error, start(), data_of(0), steps=3))()
    assert int(info.steps) == 3


def test_single_steps_of_the_trainers_optimiser_are_a_call_bit_for_bit():
    settings = {k: v for k, v in SETTINGS["everything"].items() if k != "t"}
    trainer = Trainer(epochs=3, batch_size=4, **settings)
    begin = {**start(), "norm": {"running_mean": jnp.full(2, 7.0)}}
    now = Round(KEY, jnp.int32(2))

    def loss(params, batch, key):
        return squared_error(params, batch, key) + 5.0 * params["norm"]["running_mean"][0]

    @jax.jit
    def by_hand():
        optimizer = trainer.optimizer(now.t, begin, lr=0.3)

        def step(carry, batch, key):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params, batch, key), state, params)
            return optax.apply_updates(params, updates), state

        return trainer.over_batches(now, step, (begin, optimizer.init(begin)), data_of(0), phase="head", steps=5)[0]

    expected, info = jax.jit(lambda: trainer(now, loss, begin, data_of(0), phase="head", steps=5, lr=0.3))()
    jax.tree.map(np.testing.assert_array_equal, by_hand(), expected)
    assert int(info.steps) == 5
    assert not np.allclose(expected["w"], START["w"], rtol=1e-2)


def test_momentum_starts_afresh_at_every_call():
    trainer = Trainer(epochs=1, batch_size=32, lr=0.05, momentum=0.9)
    call = jax.jit(lambda params: trainer(Round(KEY, T0), squared_error, params, data_of(0))[0])
    step = gradient_at(ROWS[0])
    twice = sgd(sgd(START, [step], lr=0.05, momentum=0.9), [step], lr=0.05, momentum=0.9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), call(call(start())), twice)
    carried = sgd(START, [step] * 2, lr=0.05, momentum=0.9)
    assert not np.allclose(twice["w"], carried["w"], rtol=1e-2)


def test_the_extractor_alone_is_trained_under_the_given_head(model, trainer, federation):
    data = client_data(federation.x, federation.y, jax.tree.map(lambda leaf: leaf[2], federation.train))
    params = model.init(KEY)
    decaying = replace(trainer, weight_decay=0.1)

    def body_loss(theta, batch, key):
        return cross_entropy(model.apply({"extractor": theta, "head": params["head"]}, batch.x), batch.y, batch.mask)

    theta, _ = jax.jit(lambda: decaying(Round(KEY, T0), body_loss, params["extractor"], data))()
    mlp, rows, w = MLP(federation.x, federation.y), held(federation.train, 2), to_numpy(params)

    def body_gradient(theta, rows):
        d_logits = softmax_loss(linear(w["head"], mlp.extract(theta, rows)), mlp.y[rows])[1]
        return mlp.extract_gradient(theta, rows, d_logits @ w["head"]["kernel"].T)

    expected = train(w["extractor"], body_gradient, KEY, 0, rows, decaying)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), theta, expected)


def test_running_statistics_take_their_gradient_as_it_is():
    """Whatever lr, momentum, weight decay and clipping are; and what is trained does not notice the statistics."""
    settings = SETTINGS["everything"]
    trainer = Trainer(epochs=3, batch_size=4, **{k: v for k, v in settings.items() if k != "t"})
    begin = {**start(), "norm": {"running_mean": jnp.full(2, 7.0), "running_var": jnp.full(2, 8.0)}}

    def loss(params, batch, key):
        handed_over = 5.0 * params["norm"]["running_mean"][0] - 0.25 * params["norm"]["running_var"][1]
        return squared_error(params, batch, key) + handed_over

    t = jnp.array(settings["t"], jnp.int32)
    params, info = jax.jit(lambda: trainer(Round(KEY, t), loss, begin, data_of(0)))()
    assert int(info.steps) == 9
    np.testing.assert_allclose(params["norm"]["running_mean"], [7 - 9 * 5, 7])
    np.testing.assert_allclose(params["norm"]["running_var"], [8, 8 + 9 * 0.25])
    for name, expected in expected_training(0, **settings).items():
        np.testing.assert_allclose(params[name], expected, rtol=2e-5)


# --- Training a head on cached features ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [8, 128])
def test_a_head_on_cached_features_trains_as_on_the_samples(batch_size, model, trainer, federation):
    params = model.init(KEY)

    def features(x):
        return model.features(params["extractor"], x)

    def on_cache(phi, batch, key):
        return cross_entropy(model.classify(phi, batch.x), batch.y, batch.mask)

    def on_samples(phi, batch, key):
        return cross_entropy(model.classify(phi, features(batch.x)), batch.y, batch.mask)

    def both(client):
        data = client_data(federation.x, federation.y, client)
        cached = cache_features(features, data, batch_size=batch_size)
        return (
            trainer(Round(KEY, T0), on_cache, params["head"], cached, phase="head", epochs=3),
            trainer(Round(KEY, T0), on_samples, params["head"], data, phase="head", epochs=3),
            cached,
        )

    # All sizes side by side, also a client without samples.
    clients = pack([held(federation.train, i) for i in range(7)] + [np.zeros(0, np.int64)], np.asarray(federation.y), 3)
    found, expected, cached = jax.jit(jax.vmap(both))(clients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)
    assert not np.allclose(found[0]["kernel"], params["head"]["kernel"])
    for i, n in enumerate(np.asarray(clients.count)):
        rows = np.asarray(cached.index)[i, :n]
        own = held(clients, i)
        z = np.asarray(model.features(params["extractor"], federation.x))
        np.testing.assert_allclose(np.asarray(cached.x)[i][rows], z[own], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(cached.y)[i][rows], np.asarray(federation.y)[own])


def test_gradient_ratios_leave_running_statistics_out():
    """Their "gradient" is the amount by which a pass moves them, and no direction of descent."""
    trainer = Trainer(batch_size=4, lr=0.1, diagnose=True)
    params = {"w": jnp.array([3.0, 4.0]), "norm": {"running_mean": jnp.zeros(2), "running_var": jnp.ones(2)}}

    def loss(params, batch, key):
        return jnp.sum(params["w"] ** 2) / 2 + 100.0 * jnp.sum(params["norm"]["running_mean"])

    def term(params, batch, key):
        return 2.0 * params["w"][0] - 7.0 * params["norm"]["running_var"][0]

    t = jnp.array(0, jnp.int32)
    found = jax.jit(lambda: trainer.gradient_ratios(Round(KEY, t), loss, {"mine": term}, params, data_of(0)))()
    assert found.keys() == {"gradient_ratio_mine"}
    np.testing.assert_allclose(found["gradient_ratio_mine"], 2 / 5, rtol=1e-6)
