"""FedProx: its limits and its gradient."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedprox import fedprox
from fedjax_pfl.models import Model
from tests import generator
from tests.reference import MLP, client_key, held, now, to_numpy

KEY = generator.key(4)
T0 = jnp.zeros((), jnp.int32)


def play(method, federation):
    engine = Engine(method, 7, Participation(0.3, 0.7, 0.2))
    run = jax.jit(engine.init)(KEY, federation)
    return jax.jit(engine.rounds)(KEY, run, T0, T0 + 3, jnp.array(True), federation)


def test_without_the_proximal_term_it_is_fedavg_bit_for_bit(model, trainer, federation):
    run, expected = play(fedprox(model, trainer, mu=0.0), federation), play(fedavg(model, trainer), federation)
    jax.tree.map(np.testing.assert_array_equal, run, expected)


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_local_steps_follow_the_gradient_plus_mu_times_the_drift(mu, model, trainer, federation):
    """mu is a traced value here, so that 0 is an ordinary coefficient too."""
    data = client_data(federation.x, federation.y, jax.tree.map(lambda leaf: leaf[4], federation.train))

    @jax.jit
    def local(key, view, mu):
        return fedprox(model, trainer, mu=mu).local(now(key, 0), view, (), data).upload

    view, mlp = model.init(KEY), MLP(federation.x, federation.y)
    w0 = to_numpy(view)

    def gradient(w, rows):
        return jax.tree.map(lambda g, w, w0: g + mu * (w - w0), mlp.gradient(w, rows), w, w0)

    key = client_key(KEY, 0, 4)
    found = local(key, view, jnp.array(mu))
    expected, _ = mlp.train(w0, key, 0, held(federation.train, 4), trainer, gradient=gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


def test_a_larger_mu_keeps_clients_nearer_on_a_convex_task(trainer, federation):
    def pixels(x):
        return (x.astype(jnp.float32) / 255 - 0.45).reshape(len(x), -1)

    def linear(phi, z):
        return z @ phi["kernel"]

    model = Model(
        init=lambda key: {"extractor": {}, "head": {"kernel": jnp.zeros((16, 3))}},
        features=lambda theta, x, mask=None: pixels(x),
        features_and_maps=lambda theta, x, mask=None: (pixels(x), ()),
        classify=linear,
        apply=lambda params, x, mask=None: linear(params["head"], pixels(x)),
        dim=16,
        classes=3,
        maps=(),
    )
    trainer = replace(trainer, epochs=20, batch_size=32, momentum=0.0, lr=0.2)

    @jax.jit
    def mean_drift(mu):
        method = fedprox(model, trainer, mu=mu)
        view = model.init(KEY)

        def drift(client):
            upload = method.local(now(KEY, 0), view, (), client_data(federation.x, federation.y, client)).upload
            return jnp.linalg.norm(upload["head"]["kernel"] - view["head"]["kernel"])

        return jnp.mean(jax.lax.map(drift, federation.train))

    drifts = [float(mean_drift(jnp.array(mu))) for mu in (0.0, 0.01, 0.1, 1.0, 4.0)]
    assert (np.diff(drifts) < 0).all()
    assert drifts[-1] < 0.5 * drifts[0]
