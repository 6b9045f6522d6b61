"""Own models: cut, pairs, NNX, batch normalisation, dropout, options, and what cannot be used.

Held against NumPy, Flax's own ``apply``, and the package's `mlp` under the same initial weights.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotated_types import Ge
from flax import nnx

from fedjax_pfl import Config, ConfigError, register_model, simulate
from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Round
from fedjax_pfl.methods import METHODS
from fedjax_pfl.models import MODELS, build
from fedjax_pfl.models.base import normalised
from fedjax_pfl.models.own import own_model, values_read_by
from fedjax_pfl.models.randomness import within_step
from fedjax_pfl.ops.losses import supervised
from fedjax_pfl.ops.training import Trainer
from tests.play import update_of

SHAPE, CLASSES = (4, 4, 1), 3
MEAN, STD = jnp.array([0.45]), jnp.array([0.3])
RNG = np.random.default_rng(5)
X = jnp.asarray(RNG.integers(0, 256, (6, *SHAPE)), jnp.uint8)
PIXELS = (np.asarray(X).reshape(6, 16) / 255.0 - 0.45) / 0.3


def fitted(given, features=None, **options):
    return own_model(given, features=features)(**options).fit(SHAPE, CLASSES, mean=MEAN, std=STD)


def client(samples):
    """One whose samples are the first so many, all of class 0."""
    counts = jnp.array([float(samples), 0, 0])
    return ClientData(X, jnp.zeros(6, jnp.int32), jnp.arange(samples), jnp.int32(samples), counts)


def computed(fn, *args):
    """What one program makes of the arguments, as NumPy has it."""
    return jax.tree.map(np.asarray, jax.jit(fn)(*args))


def started(model, seed=0):
    return computed(model.init, jax.random.key(seed))


def some(model):
    """Parameters that nobody need draw: random numbers are most of what there would be to compile."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: RNG.uniform(-0.5, 0.7, leaf.shape).astype(np.float32), shapes)


def dense(x, layer):
    return x @ layer["kernel"] + layer["bias"]


def relu(x):
    return np.maximum(x, 0.0)


class Three(nn.Module):
    """Three dense layers, with dropout after the second."""

    hidden: int = 8

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        x = nn.relu(nn.Dense(5)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


class Twin(nn.Module):
    """The package's mlp as a plain classifier."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(8, name="hidden_layer")(x.reshape(len(x), -1))))


class Late(nn.Module):
    """No dropout: can be cut anywhere."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(6)(x.reshape(len(x), -1)))
        x = nn.relu(nn.Dense(5)(x))
        return 2.0 * nn.Dense(CLASSES)(x)


class Flat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=True)(nn.relu(nn.Dense(7)(x.reshape(len(x), -1))))


class NNXNet(nnx.Module):
    """Layers in a list, batch normalisation, dropout."""

    def __init__(self, *, rngs: nnx.Rngs, hidden: int = 6):
        self.layers = nnx.List([nnx.Linear(16, hidden, rngs=rngs), nnx.Linear(hidden, 5, rngs=rngs)])
        self.norm = nnx.BatchNorm(hidden, momentum=0.8, epsilon=1e-3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(5, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.layers[0](x.reshape(len(x), -1))))
        return self.out(self.dropout(nnx.tanh(self.layers[1](x))))


# ---- where a model is cut


def test_a_classifier_is_cut_before_its_last_layer():
    model = fitted(Three)
    params = some(model)
    assert model.layers == ("Dense_0", "Dense_1")
    assert set(params["extractor"]) == {"Dense_0", "Dense_1"}
    assert {name: leaf.shape for name, leaf in params["head"].items()} == {"kernel": (5, CLASSES), "bias": (CLASSES,)}
    theta = params["extractor"]
    z = relu(dense(relu(dense(PIXELS, theta["Dense_0"])), theta["Dense_1"]))
    np.testing.assert_allclose(computed(model.features, theta, X), z, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(computed(model.apply, params, X), dense(z, params["head"]), rtol=1e-4, atol=1e-5)
    assert (model.dim, model.classes, model.maps, computed(model.features_and_maps, theta, X)[1]) == (
        5,
        CLASSES,
        (),
        (),
    )


def test_its_initial_weights_are_those_of_flax():
    params = started(fitted(Three))
    flax = computed(lambda key: Three().init(key, jnp.zeros((2, *SHAPE)), train=False)["params"], jax.random.key(0))
    found = {**params["extractor"], "Dense_2": params["head"]}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, flax)


@pytest.mark.parametrize(
    ("features", "of_extractor", "of_head"),
    [
        (None, ["Dense_0", "Dense_1"], ["Dense_2"]),
        ("Dense_1", ["Dense_0", "Dense_1"], ["Dense_2"]),
        ("Dense_0", ["Dense_0"], ["Dense_1", "Dense_2"]),
    ],
)
def test_a_head_that_is_no_dense_layer_is_a_tree_by_layer(features, of_extractor, of_head):
    model = fitted(Late(), features)
    params = some(model)
    assert sorted(params["extractor"]) == of_extractor
    assert sorted(params["head"]) == of_head
    theta, phi = params["extractor"], params["head"]
    z = np.tanh(dense(PIXELS, theta["Dense_0"]))
    z = relu(dense(z, theta["Dense_1"])) if len(of_extractor) == 2 else z
    np.testing.assert_allclose(computed(model.features, theta, X), z, rtol=1e-4, atol=1e-5)
    whole = computed(Late().apply, {"params": {**theta, **phi}}, np.float32(PIXELS))
    np.testing.assert_allclose(computed(model.apply, params, X), whole, rtol=1e-4, atol=1e-5)
    gradient = computed(jax.grad(lambda phi, z: jnp.sum(model.classify(phi, z) ** 2)), phi, z)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_it_is_cut_behind_the_last_call_of_the_layer_that_is_named():
    class Again(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(16, name="a")
            z = layer(nn.tanh(layer(x.reshape(len(x), -1))))
            return nn.Dense(CLASSES, name="out")(nn.Dense(5, name="b")(z))

    model = fitted(Again(), "a")
    params = some(model)
    layer = params["extractor"]["a"]
    assert (params["extractor"].keys(), params["head"].keys()) == ({"a"}, {"b", "out"})
    z = dense(np.tanh(dense(PIXELS, layer)), layer)
    np.testing.assert_allclose(computed(model.features, {"a": layer}, X), z, rtol=1e-4, atol=1e-5)


def test_a_layer_without_parameters_can_be_named_too():
    assert some(fitted(Three(), "Dropout_0"))["head"].keys() == {"kernel", "bias"}


def test_a_parameter_of_the_module_itself_goes_where_it_is_read():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            before, behind = (self.param(name, nn.initializers.ones_init(), (1,)) for name in ("before", "behind"))
            z = nn.Dense(4)(before * x.reshape(len(x), -1))
            return behind * nn.Dense(CLASSES)(z)

    params = some(fitted(Scaled()))
    assert params["extractor"].keys() == {"before", "Dense_0"}
    assert params["head"].keys() == {"behind", "Dense_1"}


class Shared(nn.Module):
    """A training pass uses a layer once more: the first one, or the head on what comes before the features."""

    more: str

    @nn.compact
    def __call__(self, x, train: bool):
        first, second, head = (nn.Dense(width, name=name) for name, width in (("a", 16), ("b", 16), ("out", CLASSES)))
        x = first(x.reshape(len(x), -1))
        x = first(x) if train and self.more == "a" else x
        early = head(x) if train and self.more == "out" else 0.0
        return head(jnp.tanh(second(x))) + early


class NNXShared(nnx.Module):
    """The head likewise, after all layers of the extractor."""

    def __init__(self, rngs):
        self.a, self.b = (nnx.Linear(16, 16, rngs=rngs) for _ in range(2))
        self.out = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x, train: bool):
        x = self.a(x.reshape(len(x), -1))
        z = nnx.tanh(self.b(x))
        return self.out(x) + self.out(z) if train else self.out(z)


def test_a_layer_of_the_extractor_may_be_used_more_often_in_training():
    model = fitted(Shared("a"))
    theta = some(model)["extractor"]
    for mask, times in ((None, 1), (jnp.ones(6), 2)):
        z = PIXELS
        for _ in range(times):
            z = dense(z, theta["a"])
        found = computed(model.features, theta, X, mask)
        np.testing.assert_allclose(found, np.tanh(dense(z, theta["b"])), rtol=1e-4, atol=1e-5)


class InSequence(nn.Module):
    """Layers that Flax names after this module, and that an ``nn.Sequential`` calls."""

    head: bool

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        layers = [nn.Dense(8), nn.relu, nn.Dense(5), nn.relu]
        if self.head:
            return nn.Sequential([*layers, nn.Dense(CLASSES)])(x)
        return nn.Dense(CLASSES)(nn.Sequential(layers)(x))


