"""Checks, from shapes alone, that a method's functions return what the contract requires (`fedjax_pfl/method.py`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.method import State, Update


def update_of(returned: Any) -> Update:
    """The value that a method's ``local`` has returned, checked to be an `Update`.

    Raises:
      ConfigError: it is something else.
    """
    if not isinstance(returned, Update):
        raise ConfigError("what the method's local returns", type(returned).__name__, "an Update")
    return returned


def check_logits(function: str, logits: Any, samples: int, classes: int) -> None:
    """Checks the logits that a method's ``predict`` or ``global_predict`` returns.

    Raises:
      ConfigError: they are not floats of the shape (samples, classes).
    """
    is_array = hasattr(logits, "shape") and hasattr(logits, "dtype")
    if not is_array or logits.shape != (samples, classes) or not jnp.issubdtype(logits.dtype, jnp.floating):
        found = f"{logits.dtype}{list(logits.shape)}" if is_array else type(logits).__name__
        allowed = f"logits: floats [{samples}, {classes}], a row per sample and a column per class"
        raise ConfigError(f"what the method's {function} returns", found, allowed)


def pair_of(function: str, returned: Any, first: str, second: str) -> tuple[PyTree, PyTree]:
    """The value that a function of a method has returned, checked to be a pair.

    Raises:
      ConfigError: it is not a pair.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        what = type(returned).__name__ + (f" of {len(returned)}" if isinstance(returned, tuple) else "")
        raise ConfigError(f"what the method's {function} returns", what, f"a pair ({first}, {second})")
    return returned


def check_storable(state: State) -> None:
    """Checks that a checkpoint can hold the arrays of a method's initial state.

    Raises:
      ConfigError: one is a random key, or has no entries.
    """
    for path, leaf in jax.tree.leaves_with_path(state):
        name, found = f"the method's init: {jax.tree_util.keystr(path)}", f"{leaf.dtype}{list(leaf.shape)}"
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ConfigError(name, found, "numbers: jax.random.key_data(key), or draw from the key of each round")
        if leaf.size == 0:
            raise ConfigError(name, found, "an array with entries, or None")


def check_unchanged(what: str, after: PyTree, before: PyTree) -> None:
    """Checks that a part of the state, called ``what``, has the same arrays, shapes and types after a round as before.

    Raises:
      ConfigError: an array is missing or new, or has another shape or type.
    """

    def arrays(tree: PyTree) -> dict[str, str]:
        leaves = jax.tree.leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for path, leaf in leaves}

    given, wanted = arrays(after), arrays(before)
    for name in given | wanted:
        if (found := given.get(name, "(missing)")) != (allowed := wanted.get(name, "nothing")):
            raise ConfigError(f"the method's {what}{name} after a round", found, f"{allowed}, as before it")
