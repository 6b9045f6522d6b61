"""What is measured on a client and on parts of a test set, against scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import f1_score

from fedjax_pfl.data.federated import client_data, pack
from fedjax_pfl.engine.metrics import measure
from fedjax_pfl.engine.scoring import BATCH, Scores, scores_of, tally
from fedjax_pfl.experiment.summary import harmonic_mean, summarize

CLASSES = 5
# One part longer than a batch, one without samples, one with a sample.
PARTS = (BATCH + 7, 0, 1, 40)


@pytest.fixture(scope="module")
def samples():
    """Logits and labels; class 4 is in no sample but among the guesses, class 3 in the last part alone."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.choice(3, sum(PARTS[:3])), rng.choice([0, 3], PARTS[3])])
    return (rng.normal(size=(len(y), CLASSES)) + 1.5 * np.eye(CLASSES)[y]).astype(np.float32), y.astype(np.int32)


@pytest.fixture(scope="module")
def parts(samples):
    return pack(np.split(np.arange(len(samples[1])), np.cumsum(PARTS)[:-1]), samples[1], CLASSES)


def score(predict, data):
    return scores_of(tally(predict, data), data.class_counts)


def expected(x, y):
    """By scikit-learn; macro-F1 over the classes among the labels, and by its default."""
    guess = x.argmax(axis=1)
    assert 4 in guess
    held, union = (f1_score(y, guess, labels=c, average="macro", zero_division=0) for c in (np.unique(y), None))
    loss = (np.log(np.exp(x.astype(np.float64)).sum(axis=1)) - x[np.arange(len(y)), y]).mean()
    return Scores(np.sum(guess == y), np.mean(guess == y), held, union, loss)


def per_part(fn, samples, parts):
    """Applies ``fn`` to each part as though it were a client; the logits are its samples."""
    x, y = map(jnp.asarray, samples)
    return jax.jit(jax.vmap(lambda part: fn(lambda logits: logits, client_data(x, y, part))))(parts)


def test_scores_are_scikit_learns_and_zero_without_samples(samples, parts):
    found = per_part(score, samples, parts)
    bounds = np.cumsum((0, *PARTS))
    for i in (0, 3):
        rows = slice(bounds[i], bounds[i + 1])
        np.testing.assert_allclose([leaf[i] for leaf in found], expected(samples[0][rows], samples[1][rows]), rtol=1e-5)
    assert [float(leaf[1]) for leaf in found] == [0.0, 0.0, 0.0, 0.0, 0.0]


def test_an_answer_that_is_no_number_is_a_wrong_answer_of_no_class(samples, parts):
    """Of logits that are all NaN argmax would make class 0, and of one infinity its class."""
    x, y = np.array(samples[0]), samples[1]
    x[::5], x[1::7, 2] = np.nan, np.inf
    whole = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], pack([np.arange(len(y))], y, CLASSES))
    counted = jax.jit(lambda: tally(lambda logits: logits, client_data(jnp.asarray(x), jnp.asarray(y), whole)))()
    answered = np.isfinite(x).all(axis=1)
    guess = x.argmax(axis=1)
    np.testing.assert_array_equal(counted.guesses, np.bincount(guess[answered], minlength=CLASSES))
    np.testing.assert_array_equal(counted.hits, np.bincount(y[answered & (guess == y)], minlength=CLASSES))
    found = scores_of(counted, whole.class_counts)
    assert float(found.accuracy) == pytest.approx(np.mean(answered & (guess == y)))
    assert not np.isfinite(found.loss)
    assert (answered & (guess == y)).sum() < (guess == y).sum()


def test_a_logit_of_minus_infinity_rules_its_class_out(samples):
    """As a model does that answers with the classes alone that a client holds."""
    x, y = np.array(samples[0]), samples[1]
    x[np.arange(len(y)), (y + 1) % CLASSES] = -np.inf
    whole = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], pack([np.arange(len(y))], y, CLASSES))
    found = jax.jit(lambda: score(lambda logits: logits, client_data(jnp.asarray(x), jnp.asarray(y), whole)))()
    assert float(found.accuracy) == pytest.approx(np.mean(x.argmax(axis=1) == y))
    assert np.isfinite(found.loss)


def test_tallies_of_the_parts_give_the_scores_of_the_whole(samples, parts):
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), per_part(tally, samples, parts))
    found = scores_of(total, jnp.sum(parts.class_counts, axis=0))
    np.testing.assert_allclose(np.array(found), expected(*samples), rtol=1e-5)
    # F1 is no mean over parts.
    separate = per_part(score, samples, parts).macro_f1
    assert abs(np.average(separate, weights=PARTS) - float(found.macro_f1)) > 0.02


def test_the_harmonic_mean_of_two_zeros_is_zero():
    a, b = np.array([0.6, 0.5, 0.0, 0.0, np.nan]), np.array([0.3, 0.5, 0.7, 0.0, 0.5])
    np.testing.assert_allclose(harmonic_mean(a, b), [0.4, 0.5, 0.0, 0.0, np.nan], rtol=1e-12)
    assert float(harmonic_mean(0.6, 0.3)) == pytest.approx(0.4)


def test_i_local_is_the_mean_of_the_clients_harmonic_means_not_that_of_their_means():
    accuracy, f1 = jnp.array([0.5, 1.0, 0.0, 0.0]), jnp.array([0.25, 1.0, 0.0, 0.0])
    found = summarize(Scores(accuracy * 4, accuracy, f1, f1, accuracy), np.array([4, 4, 4, 0]))
    assert found["i_local"] == pytest.approx((1 / 3 + 1) / 3, rel=1e-6)
    assert found["i_local"] != pytest.approx(float(harmonic_mean(found["accuracy"], found["macro_f1"])), abs=0.01)


def test_what_a_metric_gives_for_padding_does_not_count():
    logits, labels = jnp.array([[1.0, 2.0], [3.0, 0.0], [jnp.inf, -jnp.inf]]), jnp.array([0, 1, 0])
    own = {"sample": lambda logits, labels: jnp.sum(logits, axis=1) + labels.astype(jnp.float32)}
    found = jax.jit(lambda mask: measure(own, logits, labels, mask))
    assert float(found(jnp.array([1.0, 1.0, 0.0]))["sample"]) == 3.5
    assert float(found(jnp.zeros(3))["sample"]) == 0
    assert np.isnan(float(found(jnp.ones(3))["sample"]))
