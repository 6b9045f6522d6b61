"""CCVR against pooled features and a head trained in NumPy, its hosts, its corner cases, and what a client sends."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import round_keys
from fedjax_pfl.methods.ccvr import calibrated, ccvr
from fedjax_pfl.methods.ccvr.gaussians import Gaussians, draw, pool
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedbabu import fedbabu
from fedjax_pfl.methods.feddc import feddc
from fedjax_pfl.methods.fedper import fedper
from fedjax_pfl.methods.fedprox import fedprox
from fedjax_pfl.methods.pfedcspc import pfedcspc
from fedjax_pfl.methods.scaffold import scaffold
from fedjax_pfl.ops.training import Trainer, phase_key
from fedjax_pfl.ops.tree import count
from tests.conftest import CLASSES
from tests.play import KEY, SOME, N
from tests.reference import MLP, at, batches, client, held, linear, linear_gradient, now, sgd, softmax_loss, to_numpy

ROUNDS, DRAWN = 2, 9
SERVER = {"samples_per_class": DRAWN, "server_lr": 0.3, "server_epochs": 2, "server_batch_size": 4}
HOSTS = {"fedavg": fedavg, "fedprox": partial(fedprox, mu=0.7), "scaffold": scaffold, "feddc": feddc}
CALIBRATION = {"samples_per_class": DRAWN, "train_server": Trainer(epochs=2, batch_size=4, lr=0.3)}

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
same = partial(jax.tree.map, np.testing.assert_array_equal)


def initial(method, federation):
    """The run before round 0; a model that nobody has trained is as good as any to be calibrated."""
    return jax.jit(Engine(method, N).init)(KEY, federation)


def retrained(mlp, w, federation, clients=N):
    """phi' from scratch: all features side by side, their mean and covariance, draws, and the steps on these."""
    rows = np.concatenate([held(federation.train, i) for i in range(clients)])
    z, y = mlp.features(w, rows), mlp.y[rows]
    key = phase_key(round_keys(KEY, at(ROUNDS)).aggregate, "calibrate")
    noise = np.asarray(jax.random.normal(phase_key(key, "features"), (CLASSES, DRAWN, z.shape[1])))
    drawn, labels = [], np.repeat(np.arange(CLASSES), DRAWN)
    for c in range(CLASSES):
        covariance = np.cov(z[y == c].T)
        jitter = 1e-4 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        drawn.append(z[y == c].mean(axis=0) + noise[c] @ np.linalg.cholesky(covariance + jitter).T)
    drawn = np.concatenate(drawn)

    def step(positions):
        x, y = drawn[positions], labels[positions]
        return lambda phi: linear_gradient(x, softmax_loss(linear(phi, x), y)[1])

    order = batches(key, len(labels), epochs=SERVER["server_epochs"], batch_size=4, phase="head")
    return sgd(w["head"], map(step, order), lr=SERVER["server_lr"])


@pytest.mark.parametrize(("host", "new", "devices"), [("fedavg", 0, 2), ("scaffold", 2, 1)])
def test_the_head_is_numpys_and_nothing_else_changes(host, new, devices, model, trainer, federation, mesh):
    """Wherever the clients are; the new ones have no say in it."""
    method = calibrated(HOSTS[host](model, trainer), model, **CALIBRATION)
    before = initial(method, federation).state
    engine = Engine(method, N, placement=Placement(mesh, 2) if devices == 2 else Placement(), new=new)
    found = jax.jit(engine.calibrated)(KEY, at(ROUNDS), before, federation)
    old, after = (state.server if host == "fedavg" else state.server.params for state in (before, found))
    expected = retrained(MLP(federation.x, federation.y), to_numpy(old), federation, N - new)
    jax.tree.map(near, after["head"], expected)
    assert not np.allclose(after["head"]["kernel"], old["head"]["kernel"], rtol=0.05)
    undone = {**after, "head": old["head"]}
    same(found._replace(server=undone if host == "fedavg" else found.server._replace(params=undone)), before)


def test_it_is_scored_before_training_and_on_the_server_but_not_after_training(model, trainer, federation):
    method, mlp = ccvr(model, trainer, **SERVER), MLP(federation.x, federation.y)
    run = initial(method, federation)
    run = run._replace(post=jax.tree.map(lambda leaf: leaf + 0.125, run.post))
    found = jax.jit(Engine(method, N).score)(KEY, at(ROUNDS), run, federation)
    w = to_numpy(run.state.server)
    w = {**w, "head": retrained(mlp, w, federation)}
    for i in range(N):
        near([float(leaf[i]) for leaf in found.pre.test], mlp.scores(w, held(federation.test, i)))
    pooled = np.concatenate([held(federation.pooled, block) for block in range(len(federation.pooled.count))])
    near([float(leaf) for leaf in found.shared], mlp.scores(w, pooled))
    same(found.post, run.post)


