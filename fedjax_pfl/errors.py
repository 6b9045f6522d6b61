"""The exception that bad input raises."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration, file or data set that cannot be used.

    Attributes:
      field: the wrong config field (dotted), argument or file, e.g. ``"training.lr"``.
      value: the wrong value.
      allowed: the values that are allowed.
    """

    def __init__(self, field: str, value: object, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field} = {value!r} is not usable: {allowed}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, to stand in the one-line message of a `ConfigError`."""
    return str(error).strip().partition("\n")[0]


def one_of(given: object, names: Iterable[str]) -> str:
    """The text for an unknown name: the name that may have been meant, and all allowed names."""
    known = list(names)
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given).lower(), folded, n=1, cutoff=0.75)
    meant = f"did you mean {folded[near[0]]}? " if near else ""
    return f"{meant}allowed: {', '.join(known) or 'none'}"


def one_part_of(given: object, names: Iterable[str]) -> str:
    """The text for an unknown name of a part, such as a method: as `one_of`, and when it may be one's own."""
    text = one_of(given, names)
    if not isinstance(given, str) or not text.startswith("allowed: "):
        return text
    return f"{text}; or your own, once registered in this process or offered by an installed package"
