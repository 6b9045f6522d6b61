"""Ends a run in its middle, as a kill would."""


class KilledError(Exception):
    """Stands for whatever ends a run without a chance to react."""


def killed_after(round_number):
    """A progress function that ends the run as soon as it hears of this round or of a later one."""

    def progress(now):
        if now.round >= round_number:
            raise KilledError

    return progress
