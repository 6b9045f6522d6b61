"""Whether a model of the user's answers for each sample by itself."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from fedjax_pfl.errors import ConfigError


def check_apart(
    name: str,
    params: PyTree,
    evaluate: Callable[[PyTree, Shaped[Array, "2 ..."]], Shaped[Array, "2 ..."]],
    x: jax.ShapeDtypeStruct,
) -> None:
    """Checks that in evaluation no sample changes what comes out for another one.

    Shapes do not tell: of samples [h, w], Flax's ``nn.Conv`` with two dimensions takes a batch for one image with w
    channels, and gives back as many rows. Batches are filled up with other samples, which would then change results.

    Args:
      name: of the model, for the message.
      params: shapes and types of its parameters.
      evaluate: parameters, x -> features or logits.
      x: a batch of two samples.

    Raises:
      ConfigError: the first sample's values differ between two batches that differ in the second sample.
    """
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(3, *x.shape[1:])) if x.dtype.kind == "f" else rng.integers(0, 2, (3, *x.shape[1:]))
    samples = numbers.astype(x.dtype)

    def drawn(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        """Weights by their fan-in; biases, scales and statistics around 1. To compile ``init`` would take longer."""
        scaled = rng.normal(size=leaf.shape) / np.sqrt(np.prod(leaf.shape[:-1]))
        return (scaled if len(leaf.shape) > 1 else rng.uniform(0.5, 1.5, leaf.shape)).astype(leaf.dtype)

    params = jax.tree.map(drawn, params)
    # Compiled by hand: called as it is, within the trace of a program that makes its model there, it would be traced.
    program = jax.jit(lambda params, x: evaluate(params, x)[0]).lower(params, x).compile()
    one, other = (np.asarray(program(params, samples[[0, at]]), np.float32) for at in (1, 2))
    if not np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True):
        allowed = (
            "a model whose output for a sample does not change with the other samples of a batch (the first axis of x)"
        )
        hint = "; a last axis for the channels, x[..., None], may be what is missing in the data" if x.ndim == 3 else ""
        raise ConfigError("model", name, f"{allowed}{hint}")
