"""Gradient inversion: against the closed form of a linear model, and NumPy's gradients of what a method uploads."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from fedjax_pfl import METHODS, Config, ConfigError, Result, leakage, plot_leakage, register_method, register_model
from fedjax_pfl.analysis.inversion import Found, Search, distance, invert, psnr, search, total_variation
from fedjax_pfl.analysis.leakage import _inferred_label, _setting, _victim, _visible
from fedjax_pfl.data.sources import load
from fedjax_pfl.experiment.build import DataShape, attackers
from fedjax_pfl.experiment.kept import Kept
from fedjax_pfl.method import SentIf, State, TrainInfo, Update
from fedjax_pfl.methods.fedpac.method import Server
from fedjax_pfl.models.conv import conv2d

SHAPE, CLASSES = (3, 3, 1), 4
CONFIG = Config(
    data={"source": "digits", "clients": 4, "samples_per_client": 20, "mean": 0.3, "std": 0.4},
    model={"name": "mlp", "hidden": 8},
    method={"name": "fedavg"},
    training={"rounds": 1, "batch_size": 10, "lr": 0.1},
)
RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(9, CLASSES)).astype(np.float32)
IMAGES = RNG.uniform(size=(3, *SHAPE)).astype(np.float32)
LABELS = np.array([2, 0, 3], np.int32)


def gradients(pixels, label):
    """Of a linear softmax model with bias, by hand."""
    logits = pixels.reshape(-1) @ WEIGHTS
    error = jax.nn.softmax(logits) - jax.nn.one_hot(label, CLASSES)
    return {"bias": error, "weights": pixels.reshape(-1)[:, None] * error}


def inverted(how, label):
    """The attack on one image, with a seed and a weight of the prior."""
    nothing = {"bias": jnp.zeros(CLASSES), "weights": jnp.zeros((9, CLASSES))}

    def one(pixels, truth, seed=0, tv=0.0):
        key, known, by = jax.random.key(seed), truth if label else None, how._replace(tv=tv)
        return invert(key, gradients, gradients(pixels, truth), nothing, known, shape=SHAPE, classes=CLASSES, how=by)

    return one


@pytest.fixture(scope="module")
def digits():
    found = load("digits")
    rows = [int(np.flatnonzero(found.labels == label)[0]) for label in (3, 8)]
    return found.images[rows], found.labels[rows]


@pytest.fixture(scope="module")
def of_fedavg(digits):
    return leakage(CONFIG, *digits, steps=200, tv=0.0, restarts=4)


def test_psnr_is_that_of_numpy():
    images, targets = RNG.uniform(size=(2, 5, 4, 4, 3))
    expected = [10 * np.log10(1 / np.mean((a - b) ** 2)) for a, b in zip(images, targets, strict=True)]
    np.testing.assert_allclose(psnr(images, targets), expected, rtol=1e-5)
    assert np.isposinf(psnr(images, images)).all()


def test_total_variation_is_that_of_numpy():
    image = RNG.normal(size=(4, 6, 3)).astype(np.float32)
    down = [abs(image[i + 1, j, c] - image[i, j, c]) for i in range(3) for j in range(6) for c in range(3)]
    across = [abs(image[i, j + 1, c] - image[i, j, c]) for i in range(4) for j in range(5) for c in range(3)]
    np.testing.assert_allclose(total_variation(jnp.asarray(image)), np.mean(down) + np.mean(across), rtol=1e-5)


def test_a_single_row_of_pixels_varies_beside_each_other_only():
    image = IMAGES[0][:1]
    np.testing.assert_allclose(total_variation(image), np.abs(np.diff(image, axis=1)).mean(), rtol=1e-6)
    np.testing.assert_allclose(total_variation(image.swapaxes(0, 1)), total_variation(image), rtol=1e-6)
    assert total_variation(image[:, :1]) == 0


def test_a_distance_is_a_mean_of_shares_over_the_arrays_that_have_changed():
    arrays = {name: RNG.normal(size=(3, 2, size)).astype(np.float32) for name, size in (("a", 2), ("b", 5), ("c", 1))}
    guess, seen, nothing = ({name: value[row] for name, value in arrays.items()} for row in range(3))
    seen["c"] = nothing["c"]
    nothing["d"], seen["d"], guess["d"] = np.float32([0.0]), np.float32([1e-9]), np.float32([1.0])
    shares = [np.sum((guess[name] - seen[name]) ** 2) / np.sum((seen[name] - nothing[name]) ** 2) for name in "ab"]
    np.testing.assert_allclose(distance(guess, seen, nothing), np.mean(shares), rtol=1e-5)
    assert distance(nothing, seen, nothing) == 1
    assert distance(guess, nothing, nothing) == 0


@pytest.mark.parametrize(("how", "steps", "label"), [("adam", 1000, False), ("lbfgs", 30, True)])
def test_the_closed_form_of_a_linear_model_is_reached(how, steps, label):
    found = jax.jit(jax.vmap(inverted(search(how, steps, 0.1, 0.0), label)))(IMAGES, LABELS)
    for image, truth, pixels, of in zip(IMAGES, LABELS, found.pixels, found.label, strict=True):
        sent = gradients(jnp.asarray(image), truth)
        closed = np.asarray(sent["weights"])[:, truth] / np.asarray(sent["bias"])[truth]
        np.testing.assert_allclose(closed, image.reshape(-1), atol=1e-4)
        np.testing.assert_allclose(pixels.reshape(-1), closed, atol=0.02)
        assert of == truth
    assert np.all(found.distance < 1e-3)


def test_attacks_side_by_side_are_those_one_by_one_and_start_where_their_seed_says():
    one = inverted(search("adam", 3, 0.1, 0.0), False)
    together, alone = jax.jit(jax.vmap(one))(IMAGES, LABELS), jax.jit(one)
    for row, (image, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        found = alone(image, label, 0)
        np.testing.assert_allclose(together.pixels[row], found.pixels, atol=1e-5)
        np.testing.assert_allclose(together.objective[row], found.objective, rtol=1e-4)
    assert not np.allclose(alone(IMAGES[2], LABELS[2], 1).pixels, found.pixels, atol=0.1)


@pytest.mark.parametrize(("how", "label"), [("adam", False), ("lbfgs", True)])
def test_the_last_step_counts(how, label):
    found = jax.jit(inverted(search(how, 1, 0.1, 0.0), label))(IMAGES[0], LABELS[0])
    pixels, logits = jax.random.split(jax.random.key(0))
    noise = jax.random.uniform(pixels, SHAPE)
    assert not np.allclose(found.pixels, noise, atol=1e-3)
    chance = jax.nn.softmax(jax.random.normal(logits, (CLASSES,)))
    weights = jax.nn.one_hot(LABELS[0], CLASSES) if label else chance
    of_each = [gradients(noise, one) for one in range(CLASSES)]
    sent = {name: sum(w * of[name] for w, of in zip(weights, of_each, strict=True)) for name in of_each[0]}
    nothing = {name: jnp.zeros_like(leaf) for name, leaf in sent.items()}
    assert found.objective < distance(sent, gradients(IMAGES[0], LABELS[0]), nothing)


def test_the_label_is_that_of_the_best_guess_and_not_of_the_last():
    """One step that goes much too far, to the true label and to pixels worse than the noise."""
    far = Search(optax.with_extra_args_support(optax.sgd(1e4)), by_line=False, steps=1, tv=0.0)
    pixels, logits = jax.random.split(jax.random.key(0))
    likeliest = int(jax.random.normal(logits, (CLASSES,)).argmax())
    found = jax.jit(inverted(far, False))(IMAGES[0], (likeliest + 1) % CLASSES)
    np.testing.assert_array_equal(found.pixels, jax.random.uniform(pixels, SHAPE))
    assert found.label == likeliest


def test_a_search_that_ends_in_nan_keeps_what_it_has_found():
    def roots(pixels, label):
        """Of what has left [0, 1] on the dark side, not a number."""
        del label
        return {"a": jnp.sqrt(pixels)}

    seen, nothing = {"a": jnp.full(SHAPE, 0.1)}, {"a": jnp.zeros(SHAPE)}
    how = search("adam", 5, 3.0, 0.0)
    found = invert(jax.random.key(0), roots, seen, nothing, jnp.int32(0), shape=SHAPE, classes=2, how=how)
    noise = jax.random.uniform(jax.random.split(jax.random.key(0))[0], SHAPE)
    np.testing.assert_array_equal(found.pixels, noise)
    np.testing.assert_allclose(found.objective, distance(roots(noise, 0), seen, nothing), rtol=1e-6)


def test_the_prior_smooths_and_is_no_part_of_the_distance():
    attack = jax.jit(inverted(search("adam", 60, 0.1, 0.0), True))
    sent, nothing = gradients(jnp.asarray(IMAGES[0]), LABELS[0]), {"bias": np.zeros(4), "weights": np.zeros((9, 4))}
    rough, smooth = (attack(IMAGES[0], LABELS[0], 0, tv) for tv in (0.0, 1.0))
    for tv, found in ((0.0, rough), (1.0, smooth)):
        apart = distance(gradients(found.pixels, LABELS[0]), sent, nothing)
        np.testing.assert_allclose(found.distance, apart, atol=1e-5)
        np.testing.assert_allclose(found.objective, apart + tv * total_variation(found.pixels), atol=1e-5)
    assert total_variation(smooth.pixels) < 0.5 * total_variation(rough.pixels)


def test_what_fedavg_sends_gives_images_and_labels_away(of_fedavg, digits):
    x, y = digits
    np.testing.assert_array_equal(of_fedavg.targets, x / np.float32(255))
    np.testing.assert_array_equal(of_fedavg.found, y)
    np.testing.assert_array_equal(of_fedavg.labels, y)
    assert np.all(of_fedavg.psnr > 25)
    mse = np.mean((of_fedavg.images - of_fedavg.targets) ** 2, axis=(1, 2, 3))
    np.testing.assert_allclose(of_fedavg.psnr, -10 * np.log10(mse), rtol=1e-4)
    assert of_fedavg.images.min() >= 0
    assert of_fedavg.images.max() <= 1
    assert set(of_fedavg.uploaded) == {
        *("extractor/hidden_layer/kernel", "extractor/hidden_layer/bias", "head/kernel", "head/bias"),
    }


def test_the_same_seed_is_the_same_attack(of_fedavg, digits):
    again = leakage(CONFIG, *digits, steps=200, tv=0.0, restarts=4)
    for name in ("images", "psnr", "found", "loss"):
        np.testing.assert_array_equal(getattr(again, name), getattr(of_fedavg, name))


def test_of_all_starts_the_smallest_objective_is_kept_and_the_search_is_as_asked(digits, monkeypatch):
    """By a stand-in for the search, which ends with what it draws from its key; some have diverged."""
    asked = []

    def draw(key, send, seen, nothing, label, *, shape, classes, how):
        found = jax.random.uniform(key)
        objective = jnp.where(found < 0.5, jnp.nan, found)
        return Found(jnp.full(shape, found), jnp.int32(7), 10 * found, objective)

    monkeypatch.setattr("fedjax_pfl.analysis.leakage.search", lambda *how: asked.append(how))
    monkeypatch.setattr("fedjax_pfl.analysis.leakage.invert", draw)
    found = leakage(CONFIG, *digits, optimiser="lbfgs", steps=3, lr=0.2, tv=0.05, restarts=4, seed=2)
    assert asked == [("lbfgs", 3, 0.2, 0.05)]
    keys = [jax.random.fold_in(jax.random.key(2), start) for start in range(4)]
    starts = np.array([jax.random.uniform(key) for key in keys])
    best = starts[starts >= 0.5].min()
    assert starts.min() < 0.5 < best < starts[0]
    np.testing.assert_allclose(found.images, np.full_like(found.targets, best), rtol=1e-6)
    np.testing.assert_allclose(found.loss, [10 * best] * 2, rtol=1e-6)
    np.testing.assert_array_equal(found.found, [7, 7])


def victim_of(run, client=0):
    return _victim(run, *_setting(run, client), client)


def result_of(method, state):
    """Of a run that has ended after three rounds with this state."""
    config, shape = CONFIG.replace("method.name", method), DataShape("digits", (8, 8, 1), 10, None)
    nothing = {name: {} for name in ("summary", "history", "clients", "labels", "partition", "exported")}
    return Result(**nothing, kept=Kept(3, shape, state), config=config, client_history={})


def hidden_gradient(extractor, head, image, label):
    """NumPy's gradient of the cross-entropy by the hidden layer of a multi-layer perceptron."""
    x = (image.reshape(-1) / 255 - 0.3) / 0.4
    layer = extractor["hidden_layer"]
    before = x @ layer["kernel"] + layer["bias"]
    logits = np.maximum(before, 0) @ head["kernel"] + head["bias"]
    error = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum() - np.eye(10)[label]
    back = (head["kernel"] @ error) * (before > 0)
    return {"hidden_layer/kernel": np.outer(x, back), "hidden_layer/bias": back}