@pytest.mark.parametrize("head", [True, False])
def test_layers_within_a_sequential_are_layers(head):
    model = fitted(InSequence(head))
    params = some(model)
    assert model.layers == ("Dense_0", "Dense_1")
    theta = params["extractor"]
    z = relu(dense(relu(dense(PIXELS, theta["Dense_0"])), theta["Dense_1"]))
    np.testing.assert_allclose(computed(model.features, theta, X), z, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(computed(model.apply, params, X), dense(z, params["head"]), rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """A layer that calls a method of its own."""

    outputs: int

    def setup(self):
        self.linear = nn.Dense(self.outputs)

    def __call__(self, x):
        return self.of_bounded(jnp.tanh(x))

    def of_bounded(self, x):
        return self.linear(x)


class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Block(5)(x.reshape(len(x), -1))
        return Block(CLASSES)(x)


def test_a_layer_that_calls_a_method_of_its_own_is_cut_before_its_own_call():
    model = fitted(Blocks())
    params = some(model)
    assert model.layers == ("Block_0",)
    z = dense(np.tanh(PIXELS), params["extractor"]["Block_0"]["linear"])
    np.testing.assert_allclose(computed(model.features, params["extractor"], X), z, rtol=1e-4, atol=1e-5)
    logits = dense(np.tanh(z), params["head"]["Block_1"]["linear"])
    np.testing.assert_allclose(computed(model.classify, params["head"], z), logits, rtol=1e-4, atol=1e-5)


def test_a_pair_is_an_extractor_and_a_head():
    model = fitted((Flat(), nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(CLASSES)])))
    params = some(model)
    assert model.layers == tuple(params["extractor"]) == ("Dense_0",)
    phi = params["head"]
    z = relu(dense(PIXELS, params["extractor"]["Dense_0"]))
    logits = dense(relu(dense(z, phi["layers_0"])), phi["layers_2"])
    np.testing.assert_allclose(computed(model.apply, params, X), logits, rtol=1e-4, atol=1e-5)
    linear = some(fitted((Flat(), nn.Dense(CLASSES))))
    assert linear["head"].keys() == {"kernel", "bias"}


class Wrapped(nn.Module):
    """Layers that others call, which have parameters, too."""

    @nn.compact
    def __call__(self, x):
        x = nn.WeightNorm(nn.Dense(5))(x.reshape(len(x), -1))
        return nn.WeightNorm(nn.Dense(CLASSES))(nn.tanh(x))


@pytest.mark.parametrize("features", [None, "WeightNorm_0", "Dense_0"])
def test_a_layer_that_another_one_calls_is_on_the_same_side_of_the_cut(features):
    model = fitted(Wrapped(), features)
    params = some(model)
    assert model.layers == ("Dense_0", "WeightNorm_0")
    assert [part.keys() for part in params.values()] == [{"Dense_0", "WeightNorm_0"}, {"Dense_1", "WeightNorm_1"}]

    def normalised_dense(x, part, number):
        layer = part[f"Dense_{number}"]
        length = np.sqrt((layer["kernel"] ** 2).sum(axis=0))
        scale = part[f"WeightNorm_{number}"][f"Dense_{number}/kernel/scale"]
        return x @ (layer["kernel"] / length * scale) + layer["bias"]

    z = np.tanh(normalised_dense(PIXELS, params["extractor"], 0))
    np.testing.assert_allclose(computed(model.features, params["extractor"], X), z, rtol=1e-4, atol=1e-5)
    logits = normalised_dense(z, params["head"], 1)
    np.testing.assert_allclose(computed(model.apply, params, X), logits, rtol=1e-4, atol=1e-5)


class ByName(nn.Module):
    """Layers that are called by the names of their arguments."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(6, name="a")(inputs=x.reshape(len(x), -1))
        x = nn.BatchNorm(use_running_average=True, axis=(-1,), name="norm")(x=x)
        return nn.Dense(CLASSES, name="out")(inputs=x)


class NNXByName(nnx.Module):
    def __init__(self, rngs):
        self.a, self.norm = nnx.Linear(16, 6, rngs=rngs), nnx.BatchNorm(6, axis=(-1,), rngs=rngs)
        self.out = nnx.Linear(6, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(inputs=self.norm(x=self.a(inputs=x.reshape(len(x), -1))))


@pytest.mark.parametrize("given", [ByName(), NNXByName], ids=["linen", "nnx"])
def test_a_layer_may_be_called_by_the_names_of_its_arguments(given):
    model = fitted(given)
    assert set(model.layers) == {"a", "norm"}
    assert model.dim == 6
    params = some(model)
    norm = params["extractor"]["norm"]
    norm["running_var"] = np.abs(norm["running_var"]) + 0.1
    z = (dense(PIXELS, params["extractor"]["a"]) - norm["running_mean"]) / np.sqrt(norm["running_var"] + 1e-5)
    logits = dense(z * norm["scale"] + norm["bias"], params["head"])
    np.testing.assert_allclose(computed(model.apply, params, X), logits, rtol=1e-3, atol=1e-4)


class Asking(nnx.Module):
    """Asks what its layers are."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs), nnx.Linear(5, 4, rngs=rngs)])
        self.out = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for layer in self.layers:
            x = nnx.relu(layer(x)) if isinstance(layer, nnx.Linear) else layer(x)
        return self.out(x)


class Stack(nnx.Module):
    """Layers that `nnx.vmap` has made, and that `nnx.scan` runs one after the other."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def made(rngs):
            return nnx.Linear(5, 5, rngs=rngs)

        self.a, self.blocks, self.out = nnx.Linear(16, 5, rngs=rngs), made(rngs), nnx.Linear(5, CLASSES, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return nnx.relu(block(x))

        return self.out(run(self.a(x.reshape(len(x), -1)), self.blocks))


@pytest.mark.parametrize("given", [Asking, Stack])
def test_an_nnx_module_sees_its_layers_as_what_they_are(given):
    module = given(nnx.Rngs(0))
    model = fitted(module)
    params = started(model)
    module.eval()
    expected = module(jnp.asarray(PIXELS, jnp.float32))
    np.testing.assert_allclose(computed(model.apply, params, X), expected, rtol=1e-4, atol=1e-5)


class Unflagged(nn.Module):
    """Has no flag, and asks Flax whether it is trained."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        x = nn.BatchNorm(use_running_average=not self.is_mutable_collection("batch_stats"), name="norm")(x)
        return nn.Dense(CLASSES)(nn.Dropout(RATE, deterministic=not self.has_rng("dropout"))(x))


def test_a_linen_module_without_a_flag_may_ask_whether_it_is_trained():
    model = fitted(Unflagged())
    norm = {"running_mean": np.zeros(16), "running_var": np.ones(16), "scale": np.ones(16), "bias": np.zeros(16)}
    theta = {"norm": {name: leaf.astype(np.float32) for name, leaf in norm.items()}}
    np.testing.assert_allclose(computed(model.features, theta, X), PIXELS / np.sqrt(1 + 1e-5), rtol=1e-4, atol=1e-5)

    def trained(theta, key):
        with within_step(lambda: key):
            return model.features(theta, X, jnp.ones(6))

    found = computed(trained, theta, jax.random.key(0))
    normalised_by_batch = (PIXELS - PIXELS.mean(axis=0)) / np.sqrt(PIXELS.var(axis=0) + 1e-5)
    kept = found != 0
    assert 0 < kept.mean() < 1
    np.testing.assert_allclose(found[kept], normalised_by_batch[kept] / (1 - RATE), rtol=1e-3, atol=1e-3)


class Asking(nn.Module):
    """Takes ``has_rng`` for the answer to whether it is trained, also where it draws nothing."""

    @nn.compact
    def __call__(self, x):
        train = self.has_rng("dropout")
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x.reshape(len(x), -1))
        return nn.Dense(CLASSES)(nn.Dropout(0.0, deterministic=not train)(x))


class ReluNorm(nn.BatchNorm):
    @nn.compact
    def __call__(self, x, train):
        return nn.relu(super().__call__(x, use_running_average=not train))


class WithReluNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(CLASSES)(ReluNorm(name="norm")(x.reshape(len(x), -1), train))


NORM = {"running_mean": np.zeros(16), "running_var": np.ones(16), "scale": np.ones(16), "bias": np.zeros(16)}


