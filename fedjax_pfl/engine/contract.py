"""Checks, from shapes alone, that a method's functions return what the contract requires (`fedjax_pfl/method.py`)."""

from collections.abc import Iterable
from textwrap import shorten
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedjax_pfl.errors import ConfigError
from fedjax_pfl.method import Method, PerClass, SentIf, State, TrainInfo, Update, is_part


def update_of(returned: Any) -> Update:
    """The value that a method's ``local`` has returned, checked to be an `Update` of the right parts.

    Raises:
      ConfigError: it is something else, or its info, post or diagnostics are, or parts of its upload cannot be counted.
    """
    what = "what the method's local returns"
    if not isinstance(returned, Update):
        raise ConfigError(what, type(returned).__name__, "an Update")
    info, post, diagnostics = returned.info, returned.post, returned.diagnostics
    if not isinstance(info, TrainInfo):
        raise ConfigError(f"{what} as info", _form(info), "a TrainInfo(loss, steps)")
    _check_numbers(f"{what} as info", info._asdict())
    if post is not None and not (isinstance(post, tuple) and len(post) == 2):
        raise ConfigError(f"{what} as post", _form(post), "a pair (view, client), or None")
    if diagnostics is not None:
        _check_numbers(f"{what} as diagnostics", diagnostics)
    check_parts(f"{what} as upload", returned.upload)
    return returned


def initial_state(method: Method, returned: Any) -> State:
    """The value that a method's ``init`` has returned, as a state of the server and of one client.

    Raises:
      ConfigError: it is not a pair, a checkpoint cannot hold it, or the engine would not find a client's message.
    """
    state = State(*pair_of("init", returned, "server", "state of a client"))
    _check_storable(state)
    _check_inbox(state.clients, method)
    return state


def upload_of_setup(returned: Any, client: PyTree, upload: PyTree) -> PyTree:
    """The upload that a method's ``setup`` has returned, with a state of the client.

    Args:
      returned: the value.
      client: the state of a client.
      upload: what ``local`` uploads.

    Raises:
      ConfigError: it is not a pair, or a part of it has another form than ``client`` or ``upload``.
    """
    ready, sent = pair_of("setup", returned, "client", "upload")
    check_form("the method's state of a client", ready, client, "as from init", when=" after setup")
    check_form("the upload of the method's setup", sent, upload, "as in that of local: one aggregate has both")
    return sent


def check_diagnostics(of_clients: Iterable[str], of_server: Any, taken: str) -> None:
    """Checks that each name of a method's diagnostics stands for one number, and that none is ``taken``.

    Args:
      of_clients: the names of local's diagnostics.
      of_server: what ``diagnose`` returns.
      taken: a name that the package uses.

    Raises:
      ConfigError: diagnose returns no dict of single numbers, a name of it is also one of local's, or one is taken.
    """
    _check_numbers("what the method's diagnose returns", of_server)
    for name in of_clients:
        if name in of_server:
            raise ConfigError("what the method's diagnose returns", name, "names that local's diagnostics do not have")
    if taken in (*of_clients, *of_server):
        raise ConfigError("a diagnostic of the method", taken, "another name: the package records its own under it")


def check_logits(function: str, logits: Any, samples: int, classes: int) -> None:
    """Checks the logits that a method's ``predict`` or ``global_predict`` returns.

    Raises:
      ConfigError: they are not floats of the shape (samples, classes).
    """
    if not _is_array(logits) or logits.shape != (samples, classes) or not jnp.issubdtype(logits.dtype, jnp.floating):
        allowed = f"logits: floats [{samples}, {classes}], a row per sample and a column per class"
        raise ConfigError(f"what the method's {function} returns", _form(logits), allowed)