def test_fedper_sends_its_extractor_and_keeps_its_head(digits):
    """The attacker knows the extractor that was sent down, and takes the head to be the initial one."""
    before = victim_of(CONFIG.replace("method.name", "fedper"), 2)
    rng = np.random.default_rng(1)
    extractor, head = (
        jax.tree.map(lambda leaf: np.float32(leaf + 0.1 * rng.normal(size=leaf.shape)), part)
        for part in before.state[1:3]
    )
    heads = jax.tree.map(lambda leaf: np.stack([0 * leaf, 0 * leaf, leaf, 0 * leaf]), head)
    victim = victim_of(result_of("fedper", State(extractor, heads)), 2)
    assert victim.uploaded == ("hidden_layer/bias", "hidden_layer/kernel")
    assert victim.bias is None
    now, view, own, assumed = victim.state
    image, label = digits[0][0], jnp.int32(digits[1][0])
    pixels = jnp.asarray(image, jnp.float32) / 255

    @jax.jit
    def change(own):
        sent, nothing = (victim.send(now, view, own, held)(pixels, label) for held in (True, False))
        return jax.tree.map(jnp.subtract, nothing, sent)

    for known, whose in ((head, own), (jax.device_get(before.state[2]), assumed)):
        found = change(whose)
        for name, expected in hidden_gradient(extractor, known, image, label).items():
            np.testing.assert_allclose(found[name] / 0.1, expected, atol=1e-5)
            assert np.abs(expected).max() > 0.01


