"""Rows of trees."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.ops.tree import put_rows, take_rows, where_rows


def tree(offset=0):
    return {"a": offset + jnp.arange(12.0).reshape(4, 3), "b": (offset + jnp.arange(4, dtype=jnp.int32),), "none": ()}


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_where_rows_chooses_row_by_row():
    mask = np.array([True, False, False, True])
    new, old = tree(), tree(100)
    found = where_rows(jnp.asarray(mask), new, old)
    assert_equal(found["a"], np.where(mask[:, None], new["a"], old["a"]))
    assert_equal(found["b"][0], np.where(mask, new["b"][0], old["b"][0]))


def test_rows_past_the_end_are_read_as_the_last_and_not_written():
    ids = jnp.array([2, 4, 0], jnp.int32)
    taken = take_rows(tree(), ids)
    assert_equal(taken["a"], np.asarray(tree()["a"])[[2, 3, 0]])
    assert_equal(taken["b"][0], [2, 3, 0])
    put = put_rows(tree(), ids, take_rows(tree(100), ids))
    expected = np.asarray(tree()["a"]).copy()
    expected[[2, 0]] += 100
    assert_equal(put["a"], expected)
    assert_equal(put["b"][0], [100, 1, 102, 3])
