"""One client's view of the pool: labels, padding, and functions mapped over its samples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.data.federated import client_data, pack

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (40, 3, 2), dtype=np.uint8)
Y = RNG.integers(0, 4, 40).astype(np.int32)
COUNTS = (0, 1, 5, 8, 13)  # the largest is the capacity
ROWS = [RNG.permutation(40)[:n] for n in COUNTS]
CLIENTS = pack(ROWS, Y, 4)

every_client = pytest.mark.parametrize("i", range(len(COUNTS)), ids=COUNTS)


def data_of(i):
    return client_data(jnp.asarray(X), jnp.asarray(Y), jax.tree.map(lambda leaf: leaf[i], CLIENTS))


@every_client
def test_labels_and_valid_tell_samples_from_padding(i):
    data = data_of(i)
    np.testing.assert_array_equal(data.valid, np.arange(13) < COUNTS[i])
    assert data.valid.dtype == np.float32
    assert data.labels.shape == (13,)
    np.testing.assert_array_equal(data.labels[: COUNTS[i]], Y[ROWS[i]])
    # So that sums over samples can be masked sums over positions.
    counts = jnp.sum(jax.nn.one_hot(data.labels, 4) * data.valid[:, None], axis=0)
    np.testing.assert_array_equal(counts, data.class_counts)


def test_validation_samples_are_of_the_same_client():
    own, other = (jax.tree.map(lambda leaf, i=i: leaf[i], CLIENTS) for i in (2, 3))
    data = client_data(jnp.asarray(X), jnp.asarray(Y), own, jnp.int32(7), other)
    assert (int(data.id), int(data.validation.id), int(data.validation.count)) == (7, 7, COUNTS[3])


def test_blocks_of_one_sample_can_be_mapped_side_by_side():
    data = data_of(2)._replace(most=jnp.int32(13))
    np.testing.assert_array_equal(data.map(lambda x, positions: positions, batch_size=1)[: COUNTS[2]], range(COUNTS[2]))


@functools.partial(jax.jit, static_argnames="batch_size")
def mapped(i, batch_size):
    def rows_and_place(x, positions):
        return jnp.sum(x.astype(jnp.int32), axis=2) + 1000 * positions[:, None]

    return data_of(i).map(rows_and_place, batch_size=batch_size)


@every_client
@pytest.mark.parametrize("batch_size", [1, 5, 13, 128])
def test_a_mapped_function_sees_each_sample_at_its_position(i, batch_size):
    found, count = np.asarray(mapped(i, batch_size)), COUNTS[i]
    assert found.shape == (13, 3)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found[:count], X[ROWS[i]].sum(axis=2, dtype=int) + 1000 * np.arange(count)[:, None])
    # Blocks of padding alone are left out.
    assert not found[-(-count // batch_size) * batch_size :].any()


def test_clients_side_by_side_get_what_each_gets_alone():
    together = jax.vmap(lambda i: mapped(i, 5))(jnp.arange(len(COUNTS)))
    for i, count in enumerate(COUNTS):
        np.testing.assert_array_equal(together[i, :count], mapped(i, 5)[:count])