def test_the_attacker_knows_the_round_and_what_the_server_has_written_to_the_client():
    now, view, own, _ = victim_of(CONFIG.replace("method.name", "fedpac")).state
    assert int(now.t) == 0
    written = jax.tree.map(lambda leaf: jnp.stack([leaf + client for client in range(4)]), own)
    now, _, own, assumed = victim_of(result_of("fedpac", State(Server(view.extractor, None), written)), 2).state
    assert int(now.t) == 3
    for inbox in (own.inbox, assumed.inbox):
        jax.tree.map(np.testing.assert_array_equal, inbox, jax.tree.map(lambda leaf: leaf[2], written.inbox))


def test_the_victim_is_honest_and_knows_who_it_is(tables_as_before):
    @register_method("who")
    def who(model, train):
        def local(now, view, client, data):
            sent = {"id": data.id, "samples": jnp.sum(data.class_counts)}
            return Update(client, sent, TrainInfo(jnp.zeros(()), jnp.int32(0)))

        return METHODS["fedavg"](model, train)._replace(local=local)

    malicious = CONFIG.replace({"method.name": "who", "attack.kind": "sign_flip", "attack.share": 0.75})
    assert attackers(malicious)[2]
    victim = victim_of(malicious, 2)
    now, view, own, _ = victim.state
    sent = victim.send(now, view, own, True)(jnp.zeros((8, 8, 1)), jnp.int32(1))
    assert {name: float(value) for name, value in sent.items()} == {"id": 2, "samples": 1}


