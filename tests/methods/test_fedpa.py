"""FedPA against rounds in NumPy, its generator's training among them, its limits, and what it exchanges."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.method import PerClass
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedpa import fedpa
from fedjax_pfl.methods.fedpa.generator import Generator, diversity
from fedjax_pfl.methods.fedpa.teaching import Evidence, GeneratorTraining
from fedjax_pfl.ops.prototypes import Prototypes
from fedjax_pfl.ops.training import phase_key
from tests.conftest import CLASSES, TRAIN_SIZES
from tests.play import KEY, SOME, Floats, N, exchanged, play, update_of
from tests.reference import (
    MLP,
    batches,
    class_means,
    client,
    client_key,
    held,
    linear,
    linear_gradient,
    now,
    sgd,
    softmax_loss,
    to_numpy,
    weighted_mean,
)

ROUNDS = 4
HYPER = {"steps": 7, "guided_steps": 5, "alpha": 2.0, "beta": 3.0, "decay": 0.8, "repulsion": 0.6}
HYPER |= {"generated": 6, "hidden": 5, "noise": 3}
HYPER |= {"generator_lr": 0.02, "generator_steps": 3, "generator_batch_size": 10}

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


class Store(NamedTuple):
    """P and which classes have one."""

    mean: np.ndarray
    valid: np.ndarray


class Generated:
    """Features of noise and labels, in training or in evaluation, and the gradient of the generator."""

    def __init__(self, g, noise, y, *, training):
        self.g, self.x = g, np.concatenate([noise, np.eye(CLASSES)[y]], axis=1)
        before = self.x @ g["hidden"]["kernel"]
        self.mean, self.var = g["norm"]["running_mean"], g["norm"]["running_var"]
        if training:
            self.mean, self.var = before.mean(axis=0), before.var(axis=0)
        self.std = np.sqrt(self.var + 1e-5)
        self.unit = (before - self.mean) / self.std
        self.hidden = np.maximum(g["norm"]["scale"] * self.unit + g["norm"]["bias"], 0)
        self.z = linear(g["feature"], self.hidden)

    def gradient(self, d):
        feature = linear_gradient(self.hidden, d)
        d = d @ self.g["feature"]["kernel"].T * (self.hidden > 0)
        norm = {"scale": np.sum(d * self.unit, axis=0), "bias": d.sum(axis=0)}
        d = d * self.g["norm"]["scale"]
        d = (d - d.mean(axis=0) - self.unit * np.mean(d * self.unit, axis=0)) / self.std
        return {"hidden": {"kernel": self.x.T @ d}, "norm": norm, "feature": feature}


class Adam:
    """PyTorch's, with weight decay in the gradient, on everything but the running statistics."""

    def __init__(self):
        self.steps, self.first, self.second = 0, None, None

    def step(self, w, gradient, lr):
        self.steps += 1
        gradient = jax.tree.map(lambda g, w: g + 0.01 * w, gradient, w)
        zeros = jax.tree.map(np.zeros_like, gradient)
        self.first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, self.first or zeros, gradient)
        self.second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, self.second or zeros, gradient)

        def moved(w, m, v):
            return w - lr * (m / (1 - 0.9**self.steps)) / (np.sqrt(v / (1 - 0.999**self.steps)) + 1e-8)

        return jax.tree.map(moved, w, self.first, self.second)


def without_statistics(g):
    return {**g, "norm": {name: g["norm"][name] for name in ("scale", "bias")}}


def diversity_gradient(noise, z, y):
    """Of exp(-mean of noise distance times feature distance), pair by pair."""
    b, k = z.shape
    mean, gradient = 0.0, np.zeros_like(z)
    for i in range(b):
        for j in range(b):
            if y[i] != y[j]:
                apart = np.mean((noise[i] - noise[j]) ** 2) / b**2
                mean += apart * np.mean(np.abs(z[i] - z[j]))
                gradient[i] -= apart * np.sign(z[i] - z[j]) / k
                gradient[j] += apart * np.sign(z[i] - z[j]) / k
    return np.exp(-mean) * gradient