@pytest.mark.parametrize(("given", "after"), [(Asking, lambda x: x), (WithReluNorm, lambda x: np.maximum(x, 0))])
def test_a_normalisation_is_trained_where_nothing_is_drawn_and_keeps_what_a_subclass_adds(given, after):
    model = fitted(given())
    theta = {"norm": {name: leaf.astype(np.float32) for name, leaf in NORM.items()}}
    np.testing.assert_allclose(
        computed(model.features, theta, X), after(PIXELS / np.sqrt(1 + 1e-5)), rtol=1e-4, atol=1e-5
    )

    def trained(theta):
        return model.features(theta, X, jnp.ones(6))

    normalised_by_batch = (PIXELS - PIXELS.mean(axis=0)) / np.sqrt(PIXELS.var(axis=0) + 1e-5)
    np.testing.assert_allclose(computed(trained, theta), after(normalised_by_batch), rtol=1e-3, atol=1e-3)
    moved = jax.grad(lambda theta: jnp.sum(trained(theta)))(theta)["norm"]["running_mean"]
    np.testing.assert_allclose(moved, -0.01 * PIXELS.mean(axis=0), rtol=1e-4, atol=1e-6)


class NNXReluNorm(nnx.BatchNorm):
    def __call__(self, x):
        return nnx.relu(super().__call__(x))


class NNXWithReluNorm(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = NNXReluNorm(16, rngs=rngs), nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x.reshape(len(x), -1)))


def test_an_nnx_normalisation_with_a_call_of_its_own_is_refused():
    message = r"^model = 'NNXWithReluNorm' is not usable: .*: norm \(NNXReluNorm\) has its own __call__"
    with pytest.raises(ConfigError, match=message):
        fitted(NNXWithReluNorm)


class InOrder(nnx.Module):
    """Goes through its layers in the order in which they were given, which is not that of the alphabet."""

    def __init__(self, rngs):
        stem, body = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.layers, self.out = nnx.Dict(stem=stem, body=body), nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for layer in self.layers.values():
            x = nnx.relu(layer(x))
        return self.out(x)


class Stacked(nnx.Module):
    """Three layers with dropout, stacked and run by a scan."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs):
            return nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(RATE, rngs=rngs))

        self.blocks, self.out = blocks(rngs), nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x, block):
            return nnx.relu(block(x))

        return self.out(through(x.reshape(len(x), -1), self.blocks))


@pytest.mark.parametrize("given", [InOrder, Stacked])
@pytest.mark.parametrize("made", [True, False], ids=["instance", "class"])
def test_layers_of_nnx_run_in_their_order_also_stacked_ones(given, made):
    module = given(nnx.Rngs(0))
    model = fitted(module if made else given)
    params = started(model)
    if not made:  # whose weights are drawn from the run's key
        params = started(fitted(module))
    module.eval()
    expected = module(jnp.asarray(PIXELS, jnp.float32))
    np.testing.assert_allclose(computed(model.apply, params, X), expected, rtol=1e-4, atol=1e-5)
    if given is Stacked:

        def trained(params, key):
            with within_step(lambda: key):
                return model.apply(params, X, jnp.ones(6))

        one, again, other = (computed(trained, params, jax.random.key(seed)) for seed in (0, 0, 1))
        np.testing.assert_array_equal(one, again)
        assert (one != other).any()


class NNXGiven(nnx.Module):
    """Dropout whose randomness comes with the call."""

    def __init__(self, rngs):
        self.a, self.dropout, self.out = (
            nnx.Linear(16, 20, rngs=rngs),
            nnx.Dropout(RATE),
            nnx.Linear(20, CLASSES, rngs=rngs),
        )

    def __call__(self, x, rngs: nnx.Rngs):
        return self.out(self.dropout(self.a(x.reshape(len(x), -1)), rngs=rngs))


def test_an_nnx_module_may_be_given_its_randomness_when_it_is_called():
    model = fitted(NNXGiven)
    assert 0 < dropped(model).mean() < 2 * RATE
    params = some(model)
    np.testing.assert_allclose(
        computed(model.apply, params, X),
        dense(dense(PIXELS, params["extractor"]["a"]), params["head"]),
        rtol=1e-4,
        atol=1e-5,
    )


class NNXDroppedLast(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(16, 6, rngs=rngs), nnx.Linear(6, CLASSES, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.out(self.hidden(x.reshape(len(x), -1))))


class NNXOneName(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.conv_1, self.out = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.conv_1(self.conv[1](self.conv[0](flat(x)))))


class NNXArray(nnx.Module):
    def __init__(self, rngs):
        self.scale, self.a = jnp.ones(16), nnx.Linear(16, 4, rngs=rngs)
        self.out = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.a(self.scale * flat(x)))


class Times(nn.Module):
    @nn.compact
    def __call__(self, x, factor):
        return factor * nn.Dense(5, name="inner")(x)


class Argued(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES, name="out")(Times(name="outer")(x.reshape(len(x), -1), 3.0))


class NNXTimes(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x, factor):
        return factor * self.inner(x)


class NNXArgued(nnx.Module):
    def __init__(self, rngs):
        self.outer, self.out = NNXTimes(rngs), nnx.Linear(5, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.outer(x.reshape(len(x), -1), 3.0))


@pytest.mark.parametrize("given", [Argued(), NNXArgued], ids=["linen", "nnx"])
def test_a_layer_may_be_called_with_more_than_x(given):
    model = fitted(given)
    theta = some(model)["extractor"]
    z = 3 * dense(PIXELS, theta["outer"]["inner"])
    np.testing.assert_allclose(computed(model.features, theta, X), z, rtol=1e-4, atol=1e-5)


def test_parameters_that_say_how_to_be_sharded_are_arrays_like_all_others():
    boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "wide"))
    model = fitted(net(lambda self, x: nn.Dense(CLASSES)(nn.Dense(4, kernel_init=boxed)(flat(x)))))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert shapes["extractor"]["Dense_1"]["kernel"].shape == (16, 4)


def test_a_module_of_the_packages_contract_stays_what_it_is():
    extractor = MODELS["mlp"](hidden=4)
    assert own_model(extractor)() is extractor


def test_tokens_are_read_as_they_are():
    class Reader(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(CLASSES)(nn.Embed(9, 4)(x).mean(axis=1))

    model = own_model(Reader())().fit((5,), CLASSES, text=True)
    params, x = some(model), jnp.asarray(RNG.integers(0, 9, (3, 5)), jnp.uint8)
    z = params["extractor"]["Embed_0"]["embedding"][x].mean(axis=1)
    np.testing.assert_allclose(computed(model.apply, params, x), dense(z, params["head"]), rtol=1e-5)


def test_pixels_are_scaled_and_other_numbers_left_alone():
    floats = jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32)
    np.testing.assert_array_equal(normalised(floats, mean=MEAN, std=STD), floats)
    np.testing.assert_allclose(normalised(X, mean=MEAN, std=STD).reshape(6, 16), PIXELS, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(normalised(X, mean=None, std=None), X)


# ---- batch normalisation


class Normed(nn.Module):
    frozen: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        x = x.reshape(len(x), 4, 4)
        x = nn.BatchNorm(use_running_average=self.frozen or not train, momentum=0.8, epsilon=1e-3)(x)
        z = nn.relu(nn.Dense(5)(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES)(z)


MASK = jnp.array([1.0, 1, 1, 1, 0, 0])


@pytest.fixture(scope="module")
def normed():
    """The model, parameters with other statistics than the first ones, and the normalised maps [6, 4, 4]."""
    model = fitted(Normed())
    params = some(model)
    assert params["extractor"]["BatchNorm_0"].keys() == {"scale", "bias", "running_mean", "running_var"}
    params["extractor"]["BatchNorm_0"] = {
        name: RNG.uniform(0.5, 2.0, 4).astype(np.float32) for name in ("scale", "bias", "running_mean", "running_var")
    }
    return model, params


def expected(params, mean, var):
    norm = params["extractor"]["BatchNorm_0"]
    x = (PIXELS.reshape(6, 4, 4) - mean) / np.sqrt(var + 1e-3) * norm["scale"] + norm["bias"]
    return relu(dense(x.reshape(6, 16), params["extractor"]["Dense_0"]))


def test_evaluation_uses_the_running_statistics(normed):
    model, params = normed
    norm = params["extractor"]["BatchNorm_0"]
    z = expected(params, norm["running_mean"], norm["running_var"])
    np.testing.assert_allclose(computed(model.features, params["extractor"], X), z, rtol=1e-4, atol=1e-5)


def test_a_training_pass_uses_those_of_the_batch_without_its_padding(normed):
    model, params = normed
    samples = PIXELS.reshape(6, 4, 4)[:4].reshape(16, 4)
    z = expected(params, samples.mean(0), samples.var(0))
    found = computed(model.features, params["extractor"], X, MASK)
    np.testing.assert_allclose(found[:4], z[:4], rtol=1e-4, atol=1e-5)


def moved(model, params):
    gradient = computed(jax.grad(lambda theta: jnp.sum(model.features(theta, X, MASK))), params["extractor"])
    gradient = gradient["BatchNorm_0"]
    norm = params["extractor"]["BatchNorm_0"]
    return {name: norm[name] - gradient[name] for name in ("running_mean", "running_var")}


def test_and_moves_the_running_statistics_with_the_modules_momentum(normed):
    model, params = normed
    samples, norm = PIXELS.reshape(6, 4, 4)[:4].reshape(16, 4), params["extractor"]["BatchNorm_0"]
    after = moved(model, params)
    mean = 0.8 * norm["running_mean"] + 0.2 * samples.mean(0)
    np.testing.assert_allclose(after["running_mean"], mean, rtol=1e-4, atol=1e-6)
    var = 0.8 * norm["running_var"] + 0.2 * samples.var(0, ddof=1)
    np.testing.assert_allclose(after["running_var"], var, rtol=1e-4)


def test_unless_the_module_is_frozen(normed):
    _, params = normed
    model, norm = fitted(Normed(frozen=True)), params["extractor"]["BatchNorm_0"]
    np.testing.assert_array_equal(moved(model, params)["running_mean"], norm["running_mean"])
    z = expected(params, norm["running_mean"], norm["running_var"])
    np.testing.assert_allclose(computed(model.features, params["extractor"], X, MASK), z, rtol=1e-4, atol=1e-5)


def test_a_flag_is_what_its_name_says():
    told = []

    def call(self, x, train, training, is_train, is_training, deterministic, eval, inference, use_running_average):
        told.append((train, training, is_train, is_training, deterministic, eval, inference, use_running_average))
        return nn.Dense(CLASSES)(nn.Dense(4)(flat(x)))

    model = fitted(net(call))
    theta = jax.eval_shape(model.init, jax.random.key(0))["extractor"]
    for mask, expected in ((MASK, (True,) * 4 + (False,) * 4), (None, (False,) * 4 + (True,) * 4)):
        jax.eval_shape(model.features, theta, X, mask)
        assert told[-1] == expected


class Bare(nn.Module):
    """Batch normalisation without scale and bias, over the last axis by its number, in half precision."""

    @nn.compact
    def __call__(self, x, train: bool):
        norm = nn.BatchNorm(not train, axis=1, use_scale=False, use_bias=False, dtype=jnp.bfloat16, name="norm")
        return nn.Dense(CLASSES, dtype=jnp.float32)(norm(x.reshape(len(x), -1)))


class NNXBare(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, axis=1, use_scale=False, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.out = nnx.Linear(16, CLASSES, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x.reshape(len(x), -1)))


@pytest.mark.parametrize("given", [Bare(), NNXBare], ids=["linen", "nnx"])
def test_a_norm_may_have_neither_scale_nor_bias_and_half_precision(given):
    model = fitted(given)
    assert some(model)["extractor"]["norm"].keys() == {"running_mean", "running_var"}
    mean, var = np.float32(RNG.uniform(-1, 1, 16)), np.float32(RNG.uniform(0.5, 2, 16))
    found = computed(model.features, {"norm": {"running_mean": mean, "running_var": var}}, X)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(found), (PIXELS - mean) / np.sqrt(var + 1e-5), rtol=1e-2, atol=1e-2)


class Told(nn.Module):
    """`Normed` with Flax's own name of the flag."""

    @nn.compact
    def __call__(self, x, use_running_average: bool = True):
        x = nn.BatchNorm(momentum=0.8, epsilon=1e-3)(x.reshape(len(x), 4, 4), use_running_average=use_running_average)
        z = nn.relu(nn.Dense(5)(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES)(z)


def test_the_flag_of_batch_normalisation_itself_is_one(normed):
    model, params = normed
    for name, statistic in moved(model, params).items():
        np.testing.assert_array_equal(moved(fitted(Told()), params)[name], statistic)


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, momentum=0.8, epsilon=1e-3)(x)