def test_a_label_is_told_by_the_sign_that_its_bias_has_alone_or_by_the_classes_held():
    """Trained weights move against the gradient; what is sent may be either, or class statistics."""
    nothing, gradient = np.float32([0.5, 0.5, 0.5, 0.5]), np.float32([0.2, 0.1, -0.7, 0.4])
    for sent in (nothing + gradient, nothing - 0.1 * gradient):
        assert _inferred_label({"b": sent}, {"b": nothing}, "b") == 2
    held = {"per_class/held": np.float32([0, 0, 0, 1]), "extractor/kernel": gradient}
    assert _inferred_label(held, held, None) == 3
    assert _inferred_label({"extractor/kernel": gradient}, {"extractor/kernel": nothing}, None) is None


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_the_label_is_read_from_what_is_trained_and_not_from_a_control_variate(method):
    """They change in opposite directions; with two classes, the signs alone do not tell which is which."""
    victim = victim_of(CONFIG.replace("method.name", method))
    assert f"control/{victim.bias.partition('/')[2]}" in victim.uploaded
    assert "control" not in victim.bias.split("/")


@pytest.mark.parametrize("sent", [True, False])
def test_what_is_not_sent_in_a_round_is_not_seen(sent):
    found = _visible(SentIf(jnp.array(sent), {"kernel": jnp.ones(3)}))
    np.testing.assert_array_equal(found.value["kernel"], [float(sent)] * 3)


