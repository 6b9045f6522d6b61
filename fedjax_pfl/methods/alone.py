"""Any method without collaboration: the control that shows how much of its gain comes from other clients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from fedjax_pfl.data.federated import ClientData
from fedjax_pfl.method import Cohort, Method, Round, Setup, Update, personalize_nothing
from fedjax_pfl.ops.training import phase_key


class Alone(NamedTuple):
    """Personal: the state of the client, and the state of a server that serves only this client."""

    server: PyTree
    client: PyTree


def alone(method: Method) -> Method:
    """The method as N separate federations of one client each; nothing is exchanged.

    What the method learns from a client's own statistics remains (its prototypes, its regularisers, its phases of
    training); what it learns from other clients is lost. FedAvg without collaboration is Local.

    Args:
      method: the method that each client runs, with a server of its own.
    """

    def cohort(data: ClientData) -> Cohort:
        return Cohort(jnp.zeros((1,), jnp.int32), jnp.asarray(data.count, jnp.float32)[None], total=1, trainers=1)

    def dispatched(now: Round, own: Alone, data: ClientData) -> PyTree:
        if method.dispatch is None:
            return own.client
        now = Round(phase_key(now.key, "dispatch"), now.t)
        return own.client._replace(inbox=_only(method.dispatch(now, own.server, _one(own.client), cohort(data))))

    def aggregated(now: Round, server: PyTree, client: PyTree, upload: PyTree, data: ClientData) -> Alone:
        now = Round(phase_key(now.key, "aggregate"), now.t)
        combined, new = method.aggregate(now, server, _one(client), _one(upload), cohort(data))
        # As in the engine: without samples the round did not happen, unless the server acts alone.
        happened = (data.count > 0) | method.acts_alone
        server = jax.tree.map(lambda new, old: jnp.where(happened, new, old), combined, server)
        return Alone(server, _only(new))

    def init(key: Key[Array, ""], clients: int) -> tuple[tuple[()], Alone]:
        return (), Alone(*method.init(key, 1))

    def setup(now: Round, view: PyTree, client: Alone, data: ClientData) -> tuple[Alone, tuple[()]]:
        assert method.setup is not None
        data = _first(data)
        prepared, upload = method.setup(now, method.broadcast(client.server), client.client, data)
        return aggregated(now, client.server, prepared, upload, data), ()

    def local(now: Round, view: PyTree, client: Alone, data: ClientData) -> Update:
        data = _first(data)
        update = method.local(now, method.broadcast(client.server), dispatched(now, client, data), data)
        own = aggregated(now, client.server, update.client, update.upload, data)
        said = {**(update.diagnostics or {}), **method.diagnose(own.server)}
        return Update(own, (), update.info, post=update.trained, diagnostics=said)

    def aggregate(
        now: Round, server: PyTree, clients: PyTree, uploads: PyTree, cohort: Cohort
    ) -> tuple[PyTree, PyTree]:
        return server, clients

    def personalize(now: Round, view: PyTree, client: Alone, data: ClientData) -> tuple[PyTree, PyTree]:
        data, server = _first(data), client.server
        if method.calibrate is not None:
            calibrating = Round(phase_key(now.key, "calibrate"), now.t)
            plain = data if data.original is None else _first(data.original)  # as in the engine: without augmentation
            upload = method.calibrate.local(calibrating, method.broadcast(server), client.client, plain)
            server = method.calibrate.server(calibrating, server, _one(upload), cohort(data))
        own = dispatched(now, Alone(server, client.client), data)
        return method.personalize(now, method.broadcast(server), own, data)

    def personal(view: PyTree, client: PyTree) -> PyTree:
        if isinstance(client, Alone):  # as the client is kept, where nothing was personalised
            view, client = method.broadcast(client.server), client.client
        return method.personal(view, client)

    own_setup: Setup | None = None if method.setup is None else setup
    # Else PRE scores the client's state as it is kept, and its model is made without samples.
    personalizes = method.personalize is not personalize_nothing or method.calibrate or method.dispatch
    return Method(
        init,
        local,
        aggregate,
        personal,
        method.predict,
        personalize=personalize if personalizes else personalize_nothing,
        headline=method.headline,
        copies=method.copies,
        setup=own_setup,
        selects=method.selects,
        batches_per_step=method.batches_per_step,
    )


def _one(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _only(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _first(data: ClientData) -> ClientData:
    """The client's data with id 0: the client is the first and only one of its federation."""
    return data._replace(id=jnp.zeros((), jnp.int32))
