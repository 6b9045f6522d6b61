"""Data from Python: makes a `Dataset` of arrays, data sets of samples, or tuples per client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedjax_pfl.data import hugging_face
from fedjax_pfl.data.dataset import Dataset, from_arrays
from fedjax_pfl.data.dealing import named
from fedjax_pfl.data.listed import check_rows
from fedjax_pfl.errors import ConfigError, first_line

_ACCEPTED = (
    "(x, y) or (x, y, x_test, y_test) of arrays; FederatedData; a data set of (x, y) samples, or a pair of them, for "
    "training and test; a Hugging Face Dataset or DatasetDict; or a list of tuples of arrays, one for each client"
)
_NAMES = ("samples", "labels", "test samples", "test labels")


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Samples and labels, and whose they are.

    Arrays are NumPy's, JAX's, torch's or lists: see `as_dataset` and :func:`fedjax_pfl.data.dataset.from_arrays`.

    Attributes:
      x: samples ``[train, ...]``.
      y: labels ``[train]``.
      x_test: the official test part, ``[test, ...]``, where there is one.
      y_test: its labels ``[test]``.
      users: who each sample is from, integers or strings ``[train]``: the clients of the partition ``natural``.
      test_users: the same of the test part.
      clients: instead of users, the row numbers of each client, in their order; no row belongs to two, and some may
        belong to none. Rows of the test part are counted on from those of `x`.
      name: what the summary, ``print(result)`` and errors call the data; by default ``"arrays"``, or what the data
        source is called.
      vocabulary: for text, the number of different tokens, at most 256; `x` is then tokens, whole numbers
        ``[train, length]`` from 0 to ``vocabulary - 1``. `char_lstm` needs 80, of which a text may use fewer.
    """

    x: Any
    y: Any
    x_test: Any = None
    y_test: Any = None
    users: Any = None
    test_users: Any = None
    clients: Sequence[Any] | None = None
    name: str | None = None
    vocabulary: int | None = None


def as_dataset(data: Any, *, name: str = "arrays") -> Dataset:
    """Makes a `Dataset` of what people have at hand.

    An array is whatever NumPy makes one of: its own, JAX's, torch's, pandas', a list.

    Args:
      data: one of these:

        - arrays ``(x, y)`` or, with an official test part, ``(x, y, x_test, y_test)``;
          :func:`fedjax_pfl.data.dataset.from_arrays` says what they may hold
        - :class:`FederatedData`, with users or row numbers of the clients, or with text
        - a data set with ``len`` and ``[i] -> (x, y)``, as torch has them, or a pair of them: training and test part
        - a ``Dataset`` of Hugging Face, a pair of them, or a ``DatasetDict`` with ``train`` and maybe ``test``
        - a list with a tuple ``(x, y)`` or ``(x, y, x_test, y_test)`` of arrays for each client, who keeps them
        - a `Dataset` of this package, as it is
      name: what reports and errors call the data.

    Raises:
      ConfigError: field ``data``, for anything else, and for arrays that do not fit.
    """
    return data if isinstance(data, Dataset) else _made(data, name)._replace(own=True)


def _made(data: Any, name: str) -> Dataset:
    """What `as_dataset` makes."""
    if isinstance(data, FederatedData):
        return _federated(data, data.name or name)
    if hugging_face.is_dict(data):
        return hugging_face.of_parts(data, name)
    if _is_data_set(data):
        data = (data,)
    elif not isinstance(data, list | tuple):
        loader = "; of a DataLoader, take its .dataset" if hasattr(data, "dataset") else ""
        raise ConfigError("data", type(data).__name__, f"{_ACCEPTED}{loader}")
    if 1 <= len(data) <= 2 and all(map(hugging_face.is_data_set, data)):
        return hugging_face.of_parts(dict(zip(("train", "test"), data, strict=False)), name)
    if 1 <= len(data) <= 2 and all(map(_is_data_set, data)):
        parts = [_samples(part, which, name) for part, which in zip(data, ("train", "test"), strict=False)]
        return from_arrays(*(array for part in parts for array in part), name=name)
    if isinstance(data, list) and data and all(isinstance(part, tuple) for part in data):
        return _of_clients(data, name)
    if len(data) not in (2, 4) or all(map(_is_data_set, data)):
        raise ConfigError("data", f"{type(data).__name__} of {len(data)}", _ACCEPTED)
    try:
        arrays = _arrays(data, name)
    except ConfigError:
        if all(map(_is_of_client, data)):
            kinds = ", ".join(type(part).__name__ for part in data)
            raise ConfigError("data", f"{type(data).__name__} of {kinds}", _ACCEPTED) from None
        raise
    return from_arrays(*arrays, name=name)


