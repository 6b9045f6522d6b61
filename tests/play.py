"""A method's rounds on the tiny federation, who took part in them, and what a round exchanges."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.data.federated import Federation, client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine, Run, round_keys
from fedjax_pfl.engine.traffic import count
from fedjax_pfl.method import Update
from tests.reference import at, client, client_key, now
from tests.toys import witness

N = 7
KEY = jax.random.key(31)
EVERYONE = Participation()
SOME = Participation(0.3, 0.8, 0.2)


class Played(NamedTuple):
    """The state before round 0 and after the last, and who was present in each round."""

    start: Run
    end: Run
    cohorts: list[list[int]]


def play(method, federation: Federation, *, who=EVERYONE, rounds=3, new=0) -> Played:
    """The first rounds of a method, as the engine runs them."""
    engine = Engine(method, N, who, new=new)
    start = jax.jit(engine.init)(KEY, federation)
    end = jax.jit(engine.rounds)(KEY, start, at(0), at(rounds), jnp.array(True), federation)
    return Played(start, end, cohorts(who, tuple(federation.train.count.tolist()), new)[:rounds])


@cache
def cohorts(who, count: tuple[int, ...], new: int) -> list[list[int]]:
    """Who is present in each of the first rounds: a draw of the engine that no method has a part in."""
    engine = Engine(witness(None, None), N, who, new=new)
    rounds = jnp.arange(8)
    ids = jax.jit(jax.vmap(lambda t: engine._select(round_keys(KEY, t), jnp.array(count))[0]))(rounds)
    return [[i for i in row if i < N] for row in ids.tolist()]


def update_of(method, federation: Federation, i: int, *, t: int = 0) -> Update:
    """What client i makes of the initial state in round t."""

    @jax.jit
    def work(key, row):
        server, client = method.init(KEY, N)
        data = client_data(federation.x, federation.y, row)
        return method.local(now(key, t), method.broadcast(server), client, data)

    return work(client_key(KEY, t, i), client(federation.train, i))


class Floats(NamedTuple):
    """Numbers that a client receives and sends in a round, and that it keeps."""

    down: int
    up: int
    kept: int


def exchanged(method, federation: Federation) -> Floats:
    """From the shapes, as the accounting has it; a `PerClass` part counts as though all classes were sent."""
    _, shapes = survey(Engine(method, N), KEY, federation)
    return Floats(count(shapes.down), count(shapes.up), count(shapes.client))