@pytest.mark.parametrize("host", HOSTS)
def test_rounds_are_the_hosts(host, model, trainer, federation):
    """One program, operation by operation."""

    def program(method):
        engine = Engine(method, N, SOME)
        run = jax.eval_shape(engine.init, KEY, federation)
        return str(jax.make_jaxpr(engine.rounds)(KEY, run, at(0), at(2), jnp.array(True), federation))

    plain = HOSTS[host](model, trainer)
    assert program(calibrated(plain, model, **CALIBRATION)) == program(plain)


def test_gaussians_pool_as_though_the_features_were_in_one_place():
    """Also of a class that two clients have a sample of, of one that has a single sample, and of one without any."""
    rng, counts = np.random.default_rng(1), np.array([[5, 1, 0, 0], [0, 0, 1, 0], [9, 1, 0, 0], [1, 0, 0, 0]])
    features = [
        [rng.normal(client + 3 * c, 1 + c, (n, 6)) for c, n in enumerate(row)] for client, row in enumerate(counts)
    ]
    means, upper = np.zeros((4, 4, 6)), np.zeros((4, 4, 21))
    for k, c in zip(*np.nonzero(counts), strict=True):
        means[k, c] = features[k][c].mean(axis=0)
        upper[k, c] = np.cov(features[k][c].T)[np.triu_indices(6)] if counts[k, c] > 1 else 0.0
    # What is not sent must not be read.
    means[counts == 0], upper[counts == 0] = 1e3, 1e3
    found = jax.jit(pool)(*(jnp.asarray(a, jnp.float32) for a in (counts, means, upper)))
    together = [np.concatenate([of_client[c] for of_client in features]) for c in range(4)]
    within = sum((len(z) - 1) * np.cov(z.T) for z in together[:2]) / sum(len(z) - 1 for z in together[:2])
    for c, covariance in enumerate([np.cov(together[0].T), np.cov(together[1].T), within]):
        close(found.mean[c], together[c].mean(axis=0), rtol=1e-4)
        close(found.covariance[c], covariance, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(found.size, [15, 2, 1, 0])


def test_a_class_that_nobody_has_is_not_drawn_and_rounding_makes_no_root_fail():
    singular = np.ones((3, 3)) - 1e-3 * np.eye(3)  # of rank 1, but for errors
    covariance = jnp.asarray(np.stack([4.0 * np.eye(3), np.eye(3), singular, np.zeros((3, 3))]), jnp.float32)
    mean = jnp.arange(12.0).reshape(4, 3)
    drawn = draw(KEY, Gaussians(mean, covariance, jnp.array([5.0, 0.0, 2.0, 1.0])), 400)
    assert int(drawn.count) == 1200
    np.testing.assert_array_equal(drawn.class_counts, [400, 0, 400, 400])
    rows = np.asarray(drawn.index)[:1200]
    np.testing.assert_array_equal(np.bincount(np.asarray(drawn.y)[rows], minlength=4), [400, 0, 400, 400])
    x = np.asarray(drawn.x)[rows].reshape(3, 400, 3)
    np.testing.assert_allclose(x[0].mean(axis=0), mean[0], atol=0.4)
    np.testing.assert_allclose(x[0].std(axis=0), 2.0, rtol=0.15)
    np.testing.assert_allclose(np.corrcoef(x[1].T), 1.0, atol=0.05)
    np.testing.assert_allclose(x[2], np.broadcast_to(mean[3], (400, 3)), atol=1e-4)


def test_a_client_sends_count_mean_and_half_a_covariance_of_each_class(model, trainer, federation):
    view = jax.eval_shape(model.init, KEY)
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    upload = jax.eval_shape(ccvr(model, trainer).calibrate.local, now(KEY, 0), view, (), data)
    assert count(upload) == CLASSES * (model.dim + model.dim * (model.dim + 1) // 2 + 1)


def test_only_a_global_model_that_is_not_calibrated_yet_can_be(model, model_with_projection, trainer):
    with pytest.raises(ValueError, match="only a global model that is scored as it is broadcast"):
        calibrated(fedper(model, trainer), model, **CALIBRATION)
    with pytest.raises(ValueError, match="its global model is calibrated already"):
        calibrated(ccvr(model, trainer), model, **CALIBRATION)
    with pytest.raises(ValueError, match="what it broadcasts is not an extractor with a head"):
        calibrated(fedbabu(model, trainer), model, **CALIBRATION)
    # It sends each client an encoder of its own, and to all an extractor without one.
    personal = pfedcspc(model_with_projection, trainer, pmi="every")
    with pytest.raises(ValueError, match="what it broadcasts is not an extractor with a head"):
        calibrated(personal, model_with_projection, **CALIBRATION)
