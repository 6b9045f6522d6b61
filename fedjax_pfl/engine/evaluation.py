"""Scores of models: PRE and POST of the clients, the global model, and clients that never took part."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from fedjax_pfl.data.federated import ClientData, Clients, Federation, Samples, client_data
from fedjax_pfl.engine.cohort import Cohorts, Group
from fedjax_pfl.engine.metrics import measure
from fedjax_pfl.engine.run import Run, round_keys
from fedjax_pfl.engine.scoring import BATCH, Evaluation, Outputs, Scored, Scores, Tally, scores_of, tally
from fedjax_pfl.method import Diagnostics, Personalize, Round, State, personalize_nothing
from fedjax_pfl.ops.training import phase_key
from fedjax_pfl.ops.tree import keep_rows, put_rows


@dataclass(frozen=True)
class Evaluator(Cohorts):
    """Scores the models after a round."""

    def score(self, key: Key[Array, ""], t: Int[Array, ""], run: Run, data: Federation) -> Evaluation:
        """All scores after t rounds; scoring does not change the run.

        Args:
          key: the randomness of the whole run.
          t: rounds done.
          run: the state after these rounds.
          data: the federation.
        """
        scored = run._replace(state=self.calibrated(key, t, run.state, data))
        pre, post = self.pre(key, t, scored.state, data), self.post(key, t, run, data)
        return Evaluation(pre, post, *self.of_server(scored, data))

    def of_server(self, run: Run, data: Federation) -> tuple[Scores | None, Diagnostics, dict[str, Float[Array, ""]]]:
        """The rest of an `Evaluation`: scores and metrics of the global model, and the diagnostics.

        Args:
          run: the run, with its server state already `calibrated`; the clients' states are not used.
          data: the federation.
        """
        shared, own, server = None, {}, run.state.server
        if self.method.global_predict is not None:
            shared, own = self.global_scores(server, data), self.global_measures(server, data)
        return shared, {**run.diagnostics, **self.method.diagnose(server)}, own

    def calibrated(self, key: Key[Array, ""], t: Int[Array, ""], state: State, data: Federation) -> State:
        """The state whose models are scored; differs from ``state`` only for methods with ``calibrate``."""
        if self.method.calibrate is None:
            return state
        group = self._group(jnp.arange(self.trainers), state, data)
        uploads = self.calibration_of(key, t, state.server, group, data)
        return state._replace(server=self.calibrate(key, t, state.server, group.ids, uploads, data))

    def calibration_of(
        self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, group: Group, data: Federation
    ) -> PyTree:
        """The uploads of some clients for the calibration, zeros for absent rows; arguments as in `pre_of`."""
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
        return keep_rows(present, uploads)

    def calibrate(
        self,
        key: Key[Array, ""],
        t: Int[Array, ""],
        server: PyTree,
        ids: Int[Array, " K"],
        uploads: PyTree,
        data: Federation,
    ) -> PyTree:
        """The server state to be scored, from the calibration uploads of all clients that may take part."""
        calibrate = self.method.calibrate
        assert calibrate is not None
        _, train = self._gather(ids, data.train)
        cohort = self._cohort(ids, train.count)
        now = Round(phase_key(round_keys(key, t).aggregate, "calibrate"), t)
        return calibrate.server(now, server, self.placement.gather_small(uploads), cohort)

    def pre(self, key: Key[Array, ""], t: Int[Array, ""], state: State, data: Federation) -> Scored:
        """PRE scores of all clients after t rounds, with the newest shared parameters, personalised; every leaf [N]."""
        return self._of_everyone(functools.partial(self.pre_of, key, t), state, data)

    def pre_of(self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, group: Group, data: Federation) -> Scored:
        """PRE scores of some clients after t rounds; every leaf [K].

        Args:
          key: the randomness of the whole run.
          t: rounds done.
          server: the server state after these rounds, `calibrated`.
          group: the clients.
          data: the federation.
        """
        keys = round_keys(key, t)
        of = self._score_model, self.method.personalize
        return self._of_models(*of, keys.clients, keys.aggregate, t, server, group, data)

    def initial_of(self, key: Key[Array, ""], server: PyTree, group: Group, data: Federation) -> Scored:
        """Scores of some clients' initial models; a client keeps them until it first takes part. Every leaf [K]."""
        key_score = jax.random.split(key, 3)[2]
        t, of = jnp.zeros((), jnp.int32), (self._score_model, personalize_nothing)
        return self._of_models(*of, key_score, key_score, t, server, group, data)

    def post(self, key: Key[Array, ""], t: Int[Array, ""], run: Run, data: Federation) -> Scored:
        """POST scores of all clients after t rounds; every leaf [N].

        A new client gets the scores after one call of ``local`` from its initial state; the result is not kept.
        """
        if not self.new:
            return run.post
        group = self._group(jnp.arange(self.trainers, self.clients), run.state, data)
        return put_rows(run.post, group.ids, self.post_of(key, t, run.state.server, group, data))

    def post_of(self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, group: Group, data: Federation) -> Scored:
        """POST scores of some new clients after t rounds; arguments as in `pre_of`, with a server not calibrated."""
        _, (train, validation, scored) = self._gather(group.ids, (data.train, data.validation, self._scored(data)))
        keys = round_keys(key, t)
        group = self._dispatch_group(keys.aggregate, t, server, group, train.count)

        def one(shared: tuple, client: PyTree, row: tuple) -> Scored:
            (client_id, *own, scored), (*_, x, y) = row, shared
            return self._score_model(*self.local(shared, (client_id, client, *own)).trained, x, y, scored)

        shared = keys.clients, t, self.method.broadcast(server), data.x, data.y
        found: Scored = self._map_group(one, shared, group, (group.ids, train, validation, scored))
        return found

    def global_scores(self, server: PyTree, data: Federation) -> Scores:
        """Scores of the global model on the pooled test set as a whole; the method must have a global model."""
        predict = self.method.global_predict
        assert predict is not None
        blocks = self._pooled(data)

        def one(shared: tuple, block: Clients) -> Tally:
            server, x, y = shared
            return tally(lambda images: predict(server, images), client_data(x, y, block))

        tallies = self._map(one, (server, data.x, data.y), blocks, complete=True)
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tallies)
        return scores_of(total, jnp.sum(data.pooled.class_counts, axis=0))

    def global_measures(self, server: PyTree, data: Federation) -> dict[str, Float[Array, ""]]:
        """The config's metrics of the global model on the pooled test set."""
        predict = self.method.global_predict
        assert predict is not None
        if not self.metrics:
            return {}
        blocks = self._pooled(data)

        def one(shared: tuple, block: Clients) -> tuple[Array, Array, Array]:
            server, x, y = shared
            samples = client_data(x, y, block)
            logits = samples.map(lambda images, _: predict(server, images), batch_size=BATCH)
            return logits, samples.labels, samples.valid

        found = self._map(one, (server, data.x, data.y), blocks, complete=True)
        return measure(self.metrics, *jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found))

    def _pooled(self, data: Federation) -> Clients:
        """The blocks of the pooled test set, in the placement's order."""
        ids = self._order(jnp.arange(len(data.pooled.count)), data.pooled.count)
        return self._gather(ids, data.pooled)[1]

    def outputs(
        self,
        key: Key[Array, ""],
        t: Int[Array, ""],
        server: PyTree,
        who: Int[Array, " chosen"],
        clients: PyTree,
        data: Federation,
    ) -> Outputs:
        """Logits and features of some clients' PRE models after t rounds, on the samples that they are scored on.

        Args:
          key: the randomness of the whole run.
          t: rounds done.
          server: the server state after these rounds, `calibrated`.
          who: the clients, in ascending order; these are the rows of the result.
          clients: their states, in the same order; every leaf [len(who), ...].
          data: the federation.
        """

        def of(view: PyTree, client: PyTree, x: Samples, y: Array, scored: tuple[Clients, Clients | None]) -> Outputs:
            params, samples = self.method.personal(view, client), client_data(x, y, scored[0])
            logits = samples.map(lambda x, _: self.method.predict(params, x), batch_size=BATCH)
            if (features := self.features) is None:
                return Outputs(logits, None)
            return Outputs(logits, samples.map(lambda x, _: features(params["extractor"], x), batch_size=BATCH))

        keys, ids = round_keys(key, t), self._order(who, data.train.count)
        group = Group(ids, clients, jnp.minimum(jnp.searchsorted(who, ids), len(who) - 1))
        personalize = self.method.personalize
        found = self._of_models(of, personalize, keys.clients, keys.aggregate, t, server, group, data)
        rows = jnp.argsort(ids)[: len(who)]
        return jax.tree.map(lambda leaf: leaf[rows], found)

    def model(self, key: Key[Array, ""], t: Int[Array, ""], server: PyTree, x: Samples, y: Array, row: tuple) -> PyTree:
        """The parameters of one client's PRE model after t rounds.

        Args:
          key: the randomness of the whole run.
          t: rounds done.
          server: the server state after these rounds, `calibrated`.
          x: all samples; the index tables in ``row`` refer to them.
          y: their labels.
          row: as in `local`.
        """
        client_id, client, train, validation = row
        keys = round_keys(key, t)
        cohort = self._cohort(client_id[None], train.count[None])
        told = self._dispatch(keys.aggregate, t, server, jax.tree.map(lambda leaf: leaf[None], client), cohort)
        shared = keys.clients, t, self.method.broadcast(server), x, y
        row = client_id, jax.tree.map(lambda leaf: leaf[0], told), train, validation
        return self.method.personal(*self.method.personalize(*self._at_client(shared, row)))

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
        """The parameters of the POST model of a client that never took part: the result of one call of ``local``.

        Args:
          keys: the keys of the initial state and of the rounds.
          t: rounds done.
          server: the server state after these rounds, not calibrated: this is what is broadcast.
          x: all samples; the index table in ``train`` refers to them.
          y: their labels.
          client_id: the number of the client, on which its random draws depend.
          train: its training samples.
        """
        _, client = self.method.init(jax.random.split(keys[0], 3)[0], self.clients)
        shared = round_keys(keys[1], t).clients, t, self.method.broadcast(server), x, y
        return self.method.personal(*self.local(shared, (client_id, client, train, None)).trained)

    def _scored(self, data: Federation) -> tuple[Clients, Clients | None]:
        """The samples that models are scored on: test samples, and validation samples or None."""
        return data.test, data.validation if self.validate else None

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

    def _of_everyone(self, score_group: Callable[..., Scored], state: State, data: Federation) -> Scored:
        """``score_group(server, group, data)`` of all clients; every leaf [N]."""
        group = self._group(jnp.arange(self.clients), state, data)
        scores = score_group(state.server, group, data)
        nothing = jax.tree.map(lambda leaf: jnp.zeros((self.clients, *leaf.shape[1:]), leaf.dtype), scores)
        return put_rows(nothing, group.ids, scores)

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
        """Maps ``what(view, client, x, y, samples)`` over the clients, with the pair that ``personalize`` returns."""
        _, (train, validation, scored) = self._gather(group.ids, (data.train, data.validation, self._scored(data)))
        group = self._dispatch_group(key_server, t, server, group, train.count)

        def one(shared: tuple, client: PyTree, row: tuple) -> Any:
            (*_, x, y), (client_id, *own, scored) = shared, row
            return what(*personalize(*self._at_client(shared, (client_id, client, *own))), x, y, scored)

        shared = key, t, self.method.broadcast(server), data.x, data.y
        complete = len(group.ids) >= self.clients
        return self._map_group(one, shared, group, (group.ids, train, validation, scored), complete=complete)