@pytest.mark.parametrize(("last", "bias"), [(True, "head/out/bias"), (False, None)])
def test_the_label_is_read_from_the_bias_of_the_last_layer(last, bias, tables_as_before):
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.tanh(nn.Dense(5, name="body")(x.reshape(len(x), -1)))
            x = nn.tanh(nn.Dense(12, name="hidden")(x))
            return nn.Dense(10, name="out", use_bias=last)(x)

    register_model("deep", features="body")(Deep)
    victim = victim_of(CONFIG.replace("model.name", "deep"))
    assert "head/hidden/bias" in victim.uploaded
    assert victim.bias == bias


def test_prototypes_tell_the_label_and_nothing_of_other_classes(digits):
    victim = victim_of(CONFIG.replace("method.name", "fedproto"))
    now, view, own, _ = victim.state
    label = jnp.int32(digits[1][0])
    sent = jax.jit(victim.send(now, view, own, True))(jnp.asarray(digits[0][0], jnp.float32) / 255, label)
    assert victim.uploaded == ("held", "rows")
    np.testing.assert_array_equal(sent["held"], np.eye(10)[label])
    np.testing.assert_array_equal(np.any(sent["rows"] != 0, axis=1), np.arange(10) == label)


@pytest.mark.parametrize("pads", [((0, 0), (0, 0)), ((2, 1), (1, 2))])
@pytest.mark.parametrize(("inputs", "strides"), [(2, (2, 1)), (9, (1, 1))])
def test_a_convolution_has_the_gradient_of_a_gradient(inputs, strides, pads):
    x, kernel = (RNG.normal(size=shape).astype(np.float32) for shape in ((2, 7, 6, inputs), (3, 2, inputs, 9)))

    def plain(x, kernel):
        return lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def twice(way):
        def of_gradients(x, kernel):
            by_x, by_kernel = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(way(x, kernel))), (0, 1))(x, kernel)
            return jnp.sum(by_x**3) + jnp.sum(by_kernel**3)

        return jax.jit(jax.grad(of_gradients, (0, 1)))(x, kernel)

    ours = twice(lambda x, kernel: conv2d(x, kernel, strides=strides, padding=pads))
    for found, expected in zip(ours, twice(plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attack": "glib"}, "attack = 'glib' is not usable: one of idlg, dlg"),
        ({"optimiser": "sgd"}, "optimiser = 'sgd' is not usable: one of adam, lbfgs"),
        ({"steps": 0}, "steps = 0 is not usable: a whole number, 1 or more"),
        ({"restarts": 1.5}, "restarts = 1.5 is not usable: a whole number, 1 or more"),
        ({"seed": -1}, "seed = -1 is not usable: a whole number, 0 or more"),
        ({"lr": 0.0}, "lr = 0.0 is not usable: a number above 0"),
        ({"tv": -1.0}, "tv = -1.0 is not usable: a number, 0 or more"),
        ({"client": 4}, "client = 4 is not usable: a client from 0 to 3"),
        ({"run": "runs/a"}, "run = 'str' is not usable: a Config, or a Result"),
        ({"x": np.zeros((2, 5, 5, 1), np.uint8)}, r"x = 'uint8\[2, 5, 5, 1\]' is not usable: samples like those of"),
        ({"y": np.array([1])}, "y = 'int64.1.' is not usable: a label for each of the 2 samples"),
    ],
)
def test_a_mistake_in_the_call_is_one_line(changes, message, digits):
    arguments = {"run": CONFIG, "x": digits[0], "y": digits[1], **changes}
    with pytest.raises(ConfigError, match=message):
        leakage(arguments.pop("run"), arguments.pop("x"), arguments.pop("y"), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method.name": "local"}, "method.name = 'local' is not usable: a method whose clients upload something"),
        ({"method.name": "fedamp"}, "a message that the server computes for each client"),
        ({"method.name": "fedfcd"}, "round -1, which only a Result has behind it"),
        ({"method.name": "fedsoup", "data.validation_share": 0.2}, "validation samples to select on"),
        ({"compression.kind": "int8"}, "compression.kind = 'int8' is not usable: \"none\": whole arrays are compared"),
        ({"participation.collaborate": False}, "participation.collaborate = False is not usable: true: alone, clients"),
        ({"data.source": "arrays"}, "run = 'a Config of data from Python' is not usable: a Result of it, or"),
    ],
)
def test_a_federation_that_cannot_be_attacked_is_one_line(changes, message, digits):
    with pytest.raises(ConfigError, match=message):
        leakage(CONFIG.replace(changes), *digits, steps=1)


