"""What an upload is an update of, and which numbers of it may be changed on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.method import Method, PerClass, SentIf
from fedjax_pfl.methods import METHODS
from fedjax_pfl.ops.training import Trainer, is_off
from fedjax_pfl.ops.uploads import has_form_of, map_values, origin_of
from tests import generator
from tests.reference import at, client, now
from tests.toys import Untrained

KEY, N = generator.key(3), 7


def test_a_form_is_structure_shapes_and_types_of_real_numbers():
    view = {"a": jnp.ones((2, 3)), "b": [jnp.ones(4)]}
    assert has_form_of(view, jax.tree.map(jnp.zeros_like, view))
    for other in (
        (),
        {"a": jnp.ones((2, 3))},
        {"a": jnp.ones((3, 2)), "b": [jnp.ones(4)]},
        {"a": jnp.ones((2, 3)), "b": (jnp.ones(4),)},
        {"a": jnp.ones((2, 3)), "b": [jnp.ones(4, jnp.bfloat16)]},
    ):
        assert not has_form_of(view, other)
    for view in ((), {"a": jnp.ones(2), "n": jnp.ones(2, jnp.int32)}):
        assert not has_form_of(view, view)


def test_an_array_is_an_update_of_the_one_received_under_its_name():
    method = Method(None, None, None, None, None)
    view = {
        "w": {"same": jnp.ones(3), "shape": jnp.ones(4), "type": jnp.ones(3, jnp.int32)},
        "rows": PerClass(jnp.ones(2), jnp.ones((2, 3))),
        "late": SentIf(jnp.array(True), jnp.ones(3)),
        "never": SentIf(jnp.array(False), jnp.ones(3)),
    }
    upload = {
        "w": {"same": jnp.ones(3), "shape": jnp.ones(3), "type": jnp.ones(3)},
        "rows": PerClass(jnp.ones(2), jnp.ones((2, 3))),
        "late": SentIf(jnp.array(True), jnp.ones(3)),
        "never": SentIf(jnp.array(True), jnp.ones(3)),
        "new": jnp.ones(3),
    }
    found = origin_of(method, view, upload)
    assert jax.tree.structure(found) == jax.tree.structure(upload)
    ones = [jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(found) if leaf.any()]
    assert ones == ["['late'].value", "['w']['same']"]
    assert not any(leaf.any() for leaf in jax.tree.leaves(origin_of(method._replace(sends_change=True), view, upload)))


def test_values_are_all_real_numbers_but_statistics_flags_and_counts():
    upload = {
        "w": {"norm": {"scale": jnp.ones(2), "running_mean": jnp.ones(2), "running_var": jnp.ones(2)}},
        "rows": PerClass(jnp.ones(2), (jnp.ones((2, 3)), jnp.ones(2, bool))),
        "late": SentIf(jnp.array(True), {"running_var": jnp.ones(3), "alpha": jnp.ones(3)}),
        "steps": jnp.array(3, jnp.int32),
    }
    tens = jax.tree.map(lambda leaf: 10 * leaf.astype(jnp.float32), upload)
    in_rows = lambda held, path, leaf, ten: leaf - held[:, None] * ten  # noqa: E731
    found = map_values(lambda path, leaf, ten: leaf + ten, upload, tens, in_rows=in_rows)
    assert jax.tree.structure(found) == jax.tree.structure(upload)
    values = {jax.tree_util.keystr(path): np.unique(leaf).tolist() for path, leaf in jax.tree.leaves_with_path(found)}
    assert {path: value for path, value in values.items() if value != [1]} == {
        "['w']['norm']['scale']": [11.0],
        "['rows'].rows[0]": [-9.0],
        "['late'].value['alpha']": [11.0],
        "['steps']": [3],
    }


class Still(Untrained):
    """At a rate of 0, what is trained comes back as it was: nobody need compute gradients to see that.

    A method's own steps are taken, on all of the client's samples as one batch: there are no loops to be compiled.
    """

    def __call__(self, now, loss, params, data, *, lr=None, **others):
        trains = Untrained if lr is None or is_off(lr) else Trainer
        return trains.__call__(self, now, loss, params, data, lr=lr, **others)

    def over_batches(self, now, step, carry, data, **_):
        slots = jnp.arange(data.capacity)
        return step(carry, data.take(slots, slots < data.count), now.key)


@pytest.fixture(scope="module")
def uploads(model, model_with_maps, model_with_norm, model_with_projection, federation):
    """name -> what client 2 uploads without training, and what that is taken for an update of; all in one program.

    With a learning rate of 0. Methods are left out that send changes, or nothing under a name that they have received.
    """
    special = {"fedcpd": model_with_maps, "pfedcspc": model_with_projection, "fedbn": model_with_norm}

    def of(name, x, y, tables):
        method = METHODS[name](special.get(name, model), Still(lr=0.0))
        data, test = (client_data(x, y, rows, at(2)) for rows in tables)
        server, own = method.init(KEY, N)
        # So that nothing is 0, which a change without training is.
        view = jax.tree.map(lambda leaf: leaf + 1 if leaf.dtype == jnp.float32 else leaf, method.broadcast(server))
        upload = method.local(now(KEY, 0), view, own, data._replace(validation=test)).upload
        sent, received = ({path for path, _ in jax.tree.leaves_with_path(tree)} for tree in (upload, view))
        return None if method.sends_change or not sent & received else (upload, origin_of(method, view, upload))

    tables = client(jax.tree.map(np.asarray, (federation.train, federation.test)), 2)
    of_all = jax.jit(lambda *pool: {name: of(name, *pool) for name in METHODS})
    return jax.tree.map(np.asarray, of_all(federation.x, federation.y, tables))


# What they send is a change, or has no name that was sent down.
NO_UPDATES = {"fedamp", "feddc", "fedfcd", "fedfomo", "fedgh", "fednova", "heur_fedamp", "local", "scaffold"}


@pytest.mark.parametrize("name", METHODS)
def test_what_is_taken_for_an_update_of_the_view_comes_back_as_it_was_without_training(name, uploads):
    """An array that differs is no trained one, and its method has to say so."""
    assert (uploads[name] is None) == (name in NO_UPDATES)
    if name in NO_UPDATES:
        return
    pairs = list(zip(*map(jax.tree.leaves, uploads[name]), strict=True))
    # FedProto and FedTGP send class means alone, which are no trained form of those that came down.
    assert any(origin.any() for _, origin in pairs) == (name not in {"fedproto", "fedtgp"})
    for sent, origin in pairs:
        if origin.any():
            np.testing.assert_allclose(sent, origin, atol=1e-6)
