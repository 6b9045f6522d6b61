"""A method's rounds on the tiny federation, who took part in them, and what a round exchanges."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.federated import Federation, client_data
from fedjax_pfl.engine.memory import survey
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.engine.run import Run
from fedjax_pfl.engine.scoring import Scored, Scores
from fedjax_pfl.method import Method, Update
from fedjax_pfl.ops.tree import count
from tests.conftest import CLASSES
from tests.reference import at, client, client_key, now

N = 7
KEY = jax.random.key(31)
EVERYONE = Participation()
SOME = Participation(0.3, 0.8, 0.2)
_COHORTS: dict[tuple, list[tuple[list[int], int]]] = {}


class Played(NamedTuple):
    """The state before round 0 and after the last, and who was present in each round."""

    start: Run
    end: Run
    cohorts: list[list[int]]


class Unscored(Engine):
    """Scores no model, which is a third of what is compiled: for tests that do not look at scores."""

    def _score_model(self, view, client, x, y, scored):
        hits = jnp.zeros(scored[0].class_counts.shape)
        return Scored(Scores(*[jnp.zeros(())] * len(Scores._fields)), None, hits, {})


def play(method, federation: Federation, *, who=EVERYONE, rounds=3, new=0, scored=True) -> Played:
    """The first rounds of a method, as the engine runs them."""
    engine = (Engine if scored else Unscored)(method, N, who, new=new)
    start = jax.jit(engine.init)(KEY, federation)
    end = jax.jit(engine.rounds)(KEY, start, at(0), at(rounds), np.bool_(True), federation)
    start, end = jax.tree.map(np.asarray, (start, end))
    return Played(start, end, [present for present, _ in cohorts(engine, KEY, federation, rounds)])


def drawn(engine: Engine, key, count, rounds: int):
    """The engine's draw: [rounds, K] ids of those present, N where nobody is, and [rounds] numbers of the selected."""
    select = jax.vmap(lambda t, count: engine.select(key, t, count), in_axes=(0, None))
    return jax.tree.map(np.asarray, jax.jit(select)(jnp.arange(rounds), count))


def cohorts(engine: Engine, key, federation: Federation, rounds: int) -> list[tuple[list[int], int]]:
    """Of each of the first rounds: who is present, and how many were selected before any dropped out.

    Drawn once for all methods: who takes part is not theirs to say.
    """
    counts = np.asarray(federation.train.count)
    words = np.asarray(jax.random.key_data(key))
    what = engine.participation, engine.placement, engine.clients, engine.new, str(key.dtype), rounds
    known = *what, words.tobytes(), counts.tobytes()
    if known not in _COHORTS:
        both = (part.tolist() for part in drawn(engine, key, federation.train.count, rounds))
        _COHORTS[known] = [([i for i in ids if i < engine.clients], n) for ids, n in zip(*both, strict=True)]
    return _COHORTS[known]


def unscored(method: Method) -> Method:
    """The method, where nobody looks at the scores of its models: a program without them."""
    return method._replace(predict=lambda params, x: jnp.zeros((len(x), CLASSES)), global_predict=None)


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
    _, shapes = survey(Engine(method, N), federation)
    return Floats(count(shapes.down), count(shapes.up), count(shapes.client))
