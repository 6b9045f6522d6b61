"""The engine: one communication round, and blocks of rounds.

A round selects a cohort, gathers its rows of the state, maps ``method.local`` over them (`cohort.py`), lets
``method.aggregate`` combine the uploads, and scatters the rows back. `evaluation.py` scores the models. Functions whose
names end in ``_of`` take the states of some clients as arguments; `round`, `calibrated`, `pre` and `post` gather and
scatter them on the device.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from fedjax_pfl.data.federated import Federation, client_data
from fedjax_pfl.engine.cohort import Group
from fedjax_pfl.engine.contract import check_unchanged, pair_of
from fedjax_pfl.engine.evaluation import Evaluator
from fedjax_pfl.engine.run import Run, round_keys
from fedjax_pfl.engine.scoring import Scored, Scores
from fedjax_pfl.engine.traffic import Traffic, traffic_of
from fedjax_pfl.method import Round, Setup, State, Update
from fedjax_pfl.models.norm import without_statistics
from fedjax_pfl.ops.tree import keep_rows, put_rows, take_rows

UPDATE_COSINE = "update_cosine"
"""A diagnostic that the engine adds to those of a method, if an upload has the form of what was sent down."""


def mean_cosine(updates: PyTree, present: Bool[Array, " K"]) -> Float[Array, ""]:
    """The mean cosine of two participants' updates, over all pairs; running statistics are left out.

    Args:
      updates: upload - view, or an upload that is already a change; every leaf is [K, ...].
      present: the rows that count, [K].

    Returns:
      The mean cosine, []: 1 if all updates are parallel; NaN for fewer than two updates that are not zero.
    """
    leaves = [leaf.reshape(len(present), -1) for leaf in jax.tree.leaves(without_statistics(updates))]
    length = jnp.sqrt(sum(jnp.sum(leaf**2, axis=1) for leaf in leaves))
    unit = jnp.where(present & (length > 0), 1.0 / jnp.where(length > 0, length, 1.0), 0.0)
    # |sum of K unit vectors|^2 = K + the cosines of all K (K - 1) ordered pairs.
    total = sum(jnp.sum(jnp.sum(unit[:, None] * leaf, axis=0) ** 2) for leaf in leaves)
    count = jnp.sum((unit > 0).astype(jnp.float32))
    return jnp.where(count > 1, (total - count) / jnp.maximum(count * (count - 1), 1.0), jnp.nan)


@dataclass(frozen=True)
class Engine(Evaluator):
    """A method, ready to run on a number of clients; for the attributes see `Cohorts`.

    Its functions are pure, and meant to be called under ``jax.jit``.
    """

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
        """The state before round 0, with one initial client state for all (rule R5), and without any scores."""
        server, client = self.method.init(jax.random.split(key, 3)[0], self.clients)
        nothing = Scores(*(jnp.zeros((self.clients,), jnp.float32) for _ in Scores._fields))
        no_hits = jnp.zeros(data.test.class_counts.shape, jnp.float32)
        unmeasured = {name: jnp.zeros((self.clients,), jnp.float32) for name in self.metrics}
        unscored = Scored(nothing, nothing if self.validate else None, no_hits, unmeasured)
        unknown = {name: jnp.array(jnp.nan, jnp.float32) for name in self.diagnostics}
        traffic = Traffic(*[jnp.zeros((), jnp.int32)] * len(Traffic._fields))
        state = State(server, jax.tree.map(jnp.asarray, client))
        return Run(state, unscored, jnp.array(jnp.nan, jnp.float32), traffic, unknown)

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
          run: the state before these rounds.
          start: first round.
          stop: one past the last round. Both bounds are traced, so that one program serves blocks of any length.
          evaluate: whether to compute POST scores in the last of these rounds. Under partial participation they are
            computed in every round, because a client keeps the score of its last participation.
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
        """One round of a cohort whose states are given.

        Args:
          key: the randomness of the whole run.
          t: the round.
          run: the state after the round before; its clients' states are not used.
          group: the cohort that `select` has drawn, with the states of these clients only.
          selected: the number of clients that were selected, before any dropped out.
          score_now: whether participants are scored at POST.
          data: the federation.

        Returns:
          The run, whose clients' states are unchanged, and the cohort's new states, every leaf [K, ...].

        Raises:
          ConfigError: the method's ``local`` or ``aggregate`` returns another form than the contract requires.
        """
        method, server, ids, old = self.method, run.state.server, group.ids, group.clients
        keys = round_keys(key, t)
        rows = data.train, data.validation, self._scored(data), run.post
        present, (train, validation, scored, last) = self._gather(ids, rows)
        cohort = self._cohort(ids, train.count)
        old = self._dispatch(keys.aggregate, t, server, old, cohort)
        view = method.broadcast(server)

        def one(shared: tuple, row: tuple) -> tuple[Update, Scored]:
            (score_now, common), (own, scored, last) = shared, row
            update = self.local(common, own)
            post, (*_, x, y) = update.trained, common
            # The condition stays inside the map. Around it, it would hold collectives, which XLA on a CPU may move past
            # later ones: devices that meet them in different orders wait for each other for ever.
            scores = lax.cond(score_now, lambda: self._score_model(*post, x, y, scored), lambda: last)
            return update._replace(post=None), scores

        common = keys.clients, t, view, data.x, data.y
        mapped = (ids, old, train, validation), scored, last
        update, scores = self._map(one, (score_now, common), mapped, complete=self.participation.full)
        uploads = keep_rows(present, update.upload)
        uploads = self.placement.gather_small(uploads)
        now = Round(keys.aggregate, t)
        returned = method.aggregate(now, server, update.client, uploads, cohort)
        combined, new = pair_of("aggregate", returned, "server", "clients")
        check_unchanged("server", combined, server)
        check_unchanged("clients", new, old)
        # Without any samples the server stays as it was, because a weighted mean over nothing would be zero.
        happened = jnp.any(cohort.weight > 0) | method.acts_alone
        server = jax.tree.map(lambda new, old: jnp.where(happened, new, old), combined, server)

        count = jnp.sum(present)
        # A client without a whole batch has no loss (``drop_last``). If nobody counts a step, all participants count.
        trained = present & (update.info.steps > 0)
        trained = jnp.where(jnp.any(trained), trained, present)

        def mean(values: Float[Array, " K"], of: Bool[Array, " K"]) -> Float[Array, ""]:
            return jnp.sum(jnp.where(of, values, 0.0)) / jnp.maximum(jnp.sum(of), 1).astype(jnp.float32)

        # If nobody has trained, the last loss stays. A method that counts no steps has trained if it reports a loss.
        reported = jnp.any(present & ((update.info.steps > 0) | (update.info.loss != 0)))
        loss = jnp.where(reported, mean(update.info.loss, trained), run.loss)
        of_clients = update.diagnostics or {}
        diagnostics = {name: mean(of_clients[name], trained) for name in self.diagnostics if name in of_clients}
        if UPDATE_COSINE in self.diagnostics:
            updates = uploads if method.sends_change else jax.tree.map(jnp.subtract, uploads, view)
            # Not of what else is sent: SCAFFOLD's variates are as long as gradients, and hide the change of w.
            diagnostics[UPDATE_COSINE] = mean_cosine(getattr(updates, "params", updates), present)
        diagnostics = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), diagnostics, run.diagnostics)
        sent = traffic_of(selected, view, count, uploads)
        state, traffic = run.state._replace(server=server), jax.tree.map(jnp.add, run.traffic, sent)
        return Run(state, put_rows(run.post, ids, scores), loss, traffic, diagnostics), new

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
            returned = setup(Round(jax.random.fold_in(key, client_id), t), view, client, held)
            return pair_of("setup", returned, "client", "upload")

        view = method.broadcast(state.server)
        shared, rows = (key_clients, t, view, data.x, data.y), (ids, train, validation)
        new, uploads = self._map_group(one, shared, group, rows, complete=True)
        uploads = self.placement.gather_small(keep_rows(present, uploads))
        cohort = self._cohort(ids, train.count)
        returned = method.aggregate(Round(key_aggregate, t), state.server, new, uploads, cohort)
        server, new = pair_of("aggregate", returned, "server", "clients")
        check_unchanged("server", server, state.server)
        sent = traffic_of(jnp.zeros((), jnp.int32), view, jnp.sum(present), uploads)
        return State(server, put_rows(state.clients, ids, new)), sent
