"""The state after a run, and its file ``state.safetensors``, which has arrays named by their path in the tree."""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedjax_pfl.errors import ConfigError, first_line
from fedjax_pfl.experiment.build import DataShape
from fedjax_pfl.experiment.folders import replacing
from fedjax_pfl.method import State

STATE = "state.safetensors"
_ABOUT = "fedjax_pfl"


class Kept(NamedTuple):
    """A state from which models can be made again.

    Attributes:
      round: number of rounds done.
      data: the shape of the data for which the models were built.
      state: the state of server and clients.
    """

    round: int
    data: DataShape
    state: State


def named(tree: PyTree) -> dict[str, Any]:
    """Path -> leaf of a tree, with paths such as ``server/head/kernel``."""
    return dict(zip(_names(tree), jax.tree.leaves(tree), strict=True))


def fitted(arrays: Mapping[str, Any], like: State, where: str) -> State:
    """The state made from named arrays.

    Args:
      arrays: the leaves, as returned by `named`.
      like: shapes and types of a state of the config.
      where: the origin of the arrays, for the message.

    Raises:
      ConfigError: an array is missing, unknown, or has another shape or type than in such a state.
    """
    wanted = named(like)
    for name in [*wanted, *arrays]:
        asked, found = _described(wanted.get(name)), _described(arrays.get(name))
        if asked != found:
            raise ConfigError("state", where, f"one that fits the config: {name} is {found} instead of {asked}")
    state: State = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])
    return state


def write_state(path: Path, kept: Kept) -> None:
    """Writes a state, with its round and the shape of the data as metadata; equal states give equal files."""
    about = {"round": kept.round, "data": kept.data._asdict()}
    # One metadata entry, because the order of several entries is not fixed.
    write_arrays(path, named(kept.state), {_ABOUT: json.dumps(about)})


def read_state(path: Path) -> tuple[int, DataShape, dict[str, np.ndarray]]:
    """Reads a state: the number of rounds done, the shape of the data, and name -> array.

    Raises:
      ConfigError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            about, names = json.loads((file.metadata() or {})[_ABOUT]), file.keys()
            shape = DataShape(**{**about["data"], "sample": tuple(about["data"]["sample"])})
            return int(about["round"]), shape, {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("state", str(path), f"a state that a run has written ({error})") from None


def write_arrays(path: Path, arrays: Mapping[str, Any], about: dict[str, str] | None = None) -> None:
    """Writes a safetensors file and replaces an existing one atomically: a reader never sees half of a file.

    Args:
      path: the file; its folder is created.
      arrays: name -> array.
      about: metadata.

    Raises:
      OSError: the file cannot be written.
    """
    # The format writes the memory of an array as it is, so it must be in C order.
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with replacing(path) as partial:
        partial.touch()
        usual = partial.stat().st_mode
        try:
            save_file(ordered, partial, about)
        except SafetensorError as error:  # also on a full disk
            raise OSError(errno.EIO, first_line(error)) from None
        partial.chmod(usual)  # safetensors gives its files to their owner alone


def _names(tree: PyTree) -> list[str]:
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]


def _described(leaf: Any) -> str:
    return "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