@pytest.mark.parametrize("block", [nn.remat(Norm), nn.jit(Norm)], ids=["remat", "jit"])
def test_each_pass_has_its_own_statistics_in_a_transformed_block(block, normed):
    """Flax keeps what ``nn.jit`` has traced: of evaluation, or with another mask."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = block(name="block")(x.reshape(len(x), 4, 4))
            z = nn.relu(nn.Dense(5)(x.reshape(len(x), -1)))
            return nn.Dense(CLASSES)(z)

    model, (_, params) = fitted(Net()), normed
    layers = params["extractor"]
    theta = {"block": {"BatchNorm_0": layers["BatchNorm_0"]}, "Dense_0": layers["Dense_0"]}
    check_passes(model, theta, layers["BatchNorm_0"], layers["Dense_0"])


def check_passes(model, theta, norm, layer):
    """Evaluation and two training passes in one program, against NumPy."""
    masks = MASK, MASK.at[3].set(0)
    found = computed(lambda theta: [model.features(theta, X, mask) for mask in (None, *masks)], theta)
    of = [PIXELS.reshape(6, 4, 4)[: int(mask.sum())].reshape(-1, 4) for mask in masks]
    statistics = [(norm["running_mean"], norm["running_var"]), *((x.mean(0), x.var(0)) for x in of)]
    params = {"extractor": {"BatchNorm_0": norm, "Dense_0": layer}}
    for z, (mean, var) in zip(found, statistics, strict=True):
        np.testing.assert_allclose(z[:3], expected(params, mean, var)[:3], rtol=1e-4, atol=1e-5)


# ---- dropout

UNITS, RATE = 400, 0.25


class Dropping(nn.Module):
    """Features that are 1 or, where they are dropped, 0; the head starts at zero."""

    @nn.compact
    def __call__(self, x, *, deterministic: bool):
        zeros, ones = nn.initializers.zeros_init(), nn.initializers.ones_init()
        x = nn.Dense(UNITS, kernel_init=zeros, bias_init=ones)(x.reshape(len(x), -1))
        return nn.Dense(CLASSES, kernel_init=zeros)(nn.Dropout(RATE)(x, deterministic=deterministic))


class NNXDropping(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        zeros, ones = nnx.initializers.zeros_init(), nnx.initializers.ones_init()
        self.wide = nnx.Linear(16, UNITS, kernel_init=zeros, bias_init=ones, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)
        self.head = nnx.Linear(UNITS, CLASSES, kernel_init=zeros, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.wide(x.reshape(len(x), -1))))


class NNXTerse(nnx.Module):
    """Its first argument is not called self."""

    def __init__(net, rngs):  # noqa: N805  # as some write it
        net.inner, net.out = nnx.Linear(16, 4, rngs=rngs), nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(net, x):  # noqa: N805
        return net.out(nnx.relu(net.inner(x.reshape(len(x), -1))))


@pytest.fixture(scope="module", params=[Dropping(), NNXDropping], ids=["linen", "nnx"])
def dropping(request):
    """The model, its parameters, and (client, round) -> the head's gradient in each of two steps of one sample."""
    model = fitted(request.param)
    params = started(model)
    data = client(2)
    train = Trainer(batch_size=1)

    @jax.jit
    def gradients(client, t):
        def step(carry, batch, key):
            found, number = carry
            gradient = jax.grad(supervised, argnums=1)(model, params, batch)["head"]["kernel"]
            return found.at[number].set(gradient), number + 1

        now = Round(jax.random.fold_in(jax.random.key(1), client), t)
        return train.over_batches(now, step, (jnp.zeros((2, UNITS, CLASSES)), 0), data)[0]

    return model, params, gradients


def test_a_step_drops_units_at_the_rate_and_scales_the_others(dropping):
    _, _, gradients = dropping
    first, second = np.asarray(gradients(0, 0))
    # Softmax of zero logits: a third each, the label is 0; a kept unit is worth 1 / (1 - rate).
    kept = np.array([-2, 1, 1]) / 3 / (1 - RATE)
    for gradient in (first, second):
        zero = ~gradient.any(axis=1)
        np.testing.assert_allclose(gradient[~zero], np.tile(kept, ((~zero).sum(), 1)), rtol=1e-5)
        assert abs(zero.mean() - RATE) < 4 * np.sqrt(RATE * (1 - RATE) / UNITS)
    assert (first.any(axis=1) != second.any(axis=1)).sum() > UNITS / 5


def test_clients_draw_their_own_and_the_same_seed_the_same(dropping):
    _, _, gradients = dropping
    mine, again, yours = (np.asarray(gradients(client, 0)) for client in (0, 0, 1))
    np.testing.assert_array_equal(mine, again)
    assert (mine.any(axis=2) != yours.any(axis=2)).sum() > 2 * UNITS / 5


def test_evaluation_drops_nothing(dropping):
    model, params, _ = dropping
    np.testing.assert_array_equal(computed(model.features, params["extractor"], X), np.ones((6, UNITS)))


def test_a_training_pass_outside_of_a_step_is_refused(dropping):
    model, params, _ = dropping
    with pytest.raises(ValueError, match=r"^a training pass of a model with dropout needs a step: train\(\.\.\.\)"):
        computed(model.features, params["extractor"], X, MASK)


