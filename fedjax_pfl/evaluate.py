"""Evaluation: what is measured on one client, and how clients are summed up."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from fedjax_pfl.data.federated import ClientData

# Samples per forward pass: on a CPU the activations should stay in the cache.
BATCH = 64


class Scores(NamedTuple):
    """Test results, of one client or, with a leading axis, of each client.

    Attributes:
      correct: number of test samples classified correctly.
      accuracy: correct / n_test.
      macro_f1: F1 averaged over the classes in the client's test samples.
      loss: mean cross-entropy.
    """

    correct: Float[Array, "..."]
    accuracy: Float[Array, "..."]
    macro_f1: Float[Array, "..."]
    loss: Float[Array, "..."]


def score(predict: Callable[[Shaped[Array, "batch ..."]], Float[Array, "batch classes"]], data: ClientData) -> Scores:
    """Evaluates one client on its test samples, in batches; all zeros where it has none.

    Args:
      predict: x -> logits.
      data: the client's test samples.
    """
    width = min(BATCH, data.capacity)
    classes = data.class_counts.shape[-1]

    def block(number: Int[Array, ""], sums: tuple) -> tuple:
        slots = number * width + jnp.arange(width)
        batch = data.take(slots, slots < data.count)
        logits = predict(batch.x)
        loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.y[:, None], axis=1)[:, 0]
        guess = jax.nn.one_hot(jnp.argmax(logits, axis=-1), classes) * batch.mask[:, None]
        hits = guess * jax.nn.one_hot(batch.y, classes)
        return sums[0] + jnp.sum(hits, axis=0), sums[1] + jnp.sum(guess, axis=0), sums[2] + jnp.sum(loss * batch.mask)

    zeros = jnp.zeros((classes,), jnp.float32)
    blocks = (data.count + width - 1) // width
    hits, guesses, loss = lax.fori_loop(0, blocks, block, (zeros, zeros, jnp.zeros((), jnp.float32)))
    f1 = 2 * hits / jnp.maximum(guesses + data.class_counts, 1.0)
    held = (data.class_counts > 0).astype(jnp.float32)
    macro_f1 = jnp.sum(f1 * held) / jnp.maximum(jnp.sum(held), 1.0)
    n = jnp.maximum(data.count, 1).astype(jnp.float32)
    correct = jnp.sum(hits)
    return Scores(correct, correct / n, macro_f1, loss / n)


def summarize(scores: Scores, n_test: Int[np.ndarray, " N"]) -> dict[str, float]:
    """Sums up the clients that have test samples.

    Args:
      scores: one row per client.
      n_test: test samples per client.

    Returns:
      ``accuracy`` (unweighted mean over clients), ``weighted`` (by test samples: PFLlib's number), ``std_clients``
      (population standard deviation), ``worst_10_percent`` (mean over the tenth of the clients, at least one, that fare
      worst), ``macro_f1`` and ``loss`` (unweighted means). Accuracies lie in [0, 1].
    """
    tested = n_test > 0
    accuracy, macro_f1, loss, correct = (
        np.asarray(values, np.float64)[tested]
        for values in (scores.accuracy, scores.macro_f1, scores.loss, scores.correct)
    )
    worst = np.sort(accuracy)[: max(1, len(accuracy) // 10)]
    return {
        "accuracy": float(accuracy.mean()),
        "weighted": float(correct.sum() / n_test[tested].sum()),
        "std_clients": float(accuracy.std()),
        "worst_10_percent": float(worst.mean()),
        "macro_f1": float(macro_f1.mean()),
        "loss": float(loss.mean()),
    }
