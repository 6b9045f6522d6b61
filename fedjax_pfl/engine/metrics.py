"""A user's own metrics, compiled into the evaluation in addition to the built-in ones.

A metric is a JAX function in one of two forms:

    (logits [n, classes], labels [n]) -> [n]         one value per sample; the mean over the samples is reported
    (logits, labels, mask [n]) -> []                 one value for all samples with mask 1; samples with 0 are padding
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedjax_pfl.errors import ConfigError, first_line

Metric = Callable[..., Float[Array, "..."]]
METRICS: dict[str, Metric] = {}
"""Name -> metric; contains only registered metrics."""


def measure(
    metrics: Mapping[str, Metric],
    logits: Float[Array, "n classes"],
    labels: Int[Array, " n"],
    mask: Float[Array, " n"],
) -> dict[str, Float[Array, ""]]:
    """The value of each metric, [], on the samples with mask 1; 0 if there are none.

    NaN or infinite logits are passed on to the metric.
    """
    count = jnp.sum(mask)

    def value(metric: Metric) -> Float[Array, ""]:
        if _arguments(metric) == 3:
            found = metric(logits, labels, mask)
        else:
            found = jnp.sum(jnp.where(mask > 0, metric(logits, labels), 0.0)) / jnp.maximum(count, 1.0)
        return jnp.where(count > 0, found, 0.0).astype(jnp.float32)

    return {name: value(metric) for name, metric in metrics.items()}


def check_metrics(metrics: Mapping[str, Metric], classes: int) -> None:
    """Traces each metric on shapes alone.

    Raises:
      ConfigError: field ``run.metrics``: a metric fails, or returns another shape than its form requires.
    """
    for name, metric in metrics.items():
        n = classes + 7  # a number that no other axis has
        shapes = [
            jax.ShapeDtypeStruct((n, classes), jnp.float32),
            jax.ShapeDtypeStruct((n,), jnp.int32),
            jax.ShapeDtypeStruct((n,), jnp.float32),
        ]
        arguments = _arguments(metric)
        wanted, form = ((), "one number") if arguments == 3 else ((n,), "one number for each sample, [n]")
        try:
            found: Any = jax.eval_shape(metric, *shapes[:arguments])
        except Exception as error:  # whatever the function does
            why = f"{type(error).__name__}: {first_line(error)[:200]}"
            allowed = f"it fails on logits [n, {classes}] and labels [n] ({why})"
            raise ConfigError("run.metrics", name, allowed) from error
        if not isinstance(found, jax.ShapeDtypeStruct) or found.shape != wanted:
            shown = getattr(found, "shape", type(found).__name__)
            raise ConfigError("run.metrics", name, f"with {arguments} arguments it must return {form}, not {shown}")


def _arguments(metric: Metric) -> int:
    """The number of required positional arguments of a metric: two or three."""
    parameters = inspect.signature(metric).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)
