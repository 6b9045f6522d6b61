"""FedBN against rounds in NumPy, and what it takes for normalisation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedbn import fedbn
from fedjax_pfl.models import MODELS, build
from tests.conftest import CLASSES
from tests.play import KEY, SOME, N, exchanged, play
from tests.reference import (
    MLP,
    at,
    batches,
    client,
    client_key,
    held,
    linear,
    linear_gradient,
    softmax_loss,
    to_numpy,
    weighted_mean,
)

ROUNDS, WIDTH = 3, 8

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=5e-5)


class NormalisedMLP(MLP):
    """The model of the fixtures with batch normalisation, by hand."""

    def hidden(self, w, rows):
        return linear(w["extractor"]["hidden_layer"], self.x[rows])

    def normalised(self, w, rows, mean, var):
        deviation = np.sqrt(var + 1e-5)
        unit, norm = (self.hidden(w, rows) - mean) / deviation, w["extractor"]["norm"]
        return unit, deviation, unit * norm["scale"] + norm["bias"]

    def features(self, w, rows):
        norm = w["extractor"]["norm"]
        return np.maximum(self.normalised(w, rows, norm["running_mean"], norm["running_var"])[2], 0)

    def gradient(self, w, rows):
        """Normalised by the batch, unless it is a single sample; zero for the running statistics."""
        norm, hidden = w["extractor"]["norm"], self.hidden(w, rows)
        alone = len(rows) == 1
        mean, var = (norm["running_mean"], norm["running_var"]) if alone else (hidden.mean(0), hidden.var(0))
        unit, deviation, out = self.normalised(w, rows, mean, var)
        z = np.maximum(out, 0)
        d_logits = softmax_loss(linear(w["head"], z), self.y[rows])[1]
        d_out = d_logits @ w["head"]["kernel"].T * (out > 0)
        d_unit = d_out * norm["scale"]
        if not alone:
            d_unit = d_unit - d_unit.mean(0) - unit * (d_unit * unit).mean(0)
        still = dict.fromkeys(("running_mean", "running_var"), np.zeros(WIDTH))
        of_norm = {"scale": (d_out * unit).sum(0), "bias": d_out.sum(0), **still}
        extractor = {"hidden_layer": linear_gradient(self.x[rows], d_unit / deviation), "norm": of_norm}
        return {"extractor": extractor, "head": linear_gradient(z, d_logits)}

    def local(self, w, key, t, rows, trainer):
        """Local training, in which the running statistics go a tenth of the way to those of each batch."""
        velocity = jax.tree.map(np.zeros_like, w)
        for positions in batches(key, len(rows), epochs=trainer.epochs, batch_size=trainer.batch_size):
            batch = rows[positions]
            hidden, norm = self.hidden(w, batch), w["extractor"]["norm"]
            velocity = jax.tree.map(lambda v, g: trainer.momentum * v + g, velocity, self.gradient(w, batch))
            w = jax.tree.map(lambda w, v: w - trainer.lr * v, w, velocity)
            if len(batch) > 1:
                w["extractor"]["norm"] |= {
                    "running_mean": 0.9 * norm["running_mean"] + 0.1 * hidden.mean(0),
                    "running_var": 0.9 * norm["running_var"] + 0.1 * hidden.var(0, ddof=1),
                }
        return w


def join(layers, norm):
    return {"extractor": {"hidden_layer": layers["hidden_layer"], "norm": norm}, "head": layers["head"]}


def test_rounds_and_scores_are_numpys(model_with_norm, trainer, federation):
    method = fedbn(model_with_norm, trainer)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS, scored=False)
    mlp, rows = NormalisedMLP(federation.x, federation.y), [held(federation.train, i) for i in range(N)]
    w = to_numpy(method.personal(start.state.server, client(start.state.clients, 0)))
    layers, norms = {"hidden_layer": w["extractor"]["hidden_layer"], "head": w["head"]}, [w["extractor"]["norm"]] * N
    for t, cohort in enumerate(cohorts):
        uploads = []
        for i in cohort:
            w = mlp.local(join(layers, norms[i]), client_key(KEY, t, i), t, rows[i], trainer)
            norms[i] = w["extractor"]["norm"]
            uploads.append({"hidden_layer": w["extractor"]["hidden_layer"], "head": w["head"]})
        layers = weighted_mean(uploads, [len(rows[i]) for i in cohort])
    assert all(0 < len(cohort) < N for cohort in cohorts)
    pre = jax.jit(Engine(method, N).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        expected = join(layers, norms[i])
        jax.tree.map(near, method.personal(end.state.server, client(end.state.clients, i)), expected)
        near([float(leaf[i]) for leaf in pre], mlp.scores(expected, held(federation.test, i)), rtol=1e-3)
    assert len({norm["scale"].tobytes() for norm in norms}) > 2, "otherwise nothing has become personal"


def test_scale_shift_and_running_statistics_stay(model_with_norm, trainer, federation):
    parameters = 16 * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES
    assert exchanged(fedbn(model_with_norm, trainer), federation) == (parameters, parameters, 4 * WIDTH)


@pytest.mark.parametrize(("norm", "per_channel"), [("batch", 4), ("group", 2)])
def test_every_normalisation_of_a_resnet_is_personal(norm, per_channel, trainer):
    """Seventeen beside the 3x3 convolutions and three beside the shortcuts."""
    extractor = MODELS["resnet18"](norm=norm)
    model = build(extractor, (8, 8, 3), CLASSES, init="torch", mean=jnp.zeros(3), std=jnp.ones(3))
    server, personal = jax.eval_shape(lambda key: fedbn(model, trainer).init(key, N), KEY)
    channels = 5 * 64 + 5 * 128 + 5 * 256 + 5 * 512
    assert sum(leaf.size for leaf in jax.tree.leaves(personal)) == per_channel * channels
    names = {path[-1].key for path, _ in jax.tree.leaves_with_path(server)}
    assert names == {"kernel", "bias"}
    shared = sum(leaf.size for leaf in jax.tree.leaves(server))
    assert shared == 11_168_832 - 2 * channels + 512 * CLASSES + CLASSES


def test_running_statistics_stay_without_a_scale_beside_them_too(model_with_norm, trainer):
    """As of Flax's ``BatchNorm(use_scale=False)``."""
    norm = dict.fromkeys(("bias", "running_mean", "running_var"), jnp.zeros(WIDTH))

    def init(key):
        params = model_with_norm.init(key)
        return {**params, "extractor": {**params["extractor"], "norm": norm}}

    server, own = fedbn(model_with_norm._replace(init=init), trainer).init(KEY, N)
    assert server["extractor"]["norm"] == dict.fromkeys(norm)
    assert own["extractor"]["norm"] == norm
    assert jax.tree.leaves(own["extractor"]["hidden_layer"]) == []


def test_a_model_without_normalisation_is_refused(model, trainer):
    with pytest.raises(ValueError, match="normalisation"):
        fedbn(model, trainer)