class NNXTwice(nnx.Module):
    """The same features twice, each with its own dropout."""

    def __init__(self, rngs):
        self.wide, self.out = nnx.Linear(16, 20, rngs=rngs), nnx.Linear(40, CLASSES, rngs=rngs)
        self.first, self.second = (nnx.Dropout(RATE, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        z = self.wide(x.reshape(len(x), -1))
        return self.out(jnp.concatenate([self.first(z), self.second(z)], axis=1))


def dropped(model):
    """Which features a training pass drops, in a step of its own."""

    def features(theta, key):
        with within_step(lambda: key):
            return model.features(theta, X, MASK)

    return computed(features, some(model)["extractor"], jax.random.key(0)) == 0


def test_each_dropout_of_nnx_draws_its_own_units():
    first, second = np.split(dropped(fitted(NNXTwice)), 2, axis=1)
    assert first.any()
    assert (first != second).mean() > RATE / 2


class Noisy(nn.Module):
    """Dropout that asks for randomness under a name of its own."""

    @nn.compact
    def __call__(self, x, train: bool):
        z = nn.Dense(20)(x.reshape(len(x), -1))
        return nn.Dense(CLASSES)(nn.Dropout(RATE, rng_collection="noise", deterministic=not train)(z))


def test_randomness_may_have_any_name():
    assert 0 < dropped(fitted(Noisy())).mean() < 2 * RATE


# ---- NNX


@pytest.fixture(scope="module")
def nnx_model():
    model = fitted(NNXNet)
    return model, started(model)


def test_an_nnx_module_is_cut_at_an_attribute(nnx_model):
    model, params = nnx_model
    assert model.layers == ("layers_0", "norm", "layers_1")
    assert params["head"].keys() == {"kernel", "bias"}
    theta = params["extractor"]
    assert theta.keys() == {"layers_0", "norm", "layers_1"}
    assert theta["norm"].keys() == {"scale", "bias", "running_mean", "running_var"}
    z = np.tanh(dense(relu(dense(PIXELS, theta["layers_0"]) / np.sqrt(1.0 + 1e-3)), theta["layers_1"]))
    np.testing.assert_allclose(computed(model.features, theta, X), z, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(computed(model.apply, params, X), dense(z, params["head"]), rtol=1e-4, atol=1e-5)


def test_its_head_can_be_a_tree_too():
    class Plain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.a, self.b = nnx.Linear(16, 6, rngs=rngs), nnx.Linear(6, 5, rngs=rngs)
            self.c = nnx.Linear(5, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.c(nnx.relu(self.b(nnx.tanh(self.a(x.reshape(len(x), -1))))))

    model = fitted(Plain, "a")
    params = some(model)
    theta, phi = params["extractor"], params["head"]
    assert (theta.keys(), phi.keys()) == ({"a"}, {"b", "c"})
    logits = dense(relu(dense(np.tanh(dense(PIXELS, theta["a"])), phi["b"])), phi["c"])
    np.testing.assert_allclose(computed(model.apply, params, X), logits, rtol=1e-4, atol=1e-5)


def test_an_nnx_class_may_call_itself_anything():
    assert fitted(NNXTerse).dim == 4


def test_its_statistics_move_as_those_of_linen(nnx_model):
    model, params = nnx_model
    theta = params["extractor"]
    data = client(4)

    def loss(theta, batch, key):
        return jnp.sum(model.features(theta, batch.x, batch.mask))

    trained, _ = jax.jit(
        lambda theta: Trainer(batch_size=6)(Round(jax.random.key(0), jnp.int32(0)), loss, theta, data)
    )(theta)
    hidden = dense(PIXELS[:4], theta["layers_0"])
    np.testing.assert_allclose(trained["norm"]["running_mean"], 0.2 * hidden.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trained["norm"]["running_var"], 0.8 + 0.2 * hidden.var(0, ddof=1), rtol=1e-4)


class NNXNormed(nnx.Module):
    """`Normed`; a layer has two names, is called through ``nnx.remat``, or is kept in a dictionary."""

    def __init__(self, kind, rngs):
        self.kind = kind
        self.norm = nnx.BatchNorm(4, momentum=0.8, epsilon=1e-3, rngs=rngs)
        self.same = self.norm if kind == "shared" else None
        wide, self.out = nnx.Linear(16, 5, rngs=rngs), nnx.Linear(5, CLASSES, rngs=rngs)
        self.layers = nnx.Dict(wide=wide) if kind == "dictionary" else nnx.List([wide])

    def __call__(self, x):
        norm = self.same if self.kind == "shared" else self.norm
        x = x.reshape(len(x), 4, 4)
        x = nnx.remat(lambda norm, x: norm(x))(norm, x) if self.kind == "remat" else norm(x)
        wide = self.layers["wide"] if self.kind == "dictionary" else self.layers[0]
        return self.out(nnx.relu(wide(x.reshape(len(x), -1))))


@pytest.mark.parametrize("kind", ["shared", "remat", "dictionary"])
def test_a_layer_of_nnx_is_the_same_however_it_is_reached(kind, normed):
    model = fitted(lambda rngs: NNXNormed(kind, rngs))
    wide = "layers_wide" if kind == "dictionary" else "layers_0"
    assert model.layers == ("norm", wide)
    layers = normed[1]["extractor"]
    theta = {"norm": layers["BatchNorm_0"], wide: layers["Dense_0"]}
    assert jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0))["extractor"]) == jax.tree.structure(theta)
    check_passes(model, theta, layers["BatchNorm_0"], layers["Dense_0"])


class Centre(nnx.Module):
    def __init__(self, kind):
        self.mean = kind(jnp.zeros(16))

    def __call__(self, x):
        return flat(x) - self.mean[...]


class NNXCentred(nnx.Module):
    """Takes a mean off, which is a parameter or a statistic."""

    def __init__(self, kind, rngs):
        self.centre, self.a = Centre(kind), nnx.Linear(16, 4, rngs=rngs)
        self.out = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.a(self.centre(x))))


def test_a_parameter_that_is_called_mean_is_trained_like_all_others():
    model, data = fitted(lambda rngs: NNXCentred(nnx.Param, rngs)), client(6)
    theta = some(model)["extractor"]

    def loss(theta, batch, key):
        return jnp.sum(model.features(theta, batch.x, batch.mask))

    def step(theta):
        trained, _ = Trainer(batch_size=6, lr=0.1)(Round(jax.random.key(0), jnp.int32(0)), loss, theta, data)
        return trained["centre"], jax.grad(lambda theta: jnp.sum(model.features(theta, X)))(theta)["centre"]

    trained, gradient = computed(step, theta)
    assert np.abs(gradient["mean"]).max() > 0.1
    np.testing.assert_allclose(trained["mean"], theta["centre"]["mean"] - 0.1 * gradient["mean"], rtol=1e-4, atol=1e-5)


class NNXTold(nnx.Module):
    """Flags of both senses; and a norm that is frozen by its call."""

    def __init__(self, rngs):
        self.norm, self.out = nnx.BatchNorm(16, rngs=rngs), nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x, train: bool, deterministic: bool):
        x = self.norm(x.reshape(len(x), -1), use_running_average=True)
        return self.out((2.0 if train else 1.0) * x + (0.0 if deterministic else 1.0))


def test_an_nnx_module_is_told_which_pass_it_is_in():
    model = fitted(NNXTold)
    norm = {name: RNG.uniform(0.5, 2.0, 16).astype(np.float32) for name in some(model)["extractor"]["norm"]}
    x = (PIXELS - norm["running_mean"]) / np.sqrt(norm["running_var"] + 1e-5) * norm["scale"] + norm["bias"]
    for mask, z in ((None, x), (MASK, 2 * x + 1)):
        np.testing.assert_allclose(computed(model.features, {"norm": norm}, X, mask), z, rtol=1e-4, atol=1e-5)


def test_an_instance_brings_its_weights_and_a_class_draws_them(nnx_model):
    instance = NNXNet(rngs=nnx.Rngs(3))
    factory, kernel = own_model(instance), instance.out.kernel[...]
    instance.out.kernel[...] = jnp.zeros((5, CLASSES))  # too late to matter
    init = factory().fit(SHAPE, CLASSES, mean=MEAN, std=STD).init
    for seed in (0, 1):
        np.testing.assert_array_equal(init(jax.random.key(seed))["head"]["kernel"], kernel)
    model, first = nnx_model
    draw = jax.jit(model.init)
    again, other = draw(jax.random.key(0)), draw(jax.random.key(1))
    np.testing.assert_array_equal(again["head"]["kernel"], first["head"]["kernel"])
    assert not np.array_equal(other["head"]["kernel"], first["head"]["kernel"])


# ---- in a run


# FedAvg trains all of it at once, FedPAC the head on the features and then the extractor.
@pytest.mark.parametrize("name", ["fedavg", "fedpac"])
def test_a_twin_of_mlp_trains_as_mlp_does(name, model, federation, trainer):
    own = own_model(Twin())().fit(SHAPE, CLASSES, mean=MEAN, std=STD)._replace(init=model.init)
    methods = [METHODS[name](each, trainer) for each in (model, own)]
    found, expected = (
        jax.tree.map(np.asarray, update_of(method, federation, 4)._replace(post=None)) for method in methods
    )
    assert found.info.steps == 2 * 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


