"""The engine: a communication round, and rounds in a row. The only code that indexes clients.

A round selects a cohort, gathers its rows of the state, maps ``method.local`` over them, lets ``method.aggregate``
combine the uploads, and scatters the rows back. Functions that end in ``_of`` are about some clients whose states are
at hand, whoever gathers and scatters them: the others do so on the device.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from fedjax_pfl.data.augment import Augment, add_copies, augment
from fedjax_pfl.data.federated import ClientData, Clients, Federation, Samples, client_data
from fedjax_pfl.engine.metrics import Metric, measure
from fedjax_pfl.engine.participation import Participation
from fedjax_pfl.engine.placement import SIDE_BY_SIDE, Placement, map_clients
from fedjax_pfl.engine.scoring import BATCH, Answers, Evaluation, Scored, Scores, Tally, scores_of, tally
from fedjax_pfl.engine.traffic import Traffic, traffic_of
from fedjax_pfl.errors import ConfigError
from fedjax_pfl.method import (
    Cohort,
    Diagnostics,
    Method,
    Personalize,
    Round,
    Setup,
    State,
    Update,
    personalize_nothing,
)
from fedjax_pfl.ops.training import phase_key
from fedjax_pfl.ops.tree import put_rows, take_rows, where_rows

# Clients up to which a cohort is the head of a permutation, which sorts all of them twice: 2 microseconds each.
_MOST_SORTED = 20_000


class Run(NamedTuple):
    """What is carried from round to round.

    Attributes:
      state: server and clients.
      post: each client's POST scores, from its last participation that was evaluated; every leaf [N].
      loss: mean training loss over the participants of the last round that had any; NaN before the first.
      traffic: communication so far.
      diagnostics: mean over the same participants of what each says of the method's parts; NaN before the first.
    """

    state: State
    post: Scored
    loss: Float[Array, ""]
    traffic: Traffic
    diagnostics: Diagnostics


class Group(NamedTuple):
    """Some clients with their states.

    Attributes:
      ids: in the order in which they work; N where a row is absent.
      clients: every leaf [K, ...]: row k is the state of ids[k], anything where that is absent. With ``at``, the states
        of M clients, among them these; every leaf [M, ...].
      at: the row of each among the M; None where the rows are theirs alone.
    """

    ids: Int[Array, " K"]
    clients: PyTree
    at: Int[Array, " K"] | None = None


UPDATE_COSINE = "update_cosine"
"""The diagnostic that the engine adds to those of a method, where an upload has the form of what was sent down."""


def check_unchanged(what: str, after: PyTree, before: PyTree) -> None:
    """Checks that a round leaves a part of the state, called ``what``, in the form in which it found it.

    Raises:
      ConfigError: it has other arrays, or one of another shape or type.
    """

    def arrays(tree: PyTree) -> dict[str, str]:
        leaves = jax.tree.leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for path, leaf in leaves}

    given, wanted = arrays(after), arrays(before)
    for name in given | wanted:
        if (found := given.get(name, "(missing)")) != (allowed := wanted.get(name, "nothing")):
            raise ConfigError(f"the method's {what}{name} after a round", found, f"{allowed}, as before it")


def mean_cosine(updates: PyTree, present: Bool[Array, " K"]) -> Float[Array, ""]:
    """How far participants pull in one direction: the mean cosine of two of their updates, over all pairs.

    Args:
      updates: upload - view, or an upload that is a change already; every leaf has K rows.
      present: which rows count.

    Returns:
      1 where all are parallel, around 0 where they have nothing in common; NaN for fewer than two.
    """
    leaves = [leaf.reshape(len(present), -1) for leaf in jax.tree.leaves(updates)]
    length = jnp.sqrt(sum(jnp.sum(leaf**2, axis=1) for leaf in leaves))
    unit = jnp.where(present & (length > 0), 1.0 / jnp.where(length > 0, length, 1.0), 0.0)
    # |sum of K unit vectors|^2 = K + the cosines of all K (K - 1) ordered pairs.
    total = sum(jnp.sum(jnp.sum(unit[:, None] * leaf, axis=0) ** 2) for leaf in leaves)
    count = jnp.sum((unit > 0).astype(jnp.float32))
    return jnp.where(count > 1, (total - count) / jnp.maximum(count * (count - 1), 1.0), jnp.nan)


class RoundKeys(NamedTuple):
    """The randomness of a round; a client's is ``fold_in(clients, id)`` (rule R12)."""

    select: Key[Array, ""]
    dropout: Key[Array, ""]
    aggregate: Key[Array, ""]
    clients: Key[Array, ""]


