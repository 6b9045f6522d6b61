"""The server's corpus of prototypes, their augmentation by brute force, and both contrasts against NumPy loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from fedjax_pfl.methods.pfedcspc.contrast import augmented_contrast, weighted_contrast
from fedjax_pfl.methods.pfedcspc.corpus import augment_prototypes, gather

RNG = np.random.default_rng(0)


def slopes(function, point, step=1e-6):
    """The gradient of a function, by differences in float64."""
    result = np.zeros(point.shape)
    for at in np.ndindex(point.shape):
        ends = np.stack([point, point]).astype(np.float64)
        ends[0][at] += step
        ends[1][at] -= step
        result[at] = (function(ends[0]) - function(ends[1])) / (2 * step)
    return result


# --- The corpus ------------------------------------------------------------------------------------------------------

CLIENTS, C, M, D, ABSENT = 5, 3, 4, 3, 9
U = RNG.normal(size=(CLIENTS, C, M, D)).astype(np.float32)
VALID = np.zeros((CLIENTS, C, M), bool)
VALID[0, 0, [0, 2, 3]] = VALID[0, 1, 1:3] = True
VALID[1, 0, 1] = VALID[1, 2] = True  # the only one of its class
VALID[2, 1, 2:] = True  # the only class of its client
VALID[4] = RNG.random((C, M)) < 0.7
VALID[4, :, 0] = True
IDS = np.array([4, 0, 7, ABSENT, 2])  # the fourth did not take part
COUNT = int(VALID.sum())
ORDER = (1, 4, 0, 2, 3)  # of the rows, by id

collect = jax.jit(gather)


def corpus_of(u, valid, ids):
    return collect(jnp.asarray(u), jnp.asarray(valid), jnp.asarray(ids, jnp.int32))


def used(corpus):
    """The rows that mean something."""
    return {name: np.asarray(rows)[:COUNT] for name, rows in corpus._asdict().items() if name != "count"}


@pytest.fixture(scope="module")
def corpus():
    return corpus_of(U, VALID, IDS)


def test_the_corpus_holds_each_prototype_once_by_client_and_class(corpus):
    expected = []
    for rank, row in enumerate(ORDER):
        client_start, client_size = len(expected), VALID[row].sum()
        for c in range(C):
            class_start, class_size = len(expected), VALID[row, c].sum()
            for u in U[row, c, VALID[row, c]]:
                expected.append((u, c, rank, class_start, class_size, client_start, client_size))
    fields = ("u", "y", "client", "class_start", "class_size", "client_start", "client_size")
    found = used(corpus)
    assert int(corpus.count) == len(expected) == COUNT
    assert set(found) == set(fields)
    for name, rows in zip(fields, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(found[name], rows)


def test_neither_the_order_of_the_clients_nor_absent_rows_change_the_corpus(corpus):
    for order in ((4, 3, 2, 1, 0), (3, 0, 2, 4, 1)):
        jax.tree.map(
            np.testing.assert_array_equal,
            used(corpus_of(U[list(order)], VALID[list(order)], IDS[list(order)])),
            used(corpus),
        )
    # As many absent rows more as it takes to fill a chunk: what stands in them is of no account.
    more = [np.concatenate([a, a[:2]]) for a in (U, VALID, IDS)]
    more[1][CLIENTS:], more[2][CLIENTS:] = False, ABSENT
    longer = corpus_of(*more)
    assert int(longer.count) == COUNT
    jax.tree.map(np.testing.assert_array_equal, used(longer), used(corpus))


def test_a_corpus_may_be_empty_or_full():
    for valid in (np.zeros_like(VALID), np.ones_like(VALID)):
        found = corpus_of(U, valid, IDS)
        assert int(found.count) == valid.sum()
    np.testing.assert_array_equal(found.u, U[np.argsort(IDS)].reshape(-1, D))
    np.testing.assert_array_equal(found.class_start, np.repeat(np.arange(0, CLIENTS * C * M, M), M))


# --- Augmented prototypes --------------------------------------------------------------------------------------------

PAIRS = 900
STEPS = (0.1, 0.3, 0.5)

augment = jax.jit(partial(augment_prototypes, pairs=PAIRS))


@pytest.fixture(scope="module")
def rows():
    """All rows of the corpus, also those that hold nothing, in no order."""
    return np.random.default_rng(1).permutation(CLIENTS * C * M)


@pytest.fixture(scope="module")
def augmented(corpus, rows):
    return jax.tree.map(np.asarray, augment(jax.random.key(2), corpus, jnp.asarray(rows, jnp.int32)))


def partners(corpus, row):
    """The others of a prototype's class, and those of its client's other classes."""
    mine = used(corpus)
    own = (mine["client"] == mine["client"][row]) & (mine["y"] == mine["y"][row])
    other = (mine["client"] == mine["client"][row]) & ~own
    return mine["u"][own & (np.arange(COUNT) != row)], mine["u"][other]


def draws(samples, u, candidates, sign):
    """The number of (partner, lambda) behind each sample: the only one that gives u + sign lambda (partner - u)."""
    steps = np.array(STEPS)[:, None]
    possible = (u + sign * steps[:, None] * (candidates - u)).reshape(-1, D)
    distance = np.abs(samples[:, None] - possible).max(axis=2)
    found = distance < 1e-5
    np.testing.assert_array_equal(found.sum(axis=1), 1)
    return found.argmax(axis=1)


@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_all_partners_and_steps_are_drawn_equally_often(corpus, rows, augmented, kind):
    """Positive samples lead away from another prototype of the class, negative ones towards one of another class."""
    steps, chosen = [], []
    for place, row in enumerate(rows):
        if row >= COUNT or not all(len(found) for found in partners(corpus, row)):
            continue
        candidates = partners(corpus, row)[kind == "negative"]
        sign = 1 if kind == "negative" else -1
        drawn = draws(getattr(augmented, kind)[place], used(corpus)["u"][row], candidates, sign)
        counts = np.bincount(drawn, minlength=3 * len(candidates))
        assert chisquare(counts).pvalue > 1e-4
        steps.append(tuple(drawn // len(candidates)))
        if len(candidates) > 1:
            chosen.append(tuple(drawn % len(candidates)))
    for sequences in (steps, chosen):  # no two prototypes draw alike
        assert len(set(sequences)) == len(sequences) > 10


def test_samples_exist_where_there_are_both_partners(corpus, rows, augmented):
    for place, row in enumerate(rows):
        if row < COUNT:
            assert augmented.exists[place] == all(len(found) for found in partners(corpus, row))
    kinds = augmented.exists[rows < COUNT]
    assert 0 < kinds.sum() < len(kinds) == COUNT
    assert all(np.isfinite(a).all() for a in augmented)  # what is masked must not be NaN


def test_another_key_draws_anew(corpus, rows, augmented):
    other = augment(jax.random.key(3), corpus, jnp.asarray(rows, jnp.int32))
    there = augmented.exists > 0
    assert np.mean(np.asarray(other.positive)[there] == augmented.positive[there]) < 0.9
    assert np.mean(np.asarray(other.negative)[there] == augmented.negative[there]) < 0.9


def test_the_steps_of_a_pair_are_drawn_apart(corpus, rows, augmented):
    row = int(np.flatnonzero(used(corpus)["class_size"] == 2)[0])
    place, u = int(np.flatnonzero(rows == row)[0]), used(corpus)["u"][row]
    near, far = partners(corpus, row)
    steps = draws(augmented.positive[place], u, near, -1) // len(near)
    table = np.zeros((3, 3))
    np.add.at(table, (steps, draws(augmented.negative[place], u, far, 1) // len(far)), 1)
    assert chisquare(table.ravel()).pvalue > 1e-4


# --- The weighted contrast -------------------------------------------------------------------------------------------

N, K = 10, 4
Z = RNG.normal(0, 2, (N, K)).astype(np.float32)
Y = np.array([0, 1, 0, 2, 1, 0, 0, 1, 3, 2], np.int32)  # nothing else is of class 3
CLIENT = np.array([0, 0, 1, 0, 1, 0, 2, 2, 1, 1], np.int32)
MASKS = {"samples alone": np.ones(N), "padding": np.arange(N) < 7, "gaps": ~np.isin(np.arange(N), (0, 4))}

every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@partial(jax.jit, static_argnames="easy")
def contrast_and_gradient(z, y, client, mask, temperature, easy):
    return jax.value_and_grad(weighted_contrast)(z, y, client, mask, temperature=temperature, easy=easy)


def contrast(z=Z, y=Y, client=CLIENT, mask=MASKS["samples alone"], temperature=0.5, easy=0.5):
    z, mask = jnp.asarray(z, jnp.float32), jnp.asarray(mask, jnp.float32)
    return contrast_and_gradient(z, jnp.asarray(y), jnp.asarray(client), mask, jnp.float32(temperature), easy=easy)


def expected_contrast(z, mask, temperature, easy):
    """Eq. 12, pair by pair."""
    z = np.asarray(z, np.float64)
    held, total = np.flatnonzero(mask), 0.0

    def term(i, s):
        alike, together = Y[i] == Y[s], CLIENT[i] == CLIENT[s]
        weight = 1.0 if (alike and not together) or (together and not alike) else easy
        return weight * np.exp(z[i] @ z[s] / np.linalg.norm(z[i]) / np.linalg.norm(z[s]) / temperature)

    for i in held:
        others = [s for s in held if s != i]
        positives = [s for s in others if Y[s] == Y[i]]
        if positives:
            everything = sum(term(i, s) for s in others)
            total -= np.mean([np.log(term(i, s) / everything) for s in positives])
    return total / len(held)


@every_mask
@pytest.mark.parametrize("easy", [0.5, 0.2])
def test_the_weighted_contrast_and_its_gradient(mask, easy):
    for temperature in (0.5, 0.1):
        value, gradient = contrast(mask=mask, temperature=temperature, easy=easy)
        expected = partial(expected_contrast, mask=mask, temperature=temperature, easy=easy)
        assert float(value) == pytest.approx(expected(Z), rel=1e-5)
        np.testing.assert_allclose(gradient, slopes(expected, Z), rtol=1e-3, atol=1e-5)
        assert not gradient[mask == 0].any()
        assert gradient[mask == 1].any(axis=1).all()  # also of class 3, which the others push away


def test_the_weight_of_a_pair_is_half_unless_it_is_hard():
    """All cosines are 1: the value is that of the weights, from the rows in the mask."""
    y, client = np.array([[0, 0], [0, 1], [0, 0], [0, 1], [1, 0], [1, 1]]).T

    def value(*rows):
        pad = N - len(rows)
        y_, client_ = (np.pad(a[list(rows)], (0, pad)).astype(np.int32) for a in (y, client))
        return float(contrast(np.ones((N, K)), y_, client_, np.arange(N) < len(rows))[0]) * len(rows)

    # Each logarithm is of the sum of an anchor's weights over that of its positive; rows 4 and 5 have no positive.
    assert value(0, 1, 4) == pytest.approx(np.log(2) + np.log(1.5))  # positive 1; negative 1 at home, 1/2 abroad
    assert value(0, 2, 4) == pytest.approx(2 * np.log(1.5 / 0.5))  # positive 1/2; negative 1
    assert value(0, 2, 5) == pytest.approx(2 * np.log(2))  # both 1/2
    assert value(0, 1, 3) == pytest.approx(np.log(2) + 2 * np.mean(np.log([1.5, 1.5 / 0.5])))


def test_equal_weights_give_the_supervised_contrastive_loss():
    """Khosla et al., the sum over positives outside of the logarithm, in matrices."""
    mask = MASKS["padding"]
    z = Z[mask].astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    logits = z @ z.T / 0.07
    np.fill_diagonal(logits, -np.inf)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    positive = np.equal.outer(Y[mask], Y[mask]) & ~np.eye(len(z), dtype=bool)
    per_anchor = [-log_p[i, positive[i]].mean() if positive[i].any() else 0 for i in range(len(z))]
    found = float(contrast(mask=mask, temperature=0.07, easy=1.0)[0])
    assert found == pytest.approx(np.mean(per_anchor), rel=1e-5)
    anyone = RNG.integers(0, 3, N).astype(np.int32)
    assert float(contrast(client=anyone, mask=mask, temperature=0.07, easy=1.0)[0]) == found


@every_mask
def test_padding_is_not_contrasted(mask):
    z, y, client = Z.copy(), Y.copy(), CLIENT.copy()
    padding = mask == 0
    z[padding], y[padding], client[padding] = 1e6, 0, 1
    jax.tree.map(np.testing.assert_array_equal, contrast(z, y, client, mask), contrast(mask=mask))


def test_anchors_without_positives_contribute_zero():
    everyone = np.arange(N, dtype=np.int32)
    for case in ({"y": everyone}, {"mask": np.zeros(N)}, {"mask": everyone == 1}, {"mask": np.isin(everyone, (0, 1))}):
        value, gradient = contrast(**case)
        assert float(value) == 0
        assert not gradient.any()  # nor NaN, which counts as true


def test_only_directions_are_contrasted_and_a_dead_projection_has_a_gradient():
    lengths = np.linspace(0.1, 9, N)[:, None]
    (value, gradient), (expected, plain) = contrast(lengths * Z), contrast()
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(gradient, plain / lengths, rtol=1e-3, atol=1e-6)
    z = Z.copy()
    z[2], z[5] = 0, z[0]
    assert all(np.isfinite(a).all() for a in contrast(z))


# --- The contrast of augmented samples -------------------------------------------------------------------------------

B, PER = 6, 3
ANCHORS = RNG.normal(size=(B, K)).astype(np.float32)
POSITIVE, NEGATIVE = RNG.normal(size=(2, B, PER, K)).astype(np.float32)
PRESENT = np.array([1, 1, 0, 1, 1, 0], np.float32)


@jax.jit
def hinge(z, positive, negative, mask, margin):
    def loss(z, positive, negative):
        return augmented_contrast(z, positive, negative, mask, margin=margin)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(z, positive, negative)


def hinged(margin, mask=PRESENT, negative=NEGATIVE):
    args = (jnp.asarray(a, jnp.float32) for a in (ANCHORS, POSITIVE, negative, mask))
    return hinge(*args, jnp.float32(margin))


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_the_hinge_and_its_gradient(margin):
    z, positive, negative = (a.astype(np.float64) for a in (ANCHORS, POSITIVE, NEGATIVE))
    total, rise = 0.0, np.zeros(z.shape)
    rises = np.zeros((2, *positive.shape))
    scale, active = 1 / PER / PRESENT.sum(), []
    for i in np.flatnonzero(PRESENT):
        for n in range(PER):
            near, far = z[i] - positive[i, n], z[i] - negative[i, n]
            active.append(near @ near - far @ far + margin > 0)
            if active[-1]:
                total += scale * (near @ near - far @ far + margin)
                rise[i] += 2 * scale * (near - far)
                rises[:, i, n] = -2 * scale * near, 2 * scale * far
    assert 0 < sum(active) < len(active)
    value, gradients = hinged(margin)
    assert float(value) == pytest.approx(total, rel=1e-5)
    for found, expected in zip(gradients, (rise, *rises), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_pairs_that_are_far_enough_apart_and_absent_ones_cost_nothing():
    for case in ({"margin": 1.0, "negative": NEGATIVE + 50}, {"margin": 1.0, "mask": np.zeros(B)}):
        value, gradients = hinged(**case)
        assert float(value) == 0
        assert not any(gradient.any() for gradient in gradients)


def test_the_partners_of_a_pair_are_drawn_apart(corpus, rows, augmented):
    compared = 0
    for place, row in enumerate(rows):
        near, far = partners(corpus, row) if row < COUNT else ((), ())
        if min(len(near), len(far)) > 1:
            u = used(corpus)["u"][row]
            both = zip((augmented.positive, augmented.negative), (near, far), (-1, 1), strict=True)
            positive, negative = (draws(kind[place], u, others, sign) % len(others) for kind, others, sign in both)
            table = np.zeros((len(near), len(far)))
            np.add.at(table, (positive, negative), 1)
            assert chisquare(table.ravel()).pvalue > 1e-4
            compared += 1
    assert compared > 2
