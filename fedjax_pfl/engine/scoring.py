"""Evaluation: the scores of one model on one set of samples."""

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
    """Scores on test samples, of one client or, with a leading axis, of each client.

    Attributes:
      correct: number of test samples classified correctly.
      accuracy: correct / n_test.
      macro_f1: F1 averaged over the classes among the client's test samples.
      macro_f1_union: F1 averaged over these and the predicted classes (scikit-learn's default).
      loss: mean cross-entropy; not finite if the model has diverged.
    """

    correct: Float[Array, "..."]
    accuracy: Float[Array, "..."]
    macro_f1: Float[Array, "..."]
    macro_f1_union: Float[Array, "..."]
    loss: Float[Array, "..."]


class Scored(NamedTuple):
    """The scores of a model on the samples that it is evaluated on.

    Attributes:
      test: scores on the test samples (with ``data.evaluate_on = "validation"``, on the validation samples).
      validation: scores on the validation samples, if these are scored in addition; else None.
      hits: number of correctly classified test samples of each class.
      own: metric -> its value on the samples of ``test``, for the metrics that the config names.
    """

    test: Scores
    validation: Scores | None
    hits: Float[Array, "*clients classes"]
    own: dict[str, Float[Array, "*clients"]]


class Evaluation(NamedTuple):
    """All scores after a round.

    Attributes:
      pre: scores of each client after aggregation and personalisation; every leaf [N].
      post: scores of each client right after its last local training; every leaf [N].
      shared: scores of the global model on the pooled test set; None if the method has none.
      diagnostics: the diagnostics of clients and server; those of the clients are NaN before round 0.
      shared_own: metric -> its value for the global model; empty if the method has none.
    """

    pre: Scored
    post: Scored
    shared: Scores | None
    diagnostics: Diagnostics
    shared_own: dict[str, Float[Array, ""]]


class Outputs(NamedTuple):
    """Outputs of some clients' models on the samples that they are scored on, in the order of the clients' samples.

    Attributes:
      logits: [clients, capacity, classes]; arbitrary at the padding.
      features: z, [clients, capacity, dim], likewise; None if they are not wanted.
    """

    logits: Float[Array, "clients capacity classes"]
    features: Float[Array, "clients capacity dim"] | None


class Tally(NamedTuple):
    """Counts on test samples; the tallies of the parts of a test set add up to the tally of the whole set.

    Attributes:
      hits: number of correctly classified samples of each class.
      guesses: number of samples that were predicted to be of each class.
      loss: the sum of the cross-entropies.
    """

    hits: Float[Array, "... classes"]
    guesses: Float[Array, "... classes"]
    loss: Float[Array, "..."]


def tally(predict: Callable[[Shaped[Array, "batch ..."]], Float[Array, "batch classes"]], data: ClientData) -> Tally:
    """The `Tally` of one client, computed in batches.

    Args:
      predict: x [batch, ...] -> logits [batch, classes].
      data: the client's test samples; there may be none.
    """
    width = min(BATCH, data.capacity)
    classes = data.class_counts.shape[-1]

    def block(number: Int[Array, ""], sums: Tally) -> Tally:
        slots = number * width + jnp.arange(width)
        batch = data.take(slots, slots < data.count)
        logits = predict(batch.x)
        loss = cross_entropies(logits, batch.y)
        # If a diverged model's logits are all NaN, argmax would give class 0. A logit of -inf excludes its class.
        answered = batch.mask * jnp.isfinite(jnp.max(logits, axis=-1)).astype(jnp.float32)
        guess = jax.nn.one_hot(jnp.argmax(logits, axis=-1), classes) * answered[:, None]
        hits = guess * jax.nn.one_hot(batch.y, classes)
        new = Tally(jnp.sum(hits, axis=0), jnp.sum(guess, axis=0), jnp.sum(loss * batch.mask))
        return jax.tree.map(jnp.add, sums, new)

    zeros = jnp.zeros((classes,), jnp.float32)
    blocks = (data.longest + width - 1) // width
    return lax.fori_loop(0, blocks, block, Tally(zeros, zeros, jnp.zeros((), jnp.float32)))


def scores_of(counted: Tally, class_counts: Float[Array, " classes"]) -> Scores:
    """The scores on a test set, from its tally and its number of samples per class; all zeros if it is empty."""
    f1 = 2 * counted.hits / jnp.maximum(counted.guesses + class_counts, 1.0)
    held = class_counts > 0

    def mean_over(classes: Bool[Array, " classes"]) -> Float[Array, ""]:
        chosen = classes.astype(jnp.float32)
        return jnp.sum(f1 * chosen) / jnp.maximum(jnp.sum(chosen), 1.0)

    n = jnp.maximum(jnp.sum(class_counts), 1.0)
    correct = jnp.sum(counted.hits)
    union = mean_over(held | (counted.guesses > 0))
    return Scores(correct, correct / n, mean_over(held), union, counted.loss / n)