def _is_of_client(part: Any) -> bool:
    """Whether this, which is no array, looks like the arrays of a client, in a list or tuple."""
    return isinstance(part, list | tuple) and len(part) in (2, 4) and all(hasattr(array, "__len__") for array in part)


def _is_data_set(data: Any) -> bool:
    """Whether it gives samples one by one: what is no array, list or table, and yet has a length and items."""
    plain = isinstance(data, list | tuple | str | bytes | Mapping) or hasattr(data, "__array__")
    return not (plain or hugging_face.is_column(data)) and hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _samples(part: Any, which: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The samples and labels of one part of the data."""
    if hugging_face.is_data_set(part):
        return hugging_face.columns(part, which)
    if not len(part):
        raise ConfigError("data", name, f"the {which} part holds nothing")
    x, y = [], []
    for number in range(len(part)):
        sample = part[number]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise ConfigError("data", name, f"each sample must be (x, y), and [{number}] is {type(sample).__name__}")
        x.append(_array(_in_colours(sample[0]), f"x of sample {number}", name))
        y.append(_array(sample[1], f"y of sample {number}", name))
        for what, found in ("x", x), ("y", y):
            if found[-1].shape != found[0].shape:
                shapes = f"that of sample 0 is {found[0].shape}, and of sample {number} {found[-1].shape}"
                raise ConfigError("data", name, f"{what} must have one shape: {shapes}")
    return np.stack(x), np.stack(y)


def _in_colours(sample: Any) -> Any:
    """An image of Pillow's whose pixels are numbers of a palette's colours as these colours; all else as it is."""
    return sample.convert("RGB") if getattr(sample, "mode", None) in ("P", "PA") else sample


def _of_clients(data: Sequence[tuple], name: str) -> Dataset:
    """The data of all clients, whose users are their numbers."""
    lengths = {len(part) for part in data}
    if lengths not in ({2}, {4}):
        allowed = "a tuple (x, y) for each client, or (x, y, x_test, y_test) for each, with [] for no test samples"
        raise ConfigError("data", name, f"{allowed}; their lengths are {', '.join(map(str, sorted(lengths)))}")
    held = [_arrays(part, name, f" of client {client}") for client, part in enumerate(data)]
    without = [client for client, part in enumerate(held) if not any(array.size for array in part)]
    if without:
        raise ConfigError("data", name, f"each client needs samples; leave out those without, {named(without)}")
    known, first = next((client, x) for client, part in enumerate(held) for x in part[::2] if x.size)
    for client, part in enumerate(held):
        for x, y in zip(part[::2], part[1::2], strict=True):
            if not x.ndim or not y.ndim or len(x) != len(y):
                raise ConfigError("data", name, f"client {client} has samples {x.shape} and labels {y.shape}")
            # An empty part may be [], of which NumPy makes floats without a shape.
            if len(x) and (x.shape[1:] != first.shape[1:] or x.dtype != first.dtype):
                ones = f"{first.dtype} {first.shape[1:]}, and of client {client} {x.dtype} {x.shape[1:]}"
                allowed = f"samples must have one type and shape: those of client {known} are {ones}"
                raise ConfigError("data", name, allowed)
    for at, what in enumerate(("training", "test")[: len(held[0]) // 2]):
        if not any(len(part[2 * at]) for part in held):
            raise ConfigError("data", name, f"no client has {what} samples: give a tuple (x, y) for each client")
    users = [np.repeat(np.arange(len(held)), [len(part[at]) for part in held]) for at in range(1, len(held[0]), 2)]
    # Of [], NumPy makes floats, which would make floats of all labels.
    columns = [np.concatenate([part for part in parts if len(part)] or parts[:1]) for parts in zip(*held, strict=True)]
    made = from_arrays(*columns, name=name)
    return made._replace(users=np.concatenate(users).astype(np.int32), divided=True)


def _federated(data: FederatedData, name: str) -> Dataset:
    given = (data.x, data.y, data.x_test, data.y_test)
    x, y, x_test, y_test = (
        None if array is None else _array(array, what, name) for array, what in zip(given, _NAMES, strict=True)
    )
    if x is None or y is None:
        raise ConfigError("data", name, "FederatedData needs x and y")
    users, test_users = (None if given is None else _names(given, name) for given in (data.users, data.test_users))
    if users is not None and data.clients is not None:
        raise ConfigError(
            "data", name, "FederatedData takes users, one for each row, or clients, rows for each, not both"
        )
    made = from_arrays(x, y, x_test, y_test, users=users, test_users=test_users, vocabulary=data.vocabulary, name=name)
    if data.clients is None:
        return made
    rows = _rows(data.clients, name)
    check_rows(rows, len(made.labels), len(rows), "data", name)
    owner = np.full(len(made.labels), -1, np.int32)
    for client, held in enumerate(rows):
        owner[held] = client
    return made._replace(users=owner, divided=True)


def _rows(clients: Any, name: str) -> list[np.ndarray]:
    """The row numbers of each client."""
    needed = "clients must be row numbers, integers [n], for each of one client or more"
    if isinstance(clients, Mapping):
        raise ConfigError("data", name, f"{needed}, got a dict: list(clients.values())")
    try:
        rows = [_array(given, f"rows of client {client}", name) for client, given in enumerate(clients)]
    except TypeError:  # a number, whether Python's or in an array
        rows = []
    if not rows:
        raise ConfigError("data", name, needed)
    for client, held in enumerate(rows):
        if held.ndim != 1 or (held.size and held.dtype.kind not in "iu"):  # of [], NumPy makes floats
            hint = ": numpy.flatnonzero(mask)" if held.dtype == bool else ""
            raise ConfigError("data", name, f"{needed}; client {client} has {held.dtype} {held.shape}{hint}")
    return rows


def _names(given: Any, name: str) -> np.ndarray:
    """Users; pandas hands out strings as objects, and integers where some may be missing."""
    users = _array(given, "users", name)
    if users.dtype.kind == "T":  # NumPy's strings of any length
        users = np.array(users.tolist())
    if users.dtype != object:
        return users
    unknown = [row for row, user in enumerate(users.ravel()) if not isinstance(user, str | int | np.integer)]
    if unknown:
        found = f"row {unknown[0]} has {users.ravel()[unknown[0]]!r}"
        raise ConfigError("data", name, f"users must be strings or integers, one for each row; {found}")
    numbers = np.asarray(users.tolist())  # as strings, 10 would come before 9
    return numbers if numbers.dtype.kind in "iu" else users.astype(str)


def _arrays(data: Sequence[Any], name: str, whose: str = "") -> list[np.ndarray]:
    return [_array(array, f"{what}{whose}", name) for array, what in zip(data, _NAMES, strict=False)]


def _array(given: Any, what: str, name: str) -> np.ndarray:
    """The array that NumPy makes of it; a ConfigError for a list of unequal rows or a torch tensor on a GPU."""
    if hasattr(given, "toarray"):  # of SciPy, which NumPy would take for one object
        raise ConfigError("data", name, f"the {what} are a sparse matrix; give the array: .toarray()")
    if np.ma.is_masked(given):
        raise ConfigError("data", name, f"the {what} are a masked array with entries that are hidden; leave these out")
    try:
        return np.asarray(given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError("data", name, f"the {what} are no array ({first_line(error)})") from None
