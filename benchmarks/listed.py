"""Options whose value is a list of names, separated by commas."""

import argparse
from collections.abc import Callable, Iterable


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The ``type=`` of an option that takes some of the known names.

    What it returns raises `argparse.ArgumentTypeError` for a name that is not known.
    """
    allowed = list(known)

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
        return names

    return read