TABLES = {
    "data": {"source": "digits", "clients": 4, "partition": {"kind": "iid"}, "samples_per_client": 20},
    "method": {"name": "fedavg"},
    "training": {"rounds": 2, "batch_size": 10, "lr": 0.1},
    "run": {"placement": "map"},
}


@pytest.fixture(scope="module")
def registered():
    class Digits(nn.Module):
        hidden: int = 8
        activation: object = nn.relu

        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.Dense(self.hidden)(x.reshape(len(x), -1))
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.Dropout(0.2, deterministic=not train)(self.activation(x))
            return nn.Dense(10)(x)

    register_model("own_digits")(Digits)
    yield "own_digits"
    del MODELS["own_digits"]


def test_a_registered_class_runs_with_its_fields_as_options(registered):
    config = Config(**TABLES, model={"name": registered, "hidden": 6})
    assert config.model == {"name": registered, "hidden": 6}
    first, second = simulate(config), simulate(config)
    params = first.state.server
    assert params["head"]["kernel"].shape == (6, 10)
    assert np.all(np.asarray(params["extractor"]["BatchNorm_0"]["running_var"]) != 1.0)
    jax.tree.map(np.testing.assert_array_equal, first.state, second.state)
    assert second.summary["timing"]["compile_seconds"] < 0.5 * first.summary["timing"]["compile_seconds"]
    with pytest.raises(ConfigError, match=r"model\.widht"):
        Config(**TABLES, model={"name": registered, "widht": 6})


class NNXWidth(nnx.Module):
    """Two layers, of a width."""

    def __init__(self, width: int = 4, *, rngs):
        self.body, self.out = nnx.Linear(16, width, rngs=rngs), nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.body(x.reshape(len(x), -1)))


def of_width(*, width: int = 4):
    """Three layers, the first of a width."""
    return Three(hidden=width)


@pytest.mark.parametrize(
    ("given", "options", "width"),
    [
        (partial(of_width, width=9), {"width": 9}, 9),
        (partial(Three, hidden=7), {"hidden": 7}, 7),
        (partial(Three, 7), {}, 7),
        (partial(NNXWidth, width=6), {"width": 6}, 6),
        (partial(NNXWidth, 6), {}, 6),
    ],
    ids=["function", "linen", "linen by place", "nnx", "nnx by place"],
)
def test_a_partial_is_what_it_is_of_with_other_defaults(given, options, width):
    factory = own_model(given)
    assert {name: p.default for name, p in inspect.signature(factory).parameters.items()} == options
    assert factory.__name__ == given.func.__name__
    assert factory.__doc__ == given.func.__doc__
    shapes = jax.eval_shape(factory().fit(SHAPE, CLASSES).init, jax.random.key(0))
    first = next(iter(shapes["extractor"].values()))
    assert first["kernel"].shape == (16, width)


def test_options_are_the_fields_of_plain_types_and_the_arguments_by_name_alone():
    class Held(nn.Module):
        widths: tuple[int, ...] = (4,)
        rate: float | None = None
        kind: Literal["a", "b"] = "a"
        strides: Sequence[int] = (1, 2)
        depth: Annotated[int, Ge(1)] = 1
        perhaps: tuple[int | None, ...] = (None,)
        activation: Callable = nn.relu
        mixed: tuple[int, Callable] = (1, nn.relu)

    def made(width=3, *, hidden: Annotated[int, Ge(1)] = 4):
        return Three(hidden=hidden)

    options = inspect.signature(own_model(Held)).parameters
    assert list(options) == ["widths", "rate", "kind", "strides", "depth"]
    assert options["strides"].annotation == options["widths"].annotation == tuple[int, ...]
    of_function = inspect.signature(own_model(made)).parameters
    assert list(of_function) == ["hidden"]
    assert options["depth"].annotation == of_function["hidden"].annotation == Annotated[int, Ge(1)]


def test_a_field_whose_default_is_made_anew_is_an_option():
    class Wide(nn.Module):
        widths: list[int] = dataclasses.field(default_factory=lambda: [4, 5])

        @nn.compact
        def __call__(self, x):
            x = x.reshape(len(x), -1)
            for width in self.widths:
                x = nn.relu(nn.Dense(width)(x))
            return nn.Dense(CLASSES)(x)

    factory = own_model(Wide)
    assert inspect.signature(factory).parameters["widths"].default == [4, 5]
    assert [fitted(Wide, **given).dim for given in ({}, {"widths": [3]})] == [5, 3]


def test_the_same_model_is_the_same_program():
    """A program is known by its factory: by another one for the same model it would be compiled again."""
    assert own_model(Three(hidden=4)) is own_model(Three(hidden=4))
    assert own_model(Three(hidden=4)) is not own_model(Three(hidden=5))
    assert own_model(Three, features="Dense_0") is not own_model(Three)


def test_the_values_that_a_function_reads():
    depth, listed = 2, [1.0]

    def part(rate=0.5):
        def within(x):
            return x.SIZES * depth * CLASSES * rate + len(listed) + later

        return within

    assert values_read_by(part) == [("CLASSES", CLASSES), ("depth", 2), ("listed", [1.0])]
    later = True
    assert values_read_by(part) == [("CLASSES", CLASSES), ("depth", 2), ("later", True), ("listed", [1.0])]
    assert values_read_by(own_model(part)) == values_read_by(part)
    assert values_read_by(Three) == values_read_by(CLASSES) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.int64(1), np.int64(2)),
        (np.float32(0.1), np.float32(0.2)),
        ((4, 8), (4, 9)),
        ({"width": [4], "rate": None}, {"width": [5], "rate": None}),
        ({1, 2}, {1, 3}),
        (np.arange(2000), np.arange(2000) * (np.arange(2000) != 1000)),
        (np.arange(2), np.arange(2.0)),
        (jnp.arange(3), jnp.arange(3) + 1),
        (jax.random.key(0), jax.random.key(1)),
        ([np.zeros(2)], [np.ones(2)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_plain_value_that_a_function_reads_is_told_from_another(before, after):
    def shown(value):
        return repr(values_read_by(lambda: value))

    assert shown(before) == shown(copy.deepcopy(before)) != shown(after)
    assert values_read_by(lambda: print([before])) == values_read_by(lambda: before)


def test_what_is_no_plain_value_is_not_read():
    model, mixed = Three(), [1, print]
    assert values_read_by(lambda: (model, mixed, print)) == []


# ---- what cannot be used


def net(call, **fields):
    """A Linen class with this ``__call__``."""
    return type("Net", (nn.Module,), {"__call__": nn.compact(call), "__annotations__": {}, **fields})


def flat(x):
    return x.reshape(len(x), -1)


def counting(self, x):
    self.variable("counts", "n", lambda: jnp.zeros(()))
    return nn.Dense(CLASSES)(nn.Dense(4)(flat(x)))


def skipping(self, x):
    z = nn.Dense(4)(flat(x))
    return nn.Dense(CLASSES)(z) + jnp.sum(z**2, axis=1, keepdims=True)


def wide(self, x):
    z = nn.Dense(4)(flat(x))
    return nn.Dense(CLASSES)(z) + jnp.mean(x)


def past(self, x):
    deep = nn.Dense(CLASSES)(nn.relu(nn.Dense(4)(flat(x))))
    return deep + nn.Dense(CLASSES)(flat(x))


def across(self, x):
    """Reads a batch of samples [h, w] as one image with w channels."""
    return nn.Dense(CLASSES)(flat(nn.Conv(2, (3, 3))(x[..., 0])))


def centred(self, x):
    return nn.Dense(CLASSES)(nn.Dense(4)(flat(x) - flat(x).mean(axis=0)))


def shared(self, x):
    layer = nn.Dense(CLASSES)
    z = layer(flat(x))
    return layer(flat(x)) + nn.Dense(CLASSES)(z)


def twice(self, x):
    layer = nn.Dense(CLASSES)
    x = layer(nn.Dense(CLASSES)(flat(x)))
    return layer(x)


def dropped_late(self, x, train: bool):
    x = nn.Dense(4)(flat(x))
    x = nn.relu(nn.Dense(4)(x))
    return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=not train)(x))


def normed_late(self, x, train: bool):
    x = nn.Dense(4)(flat(x))
    return nn.Dense(CLASSES)(nn.BatchNorm(use_running_average=not train)(x))


