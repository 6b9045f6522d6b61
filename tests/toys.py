"""Stand-ins: a method that uses every feature of the contract and leaves a trace of it; trainers that train little."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedjax_pfl.method import Method, TrainInfo, Update
from fedjax_pfl.ops.aggregate import weighted_mean
from fedjax_pfl.ops.training import Trainer

NO_STEPS = TrainInfo(jnp.ones(()), jnp.array(0, jnp.int32))


class Untrained(Trainer):
    """What is trained comes back as it was; no gradient is traced or compiled."""

    def __call__(self, now, loss, params, data, **options):
        return params, NO_STEPS


class OnlyHeads(Untrained):
    """Trains heads alone, where nobody looks at the extractor."""

    def __call__(self, now, loss, params, data, **options):
        trains = Trainer if options.get("phase") == "head" else Untrained
        return trains.__call__(self, now, loss, params, data, **options)


class Witness(NamedTuple):
    """A client of `witness`: the draw of its last key, its number of participations, and the view it last got.

    In its ``inbox`` the server writes the client's id and its weight in the last cohort.
    """

    draw: jax.Array
    visits: jax.Array
    view: jax.Array
    inbox: PyTree


def witness(model, train, *, gain: float = 1.0):
    """Server: the mean pixel of the cohort (all clients after ``setup``), and a secret that is not sent down."""
    del train

    def pixel_mean(data):
        valid = jnp.arange(data.capacity) < data.count
        x = data.take(jnp.arange(data.capacity), valid).x.astype(jnp.float32).mean(axis=(1, 2, 3))
        # NaN without samples: what an absent row computes must not reach the server, not even with weight 0.
        return jnp.sum(x * valid.astype(jnp.float32)) / data.count.astype(jnp.float32)

    def init(key, clients):
        zero, none = jnp.zeros(()), jnp.array(-1, jnp.int32)
        client = Witness(zero, jnp.array(0, jnp.int32), zero, {"id": none, "weight": zero})
        return {"pixel": zero - 3, "t": none, "secret": model.init(key)}, client

    def setup(now, view, client, data):
        return client._replace(draw=jax.random.uniform(now.key), view=view), pixel_mean(data)

    def local(now, view, client, data):
        client = client._replace(draw=jax.random.uniform(now.key), visits=client.visits + 1, view=view)
        return Update(client, gain * pixel_mean(data), NO_STEPS, post=(view, client))

    def aggregate(now, server, clients, uploads, cohort):
        server = {**server, "pixel": weighted_mean(uploads, cohort.weight), "t": now.t}
        return server, clients._replace(inbox={"id": cohort.ids, "weight": cohort.weight})

    def predict(client, x):
        return jnp.broadcast_to(client.draw * jnp.arange(model.classes, dtype=jnp.float32), (len(x), model.classes))

    return Method(
        init,
        local,
        aggregate,
        lambda view, client: client,
        predict,
        broadcast=lambda server: server["pixel"],
        setup=setup,
    )
