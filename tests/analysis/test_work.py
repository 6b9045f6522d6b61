"""What a client computes in a round, against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pfl.analysis.work import Work, _walk, client_work
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.method import Update
from fedjax_pfl.methods import METHODS
from tests.conftest import CLASSES, TRAIN_SIZES
from tests.toys import NO_STEPS

N, PIXELS, HIDDEN, BATCH, EPOCHS = len(TRAIN_SIZES), 16, 8, 4, 2
MEAN = round(np.mean(TRAIN_SIZES))
STEPS = -(-MEAN // BATCH)
# A product of [m, k] and [k, n] takes 2 m k n operations; backward a layer has two, the first one only its kernel's.
FEATURES, HEAD = 2 * BATCH * PIXELS * HIDDEN, 2 * BATCH * HIDDEN * CLASSES
PASS = STEPS * (2 * FEATURES + 3 * HEAD)


def work(method, model, trainer, federation, **hyper):
    return client_work(Engine(METHODS[method](model, trainer, **hyper), N), jax.random.key(0), federation)


def test_fedavg_takes_the_products_of_its_epochs(model, trainer, federation):
    assert work("fedavg", model, trainer, federation) == Work(EPOCHS * PASS, True)


def test_ditto_trains_two_models(model, trainer, federation):
    assert work("ditto", model, trainer, federation) == Work(2 * EPOCHS * PASS, True)


def test_fedrep_sees_features_once_for_all_epochs_of_the_head(model, trainer, federation):
    found = work("fedrep", model, trainer, federation, head_epochs=3)
    # Features of all positions of the list in blocks; the head's kernel alone; then the extractor under a fixed head.
    blocks = 2 * max(TRAIN_SIZES) * PIXELS * HIDDEN
    assert found == Work(blocks + 3 * STEPS * 2 * HEAD + EPOCHS * STEPS * (2 * FEATURES + 2 * HEAD), True)


def count(fn, *args, known):
    traced = jax.make_jaxpr(fn)(*args)
    return _walk(traced.jaxpr, traced.consts, known)[0]


def test_convolutions_are_counted_with_their_windows():
    x, kernel = jnp.zeros((2, 9, 9, 3)), jnp.zeros((5, 5, 3, 7))

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert count(convolve, x, kernel, known=[None, None]) == Work(2 * (2 * 5 * 5 * 7) * (5 * 5 * 3), True)


def test_loops_nest_and_branches_take_the_one_that_is_known():
    product = 2 * 2**3

    def rounds(n, which, x):
        def outer(i, x):
            return lax.fori_loop(0, n * 3, lambda j, x: x @ x, x)

        x = lax.fori_loop(1, n, outer, x)
        x, _ = lax.scan(lambda x, _: (x @ x, None), x, None, length=5)
        return lax.switch(which, [lambda x: x, lambda x: x @ x @ x], x)

    args = jnp.int32(0), jnp.int32(0), jnp.zeros((2, 2))
    four, zero, one = np.int32(4), np.int32(0), np.int32(1)
    assert count(rounds, *args, known=[four, zero, None]) == Work((3 * 12 + 5) * product, True)
    assert count(rounds, *args, known=[four, one, None]) == Work((3 * 12 + 7) * product, True)
    assert count(rounds, *args, known=[four, None, None]) == Work((3 * 12 + 7) * product, True)
    assert count(rounds, *args, known=[zero, zero, None]) == Work(5 * product, True)


def test_the_steps_of_a_loop_may_depend_on_the_counter_of_the_one_around_it():
    product = 2 * 2**3

    def shrinking(n, x):
        return lax.fori_loop(0, n - 1, lambda i, x: lax.fori_loop(0, n - i, lambda j, x: x @ x, x), x)

    args = jnp.int32(4), jnp.zeros((2, 2))
    assert count(shrinking, *args, known=[np.int32(4), None]) == Work((4 + 3 + 2) * product, True)
    assert count(shrinking, *args, known=[None, None]).whole is False


def test_it_is_the_work_of_round_1_whose_terms_may_be_off_in_round_0(model, trainer, federation):
    def local(now, view, client, data):
        kernel = view["head"]["kernel"]
        sent = lax.cond(now.t == 1, lambda: kernel.T @ kernel, lambda: jnp.zeros((CLASSES, CLASSES)))
        return Update(client, sent, NO_STEPS)

    method = METHODS["fedavg"](model, trainer)._replace(local=local)
    found = client_work(Engine(method, N), jax.random.key(0), federation)
    assert found == Work(2 * CLASSES * HIDDEN * CLASSES, True)


def test_steps_are_counted_to_the_last_and_cut_short_epoch(model, trainer, federation):
    few, more = (work("fedpa", model, trainer, federation, steps=steps).flops for steps in (STEPS, 3 * STEPS + 1))
    one = work("fedpa", model, trainer, federation, steps=1).flops
    assert more > few > one
    assert (more - few) / (few - one) == pytest.approx((2 * STEPS + 1) / (STEPS - 1))


def test_a_loop_that_its_numbers_end_counts_one_step_and_says_so():
    def until_small(x):
        return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x @ x, x)

    assert count(until_small, jnp.zeros((2, 2)), known=[None]) == Work(2 * 2**3, False)


def test_a_checkpoint_is_a_call_and_a_branch_that_is_not_whole_tells():
    def until_small(x):
        return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x @ x, x)

    def larger_branch_is_whole(which, x):
        return lax.switch(which, [until_small, lambda x: x @ x @ x], x)

    product, x = 2 * 2**3, jnp.zeros((2, 2))
    assert count(jax.checkpoint(lambda x: x @ x), x, known=[None]) == Work(product, True)
    assert count(larger_branch_is_whole, jnp.int32(0), x, known=[None, None]) == Work(2 * product, False)


@pytest.mark.parametrize("name", ["fedala", "pgfedsplit"])
def test_methods_that_stop_when_they_have_converged_are_not_counted_whole(name, model, trainer, federation):
    assert not work(name, model, trainer, federation).whole
