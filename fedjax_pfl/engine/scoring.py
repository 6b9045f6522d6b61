"""Evaluation: what is measured on one client's samples."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Diagnostics
from fedjax_pfl.ops.losses import cross_entropies

# Samples per forward pass: on a CPU the activations should stay in the cache.
BATCH = 64


class Scores(NamedTuple):
    """Test results, of one client or, with a leading axis, of each client.

    Attributes:
      correct: number of test samples classified correctly.
      accuracy: correct / n_test.
      macro_f1: F1 averaged over the classes in the client's test samples.
      macro_f1_union: F1 averaged over these and the classes that were predicted (scikit-learn's default).
      loss: mean cross-entropy; not finite where the model has diverged.
    """

    correct: Float[Array, "..."]
    accuracy: Float[Array, "..."]
    macro_f1: Float[Array, "..."]
    macro_f1_union: Float[Array, "..."]
    loss: Float[Array, "..."]


class Scored(NamedTuple):
    """The scores of a model on the samples that it is evaluated on.

    Attributes:
      test: on the test samples, or what ``data.evaluate_on`` puts in their place.
      validation: on the validation samples, where they are scored beside the test samples.
      hits: test samples of each class that were classified correctly.
      own: metric -> its value on the samples of ``test``, for the metrics that a config names.
    """

    test: Scores
    validation: Scores | None
    hits: Float[Array, "*clients classes"]
    own: dict[str, Float[Array, "*clients"]]


class Evaluation(NamedTuple):
    """All scores after a round.

    Attributes:
      pre: of each client after aggregation and personalisation; every leaf [N].
      post: of each client right after its last local training; every leaf [N].
      shared: of the global model on the pooled test set; None where the method has none.
      diagnostics: what clients and server say of the parts of the method; those of clients are NaN before round 0.
      shared_own: metric -> its value for the global model, likewise; empty where the method has none.
    """

    pre: Scored
    post: Scored
    shared: Scores | None
    diagnostics: Diagnostics
    shared_own: dict[str, Float[Array, ""]]


class Answers(NamedTuple):
    """What the models of some clients make of the samples that these are scored on, at the positions of their lists.

    Attributes:
      logits: [clients, capacity, classes]; anything at the padding.
      features: z, likewise; None where they are not wanted.
    """

    logits: Float[Array, "clients capacity classes"]
    features: Float[Array, "clients capacity dim"] | None


class Tally(NamedTuple):
    """What is counted on test samples; the tallies of parts of a test set add up to that of the whole.

    Attributes:
      hits: samples of each class classified correctly.
      guesses: samples taken for each class.
      loss: the sum of the cross-entropies.
    """

    hits: Float[Array, "... classes"]
    guesses: Float[Array, "... classes"]
    loss: Float[Array, "..."]


def tally(predict: Callable[[Shaped[Array, "batch ..."]], Float[Array, "batch classes"]], data: ClientData) -> Tally:
    """Counts what the scores of one client are made of, in batches.

    Args:
      predict: x -> logits.
      data: the client's test samples; it may have none.
    """
    width = min(BATCH, data.capacity)
    classes = data.class_counts.shape[-1]

    def block(number: Int[Array, ""], sums: Tally) -> Tally:
        slots = number * width + jnp.arange(width)
        batch = data.take(slots, slots < data.count)
        logits = predict(batch.x)
        loss = cross_entropies(logits, batch.y)
        # Of a diverged model's logits, all NaN, argmax would make class 0; -inf rules a class out.
        answered = batch.mask * jnp.isfinite(jnp.max(logits, axis=-1)).astype(jnp.float32)
        guess = jax.nn.one_hot(jnp.argmax(logits, axis=-1), classes) * answered[:, None]
        hits = guess * jax.nn.one_hot(batch.y, classes)
        new = Tally(jnp.sum(hits, axis=0), jnp.sum(guess, axis=0), jnp.sum(loss * batch.mask))
        return jax.tree.map(jnp.add, sums, new)

    zeros = jnp.zeros((classes,), jnp.float32)
    blocks = (data.longest + width - 1) // width
    return lax.fori_loop(0, blocks, block, Tally(zeros, zeros, jnp.zeros((), jnp.float32)))


def scores_of(counted: Tally, class_counts: Float[Array, " classes"]) -> Scores:
    """The scores on a test set with so many samples of each class; all zeros where it has none."""
    f1 = 2 * counted.hits / jnp.maximum(counted.guesses + class_counts, 1.0)
    held = class_counts > 0

    def mean_over(classes: Bool[Array, " classes"]) -> Float[Array, ""]:
        chosen = classes.astype(jnp.float32)
        return jnp.sum(f1 * chosen) / jnp.maximum(jnp.sum(chosen), 1.0)

    n = jnp.maximum(jnp.sum(class_counts), 1.0)
    correct = jnp.sum(counted.hits)
    union = mean_over(held | (counted.guesses > 0))
    return Scores(correct, correct / n, mean_over(held), union, counted.loss / n)