def pair_of(function: str, returned: Any, first: str, second: str) -> tuple[PyTree, PyTree]:
    """The value that a function of a method has returned, checked to be a pair.

    Raises:
      ConfigError: it is not a pair.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        what = type(returned).__name__ + (f" of {len(returned)}" if isinstance(returned, tuple) else "")
        raise ConfigError(f"what the method's {function} returns", what, f"a pair ({first}, {second})")
    return returned


def check_parts(what: str, sent: PyTree) -> None:
    """Checks that the parts of a view or an upload that are not always sent can be counted.

    Raises:
      ConfigError: there are two of a kind, or one lies within another.
    """
    outer = _parts(sent)
    inner = [within for part in outer for within in _parts(tuple(part))]
    if inner or len(outer) > len(set(map(type, outer))):
        found = [type(part).__name__ for part in (*outer, *inner)]
        raise ConfigError(f"the parts of {what}", found, "one PerClass and one SentIf at most, none within another")


def check_form(what: str, found: PyTree, wanted: PyTree, why: str, *, when: str = "") -> None:
    """Checks that a tree, called ``what``, has the containers, arrays, shapes and types of another.

    Args:
      what: its name in a message, to which the place of an array is added.
      found: the tree.
      wanted: the other tree.
      why: why it has to have that form.
      when: the end of its name.

    Raises:
      ConfigError: an array is missing or new, or has another shape or type, or a container is of another type.
    """

    def arrays(tree: PyTree) -> dict[str, str]:
        leaves = jax.tree.leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for path, leaf in leaves}

    given, known = arrays(found), arrays(wanted)
    for name in given | known:
        if (form := given.get(name, "(missing)")) != (allowed := known.get(name, "no array")):
            raise ConfigError(f"{what}{name}{when}", form, f"{allowed}, {why}")
    containers: Any = jax.tree.structure(found)
    if containers != jax.tree.structure(wanted):
        allowed = "the same tuples, lists, dicts and NamedTuples"
        outside = "define a NamedTuple outside the factory, which is called several times and would make several of it"
        raise ConfigError(f"{what}{when}", shorten(str(containers), 100), f"{allowed}, {why}; {outside}")


def check_unchanged(what: str, after: PyTree, before: PyTree) -> None:
    """Checks that a part of the state, called ``what``, has the same form after a round as before.

    Raises:
      ConfigError: see `check_form`.
    """
    check_form(f"the method's {what}", after, before, "as from init", when=" after a round")


def _check_numbers(what: str, named: Any) -> None:
    """Checks that ``what``, which a function of a method returns, is a dict of single numbers."""
    if not isinstance(named, dict):
        raise ConfigError(what, _form(named), "a dict: name -> number")
    for name, value in named.items():
        if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
            raise ConfigError(f"{what}[{name!r}]", _form(value), "one number, of shape []")


def _check_storable(state: State) -> None:
    """Checks that a checkpoint can hold the arrays of a method's initial state."""
    for path, leaf in jax.tree.leaves_with_path(state):
        name, found = f"the method's init: {jax.tree_util.keystr(path)}", _form(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ConfigError(name, found, "numbers: jax.random.key_data(key), or draw from the key of each round")
        if leaf.size == 0:
            raise ConfigError(name, found, "an array with entries, or None")


def _check_inbox(client: PyTree, method: Method) -> None:
    """Checks that the engine finds the message of the server, if there is one, in the initial state of a client."""
    needed = method.dispatch is not None or (isinstance(client, dict) and "inbox" in client)
    if needed and not hasattr(client, "inbox"):
        found = list(client) if isinstance(client, dict) else _form(client)
        raise ConfigError("the method's init: state of a client", found, "a NamedTuple with the field inbox")


def _parts(tree: PyTree) -> list[PerClass | SentIf]:
    """The parts of a view or an upload that are not always sent, but for those that lie within another."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_part) if is_part(node)]


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _form(value: Any) -> str:
    """Type and shape of an array, or the type of anything else, for messages."""
    return f"{value.dtype}{list(value.shape)}" if _is_array(value) else type(value).__name__
