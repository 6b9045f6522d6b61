"""Fed-RoD against rounds in NumPy, its limit, and what it exchanges."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np

from fedjax_pfl.data.federated import client_data
from fedjax_pfl.engine.round import Engine
from fedjax_pfl.methods.fedavg import fedavg
from fedjax_pfl.methods.fedrod import fedrod
from tests.play import KEY, SOME, N, exchanged, play
from tests.reference import (
    MLP,
    at,
    client,
    client_key,
    held,
    linear,
    linear_gradient,
    now,
    softmax_loss,
    to_numpy,
    train,
    weighted_mean,
)

ROUNDS, STRENGTH = 3, 0.7

near = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


class TwoHeads(MLP):
    """The tiny model with a generic and a personal head, which answer together."""

    def logits(self, w, rows):
        z = self.features(w, rows)
        return linear(w["head"], z) + linear(w["personal"], z)

    def local_gradient(self, w, rows, prior):
        z = self.features(w, rows)
        d_generic = softmax_loss(linear(w["head"], z) + prior, self.y[rows])[1]
        d_both = softmax_loss(self.logits(w, rows), self.y[rows])[1]
        return {
            "extractor": self.extract_gradient(w["extractor"], rows, d_generic @ w["head"]["kernel"].T),
            "head": linear_gradient(z, d_generic),
            "personal": linear_gradient(z, d_both),
        }


def test_rounds_and_scores_are_numpys(model, trainer, federation):
    trainer = replace(trainer, lr_decay=0.9, weight_decay=0.01)
    method = fedrod(model, trainer, strength=STRENGTH)
    start, end, cohorts = play(method, federation, who=SOME, rounds=ROUNDS)
    mlp, server = TwoHeads(federation.x, federation.y), to_numpy(start.state.server)
    own, post, absent = [server["head"]] * N, {}, 0
    for t, cohort in enumerate(cohorts):
        uploads, rows = [], [held(federation.train, i) for i in cohort]
        for i, held_rows in zip(cohort, rows, strict=True):
            counts = np.bincount(mlp.y[held_rows], minlength=3)
            absent += np.sum(counts == 0)
            gradient = partial(mlp.local_gradient, prior=STRENGTH * np.log([max(1, n) for n in counts]))
            w, key = {**server, "personal": own[i]}, client_key(KEY, t, i)
            post[i] = train(w, gradient, key, t, held_rows, trainer)
            own[i] = post[i]["personal"]
            uploads.append({part: post[i][part] for part in ("extractor", "head")})
        server = weighted_mean(uploads, list(map(len, rows)))
    assert absent, "some clients lack a class"
    jax.tree.map(near, end.state.server, server)
    pre = jax.jit(Engine(method, N, SOME).pre)(KEY, at(ROUNDS), end.state, federation).test
    for i in range(N):
        jax.tree.map(near, client(end.state.clients, i), own[i])
        rows = held(federation.test, i)
        near([float(leaf[i]) for leaf in pre], mlp.scores({**server, "personal": own[i]}, rows))
        if i in post:
            near([float(leaf[i]) for leaf in end.post.test], mlp.scores(post[i], rows))
    pooled = jax.jit(method.global_predict)(end.state.server, federation.x)
    near(pooled, MLP(federation.x, federation.y).logits(server, np.arange(len(mlp.y))), atol=1e-4)


def test_without_the_prior_extractor_and_generic_head_are_fedavgs(model, trainer, federation):
    data = client_data(federation.x, federation.y, client(federation.train, 4))
    w = model.init(KEY)
    own = jax.tree.map(lambda leaf: leaf + 0.1, w["head"])
    expected = jax.jit(fedavg(model, trainer).local)(now(KEY, 0), w, (), data).upload
    plain, balanced = (
        jax.jit(fedrod(model, trainer, strength=s).local)(now(KEY, 0), w, own, data).upload for s in (0.0, 1.0)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), plain, expected)
    assert np.abs(balanced["head"]["kernel"] - plain["head"]["kernel"]).max() > 0.01


def test_a_client_without_samples_keeps_its_head_and_sends_what_it_received(model, trainer, federation):
    nobody = client_data(federation.x, federation.y, client(federation.train, 4))._replace(
        count=np.int32(0), class_counts=np.zeros(3, np.float32)
    )
    w = model.init(KEY)
    own = jax.tree.map(lambda leaf: leaf + 0.1, w["head"])
    update = jax.jit(fedrod(model, trainer).local)(now(KEY, 0), w, own, nobody)
    jax.tree.map(np.testing.assert_array_equal, (update.upload, update.client), (w, own))


def test_the_generic_model_goes_down_and_comes_back_and_the_personal_head_stays(model, trainer, federation):
    head = 8 * 3 + 3
    parameters = 16 * 8 + 8 + head
    assert exchanged(fedrod(model, trainer), federation) == (parameters, parameters, head)