def test_a_method_that_has_no_derivative_is_one_line(digits, tables_as_before):
    @register_method("stuck")
    def stuck(model, train):
        def local(now, view, client, data):
            sent = lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x + 1, data.x)
            return Update(client, sent, TrainInfo(jnp.zeros(()), jnp.int32(0)))

        return METHODS["fedavg"](model, train)._replace(local=local)

    with pytest.raises(
        ConfigError, match="'stuck' is not usable: a method and a model whose upload can be diff"
    ) as error:
        leakage(CONFIG.replace("method.name", "stuck"), *digits)
    assert "\n" not in str(error.value)


def test_a_picture_has_targets_above_and_a_row_for_each_attack(of_fedavg):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    ax = plot_leakage({"first": of_fedavg, "second": of_fedavg})
    assert [label.get_text() for label in ax.get_yticklabels()] == ["target", "first", "second"]
    drawn = [np.asarray(image.get_array()) for image in ax.images]
    expected = [*of_fedavg.targets, *of_fedavg.images, *of_fedavg.images]
    for image, of in zip(drawn, expected, strict=True):
        np.testing.assert_array_equal(image, of[..., 0])
    assert [text.get_text() for text in ax.texts] == 2 * [f"{score:.1f}" for score in of_fedavg.psnr]
    for name in ("fedavg", "fedecouple", "fedper_pp_approx"):  # the first picture of it shows the whole name
        ax = plot_leakage(dict.fromkeys((name, "second", "third", "fourth"), of_fedavg))
        ax.figure.canvas.draw()
        assert ax.get_tightbbox().x0 >= 0
    odd = plot_leakage({"lr $5 & $6": of_fedavg, 5 * "a long name ": of_fedavg})
    assert [label.get_text().count("\n") for label in odd.get_yticklabels()] == [0, 0, 3]
    assert odd.get_yticklabels()[1].get_text() == r"lr \$5 & \$6"
    alone = plot_leakage(of_fedavg)
    assert [label.get_text() for label in alone.get_yticklabels()] == ["target", "fedavg"]
    pyplot.close("all")
    with pytest.raises(ConfigError, match=r"found = \[\] is not usable: attacks on the same images, one or more"):
        plot_leakage({})


def test_a_picture_has_the_first_twelve_images_of_attacks_on_the_same(of_fedavg):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    repeated = {name: np.repeat(getattr(of_fedavg, name), 8, axis=0) for name in ("targets", "images", "psnr")}
    many = dataclasses.replace(of_fedavg, **repeated)
    assert len(plot_leakage(many).images) == 2 * 12
    pyplot.close("all")
    with pytest.raises(ConfigError, match=r"found = \['a', 'b'\] is not usable: attacks on the same images"):
        plot_leakage({"a": of_fedavg, "b": many})