class Cached(nnx.Module):
    def __init__(self, rngs):
        self.out, self.kept = nnx.Linear(16, CLASSES, rngs=rngs), nnx.Cache(jnp.zeros(2))

    def __call__(self, x):
        return self.out(x)


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.data([nnx.Linear(16, 4, rngs=rngs), nnx.Linear(4, CLASSES, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](self.layers[0](flat(x)))


class NNXAcross(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = nnx.BatchNorm(4, axis=1, rngs=rngs), nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(flat(self.norm(x)))


class NNXWindowed(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.out = nnx.Conv(4, 4, (3, 3), rngs=rngs), nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(flat(self.conv(x[..., 0])))


class Required(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.Dense(self.hidden)(flat(x)))


class Torch:
    __module__ = "torch.nn.modules"

    def __call__(self, x):
        return x


MISTAKES = {
    "wrong_width": (
        net(lambda self, x: nn.Dense(7)(nn.Dense(4)(flat(x)))),
        None,
        "model = 'Net' is not usable: its logits are 7 wide; the data has 3 classes",
    ),
    "one_layer": (
        net(lambda self, x: nn.Dense(3)(flat(x))),
        None,
        "model = 'Net' is not usable: nothing with parameters comes before Dense_0, so that there would be no "
        "extractor; its layers: Dense_0; pass a pair (extractor, head), or, where a Sequential is the only layer, ",
    ),
    "no_layer": (
        net(lambda self, x: flat(x)),
        None,
        "model = 'Net' is not usable: it calls no layer with parameters, so that there would be no head; layers: none; "
        "pass a pair (extractor, head)",
    ),
    "no_such_layer": (
        Late(),
        "Dense_7",
        "features = 'Dense_7' is not usable: one of the layers of Late: Dense_0, Dense_1, Dense_2",
    ),
    "nothing_behind": (
        Late(),
        "Dense_2",
        "model = 'Late' is not usable: no layer with parameters follows Dense_2, so that there would be no head; "
        "layers: Dense_0, Dense_1, Dense_2",
    ),
    "maps_at_the_cut": (
        net(lambda self, x: nn.Dense(3)(nn.Conv(2, (3, 3))(x)).mean(axis=(1, 2))),
        None,
        "model = 'Net before Dense_0' is not usable: features must be [batch, dim] floats, not float32 [2, 4, 4, 2]; "
        "flatten or pool before",
    ),
    "whole_numbers_at_the_cut": (
        net(lambda self, x: nn.Embed(9, CLASSES)(nn.Dense(4)(flat(x)).astype(int)).mean(axis=1)),
        None,
        "model = 'Net before Embed_0' is not usable: features must be [batch, dim] floats, not int32 [2, 4]; flatten",
    ),
    "logits_are_maps": (
        net(lambda self, x: nn.Dense(CLASSES)(nn.Dense(4)(flat(x)))[:, None]),
        None,
        "model = 'Net' is not usable: it must return logits [batch, classes], not float32 [2, 1, 3]",
    ),
    "two_outputs": (
        net(lambda self, x: (nn.Dense(CLASSES)(nn.Dense(4)(flat(x))), x)),
        None,
        "model = 'Net' is not usable: it must return logits [batch, classes], not a tuple",
    ),
    "input_behind_the_cut": (
        net(wide),
        None,
        "model = 'Net' is not usable: the head from Dense_1 on reads the samples, too: cut it elsewhere (features=)",
    ),
    "around_the_cut": (
        net(skipping),
        None,
        "model = 'Net' is not usable: Dense_0 is read on both sides of a cut before Dense_1: cut it elsewhere "
        "(features=), or pass a pair (extractor, head)",
    ),
    "skip_from_the_samples": (
        net(past),
        None,
        "model = 'Net' is not usable: Dense_2 reads the samples themselves, past the layers before it; its layers: "
        "Dense_1, Dense_0, Dense_2; pass a pair (extractor, head)",
    ),
    "batch_as_an_image": (
        net(across),
        None,
        "model = 'Net' is not usable: a model whose output for a sample does not change with the other samples of a "
        "batch (the first axis of x)",
    ),
    "nnx_batch_as_an_image": (
        NNXWindowed,
        None,
        "model = 'NNXWindowed' is not usable: a model whose output for a sample does not change with the other samples",
    ),
    "mean_over_the_batch": (
        net(centred),
        None,
        "model = 'Net' is not usable: a model whose output for a sample does not change with the other samples of a "
        "batch (the first axis of x)",
    ),
    "samples_cut_in_pieces": (
        net(lambda self, x: nn.Dense(CLASSES)(nn.Dense(4)(x.reshape(-1, 8)))),
        None,
        "model = 'Net' is not usable: one row of features for each sample, got 4 for a batch of 2; the first axis",
    ),
    "logits_of_pieces": (
        net(lambda self, x: nn.Dense(CLASSES)(nn.Dense(4)(flat(x))).repeat(2, axis=0)),
        None,
        "model = 'Net' is not usable: one row of logits for each sample, got 4 for a batch of 2; the first axis",
    ),
    "mask_without_a_default": (
        net(lambda self, x, mask: (nn.Dense(4)(flat(x)), ())),
        None,
        "model = 'Net' is not usable: a default, mask=None, in its __call__(self, x, mask=None): without a mask, a "
        "pass is evaluation",
    ),
    "shared_layer": (
        net(shared),
        None,
        "model = 'Net' is not usable: Dense_0 is read on both sides of a cut before Dense_1: cut it elsewhere "
        "(features=), or pass a pair (extractor, head)",
    ),
    "layer_used_twice": (
        net(twice),
        None,
        "model = 'Net' is not usable: Dense_0 is read on both sides of a cut before Dense_0: cut it elsewhere "
        "(features=)",
    ),
    "layer_used_again_in_training": (
        Shared("out"),
        None,
        "model = 'Shared' is not usable: out, before which it is cut, must be called as often in training (2 times) as "
        "in evaluation (1): or cut it elsewhere (features=)",
    ),
    "nnx_layer_used_again_in_training": (
        NNXShared,
        None,
        "model = 'NNXShared' is not usable: out, before which it is cut, must be called as often in training (2 times) "
        "as in evaluation (1): or cut it elsewhere (features=)",
    ),
    "does_not_fit": (
        net(lambda self, x: nn.Dense(CLASSES)(nn.Dense(4)(x.reshape(len(x), 7, 7)))),
        None,
        "model = 'Net' is not usable: it fails on samples of shape [4, 4, 1] (TypeError: cannot reshape array of shape "
        "(2, 4, 4, 1) (size 32) into shape (2, 7, 7) (size 98))",
    ),
    "other_state": (
        net(counting),
        None,
        "model = 'Net' is not usable: it keeps counts, and only parameters and the statistics of nn.BatchNorm can be "
        "kept",
    ),
    "other_arguments": (
        net(lambda self, x, context: nn.Dense(3)(x)),
        None,
        "model = 'Net' is not usable: a __call__ of x and flags among train, training, is_train, is_training, "
        "deterministic, eval, inference, use_running_average; its arguments: x, context",
    ),
    "switch_of_another_name": (
        net(lambda self, x, dropout=False: nn.Dense(3)(nn.Dropout(0.5, deterministic=not dropout)(flat(x)))),
        None,
        "model = 'Net' is not usable: a __call__ of x and flags among train, training, is_train, is_training, "
        "deterministic, eval, inference, use_running_average; its arguments: x, dropout (what is the same in training "
        "and evaluation can be a field)",
    ),
    "parameters_in_half_precision": (
        net(lambda self, x: nn.Dense(3)(nn.Dense(4, dtype=jnp.float32, param_dtype=jnp.bfloat16)(flat(x)))),
        None,
        "model = 'Net' is not usable: its parameters must be float32, not bfloat16: use dtype=, not param_dtype=",
    ),
    "always_dropping": (
        net(lambda self, x: nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(flat(x))))),
        None,
        "model = 'Net' is not usable: it draws random numbers in evaluation, too: switch dropout by a flag of "
        "__call__, such as train",
    ),
    "always_dropping_in_a_transformed_block": (
        net(lambda self, x: nn.Dense(3)(nn.remat(nn.Dropout)(0.5, deterministic=False)(nn.Dense(4)(flat(x))))),
        None,
        "model = 'Net' is not usable: it draws random numbers in evaluation, too: switch dropout by a flag of "
        "__call__, such as train",
    ),
    "dropout_in_the_head": (
        net(dropped_late),
        "Dense_0",
        "model = 'Net' is not usable: dropout behind the cut: the head is not told which pass it is in; cut behind it "
        "(features=), or omit it",
    ),
    "dropout_after_the_last_layer": (
        net(lambda self, x, train=False: nn.Dropout(0.5, deterministic=not train)(nn.Dense(3)(nn.Dense(4)(flat(x))))),
        None,
        "model = 'Net' is not usable: dropout behind the cut: the head is not told which pass it is in; cut behind it "
        "(features=), or omit it",
    ),
    "nnx_dropout_after_the_last_layer": (
        NNXDroppedLast,
        None,
        "model = 'NNXDroppedLast' is not usable: dropout behind the cut: the head is not told which pass it is in; cut "
        "behind it (features=), or omit it",
    ),
    "sharper_logits_in_training": (
        net(lambda self, x, train=False: nn.Dense(3)(nn.Dense(4)(flat(x))) * (20 if train else 1)),
        None,
        "model = 'Net' is not usable: a head that does the same in training and evaluation: it is not told which pass "
        "it is in; cut behind what differs (features=)",
    ),
    "pair_whose_head_is_sharper_in_training": (
        (Flat(), net(lambda self, z, train=False: nn.Dense(CLASSES)(z) * (20 if train else 1))()),
        None,
        "model = '(Flat, Net)' is not usable: a head that does the same in training and evaluation: it is not told "
        "which pass it is in; cut behind what differs (features=)",
    ),
    "norm_in_the_head": (
        net(normed_late),
        "Dense_0",
        "model = 'Net' is not usable: nn.BatchNorm behind the cut: the head is not told which pass it is in; cut "
        "behind it (features=)",
    ),
    "norm_over_another_axis": (
        net(
            lambda self, x: nn.Dense(3)(
                nn.BatchNorm(use_running_average=True, axis=1)(nn.Dense(4)(flat(x))[..., None])[..., 0]
            )
        ),
        None,
        "model = 'BatchNorm_0' is not usable: nn.BatchNorm over the last axis, without axis_name",
    ),
    "norm_over_devices": (
        net(lambda self, x: nn.Dense(3)(nn.BatchNorm(use_running_average=True, axis_name="d")(nn.Dense(4)(flat(x))))),
        None,
        "model = 'BatchNorm_0' is not usable: nn.BatchNorm over the last axis, without axis_name",
    ),
    "nnx_norm_over_another_axis": (
        lambda rngs: NNXAcross(rngs),
        None,
        "model = 'BatchNorm' is not usable: nnx.BatchNorm over the last axis, without axis_name",
    ),
    "pair_that_does_not_fit": (
        (Flat(), net(lambda self, z: nn.Dense(CLASSES)(z.reshape(len(z), 9)))()),
        None,
        "model = '(Flat, Net)' is not usable: it fails on samples of shape [4, 4, 1] (TypeError: cannot reshape array "
        "of shape (2, 7) (size 14) into shape (2, 9) (size 18))",
    ),
    "nnx_one_name": (
        NNXOneName,
        None,
        "model = 'NNXOneName' is not usable: other attributes: conv.1.bias and conv_1.bias would have one name among",
    ),
    "nnx_array": (
        NNXArray(nnx.Rngs(0)),
        None,
        "model = 'NNXArray' is not usable: it keeps scale (an array; make it in __call__): only nnx.Param and nnx.",
    ),
    "cut_within_a_transformation": (
        net(lambda self, x: nn.Dense(CLASSES)(nn.remat(nn.Dense)(5, name="b")(nn.Dense(4, name="a")(flat(x))))),
        "a",
        "model = 'Net' is not usable: b is called within a transformation (nn.jit, nn.remat, nn.scan), where it cannot",
    ),
    "norm_with_a_mask": (
        net(lambda self, x: nn.Dense(3)(nn.BatchNorm(True)(nn.Dense(4)(flat(x)), mask=jnp.ones((2, 1), bool)))),
        None,
        "model = 'BatchNorm_0' is not usable: nn.BatchNorm over the last axis, without axis_name and mask",
    ),
    "pair_whose_head_has_nothing_to_train": (
        (Flat(), net(lambda self, z: z[:, :CLASSES])()),
        None,
        "model = '(Flat, Net)' is not usable: its head needs parameters",
    ),
    "pair_of_three": (
        (Flat(), Flat(), Flat()),
        None,
        "model = '(Flat, Flat, Flat)' is not usable: a pair of Flax modules (extractor, head)",
    ),
    "pair_that_is_cut": (
        (Flat(), Flat()),
        "Dense_0",
        "features = 'Dense_0' is not usable: nothing for a pair: it is cut already",
    ),
    "contract_that_is_cut": (
        MODELS["mlp"](),
        "Dense_0",
        "features = 'Dense_0' is not usable: nothing for a module x, mask -> (z, maps): it ends in the features",
    ),
    "nnx_state": (
        Cached,
        None,
        "model = 'Cached' is not usable: it keeps kept (Cache): only nnx.Param and nnx.BatchNorm's statistics can be "
        "kept",
    ),
    "nnx_statistic_of_another_layer": (
        lambda rngs: NNXCentred(nnx.BatchStat, rngs),
        None,
        "model = '<lambda>' is not usable: it keeps centre.mean (BatchStat): only nnx.Param and nnx.BatchNorm's "
        "statistics can be kept",
    ),
    "nnx_layers_in_a_list_of_python": (
        Listed,
        None,
        "model = 'Listed' is not usable: nnx.List or nnx.Dict for the layers that layers holds",
    ),
    "nnx_of_nothing": (
        lambda rngs: 3,
        None,
        "model = '<lambda>' is not usable: a function of rngs returns an nnx.Module, not int",
    ),
    "required_field": (
        Required,
        None,
        "model = 'Required' is not usable: a default for its argument hidden (an NNX module's randomness is called "
        "rngs), or an instance: Required(...)",
    ),
    "required_argument": (
        lambda width: Late(),
        None,
        "model = '<lambda>' is not usable: a default for its argument width (an NNX module's randomness is called "
        "rngs)",
    ),
    "fails_when_made": (
        lambda: 1 / 0,
        None,
        "model = '<lambda>' is not usable: it fails when it is made (ZeroDivisionError: division by zero)",
    ),
    "torch": (Torch(), None, "model = 'Torch' is not usable: not a PyTorch module, but a Flax module (of Linen; "),
    "no_model": (
        3,
        None,
        "model = 'int' is not usable: a Flax module (of Linen; of NNX as an instance, or a class or ",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_used_is_one_line(mistake):
    given, features, expected = MISTAKES[mistake]
    with pytest.raises(ConfigError) as found:
        fitted(given, features)
    message = str(found.value)
    assert "\n" not in message
    assert message.startswith(expected)


MASKED = {
    "classifier": (lambda self, x, mask=None: nn.Dense(CLASSES)(flat(x)), "it returns the shapes (1, 3)"),
    "features_that_are_maps": (
        lambda self, x, mask=None: (nn.Conv(2, (3, 3))(x), ()),
        "it returns the shapes ((1, 4, 4, 2), ())",
    ),
    "maps_that_are_flat": (
        lambda self, x, mask=None: (nn.Dense(4)(flat(x)), (flat(x),)),
        "it returns the shapes ((1, 4), ((1, 16),))",
    ),
    "batch_normalisation_of_flax": (
        lambda self, x, mask=None: (nn.BatchNorm(use_running_average=mask is None)(nn.Dense(4)(flat(x))), ()),
        "it keeps batch_stats: models/norm.py has a BatchNorm for it, which takes the mask",
    ),
    "features_of_pieces": (
        lambda self, x, mask=None: (nn.Dense(4)(x.reshape(-1, 8)), ()),
        "it returns the shapes ((2, 4), ())",
    ),
    "dropout": (
        lambda self, x, mask=None: (nn.Dropout(0.5, deterministic=mask is None)(nn.Dense(4)(flat(x))), ()),
        "it draws random numbers, which only classifiers and pairs can do",
    ),
}


@pytest.mark.parametrize("mistake", MASKED)
def test_a_module_with_a_mask_that_cannot_be_used_is_one_line(mistake):
    call, why = MASKED[mistake]
    with pytest.raises(ConfigError) as found:
        build(net(call)(), SHAPE, CLASSES, init="torch")
    form = "with an argument mask, it is x, mask -> (z [batch, dim], a tuple of maps [batch, h, w, c])"
    assert str(found.value) == f"model = 'Net' is not usable: {form}, and {why}"


def test_so_is_one_that_mixes_samples():
    def across(self, x, mask=None):
        return flat(nn.Conv(2, (3, 3))(x)), ()

    with pytest.raises(ConfigError, match=r"^model = 'Net' is not usable: a model whose .*x\[..., None\], may be what"):
        build(net(across)(), (8, 8), CLASSES, init="torch")


@pytest.mark.usefixtures("tables_as_before")
def test_so_is_one_that_fails():
    with pytest.raises(
        ConfigError, match=r"^model.name = 'Net' is not usable: it does not fit 8x8x1 images: 'z'$"
    ) as found:
        simulate(Config(**TABLES), model=net(lambda self, x, mask=None: {}["z"])())
    assert isinstance(found.value.__cause__, KeyError)  # with the line of the module that failed


def test_a_method_that_wants_feature_maps_says_so():
    with pytest.raises(ValueError, match="feature maps"):
        METHODS["fedcpd"](fitted(Twin()), Trainer())
