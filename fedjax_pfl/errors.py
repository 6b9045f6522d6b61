"""The one exception that bad input raises."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration, file or data set that cannot be used.

    Attributes:
      field: the dotted config field or the file that is wrong, e.g. ``"training.lr"``.
      value: the offending value.
      allowed: what would have been accepted.
    """

    def __init__(self, field: str, value: object, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field} = {value!r} is not usable: {allowed}")


def one_of(given: object, names: Iterable[str]) -> str:
    """What is allowed where a name is not among these; first the one that may have been meant."""
    known = list(names)
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given).lower(), folded, n=1, cutoff=0.75)
    meant = f"did you mean {folded[near[0]]}? " if near else ""
    return f"{meant}allowed: {', '.join(known) or 'none'}"
