"""The one exception that bad input raises."""


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
