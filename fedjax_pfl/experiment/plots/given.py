"""Checks of what a plot is given."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from fedjax_pfl.errors import ConfigError


def check_given(field: str, given: object, kinds: type | tuple[type, ...], allowed: str) -> None:
    """Checks the type of what is drawn.

    Raises:
      ConfigError: it is of none of these types.
    """
    if not isinstance(given, kinds):
        raise ConfigError(field, type(given).__name__, allowed)


def counts_in(partition: Mapping[str, Any]) -> Int[np.ndarray, "N classes"]:
    """The samples per client and class in the content of a ``partition.json``.

    Raises:
      ConfigError: this is something else.
    """
    allowed = "Result.partition, or what partition.json holds"
    check_given("partition", partition, Mapping, allowed)
    if "class_counts" not in partition:
        raise ConfigError("partition", type(partition).__name__, allowed)
    return np.asarray(partition["class_counts"])
