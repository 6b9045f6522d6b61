"""Under the median, prototypes and combined heads stay finite, as the model does, when a client has diverged."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.method import Cohort, PerClass
from fedjax_pfl.methods import METHODS
from fedjax_pfl.ops.aggregate import coordinate_median
from tests.play import KEY
from tests.reference import client, now

CLIENTS = 4
# Methods that share more than parameters, and which options make them quick.
SHARING = {
    "fedpac": {},
    "fedproc": {},
    "fedcrl_approx": {},
    "fedcpd": {"gamma": 0.0},
    "pgfedsplit": {},
    "fedpa": {"generator_steps": 1, "hidden": 8},
    "fedproto": {},
}


def filled(upload, bad):
    """Uploads of four clients, the last of which has this value in all its real numbers; all hold all classes."""
    rng = np.random.default_rng(0)

    def leaf(shape):
        if not jnp.issubdtype(shape.dtype, jnp.floating):
            return np.ones((CLIENTS, *shape.shape), shape.dtype)
        values = rng.normal(0.5, 0.1, (CLIENTS, *shape.shape)).astype(np.float32)
        values[-1] = bad
        return values

    def node(part):
        if not isinstance(part, PerClass):
            return leaf(part)
        held = np.ones((CLIENTS, *part.held.shape), part.held.dtype)
        return PerClass(held, jax.tree.map(leaf, part.rows))

    return jax.tree.map(node, upload, is_leaf=lambda part: isinstance(part, PerClass))


@pytest.mark.parametrize("name", SHARING)
def test_one_upload_that_is_not_finite_does_not_reach_the_others(name, model, trainer, federation):
    factory = METHODS[name]
    rule = {"combine": coordinate_median} if "combine" in inspect.signature(factory).parameters else {}
    method = factory(model, trainer, **rule, **SHARING[name])
    data = client_data(federation.x, federation.y, client(federation.train, 2))
    server, own = jax.jit(lambda: method.init(KEY, CLIENTS))()
    upload = jax.eval_shape(lambda: method.local(now(KEY, 3), method.broadcast(server), own, data)).upload
    clients = jax.tree.map(lambda leaf: np.stack([leaf] * CLIENTS), own)
    cohort = Cohort(jnp.arange(CLIENTS), jnp.full(CLIENTS, 6.0), CLIENTS, CLIENTS)

    @jax.jit
    def aggregate(uploads):
        new, clients_after = method.aggregate(now(KEY, 3), server, clients, uploads, cohort)
        return method.broadcast(new), clients_after, new

    for bad in (np.nan, np.inf):
        shared, *after = aggregate(filled(upload, bad))
        assert jax.tree.leaves(shared), "there is something to ruin"
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((shared, after)))