class Reference:
    """Clients and server, on the pool of the federation."""

    def __init__(self, mlp, hyper, trainer):
        self.mlp, self.hyper, self.trainer, self.adam = mlp, hyper, trainer, Adam()

    def weights(self, t):
        left = self.hyper.decay**t
        return max(4e-6 * self.hyper.alpha, left * self.hyper.alpha), max(
            0.03 * self.hyper.beta, left * self.hyper.beta
        )

    def local(self, key, t, w, g, store, rows):
        """w_i, and class means and counts of what it has trained on."""
        hyper, (a, b), seen, labels = self.hyper, self.weights(t), [], []
        size, local_key = self.trainer.batch_size, phase_key(key, "local")
        in_epoch = -(-len(rows) // size)

        def step(number, positions):
            epoch = jax.random.fold_in(local_key, number // in_epoch)
            key_step = jax.random.fold_in(jax.random.split(epoch)[1], number % in_epoch)

            def gradient(w):
                batch = rows[positions]
                z, y = self.mlp.features(w, batch), self.mlp.y[batch]
                seen.append(z)
                labels.append(y)
                d = softmax_loss(linear(w["head"], z), y)[1]
                head, dz = linear_gradient(z, d), d @ w["head"]["kernel"].T
                if t > 0 and number < hyper.guided_steps:
                    key_y, key_noise = jax.random.split(key_step)
                    among = jnp.where(jnp.asarray(store.valid), 0.0, -jnp.inf)
                    drawn = np.asarray(jax.random.categorical(key_y, among, shape=(hyper.generated,)))
                    noise = np.asarray(jax.random.uniform(key_noise, (hyper.generated, hyper.noise)))
                    made = Generated(g, noise, drawn, training=False).z
                    d_made = a * hyper.generated / size * softmax_loss(linear(w["head"], made), drawn)[1]
                    d_made = d_made * store.valid[drawn][:, None]
                    head = jax.tree.map(np.add, head, linear_gradient(made, d_made))
                    dz = dz + b * 2 * (z - store.mean[y]) * store.valid[y][:, None] / z.size
                return {"extractor": self.mlp.extract_gradient(w["extractor"], batch, dz), "head": head}

            return gradient

        order = list(batches(key, len(rows), epochs=-(-hyper.steps // in_epoch), batch_size=size))[: hyper.steps]
        steps = (step(number, positions) for number, positions in enumerate(order))
        rate = self.trainer.lr * self.trainer.lr_decay**t
        w = sgd(w, steps, lr=rate, momentum=self.trainer.momentum)
        return w, *class_means(np.concatenate(seen), np.concatenate(labels), CLASSES)

    def generator(self, key, t, g, heads, counts, store):
        """The generator after a round of the server's steps."""
        hyper, b = self.hyper, self.hyper.generator_batch_size
        say = (counts + 1) / np.sum(counts + 1, axis=0)
        logits = jnp.where(jnp.asarray(counts.sum(axis=0) > 0), 0.0, -jnp.inf)
        for number in range(hyper.generator_steps):
            key_y, key_noise = jax.random.split(jax.random.fold_in(phase_key(key, "generator"), number))
            y = np.asarray(jax.random.categorical(key_y, logits, shape=(b,)))
            assert (counts.sum(axis=0)[y] > 0).all()
            noise = np.asarray(jax.random.uniform(key_noise, (b, hyper.noise)), np.float64)
            made = Generated(g, noise, y, training=True)
            d = diversity_gradient(noise, made.z, y)
            for i, phi in enumerate(heads):
                # The mean over the batch is in the gradient already.
                of_client = softmax_loss(linear(phi, made.z), y)[1] * say[i][y][:, None]
                d += self.weights(t)[0] * of_client @ phi["kernel"].T
            d -= hyper.repulsion * 2 * (made.z - store.mean[y]) * store.valid[y][:, None] / made.z.size
            moved = self.adam.step(without_statistics(g), made.gradient(d), hyper.generator_lr * 0.98**t)
            old = g["norm"]
            mean = 0.9 * old["running_mean"] + 0.1 * made.mean
            var = 0.9 * old["running_var"] + 0.1 * made.var * b / (b - 1)
            g = {**moved, "norm": {**moved["norm"], "running_mean": mean, "running_var": var}}
        return g


def test_rounds_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr=0.05, lr_decay=0.9)
    start, end, cohorts = play(fedpa(model, trainer, **HYPER), federation, who=SOME, rounds=ROUNDS)
    mlp = MLP(federation.x, federation.y)
    reference, rows = Reference(mlp, SimpleNamespace(**HYPER), trainer), [held(federation.train, i) for i in range(N)]
    w, g = to_numpy(start.state.server.params), to_numpy(start.state.server.generator.params)
    store, post = Store(np.zeros((CLASSES, 8)), np.zeros(CLASSES, bool)), {}
    for t, cohort in enumerate(cohorts):
        if not cohort:
            continue
        found = [reference.local(client_key(KEY, t, i), t, w, g, store, rows[i]) for i in cohort]
        post |= {i: w for i, (w, *_) in zip(cohort, found, strict=True)}
        counts = np.array([counts for *_, counts in found])
        key = jax.random.split(jax.random.fold_in(KEY, t), 4)[2]
        g = reference.generator(key, t, g, [w["head"] for w, *_ in found], counts, store)
        mean = sum(counts[:, None] * mean for _, mean, counts in found)
        total, old = counts.sum(axis=0), store
        new = np.where(total[:, None] > 0, mean / np.maximum(total, 1)[:, None], old.mean)
        store = Store(new, old.valid | (total > 0))
        w = weighted_mean([w for w, *_ in found], [len(rows[i]) for i in cohort])
    assert reference.adam.steps == HYPER["generator_steps"] * sum(map(bool, cohorts)) > 6
    server = end.state.server
    jax.tree.map(near, server.params, w)
    jax.tree.map(near, tuple(server.prototypes), tuple(store))
    jax.tree.map(near, server.generator.params, g)
    for i, params in post.items():
        near([float(leaf[i]) for leaf in end.post.test], mlp.scores(params, held(federation.test, i)))


def test_the_first_round_is_fedavgs(model, trainer, federation):
    """Up to the rounding of two programs, which are fused otherwise. Six steps of four of 12 samples are two epochs."""
    found, expected = (
        update_of(method, federation, 4) for method in (fedpa(model, trainer, steps=6), fedavg(model, trainer))
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7),
        (found.upload.params, found.info),
        (expected.upload, expected.info),
    )
    assert int(found.info.steps) == 6


def test_the_weights_fall_no_further_than_to_a_share(model, trainer, federation):
    """By round 200 a factor of 0.5 has left nothing but the bounds, 4e-6 and 0.03 of the first weights."""
    data = client_data(federation.x, federation.y, client(federation.train, 4))
    prototypes = PerClass(jnp.ones(CLASSES, bool), jnp.ones((CLASSES, model.dim)))

    @jax.jit
    def late(alpha, beta, decay):
        method = fedpa(model, trainer, steps=4, alpha=alpha, beta=beta, decay=decay)
        server, own = method.init(KEY, N)
        view = method.broadcast(server)._replace(prototypes=prototypes)
        return method.local(now(KEY, 200), view, own, data).upload.params

    found = late(1e6, 100.0, 0.5)
    jax.tree.map(near, found, late(4.0, 3.0, 1.0))
    for without in ((0.0, 3.0), (4.0, 0.0)):
        assert not np.allclose(found["head"]["kernel"], late(*without, 1.0)["head"]["kernel"], atol=1e-3)


@pytest.mark.parametrize("valid", [(True, False, True), (False, False, False)], ids=["two classes", "none"])
def test_no_features_are_generated_of_a_class_without_a_prototype(valid, model, trainer, federation):
    """After round 0, where nobody that took part held some class, or nobody did."""
    method, mlp = fedpa(model, trainer, **HYPER), MLP(federation.x, federation.y)
    server, own = method.init(KEY, N)
    means = np.random.default_rng(3).normal(0, 1, (CLASSES, model.dim))
    store = Store(np.where(np.array(valid)[:, None], means, 0.0), np.array(valid))
    view = method.broadcast(server)._replace(prototypes=PerClass(*map(jnp.asarray, (valid, store.mean))))
    data = client_data(federation.x, federation.y, client(federation.train, 4))
    update = jax.jit(method.local)(now(KEY, 1), view, own, data)
    start = to_numpy((view.params, view.generator))
    expected, *_ = Reference(mlp, SimpleNamespace(**HYPER), trainer).local(
        KEY, 1, *start, store, held(federation.train, 4)
    )
    jax.tree.map(near, update.upload.params, expected)


def test_unless_given_as_many_features_are_generated_as_a_batch_has_samples(model, trainer, federation):
    """By what the head is asked to classify."""
    sizes, data = set(), client_data(federation.x, federation.y, client(federation.train, 4))

    def classify(phi, z):
        sizes.add(len(z))
        return model.classify(phi, z)

    for given, expected in (({}, {trainer.batch_size}), ({"generated": 6}, {trainer.batch_size, 6})):
        sizes.clear()
        method = fedpa(model._replace(classify=classify), trainer, **given)
        server, own = jax.eval_shape(partial(method.init, clients=N), KEY)
        jax.eval_shape(method.local, now(KEY, 1), jax.eval_shape(method.broadcast, server), own, data)
        assert sizes == expected


def test_the_generator_stays_as_it_is_where_nobody_has_trained(model):
    training = GeneratorTraining(model, Generator(5, CLASSES, model.dim), 3, 4, 6, 0.1, 0.5)
    before = training.init(KEY)
    heads = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), model.init(KEY)["head"])
    prototypes = Prototypes.none(CLASSES, model.dim)

    @jax.jit
    def after(counts):
        return training(now(KEY, 2), before, Evidence(heads, counts, prototypes), 0.7)

    jax.tree.map(np.testing.assert_array_equal, after(jnp.zeros((2, CLASSES))), before)
    some = after(jnp.zeros((2, CLASSES)).at[1, 0].set(3.0))
    assert any((new != old).any() for new, old in zip(*map(jax.tree.leaves, (some.params, before.params)), strict=True))


def test_the_generator_begins_within_1_over_the_root_of_its_inputs(model):
    """As PyTorch's layers do; the hidden one reads noise and a one-hot label."""
    begun = GeneratorTraining(model, Generator(50, CLASSES, model.dim), 20, 4, 6, 0.1, 0.5).init(KEY).params
    for layer, inputs in (("hidden", 20 + CLASSES), ("feature", 50)):
        assert 0.9 < np.abs(begun[layer]["kernel"]).max() * inputs**0.5 <= 1


def test_features_of_one_class_are_as_diverse_as_can_be():
    rng = np.random.default_rng(0)
    noise, z = jnp.asarray(rng.random((6, 3)), jnp.float32), jnp.asarray(rng.normal(0, 1, (6, 4)), jnp.float32)
    both = jax.jit(jax.value_and_grad(diversity, argnums=1))
    value, gradient = both(noise, z, jnp.full(6, 2))
    assert float(value) == 1
    assert not gradient.any()
    value, gradient = both(noise, z, jnp.array([0, 0, 1, 1, 2, 2]))
    assert 0 < float(value) < 1
    assert gradient.any(axis=1).all()


def test_a_client_without_samples_changes_nothing(model, trainer, federation):
    method = fedpa(model, trainer, **HYPER)
    server, own = method.init(KEY, N)
    data = client_data(federation.x, federation.y, client(federation.train, 0))
    data = data._replace(count=jnp.int32(0), class_counts=jnp.zeros(CLASSES))
    update = jax.jit(method.local)(now(KEY, 1), method.broadcast(server), own, data)
    jax.tree.map(np.testing.assert_array_equal, update.upload.params, server.params)
    assert not any(leaf.any() for leaf in update.upload.prototypes)


def test_prototypes_and_generator_come_with_the_model_and_class_means_go_back(model, trainer, federation):
    C, K, hidden, noise = CLASSES, 8, 5, 3
    w = 16 * K + K + K * C + C
    generator = (noise + C) * hidden + 4 * hidden + hidden * K + K
    found = exchanged(fedpa(model, trainer, **HYPER), federation)
    assert found == Floats(down=w + generator + C * K + C, up=w + C * K + C, kept=0)


def test_without_a_number_of_steps_it_takes_those_of_the_epochs(model, trainer, federation):
    steps = int(update_of(fedpa(model, trainer, steps=None), federation, 4).info.steps)
    assert steps == trainer.epochs * -(-TRAIN_SIZES[4] // trainer.batch_size)
