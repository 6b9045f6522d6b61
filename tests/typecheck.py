"""Beartype for jaxtyping's import hook, once for each function instead of whenever a function around it is called."""

from beartype import beartype

_checked = {}


def once(signature):
    """Checks a stand-in of a function, which jaxtyping makes: its name and annotations, and nothing of its body.

    A factory makes its inner functions anew in every call, and their stand-ins are all alike. Annotations are compared
    as they are written: jaxtyping makes a new class each time it comes to one.
    """
    annotations = str(signature.__annotations__)
    key = signature.__module__, signature.__qualname__, signature.__code__.co_varnames, annotations
    if key not in _checked:
        _checked[key] = beartype(signature)
    return _checked[key]