def round_keys(key: Key[Array, ""], t: Int[Array, ""]) -> RoundKeys:
    """Keys of round t; they depend on nothing but the seed and t."""
    return RoundKeys(*jax.random.split(jax.random.fold_in(key, t), 4))


@dataclass(frozen=True)
class Engine:
    """A method, set to run on a number of clients. Its functions are pure and meant to be jitted.

    Attributes:
      method: what the clients and the server do.
      clients: N.
      participation: who takes part, of the clients that are not new.
      placement: where clients run.
      new: how many clients, the last ones, never take part and are only evaluated.
      validate: whether the clients' validation samples are scored beside the test samples.
      augment: what is done to the clients' training images, on top of the method's own copies.
      augment_every: whether each epoch draws anew, or all passes of a round see the same images.
      diagnostics: names of what is recorded of `Update.diagnostics`, and `UPDATE_COSINE` if it is wanted.
      features: the model's, theta, x -> z, where `answers` shall have them.
      metrics: name -> what models are scored with besides.
      equal: whether all clients hold as many training samples as each other. Of a cohort of known size, side by side,
        all then take the same number of steps, which the compiler knows.
    """

    method: Method
    clients: int
    participation: Participation = field(default_factory=Participation)
    placement: Placement = field(default_factory=Placement)
    new: int = 0
    validate: bool = False
    augment: Augment = "none"
    augment_every: Literal["epoch", "round"] = "epoch"
    diagnostics: tuple[str, ...] = ()
    features: Callable[..., Float[Array, "batch dim"]] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    equal: bool = False

    @property
    def trainers(self) -> int:
        """The number of clients that may take part, the first ones."""
        return self.clients - self.new

    @property
    def cohort_size(self) -> int:
        """K, the largest number of clients in a round."""
        return self.participation.cohort_size(self.trainers)

    def init(self, key: Key[Array, ""], data: Federation) -> Run:
        """The state before round 0."""
        run = self.start(key, data)
        clients = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.clients, *leaf.shape)), run.state.clients)
        state, traffic = State(run.state.server, clients), run.traffic
        if self.method.setup is not None:
            state, traffic = self._setup(self.method.setup, jax.random.split(key, 3)[1], state, data)
        post = run.post
        if not self.participation.full:
            post = self._of_everyone(functools.partial(self.initial_of, key), state, data)
        return run._replace(state=state, post=post, traffic=traffic)

    def start(self, key: Key[Array, ""], data: Federation) -> Run:
        """One common initial model (rule R5): the state before round 0, with one client for all, and nobody scored."""
        server, client = self.method.init(jax.random.split(key, 3)[0], self.clients)
        nothing = Scores(*(jnp.zeros((self.clients,), jnp.float32) for _ in Scores._fields))
        no_hits = jnp.zeros(data.test.class_counts.shape, jnp.float32)
        unmeasured = {name: jnp.zeros((self.clients,), jnp.float32) for name in self.metrics}
        unscored = Scored(nothing, nothing if self.validate else None, no_hits, unmeasured)
        unknown = {name: jnp.array(jnp.nan, jnp.float32) for name in self.diagnostics}
        traffic = Traffic(*[jnp.zeros((), jnp.int32)] * len(Traffic._fields))
        state = State(server, jax.tree.map(jnp.asarray, client))
        return Run(state, unscored, jnp.array(jnp.nan, jnp.float32), traffic, unknown)

    def initial_of(self, key: Key[Array, ""], server: PyTree, group: Group, data: Federation) -> Scored:
        """Scores of some clients' initial models, which one that is never selected keeps; every leaf [K]."""
        key_score = jax.random.split(key, 3)[2]
        shared = key_score, key_score, jnp.zeros((), jnp.int32), server
        return self._of_models(self._score_model, personalize_nothing, *shared, group, data)

    def rounds(
        self,
        key: Key[Array, ""],
        run: Run,
        start: Int[Array, ""],
        stop: Int[Array, ""],
        evaluate: Bool[Array, ""],
        data: Federation,
    ) -> Run:
        """Runs the rounds start ... stop - 1 as one program.

        Args:
          key: the randomness of the whole run, the same at every call.
          run: what the last round left.
          start: first round.
          stop: one past the last round. Both bounds are traced: one program serves blocks of every length.
          evaluate: whether to take POST scores in the last of these rounds. Under partial participation they are taken
            in every round, since a client's counts from its last participation.
          data: the federation.
        """

        def one_round(t: Int[Array, ""], run: Run) -> Run:
            score_now = (evaluate & (t == stop - 1)) if self.participation.full else jnp.array(True)
            return self.round(key, t, run, score_now, data)

        return lax.fori_loop(start, stop, one_round, run)

    def round(
        self, key: Key[Array, ""], t: Int[Array, ""], run: Run, score_now: Bool[Array, ""], data: Federation
    ) -> Run:
        """One communication round: select, gather, train, aggregate, scatter."""
        clients = run.state.clients
        ids, selected = self.select(key, t, data.train.count)
        run, new = self.round_of(key, t, run, Group(ids, take_rows(clients, ids)), selected, score_now, data)
        # Absent rows have an id past the end, and write nothing.
        return run._replace(state=run.state._replace(clients=put_rows(clients, ids, new)))

    def round_of(
        self,
        key: Key[Array, ""],
        t: Int[Array, ""],
        run: Run,
        group: Group,
        selected: Int[Array, ""],
        score_now: Bool[Array, ""],
        data: Federation,
    ) -> tuple[Run, PyTree]:
        """A round of a cohort whose states are at hand.

        Args:
          key: the randomness of the whole run.
          t: the round.
          run: what the last one left; its clients are not looked at.
          group: the cohort that `select` gives, with its rows alone.
          selected: how many were, before any dropped out.
          score_now: whether participants are scored.
          data: the federation.

        Returns:
          The run, its clients as they were, and the cohort's new states; every leaf [K, ...].
        """
        method, server, ids, old = self.method, run.state.server, group.ids, group.clients
        keys = round_keys(key, t)
        rows = data.train, data.validation, self._scored(data), run.post
        present, (train, validation, scored, last) = self._gather(ids, rows)
        cohort = Cohort(ids, train.count.astype(jnp.float32), self.clients, self.trainers)
        old = self._dispatch(keys.aggregate, t, server, old, cohort)
        view = method.broadcast(server)

        def one(shared: tuple, row: tuple) -> tuple[Update, Scored]:
            (score_now, common), (own, scored, last) = shared, row
            update = self.local(common, own)
            post, (*_, x, y) = update.trained, common
            # A condition around the whole map would hold collectives, which XLA does not keep in order with those
            # after it on a CPU: devices that meet them in another order wait for each other for ever.
            scores = lax.cond(score_now, lambda: self._score_model(*post, x, y, scored), lambda: last)
            return update._replace(post=None), scores

        common = keys.clients, t, view, data.x, data.y
        mapped = (ids, old, train, validation), scored, last
        update, scores = self._map(one, (score_now, common), mapped, complete=self.participation.full)
        uploads = where_rows(present, update.upload, jax.tree.map(jnp.zeros_like, update.upload))
        uploads = self.placement.gather_small(uploads)
        now = Round(keys.aggregate, t)
        combined, new = method.aggregate(now, server, update.client, uploads, cohort)
        check_unchanged("server", combined, server)
        check_unchanged("clients", new, old)
        # With no samples left the round did not happen: a weighted mean over nothing would be zero.
        happened = jnp.any(cohort.weight > 0) | method.acts_alone
        server = jax.tree.map(lambda new, old: jnp.where(happened, new, old), combined, server)

        count = jnp.sum(present)

        def mean(values: Float[Array, " K"]) -> Float[Array, ""]:
            return jnp.sum(jnp.where(present, values, 0.0)) / jnp.maximum(count, 1).astype(jnp.float32)

        of_clients = update.diagnostics or {}
        said = {name: mean(of_clients[name]) for name in self.diagnostics if name in of_clients}
        if UPDATE_COSINE in self.diagnostics:
            updates = uploads if method.sends_change else jax.tree.map(jnp.subtract, uploads, view)
            said[UPDATE_COSINE] = mean_cosine(updates, present)
        loss, said = jax.tree.map(
            lambda new, old: jnp.where(count > 0, new, old), (mean(update.info.loss), said), (run.loss, run.diagnostics)
        )
        sent = traffic_of(selected, view, count, uploads)
        state, traffic = run.state._replace(server=server), jax.tree.map(jnp.add, run.traffic, sent)
        return Run(state, put_rows(run.post, ids, scores), loss, traffic, said), new

    def local(self, shared: tuple, row: tuple) -> Update:
        """A participant's part in a round: what is mapped over the cohort.

        Args:
          shared: (key, t, view, x, y), the same for all.
          row: (id, client, training samples, validation samples or None) of one participant.
        """
        (key, t, view, x, y), (client_id, client, train, validation) = shared, row
        key = jax.random.fold_in(key, client_id)
        return self.method.local(
            Round(key, t), view, client, self._training_data(key, client_id, x, y, train, validation)
        )

    def score(self, key: Key[Array, ""], t: Int[Array, ""], run: Run, data: Federation) -> Evaluation:
        """All scores after t rounds; nothing of what it computes is kept.

        Args:
          key: the randomness of the whole run.
          t: rounds done.
          run: what they left.
          data: the federation.
        """
        run = run._replace(state=self.calibrated(key, t, run.state, data))
        pre, post = self.pre(key, t, run.state, data), self.post(key, t, run, data)
        return Evaluation(pre, post, *self.of_server(run, data))

    def of_server(self, run: Run, data: Federation) -> tuple[Scores | None, Diagnostics, dict[str, Float[Array, ""]]]:
        """What an `Evaluation` says beside the clients' scores: of the global model, and of the method's parts.

        Args:
          run: with the server's state `calibrated`; its clients are not looked at.
          data: the federation.
        """
        shared, own, server = None, {}, run.state.server
        if self.method.global_predict is not None:
            shared, own = self.global_scores(server, data), self.global_measures(server, data)
        return shared, {**run.diagnostics, **self.method.diagnose(server)}, own

    def calibrated(self, key: Key[Array, ""], t: Int[Array, ""], state: State, data: Federation) -> State:
        """The state whose models are scored, for a method that does not score what it broadcasts."""
        if self.method.calibrate is None:
            return state
        group = self._group(jnp.arange(self.trainers), state, data)
        uploads = self.calibration_of(key, t, state.server, group, data)
        return state._replace(server=self.calibrate(key, t, state.server, group.ids, uploads, data))

    def calibration_of(
        self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, group: Group, data: Federation
    ) -> PyTree:
        """What some clients upload for the calibration, zeros where absent; arguments as in `pre_of`."""
        calibrate = self.method.calibrate
        assert calibrate is not None
        present, (train, validation) = self._gather(group.ids, (data.train, data.validation))

        def one(shared: tuple, client: PyTree, row: tuple) -> PyTree:
            (key, t, view, x, y), (client_id, train, validation) = shared, row
            key = phase_key(jax.random.fold_in(key, client_id), "calibrate")
            return calibrate.local(Round(key, t), view, client, client_data(x, y, train, client_id, validation))

        shared = round_keys(key, t).clients, t, self.method.broadcast(server), data.x, data.y
        complete = len(group.ids) >= self.trainers
        uploads = self._map_group(one, shared, group, (group.ids, train, validation), complete=complete)
        return where_rows(present, uploads, jax.tree.map(jnp.zeros_like, uploads))

    def calibrate(
        self,
        key: Key[Array, ""],
        t: Int[Array, ""],
        server: PyTree,
        ids: Int[Array, " K"],
        uploads: PyTree,
        data: Federation,
    ) -> PyTree:
        """The server's state that is scored, from the uploads of all clients that may take part."""
        calibrate = self.method.calibrate
        assert calibrate is not None
        _, train = self._gather(ids, data.train)
        cohort = Cohort(ids, train.count.astype(jnp.float32), self.clients, self.trainers)
        now = Round(phase_key(round_keys(key, t).aggregate, "calibrate"), t)
        return calibrate.server(now, server, self.placement.gather_small(uploads), cohort)

    def pre(self, key: Key[Array, ""], t: Int[Array, ""], state: State, data: Federation) -> Scored:
        """PRE scores of all clients after t rounds: the newest shared parameters, personalised; every leaf [N]."""
        return self._of_everyone(functools.partial(self.pre_of, key, t), state, data)

    def pre_of(self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, group: Group, data: Federation) -> Scored:
        """PRE scores of some clients after t rounds; every leaf [K].

        Args:
          key: the randomness of the whole run.
          t: rounds done.
          server: what they left, `calibrated`.
          group: the clients.
          data: the federation.
        """
        keys = round_keys(key, t)
        shared = keys.clients, keys.aggregate, t, server
        return self._of_models(self._score_model, self.method.personalize, *shared, group, data)

    def answers(
        self,
        key: Key[Array, ""],
        t: Int[Array, ""],
        server: PyTree,
        who: Sequence[int],
        clients: PyTree,
        data: Federation,
    ) -> Answers:
        """What some clients' PRE models after t rounds make of the samples that they are scored on.

        Args:
          key: the randomness of the whole run.
          t: rounds done.
          server: what they left, `calibrated`.
          who: the clients, in ascending order; the rows of the result.
          clients: their states, likewise.
          data: the federation.
        """

        def of(view: PyTree, client: PyTree, x: Samples, y: Array, scored: tuple[Clients, Clients | None]) -> Answers:
            params, samples = self.method.personal(view, client), client_data(x, y, scored[0])
            logits = samples.map(lambda x, _: self.method.predict(params, x), batch_size=BATCH)
            if (features := self.features) is None:
                return Answers(logits, None)
            return Answers(logits, samples.map(lambda x, _: features(params["extractor"], x), batch_size=BATCH))

        keys, known = round_keys(key, t), jnp.asarray(who, jnp.int32)
        ids = self._order(known, data.train.count)
        group = Group(ids, clients, jnp.minimum(jnp.searchsorted(known, ids), len(who) - 1))
        shared = keys.clients, keys.aggregate, t, server
        found = self._of_models(of, self.method.personalize, *shared, group, data)
        rows = jnp.argsort(ids)[: len(who)]
        return jax.tree.map(lambda leaf: leaf[rows], found)

    def model(self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, x: Samples, y: Array, row: tuple) -> PyTree:
        """The parameters of one client's PRE model after t rounds.

        Args:
          key: the randomness of the whole run.
          t: rounds done.
          server: what they left, `calibrated`.
          x: the samples that the tables of the row point into.
          y: their labels.
          row: as in `local`.
        """
        client_id, client, train, validation = row
        keys = round_keys(key, t)
        cohort = Cohort(client_id[None], train.count.astype(jnp.float32)[None], self.clients, self.trainers)
        told = self._dispatch(keys.aggregate, t, server, jax.tree.map(lambda leaf: leaf[None], client), cohort)
        shared = keys.clients, t, self.method.broadcast(server), x, y
        row = client_id, jax.tree.map(lambda leaf: leaf[0], told), train, validation
        return self.method.personal(*self._personalized(self.method.personalize, shared, row))

    def newcomer(
        self,
        keys: Key[Array, " 2"],
        t: Int[Array, ""],
        server: PyTree,
        x: Samples,
        y: Array,
        client_id: Int[Array, ""],
        train: Clients,
    ) -> PyTree:
        """The parameters of the POST model of a client that never took part: what one call of ``local`` makes.

        Args:
          keys: of the initial state and of the rounds.
          t: rounds done.
          server: what they left, `calibrated`.
          x: the samples that the table points into.
          y: their labels.
          client_id: the number that the client goes by.
          train: what it trains on.
        """
        _, client = self.method.init(jax.random.split(keys[0], 3)[0], self.clients)
        shared = round_keys(keys[1], t).clients, t, self.method.broadcast(server), x, y
        return self.method.personal(*self.local(shared, (client_id, client, train, None)).trained)

    def post(self, key: Key[Array, ""], t: Int[Array, ""], run: Run, data: Federation) -> Scored:
        """POST scores of all clients after t rounds; every leaf [N].

        A new client gets those of one call of ``local`` from its initial state, of which nothing is kept.
        """
        if not self.new:
            return run.post
        group = self._group(jnp.arange(self.trainers, self.clients), run.state, data)
        return put_rows(run.post, group.ids, self.post_of(key, t, run.state.server, group, data))

    def post_of(self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, group: Group, data: Federation) -> Scored:
        """POST scores of some new clients after t rounds; arguments as in `pre_of`."""
        _, (train, validation, scored) = self._gather(group.ids, (data.train, data.validation, self._scored(data)))
        keys = round_keys(key, t)
        group = self._told(keys.aggregate, t, server, group, train.count)

        def one(shared: tuple, client: PyTree, row: tuple) -> Scored:
            (client_id, *own, scored), (*_, x, y) = row, shared
            return self._score_model(*self.local(shared, (client_id, client, *own)).trained, x, y, scored)

        shared = keys.clients, t, self.method.broadcast(server), data.x, data.y
        found: Scored = self._map_group(one, shared, group, (group.ids, train, validation, scored))
        return found

    def global_scores(self, server: PyTree, data: Federation) -> Scores:
        """Scores of the global model, for methods that have one, on the pooled test set as a whole."""
        predict = self.method.global_predict
        assert predict is not None
        ids = self._order(jnp.arange(len(data.pooled.count)), data.pooled.count)
        _, blocks = self._gather(ids, data.pooled)

        def one(shared: tuple, block: Clients) -> Tally:
            server, x, y = shared
            return tally(lambda images: predict(server, images), client_data(x, y, block))

        tallies = self._map(one, (server, data.x, data.y), blocks, complete=True)
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tallies)
        return scores_of(total, jnp.sum(data.pooled.class_counts, axis=0))

    def global_measures(self, server: PyTree, data: Federation) -> dict[str, Float[Array, ""]]:
        """Likewise, what the config's metrics make of its answers."""
        predict = self.method.global_predict
        assert predict is not None
        if not self.metrics:
            return {}
        ids = self._order(jnp.arange(len(data.pooled.count)), data.pooled.count)
        _, blocks = self._gather(ids, data.pooled)

        def one(shared: tuple, block: Clients) -> tuple[Array, Array, Array]:
            server, x, y = shared
            samples = client_data(x, y, block)
            logits = samples.map(lambda images, _: predict(server, images), batch_size=BATCH)
            return logits, samples.labels, samples.valid

        found = self._map(one, (server, data.x, data.y), blocks, complete=True)
        return measure(self.metrics, *jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found))

    def _training_data(
        self,
        key: Key[Array, ""],
        client_id: Int[Array, ""],
        x: Samples,
        y: Array,
        train: Clients,
        validation: Clients | None,
    ) -> ClientData:
        """What a client trains on in the round of this key."""
        data = client_data(x, y, train, client_id, validation)
        if self.equal and self.participation.known:
            data = data._replace(count=np.int32(data.capacity), most=np.int32(data.capacity))
        data = add_copies(phase_key(key, "augment"), data, self.method.copies)
        return augment(phase_key(key, "base augmentation"), data, self.augment, every=self.augment_every)

    def _map(self, fn: Callable, shared: PyTree, rows: PyTree, *, complete: bool = False) -> Any:
        """`map_clients`; of clients side by side, each knows how many samples the largest has.

        Args:
          fn: (shared, row) -> result.
          shared: what all clients see.
          rows: every leaf [K, ...].
          complete: whether the largest of all clients is among them.
        """
        side_by_side = self.placement.chunk
        if side_by_side == 1:
            return map_clients(fn, shared, rows, self.placement)
        # All in one chunk run as long as the index table is wide, a number that the compiler knows.
        known = complete and len(jax.tree.leaves(rows)[0]) == side_by_side * self.placement.devices

        def aligned(node: Any) -> Any:
            if not isinstance(node, Clients):
                return node
            most = np.int32(node.index.shape[-1]) if known else lax.pmax(node.count, SIDE_BY_SIDE)
            return node._replace(most=most)

        def one(shared: PyTree, row: PyTree) -> Any:
            return fn(shared, jax.tree.map(aligned, row, is_leaf=lambda node: isinstance(node, Clients)))

        return map_clients(one, shared, rows, self.placement)

    def _map_group(self, fn: Callable, shared: PyTree, group: Group, rows: PyTree, *, complete: bool = False) -> Any:
        """`_map` of ``fn(shared, client, row)`` over a group, with each client's state.

        A state is read where it is as its client's turn comes: all of them, in the group's order, would be a copy.
        """
        if group.at is None:

            def at_hand(shared: PyTree, row: tuple) -> Any:
                return fn(shared, *row)

            return self._map(at_hand, shared, (group.clients, rows), complete=complete)

        def among_others(both: tuple, row: tuple) -> Any:
            (shared, clients), (at, own) = both, row
            client = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), clients)
            return fn(shared, client, own)

        return self._map(among_others, (shared, group.clients), (group.at, rows), complete=complete)

    def _scored(self, data: Federation) -> tuple[Clients, Clients | None]:
        """The samples that models are scored on: what `Scored` holds the scores of."""
        return data.test, data.validation if self.validate else None

    def select(
        self, key: Key[Array, ""], t: Int[Array, ""], count: Int[Array, " N"]
    ) -> tuple[Int[Array, " K"], Int[Array, ""]]:
        """Draws the cohort of round t: its ids (N where absent), and how many were selected before any dropped out."""
        who, size, keys = self.participation, self.cohort_size, round_keys(key, t)
        key_order, key_ratio = jax.random.split(keys.select)
        ratio: Any = who.high
        if who.low < who.high:
            ratio = jax.random.uniform(key_ratio, minval=who.low, maxval=who.high)
        if who.low == 1.0:
            ids = jnp.arange(size)
        elif who.sampling == "poisson":
            draws, ids = lax.top_k(-jax.random.uniform(key_order, (self.trainers,)), size)
            ids = jnp.where(-draws < ratio, ids, self.clients)
        elif self.trainers <= _MOST_SORTED:
            ids = jax.random.permutation(key_order, self.trainers)[:size]
        else:
            ids = lax.top_k(jax.random.uniform(key_order, (self.trainers,)), size)[1]
        if who.low < who.high and who.sampling == "fixed":
            drawn = jnp.maximum(1, jnp.round(ratio * self.trainers).astype(jnp.int32))
            ids = jnp.where(jnp.arange(size) < drawn, ids, self.clients)
        selected = jnp.sum(ids < self.clients)
        if who.dropout > 0.0:
            luck = jax.vmap(lambda client_id: jax.random.uniform(jax.random.fold_in(keys.dropout, client_id)))(ids)
            ids = jnp.where(luck >= who.dropout, ids, self.clients)
        return self._order(ids, count), selected

    def _order(self, ids: Int[Array, " K"], count: Int[Array, " N"]) -> Int[Array, " rows"]:
        """Ids by falling size, filled up to whole chunks with absent rows (id N), and spread over the devices."""
        absent = len(count)
        sizes = jnp.where(ids < absent, jnp.take(count, ids, mode="clip"), -1)
        ids = ids[jnp.argsort(-sizes)]
        rows = self.placement.padded(len(ids))
        return jnp.pad(ids, (0, rows - len(ids)), constant_values=absent)[self.placement.balanced_order(rows)]

    def _gather(self, ids: Int[Array, " K"], rows: PyTree) -> tuple[Bool[Array, " K"], PyTree]:
        """Which rows are present, and the rows; an absent client has no samples, so that it does no work."""
        present = ids < len(jax.tree.leaves(rows)[0])

        def without_absent(node: Any) -> Any:
            return node._replace(count=jnp.where(present, node.count, 0)) if isinstance(node, Clients) else node

        taken = take_rows(rows, ids)
        return present, jax.tree.map(without_absent, taken, is_leaf=lambda node: isinstance(node, Clients))

    def _score_model(
        self, view: PyTree, client: PyTree, x: Samples, y: Array, scored: tuple[Clients, Clients | None]
    ) -> Scored:
        """Scores one client's model on its rows of `_scored`."""

        params = self.method.personal(view, client)

        def on(samples: Clients) -> tuple[Scores, Tally]:
            data = client_data(x, y, samples)
            counted = tally(lambda images: self.method.predict(params, images), data)
            return scores_of(counted, data.class_counts), counted

        def measured(data: ClientData) -> dict[str, Float[Array, ""]]:
            if not self.metrics:
                return {}
            logits = data.map(lambda images, _: self.method.predict(params, images), batch_size=BATCH)
            return measure(self.metrics, logits, data.labels, data.valid)

        (test, counted), validation = on(scored[0]), scored[1]
        own = measured(client_data(x, y, scored[0]))
        return Scored(test, None if validation is None else on(validation)[0], counted.hits, own)

    def _of_everyone(self, scores_of: Callable[..., Scored], state: State, data: Federation) -> Scored:
        """``scores_of(server, group, data)`` of all clients; every leaf [N]."""
        group = self._group(jnp.arange(self.clients), state, data)
        scores = scores_of(state.server, group, data)
        nothing = jax.tree.map(lambda leaf: jnp.zeros((self.clients, *leaf.shape[1:]), leaf.dtype), scores)
        return put_rows(nothing, group.ids, scores)

    def _group(self, ids: Int[Array, " K"], state: State, data: Federation) -> Group:
        """Clients in the engine's order, whose states stay where they are."""
        ids = self._order(ids, data.train.count)
        return Group(ids, state.clients, jnp.minimum(ids, self.clients - 1))

    def _of_models(
        self,
        what: Callable[..., Any],
        personalize: Personalize,
        key: Key[Array, ""],
        key_server: Key[Array, ""],
        t: Int[Array, ""],
        server: PyTree,
        group: Group,
        data: Federation,
    ) -> Any:
        """``what(view, client, x, y, samples)`` of each client with the pair that ``personalize`` gives."""
        _, (train, validation, scored) = self._gather(group.ids, (data.train, data.validation, self._scored(data)))
        group = self._told(key_server, t, server, group, train.count)

        def one(shared: tuple, client: PyTree, row: tuple) -> Any:
            (*_, x, y), (client_id, *own, scored) = shared, row
            return what(*self._personalized(personalize, shared, (client_id, client, *own)), x, y, scored)

        shared = key, t, self.method.broadcast(server), data.x, data.y
        complete = len(group.ids) >= self.clients
        return self._map_group(one, shared, group, (group.ids, train, validation, scored), complete=complete)

    def _personalized(self, personalize: Personalize, shared: tuple, row: tuple) -> tuple[PyTree, PyTree]:
        """The pair that ``personalize`` gives for one client; shared and row as in `local`."""
        (key, t, view, x, y), (client_id, client, train, validation) = shared, row
        key = jax.random.fold_in(key, client_id)
        return personalize(Round(key, t), view, client, self._training_data(key, client_id, x, y, train, validation))

    def _told(
        self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, group: Group, count: Int[Array, " K"]
    ) -> Group:
        """The group with what the server writes to each of its clients before they work."""
        if self.method.dispatch is None:
            return group
        ids, clients, at = group
        cohort = Cohort(ids, count.astype(jnp.float32), self.clients, self.trainers)
        return Group(ids, self._dispatch(key, t, server, clients if at is None else take_rows(clients, at), cohort))

    def _dispatch(
        self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, clients: PyTree, cohort: Cohort
    ) -> PyTree:
        """The clients with what the server writes to each of them before they work."""
        if self.method.dispatch is None:
            return clients
        now = Round(phase_key(key, "dispatch"), t)
        return clients._replace(inbox=self.method.dispatch(now, server, clients, cohort))

    def _setup(self, setup: Setup, key: Key[Array, ""], state: State, data: Federation) -> tuple[State, Traffic]:
        """Round -1: every client prepares an upload, and the server combines all of them; nothing is sent down."""
        method, t = self.method, jnp.array(-1, jnp.int32)
        key_clients, key_aggregate = jax.random.split(key)
        group = self._group(jnp.arange(self.trainers), state, data)
        ids = group.ids
        present, (train, validation) = self._gather(ids, (data.train, data.validation))

        def one(shared: tuple, client: PyTree, row: tuple) -> tuple:
            (key, t, view, x, y), (client_id, train, validation) = shared, row
            held = client_data(x, y, train, client_id, validation)
            return setup(Round(jax.random.fold_in(key, client_id), t), view, client, held)

        view = method.broadcast(state.server)
        shared, rows = (key_clients, t, view, data.x, data.y), (ids, train, validation)
        new, uploads = self._map_group(one, shared, group, rows, complete=True)
        uploads = where_rows(present, uploads, jax.tree.map(jnp.zeros_like, uploads))
        cohort = Cohort(ids, train.count.astype(jnp.float32), self.clients, self.trainers)
        server, new = method.aggregate(Round(key_aggregate, t), state.server, new, uploads, cohort)
        sent = traffic_of(jnp.zeros((), jnp.int32), view, jnp.sum(present), uploads)
        return State(server, put_rows(state.clients, ids, new)), sent
